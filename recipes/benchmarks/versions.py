"""Two versions of hf_burst beside each other: attention or whole training steps, in turns on the same devices.

    python recipes/benchmarks/versions.py --before ../before --after . --ranks 4 --lengths 32768 131072 \\
        --out outputs/versions.json
    python recipes/benchmarks/versions.py --before ../before --after . --ranks 4 --lengths 262144 --documents 512 65536
    python recipes/benchmarks/versions.py --before ../before --after . --ranks 4 --lengths 32768 --model llama-8b \\
        --layers 8 --rounds 10

On two CPU processes a version, to see that it works:

    python recipes/benchmarks/versions.py --before . --after . --ranks 2 --device cpu --dtype float32 --q-heads 4 \\
        --kv-heads 2 --head-dim 16 --lengths 256

A version is a folder that holds an `hf_burst` package. The script starts processes for both versions, one a device for
each (version_rank.py). The versions take turns: one measures while the processes of the other wait and their devices
are idle. The version that is first changes from round to round. The slowest rank counts. The results of the first calls
are compared bit by bit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from recipes.benchmarks.provenance import git_commit, interquartile_range
from recipes.benchmarks.version_task import VERSIONS, Task

WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
DTYPES = ("bfloat16", "float16", "float32", "float64")


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line, and ends the process with a sentence if it cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for version in VERSIONS:
        parser.add_argument(f"--{version}", type=Path, required=True, help="a folder that holds an hf_burst package")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each version")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768], help="tokens of the whole sequence")
    parser.add_argument("--schedules", nargs="+", default=["auto"], help="names of BurstConfig.schedule")
    parser.add_argument("--kernel", default="auto", help="a name of BurstConfig.kernel")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8], help="key heads, a case each")
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--window", type=int, help="tokens that a query sees backwards beside itself")
    parser.add_argument(
        "--documents",
        type=int,
        nargs=2,
        metavar=("SHORTEST", "LONGEST"),
        help="measures packed documents of so many tokens, too",
    )
    parser.add_argument("--in-a-row", type=int, default=4, help="calls of attention that follow each other")
    parser.add_argument("--model", help="train a model of this shape of training_job.py instead, such as llama-8b")
    parser.add_argument("--layers", type=int, help="layers of the model, if not those of its shape")
    parser.add_argument("--width", type=int, help="hidden size of the model; heads and MLP are scaled with it")
    parser.add_argument("--rounds", type=int, default=12, help="timed turns of each version")
    parser.add_argument("--warmup", type=int, default=5, help="turns before them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that processes wait for each other")
    parser.add_argument("--commits", nargs=2, metavar=("BEFORE", "AFTER"), help="of folders that are no git checkouts")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    arguments = parser.parse_args(words)
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = _problem(arguments)
    if problem:
        parser.error(problem)
    return arguments


def _problem(arguments: argparse.Namespace) -> str | None:
    """Why the options cannot be used, or `None`."""
    for version in VERSIONS:
        folder = getattr(arguments, version)
        if not (folder / "hf_burst" / "__init__.py").is_file():
            return f"--{version} is {folder}, which holds no hf_burst package; give the folder of a checkout"
    for name in ("ranks", "rounds", "in_a_row", "layers", "width", "timeout"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            return f"--{name.replace('_', '-')} is {value}; it must be above 0"
    if arguments.warmup < 0:
        return f"--warmup is {arguments.warmup}; it must be at least 0"
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.ranks:
        return f"--ranks is {arguments.ranks}; there are {torch.cuda.device_count()} GPUs, and a rank needs one"
    if arguments.out is not None and arguments.out.is_dir():
        return f"--out is {arguments.out}, a folder; give a file"
    if arguments.model is None:
        return "--layers and --width are for --model" if arguments.layers or arguments.width else None
    from recipes.benchmarks.training_job import SHAPES

    if arguments.model not in SHAPES:
        return f"--model is {arguments.model!r}; it must be one of {', '.join(SHAPES)}"
    sizes = SHAPES[arguments.model][2]
    if arguments.width and any(sizes[name] * arguments.width % sizes["hidden_size"] for name in WIDTHS):
        return f"--width is {arguments.width}, to which the heads of {arguments.model} cannot be scaled"
    return None


def changes(arguments: argparse.Namespace) -> dict[str, int]:
    """Values of the model's config that differ from its shape."""
    changed = {"num_hidden_layers": arguments.layers} if arguments.layers else {}
    if arguments.width:
        from recipes.benchmarks.training_job import SHAPES

        sizes = SHAPES[arguments.model][2]
        changed |= {name: sizes[name] * arguments.width // sizes["hidden_size"] for name in WIDTHS}
    return changed


def cases(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases to measure, one after another."""
    if arguments.model:
        return [
            {"length": length, "schedule": schedule} for length in arguments.lengths for schedule in arguments.schedules
        ]
    packings = [None, arguments.documents] if arguments.documents else [None]
    return [
        {"length": length, "kv_heads": kv_heads, "documents": documents, "schedule": schedule}
        for length in arguments.lengths
        for kv_heads in arguments.kv_heads
        for documents in packings
        for schedule in arguments.schedules
    ]


def start(task: Task) -> subprocess.Popen[bytes]:
    """Starts a rank of a version, with its checkout in front of all other paths."""
    paths = [str(Path(task.folder).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "RANK": str(task.rank),
        "LOCAL_RANK": str(task.rank),
        "WORLD_SIZE": str(task.ranks),
        "MASTER_ADDR": task.host,
        "MASTER_PORT": str(task.port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if task.settings["device"] == "cpu":
        environment["ACCELERATE_USE_CPU"] = "1"
    command = [sys.executable, str(Path(__file__).with_name("version_rank.py")), json.dumps(asdict(task))]
    return subprocess.Popen(command, env=environment)


def finish(processes: Mapping[str, subprocess.Popen[bytes]]) -> str | None:
    """Waits for all processes. When one of them fails, ends the others and returns its name."""
    try:
        while True:
            codes = {name: process.poll() for name, process in processes.items()}
            failed = next((name for name, code in codes.items() if code), None)
            if failed or None not in codes.values():
                return failed
            time.sleep(0.1)
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Runs both versions: the reports of the ranks of each."""
    limit = timedelta(seconds=arguments.timeout)
    store = dist.TCPStore("localhost", 0, is_master=True, timeout=limit, wait_for_workers=False)
    settings = {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)}
    settings["changes"] = changes(arguments)
    processes = {}
    for version in VERSIONS:
        for rank in range(arguments.ranks):
            task = Task(
                version=version,
                folder=str(getattr(arguments, version)),
                rank=rank,
                ranks=arguments.ranks,
                host="localhost",
                port=store.port,
                settings=settings,
                cases=cases(arguments),
            )
            processes[f"rank {rank} of {version}"] = start(task)
    failed = finish(processes)
    if failed:
        raise SystemExit(f"versions.py: {failed} failed; its error stands above.")
    return {
        version: [json.loads(store.get(f"report/{version}/{rank}")) for rank in range(arguments.ranks)]
        for version in VERSIONS
    }


def compare(case: dict[str, Any], ranks: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """The result of a case: seconds of the slowest rank in each round, and how the versions compare.

    Args:
        case (`dict`): The case.
        ranks (mapping from `str` to sequence of `dict`): For each version, the measurements of its ranks.
    """
    parts = list(ranks["before"][0]["seconds"])
    seconds = {
        version: {
            part: [max(times) for times in zip(*(rank["seconds"][part] for rank in measured), strict=True)]
            for part in parts
        }
        for version, measured in ranks.items()
    }
    medians = {version: {part: statistics.median(seconds[version][part]) for part in parts} for version in VERSIONS}
    rounds = {
        part: [after / before for before, after in zip(seconds["before"][part], seconds["after"][part], strict=True)]
        for part in parts
    }
    bits = {version: [rank["bits"] for rank in measured] for version, measured in ranks.items()}
    peaks = {version: [rank["peak_memory_bytes"] for rank in measured] for version, measured in ranks.items()}
    return {
        **case,
        "seconds": seconds,
        "median_s": medians,
        "iqr_s": {
            version: {part: interquartile_range(seconds[version][part]) for part in parts} for version in VERSIONS
        },
        "ratio": {part: medians["after"][part] / medians["before"][part] for part in parts},
        "ratio_of_rounds": {
            part: {"median": statistics.median(ratios), "iqr": interquartile_range(ratios)}
            for part, ratios in rounds.items()
        },
        "same_bits": {
            name: all(old[name] == new[name] for old, new in zip(bits["before"], bits["after"], strict=True))
            for name in bits["before"][0]
        },
        "peak_memory_bytes": {version: None if None in peak else max(peak) for version, peak in peaks.items()},
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| case | part | before, ms | after, ms | after / before | of rounds | same bits |"]
    lines.append("|---|---|---:|---:|---:|---:|---|")
    for row in result["results"]:
        packing = "documents" if row.get("documents") else "one document"
        heads = f", {row['kv_heads']} key heads" if "kv_heads" in row else ""
        name = f"{row['length']} tokens{heads}, {packing}, {row['schedule']}"
        same = ", ".join(result for result, equal in row["same_bits"].items() if equal) or "none"
        for part, ratio in row["ratio"].items():
            before, after = (1e3 * row["median_s"][version][part] for version in VERSIONS)
            spread = row["ratio_of_rounds"][part]
            cells = [name, part, f"{before:.3f}", f"{after:.3f}", f"{ratio:.4f}"]
            cells += [f"{spread['median']:.4f} ± {spread['iqr'] / 2:.4f}", same]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    arguments = read_arguments(words)
    commits = arguments.commits or [git_commit(getattr(arguments, version)) for version in VERSIONS]
    reports = measure(arguments)
    of_rank = {version: reports[version][0] for version in VERSIONS}
    result = {
        "command": " ".join([Path(__file__).name, *(sys.argv[1:] if words is None else words)]),
        "git_commits": dict(zip(VERSIONS, commits, strict=True)),
        "hardware": of_rank["after"]["hardware"],
        "versions": {version: report["versions"] for version, report in of_rank.items()},
        "settings": {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)},
        "results": [
            compare(case, {version: [rank["measured"][index] for rank in reports[version]] for version in VERSIONS})
            for index, case in enumerate(cases(arguments))
        ],
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
