"""A patched model over 1 to 4 ranks beside the unpatched one in one process: loss, logits and every gradient."""

import copy
import gc
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM

import hf_burst
from hf_burst.attention import AttentionRequest, ContextGroup, SequenceLayout, burst_attention
from hf_burst.errors import BatchError, ConfigError, KernelError, UnsupportedModelError
from hf_burst.hf import admission
from hf_burst.hf.batches.sharded import checksum
from hf_burst.hf.forward_pass import ForwardPass
from hf_burst.hf.groups import PATCH
from hf_burst.hf.parts.base import Part
from hf_burst.hf.spread.value import Spread
from hf_burst.hf.view import ModelView, walk
from hf_burst.plan import MaskPattern, Shapes, choose_schedule, name_of
from tests.support import models
from tests.support.ranks import RankError, RankPool, reset_accelerate
from tests.support.tiny_seeing import seeing_model

LONGEST = ("llama_dynamic", "llama_longrope")
KINDS = ("plain", "packed", "right", "left")
SCHEDULES = ("burst", "auto")
Ranks = Callable[[int], RankPool]


def part_of(model: torch.nn.Module, kind: type[Part]) -> Part:
    """The part of a patched model that is of a class."""
    return next(part for part in getattr(model, PATCH).parts if isinstance(part, kind))


def group_mean(model: torch.nn.Module) -> list[torch.Tensor]:
    """The gradients as a data-parallel wrapper averages them."""
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    if dist.is_initialized():
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    return gradients


class Expected(NamedTuple):
    """What one process computes of a batch: its loss, all gradients in one tensor, and the logits in an evaluation."""

    loss: torch.Tensor
    gradients: torch.Tensor
    logits: torch.Tensor


def make_batch(name: str, kind: str) -> dict[str, torch.Tensor]:
    """A batch for a model. RoBERTa counts positions from 1."""
    batch = models.make_batch(kind)
    if name == "roberta" and "position_ids" in batch:
        batch["position_ids"] += 1
    return batch


@cache
def one_process(name: str, kind: str, dtype: torch.dtype) -> Expected:
    """Computed once, by the process that runs the tests, for all numbers of ranks and schedules."""
    model, batch = models.make_model(name, dtype).train(), make_batch(name, kind)
    loss = models.plain_loss(model, batch)
    loss.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return Expected(loss.detach(), gradients, models.plain_logits(model.eval(), batch).detach())


def compare_with_one_process(
    rank: int, size: int, name: str, chosen: list[tuple[str, str]], expected: dict[str, Expected]
) -> None:
    """Batches of a kind by a schedule; logits of each kind once, since the schedule is the same code for them."""
    dtype = expected[chosen[0][0]].loss.dtype
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5}[dtype]
    model = models.make_model(name, dtype).train()
    numbered = name == "roberta"  # its first position is not known before the batch comes to the model
    left = dict(expected)  # whose logits were not compared yet
    for kind, schedule in chosen:
        batch, wanted = make_batch(name, kind), expected[kind]
        config = hf_burst.BurstConfig(schedule=schedule)
        models.patch(model.train(), config)
        for explicit in (False,) if numbered else (False, True):
            model.zero_grad()
            causal = not models.is_masked(model)
            given = hf_burst.shard_batch(batch, config=config, causal=causal) if explicit else batch
            outputs = model(**given)
            outputs.loss.backward()
            assert outputs.logits is None if explicit else isinstance(outputs.logits, Spread)
            torch.testing.assert_close(outputs.loss, wanted.loss, rtol=tolerance, atol=tolerance)
            found = torch.cat([gradient.flatten() for gradient in group_mean(model)])
            torch.testing.assert_close(found, wanted.gradients, rtol=tolerance, atol=tolerance)
        if left.pop(kind, None) is not None:
            check_logits(model.eval(), batch, wanted.logits, tolerance)
        hf_burst.unpatch_model(model)


