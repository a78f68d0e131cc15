"""The choice of a schedule: the cheapest that can run, and a table that says why the others lost."""

from dataclasses import dataclass
from functools import lru_cache

from ..config import Schedule, Transport
from ..errors import ConfigError
from .cost import Cost, estimate
from .machine import Machine
from .work import Layer

BUDGET_SHARE = 0.25
_NEAR = 1.1  # times the cost of the cheapest
# kernels that know the diagonal of squares only: the taller or wider tiles of gathered keys they mask, or refuse
_SQUARES_ONLY = ("cpu_flash", "torch_cudnn")


@dataclass(frozen=True)
class Choice:
    """The schedule of a layer.

    Args:
        route ([`Schedule`]): The schedule.
        reason (`str`): Why this one, as a part of a sentence.
        table (`str`): All schedules with their costs, and why they lost.
        cost ([`Cost`]): What it is estimated to cost, with the transport and the slices that it takes.
    """

    route: Schedule
    reason: str
    table: str
    cost: Cost


def candidates(ranks: int, q_heads: int, kv_heads: int, ranks_per_host: int) -> list[Schedule]:
    """The schedules that a group can run, in the order in which equals are preferred.

    Products whose Ulysses groups would lie across hosts while hosts divide them no further are left out: the same
    degree inside of hosts is never slower.

    Args:
        ranks (`int`): Ranks of the group.
        q_heads (`int`): Query heads.
        kv_heads (`int`): Key heads.
        ranks_per_host (`int`): Ranks on one host.
    """
    if ranks == 1:
        return [Schedule()]
    routes = [Schedule("kv_ring"), Schedule("burst"), Schedule("all_gather"), Schedule("kv_ring", ranks)]
    for ulysses in range(2, ranks):
        if ranks_per_host % ulysses == 0 or ulysses % ranks_per_host == 0:
            routes += [Schedule("kv_ring", ulysses), Schedule("burst", ulysses), Schedule("all_gather", ulysses)]
    return [route for route in routes if route.refusal(ranks, q_heads, kv_heads) is None]


@lru_cache(maxsize=256)
def choose(
    schedule: str,
    layer: Layer,
    machine: Machine,
    transport: Transport = "auto",
    budget: int | None = None,
    usual: Schedule | None = None,
) -> Choice:
    """The schedule of a layer. Depends on nothing but its arguments, so that all ranks choose alike.

    Args:
        schedule (`str`): A name that [`Schedule.parse`] reads, which is then taken, or `"auto"`.
        layer ([`Layer`]): What is computed.
        machine ([`Machine`]): On what; the same numbers on all ranks.
        transport (`str`, defaults to `"auto"`): What carries messages inside a host.
        budget (`int`, *optional*): The most memory that a layer may take beside its inputs and outputs, in bytes; a
            quarter of the device's by default.
        usual ([`Schedule`], *optional*): What other batches take. `"auto"` stays with it unless another schedule is
            cheaper by a tenth, and then takes the first of [`candidates`] of which that is not so: a change takes
            memory and time, and the model is not exact. Products that exchange heads otherwise are left out.

    Raises:
        ConfigError: If the group cannot run the schedule asked for.
    """
    asked = None if schedule == "auto" else _asked(schedule, layer)
    if layer.ranks == 1:
        cost = estimate(Schedule(), layer, machine, transport="p2p")
        reason = "one rank exchanges nothing"
        return Choice(Schedule(), reason, _table({Schedule(): cost}, {}, layer, Schedule(), reason), cost)
    shapes, ranks = layer.shapes, layer.ranks
    budget = int(BUDGET_SHARE * machine.memory) if budget is None else budget
    routes = candidates(ranks, shapes.q_heads, shapes.kv_heads, machine.ranks_per_host)
    if usual is not None:
        routes = [route for route in routes if route.ulysses in (1, usual.ulysses, ranks)]
    if asked and asked not in routes:
        routes.append(asked)
    costs = {route: estimate(route, layer, machine, transport, budget=budget) for route in routes}
    refused = {
        route: f"needs {_size(cost.memory_bytes - budget)} more memory than is free"
        for route, cost in costs.items()
        if cost.memory_bytes > budget
    }
    if machine.kernel in _SQUARES_ONLY:
        gathering = [route for route in costs if route.ring == "all_gather"]
        refused |= dict.fromkeys(gathering, f"{machine.kernel} is slow on its tiles, which are no squares")
    # to the nanosecond, so that the last bit of a sum decides nothing
    order = sorted(costs, key=lambda route: round(costs[route].total_s, 9))
    fits = [route for route in order if route not in refused]
    if asked:
        best, reason = asked, "asked for"
    elif fits:
        best = fits[0]
        reason = f"{_time(costs[best].total_s)} a layer by the cost model"
        if len(fits) > 1:
            ratio = costs[fits[1]].total_s / costs[best].total_s
            reason += f", {name_of(fits[1], ranks)} is {ratio:.2f}x"
        if usual is not None:
            near = [route for route in (usual, *routes) if route in fits]
            first = next(route for route in near if costs[route].total_s <= _NEAR * costs[best].total_s)
            if first != best:
                ratio = costs[first].total_s / costs[best].total_s
                reason = f"{ratio:.2f}x {name_of(best, ranks)}, which is no reason to change"
            best = first
    else:
        best = min(order, key=lambda route: costs[route].memory_bytes)
        reason = f"every schedule needs more than the {_size(budget)} that are free, and this one the least"
    return Choice(best, reason, _table(costs, refused, layer, best, reason), costs[best])


