"""Batches with images, and videos, for the tiny models of `tests/support/tiny_seeing.py`.

A family shows images by their numbers: each has its own pixels, and another size where the family takes sizes. So one
batch may hold some of them and another batch the others.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch

from tests.support.tiny_seeing import IMAGE, START, VIDEO, seeing_class

Batch = dict[str, torch.Tensor]
Shown = tuple[list[int], dict[str, Any]]  # how many tokens each image takes, and what the model is given of them
Show = Callable[[Sequence[int]], Shown]
WORDS = 56  # token ids of text are smaller
KINDS = ("text", "one image", "images", "with and without", "packed", "video")
_GRIDS = ((1, 4, 4), (1, 4, 6), (1, 6, 4))  # of images, in patches
_FILMS = ((3, 4, 4), (1, 4, 6))  # of videos
_SIDES = ((16, 32), (32, 32))  # of images, in pixels


def _draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _patches(*patch: int) -> Show:
    """Images in rows of patches, four of which become a token."""

    def show(numbers: Sequence[int]) -> Shown:
        grids = [_GRIDS[number] for number in numbers]
        pixels = [_draw(high * wide, *patch, seed=1 + n) for n, (_, high, wide) in zip(numbers, grids, strict=True)]
        tokens = [high * wide // 4 for _, high, wide in grids]
        return tokens, {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}

    return show


def _films(*patch: int, apart: bool = False, times: int = 1, **each: Any) -> Show:
    """Videos in rows of patches, whose frames are `apart` in the text, or merged by `times`; `each` is what a model is
    given besides of every one."""

    def show(numbers: Sequence[int]) -> Shown:
        grids = [(_FILMS[number][0] * times, *_FILMS[number][1:]) for number in numbers]
        pixels = [_draw(prod(grid), *patch, seed=5 + number) for number, grid in zip(numbers, grids, strict=True)]
        whole = [prod(grid) // 4 // times for grid in grids]
        frames = [high * wide // 4 for count, high, wide in grids for _ in range(count)]
        more = {name: torch.tensor([value] * len(numbers)) for name, value in each.items()}
        inputs = {"pixel_values_videos": torch.cat(pixels), "video_grid_thw": torch.tensor(grids)}
        return frames if apart else whole, inputs | more

    return show


def _frames(tokens: int, *shape: int, places: list[list[int]]) -> Show:
    """Videos of three and of one frame, which lie apart in the text; `places` are those of a frame's patches."""

    def show(numbers: Sequence[int]) -> Shown:
        counts = [(3, 1)[number] for number in numbers]
        frames = [_draw(count, *shape, seed=5 + number) for number, count in zip(numbers, counts, strict=True)]
        inputs = {"pixel_values_videos": torch.cat(frames), "num_frames_per_video": torch.tensor(counts)}
        return [tokens] * sum(counts), {**inputs, "video_position_ids": torch.tensor([places] * sum(counts))}

    return show


def _clips(tokens: int, frames: int) -> Show:
    """Videos of so many whole frames."""

    def show(numbers: Sequence[int]) -> Shown:
        clips = [_draw(frames, 3, 16, 16, seed=5 + number) for number in numbers]
        return [tokens] * len(numbers), {"pixel_values_videos": torch.stack(clips)}

    return show


def _images(tokens: int, *shape: int, dim: int = 0, **each: Any) -> Show:
    """Images of one size; `each` is what the model is given besides of every one."""

    def show(numbers: Sequence[int]) -> Shown:
        pixels = torch.stack([_draw(*shape, seed=1 + number) for number in numbers], dim)
        more = {name: torch.tensor([value] * len(numbers)) for name, value in each.items()}
        return [tokens] * len(numbers), {"pixel_values": pixels, **more}

    return show


