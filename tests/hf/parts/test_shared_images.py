"""Rows that begin alike and have the same images: their tokens are computed once by the language model."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_burst
from hf_burst.hf.batches.joining import Joined
from hf_burst.hf.batches.modalities import same_for_every_text
from hf_burst.hf.groups import PATCH
from tests.support import models
from tests.support.gradients import Result, assert_equal, loss_and_gradients
from tests.support.op_graphs import WAITS
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_pictures import Batch, seeing_batch
from tests.support.tiny_seeing import FAMILIES, seeing_model

Ranks = Callable[[int], RankPool]
ROWS = 3


PER_TOKEN = ("input_ids", "labels", "mm_token_type_ids", "position_ids")


def rows_alike(family: str, same_images: bool = True, length: int = 53) -> Batch:
    """Three rows with the same images, whose last tokens are others."""
    batch = seeing_batch(family, "images", length)
    length = batch["input_ids"].shape[1]
    rows = {}
    for key in ("input_ids", "labels", "mm_token_type_ids"):
        if key in batch:
            rows[key] = batch[key].repeat(ROWS, 1)
    for row in range(ROWS):
        for place in range(length - 3, length):
            rows["input_ids"][row, place] = rows["labels"][row, place] = 5 + (row + place) % 7
    others = {key: value for key, value in batch.items() if key not in rows}
    more = {
        key: value * ROWS if isinstance(value, list) else torch.cat([value] * ROWS) for key, value in others.items()
    }
    if not same_images:
        more["pixel_values"] = more["pixel_values"].clone()
        more["pixel_values"][-1] += 1
    return {**rows, **more}


def documents(family: str, same_images: bool, length: int = 53) -> list[Batch]:
    """Those rows, each by itself, with positions that are given."""
    whole = rows_alike(family, same_images, length)
    rows = [{key: value[row : row + 1] for key, value in whole.items() if key in PER_TOKEN} for row in range(ROWS)]
    for row, batch in enumerate(rows):
        for key in whole.keys() - {*PER_TOKEN}:
            each = len(whole[key]) // ROWS
            batch[key] = whole[key][row * each : (row + 1) * each]
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
        batch["labels"][:, 0] = -100
    return rows


def packed(family: str, same_images: bool, length: int = 53, rows: int = 1) -> Batch:
    """The documents in one row, or in several that hold as many of them again."""
    parts = documents(family, same_images, length)
    batch = {key: torch.cat([part[key] for part in parts], int(key in PER_TOKEN)) for key in parts[0]}
    return {key: torch.cat([value] * rows) for key, value in batch.items()}


def one_by_one(family: str, same_images: bool, length: int = 53) -> Result:
    """The mean over documents that have as many labels each, of an unpatched model."""
    model = seeing_model(family)
    found = [loss_and_gradients(model, batch)[0] for batch in documents(family, same_images, length)]
    gradients = {name: weight.grad / ROWS for name, weight in model.named_parameters() if weight.grad is not None}
    return sum(found) / ROWS, gradients


def on_packed(
    rank: int, size: int, family: str, same: bool, length: int = 53, rows: int = 1, share: Any = True
) -> tuple[Result, set[str]]:
    model = models.patch(seeing_model(family), hf_burst.BurstConfig(share_prefixes=share))
    found = loss_and_gradients(model, packed(family, same, length, rows))
    part = getattr(model, PATCH).tokens.beginnings
    return found, part.logged


def train(family: str, same_images: bool = True) -> Result:
    return loss_and_gradients(seeing_model(family), rows_alike(family, same_images))


def on_ranks(rank: int, size: int, family: str, same_images: bool = True) -> tuple[Result, set[str]]:
    model = models.patch(seeing_model(family), hf_burst.BurstConfig(share_prefixes=True))
    found = loss_and_gradients(model, rows_alike(family, same_images))
    part = getattr(model, PATCH).tokens.beginnings
    return found, part.logged


SOME = ("Qwen3VL", "Mistral3", "Qwen3_5")
IN_ONE_ROW = ("MiniCPMOcr", "MiniCPMV4_6", "MiniCPMV4_7")  # are the patches of all images


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SOME + IN_ONE_ROW])
def test_every_family_is_exact(ranks: Ranks, family: str) -> None:
    """Whether it shares or not."""
    found = ranks(2).run(on_ranks, family)
    assert_equal([result for result, _ in found], train(family))


@pytest.mark.parametrize("family", SOME)
def test_rows_with_the_same_images_share_their_tokens(ranks: Ranks, family: str) -> None:
    found = ranks(2).run(on_ranks, family)
    assert_equal([result for result, _ in found], train(family))
    assert all(told == {"joined"} for _, told in found)


LATER = ("InternVL", "Mistral3", "Qwen2_5_VL")
PACKED = ("InternVL", "Lfm2Vl", "Llama4", "Llava", "Mistral3", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5")


@pytest.mark.parametrize(
    ("family", "same"),
    [
        pytest.param(family, same, marks=[pytest.mark.full] * (family in LATER or (number + place) % 2 > 0))
        for number, family in enumerate(PACKED)
        for place, same in enumerate((False, True))
    ],
)
def test_documents_of_a_packed_row_share_no_images_of_others(ranks: Ranks, family: str, same: bool) -> None:
    """Beginnings are shared where all documents have the same images, and only there."""
    wanted = one_by_one(family, same)
    alone, told = on_packed(0, 1, family, same)
    found = ranks(2).run(on_packed, family, same)
    assert_equal([alone], wanted)
    assert_equal([result for result, _ in found], wanted)
    assert ("joined" in told) == same


@pytest.mark.parametrize(("length", "rows", "share"), [(300, 1, "auto"), (53, 2, True)])
def test_rows_of_documents_and_the_default(length: int, rows: int, share: Any) -> None:
    found, told = on_packed(0, 1, "Qwen3VL", False, length, rows, share)
    assert_equal([found], one_by_one("Qwen3VL", False, length))
    assert "joined" not in told
    assert "joined" in on_packed(0, 1, "Qwen3VL", True, length, rows, share)[1]


def test_one_process(ranks: Ranks) -> None:
    result, told = on_ranks(0, 1, "Qwen3VL")
    assert_equal([result], train("Qwen3VL"))
    assert told == {"joined"}


@pytest.mark.parametrize(
    ("family", "same", "why"),
    [
        ("Qwen3VL", False, "are not the same for every text"),
        ("Gemma3", True, "tokens of images may see later ones"),
    ],
)
def test_others_are_computed_row_by_row(ranks: Ranks, family: str, same: bool, why: str) -> None:
    found = ranks(2).run(on_ranks, family, same)
    assert_equal([result for result, _ in found], train(family, same))
    assert all(why in next(iter(told)) for _, told in found)


def at_other_places(rank: int, size: int) -> None:
    """A model that gives every row positions of its own."""
    model = models.patch(seeing_model("Qwen3VL"), hf_burst.BurstConfig(share_prefixes=True))
    inner = model.model
    own = inner.get_rope_index

    def shifted(*args: Any, **kwargs: Any) -> Any:
        positions, *rest = own(*args, **kwargs)
        return positions + torch.arange(ROWS)[:, None], *rest

    with mock.patch.object(inner, "get_rope_index", shifted):
        model(**rows_alike("Qwen3VL"))


def test_positions_that_differ_are_an_error(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"gives texts that begin alike other positions. Set BurstConfig"):
        ranks(2).run(at_other_places)


def test_parts_that_belong_to_no_row() -> None:
    """Two images of one row and four of another, which are twice the same two."""
    config = seeing_model("Qwen3VL").config
    image = config.image_token_id
    batch: Batch = {"pixel_values": torch.tensor([[1.0], [2.0], [1.0], [2.0]])}
    for row, same in (([image, image, 5, 5], True), ([image, 5, 5, 5], False)):
        batch["input_ids"] = torch.tensor([row, [image, image, 5, 6]])
        assert same_for_every_text(batch, config) == same
    film = config.video_token_id  # of which one row has two, and another one image more
    batch["input_ids"] = torch.tensor([[image, image, image, 5], [image, film, film, 5]])
    assert not same_for_every_text(batch | {"pixel_values_videos": torch.ones(2, 1)}, config)
    assert not same_for_every_text(batch | {"pixel_values": torch.ones(3, 1)}, config)
    assert not same_for_every_text(batch | {"pixel_values": [1, 2]}, config)
    assert not same_for_every_text(batch, models.make_model("llama").config)
    assert same_for_every_text({"input_ids": batch["input_ids"], "num_items_in_batch": torch.ones(1)}, config)


class Waits(TorchDispatchMode):
    """Counts the operators whose result a host would wait for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(name in str(func) for name in (*WAITS, "aten.equal"))
        return func(*args, **(kwargs or {}))


