"""`hf-burst bench`: how fast attention is on this machine.

    accelerate launch --num_processes 4 -m hf_burst bench attention --kv-heads 8 --lengths 16384 131072

Each schedule of [`BurstConfig`] beside the limit: the same kernel on a share of the heads, with no communication.
`recipes/benchmarks/attention.py` is this with the attention of other packages beside it.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..config import BurstConfig, Chunking
from ..errors import BurstError, ConfigError
from ..plan import Mask, chunks_per_rank

if TYPE_CHECKING:
    from .bench_contenders import Case, Contender
    from .bench_ranks import Ranks

SCHEDULES = ("auto", "kv_ring", "burst", "all_gather", "ulysses")
DTYPES = ("bfloat16", "float16", "float32", "float64")
LENGTHS = (8192, 16384, 32768, 65536, 131072)
_DAY_S = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-burst bench` takes."""
    parser.add_argument("subject", choices=("attention",), help="what to measure")
    add_attention_arguments(parser)


def add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    """The attention to measure, how long, and where the result goes."""
    parser.add_argument(
        "--lengths", type=int, nargs="+", help=f"tokens of the whole sequence ({' '.join(map(str, LENGTHS))})"
    )
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8], help="key heads, each a matrix of its own")
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--documents",
        type=int,
        nargs=2,
        metavar=("SHORTEST", "LONGEST"),
        help="packed documents of so many tokens, whose logarithms are uniform; one whole sequence by default",
    )
    parser.add_argument("--window", type=int, help="tokens that a query sees backwards beside itself; all by default")
    parser.add_argument("--chunkings", nargs="+", choices=get_args(Chunking), default=["balanced"])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), help="names of BurstConfig.schedule")
    parser.add_argument("--kernel", default="auto", help="a name of BurstConfig.kernel, for all that let one choose")
    parser.add_argument(
        "--burst", type=_setting, nargs="+", default=[], metavar="NAME=VALUE", help="further settings of BurstConfig"
    )
    parser.add_argument("--contenders", nargs="+", default=["*"], help="patterns of names, such as 'limit' 'torch*'")
    parser.add_argument("--seconds", type=float, default=180.0, help="time for the lengths of one number of key heads")
    parser.add_argument("--rounds", type=int, nargs=2, default=(3, 30), metavar=("FEWEST", "MOST"))
    parser.add_argument(
        "--in-a-row", type=int, default=4, help="calls that follow each other, as layers do; fewer of slow ones"
    )
    parser.add_argument("--warmup", type=int, default=56, help="calls before the first round; fewer of slow ones")
    parser.add_argument(
        "--check-length",
        type=int,
        help="tokens at which results are compared with fp64 (2048; of documents, a rank)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one call may take")
    parser.add_argument("--commit", help="what to write down where this is no git checkout")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measures hf_burst's schedules; the exit status."""
    return benchmark(arguments)


def benchmark(arguments: argparse.Namespace, peers: Sequence["Contender"] = ()) -> int:
    """Measures hf_burst's schedules, and `peers`, beside the limit; writes the result and prints a table.

    Args:
        arguments (`argparse.Namespace`): As `add_attention_arguments` reads them.
        peers (sequence of [`Contender`]): What else to measure.

    Returns:
        `int`: 0; 1 if a contender was wrong against fp64, or failed wherever it ran, or if none of hf_burst's was
        measured (none at all, where none of those was asked for); 2 for settings that cannot be used. Contenders that
        are not available here, such as those of packages that are not installed, are no failure.
    """
    from .bench_ranks import Ranks
    from .bench_report import table

    try:
        _validate(arguments)
        contenders = _asked_for(arguments, peers)
        ranks = Ranks(arguments.device, arguments.timeout)
    except BurstError as error:
        print(f"hf-burst bench: {error}", file=sys.stderr)
        return 2
    try:
        _check_out(arguments.out, ranks)
        result = _matrix(arguments, contenders, ranks)
    except BurstError as error:
        ranks.say(f"hf-burst bench: {error}")
        return 2
    finally:
        ranks.close()
    if ranks.rank == 0:
        print(table(result))
    return _status(result)


