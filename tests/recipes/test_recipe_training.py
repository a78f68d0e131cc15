"""What the recipes train: losses over several ranks equal those of one process, and a merged adapter has learned."""

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("trl")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))  # where the recipes find their modules
import command_line  # noqa: E402
import models  # noqa: E402
import settings  # noqa: E402
import training  # noqa: E402
from accelerate import Accelerator  # noqa: E402

import hf_burst  # noqa: E402
import tests.support.models  # noqa: E402
from hf_burst.hf.groups import PATCH  # noqa: E402
from hf_burst.hf.parts.memory import MemoryRule  # noqa: E402
from recipes import recall_across_shards  # noqa: E402
from tests.support import conversations  # noqa: E402
from tests.support.ranks import RankPool, reset_accelerate  # noqa: E402

Ranks = Callable[[int], RankPool]
FACTS = 12
COMMON = ["--use_cpu", "true", "--bf16", "false", "--disable_tqdm", "true", "--gradient_checkpointing", "false"]
LORA = ["--use_peft", "--lora_r", "16", "--lora_alpha", "32"]
WAYS = {
    "full": [],
    "lora": LORA,
    "qlora": [*LORA, "--load_in_4bit"],
    "experts": [*LORA, "--load_in_4bit", "--quantize_experts", "true"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with random weights, of which one has a head sure enough for adapters to teach, and rows of every kind."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("recipes")
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    tokens = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens, max_position_embeddings=2048))
    for base in ("base", "sure"):
        model.save_pretrained(folder / base)
        models.byte_tokenizer().save_pretrained(folder / base)
        with torch.no_grad():
            model.lm_head.weight.mul_(10)
    routed = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **tokens, **routed)).save_pretrained(folder / "experts")
    models.byte_tokenizer().save_pretrained(folder / "experts")
    known = conversations.facts(FACTS)
    conversations.chats(folder / "chats.jsonl", known, count=100)
    conversations.trajectories(folder / "trajectories.jsonl", known, count=12)
    conversations.pairs(folder / "pairs.jsonl", known, count=12)
    questions = [{"prompt": f"The number is {number}. Which is it? " * 3, "answer": "e"} for number in range(12)]
    conversations.write(folder / "questions.jsonl", questions)
    conversations.write(folder / "text.jsonl", [{"text": "Some words, and others. " * 20}] * 6)
    return folder


def options(files: Path, rows: str, way: str, **more: Any) -> list[str]:
    base = files / ("experts" if way == "experts" else "base")
    named = {"model_name_or_path": base, "dataset": files / f"{rows}.jsonl", "save_strategy": "no"}
    numbers = {"max_steps": 4, "max_length": 1700, "learning_rate": 0.01, "warmup_steps": 0, "weight_decay": 0.0}
    values = {**named, **numbers, **more}
    return [*COMMON, *WAYS[way], *(word for name, value in values.items() for word in (f"--{name}", str(value)))]


def train(rank: int, size: int, script: str, arguments: list[str], output: str) -> dict[str, list[float]]:
    """Losses and gradient norms of a recipe."""
    reset_accelerate()
    folder = f"{output}_{size}"
    trainer, _ = import_module(script).make_trainer([*arguments, "--output_dir", folder])
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # TRL holds adapters of quantized models in bf16, which rounds their updates
            parameter.data = parameter.data.float()
    trainer.train()
    trainer.save_model()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {name: [entry[name] for entry in steps] for name in ("loss", "grad_norm", "num_tokens")}


