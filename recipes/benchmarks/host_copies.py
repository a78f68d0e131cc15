"""Copies between GPUs and page-locked memory of their host: rates by the size of a page, and the time of page-locking.

    torchrun --nproc-per-node 2 recipes/benchmarks/host_copies.py --out outputs/host_copies.json
    python recipes/benchmarks/host_copies.py --device cpu --mebibytes 8 --lock-gib 0.5

Each GPU copies the same bytes out, in, and both ways at once, in pages of some sizes, as hf_burst does: first alone,
then together with all others.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from hf_burst.layers.host_memory import HostMemory
from recipes.benchmarks.provenance import environment
from recipes.benchmarks.ranks import Ranks

MIB, GIB = 2**20, 2**30
PIECE = HostMemory.block_bytes  # bytes that are page-locked at a time
OF_A_GIB = GIB // PIECE
WAYS = ("out", "in", "both")


class Copies:
    """Copies of as many bytes out of a device and into it, page by page, on a stream for each direction."""

    def __init__(self, ranks: Ranks, size: int) -> None:
        self.ranks = ranks
        self.host = [torch.ones(size, dtype=torch.uint8, pin_memory=ranks.cuda) for _ in range(2)]
        self.device = [torch.ones(size, dtype=torch.uint8, device=ranks.device) for _ in range(2)]
        self.streams = [torch.cuda.Stream() if ranks.cuda else None for _ in range(2)]

    def run(self, way: str, page: int) -> float:
        """Seconds of the copies."""
        pairs = {"out": (self.host[0], self.device[0]), "in": (self.device[1], self.host[1])}
        self.finish()
        start = time.perf_counter()
        for stream, (direction, (target, source)) in zip(self.streams, pairs.items(), strict=True):
            if way in (direction, "both"):
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    for into, part in zip(target.split(page), source.split(page), strict=True):
                        into.copy_(part, non_blocking=True)
        self.finish()
        return time.perf_counter() - start

    def finish(self) -> None:
        if self.ranks.cuda:
            torch.cuda.synchronize()


def measure(copies: Copies, arguments: argparse.Namespace, ranks: Ranks) -> list[dict[str, Any]]:
    """Bytes a second of every way and size of a page, each direction by itself: of the slowest GPU."""
    rows = []
    for count in sorted({1, ranks.size}):
        for page in arguments.pages:
            for way in WAYS:
                times = []
                for _ in range(arguments.rounds + 1):
                    ranks.align()
                    own = copies.run(way, page * MIB) if ranks.rank < count else 0.0
                    times.append(float(ranks.largest(torch.tensor([own], dtype=torch.float64))[0]))
                seconds = statistics.median(times[1:])
                rate = copies.host[0].nbytes / seconds
                rows.append({"gpus": count, "page_mib": page, "way": way, "bytes_per_s": rate, "seconds": times[1:]})
    for way in WAYS:
        best = max(row["bytes_per_s"] for row in rows if row["way"] == way)
        for row in (row for row in rows if row["way"] == way):
            row["share_of_best"] = row["bytes_per_s"] / best
    return rows


def lock(ranks: Ranks, gib: float) -> dict[str, Any]:
    """Page-locks memory that was not used before on all ranks at once, as torch does and as hf_burst does where nothing
    is computed meanwhile, a GiB each in turns: seconds of all, and of each GiB. The host's memory before and after
    shows machines whose memory grows as it is used."""
    before, count = psutil.virtual_memory(), round(gib * GIB / PIECE)
    home, held = HostMemory(ranks.device), list[Any]()
    ways: dict[str, Callable[[int], Any]] = {
        "torch": lambda pieces: [torch.empty(PIECE, dtype=torch.uint8, pin_memory=ranks.cuda) for _ in range(pieces)],
        "hf_burst": lambda pieces: home.take(pieces * PIECE),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for first in range(0, count, OF_A_GIB):
        for name in [*ways][:: 1 if first % (2 * OF_A_GIB) == 0 else -1]:
            ranks.align()
            start = time.perf_counter()
            held += ways[name](min(OF_A_GIB, count - first))
            times[name].append(time.perf_counter() - start)
    result: dict[str, Any] = {}
    for name, of_each in times.items():
        whole = float(ranks.largest(torch.tensor([sum(of_each)], dtype=torch.float64))[0])
        result[name] = {"gib_of_each_process": gib, "seconds": whole, "seconds_of_each_gib": of_each}
    after = psutil.virtual_memory()
    result["total_gib"] = [before.total / GIB, after.total / GIB]
    return result | {"available_gib": [before.available / GIB, after.available / GIB]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--pages", type=int, nargs="+", default=[4, 16, 64], help="MiB of a page")
    parser.add_argument("--mebibytes", type=int, default=2048, help="MiB of a copy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lock-gib", type=float, default=16.0, help="GiB that each process page-locks, by each way")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--commit", help="the commit to write down, if this is no git checkout")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    arguments = parser.parse_args()
    ranks = Ranks(arguments.device)
    result = environment(ranks, [Path(sys.argv[0]).name, *sys.argv[1:]], arguments.commit)
    result["page_locking"] = lock(ranks, arguments.lock_gib)
    result["copies"] = measure(Copies(ranks, arguments.mebibytes * MIB), arguments, ranks)
    for row in result["copies"]:
        rate = f"{row['bytes_per_s'] / 1e9:.1f} GB/s, {row['share_of_best']:.0%} of the best"
        ranks.say(f"{row['gpus']} GPUs, pages of {row['page_mib']} MiB, {row['way']}: {rate}")
    ranks.say(f"page-locking: {json.dumps(result['page_locking'])}")
    if arguments.out is not None and ranks.rank == 0:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
