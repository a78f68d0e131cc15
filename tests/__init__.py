"""What libraries read when they are imported is set here, before any of them is."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
