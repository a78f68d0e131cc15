"""Every file of settings for GPUs is run by as_shipped.py, and its list runs on CPUs."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tests.support
from recipes.benchmarks import provenance
from tests.support import as_shipped
from tests.support.scripts import in_a_process

ROOT = Path(__file__).parents[2]
CPU = ("accelerate_2_processes.yaml",)  # as all whose names end in _cpu.yaml


def run(out: Path, *options: str, timeout: float = 580) -> tuple[int, dict[str, dict]]:
    """The exit status, and the row of each file."""
    command = [sys.executable, "-m", "tests.support.as_shipped", "--out", str(out), *options]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    return done.returncode, rows_of(out)


def rows_of(out: Path) -> dict[str, dict]:
    return {file: row for row in json.loads(out.read_text())["results"] for file in row["files"]}


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


@pytest.mark.parametrize(
    ("variables", "options", "groups"),
    [
        ("HF_BURST_SIZE=2 OMP_NUM_THREADS=8 ", "", True),
        ("HF_BURST_SIZE=4 ", "", False),
        ("", "--burst_size 2", True),
        ("HF_BURST_SIZE=2 ", "--burst_size 4", False),
    ],
)
def test_sizes_of_groups_in_launch_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: str, options: str, groups: bool
) -> None:
    line = f"{variables}accelerate launch --num_processes 4 recipes/sft.py --config new.yaml {options}"
    (tmp_path / "new.yaml").write_text(f"# A file.\n#   {line}\nmodel_name_or_path: meta-llama/Llama-3.1-8B\n")
    monkeypatch.setattr(as_shipped, "CONFIGS", tmp_path)
    ((run, _),) = as_shipped.combinations()
    assert run.groups == groups
    words = " ".join(as_shipped.command(run, Path("inputs"), Path("out"), 2))
    assert ("--burst_size 1" in words) == groups
    assert words.count("--burst_size") == (groups or bool(options))


RESULT = ROOT / "recipes/benchmarks/results/as_shipped_2xH200.json"
RESULTS = sorted(RESULT.parent.glob("as_shipped_*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=[path.stem for path in RESULTS])
def test_rows_of_the_results_say_where_they_ran(path: Path) -> None:
    result = json.loads(path.read_text())
    rows = result["results"]
    assert result["schema"] == provenance.SCHEMA_VERSION
    assert len({(as_shipped.combination(row), row["processes"]) for row in rows}) == len(rows)
    for row in rows:
        if row["status"] == "not run":
            assert not {"git_commit", "hardware", "versions"} & set(row), "no job had it"
            continue
        assert row["status"] == "ok"
        assert re.fullmatch("[0-9a-f]{8,}", row["git_commit"])
        assert row["hardware"]["ranks"] == row["processes"]
        assert {"hf_burst", "torch", "transformers"} <= set(row["versions"])


def test_a_later_call_replaces_its_own_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files may have other names since; a row that failed in another call is not the fault of this one."""
    known = {"git_commit": "new", "hardware": {"ranks": 2}, "versions": {"torch": "2.13.0"}}
    inputs = types.SimpleNamespace(make=lambda folder: None, machine=lambda *_: known)

    def ran(*_: object) -> dict:
        return {"status": status}

    def call(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["as_shipped.py", "--out", str(out), *options])
        with pytest.raises(SystemExit) as end:
            as_shipped.main()
        return end.value.code

    out, status = tmp_path / "out.json", "ok"
    monkeypatch.setattr(as_shipped, "ran", ran)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "tests.support.shipped_inputs", inputs)
    monkeypatch.setattr(tests.support, "shipped_inputs", inputs, raising=False)  # where another test has imported it
    before = json.loads(RESULT.read_text())["results"]
    (old,), (other,) = ([row for row in before if row["config"] == f"{name}_4gpu.yaml"] for name in ("dpo", "grpo"))
    old |= {"files": ["earlier.yaml"], "config": "earlier.yaml"}
    other["status"] = "failed"
    gone = {**other, "recipe": "gone"}  # which nothing ships now
    out.write_text(json.dumps({"results": [*before, gone]}))
    assert call("--only", "dpo_4*") == 0
    *kept, new = json.loads(out.read_text())["results"]
    assert kept == [row for row in before if row is not old]
    assert new.items() >= {**known, "files": ["dpo_4gpu.yaml"], "status": "ok", "processes": 2}.items()
    status = "failed"
    assert call("--only", "dpo_4*") == 1
    assert call("--only", "dpo_1gpu*", "dpo_4*", "--processes", "1") == 1
    rows = json.loads(out.read_text())["results"]
    assert len(rows) == len(before) + 1, "files for one GPU and for four are two combinations, also in one process"
    out.unlink()
    status = "ok"
    assert call("--only", "accelerate_2_hosts_fsdp2*", "accelerate_ddp*") == 0
    rows = {row["wrapping"]: row for row in json.loads(out.read_text())["results"]}
    assert rows["ddp"].items() >= known.items()
    assert rows["hsdp"]["status"] == "not run"
    assert not set(known) & set(rows["hsdp"]), "of the job of another wrapping"


