"""Segments: the pieces of documents that lie together on one rank, which a state passes one after another."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from .sharding import Batch, Sharding


class Segment(NamedTuple):
    """Tokens `[start, stop)` of a row that belong to one document and lie together in a shard.

    Args:
        row (`int`): The row of the batch.
        start (`int`): Its first token, as the row counts them.
        stop (`int`): The end of its tokens.
        document (`int`): Where its document starts.
        local (`int`): Where it begins among the tokens of the shard, all rows one after another.
        follows (`bool`, defaults to `False`): Whether its document continues another one.
    """

    row: int
    start: int
    stop: int
    document: int
    local: int
    follows: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def opens(self) -> bool:
        """Whether its text starts here, so that no state comes in."""
        return self.start == self.document and not self.follows


class Segments:
    """The segments of all ranks. Each list is made when it is first asked for, and kept. FSDP2 hands the layers copies
    of what it knows to hold tensors; of this it knows nothing.

    Args:
        sharding ([`Sharding`]): Which rank holds which tokens.
        documents (`tuple[tuple[int, ...], ...]`): Cumulative document boundaries, one tuple for every row of the batch.
        parents (`tuple[tuple[int, ...], ...]`, *optional*): Which documents of each row continue others, see
            [`hf_burst.plan.Mask`].
    """

    def __init__(self, sharding: Sharding, documents: Batch, parents: Batch = ()) -> None:
        self.sharding, self.documents, self.parents = sharding, documents, parents
        self.made: dict[tuple[Any, ...], Any] = {}  # of them, by others

    @cached_property
    def by_rank(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each rank, in the order of its memory."""
        return tuple(tuple(self._of(rank)) for rank in range(self.sharding.ranks))

    @cached_property
    def before(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The segment that comes before each one in its text, if any: their ranks, and their places in `by_rank`."""
        found = dict[tuple[int, int], tuple[int, int]]()
        for rank, own in enumerate(self.by_rank):
            for index, piece in enumerate(own):
                last = next(self.text_before(piece), None)
                if last is not None:
                    found[rank, index] = self.holder(piece.row, last)
        return found

    def text_before(self, piece: Segment) -> Iterator[int]:
        """The tokens of a segment's text that come before it, the last one first."""
        start = piece.start
        document = piece.document
        while True:
            yield from range(start - 1, document - 1, -1)
            edges = self._edges[piece.row]
            at = bisect_right(edges, document) - 1
            parent = self.parents[piece.row][at] if self.parents else -1
            if parent < 0:
                return
            start = edges[parent + 1]
            document = edges[parent]

    @cached_property
    def slots(self) -> dict[tuple[int, int], int]:
        """The segments that have a successor, and the place of each among those of its rank."""
        sources = sorted(set(self.before.values()))
        return {source: place for _, own in groupby(sources, itemgetter(0)) for place, source in enumerate(own)}

    @cached_property
    def most_slots(self) -> int:
        """Those of the rank with the most of them."""
        return max((place + 1 for place in self.slots.values()), default=0)

    @cached_property
    def whole(self) -> "Segments":
        """Those of one process that holds the whole sequence: the documents."""
        return Segments(Sharding((self.sharding.start, self.sharding.stop), (0,), 1), self.documents, self.parents)

    def holder(self, row: int, token: int) -> tuple[int, int]:
        """The rank that holds a token, and the segment there."""
        rank = self.sharding.owner(token)
        return rank, bisect_right(self.by_rank[rank], (row, token), key=lambda piece: (piece.row, piece.start)) - 1

    def _of(self, rank: int) -> list[Segment]:
        segments = []
        for row, edges in enumerate(self._edges):
            before = row * self.sharding.tokens(rank)
            for run in self.sharding.runs(rank):
                for index in range(bisect_right(edges, run.start) - 1, bisect_left(edges[:-1], run.stop)):
                    follows = bool(self.parents) and self.parents[row][index] >= 0
                    for part in run.within((edges[index], edges[index + 1])):
                        local = before + part.local
                        segments.append(Segment(row, part.start, part.stop, edges[index], local, follows))
        return segments

    @cached_property
    def _edges(self) -> Batch:
        """Where the documents of each row start, and where the last one ends."""
        return tuple(tuple(sorted({0, *bounds})) for bounds in self.documents)
