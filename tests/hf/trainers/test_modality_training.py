"""Training a model of several modalities, on text and on images, beside one process; saved as what it was."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel, Trainer

import hf_burst
from hf_burst.check.tiny import tiny_copy
from hf_burst.hf.models.cut_point import language_model_path
from hf_burst.hf.view import ModelView
from tests.support import conversations, models, pictures, trainers
from tests.support.ranks import RankPool, reset_accelerate
from tests.support.tiny_models import tiny_wrapper
from tests.support.tiny_pictures import seeing_batch
from tests.support.tiny_seeing import seeing_model
from tests.support.trainers import Case, make_trainer

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))  # where the recipes find their modules
import models as recipe_models

ROOT = Path(__file__).parents[3]
Ranks = Callable[[int], RankPool]
GEMMA, QWEN = "Gemma3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
IN_LANGUAGE_MODEL = r".*\.language_model\..*\.(q|v)_proj"
CASES = [  # one process mixes packed documents in Qwen2.5-VL, whose masks are made without position ids
    Case("SFTTrainer", "packed", model=GEMMA),
    pytest.param(Case("SFTTrainer", "padded", lora=True, checkpointing=True, model=QWEN), marks=pytest.mark.full),
    pytest.param(Case("SFTTrainer", "padded", lora=True, data=2, model=GEMMA), marks=pytest.mark.full),
    pytest.param(Case("Trainer", "padded", checkpointing=True, model=QWEN), marks=pytest.mark.full),
]


def make_wrapper(case: Case, checkpoint: str | None = None) -> nn.Module:
    """A model with towers for images, which are frozen, or with adapters in its language model alone."""
    model = tiny_wrapper(case.model).to(torch.float32)
    if checkpoint is not None:
        model = type(model).from_pretrained(checkpoint)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "language_model" in name or "lm_head" in name
    if case.burst:
        hf_burst.patch_model(model)
    model.config.get_text_config().use_cache = False
    if case.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        return get_peft_model(
            model, LoraConfig(r=2, target_modules=IN_LANGUAGE_MODEL, init_lora_weights=False, task_type="CAUSAL_LM")
        )
    return model


def trainer_of(case: Case, folder: str, checkpoint: str | None = None, **options: Any) -> Trainer:
    return make_trainer(case, folder, model=make_wrapper(case, checkpoint), **options)


def train(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    trainer = trainer_of(case, folder)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    result = trainers.finish(trainer)
    for name, value in result["weights"].items():
        trained = ("lora" in name) if case.lora else "language_model" in name
        assert trained or "lm_head" in name or torch.equal(value, before[name]), f"{name} is frozen"
    changed = [name for name, value in result["weights"].items() if not torch.equal(value, before[name])]
    assert changed
    return result


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_those_of_one_process(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    wanted = train(0, 1, str(tmp_path / "alone"), case.alone)
    for run in ranks(case.ranks).run(train, str(tmp_path / "ranks"), case):
        trainers.compare(run, wanted)


def train_on_images(rank: int, size: int, folder: str, case: Case, packing: bool = False) -> dict[str, Any]:
    """TRL's collator for images, chats of one and of two images, all weights or adapters; the tower learns. In fp64,
    because a tower that takes other images together rounds otherwise."""
    from datasets import Dataset

    model = seeing_model(case.model).to(torch.float64)
    if case.burst:
        hf_burst.patch_model(model, hf_burst.BurstConfig(share_prefixes=True))
    if case.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        adapters = LoraConfig(r=2, target_modules=r".*\.(q|v)_proj", init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    pairs = case.trainer == "DPOTrainer"
    data = Dataset.from_list(pictures.pairs_with_images() if pairs else pictures.chats_with_images())
    trainer = make_trainer(case, folder, data=data, model=model, processing_class=pictures.llava_processor())
    if packing:
        trainer.data_collator = hf_burst.BurstCollator(trainer.data_collator, packing=True)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    result = trainers.finish(trainer)
    changed = [name for name, value in result["weights"].items() if not torch.equal(value, before[name])]
    assert any("vision_tower" in name for name in changed)
    return result


SEEING = [
    Case("SFTTrainer", "padded", model="Llava"),
    pytest.param(Case("SFTTrainer", "padded", model="Llava", lora=True, checkpointing=True), marks=pytest.mark.full),
    pytest.param(Case("SFTTrainer", "padded", model="Llava", data=2), marks=pytest.mark.full),
    pytest.param(Case("DPOTrainer", model="Llava", lora=True), marks=pytest.mark.slow),  # pairs of images, row by row
    pytest.param(Case("DPOTrainer", model="Llava", lora=True, data=2), marks=pytest.mark.full),  # a pair at a time
]


@pytest.mark.parametrize("case", SEEING, ids=str)
def test_images_train_as_in_one_process(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    wanted = train_on_images(0, 1, str(tmp_path / "alone"), case.alone)
    for run in ranks(case.ranks).run(train_on_images, str(tmp_path / "ranks"), case):
        trainers.compare(run, wanted)


def test_images_in_packed_rows_train_as_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("SFTTrainer", model="Llava")
    wanted = train_on_images(0, 1, str(tmp_path / "alone"), case.alone)  # a row for each sample, padded
    for run in ranks(2).run(train_on_images, str(tmp_path / "ranks"), case, True):
        trainers.compare(run, wanted)


def one_row(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: value.float() if value.is_floating_point() else value for name, value in rows[0].items()}


def train_on_patches(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    """Trainer on sequences of other lengths, of a wrapper whose loss is the mean of a micro-batch."""
    model = seeing_model(case.model).to(torch.float32)
    assert not model.accepts_loss_kwargs
    if case.burst:
        hf_burst.patch_model(model)
    data = [seeing_batch(case.model, length=length) for length in (53, 41, 47, 59, 43, 37)]
    trainer = make_trainer(case, folder, data=data, model=model, per_device_train_batch_size=1)
    trainer.data_collator = one_row
    return trainers.finish(trainer)


@pytest.mark.parametrize("model", ["Qwen2_5_VL", pytest.param("Qwen3VL", marks=pytest.mark.full)])
def test_sequences_with_images_of_any_size_train_as_in_one_process(ranks: Ranks, tmp_path: Path, model: str) -> None:
    case = Case("Trainer", model=model)
    wanted = train_on_patches(0, 1, str(tmp_path / "alone"), case.alone)
    for run in ranks(2).run(train_on_patches, str(tmp_path / "ranks"), case):
        trainers.compare(run, wanted)


def save_and_resume(rank: int, size: int, folder: str, case: Case) -> dict[str, torch.Tensor]:
    """The weights after three steps, of which the last follows from a checkpoint."""
    first = trainer_of(case, folder, save_strategy="steps", save_steps=2)
    first.train()
    reset_accelerate()
    # Trainer itself finds no weights of a whole wrapper in its checkpoint: their files have the names of older versions
    again = trainer_of(case, folder, None if case.lora else f"{folder}/checkpoint-2")
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    weights = {name: value.clone() for name, value in first.model.state_dict().items()}
    for name, value in again.model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-7)
    again.save_model()
    return weights


def test_it_is_saved_as_the_wrapper_that_it_was(ranks: Ranks, tmp_path: Path) -> None:
    case = CASES[0]
    weights = ranks(2).run(save_and_resume, str(tmp_path), case)[0]
    loaded, before = AutoModelForImageTextToText.from_pretrained(tmp_path), make_wrapper(replace(case, burst=0))
    assert type(loaded) is type(before)
    assert loaded.config._attn_implementation != "hf_burst"
    towers = [name for name in before.state_dict() if "vision" in name or "projector" in name]
    assert towers
    for name in towers:
        assert torch.equal(loaded.state_dict()[name], before.state_dict()[name])
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-7)


@pytest.mark.slow
def test_adapters_load_beside_the_wrapper(ranks: Ranks, tmp_path: Path) -> None:
    from peft import PeftModel

    case = Case("SFTTrainer", "padded", lora=True, data=2, model=GEMMA)
    ranks(4).run(save_and_resume, str(tmp_path), case)
    base = make_wrapper(replace(case, burst=0, lora=False))
    ids = torch.randint(3, models.VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    plain = base.eval()(ids).logits
    adapted = PeftModel.from_pretrained(base, tmp_path).eval()
    assert (adapted(ids).logits - plain).abs().max() > 1e-3
    assert all("language_model" in name for name, _ in adapted.named_parameters() if "lora" in name)


def test_a_processor_does_for_a_tokenizer(tmp_path: Path) -> None:
    """TRL takes the tokenizer out of it, where rows are text."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer = trainers.tokenizer()
    processor = LlavaProcessor(image_processor=CLIPImageProcessorPil(), tokenizer=tokenizer, patch_size=14)
    import trl

    case, results = Case("SFTTrainer", "packed", model="LlavaForConditionalGeneration", burst=1), []
    for given in (processor, tokenizer):
        reset_accelerate()
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=2, packing=True, max_length=40, report_to=[]
        )
        trainer = trl.SFTTrainer(
            make_wrapper(case), arguments, train_dataset=trainers.table("padded", 24), processing_class=given
        )
        results.append(trainer.train().training_loss)
    assert results[0] == results[1]