def test_processes_are_at_least_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("0", "-1", "two"):
        monkeypatch.setattr(sys, "argv", ["as_shipped.py", f"--processes={given}"])
        with pytest.raises(SystemExit) as end:
            as_shipped.main()
        assert end.value.code == 2
        assert f"argument --processes: '{given}' is no number of processes; give at least 1" in capsys.readouterr().err


def run_in_forks(words: list[str]) -> object:
    """The exit status, where forks stand for all that is launched but rewards."""
    own = as_shipped.started

    def started(command: list[str], *others: Any) -> None:
        kind, recipe, *rest = command[command.index("work") + 1 :]
        if recipe == "reward":
            return own(command, *others)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as process:
            try:
                return process.submit(as_shipped.work, kind, recipe, rest).result()
            except SystemExit as end:
                raise AssertionError(f"{kind} {recipe} {rest} ended: {end.code}") from end

    os.environ |= {"ACCELERATE_USE_CPU": "1"}
    sys.path.insert(0, str(as_shipped.ROOT / "recipes"))
    with (
        mock.patch.object(as_shipped, "started", started),
        mock.patch.object(sys, "argv", ["as_shipped.py", *words]),
        mock.patch.dict("settings.DEFAULTS", use_cpu=True),  # other tests may have read the environment before
    ):
        try:
            as_shipped.main()
        except SystemExit as end:
            return end.code
    return None


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_is_shipped_runs(tmp_path: Path, processes: int) -> None:
    """On CPUs, in bf16: 4 bits and rewards in one process; images, answers and FSDP2 over two."""
    only = (
        ["text_24gb*", "reward_1gpu*", "gemma4*", "moe_*"]
        if processes == 1
        else ["sft_images_4*", "grpo_4*", "text_1m_8gpu*", "text_qlora*"]
    )
    out, options = tmp_path / "a/out.json", ["--processes", str(processes), "--limit", "400", "--only", *only]
    if processes == 1:
        status, rows = in_a_process(run_in_forks, ["--out", str(out), *options]), rows_of(out)
    else:
        status, rows = run(out, *options)
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


def test_a_launch_that_fails_or_waits_does_not_end_the_list(tmp_path: Path) -> None:
    (run, *_), log = [run for run, _ in as_shipped.combinations()], tmp_path / "log"
    start, told = time.monotonic(), []
    for words, limit in (("raise ValueError('of one rank')", 60.0), ("import time; time.sleep(1000)", 0.5)):
        with pytest.raises(RuntimeError) as failure:
            as_shipped.started([sys.executable, "-c", words], "none", log, limit)
        told.append(str(failure.value))
    assert told == ["it ended by 1; see the log", "longer than 0 s"]
    assert "ValueError: of one rank" in log.read_text()
    assert time.monotonic() - start < 50
    inputs = mock.patch.dict(sys.modules, {"tests.support.shipped_inputs": types.SimpleNamespace()})
    with inputs, mock.patch.object(as_shipped, "started", side_effect=RuntimeError("it ended by 1; see the log")):
        row = as_shipped.ran(run, tmp_path, "0", "none", 1, False, 1.0)
    assert row == {"status": "failed", "steps": [], "reason": "it ended by 1; see the log"}
