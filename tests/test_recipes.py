"""The main job, launched as a user launches it, shorter: it learns, and its checkpoint needs no hf_burst."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from accelerate.state import PartialState

datasets = pytest.importorskip("datasets")
from recipes import finetune_long_document, recall_across_shards  # noqa: E402 (which needs data sets)
from recipes.benchmarks import balance, plot  # noqa: E402

ROOT = Path(__file__).parents[1]
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", "recipes/configs/accelerate_2_processes.yaml"]
RELOAD = """
import importlib.util, json, sys
sys.modules["hf_burst"] = None  # any import of it fails
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(3, 203)[None]
loss = float(model(ids, labels=ids).loss.detach())
print(json.dumps({"implementation": model.config._attn_implementation, "loss": loss}))
"""


def finetune(folder: Path, *options: str) -> list[dict[str, float]]:
    command = [sys.executable, *LAUNCH, "recipes/finetune_long_document.py"]
    command += ["--config", "recipes/configs/python_topics_cpu.yaml", "--output_dir", str(folder), *options]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "training_log.json").read_text())["steps"]


def reload(folder: Path) -> dict[str, float | str]:
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, str(folder)], capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_full_finetuning_learns_and_its_checkpoint_stands_alone(tmp_path: Path) -> None:
    log = finetune(tmp_path, "--max_steps", "8", "--sequence_length", "2048", "--warmup_steps", "1")
    assert log[-1]["loss"] < log[0]["loss"] - 1
    assert all(entry["memory_gib"] > 0 for entry in log)
    assert all(entry["tokens_per_second"] > 0 for entry in log[1:])
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "hf_burst" not in (tmp_path / "config.json").read_text()
    found = reload(tmp_path)
    assert found["implementation"] == "sdpa"
    assert float(found["loss"]) > 0


TEXTS = ["A document. " * 40, "Another one, which is longer. " * 60, "x"]


def test_every_source(tmp_path: Path) -> None:
    sources = {kind: tmp_path / f"documents.{kind}" for kind in ("txt", "jsonl", "parquet")}
    sources["txt"].write_text("\n".join(TEXTS))
    datasets.Dataset.from_dict({"text": TEXTS}).to_json(sources["jsonl"])
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(sources["parquet"])
    for kind, source in sources.items():
        found = finetune_long_document.load_documents(finetune_long_document.Recipe(dataset=[str(source)]))
        assert list(found["text"]) == (["\n".join(TEXTS)] if kind == "txt" else TEXTS)
    with pytest.raises(SystemExit, match="mixes kinds of files"):
        finetune_long_document.load_documents(finetune_long_document.Recipe(dataset=list(map(str, sources.values()))))


def test_lora_and_rope_scaling(tmp_path: Path) -> None:
    source, base = tmp_path / "documents.jsonl", tmp_path / "base"
    datasets.Dataset.from_dict({"text": TEXTS}).to_json(source)
    make_base(base)
    options = ["--model", str(base), "--tokenizer", "bytes", "--dataset", str(source), "--sequence_length", "301"]
    options += ["--lora_rank", "2", "--rope_scaling", "{rope_type: linear, factor: 2.0}", "--max_steps", "2"]
    options += ["--burst", "{schedule: burst}", "--per_device_train_batch_size", "2"]
    log = finetune(tmp_path / "out", *options)
    assert len(log) == 2
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert float(reload(tmp_path / "out")["loss"]) > 0


def make_base(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)


def test_a_setting_that_does_not_exist_is_named(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("sequence_lenght: 5\n")
    with pytest.raises(SystemExit, match="sequence_lenght"):
        finetune_long_document.parse(["--config", str(config)])


BASE = """
model_config: {model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
tokenizer: bytes
sequence_length: 512
max_steps: 1
use_cpu: true
report_to: none
"""
Sentence = Callable[..., str]


@pytest.fixture
def sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sentence:
    """The one line by which a script ends, whose exit status is not 0."""

    def ends(main: Callable[[], object], *options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["script.py", *options])
        with pytest.raises(SystemExit) as end:
            main()
        said = end.value.code
        if not isinstance(said, str):
            assert said == 2, said
            said = capsys.readouterr().err.strip().splitlines()[-1]
        assert "\n" not in said
        return said

    return ends


@pytest.fixture
def wrong(sentence: Sentence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sentence]:
    """The line by which fine-tuning ends for these options, beside settings and a document that are right."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", sys.exit)  # of a run that does not end as it should
    Path("base.yaml").write_text(BASE)
    Path("long.txt").write_text("A document. " * 200)
    options = ["--config", "base.yaml", "--dataset", "long.txt", "--output_dir", "out"]
    yield lambda *more: sentence(finetune_long_document.main, *options, *more)
    PartialState._reset_state()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (bytes(range(256)), "--config 'more.yaml' cannot be used: 'utf-8' codec"),
        (b"a: [1", "--config 'more.yaml' cannot be used: while parsing"),
        (b"just text", "--config is 'more.yaml'; it must be a mapping"),
        (b"- a", "--config is 'more.yaml'; it must be a mapping"),
        (b"1: 2", "--config is 'more.yaml'; it must be a mapping"),
        (b"help: 3", "no setting is called help"),
        (b"sequence_length: 512.0", "sequence_length is 512.0; give a whole number, at least 2"),
        (b"output_dir: 3", "more.yaml: output_dir is 3; give text"),
        (b"save_strategy: no", "save_strategy is False; it must be one of 'no', 'steps'"),
        (b"dtype: nonsense", "dtype is 'nonsense'; it must be one of 'auto', 'float32'"),
    ],
)
def test_a_file_of_settings_that_is_wrong(wrong: Sentence, content: bytes, told: str) -> None:
    Path("more.yaml").write_bytes(content)
    assert told in wrong("--config", "more.yaml")


