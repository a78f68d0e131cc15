"""Every file of settings for GPUs is run by as_shipped.py, and its list runs on CPUs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.benchmarks import as_shipped

ROOT = Path(__file__).parents[2]
CPU = ("accelerate_2_processes.yaml",)  # as all whose names end in _cpu.yaml


def run(out: Path, *options: str, timeout: float = 580) -> tuple[int, dict[str, dict]]:
    """The exit status, and the row of each file."""
    command = [sys.executable, "recipes/benchmarks/as_shipped.py", "--out", str(out), *options]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    return done.returncode, {file: row for row in json.loads(out.read_text())["results"] for file in row["files"]}


def test_every_file_for_gpus_is_run() -> None:
    files = {path.name for path in (ROOT / "recipes/configs").glob("*.yaml") if not path.stem.endswith("_cpu")}
    every = as_shipped.combinations()
    assert files - set(CPU) == {name for _, names in every for name in names}
    assert {run.wrapping for run, _ in every} == {"none", "ddp", "fsdp2", "hsdp", "zero2", "zero3"}
    (lora,) = [run for run, names in every if "sft_4gpu.yaml" in names]
    words = as_shipped.command(lora, Path("inputs"), Path("out"), 2)
    assert words[:2] == ["--config", str(ROOT / "recipes/configs/sft_4gpu.yaml")]
    assert words[words.index("--model_name_or_path") + 1] == "inputs/llama"
    assert words[words.index("--burst_size") + 1] == "2"
    (groups,) = [run for run, names in every if "sft_8gpu.yaml" in names]
    assert "--burst_size 1" in " ".join(as_shipped.command(groups, Path("inputs"), Path("out"), 2)), "two groups"


@pytest.mark.parametrize(
    ("model", "line", "told"),
    [
        ("meta-llama/Llama-3.1-8B", "python sft.py", "new.yaml has no launch line"),
        ("other/model", "accelerate launch --num_processes 1 recipes/sft.py --config new.yaml", "no small model of"),
    ],
)
def test_a_new_file_that_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, line: str, told: str
) -> None:
    (tmp_path / "new.yaml").write_text(f"# A file.\n#   {line}\nmodel_name_or_path: {model}\n")
    monkeypatch.setattr(as_shipped, "CONFIGS", tmp_path)
    with pytest.raises(SystemExit, match=told):
        as_shipped.combinations()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_shipped_runs(tmp_path: Path, processes: int) -> None:
    """On CPUs, in bf16: 4 bits and rewards in one process; images, answers and FSDP2 over two."""
    only = ["text_24gb*", "reward_1gpu*"] if processes == 1 else ["sft_images_4*", "grpo_4*", "text_1m_8gpu*"]
    status, rows = run(tmp_path / "a/out.json", "--processes", str(processes), "--limit", "400", "--only", *only)
    assert status == 0, [row.get("reason") for row in rows.values()]
    assert len({row["config"] for row in rows.values()}) == len(only)
    for row in rows.values():
        assert (row["status"], row["processes"], row["steps"][0]) == ("ok", processes, "train")
        assert row["seconds"] > 0
    asked = rows["text_24gb.yaml" if processes == 1 else "grpo_4gpu.yaml"]
    assert asked["steps"] == ["train", "merge", "load", "evaluate", "ask"]


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_all_that_is_shipped_runs(tmp_path: Path) -> None:
    status, rows = run(tmp_path / "out.json", "--limit", "400", timeout=2900)
    assert status == 0, [row for row in rows.values() if row["status"] == "failed"]
    assert {row["status"] for file, row in rows.items() if "zero" not in file and "hosts" not in file} == {"ok"}


FAILS = """
import os, sys, time
from recipes.benchmarks import as_shipped
def steps(run, folder, name, size, follow):
    if run.config == "dpo_4gpu.yaml" and os.environ["RANK"] == "1":
        raise ValueError("of one rank")
    if run.config in ("dpo_4gpu.yaml", "reward_4gpu.yaml"):
        time.sleep(1000)  # waits for the other
    yield "train"
as_shipped.steps, as_shipped.__file__ = steps, __file__
as_shipped.main()
"""


@pytest.mark.slow
def test_a_rank_that_fails_or_waits_does_not_end_the_list(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    only = ("dpo_4*", "grpo_4*", "reward_4*", "sft_4*")
    command = [sys.executable, str(tmp_path / "fails.py"), "--limit", "20", "--only", *only]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    out, start = tmp_path / "out.json", time.monotonic()
    done = subprocess.run([*command, "--out", str(out)], env=environment, capture_output=True, text=True, timeout=580)
    rows = {row["config"]: (row["status"], row.get("reason")) for row in json.loads(out.read_text())["results"]}
    assert done.returncode == 1, done.stderr
    assert rows["dpo_4gpu.yaml"] == ("failed", "ValueError: of one rank")
    assert rows["reward_4gpu.yaml"] == ("failed", "longer than 20 s")
    assert rows["grpo_4gpu.yaml"] == rows["sft_4gpu.yaml"] == ("ok", None)
    assert time.monotonic() - start < 550
