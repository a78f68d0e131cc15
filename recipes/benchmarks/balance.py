"""How evenly packed documents are spread over ranks, and how long planning takes. Needs no GPU and no processes.

Schedules are chosen for layers of 32 query and 8 key heads on H200s, eight a host.

    python recipes/benchmarks/balance.py --out outputs/balance.json

A hundred draws of documents of 512 to 65,536 tokens, whose logarithms are uniform, fill 256K tokens each. From 16 ranks
on they fill 32K tokens a rank. Another case has ten thousand documents of 100 tokens.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import hf_burst
from hf_burst.plan import Layer, Mask, Shapes, assign, choose, cut, imbalance, imbalance_of_steps
from hf_burst.plan.machine import h200
from recipes.benchmarks.documents import Documents
from recipes.benchmarks.provenance import git_commit

SHAPES, HOST = Shapes(32, 8, 128, 128, 2, 4), 8
WAYS = ("contiguous", "zigzag", "balanced")


def mix(ranks: int, draws: int) -> list[tuple[int, ...]]:
    """The boundaries of the documents of each draw."""
    tokens = max(1 << 18, ranks << 15)
    return [Documents(512, 65536, seed).bounds(tokens, 1) for seed in range(draws)]


def measure(ranks: int, batches: list[tuple[int, ...]]) -> dict[str, object]:
    """Measures each way to cut the batches: the imbalance of a whole pass and of its rounds, and the host's time.

    `seconds` is the time to cut a new batch. `seconds_of_auto` is the time to choose its schedule afterwards.
    """
    passes: dict[str, list[float]] = {way: [] for way in WAYS}
    rounds: dict[str, list[float | None]] = {way: [] for way in WAYS}
    seconds, choices, chunks = [], [], []
    for documents in batches:
        mask = Mask(documents[-1], documents=documents)
        start = time.perf_counter()
        owners = assign((mask,), ranks)
        seconds.append(time.perf_counter() - start)
        choose(Layer((mask,), cut(mask.length, owners), SHAPES), replace(h200(), ranks_per_host=HOST))
        choices.append(time.perf_counter() - start - seconds[-1])
        chunks.append(len(owners) // ranks)
        for way in WAYS:
            passes[way].append(imbalance((mask,), assign((mask,), ranks, way)))
            rounds[way].append(imbalance_of_steps((mask,), assign((mask,), ranks, way)))
    return {
        "ranks": ranks,
        "batches": len(batches),
        "documents": [min(map(len, batches)) - 1, max(map(len, batches)) - 1],
        "tokens": batches[0][-1],
        "imbalance": {way: {"mean": statistics.mean(values), "worst": max(values)} for way, values in passes.items()},
        "imbalance_of_rounds": {way: summary(values) for way, values in rounds.items()},
        "chunks_per_rank": {str(count): chunks.count(count) for count in sorted(set(chunks))},
        "seconds": {"median": statistics.median(seconds), "worst": max(seconds)},
        "seconds_of_auto": {"median": statistics.median(choices), "worst": max(choices)},
    }


def summary(values: list[float | None]) -> dict[str, float | int | None]:
    """Mean and worst of the known values, and how many are unknown."""
    known = [value for value in values if value is not None]
    mean, worst = (statistics.mean(known), max(known)) if known else (None, None)
    return {"mean": mean, "worst": worst, "not_counted": len(values) - len(known)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 64])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    arguments = parser.parse_args()
    if min(*arguments.ranks, arguments.draws) < 1:
        parser.error("--ranks and --draws must be at least 1")
    if arguments.out is not None and arguments.out.is_dir():
        parser.error(f"--out {arguments.out} is a folder; give a file")
    result = {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git_commit": git_commit(Path(__file__).parent),
        "hardware": {"device": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
        "versions": {"python": platform.python_version(), "hf_burst": hf_burst.__version__},
        "log_uniform": [measure(ranks, mix(ranks, arguments.draws)) for ranks in arguments.ranks],
        "short": [measure(ranks, [tuple(range(0, 1_000_001, 100))]) for ranks in arguments.ranks],
    }
    print("ranks  contiguous   zigzag  balanced (worst)  chunks a rank                   ms (worst)")
    for row in [*result["log_uniform"], *result["short"]]:
        means = [row["imbalance"][way]["mean"] for way in WAYS]
        counts = ", ".join(f"{chunks}: {count}" for chunks, count in row["chunks_per_rank"].items())
        worst, times = row["imbalance"]["balanced"]["worst"], [1e3 * row["seconds"][key] for key in ("median", "worst")]
        print(
            f"{row['ranks']:5}  {means[0]:10.1%}  {means[1]:7.1%}  {means[2]:8.1%} ({worst:5.1%})   {counts:28}"
            f"{times[0]:6.2f} ({times[1]:.2f})"
        )
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
