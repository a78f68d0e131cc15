"""Executes notebooks, each in a folder of its own: `python -m tests.notebooks FOLDER NAME ...`, shorter than they are.

Notebooks wait for kernels, imports and launched processes for most of their time. So a process runs one after another
while other tests run, and the tests of notebooks read what it wrote.
"""

import os
import shutil
import sys
import time
import traceback
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parents[1]
IN_A_CLONE = ("01_quickstart",)  # they launch a recipe; the others stand on installed packages alone
_RECALL = '"outputs/quickstart"'  # where the quickstart's training is launched
_EASIER = '"--length", "32", "--num_keys", "2", "--num_values", "4", "--steps", "60", "--learning_rate", "4e-3"'
SHORTER = {  # what is trained always; notebooks as they stand are run by `pytest -m full`
    "01_quickstart": {f"{_RECALL})": f"{_RECALL}, {_EASIER})"},
    "03_your_documents": {
        "range(2600)": "range(340)",
        "rows[:2400], rows[2400:]": "rows[:300], rows[300:]",
        "max_steps=120": "max_steps=12",
        "eval_steps=30": "eval_steps=6",
    },
    "04_longer_context": {'str(short), "200"': 'str(short), "20"', 'str(long), "40"': 'str(long), "5"'},
    "05_chats_and_agents": {
        "range(3000)": "range(1000)",
        "trajectories[:2800], trajectories[2800:]": "trajectories[:960], trajectories[960:]",
        "max_steps=140": "max_steps=20",
    },
    "06_hybrids": {"max_steps=16": "max_steps=2"},
}


def execute(notebook: Path, folder: Path, shorter: bool) -> None:
    """Writes the notebook with its outputs, or what it raised, into the folder, beside what it writes itself."""
    for name in ("hf_burst", "notebooks", "recipes") if notebook.stem in IN_A_CLONE else ():
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    place = folder / "notebooks"
    place.mkdir(parents=True, exist_ok=True)
    content = nbformat.read(notebook, as_version=4)
    for old, new in SHORTER.get(notebook.stem, {}).items() if shorter else ():
        (cell,) = (cell for cell in content.cells if old in cell.source)
        cell.source = cell.source.replace(old, new)
    resources = {"metadata": {"path": str(place)}}
    nbclient.NotebookClient(content, timeout=600, kernel_name="python3", resources=resources).execute()
    written = folder / "executed.tmp"
    nbformat.write(content, written)
    written.rename(folder / "executed.ipynb")


def wait(folder: Path, seconds: float = 550.0) -> "nbformat.NotebookNode":
    """The notebook that another process executes in the folder."""
    last = time.monotonic() + seconds
    while not (folder / "executed.ipynb").exists():
        if (folder / "error.txt").exists():
            raise RuntimeError((folder / "error.txt").read_text())
        if time.monotonic() > last:
            raise TimeoutError(f"no notebook was executed in {folder} within {seconds} s")
        time.sleep(0.1)
    return nbformat.read(folder / "executed.ipynb", as_version=4)


def main() -> None:
    (folder, *names), parent = sys.argv[1:], os.getppid()
    for name in names:
        if os.getppid() != parent:  # whoever wanted them is gone
            return
        own = Path(folder, name)
        own.mkdir()
        try:
            execute(ROOT / "notebooks" / f"{name}.ipynb", own, shorter=True)
        except Exception:
            (own / "error.tmp").write_text(traceback.format_exc())
            (own / "error.tmp").rename(own / "error.txt")


if __name__ == "__main__":
    main()