@pytest.mark.parametrize("given", ["dataset: 3", "dataset: []", "dataset: [3]"])
def test_data_sets_that_are_no_text(sentence: Sentence, tmp_path: Path, given: str) -> None:
    config = tmp_path / "base.yaml"
    config.write_text(f"{BASE}{given}")
    assert given.replace(":", " is") in sentence(finetune_long_document.main, "--config", str(config))


LLAMA = "model_type: llama, num_hidden_layers: 1, hidden_size: 16"


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--nonsense", "3", "unrecognized arguments: --nonsense 3"),
        ("--config", "missing.yaml", "--config 'missing.yaml' cannot be used: [Errno 2]"),
        ("--config", ".", "--config '.' cannot be used: [Errno 21]"),
        ("--sequence_length", "0", "sequence_length is 0; give a whole number, at least 2"),
        ("--lora_rank", "-1", "lora_rank is -1; give a whole number, at least 0"),
        ("--dtype", "nonsense", "invalid choice: 'nonsense'"),
        ("--burst_size", "0", "burst_size is 0"),
        ("--burst", "{schedule: nonsense}", "no schedule 'nonsense'"),
        ("--burst", "{schedule: 3}", "no schedule '3'"),
        ("--burst", "{nokey: 1}", "no setting nokey"),
        ("--burst", "{attention_keep: 3}", "attention_keep is 3"),
        ("--burst", "{logits_limit_gib: abc}", "logits_limit_gib is 'abc'"),
        ("--burst", "7", "burst is '7'; it must be a mapping"),
        ("--model_config", "7", "model_config is '7'; it must be a mapping"),
        ("--rope_scaling", "7", "rope_scaling is '7'; it must be a mapping"),
        ("--burst", "hello", "burst is 'hello'; it must be a mapping"),
        ("--burst", "{1: 2}", "burst is '{1: 2}'; it must be a mapping"),
        ("--model_config", "[1", "model_config '[1' cannot be used: while parsing"),
        ("--rope_scaling", "missing.yaml", "rope_scaling 'missing.yaml' cannot be used: [Errno 2]"),
        ("--model_config", "{}", "model_config has the model_type None"),
        ("--model_config", "{model_type: nonsense}", "model_config has the model_type 'nonsense'"),
        ("--model_config", "{model_type: llama, hidden_size: abc}", "Field 'hidden_size' expected int, got str"),
        ("--model_config", "{model_type: t5}", "a t5, of which Transformers has no causal language model"),
        ("--model_config", f"{{{LLAMA}, hidden_act: nonsense}}", "hidden_act': 'nonsense'} cannot be used"),
        ("--model_config", f"{{{LLAMA.replace('llama', 'mamba')}}}", "MambaForCausalLM has layers of type linear_att"),
        ("--rope_scaling", "{rope_type: nonsense}", "rope_scaling has the rope_type 'nonsense'; it must be one of"),
        ("--rope_scaling", "{rope_type: yarn}", "rope_scaling {'rope_type': 'yarn'} cannot be used: \"Missing"),
        ("--model", ".", "model '.' cannot be used"),
        ("--tokenizer", ".", "tokenizer '.' cannot be used"),
        ("--dataset", "missing.txt", "dataset ['missing.txt'] cannot be used: Unable to find"),
        ("--dataset", "", "dataset is ['']; give files"),
        ("--output_dir", "long.txt", "output_dir 'long.txt' cannot be used: [Errno 17]"),
        ("--output_dir", "/proc", "output_dir '/proc' cannot be used"),
        ("--resume_from_checkpoint", "missing", "resume_from_checkpoint is 'missing'"),
    ],
)
def test_settings_that_are_wrong(wrong: Sentence, option: str, value: str, told: str) -> None:
    assert told in wrong(option, value)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("number.jsonl", b'{"text": 5}\n', "holds Value('int64'); it must hold text"),
        ("list.jsonl", b'{"text": ["a"]}\n', "it must hold text"),
        ("broken.jsonl", b'{"text": "a', "JSON parse error"),
        ("latin.txt", b"\xff\xfe" * 9, "'utf-8' codec can't decode"),
        ("empty/", None, "doesn't contain any data files"),
    ],
)
def test_documents_that_cannot_be_read(wrong: Sentence, name: str, content: bytes | None, told: str) -> None:
    if content is None:
        Path(name).mkdir()
    else:
        Path(name).write_bytes(content)
    said = wrong("--dataset", name)
    assert name in said
    assert told in said