def check_logits(model, batch: dict[str, torch.Tensor], expected: torch.Tensor, tolerance: float) -> None:
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        logits = model(**inputs).logits
        torch.testing.assert_close(logits[real], expected[real], rtol=tolerance, atol=tolerance)
        last = model(**inputs, logits_to_keep=3).logits
        torch.testing.assert_close(last, logits[:, -3:], rtol=tolerance, atol=tolerance)
        chosen = torch.tensor([30, 2, 2, 17])
        picked = model(**inputs, logits_to_keep=chosen).logits
        torch.testing.assert_close(picked, logits[:, chosen], rtol=tolerance, atol=tolerance)
        evaluated = model(**batch)
        torch.testing.assert_close(evaluated.logits[real], expected[real], rtol=tolerance, atol=tolerance)
        states = model(**inputs, output_hidden_states=True).hidden_states
        assert [state.shape[:2] for state in states] == [batch["input_ids"].shape] * 3


def compare(ranks: Ranks, size: int, name: str, chosen: list[tuple[str, str]], dtype: torch.dtype) -> None:
    expected = {kind: one_process(name, kind, dtype) for kind, _ in chosen}
    if size == 1:
        compare_with_one_process(0, 1, name, chosen, expected)
    else:
        ranks(size).run(compare_with_one_process, name, chosen, expected)


LATER = ("gpt2", "llama_linear", "llama_llama3")  # two positions that differ from those of others by numbers alone
SOME = [("llama", 1), ("gpt2", 2), *((name, 3) for name in models.NAMES if name not in LATER)]
EVERY = [(name, size) for name in models.NAMES for size in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("name", "size"), [*SOME, *(pytest.param(*case, marks=pytest.mark.full) for case in EVERY if case not in SOME)]
)
def test_loss_logits_and_gradients_equal_one_process(ranks: Ranks, name: str, size: int) -> None:
    """Of llama everything over ranks; of the others a third over each of 1 to 3 ranks, another one each, and all over
    4."""
    kinds = KINDS if name in ("llama", "mistral") else ("plain", "packed")
    if name in LONGEST:  # documents one by one are not as long as the batch
        kinds = ("plain", "left")
    chosen = list(itertools.product(kinds, SCHEDULES))
    if size == 1 or (name != "llama" and size < 4):
        chosen = chosen[(models.NAMES.index(name) + size) % 3 :: 3]
    compare(ranks, size, name, chosen, torch.float64)


def test_float32_equals_one_process(ranks: Ranks) -> None:
    compare(ranks, 2, "llama", list(itertools.product(KINDS, SCHEDULES)), torch.float32)


def train_on_short_rows(rank: int, size: int, keep: float) -> None:
    """Fewer tokens than chunks, down to one, beside one process."""
    lengths = (1, 2, 5, 6, 7, 13, 26)
    model = models.make_model("llama", torch.float64).train()
    model.gradient_checkpointing_enable()
    for length in lengths if keep == 1 else lengths[-2:]:
        ids = torch.arange(2 * length).view(2, length) % 50 + 1
        batch = {"input_ids": ids, "labels": ids}
        logits = model(input_ids=ids, use_cache=False).logits.detach()
        if length > 1:
            model.zero_grad()
            loss = models.plain_loss(model, batch)
            loss.backward()
            expected = [parameter.grad.clone() for parameter in model.parameters()]
        models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(attention_keep=keep)))
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=1e-10, atol=1e-10)
        for explicit in (False, True) if length > 1 else ():
            model.zero_grad()
            config = hf_burst.BurstConfig(memory=hf_burst.Memory(attention_keep=keep))
            ours = model(**(hf_burst.shard_batch(batch, config=config) if explicit else batch)).loss
            ours.backward()
            torch.testing.assert_close(ours, loss, rtol=1e-10, atol=1e-10)
            for gradient, wanted in zip(group_mean(model), expected, strict=True):
                torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)
        hf_burst.unpatch_model(model)


