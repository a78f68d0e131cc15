"""Whole training steps: hf_burst beside other ways to train on long sequences, interleaved in one run.

    torchrun --nproc-per-node 4 recipes/benchmarks/training.py --shape llama-8b --lengths 32768 131072 \\
        --out outputs/training.json
    torchrun --nproc-per-node 2 recipes/benchmarks/training.py --liger --lengths 524288 --rounds 1 --warmup 0 \\
        --check-length 8192 --hf-burst tiled_mlp=16384,activation_offloading=0.6
    python recipes/benchmarks/training.py --shape llama-8b --lora --liger --lengths 131072
    torchrun --nproc-per-node 2 recipes/benchmarks/training.py --device cpu --shape tiny --lengths 512 --rounds 2

One model with random weights in bf16 is sharded by FSDP2 as accelerate does it, over several ranks. AdamW trains it on
random tokens, with or without checkpoints. All contenders (training_contenders.py) train it in turns, a step each, so
that they share weights, optimizer and memory. Before the first step their losses and gradient norms are compared.
README.md says what is measured.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from hf_burst.cli.launch import launched
from hf_burst.plan import Mask
from recipes.benchmarks.native import choose_native
from recipes.benchmarks.provenance import environment
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.training_contenders import CONTENDERS, NAMED, SINGLE, Way, read_settings
from recipes.benchmarks.training_job import SHAPES, Job, head_size, make_job
from recipes.benchmarks.training_limits import flops, limits, parts_of_limits

KNOWN = CONTENDERS | SINGLE | NAMED

PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}


def first_gradients(job: Job, way: Way) -> dict[str, float]:
    """The loss of a contender and the norm of its gradients, without a step."""
    with way(job) as loss:
        value = loss(job)
        value.backward()
    norm = nn.utils.clip_grad_norm_(job.model.parameters(), float("inf"))
    job.optimizer.zero_grad()
    return {"loss": mean_loss(job, value), "gradient_norm": float(getattr(norm, "full_tensor", lambda: norm)())}


def mean_loss(job: Job, value: torch.Tensor) -> float:
    """The loss of the whole sequence, from those of all ranks."""
    return float(sum(job.ranks.gather(float(value.detach())))) / job.ranks.size


def step(job: Job, way: Way) -> dict[str, float]:
    """Makes one optimizer step: its seconds, from a barrier on, and its peaks of memory, on the slowest rank."""
    with way(job) as loss:
        gc.collect()
        if job.ranks.cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()
        locking = memory(job)["page_locking_s"]
        job.ranks.align()
        if job.ranks.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        value = loss(job)
        value.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        if job.ranks.cuda:
            torch.cuda.synchronize()
        own = {"seconds": time.perf_counter() - start, **memory(job)}
    own["page_locking_s"] -= locking
    slowest = job.ranks.largest(torch.tensor(list(own.values()), dtype=torch.float64)).tolist()
    return dict(zip(own, slowest, strict=True)) | {"loss": mean_loss(job, value)}


def memory(job: Job) -> dict[str, float]:
    """The peaks of this rank: bytes of its GPU that tensors take and that torch reserves, and bytes of host memory that
    torch and hf_burst have page-locked. And the seconds that page-locking has taken."""
    if not job.ranks.cuda:
        return dict.fromkeys(("peak_bytes", "reserved_bytes", "host_bytes", "page_locking_s"), 0.0)
    host, (size, seconds) = torch.cuda.host_memory_stats(), (job.home.size, job.home.seconds) if job.home else (0, 0)
    return {
        "peak_bytes": float(torch.cuda.max_memory_allocated()),
        "reserved_bytes": float(torch.cuda.max_memory_reserved()),
        # all that torch holds; older versions call this reserved
        "host_bytes": float(host.get("reserved_bytes.peak", host.get("allocated_bytes.peak", 0)) + size),
        "page_locking_s": host.get("host_alloc_time.total", 0) / 1e6 + seconds,
    }


def measure(job: Job, length: int, rounds: int, arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Measures all contenders at one length, and yields the rows after each step."""
    generator = torch.Generator().manual_seed(length)
    vocabulary = job.base.config.vocab_size
    tokens = torch.randint(0, vocabulary, (1, length), generator=generator).to(job.ranks.device)
    job.tokens = tokens[:, : arguments.check_length]
    rows: dict[str, dict[str, Any]] = {}
    longest = dict(arguments.longest)
    for name in (name for name in arguments.contenders if length <= longest.get(name, length)):
        way, graphs = arguments.contenders[name].way, compiled_graphs()
        check, reason = job.ranks.attempt(partial(first_gradients, job, way))
        rows[name] = {"contender": name, "length": length, "status": "failed" if reason else "ok", "reason": reason}
        rows[name] |= {"settings": arguments.contenders[name].settings, "steps": []}
        rows[name] |= {"check": check and check | {"length": job.tokens.shape[1]}}
        rows[name]["compiled_graphs"] = compiled_graphs() - graphs
        job.ranks.say(f"{length} tokens, {name}: {reason or check}")
        job.optimizer.zero_grad()
        if arguments.give_back:
            give_back(job)
    job.tokens = tokens
    yield list(rows.values())
    running = [name for name, row in rows.items() if row["status"] == "ok"]
    for index in range(arguments.warmup + rounds):
        turn = index % max(1, len(running))
        for name in [*running[turn:], *running[:turn]]:
            job.chosen = {}
            timed, reason = job.ranks.attempt(partial(step, job, arguments.contenders[name].way))
            if job.chosen:
                rows[name]["settings"] = {**rows[name]["settings"], **job.chosen}
            if reason:
                rows[name] |= {"status": "failed", "reason": reason}
                running = [survivor for survivor in running if survivor != name]
                job.optimizer.zero_grad()
            elif index >= arguments.warmup:
                rows[name]["steps"].append(timed)
            if arguments.give_back:
                give_back(job)
            yield list(rows.values())
        job.ranks.say(f"{length} tokens, round {index + 1} of {arguments.warmup + rounds}")