def test_a_size_from_the_environment_that_is_wrong(wrong: Sentence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_BURST_SIZE", "x")
    assert "HF_BURST_SIZE='x'" in wrong()


def test_an_interrupted_run_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune_long_document, "parse", interrupted)
    with pytest.raises(SystemExit) as end:
        finetune_long_document.main()
    assert end.value.code == 130


def test_help_names_the_file_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        finetune_long_document.parse(["--help"])
    assert "--config FILE" in capsys.readouterr().out.split("options:")[1]


def test_every_process_ends_with_the_sentence_alone(tmp_path: Path) -> None:
    command = [sys.executable, *LAUNCH, "--main_process_port", "0", "recipes/finetune_long_document.py", "--config"]
    command += ["recipes/configs/python_topics_cpu.yaml", "--output_dir", str(tmp_path), "--sequence_length", "262144"]
    command += ["--model_config", f"{{{LLAMA.replace('llama', 'mamba')}}}"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert done.stderr.count("MambaForCausalLM has layers of type linear_attention") == 2
    assert 'recipes/finetune_long_document.py", line' not in done.stderr


@pytest.mark.parametrize("name", ["length", "num_keys", "batch_size", "eval_every", "eval_sequences"])
def test_recall_needs_numbers_above_0(sentence: Sentence, name: str) -> None:
    assert f"--{name} is 0; it must be at least 1" in sentence(recall_across_shards.parse_args, f"--{name}", "0")


def test_recall_finds_out_at_once_where_it_cannot_write(sentence: Sentence, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = ["--output_dir", str(tmp_path / "file")]
    assert "--output_dir must be a folder" in sentence(recall_across_shards.parse_args, *options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["missing.json", "--markdown"], "missing.json cannot be read as JSON"),
        (["training_2xH200.json", "--markdown"], "no result of attention.py"),
        (["balance.json", "--markdown"], "no result of attention.py"),
        (["attention_2xH200.json"], "give --out, --markdown or both"),
        (["attention_2xH200.json", "--out", "missing.xyz"], "--out missing.xyz must be a file that ends in"),
        (["attention_2xH200.json", "--out", "."], "--out . must be a file that ends in"),
    ],
)
def test_what_cannot_be_drawn(
    sentence: Sentence, monkeypatch: pytest.MonkeyPatch, options: list[str], told: str
) -> None:
    monkeypatch.chdir(ROOT / "recipes" / "benchmarks" / "results")
    assert told in sentence(plot.main, *options)


def test_an_empty_file_cannot_be_drawn(sentence: Sentence, tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    assert "cannot be read as JSON" in sentence(plot.main, str(tmp_path / "empty.json"), "--markdown")


@pytest.mark.parametrize("options", [["--ranks", "0"], ["--ranks", "2", "0"], ["--draws", "0"], ["--out", "."]])
def test_balance_that_cannot_be_measured(sentence: Sentence, options: list[str]) -> None:
    assert options[0] in sentence(balance.main, *options)
