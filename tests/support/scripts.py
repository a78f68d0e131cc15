"""Scripts that run in processes which have imported what they need: as ranks of a pool, or as one that nobody launched.
Programs that are launched take ten seconds more, for what they import."""

import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from tests.support.ranks import RankPool, forked

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


def run(rank: int, size: int, script: str, words: Sequence[str]) -> str:
    """Runs a script of the project, whose exit status is 0, and returns what it says."""
    path = ROOT / script
    argv = mock.patch.object(sys, "argv", [str(path), *words])
    paths = mock.patch.object(sys, "path", [str(path.parent), *sys.path])
    with argv, paths, redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise AssertionError(f"{said.getvalue()[-6000:]}{ended}") from None
    return said.getvalue()


def run_by_ranks(size: int, script: str, words: Sequence[str], folder: Path = ROOT) -> str:
    """Runs a script as ranks of its own, in a folder, and returns what the first one says. Their group may end."""
    pool = RankPool(size)
    try:
        return pool.run(_run_in, str(folder), script, words)[0]
    finally:
        pool.close()


def _run_in(rank: int, size: int, folder: str, script: str, words: Sequence[str]) -> str:
    with chdir(folder):
        return run(rank, size, script, words)


def run_alone(script: str, words: Sequence[str], **variables: str) -> str:
    """As `python script` does, in no process group, with variables of the environment; returns what it says."""
    return in_a_process(_run_with, variables, script, words)


def _run_with(variables: dict[str, str], script: str, words: Sequence[str]) -> str:
    os.environ |= variables
    return run(0, 1, script, words)


def in_a_process(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function in a process of its own, which no launcher has started."""
    with ProcessPoolExecutor(1, mp_context=forked()) as processes:
        return processes.submit(function, *arguments).result(timeout=300)
