"""Attention over several hosts: measured on network namespaces of one machine, and predicted for 16 to 256 H200s.

Needs no GPU. The measured part needs root, `ip` and `tc`, which make the links between the namespaces slow.

    python recipes/benchmarks/hosts.py --out outputs/hosts.json

Every schedule runs on two levels, where a block crosses once between two hosts, and rings run flat, too: blocks then go
from their home to every rank that needs them. Contenders take turns. The predicted seconds come from a machine that is
measured over the same hosts first, as `hf-burst calibrate` does.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import torch
import torch.distributed as dist

import hf_burst
from hf_burst.attention import AttentionRequest, SequenceLayout, burst_attention
from hf_burst.config import Schedule
from hf_burst.plan import (
    Layer,
    Machine,
    Mask,
    Shapes,
    assign,
    candidates,
    choose,
    cut,
    estimate,
    make_plan,
    name_of,
)
from hf_burst.plan.machine import h200
from hf_burst.plan.traffic import row_bytes
from hf_burst.plan.work import rotating_of
from hf_burst.ranks.group import ContextGroup
from hf_burst.ring.calibrate import calibrate, default_kernel
from hf_burst.ring.resources import resources_of
from recipes.benchmarks.documents import Documents
from recipes.benchmarks.provenance import SCHEMA_VERSION, git_commit, hardware, versions

Row = dict[str, Any]
HEAD_DIM = 64
RINGS = ("kv_ring", "burst")


def layer_of(
    ranks: int, tokens: int, heads: tuple[int, int], head_dim: int, itemsize: int, documents: tuple[int, ...] = ()
) -> Layer:
    """A causal layer with so many tokens a rank, over one document or those between boundaries."""
    masks = (Mask(ranks * tokens, documents=documents or (0, ranks * tokens)),)
    return Layer(masks, cut(ranks * tokens, assign(masks, ranks)), Shapes(*heads, head_dim, head_dim, itemsize, 4))


def flat(machine: Machine, ranks: int) -> Machine:
    """The machine on which all links are as slow as those between hosts: what a flat ring sees."""
    return replace(machine, p2p=machine.between_hosts, symmetric=None, ranks_per_host=ranks)


def crossing_mb(layer: Layer, schedule: Schedule, per_host: int, hosts: int) -> float:
    """MB that leave a host in both passes of a ring by its plan, the host with the most of them; over one host, where
    the plan has one level, those of all steps whose ends are on different hosts of so many ranks."""
    plan, most = make_plan(layer.masks, layer.sharding, hosts=hosts), []
    for first in range(0, layer.ranks, per_host):
        total = 0
        for rank in range(first, first + per_host):
            for direction in ("forward", "backward"):
                rotating = rotating_of(schedule, direction)
                for step in plan.steps(rank, rotating) if hosts == 1 else plan.crossings(rank, rotating):
                    lone = step.recv is not None and step.recv.lone
                    block, returned = map(sum, row_bytes(direction, rotating, layer.shapes, lone))
                    for move, size in ((step.send, block), (step.recv, returned)):
                        total += move.rows * size if move and move.peer // per_host != rank // per_host else 0
        most.append(total / 1e6)
    return max(most)


def measured_machine(rank: int, size: int) -> Machine:
    """What `hf-burst calibrate` finds out on these ranks; remembered, so that the choice goes by it."""
    device = torch.device("cpu")
    return calibrate(ContextGroup.from_mesh(None), device, default_kernel(device))


def seconds_of(
    rank: int, size: int, contenders: list[tuple[str, int | None]], tokens: int, heads: tuple[int, int], repeats: int
) -> list[list[float]]:
    """Seconds of a forward and a backward pass of every contender, which take turns, and are begun together."""
    layout = SequenceLayout.for_batch([(0, size * tokens)], size)
    generator, group = torch.Generator().manual_seed(rank), ContextGroup.from_mesh(None)
    shapes = [(1, tokens, count, HEAD_DIM) for count in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    found: list[list[float]] = [[] for _ in contenders]
    for turn in range(repeats + 1):
        for index, (schedule, per_host) in enumerate(contenders):
            request = AttentionRequest(group, schedule=schedule, ranks_per_host=per_host)
            inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            dist.barrier()
            started = time.perf_counter()
            out, _ = burst_attention(*inputs, layout, request)
            out.backward(dout)
            dist.barrier()
            if turn:  # the first opens connections
                found[index].append(time.perf_counter() - started)
    return found


def chosen_by(rank: int, size: int, tokens: int, heads: tuple[int, int]) -> str:
    """What `"auto"` takes on these ranks."""
    machine = resources_of(ContextGroup.from_mesh(None)).machine(torch.device("cpu"), "auto")
    return name_of(choose(layer_of(size, tokens, heads, HEAD_DIM, 4), machine).schedule, size)


def measure(nodes: int, per_host: int, megabits: int, tokens: int, heads: list[tuple[int, int]], repeats: int) -> Row:
    """All contenders on so many hosts."""
    from tests.support.hosts import HostPool

    pool, size = HostPool(nodes, per_host, megabits), nodes * per_host
    try:
        machine = pool.run(measured_machine, timeout=600)[0]
        cases = [measure_case(pool, machine, tokens, case, repeats) for case in heads]
    finally:
        pool.close()
    link = {name: getattr(machine, name).bandwidth / 1e6 for name in ("p2p", "between_hosts")}
    place = {"hosts": nodes, "ranks": size, "megabits": megabits, "tokens": tokens}
    return {**place, "link_mb_per_s": link, "cases": cases}


def measure_case(pool: Any, machine: Machine, tokens: int, heads: tuple[int, int], repeats: int) -> Row:
    """All contenders with so many heads."""
    size, per_host = pool.size, machine.ranks_per_host
    layer = layer_of(size, tokens, heads, HEAD_DIM, 4)
    contenders: list[tuple[str, int | None]] = [
        (name_of(one, size), None) for one in candidates(size, *heads, per_host)
    ]
    contenders += [(ring, size) for ring in RINGS]
    found = pool.run(seconds_of, contenders, tokens, heads, repeats, timeout=900)
    times = [list(map(max, zip(*own, strict=True))) for own in zip(*found, strict=True)]  # of the slowest rank
    auto, rows = pool.run(chosen_by, tokens, heads)[0], []
    for (name, named), seconds in zip(contenders, times, strict=True):
        schedule = Schedule.parse(name, size)
        cost = estimate(schedule, layer, machine if named is None else flat(machine, size))
        levels = 1 if named else min(2, schedule.hosts(size, per_host))
        row: Row = {"schedule": name, "flat": named is not None, "levels": levels, "seconds": seconds}
        row |= {"median_s": statistics.median(seconds), "predicted_s": cost.total_s}
        if schedule.ulysses == 1 and schedule.ring in RINGS:
            row["mb_from_a_host"] = crossing_mb(layer, schedule, per_host, 1 if named else size // per_host)
        rows.append(row)
    named_rows = {row["schedule"]: row["median_s"] for row in rows if not row["flat"]}
    behind = named_rows[auto] / min(row["median_s"] for row in rows) - 1
    return {"heads": heads, "auto": auto, "auto_behind": behind, "rows": rows}


def with_cards(gigabits: float) -> Machine:
    """H200s, 8 a host, with a network card of so many Gb/s each, of which messages get 90 %."""
    known = h200()
    return replace(known, between_hosts=replace(known.between_hosts, bandwidth=gigabits * 1e9 / 8 * 0.9))


def simulate(ranks: int, heads: tuple[int, int], tokens: int, gigabits: float) -> Row:
    """Of one document: a flat ring, a ring on two levels, and `"auto"`, also without measured links."""
    machine, layer = with_cards(gigabits), layer_of(ranks, tokens, heads, 128, 2)
    ring = Schedule("burst" if heads[0] == heads[1] else "kv_ring")
    taken, unmeasured = (choose(layer, one).schedule for one in (machine, h200()))
    costs = {
        "flat ring": estimate(ring, layer, flat(machine, ranks)),
        "ring on two levels": estimate(ring, layer, machine),
        "auto": estimate(taken, layer, machine),
    }
    ways = {
        name: {
            "ms": cost.total_s * 1e3,
            "exposed_ms": cost.exposed_s * 1e3,
            "share_of_limit": cost.kernels_s / cost.total_s,
            "sent_mb": cost.sent_bytes / 1e6,
            "across_mb": cost.across_bytes / 1e6,
        }
        for name, cost in costs.items()
    }
    regret = estimate(unmeasured, layer, machine).total_s / costs["auto"].total_s - 1
    case = {"ranks": ranks, "heads": heads, "tokens": tokens, "gigabits": gigabits}
    return {**case, "ring": str(ring), "auto": name_of(taken, ranks), "ways": ways, "regret_without_measuring": regret}


def simulate_packed(ranks: int, heads: tuple[int, int], tokens: int, gigabits: float, longest: int) -> Row:
    """Of packed documents: how far `"auto"`, and the choice for one document, are behind the fastest prediction; and
    the seconds in which the host makes the choice."""
    machine, bounds = with_cards(gigabits), Documents(longest // 16, longest).bounds(ranks * tokens, 1)
    layer = layer_of(ranks, tokens, heads, 128, 2, bounds)
    started = time.perf_counter()
    taken = choose(layer, machine).schedule
    choosing_s = time.perf_counter() - started
    of_one = choose(layer_of(ranks, tokens, heads, 128, 2), machine).schedule
    known = candidates(ranks, *heads, machine.ranks_per_host)
    times = {one: estimate(one, layer, machine).total_s for one in known}
    behind = {name: times[one] / min(times.values()) - 1 for name, one in (("auto", taken), ("one_document", of_one))}
    case = {"ranks": ranks, "heads": heads, "tokens": tokens, "gigabits": gigabits, "documents": len(bounds) - 1}
    names = {"auto": name_of(taken, ranks), "of_one_document": name_of(of_one, ranks)}
    return {**case, "longest": longest, **names, "behind": behind, "choosing_s": choosing_s}


def markdown(result: Row) -> str:
    """All tables."""
    lines = ["| hosts x ranks | Mb/s | heads | schedule | levels | ms | predicted | MB from a host |"]
    lines.append("|---|---:|---:|---|---:|---:|---:|---:|")
    for topology in result["measured"]:
        for case in topology["cases"]:
            for row in sorted(case["rows"], key=lambda row: row["median_s"]):
                taken = row["schedule"] == case["auto"] and not row["flat"]
                cells = [f"{topology['hosts']} x {topology['ranks'] // topology['hosts']}", topology["megabits"]]
                cells += [":".join(map(str, case["heads"])), f"**{row['schedule']}**" if taken else row["schedule"]]
                cells += [row["levels"], f"{row['median_s'] * 1e3:.0f}", f"{row['predicted_s'] * 1e3:.0f}"]
                cells += [f"{row['mb_from_a_host']:.2f}" if "mb_from_a_host" in row else ""]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", 'Bold is what `"auto"` took.', ""]
    lines.append(
        "| GPUs | heads | tokens a GPU | Gb/s a GPU | flat ring | two levels | auto | auto takes | MB flat "
        "| two levels | auto |"
    )
    lines.append("|---:|---|---:|---:|---:|---:|---:|---|---:|---:|---:|")
    for row in result["simulated"]:
        ways = row["ways"].values()
        cells = [row["ranks"], f"{row['heads'][0]}:{row['heads'][1]}", row["tokens"], f"{row['gigabits']:.0f}"]
        cells += [f"{way['share_of_limit']:.0%}" for way in ways] + [row["auto"]]
        cells += [f"{way['across_mb'] or way['sent_mb']:,.0f}" for way in ways]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "Packed documents, whose longest have 16 times the tokens of the shortest:", ""]
    lines.append(
        "| GPUs | heads | tokens a GPU | Gb/s a GPU | documents | auto | the choice for one document is behind |"
    )
    lines.append("|---:|---|---:|---:|---:|---|---:|")
    for row in result["packed"]:
        cells = [row["ranks"], f"{row['heads'][0]}:{row['heads'][1]}", row["tokens"], f"{row['gigabits']:.0f}"]
        cells += [row["documents"], row["auto"], f"{row['behind']['one_document']:.0%}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", nargs="+", default=["2x1", "2x2", "4x1", "4x2"], help="hosts x ranks on each")
    parser.add_argument("--megabits", type=int, nargs="+", default=[100, 400], help="of the link of a host")
    parser.add_argument("--tokens", type=int, default=512, help="of a rank (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--simulate-only", action="store_true", help="leave out what is measured")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON, and its tables beside it (.md)")
    arguments = parser.parse_args()
    topologies = [tuple(map(int, text.split("x"))) for text in arguments.hosts]
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder  # machines are remembered there
        for nodes, per_host in () if arguments.simulate_only else topologies:
            for megabits in arguments.megabits:
                heads = [(8, 2), (8, 8)]
                measured.append(measure(nodes, per_host, megabits, arguments.tokens, heads, arguments.repeats))
    simulated = [
        simulate(ranks, heads, tokens, gigabits)
        for ranks in (16, 64, 256)
        for heads in ((32, 8), (32, 32))
        for tokens in (4096, 16384)
        for gigabits in (100.0, 400.0)
    ]
    packed = [
        simulate_packed(ranks, heads, tokens, gigabits, longest)
        for ranks in (16, 32, 64)
        for heads in ((32, 8), (32, 32))
        for tokens in (4096, 16384)
        for gigabits in (100.0, 400.0)
        for longest in (8192, 65536)
    ]
    result = {
        "schema": SCHEMA_VERSION,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git_commit": git_commit(Path(__file__).parent),
        "hardware": hardware(torch.device("cpu"), max(a * b for a, b in topologies), 1),
        "versions": {"hf_burst": hf_burst.__version__, **versions(cuda=False), "kernel": platform.release()},
        "measured": measured,
        "simulated": simulated,
        "packed": packed,
    }
    print(markdown(result))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(markdown(result) + "\n")
    return 0


if __name__ == "__main__":
    from recipes.benchmarks.hosts import main as run  # functions that ranks find by their module

    sys.exit(run())