def _setting(text: str) -> tuple[str, Any]:
    """`name=value`, the value as JSON where it is JSON."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _validate(arguments: argparse.Namespace) -> None:
    counts = ("q_heads", "head_dim", "batch", "check_length", "timeout", "seconds", "in_a_row")
    for name in counts:
        value = getattr(arguments, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be a number above 0.")
    if arguments.timeout > _DAY_S:
        raise ConfigError(f"--timeout is {arguments.timeout}; it must be at most {_DAY_S} seconds, a day.")
    if arguments.warmup < 0:
        raise ConfigError(f"--warmup is {arguments.warmup}; it must be at least 0.")
    if arguments.lengths and min(arguments.lengths) < 1:
        raise ConfigError(f"--lengths are {arguments.lengths}; give numbers of tokens, at least 1.")
    for kv_heads in arguments.kv_heads:
        if kv_heads < 1 or arguments.q_heads % kv_heads:
            raise ConfigError(f"--q-heads {arguments.q_heads} is no whole multiple of --kv-heads {kv_heads}.")
    if arguments.documents and not 1 <= arguments.documents[0] <= arguments.documents[1]:
        raise ConfigError(f"--documents is {arguments.documents}; give the shortest, at least 1, and the longest.")
    if arguments.window is not None and arguments.window < 0:
        raise ConfigError(f"--window is {arguments.window}; give the tokens visible backwards, or leave it out.")
    fewest, most = arguments.rounds
    if not 1 <= fewest <= most:
        raise ConfigError(f"--rounds is {fewest} {most}; give the fewest, at least 1, and the most.")
    given = {"kernel": arguments.kernel, **dict(arguments.burst)}
    for name in ("schedule", "chunking"):
        if name in given:
            raise ConfigError(f"--burst {name}={given[name]} is not taken; give --{name}s {given[name]}.")
    for schedule in arguments.schedules:
        BurstConfig.from_dict({**given, "schedule": schedule})


def _asked_for(arguments: argparse.Namespace, peers: Sequence["Contender"]) -> list["Contender"]:
    """The limit, hf_burst's schedules and `peers`: those whose names match a pattern of `--contenders`."""
    from .bench_contenders import hf_burst, limit

    settings = [dict(arguments.burst) | {"chunking": chunking} for chunking in dict.fromkeys(arguments.chunkings)]
    own = [hf_burst(schedule, given) for schedule in arguments.schedules for given in settings]
    every = [limit(), *own, *peers]
    found = [one for one in every if any(fnmatch(one.name, pattern) for pattern in arguments.contenders)]
    if not found:
        names = ", ".join(repr(one.name) for one in every)
        raise ConfigError(f"--contenders {' '.join(map(repr, arguments.contenders))} is none of {names}.")
    return found


def _check_out(out: Path | None, ranks: "Ranks") -> None:
    """Raises on all ranks if rank 0 cannot write the result; what is there already stays as it is."""
    problem = None
    if out is not None and ranks.rank == 0:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            new = not out.exists()
            out.open("a").close()
            if new:
                out.unlink()
        except OSError as error:
            problem = (time.time(), f"--out is {out}, where no result can be written: {error}")
    told = ranks.agree(problem)
    if told is not None:
        raise ConfigError(told)


