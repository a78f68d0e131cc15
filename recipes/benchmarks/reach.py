"""The longest sequence that every contender of training.py trains on, by doubling it until memory is short.

    python recipes/benchmarks/reach.py --lora --liger --shortest 65536 --longest 524288 --out outputs/reach.json \\
        --contenders "hf_burst, chosen" "Transformers, Liger's loss" "TRL's offloading, Liger's loss and tiles"
    python recipes/benchmarks/reach.py --processes 2 --liger --layers 8 --shortest 262144 --longest 1048576 \\
        --hf-burst tiled_mlp=16384,activation_offloading=1.0 --contenders "accelerate context parallelism, cuDNN"
    python recipes/benchmarks/reach.py --device cpu --shape tiny --shortest 128 --longest 256

Each attempt is one step, the first one of processes of its own, with a time limit. What this script does not know goes
to training.py. Of each attempt the result has seconds, peaks of memory, and how it ended. With `--document 4096` the
sequence is packed of short documents: flash kernels take as much memory for them, and far less time.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

TRAINING = Path(__file__).with_name("training.py")
ONE_STEP = ("--rounds", "1", "--warmup", "0", "--no-limits")
# of the result of an attempt, what is the same for all of them
COMMON = (
    "schema",
    "git_commit",
    "hardware",
    "versions",
    "shape",
    "layers",
    "document",
    "lora",
    "four_bits",
    "gpu_memory_gib",
    "liger",
    "kernel",
)
KEPT = (
    *("median_s", "mfu", "peak_memory_gib", "reserved_memory_gib", "host_memory_gib", "check", "settings"),
    *("predicted", "predicted_of_all_layers"),
)


def attempt(choice: Sequence[str], length: int, arguments: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Trains one step, and tells how that ended."""
    start = [sys.executable]
    if arguments.processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.processes)]
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "result.json", Path(folder) / "log"
        words = [*ONE_STEP, "--timeout", str(limit_s), *arguments.rest, *choice]
        words += ["--lengths", str(length), "--out", str(out)]
        begin = time.perf_counter()
        with log.open("w") as written:
            process = subprocess.Popen(
                [*start, str(TRAINING), *words], stdout=written, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the processes of a launcher, too
                status = None
                process.wait()
        result = json.loads(out.read_text()) if out.exists() else {"results": []}
        return ending(result, status, log.read_text()) | {
            "wall_s": time.perf_counter() - begin,
            "common": {name: result.get(name) for name in COMMON},
        }


def ending(result: dict[str, Any], status: int | None, log: str) -> dict[str, Any]:
    """How an attempt ended: `"step"`, `"out of memory"`, `"out of time"` or `"failed"`; why; and its numbers."""
    row = result["results"][-1] if result["results"] else {}
    if "median_s" in row:
        return {"ended": "step", **{name: row.get(name) for name in KEPT}, "steps": row["steps"]}
    if status is None:
        return {"ended": "out of time"}
    reason = row.get("reason") or "\n".join(log.strip().splitlines()[-3:])
    words = (row.get("reason") or log).lower()
    short = "out of memory" in words or "host memory" in words or status in (-signal.SIGKILL, 137)
    return {"ended": "out of memory" if short else "failed", "reason": reason[-500:]}


def climb(choice: Sequence[str], arguments: argparse.Namespace, begin: float) -> list[dict[str, Any]]:
    """Doubles the sequence for one contender, as long as steps succeed and there is time for the next one."""
    attempts: list[dict[str, Any]] = []
    length, least_s = arguments.shortest, 0.0
    while length <= arguments.longest:
        left_s = arguments.seconds - (time.perf_counter() - begin)
        if least_s > min(left_s, arguments.attempt_seconds) or left_s <= 0:
            attempts.append({"length": length, "ended": "not tried", "reason": f"would take {least_s:.0f} s or more"})
            return attempts
        attempts.append({"length": length} | attempt(choice, length, arguments, min(left_s, arguments.attempt_seconds)))
        if attempts[-1]["ended"] != "step":
            return attempts
        least_s = attempts[-1]["wall_s"] + attempts[-1]["median_s"]  # twice the tokens take at least twice as long
        length *= 2
    return attempts


def read_arguments() -> argparse.Namespace:
    """Reads the command line, and ends the process with a sentence if it cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--contenders", nargs="+", default=[], help="names of training.py, one after another")
    parser.add_argument("--hf-burst", metavar="NAME=VALUE,...", action="append", default=[], help="as in training.py")
    parser.add_argument("--processes", type=int, default=1, help="GPUs that share a sequence")
    parser.add_argument("--shortest", type=int, default=65536, help="tokens of the first sequence")
    parser.add_argument("--longest", type=int, default=2**20, help="tokens of the last one")
    parser.add_argument("--attempt-seconds", type=float, default=300.0, help="limit of one attempt")
    parser.add_argument("--seconds", type=float, default=540.0, help="limit of all of them")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    arguments, rest = parser.parse_known_args()
    arguments.rest = rest
    if not arguments.contenders and not arguments.hf_burst:
        arguments.hf_burst = ["default"]
    if "--check-length" not in arguments.rest:
        arguments.rest += ["--check-length", str(min(arguments.shortest, 8192))]
    return arguments


def main() -> int:
    arguments = read_arguments()
    choices = {name: ["--contenders", name] for name in arguments.contenders}
    choices |= {f"hf_burst, {text.replace(',', ', ')}": ["--hf-burst", text] for text in arguments.hf_burst}
    result: dict[str, Any] = {"command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), "results": []}
    begin = time.perf_counter()
    for name, choice in choices.items():
        attempts = climb(choice, arguments, begin)
        for tried in attempts:
            common = tried.pop("common", {})
            result |= {key: value for key, value in common.items() if value is not None}
            seconds = f"{tried['median_s']:.2f} s, {tried['peak_memory_gib']:.1f} GiB" if "median_s" in tried else ""
            print(
                f"{name}, {tried['length']} tokens: {tried['ended']} {seconds or tried.get('reason', '')}", flush=True
            )
        steps = [tried["length"] for tried in attempts if tried["ended"] == "step"]
        result["results"].append({"contender": name, "longest": max(steps, default=0), "attempts": attempts})
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if any(row["longest"] for row in result["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
