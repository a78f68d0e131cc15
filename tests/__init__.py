"""What libraries read when they are imported is set here, before any of them is."""

import os

import torch

# flash-attn 4 compiles each kind of call for a second or two: once for all ranks, not once for each
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
