"""Heads exchanged for tokens (DeepSpeed Ulysses, arXiv 2309.14509), slice by slice, and results exchanged back.

The next slice of the heads is on its way while one is computed. Any ownership of chunks will do: the tokens of the
ranks together are in the sequence's order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import Tensor

from ..plan import Sharding
from .exchange import Exchange, HeadBlock, HeadMove, HeadRound, Pending, Shape


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
        runs = self.together.runs(self.rank // self.degree)
        spans = []
        for run in self.sharding.runs(rank):
            whole = next(whole for whole in runs if whole.start <= run.start < whole.stop)
            spans.append((whole.local + run.start - whole.start, run.local, run.size))
        return spans


@lru_cache(maxsize=64)
def ulysses_ranks_of(sharding: Sharding, rank: int, degree: int, first: int = 0) -> UlyssesRanks:
    """The [`UlyssesRanks`]: one object for all layers and for batches that are cut alike."""
    return UlyssesRanks(sharding, rank, degree, first)


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
        degree = self.owners[0].degree
        self.heads = tuple(tensor.shape[2] // degree // slices for tensor in tensors)
        owned = zip(tensors, self.owners, strict=True)
        capacity = sum(tensor.nbytes // tensor.shape[1] * owner.most_tokens[0] for tensor, owner in owned)
        exchange.publish("tokens to heads", tensors, capacity)

    def fetch(self, index: int, into: Sequence[Tensor], beside_kernel: bool) -> Pending:
        """Starts to fetch a slice.

        Args:
            index (`int`): The slice.
            into (sequence of `torch.Tensor` of shape `(B, N, H / ranks / slices, D)`): Where it goes.
            beside_kernel (`bool`): Whether a kernel computes meanwhile, so that few multiprocessors are taken.
        """
        this_round = _round(self.owners, self.heads, self.slices, index, to_heads=True)
        return self.exchange.fetch_heads("tokens to heads", this_round, self.tensors, into, 2 * index, beside_kernel)


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
        parts, owned = self.owners[0].degree * slices, zip(results, self.owners, strict=True)
        self.capacity = sum(
            result.nbytes // (result.shape[1] * parts) * owner.most_tokens[1] for result, owner in owned
        )

    def output_buffers(self, shapes: Sequence[Shape]) -> Sequence[Tensor | None]:
        """Buffers into which a kernel may write the results of the next slice, of these shapes."""
        return self.exchange.output_buffers("heads to tokens", shapes, self.capacity)

    def send(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Sends the results of a slice, each of shape `(B, N, H / ranks / slices, D)`."""
        self.exchange.publish("heads to tokens", tensors, self.capacity)
        heads = tuple(tensor.shape[2] for tensor in tensors)
        this_round = _round(self.owners, heads, self.slices, index, to_heads=False)
        beside_kernel, tag = index + 1 < self.slices, 2 * index + 1
        self.pending.append(
            self.exchange.fetch_heads("heads to tokens", this_round, tensors, self.results, tag, beside_kernel)
        )

    def finish(self) -> None:
        """Waits for the slices that are still under way."""
        for pending in self.pending:
            pending.wait()
        self.pending = []


@lru_cache(maxsize=256)
def _round(
    owners: tuple[UlyssesRanks, ...], heads: tuple[int, ...], slices: int, index: int, to_heads: bool
) -> HeadRound:
    """Who fetches which rows and heads of a slice, so many `heads` of each tensor: tokens to heads, or back."""
    own, outgoing, incoming = owners[0], list[HeadBlock](), list[HeadMove]()
    for member, rank in enumerate(own.ranks):
        for tensor, (owner, count) in enumerate(zip(owners, heads, strict=True)):
            offered, wanted = (member * slices + index) * count, (own.member * slices + index) * count
            leaving = _moves(owner, own.rank, rank, tensor, (offered, offered + count))
            coming = _moves(owner, rank, rank, tensor, (wanted, wanted + count))
            if not to_heads:
                leaving, coming = ([(whole, shard) for shard, whole in moves] for moves in (coming, leaving))
            outgoing += [source for source, _ in leaving]
            incoming += coming
    rows = {
        rank - own.first: tuple(owner.sharding.tokens(rank) if to_heads else owner.tokens for owner in owners)
        for rank in own.ranks
    }
    return HeadRound(tuple(outgoing), tuple(incoming), rows)


def _moves(owner: UlyssesRanks, holder: int, peer: int, tensor: int, heads: tuple[int, int]) -> list[HeadMove]:
    """These heads of the shard of `holder`, and where they lie among all tokens of a slice; to or from `peer`."""
    number = peer - owner.first
    return [
        (
            HeadBlock(number, tensor, (row, row + size), heads),
            HeadBlock(number, tensor, (row_together, row_together + size), (0, heads[1] - heads[0])),
        )
        for row_together, row, size in owner.spans(holder)
    ]
