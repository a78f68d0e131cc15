"""The same training by several engines: losses are those of one process, and a wrong engine is seen."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.ranks import RankPool, reset_accelerate
from tests.support.scripts import in_a_process

pytest.importorskip("trl")
from recipes.benchmarks import engines
from recipes.benchmarks.engine_setups import Engine

TINY = ["--model", "tiny", "--steps", "3", "--warmup", "1", "--learning-rate", "0.01", "--commit", "abc"]
TEXT, AGENTS = ["--length", "96", "--weights", "all"], ["--length", "128", "--data", "agents", "--adapters", "peft"]


def apart(arguments: Any, gpus: int) -> dict[str, Any]:
    """Every rank has rows of its own."""
    return {}


def fails(arguments: Any) -> None:
    raise MemoryError("too long")


BROKEN = {"one-gpu": Engine(apart), "torch": Engine(apart, load=fails)}


def train(rank: int, size: int, words: list[str], broken: bool = False) -> None:
    reset_accelerate()
    others = mock.patch.dict(engines.ENGINES, BROKEN if broken else {})
    on_cpus = mock.patch.dict(os.environ, {"ACCELERATE_USE_CPU": "1"})
    with others, on_cpus, mock.patch.object(sys, "argv", ["engines.py", *TINY, *words]):
        engines.main()


@pytest.mark.slow
@pytest.mark.parametrize("data", [TEXT, AGENTS])
def test_losses_of_ranks_are_those_of_one_process(
    data: list[str], ranks: Callable[[int], RankPool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, shared = tmp_path / "engines.json", [*data, "--folder", str(tmp_path / "trainer")]
    shared += ["--out", str(out)]
    in_a_process(train, 0, 1, ["--engine", "one-gpu", *shared])
    ranks(2).run(train, ["--engine", "hf_burst", *shared])
    ranks(2).run(train, ["--engine", "one-gpu", *shared], True)
    ranks(2).run(train, ["--engine", "torch", *shared], True)
    one, ours, wrong, failed = json.loads(out.read_text())
    assert one["status"] == ours["status"] == "ok", ours["reason"]
    assert (len(one["losses"]), len(ours["steps"]), ours["hardware"]["ranks"]) == (3, 3, 2)
    for name in ("losses", "gradient_norms"):
        assert ours[name] == pytest.approx(one[name], rel=2e-6)
        assert wrong[name] != pytest.approx(one[name], rel=1e-4)
    assert ours["tokens"] == one["tokens"]
    assert (failed["status"], failed["reason"]) == ("failed", "MemoryError: too long")
    with mock.patch.object(sys, "argv", ["engines.py", "--table", str(out), "--picture", str(tmp_path / "a.png")]):
        engines.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].split(",")[0].strip() for line in lines[2:]] == [
        "one-gpu",
        "hf_burst",
        "one-gpu",
        "torch",
    ]
    assert float(lines[3].split("|")[-3]) < 1e-5 < float(lines[4].split("|")[-3])
    assert "MemoryError: too long" in lines[5]
    assert (tmp_path / "a.png").stat().st_size > 1000