@pytest.mark.parametrize(
    ("size", "keep"), [(3, 1.0), (4, 0.25), *(pytest.param(size, 1.0, marks=pytest.mark.full) for size in (2, 4))]
)
def test_rows_with_fewer_tokens_than_chunks_are_padded(ranks: Ranks, size: int, keep: float) -> None:
    ranks(size).run(train_on_short_rows, keep)


def evaluate_without_labels(rank: int, size: int) -> None:
    """A batch of prompts alone in an evaluation: its loss is not a number, as in Transformers."""
    model = hf_burst.patch_model(models.make_model("llama").eval())
    batch = models.make_batch("plain")
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for given in (batch, hf_burst.shard_batch(batch)):
        assert model(**given).loss.isnan()


@pytest.mark.parametrize("size", [1, 2])
def test_an_evaluation_without_any_label_goes_on(ranks: Ranks, size: int) -> None:
    if size == 1:
        evaluate_without_labels(0, 1)
    else:
        ranks(size).run(evaluate_without_labels)


def differentiate_gathered_logits(rank: int, size: int) -> None:
    model = models.make_model("llama", torch.float64).train()
    batch = models.make_batch("plain")
    logits = model(batch["input_ids"]).logits
    logits.square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    models.patch(model)
    model(batch["input_ids"]).logits.square().mean().backward()
    for found, wanted in zip(group_mean(model), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_loss_of_ones_own_on_gathered_logits_is_exact(ranks: Ranks) -> None:
    ranks(3).run(differentiate_gathered_logits)


def compare_hidden_states(rank: int, size: int) -> None:
    model = models.make_model("llama", torch.float64).eval()
    tokens = models.make_batch("plain")["input_ids"]
    expected = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    found = models.patch(model)(tokens, output_hidden_states=True).hidden_states
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-10)


def test_hidden_states_are_gathered_in_sequence_order(ranks: Ranks) -> None:
    ranks(3).run(compare_hidden_states)


def checkpointed(rank: int, size: int) -> None:
    batch = models.make_batch("packed")
    for name in ("llama", "gpt2"):
        model = models.make_model(name, torch.float64).train()
        models.patch(model)
        model(**batch).loss.backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        model.gradient_checkpointing_enable()
        model(**batch).loss.backward()
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-10, atol=1e-12)


def test_gradient_checkpointing_changes_nothing(ranks: Ranks) -> None:
    ranks(2).run(checkpointed)


def generate(rank: int, size: int) -> None:
    model = models.make_model("mistral").eval()
    prompt = models.make_batch("plain")["input_ids"][:, :23]
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for extra in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        expected = model.generate(prompt, **options, **extra)
        models.patch(model)
        assert torch.equal(model.generate(prompt, **options, **extra), expected), extra
        hf_burst.unpatch_model(model)


def test_generation_is_plain_attention_on_the_whole_prompt(ranks: Ranks) -> None:
    ranks(2).run(generate)


def test_a_cached_loop_of_ones_own_in_one_process() -> None:
    model, found = models.make_model("llama").eval(), []
    prompt = models.make_batch("plain")["input_ids"][:1, :9]
    for patched in (False, True):
        if patched:
            models.patch(model)
        outputs = model(prompt)
        chosen = [outputs.logits[:, -1:].argmax(-1)]
        for _ in range(3):
            outputs = model(chosen[-1], past_key_values=outputs.past_key_values)
            chosen.append(outputs.logits[:, -1:].argmax(-1))
        found.append(torch.cat(chosen, 1))
    assert torch.equal(*found)


def evaluate_with_cache(rank: int, size: int) -> None:
    batch = models.make_batch("plain")
    model = models.make_model("llama", torch.float64).eval()
    exact = models.plain_loss(model, batch).detach()
    models.patch(model)
    for given in (batch, hf_burst.shard_batch(batch)):
        torch.testing.assert_close(model(**given, use_cache=True).loss.detach(), exact, rtol=1e-10, atol=1e-10)


def test_use_cache_does_not_change_the_loss(ranks: Ranks) -> None:
    ranks(2).run(evaluate_with_cache)


