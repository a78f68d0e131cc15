"""Images whose tokens see each other (Gemma 3 and 4, PaliGemma): exact over ranks, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from hf_burst.attention import SequenceLayout
from hf_burst.errors import BurstError, UnsupportedModelError
from hf_burst.hf.attention import LazyMask, masks_with_blocks
from hf_burst.hf.parts import tokens
from hf_burst.ranks.layout import blocks_of
from tests.support import models
from tests.support.gradients import Result, assert_equal, loss_and_gradients
from tests.support.ranks import RankPool
from tests.support.tiny_pictures import Batch, seeing_batch
from tests.support.tiny_seeing import seeing_model

Ranks = Callable[[int], RankPool]
FAMILIES = ("Gemma3", "Gemma4", "Gemma4Unified", "PaliGemma")
LESS_MEMORY: dict[str, Any] = {"tiled_mlp": 4, "activation_offloading": 1.0, "layers_per_checkpoint": 2}


def train(family: str, kind: str, patched: bool = False, checkpoints: bool = False, **settings: Any) -> Result:
    """Loss and gradients of a pass over a batch of one of `KINDS`."""
    model = seeing_model(family)
    side, kind = kind.partition(" padded")[::2] if "padded" in kind else ("", kind)
    batch = padded(seeing_batch(family, "images"), side) if side else seeing_batch(family, kind)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if patched:
        models.patch(model, models.config_of(**settings))
    return loss_and_gradients(model, batch, single=checkpoints)


def padded(batch: Batch, side: str) -> Batch:
    """Two rows with the same images; the second one has lost some text at its end, and has padding on this side."""
    rows = {}
    for name in ("input_ids", "labels", "token_type_ids", "mm_token_type_ids"):
        if name in batch:
            fill = torch.full((1, 6), -100 if name == "labels" else 0)
            short = [batch[name][:, :-6], fill]
            rows[name] = torch.cat([batch[name], torch.cat(short if side == "right" else short[::-1], 1)])
    mask = torch.ones_like(rows["input_ids"])
    mask[1, slice(-6, None) if side == "right" else slice(6)] = 0
    twice = {name: torch.cat([value, value]) for name, value in batch.items() if name not in rows}
    return {**rows, **twice, "attention_mask": mask}


def on_ranks(rank: int, size: int, family: str, kind: str, **settings: Any) -> Result:
    return train(family, kind, patched=True, **settings)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=[pytest.mark.full] * ((number + place) % 3 > 0))
        for number, family in enumerate(FAMILIES)
        for place, kind in enumerate(("text", "one image", "with and without", "left padded", "right padded"))
    ],
)
def test_batches_of_other_kinds_are_exact(ranks: Ranks, family: str, kind: str) -> None:
    wanted = train(family, kind)
    for size in (1, 4):
        assert_equal(ranks(size).run(on_ranks, family, kind), wanted)


def scheduled(rank: int, size: int, schedule: str) -> Result:
    return train("Gemma3", "images", patched=True, schedule=schedule)


@pytest.mark.parametrize("schedule", ["ulysses", "burst"])
def test_every_schedule_is_exact(ranks: Ranks, schedule: str) -> None:
    assert_equal(ranks(2).run(scheduled, schedule), train("Gemma3", "images"))


def checkpointed(rank: int, size: int, family: str, settings: dict[str, Any]) -> Result:
    return train(family, "images", patched=True, checkpoints=True, **settings)


@pytest.mark.parametrize("settings", [{"schedule": "ulysses"}, LESS_MEMORY, {"attention_keep": 0.5}], ids=str)
def test_less_memory_changes_nothing(ranks: Ranks, settings: dict[str, Any]) -> None:
    wanted = train("Gemma3", "images", checkpoints=True)
    assert_equal(ranks(2).run(checkpointed, "Gemma3", settings), wanted, 1e-5)  # norms in fp32


def without_blocks(rank: int, size: int) -> Result:
    """As if the masks of the wrapper were lost where the tokens are cut."""
    with mock.patch.object(tokens, "masks_with_blocks", return_value=()):
        return train("Gemma3", "images", patched=True)


def test_a_block_that_is_treated_as_causal_is_noticed(ranks: Ranks) -> None:
    with pytest.raises(AssertionError):
        assert_equal(ranks(2).run(without_blocks), train("Gemma3", "images"))


def refused(rank: int, size: int, types: list[int]) -> str:
    """The sentence on a batch of a PaliGemma with these types of tokens."""
    batch = seeing_batch("PaliGemma", "text", length=len(types))
    batch["token_type_ids"] = torch.tensor([types])
    model = seeing_model("PaliGemma")
    models.patch(model, models.config_of())
    try:
        model(**batch)
    except BurstError as problem:
        return str(problem)
    return ""


def refused_early(rank: int, size: int, types: list[int]) -> str:
    """As if no mask came to the cut: what is refused there is refused before ranks agree, too, in all groups."""
    with mock.patch.object(tokens, "masks_with_blocks", return_value=()):
        return refused(rank, size, types)


def test_prefixes_are_refused_before_the_model_runs(ranks: Ranks) -> None:
    assert all("sliding window reaches 39 back" in said for said in ranks(2).run(refused_early, [0] * 50 + [1] * 10))


def test_masks_of_other_kinds_are_not_lost() -> None:
    layout = SequenceLayout(4, (0,), ((0, 4),))
    with pytest.raises(UnsupportedModelError, match=r"a mask of shape \(1, 1, 4, 4\)"):
        masks_with_blocks({"full_attention": torch.ones(1, 1, 4, 4, dtype=torch.bool)}, layout)
    odd = LazyMask({"mask_function": len}, sharded=True)
    odd.parts = frozenset({"causal_mask_function", "or_masks", "of_ones_own"})
    for index in (0, None, slice(2)):
        with pytest.raises(UnsupportedModelError, match=r"reads the attribute '\[.*\]' of its attention mask"):
            odd[index]
    with pytest.raises(UnsupportedModelError, match="of_ones_own"):
        masks_with_blocks(odd, layout)
    assert masks_with_blocks(torch.ones(1, 4), layout) == masks_with_blocks(None, layout) == ()


def test_blocks_beyond_the_window_are_refused(ranks: Ranks) -> None:
    assert all("sliding window reaches 39 back" in said for said in ranks(2).run(refused, [0] * 50 + [1] * 10))


def test_blocks_with_text_between_are_refused(ranks: Ranks) -> None:
    said = ranks(2).run(refused, [0] * 6 + [1] * 6 + [0] * 4 + [1] * 8)
    assert all("do not lie beside it" in own for own in said)


def test_blocks_are_cut_by_documents_and_padding() -> None:
    numbers = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 2, 2, 0]])
    layout = SequenceLayout(10, (0,), ((0, 3, 9, 10),))
    assert blocks_of(numbers, layout) == (((1, 3), (3, 4), (5, 7), (7, 9), (9, 10)),)
    assert blocks_of(numbers, replace(layout, real=((2, 8),))) == (((2, 3), (3, 4), (5, 7), (7, 8)),)
    with pytest.raises(UnsupportedModelError):
        blocks_of(numbers, SequenceLayout(10, (0,), ((0, 10),)))
