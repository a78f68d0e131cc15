"""What the loop of a ring works on: one attention over ring ranks, and the steps of its plan as rounds of messages."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from ..kernels import Kernel, Scores
from ..numerics import accumulation_dtype
from ..plan import Plan, Step, Transfer
from ..plan.ring import Rotating
from .exchange import Incoming, Region, Round, Shape


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
    shapes: tuple[Shape, ...],
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

    def returned(transfer: Transfer) -> tuple[Shape, ...]:
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


def _held(
    plan: Plan, rank: int, rotating: Rotating, shapes: tuple[Shape, ...], crossing: int | None
) -> tuple[int, tuple[Shape, ...]]:
    """The first row that a rank holds, and the shapes of what it holds; no shapes without rows."""
    first, stop = plan.held(rank, rotating, crossing or 0)
    return first, tuple(((batch, stop - first, *rest), dtype) for (batch, _, *rest), dtype in shapes if stop > first)


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of one row of all sequences."""
    return math.prod(shape) // shape[1] * dtype.itemsize
