"""What a recipe does before it imports what takes seconds: it says that it has begun, and asks torch's allocator for
expandable segments, which leave smaller gaps between the blocks of long sequences. `PYTORCH_ALLOC_CONF`, where it is
set, counts instead.
"""

import os
import sys
from pathlib import Path

if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
if os.environ.get("RANK", "0") == "0" and Path(sys.argv[0]).resolve().parent == Path(__file__).parent:
    print(f"{Path(sys.argv[0]).name}: loading torch, Transformers and TRL", file=sys.stderr, flush=True)
