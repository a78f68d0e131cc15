"""The proof of a plan: every admitted pair computed once, every message expected, every gradient returned."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hf_burst.plan import Mask, Plan, Sharding, Step, Tile
from hf_burst.plan.ring import Rotating

# for every row of the batch and every query, the intervals of keys that were computed
Seen = list[dict[int, list[tuple[int, int]]]]


class PlanError(AssertionError):
    """A plan that does not compute its mask exactly once."""


def intervals(mask: Mask, query: int) -> list[tuple[int, int]]:
    """All keys that a query sees, as intervals in rising order of which no two touch."""
    merged = list[tuple[int, int]]()
    for start, stop in sorted(span for span in mask.intervals(query) if span[0] < span[1]):
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


def columns_of(tile: Tile, row: int) -> tuple[int, int]:
    """The admitted columns `[start, stop)` of a row; both are counted from the tile's corner."""
    whole = 0, tile.k[1] - tile.k[0]
    if tile.band.documents:
        whole = next(span for span in pairwise(tile.band.documents) if row < span[1])
    return tile.band.columns(row, *whole)


def pairs_of(plan: Plan) -> int:
    """The (query, key) pairs that the masks of a plan admit, in closed form."""
    return sum(mask.pairs for mask in plan.masks)


def verify_plan(plan: Plan, rotating: Rotating) -> int:
    """Plays the schedules of all ranks on paper, and returns how many (query, key) pairs they compute, each once.

    Raises:
        PlanError: If a pair is missing, computed twice or not admitted, a tile reads rows that did not come or has a
            row that sees nothing, or a message is sent that no one expects, or the other way round.
    """
    queries, keys = plan.queries, plan.keys
    seen: Seen = [{query: [] for query in range(queries.start, queries.stop)} for _ in plan.masks]
    crossings = [{step.order: step for step in plan.crossings(rank, rotating)} for rank in range(plan.ranks)]
    for rank in range(plan.ranks):
        for crossing in crossings[rank].values():
            _check_messages(crossings, rank, crossing, "crossing")
    for order in range(plan.hosts):
        steps = [{step.order: step for step in plan.steps(rank, rotating, order)} for rank in range(plan.ranks)]
        for rank in range(plan.ranks):
            if steps[rank] and not (order in crossings[rank] and plan.visited(rank, rotating, order)):
                raise PlanError(f"rank {rank} computes with blocks of crossing {order}, of which it knows nothing")
            _check_single(plan, rank, crossings[rank].get(order), rotating)
            for step in steps[rank].values():
                _check_messages(steps, rank, step, "step")
                _check_rows(plan, rank, step, crossings[rank][order], rotating)
                _collect(seen, plan, rank, step, rotating)
    pairs = 0
    for row, mask in enumerate(plan.masks):
        for query in range(queries.start, queries.stop):
            for start, stop in intervals(mask, query):
                first = max(start, keys.start)
                last = max(first, min(stop, keys.stop))
                position = first
                own = sorted(span for span in seen[row][query] if start <= span[0] < stop)
                for found, end in [*own, (last, last)]:
                    if found != position:
                        raise PlanError(
                            f"row {row}, query {query} is computed up to key {position}, then from key {found} on; it "
                            f"sees {start}-{stop}"
                        )
                    position = end
                pairs += last - first
            known = intervals(mask, query)
            if any(all(not start <= span[0] < stop for start, stop in known) for span in seen[row][query]):
                raise PlanError(f"row {row}, query {query} is computed with {seen[row][query]}; it sees {known}")
    return pairs


def _check_messages(steps: list[dict[int, Step]], rank: int, step: Step, kind: str) -> None:
    """The two ends of a transfer name the same rows; a gradient returns on the same pair of ends."""
    for here, there, ends in ((step.send, "recv", "sends"), (step.recv, "send", "expects")):
        if here is None:
            continue
        twin = getattr(steps[here.peer].get(step.order), there, None)
        if twin != replace(here, peer=rank):
            raise PlanError(f"rank {rank}, {kind} {step.order} {ends} {here}, rank {here.peer} has {twin}")
    if kind == "step" and step.order and bool(step.tiles) != (step.recv is not None):
        raise PlanError(f"rank {rank}, step {step.order}: {len(step.tiles)} tiles, but receives {step.recv}")


