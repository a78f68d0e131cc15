"""The recipes, launched as a user launches them, shorter; and every setting that ends them by a sentence."""

import dataclasses
import errno
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import Mock

import pytest
import torch
import transformers
import yaml
from accelerate.state import PartialState

import hf_burst
from hf_burst.errors import BurstError, ConfigError

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))  # where the recipes find their modules
import byte_tokenizer  # noqa: E402
import command_line  # noqa: E402
import dpo  # noqa: E402
import finetune_long_document  # noqa: E402
import grpo  # noqa: E402
import merge_adapter  # noqa: E402
import models  # noqa: E402
import report  # noqa: E402
import resuming  # noqa: E402
import reward  # noqa: E402
import settings  # noqa: E402
import sft  # noqa: E402
import training  # noqa: E402

from recipes import recall_across_shards  # noqa: E402
from tests.support import conversations  # noqa: E402
from tests.support.ranks import reset_accelerate  # noqa: E402

LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", "recipes/configs/accelerate_2_processes.yaml"]
CPU = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
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
AT_EXIT = """
import atexit, os, pathlib
if rank := os.environ.get("RANK"):  # what a tracker does that finishes its run
    atexit.register(pathlib.Path(os.environ["RUNS"], f"finished_{rank}").touch)
"""


def reload(folder: Path) -> dict[str, float | str]:
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, str(folder)], capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_processes_learn_and_leave_a_checkpoint_that_stands_alone(tmp_path: Path) -> None:
    """The first command of the README, shorter. Handlers of the interpreter's exit run: trackers finish by them."""
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *LAUNCH, "--main_process_port", "0", "recipes/finetune_long_document.py"]
    command += ["--config", "recipes/configs/text_cpu.yaml", "--output_dir", str(tmp_path), "--warmup_steps", "1"]
    command += ["--max_steps", "8", "--max_length", "2048"]
    environment = {**CPU, "PYTHONPATH": paths, "RUNS": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "2 ranks in 1 group of 2; a step takes 1 sequence of at most 2,048 tokens, 1,024 a rank\n" in done.stdout
    assert {"finished_0", "finished_1"} <= {path.name for path in tmp_path.iterdir()}
    log = json.loads((tmp_path / "training_log.json").read_text())["steps"]
    assert log[-1]["loss"] < log[0]["loss"] - 1
    assert all(entry["peak_memory_gib"] > 0 for entry in log)
    assert all(entry["tokens_per_second_per_gpu"] > 0 for entry in log)
    assert (tmp_path / "model.safetensors").exists()
    for picture in ("loss.png", "lengths.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert "hf_burst" not in (tmp_path / "config.json").read_text()
    reloaded = reload(tmp_path)
    assert reloaded["implementation"] == "sdpa"
    assert float(reloaded["loss"]) > 0


BASE = """
model_config: {model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
tokenizer: bytes
max_length: 512
max_steps: 1
use_cpu: true
bf16: false
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
            *_, said, usage = capsys.readouterr().err.strip().splitlines()
            assert usage.startswith("usage: script.py")
        assert "\n" not in said
        return said

    return ends


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes the trainer of a recipe from small settings that are right, and more options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    reset_accelerate()
    Path("base.yaml").write_text(BASE)
    Path("long.txt").write_text("A document. " * 200)
    options = ["--config", "base.yaml", "--dataset", "long.txt", "--output_dir", "out", "--disable_tqdm", "true"]
    yield lambda *more, script=finetune_long_document: script.make_trainer([*options, *more])
    reset_accelerate()


@pytest.fixture
def wrong(recipe: Callable[..., Any], sentence: Sentence) -> Sentence:
    """The line by which a recipe ends for these options, beside settings and a document that are right."""
    return lambda *more, **script: sentence(lambda: settings.run(lambda _: recipe(*more, **script)))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (bytes(range(256)), "--config 'more.yaml' cannot be used: 'utf-8' codec"),
        (b"a: [1", "--config 'more.yaml' cannot be used: while parsing"),
        (b"just text", "--config is 'more.yaml'; it must be a mapping"),
        (b"- a", "--config is 'more.yaml'; it must be a mapping"),
        (b"1: 2", "--config is 'more.yaml'; it must be a mapping"),
        (b"help: 3", "no setting is called help"),
        (b"max_lenght: 5", "no setting is called max_lenght; did you mean max_length?"),
        (b"max_length: 512.0", "max_length is 512.0; give a whole number"),
        (b"output_dir: null", "more.yaml: output_dir is None; give text"),
        (b"run_name: [a]", "more.yaml: run_name is ['a']; give text"),
        (b"max_steps: true", "more.yaml: max_steps is True; give a whole number."),
        (b"bf16: 2", "more.yaml: bf16 is 2; give true or false."),
        (b"max_steps: {a: 1}", "more.yaml: max_steps is {'a': 1}; give a whole number."),
        (b"optim: null", "more.yaml: optim is None; it must be one of 'adamw_torch'"),
        (b"optim: adamw", "more.yaml: optim is 'adamw'; it must be one of 'adamw_torch'"),
        (b"save_strategy: no", "save_strategy is False; it must be one of 'no', 'steps'"),
        (b"dtype: nonsense", "dtype is 'nonsense'; it must be one of 'auto', 'bfloat16'"),
        (b"max_length: null", "max_length is None; give a whole number"),
        (b"eval_share: null", "eval_share is None; give a number."),
        (b"dataset: []", "dataset is []; give files"),
        (b"dataset: [[a]]", "dataset is [['a']]; give text, or several in a list."),
        (b"debug: [nothing]", "nothing is not a valid DebugOption, please select one of ['underflow_overflow',"),
        (b"debug: nothing", "more.yaml: debug is 'nothing'; nothing is not a valid DebugOption"),
        (b"report_to: {a: 1}", "more.yaml: report_to is {'a': 1}; give text."),
    ],
)
def test_a_file_of_settings_that_is_wrong(
    sentence: Sentence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in of_file(sentence, content, finetune_long_document)
    PartialState._reset_state()


def of_file(sentence: Sentence, content: bytes, script: Any) -> str:
    """The line by which a recipe ends for a file of settings, beside one that is right."""
    Path("base.yaml").write_text(BASE)
    Path("more.yaml").write_bytes(content)
    files = ["--config", "base.yaml", "--config", "more.yaml"]
    return sentence(lambda: settings.run(lambda _: script.make_trainer(files)))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"reward: null", "more.yaml: reward is None; give text, or several in a list."),
        (b"max_completion_length: null", "more.yaml: max_completion_length is None; give a whole number."),
        (b"reward_weights: much", "more.yaml: reward_weights is 'much'; give a number, or several in a list."),
    ],
)
def test_a_file_of_settings_for_grpo_that_is_wrong(
    sentence: Sentence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in of_file(sentence, b"dataset: python_topics\n" + content, grpo)


REFUSED = "xlstm"  # a model_type
LLAMA = "model_type: llama, num_hidden_layers: 1, hidden_size: 16"


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--nonsense", "3", "No setting is called nonsense; see --help"),
        ("--learning_rat", "3", "No setting is called learning_rat; did you mean learning_rate?"),
        ("--config", "missing.yaml", "--config 'missing.yaml' cannot be used: [Errno 2]"),
        ("--config", ".", "--config '.' cannot be used: [Errno 21]"),
        ("--max_length", "0", "max_length is 0; give a whole number of tokens, at least 2"),
        ("--dtype", "nonsense", "invalid choice: 'nonsense'"),
        ("--burst_size", "0", "burst_size is 0"),
        ("--burst", "{schedule: nonsense}", "no schedule 'nonsense'"),
        ("--burst", "{schedule: 3}", "no schedule 3; it must be one of"),
        ("--burst", "{nokey: 1}", "no setting nokey"),
        ("--burst", "{memory: {attention_keep: 3}}", "attention_keep is 3"),
        ("--burst", "{memory: much}", "memory is 'much'"),
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
        (
            "--model_config",
            f"{{{LLAMA.replace('llama', REFUSED)}}}",
            "xLSTMForCausalLM has no attention, and no recurrent layers",
        ),
        ("--rope_scaling", "{rope_type: nonsense}", "rope_scaling has the rope_type 'nonsense'; it must be one of"),
        ("--rope_scaling", "{rope_type: yarn}", "rope_scaling {'rope_type': 'yarn'} cannot be used: \"Missing"),
        ("--model_name_or_path", ".", "tokenizer '.' cannot be used"),
        ("--model_name_or_path", "./nothing", "is './nothing', a folder that does not exist; the current folder is"),
        ("--model_name_or_path", "a/b/c", "model_name_or_path is 'a/b/c', a folder that does not exist; the current"),
        ("--tokenizer", ".", "tokenizer '.' cannot be used"),
        ("--dataset", "missing.txt", "dataset has 'missing.txt', which does not exist; the current folder is /"),
        (
            "--dataset",
            f"{ROOT}/LICENSE",
            "LICENSE', a file whose suffix tells no kind; a text is named such as LICENSE.txt",
        ),
        ("--dataset", "lang.txt", "dataset has 'lang.txt', which does not exist; did you mean long.txt?"),
        ("--dataset", "books/", "dataset has 'books/', a folder that does not exist; the current folder is /"),
        ("--dataset", "./long", "dataset has './long', a folder that does not exist; did you mean long.txt?"),
        ("--dataset", f"{ROOT}/recipe", f"recipe', a folder that does not exist; did you mean {ROOT}/recipes?"),
        ("--dataset", f"{ROOT}/docs/READM.md", "READM.md', which does not exist; the current folder is /"),
        ("--dataset", f"{ROOT}/READM.md", f"READM.md', which does not exist; did you mean {ROOT}/README.md?"),
        ("--dataset_split", "validation", "dataset ['long.txt'] cannot be used: Unknown split \"validation\""),
        ("--eval_share", "1", "eval_share is 1.0; give a share"),
        ("--too_long", "refuse", "1 of 1 rows have more than max_length (512) tokens, the longest 2,401"),
        ("--too_long", "drop", "all rows have more than max_length (512) tokens"),
        ("--load_in_4bit", "true", "Quantized weights cannot be trained; set use_peft"),
        ("--use_peft", "true", "use_peft trains adapters beside trained weights; set model_name_or_path"),
        ("--merge_to", "x", "merge_to is set without use_peft"),
        ("--attn_implementation", "eager", "attn_implementation is set, but the attention is hf_burst's"),
        ("--eval_split", "test", "eval_split is 'test' without eval_dataset"),
        ("--eos_token", "<nonsense>", "eos_token is '<nonsense>', which tokenizer 'bytes' does not have"),
        ("--dataset", "", "dataset is ['']; give files"),
        ("--per_device_train_batch_size", "0", "per_device_train_batch_size is 0; give a whole number, at least 1"),
        ("--gradient_accumulation_steps", "0", "gradient_accumulation_steps is 0; give a whole number"),
        ("--eval_strategy", "steps", "eval_strategy is 'steps', but there are no rows for it; set eval_share"),
        ("--output_dir", "long.txt", "output_dir 'long.txt' cannot be used: [Errno 17]"),
        ("--output_dir", "/proc", "output_dir '/proc' cannot be used"),
        ("--resume_from_checkpoint", "missing", "resume_from_checkpoint is 'missing'"),
        (
            "--resume_from_checkpoint",
            "true",
            "is true, but 'out' holds no whole checkpoint",
        ),
    ],
)
def test_settings_that_are_wrong(wrong: Sentence, option: str, value: str, told: str) -> None:
    assert told in wrong(option, value)


@pytest.mark.parametrize(
    ("library", "options", "told"),
    [
        ("bitsandbytes", ["--use_peft", "--load_in_4bit"], "need bitsandbytes: pip install"),
        ("liger_kernel", ["--use_liger_kernel"], "use_liger_kernel needs Liger: pip install"),
        ("wandb", ["--report_to", "wandb"], "the settings cannot be used: WandbCallback requires wandb"),
    ],
)
def test_a_library_that_is_not_installed(
    wrong: Sentence, tmp_path: Path, library: str, options: list[str], told: str
) -> None:
    if find_spec(library):
        pytest.skip(f"{library} is installed")
    base = ["--model_name_or_path", str(make_base(tmp_path / "base")), "--dtype", "float32"]
    assert told in wrong(*base, *options)


def test_a_chat_template_may_have_any_name(recipe: Callable[..., Any]) -> None:
    """The recipe reads it; TRL takes what does not end in .jinja for a model."""
    conversations.chats(Path("chats.jsonl"), conversations.facts(8), count=2, turns=2)
    template = "{# mine #}" + byte_tokenizer.CHATML.read_text()
    Path("mine.txt").write_text(template)
    trainer, _ = recipe("--dataset", "chats.jsonl", "--chat_template_path", "mine.txt", script=sft)
    assert trainer.processing_class.chat_template == template


REFUSES = """
import importlib, json, os, sys
cases, slow = json.loads(sys.argv[1])
for script, arguments, told, *size in cases + slow:
    os.environ |= {"HF_BURST_SIZE": one for one in size}
    module, sys.argv = importlib.import_module(script), [f"{script}.py", *arguments]
    try:
        main = vars(module).get("make_trainer") or module.main
        main() if script == "merge_adapter" else main(arguments)
    except (SystemExit, ValueError) as end:  # a ConfigError ends a recipe as well
        assert told in str(end), (told, end)
    else:
        raise AssertionError(f"{script} takes {arguments}")
    os.environ.pop("HF_BURST_SIZE", None)
    for name in ("torch", "accelerate", "datasets", "peft") if [script, arguments, told, *size] in cases else ():
        assert name not in sys.modules, f"{script} {arguments}: {name} was imported before"
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_file_for_gpus_names_those_for_cpus(sentence: Sentence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.DEFAULTS, "use_cpu", False)
    options = ["--config", str(ROOT / "recipes/configs/text_4gpu.yaml"), "--dataset", str(ROOT / "README.md")]
    said = sentence(lambda: finetune_long_document.make_trainer(options))
    assert "take a file there whose name ends in _cpu.yaml" in said


def test_settings_are_checked_before_what_takes_seconds_to_import(tmp_path: Path) -> None:
    """All recipes refuse wrong arguments of their own before torch is imported, those of TRL's classes before the
    processes would be joined, of which two are missing here."""
    (tmp_path / "base").mkdir()
    (tmp_path / "typo.yaml").write_text("learning_rat: 3\n")
    (tmp_path / "choice.yaml").write_text("optim: adamw\n")
    (tmp_path / "text.txt").write_text("A text.")
    broken = {
        "[1]": "1]/adapter_config.json'; it must be a mapping",
        "{": "adapter_config.json' cannot be used: Expecting property name",
        "{}": "adapter_config.json names no base_model_name_or_path, but None; set it",
    }
    for content in broken:
        (tmp_path / content).mkdir()
        (tmp_path / content / "adapter_config.json").write_text(content)
    base, text = ["--model_name_or_path", str(tmp_path / "base")], ["--dataset", str(tmp_path / "text.txt")]
    out = [*base, *text, "--output_dir", str(tmp_path / "out")]
    asked = [str(tmp_path / "base"), str(tmp_path / "text.txt"), "--questions", text[1]]
    no_size, another = "is not a number of ranks; set it to an integer", "HF_BURST_SIZE is 2, which does not divide"
    cases: list[tuple[str, list[str], str] | tuple[str, list[str], str, str]] = [
        ("sft", [*out, "--burst_size", "0"], "burst_size is 0; give a whole number of processes, at least 1."),
        ("sft", ["--dataset", "missing.jsonl"], "dataset has 'missing.jsonl', which does not exist"),
        *(("sft", out, f"HF_BURST_SIZE={size!r} {no_size}", size) for size in ("x", "0", "")),
        ("ask", asked, f"HF_BURST_SIZE='x' {no_size}", "x"),
        ("ask", asked, another, "2"),
        ("grpo", [*out, "--reward", "none.py:one"], "reward has 'none.py:one'; give 'answer'"),
        ("evaluate", [*base, "--lengths", "1"], "lengths is [1]; give whole numbers of tokens"),
        ("evaluate", [*base, "--lenghts", "512"], "No setting is called lenghts; did you mean lengths?"),
        ("ask", ["./none", str(tmp_path), "--questions", text[1]], "model is './none', a folder that does not exist"),
        ("merge_adapter", [str(tmp_path), "merged"], "holds no adapter_config.json; give the folder of an adapter"),
        ("merge_adapter", [str(tmp_path / "none"), "merged"], "none holds no adapter_config.json; give the folder"),
        *(("merge_adapter", [str(tmp_path / name), "merged"], told) for name, told in broken.items()),
    ]
    slow: list[tuple[str, list[str], str] | tuple[str, list[str], str, str]] = [
        ("sft", [*text, "--learning_rat", "3"], "No setting is called learning_rat; did you mean learning_rate?"),
        ("sft", [*text, "--config", str(tmp_path / "typo.yaml")], "typo.yaml: no setting is called learning_rat; did"),
        ("sft", [*text, "--learning_rate", "much"], "--learning_rate/--learning-rate: invalid float value: 'much'"),
        ("sft", [*text, "--bf16"], "argument --bf16: expected one argument, such as --bf16 true; see --help."),
        ("sft", [*text, "--max_steps"], "argument --max_steps/--max-steps: expected one argument; see --help."),
        ("sft", [*out, "--optim", "adamw"], "invalid choice: 'adamw' (choose from 'adamw_torch', 'adamw_torch_fused'"),
        ("sft", [*out, "--lr_scheduler_type", "cosin"], "invalid choice: 'cosin' (choose from 'linear', 'cosine', "),
        ("sft", [*out, "--log_level", "all"], "invalid choice: 'all' (choose from 'detail', 'debug', "),
        ("sft", [*out, "--debug", "all"], "argument --debug: invalid DebugOption value: 'all'; see --help."),
        ("sft", [*out, "--loss_type", "all"], "invalid choice: 'all' (choose from 'nll', 'dft', "),
        ("sft", [*out, "--config", str(tmp_path / "choice.yaml")], "optim is 'adamw'; it must be one of 'adamw_torch'"),
        ("sft", [*out, "--resume_from_checkpoint", "nowhere"], "is 'nowhere'; give the folder of a checkpoint, true"),
        *([] if find_spec("liger_kernel") else [("sft", [*out, "--use_liger_kernel"], "use_liger_kernel needs Liger")]),
        ("sft", [*out, "--burst_size", "2"], "burst_size is 2, which does not divide the processes"),
        ("sft", out, another, "2"),
        ("finetune_long_document", [*out, "--max_length", "1"], "max_length is 1; give a whole number of tokens"),
        ("dpo", [*out, "--precompute_ref_log_probs"], "precompute_ref_log_probs would compute sequences"),
        ("reward", [*out, "--use_peft", "--lora_task_type", "CAUSAL_LM"], "lora_task_type is 'CAUSAL_LM', by which"),
        ("grpo", [*out, "--max_completion_length", "20000"], "max_completion_length is 20000, and max_length 16384"),
        ("extend_context", out, "Set eval_share, or eval_dataset, for the text of the perplexity."),
    ]
    paths = os.pathsep.join([str(ROOT / "recipes"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", REFUSES, json.dumps([cases, slow])]
    environment = {**CPU, "PYTHONPATH": paths, "WORLD_SIZE": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_that_torch_is_loaded_is_said_when_the_arguments_are_right(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A text.")
    command = [sys.executable, "recipes/sft.py", "--dataset", str(tmp_path / "text.txt"), "--output_dir", str(tmp_path)]
    for words, told in (["--burst_size", "0"], ""), (["--bf16", "true", "--fp16", "true"], "sft.py: loading torch"):
        done = subprocess.run([*command, *words], cwd=ROOT, env=CPU, capture_output=True, text=True, timeout=100)
        assert done.returncode == 1
        assert done.stderr.startswith(told)
        assert ("loading" in done.stderr) == bool(told)


@pytest.mark.parametrize("name", ["SFTConfig", "DPOConfig", "RewardConfig", "GRPOConfig"])
def test_every_documented_kind_of_value_may_be_in_a_file(name: str) -> None:
    """The first line of a setting in the docstrings says `str` or `bool`, which is more than some annotations say."""
    theirs = getattr(trl, name)
    values = {"bool": [True, False], "int": [3], "float": [0.5], "dict": [{}], "None": [None], "False": [False]}
    values |= {"list[str]": [["x"], "x"], "list[float]": [[0.5], 0.5]}
    told: dict[str, set[str]] = {}
    for base in theirs.__mro__:
        for setting, kinds in re.findall(r"^ +(\w+) \((.*?)\)?:$", base.__doc__ or "", re.MULTILINE):
            described = kinds.partition(", *optional*")[0].replace("dict[str, Any]", "dict")
            told.setdefault(setting, set()).update(re.findall(r"`([\w\[\]]+)`", described))
    cases = [(setting, value) for setting, kinds in told.items() for kind in kinds for value in values.get(kind, ())]
    cases += [("debug", value) for value in (["underflow_overflow"], "underflow_overflow")]
    cases += [("include_for_metrics", "loss"), ("label_names", "x")]
    names = {field.name for field in dataclasses.fields(theirs)}
    cases = [case for case in cases if case[0] in names - {"max_length", "max_completion_length"}]  # None is refused
    assert len(cases) > 100
    actions = {action.dest: action for action in command_line.Parser((theirs,))._actions}
    types = get_type_hints(theirs, include_extras=True)
    for setting, value in cases:
        if not actions[setting].choices:
            taken = command_line.as_given(Path("file.yaml"), actions[setting], types[setting], value)
            several = actions[setting].nargs == "+" and value is not None and not isinstance(value, list)
            assert taken == ([value] if several else value), setting


def test_lists_of_one_and_what_only_documentation_says_are_taken(tmp_path: Path) -> None:
    given = {"reward_weights": 1.0, "scale_rewards": False, "label_names": "x", "debug": ["underflow_overflow"]}
    given["generation_batch_size"] = 8
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({**given, "use_cpu": True, "bf16": False}))
    (tmp_path / "fsdp.yaml").write_text("fsdp: true\n")
    words = ["--config", str(tmp_path / "more.yaml"), "--output_dir", str(tmp_path)]
    (taken,) = command_line.read(words, (trl.GRPOConfig,), {})
    assert (taken.reward_weights, taken.label_names, taken.debug) == ([1.0], ["x"], ["underflow_overflow"])
    assert taken.scale_rewards == "none"
    given, words = [], ["--config", str(tmp_path / "fsdp.yaml"), "--output_dir", str(tmp_path), "--bf16", "false"]
    command_line.read([*words, "--use_cpu", "true"], (trl.SFTConfig,), {}, check=given.append)
    assert given[0].fsdp is True


def test_mappings_in_json_are_read_as_json(tmp_path: Path) -> None:
    """Which may be indented by tabs."""
    (tmp_path / "adapter_config.json").write_text('{\n\t"base_model_name_or_path": "base",\n\t"lr": 1e-1\n}')
    read = settings.mapping("adapter", tmp_path / "adapter_config.json")
    assert read == {"base_model_name_or_path": "base", "lr": 0.1}


def test_two_ways_to_name_a_model(recipe: Callable[..., Any], wrong: Sentence, tmp_path: Path) -> None:
    """In one source they contradict each other; a later source overrules an earlier one."""
    base = ["--model_name_or_path", str(make_base(tmp_path / "base"))]
    assert "and model_config is set too" in wrong(*base, "--model_config", "{model_type: llama}")
    Path("both.yaml").write_text(Path("base.yaml").read_text() + f"model_name_or_path: {base[1]}\n")
    assert "and model_config is set too" in wrong("--config", "both.yaml")
    assert recipe(*base)[0].model.config.hidden_size == 32
    Path("again.yaml").write_text(f"model_config: {{{LLAMA.replace('16', '48')}, num_attention_heads: 2}}\n")
    Path("base.yaml").write_text(f"model_name_or_path: {base[1]}\nmax_length: 512\nuse_cpu: true\nbf16: false\n")
    assert recipe("--config", "again.yaml", "--tokenizer", "bytes")[0].model.config.hidden_size == 48


def test_paths_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_base(tmp_path / "base")
    (tmp_path / "rows.txt").write_text("A document.")
    kinds = (settings.ModelSettings, settings.DataSettings, settings.BurstSettings)
    (tmp_path / "home.yaml").write_text("model_name_or_path: ~/base\ndataset: [~/rows.txt]\nmerge_to: ~/merged\n")
    model, documents, burst = command_line.parse(["--config=~/home.yaml", "--tokenizer=~/base"], kinds, {})
    base = str(tmp_path / "base")
    assert (model.model_name_or_path, model.tokenizer, documents.dataset, burst.merge_to) == (
        base,
        base,
        [str(tmp_path / "rows.txt")],
        str(tmp_path / "merged"),
    )


def test_a_size_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("x", "0", "", "\u00b2"):
        monkeypatch.setenv("HF_BURST_SIZE", size)
        for make in (settings.BurstSettings, hf_burst.BurstParallelismConfig.from_env):
            with pytest.raises(ConfigError, match=f"HF_BURST_SIZE='{size}' is not a number of ranks"):
                make()
        assert settings.BurstSettings(burst_size=2).size == 2
    monkeypatch.setenv("HF_BURST_SIZE", "3")
    assert settings.BurstSettings().size == settings.BurstSettings().parallelism.burst_size == 3


def test_an_interrupted_run_ends_without_a_traceback() -> None:
    def interrupted(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        settings.run(interrupted)
    assert end.value.code == 130


@pytest.mark.parametrize("script", [finetune_long_document, sft, dpo, reward, grpo])
def test_help_names_the_file_of_settings(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.make_trainer(["--help"])
    assert "--config FILE" in capsys.readouterr().out.split("options:")[1]


@pytest.mark.full
@pytest.mark.slow
def test_the_sentence_is_told_once_and_in_the_report_of_the_launcher(tmp_path: Path) -> None:
    command = [sys.executable, *LAUNCH, "--main_process_port", "0", "recipes/finetune_long_document.py", "--config"]
    command += ["recipes/configs/text_cpu.yaml", "--output_dir", str(tmp_path), "--max_length", "262144"]
    command += ["--model_config", f"{{{LLAMA.replace('llama', REFUSED)}}}"]
    done = subprocess.run(command, cwd=ROOT, env=CPU, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert sum(line.startswith("xLSTMForCausalLM has no attention, and no recurrent layers") for line in lines) == 1
    report = done.stderr.split("Root Cause")[1]  # where the launcher ends
    assert "traceback : xLSTMForCausalLM has no attention, and no recurrent layers" in report
    assert 'recipes/finetune_long_document.py", line' not in done.stderr


def make_base(folder: Path, positions: int = 512) -> Path:
    """A small model with random weights, as one from the hub."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    tokens = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    config = LlamaConfig(**sizes, **heads, **tokens, max_position_embeddings=positions)
    LlamaForCausalLM(config).save_pretrained(folder)
    models.byte_tokenizer().save_pretrained(folder)
    return folder


RECIPES = dict.fromkeys(("text", "gemma4", "moe"), finetune_long_document)
RECIPES |= {"sft": sft, "dpo": dpo, "reward": reward, "grpo": grpo}


@pytest.mark.parametrize(
    "name", sorted(file.stem for kind in RECIPES for file in (ROOT / "recipes" / "configs").glob(f"{kind}_*.yaml"))
)
def test_every_file_of_settings_is_one(tmp_path: Path, name: str) -> None:
    """Its settings exist, and its comment names the files that it is launched with."""
    script, file = RECIPES[name.split("_")[0]], ROOT / "recipes" / "configs" / f"{name}.yaml"
    trainer = {dpo: trl.DPOConfig, reward: trl.RewardConfig, grpo: trl.GRPOConfig}.get(script, trl.SFTConfig)
    more = (grpo.Rewards,) if script is grpo else ()
    kinds = (settings.ModelSettings, settings.DataSettings, settings.BurstSettings, trainer, *more)
    machine = ["--use_cpu", "true", "--output_dir", str(tmp_path), "--dataset", "python_topics"]
    found = command_line.parse(["--config", str(file), *machine], kinds, script.DEFAULTS)
    model, documents, burst, arguments = found[:4]
    arguments.max_length = found[-1].max_length
    settings.prepare(arguments, model, documents, burst)
    comment = file.read_text().split("model_")[0]
    assert f"--config recipes/configs/{name}.yaml" in comment
    assert f"recipes/{Path(script.__file__).name}" in comment


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "2_processes", "2_hosts", "2_hosts_fsdp2"])
def test_accelerate_reads_its_files(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "recipes" / "configs" / f"accelerate_{name}.yaml"))
    assert config.num_processes >= 2
    assert (config.fsdp_config.get("fsdp_version") == 2) == name.endswith("fsdp2")
    assert (config.num_machines == 2) == name.startswith("2_hosts")


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (33, 0), (34, 1), (1000, 30)])
def test_a_share_of_warmup_is_rounded_down(recipe: Callable[..., Any], steps: int, warmup: int) -> None:
    """The only step of a short training has a learning rate."""
    trainer, _ = recipe("--learning_rate", "0.01")
    share = trainer.args.warmup_steps
    for _ in range(2):  # another schedule has its own
        trainer.create_optimizer_and_scheduler(steps)
        rates = [trainer.lr_scheduler.get_last_lr()[0]]
        for _ in range(warmup):
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
            rates.append(trainer.lr_scheduler.get_last_lr()[0])
        assert rates.index(0.01) == warmup
        assert trainer.args.warmup_steps == share
        trainer.lr_scheduler = None
    assert type(trainer).__name__ == "SFTTrainer"


def test_one_step_trains(recipe: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    epochs = ["--num_train_epochs", "1", "--max_steps", "-1"]
    trainer, burst = recipe(*epochs, "--gradient_accumulation_steps", "64", "--learning_rate", "0.01")
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    training.train(trainer, burst)
    assert any(not torch.equal(own, old) for own, old in zip(trainer.model.parameters(), before, strict=True))
    said = capsys.readouterr()
    line = "The whole training has 1 step of up to 64 batches each; gradient_accumulation_steps: 1 makes more"
    assert line in said.out + said.err


def test_a_folder_is_trained_in_once_at_a_time(recipe: Callable[..., Any], wrong: Sentence, tmp_path: Path) -> None:
    recipe()
    recipe()  # the same process may go on
    holder = [sys.executable, "-c", "import resuming, sys; resuming.hold(sys.argv[1]); print(1, flush=True); input()"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'recipes'}:{ROOT}"}
    (tmp_path / "other").mkdir()
    with subprocess.Popen(
        [*holder, "other"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "1\n"
        said = wrong("--output_dir", "other")
        assert said.startswith(f"Process {other.pid} of {platform.node()} trains in output_dir 'other'. Wait for it")
        other.kill()
    recipe("--output_dir", "other")


def test_one_process_takes_one_of_several_gpus(recipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the files for one GPU are launched. Trainer would copy the model to all of them, over which nothing runs."""
    monkeypatch.setattr(settings, "keep_time_limit", lambda training: setattr(training, "_n_gpu", 2))
    trainer, _ = recipe()
    assert trainer.args.n_gpu == 1
    assert not isinstance(trainer._wrap_model(trainer.model), torch.nn.DataParallel)


def test_defaults_suit_long_sequences(recipe: Callable[..., Any]) -> None:
    arguments = recipe()[0].args
    assert arguments.per_device_train_batch_size == arguments.per_device_eval_batch_size == 1
    assert 0 < arguments.warmup_steps < 1  # a share of all steps
    assert [arguments.get_warmup_steps(steps) for steps in (10, 1000)] == [1, 30]
    assert arguments.gradient_checkpointing  # has the same value in releases that have the newer name
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # two names of one setting
        if hasattr(arguments, name):
            assert not recipe(f"--{name}", "false")[0].args.gradient_checkpointing, name


@dataclass
class OlderArguments:
    """Those of Transformers before 5.23, which had one name for checkpoints of activations."""

    gradient_checkpointing: bool = True


@pytest.mark.parametrize(("value", "wanted"), [(None, True), ("true", True), ("false", False)])
def test_checkpointing_has_its_older_name_in_older_releases(tmp_path: Path, value: str | None, wanted: bool) -> None:
    (tmp_path / "settings.yaml").write_text(f"activation_checkpointing: {value}" if value else "{}")
    (arguments,) = command_line.parse(["--config", str(tmp_path / "settings.yaml")], (OlderArguments,), {})
    assert arguments.gradient_checkpointing == wanted


def test_prompts_and_rewards_that_cannot_be_used(wrong: Sentence) -> None:
    conversations.write(Path("prompts.jsonl"), [{"prompt": "How many? " * 9, "answer": "3"}, {"prompt": ""}])
    conversations.write(Path("answers.jsonl"), [{"prompt": "How many? ", "answer": "3"}])
    Path("rewards.py").write_text("def short(completions, **rest):\n    return [-len(each) for each in completions]\n")
    few = ("--max_completion_length", "9")
    of = partial(wrong, *few, "--dataset", "answers.jsonl", script=grpo)
    assert "has no column prompt" in wrong(*few, script=grpo)
    assert "prompts.jsonl:2: prompt is empty" in wrong(*few, "--dataset", "prompts.jsonl", script=grpo)
    assert "reward has 'short'; give 'answer'" in of("--reward", "short")
    assert "rewards.py has no function long" in of("--reward", "rewards.py:long")
    assert "max_completion_length is 600, and max_length 512" in of("--max_completion_length", "600")
    assert "1 of 1 rows have more than max_length (2)" in of("--max_completion_length", "510")
    assert "a prompt cannot be split" in of("--too_long", "split")
    for empty in (None, "", " "):
        conversations.write(
            Path("answers.jsonl"), [{"prompt": "Why?", "answer": "3"}, {"prompt": "Y?", "answer": empty}]
        )
        assert "an answer in every row, and 1 of 2 have none" in of()


def test_adapters_remember_the_revision_and_are_merged_elsewhere(
    recipe: Callable[..., Any], wrong: Sentence, tmp_path: Path
) -> None:
    options = ["--model_name_or_path", str(make_base(tmp_path / "base")), "--use_peft"]
    assert "precompute_ref_log_probs would" in wrong("--precompute_ref_log_probs", "true", script=dpo)
    assert "by which the head would not learn" in wrong(*options, "--lora_task_type", "CAUSAL_LM", script=reward)
    assert "merge_to is './out', where an adapter is; set another folder" in wrong(*options, "--merge_to", "./out")
    assert "where the base of the adapter is" in wrong(*options, "--merge_to", f"{tmp_path}/x/../base")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    assert "an adapter. Merge it first" in wrong("--model_name_or_path", str(tmp_path / "adapter"))
    assert "merge_to '/proc/x' cannot be used" in wrong(*options, "--merge_to", "/proc/x")
    trainer, _ = recipe(*options, "--model_revision", "v2")
    assert trainer.model.peft_config["default"].revision == "v2"


@pytest.mark.parametrize("rope", [pytest.param({}, marks=pytest.mark.full), {"rope_type": "yarn", "factor": 4.0}])
def test_an_adapter_keeps_the_rope_that_it_was_trained_with(
    recipe: Callable[..., Any], tmp_path: Path, rope: dict[str, Any]
) -> None:
    """The merged model equals the one that was trained; nothing loads the adapter with the RoPE of the base."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    base = make_base(tmp_path / "base")
    options = ["--model_name_or_path", str(base), "--use_peft", "--rope_scaling", json.dumps(rope)]
    options += ["--merge_to", "merged", "--learning_rate", "0.1", "--save_strategy", "steps", "--save_steps", "1"]
    Path("out").mkdir()
    Path("out/config.json").write_text("{}")  # of an earlier run
    trainer, burst = recipe(*options, "--max_steps", "2", "--warmup_steps", "0")
    ids = torch.arange(4, 255)[None]
    training.train(trainer, burst)
    with torch.no_grad():
        trained = trainer.model.eval()(ids).logits
        merged = AutoModelForCausalLM.from_pretrained("merged")
        torch.testing.assert_close(merged(ids).logits, trained, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(models.load_adapter("out")(ids).logits, trained, rtol=1e-4, atol=1e-4)
        if rope:
            for folder in ("out", "out/checkpoint-1", "merged"):
                config = AutoConfig.from_pretrained(folder)
                assert rope.items() <= config.rope_parameters.items()
                assert config.max_position_embeddings == 2048
            with pytest.raises(OSError, match=r"model\.safetensors"):  # not the base with its own RoPE
                AutoModelForCausalLM.from_pretrained("out")
        else:
            plain = AutoModelForCausalLM.from_pretrained("out")
            torch.testing.assert_close(plain(ids).logits, trained, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adapted", ["embed_tokens", "lm_head", "embed_tokens lm_head"])
def test_an_adapter_of_tied_layers_is_merged_into_its_own(tmp_path: Path, adapted: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(models.byte_tokenizer()), tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    models.byte_tokenizer().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trained = get_peft_model(base, LoraConfig(target_modules=adapted.split(), init_lora_weights=False)).eval()
    trained.save_pretrained(tmp_path / "adapter")
    models.merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), torch.arange(3, 40)[None]
    torch.testing.assert_close(merged(ids).logits, trained(ids).logits)


@pytest.mark.slow
def test_a_checkpoint_is_merged_by_the_script(
    recipe: Callable[..., Any],
    sentence: Sentence,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM

    base = make_base(tmp_path / "base")
    assert "holds no adapter_config.json" in sentence(merge_adapter.main, str(base), "merged")
    saving = ["--use_peft", "--save_strategy", "steps", "--save_steps", "1"]
    training.train(*recipe("--model_name_or_path", str(base), *saving))
    assert "to is 'out', where an adapter is" in sentence(merge_adapter.main, "out/checkpoint-1", "out")
    assert "where the base of the adapter is" in sentence(merge_adapter.main, "out/checkpoint-1", "base")
    for file in Path("out/checkpoint-1").glob("tokenizer*"):
        file.unlink()  # the base has one
    monkeypatch.setattr(sys, "argv", ["merge_adapter.py", "out/checkpoint-1", "merged", "--dtype", "bfloat16"])
    merge_adapter.main()
    assert "replaces it" not in capsys.readouterr().out
    merge_adapter.main()
    assert "to 'merged' holds a full model; the merged one replaces it." in capsys.readouterr().out
    assert json.loads(Path("merged/config.json").read_text())["dtype"] == "bfloat16"
    assert "hf_burst" not in Path("merged/config.json").read_text()
    for folder in (base, "merged"):
        assert AutoModelForCausalLM.from_pretrained(folder)(torch.arange(3, 203)[None]).logits.isfinite().all()
    assert Path("merged/tokenizer.json").exists()


def test_an_adapter_that_peft_refuses_is_not_merged(
    sentence: Sentence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = str(make_base(tmp_path / "base"))
    Path("adapter").mkdir()
    values = {"base_model_name_or_path": base, "peft_type": "LORA", "r": "a"}
    Path("adapter/adapter_config.json").write_text(json.dumps(values))
    assert "adapter adapter cannot be used: '<=' not" in sentence(merge_adapter.main, "adapter", "merged")


def test_training_goes_on_from_the_latest_checkpoint(
    recipe: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--save_strategy", "steps", "--save_steps", "2", "--learning_rate", "0.01", "--lr_scheduler_type"]
    options += ["constant", "--max_length", "128"]
    whole, _ = recipe(*options, "--max_steps", "4", "--output_dir", "whole")
    training.train(whole, settings.BurstSettings())
    training.train(*recipe(*options, "--max_steps", "2"))
    resumed, _ = recipe(*options, "--max_steps", "4", "--resume_from_checkpoint", "true")
    assert resumed.args.resume_from_checkpoint == str(Path("out/checkpoint-2"))
    training.train(resumed, settings.BurstSettings())
    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (whole, resumed)]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    Path("out/model.safetensors").unlink()  # as if it was killed while its end was written
    finished, _ = recipe(*options, "--max_steps", "4")  # the same command goes on
    assert finished.args.resume_from_checkpoint == str(Path("out/checkpoint-4"))
    training.train(finished, settings.BurstSettings())
    assert "4 steps are done, and max_steps is 4: nothing is trained" in caplog.text
    ends = [Path(folder, "model.safetensors").read_bytes() for folder in ("out", "out/checkpoint-4")]
    assert ends[0] == ends[1]


def test_another_training_does_not_go_on(recipe: Callable[..., Any], wrong: Sentence) -> None:
    options = ["--save_strategy", "steps", "--save_steps", "1", "--max_length", "128", "--max_steps", "1"]
    training.train(*recipe(*options))
    assert recipe(*options, "--max_steps", "2")[0].args.resume_from_checkpoint == str(Path("out/checkpoint-1"))
    assert recipe(*options, "--resume_from_checkpoint", "false")[0].args.resume_from_checkpoint is None
    others = [*options, "--seed", "7"]
    said = wrong(*others)
    assert "checkpoint-1 was trained with seed 42, and it is 7 now. Set another output_dir" in said
    assert recipe(*others, "--resume_from_checkpoint", "true")[0].args.resume_from_checkpoint is not None
    Path("long.txt").write_text("Others. " * 200)
    assert "checkpoint-1 was trained with dataset ['long.txt (" in wrong(*options)
    Path("long.txt").write_text("A document. " * 200)
    state = Path("out/checkpoint-1/trainer_state.json")
    kept = json.loads(state.read_text())
    del kept["stateful_callbacks"]["BurstResume"]
    state.write_text(json.dumps(kept))
    assert "checkpoint-1 does not tell by which settings it was trained. Set another" in wrong(*options)
    weights = Path("out/checkpoint-1/model.safetensors")
    weights.rename("aside")
    told = "'out' holds no whole checkpoint, though checkpoint-1 was written to its end. Set another output_dir"
    assert told in wrong(*options)
    assert recipe(*options, "--resume_from_checkpoint", "false")[0].args.resume_from_checkpoint is None
    Path("aside").rename(weights)
    state.unlink()
    told = "checkpoint-1' is not whole: trainer_state.json is missing"
    assert told in wrong(*others, "--resume_from_checkpoint", "out/checkpoint-1")


def test_a_training_begins_anew_if_its_first_checkpoint_was_cut_off(
    recipe: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights are those of an undisturbed run. Other files stay, and so does a checkpoint of a higher number."""
    options = ["--save_strategy", "steps", "--max_length", "128", "--max_steps", "2", "--save_steps"]
    training.train(*recipe(*options, "1"))
    wanted = Path("out/model.safetensors").read_bytes()
    for name in ("checkpoint-1", "model.safetensors"):
        Path("out", name).rename(Path("out", name).with_suffix(".aside"))
    Path("out/checkpoint-2/trainer_state.json").write_text('{"epoch"')
    Path("out/notes.txt").write_text("of the user")
    training.train(*recipe(*options, "5"))
    said = f"begins anew: {Path('out/checkpoint-2')} was cut off, and out holds no whole checkpoint\n"
    assert capsys.readouterr().out.count(said) == 1
    assert Path("out/model.safetensors").read_bytes() == wanted
    assert Path("out/notes.txt").exists()
    assert Path("out/checkpoint-1.aside/trainer_state.json").exists()


OF_ANOTHER = {
    "beta": 0.5,
    "loss_type": ["ipo"],
    "label_smoothing": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 100,
    "adam_beta2": 0.95,
    "max_grad_norm": 5.0,
    "bf16": True,
    "eos_token": "x",
    "completion_only_loss": True,
    "neftune_noise_alpha": 5.0,
    "lora_r": 3,
    "eval_share": 0.5,
    "num_train_epochs": 7,
    "save_steps": 9,
    "eval_steps": 9,
    "per_device_train_batch_size": 9,
    "gradient_accumulation_steps": 9,
    "logging_steps": 9,
    "activation_checkpointing": False,
    "hub_model_id": "x",
    "ddp_timeout": 9,
    "bnb_4bit_quant_storage": "uint8",
    "eval_split": "test",
}


@pytest.mark.parametrize("name", OF_ANOTHER)
def test_settings_that_make_another_experiment(name: str, tmp_path: Path) -> None:
    """Steps, batches, saving, logging, evaluation and hardware do not; of batches BurstResume knows more."""
    folder, own = str(tmp_path), {name: OF_ANOTHER[name]}
    made = []
    for values in ({}, own):
        model, documents, training = settings.ModelSettings(), settings.DataSettings(["python_topics"]), None
        for one in (model, documents):
            one.__dict__.update({key: value for key, value in values.items() if hasattr(one, key)})
        kind = trl.SFTConfig if name in ("completion_only_loss", "eos_token") else trl.DPOConfig
        training = kind(folder, use_cpu=True, bf16=False, report_to="none")
        training.__dict__.update({key: value for key, value in values.items() if hasattr(training, key)})
        assert not values or any(hasattr(one, name) for one in (model, documents, training))
        made.append(resuming.settings_of(training, {**asdict(model), **asdict(documents)}))
    free = list(OF_ANOTHER).index(name) >= list(OF_ANOTHER).index("num_train_epochs")
    assert (made[0] == made[1]) is free


def test_other_rewards_make_another_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names count, and what their files hold."""
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text("def short(completions, **rest):\n    return [-len(each) for each in completions]\n")
    training = trl.GRPOConfig("out", use_cpu=True, bf16=False, report_to="none")
    chosen = {"dataset": ["python_topics"]}
    of = [
        resuming.settings_of(training, {**chosen, "reward": ["answer", *more]}) for more in ([], ["rewards.py:short"])
    ]
    Path("rewards.py").write_text(Path("rewards.py").read_text().replace("-", ""))
    of.append(resuming.settings_of(training, {**chosen, "reward": ["answer", "rewards.py:short"]}))
    assert [one["reward"] for one in of[:1]] == [["answer"]]
    assert len({str(one["reward"]) for one in of}) == 3


def test_the_same_data_in_other_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spellings of a path do not count, nor times; a changed byte does, also in the middle of a large file."""
    (tmp_path / "rows/more").mkdir(parents=True)
    (tmp_path / "rows/more/a.txt").write_text("a" * 5000)
    (tmp_path / "rows/b.jsonl").write_text("{}")
    shutil.copytree(tmp_path / "rows", tmp_path / "elsewhere/rows")
    monkeypatch.chdir(tmp_path)
    names = ["rows", "./rows", str(tmp_path / "rows"), "row*", "elsewhere/rows"]
    found = [list(resuming.contents(name)) for name in names]
    assert all(one == found[0] for one in found)
    assert list(resuming.contents("organization/dataset")) == ["organization/dataset"]
    Path("rows/more/a.txt").write_text("a" * 2500 + "b" + "a" * 2499)
    assert list(resuming.contents("rows")) != found[0]


def test_an_adapter_and_a_full_model_do_not_share_a_folder(wrong: Sentence, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    assert "holds a full model of another run" in wrong(
        "--model_name_or_path", str(base), "--use_peft", "--output_dir", str(base)
    )
    Path("out").mkdir()
    Path("out/adapter_config.json").touch()
    assert "holds an adapter of another run" in wrong()


def test_that_a_model_is_replaced_is_said(recipe: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    conversations.chats(Path("chats.jsonl"), conversations.facts(8), count=4, turns=2)
    for held in (False, True):
        recipe("--dataset", "chats.jsonl", "--output_dir", "trained", script=sft)
        assert ("holds a full model that was trained before" in capsys.readouterr().out) is held
        Path("trained").mkdir(exist_ok=True)
        Path("trained/model.safetensors").touch()


def test_an_evaluation_set_is_drawn_and_evaluated(
    recipe: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """On the screen is one line for each log, of training steps and of evaluations."""
    conversations.chats(Path("chats.jsonl"), conversations.facts(8), count=10, turns=2)
    trainer, burst = recipe("--dataset", "chats.jsonl", "--eval_share", "0.2", "--packing", "false", script=sft)
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (8, 2)
    capsys.readouterr()
    training.train(trainer, burst)
    said = capsys.readouterr()
    starts = (
        "1 rank in",
        "kernels: ",
        "step 1 of 1,",
        "the model is in out; now it is evaluated on 2 rows",
        "step 1: evaluation loss ",
        "loss ",
        "next",
    )
    lines = said.out.splitlines()
    assert len(lines) == len(starts), said.out
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), said.out
    assert "{'loss'" not in said.err
    log = json.loads(Path("out/training_log.json").read_text())
    assert log["evaluations"][-1]["eval_loss"] > 0


def test_a_long_evaluation_says_how_long_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line a minute, from batches of 45 seconds, of one process, and none of the last batch; a second evaluation
    begins anew."""
    clock = iter(range(0, 10**6, 45))
    monkeypatch.setattr(report, "perf_counter", lambda: float(next(clock)))
    said, others = report.Evaluations(), report.Evaluations(every=0)
    for _ in range(2):
        for _ in range(7):
            said.on_prediction_step(None, Mock(is_world_process_zero=True), None, eval_dataloader=[0] * 7)
            others.on_prediction_step(None, Mock(is_world_process_zero=False), None, eval_dataloader=[0] * 7)
    steps = [line.removeprefix("evaluation: batch ") for line in capsys.readouterr().out.splitlines()]
    assert steps == ["3 of 7, 0:03:00 left", "5 of 7, 0:01:30 left"] * 2


@pytest.mark.parametrize(
    ("steps", "strategy", "every", "told"),
    [
        (5, "steps", "20", "5 steps, and save_steps is 20: it is saved at its end alone, and save_steps: 2 saves"),
        (2, "steps", "2", "2 steps, and save_steps is 2: it is saved at its end alone, and save_steps: 1 saves"),
        (2, "steps", "0.9", "2 steps, and save_steps is 2: it is saved at its end alone, and save_steps: 1 saves"),
        (2, "steps", "0.5", ""),
        (2, "no", "20", ""),
        (1, "steps", "20", ""),
    ],
)
def test_a_training_that_is_saved_at_its_end_alone_says_so(
    capsys: pytest.CaptureFixture[str], steps: int, strategy: str, every: str, told: str
) -> None:
    args = transformers.TrainingArguments("out", save_strategy=strategy, save_steps=float(every), max_steps=steps)
    state = transformers.TrainerState(max_steps=steps)
    state.compute_steps(args, steps)
    report.FewSteps().on_train_begin(args, state, None)
    said = capsys.readouterr().out
    assert told in said
    assert bool(told) == ("saves on the way" in said)
    state.global_step = steps  # a training that is done goes no further
    report.FewSteps().on_train_begin(args, state, None)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("during", [[], ["--eval_strategy", "steps", "--eval_steps", "1"]])
def test_evaluations_are_made_once_and_kept_if_no_step_was_logged(
    recipe: Callable[..., Any], capsys: pytest.CaptureFixture[str], during: list[str]
) -> None:
    training.train(*recipe("--eval_share", "0.2", "--logging_steps", "5", *during))
    log = json.loads(Path("out/training_log.json").read_text())
    assert (len(log["evaluations"]), log["steps"]) == (1, [])
    last = log["evaluations"][0]["eval_loss"]
    assert f"no step was logged (logging_steps is 5); evaluation loss {last:.3f}\n" in capsys.readouterr().out


def test_what_is_held_out_is_compared_with_the_beginning(
    recipe: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    during = ["--eval_on_start", "true", "--eval_strategy", "steps", "--eval_steps", "1", "--max_steps", "3"]
    training.train(*recipe("--eval_share", "0.2", *during, "--learning_rate", "0.01"))
    losses = [entry["eval_loss"] for entry in json.loads(Path("out/training_log.json").read_text())["evaluations"]]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert f"; evaluation loss {losses[0]:.3f} -> {losses[-1]:.3f}; " in capsys.readouterr().out


def test_a_model_is_saved_before_its_evaluation(recipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the config that it was loaded with; that of the training stays for the evaluation."""
    trainer, burst = recipe("--eval_share", "0.2")
    monkeypatch.setattr(trainer, "evaluate", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        training.train(trainer, burst)
    assert Path("out/model.safetensors").exists()
    assert json.loads(Path("out/config.json").read_text())["use_cache"] is True
    assert trainer.model.config.use_cache is False


def test_the_last_line_has_means_of_the_first_and_last_tenth(
    recipe: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A single batch tells little. Steps that are logged together are counted as many."""
    trainer, _ = recipe()
    trainer.state.log_history = [{"step": 2 * step, "loss": 40.0 - step} for step in range(1, 21)]
    report.write_log(trainer)
    assert "loss 38.500 -> 20.500, means of the first and last 4 of 40 steps; checkpoint" in capsys.readouterr().out
    for entry in trainer.state.log_history:
        entry["accuracy"] = entry["step"] / 80
    report.write_log(trainer)
    assert "of 40 steps; the preferred answer is ahead in 4% -> 49% of pairs; ch" in capsys.readouterr().out
    trainer.state.log_history = trainer.state.log_history[:1]
    report.write_log(trainer)
    assert "loss 39.000, the mean of 2 steps; the preferred answer is ahead in 2% of pairs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
        pytest.param(OSError(errno.ENOSPC, "No space left on device"), marks=pytest.mark.full),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named(recipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """On the rank that saves, by the words that the others are told, too."""
    trainer, burst = recipe("--save_steps", "1", "--max_steps", "2")
    monkeypatch.setattr(torch, "save", Mock(side_effect=error))
    monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=Mock(free=0)))
    Path("out/checkpoint-0/state").mkdir(parents=True)
    Path("out/checkpoint-0/state/optimizer.pt").write_bytes(bytes(2**25))
    with pytest.raises(BurstError) as end:
        training.train(trainer, burst)
    told = "Rank 0 cannot save: the disk of 'out', or a quota there, is full: 0.00 GiB are free, and the largest "
    assert str(end.value).startswith(f"{told}checkpoint there has 0.03 GiB. Free some (")


def test_other_errors_than_a_full_disk_stay(recipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, burst = recipe("--save_steps", "1")
    monkeypatch.setattr(torch, "save", Mock(side_effect=RuntimeError("unexpected pos 64 vs 0")))
    monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=Mock(free=2**40)))
    with pytest.raises(RuntimeError, match="unexpected pos"):
        training.train(trainer, burst)


@pytest.mark.parametrize("end", ["", "; raise ValueError", "; raise SystemExit('a sentence')"])
def test_a_training_leaves_no_lock(tmp_path: Path, end: str) -> None:
    holder = f"import os, resuming; resuming.hold('.'); assert os.path.exists('_training.lock'); os.chdir('/'){end}"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'recipes'}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", holder], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == (not end), done.stderr
    assert "Assertion" not in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_lock_that_was_removed_meanwhile_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the run that had it ends between the opening and the locking."""
    lock, real = tmp_path / "_training.lock", resuming.fcntl.lockf

    def removed(*given: Any) -> None:
        monkeypatch.setattr(resuming.fcntl, "lockf", real)
        lock.unlink()

    monkeypatch.setattr(resuming.fcntl, "lockf", removed)
    assert resuming.hold(str(tmp_path)) is None
    assert lock.read_text().startswith(f"Process {os.getpid()} of")


def test_a_card_names_the_base(recipe: Callable[..., Any], tmp_path: Path) -> None:
    trainer, burst = recipe("--save_steps", "1", "--max_steps", "1")
    training.train(trainer, burst)
    card = Path("out/README.md").read_text()
    assert "a fine-tuned version of a llama with random weights, made from a config.\n" in card
    make_base(tmp_path / "bases" / "small")
    named = ["--model_name_or_path", "bases/small", "--output_dir", "tuned", "--save_steps", "1", "--max_steps", "1"]
    trainer, burst = recipe(*named)
    training.train(trainer, burst)
    assert "a fine-tuned version of `small`.\n" in Path("tuned/README.md").read_text()
    cached = models.base_in_words
    path = "/home/me/.cache/huggingface/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/93efa2f"
    assert cached(Mock(_name_or_path=path)) == "`HuggingFaceTB/SmolLM2-135M`"


@pytest.mark.parametrize("name", ["length", "num_keys", "num_questions", "batch_size", "eval_every"])
def test_recall_needs_numbers_above_0(sentence: Sentence, name: str) -> None:
    assert f"--{name} is 0; it must be at least 1" in sentence(recall_across_shards.parse_args, f"--{name}", "0")


def test_recall_finds_out_at_once_where_it_cannot_write(sentence: Sentence, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = ["--output_dir", str(tmp_path / "file")]
    assert "--output_dir must be a folder" in sentence(recall_across_shards.parse_args, *options)


def test_another_model_comes_with_its_tokenizer(tmp_path: Path) -> None:
    """A config file names a model and a tokenizer; the command line another model, and maybe a tokenizer."""
    (tmp_path / "own.yaml").write_text("{model_config: {model_type: llama}, tokenizer: bytes}")
    base = str(make_base(tmp_path / "base"))
    for more, tokenizer in (([], None), (["--tokenizer", "other"], "other")):
        words = ["--config", str(tmp_path / "own.yaml"), "--model_name_or_path", base, *more]
        (model,) = command_line.parse(words, (settings.ModelSettings,), {})
        assert (model.model_name_or_path, model.tokenizer) == (base, tokenizer)


def test_a_variable_that_is_overruled_is_told(
    recipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the script for SLURM, which sets it."""
    told = "burst_size is 1, which overrules HF_BURST_SIZE=8. Pass --burst_size 8 for that."
    monkeypatch.setenv("HF_BURST_SIZE", "8")
    recipe("--burst_size", "1")
    assert told in capsys.readouterr().err
    monkeypatch.setenv("HF_BURST_SIZE", "1")
    assert settings.overruled(1) is settings.overruled(None) is None


def test_groups_must_divide_what_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.check_groups(3)  # nothing was launched
    monkeypatch.setenv("WORLD_SIZE", "4")
    settings.check_groups(2)
    with pytest.raises(SystemExit, match="burst_size is 3, which does not divide the processes that were launched: 4"):
        settings.check_groups(3)
    settings.check_groups(None)
    monkeypatch.setenv("HF_BURST_SIZE", "3")
    with pytest.raises(SystemExit, match=r"HF_BURST_SIZE is 3, which does not divide .* launched: 4\. Set it to 2\."):
        settings.check_groups(None)
    settings.check_groups(2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=r"Pass --burst_size 2\."):
        settings.check_groups(4)


@pytest.mark.parametrize("library", ["matplotlib", "trl", "peft"])
@pytest.mark.parametrize("script", ["settings", "merge_adapter"])
def test_a_library_of_the_recipes_is_missing(library: str, script: str) -> None:
    paths = os.pathsep.join([str(ROOT / "recipes"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", f"import sys; sys.modules[{library!r}] = None; import {script}"]
    environment = {**CPU, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == f'The recipes need {library}: pip install ".[recipes]" in a clone.'


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ask", "merge_adapter"])
def test_recipes_that_draw_nothing_need_no_matplotlib(script: str) -> None:
    paths = os.pathsep.join([str(ROOT / "recipes"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    begin = f"import sys; sys.modules['matplotlib'] = None; sys.argv = ['{script}.py']; import {script}"
    environment = {**CPU, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", begin], env=environment, timeout=100, check=True)


def test_bitsandbytes_does_not_warn_on_every_rank() -> None:
    assert not logging.getLogger("bitsandbytes").isEnabledFor(logging.WARNING)


def test_chats_are_not_cut_as_text(wrong: Sentence, tmp_path: Path) -> None:
    chats = conversations.chats(tmp_path / "chats.jsonl", conversations.facts(9), count=3, turns=2)
    told = wrong("--dataset", str(chats), "--max_length", "64")
    assert "has the columns messages, and this recipe trains on text, which it may cut" in told
    assert "recipes/sft.py" in told


def test_processes_on_cpus_follow_the_variable_of_accelerate() -> None:
    """Which is read when the module is imported."""
    source = "import settings; print(settings.DEFAULTS['use_cpu'])"
    for value, expected in (("1", "True"), ("", "False")):
        paths = os.pathsep.join([str(ROOT / "recipes"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**CPU, "ACCELERATE_USE_CPU": value, "PYTHONPATH": paths}
        command = [sys.executable, "-c", source]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
        assert done.stdout.split()[-1] == expected
