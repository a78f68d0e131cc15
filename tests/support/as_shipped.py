"""Runs what recipes/configs ships for GPUs: two steps of each distinct combination of recipe, dtype, adapters, bits,
kind of model, rows and wrapping, with a small random model of the same kind in the place of its own.

    python -m tests.support.as_shipped --processes 2 --out outputs/as_shipped.json
    python -m tests.support.as_shipped --processes 2 --only 'grpo_*' 'accelerate_*' --out outputs/as_shipped.json
    ACCELERATE_USE_CPU=1 python -m tests.support.as_shipped --out outputs/as_shipped.json

The launch line in the comment of a file says its recipe and wrapping. Lines for one process run in one, the others in
`--processes`. Every recipe is launched as users launch it. The model that comes out is loaded by plain Transformers;
that of the first adapters of a recipe is also evaluated and asked. `--out` is written after each combination, and holds
the rows of earlier calls, of combinations that are still shipped and were not run again; each row says where and with
what it ran. Beside it lies the log of all processes.
"""

import argparse
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes/configs"
Row = dict[str, Any]
KINDS = {  # of the models that the files name
    **dict.fromkeys(("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "outputs/smollm2"), "llama"),
    **dict.fromkeys(("meta-llama/Meta-Llama-3-8B", "TinyLlama/TinyLlama_v1.1"), "llama"),
    **dict.fromkeys(("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-9B-Base"), "qwen3_5"),
    **dict.fromkeys(("Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-32B"), "qwen3"),
    "ibm-granite/granite-4.0-h-tiny": "granitemoehybrid",
    **{"google/gemma-3-12b-it": "gemma3", "google/gemma-4-12B": "gemma4"},
    **dict.fromkeys(("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Coder-30B-A3B-Instruct"), "qwen3_moe"),
}
ALIKE = (  # patterns of settings whose value makes no other combination
    *("*dataset", "eval_share", "output_dir", "report_to", "seed", "burst_size", "logging_steps", "max_*", "save_*"),
    *("num_*", "learning_rate", "lr_*", "warmup_steps", "weight_decay", "gradient_accumulation_steps", "lora_alpha"),
    *("lora_r", "lengths", "depths", "samples", "windows", "batch_size"),
)
ROWS = {"finetune_long_document": "text", "extend_context": "text", "evaluate": "none"}
ROWS |= {"dpo": "pairs", "reward": "pairs", "grpo": "prompts"}
STAND_IN = "sft_4gpu.yaml"  # for wrappings whose file names a script of the user's own
FULL = {"use_peft": "false", "dtype": "float32"}
WRAPPINGS = {"2_hosts": "ddp", "2_hosts_fsdp2": "hsdp"}  # of accelerate's files; the others are their own names
LENGTH = 512  # tokens of a sequence, and positions of the small models


@dataclass(frozen=True)
class Run:
    """A launch line of a file: what is trained or evaluated, and how."""

    file: str  # which has the line
    recipe: str
    config: str
    wrapping: str  # none, ddp, fsdp2, hsdp, zero2, zero3
    groups: bool  # whether there are several groups of processes
    rows: str
    model: str
    settings: dict[str, Any]  # those that make a combination
    more: dict[str, str]  # on its command line

    @property
    def combination(self) -> str:
        return combination({**asdict(self), "shipped": self.wrapping})


def combination(row: Row) -> str:
    """What makes a row another one: all but the names of files, and how it ran."""
    own = {name: row.get(name) for name in ("recipe", "shipped", "groups", "rows", "model", "settings")}
    return json.dumps(own, sort_keys=True)


def launches(file: Path) -> Iterator[Run]:
    """The launch lines for GPUs in the comment of a file. Of variables before them `HF_BURST_SIZE` counts."""
    text = re.sub(r"\\\n#\s*", "", file.read_text())
    for variables, line in re.findall(r"^#  +((?:\w+=\S* +)*)accelerate launch (.+)", text, re.MULTILINE):
        launcher, script, behind = re.split(r"(?:recipes/)?(\w+)\.py", line, maxsplit=1)
        told, given = (
            {name.lstrip("-"): value for name, value in pairwise(shlex.split(words)) if name.startswith("--")}
            for words in (launcher, behind)
        )
        accelerate = Path(told.get("config_file", "accelerate_ddp")).stem.removeprefix("accelerate_")
        own = {} if script != "train" else FULL
        config = Path(given.pop("config", STAND_IN)).name
        more = own | {name: value for name, value in given.items() if name not in ("dataset", "output_dir", "merge_to")}
        sizes = dict(re.findall(r"(HF_BURST_SIZE)=(\d+)", variables))
        values = {"burst_size": sizes.get("HF_BURST_SIZE"), **yaml.safe_load((CONFIGS / config).read_text()), **more}
        count = int(told.get("num_processes") or yaml.safe_load(file.read_text())["num_processes"])
        recipe = STAND_IN.partition("_")[0] if script == "train" else script
        if values["model_name_or_path"] not in KINDS:
            raise SystemExit(
                f"{config}: as_shipped.py has no small model of the kind of {values['model_name_or_path']}."
            )
        rows = "images" if "_images" in config else "questions" if "group_rows" in values else "chats"
        yield Run(
            file.name,
            recipe,
            config,
            wrapping="none" if count == 1 else WRAPPINGS.get(accelerate, accelerate),
            groups=count > int(values["burst_size"] or count),
            rows=ROWS.get(recipe, rows),
            model=KINDS[values.pop("model_name_or_path")],
            settings={name: value for name, value in values.items() if not any(fnmatch(name, one) for one in ALIKE)},
            more=more,
        )


def combinations() -> list[tuple[Run, list[str]]]:
    """A run of each combination, with the files that it stands for: all in recipes/configs but those for CPUs."""
    found: dict[str, tuple[Run, list[str]]] = {}
    for file in sorted(CONFIGS.glob("*.yaml")):
        if file.stem.endswith("_cpu") or file.stem == "accelerate_2_processes":
            continue
        lines = list(launches(file))
        if not lines:
            raise SystemExit(f"{file.name} has no launch line in its comment, by which as_shipped.py would run it.")
        for run in lines:
            found.setdefault(run.combination, (run, []))[1].append(file.name)
    return list(found.values())


def command(run: Run, inputs: Path, output: Path, processes: int) -> list[str]:
    """The command line of a recipe: its file as it is, and what makes it small."""
    small: dict[str, Any] = {**run.more, "model_name_or_path": inputs / run.model, "output_dir": output}
    if run.recipe == "evaluate":
        small |= {"lengths": "512", "depths": 2, "samples": 1, "windows": 2}
        small |= {"ruler": "none"} if find_spec("lm_eval") is None else {}
    else:
        values = yaml.safe_load((CONFIGS / run.config).read_text())
        small |= {"dataset": inputs / f"{run.rows}.jsonl", "max_steps": 2, "save_steps": 1, "warmup_steps": 0}
        small |= {"max_length": LENGTH, "logging_steps": 1, "report_to": "none", "disable_tqdm": "true"}
        small |= {"gradient_accumulation_steps": min(2, values.get("gradient_accumulation_steps", 1))}
        small |= {"eval_dataset": inputs / "text.jsonl"} if "eval_dataset" in values else {}
        small |= {"eval_share": 0.2} if "eval_share" in values else {}
        small |= {"merge_to": output.with_name(f"{output.name}_merged")} if is_adapter(run) else {}
        small |= {"max_completion_length": 8} if run.recipe == "grpo" else {}
        small |= {"max_length": 2 * LENGTH, "windows": 2} if run.recipe == "extend_context" else {}
        grouped = run.groups or "burst_size" in {**values, **run.more}
        small |= {"burst_size": max(1, processes // (1 + run.groups))} if grouped else {}
    words = (word for name, value in small.items() for word in (f"--{name}", *str(value).split()))
    return ["--config", str(CONFIGS / run.config), *words]


def is_adapter(run: Run) -> bool:
    return str(run.settings.get("use_peft")).lower() == "true"


def work(kind: str, recipe: str, words: list[str]) -> None:
    """What each launched process does: runs a recipe, with a processor of images for a small model of this kind."""
    sys.path[:1] = [str(ROOT), str(ROOT / "recipes")]  # the recipes' modules, and not those beside this file
    import beginning  # noqa: F401 (before torch)

    from tests.support import shipped_inputs

    sys.argv = [f"{recipe}.py", *words]
    with shipped_inputs.processors(kind):
        runpy.run_path(str(ROOT / f"recipes/{recipe}.py"), run_name="__main__")


def launched(wrapping: str, processes: int, kind: str, recipe: str, words: list[str]) -> list[str]:
    """The command that launches a recipe."""
    launcher = ["--num_processes", str(processes), "--main_process_port", "0"]
    if wrapping == "ddp":
        launcher += ["--config_file", str(CONFIGS / "accelerate_2_processes.yaml")]
    elif wrapping == "none":
        launcher += ["--cpu"] if os.environ.get("ACCELERATE_USE_CPU") else []  # which this launcher overrules
    else:
        launcher += ["--config_file", str(CONFIGS / f"accelerate_{wrapping.replace('hsdp', 'fsdp2')}.yaml")]
    return [sys.executable, "-m", "accelerate.commands.launch", *launcher, __file__, "work", kind, recipe, *words]


def started(command: list[str], wrapping: str, log: Path, limit: float) -> None:
    """Runs a command until it ends.

    Raises:
        RuntimeError: If it fails, or takes longer than `limit` seconds.
    """
    own = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}
    own |= {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"} if wrapping == "hsdp" else {}
    environment = {"OMP_NUM_THREADS": "1" if os.environ.get("ACCELERATE_USE_CPU") else "8", **os.environ, **own}
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"longer than {limit:.0f} s") from None
    finally:
        process.terminate()  # torch's launcher ends its processes, which are in sessions of their own
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if status:
        raise RuntimeError(f"it ended by {status}; see the log")


def steps(
    run: Run, folder: Path, name: str, wrapping: str, processes: int, follow: bool, limit: float
) -> Iterator[str]:
    """Runs a combination, and yields the name of each part when it is done.

    Raises:
        RuntimeError: If a part fails.
    """
    from tests.support import shipped_inputs

    inputs, output = folder / "inputs", folder / name

    def launch(recipe: str, *words: str) -> None:
        started(launched(wrapping, processes, run.model, recipe, list(words)), wrapping, folder / "log", limit)

    launch(run.recipe, *command(run, inputs, output, processes))
    if run.recipe == "evaluate":
        yield "evaluate"
        return
    yield "train"
    if is_adapter(run):
        yield "merge"
    shipped_inputs.load(output.with_name(f"{output.name}_merged") if is_adapter(run) else output)
    yield "load"
    if follow and run.recipe != "reward":
        small = ("--lengths", "512", "--depths", "2", "--samples", "1", "--windows", "1", "--ruler", "none")
        evaluation = ("--config", str(CONFIGS / "evaluate_1gpu.yaml"), *small, "--output_dir", f"{output}_evaluated")
        launch("evaluate", *evaluation, "--model_name_or_path", str(output))
        yield "evaluate"
        launch("ask", str(output), str(inputs / "texts"), "--questions", str(inputs / "questions.txt"), "--tokens", "4")
        yield "ask"


def ran(run: Run, *given: Any) -> Row:
    """What became of a combination."""
    start, done = time.perf_counter(), list[str]()
    try:
        for step in steps(run, *given):
            done.append(step)
    except Exception as problem:  # of processes, or of the model that is loaded
        return {"status": "failed", "steps": done, "reason": str(problem) or type(problem).__name__}
    return {"status": "ok", "steps": done, "seconds": round(time.perf_counter() - start, 1)}


def positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no number of processes; give at least 1")
    return int(word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--processes", type=positive, default=2, help="of the lines for several GPUs")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names of files, such as 'sft_*'")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that one launch may take")
    parser.add_argument("--commit", help="where the checkout has none")
    parser.add_argument("--out", type=Path, default=Path("outputs/as_shipped.json"))
    args = parser.parse_args()
    every = combinations()
    chosen = [
        at for at, (_, files) in enumerate(every) if any(fnmatch(file, one) for file in files for one in args.only)
    ]
    if not chosen:
        raise SystemExit(f"--only is {args.only}; no file of {CONFIGS} has such a name.")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    plain = [at for at in chosen if is_adapter(every[at][0]) and every[at][0].model == "llama"]
    followed = {every[at][0].recipe: at for at in reversed(plain)}
    held = json.loads(args.out.read_text())["results"] if args.out.exists() else []
    held = [row for row in held if combination(row) in [run.combination for run, _ in every]]
    sys.path[:0] = [str(ROOT / "recipes")]
    from tests.support import shipped_inputs

    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shipped_inputs.make(folder / "inputs")
        for at in chosen:
            run, files = every[at]
            alone = args.processes == 1 or run.wrapping == "none"
            wrapping, processes = ("none", 1) if alone else (run.wrapping, args.processes)
            missing = wrapping.startswith("zero") and find_spec("deepspeed") is None
            reason = (
                "needs deepspeed" if missing else "needs 4 processes" if wrapping == "hsdp" and processes < 4 else ""
            )
            own = {name: value for name, value in asdict(run).items() if name not in ("file", "more")}
            row = {"files": files, **own, "wrapping": wrapping, "shipped": run.wrapping, "processes": processes}
            if reason:
                row |= {"status": "not run", "reason": reason}
            else:
                row |= ran(run, folder, str(at), wrapping, processes, at in followed.values(), args.limit)
                row |= shipped_inputs.machine(processes, args.commit)
            same = [(combination(other), other["processes"]) == (run.combination, processes) for other in held]
            held = [other for other, old in zip(held, same, strict=True) if not old] + [row]
            failed |= row["status"] == "failed"
            write(args.out, folder / "log", held)
            said = f"{row['status']:>8} {row.get('seconds', ''):>6}  {processes} x {wrapping:<6} {run.recipe:<23}"
            print(f"{said} {run.model:<17} {', '.join(files)} {row.get('reason') or ''}", flush=True)
    sys.exit(failed)


def write(out: Path, log: Path, rows: list[Row]) -> None:
    """Writes the result, and the log beside it."""
    result: Row = {"command": shlex.join(["as_shipped.py", *sys.argv[1:]])}
    result |= {"schema": 1, "results": rows}  # provenance.SCHEMA_VERSION, whose module imports torch
    out.write_text(json.dumps(result, indent=1) + "\n")
    if log.exists():
        out.with_suffix(".log").write_bytes(log.read_bytes())


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()
