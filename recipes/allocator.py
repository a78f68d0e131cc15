"""Asks torch's allocator for expandable segments, before anything imports torch.

They leave smaller gaps between the blocks of long sequences. `PYTORCH_ALLOC_CONF`, where it is set, counts instead.
"""

import os

if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