def set_lengths(arguments: argparse.Namespace, ranks: "Ranks") -> None:
    """Lengths that were not given, in multiples of what the ranks cut; raises for given ones that are none."""
    multiple, finest = 2 * ranks.size, chunks_per_rank(LENGTHS[-1], ranks.size, "balanced") * ranks.size
    for name, given in (("--lengths", arguments.lengths or ()), ("--check-length", (arguments.check_length,))):
        for length in filter(None, given):
            if length % multiple:
                raise ConfigError(
                    f"{name}: {length} tokens cannot be cut into 2 x {ranks.size} equal chunks; give a multiple of "
                    f"{multiple}, such as {max(1, round(length / multiple)) * multiple}."
                )
    if arguments.lengths is None:
        arguments.lengths = [-(-length // finest) * finest for length in LENGTHS]
    if arguments.check_length is None:  # of documents so long that chunks are dealt out
        arguments.check_length = -(-2048 // finest) * finest * (ranks.size if arguments.documents else 1)


def _matrix(arguments: argparse.Namespace, contenders: Sequence["Contender"], ranks: "Ranks") -> dict[str, Any]:
    import torch

    from .bench_contenders import Case, Documents, choose_native
    from .bench_report import environment
    from .bench_rounds import check

    set_lengths(arguments, ranks)
    dtype = getattr(torch, arguments.dtype)
    bounds = (0, 100, 256) if arguments.documents else ()
    sample = Mask(256, window=arguments.window, documents=bounds)
    native, refusals = choose_native(arguments.kernel, ranks, dtype, arguments.head_dim, sample)
    ranks.say(f"kernel {native.name} on {ranks.size} x {ranks.device.type}" + "".join(f"\n  {why}" for why in refusals))
    result = environment(ranks, [Path(sys.argv[0]).name, *sys.argv[1:]], arguments.commit)
    result |= {"settings": _settings(arguments), "kernel": native.name, "kernels_refused": refusals}
    result |= {"checks": [], "results": []}
    for kv_heads in arguments.kv_heads:
        case = Case(
            length=arguments.check_length,
            q_heads=arguments.q_heads,
            kv_heads=kv_heads,
            head_dim=arguments.head_dim,
            batch=arguments.batch,
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
        _lengths(arguments, [one for one in contenders if one.name in right], case, ranks, result)
    return result


def _lengths(
    arguments: argparse.Namespace,
    contenders: Sequence["Contender"],
    case: "Case",
    ranks: "Ranks",
    result: dict[str, Any],
) -> None:
    """Measures one length after another, the shortest first; what one does not use of its time is left to the next."""
    from dataclasses import replace

    import torch

    from .bench_report import rows
    from .bench_rounds import Effort, measure

    start, warm = time.perf_counter(), frozenset[str]()
    lengths = sorted(set(arguments.lengths))
    for index, length in enumerate(lengths):
        passed = float(ranks.largest(torch.tensor([time.perf_counter() - start], dtype=torch.float64))[0])
        share = length / sum(lengths[index:])
        left, rounds = arguments.seconds - passed, tuple(arguments.rounds)
        effort = Effort(arguments.warmup, rounds, left, share, arguments.in_a_row, warm)
        ranks.say(f"{case.kv_heads} key heads, {length} tokens ({index + 1} of {len(lengths)}, {passed:.0f} s so far)")
        at_length = replace(case, length=length)
        found = measure(contenders, at_length, ranks, effort)
        warm |= {measured.contender.name for measured in found if measured.status == "ok"}
        result["results"] += rows(found, at_length)
        if arguments.out is not None and ranks.rank == 0:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def _status(result: dict[str, Any]) -> int:
    """The exit status of a run, as `benchmark` says."""
    asked = {check["contender"] for check in result["checks"]}
    seen = {(row["contender"], row["status"]) for row in [*result["checks"], *result["results"]]}
    measured = {row["contender"] for row in result["results"] if row["status"] == "ok"}
    failed = {name for name, status in seen if status == "wrong" or (status == "failed" and name not in measured)}
    wanted = {name for name in asked if name.startswith("hf_burst ")} or asked
    return 1 if failed or not wanted & measured else 0


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        name: value for name, value in vars(arguments).items() if isinstance(value, int | float | str | list | tuple)
    }