def half_precision(rank: int, size: int) -> None:
    """Logits of a patched model in bf16 and under autocast, at most twice as far off as those of plain attention."""
    batch = models.make_batch("packed", length=97)
    exact = models.plain_logits(models.make_model("qwen3", torch.float64).eval(), batch).detach()
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    for dtype in (torch.bfloat16, torch.float32):
        model = models.make_model("qwen3", dtype).eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            rough = models.plain_logits(model, batch)
            found = models.patch(model)(**inputs).logits
            loss = model(**batch).loss
        assert loss.dtype == torch.float32
        assert found.dtype == rough.dtype
        assert (found - exact).norm() <= 2 * (rough - exact).norm()
        confined = torch.zeros_like(exact)  # the bound is far below what wrong attention would give
        assert 2 * (rough - exact).norm() < 0.1 * (confined - exact).norm()


def test_bfloat16_and_autocast(ranks: Ranks) -> None:
    ranks(2).run(half_precision)


def test_nothing_quadratic_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.patch(models.make_model("mistral").train())
    monkeypatch.setattr("hf_burst.hf.attention.sdpa_mask", lambda **_: pytest.fail("a mask was built"))
    model(**models.make_batch("packed")).loss.backward()


def snapshot(model: torch.nn.Module) -> dict[str, object]:
    return {
        "attention": model.config._attn_implementation,
        "loss": model.loss_function,
        "attributes": set(vars(model)),
        "hooks": (len(model._forward_pre_hooks), len(model._forward_hooks)),
        "config": model.config.to_dict(),
    }


@pytest.mark.parametrize("broken", [False, True])
def test_unpatch_puts_everything_back(broken: bool) -> None:
    model = models.make_model("llama").train()
    batch = models.make_batch("plain")
    before, loss = snapshot(model), model(**batch).loss
    before["loss"] = model.loss_function
    assert models.patch(model) is model
    if broken:
        with pytest.raises(ConfigError, match="patched already"):
            hf_burst.patch_model(model, hf_burst.BurstConfig(chunking="zigzag"))
        with pytest.raises(ValueError, match="input_ids"):
            model(labels=batch["labels"])
        handle = model.model.layers[0].register_forward_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch)
        handle.remove()
    assert hf_burst.unpatch_model(model) is model
    assert snapshot(model) == before
    assert torch.equal(model(**batch).loss, loss)


def cut_at(path: str) -> Any:
    """A context in which Llama is cut at an inner module."""
    row = replace(admission.CLASSES["LlamaForCausalLM"], cut=path)
    return mock.patch.object(admission, "CLASSES", {**admission.CLASSES, "LlamaForCausalLM": row})


def test_a_patch_that_fails_half_way_leaves_nothing() -> None:
    model = models.make_model("llama").train()
    before = snapshot(model)
    with cut_at("model.elsewhere"), pytest.raises(AttributeError, match="elsewhere"):
        models.patch(model)
    assert snapshot(model) == before
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    models.patch(model)
    del model._loss_function
    hf_burst.unpatch_model(model)
    assert snapshot(model) == before


def test_what_would_make_the_loss_wrong_is_refused() -> None:
    batch = models.make_batch("plain")
    model = models.make_model("llama").train()
    model.loss_function = lambda **_: torch.zeros(())
    with pytest.raises(UnsupportedModelError, match="ForCausalLMLoss"):
        models.patch(model)
    for change in (
        lambda model: model.set_attn_implementation("sdpa"),
        lambda model: setattr(model, "loss_function", lambda **_: torch.zeros(())),
    ):
        model = models.patch(models.make_model("llama").train())
        change(model)
        with pytest.raises(ConfigError, match="changed after it was patched"):
            model(**batch)


def test_unpatch_keeps_a_loss_function_that_was_set() -> None:
    model = models.make_model("llama")
    model.loss_function = model.loss_function
    hf_burst.unpatch_model(models.patch(model))
    assert "_loss_function" in vars(model)


