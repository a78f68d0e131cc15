"""Whole training steps: hf_burst beside other ways to train on long sequences, interleaved in one run.

    torchrun --nproc-per-node 2 recipes/benchmarks/training.py --device cpu --shape tiny --lengths 512 --rounds 2

README.md beside this file says what is measured, and has commands for GPUs. All contenders (training_contenders.py)
train one model in turns, a step each, so that they share weights, optimizer and memory.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from hf_burst.cli.launch import launched
from recipes.benchmarks.harness import Row, at_least, begin, options_of, setting, write
from recipes.benchmarks.steps import measure, summary_table, with_medians
from recipes.benchmarks.training_contenders import CONTENDERS, NAMED, read_settings
from recipes.benchmarks.training_job import add_training, make_job, random_tokens
from recipes.benchmarks.training_limits import attentions_of, limits, native_of, parts_of_limits

KNOWN = CONTENDERS | NAMED


def summary(rows: dict[str, Row], length: int, limits: dict[str, float], arguments: argparse.Namespace) -> list[Row]:
    """The rows of a length with their settings, medians and shares of their limits."""
    found = []
    for row in with_medians(rows):
        contender = arguments.contenders[row["contender"]]
        settings = None if contender.settings is None else {**contender.settings, **row["chosen"]}
        row = {"contender": row["contender"], "length": length, **row, "settings": settings}
        if "median_s" in row:
            limit = limits.get(contender.limit)
            row["share_of_limit"] = limit and limit / row["median_s"]
            if len(arguments.contenders) > 1:
                row["host_memory_gib"] = None  # torch holds that of other contenders, too
        found.append(row)
    return found


def read_arguments() -> argparse.Namespace:
    """Reads the command line, and ends the process with a sentence if it cannot be used."""
    parser = options_of(__doc__)
    add_training(parser)
    parser.add_argument("--lengths", type=at_least(2), nargs="+", default=[32768], help="tokens of the whole sequence")
    parser.add_argument("--contenders", nargs="+", choices=KNOWN, help="by default all that know such a model")
    burst = "one more contender: settings of hf_burst.Memory, such as tiled_mlp=16384,activation_offloading=1.0"
    parser.add_argument("--hf-burst", type=read_settings, action="append", default=[], help=burst)
    parser.add_argument("--longest", type=setting, nargs="+", default=[], help="NAME=TOKENS: none of longer sequences")
    parser.add_argument(
        "--rounds", type=at_least(1), nargs="+", default=[5], help="timed steps; one number, or one a length"
    )
    parser.add_argument("--warmup", type=at_least(0), default=1, help="steps before them")
    parser.add_argument("--check-length", type=at_least(2), help="tokens of the comparison before the first step (all)")
    parser.add_argument("--no-limits", action="store_true", help="do not measure the least time of a step")
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    return arguments


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Puts arguments into the form that the benchmark needs, and ends the process if that cannot be."""
    size, hybrid = launched()[0], "hybrid" in arguments.shape
    if arguments.gated_norms and not hybrid:
        parser.error(f"--gated-norms is for shapes with recurrent layers, not for {arguments.shape}")
    if arguments.contenders is None:
        known = {} if arguments.hf_burst else CONTENDERS
        arguments.contenders = [
            name
            for name, contender in known.items()
            if contender.hybrids in (None, hybrid) and contender.several in (None, size > 1)
        ]
    arguments.contenders = {name: KNOWN[name] for name in arguments.contenders} | dict(arguments.hf_burst)
    if wrong := [name for name, most in arguments.longest if name not in KNOWN or not isinstance(most, int)]:
        parser.error(f"--longest: {wrong[0]!r} is no NAME=TOKENS; the names are {', '.join(KNOWN)}")
    count, arguments.lengths = len(arguments.rounds), sorted(arguments.lengths)
    if count not in (1, len(arguments.lengths)):
        parser.error(f"--rounds has {count} numbers for {len(arguments.lengths)} lengths; give one, or one each")
    arguments.rounds *= len(arguments.lengths) // count
    for name in (name for name, contender in arguments.contenders.items() if contender.several is (size == 1)):
        parser.error(f"{name!r} is no way to train on {size} {'process' if size == 1 else 'processes'}")


def main() -> int:
    arguments = read_arguments()
    ranks, result = begin(arguments, "shape", "layers", "liger", "gated_norms")
    job = make_job(arguments, arguments.lengths[-1], ranks)
    lora = arguments.weights == "lora"
    kinds = dict.fromkeys(attentions_of(job.base.model))
    kernels = dict.fromkeys(native_of(kind, job.base.dtype, ranks).name for kind in kinds)
    result |= {
        "lora": lora,
        "adapters": "hf_burst" if lora else None,  # who computes them in its rows
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF"),
        "kernel": ", ".join(kernels),
        "parts_of_limits": {},
        "limits": {},
        "results": [],
    }
    for length, count in zip(arguments.lengths, arguments.rounds, strict=True):
        bounds = dict[str, float]()
        if not arguments.no_limits:
            parts = parts_of_limits(job.base.model, ranks, length, lora)
            bounds = limits(parts)
            result["parts_of_limits"][str(length)], result["limits"][str(length)] = parts, bounds
        before, most = result["results"], dict(arguments.longest)
        ways = {name: one.way for name, one in arguments.contenders.items() if length <= most.get(name, length)}
        tokens = random_tokens(length, job.base, ranks.device)
        for rows in measure(job, ways, count, arguments.warmup, tokens, arguments.check_length):
            result["results"] = [*before, *summary(rows, length, bounds, arguments)]
            write(arguments.out, result, ranks)
    ranks.say(json.dumps(result["parts_of_limits"]))
    ranks.say(summary_table(result["results"]))
    ranks.close()
    return 0 if any("median_s" in row for row in result["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
