"""What recurrent layers send beside attention, and why they do it so, in lines: for `hf-burst doctor`."""

from collections.abc import Sequence
from typing import get_args

from ..plan import Cut, Machine, RecurrentSize, Segments, recurrence_cost
from ..plan.recurrence import Way


def describe_cuts(priced: Sequence[Cut], taken: Cut) -> list[str]:
    """A table of cuts, the one taken first, then the cheapest."""
    rows = [["cut", "attention", "recurrent", "by", "together", "slots", ""]]
    for one in sorted(priced, key=lambda cut: (cut != taken, cut.total_s)):
        ratio = "taken" if one == taken else f"{one.total_s / taken.total_s:.2f}x"
        seconds = [one.attention_s, one.recurrence.seconds, one.total_s]
        attention, recurrent, total = (f"{value * 1e3:.1f} ms" for value in seconds)
        rows.append([one.chunking, attention, recurrent, one.recurrence.way, total, str(one.most_slots), ratio])
    return table(rows)


def describe_ways(sizes: Sequence[RecurrentSize], segments: Segments, machine: Machine, way: Way) -> list[str]:
    """A table of the ways of one layer of each kind, the one taken first."""
    rows = [["layer", "by", "forward", "backward", "its functions", "sent", "halos", "memory", ""]]
    for size in sizes:
        for own in sorted(size.ways, key=lambda name: name != way):
            cost = recurrence_cost(own, size, segments, machine)
            seconds = [f"{value * 1e3:.2f} ms" for value in (cost.forward_s, cost.backward_s, cost.rule_s)]
            rows.append([size.kind, sent_as(size, own), *seconds, megabytes(cost.sent_bytes)])
            rows[-1] += [megabytes(cost.halo_bytes), megabytes(cost.memory_bytes)]
            rows[-1] += ["taken" if own == way or len(size.ways) == 1 else ""]
    return table(rows)


def sent_as(size: RecurrentSize, way: Way) -> str:
    """What travels between the ranks."""
    only = {"selective": "channels", "convolution": "halos"}.get(size.kind)
    assert way in get_args(Way), way
    return only or way


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells in columns, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
