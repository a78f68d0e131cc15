"""Where hf_burst remembers what it measured and checked on this machine."""

import os
import re
import tempfile
from pathlib import Path


def cache_file(*parts: str) -> Path:
    """A file in `$HF_HOME/hf_burst`, `$XDG_CACHE_HOME/hf_burst` or `~/.cache/hf_burst`, named by these parts."""
    home = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = "-".join(re.sub(r"[^\w.]+", "_", part) for part in parts)
    return Path(home).expanduser() / "hf_burst" / f"{name}.json"


def write_whole(path: Path, text: str) -> None:
    """Writes a file all at once, so that no other process reads half of it; an `OSError` if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
