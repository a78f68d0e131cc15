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
SHORT = ["--q-heads", "8", "--kv-heads", "2", "--head-dim", "64", "--length", "4096"]


def call(*words: str, home: Path, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        **{"HF_HOME": str(home), "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"},
        **{"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1"},
    }
    command = [sys.executable, *launcher, "-m", "hf_burst", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)


def test_the_doctor_in_one_process(tmp_path):
    done = call("doctor", *SHORT, "--ranks", "4", home=tmp_path)
    assert done.returncode == 0, done.stderr
    report = done.stdout
    assert re.search(r"^  hf_burst \S+, torch \d", report, re.MULTILINE)
    assert "ranks: 1 in this launch, on cpu" in report
    assert re.search("^  runs on cuda, not on cpu: .*torch_flash", report, re.MULTILINE)
    assert "  can: cpu_flash, reference" in report
    assert "cost model: built in" in report
    assert "hf-burst calibrate" in report
    assert "8 query and 2 key heads of 64, 1 x 4096 tokens in 1 document over 4 ranks, 4 a host takes " in report
    assert "4 a host takes ulysses_2+kv_ring: 2 ranks of one host divide" in report
    for name in ("kv_ring", "burst", "all_gather", "ulysses_2+kv_ring"):
        assert re.search(rf"^  {re.escape(name)} +[\d.]+ ms", report, re.MULTILINE), name
    assert len(re.findall(r" taken$", report, re.MULTILINE)) == 1
    assert len(re.findall(r" \d\.\d\dx$", report, re.MULTILINE)) == 5
    assert report.splitlines()[-1] == "Usable."
    assert not (tmp_path / "hf_burst").exists()  # nothing is measured unasked


def test_the_doctor_of_a_model_with_recurrent_layers(capsys):
    """Its attention beside the ways of its recurrent layers, and the cuts; only these of a model without attention."""
    words = ["doctor", "--machine", "h200", "--ranks", "2", "--length", "65536", "--documents", "9000", "40000", "700"]
    assert main([*words, "--model", "qwen3.6-27b"]) == 0
    report = capsys.readouterr().out
    assert "a causal layer of 24 query and 4 key heads of 256, 1 x 65536 tokens in 5 documents over 2 ranks" in report
    assert "48 recurrent layers (delta) of 48 states of 128 x 128" in report
    seconds = r"by states [\d.]+ ms, by scanned states [\d.]+ ms and by heads "
    assert re.search(rf"^cut \w+; recurrent layers are predicted to take {seconds}", report, re.M)
    for cut in ("contiguous", "zigzag", "documents"):
        assert re.search(rf"^  {cut} +[\d.]+ ms +[\d.]+ ms +(states|heads) +[\d.]+ ms +\d+ ", report, re.M), cut
    ways = re.findall(r"^  delta +(\D+?) +[\d.]+ ms +[\d.]+ ms +[\d.]+ ms +[\d.]+ MB", report, re.M)
    assert sorted(ways) == ["heads", "scanned states", "states"]
    assert len(re.findall(r" taken$", report, re.MULTILINE)) == 3
    assert main([*words, "--model", "Mamba2ForCausalLM"]) == 0
    report = capsys.readouterr().out
    assert "a causal layer" not in report
    assert re.search(r"^  scan +(states|heads) ", report, re.M)


