"""The benchmark of GRPO runs in processes of its own, and its numbers agree with each other."""

import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipes.benchmarks import grpo
from recipes.benchmarks.grpo import GENERATION, OLD, PARTS, REFERENCE, REWARDS, TRAINING
from tests.recipes.test_benchmarks import launch
from tests.support import scripts

pytest.importorskip("trl")
OPTIONS = ["--shape", "tiny", "--device", "cpu", "--answers", "2", "--answer-length", "6", "--warm-length", "3"]
LENGTHS = ["--prompts", "300", "--trl-prompts", "64", "96", "--warm-prompt", "32", "--steps", "1"]


def in_a_pool(command: list[str], folder: Path, timeout_s: float) -> None:
    """Runs the processes of an attempt without their launcher."""
    scripts.run_by_ranks(2, "recipes/benchmarks/grpo.py", command[command.index(grpo.__file__) + 1 :])


@pytest.mark.slow
def test_the_benchmark_of_grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "deep" / "result.json"
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["grpo.py", *OPTIONS, *LENGTHS, "--out", str(out)])
    monkeypatch.setattr(grpo, "failure_of", in_a_pool)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert grpo.main() == 0
    result = json.loads(out.read_text())
    assert result["hardware"]["ranks"] == 2
    assert "--attempt" not in result["command"]
    ours, theirs = result["results"]  # TRL holds the longest of its prompts, and is not asked for another
    assert (ours["contender"], ours["prompt"], theirs["contender"], theirs["prompt"]) == ("hf_burst", 300, "trl", 96)
    for row in result["results"]:
        assert (row["status"], row["reason"]) == ("ok", None)
        assert row["begun"] is None
        assert [rollout["warm"] for rollout in row["rollouts"]] == [True, False]
        seconds = row["rollouts"][1]["seconds"]
        assert list(seconds) == list(PARTS)
        assert all(seconds[name] > 0 for name in (GENERATION, OLD, REFERENCE, REWARDS, TRAINING))
        assert row["median_s"] == seconds
        assert row["rollout_s"] == pytest.approx(sum(seconds.values()))
        assert row["training_step_s"] == pytest.approx(seconds[TRAINING] / 2)


WRITES = """
import sys, time
time.sleep(float(sys.argv[2]))
if sys.argv[3] == "1":
    open(sys.argv[1] + "/failure_1", "w").write("rank 1: ValueError: nonsense")
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("seconds", "status", "limit", "reason"),
    [
        ("0", "0", 60.0, None),
        ("0", "1", 60.0, "rank 1: ValueError: nonsense"),
        ("0", "3", 60.0, "its processes ended with status 3"),
        ("60", "0", 1.0, "it did not end within 1 s"),
    ],
)
def test_how_an_attempt_ends(tmp_path: Path, seconds: str, status: str, limit: float, reason: str | None) -> None:
    start, command = time.monotonic(), [sys.executable, "-c", WRITES, str(tmp_path), seconds, status]
    assert grpo.failure_of(command, tmp_path, limit) == reason
    assert time.monotonic() - start < 30


@pytest.mark.full
@pytest.mark.slow
def test_an_attempt_that_takes_too_long_ends_with_its_workers(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = [*LENGTHS, "--contenders", "trl", "--timeout", "3", "--out", str(out)]
    launch("recipes/benchmarks/grpo.py", *words, common=OPTIONS, status=1)
    rows = json.loads(out.read_text())["results"]
    assert [row["reason"] for row in rows] == ["it did not end within 3 s"] * 2
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(out) in command], "which would keep the GPUs"


@pytest.mark.full
@pytest.mark.slow
def test_an_attempt_that_fails_leaves_the_next_one_alone(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = [*LENGTHS, "--contenders", "trl", "--trl-attention", "nonsense", "--out", str(out)]
    launch("recipes/benchmarks/grpo.py", *words, common=OPTIONS, status=1)
    rows = json.loads(out.read_text())["results"]
    assert [(row["prompt"], row["status"], row["rollouts"]) for row in rows] == [(96, "failed", []), (64, "failed", [])]
    assert all("rank 0: ValueError" in row["reason"] and "nonsense" in row["reason"] for row in rows)
