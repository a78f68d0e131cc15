"""The loop of a ring. In step s a rank computes with the block of the rank s places before it: K and V, or the queries
and all that belongs to them. Blocks come straight from the ranks that own them, and their gradients return there.

```text
rank 2 of 4   step 0     step 1         step 2         step 3
computes      block 2    block 1        block 0        block 3
fetches       block 1    block 0        block 3
returns                  gradients 1    gradients 0    gradients 3     (in the backward pass)
```

On one host `_rotate` is all of it. Over several hosts it runs on two levels, see `_run`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import BackwardInputs, Gradients, Kernel, OutputBuffers, Outputs, Scores, project_out
from ..numerics import accumulation_dtype
from ..plan import Plan, Step, Tile, Transfer
from ..plan.ring import Rotating, sends_before_compute
from .exchange import Exchange, Exchanges, Incoming, Pending, Published, Region, Round, shapes_of
from .merge import Merged, Summed


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
    """

    plan: Plan
    ring_rank: int
    peers: tuple[int, ...]
    kernel: Kernel
    scores: Scores

    @cached_property
    def single_tile(self) -> bool:
        """Whether one tile covers all rows and columns of this ring rank, which is the only one."""
        plan = self.plan
        if plan.ranks > 1:
            return False
        tiles = [(tile.batch, tile.q, tile.k) for step in plan.steps(0, "kv") for tile in step.tiles]
        return tiles == [((0, len(plan.masks)), (0, plan.queries.length), (0, plan.keys.length))]


class StepRounds(NamedTuple):
    """A step of a plan, the round in which its blocks come, and the one in which their gradients return."""

    step: Step
    blocks: Round
    gradients: Round


@dataclass(frozen=True, eq=False)
class Level:
    """The steps of this rank inside its host or between hosts, for blocks of given shapes.

    Args:
        orders (`int`): Steps of all ranks, those that this one leaves out included.
        steps (`tuple[StepRounds, ...]`): The steps of this rank.
        gradients (`int`): How many tensors of a block have gradients that return; 0 in the forward pass.
        block_bytes (`int`): The most bytes that a rank publishes as its block.
        gradient_bytes (`int`): The most bytes that a rank publishes as gradients.
    """

    orders: int
    steps: tuple[StepRounds, ...]
    gradients: int
    block_bytes: int
    gradient_bytes: int


@lru_cache(maxsize=1024)
def level_of(
    attention: RingAttention,
    rotating: Rotating,
    shapes: Published,
    gradients: int,
    single_dtype: torch.dtype | None,
    crossing: int | None,
) -> Level:
    """The [`Level`] of a rank whose own block has these shapes.

    Args:
        gradients (`int`): As in [`Level`]; the first tensors of a block have them.
        single_dtype (`torch.dtype`, *optional*): In which gradients of a single tile travel; others do in the
            accumulation dtype.
        crossing (`int`, *optional*): The step of the outer ring in which the blocks came; the outer ring itself if
            `None`.
    """
    plan, rank = attention.plan, attention.ring_rank
    steps = plan.crossings(rank, rotating) if crossing is None else plan.steps(rank, rotating, crossing)

    def returned(transfer: Transfer) -> Published:
        single = single_dtype if transfer.single_tile else None
        return tuple(
            ((batch, transfer.rows, *rest), single or accumulation_dtype(dtype))
            for (batch, _, *rest), dtype in shapes[:gradients]
        )

    def rounds(step: Step) -> StepRounds:
        outgoing, incoming = list[tuple[int, Region]](), list[Incoming]()
        leaving, coming = list[tuple[int, Region]](), list[Incoming]()
        first, own = _held(plan, rank, rotating, shapes, crossing)
        if step.send:
            peer, theirs = attention.peers[step.send.peer], returned(step.send)
            rows = step.send.start - first, step.send.stop - first
            outgoing = [(peer, Region(index, rows)) for index in range(len(shapes))]
            coming = [
                Incoming(peer, theirs, Region(index, (0, step.send.rows)), Region(index, rows))
                for index in range(gradients)
            ]
        if step.recv:
            peer, whole = attention.peers[step.recv.peer], (0, step.recv.rows)
            first, theirs = _held(plan, step.recv.peer, rotating, shapes, crossing)
            rows = step.recv.start - first, step.recv.stop - first
            incoming = [
                Incoming(peer, theirs, Region(index, rows), Region(index, whole)) for index in range(len(shapes))
            ]
            leaving = [(peer, Region(index, whole)) for index in range(gradients)]
        sums = returned(step.recv) if step.recv else ()
        return StepRounds(
            step,
            Round(own, tuple(outgoing), tuple(incoming), 2 * step.order),
            Round(sums, tuple(leaving), tuple(coming), 2 * step.order + 1),
        )

    widened = [(shape, accumulation_dtype(dtype)) for shape, dtype in shapes[:gradients]]
    most_tokens = plan.blocks(rotating).most_tokens
    return Level(
        orders=plan.hosts if crossing is None else plan.per_host,
        steps=tuple(rounds(step) for step in steps),
        gradients=gradients,
        block_bytes=sum(_row_bytes(*shape) for shape in shapes) * most_tokens,
        gradient_bytes=sum(_row_bytes(*shape) for shape in widened) * most_tokens,
    )


