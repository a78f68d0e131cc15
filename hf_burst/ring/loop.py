"""The loop that executes the steps of a ring, forward and backward.

Over several hosts the same loop runs on two levels: a step of the outer ring, between hosts, is all of an inner ring.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import BackwardInputs, Band, Kernel, OutputBuffers, Scores, project_out
from ..numerics import accumulation_dtype
from ..plan import Plan, Step, Tile, Transfer
from ..plan.steps import Rotating, goes_ahead
from .exchange import Exchange, Exchanges, Incoming, Outgoing, Pending, Round, Shape
from .merge import Merged, Summed

_BANDS = 1024


class Held(NamedTuple):
    """The block that a rank holds: its own, or one that crossed to it. It begins with row `first` of its shard. `home`
    are the sums of its gradients; none in the forward pass, or without a block."""

    block: Sequence[Tensor]
    first: int = 0
    home: Sequence[Summed] = ()


# Computes a step with a block. Returns the gradients of the block, which may be written to the buffers.
Compute = Callable[[Step, Sequence[Tensor], OutputBuffers], Sequence[Tensor]]
# The same for a step of an inner ring, and what the rank holds in it.
ComputeOnHost = Callable[[Held, Step, Sequence[Tensor], OutputBuffers], Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class RingAttention:
    """One attention over a ring: what its forward and backward pass and all layers have in common.

    Args:
        plan ([`Plan`]): The tiles of each ring rank.
        ring_rank (`int`): This rank's number in the ring.
        peers (`tuple[int, ...]`): The number of each ring rank in the exchange that reaches it: inside the host, or
            between hosts.
        kernel ([`Kernel`]): Computes a tile.
        scores ([`Scores`]): Scale and soft-capping.
        slice_blocks (`int`, defaults to 0): Blocks of rows of a slice of heads at least, see [`head_slices`].
        head_groups (`int`, defaults to 1): As in [`Memory`]; those of gathered keys.
        bands (`dict`): The bands that `band` has made.
    """

    plan: Plan
    ring_rank: int
    peers: tuple[int, ...]
    kernel: Kernel
    scores: Scores
    slice_blocks: int = 0
    head_groups: int = 1
    bands: dict[int, tuple[Tile, Band]] = field(default_factory=dict, repr=False)

    def band(self, tile: Tile) -> Band:
        """The band of a tile: one object for all calls, which remembers its hash."""
        known = self.bands.get(id(tile))  # whose tile is kept, so that nothing else has its id
        if known is None:
            if len(self.bands) >= _BANDS:
                self.bands.clear()
            known = self.bands[id(tile)] = tile, Band(tile.low, tile.high, tile.segments)
        return known[1]

    @cached_property
    def single_tile(self) -> bool:
        """Whether one tile covers all rows and columns of this ring rank, which is the only one."""
        plan = self.plan
        if plan.ranks > 1:
            return False
        tiles = [(tile.batch, tile.q, tile.k) for step in plan.steps(0, "kv") for tile in step.tiles]
        return tiles == [((0, len(plan.masks)), (0, plan.queries.length), (0, plan.keys.length))]

    @cached_property
    def gathered(self) -> tuple[Tile, ...]:
        """The tiles of this ring rank with the keys of all, see [`Plan.gathered`]."""
        return self.plan.gathered(self.ring_rank)

    @cached_property
    def most_tokens(self) -> dict[Rotating, int]:
        """The most tokens of a ring rank, of keys and of queries."""
        return {"kv": self.plan.keys.most_tokens, "q": self.plan.queries.most_tokens}


def forward(
    attention: RingAttention,
    exchanges: Exchanges,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    buffers: OutputBuffers | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks. K and V rotate.

    Args:
        attention ([`RingAttention`]): What to compute.
        exchanges, q, k, v, sinks: As in [`ShardedAttention.forward`].
        buffers (sequence of `torch.Tensor`, *optional*): Where `out` and `lse` may be written, if one tile is all.

    Returns:
        `out` of shape `(B, n, Hq, Dv)` in the dtype of q, and `lse` of shape `(B, n, Hq)` in fp32 (fp64 for fp64), in
        memory `(B, Hq, n)`.
    """
    buffers = buffers if attention.single_tile and sinks is None else None
    merged = Merged((*q.shape[:3], v.shape[3]), q.dtype, q.device, sinks)

    def compute(held: Held, step: Step, block: Sequence[Tensor], _: OutputBuffers) -> Sequence[Tensor]:
        keys, values = block
        first = step.recv.start if step.recv else held.first
        for tile in step.tiles:
            out, lse = attention.kernel.forward(
                _cut(q, tile.batch, tile.q),
                _cut(keys, tile.batch, tile.k, first),
                _cut(values, tile.batch, tile.k, first),
                attention.band(tile),
                attention.scores,
                buffers,
            )
            merged.add(tile.batch, tile.q, out, lse)
        return ()

    _run(attention, "kv", exchanges, Held((k, v)), compute)
    return merged.result()


