"""What a schedule sends: messages and bytes, exactly as the exchange counts them."""

from dataclasses import dataclass
from typing import Literal

from .ring import Plan, Rotating, Step

Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class Shapes:
    """The sizes of the heads, and bytes an element of the inputs, of the accumulators, and of the gradients as the
    kernel returns them (by default as the inputs)."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    accumulator_itemsize: int
    gradient_itemsize: int | None = None


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes that leave one rank, and those of the bytes that leave its host."""

    messages: int = 0
    bytes: int = 0
    across: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.messages + other.messages, self.bytes + other.bytes, self.across + other.across)


def rank_traffic(plan: Plan, rank: int, direction: Pass, rotating: Rotating, shapes: Shapes) -> Traffic:
    """What one rank sends in one pass through one layer.

    For K and V (design of ring attention) these are 2·n·Hkv·D elements a step forward, and as many more gradients
    backward; for the burst backward Q, dO, dQ and two accumulator scalars a head (arXiv 2403.09347, section 3).
    """
    sent = Traffic()
    for crossing in plan.crossings(rank, rotating):
        far = _sent(plan, crossing, direction, rotating, shapes)
        sent += Traffic(far.messages, far.bytes, far.bytes)
        for step in plan.steps(rank, rotating, crossing.order):
            sent += _sent(plan, step, direction, rotating, shapes)
    return sent


def _sent(plan: Plan, step: Step, direction: Pass, rotating: Rotating, shapes: Shapes) -> Traffic:
    """The block that leaves a rank in a step, and the gradients of the one that it received."""
    single_tile = step.recv is not None and step.recv.single_tile
    sent = Traffic()
    for transfer, rows in zip((step.send, step.recv), row_bytes(direction, rotating, shapes, single_tile), strict=True):
        if transfer:
            sent += Traffic(len(rows), len(plan.masks) * transfer.rows * sum(rows))
    return sent


def row_bytes(direction: Pass, rotating: Rotating, shapes: Shapes, single_tile: bool) -> tuple[list[int], list[int]]:
    """Bytes of a row of each tensor of the rotating block, and of each gradient that returns: as the kernel made it
    (`single_tile`), or summed."""
    keys = shapes.kv_heads * shapes.head_dim
    values = shapes.kv_heads * shapes.value_dim
    queries = shapes.q_heads * shapes.head_dim
    outputs = shapes.q_heads * shapes.value_dim
    gradient = (shapes.gradient_itemsize or shapes.itemsize) if single_tile else shapes.accumulator_itemsize
    if rotating == "kv":
        returned = [keys * gradient, values * gradient] if direction == "backward" else []
        return [keys * shapes.itemsize, values * shapes.itemsize], returned
    scalars = shapes.q_heads * shapes.accumulator_itemsize
    return [queries * shapes.itemsize, outputs * shapes.itemsize, scalars, scalars], [queries * gradient]