def give_back(job: Job) -> None:
    """Gives the page-locked memory that nobody uses any more back to the host, that of hf_burst too."""
    job.home = None
    gc.collect()
    if job.ranks.cuda:
        torch.cuda.synchronize()
        torch._C._host_emptyCache()


def compiled_graphs() -> int:
    """The number of graphs that torch.compile has made in this process."""
    return int(counters["stats"]["unique_graphs"])


def summary(
    rows: Sequence[dict[str, Any]],
    work: float | None,
    result: dict[str, Any],
    arguments: argparse.Namespace,
    ranks: Ranks,
) -> list[dict[str, Any]]:
    """Adds medians, rates and ratios to the other contenders to the rows."""
    medians = {
        row["contender"]: statistics.median(step["seconds"] for step in row["steps"]) for row in rows if row["steps"]
    }
    peak = PEAK.get(torch.cuda.get_device_name()) if ranks.cuda else None
    summarized = []
    for row in rows:
        name = row["contender"]
        if name in medians:
            limit = result["limits"].get(str(row["length"]), {}).get(arguments.contenders[name].limit)
            peaks: dict[str, float | None] = {
                f"{kind}_memory_gib": max(step[f"{kind}_bytes"] for step in row["steps"]) / 2**30
                for kind in ("peak", "reserved", "host")
            }
            if len(arguments.contenders) > 1 and not arguments.give_back:
                peaks["host_memory_gib"] = None  # torch holds that of other contenders, too
            row = row | {
                "median_s": medians[name],
                "tokens_per_second_and_gpu": row["length"] / medians[name] / ranks.size,
                "mfu": work / medians[name] / ranks.size / peak if peak and work else None,
                **peaks,
                "share_of_limit": limit and limit / medians[name],
                "times_as_fast_as": {rival: medians[rival] / medians[name] for rival in medians if rival != name},
            }
        summarized.append(row)
    return summarized


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| tokens | contender | s a step | MFU | GiB | of the host | share of its limit |"]
    lines.append("|---:|---|---:|---:|---:|---:|---:|")
    for row in result["results"]:
        if "median_s" not in row:
            lines.append(f"| {row['length']} | {row['contender']} | {row['reason']} | | | | |")
            continue
        shares = [row["mfu"], row["share_of_limit"]]
        mfu, share = ("" if value is None else f"{value:.1%}" for value in shares)
        host = row["host_memory_gib"]
        gib = f"{row['peak_memory_gib']:.1f} | {'' if host is None else format(host, '.1f')}"
        numbers = f"{row['median_s']:.3f} | {mfu} | {gib} | {share}"
        lines.append(f"| {row['length']} | {row['contender']} | {numbers} |")
    return "\n".join(lines)