def train_by_recipe(rank: int, size: int, arguments: list[str], output: str) -> list[float]:
    reset_accelerate()
    trainer, _ = import_module("sft").make_trainer([*arguments, "--output_dir", f"{output}_{size}"])
    trainer.train()
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_the_recipe_takes_a_wrapper(ranks: Ranks, tmp_path: Path, lora: bool) -> None:
    folder = tmp_path / "gemma"
    config = transformers.Gemma3Config(eos_token_id=1, pad_token_id=0)
    kind = transformers.Gemma3ForConditionalGeneration
    small: PreTrainedModel = tiny_copy(kind, config).to(torch.float32)
    small.resize_token_embeddings(260)
    small.config.get_text_config().max_position_embeddings = 512
    small.save_pretrained(folder)
    recipe_models.byte_tokenizer().save_pretrained(folder)
    rows = conversations.chats(tmp_path / "chats.jsonl", conversations.facts(12), count=20, turns=4)
    settings = {"model_name_or_path": folder, "dataset": rows, "max_steps": 3, "max_length": 300, "save_strategy": "no"}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    words += ["--use_cpu", "true", "--bf16", "false", "--disable_tqdm", "true", *(["--use_peft"] if lora else [])]
    wanted = train_by_recipe(0, 1, words, str(tmp_path / "out"))
    for losses in ranks(2).run(train_by_recipe, words, str(tmp_path / "out")):
        assert losses == pytest.approx(wanted, rel=1e-5)
    if lora:
        recipe_models.merge_adapter(tmp_path / "out_2", tmp_path / "merged")
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / ("merged" if lora else "out_2"))
    assert type(trained) is kind
    path = language_model_path(ModelView(trained))
    for name, value in trained.state_dict().items():
        if not name.startswith((path, "lm_head")):
            assert torch.equal(value, small.state_dict()[name]), f"{name} is frozen"
    assert any(not torch.equal(value, small.state_dict()[name]) for name, value in trained.state_dict().items())


