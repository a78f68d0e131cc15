"""What a recipe does before it imports what takes seconds: it ends where a library is missing, and asks torch's
allocator for expandable segments, which leave smaller gaps between the blocks of long sequences. `PYTORCH_ALLOC_CONF`,
where it is set, counts instead.
"""

import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = {"datasets", "matplotlib", "peft", "trl", "yaml"} - (
    {"matplotlib"} if Path(sys.argv[0]).name in ("ask.py", "merge_adapter.py") else set()  # which draw nothing
)
MISSING = [name for name in sorted(NEEDED) if find_spec(name) is None]
if MISSING:
    raise SystemExit(f'The recipes need {", ".join(MISSING)}: pip install ".[recipes]" in a clone.')
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels that no recipe needs

if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
if os.environ.get("RANK", "0") != "0":
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # those of the first rank are enough


def loading(libraries: str = "torch and Transformers") -> None:
    """Says that imports take seconds."""
    if os.environ.get("RANK", "0") == "0" and Path(sys.argv[0]).resolve().parent == Path(__file__).parent:
        print(f"{Path(sys.argv[0]).name}: loading {libraries}", file=sys.stderr, flush=True)
