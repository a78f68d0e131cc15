"""Heads exchanged for tokens (DeepSpeed Ulysses, arXiv 2309.14509): before attention every rank gives its tokens of
most heads away and gets the tokens of neighbouring ranks for its own heads; afterwards results go back.

The heads go in slices, so that the next slice is on its way while one is computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..plan import Sharding
from .exchange import Exchange, HeadBlock, HeadMove, HeadRound, Pending, Shape


@dataclass(frozen=True, eq=False)
class UlyssesRanks:
    """The ranks that exchange heads; one object for all layers.

    Args:
        sharding ([`Sharding`]): Who of the whole group holds what.
        together ([`Sharding`]): What the places of the ring hold.
        rank (`int`): This rank of the group.
        ulysses (`int`): How many ranks exchange heads.
    """

    sharding: Sharding
    together: Sharding
    rank: int
    ulysses: int

    @property
    def tokens(self) -> int:
        """How many tokens the mates have together."""
        return self.together.tokens(self.rank // self.ulysses)

    @property
    def member(self) -> int:
        """Which of the mates this rank is."""
        return self.rank % self.ulysses

    @property
    def ranks(self) -> range:
        """The mates as the group numbers them."""
        first = self.rank - self.member
        return range(first, first + self.ulysses)

    def spans(self, mate: int) -> list[tuple[int, int, int]]:
        """Where the tokens of a rank lie in the shard that the mates have together: first row there, first row of the
        rank's own shard, how many."""
        shared = self.together.runs(self.rank // self.ulysses)
        found = []
        for run in self.sharding.runs(mate):
            home = next(whole for whole in shared if whole.start <= run.start < whole.stop)
            found.append((home.local + run.start - home.start, run.local, run.size))
        return found


@lru_cache(maxsize=64)
def ulysses_ranks_of(sharding: Sharding, together: Sharding, rank: int, ulysses: int) -> UlyssesRanks:
    """The [`UlyssesRanks`]: one object for all layers and for batches that are cut alike."""
    return UlyssesRanks(sharding, together, rank, ulysses)


class HeadsIn:
    """Tensors on their way from a rank's tokens of all heads to all tokens of a rank's heads.

    Args:
        exchange ([`Exchange`]): The messages.
        mates ([`UlyssesRanks`]): Who exchanges.
        tensors (sequence of `torch.Tensor` of shape `(B, n, H, D)`): What is exchanged.
        slices (`int`): Into how many slices the heads of a rank are cut.
    """

    def __init__(self, exchange: Exchange, mates: UlyssesRanks, tensors: Sequence[torch.Tensor], slices: int) -> None:
        self.exchange, self.mates, self.tensors, self.slices = exchange, mates, tensors, slices
        self.heads = tuple(tensor.shape[2] // mates.ulysses // slices for tensor in tensors)
        exchange.publish("heads in", tensors, sum(tensor.nbytes for tensor in tensors))

    def fetch(self, index: int, into: Sequence[torch.Tensor], behind: bool) -> Pending:
        """Starts to fetch a slice into tensors of shape `(B, N, H / ranks / slices, D)`: `behind` another kernel by few
        multiprocessors, else by all."""
        moves = _moves_in(self.mates, self.heads, self.slices, index)
        return self.exchange.move("heads in", moves, self.tensors, into, 2 * index, behind)


class HeadsOut:
    """Results on their way back, slice by slice.

    Args:
        exchange ([`Exchange`]): The messages.
        mates ([`UlyssesRanks`]): Who exchanges.
        results (sequence of `torch.Tensor` of shape `(B, n, H, D)`): Where results go.
        slices (`int`): Into how many slices the heads of a rank are cut.
    """

    def __init__(self, exchange: Exchange, mates: UlyssesRanks, results: Sequence[torch.Tensor], slices: int) -> None:
        self.exchange, self.mates, self.results, self.slices = exchange, mates, results, slices
        self.under_way: list[Pending] = []

    def room(self, shapes: Sequence[Shape]) -> Sequence[torch.Tensor | None]:
        """Where the results of the next slice, of these shapes, may be written."""
        return self.exchange.room(
            "heads out", shapes, sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        )

    def send(self, index: int, tensors: Sequence[torch.Tensor]) -> None:
        """Sends the results of a slice, each of shape `(B, N, H / ranks / slices, D)`."""
        self.exchange.publish("heads out", tensors, sum(tensor.nbytes for tensor in tensors))
        moves = _moves_out(self.mates, tuple(tensor.shape[2] for tensor in tensors), self.slices, index)
        behind = index + 1 < self.slices
        self.under_way.append(self.exchange.move("heads out", moves, tensors, self.results, 2 * index + 1, behind))

    def finish(self) -> None:
        """Waits for what is still under way."""
        for posted in self.under_way:
            posted.wait()
        self.under_way = []


@lru_cache(maxsize=256)
def _moves_in(mates: UlyssesRanks, heads: tuple[int, ...], slices: int, index: int) -> HeadRound:
    """What each mate fetches of a slice; `heads` of every tensor are in it."""
    given, taken = [], []
    for mate, rank in enumerate(mates.ranks):
        for which, count in enumerate(heads):
            wanted = (mates.member * slices + index) * count
            offered = (mate * slices + index) * count
            for _, row, size in mates.spans(mates.rank):
                given.append(HeadBlock(rank, which, (row, row + size), (offered, offered + count)))
            for there, row, size in mates.spans(rank):
                source = HeadBlock(rank, which, (row, row + size), (wanted, wanted + count))
                taken.append(HeadMove(source, (there, there + size), (0, count)))
    return HeadRound(tuple(given), tuple(taken))


@lru_cache(maxsize=256)
def _moves_out(mates: UlyssesRanks, heads: tuple[int, ...], slices: int, index: int) -> HeadRound:
    """As [`_moves_in`], the other way round."""
    given, taken = [], []
    for mate, rank in enumerate(mates.ranks):
        for which, count in enumerate(heads):
            place = (mate * slices + index) * count
            for there, _, size in mates.spans(rank):
                given.append(HeadBlock(rank, which, (there, there + size), (0, count)))
            for there, row, size in mates.spans(mates.rank):
                source = HeadBlock(rank, which, (there, there + size), (0, count))
                taken.append(HeadMove(source, (row, row + size), (place, place + count)))
    return HeadRound(tuple(given), tuple(taken))
