"""Heads exchanged for tokens (DeepSpeed Ulysses, arXiv 2309.14509), slice by slice, and results exchanged back.

The next slice of the heads is on its way while one is computed. Any ownership of chunks will do: the tokens of the
ranks together are in the sequence's order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import Tensor

from ..plan import Sharding
from .exchange import Exchange, Incoming, Pending, Region, Round, Shape


@dataclass(frozen=True, eq=False)
class UlyssesRanks:
    """The neighbouring ranks that exchange heads, together one ring rank, and the tokens that each of them holds.

    Args:
        sharding ([`Sharding`]): Which rank of the whole group holds which tokens.
        rank (`int`): This rank of the group.
        degree (`int`): How many ranks exchange heads.
        first (`int`, defaults to 0): The rank of the group that is the first one of the exchange.
    """

    sharding: Sharding
    rank: int
    degree: int
    first: int = 0

    @cached_property
    def together(self) -> Sharding:
        """The tokens of each ring rank."""
        return self.sharding.joined(self.degree)

    @cached_property
    def tokens(self) -> int:
        """How many tokens these ranks hold together."""
        return self.together.tokens(self.rank // self.degree)

    @cached_property
    def most_tokens(self) -> tuple[int, int]:
        """How many tokens the rank, and the ring rank, with the most of them holds."""
        return self.sharding.most_tokens, self.together.most_tokens

    @property
    def member(self) -> int:
        """The number of this rank among them."""
        return self.rank % self.degree

    @property
    def ranks(self) -> range:
        """Their ranks in the group."""
        first = self.rank - self.member
        return range(first, first + self.degree)

    def spans(self, rank: int) -> list[tuple[int, int, int]]:
        """Where the tokens of one of the ranks lie among those of all: first row there, first row in the rank's own
        shard, how many."""
        whole = self.together.runs(self.rank // self.degree)
        spans = []
        for run in self.sharding.runs(rank):
            around = next(place for place in whole if place.start <= run.start < place.stop)
            spans.append((around.local + run.start - around.start, run.local, run.size))
        return spans


# one object for all layers and for batches that are cut alike
ulysses_ranks_of = lru_cache(maxsize=64)(UlyssesRanks)


class TokensToHeads:
    """Tensors on their way from a rank's tokens of all heads to all tokens of a rank's heads.

    Args:
        exchange ([`Exchange`]): The messages.
        owners (sequence of [`UlyssesRanks`]): Who exchanges, and holds which tokens, of each tensor.
        tensors (sequence of `torch.Tensor` of shape `(B, n, H, D)`): What is exchanged.
        slices (`int`): Into how many slices the heads of a rank are cut.
    """

    def __init__(
        self, exchange: Exchange, owners: Sequence[UlyssesRanks], tensors: Sequence[Tensor], slices: int
    ) -> None:
        self.exchange, self.owners, self.tensors, self.slices = exchange, tuple(owners), tensors, slices
        self.shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        owned = zip(tensors, self.owners, strict=True)
        capacity = sum(tensor.nbytes // tensor.shape[1] * owner.most_tokens[0] for tensor, owner in owned)
        exchange.publish("tokens to heads", tensors, capacity)

    def fetch(self, index: int, into: Sequence[Tensor], during_kernel: bool) -> Pending:
        """Starts to fetch a slice.

        Args:
            index (`int`): The slice.
            into (sequence of `torch.Tensor` of shape `(B, N, H / ranks / slices, D)`): Where it goes.
            during_kernel (`bool`): Whether a kernel computes meanwhile, so that few multiprocessors are taken.
        """
        this_round = _round(self.owners, self.shapes, self.slices, index, to_heads=True)
        return self.exchange.fetch("tokens to heads", this_round, self.tensors, into, during_kernel)


class HeadsToTokens:
    """Results on their way back, slice by slice.

    Args:
        exchange ([`Exchange`]): The messages.
        owners (sequence of [`UlyssesRanks`]): Who exchanges, and holds which tokens, of each result.
        results (sequence of `torch.Tensor` of shape `(B, n, H, D)`): Where results go.
        slices (`int`): Into how many slices the heads of a rank are cut.
    """

    def __init__(
        self, exchange: Exchange, owners: Sequence[UlyssesRanks], results: Sequence[Tensor], slices: int
    ) -> None:
        self.exchange, self.owners, self.results, self.slices = exchange, tuple(owners), results, slices
        self.pending: list[Pending] = []
        parts = self.owners[0].degree * slices
        self.capacity = sum(
            result.nbytes // (result.shape[1] * parts) * owner.most_tokens[1]
            for result, owner in zip(results, self.owners, strict=True)
        )

    def output_buffers(self, shapes: Sequence[Shape]) -> Sequence[Tensor | None]:
        """Buffers into which a kernel may write the results of the next slice, of these shapes."""
        return self.exchange.output_buffers("heads to tokens", shapes, self.capacity)

    def send(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Sends the results of a slice, each of shape `(B, N, H / ranks / slices, D)`."""
        self.exchange.publish("heads to tokens", tensors, self.capacity)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        this_round = _round(self.owners, shapes, self.slices, index, to_heads=False)
        during_kernel = index + 1 < self.slices
        self.pending.append(self.exchange.fetch("heads to tokens", this_round, tensors, self.results, during_kernel))

    def finish(self) -> None:
        """Waits for the slices that are still under way."""
        for pending in self.pending:
            pending.wait()
        self.pending = []


@lru_cache(maxsize=256)
def _round(
    owners: tuple[UlyssesRanks, ...], shapes: tuple[Shape, ...], slices: int, index: int, to_heads: bool
) -> Round:
    """Who fetches which rows and heads of a slice, of tensors of which this rank has published these shapes: tokens to
    heads, or back."""
    own = owners[0]
    outgoing, incoming = list[tuple[int, Region]](), list[Incoming]()
    for member, rank in enumerate(own.ranks):
        published = tuple(
            ((shape[0], owner.sharding.tokens(rank) if to_heads else owner.tokens, *shape[2:]), dtype)
            for (shape, dtype), owner in zip(shapes, owners, strict=True)
        )
        for tensor, (owner, (shape, _)) in enumerate(zip(owners, shapes, strict=True)):
            count = shape[2] // (own.degree * slices) if to_heads else shape[2]
            theirs, ours = ((number * slices + index) * count for number in (member, own.member))
            leaving = _moves(owner, own.rank, tensor, theirs, count)
            coming = _moves(owner, rank, tensor, ours, count)
            if not to_heads:
                leaving, coming = ([(whole, shard) for shard, whole in moves] for moves in (coming, leaving))
            if rank != own.rank:
                outgoing += [(rank - own.first, source) for source, _ in leaving]
            incoming += [Incoming(rank - own.first, published, source, target) for source, target in coming]
    return Round(shapes, tuple(outgoing), tuple(incoming), 2 * index + (not to_heads))


def _moves(owner: UlyssesRanks, holder: int, tensor: int, first: int, count: int) -> list[tuple[Region, Region]]:
    """`count` heads from `first` on of the shard of `holder`, and where they lie among all tokens of a slice."""
    heads = first, first + count
    return [
        (Region(tensor, (row, row + size), heads), Region(tensor, (row_together, row_together + size), (0, count)))
        for row_together, row, size in owner.spans(holder)
    ]