def _sized(numbers: Sequence[int]) -> Shown:
    """Images with room for larger ones; 16 x 16 pixels become a token."""
    sizes = [_SIDES[number] for number in numbers]
    inputs = _images(0, 3, 32, 32)(numbers)[1]
    return [high * wide // 256 for high, wide in sizes], {**inputs, "image_sizes": torch.tensor(sizes)}


def _tiled(numbers: Sequence[int]) -> Shown:
    """Images of 16 x 32 and of 16 x 16 pixels: the whole, and two tiles or one, each row of which ends in a token."""
    tiles, tokens = ([3, 2][number] for number in numbers), ([14, 10][number] for number in numbers)
    pixels = [torch.zeros(3, 3, 16, 16, dtype=torch.float64) for _ in numbers]
    for own, count, number in zip(pixels, tiles, numbers, strict=True):
        own[:count] = _draw(count, 3, 16, 16, seed=1 + number)
    sizes = torch.tensor([[(16, 32), (16, 16)][number] for number in numbers])
    return list(tokens), {"pixel_values": torch.stack(pixels), "image_sizes": sizes}


def _merged(numbers: Sequence[int]) -> Shown:
    """With how many patches become one along a side."""
    tokens, inputs = _patches(48)(numbers)
    return tokens, {**inputs, "image_merge_sizes": torch.full((len(numbers),), 2)}


def _with_lines(numbers: Sequence[int]) -> Shown:
    """Every row of patches ends in a token, and two enclose an image."""
    _, inputs = _patches(48)(numbers)
    return [rows * (columns + 1) + 2 for _, rows, columns in (inputs["image_grid_thw"] // 2).tolist()], inputs


def _by_height(numbers: Sequence[int]) -> Shown:
    """Grids without time."""
    tokens, inputs = _patches(48)(numbers)
    return tokens, {"pixel_values": inputs["pixel_values"], "image_grid_hw": inputs["image_grid_thw"][:, 1:]}


def _in_one_row(numbers: Sequence[int], merge: int = 16) -> Shown:
    """The patches of all images lie side by side in one wide image."""
    sizes = [((4, 4), (4, 8))[number] for number in numbers]
    pixels = [_draw(1, 3, 4, 4 * high * wide, seed=1 + n) for n, (high, wide) in zip(numbers, sizes, strict=True)]
    tokens = [high * wide // merge for high, wide in sizes]
    return tokens, {"pixel_values": torch.cat(pixels, -1), "target_sizes": torch.tensor(sizes)}


def _local(tokens: int, whole: int, side: int, local: int) -> Show:
    """Images of which some have parts of higher resolution besides."""

    def show(numbers: Sequence[int]) -> Shown:
        counts, inputs = _images(tokens, 3, whole, whole)(numbers)
        parts = [(0, 2)[number] for number in numbers]
        if any(parts):
            inputs["pixel_values_local"] = _draw(sum(parts), 3, side, side, seed=9)
        counts = [own + local * part for own, part in zip(counts, parts, strict=True)]
        return counts, {**inputs, "num_local_patches": parts}

    return show


def _films_in_one_row(numbers: Sequence[int], merge: int = 16) -> Shown:
    """As images, one video after the other."""
    tokens, inputs = _in_one_row(numbers, merge)
    return tokens, {f"{name}_videos": value for name, value in inputs.items()}


def _gridded(numbers: Sequence[int]) -> Shown:
    """Parts of which it is known where they lie."""
    tokens, inputs = _local(3, 64, 64, 1)(numbers)
    places = [((0, 0), (2, 1))[number] for number in numbers]
    return [own + rows for own, (_, rows) in zip(tokens, places, strict=True)], {**inputs, "patches_grid": places}


def _documented(numbers: Sequence[int]) -> Shown:
    """Pages of one row."""
    tokens, inputs = _images(1, 1, 3, 16, 16, dim=1)(numbers)
    return tokens, {**inputs, "pixel_attention_mask": torch.ones(1, len(numbers), dtype=torch.bool)}


def _wide(numbers: Sequence[int]) -> Shown:
    """As tiled images, of tiles that are twice as high and wide."""
    tokens, inputs = _tiled(numbers)
    pixels = inputs["pixel_values"].repeat_interleave(2, -1).repeat_interleave(2, -2)
    return tokens, {"pixel_values": pixels, "image_sizes": inputs["image_sizes"] * 2}


def _both(numbers: Sequence[int]) -> Shown:
    """Images in two resolutions."""
    tokens, inputs = _images(16, 3, 32, 32)(numbers)
    return tokens, {**inputs, "high_res_pixel_values": _images(0, 3, 64, 64)(numbers)[1]["pixel_values"]}


_SIXTEEN = [[place % 4, place // 4] for place in range(16)]
_FOUR = [[0, 0], [1, 0], [0, 1], [1, 1]]
_QWEN = _patches(96)
_PLAIN = _images(4, 3, 16, 16)
_SHOW: dict[str, Show] = {
    "Aria": _images(2, 3, 16, 16),
    **dict.fromkeys(("AyaVision", "Cohere2Vision"), _images(1, 3, 16, 16)),
    **dict.fromkeys(("Cosmos3Edge", "Ernie4_5_VLMoe"), _patches(48)),
    "DeepseekOcr2": _local(145, 64, 64, 144),
    "DeepseekVLHybrid": _both,
    "Emu3": _images(6, 3, 4, 4, image_sizes=[4, 4]),
    "FuyuForCausalLM": _images(16, 16, 48),
    "Gemma3": _PLAIN,
    "Gemma4": _images(4, 16, 48, image_position_ids=_SIXTEEN),
    "Gemma4Unified": _images(4, 4, 432, image_position_ids=_FOUR),
    "GotOcr2": _images(1, 3, 64, 64),
    "Granite4Vision": _wide,
    "GraniteDocling": _documented,
    "HunYuanVL": _with_lines,
    "Idefics2": _images(4, 1, 3, 16, 16, dim=1),
    **dict.fromkeys(("Idefics3", "SmolVLM"), _images(1, 1, 3, 16, 16, dim=1)),
    **dict.fromkeys(("DeepseekVL", "InternVL", "Janus", "Llama4", "Llava", "Ovis2"), _PLAIN),
    **dict.fromkeys(("PaliGemma", "QianfanOCR"), _PLAIN),
    **dict.fromkeys(("Kimi_K25", "PaddleOCRVL"), _patches(3, 4, 4)),
    "Lfm2Vl": _images(4, 16, 192, pixel_attention_mask=[1] * 16, spatial_shapes=[4, 4]),
    **dict.fromkeys(("LightOnOcr", "Mistral3"), _sized),
    **dict.fromkeys(("LlavaNext", "LlavaNextVideo", "LlavaOnevision"), _tiled),
    "MiniCPMOcr": partial(_in_one_row, merge=4),
    **dict.fromkeys(("MiniCPMV4_6", "MiniCPMV4_7"), _in_one_row),
    "NemotronH_Omni_Reasoning_V3": _by_height,
    "Step3p7": _local(4, 16, 16, 4),
    "UnlimitedOcr": _gridded,
    "VideoLlama3": _merged,
    **dict.fromkeys(("VideoLlava", "VipLlava"), _PLAIN),
}
# text stands between the frames of a video
_APART = ("CohereCompass", "Cosmos3Omni", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")
_GLM = ("Glm46V", "Glm4v", "Glm4vMoe", "GlmOcr")  # frames are images in the text, and no batch holds both
_WATCH: dict[str, Show] = {
    **dict.fromkeys(("Exaone4_5_", "HyperCLOVAXVisionV2", "Lfm3Vl", "MuseGlimmer", "MuseSpark"), _films(96)),
    **dict.fromkeys(("Qwen2VL", "Qwen2_5OmniThinker", "Qwen2_5_VL"), _films(96)),
    **dict.fromkeys((*_APART, *_GLM), _films(96, apart=True)),
    "Cosmos3Edge": _films(48, apart=True),
    "Ernie4_5_VLMoe": _films(48, times=2),
    "Qwen3OmniMoeThinker": _films(96, video_second_per_grid=1.0),
    "Gemma4": _frames(4, 16, 48, places=_SIXTEEN),
    "Gemma4Unified": _frames(4, 4, 432, places=_FOUR),
    "LlavaNextVideo": _clips(3, 3),
    "LlavaOnevision": _clips(4, 3),
    "VideoLlama3": _films(48, video_merge_sizes=2),
    "VideoLlava": _clips(15, 3),
    **dict.fromkeys(("MiniCPMV4_6", "MiniCPMV4_7"), _films_in_one_row),
    "MiniCPMOcr": partial(_films_in_one_row, merge=4),
}
WITH_VIDEO = tuple(_WATCH)


def seeing_batch(family: str, kind: str = "images", length: int = 53) -> Batch:
    """A batch of one of `KINDS`. Of `"with and without"` the second row has no image; an image comes before videos."""
    images, films = {"text": [], "one image": [0], "video": [0]}.get(kind, [0, 1]), [0, 1] if kind == "video" else []
    batch = _row(family, [] if films and family in _GLM else images, films, length)
    length = batch["input_ids"].shape[1]
    if kind == "packed":
        bounds = torch.tensor([0, *_cuts(family), length], dtype=torch.int32)
        batch |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
        batch["labels"][:, list(_cuts(family))] = -100
    elif kind == "with and without":
        rows = _row(family, [], [], length, seed=1)
        batch |= {key: torch.cat([batch[key], rows[key]]) for key in rows}
    return batch


def documents(family: str, length: int = 53) -> list[Batch]:
    """The documents of the packed batch, each with its own images."""
    whole = seeing_batch(family, "images", length)
    bounds = [0, *_cuts(family), whole["input_ids"].shape[1]]
    parts = []
    for images, (start, end) in zip(([0], [1], []), pairwise(bounds), strict=True):
        inputs = _SHOW.get(family, _QWEN)(images)[1] if images else {}
        parts.append({key: whole[key][:, start:end] for key in _row(family, [], [], length)} | inputs)
    return parts


def _cuts(family: str) -> tuple[int, int]:
    """Where the second and the third document of the packed batch begin."""
    first, second = _SHOW.get(family, _QWEN)([0, 1])[0]
    return 5 + first + 2, 10 + first + second + 3


def _row(family: str, images: Sequence[int], films: Sequence[int], length: int, seed: int = 0) -> Batch:
    """One sequence, of at least this length, with images and videos between its text."""
    spans: list[tuple[int, int, int]] = []
    inputs: dict[str, Any] = {}
    frame = IMAGE if family in _GLM else VIDEO
    for numbers, show, token in ((images, _SHOW.get(family, _QWEN), IMAGE), (films, _WATCH.get(family, _QWEN), frame)):
        tokens, own = show(numbers) if numbers else ([], {})
        spans += [(count, token, 1 if numbers is images else 2) for count in tokens]
        inputs |= own
    length = max(length, 25 + sum(count for count, _, _ in spans) + 5 * max(0, len(spans) - 2))
    ids = torch.randint(1, WORDS, (1, length), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.clone(), "mm_token_type_ids": torch.zeros_like(ids)}
    place = 5
    for count, token, sort in spans:
        ids[0, place - 1] = START
        ids[0, place : place + count] = token
        batch["mm_token_type_ids"][0, place : place + count] = sort
        place += count + 5
    batch["moe_mm_token_type_ids"] = (batch["mm_token_type_ids"] > 0).long()
    if family == "Gemma3":
        batch["token_type_ids"] = batch["mm_token_type_ids"]
    elif family == "PaliGemma":  # 0 is the prefix, with the images and the question
        batch["token_type_ids"] = (torch.arange(length)[None] >= place).long() if spans else torch.ones_like(ids)
    batch["labels"][:, :3] = -100
    taken = inspect.signature(seeing_class(family).forward).parameters
    return {key: value for key, value in batch.items() if key in taken} | inputs