def write_chats_with_images(folder: Path) -> Path:
    """A tiny Llava with its processor in a folder, and chats with images in another one."""
    seeing_model("Llava").to(torch.float32).save_pretrained(folder / "llava")
    pictures.llava_processor().save_pretrained(folder / "llava")
    shown, lines = folder / "shown", []
    shown.mkdir()
    for number, chat in enumerate(pictures.chats_with_images()):
        names = [f"{number}_{place}.png" for place in range(len(chat["images"]))]
        for name, image in zip(names, chat["images"], strict=True):
            image.save(shown / name)
        lines.append(json.dumps({"messages": chat["messages"], "images": names}))
    (shown / "chats.jsonl").write_text("\n".join(lines))
    return shown


def words_of(folder: Path, **settings: Any) -> list[str]:
    """Words of a command that trains on the chats."""
    given = {"model_name_or_path": folder / "llava", "dataset": folder / "shown" / "chats.jsonl", **settings}
    given |= {"use_cpu": "true", "bf16": "false", "disable_tqdm": "true"}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_recipe_trains_on_images(ranks: Ranks, tmp_path: Path, rows: int) -> None:
    shown = write_chats_with_images(tmp_path)
    words = words_of(tmp_path, max_steps=3, save_strategy="no", per_device_train_batch_size=rows)
    wanted = train_by_recipe(0, 1, words, str(tmp_path / "out"))
    for losses in ranks(2).run(train_by_recipe, words, str(tmp_path / "out")):
        assert losses == pytest.approx(wanted, rel=1e-5)
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "out_2")
    assert isinstance(trained, transformers.LlavaForConditionalGeneration)
    text = tmp_path / "text"
    models.make_model("llama").save_pretrained(text)
    pictures.llava_processor().tokenizer.save_pretrained(text)
    with pytest.raises(SystemExit, match="column images, which is not read here"):
        train_by_recipe(0, 1, [*words, "--model_name_or_path", str(text)], str(tmp_path / "out"))
    (shown / "3_0.png").unlink()
    with pytest.raises(SystemExit, match=r"chats\.jsonl:4: its image .*/3_0\.png is no file"):
        train_by_recipe(0, 1, words, str(tmp_path / "out"))


def launch(words: list[str]) -> subprocess.Popen[str]:
    """Starts the recipe over two processes, in a session of their own."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    return subprocess.Popen(
        [*command, "--main_process_port", "0", str(ROOT / "recipes" / "sft.py"), *words],
        env={**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = [*folder.glob("adapter_model.safetensors"), *folder.glob("model.safetensors")]
    return load_file(file)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("adapters", [[], ["--use_peft"]], ids=["all weights", "adapters"])
def test_a_training_on_images_that_is_killed_goes_on_bit_by_bit(tmp_path: Path, adapters: list[str]) -> None:
    write_chats_with_images(tmp_path)
    words = words_of(tmp_path, save_strategy="steps", save_steps=2, per_device_train_batch_size=2, max_steps=6)
    whole = launch([*words, *adapters, "--output_dir", str(tmp_path / "whole")])
    said, _ = whole.communicate(timeout=200)
    assert whole.returncode == 0, said
    output = tmp_path / "killed"
    killed = launch([*words, *adapters, "--output_dir", str(output)])
    try:
        last = time.monotonic() + 200
        while not (output / "checkpoint-2" / "trainer_state.json").exists():
            assert time.monotonic() < last
            assert killed.poll() is None, killed.communicate()[0]
            time.sleep(0.01)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
    assert not (output / "trainer_state.json").exists(), "it was killed before its end"
    resumed = launch([*words, *adapters, "--output_dir", str(output)])
    said, _ = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, said
    assert re.search(r"goes on from .*checkpoint-\d", said), said
    wanted, found = weights_in(tmp_path / "whole"), weights_in(output)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    start = load_file(tmp_path / "llava" / "model.safetensors")
    assert not all(name in start and torch.equal(value, start[name]) for name, value in found.items()), "it trained"