def backward(
    attention: RingAttention,
    exchanges: Exchanges,
    rotating: Rotating,
    inputs: BackwardInputs,
    buffers: OutputBuffers | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v.

    Args:
        attention ([`RingAttention`]): As in the forward pass.
        exchanges ([`Exchanges`]): The messages.
        rotating (`str`): `"kv"`: K and V rotate, dK and dV return. `"q"`: Q, dO, lse and delta rotate, dQ returns.
        inputs ([`BackwardInputs`]): This rank's rows. `out` may be left out if `delta` is there, and `delta` if `out`
            is there, `rotating` is `"kv"` and the kernel derives it.
        buffers (sequence of `torch.Tensor`, *optional*): Where `dq`, `dk` and `dv` may be written, if one tile is all.

    Returns:
        `dq`, `dk` and `dv` in the shapes and dtypes of q, k and v.
    """
    buffers = buffers if attention.single_tile else None
    q, k, v = inputs.q, inputs.k, inputs.v
    dq, dk, dv = (Summed(tuple(tensor.shape), tensor.dtype, q.device) for tensor in (q, k, v))
    rows, keys = Rows(q, inputs.dout, inputs.lse, inputs.delta, inputs.out, 0, dq), Keys(k, v, 0, dk, dv)
    if inputs.out is None:
        assert inputs.delta is not None, "there is out or delta"
        rows = _rows_without_out(attention.kernel, (q, inputs.dout, inputs.lse, inputs.delta), 0, dq)

    def compute(held: Held, step: Step, block: Sequence[Tensor], returning: OutputBuffers) -> Sequence[Tensor]:
        if step.recv is None and held is own:
            add_tiles(attention, step.tiles, rows, keys, buffers)
            return ()
        first, lone = (step.recv.start, step.recv.lone) if step.recv else (held.first, False)
        sums = _sums(block[: len(own.home)]) if step.recv else held.home
        if rotating == "kv":
            block_keys = Keys(block[0], block[1], first, sums[0], sums[1])
            add_tiles(attention, step.tiles, rows, block_keys, (None, *returning) if lone else None)
        else:
            block_rows = _rows_without_out(attention.kernel, block, first, sums[0])
            add_tiles(attention, step.tiles, block_rows, keys, (*returning, None, None) if lone else None)
        return _totals(sums, lone) if step.recv else ()

    own = Held((k, v), 0, (dk, dv))
    if rotating == "q" and attention.plan.ranks > 1:
        assert inputs.delta is not None, "delta rotates"
        own = Held((q, inputs.dout, inputs.lse, inputs.delta), 0, (dq,))
    lone_dtype = accumulation_dtype(q.dtype) if attention.kernel.capabilities.wide else q.dtype
    _run(attention, rotating, exchanges, own, compute, lone_dtype)
    return dq.result(), dk.result(), dv.result()


class Rows(NamedTuple):
    """Queries and all that belongs to them in the backward pass, `out` as the kernel wants it. Row 0 is row `first` of
    its shard."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor | None
    out: Tensor | None
    first: int
    dq: Summed


class Keys(NamedTuple):
    """Keys and values, and the sums of their gradients. Row 0 is row `first` of its shard."""

    k: Tensor
    v: Tensor
    first: int
    dk: Summed
    dv: Summed


def _rows_without_out(kernel: Kernel, block: Sequence[Tensor], first: int, dq: Summed) -> Rows:
    """Rows whose output is elsewhere, or does not have the product `delta`."""
    q, dout, lse, delta = block
    dout, out = project_out(dout, delta) if kernel.capabilities.wants_out else (dout, None)
    return Rows(q, dout, lse, delta, out, first, dq)


def add_tiles(
    attention: RingAttention, tiles: Sequence[Tile], rows: Rows, keys: Keys, buffers: OutputBuffers | None = None
) -> None:
    """Adds the gradients of tiles to the sums of their blocks; those of a lone tile may go to the buffers."""
    for tile in tiles:
        q_part, k_part = (tile.batch, tile.q, rows.first), (tile.batch, tile.k, keys.first)
        inputs = BackwardInputs(
            dout=_cut(rows.dout, *q_part),
            q=_cut(rows.q, *q_part),
            k=_cut(keys.k, *k_part),
            v=_cut(keys.v, *k_part),
            out=None if rows.out is None else _cut(rows.out, *q_part),
            lse=_cut(rows.lse, *q_part),
            delta=None if rows.delta is None else _cut(rows.delta, *q_part),
        )
        gradients = attention.kernel.backward(inputs, attention.band(tile), attention.scores, buffers)
        for total, gradient, (batch, (start, stop), first) in zip(
            (rows.dq, keys.dk, keys.dv), gradients, (q_part, k_part, k_part), strict=True
        ):
            total.add(batch, (start - first, stop - first), gradient)


def _run(
    attention: RingAttention,
    rotating: Rotating,
    exchanges: Exchanges,
    own: Held,
    compute: ComputeOnHost,
    lone_dtype: torch.dtype | None = None,
) -> None:
    """Runs a ring. While the ranks of a host hand the blocks of one host round, those of the next one cross, and the
    gradients of the last one cross back.

    Gradients of a single tile travel in `lone_dtype`, others in the accumulation dtype.
    """
    plan, rank = attention.plan, attention.ring_rank
    blocks, home = (tuple((tensor.shape, tensor.dtype) for tensor in tensors) for tensors in (own.block, own.home))

    outer = _level(attention, rotating, blocks, home, lone_dtype, None)
    if plan.hosts > 1 and plan.per_host > 1:
        exchanges.near.reserve("blocks", outer.capacity)
        if outer.returned:
            exchanges.near.reserve("gradients", outer.returned)

    def visit(crossing: Step, block: Sequence[Tensor], _: OutputBuffers) -> Sequence[Tensor]:
        order, came = crossing.order, crossing.recv
        held = Held(block, came.start, _sums(block[: len(home)])) if came else own if order == 0 else Held(())
        if plan.visited(rank, rotating, order):
            ring = _level(attention, rotating, blocks, home, lone_dtype, order)
            _rotate(ring, exchanges.near, held, lambda step, *more: compute(held, step, *more) if step.tiles else ())
        return _totals(held.home, came.lone) if came else ()

    _rotate(outer, exchanges.far, own, visit)


def _sums(block: Sequence[Tensor]) -> list[Summed]:
    return [Summed(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in block]


def _totals(sums: Sequence[Summed], lone: bool) -> list[Tensor]:
    return [total.only_part if lone else total.wide for total in sums]


@dataclass(frozen=True, eq=False)
class _Ring:
    """One level of a ring as this rank sees it, for blocks of given shapes.

    Args:
        orders (`int`): Steps, those that a rank leaves out included.
        blocks (`list[tuple[Step, Round]]`): The steps of this rank, and how their blocks come.
        returns (`dict[int, Round]`): How the gradients of a step go home; none in the forward pass.
        capacity (`int`): The most bytes that a rank publishes as its block.
        returned (`int`): The most bytes that a rank publishes as gradients; 0 in the forward pass.
    """

    orders: int
    blocks: list[tuple[Step, Round]]
    returns: dict[int, Round]
    capacity: int
    returned: int


@lru_cache(maxsize=1024)
def _level(
    attention: RingAttention,
    rotating: Rotating,
    blocks: tuple[Shape, ...],
    home: tuple[Shape, ...],
    lone_dtype: torch.dtype | None,
    crossing: int | None,
) -> _Ring:
    """A level of a ring, if this rank's own block has the shapes `blocks`, and its gradients have the shapes `home`.

    Args:
        crossing (`int`, *optional*): The inner ring of this step of the outer one; the outer ring by default.
    """
    plan, rank, shards = attention.plan, attention.ring_rank, attention.plan.blocks(rotating)
    steps = plan.crossings(rank, rotating) if crossing is None else plan.steps(rank, rotating, crossing)

    def held(ring_rank: int) -> tuple[int, tuple[Shape, ...]]:
        """The first row that a rank holds, and the shapes of all of them."""
        first, stop = (0, shards.tokens(ring_rank)) if crossing is None else plan.held(ring_rank, rotating, crossing)
        return first, tuple(
            ((batch, stop - first, *rest), dtype) for (batch, _, *rest), dtype in blocks if stop > first
        )

    first, own = held(rank)
    rounds, returns = [], {}
    for step in steps:
        send, recv = step.send, step.recv
        outgoing, incoming = [], []
        if send:
            peer = attention.peers[send.peer]
            outgoing = [Outgoing(peer, index, send.start - first, send.stop - first) for index in range(len(own))]
        if recv:
            peer, (theirs_first, theirs) = attention.peers[recv.peer], held(recv.peer)
            rows = recv.start - theirs_first, recv.stop - theirs_first
            incoming = [Incoming(peer, theirs, index, *rows) for index in range(len(theirs))]
        rounds.append((step, Round(own, tuple(outgoing), tuple(incoming), 2 * step.order)))
        returns[step.order] = _return_round(attention, step, home, lone_dtype)
    most = attention.most_tokens[rotating]
    capacity = sum(_row_bytes(shape, dtype) for shape, dtype in blocks) * most
    returned = sum(_row_bytes(shape, accumulation_dtype(dtype)) for shape, dtype in home) * most
    return _Ring(plan.hosts if crossing is None else plan.per_host, rounds, returns, capacity, returned)


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of one row of all sequences."""
    return math.prod(shape) // shape[1] * dtype.itemsize


def _return_round(
    attention: RingAttention, step: Step, home: tuple[Shape, ...], lone_dtype: torch.dtype | None
) -> Round:
    """How the gradients of a step go home, if those of a whole shard have these shapes and dtypes."""

    def returned(transfer: Transfer) -> tuple[Shape, ...]:
        lone, rows = lone_dtype if transfer.lone else None, transfer.rows
        return tuple(((batch, rows, *rest), lone or accumulation_dtype(dtype)) for (batch, _, *rest), dtype in home)

    outgoing: tuple[Outgoing, ...] = ()
    incoming: tuple[Incoming, ...] = ()
    own = returned(step.recv) if step.recv else ()
    if step.recv:
        peer = attention.peers[step.recv.peer]
        outgoing = tuple(Outgoing(peer, index, 0, step.recv.rows) for index in range(len(own)))
    if step.send:
        theirs, peer = returned(step.send), attention.peers[step.send.peer]
        incoming = tuple(Incoming(peer, theirs, index, 0, step.send.rows) for index in range(len(theirs)))
    return Round(own, outgoing, incoming, 2 * step.order + 1)


def _rotate(ring: _Ring, exchange: Exchange, held: Held, compute: Compute) -> None:
    """Runs the steps of one level. While a step computes, the block of the next step is under way, and so are the
    gradients of the step before on their way home, where they are added to the sums of what is held."""
    if ring.orders == 1:
        for step, _ in ring.blocks:
            compute(step, held.block, ())
        return
    returns = _Returns(ring, exchange, held)
    exchange.publish("blocks", held.block, ring.capacity)
    arriving: Pending | None = None
    for index, (step, this_round) in enumerate(ring.blocks):
        if index == 0 and step.order:
            arriving = exchange.fetch("blocks", this_round, held.block)
        arrived = arriving.wait() if step.order and arriving else held.block
        following, next_round = ring.blocks[index + 1] if index + 1 < len(ring.blocks) else (None, None)
        ahead = following is not None and goes_ahead(step, following, ring.returned > 0)
        if next_round is not None and ahead:
            arriving = exchange.fetch("blocks", next_round, held.block)
        gradients = compute(step, arrived, returns.output_buffers(step))
        returns.send(step, gradients)
        if next_round is not None and not ahead:
            arriving = exchange.fetch("blocks", next_round, held.block)
    returns.finish()


class _Returns:
    """The gradients of rotating blocks on their way home, step by step; see [`_rotate`]. Forward there are none."""

    def __init__(self, ring: _Ring, exchange: Exchange, held: Held) -> None:
        self.ring, self.exchange, self.held = ring, exchange, held
        self.pending: tuple[Transfer | None, Pending] | None = None
        self.following = 1  # the order of the step whose gradients are published next

    def output_buffers(self, step: Step) -> OutputBuffers:
        """Where the gradients of a step may be written."""
        if not (self.ring.returned and step.order):
            return ()
        self._skip_to(step.order)
        shapes = self.ring.returns[step.order].shapes
        return self.exchange.output_buffers("gradients", shapes, self.ring.returned) if shapes else ()

    def send(self, step: Step, gradients: Sequence[Tensor]) -> None:
        """Sends the gradients of a step's block home, and adds those of the step before that came home."""
        if not (self.ring.returned and step.order):
            return
        self._skip_to(step.order)
        this_round = self.ring.returns[step.order]
        tensors = [gradient.to(dtype) for gradient, (_, dtype) in zip(gradients, this_round.shapes, strict=True)]
        self.exchange.publish("gradients", tensors, self.ring.returned)
        self.following = step.order + 1
        pending = self.exchange.fetch("gradients", this_round, tensors)
        self._add_pending()
        self.pending = step.send, pending

    def finish(self) -> None:
        """Adds the gradients that are still under way."""
        if self.ring.returned:
            self._skip_to(self.ring.orders)
        self._add_pending()

    def _skip_to(self, order: int) -> None:
        """Publishes nothing in the steps that this rank leaves out."""
        while self.following < order:
            self.exchange.publish("gradients", (), self.ring.returned)
            self.following += 1

    def _add_pending(self) -> None:
        if self.pending is None:
            return
        transfer, pending = self.pending
        gradients = pending.wait()
        if transfer is not None:
            rows = transfer.start - self.held.first, transfer.stop - self.held.first
            for total, gradient in zip(self.held.home, gradients, strict=True):
                total.add((0, total.shape[0]), rows, gradient)
        self.pending = None


def _cut(tensor: Tensor, batch: tuple[int, int], rows: tuple[int, int], first: int = 0) -> Tensor:
    """The part of a block that a tile names; its row 0 is row `first` of its shard."""
    if batch == (0, tensor.shape[0]) and rows == (first, first + tensor.shape[1]):
        return tensor
    return tensor[batch[0] : batch[1], rows[0] - first : rows[1] - first]
