"""Segments: the pieces of documents that lie together on one rank, which a state passes one after another."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from .sharding import Sharding


@dataclass(frozen=True)
class Segment:
    """Tokens `[start, stop)` of a row that belong to one document and lie together in a shard.

    Args:
        row (`int`): The row of the batch.
        start (`int`): Its first token, as the row counts them.
        stop (`int`): The end of its tokens.
        document (`int`): Where its document starts.
        local (`int`): Where it begins among the tokens of the shard, all rows one after another.
    """

    row: int
    start: int
    stop: int
    document: int
    local: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def opens(self) -> bool:
        """Whether its document starts here, so that no state comes in."""
        return self.start == self.document


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of all ranks.

    Args:
        sharding ([`Sharding`]): Which rank holds which tokens.
        documents (`tuple[tuple[int, ...], ...]`): Cumulative document boundaries, one tuple for every row of the batch.
    """

    sharding: Sharding
    documents: tuple[tuple[int, ...], ...]

    @cached_property
    def by_rank(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each rank, in the order of its memory."""
        return tuple(tuple(self._of(rank)) for rank in range(self.sharding.ranks))

    @cached_property
    def chains(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every document of several segments, these in its order: their rank, and their place in `by_rank`."""
        documents: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for rank, segments in enumerate(self.by_rank):
            for index, segment in enumerate(segments):
                documents.setdefault((segment.row, segment.document), []).append((segment.start, rank, index))
        ordered = (sorted(pieces) for pieces in documents.values())
        return tuple(tuple((rank, index) for _, rank, index in pieces) for pieces in ordered if len(pieces) > 1)

    @cached_property
    def slots(self) -> dict[tuple[int, int], int]:
        """The segments that have a successor, and the place of each among those of its rank."""
        places: dict[tuple[int, int], int] = {}
        for rank, index in sorted(piece for chain in self.chains for piece in chain[:-1]):
            places[rank, index] = sum(owner == rank for owner, _ in places)
        return places

    @cached_property
    def most_slots(self) -> int:
        """Those of the rank with the most of them."""
        return max((place + 1 for place in self.slots.values()), default=0)

    def holder(self, row: int, token: int) -> tuple[int, int]:
        """The rank that holds a token, and the segment there."""
        rank = self.sharding.owner(token)
        pieces = enumerate(self.by_rank[rank])
        return rank, next(index for index, piece in pieces if piece.row == row and piece.start <= token < piece.stop)

    def _of(self, rank: int) -> list[Segment]:
        segments, tokens = [], self.sharding.tokens(rank)
        for row, bounds in enumerate(self.documents):
            for run in self.sharding.runs(rank):
                for first, last in pairwise(sorted({0, *bounds})):
                    start, stop = max(run.start, first), min(run.stop, last)
                    if start < stop:
                        local = row * tokens + run.local + start - run.start
                        segments.append(Segment(row, start, stop, first, local))
        return segments


@lru_cache(maxsize=64)
def segments_of(sharding: Sharding, documents: tuple[tuple[int, ...], ...]) -> Segments:
    """The [`Segments`]: one object for all layers of a pass."""
    return Segments(sharding, documents)
