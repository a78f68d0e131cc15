"""What a schedule costs on a machine: the seconds, bytes and memory of one attention layer on its busiest rank.

A pass is a row of stages: the steps of a ring, or slices of the heads. A stage computes beside messages under way and
takes `max(kernels + other + drag, messages)` seconds; `other` is the time of copies, merges and launches. What crosses
between hosts is under way beside all stages of an inner ring.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import get_args

from ..config import Schedule, Transport
from ..errors import ConfigError
from .machine import Link, Machine, cut_for_cudnn
from .steps import Rotating, Step, goes_ahead
from .tiles import Tile
from .traffic import Pass, row_bytes
from .work import Layer, busiest, gathered_rows, lag, rotating_of, tile_pairs

_MOST_SLICES = 4
_BLOCK_ROWS = 128  # the unit of `Machine.slice_blocks`


@dataclass(frozen=True)
class Cost:
    """What a layer costs under one schedule, on the rank that has the most to compute.

    Args:
        forward_s, backward_s (`float`): Seconds of either pass.
        kernels_s (`float`): Seconds in which the attention kernel runs, in both passes.
        exposed_s (`float`): Seconds by which messages make the passes longer.
        other_s (`float`): Seconds of copies, merges, sums and launches.
        sent_bytes (`int`): Bytes that leave the rank, or arrive if that is more, in both passes.
        across_bytes (`int`): Those of them that travel between hosts.
        memory_bytes (`int`): Most memory beside inputs, outputs and gradients.
        transport (`str`): `"p2p"` or `"symmetric"`: what carries messages inside a host.
        slices (`int`): Parts of a rank's heads, computed one after another.
        by_cudnn (`bool`): Whether the backward pass of a tile is cuDNN's, see [`Machine`].
    """

    forward_s: float
    backward_s: float
    kernels_s: float
    exposed_s: float
    other_s: float
    sent_bytes: int
    across_bytes: int
    memory_bytes: int
    transport: Transport
    slices: int
    by_cudnn: bool

    @property
    def total_s(self) -> float:
        """Seconds of both passes."""
        return self.forward_s + self.backward_s


@lru_cache(maxsize=1024)
def estimate(
    schedule: Schedule,
    layer: Layer,
    machine: Machine,
    transport: Transport = "auto",
    slices: int | None = None,
    head_groups: int = 1,
) -> Cost:
    """The cost of a layer under a schedule.

    Args:
        schedule ([`Schedule`]): The schedule; its Ulysses degree divides the ranks and the heads.
        layer ([`Layer`]): What is computed.
        machine ([`Machine`]): On what.
        transport (`str`, defaults to `"auto"`): `"p2p"`, `"symmetric"`, or the second wherever it reaches.
        slices (`int`, *optional*): Slices of the heads; [`head_slices`] by default.
        head_groups (`int`, defaults to 1): As in [`Memory`].

    Raises:
        ConfigError: If the machine has no symmetric memory for these ranks and it is asked for.
    """
    hosts = schedule.hosts(layer.ranks, min(layer.ranks, machine.ranks_per_host))
    within = machine.symmetric is not None and 1 < layer.ranks // hosts <= machine.ranks_per_host
    if transport == "symmetric" and not within:
        unreached = f"{layer.ranks} ranks with {machine.ranks_per_host} on a host of {machine.device}"
        raise ConfigError(f"Symmetric memory does not reach {unreached}. Take the transport 'p2p', or 'auto'.")
    transport = ("symmetric" if within else "p2p") if transport == "auto" else transport
    heads, tokens = (layer.shapes.q_heads, layer.shapes.kv_heads), layer.masks[0].length // layer.ranks
    count = slices or head_slices(schedule, layer.ranks, heads, tokens, machine.slice_blocks, head_groups)
    forward, backward = (_PassCost(schedule, layer, machine, transport, count, way) for way in get_args(Pass))
    kernels, other = forward.kernels + backward.kernels, forward.other + backward.other
    return Cost(
        forward_s=forward.seconds,
        backward_s=backward.seconds,
        kernels_s=kernels,
        exposed_s=max(0.0, forward.seconds + backward.seconds - kernels - other),
        other_s=other,
        sent_bytes=max(forward.sent + backward.sent, forward.received + backward.received),
        across_bytes=forward.across + backward.across,
        memory_bytes=max(forward.memory, backward.memory),
        transport=transport,
        slices=count,
        by_cudnn=backward.by_cudnn,
    )


def head_slices(
    schedule: Schedule, ranks: int, heads: tuple[int, int], tokens: int, slice_blocks: int, head_groups: int = 1
) -> int:
    """The slices of a rank's key heads, of which one travels while another is computed: at most 4, and 1 for rings; or
    more if so many groups are asked for.

    Args:
        schedule ([`Schedule`]): The schedule.
        ranks (`int`): Ranks of the group.
        heads (`tuple[int, int]`): Query and key heads of all ranks.
        tokens (`int`): Tokens of one rank.
        slice_blocks (`int`): The least work of a slice, as in [`Machine`]; 0 is no limit.
        head_groups (`int`, defaults to 1): As in [`Memory`].
    """
    q_heads, kv_heads = heads
    own = kv_heads // schedule.ulysses
    least = next(count for count in range(min(head_groups, own), own + 1) if own % count == 0)
    if schedule.ulysses == 1 and (schedule.ring != "all_gather" or ranks == 1):
        return least
    blocks = q_heads * tokens // _BLOCK_ROWS  # of the heads of a rank and the tokens of all that exchange them
    most = min(_MOST_SLICES, blocks // slice_blocks) if slice_blocks else _MOST_SLICES
    return max(least, *(count for count in range(1, max(1, most) + 1) if own % count == 0))


@dataclass(frozen=True)
class _Messages:
    """Messages under way: how long, and by how much they hold up a kernel beside them, in seconds."""

    seconds: float = 0.0
    drag: float = 0.0

    def __add__(self, other: "_Messages") -> "_Messages":
        return _Messages(self.seconds + other.seconds, self.drag + other.drag)


_SILENCE = _Messages()


class _PassCost:
    """One pass as it adds up, in seconds and bytes: first of one slice of the heads, at the end of all of them."""

    def __init__(
        self, schedule: Schedule, layer: Layer, machine: Machine, transport: Transport, slices: int, direction: Pass
    ) -> None:
        self.schedule, self.layer, self.machine, self.direction = schedule, layer, machine, direction
        self.backward, self.symmetric = direction == "backward", transport == "symmetric"
        self.by_cudnn = False
        self.hosts = schedule.hosts(layer.ranks, min(layer.ranks, machine.ranks_per_host))
        self.plan, self.slices = layer.plan(schedule.ulysses, self.hosts), slices
        parts, shapes = schedule.ulysses * slices, layer.shapes
        self.shapes = replace(shapes, q_heads=shapes.q_heads // parts, kv_heads=shapes.kv_heads // parts)  # of a slice
        self.batch, self.rows = len(layer.masks), len(layer.masks) * self.plan.queries.most_tokens
        self.seconds = self.kernels = self.other = self.messages = self.crossing = 0.0
        self.sent = self.received = self.across = self.memory = 0
        gathers = schedule.ring == "all_gather" and self.plan.ranks > 1
        coming, leaving = self._gather() if gathers else self._ring()
        if schedule.ulysses > 1:
            first, last = self._exchange()
            coming, leaving = first + coming, leaving + last
        self._repeat(coming, leaving)

    def _repeat(self, coming: _Messages, leaving: _Messages) -> None:
        """All slices: the first one comes and the last one leaves with nothing beside it."""
        idle = max(0.0, self.seconds - self.kernels - self.other)
        self.seconds = coming.seconds + leaving.seconds
        for index in range(self.slices):
            beside = (coming if index + 1 < self.slices else _SILENCE) + (leaving if index else _SILENCE)
            computing = self.kernels + self.other + idle + beside.drag
            self.seconds += max(computing, self.messages + beside.seconds, self.crossing)
        self.kernels, self.other = self.slices * self.kernels, self.slices * self.other
        self.sent, self.received = self.slices * self.sent, self.slices * self.received
        self.across *= self.slices

    def _stage(
        self, kernels: float = 0.0, touched: float = 0.0, launches: int = 0, messages: _Messages = _SILENCE
    ) -> None:
        """Kernels, and calls that read or write `touched` bytes, beside messages."""
        other = touched / self.machine.memory_bandwidth + launches * self.machine.launch
        self.seconds += max(kernels + other + messages.drag, messages.seconds)
        self.kernels, self.other = self.kernels + kernels, self.other + other
        self.messages += messages.seconds

    @property
    def _inside(self) -> Link:
        """The link inside a host."""
        return (self.machine.symmetric if self.symmetric else None) or self.machine.p2p

    def _hop(self, size: float, crosses: bool) -> _Messages:
        """A step of a ring. All ranks send equally far, so some cross hosts wherever a level of it lies on several."""
        link = self.machine.between_hosts if crosses else self._inside
        return _Messages(link.seconds(size), link.drag * link.seconds(size))

    @property
    def _crosses(self) -> bool:
        """Whether ranks of the inner ring, or of the only one, are on several hosts."""
        return self.layer.ranks // self.hosts > self.machine.ranks_per_host

    def _spread(self, size: float, ranks: int, stride: int, share: float = 1.0) -> _Messages:
        """`size` bytes to each of `ranks - 1` peers, `stride` ranks apart, at a share of the bandwidth inside a host.
        Other hosts are reached at the same time as this one."""
        near = min(ranks, max(1, self.machine.ranks_per_host // stride))
        self.across += round(size * (ranks - near))
        within = self._inside.seconds(size * (near - 1) / share)
        between = self.machine.between_hosts.seconds(size * (ranks - near))
        link = self._inside if within >= between else self.machine.between_hosts
        return _Messages(max(within, between), max(within, between) * link.drag)

    def _hops(self, size: float, ranks: int) -> _Messages:
        """The same by two hops, each byte once between two hosts. The hop inside has nothing beside it."""
        crossing, inside = size * (self.hosts - 1), size * self.hosts * (ranks // self.hosts - 1)
        self.across += round(crossing)
        self._stage(messages=_Messages(self._inside.seconds(inside)))
        seconds = self.machine.between_hosts.seconds(crossing)
        return _Messages(seconds, seconds * self.machine.between_hosts.drag)

    def _kernels(self, tiles: tuple[Tile, ...], has_out: bool) -> float:
        """Seconds of kernel calls: 2 products of matrices forward, 5 backward (arXiv 2307.08691). `has_out` is whether
        the output of the queries is at hand."""
        shapes, seconds = self.shapes, 0.0
        products = (3, 2) if self.backward else (1, 1)
        by_cudnn = self.backward and has_out and self.schedule.ulysses == 1
        by_cudnn = by_cudnn and self.machine.has_wide_from_out(shapes.head_dim) and shapes.head_dim == shapes.value_dim
        for tile in tiles:
            scores = (tile.batch[1] - tile.batch[0]) * _computed(tile, self.machine) * shapes.q_heads
            flops = scores * 2 * (products[0] * shapes.head_dim + products[1] * shapes.value_dim)
            from_out = by_cudnn and _is_for_cudnn(tile, max(shapes.q_heads, shapes.kv_heads) * shapes.head_dim)
            self.by_cudnn |= from_out
            seconds += self.machine.kernel_seconds(scores, flops, self.backward, shapes.head_dim, from_out)
        return seconds

    def _ring(self) -> tuple[_Messages, _Messages]:
        """Steps of the outer ring: blocks of the next one cross, and gradients of the last one cross back, beside an
        inner ring."""
        rotating = rotating_of(self.schedule, self.direction)
        rank = busiest(self.plan, rotating)
        crossings = self.plan.crossings(rank, rotating)
        returning = coming = _SILENCE
        count = 0
        for crossing, following in zip_longest(crossings, crossings[1:]):
            if following:
                coming = self._travel(following, rotating, home=False, crosses=True)
            ahead = following is not None and goes_ahead(crossing, following, self.backward)
            beside, started = returning + coming if ahead else returning, self.seconds
            steps = self.plan.steps(rank, rotating, crossing.order)
            self._inner_ring(steps, rotating, alone=crossing.order == 0)
            count += sum(len(step.tiles) for step in steps)
            self.crossing += beside.seconds
            self.seconds = max(self.seconds + beside.drag, started + beside.seconds)
            returning = self._travel(crossing, rotating, home=True, crosses=True) if self.backward else _SILENCE
            if following and not ahead:
                self._stage(messages=coming)
        self._stage(messages=returning)
        if self.backward or not self.symmetric:  # what is only read from memory waits for nobody
            self._stage(messages=_Messages(self.machine.waiting * lag(self.plan, rotating) * self.kernels))
        # two slots of what comes, two of what returns, or three where kernels write it in place
        self.memory *= 2 if not self.backward else 5 if self.symmetric else 4
        if self.hosts > 1:  # the block that is held, the one that crosses, and the sums of either
            rows = self.batch * self.plan.blocks(rotating).most_tokens
            self.memory += 2 * rows * sum(map(sum, row_bytes(self.direction, rotating, self.shapes, lone=False)))
        self._ends(alone=count == 1)
        return _SILENCE, _SILENCE

    def _inner_ring(self, steps: tuple[Step, ...], rotating: Rotating, alone: bool) -> None:
        """Steps of the plan: blocks of the next one come, and gradients of the last one return, beside its kernels.
        Without steps before it (`alone`) the first one merges nothing."""
        returning = coming = _SILENCE
        if steps and steps[0].order:
            self._stage(messages=self._travel(steps[0], rotating, home=False, crosses=self._crosses))
        for step, following in zip_longest(steps, steps[1:]):
            if following:
                coming = self._travel(following, rotating, home=False, crosses=self._crosses)
            ahead = following is not None and goes_ahead(step, following, self.backward)
            kept = alone and step is steps[0] and len(step.tiles) <= 1  # as the kernel made it
            touched, launches = (0, len(step.tiles)) if kept else self._sum(step.tiles)
            beside = returning + coming if ahead else returning
            has_out = rotating == "kv" or (alone and step.recv is None)
            self._stage(self._kernels(step.tiles, has_out), touched, launches, beside)
            returning = self._travel(step, rotating, home=True, crosses=self._crosses) if self.backward else _SILENCE
            if following and not ahead:
                self._stage(messages=coming)
        self._stage(messages=returning)

    def _travel(self, step: Step, rotating: Rotating, home: bool, crosses: bool) -> _Messages:
        """The block of a step leaves and another one arrives, or gradients go `home`: the longer way counts."""
        block, summed = map(sum, row_bytes(self.direction, rotating, self.shapes, lone=False))
        lone = sum(row_bytes(self.direction, rotating, self.shapes, lone=True)[1])
        ways = (step.recv, step.send) if home else (step.send, step.recv)
        sizes = [0 if rows is None else block if not home else lone if rows.lone else summed for rows in ways]
        sent, received = (self.batch * rows.rows * size if rows else 0 for rows, size in zip(ways, sizes, strict=True))
        self.sent, self.received = self.sent + sent, self.received + received
        self.across += max(sent, received) if crosses else 0
        self.memory = max(self.memory, sent, received)
        return self._hop(max(sent, received), crosses)

    def _sum(self, tiles: tuple[Tile, ...]) -> tuple[int, int]:
        """Bytes that merges, or sums of gradients, read (the kernel's results and a sum) and write (the sum), and their
        calls with those of the kernel."""
        shapes, (queries, keys) = self.shapes, _rows(tiles)
        added = shapes.itemsize + 2 * shapes.accumulator_itemsize
        if not self.backward:
            row = shapes.value_dim * added + 3 * shapes.accumulator_itemsize
            return queries * shapes.q_heads * row, 2 * len(tiles)
        sums = queries * shapes.q_heads * shapes.head_dim + keys * self._key_row
        return sums * added, 4 * len(tiles)

    @property
    def _key_row(self) -> int:
        """Elements of a row of K and V."""
        return self.shapes.kv_heads * (self.shapes.head_dim + self.shapes.value_dim)

    def _ends(self, alone: bool) -> None:
        """What a ring does before its first and after its last step, and its memory: delta, sums, and for symmetric
        memory a copy to where peers read it, between two barriers."""
        shapes, rows, wide, narrow = self.shapes, self.rows, self.shapes.accumulator_itemsize, self.shapes.itemsize
        outputs = rows * shapes.q_heads * shapes.value_dim
        inputs = rows * (shapes.q_heads * shapes.head_dim + self._key_row)
        touched, launches = 0, 0
        if self.backward:
            touched, launches = 2 * outputs * narrow + rows * shapes.q_heads * wide, 1
            self.memory += rows * shapes.q_heads * wide
        if not alone:
            self.memory += (inputs if self.backward else outputs) * (wide + narrow)
        if self.symmetric and self.plan.ranks > 1:
            payload = 2 * rows * max(shapes.q_heads, shapes.kv_heads) * shapes.head_dim * narrow
            touched, launches = touched + 2 * payload, launches + 4
            self.memory += payload
            self._stage(messages=_Messages(2 * self._inside.latency))
        self._stage(touched=touched, launches=launches)

    def _gather(self) -> tuple[_Messages, _Messages]:
        """A slice of K and V of all ranks; backward, dK and dV go home, where the sums of all ranks are added."""
        shapes, wide, narrow = self.shapes, self.shapes.accumulator_itemsize, self.shapes.itemsize
        ranks, stride, rank, row = self.plan.ranks, self.schedule.ulysses, busiest(self.plan, "kv"), self._key_row
        tiles, sequence = self.plan.gathered(rank), self.batch * self.plan.keys.length
        fetched_rows, sent_rows = (self.batch * rows for rows in gathered_rows(self.plan, rank))
        slots, size = (
            min(2, self.slices),
            max(fetched_rows, sent_rows) * row / (ranks - 1),
        )  # elements to or from a peer

        def spread(size: float) -> _Messages:
            return self._hops(size, ranks) if self.hosts > 1 else self._spread(size, ranks, stride)

        coming, leaving = spread(size * narrow), _SILENCE
        touched, launches = 2 * self.rows * row * narrow, len(tiles) + 4
        self.sent, self.received = sent_rows * row * narrow, fetched_rows * row * narrow
        self.memory = (self.rows + slots * sequence) * row * narrow
        if self.backward:
            leaving = spread(size * wide)
            touched += (sequence * wide + _rows(tiles)[1] * (narrow + 2 * wide) + 3 * sent_rows * wide) * row
            touched += self.rows * shapes.q_heads * (2 * shapes.value_dim * narrow + wide)
            launches += 2 * len(tiles) + 2 * (ranks - 1)
            self.sent, self.received = self.sent + fetched_rows * row * wide, self.received + sent_rows * row * wide
            self.memory += (slots * sequence + sent_rows) * row * wide + sequence * row * narrow
        self._stage(self._kernels(tiles, has_out=True) / self.machine.gathered_rate, touched, launches)
        return coming, leaving

    def _exchange(self) -> tuple[_Messages, _Messages]:
        """Messages that come and that leave for a slice: q, k and v and the output with its log-sum-exp, or dO with two
        scalars a row and dQ, dK and dV. A rank sends equal parts of its tensors to its Ulysses ranks."""
        shapes, ulysses, rows = self.shapes, self.schedule.ulysses, self.rows
        inputs = rows * (shapes.q_heads * shapes.head_dim + self._key_row) * shapes.itemsize
        outputs = rows * shapes.q_heads * shapes.value_dim * shapes.itemsize
        scalars = rows * shapes.q_heads * shapes.accumulator_itemsize
        sizes = (outputs + 2 * scalars, inputs) if self.backward else (inputs, outputs + scalars)
        share = self.machine.strided_bandwidth if self.symmetric else 1.0
        coming, leaving = (self._spread(size / ulysses, ulysses, 1, share) for size in sizes)
        packs = 2 if self.symmetric else 4  # packed, read and written; p2p unpacks too
        exchanged = sum(sizes) * (ulysses - 1) // ulysses
        self.sent, self.received = self.sent + exchanged, self.received + exchanged
        self.memory += min(2, self.slices) * sum(sizes) * (2 if self.backward else 1)
        self.memory += sizes[1] if self.symmetric else 0  # a third segment of what leaves
        self._stage(touched=packs * sum(sizes), launches=8)
        return coming, leaving


def _rows(tiles: tuple[Tile, ...]) -> tuple[int, int]:
    """The rows of queries and of keys of some tiles, all rows of the batch together."""
    queries = sum((tile.batch[1] - tile.batch[0]) * (tile.q[1] - tile.q[0]) for tile in tiles)
    return queries, sum((tile.batch[1] - tile.batch[0]) * (tile.k[1] - tile.k[0]) for tile in tiles)


def _is_for_cudnn(tile: Tile, row: int) -> bool:
    """Whether flash-attn 4 lets cuDNN go backward for a tile whose rows have so many elements."""
    height, width = (stop - start for start, stop in (tile.q, tile.k))
    whole = not tile.segments and (tile.high is None or tile.high >= height - 1) and tile.low in (None, 0)
    elements = (tile.batch[1] - tile.batch[0]) * max(height, width) * row
    return whole and cut_for_cudnn(height, width, tile.low == 0, elements)


def _computed(tile: Tile, machine: Machine) -> int:
    """The pairs that a kernel could compute in the time of a tile: whole blocks of documents, and more for each one."""
    size = machine.block
    if not tile.segments or not size:
        return tile_pairs(tile)
    total = 0
    for start, stop in pairwise(tile.segments):
        blocks = -(-(stop - start) // size)
        squares = blocks * blocks if tile.low is None else blocks * (blocks + 1) // 2
        if tile.high is not None:
            squares = min(squares, blocks * (tile.high // size + 2))
        total += (squares + machine.document_blocks) * size * size
    return total