def test_texts_with_images_are_compared_at_once() -> None:
    batch, config = rows_alike("Qwen3VL"), seeing_model("Qwen3VL").config
    mask = {"attention_mask": torch.ones_like(batch["input_ids"])}
    for more, model, waits in (
        ({}, config, 1),  # whatever the number of texts and values
        ({"pixel_values": batch["pixel_values"][1:]}, config, 0),
        ({**mask, "pixel_values": [1, 2]}, config, 0),
        (mask, models.make_model("llama").config, 0),
    ):
        with Waits() as seen:
            same_for_every_text(batch | more, model)
        assert seen.count == waits


def without_embeddings_of_others(rank: int, size: int, family: str) -> tuple[Result, set[str]]:
    """As if the embeddings of the row were those of the first text alone."""
    inputs = Joined.inputs

    def first(joined: Joined, whole: Any, *others: Any) -> dict[str, Any]:
        row = inputs(joined, whole, *others)
        embeds = whole["inputs_embeds"][:1]
        row["inputs_embeds"] = torch.cat([embeds, row["inputs_embeds"][:, embeds.shape[1] :]], 1)
        row["inputs_embeds"] = row["inputs_embeds"].roll(1, 1)
        return row

    with mock.patch.object(Joined, "inputs", first):
        return on_ranks(rank, size, family)


def test_other_embeddings_are_noticed(ranks: Ranks) -> None:
    found = ranks(2).run(without_embeddings_of_others, "Qwen3VL")
    with pytest.raises(AssertionError):
        assert_equal([result for result, _ in found], train("Qwen3VL"))