def _check_rows(plan: Plan, rank: int, step: Step, crossing: Step, rotating: Rotating) -> None:
    """A rank has the rows that it sends, or uses without receiving them: its own, or those that crossed to it."""
    held, came = (0, plan.blocks(rotating).tokens(rank)), crossing.recv
    if crossing.order:
        held = (came.start, came.stop) if came else (0, 0)
    if held != plan.held(rank, rotating, crossing.order):
        raise PlanError(f"rank {rank}, crossing {crossing.order}: {came} came, and the plan counts on {held}")
    used = [] if step.order else [tile.k if rotating == "kv" else tile.q for tile in step.tiles]
    for start, stop in [*used, *([(step.send.start, step.send.stop)] if step.send else [])]:
        if not (held[0] <= start and stop <= held[1]):
            raise PlanError(f"rank {rank}, step {step.order}: rows {start}-{stop} are not in the {held} that it holds")


def _check_single(plan: Plan, rank: int, crossing: Step | None, rotating: Rotating) -> None:
    """A block whose gradient crosses back as the kernel made it is used by one tile of the host, which is all of it."""
    if crossing is None or crossing.recv is None or not crossing.recv.single_tile:
        return
    first, came = rank - rank % plan.per_host, crossing.recv
    steps = [step for one in range(first, first + plan.per_host) for step in plan.steps(one, rotating, crossing.order)]
    tiles = [tile for step in steps if step.source == crossing.source for tile in step.tiles]
    if len(tiles) != 1 or (tiles[0].k if rotating == "kv" else tiles[0].q) != (came.start, came.stop):
        raise PlanError(f"rank {rank}, crossing {crossing.order}: {tiles} are not one tile of the single {came}")


def _collect(seen: Seen, plan: Plan, rank: int, step: Step, rotating: Rotating) -> None:
    """Adds the keys that the tiles of a step compute for each query, in tokens of the sequence."""
    q_rank, k_rank = (rank, step.source) if rotating == "kv" else (step.source, rank)
    for tile in step.tiles:
        rotating_rows = tile.k if rotating == "kv" else tile.q
        if tile.q[1] > plan.queries.tokens(q_rank) or tile.k[1] > plan.keys.tokens(k_rank):
            raise PlanError(f"rank {rank}, step {step.order}: {tile} reaches beyond the shard")
        if step.recv and not (step.recv.start <= rotating_rows[0] and rotating_rows[1] <= step.recv.stop):
            raise PlanError(f"rank {rank}, step {step.order}: {tile} reads rows outside of {step.recv}")
        if step.recv and step.recv.single_tile and rotating_rows != (step.recv.start, step.recv.stop):
            raise PlanError(f"rank {rank}, step {step.order}: {tile} is not all of the single {step.recv}")
        for row in range(*tile.q):
            start, stop = columns_of(tile, row - tile.q[0])
            if start >= stop:
                raise PlanError(f"rank {rank}, step {step.order}: row {row} of {tile} sees nothing")
            query = next(_tokens(plan.queries, q_rank, row, row + 1))[0]
            for span in _tokens(plan.keys, k_rank, tile.k[0] + start, tile.k[0] + stop):
                for batch_row in range(*tile.batch):
                    seen[batch_row][query].append(span)


def _tokens(sharding: Sharding, rank: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The tokens of rows `[start, stop)` of a shard, as intervals."""
    for run in sharding.runs(rank):
        first, last = max(start, run.local), min(stop, run.local + run.size)
        if first < last:
            yield first - run.local + run.start, last - run.local + run.start
