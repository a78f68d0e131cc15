"""Executes notebooks, each in a folder of its own, as they are or shorter."""

import multiprocessing
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import nbclient
import nbformat

from tests.support import ranks, scripts

ROOT = Path(__file__).parents[2]
IN_A_CLONE = ("01_quickstart", "07_real_weights")  # they launch a recipe; the others need installed packages alone
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
    "08_picture_book": {
        "range(3560)": "range(392)",
        "< 3528": "< 384",
        "books[:3528], books[3528:]": "books[:384], books[384:]",
        "max_steps=294": "max_steps=12",
    },
    "09_remembered_book": {
        "{16: 90, 32: 15, 64: 15, 128: 20, 256: 30, 512: 40, 1024: 70}": "{16: 10, 64: 2}",
        "half + 1024": "half + 128",
    },
    "10_rewards": {"{16: 90, 32: 15, 64: 10}": "{16: 10, 64: 2}", "max_steps=100": "max_steps=4"},
    "07_real_weights": {"STEPS = 12": "STEPS = 2"},
}


def read(notebook: Path, shorter: bool) -> nbformat.NotebookNode:
    content = nbformat.read(notebook, as_version=4)
    for old, new in SHORTER.get(notebook.stem, {}).items() if shorter else ():
        (cell,) = (cell for cell in content.cells if old in cell.source)
        cell.source = cell.source.replace(old, new)
    return content


def execute_here(notebook: Path, folder: Path) -> None:
    """Runs the cells of a shorter notebook, in the folder, without a kernel. What they launch over two processes are
    forks of this one, which is to be one of its own."""
    from IPython.core.interactiveshell import InteractiveShell

    own = subprocess.run

    def run(command: list[str], cwd: str | Path = ".", **options: Any) -> subprocess.CompletedProcess[str]:
        if "accelerate.commands.launch" not in command:
            return own(command, cwd=cwd, **options)
        assert command[3:6] == ["--multi_gpu", "--num_processes", "2"]
        script, *words = command[6:]
        there = Path(cwd).resolve()
        return subprocess.CompletedProcess(command, 0, scripts.run_by_ranks(2, str(there / script), words, there), "")

    os.environ["MPLBACKEND"] = "agg"
    os.chdir(folder)
    shell = InteractiveShell()
    shell.history_manager.enabled = False
    with (
        mock.patch.object(ranks, "forked", return_value=multiprocessing.get_context("fork")),
        mock.patch.object(subprocess, "run", run),
    ):
        for cell in read(notebook, shorter=True).cells:
            if cell.cell_type == "code":
                shell.run_cell(cell.source).raise_error()


def execute(notebook: Path, folder: Path, shorter: bool) -> nbformat.NotebookNode:
    """The notebook with its outputs. What it writes itself lies in the folder."""
    for name in ("hf_burst", "notebooks", "recipes") if notebook.stem in IN_A_CLONE else ():
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    place = folder / "notebooks"
    place.mkdir(parents=True, exist_ok=True)
    content = read(notebook, shorter)
    resources = {"metadata": {"path": str(place)}}
    nbclient.NotebookClient(content, timeout=600, kernel_name="python3", resources=resources).execute()
    return content