def test_models_of_one_config_object_are_patched_each_by_itself() -> None:
    batch = models.make_batch("plain")
    first = models.make_model("llama").train()
    second, third = (type(first)(first.config).train() for _ in range(2))
    wanted = [model(**batch).loss for model in (first, second, third)]
    for model in (first, second):
        hf_burst.patch_model(model)
    assert torch.equal(third(**batch).loss, wanted[2])
    hf_burst.unpatch_model(first)
    torch.testing.assert_close(first(**batch).loss, wanted[0])
    torch.testing.assert_close(second(**batch).loss, wanted[1])
    hf_burst.patch_model(first)
    hf_burst.unpatch_model(second)
    torch.testing.assert_close(first(**batch).loss, wanted[0])
    hf_burst.unpatch_model(first)
    assert first.config._attn_implementation == "sdpa"
    assert torch.equal(first(**batch).loss, wanted[0])
    first.set_attn_implementation("eager")
    for change in (hf_burst.patch_model, hf_burst.unpatch_model):
        change(first)
        change(second)
    assert first.config._attn_implementation == "eager"


def test_a_shared_config_gets_all_its_values_back_with_the_last_model() -> None:
    first = seeing_model("Llava")
    first.set_attn_implementation({"text_config": "eager"})
    second = type(first)(first.config)
    for change in (hf_burst.patch_model, hf_burst.unpatch_model):
        change(first)
        change(second)
    assert first.config._attn_implementation == "sdpa"
    assert first.config.text_config._attn_implementation == "eager"


def test_a_model_of_the_config_of_one_that_is_gone() -> None:
    first = models.make_model("llama")
    config = hf_burst.patch_model(first).config
    second = type(first)(config)
    del first
    gc.collect()
    hf_burst.unpatch_model(hf_burst.patch_model(second))
    assert config._attn_implementation == "sdpa"


def test_generation_after_the_processes_have_parted() -> None:
    """Every process generates by itself; a pass that is cut over ranks needs them."""
    reset_accelerate()  # tests before this one may have counted one process
    model = hf_burst.patch_model(models.make_model("llama").eval())
    prompt = models.make_batch("plain")["input_ids"][:, :5]
    with mock.patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2"}):
        assert model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 7)
        with pytest.raises(ConfigError, match="does not join them"):
            model(**models.make_batch("plain"))


def test_a_pass_walks_once_over_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.patch(models.make_model("llama")), models.make_batch("plain")
    model(**batch)
    monkeypatch.setattr(model, "modules", lambda: pytest.fail("the slow walk of torch"))
    model(**batch)
    shared = torch.nn.Linear(1, 1)
    twice = torch.nn.Sequential(torch.nn.Sequential(shared, torch.nn.ReLU()), shared)
    assert walk(twice) == (ModelView(twice).modules, False)
    twice[0][1].compile()
    assert walk(twice)[1]


def test_copies_and_saved_models_stay_patched(tmp_path: Path) -> None:
    model, batch = models.patch(models.make_model("llama").train()), models.make_batch("plain")
    loss = model(**batch).loss
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(other(**batch).loss, loss)
        hf_burst.unpatch_model(other)
        assert len(other._forward_pre_hooks) == 0
        assert torch.equal(model(**batch).loss, loss), "the model itself stays patched"


def test_unpatching_what_was_not_patched_is_refused() -> None:
    with pytest.raises(ConfigError, match="not patched"):
        hf_burst.unpatch_model(models.make_model("gpt2"))


def test_peft_models_are_patched_before_and_after(ranks: Ranks) -> None:
    ranks(2).run(adapted)


