"""One video over several ranks: each encodes some of its frames."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from hf_burst.hf.admission import row_of
from hf_burst.hf.parts import towers
from hf_burst.ranks.collectives import all_gather
from tests.support import models
from tests.support.gradients import Result, assert_equal, loss_and_gradients
from tests.support.ranks import RankPool
from tests.support.tiny_pictures import WITH_VIDEO, Batch, seeing_batch
from tests.support.tiny_seeing import START, VIDEO, seeing_class, seeing_model

Ranks = Callable[[int], RankPool]
TOGETHER = (
    "Ernie4_5_VLMoe",
    "Gemma4",
    "Gemma4Unified",
    "LlavaNextVideo",
    "LlavaOnevision",
    "VideoLlama3",
    "VideoLlava",
)
TOGETHER += ("MiniCPMOcr", "MiniCPMV4_6", "MiniCPMV4_7")


def clip(family: str, frames: int) -> Batch:
    """One video of so many frames, of four tokens each, which text parts in some families."""
    batch = seeing_batch(family, "text", 25 + 9 * frames)
    ids, apart = batch["input_ids"], family.startswith("Qwen3")
    for frame in range(frames):
        place = 5 + frame * (9 if apart else 4)
        ids[0, place : place + 4] = VIDEO
        if apart or frame == 0:
            ids[0, place - 1] = START
    batch["mm_token_type_ids"] = 2 * (ids == VIDEO).long()
    pixels = torch.randn(16 * frames, 96, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return {**batch, "pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[frames, 4, 4]])}


def train(family: str, frames: int, patched: bool = False) -> tuple[Result, int]:
    """Loss and gradients of a pass, and how many patches its tower was given."""
    model, patches = seeing_model(family), list[int]()
    tower = next(module for name, module in model.named_modules() if name.endswith("visual"))
    tower.register_forward_pre_hook(lambda _, args, kwargs: patches.append(len(args[0])), with_kwargs=True)
    if patched:
        models.patch(model, models.config_of())
    return loss_and_gradients(model, clip(family, frames)), sum(patches)


def on_ranks(rank: int, size: int, family: str, frames: int) -> tuple[Result, int]:
    return train(family, frames, patched=True)


@pytest.mark.parametrize(
    ("family", "size", "frames"),
    [
        pytest.param(family, size, frames, marks=[pytest.mark.full] * (size != always))
        for family, always in (("Qwen2_5_VL", 4), ("Qwen3VL", 3), ("Qwen3_5", 2))
        for size, frames in ((2, 5), (3, 7), (4, 3))
    ],
)
def test_one_video_over_ranks_is_exact(ranks: Ranks, family: str, size: int, frames: int) -> None:
    wanted, patches = train(family, frames)
    found = ranks(size).run(on_ranks, family, frames)
    assert_equal([result for result, _ in found], wanted)
    assert patches == 16 * frames
    assert max(own for _, own in found) == 16 * -(-frames // size)
    assert sum(own for _, own in found) == 16 * max(frames, size), "a rank without a frame runs one for its weights"


def other_frames(rank: int, size: int, family: str, frames: int) -> tuple[Result, int]:
    """As if ranks had encoded each other's frames."""

    def swapped(tensor: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
        return all_gather(tensor, group)[::-1]

    with mock.patch.object(towers, "all_gather", swapped):
        return on_ranks(rank, size, family, frames)


def test_frames_in_the_place_of_others_are_seen(ranks: Ranks) -> None:
    wanted, _ = train("Qwen3VL", 4)
    with pytest.raises(AssertionError):
        assert_equal([result for result, _ in ranks(2).run(other_frames, "Qwen3VL", 4)], wanted)


def test_families_whose_frames_are_apart() -> None:
    assert sorted(family for family in WITH_VIDEO if row_of(seeing_class(family)).videos != "frames") == sorted(
        TOGETHER
    )


@pytest.mark.parametrize("family", sorted({*WITH_VIDEO} - {*TOGETHER}))
def test_towers_encode_frames_apart(family: str) -> None:
    owner: Any = seeing_model(family).base_model
    batch = seeing_batch(family, "video")
    given = {"pixel_values_videos": batch["pixel_values_videos"], "video_grid_thw": batch["video_grid_thw"]}
    single = [[1, high, wide] for times, high, wide in given["video_grid_thw"].tolist() for _ in range(times)]
    with torch.no_grad():
        whole = owner.get_video_features(**given)
        apart = owner.get_video_features(**{**given, "video_grid_thw": torch.tensor(single)})
    layers = zip([whole.pooler_output, *_deep(whole)], [apart.pooler_output, *_deep(apart)], strict=True)
    for wanted, found in layers:
        assert torch.equal(_rows(wanted), _rows(found))


def _deep(output: Any) -> Sequence[Any]:
    return output.get("deepstack_features") or ()


def _rows(features: Any) -> torch.Tensor:
    return features if isinstance(features, torch.Tensor) else torch.cat(list(features))
