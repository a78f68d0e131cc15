"""Scripts that run in processes which have imported what they need: as ranks of a pool, or as one that nobody launched.
Programs that are launched take ten seconds more, for what they import."""

import io
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from tests.support.ranks import forked

ROOT = Path(__file__).parents[2]


def run(rank: int, size: int, script: str, words: Sequence[str]) -> str:
    """Runs a script of the project, whose exit status is 0, and returns what it says."""
    path = str(ROOT / script)
    argv, paths = mock.patch.object(sys, "argv", [path, *words]), mock.patch.object(sys, "path", [*sys.path])
    with argv, paths, redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            assert not end.code, said.getvalue()[-6000:] + str(end)
    return said.getvalue()


def run_alone(script: str, words: Sequence[str]) -> None:
    """As `python script` does, in no process group."""
    process = forked().Process(target=run, args=(0, 1, script, words))
    process.start()
    process.join(180)
    process.kill()
    assert process.exitcode == 0
