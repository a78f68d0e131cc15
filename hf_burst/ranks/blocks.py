"""Blocks of tokens that see each other: finds them in a model's token numbers, and refuses unsupported ones."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..errors import UnsupportedModelError
from .layout import SequenceLayout

Blocks = tuple[tuple[tuple[int, int], ...], ...]  # for every row of the batch, tokens [start, stop)


def blocks_of(numbers: torch.Tensor, layout: SequenceLayout) -> Blocks:
    """Returns the runs of tokens in one document with the same number of at least 0; padding has none.

    Args:
        numbers (`torch.LongTensor` of shape `(batch, tokens)`): As `block_sequence_ids` of Transformers.
        layout ([`SequenceLayout`]): The layout of the batch.

    Raises:
        UnsupportedModelError: If tokens of one number are not adjacent, so that their keys are not an interval.
    """
    rows, real = numbers.cpu(), layout.real or ((0, numbers.shape[1]),) * len(numbers)
    return tuple(
        tuple(_runs(row, span, bounds)) for row, span, bounds in zip(rows, real, layout.documents, strict=True)
    )


def _runs(numbers: torch.Tensor, real: tuple[int, int], documents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the blocks of one row."""
    first, last = real[0], min(real[1], len(numbers))
    changes = (numbers[first + 1 : last] != numbers[first : last - 1]).nonzero().flatten() + first + 1
    edges, seen = set(documents), set[int]()
    bounds = sorted({first, last, *changes.tolist(), *(edge for edge in edges if first < edge < last)})
    for start, stop in pairwise(bounds):
        if start in edges:
            seen.clear()
        number = int(numbers[start])
        if number in seen:
            raise UnsupportedModelError(
                f"Token {start} sees tokens of an image or a prefix that do not lie beside it, with text between them. "
                "Over ranks a token sees one interval of others. Put them side by side."
            )
        if number >= 0:
            seen.add(number)
            yield start, stop


def longer_than(blocks: Blocks, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yields the row, start and stop of blocks longer than `tokens`."""
    for row, spans in enumerate(blocks):
        yield from ((row, start, stop) for start, stop in spans if stop - start > tokens)


def check_prefixes(types: torch.Tensor, layout: SequenceLayout, config: Any) -> None:
    """Raises for PaliGemma prefixes, whose tokens of type 0 see each other, if they are not contiguous, or longer than
    the sliding window of the language model's config. No rank has sent anything yet."""
    blocks = blocks_of(torch.where(types == 0, 0, -1), layout)
    window: int | None = getattr(config, "sliding_window", None)
    if window is not None:
        for _, start, stop in longer_than(blocks, window):
            refuse_window(start, stop, window - 1)


def refuse_window(start: int, stop: int, window: int) -> None:
    """Raises an error for tokens that see each other beyond a sliding window."""
    raise UnsupportedModelError(
        f"Tokens {start} to {stop - 1} see each other, {stop - start} of them, and the sliding window reaches {window} "
        "back. Make the image or the prefix shorter."
    )
