"""`hf-burst layout`: shows which rank holds and computes which part of an attention layer, as a table and a picture."""

import argparse
from typing import get_args

from ..config import Chunking, Schedule
from ..errors import ConfigError
from ..plan import Choice, Mask, MaskPattern, Plan, Shapes, Sharding, choose_schedule, make_plan, name_of, sharding_for
from .launch import launched
from .sequence import add_sequence, named_sequence, tokens

_LENGTH = 4096  # default number of tokens
_POINTS = 32  # points per side of the picture
_MAX_RANKS = 256  # takes seconds
_MAX_RUNS = 4  # per rank in a line of the table
_NAMES = "0123456789abcdefghijklmnopqrstuvwxyz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mask", choices=("causal", "full"), default="causal", help="(default %(default)s)")
    parser.add_argument("--window", type=tokens, help="earlier tokens that a query sees (default all)")
    add_sequence(parser, f" (default {_LENGTH}, or those of the documents)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that share the sequence (default %(default)s)")
    parser.add_argument("--ranks-per-host", type=int, help="ranks on one host (default all)")
    parser.add_argument("--chunking", choices=get_args(Chunking), default="balanced", help="(default %(default)s)")
    parser.add_argument("--schedule", default="auto", help="as in BurstConfig (default %(default)s)")
    parser.add_argument("--q-heads", type=int, default=32, help="query heads (default %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key heads (default %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table and the picture on rank 0 of a launch; returns the exit code."""
    if launched()[1]:
        return 0
    _check(arguments)
    ranks = arguments.ranks
    per_host = arguments.ranks_per_host or arguments.ranks
    length, documents = named_sequence(arguments)
    mask = Mask(_LENGTH if length is None else length, arguments.mask == "causal", arguments.window, documents)
    sharding = sharding_for((mask.documents,), {MaskPattern(mask.causal, mask.window): 1}, ranks, arguments.chunking)
    if arguments.schedule == "auto":
        shapes = Shapes(arguments.q_heads, arguments.kv_heads, 128, 128, 2, 4)
        choice = choose_schedule((mask,), sharding, shapes, per_host)
    else:
        choice = Choice(_asked(arguments, ranks), "asked for")
    schedule = choice.schedule
    plan = make_plan((mask,), sharding.joined(schedule.ulysses), hosts=schedule.hosts(ranks, per_host))
    count = len(mask.documents) - 1
    batch = f"{mask.length:,} tokens in {count} document{'s'[: count - 1]} over {ranks} ranks, {per_host} a host"
    print(f"{batch}, by {name_of(schedule, ranks)}: {choice.reason}")
    print(describe(plan, sharding))
    if plan.ranks > 1:
        print(picture(plan))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    ranks = arguments.ranks
    per_host = arguments.ranks_per_host
    if not 1 <= ranks <= _MAX_RANKS:
        raise ConfigError(f"--ranks is {ranks}; it must be 1 to {_MAX_RANKS}.")
    if per_host is not None and (per_host < 1 or ranks % per_host):
        raise ConfigError(f"{ranks} ranks do not lie on hosts of {per_host} each: give --ranks-per-host that divides.")
    q_heads = arguments.q_heads
    kv_heads = arguments.kv_heads
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise ConfigError(f"{q_heads} query heads cannot share {kv_heads} key heads: give a whole multiple.")


def _asked(arguments: argparse.Namespace, ranks: int) -> Schedule:
    """Returns the named schedule; the default for one rank, which exchanges nothing."""
    schedule = Schedule.parse(arguments.schedule, ranks)
    problem = schedule.refusal(ranks, arguments.q_heads, arguments.kv_heads)
    if ranks > 1 and problem:
        raise ConfigError(f"--schedule {arguments.schedule} cannot run: {problem}. Name another one, or leave it out.")
    return schedule if ranks > 1 else Schedule()


def describe(plan: Plan, sharding: Sharding) -> str:
    """Returns a table of each rank's tokens and work, in total and by step, and the imbalance.

    Args:
        plan ([`Plan`]): The plan of the ring ranks.
        sharding ([`Sharding`]): The tokens of each rank. Neighbours that exchange heads form one ring rank.
    """
    ranks, work, ulysses = plan.ranks, steps_of(plan), sharding.ranks // plan.ranks
    total = plan.masks[0].pairs
    rows = [["rank", "tokens", "work", "by steps, % of its own work", "holds"]]
    for rank in range(sharding.ranks):
        steps = work[rank // ulysses]
        own = sum(steps)
        parts = "  ".join(f"{order}: {step / own:.0%}" for order, step in enumerate(steps) if step)
        runs = [f"{run.start}-{run.stop - 1}" for run in sharding.runs(rank)]
        if len(runs) > _MAX_RUNS:
            runs[_MAX_RUNS:] = [f"and {len(runs) - _MAX_RUNS} more"]
        share = f"{own / total / ulysses:.1%}"
        rows.append([str(rank), str(sharding.tokens(rank)), share, parts, ", ".join(runs)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    most = f"{max(map(sum, work)) * ranks / total - 1:.1%} more than an even share"
    lines.append(f"{total:,} pairs of {plan.queries.length:,} tokens; the busiest rank has {most}.")
    longest = sum(map(max, zip(*work, strict=True)))
    lines.append(f"Step by step, each as long as its busiest rank, it is {longest * ranks / total - 1:.1%} more.")
    if ulysses > 1:
        lines.append(f"{ulysses} neighbouring ranks exchange heads: each computes what they hold, for its own heads.")
    return "\n".join(lines)


def steps_of(plan: Plan) -> list[list[int]]:
    """Returns the pairs per ring rank and step; on two levels, the steps of the inner rings come one after another."""
    work = [[0] * plan.ranks for _ in range(plan.ranks)]
    for rank, own in enumerate(work):
        for crossing in plan.crossings(rank, "kv"):
            for step in plan.steps(rank, "kv", crossing.order):
                own[crossing.order * plan.per_host + step.order] = sum(tile.pairs for tile in step.tiles)
    return work


def picture(plan: Plan) -> str:
    """Returns the mask, drawn with the names of the ring ranks that compute it: those that hold the queries."""
    mask = plan.masks[0]
    points = min(mask.length, _POINTS)
    tokens = [(2 * index + 1) * mask.length // (2 * points) for index in range(points)]
    lines = ["who computes what, by ranks of the ring (0-9, a-z, and again); queries down, keys to the right:"]
    for query in tokens:
        name = _NAMES[plan.queries.owner(query) % len(_NAMES)]
        seen = mask.intervals(query)
        row = (name if any(start <= key < stop for start, stop in seen) else "." for key in tokens)
        lines.append(f"  {' '.join(row)}")
    return "\n".join(lines)
