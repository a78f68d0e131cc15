"""Chunk ownership: which rank holds which tokens of a sequence."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..config import Chunking
from ..errors import ShardingError


@dataclass(frozen=True)
class Run:
    """Tokens `[start, stop)` of the sequence that lie together in a shard, from row `local` on."""

    start: int
    stop: int
    local: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Sharding:
    """An assignment of the chunks of a sequence to ranks.

    Args:
        boundaries (`tuple[int, ...]`): Cumulative chunk boundaries `(0, ..., length)`.
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

    @property
    def length(self) -> int:
        return self.boundaries[-1]

    def tokens(self, rank: int) -> int:
        """How many tokens `rank` holds."""
        return sum(run.size for run in self.runs(rank))

    @property
    def most_tokens(self) -> int:
        """How many tokens the rank with the most of them holds."""
        return max(self.tokens(rank) for rank in range(self.ranks))

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The contiguous pieces that `rank` holds, adjacent chunks joined."""
        return _runs(self, rank)

    def owner(self, token: int) -> int:
        """The rank that holds `token`."""
        return next(rank for end, rank in zip(self.boundaries[1:], self.owners, strict=False) if token < end)


@lru_cache(maxsize=1024)
def _runs(sharding: Sharding, rank: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    local = 0
    for (start, stop), owner in zip(pairwise(sharding.boundaries), sharding.owners, strict=True):
        if owner != rank:
            continue
        if runs and runs[-1].stop == start:
            runs[-1] = Run(runs[-1].start, stop, runs[-1].local)
        else:
            runs.append(Run(start, stop, local))
        local += stop - start
    return tuple(runs)


def chunks_per_rank(chunking: Chunking) -> int:
    """How many chunks a rank holds."""
    return 2 if chunking == "zigzag" else 1


@lru_cache(maxsize=256)
def make_sharding(length: int, ranks: int, chunking: Chunking = "zigzag") -> Sharding:
    """Cuts `length` tokens into chunks whose sizes differ by at most one, and assigns them.

    Args:
        length (`int`): Tokens in the sequence, any number from the number of chunks on.
        ranks (`int`): Ranks of the group.
        chunking (`str`, defaults to `"zigzag"`): `"zigzag"` (2P chunks, rank r holds r and 2P-1-r) or `"contiguous"`
            (P chunks).

    Returns:
        [`Sharding`]

    Raises:
        ShardingError: If there are more chunks than tokens.
    """
    if ranks < 1:
        raise ShardingError(f"A sequence is sharded over at least 1 rank, got ranks={ranks}.")
    count = ranks * chunks_per_rank(chunking) if ranks > 1 else 1
    if length < count:
        raise ShardingError(
            f"A sequence of {length} tokens is too short for {ranks} ranks: {chunking} chunking needs at least {count} "
            f"tokens. Pad it to {count} tokens, drop it, or use fewer ranks."
        )
    boundaries = tuple(index * length // count for index in range(count + 1))
    if chunking == "zigzag" and ranks > 1:
        owners = tuple(min(index, 2 * ranks - 1 - index) for index in range(count))
    else:
        owners = tuple(range(count))
    return Sharding(boundaries, owners, ranks)