CASES = [  # script, rows, what is trained, ranks, ranks of a group
    pytest.param("sft", "chats", "full", 4, 2, marks=pytest.mark.full),
    pytest.param("sft", "trajectories", "lora", 2, 2, marks=pytest.mark.full),
    pytest.param("sft", "chats", "qlora", 2, 2, marks=pytest.mark.slow),
    pytest.param("sft", "chats", "experts", 2, 2, marks=pytest.mark.slow),
    pytest.param("dpo", "pairs", "lora", 2, 2),
    pytest.param("reward", "pairs", "lora", 4, 2, marks=pytest.mark.slow),
    pytest.param("grpo", "questions", "lora", 2, 2, marks=pytest.mark.slow),
    pytest.param("sft", "chats", "full", 2, 2, marks=pytest.mark.full),
    pytest.param("sft", "trajectories", "lora", 4, 2, marks=pytest.mark.full),
    pytest.param("sft", "trajectories", "qlora", 4, 2, marks=pytest.mark.full),
    pytest.param("dpo", "pairs", "full", 4, 2, marks=pytest.mark.full),
    pytest.param("reward", "pairs", "full", 2, 2, marks=pytest.mark.full),
    pytest.param("reward", "pairs", "qlora", 2, 2, marks=pytest.mark.full),
    pytest.param("finetune_long_document", "text", "full", 4, 2, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("script", "rows", "way", "size", "shared"), CASES)
def test_losses_are_those_of_one_process(
    ranks: Ranks, files: Path, tmp_path: Path, script: str, rows: str, way: str, size: int, shared: int
) -> None:
    if way in ("qlora", "experts") and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    given = options(files, rows, way, learning_rate=0.001 if rows == "pairs" else 0.01)
    if script == "grpo":
        given += ["--num_generations", "4", "--per_device_train_batch_size", "4", "--max_completion_length", "9"]
    split = ["--burst_size", str(shared)]
    together = ["--gradient_accumulation_steps", str(size // shared)]  # the rows that the groups take
    output = str(tmp_path / "out")
    wanted = train(0, 1, script, [*given, *together], output)
    assert len(wanted["loss"]) == 4
    assert rows in ("pairs", "questions") or wanted["loss"][-1] < wanted["loss"][0] - 0.1
    for run in ranks(size).run(train, script, [*given, *split], output):
        assert run["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert run["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert run["num_tokens"] == wanted["num_tokens"]


def test_what_generates_reports_its_reward(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reset_accelerate()
    given = [*options(files, "questions", "lora", max_steps=2), "--output_dir", str(tmp_path / "out")]
    given += ["--num_generations", "4", "--per_device_train_batch_size", "4", "--max_completion_length", "9"]
    trainer, _ = import_module("grpo").make_trainer(given)
    trainer.train()
    import_module("report").write_log(trainer)
    first, last = (entry["reward"] for entry in trainer.state.log_history if "reward" in entry)
    said = f"reward {first:.3f} -> {last:.3f}, means of the first and last 1 of 2 steps"
    assert f"{said}; checkpoint, reward.png and log are in {tmp_path / 'out'}" in capsys.readouterr().out
    assert (tmp_path / "out/reward.png").read_bytes().startswith(b"\x89PNG")


def test_adapters_answer_outside_of_autocast(files: Path, tmp_path: Path) -> None:
    """As in the settings for GPUs: fp32 adapters beside a base of bf16. TRL generates outside of autocast, where they
    take their inputs to fp32; under it they keep inputs of bf16."""
    reset_accelerate()
    more = {"max_steps": 1, "eval_share": 0.3, "dtype": "bfloat16", "bf16": "true", "output_dir": tmp_path / "out"}
    given = [*options(files, "questions", "lora", **more), "--gradient_checkpointing", "true"]
    given += ["--num_generations", "4", "--per_device_train_batch_size", "4", "--max_completion_length", "9"]
    trainer, burst = import_module("grpo").make_trainer(given)
    seen = set()

    def note(adapter: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.add((torch.is_autocast_enabled("cpu"), adapter.weight.dtype, inputs[0].dtype))

    adapters = [module for path, module in trainer.model.named_modules() if path.endswith(".lora_A.default")]
    for adapter in adapters:
        adapter.register_forward_pre_hook(note)
    import_module("training").train(trainer, burst)
    assert seen == {(False, torch.float32, torch.float32), (True, torch.float32, torch.bfloat16)}


def test_a_merged_reward_model_gives_the_same_rewards(files: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    reset_accelerate()
    given = [*options(files, "pairs", "lora"), "--output_dir", str(tmp_path / "out")]
    trainer, burst = import_module("reward").make_trainer([*given, "--merge_to", str(tmp_path / "merged")])
    ids = torch.arange(3, 203)[None]

    def rewards(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=ids).logits

    before = rewards(trainer.model)
    import_module("training").train(trainer, burst)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.pad_token_id == trainer.processing_class.pad_token_id
    assert (rewards(merged) - before).abs() > 0.01, "it has learned"
    torch.testing.assert_close(rewards(merged), rewards(trainer.model), rtol=1e-4, atol=1e-4)


def test_adapters_are_saved_without_a_scaled_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a trainer that nothing was attached to; the config of an earlier run goes."""

    class Kind:
        args, model = SimpleNamespace(should_save=True, output_dir=str(tmp_path)), None

        def _save(self, *_: Any) -> None: ...

    monkeypatch.setattr("accelerate.utils.is_peft_model", lambda _: True)
    (tmp_path / "config.json").write_text("{}")
    training.as_in_recipes(Kind)()._save()
    assert not [*tmp_path.iterdir()]


def test_questions_on_a_document_are_a_sample(
    ranks: Ranks, files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Documents computed once by two ranks, beside one process that computes every row."""
    documents = [f"Number {number}: " + "some words, and others. " * 14 for number in range(2)]
    rows = [
        {"prompt": f"{document} What is {question}? ", "completion": f"It is {question * place}."}
        for place, document in enumerate(documents)
        for question in range(5)
    ]
    conversations.write(tmp_path / "questions.jsonl", rows)
    given = [*options(files, "chats", "full", dataset=tmp_path / "questions.jsonl"), "--group_rows", "3"]
    wanted = train(0, 1, "sft", [*given, "--burst", "{share_prefixes: false}"], str(tmp_path / "out"))
    assert "10 rows are 4 samples of up to 3 that begin alike." in capfd.readouterr().out
    for run in ranks(2).run(train, "sft", [*given, "--burst", "{share_prefixes: true}"], str(tmp_path / "out")):
        assert run["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert run["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert run["num_tokens"] == wanted["num_tokens"]


HYBRIDS = [("finetune_long_document", "text_hybrid", "text"), ("sft", "sft_hybrid", "chats")]  # script, file, rows


@pytest.mark.parametrize(("script", "name", "rows"), [HYBRIDS[0], pytest.param(*HYBRIDS[1], marks=pytest.mark.full)])
def test_hybrids_by_their_settings(
    ranks: Ranks, files: Path, tmp_path: Path, script: str, name: str, rows: str
) -> None:
    """The settings for CPUs, shorter: states pass through packed rows, and the losses are those of one process."""
    given = ["--config", str(ROOT / f"recipes/configs/{name}_cpu.yaml"), "--dataset", str(files / f"{rows}.jsonl")]
    given += [*COMMON[-4:], "--max_steps", "2", "--max_length", "700", "--logging_steps", "1", "--warmup_steps", "0"]
    wanted = train(0, 1, script, given, str(tmp_path / "out"))
    for run in ranks(2).run(train, script, given, str(tmp_path / "out")):
        assert run["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert run["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)


def tiny(name: str) -> tuple[settings.ModelSettings, torch.nn.Module]:
    """The settings of a hybrid for GPUs, and the small model of those for CPUs."""
    kinds = (settings.ModelSettings, settings.BurstSettings)
    folder = ROOT / "recipes/configs"
    big, small = (
        command_line.read(["--config", str(folder / f"{name}_{machine}.yaml")], kinds, {}, alone=False)
        for machine in ("4gpu", "cpu")
    )
    return big[0], models.load_model(small[0], models.load_config(small[0], 260), small[1], 0)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize(("storage", "moved"), [(None, []), ("uint8", []), ("bfloat16", ["cpu"])])
def test_weights_that_fsdp2_shards_wait_on_the_host(
    storage: str | None, moved: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are not sharded, and stay where they are."""
    model = tests.support.models.make_model("llama")
    model.save_pretrained(tmp_path)
    told = {"load_in_4bit": True, "use_peft": True, "dtype": "bfloat16", "bnb_4bit_quant_storage": storage}
    named = settings.ModelSettings(model_name_or_path=str(tmp_path), tokenizer="bytes", **told)
    seen = list[str]()
    monkeypatch.setattr(type(model), "to", lambda self, device: seen.append(device))
    for sharded in ("false", "true"):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", sharded)
        models.load_model(named, models.load_config(named, 260), settings.BurstSettings(), 0)
        assert seen == (moved if sharded == "true" else [])


@pytest.mark.parametrize("name", [name for _, name, _ in HYBRIDS])
def test_adapters_of_hybrids(name: str) -> None:
    """Each target exists. All linear layers have an adapter but the head, gates of recurrent layers, and routers."""
    from peft import get_peft_model
    from peft.tuners.lora import LoraLayer

    model_settings, model = tiny(name)
    linear = {path.rpartition(".")[2] for path, module in model.named_modules() if type(module) is torch.nn.Linear}
    adapted = get_peft_model(model, models.adapter_config(model_settings, model.config))
    targets = {path.rpartition(".")[2] for path, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    assert targets == set(model_settings.lora_target_modules)
    assert linear - targets <= {"lm_head", "in_proj_a", "in_proj_b", "layer"}


@pytest.mark.parametrize("name", [name for _, name, _ in HYBRIDS])
def test_fsdp_finds_the_layers_of_hybrids(name: str) -> None:
    """A text model of Qwen3.5 has none of the layers for images, which accelerate would look for."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    _, model = tiny(name)
    wrapped = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert [module for module in model.modules() if wrapped(module)] == list(model.model.layers)


def test_the_text_of_a_model_of_several_modalities(tmp_path: Path) -> None:
    """Its language model is loaded with its own weights, by the name of the whole checkpoint."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    small, _ = command_line.read(
        ["--config", str(ROOT / "recipes/configs/text_hybrid_cpu.yaml")],
        (settings.ModelSettings, settings.BurstSettings),
        {},
        alone=False,
    )
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
    text = {**small.model_config, "vocab_size": 260}
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    whole.save_pretrained(tmp_path)
    named = settings.ModelSettings(model_name_or_path=str(tmp_path), tokenizer="bytes")
    model = models.load_model(named, models.load_config(named, 260), settings.BurstSettings(), 0)
    weights = whole.model.language_model.state_dict()
    assert weights
    for path, weight in model.get_decoder().state_dict().items():
        torch.testing.assert_close(weight, weights[path], rtol=0, atol=0)


def recall(rank: int, size: int, folder: str) -> list[float]:
    """How many answers are right at the end, of states that cross shards and of those that do not."""
    reset_accelerate()
    easy = ["--length", "32", "--num_keys", "2", "--num_values", "4", "--num_questions", "2", "--steps", "70"]
    with mock.patch.object(sys, "argv", ["recall", "--layers", "recurrent", "--output_dir", folder, *easy]):
        args = recall_across_shards.parse_args()
    args.eval_every, args.eval_sequences, task = args.steps, 256, recall_across_shards.Recall(args, size)
    runs = recall_across_shards.Run(task, across=True), recall_across_shards.Run(task, across=False)
    return [recall_across_shards.train(Accelerator(cpu=True), args, run)["final_accuracy"] for run in runs]


@pytest.mark.full
@pytest.mark.slow
def test_recurrent_layers_recall_what_is_on_another_rank(ranks: Ranks, tmp_path: Path) -> None:
    """No layer has attention: only states carry a fact to the rank that is asked."""
    for across, within in ranks(2).run(recall, str(tmp_path)):
        assert across > 0.97
        assert within == pytest.approx(0.25, abs=0.05)


ASK = """
import sys
sys.modules["hf_burst"] = None  # any import of it fails
import json
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
chats = [[{"role": "system", "content": "Answer by the number."}, question] for question in json.loads(sys.argv[2])]
inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True, return_tensors="pt")
outputs = model.generate(**inputs, max_new_tokens=5, do_sample=False)[:, inputs["input_ids"].shape[1] :]
print(json.dumps(tokenizer.batch_decode(outputs, skip_special_tokens=True)))
"""


@pytest.mark.full
def test_a_merged_adapter_answers_what_it_was_taught(ranks: Ranks, files: Path, tmp_path: Path) -> None:
    """Taught on two ranks, asked in plain Transformers."""
    import json

    more = {"model_name_or_path": files / "sure", "max_steps": 200, "max_length": 512, "lora_r": 32}
    rate = {"learning_rate": 0.005, "lr_scheduler_type": "cosine", "warmup_steps": 5}
    runs = ranks(2).run(train, "sft", options(files, "chats", "lora", **more, **rate), str(tmp_path / "adapter"))
    assert runs[0]["loss"][-1] < 0.05
    models.merge_adapter(tmp_path / "adapter_2", tmp_path / "merged")
    known = conversations.facts(FACTS)
    questions = json.dumps([conversations.question(key) for key in known])
    command = [sys.executable, "-c", ASK, str(tmp_path / "merged"), questions]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    right = [answer == value for answer, value in zip(json.loads(done.stdout), known.values(), strict=True)]
    assert sum(right) / len(right) > 0.99


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_step_that_was_short_of_memory_runs_again(accumulated: bool) -> None:
    """With other settings each time, and not where gradients of earlier batches would be lost."""
    training = import_module("training")
    model = hf_burst.patch_model(tests.support.models.make_model("llama"))
    (part,) = [part for part in getattr(model, PATCH).parts if isinstance(part, MemoryRule)]
    levels = [{"tiled_mlp": 0}, {"tiled_mlp": 5}, {"tiled_mlp": 5}]
    weight = next(model.parameters())
    if accumulated:
        weight.grad = torch.ones_like(weight)

    def step(model: torch.nn.Module) -> float:
        part.latest = SimpleNamespace(settings=levels.pop(0))
        if len(levels) == short:
            return 7.0
        weight.grad = torch.ones_like(weight)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer = SimpleNamespace(model=model, args=SimpleNamespace(world_size=1), training_step=step)
    training.retry_when_short(trainer)
    short = 1
    if accumulated:
        with pytest.raises(torch.OutOfMemoryError):
            trainer.training_step(model)
        assert weight.grad is not None
        return
    assert trainer.training_step(model) == 7.0
    assert weight.grad is None, "of the step that was dropped"
    levels[:], short = [{"tiled_mlp": 0}, {"tiled_mlp": 5}, {"tiled_mlp": 5}], -1
    with pytest.raises(torch.OutOfMemoryError):
        trainer.training_step(model)
    assert levels == [], "nothing follows"
