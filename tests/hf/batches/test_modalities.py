"""Models of several modalities on text, over ranks, beside one process."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Gemma4Config, PreTrainedModel

import hf_burst
from hf_burst.check.compare import KINDS, compare, make_batch
from hf_burst.check.run import find_target
from hf_burst.check.tiny import Double
from hf_burst.errors import BatchError, UnsupportedModelError
from hf_burst.hf.batches.cutting import cut_targets
from hf_burst.hf.models.cut_point import TOKEN_INPUTS
from hf_burst.hf.models.support import check_model
from hf_burst.hf.parts import tokens
from hf_burst.hf.patch import patch_under_check
from hf_burst.hf.view import ModelView
from hf_burst.ranks.layout import SequenceLayout
from tests.support import models
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_models import tiny_wrapper

Ranks = Callable[[int], RankPool]
GEMMA, GEMMA3N, QWEN = (f"{family}ForConditionalGeneration" for family in ("Gemma3", "Gemma3n", "Qwen2_5_VL"))
CASES = {
    GEMMA: 2,  # windows, and masks that are made outside of the language model
    GEMMA3N: 3,  # inputs of its own for every layer, and embeddings in the place of padding
    QWEN: 3,  # positions of three rows
    "Qwen3_5ForConditionalGeneration": 2,  # states, and positions of four rows
    "Kosmos2_5ForConditionalGeneration": 2,  # the loss is computed inside of the language model
    "LlavaForConditionalGeneration": 1,
}
LATER = {
    GEMMA: pytest.mark.full,  # and what is cut wrongly of it is seen
    GEMMA3N: pytest.mark.full,
    "Qwen3_5ForConditionalGeneration": pytest.mark.full,
    "Kosmos2_5ForConditionalGeneration": pytest.mark.full,
}
IMAGE = {"pixel_values": torch.zeros(1, 3, 28, 28)}
Part = Mapping[str, Any]


def compare_on_ranks(rank: int, size: int, name: str, broken: str = "") -> tuple[str, dict[str, float], str]:
    """The verdict, with something broken on purpose."""
    whole = tokens.cut_inputs

    def cut(inputs: Part, layout: SequenceLayout, place: int, *others: Any) -> dict[str, Any]:
        part = whole(inputs, layout, place, *others)
        if broken == "position_ids":
            part[broken] = torch.arange(part[broken].shape[-1]).expand_as(part[broken])
        elif broken in part:
            part[broken] = layout.shard(inputs[broken], (place + 1) % layout.ranks, dim=TOKEN_INPUTS[broken])
        return part

    def targets(batch: Part, layout: SequenceLayout, place: int, task: Any) -> dict[str, torch.Tensor]:
        return {key: value.roll(1, dims=1) for key, value in cut_targets(batch, layout, place, task).items()}

    with ExitStack() as changes:
        if broken == "labels":
            changes.enter_context(mock.patch.object(tokens, "cut_targets", targets))
        elif broken:
            changes.enter_context(mock.patch.object(tokens, "cut_inputs", cut))
        verdict = compare(partial(tiny_wrapper, name))
    return verdict.result, verdict.errors, verdict.note


@pytest.mark.parametrize("name", [pytest.param(name, marks=LATER.get(name, ())) for name in CASES])
def test_text_is_exact(ranks: Ranks, name: str) -> None:
    for result, errors, note in ranks(CASES[name]).run(compare_on_ranks, name):
        assert result == "exact", note
        assert set(errors) == set(KINDS)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        (GEMMA, "inputs_embeds"),
        pytest.param(QWEN, "position_ids", marks=pytest.mark.full),
        pytest.param(GEMMA3N, "per_layer_inputs", marks=pytest.mark.slow),
        pytest.param(GEMMA, "labels", marks=pytest.mark.full),
    ],
)
def test_what_is_cut_for_another_rank_is_seen(ranks: Ranks, name: str, broken: str) -> None:
    for result, errors, note in ranks(2).run(compare_on_ranks, name, broken):
        assert result == "wrong", note
        assert max(errors.values()) > 1e-3, "far from the tolerance"


def shard_weights(rank: int, size: int, name: str, policy: MixedPrecisionPolicy) -> dict[str, torch.Tensor]:
    """The loss and the gradients of a wrapper under FSDP2; of a plain one if there is one rank."""
    with ExitStack() as settings:
        torch.set_default_dtype(torch.float64)
        settings.callback(torch.set_default_dtype, torch.float32)
        settings.enter_context(Double())
        model = tiny_wrapper(name).double().train()
        if size > 1:
            patch_under_check(model)
            for layer in model.model.language_model.layers:
                fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        loss = model(**make_batch("one sequence", model)).loss
        loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    found = {name: grad.full_tensor() if size > 1 else grad for name, grad in found.items()}
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.float64)], ids=["plain", "cast"])
def test_fsdp2_looks_for_tensors_in_no_config(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """That of Gemma 4 has another head size for some layers, and does not let all of its attributes be read."""
    name = "Gemma4ForConditionalGeneration"
    wanted = shard_weights(0, 1, name, policy)
    assert len(wanted) > 20
    for found in ranks(2).run(shard_weights, name, policy):
        assert wanted.keys() == found.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-10)


def forward(rank: int, size: int, name: str, more: Part, only: int | None = None) -> None:
    """A pass with more than text, on all ranks or on one."""
    model = patch_under_check(tiny_wrapper(name))
    more = more if only in (None, rank) else {}
    model(**make_batch("one sequence", model), **more)


@pytest.mark.parametrize("only", [None, 1])
def test_images_are_refused_on_every_rank(ranks: Ranks, only: int | None) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(forward, GEMMA3N, IMAGE, only)
    assert all(isinstance(error, hf_burst.errors.BurstError) for error in caught.value.errors)
    sentence = r"holds pixel_values\. Of Gemma3n\w+ text and sound are served.*Give batches without the rest"
    assert pytest.RaisesExc(BatchError, match=sentence).matches(caught.value.errors[1])


@pytest.mark.parametrize(
    ("name", "more", "sentence"),
    [
        (GEMMA3N, {"token_type_ids": torch.ones(2, 37, dtype=torch.long)}, "holds token_type_ids"),
        (QWEN, {"input_features": torch.zeros(1, 9, 128)}, "holds input_features.* text, images and videos are served"),
        (GEMMA, {"pixel_values_videos": torch.zeros(4, 8)}, "holds pixel_values_videos"),
        (GEMMA3N, {"image_grid_thw": torch.ones(1, 3, dtype=torch.long)}, "holds image_grid_thw"),
        ("ChameleonForConditionalGeneration", IMAGE, r"holds pixel_values\. Of Chameleon\w+ text is served"),
        (GEMMA3N, {"mm_encoder_outputs": {"image": torch.zeros(4, 32)}}, "holds mm_encoder_outputs"),
    ],
)
def test_sound_video_and_features_are_refused(name: str, more: Part, sentence: str) -> None:
    with pytest.raises(BatchError, match=sentence):
        forward(0, 1, name, more)


def test_paligemma_needs_to_be_told_that_no_token_sees_later_ones() -> None:
    model = patch_under_check(tiny_wrapper("PaliGemmaForConditionalGeneration"))
    batch = make_batch("one sequence", model)
    model(**batch)
    kinds = batch.pop("token_type_ids")
    with pytest.raises(BatchError, match="Give token_type_ids of 1"):
        model(**batch)
    model(**batch, token_type_ids=torch.zeros_like(kinds))


def test_a_sharded_batch_is_refused_since_wrappers_read_whole_ones() -> None:
    model = patch_under_check(tiny_wrapper(GEMMA))
    collator = hf_burst.BurstCollator(lambda rows: rows[0])
    with pytest.raises(BatchError, match="reads whole sequences before they are cut"):
        model(**collator([models.make_batch("plain")]))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Blip2ForConditionalGeneration", "its forward requires pixel_values"),
        ("GitForCausalLM", "none is known as its language model"),
        ("MllamaForConditionalGeneration", "has cross attention"),
        ("Florence2ForConditionalGeneration", "is an encoder-decoder"),
    ],
)
def test_others_are_refused_with_a_sentence(name: str, sentence: str) -> None:
    model = tiny_wrapper(name)
    with pytest.raises(UnsupportedModelError, match=sentence):
        check_model(ModelView(model))


def test_it_can_be_unpatched() -> None:
    model: PreTrainedModel = tiny_wrapper("Kosmos2_5ForConditionalGeneration")
    before, loss = model.config._attn_implementation, model.text_model.loss_function
    batch = make_batch("one sequence", model)
    wanted = model(**batch).loss
    hf_burst.unpatch_model(patch_under_check(model))
    assert (model.config._attn_implementation, model.text_model.loss_function) == (before, loss)
    assert model(**batch).loss == wanted


def test_the_check_finds_the_wrapper_that_a_checkpoint_names() -> None:
    for name in (QWEN, "Mistral3ForConditionalGeneration", "Qwen3_5ForConditionalGeneration"):
        kind = getattr(transformers, name)
        assert find_target(kind.config_class(architectures=[name])).model_class is kind
    assert find_target(Gemma4Config()).model_class.__name__ == "Gemma4ForConditionalGeneration"