def adapted(rank: int, size: int) -> None:
    from peft import LoraConfig, get_peft_model

    batch = models.make_batch("packed")
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain = get_peft_model(models.make_model("llama", torch.float64), settings).train()
    torch.manual_seed(3)
    for parameter in plain.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    loss = models.plain_loss(plain, batch)
    loss.backward()
    weights = plain.state_dict()
    for first in (True, False):
        base = models.make_model("llama", torch.float64)
        model = get_peft_model(models.patch(base) if first else base, settings).train()
        if not first:
            models.patch(model)
        model.load_state_dict(weights)
        found = model(**batch).loss
        found.backward()
        torch.testing.assert_close(found, loss, rtol=1e-10, atol=1e-10)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            if one.requires_grad:
                gradient = one.grad.clone()
                dist.all_reduce(gradient)
                torch.testing.assert_close(gradient / size, other.grad, rtol=1e-10, atol=1e-10)


def test_models_that_are_not_served_are_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        Qwen2ForCausalLM,
    )
    from transformers.distributed.configuration_utils import DistributedConfig

    class Changed(Qwen2ForCausalLM):
        pass

    others = {name: row for name, row in admission.CLASSES.items() if name != "GPTNeoXForCausalLM"}
    monkeypatch.setattr(admission, "CLASSES", others)
    cases = {
        "not been checked": [models.make_model("gpt_neox")],
        "does not use Transformers' AttentionInterface": [
            BloomForCausalLM(BloomConfig(vocab_size=11, hidden_size=16, n_layer=1, n_head=2))
        ],
        "cross attention": [
            GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1, add_cross_attention=True))
        ],
        "takes a Transformers model": [torch.nn.Linear(2, 2)],
        "Pass the model inside": [torch.nn.DataParallel(torch.nn.Linear(2, 2))],
    }
    for sizes in ({"tp_size": 2}, {"pp_size": 2}):
        placed = models.make_model("qwen2")
        placed.config.distributed_config = DistributedConfig(**sizes)
        cases[f"loaded with DistributedConfig.{next(iter(sizes))}=2.* parts of layers"] = [placed]
    for sentence, refused in cases.items():
        for model in refused:
            with pytest.raises(UnsupportedModelError, match=sentence):
                models.patch(model)
            assert getattr(getattr(model, "config", None), "_attn_implementation", "") != "hf_burst"
    models.patch(Changed(models.make_model("qwen2").config))


def compare_positions(rank: int, size: int) -> None:
    """Beside an attention_mask position ids that jump are positions only (as PoSE makes them); padding may have any."""
    model = models.make_model("llama", torch.float64).train()
    batch = models.make_batch("left")
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    batch["position_ids"][:, 20:] += 9
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits, targets = model(**inputs, use_cache=False).logits, models.shifted(batch["labels"])
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).detach()
    models.patch(model)
    for given in (batch, hf_burst.shard_batch(batch)):
        torch.testing.assert_close(model(**given).loss.detach(), wanted, rtol=1e-10, atol=1e-10)


def plain_loss_of_jumping_positions() -> None:
    """What the comparison rests on: without a mask Transformers takes a jump for another document."""
    model = models.make_model("llama", torch.float64).train()
    batch = models.make_batch("plain")
    batch["position_ids"] = torch.arange(37).expand(2, -1) + 9 * (torch.arange(37) >= 20)
    masked = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    losses = [model(**given, use_cache=False).loss.item() for given in (batch, masked)]
    assert abs(losses[0] - losses[1]) > 1e-6


def test_positions_that_jump_beside_a_mask(ranks: Ranks) -> None:
    plain_loss_of_jumping_positions()
    ranks(2).run(compare_positions)


def train_after_inference(rank: int, size: int) -> None:
    batch = models.make_batch("plain", 43)
    model = models.make_model("llama", torch.float64)
    wanted = models.plain_loss(model, batch).detach()
    models.patch(model)
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(**batch).loss, wanted, rtol=1e-10, atol=1e-10)
    loss = model.train()(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-10, atol=1e-10)
    with torch.device("meta"):  # an ambient default device is not that of a layout
        again = model(**batch).loss
    torch.testing.assert_close(again.detach(), wanted, rtol=1e-10, atol=1e-10)


def test_inference_mode_and_default_devices_leave_nothing_behind(ranks: Ranks) -> None:
    ranks(2).run(train_after_inference)


