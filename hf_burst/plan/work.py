"""What a layer makes the ranks compute, on any machine: pairs counted in closed form, by rank and by step of a ring."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from .mask import Mask
from .tiles import Tile

_MOST_MEETINGS = 8192  # pairs of chunks in one document; more are not gone through


def tile_pairs(tile: Tile) -> int:
    """How many pairs a tile admits in one row of the batch."""
    return tile.band.pairs(tile.q[1] - tile.q[0], tile.k[1] - tile.k[0])


def pairs_of_chunks(masks: Sequence[Mask], boundaries: Sequence[int], weights: Sequence[int] = ()) -> list[int]:
    """How many pairs have their query in each chunk between two boundaries. Each mask is computed once, or as often as
    its weight says."""
    totals = [0] * (len(boundaries) - 1)
    for mask, weight in zip(masks, weights or (1,) * len(masks), strict=True):
        by_documents, before = _cumulative_pairs(mask), []  # pairs whose query lies before each boundary
        for token in boundaries:
            index = bisect_right(mask.documents, token) - 1
            start, pairs = mask.documents[index], by_documents[index]
            if token > start:
                pairs += mask.band.pairs(token - start, mask.documents[index + 1] - start)
            before.append(pairs)
        for chunk, (first, last) in enumerate(pairwise(before)):
            totals[chunk] += weight * (last - first)
        for reach in mask.reaches:
            for chunk, queries in _parts(reach.queries, boundaries):
                totals[chunk] += weight * mask.reach_pairs(reach, queries)
    return totals


@lru_cache(maxsize=64)
def meetings(
    masks: tuple[Mask, ...], boundaries: tuple[int, ...], weights: tuple[int, ...] = ()
) -> dict[tuple[int, int], int] | None:
    """The weighted pairs of a query in one chunk and a key in another one, by both chunks; `None` if too many chunks
    may meet to go through them."""
    documents = [
        (mask, weight, *span)
        for mask, weight in zip(masks, weights or (1,) * len(masks), strict=True)
        for span in _spans(mask, boundaries)
    ]
    reaching = [
        (mask, weight, reach, queries, keys)
        for mask, weight in zip(masks, weights or (1,) * len(masks), strict=True)
        for reach in mask.reaches
        for queries in _parts(reach.queries, boundaries)
        for keys in _parts(reach.keys, boundaries)
    ]
    inside = sum((last - first) * (last - first + 1) for *_, first, last in documents)
    if inside + 2 * len(reaching) > 2 * _MOST_MEETINGS:
        return None
    met: dict[tuple[int, int], int] = {}
    for mask, weight, reach, (i, (row, row_end)), (j, (column, column_end)) in reaching:
        band = reach.band(mask.window, row, column)
        pairs = weight * band.pairs(row_end - row, column_end - column)
        if pairs and i != j:
            met[i, j] = met.get((i, j), 0) + pairs
    for mask, weight, start, stop, first, last in documents:
        parts = [(max(start, boundaries[at]), min(stop, boundaries[at + 1])) for at in range(first, last + 1)]
        for i, (row, row_end) in enumerate(parts, first):
            for j, (column, column_end) in enumerate(parts[: i - first] if mask.band.low == 0 else parts, first):
                if i == j:
                    continue
                band = mask.band.shift(row - column)
                pairs = weight * band.pairs(row_end - row, column_end - column)
                if pairs:
                    met[i, j] = met.get((i, j), 0) + pairs
    return met


def _parts(span: tuple[int, int], boundaries: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """The chunks into which a span reaches, and the part of it in each."""
    first, last = bisect_right(boundaries, span[0]) - 1, bisect_right(boundaries, span[1] - 1)
    chunks = (
        (chunk, (max(span[0], boundaries[chunk]), min(span[1], boundaries[chunk + 1])))
        for chunk in range(max(first, 0), min(last, len(boundaries) - 1))
    )
    return [(chunk, part) for chunk, part in chunks if part[0] < part[1]]


def _spans(mask: Mask, boundaries: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """The documents that lie in several chunks: where they start and stop, the first and the last of the chunks."""
    spans: list[tuple[int, int, int, int]] = []
    for boundary in boundaries[1:-1]:
        at = bisect_right(mask.documents, boundary) - 1
        if boundary == mask.documents[at] or (spans and spans[-1][0] == mask.documents[at]):
            continue
        start, stop = mask.documents[at : at + 2]
        spans.append((start, stop, bisect_right(boundaries, start) - 1, bisect_right(boundaries, stop - 1) - 1))
    return spans


@lru_cache(maxsize=64)
def _cumulative_pairs(mask: Mask) -> tuple[int, ...]:
    """The pairs of all documents that end at each of the mask's boundaries, or before."""
    total, totals = 0, [0]
    band = mask.band
    causal = mask.length if band.high is None else band.high + 1  # up to so many tokens a document is a triangle
    for start, stop in pairwise(mask.documents):
        size = stop - start
        total += size * (size + 1) // 2 if band.low == 0 and size <= causal else band.pairs(size, size)
        totals.append(total)
    return tuple(totals)
