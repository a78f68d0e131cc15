"""Blocks of tokens that see each other, such as those of an image: the pairs of a query and a later key of its block.

A causal mask has the pairs with earlier keys. Those that a block of n tokens adds are causal too, if its tokens come in
reversed order and the key of a token stands where the query of the one before it stands:

```text
tokens of a block   a b c d
queries             c b a      a query sees the keys up to its own place: c sees d, b sees d and c, a sees d, c and b
keys                d c b
```

So the blocks of a batch are the documents of one packed sequence, which is planned and computed as any other. Where a
shard ends inside of a block, queries and keys of one place are of two ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from .mask import Mask
from .sharding import Batch, Sharding

Rows = tuple[tuple[int, int], ...]  # [start, stop) of some things, one after the other
LocalSpan = tuple[int, int, int]  # a row of the batch, and rows [start, stop) of a shard


@dataclass(frozen=True)
class LaterKeys:
    """The packed sequence that computes what blocks add to a causal attention.

    Args:
        mask ([`Mask`]): Its mask; the last documents, one for each rank, are of one token that stands for nothing, so
            that every rank holds one.
        queries, keys ([`Sharding`]): Which rank holds the queries and the keys of its places.
        query_spans, key_spans (`tuple`): For every rank, the rows of its shard that these are, each span from its end
            to its start.
    """

    mask: Mask
    queries: Sharding
    keys: Sharding
    query_spans: tuple[tuple[LocalSpan, ...], ...]
    key_spans: tuple[tuple[LocalSpan, ...], ...]


@lru_cache(maxsize=64)
def later_keys(blocks: tuple[Rows, ...], documents: Batch, sharding: Sharding) -> LaterKeys:
    """The [`LaterKeys`] of a batch.

    Args:
        blocks (`tuple`): For every row of the batch, the tokens `[start, stop)` of its blocks.
        documents (`tuple[tuple[int, ...], ...]`): Cumulative boundaries of the documents of each row, which cut blocks.
        sharding ([`Sharding`]): Which rank holds which tokens.
    """
    rows = enumerate(zip(blocks, documents, strict=True))
    pieces = [(row, *piece) for row, own in rows for piece in _cut(*own)]
    sizes = [stop - start - 1 for _, start, stop in pieces] + [1] * sharding.ranks
    bounds = tuple(accumulate(sizes, initial=0))
    queries, query_spans = _side(pieces, sharding, 0)
    keys, key_spans = _side(pieces, sharding, 1)
    return LaterKeys(Mask(bounds[-1], documents=bounds), queries, keys, query_spans, key_spans)


def _cut(spans: Rows, documents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Blocks cut by documents, without those of one token."""
    for start, stop in spans:
        inside = sorted(edge for edge in documents if start < edge < stop)
        yield from ((first, last) for first, last in pairwise((start, *inside, stop)) if last - first > 1)


def _side(
    pieces: Sequence[tuple[int, int, int]], sharding: Sharding, ahead: int
) -> tuple[Sharding, tuple[tuple[LocalSpan, ...], ...]]:
    """Who holds the queries of blocks, or with `ahead` of 1 the keys, in reversed order, and which rows these are."""
    spans: list[list[LocalSpan]] = [[] for _ in range(sharding.ranks)]
    sizes, owners, places = list[int](), list[int](), sharding.places
    for row, start, stop in pieces:
        for run, rank in reversed(places):
            for part in run.within((start + ahead, stop - 1 + ahead)):
                spans[rank].append((row, part.local, part.local + part.size))
                owners.append(rank)
                sizes.append(part.size)
    for rank, own in enumerate(spans):
        own.append((0, 0, 1))
        owners.append(rank)
        sizes.append(1)
    bounds = tuple(accumulate(sizes, initial=0))
    return Sharding(bounds, tuple(owners), sharding.ranks), tuple(map(tuple, spans))