def test_the_doctor_of_a_laptop_is_short(tmp_path, monkeypatch, capsys):
    """No seconds of a CPU for a layer that nobody asked about; how to ask about GPUs instead."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    assert "cost model" not in report
    assert "predicted:" not in report
    assert "hf-burst plan --model llama-3-8b --length 128k --gpus 8 --machine h200" in report
    assert len(report.splitlines()) < 20


@pytest.mark.parametrize(("text", "length"), [("131072", 2**17), ("128k", 2**17), ("1M", 2**20), ("131,072", 2**17)])
def test_lengths_as_people_write_them(text, length, capsys):
    assert main([*PLAN, "--length", text]) == 0
    assert f"{length:,} tokens a sequence" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--length", f"{text}x"])
    assert f"'{text}x' is no number of tokens; give one as 131072, 128k or 1M" in capsys.readouterr().err


def test_two_ranks_are_measured_and_the_doctor_remembers(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    measured = call("calibrate", home=tmp_path, launcher=launcher)
    assert measured.returncode == 0, measured.stderr
    assert measured.stdout.count("cost model: measured on") == 1  # rank 0 alone prints
    (profile,) = (tmp_path / "hf_burst").iterdir()
    assert re.search(rf"cost model: measured on \d{{4}}-\d\d-\d\d, {re.escape(str(profile))}", measured.stdout)
    remembered = call("doctor", "--ranks", "2", *SHORT, home=tmp_path)
    assert remembered.returncode == 0, remembered.stderr
    assert measured.stdout in remembered.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--q-heads", "8", "--kv-heads", "3"], "8 query heads cannot share 3 key heads"),
        (["--length", "0"], "--length is 0; it must be at least 1"),
        (["--ranks", "4", "--schedule", "ulysses_3+burst"], "'ulysses_3+burst' cannot run"),
        (["--ranks", "4", "--schedule", "spiral"], "no schedule 'spiral'"),
        (["--ranks", "4", "--length", "3"], "too short for 4 ranks"),
        (["--documents", "7", "0"], "--documents are [7, 0]; give lengths of at least 1"),
        (["--ranks", "4", "--ranks-per-host", "3"], "4 ranks do not lie on hosts of 3 each"),
        (["--window", "-1"], "window=-1 is negative"),
        (["--ranks", "100000"], "documents over 100000 ranks is too much to go through; ranks may be 2048"),
        (["--batch", "100000000000000"], "--batch 100000000000000 times --length 131072 in 1 documents"),
        (["--length", "10000000000", "--documents", "3"], "in 3333333334 documents over 1 ranks is too much"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(words, sentence, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert main(["doctor", *words]) == 1
    report = capsys.readouterr().out
    assert f"Not usable: {sentence}" in report or re.search(
        rf"^Not usable: .*{re.escape(sentence)}", report, re.MULTILINE
    )
    assert "Usable." not in report


def test_no_kernel_is_not_usable(monkeypatch, tmp_path, capsys):
    doctor = importlib.import_module("hf_burst.cli.doctor")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setattr(doctor, "explain_kernels", lambda *_, **__: [("only", "takes no such heads")])
    assert main(["doctor"]) == 1
    assert "Not usable: no kernel computes torch.float32 on cpu: only takes no such heads." in capsys.readouterr().out


def test_a_schedule_that_is_asked_for_is_compared(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert main(["doctor", *SHORT, "--ranks", "4", "--schedule", "burst", "--window", "100"]) == 0
    report = capsys.readouterr().out
    assert "4 a host takes burst: asked for" in report
    assert re.search(r"^  burst .* taken$", report, re.MULTILINE)


def test_the_table_is_for_the_documents_that_are_given(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    taken = []
    for documents in ([], ["--documents", "16", "20"]):
        options = ["--ranks", "4", "--q-heads", "8", "--kv-heads", "4", "--head-dim", "16", "--length", "4096"]
        assert main(["doctor", *options, *documents]) == 0
        report = capsys.readouterr().out
        assert f"in {'228 documents' if documents else '1 document'} over 4 ranks" in report
        taken.append(re.search(r"^  (\S+) .* taken$", report, re.MULTILINE)[1])
    assert taken == ["ulysses", "kv_ring"]


def test_words_that_mean_nothing_end_with_how_to_call_it(capsys):
    for words in ([], ["cure"], ["doctor", "--pill"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert "usage: hf-burst" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert re.search(r"doctor(.|\n)*plan", capsys.readouterr().out)


def test_the_installed_command_is_this_one():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    name, target = settings["options.entry_points"]["console_scripts"].strip().split(" = ")
    module, function = target.split(":")
    assert name == "hf-burst"
    assert getattr(importlib.import_module(module), function) is main


def test_one_rank_of_a_launch_tells_the_plan(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main([*PLAN, "--length", "4096"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("WORLD_SIZE")
    assert main([*PLAN, "--length", "4096"]) == 2
    assert "RANK=1 cannot be" in capsys.readouterr().err


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
    command = [sys.executable, "-m", "hf_burst", *PLAN, "--length", "4096"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=100)
    os.close(writer)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr  # libraries may have warned


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc cannot be"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 cannot be"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE=2 RANK=2 cannot be"),
    ],
)
def test_variables_of_no_launcher_are_named(variables, said, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    assert said in capsys.readouterr().err
