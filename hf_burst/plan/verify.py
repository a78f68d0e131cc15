"""The proof of a plan: every admitted pair computed once, every message expected, every gradient home."""

from collections.abc import Iterator

from ..errors import PlanError
from .sharding import Sharding
from .steps import Plan, Rotating, Step


def verify_plan(plan: Plan, rotating: Rotating) -> int:
    """Plays the schedules of all ranks on paper.

    Args:
        plan ([`Plan`]): The plan.
        rotating (`str`): `"kv"` or `"q"`: what travels.

    Returns:
        `int`: The number of (query, key) pairs that were found, each exactly once.

    Raises:
        PlanError: If a pair is missing, computed twice or not admitted; if a tile reads rows that did not come; if a
            message is sent that no one expects, or the other way round; if a tile has a row that sees nothing.
    """
    sharding = plan.sharding
    seen: list[list[list[tuple[int, int]]]] = [[[] for _ in range(sharding.length)] for _ in plan.masks]
    schedules = [{step.distance: step for step in plan.steps(rank, rotating)} for rank in range(sharding.ranks)]
    for rank, steps in enumerate(schedules):
        for step in steps.values():
            _check_messages(schedules, rank, step)
            _collect(seen, sharding, rank, step, rotating)
    pairs = 0
    for row, mask in enumerate(plan.masks):
        for query in range(sharding.length):
            start, stop = mask.keys(query)
            position = start
            for key_start, key_stop in sorted(seen[row][query]):
                if key_start != position:
                    raise PlanError(
                        f"row {row}, query {query}: keys {key_start}-{key_stop} follow {position}; "
                        f"it sees {start}-{stop}"
                    )
                position = key_stop
            if position != stop:
                raise PlanError(f"row {row}, query {query} is computed up to key {position}, it sees {start}-{stop}")
            pairs += stop - start
    return pairs


def _check_messages(schedules: list[dict[int, Step]], rank: int, step: Step) -> None:
    """The two ends of a transfer name the same rows; a gradient returns on the same pair of ends."""
    for here, there, ends in ((step.send, "recv", "sends"), (step.recv, "send", "expects")):
        if here is None:
            continue
        other = schedules[here.peer].get(step.distance)
        twin = getattr(other, there) if other else None
        if (
            twin is None
            or twin.peer != rank
            or (twin.start, twin.stop, twin.lone) != (here.start, here.stop, here.lone)
        ):
            raise PlanError(f"rank {rank}, step {step.distance} {ends} {here}, rank {here.peer} has {twin}")
    if step.distance and bool(step.tiles) != (step.recv is not None):
        raise PlanError(f"rank {rank}, step {step.distance}: {len(step.tiles)} tiles, but receives {step.recv}")


def _collect(
    seen: list[list[list[tuple[int, int]]]], sharding: Sharding, rank: int, step: Step, rotating: Rotating
) -> None:
    """Adds the keys that the tiles of a step compute for each query, in tokens of the sequence."""
    guest = step.recv.peer if step.recv else rank
    q_rank, k_rank = (rank, guest) if rotating == "kv" else (guest, rank)
    for tile in step.tiles:
        visiting = tile.k if rotating == "kv" else tile.q
        if tile.q[1] > sharding.tokens(q_rank) or tile.k[1] > sharding.tokens(k_rank):
            raise PlanError(f"rank {rank}, step {step.distance}: {tile} reaches beyond the shard")
        if step.recv and not (step.recv.start <= visiting[0] and visiting[1] <= step.recv.stop):
            raise PlanError(f"rank {rank}, step {step.distance}: {tile} reads rows outside of {step.recv}")
        if step.recv and step.recv.lone and visiting != (step.recv.start, step.recv.stop):
            raise PlanError(f"rank {rank}, step {step.distance}: {tile} is not all of the lone {step.recv}")
        for row in range(tile.q[0], tile.q[1]):
            start, stop = tile.columns(row - tile.q[0])
            if start >= stop:
                raise PlanError(f"rank {rank}, step {step.distance}: row {row} of {tile} sees nothing")
            query = next(_tokens(sharding, q_rank, row, row + 1))[0]
            for keys in _tokens(sharding, k_rank, tile.k[0] + start, tile.k[0] + stop):
                for batch_row in range(*tile.batch):
                    seen[batch_row][query].append(keys)


def _tokens(sharding: Sharding, rank: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The tokens of rows `[start, stop)` of a shard, as intervals."""
    for run in sharding.runs(rank):
        first, last = max(start, run.local), min(stop, run.local + run.size)
        if first < last:
            yield first - run.local + run.start, last - run.local + run.start
