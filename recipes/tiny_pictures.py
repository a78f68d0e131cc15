"""Batches with images, and videos, for the tiny models of `recipes/tiny_seeing.py`.

A family shows images by their numbers: each has its own pixels, and another size where the family takes sizes. So one
batch may hold some of them and another batch the others.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recipes.tiny_seeing import IMAGE, START, VIDEO, seeing_class

Batch = dict[str, torch.Tensor]
Shown = tuple[list[int], dict[str, Any]]  # how many tokens each image takes, and what the model is given of them
Show = Callable[[Sequence[int]], Shown]
WORDS = 56  # token ids of text are smaller
KINDS = ("text", "one image", "images", "with and without", "packed", "video")
_GRIDS = ((1, 4, 4), (1, 4, 6), (1, 6, 4))  # of images, in patches
_FILMS = ((3, 4, 4), (1, 4, 6))  # of videos
_SIDES = ((16, 32), (32, 16))  # of images, in pixels


def _draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _patches(*patch: int, grids: Sequence[tuple[int, ...]] = _GRIDS, prefix: str = "image", merge: int = 4) -> Show:
    """Images, or videos, in rows of patches, so many of which become a token."""

    def show(numbers: Sequence[int]) -> Shown:
        own = [grids[number] for number in numbers]
        counts = [frames * height * width for frames, height, width in own]
        pixels = [_draw(count, *patch, seed=1 + number) for count, number in zip(counts, numbers, strict=True)]
        name = "pixel_values" if prefix == "image" else "pixel_values_videos"
        return [count // merge for count in counts], {name: torch.cat(pixels), f"{prefix}_grid_thw": torch.tensor(own)}

    return show


def _images(tokens: int, *shape: int, dim: int = 0, **each: Any) -> Show:
    """Images of one size; `each` is what the model is given besides of every one."""

    def show(numbers: Sequence[int]) -> Shown:
        pixels = torch.stack([_draw(*shape, seed=1 + number) for number in numbers], dim)
        return [tokens] * len(numbers), {
            "pixel_values": pixels,
            **{name: torch.tensor([value] * len(numbers)) for name, value in each.items()},
        }

    return show


def _sized(tokens: int, sizes: Sequence[tuple[int, int]], *shape: int) -> Show:
    """Images of the same number of tokens and other sizes."""

    def show(numbers: Sequence[int]) -> Shown:
        counts, inputs = _images(tokens, *shape)(numbers)
        return counts, {**inputs, "image_sizes": torch.tensor([sizes[number] for number in numbers])}

    return show


def _tiled(numbers: Sequence[int]) -> Shown:
    """Images of 16 x 32 and of 16 x 16 pixels: the whole, and two tiles or one, each row of which ends in a token."""
    tiles, tokens = ([3, 2][number] for number in numbers), ([14, 10][number] for number in numbers)
    pixels = [torch.zeros(3, 3, 16, 16, dtype=torch.float64) for _ in numbers]
    for own, count, number in zip(pixels, tiles, numbers, strict=True):
        own[:count] = _draw(count, 3, 16, 16, seed=1 + number)
    sizes = torch.tensor([[(16, 32), (16, 16)][number] for number in numbers])
    return list(tokens), {"pixel_values": torch.stack(pixels), "image_sizes": sizes}


_QWEN = _patches(96)
_PLAIN = _images(4, 3, 16, 16)
_SHOW: dict[str, Show] = {
    "Aria": _images(2, 3, 16, 16),
    "AyaVision": _images(1, 3, 16, 16),
    "Cohere2Vision": _images(1, 3, 16, 16),
    "DeepseekVL": _PLAIN,
    "Ernie4_5_VLMoe": _patches(48),
    "GotOcr2": _images(1, 3, 64, 64),
    "Idefics2": _images(4, 1, 3, 16, 16, dim=1),
    "Idefics3": _images(1, 1, 3, 16, 16, dim=1),
    "InternVL": _PLAIN,
    "Janus": _PLAIN,
    "Lfm2Vl": _images(4, 16, 192, pixel_attention_mask=[1] * 16, spatial_shapes=[4, 4]),
    "LightOnOcr": _sized(2, _SIDES, 3, 32, 32),
    "Llama4": _PLAIN,
    "Llava": _PLAIN,
    **dict.fromkeys(("LlavaNext", "LlavaNextVideo", "LlavaOnevision"), _tiled),
    "Mistral3": _sized(2, _SIDES, 3, 32, 32),
    "PaddleOCRVL": _patches(3, 4, 4),
    "QianfanOCR": _PLAIN,
    "SmolVLM": _images(1, 1, 3, 16, 16, dim=1),
    "VipLlava": _PLAIN,
}
_SPLIT = ("Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")  # text stands between the frames of a video
_WATCH = {
    **dict.fromkeys(("Qwen2VL", "Qwen2_5_VL", *_SPLIT), _patches(96, grids=_FILMS, prefix="video")),
}
WITH_VIDEO = tuple(_WATCH)


def seeing_batch(family: str, kind: str = "images", length: int = 53) -> Batch:
    """A batch of one of `KINDS`; of `"with and without"` the second row has no image."""
    films = [0] if kind == "video" else []
    batch = _row(family, {"text": [], "one image": [0], "video": [0]}.get(kind, [0, 1]), films, length)
    if kind == "packed":
        bounds = torch.tensor([0, *_cuts(family), length], dtype=torch.int32)
        batch |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
    elif kind == "with and without":
        rows = _row(family, [], [], length, seed=1)
        batch |= {key: torch.cat([batch[key], rows[key]]) for key in rows}
    return batch


def documents(family: str, length: int = 53) -> list[Batch]:
    """The documents of the packed batch, each with its own images."""
    whole, bounds = seeing_batch(family, "images", length), [0, *_cuts(family), length]
    rows, parts = _row(family, [], [], length), []
    for images, start, end in zip(([0], [1], []), bounds, bounds[1:], strict=True):
        inputs = _SHOW.get(family, _QWEN)(images)[1] if images else {}
        parts.append({key: whole[key][:, start:end] for key in rows} | inputs)
    return parts


def _cuts(family: str) -> tuple[int, int]:
    """Where the second and the third document of the packed batch begin."""
    first, second = _SHOW.get(family, _QWEN)([0, 1])[0]
    return 5 + first + 2, 10 + first + second + 3


def _row(family: str, images: Sequence[int], films: Sequence[int], length: int, seed: int = 0) -> Batch:
    """One sequence with images and videos between its text."""
    ids = torch.randint(1, WORDS, (1, length), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.clone(), "mm_token_type_ids": torch.zeros_like(ids)}
    place, inputs = 5, {}
    shows = ((images, _SHOW.get(family, _QWEN), IMAGE), (films, _WATCH.get(family, _QWEN), VIDEO))
    for numbers, show, token in shows:
        tokens, own = show(numbers) if numbers else ([], {})
        frames = 3 if token == VIDEO and family in _SPLIT else 1
        for count in (count // frames for count in tokens for _ in range(frames)):
            batch["input_ids"][0, place - 1] = START
            batch["input_ids"][0, place : place + count] = token
            batch["mm_token_type_ids"][0, place : place + count] = 1 if token == IMAGE else 2
            place += count + 5
        inputs |= own
    batch["labels"][:, :3] = -100
    taken = inspect.signature(seeing_class(family).forward).parameters
    batch["moe_mm_token_type_ids"] = (batch["mm_token_type_ids"] > 0).long()
    return {key: value for key, value in batch.items() if key in taken} | inputs