def longest(text: str) -> tuple[str, int]:
    """Reads a contender and a length from the command line."""
    name, _, tokens = text.rpartition("=")
    if name not in KNOWN or not tokens.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=TOKENS; the names are {', '.join(KNOWN)}")
    return name, int(tokens)


def at_least(least: int) -> Callable[[str], int]:
    """A reader of whole numbers that are not smaller."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return read


def read_arguments() -> argparse.Namespace:
    """Reads the command line, and ends the process with a sentence if it cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=at_least(1), help="how many layers of that width (as many as the shape has)")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 on all large linear layers")
    parser.add_argument("--qlora", action="store_true", help="the same of weights in 4 bits, on one GPU")
    parser.add_argument("--liger", action="store_true", help="Liger's norms, rotary positions and SwiGLU, for all")
    parser.add_argument(
        "--gated-norms",
        action="store_true",
        help="flash-linear-attention's norms of the gated outputs of recurrent layers, for all",
    )
    parser.add_argument("--compile", action="store_true", help="every layer compiled by itself, for all")
    parser.add_argument("--lengths", type=at_least(2), nargs="+", default=[32768], help="tokens of the whole sequence")
    parser.add_argument(
        "--document",
        type=at_least(2),
        help="tokens of each packed document (one document): the memory of the whole sequence, and little attention",
    )
    parser.add_argument("--contenders", nargs="+", choices=KNOWN, help="by default all that know such a model")
    parser.add_argument(
        "--hf-burst",
        metavar="NAME=VALUE,...",
        type=read_settings,
        action="append",
        default=[],
        help="one more contender: settings of hf_burst.Memory, such as tiled_mlp=16384,activation_offloading=1.0",
    )
    parser.add_argument(
        "--longest",
        metavar="NAME=TOKENS",
        type=longest,
        nargs="+",
        default=[],
        help="contenders that are left out of longer sequences",
    )
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        nargs="+",
        default=[5],
        help="timed steps of every contender; one number, or one a length from the shortest on",
    )
    parser.add_argument("--warmup", type=at_least(0), default=1, help="steps before them")
    parser.add_argument("--check-length", type=at_least(2), help="tokens of the comparison before the first step (all)")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="as on a smaller GPU (all that it has)")
    parser.add_argument(
        "--give-back",
        action="store_true",
        help="page-locked memory is given back after each step: for contenders that together take more than the host "
        "has",
    )
    parser.add_argument("--no-limits", action="store_true", help="do not measure the least time of a step")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one step may take")
    parser.add_argument("--commit", help="the commit to write down, if this is no git checkout")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    return arguments


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Puts arguments into the form that the benchmark needs, and ends the process if that cannot be."""
    size, hybrid = launched()[0], "hybrid" in arguments.shape
    if arguments.gated_norms and not hybrid:
        parser.error(f"--gated-norms is for shapes with recurrent layers, not for {arguments.shape}")
    if arguments.contenders is None:
        known = {} if arguments.hf_burst else CONTENDERS | SINGLE
        arguments.contenders = [
            name
            for name, contender in known.items()
            if contender.hybrids in (None, hybrid) and contender.several in (None, size > 1)
        ]
    arguments.contenders = {name: KNOWN[name] for name in arguments.contenders} | dict(arguments.hf_burst)
    count, arguments.lengths = len(arguments.rounds), sorted(arguments.lengths)
    if count not in (1, len(arguments.lengths)):
        parser.error(f"--rounds has {count} numbers for {len(arguments.lengths)} lengths; give one, or one each")
    arguments.rounds *= len(arguments.lengths) // count
    for name in (name for name, contender in arguments.contenders.items() if contender.several is (size == 1)):
        parser.error(f"{name!r} is no way to train on {size} {'process' if size == 1 else 'processes'}")
    if arguments.qlora and size > 1:
        parser.error("--qlora trains on one GPU: FSDP2 does not shard these weights")
    whole = [name for name, contender in arguments.contenders.items() if contender.settings is None and size > 1]
    if arguments.document and (whole or not arguments.no_limits):
        parser.error("--document is for hf_burst, or one process, with --no-limits")
    if arguments.liger and not find_spec("liger_kernel"):
        parser.error("--liger needs Liger-Kernel: pip install liger-kernel")
    if arguments.qlora and not find_spec("bitsandbytes"):
        parser.error("--qlora needs bitsandbytes: pip install bitsandbytes")
    if arguments.gpu_memory and (arguments.device == "cpu" or not torch.cuda.is_available()):
        parser.error("--gpu-memory is for GPUs")
    if arguments.out is not None and arguments.out.is_dir():
        parser.error(f"--out is {arguments.out}, a folder; give a file")


def main() -> int:
    arguments = read_arguments()
    ranks = Ranks(arguments.device, arguments.timeout)
    if arguments.gpu_memory:
        share = arguments.gpu_memory * 2**30 / torch.cuda.mem_get_info(ranks.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), ranks.device)
    dtype = torch.bfloat16 if ranks.cuda else torch.float32
    job = make_job(
        arguments.shape,
        longest=arguments.lengths[-1],
        ranks=ranks,
        liger=arguments.liger,
        weights="qlora" if arguments.qlora else "lora" if arguments.lora else "all",
        compiled=arguments.compile,
        layers=arguments.layers,
        gated_norms=arguments.gated_norms,
    )
    job.document = arguments.document
    lora = arguments.lora or arguments.qlora
    native, _ = choose_native("auto", ranks, dtype, head_size(job.base), Mask(256))
    result = environment(ranks, [Path(sys.argv[0]).name, *sys.argv[1:]], arguments.commit)
    result |= {
        "shape": arguments.shape,
        "layers": arguments.layers,
        "document": arguments.document,
        "lora": lora,
        "adapters": "hf_burst" if lora and not arguments.compile else None,  # who computes them in its rows
        "four_bits": arguments.qlora,
        "gpu_memory_gib": arguments.gpu_memory,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF"),
        "liger": arguments.liger,
        "gated_norms": arguments.gated_norms,
        "compiled": arguments.compile,
        "kernel": native.name,
        "parts_of_limits": {},
        "limits": {},
        "results": [],
    }
    for length, count in zip(arguments.lengths, arguments.rounds, strict=True):
        if not arguments.no_limits:
            parts = parts_of_limits(job.base.model, ranks, length, native, lora)
            result["parts_of_limits"][str(length)], result["limits"][str(length)] = parts, limits(parts)
        before, work = result["results"], None if arguments.document else flops(job, length, lora)
        for rows in measure(job, length, count, arguments):
            result["results"] = [*before, *summary(rows, work, result, arguments, ranks)]
            if arguments.out is not None and ranks.rank == 0:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    ranks.say(json.dumps(result["parts_of_limits"]))
    ranks.say(table(result))
    ranks.close()
    return 0 if any("median_s" in row for row in result["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
