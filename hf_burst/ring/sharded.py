"""Attention over the ranks of a group by a schedule: heads over neighbouring ranks, the sequence over the rest.

Heads are exchanged for tokens (DeepSpeed Ulysses, arXiv 2309.14509), slice by slice, and results back: the next slice
is on its way while one is computed. Any ownership of chunks will do: the tokens of the ranks together are in the
sequence's order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import Schedule
from ..kernels import BackwardInputs, Gradients, Kernel, OutputBuffers, Outputs, Scores
from ..numerics import accumulation_dtype
from ..plan import Mask, Sharding, head_slices, make_plan, rotating_of
from ..ranks.group import ContextGroup
from .exchange import Exchange, Exchanges, Incoming, Pending, Published, Region, Round, Shape, shapes_of
from .loop import RingAttention, backward, forward
from .merge import by_head, heads_first


class HeadSizes(NamedTuple):
    """Heads of an attention, and their sizes."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> "HeadSizes":
        """Those of q, k and v, also of fake tensors, whose heads are never symbols."""
        return cls(int(q.shape[2]), int(k.shape[2]), int(q.shape[3]), int(v.shape[3]))

    def shapes(self, batch: int, queries: int, keys: int) -> list[tuple[int, int, int, int]]:
        """The shapes of q, k and v for these numbers of rows of a batch, queries and keys."""
        return [
            (batch, queries, self.q_heads, self.head_dim),
            (batch, keys, self.kv_heads, self.head_dim),
            (batch, keys, self.kv_heads, self.value_dim),
        ]

    def slice(self, parts: int) -> list[tuple[int, int]]:
        """Heads and head sizes of q, k and v when the heads are cut into `parts`."""
        return [(heads // parts, dim) for _, _, heads, dim in self.shapes(0, 0, 0)]


def kept_shapes(
    schedule: Schedule, batch: int, tokens: int, sizes: HeadSizes, on_gpus: bool, head_groups: int
) -> list[tuple[int, int, int]]:
    """The shapes of the exchanged heads that a forward pass keeps instead of q, k and v, if it does.

    Args:
        schedule, on_gpus, head_groups: As in [`head_slices`].
        batch, tokens (`int`): Rows of the batch, and tokens of a rank.
        sizes ([`HeadSizes`]): Heads of the whole attention.
    """
    if schedule.ulysses == 1:
        return []
    slices = head_slices(schedule, (sizes.q_heads, sizes.kv_heads), int(tokens), on_gpus, head_groups)
    width = sum(heads * dim for heads, dim in sizes.slice(schedule.ulysses * slices))
    return [(batch, tokens * schedule.ulysses, width)] * slices


def unpack(packed: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The tensors of `(heads, dim)` that lie side by side in the last dimension."""
    ends = [0, *accumulate(heads * dim for heads, dim in sizes)]
    return [packed[..., a:b].unflatten(2, size) for (a, b), size in zip(pairwise(ends), sizes, strict=True)]


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

    @property
    def member(self) -> int:
        """The number of this rank among them."""
        return self.rank % self.degree


# one object for all layers and for batches that are cut alike
ulysses_ranks_of = lru_cache(maxsize=64)(UlyssesRanks)


@dataclass
class TokensToHeads:
    """Tensors on their way from a rank's tokens of all heads to all tokens of a rank's heads.

    Args:
        exchange ([`Exchange`]): The messages.
        owners (`tuple[UlyssesRanks, ...]`): Who exchanges, and holds which tokens, of each tensor.
        tensors (sequence of `torch.Tensor` of shape `(B, n, H, D)`): What is exchanged.
        slices (`int`): Into how many slices the heads of a rank are cut.
    """

    exchange: Exchange
    owners: tuple[UlyssesRanks, ...]
    tensors: Sequence[Tensor]
    slices: int

    def __post_init__(self) -> None:
        owned = zip(self.tensors, self.owners, strict=True)
        capacity = sum(tensor.nbytes // tensor.shape[1] * owner.sharding.most_tokens for tensor, owner in owned)
        self.exchange.publish("tokens to heads", self.tensors, capacity)

    def fetch(self, index: int, into: Sequence[Tensor], during_kernel: bool) -> Pending:
        """Starts to fetch a slice.

        Args:
            index (`int`): The slice.
            into (sequence of `torch.Tensor` of shape `(B, N, H / ranks / slices, D)`): Where it goes.
            during_kernel (`bool`): Whether a kernel computes meanwhile, so that few multiprocessors are taken.
        """
        this_round = _round(self.owners, shapes_of(self.tensors), self.slices, index, to_heads=True)
        return self.exchange.fetch("tokens to heads", this_round, self.tensors, into, during_kernel)


@dataclass
class HeadsToTokens:
    """Results on their way back, slice by slice.

    Args:
        exchange ([`Exchange`]): The messages.
        owners (`tuple[UlyssesRanks, ...]`): Who exchanges, and holds which tokens, of each result.
        results (sequence of `torch.Tensor` of shape `(B, n, H, D)`): Where results go.
        slices (`int`): Into how many slices the heads of a rank are cut.
        pending (`list`): The slices that are under way.
    """

    exchange: Exchange
    owners: tuple[UlyssesRanks, ...]
    results: Sequence[Tensor]
    slices: int
    pending: list[Pending] = field(default_factory=list)

    @cached_property
    def capacity(self) -> int:
        """The most bytes of a slice that any rank publishes."""
        parts = self.owners[0].degree * self.slices
        owned = zip(self.results, self.owners, strict=True)
        return sum(part.nbytes // (part.shape[1] * parts) * owner.together.most_tokens for part, owner in owned)

    def output_buffers(self, shapes: Sequence[Shape]) -> OutputBuffers:
        """Buffers into which a kernel may write the results of the next slice, of these shapes."""
        return self.exchange.output_buffers("heads to tokens", shapes, self.capacity)

    def send(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Sends the results of a slice, each of shape `(B, N, H / ranks / slices, D)`."""
        self.exchange.publish("heads to tokens", tensors, self.capacity)
        this_round = _round(self.owners, shapes_of(tensors), self.slices, index, to_heads=False)
        during_kernel = index + 1 < self.slices
        self.pending.append(self.exchange.fetch("heads to tokens", this_round, tensors, self.results, during_kernel))

    def finish(self) -> None:
        """Waits for the slices that are still under way."""
        for pending in self.pending:
            pending.wait()


@lru_cache(maxsize=256)
def _round(owners: tuple[UlyssesRanks, ...], shapes: Published, slices: int, index: int, to_heads: bool) -> Round:
    """Who fetches which rows and heads of a slice, of tensors of which this rank has published these shapes: tokens to
    heads, or back."""
    own = owners[0]
    outgoing, incoming = list[tuple[int, Region]](), list[Incoming]()
    for member, rank in enumerate(range(own.rank - own.member, own.rank - own.member + own.degree)):
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
    whole, moves = owner.together.runs(owner.rank // owner.degree), []
    for run in owner.sharding.runs(holder):
        around = next(place for place in whole if place.start <= run.start < place.stop)
        start = around.local + run.start - around.start
        source = Region(tensor, (run.local, run.local + run.size), (first, first + count))
        moves.append((source, Region(tensor, (start, start + run.size), (0, count))))
    return moves


@dataclass(frozen=True, eq=False)
class ShardedAttention:
    """One attention over a group; one object for all layers, which remembers what follows from its arguments.

    Args:
        schedule ([`Schedule`]): How it is spread.
        group ([`ContextGroup`]): Over which ranks.
        masks (`tuple[Mask, ...]`): One mask for every row of the batch.
        queries ([`Sharding`]): Who holds the queries.
        keys ([`Sharding`]): Who holds the keys and values; where heads are exchanged, as many tokens as queries.
        kernel ([`Kernel`]): Computes a tile.
        scores ([`Scores`]): Scale and soft-capping.
        on_gpus (`bool`, defaults to `False`): As in [`head_slices`].
        head_groups (`int`, defaults to 1): As in [`Memory`].
        ranks_per_host (`int`, *optional*): Ranks of the group on one host, neighbours of each other; all by default.
    """

    schedule: Schedule
    group: ContextGroup
    masks: tuple[Mask, ...]
    queries: Sharding
    keys: Sharding
    kernel: Kernel
    scores: Scores
    on_gpus: bool = False
    head_groups: int = 1
    ranks_per_host: int | None = None

    def forward(
        self, exchanges: Exchanges, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Attention of this rank's queries over the keys of all ranks.

        Args:
            exchanges ([`Exchanges`]): The messages, over the [`ShardedAttention.near_ranks`].
            q (`torch.Tensor` of shape `(B, n, Hq, D)`): This rank's queries.
            k (`torch.Tensor` of shape `(B, m, Hkv, D)`): This rank's keys.
            v (`torch.Tensor` of shape `(B, m, Hkv, Dv)`): This rank's values.
            sinks (`torch.Tensor` of shape `(Hq,)`, *optional*): A further score of every row, whose value is 0.

        Returns:
            `out` of shape `(B, n, Hq, Dv)`, `lse` of shape `(B, n, Hq)`, and the tensors that the backward pass takes
            instead of q, k and v: none, or all of this rank's heads, a slice each.
        """
        if self.schedule.ulysses == 1:
            return *self._ring_forward(exchanges, q, k, v, sinks), []
        kept, heads, pending = self._fetch_heads(exchanges.near, q, k, v, waits=True)
        owner, slices = self._owner(self.queries), len(kept)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = heads_first(q.shape, accumulation_dtype(q.dtype), q.device)
        leaving = HeadsToTokens(exchanges.near, (owner, owner), (out, lse.unsqueeze(3)), slices)
        own_sinks = None if sinks is None else sinks.chunk(self.schedule.ulysses)[owner.member].chunk(slices)
        rows = heads[0][0].shape[:3]
        shapes = ((*rows, v.shape[3]), q.dtype), ((*rows, 1), lse.dtype)
        for index, (arriving, (own_q, own_k, own_v)) in enumerate(zip(pending, heads, strict=True)):
            arriving.wait()
            out_buffer, lse_buffer = leaving.output_buffers(shapes)
            buffers = (out_buffer, None if lse_buffer is None else lse_buffer.squeeze(3))
            slice_sinks = None if own_sinks is None else own_sinks[index]
            part, part_lse = self._ring_forward(exchanges, own_q, own_k, own_v, slice_sinks, buffers)
            leaving.send(index, (part, part_lse.unsqueeze(3)))
        leaving.finish()
        return out, lse, kept

    def exchanged(self, exchanges: Exchanges, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """The tensors that [`ShardedAttention.forward`] keeps where heads are exchanged, without the attention; under
        way until the next pass begins."""
        kept, _, pending = self._fetch_heads(exchanges.near, q, k, v, waits=False)
        for arriving in pending:
            exchanges.near.wait_later(arriving)
        return kept

    def _fetch_heads(
        self, exchange: Exchange, q: Tensor, k: Tensor, v: Tensor, waits: bool
    ) -> tuple[list[Tensor], list[list[Tensor]], list[Pending]]:
        """This rank's heads of all Ulysses ranks on their way: where they come to lie, slice by slice, as q, k and v.

        If nothing `waits` for the first slice, products of matrices run during the copies. Many multiprocessors held
        for a short time disturb these less than some held for a long time.
        """
        sizes = HeadSizes.of(q, k, v)
        shapes = kept_shapes(self.schedule, q.shape[0], q.shape[1], sizes, self.on_gpus, self.head_groups)
        kept = [q.new_empty(shape) for shape in shapes]
        if waits:
            self._use_current_stream(exchange, len(kept))
        owners = self._owner(self.queries), self._owner(self.keys), self._owner(self.keys)
        tokens_to_heads = TokensToHeads(exchange, owners, (q, k, v), len(kept))
        slice_sizes = sizes.slice(self.schedule.ulysses * len(kept))
        heads = [unpack(packed, slice_sizes) for packed in kept]
        pending = [
            tokens_to_heads.fetch(index, into, during_kernel=waits and index > 0) for index, into in enumerate(heads)
        ]
        return kept, heads, pending

    def backward(
        self,
        exchanges: Exchanges,
        sizes: HeadSizes,
        saved: Sequence[Tensor],
        dout: Tensor,
        out: Tensor | None,
        lse: Tensor,
        delta: Tensor | None,
    ) -> Gradients:
        """Gradients of this rank's q, k and v.

        Args:
            exchanges ([`Exchanges`]): The messages, over the [`ShardedAttention.near_ranks`].
            sizes ([`HeadSizes`]): Of the forward pass.
            saved (sequence of `torch.Tensor`): The tensors that the forward pass kept, or q, k and v if it kept none.
            dout (`torch.Tensor` of shape `(B, n, Hq, Dv)`): Gradient of `out`.
            out (`torch.Tensor`, *optional*): Its output, if `rowsum(dout * out) = delta`.
            lse (`torch.Tensor` of shape `(B, n, Hq)`): Its log-sum-exp.
            delta (`torch.Tensor` of shape `(B, n, Hq)`, *optional*): `rowsum(dout * out)` less the gradient of `lse`;
                may be left out with an `out` unless `needs_delta`.
        """
        if self.schedule.ulysses == 1:
            q, k, v = saved
            inputs = BackwardInputs(dout=dout, q=q, k=k, v=v, out=out, lse=lse, delta=delta)
            return self._ring_backward(exchanges, inputs)
        assert delta is not None, "delta is sent"
        owner, slices, lse, delta = self._owner(self.queries), len(saved), by_head(lse), by_head(delta)
        self._use_current_stream(exchanges.near, slices)
        arriving = TokensToHeads(exchanges.near, (owner,) * 3, (dout, lse.unsqueeze(3), delta.unsqueeze(3)), slices)
        key_tokens = self.keys.tokens(self.group.rank)
        dq, dk, dv = (dout.new_empty(shape) for shape in sizes.shapes(dout.shape[0], dout.shape[1], key_tokens))
        owners = owner, self._owner(self.keys), self._owner(self.keys)
        leaving = HeadsToTokens(exchanges.near, owners, (dq, dk, dv), slices)
        parts = self.schedule.ulysses * slices
        rows, slice_sizes = (dout.shape[0], owner.tokens, sizes.q_heads // parts), sizes.slice(parts)

        def fetch(index: int) -> tuple[Pending, Tensor, list[Tensor]]:
            own_dout = dout.new_empty(*rows, sizes.value_dim)
            scalars = [heads_first(rows, lse.dtype, dout.device) for _ in range(2)]
            into = (own_dout, *(tensor.unsqueeze(3) for tensor in scalars))
            return arriving.fetch(index, into, during_kernel=index > 0), own_dout, scalars

        under_way = zip([fetch(index) for index in range(slices)], saved, strict=True)
        for index, ((pending, own_dout, (own_lse, own_delta)), packed) in enumerate(under_way):
            pending.wait()
            q, k, v = unpack(packed, slice_sizes)
            buffers = leaving.output_buffers([(tensor.shape, dout.dtype) for tensor in (q, k, v)])
            own = BackwardInputs(dout=own_dout, q=q, k=k, v=v, out=None, lse=own_lse, delta=own_delta)
            leaving.send(index, self._ring_backward(exchanges, own, buffers))
        leaving.finish()
        return dq, dk, dv

    @cached_property
    def needs_delta(self) -> bool:
        """Whether the backward pass needs delta even where it is given the output."""
        sends_delta = self.group.size > 1 and (self.schedule.ulysses > 1 or self.schedule.ring == "burst")
        return sends_delta or not self.kernel.capabilities.derives_delta

    def _groups(self, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
        """Query heads and key heads of each group that a ring takes by itself. Exchanged heads are taken apart
        elsewhere."""
        heads, count = (q.shape[2], k.shape[2]), 1
        if self.schedule.ulysses == 1:
            count = head_slices(self.schedule, heads, self.queries.most_tokens, False, self.head_groups)
        q_size, kv_size = (total // count for total in heads)
        return [
            (slice(index * q_size, (index + 1) * q_size), slice(index * kv_size, (index + 1) * kv_size))
            for index in range(count)
        ]

    def _ring_forward(
        self,
        exchanges: Exchanges,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        buffers: OutputBuffers = (),
    ) -> Outputs:
        groups = self._groups(q, k)
        if len(groups) == 1:
            return forward(self._ring, exchanges, q, k, v, sinks, buffers)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = heads_first(q.shape, accumulation_dtype(q.dtype), q.device)
        for heads, kv_heads in groups:
            inputs = q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads]
            own_sinks = None if sinks is None else sinks[heads]
            out[:, :, heads], lse[:, :, heads] = forward(self._ring, exchanges, *inputs, own_sinks)
        return out, lse

    def _ring_backward(self, exchanges: Exchanges, inputs: BackwardInputs, buffers: OutputBuffers = ()) -> Gradients:
        rotating, groups = rotating_of(self.schedule, "backward"), self._groups(inputs.q, inputs.k)
        if len(groups) == 1:
            return backward(self._ring, exchanges, rotating, inputs, buffers)
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (inputs.q, inputs.k, inputs.v))
        for heads, kv_heads in groups:
            own = inputs.of_heads(heads, kv_heads)
            # under no name, which would keep them until the next group has its own
            dq[:, :, heads], dk[:, :, kv_heads], dv[:, :, kv_heads] = backward(self._ring, exchanges, rotating, own)
        return dq, dk, dv

    def _use_current_stream(self, exchange: Exchange, slices: int) -> None:
        """Where nothing else is exchanged on a host, with one slice and no ring there, copies need no stream of their
        own."""
        if slices == 1 and self.schedule.ulysses == self.near_ranks:
            exchange.use_current_stream()

    @cached_property
    def near_ranks(self) -> int:
        """Ranks that `Exchanges.near` joins: those of a host where a ring has two levels, else all of the group."""
        size = self.group.size
        return size // self.schedule.hosts(size, self.ranks_per_host or size)

    @cached_property
    def _ring(self) -> RingAttention:
        """The attention of a ring rank."""
        degree, near, size = self.schedule.ulysses, self.near_ranks, self.group.size
        ring_rank, member = divmod(self.group.rank, degree)
        same = (other * degree + member for other in range(size // degree))
        return RingAttention(
            plan=make_plan(self.masks, self.queries.joined(degree), self.keys.joined(degree), size // near),
            ring_rank=ring_rank,
            peers=tuple(rank % near if rank // near == self.group.rank // near else rank // near for rank in same),
            kernel=self.kernel,
            scores=self.scores,
        )

    def _owner(self, sharding: Sharding) -> UlyssesRanks:
        first = self.group.rank - self.group.rank % self.near_ranks
        return ulysses_ranks_of(sharding, self.group.rank, self.schedule.ulysses, first)
