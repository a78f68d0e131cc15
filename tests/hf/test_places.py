"""Llama 4 scales queries by where tokens stand in a row, whatever their position ids are: padding counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_burst
from hf_burst.errors import BatchError
from hf_burst.hf.groups import PATCH
from tests.hf.batches.test_shared_beginnings import make_model
from tests.support import models
from tests.support.gradients import Result, assert_equal, loss_and_gradients
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
TOKENS, BEGINNING = 43, 20  # of rows, and of what they have in common: a temperature is that of 8 tokens
TOLERANCE = 1e-6  # temperatures are fp32


def rows(kind: str) -> dict[str, torch.Tensor]:
    """Two rows that begin alike, and differ in their padding where they are padded."""
    ids = torch.randint(1, 60, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    ids[1, :BEGINNING] = ids[0, :BEGINNING].clone()
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "offset":
        batch["position_ids"] = (torch.arange(TOKENS) + 5).expand(2, -1)
    if "padded" in kind:
        mask = torch.ones_like(ids)
        for row, padding in enumerate((3, 11)):
            ids[row] = ids[row].roll(padding)
            mask[row, :padding] = 0
        batch["labels"] = ids.masked_fill(mask.cumsum(1) < 2, -100)
        batch["attention_mask"] = mask
    if kind == "padded with positions":
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return batch


def train(rank: int, size: int, kind: str, share: bool, collated: bool = False) -> tuple[Result, set[str]]:
    config = hf_burst.BurstConfig(share_prefixes=share)
    model = models.patch(make_model("Llama4ForCausalLM"), config)
    batch: dict[str, Any] = rows(kind)
    batch = hf_burst.shard_batch(batch, config=config) if collated else batch
    found = loss_and_gradients(model, batch, single=True)
    part = getattr(model, PATCH).tokens.beginnings
    return found, part.logged


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        pytest.param(kind, share, marks=[pytest.mark.full] * ((number + place) % 2 > 0))
        for number, kind in enumerate(("offset", "padded", "padded with positions"))
        for place, share in enumerate((False, True))
    ],
)
def test_temperatures_follow_places(ranks: Ranks, kind: str, share: bool) -> None:
    wanted = loss_and_gradients(make_model("Llama4ForCausalLM"), rows(kind), single=True)
    alone, told = train(0, 1, kind, share)
    assert_equal([alone], wanted, TOLERANCE)
    assert_equal([result for result, _ in ranks(2).run(train, kind, share)], wanted, TOLERANCE)
    assert ("joined" in told) == (share and kind == "offset")


def test_batches_that_arrive_sharded(ranks: Ranks) -> None:
    for kind in ("offset", "padded with positions"):
        wanted = loss_and_gradients(make_model("Llama4ForCausalLM"), rows(kind), single=True)
        found = ranks(2).run(train, kind, False, True)
        assert_equal([result for result, _ in found], wanted, TOLERANCE)
    batch = rows("padded with positions")
    batch["labels"][:, : 11 + BEGINNING] = -100  # or a label would count in both rows
    config = hf_burst.BurstConfig(share_prefixes=True)
    with pytest.raises(BatchError, match=r"scaled by places that count padding.* Leave share_prefixes=True out"):
        models.patch(make_model("Llama4ForCausalLM"), config)(**hf_burst.shard_batch(batch, config=config))