def name_of(route: Schedule, ranks: int) -> str:
    """The name of a schedule; Ulysses of all ranks has no ring around it."""
    return "ulysses" if route.ulysses == ranks > 1 else str(route)


def _asked(schedule: str, layer: Layer) -> Schedule | None:
    """The schedule of a name, which the group can run; one rank runs any."""
    route = Schedule.parse(schedule, layer.ranks)
    if layer.ranks == 1:
        return None
    q_heads, kv_heads = layer.shapes.q_heads, layer.shapes.kv_heads
    problem = route.refusal(layer.ranks, q_heads, kv_heads)
    if problem is None:
        return route
    allowed = [
        degree
        for degree in range(1, layer.ranks + 1)
        if Schedule(route.ring, degree).refusal(layer.ranks, q_heads, kv_heads) is None
    ]
    raise ConfigError(
        f"The schedule {schedule!r} cannot run: {problem}. The ranks that exchange heads must divide the {layer.ranks} "
        f"ranks, the {q_heads} query heads and the {kv_heads} key heads ({', '.join(map(str, allowed))} would); 1 is a "
        "schedule without 'ulysses', and 'auto' takes the fastest."
    )


def _table(costs: dict[Schedule, Cost], refused: dict[Schedule, str], layer: Layer, best: Schedule, reason: str) -> str:
    """One line a schedule, the one taken and then the fastest first, at the end those that the heads do not allow."""
    lines = [["schedule", "forward", "backward", "total", "exposed", "sent", "memory", "over", "slices", ""]]
    for route in sorted(costs, key=lambda route: (route != best, round(costs[route].total_s, 9))):
        cost = costs[route]
        times = (cost.forward_s, cost.backward_s, cost.total_s, cost.exposed_s)
        remark = f"taken: {reason}" if route == best else refused.get(route) or _lost(cost, costs[best])
        line = [name_of(route, layer.ranks), *map(_time, times)]
        line += [f"{cost.sent_bytes / 1e6:.1f} MB", _size(cost.memory_bytes)]
        lines.append([*line, cost.transport if layer.ranks > 1 else "-", str(cost.slices), remark])
    for degree in range(2, layer.ranks + 1):
        problem = Schedule(ulysses=degree).refusal(layer.ranks, layer.shapes.q_heads, layer.shapes.kv_heads)
        if layer.ranks % degree == 0 and problem:
            name = "ulysses" if degree == layer.ranks else f"ulysses_{degree}+..."
            lines.append([name, *["-"] * 8, problem])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:9], widths[1:9]), line[9]] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _lost(cost: Cost, best: Cost) -> str:
    """How much slower, and the largest part of the difference."""
    ratio = cost.total_s / best.total_s
    if ratio < 0.995:
        return f"{1 / ratio:.2f}x faster, but not what is taken"
    if ratio < 1.005:
        return "as fast"
    parts = {
        f"{_time(cost.exposed_s)} of exchange is not hidden": cost.exposed_s - best.exposed_s,
        f"{_time(cost.other_s)} of copies, sums and launches": cost.other_s - best.other_s,
        f"kernel calls, smaller or less even, take {_time(cost.kernels_s - best.kernels_s)} more": (
            cost.kernels_s - best.kernels_s
        ),
    }
    return f"{ratio:.2f}x slower: {max(parts, key=lambda text: parts[text])}"


def _size(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if abs(seconds) < 10 else f"{seconds:.1f} s"
