"""What a schedule costs on a machine: the seconds, bytes and memory of one attention layer on its slowest rank.

A pass is a row of stages, each of which computes beside messages under way: `max(kernels + other + drag, messages)`
seconds, where other is what copies, merges and launches take. Rings have a stage for every step of the plan; schedules
that exchange heads or gather keys have one for every slice of the heads, in which the next slice comes and the last one
leaves. What no kernel runs beside is added.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import zip_longest

from ..config import Schedule, Transport
from ..errors import ConfigError
from .machine import Link, Machine
from .steps import Rotating, Step, Transfer
from .traffic import Pass, Shapes, step_traffic
from .work import KernelWork, Layer, Load, load_of, rotating_of

MOST_SLICES = 4
_BLOCK_ROWS = 128
_SLICE_BLOCKS = 2048  # of rows; on 4 H200s fewer gain nothing: copies of a slice hold up the kernel of another one
_SCATTERED = 0.8  # of a link's bandwidth is left for heads cut out of rows, on 4 H200s
_LAG = 0.55  # of what uneven rounds cost remains, as ranks may be ahead: 1.40 times on 4 H200s where [`lag`] is 0.72
_GATHERED = 0.93  # of a kernel's rate is left on tiles with more keys than rows and few heads, on H200s


@dataclass(frozen=True)
class Cost:
    """What a layer costs under one schedule, on the rank that has the most to compute.

    Args:
        forward_s (`float`): Seconds of the forward pass.
        backward_s (`float`): Seconds of the backward pass.
        kernels_s (`float`): Seconds in which the attention kernel runs, in both passes.
        exposed_s (`float`): Seconds by which messages make the passes longer.
        other_s (`float`): Seconds of copies, merges, sums and launches.
        sent_bytes (`int`): Bytes that leave the rank, or arrive if that is more, in both passes.
        memory_bytes (`int`): Most memory beside inputs, outputs and gradients.
        launches (`int`): Kernel calls and copies of both passes.
        transport (`str`): `"p2p"` or `"symmetric"`: what carries messages inside a host.
        slices (`int`): Into how many parts the heads of a rank are cut, one after another.
    """

    forward_s: float
    backward_s: float
    kernels_s: float
    exposed_s: float
    other_s: float
    sent_bytes: int
    memory_bytes: int
    launches: int
    transport: Transport
    slices: int

    @property
    def total_s(self) -> float:
        """Seconds of both passes."""
        return self.forward_s + self.backward_s


@lru_cache(maxsize=1024)
def estimate(
    route: Schedule,
    layer: Layer,
    machine: Machine,
    transport: Transport = "auto",
    slices: int | None = None,
    budget: float = math.inf,
) -> Cost:
    """The cost of a layer under a schedule.

    Args:
        route ([`Schedule`]): The schedule; its Ulysses degree divides the ranks and the heads.
        layer ([`Layer`]): What is computed.
        machine ([`Machine`]): On what.
        transport (`str`, defaults to `"auto"`): `"p2p"`, `"symmetric"`, or the faster of them.
        slices (`int`, *optional*): Into how many slices the heads are cut; [`head_slices`] by default.
        budget (`float`, defaults to `inf`): The most memory beside inputs and outputs, in bytes, where there is a
            choice: transports that fit go before faster ones.

    Raises:
        ConfigError: If the machine has no symmetric memory for these ranks and it is asked for.
    """
    within = machine.symmetric is not None and layer.ranks <= machine.ranks_per_host
    if transport == "symmetric" and not within:
        raise ConfigError(
            f"Symmetric memory does not reach {layer.ranks} ranks with {machine.ranks_per_host} on a host of "
            f"{machine.device}. Take the transport 'p2p', or 'auto'."
        )
    ways: list[Transport] = [transport] if transport != "auto" else _transports(machine, within)
    heads, tokens = (layer.shapes.q_heads, layer.shapes.kv_heads), layer.masks[0].length // layer.ranks
    device = "cpu" if machine.device == "CPU" else "cuda"
    count = slices or head_slices(route, layer.ranks, heads, tokens, device)
    load = load_of(route, layer)
    costs = [_cost(_Setting(route, load, machine, way, count)) for way in ways]
    return min(costs, key=lambda cost: (max(cost.memory_bytes - budget, 0), cost.total_s))


def _transports(machine: Machine, within: bool) -> list[Transport]:
    """Those that may win: of two links, not the one that is worse in every number (of whole rows)."""
    first, second = machine.symmetric, machine.p2p
    if first is None or not within:
        return ["p2p"]
    better = first.latency <= second.latency and first.bandwidth >= second.bandwidth and first.drag <= second.drag
    return ["symmetric"] if better else ["symmetric", "p2p"]


def slices_of(route: Schedule, ranks: int, kv_heads: int) -> list[int]:
    """Into how many slices the key heads of a rank may be cut: at most 4, so that kernel calls stay large."""
    if route.ulysses == 1 and (route.ring != "all_gather" or ranks == 1):
        return [1]
    heads = kv_heads // route.ulysses
    return [count for count in range(1, MOST_SLICES + 1) if heads % count == 0]


def head_slices(route: Schedule, ranks: int, heads: tuple[int, int], tokens: int, device: str) -> int:
    """Into how many slices the heads of a rank are cut, so that one travels while another is computed; on GPUs only
    where there is much to compute, since a slice costs the host as much as the whole.

    Args:
        route ([`Schedule`]): With `ulysses` ranks that exchange heads, or keys that are gathered.
        ranks (`int`): Ranks of the group.
        heads (`tuple[int, int]`): Query and key heads of all ranks.
        tokens (`int`): Tokens of one rank.
        device (`str`): Type of the device.
    """
    blocks = heads[0] * tokens // _BLOCK_ROWS  # of the heads of a rank and the tokens of all that exchange them
    most = MOST_SLICES if device == "cpu" else max(1, blocks // _SLICE_BLOCKS)
    return max(count for count in slices_of(route, ranks, heads[1]) if count <= most)


@dataclass(frozen=True)
class _Busy:
    """Messages under way: how long, and by how much they hold up a kernel beside them, in seconds."""

    seconds: float = 0.0
    drag: float = 0.0

    def __add__(self, other: "_Busy") -> "_Busy":
        return _Busy(self.seconds + other.seconds, self.drag + other.drag)


@dataclass
class _Tally:
    """A pass, or one slice of it, as it adds up."""

    seconds: float = 0.0
    kernels: float = 0.0
    other: float = 0.0
    busy: float = 0.0
    sent: int = 0
    received: int = 0
    memory: int = 0
    launches: int = 0

    def stage(self, kernels: float, other: float, busy: _Busy) -> None:
        """Kernels and copies beside messages."""
        self.seconds += max(kernels + other + busy.drag, busy.seconds)
        self.kernels += kernels
        self.other += other
        self.busy += busy.seconds


@dataclass(frozen=True)
class _Setting:
    """What is priced."""

    route: Schedule
    load: Load
    machine: Machine
    transport: Transport
    slices: int

    @cached_property
    def shapes(self) -> Shapes:
        """Those of one slice on one rank."""
        shapes, parts = self.load.shapes, self.route.ulysses * self.slices
        return replace(shapes, q_heads=shapes.q_heads // parts, kv_heads=shapes.kv_heads // parts)

    @property
    def inside(self) -> Link:
        """The link inside a host."""
        symmetric = self.machine.symmetric if self.transport == "symmetric" else None
        return symmetric or self.machine.p2p

    def hop(self, size: float) -> _Busy:
        """Every place sends to another one at the same distance, so some cross hosts wherever there are several."""
        several = self.load.ranks > self.machine.ranks_per_host
        link = self.machine.between_hosts if several else self.inside
        return _Busy(link.seconds(size), link.drag * link.seconds(size))

    def spread(self, size: float, places: int, stride: int, share: float = 1.0) -> _Busy:
        """`size` bytes to each of `places - 1` peers that lie `stride` ranks apart, at a share of the bandwidth inside
        of a host; those on other hosts are reached at the same time as those on this one."""
        near = min(places, max(1, self.machine.ranks_per_host // stride))
        within = self.inside.seconds(size * (near - 1) / share)
        between = self.machine.between_hosts.seconds(size * (places - near))
        link = self.inside if within >= between else self.machine.between_hosts
        return _Busy(max(within, between), max(within, between) * link.drag)

    def kernel(self, call: KernelWork, backward: bool) -> float:
        """Seconds of one call: 2 products of matrices forward, 5 backward (arXiv 2307.08691)."""
        shapes = self.shapes
        scores = (call.pairs if self.machine.device == "CPU" else call.computed) * shapes.q_heads
        both = 3 * shapes.head_dim + 2 * shapes.value_dim if backward else shapes.head_dim + shapes.value_dim
        return self.machine.kernel_seconds(scores, scores * 2 * both, backward)

    def other(self, size: float, launches: int) -> float:
        """Seconds in which `size` bytes of memory are read or written by some calls."""
        return size / self.machine.memory_bandwidth + launches * self.machine.launch


def _cost(setting: _Setting) -> Cost:
    forward, backward = _pass(setting, "forward"), _pass(setting, "backward")
    kernels, other = forward.kernels + backward.kernels, forward.other + backward.other
    return Cost(
        forward_s=forward.seconds,
        backward_s=backward.seconds,
        kernels_s=kernels,
        exposed_s=max(0.0, forward.seconds + backward.seconds - kernels - other),
        other_s=other,
        sent_bytes=max(forward.sent + backward.sent, forward.received + backward.received),
        memory_bytes=max(forward.memory, backward.memory),
        launches=forward.launches + backward.launches,
        transport=setting.transport,
        slices=setting.slices,
    )


def _pass(setting: _Setting, direction: Pass) -> _Tally:
    """All slices of a pass: the first one comes and the last one leaves with nothing beside it."""
    coming, leaving, inner = _Busy(), _Busy(), _Tally()
    if setting.load.rings:
        _ring(setting, direction, inner)
    else:
        coming, leaving = _gather(setting, direction, inner)
    if setting.route.ulysses > 1:
        first, last = _exchange(setting, direction, inner)
        coming, leaving = first + coming, leaving + last
    whole = _Tally(
        seconds=coming.seconds + leaving.seconds,
        sent=setting.slices * inner.sent,
        received=setting.slices * inner.received,
        memory=inner.memory,
        launches=setting.slices * inner.launches,
    )
    idle = max(0.0, inner.seconds - inner.kernels - inner.other)
    for index in range(setting.slices):
        beside = (coming if index + 1 < setting.slices else _Busy()) + (leaving if index else _Busy())
        whole.stage(inner.kernels, inner.other, _Busy(inner.busy + beside.seconds, idle + beside.drag))
    return whole


def _ring(setting: _Setting, direction: Pass, tally: _Tally) -> None:
    """Steps of the plan: visitors of the next one come, and gradients of the last one return, beside its kernels."""
    backward, steps = direction == "backward", setting.load.rings[direction]
    visit, summed, lone = _row_bytes(rotating_of(setting.route, direction), direction, setting.shapes)
    alone = sum(len(step.calls) for step in steps) == 1
    tensors = 4 if rotating_of(setting.route, direction) == "q" else 2

    def travel(leaving: tuple[Transfer | None, int], arriving: tuple[Transfer | None, int]) -> _Busy:
        """A round in which rows of some bytes leave and arrive: the longer way counts."""
        sent, received = (setting.load.batch * way.rows * row if way else 0 for way, row in (leaving, arriving))
        tally.sent, tally.received = tally.sent + sent, tally.received + received
        tally.launches += tensors if sent or received else 0
        tally.memory = max(tally.memory, sent, received)
        return setting.hop(max(sent, received))

    returning = visiting = _Busy()
    for step, following in zip_longest(steps, steps[1:]):
        if following:
            visiting = travel((following.send, visit), (following.recv, visit))
        ahead = following is not None and (step.ahead or not backward)
        touched, launches = _touched(step.calls, setting.shapes, direction, kept=step is steps[0])
        kernels = sum(setting.kernel(call, backward) for call in step.calls)
        tally.stage(kernels, setting.other(touched, launches), returning + visiting if ahead else returning)
        tally.launches += launches
        returning = _Busy()
        if backward and (step.send or step.recv):
            leaving, arriving = ((way, lone if way and way.lone else summed) for way in (step.recv, step.send))
            returning = travel(leaving, arriving)
        if following and not ahead:
            tally.stage(0.0, 0.0, visiting)
    tally.stage(0.0, 0.0, returning)
    if backward or setting.transport == "p2p":  # what is only read from memory waits for nobody
        tally.stage(0.0, 0.0, _Busy(_LAG * setting.load.lags[direction] * tally.kernels))
    # two slots of what comes, two of what returns, or three where kernels write it in place
    tally.memory *= 2 if not backward else 5 if setting.transport == "symmetric" else 4
    _ends(setting, direction, alone, tally)


def _row_bytes(rotating: Rotating, direction: Pass, shapes: Shapes) -> tuple[int, int, int]:
    """Bytes of a row that visits, of its gradient as a sum of several tiles, and as the kernel made it."""
    visit = step_traffic(Step(1, (), send=Transfer(0, 0, 1, False)), direction, rotating, 1, shapes)
    summed, lone = (
        step_traffic(Step(1, (), recv=Transfer(0, 0, 1, lone)), direction, rotating, 1, shapes)
        for lone in (False, True)
    )
    return visit.bytes, summed.bytes, lone.bytes


def _touched(calls: tuple[KernelWork, ...], shapes: Shapes, direction: Pass, kept: bool) -> tuple[int, int]:
    """Bytes of memory read and written beside the kernel's own, and calls: merges, or sums of gradients, which read
    what the kernel wrote and read and write a sum. What is `kept` as the kernel made it costs nothing."""
    if kept and len(calls) <= 1:
        return 0, len(calls)
    added = shapes.itemsize + 2 * shapes.accumulator_itemsize
    queries, keys = sum(call.q_rows for call in calls), sum(call.k_rows for call in calls)
    if direction == "forward":
        return queries * shapes.q_heads * (shapes.value_dim * added + 3 * shapes.accumulator_itemsize), 2 * len(calls)
    sums = queries * shapes.q_heads * shapes.head_dim + keys * shapes.kv_heads * (shapes.head_dim + shapes.value_dim)
    return sums * added, 4 * len(calls)


def _ends(setting: _Setting, direction: Pass, alone: bool, tally: _Tally) -> None:
    """What a ring does before its first and after its last step, and its memory: delta, sums, and for symmetric memory
    a copy to where peers read it, between two barriers."""
    shapes, rows = setting.shapes, setting.load.rows
    wide, narrow = shapes.accumulator_itemsize, shapes.itemsize
    outputs = rows * shapes.q_heads * shapes.value_dim
    inputs = rows * (shapes.q_heads * shapes.head_dim + shapes.kv_heads * (shapes.head_dim + shapes.value_dim))
    touched, launches = 0, 0
    if direction == "backward":
        touched, launches = 2 * outputs * narrow + rows * shapes.q_heads * wide, 1
        tally.memory += rows * shapes.q_heads * wide
    if not alone:
        tally.memory += (outputs if direction == "forward" else inputs) * (wide + narrow)
    if setting.transport == "symmetric" and setting.load.places > 1:
        payload = 2 * rows * max(shapes.q_heads, shapes.kv_heads) * shapes.head_dim * narrow
        touched, launches = touched + 2 * payload, launches + 4
        tally.memory += payload
        tally.stage(0.0, 0.0, _Busy(2 * setting.inside.latency))
    tally.stage(0.0, setting.other(touched, launches), _Busy())
    tally.launches += launches


def _gather(setting: _Setting, direction: Pass, tally: _Tally) -> tuple[_Busy, _Busy]:
    """A slice of K and V of all places; backward, dK and dV go home, where the sums of all places are added."""
    shapes, load, backward = setting.shapes, setting.load, direction == "backward"
    narrow, wide = shapes.itemsize, shapes.accumulator_itemsize
    row = shapes.kv_heads * (shapes.head_dim + shapes.value_dim)
    peers, slots = max(1, load.places - 1), min(2, setting.slices)
    each = max(load.fetched, load.given) * row / peers  # elements to or from a peer
    coming, leaving = setting.spread(each * narrow, load.places, setting.route.ulysses), _Busy()
    touched, launches = 2 * load.rows * row * narrow, len(load.gathered) + 4
    tally.sent, tally.received = load.given * row * narrow, load.fetched * row * narrow
    tally.memory = (load.rows + slots * load.sequence) * row * narrow
    if backward:
        leaving = setting.spread(each * wide, load.places, setting.route.ulysses)
        keys = sum(call.k_rows for call in load.gathered)
        touched += (load.sequence * wide + keys * (narrow + 2 * wide) + 3 * load.given * wide) * row
        touched += load.rows * shapes.q_heads * (2 * shapes.value_dim * narrow + wide)
        launches += 2 * len(load.gathered) + 2 * peers
        tally.sent += load.fetched * row * wide
        tally.received += load.given * row * wide
        tally.memory += (slots * load.sequence + load.given) * row * wide + load.sequence * row * narrow
    kernels = sum(setting.kernel(call, backward) for call in load.gathered) / _GATHERED
    tally.stage(kernels, setting.other(touched, launches), _Busy())
    tally.launches += launches
    return coming, leaving


def _exchange(setting: _Setting, direction: Pass, tally: _Tally) -> tuple[_Busy, _Busy]:
    """A slice of q, k and v that comes and of the output and its log-sum-exp that leaves, or of dO and two scalars a
    row and of dQ, dK and dV: what a rank holds of it goes to the `ulysses` members of its place in equal parts."""
    shapes, ulysses, rows = setting.shapes, setting.route.ulysses, setting.load.rows
    inputs = shapes.q_heads * shapes.head_dim + shapes.kv_heads * (shapes.head_dim + shapes.value_dim)
    inputs, outputs = rows * inputs * shapes.itemsize, rows * shapes.q_heads * shapes.value_dim * shapes.itemsize
    scalars = rows * shapes.q_heads * shapes.accumulator_itemsize
    sizes = (inputs, outputs + scalars) if direction == "forward" else (outputs + 2 * scalars, inputs)
    share = _SCATTERED if setting.transport == "symmetric" else 1.0
    coming, leaving = (setting.spread(size / ulysses, ulysses, 1, share) for size in sizes)
    packs = 2 if setting.transport == "symmetric" else 4  # packed, read and written; p2p unpacks too
    tally.sent += sum(sizes) * (ulysses - 1) // ulysses
    tally.received += sum(sizes) * (ulysses - 1) // ulysses
    tally.memory += min(2, setting.slices) * sum(sizes) * (1 if direction == "forward" else 2)
    if setting.transport == "symmetric":
        tally.memory += sizes[1]  # a third segment of what leaves
    tally.launches += 8
    tally.stage(0.0, setting.other(packs * sum(sizes), 8), _Busy())
    return coming, leaving
