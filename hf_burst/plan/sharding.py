"""Chunk ownership: which rank holds which tokens of a sequence."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

from ..errors import ShardingError

Batch = tuple[tuple[int, ...], ...]  # cumulative boundaries of the documents of each row


@dataclass(frozen=True, order=True)
class Run:
    """Tokens `[start, stop)` of the sequence that lie together in a shard, from row `local` on."""

    start: int
    stop: int
    local: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def within(self, span: tuple[int, int]) -> "list[Run]":
        """The part of it that lies in a span, if any."""
        start = max(self.start, span[0])
        stop = min(self.stop, span[1])
        return [Run(start, stop, self.local + start - self.start)] if start < stop else []


@dataclass(frozen=True)
class Sharding:
    """An assignment of the chunks of a sequence to ranks.

    Args:
        boundaries (`tuple[int, ...]`): Chunk boundaries, each above the one before, from the first token that is held
            to the end of the last one: `(0, ..., length)` for a whole sequence.
        owners (`tuple[int, ...]`): The rank that holds each chunk; a rank holds its chunks in sequence order.
        ranks (`int`): The number of ranks.
    """

    boundaries: tuple[int, ...]
    owners: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        if len(self.owners) != len(self.boundaries) - 1 or set(self.owners) != set(range(self.ranks)):
            raise ShardingError(
                f"{len(self.boundaries) - 1} chunks with owners {self.owners} do not give each of {self.ranks} ranks a "
                "chunk: name one owner a chunk and let every rank own at least one."
            )
        if any(start >= stop for start, stop in pairwise(self.boundaries)):
            raise ShardingError(f"The boundaries {self.boundaries} do not rise: give every chunk at least one token.")

    @property
    def start(self) -> int:
        """The first token that is held."""
        return self.boundaries[0]

    @property
    def stop(self) -> int:
        """The end of the tokens that are held."""
        return self.boundaries[-1]

    @property
    def length(self) -> int:
        """How many tokens are held by all ranks."""
        return self.stop - self.start

    def tokens(self, rank: int) -> int:
        """How many tokens `rank` holds."""
        return sum(run.size for run in self.runs(rank))

    @cached_property
    def most_tokens(self) -> int:
        """How many tokens the rank with the most of them holds."""
        return max(self.tokens(rank) for rank in range(self.ranks))

    @lru_cache(maxsize=1024)  # noqa: B019, since shardings are values
    def runs(self, rank: int) -> tuple[Run, ...]:
        """The contiguous pieces that `rank` holds, adjacent chunks joined."""
        runs: list[Run] = []
        local = 0
        for (start, stop), owner in zip(pairwise(self.boundaries), self.owners, strict=True):
            if owner != rank:
                continue
            if runs and runs[-1].stop == start:
                runs[-1] = Run(runs[-1].start, stop, runs[-1].local)
            else:
                runs.append(Run(start, stop, local))
            local += stop - start
        return tuple(runs)

    @property
    def places(self) -> list[tuple[Run, int]]:
        """The runs of all ranks, each with its rank, in sequence order."""
        return sorted((run, rank) for rank in range(self.ranks) for run in self.runs(rank))

    @lru_cache(maxsize=256)  # noqa: B019, since shardings are values
    def joined(self, neighbours: int) -> "Sharding":
        """The sharding over `ranks / neighbours` ring ranks, each of which stands for `neighbours` ranks."""
        if neighbours == 1:
            return self
        owners = tuple(owner // neighbours for owner in self.owners)
        return Sharding(self.boundaries, owners, self.ranks // neighbours)

    def owner(self, token: int) -> int:
        """The rank that holds `token`."""
        return self.owners[bisect_right(self.boundaries, token) - 1]


def pattern(ranks: int, chunking: Literal["zigzag", "contiguous"]) -> tuple[int, ...]:
    """The owners of the chunks of one long document: `"zigzag"` (2P chunks, rank r holds r and 2P-1-r, which balances a
    causal mask) or `"contiguous"` (P chunks)."""
    if ranks < 1:
        raise ShardingError(f"A sequence is sharded over at least 1 rank, got ranks={ranks}.")
    once = tuple(range(ranks))
    return (*once, *reversed(once)) if chunking == "zigzag" and ranks > 1 else once


@lru_cache(maxsize=256)
def cut(length: int, owners: tuple[int, ...]) -> Sharding:
    """Cuts `length` tokens into one chunk for each of these owners; sizes differ by at most one.

    Raises:
        ShardingError: If there are more chunks than tokens, or a rank without a chunk.
    """
    count = len(owners)
    ranks = max(owners, default=0) + 1
    if not 1 <= count <= length:
        raise ShardingError(
            f"A sequence of {length} tokens is too short for {ranks} ranks: it is to be cut into {count} chunks, so it "
            f"needs at least {count} tokens. Pad it to {count} tokens, drop it, or use fewer ranks."
        )
    return Sharding(tuple(index * length // count for index in range(count + 1)), owners, ranks)


def make_sharding(length: int, ranks: int, chunking: Literal["zigzag", "contiguous"] = "zigzag") -> Sharding:
    """The [`Sharding`] of one document by a [`pattern`]."""
    return cut(length, pattern(ranks, chunking))
