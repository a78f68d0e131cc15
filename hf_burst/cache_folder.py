"""Where files lie that later processes use."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns `$HF_HOME/hf_burst`, `$XDG_CACHE_HOME/hf_burst` or `~/.cache/hf_burst`; it may not be there."""
    home = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "hf_burst"
