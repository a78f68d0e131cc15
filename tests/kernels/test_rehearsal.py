"""Kernels that are compiled ahead, by Triton's own classes without a GPU: `support/without_gpu.py`."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hf_burst.kernels import tuning
from hf_burst.recurrent import fla

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
ROOT = Path(__file__).parents[2]
FORWARD, BACKWARD = ([f"{name} {warps}" for warps in (8, 2, 4)] for name in ("forward", "backward"))


def program(tmp_path: Path, how: str) -> str:
    more = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.without_gpu", "64", how]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def did(tmp_path: Path, how: str) -> list[str]:
    """What was compiled and launched by a copy and its backward pass, in this order."""
    return json.loads(program(tmp_path, how))


def compiled(*kernels: str) -> list[str]:
    return [f"compiled {kernel}" for kernel in kernels]


def launched(*kernels: str) -> list[str]:
    return [f"launched {kernel}" for kernel in kernels]


STEP = ["called", *launched(*FORWARD, "forward 2", "plain 4"), "backward", *launched(*BACKWARD, "backward 2")]


def test_all_candidates_of_both_passes_are_compiled_before_one_is_launched(tmp_path: Path) -> None:
    first, second = did(tmp_path, "ahead"), did(tmp_path, "ahead")
    assert first[:7] == compiled(*FORWARD, "plain 4", *BACKWARD)
    assert first[7:] == STEP
    chosen = ["forward 2", "plain 4", "backward 2"]  # their times are on disk
    assert second[:3] == compiled(*chosen)
    assert second[3:] == ["called", *launched(*chosen[:2]), "backward", *launched(chosen[2])]


def test_packed_documents_have_bounds_of_their_own(tmp_path: Path) -> None:
    assert did(tmp_path, "packed")[7:] == STEP


def test_a_checkpoint_counts_nothing_of_it(tmp_path: Path) -> None:
    """It would raise if the second forward pass saved another number of tensors than the first."""
    again = ["called", *launched("forward 2", "plain 4")]
    assert did(tmp_path, "checkpointed")[7:] == [*STEP[:7], *again, *STEP[7:]]


def test_a_failure_leaves_the_rest_to_the_call(tmp_path: Path) -> None:
    found = did(tmp_path, "failing")
    assert found[:4] == compiled(*FORWARD, "plain 4")
    assert found[4:11] == STEP[:7]
    assert found[11:14] == compiled(*BACKWARD)
    assert found[14:] == STEP[7:]


@pytest.mark.parametrize("how", ["lacking", "uncompiled"])
def test_a_candidate_that_lacks_something_holds_no_tensor(tmp_path: Path, how: str) -> None:
    """Beside a leaf, before Python collects garbage."""
    found = did(tmp_path, how)
    assert ({*launched("forward 8", "backward 8")} < {*found}) is (how == "lacking")
    assert found[-4:-1] == launched("backward 2", "backward 4", "backward 2")
    assert found[-1] == "1"


def test_without_a_rehearsal_each_kernel_waits_for_those_before(tmp_path: Path) -> None:
    found = did(tmp_path, "alone")
    assert found.index("launched plain 4") < found.index("compiled backward 8")
    assert [what for what in found if "compiled" not in what] == STEP


def test_a_process_that_ends_compiles_nothing_more(tmp_path: Path) -> None:
    """Of seven kernels, one thread for each pass has begun one."""
    assert program(tmp_path, "ending").count("begun") < 4


def test_compiled_models_pass_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` cannot trace how a rehearsal begins."""
    monkeypatch.setattr(tuning, "compile_ahead", lambda *_, **__: torch._dynamo.graph_break())

    @torch.compile(fullgraph=True, backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        fla.compile_ahead(torch.sin, x)
        return torch.sin(x)

    assert step(torch.zeros(2)).equal(torch.zeros(2))