def add_noise(rank: int, size: int) -> None:
    model = models.make_model("llama").train()
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    models.patch(model)(**models.make_batch("plain"))


def test_noise_on_embeddings_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(add_noise)
    assert all("neftune_noise_alpha" in str(error) for error in caught.value.errors)


def bound_token_types(rank: int, size: int) -> None:
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=61, **sizes, is_decoder=True, attention_probs_dropout_prob=0.0)
    model = models.patch(BertLMHeadModel(config))
    batch = models.make_batch("plain")
    types = torch.zeros_like(batch["input_ids"])
    types[0, 0] = 2  # BERT has two, and the token is in the shard of rank 0 alone
    model(**batch, token_type_ids=types)


def test_token_types_beyond_their_table_are_refused_on_every_rank(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(bound_token_types)
    assert all("token_type_ids holds 2; this model takes 0 to 1" in str(error) for error in caught.value.errors)


def test_rotary_positions_of_layer_types_that_depend_on_the_longest() -> None:
    """Gemma 3 gives its rotary module position ids and a layer type, in this order."""
    rope = {"rope_theta": 1e4, "rope_type": "default"}
    dynamic = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
    sizes = {**models._SIZES, "max_position_embeddings": 16, "head_dim": 8, "num_key_value_heads": 2}
    kinds = {"rope_parameters": {"full_attention": dynamic, "sliding_attention": rope}, "sliding_window": 9}
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**{**sizes, "num_hidden_layers": 6}, **kinds)).double()
    batch = models.make_batch("plain")
    wanted = model(**batch, use_cache=False).loss
    found = models.patch(model)(**batch).loss
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_the_checksum_of_a_batch_knows_its_token_types() -> None:
    ids, types = torch.ones(1, 6, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long)
    one, other = ({"input_ids": ids, "token_type_ids": types + kind} for kind in (0, 1))
    assert checksum(one) != checksum(other)


def scale_all_positions(rank: int, size: int) -> None:
    from transformers import PhimoeConfig, PhimoeForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    rope = {
        "rope_type": "linear",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 36,
        "long_mscale": 1.5,
        "short_mscale": 1.1,
    }
    torch.manual_seed(0)
    config = PhimoeConfig(vocab_size=61, **sizes, num_key_value_heads=2, num_local_experts=4, rope_parameters=rope)
    model = PhimoeForCausalLM(config).eval()  # in training its routers draw random numbers
    batch = models.make_batch("plain", 43)  # rank 1 holds the middle of it, below position 36
    wanted = model(**batch, use_cache=False).loss.detach()
    models.patch(model)
    torch.testing.assert_close(model(**batch).loss.detach(), wanted, rtol=1e-6, atol=1e-6)


def test_phimoe_scales_by_the_longest_position_whatever_its_type(ranks: Ranks) -> None:
    ranks(2).run(scale_all_positions)


