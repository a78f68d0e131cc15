"""What a layer makes the ranks compute, on any machine: pairs counted in closed form, by rank and by step of a ring."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product

from .mask import Mask, Reach

_MOST_MEETINGS = 8192  # pairs of chunks in one document; more are not gone through


def pairs_of_chunks(masks: Sequence[Mask], boundaries: Sequence[int], weights: Sequence[int] = ()) -> list[int]:
    """How many pairs have their query in each chunk between two boundaries. Each mask is computed once, or as often as
    its weight says."""
    totals = [0] * (len(boundaries) - 1)
    for mask, weight in zip(masks, weights or (1,) * len(masks), strict=True):
        for chunk, (first, last) in enumerate(pairwise(map(mask.pairs_until, boundaries))):
            totals[chunk] += weight * (last - first)
        for reach in mask.reaches:
            for chunk, queries in _parts(reach.queries, boundaries):
                totals[chunk] += weight * reach.band.pairs_between(queries, reach.keys)
    return totals


def meetings(
    masks: Sequence[Mask], boundaries: Sequence[int], weights: Sequence[int] = ()
) -> dict[tuple[int, int], int] | None:
    """The weighted pairs of a query in one chunk and a key in another one, by both chunks; `None` if too many chunks
    may meet to go through them."""
    found = []
    for mask, weight in zip(masks, weights or (1,) * len(masks), strict=True):
        crossing = dict.fromkeys(mask.document(edge) for edge in boundaries[1:] if edge < mask.length)
        for reach in (*(Reach(span, span, mask.band) for span in crossing), *mask.reaches):
            found.append((weight, reach.band, _parts(reach.queries, boundaries), _parts(reach.keys, boundaries)))
    twice = [len(queries) * (len(keys) - 1 if keys == queries else 2 * len(keys)) for *_, queries, keys in found]
    if sum(twice) > 2 * _MOST_MEETINGS:
        return None
    met = Counter[tuple[int, int]]()
    for weight, band, queries, keys in found:
        for (i, rows), (j, columns) in product(queries, keys):
            if i > j or (i < j and band.low != 0):
                met[i, j] += weight * band.pairs_between(rows, columns)
    return dict(+met)


def _parts(span: tuple[int, int], boundaries: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """The chunks into which a span reaches, and the part of it in each."""
    chunks = range(bisect_right(boundaries, span[0]) - 1, bisect_left(boundaries, span[1]))
    return [(chunk, (max(span[0], boundaries[chunk]), min(span[1], boundaries[chunk + 1]))) for chunk in chunks]