def _held(plan: Plan, rank: int, rotating: Rotating, shapes: Published, crossing: int | None) -> tuple[int, Published]:
    """The first row that a rank holds, and the shapes of what it holds; no shapes without rows."""
    first, stop = plan.held(rank, rotating, crossing or 0)
    return first, tuple(((batch, stop - first, *rest), dtype) for (batch, _, *rest), dtype in shapes if stop > first)


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of one row of all sequences."""
    return math.prod(shape) // shape[1] * dtype.itemsize


class Block(NamedTuple):
    """A block that a rank computes with: its own, or one that came. It begins with row `first` of its shard, and its
    first tensors have sums of gradients; none in the forward pass."""

    tensors: Sequence[Tensor]
    first: int = 0
    gradients: Sequence[Summed] = ()


# Computes a step with a block, and adds to the sums of its gradients. Those of a single tile may go to the buffers.
Compute = Callable[[Block, Step, OutputBuffers], None]


def forward(
    attention: RingAttention,
    exchanges: Exchanges,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    buffers: OutputBuffers = (),
) -> Outputs:
    """Attention of this rank's queries over the keys of all ranks. K and V rotate.

    Args:
        attention ([`RingAttention`]): What to compute.
        exchanges, q, k, v, sinks: As in [`ShardedAttention.forward`].
        buffers (sequence of `torch.Tensor`, *optional*): Where `out` and `lse` may be written, if one tile is all.

    Returns:
        `out` of shape `(B, n, Hq, Dv)` in the dtype of q, and `lse` of shape `(B, n, Hq)` in fp32 (fp64 for fp64), in
        memory `(B, Hq, n)`.
    """
    buffers = buffers if attention.single_tile and sinks is None else ()
    merged = Merged((*q.shape[:3], v.shape[3]), q, sinks)

    def compute(block: Block, step: Step, _: OutputBuffers) -> None:
        for tile in step.tiles:
            rows = slice(*tile.batch), slice(*tile.q)
            columns = slice(*tile.batch), slice(tile.k[0] - block.first, tile.k[1] - block.first)
            keys, values = (tensor[columns] for tensor in block.tensors)
            out, lse = attention.kernel.forward(q[rows], keys, values, tile.band, attention.scores, buffers)
            merged.add(tile.batch, tile.q, out, lse)

    _run(attention, "kv", exchanges, Block((k, v)), compute)
    return merged.result()


def backward(
    attention: RingAttention,
    exchanges: Exchanges,
    rotating: Rotating,
    inputs: BackwardInputs,
    buffers: OutputBuffers = (),
) -> Gradients:
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
    q, k, v = inputs.q, inputs.k, inputs.v
    dq, dk, dv = (Summed(tensor.shape, tensor) for tensor in (q, k, v))
    kernel, single_tile_buffers = attention.kernel, buffers if attention.single_tile else ()
    own, own_block = _with_out(kernel, inputs), Block((k, v), 0, (dk, dv))
    if rotating == "q" and attention.plan.ranks > 1:
        assert inputs.delta is not None, "delta rotates"
        own_block = Block((q, inputs.dout, inputs.lse, inputs.delta), 0, (dq,))

    def compute(block: Block, step: Step, returning: OutputBuffers) -> None:
        if not step.tiles:
            return
        if block is own_block:
            _add_tiles(attention, step.tiles, own, (dq, dk, dv), buffers=single_tile_buffers)
        elif rotating == "kv":
            keys, values = block.tensors
            places = (None, *returning) if returning else ()
            sums = dq, *block.gradients
            _add_tiles(attention, step.tiles, own._replace(k=keys, v=values), sums, (0, block.first), places)
        else:
            their_q, dout, lse, delta = block.tensors
            theirs = _with_out(kernel, BackwardInputs(dout, their_q, k, v, None, lse, delta))
            places = (*returning, None, None) if returning else ()
            _add_tiles(attention, step.tiles, theirs, (*block.gradients, dk, dv), (block.first, 0), places)

    single_dtype = accumulation_dtype(q.dtype) if kernel.capabilities.wide else q.dtype
    _run(attention, rotating, exchanges, own_block, compute, single_dtype)
    return dq.result(), dk.result(), dv.result()


def _with_out(kernel: Kernel, inputs: BackwardInputs) -> BackwardInputs:
    """Inputs whose output is elsewhere, or does not have the product `delta`, with one that has it if a kernel needs
    it."""
    if inputs.out is not None or not kernel.capabilities.wants_out:
        return inputs
    assert inputs.delta is not None, "there is out or delta"
    dout, out = project_out(inputs.dout, inputs.delta)
    return inputs._replace(dout=dout, out=out)


def _add_tiles(
    attention: RingAttention,
    tiles: Sequence[Tile],
    inputs: BackwardInputs,
    sums: Sequence[Summed],
    first: tuple[int, int] = (0, 0),
    buffers: OutputBuffers = (),
) -> None:
    """Adds the gradients of tiles to the sums of dq, dk and dv. Rows and columns of the inputs begin with the `first`
    ones of their shards. Gradients of a single tile may go to the buffers."""
    first_row, first_column = first
    for tile in tiles:
        rows = tile.q[0] - first_row, tile.q[1] - first_row
        columns = tile.k[0] - first_column, tile.k[1] - first_column
        cut = inputs.cut(slice(*rows), slice(*columns), slice(*tile.batch))
        gradients = attention.kernel.backward(cut, tile.band, attention.scores, buffers)
        for total, gradient, span in zip(sums, gradients, (rows, columns, columns), strict=True):
            total.add(tile.batch, span, gradient)


def _run(
    attention: RingAttention,
    rotating: Rotating,
    exchanges: Exchanges,
    own: Block,
    compute: Compute,
    single_dtype: torch.dtype | None = None,
) -> None:
    """Runs the ring of a plan; `single_dtype` as in [`level_of`]. Over several hosts it has two levels: a step of the
    outer one, between hosts, is all of an inner one. While the ranks of a host pass on the blocks of one host, those of
    the next one cross, and the gradients of the last one cross back."""
    shapes = shapes_of(own.tensors)
    level = partial(level_of, attention, rotating, shapes, len(own.gradients), single_dtype)
    plan, near = attention.plan, exchanges.near
    if plan.hosts == 1:
        _rotate(level(0), near, own, compute)
        return
    outer = level(None)
    if plan.per_host > 1:
        near.reserve("blocks", outer.block_bytes)
        if outer.gradients:
            near.reserve("gradients", outer.gradient_bytes)

    def visit(block: Block, crossing: Step, _: OutputBuffers) -> None:
        if plan.visited(attention.ring_rank, rotating, crossing.order):
            _rotate(level(crossing.order), near, block, compute)

    _rotate(outer, exchanges.far, own, visit)


def _rotate(level: Level, exchange: Exchange, own: Block, compute: Compute) -> None:
    """Runs the steps of one level. While a step computes, the block of the next step is under way, and so are the
    gradients of the step before, which are added to the sums of what this rank holds."""
    if level.orders == 1:
        for rounds in level.steps:
            compute(own, rounds.step, ())
        return
    returns = _Returns(level, exchange, own)
    exchange.publish("blocks", own.tensors, level.block_bytes)
    arriving: Pending | None = None
    for rounds, following in zip_longest(level.steps, level.steps[1:]):
        step = rounds.step
        if step.order and arriving is None:
            arriving = exchange.fetch("blocks", rounds.blocks, own.tensors)
        block = own if arriving is None else _received(arriving.wait(), step, level.gradients)
        arriving = None
        if following is not None and sends_before_compute(step, following.step, level.gradients > 0):
            arriving = exchange.fetch("blocks", following.blocks, own.tensors)
        sends_back = level.gradients > 0 and step.order > 0
        compute(block, step, returns.output_buffers(rounds) if sends_back else ())
        if sends_back:
            returns.send(rounds, block)
    returns.finish()


def _received(tensors: Sequence[Tensor], step: Step, gradients: int) -> Block:
    """The block that came in a step; empty if none did."""
    sums = [Summed(tensor.shape, tensor) for tensor in tensors[:gradients]]
    return Block(tensors, step.recv.start if step.recv else 0, sums)


@dataclass
class _Returns:
    """The gradients of received blocks on their way back, step by step; see [`_rotate`]. Forward there are none."""

    level: Level
    exchange: Exchange
    own: Block
    pending: tuple[Round, Pending] | None = None
    following: int = 1  # the order of the step whose gradients are published next

    def output_buffers(self, rounds: StepRounds) -> OutputBuffers:
        """Where the gradients of a step may be written, if they are those of a single tile."""
        step = rounds.step
        self._skip_to(step.order)
        if step.recv is None:
            return ()
        buffers = self.exchange.output_buffers("gradients", rounds.gradients.shapes, self.level.gradient_bytes)
        return buffers if step.recv.single_tile else ()

    def send(self, rounds: StepRounds, block: Block) -> None:
        """Sends the gradients of a step's block back, and adds those of the step before that came to this rank."""
        step, this_round = rounds.step, rounds.gradients
        sums = block.gradients if step.recv else ()
        tensors = [
            (total.only_part if step.recv and step.recv.single_tile else total.wide).to(dtype)
            for total, (_, dtype) in zip(sums, this_round.shapes, strict=True)
        ]
        self.exchange.publish("gradients", tensors, self.level.gradient_bytes)
        self.following = step.order + 1
        pending = self.exchange.fetch("gradients", this_round, tensors)
        self._add_pending()
        self.pending = this_round, pending

    def finish(self) -> None:
        """Adds the gradients that are still under way."""
        if self.level.gradients:
            self._skip_to(self.level.orders)
        self._add_pending()

    def _skip_to(self, order: int) -> None:
        """Publishes nothing in the steps that this rank leaves out."""
        while self.following < order:
            self.exchange.publish("gradients", (), self.level.gradient_bytes)
            self.following += 1

    def _add_pending(self) -> None:
        if self.pending is None:
            return
        this_round, pending = self.pending
        for part, gradient in zip(this_round.incoming, pending.wait(), strict=True):
            total = self.own.gradients[part.target.index]
            total.add((0, total.shape[0]), part.target.rows, gradient)
        self.pending = None
