"""hf_burst's attention beside other packages and the limit without communication, interleaved in one run.

On 4 GPUs with the kernels of FlashAttention-2 for all that let one choose (README.md beside this file has the whole
matrix, how it is measured and how to read the result):

    torchrun --nproc-per-node 4 recipes/benchmarks/attention.py --kv-heads 8 32 --kernel flash_attn_2 \\
        --contenders limit 'hf_burst*' 'ulysses*' 'ring*' --out outputs/attention_4xH200_fa2.json

On two CPU processes, to see that it works (most peers need GPUs):

    torchrun --nproc-per-node 2 recipes/benchmarks/attention.py --device cpu --dtype float32 --q-heads 4 \\
        --kv-heads 2 4 --head-dim 16 --lengths 256 512 --check-length 64 --out outputs/attention_cpu.json
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from hf_burst import BurstConfig
from hf_burst.config import Chunking
from hf_burst.errors import BurstError, ConfigError
from hf_burst.plan import Mask, chunks_per_rank
from recipes.benchmarks.contenders import Case, Contender, Documents, hf_burst, limit
from recipes.benchmarks.harness import at_least, options_of, setting, settings_of, table, write
from recipes.benchmarks.measure import PASSES, Effort, Measured, check, measure
from recipes.benchmarks.native import choose_native
from recipes.benchmarks.peers import peers
from recipes.benchmarks.provenance import environment, interquartile_range
from recipes.benchmarks.ranks import Ranks

SCHEDULES = ("auto", "kv_ring", "burst", "ulysses")
DTYPES = ("bfloat16", "float16", "float32", "float64")
LENGTHS = (8192, 16384, 32768, 65536, 131072)


def options() -> argparse.ArgumentParser:
    """The options: the attention to measure, how long, and where the result goes."""
    parser = options_of(__doc__, timeout_s=120.0)
    parser.add_argument("--lengths", type=at_least(1), nargs="+", help=f"tokens of the whole sequence {LENGTHS}")
    parser.add_argument("--kv-heads", type=at_least(1), nargs="+", default=[8], help="key heads, a table each")
    parser.add_argument("--q-heads", type=at_least(1), default=32)
    parser.add_argument("--head-dim", type=at_least(1), default=128)
    documents = "shortest and longest, in tokens, of packed documents, whose logarithms are uniform"
    parser.add_argument("--documents", type=at_least(1), nargs=2, help=documents)
    parser.add_argument("--window", type=at_least(0), help="tokens that a query sees backwards beside itself (all)")
    parser.add_argument("--chunkings", nargs="+", choices=get_args(Chunking), default=["balanced"])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), help="names of BurstConfig.schedule")
    parser.add_argument("--kernel", default="auto", help="a name of BurstConfig.kernel, for contenders with a choice")
    parser.add_argument("--burst", type=setting, nargs="+", default=[], help="NAME=VALUE: settings of BurstConfig")
    parser.add_argument("--contenders", nargs="+", default=["*"], help="patterns of names, such as limit 'hf_burst*'")
    parser.add_argument("--seconds", type=float, default=180.0, help="for all lengths of one number of key heads")
    parser.add_argument("--rounds", type=at_least(1), nargs=2, default=(3, 30), metavar=("FEWEST", "MOST"))
    parser.add_argument("--in-a-row", type=at_least(1), default=4, help="calls without a pause; fewer if slow")
    parser.add_argument("--warmup", type=at_least(0), default=56, help="calls before the first round; fewer if slow")
    parser.add_argument("--check-length", type=at_least(1), help="tokens of the comparison with fp64 (2048)")
    return parser


def benchmark(arguments: argparse.Namespace, others: Sequence[Contender] = ()) -> int:
    """Measures the limit, hf_burst's schedules and other contenders; writes the result and prints a table.

    Contenders of packages that are not installed are no failure.

    Returns:
        `int`: 0 for success and 2 for settings that cannot be used. It is 1 if a contender was wrong against fp64 or
        failed at every length. It is also 1 if no schedule of hf_burst was measured although one was requested, or if
        nothing was measured.
    """
    try:
        _validate(arguments)
        contenders = _requested(arguments, others)
        ranks = Ranks(arguments.device, arguments.timeout)
    except BurstError as error:
        print(f"attention.py: {error}", file=sys.stderr)
        return 2
    try:
        result = _matrix(arguments, contenders, ranks)
    except BurstError as error:
        ranks.say(f"attention.py: {error}")
        return 2
    finally:
        ranks.close()
    if ranks.rank == 0:
        print(markdown(result))
    return _status(result)


def _validate(arguments: argparse.Namespace) -> None:
    for kv_heads in arguments.kv_heads:
        if arguments.q_heads % kv_heads:
            raise ConfigError(f"--q-heads {arguments.q_heads} is no whole multiple of --kv-heads {kv_heads}.")
    for name in ("documents", "rounds"):
        if (pair := getattr(arguments, name)) and pair[0] > pair[1]:
            raise ConfigError(f"--{name} is {pair[0]} {pair[1]}; give the smaller number first.")
    settings = {"kernel": arguments.kernel, **dict(arguments.burst)}
    for name in ("schedule", "chunking"):
        if name in settings:
            raise ConfigError(f"--burst {name}={settings[name]} is not taken; give --{name}s {settings[name]}.")
    for schedule in arguments.schedules:
        BurstConfig.from_dict({**settings, "schedule": schedule})


def _requested(arguments: argparse.Namespace, others: Sequence[Contender]) -> list[Contender]:
    """The contenders whose names match a pattern of `--contenders`."""
    settings = [dict(arguments.burst) | {"chunking": chunking} for chunking in dict.fromkeys(arguments.chunkings)]
    own = [hf_burst(schedule, setting) for schedule in arguments.schedules for setting in settings]
    contenders = [limit(), *own, *others]
    matching = [one for one in contenders if any(fnmatch(one.name, pattern) for pattern in arguments.contenders)]
    if not matching:
        names = ", ".join(repr(contender.name) for contender in contenders)
        raise ConfigError(f"--contenders {' '.join(map(repr, arguments.contenders))} is none of {names}.")
    return matching


def set_lengths(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Sets the default lengths to multiples that the ranks can cut, and refuses requested lengths that they cannot."""
    multiple, finest = 2 * ranks.size, chunks_per_rank(LENGTHS[-1], ranks.size, "balanced") * ranks.size
    for name, lengths in (("--lengths", arguments.lengths or ()), ("--check-length", (arguments.check_length,))):
        for length in filter(None, lengths):
            if length % multiple:
                raise ConfigError(
                    f"{name}: {length} tokens cannot be cut into 2 x {ranks.size} equal chunks; give a multiple of "
                    f"{multiple}, such as {max(1, round(length / multiple)) * multiple}."
                )
    if arguments.lengths is None:
        arguments.lengths = [-(-length // finest) * finest for length in LENGTHS]
    if arguments.check_length is None:  # documents: so long that chunks are dealt out
        arguments.check_length = -(-2048 // finest) * finest * (ranks.size if arguments.documents else 1)


def _matrix(arguments: argparse.Namespace, contenders: Sequence[Contender], ranks: Ranks) -> dict[str, Any]:
    """Checks and measures all contenders for each number of key heads; the result as a JSON document."""
    set_lengths(arguments, ranks)
    dtype = getattr(torch, arguments.dtype)
    bounds = (0, 100, 256) if arguments.documents else ()
    sample = Mask(256, window=arguments.window, documents=bounds)
    native, refusals = choose_native(arguments.kernel, ranks, dtype, arguments.head_dim, sample)
    ranks.say(f"kernel {native.name} on {ranks.size} x {ranks.device.type}" + "".join(f"\n  {why}" for why in refusals))
    result = environment(ranks, arguments.commit)
    result |= {"settings": settings_of(arguments), "kernel": native.name, "kernels_refused": refusals}
    result |= {"checks": [], "results": []}
    for kv_heads in arguments.kv_heads:
        case = Case(
            length=arguments.check_length,
            q_heads=arguments.q_heads,
            kv_heads=kv_heads,
            head_dim=arguments.head_dim,
            dtype=dtype,
            device=ranks.device,
            rank=ranks.rank,
            ranks=ranks.size,
            native=native,
            kernel=arguments.kernel,
            documents=None if arguments.documents is None else Documents(*arguments.documents),
            window=arguments.window,
        )
        ranks.say(f"{kv_heads} key heads: results of {len(contenders)} contenders at {case.length} tokens")
        checked = check(contenders, case, ranks)
        result["checks"] += [{**verdict, "kv_heads": kv_heads, "length": case.length} for verdict in checked]
        right = {verdict["contender"] for verdict in checked if verdict["status"] == "ok"}
        _lengths(arguments, [contender for contender in contenders if contender.name in right], case, ranks, result)
    return result


def _lengths(
    arguments: argparse.Namespace, contenders: Sequence[Contender], case: Case, ranks: Ranks, result: dict[str, Any]
) -> None:
    """Measures the lengths, the shortest first. Time that one length does not use is left to the next."""
    start, warm = time.perf_counter(), frozenset[str]()
    lengths = sorted(set(arguments.lengths))
    for index, length in enumerate(lengths):
        (passed,) = ranks.largest([time.perf_counter() - start])
        left = (arguments.seconds - passed) * length / sum(lengths[index:])
        effort = Effort(arguments.warmup, tuple(arguments.rounds), left, arguments.in_a_row, warm)
        ranks.say(f"{case.kv_heads} key heads, {length} tokens ({index + 1} of {len(lengths)}, {passed:.0f} s so far)")
        at_length = replace(case, length=length)
        results = measure(contenders, at_length, ranks, effort)
        warm |= {measured.contender.name for measured in results if measured.status == "ok"}
        result["results"] += rows(results, at_length)
        write(arguments.out, result, ranks)


def _status(result: dict[str, Any]) -> int:
    """The exit status of a run, as `benchmark` says."""
    requested = {verdict["contender"] for verdict in result["checks"]}
    statuses = {(row["contender"], row["status"]) for row in [*result["checks"], *result["results"]]}
    measured = {row["contender"] for row in result["results"] if row["status"] == "ok"}
    failed = {name for name, status in statuses if status == "wrong" or (status == "failed" and name not in measured)}
    expected = {name for name in requested if name.startswith("hf_burst ")} or requested
    return 1 if failed or not expected & measured else 0


def rows(results: Sequence[Measured], case: Case) -> list[dict[str, Any]]:
    """The rows of one case. Ratios between contenders are ratios of medians."""
    medians = {
        measured.contender.name: {name: statistics.median(measured.seconds[name]) for name in PASSES}
        for measured in results
        if measured.status == "ok"
    }
    return [_row(measured, case, medians) for measured in results]


def _row(measured: Measured, case: Case, medians: dict[str, dict[str, float]]) -> dict[str, Any]:
    name = measured.contender.name
    row: dict[str, Any] = {
        "contender": name,
        "config": measured.contender.config,
        "limit_kernel": case.native.name,
        "length": case.length,
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "dtype": str(case.dtype).removeprefix("torch."),
        "documents": len(case.mask.documents) - 1,
        "document_tokens": [case.documents.shortest, case.documents.longest] if case.documents else None,
        "window": case.window,
        "ranks": case.ranks,
        "status": measured.status,
        "reason": measured.reason,
        "said": measured.said,
    }
    if measured.status != "ok" or measured.run is None:
        return row
    own, flops = medians[name], case.flops()
    limit = medians.get("limit")
    return row | {
        "calls": measured.calls,
        "seconds": measured.seconds,
        "median_s": own,
        "iqr_s": {part: interquartile_range(measured.seconds[part]) for part in PASSES},
        "tflops_per_gpu": {part: flops[part] / own[part] / 1e12 for part in PASSES},
        "share_of_limit": {part: limit[part] / own[part] for part in PASSES} if limit else None,
        "times_as_fast_as": {rival: medians[rival]["both"] / own["both"] for rival in medians if rival != name},
        "peak_memory_bytes": measured.peak_bytes,
        "memory_outside_allocator_bytes": measured.outside_bytes,
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    cells = []
    for row in result["results"]:
        found = [row["kv_heads"], f"{row['length']:,}", row["contender"], row["status"]]
        if row["status"] == "ok":
            rate, share = row["tflops_per_gpu"]["both"], row["share_of_limit"]
            found[3:] = [f"{rate:.3g}", "" if share is None else f"{share['both']:.0%}"]
        cells.append(found)
    return table(["key heads", "tokens", "contender", "TF/s per GPU", "share of the limit"], cells)


if __name__ == "__main__":
    sys.exit(benchmark(options().parse_args(), peers()))