class SchedulesAsked(TorchDispatchMode):
    """Notes what schedule the operators are asked for, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.hf_burst.attention.default, torch.ops.hf_burst.attention_backward.default):
            self.found.append(args[-3])
        return func(*args, **(kwargs or {}))


def choose_by_documents(rank: int, size: int) -> None:
    """One long document and many short ones of the same batch shape, in turns, with layers that run twice."""
    model = models.patch(models.make_model("llama_yarn", torch.float64), hf_burst.BurstConfig())
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    length = 256
    whole = SequenceLayout.for_batch([(0, length)], size)
    short = SequenceLayout.for_batch([tuple(range(0, length + 1, 16))], size)
    group = ContextGroup.from_mesh(None)
    shapes = Shapes(4, 4, 16, 16, 8, 8)
    layers = [(layout.masks(MaskPattern()), layout.sharding, shapes) for layout in (whole, short)]
    wanted = [name_of(choose_schedule(*layer, size).schedule, size) for layer in layers]
    assert wanted == ["ulysses", "burst"]
    train_by_documents(model, group, (whole, short), wanted)


def train_by_documents(
    model: torch.nn.Module,
    group: ContextGroup,
    layouts: tuple[SequenceLayout, SequenceLayout],
    wanted: list[str],
) -> None:
    length, short = layouts[0].length, layouts[1]
    ids = torch.arange(length)[None] % models.VOCABULARY
    for _ in range(2):
        for layout, name in zip(layouts, wanted, strict=True):
            positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(layout.documents[0])])[None]
            with SchedulesAsked() as asked:
                model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
            assert len(asked.found) >= 4
            assert set(asked.found) == {name}
    with SchedulesAsked() as asked:
        q = torch.randn(1, length // group.size, 4, 8, dtype=torch.float64)
        burst_attention(q, q, q, short, AttentionRequest(group))
        burst_attention(q, q, q, short, AttentionRequest(group, schedule="burst"))
    assert asked.found == [wanted[1], "burst"]


def test_a_schedule_is_chosen_for_the_documents_of_the_batch(ranks: Ranks) -> None:
    ranks(4).run(choose_by_documents)


class HandsOn(LlamaForCausalLM):
    """A class of a user's that names nothing of what it takes."""

    def forward(self, *given: Any, **named: Any) -> Any:
        return super().forward(*given, **named)


class TakesMore(LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, factor: float = 1.0, **rest: Any) -> Any:
        output = super().forward(input_ids, labels=labels, **rest)
        output.loss = factor * output.loss
        return output


def train_own_classes(rank: int, size: int) -> None:
    batch = models.make_batch("right")
    plain = models.make_model("llama", torch.float64).train()
    wanted = models.plain_loss(plain, batch)
    for kind in (HandsOn, TakesMore):
        model = kind(plain.config).double().train()
        model.config._attn_implementation = "sdpa"
        model.load_state_dict(plain.state_dict())
        models.patch(model)
        labels, mask = batch["labels"], batch["attention_mask"]
        if kind is HandsOn:
            losses = [model(batch["input_ids"], mask, labels=labels).loss, model(**batch).loss]
        else:
            losses = [model(batch["input_ids"], labels, 3.0, attention_mask=mask).loss / 3]
        for loss in losses:
            torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)


def test_classes_with_a_forward_of_their_own(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks(2).run(train_own_classes)
    models.patch(models.make_model("llama"))
    assert not caplog.records
    models.patch(HandsOn(models.make_model("llama").config))
    assert "not compared with one process: HandsOn" in caplog.text


def differentiate_twice(rank: int, size: int) -> None:
    model = models.patch(models.make_model("llama"))
    batch = models.make_batch("right")
    loss = model.train()(**batch).loss
    with pytest.raises(KernelError, match="no second derivative"):
        torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)
    if size > 1:
        logits = model.eval()(**batch).logits
        with pytest.raises(KernelError, match="no second derivative"):
            torch.autograd.grad(logits.sum(), model.lm_head.weight, create_graph=True)
    with pytest.raises(BatchError, match="ignore_index=3"):
        model.train()(**batch, ignore_index=3)


@pytest.mark.parametrize("size", [1, 2])
def test_what_would_be_lost_silently_is_an_error(ranks: Ranks, size: int) -> None:
    if size == 1:
        differentiate_twice(0, 1)
    else:
        ranks(size).run(differentiate_twice)


def test_gpus_are_asked_for_by_a_pass_and_not_by_patching(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook may patch a model before it forks, and CUDA that was asked for does not work in forks."""

    class Asked(Exception): ...

    for name in ("is_available", "device_count", "current_device"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock(side_effect=Asked(name)))
    model, batch = models.make_model("llama"), models.make_batch("plain", 24)
    with mock.patch("hf_burst.hf.patch.tune_in_parallel", side_effect=Asked) as tune:
        hf_burst.patch_model(model)
        model(**batch)
        tune.assert_not_called()
        monkeypatch.setattr(ForwardPass, "device", torch.device("cuda"))
        with pytest.raises(Asked):
            model(**batch)
        tune.assert_called_once()
