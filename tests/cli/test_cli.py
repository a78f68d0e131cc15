"""The command line, as a user calls it: in one process, in two, with words that mean nothing."""

import configparser
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_burst.cli import main

ROOT = Path(__file__).parents[2]
PLAN = ["plan", "--model", "llama-3.2-1b", "--gpus", "8", "--machine", "h200"]


def call(*words: str, home: Path, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        **{"HF_HOME": str(home), "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"},
        **{"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1"},
    }
    command = [sys.executable, *launcher, "-m", "hf_burst.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)


def test_the_doctor_in_one_process(tmp_path):
    done = call("doctor", "--head-dim", "64", home=tmp_path)
    assert done.returncode == 0, done.stderr
    report = done.stdout
    assert re.search(r"^  hf_burst \S+, torch \d", report, re.MULTILINE)
    assert "ranks: 1 in this launch, on cpu" in report
    assert re.search(r"^environment: .*ACCELERATE_USE_CPU=1", report, re.MULTILINE)
    assert "kernels for torch.float32 and heads of 64, the fastest first:" in report
    assert re.search("^  runs on cuda, not on cpu: .*torch_flash", report, re.MULTILINE)
    assert "  can: cpu_flash, reference" in report
    assert report.splitlines()[-1] == "Usable."
    assert len(report.splitlines()) < 20
    assert not (tmp_path / "hf_burst").exists()  # nothing is remembered


@pytest.mark.slow
def test_the_doctor_over_two_ranks(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = call("doctor", home=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hosts: 1, 2 ranks on ") == 1  # rank 0 alone prints
    assert "ranks: 2 in this launch, on cpu" in done.stdout
    assert done.stdout.splitlines()[-1] == "Usable."


def test_a_head_size_that_cannot_be_is_said(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert main(["doctor", "--head-dim", "0"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "Not usable: --head-dim is 0; it must be at least 1."


@pytest.mark.parametrize(("text", "length"), [("131072", 2**17), ("128k", 2**17), ("1M", 2**20), ("131,072", 2**17)])
def test_lengths_as_people_write_them(text, length, capsys):
    assert main([*PLAN, "--length", text]) == 0
    assert f"{length:,} tokens a sequence" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--length", f"{text}x"])
    assert capsys.readouterr().err.startswith(f"hf-burst plan: --length: '{text}x' is no number of tokens; give one as")


def test_no_kernel_is_not_usable(monkeypatch, tmp_path, capsys):
    doctor = importlib.import_module("hf_burst.cli.doctor")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setattr(doctor, "explain_kernels", lambda *_, **__: [("only", "takes no such heads")])
    assert main(["doctor"]) == 1
    assert "Not usable: no kernel computes torch.float32 on cpu: only takes no such heads." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "hf-burst: the following arguments are required: command"),
        ("plann", "hf-burst: command is plann; give one of doctor, plan, layout, check, bench; did you mean plan?"),
        ("doctor --pill", "hf-burst doctor: --pill is no option"),
        ("plan --lenght 4k", "hf-burst plan: --lenght is no option; did you mean --length?"),
        ("plan --lenght=4k", "hf-burst plan: --lenght=4k is no option; did you mean --length?"),
        ("plan --length 4x", "hf-burst plan: --length: 4x is no number of tokens; give one as 131072, 128k or 1M"),
        ("plan --sharded fsdp", "hf-burst plan: --sharded is fsdp; give one of fsdp2, ddp; did you mean fsdp2?"),
        ("layout --ranks two", "hf-burst layout: --ranks is two; give a whole number"),
        ("check a --limit long", "hf-burst check: --limit is long; give a number"),
    ],
)
def test_wrong_words_end_with_a_sentence_and_a_line_of_usage(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    sentence, usage = capsys.readouterr().err.splitlines()
    assert sentence.replace("'", "") == said  # newer Pythons quote no choices
    called = said.partition(":")[0]
    assert usage.startswith(f"usage: {called} [OPTION ...]")
    assert usage.endswith(f"({called} --help lists all)")


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert re.search(r"doctor(.|\n)*plan(.|\n)*layout(.|\n)*check", capsys.readouterr().out)


def test_the_installed_command_is_this_one():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    name, target = settings["options.entry_points"]["console_scripts"].strip().split(" = ")
    module, function = target.split(":")
    assert name == "hf-burst"
    assert getattr(importlib.import_module(module), function) is main


WITHOUT_TORCH = """
import sys
sys.modules |= {"torch": None, "transformers": None, "psutil": None}  # any import of them fails
from hf_burst.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("more", [["--length", "256k"], ["--lora", "--documents", "8k", "3k"]])
def test_a_named_model_on_a_named_machine_is_planned_without_torch(more, tmp_path, monkeypatch, capsys):
    words = ["plan", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--machine", "h100", *more]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.setattr("hf_burst.cli.plan.dense_model", lambda name: None)
    assert main(words) == 0
    assert capsys.readouterr().out == done.stdout


def test_what_never_fits_is_said_in_place_of_zeros(capsys):
    words = ["plan", "--model", "llama-3.3-70b", "--machine", "rtx3090", "--gpus", "1", "--length", "4k"]
    assert main(words) == 1
    *_, sequence, prompt, memory = capsys.readouterr().out.splitlines()
    assert sequence == "No sequence fits on all GPUs together, however short."
    assert prompt == "No prompt fits (hf_burst.remember, generate), however short."
    assert memory == "GiB, without an optimizer: weights 131.42, outside 1.25"


def test_one_rank_of_a_launch_tells_the_plan(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main([*PLAN, "--length", "4096"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("WORLD_SIZE")
    assert main([*PLAN, "--length", "4096"]) == 2
    assert "RANK=1 MASTER_ADDR=localhost MASTER_PORT=29500 cannot be" in capsys.readouterr().err


def test_a_command_that_is_interrupted_says_so(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_burst.cli.plan.find_model", interrupt)
    try:
        status = main([*PLAN, "--length", "4096"])
    except KeyboardInterrupt:
        pytest.fail("the interrupt went through")
    assert status == 130
    assert capsys.readouterr().err == "hf-burst: interrupted\n"


def test_a_reader_that_is_gone_is_no_traceback(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hf_burst.cli", "layout"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=100)
    os.close(writer)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr  # libraries may have warned


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc cannot be"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 cannot be"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "MASTER_PORT=1 cannot be"),
    ],
)
def test_variables_of_no_launcher_are_named(variables, said, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    assert said in capsys.readouterr().err
