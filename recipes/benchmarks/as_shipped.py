"""Runs what recipes/configs ships for GPUs: two steps of each distinct combination of recipe, dtype, adapters, bits,
kind of model, rows and wrapping, with a small random model of the same kind in the place of its own.

    python recipes/benchmarks/as_shipped.py --processes 2 --out outputs/as_shipped.json
    python recipes/benchmarks/as_shipped.py --processes 2 --only 'grpo_*' 'accelerate_*' --out outputs/as_shipped.json
    ACCELERATE_USE_CPU=1 python recipes/benchmarks/as_shipped.py --out outputs/as_shipped.json

The launch line in the comment of a file says its recipe and wrapping. Lines for one process run in one, the others in
`--processes`. The model that comes out is loaded by plain Transformers; that of the first adapters of a recipe is also
evaluated and asked. One launched job runs all combinations of a wrapping. After a failure, or where a combination took
longer than `--limit` seconds, a new job goes on behind it. `--out` is written after each combination, and holds the
rows of earlier calls, of combinations that are still shipped and were not run again; each row says where and with what
it ran. Beside it lies the log of all jobs.
"""

import argparse
import gc
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
import traceback
from collections.abc import Iterator, Sequence
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
    "Qwen/Qwen3-0.6B-Base": "qwen3",
    "ibm-granite/granite-4.0-h-tiny": "granitemoehybrid",
    "google/gemma-3-12b-it": "gemma3",
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
START_S = 300.0  # imports and models may take


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


def work(folder: Path, numbers: Sequence[int], followed: Sequence[int]) -> None:
    """What each process of a job does: makes the inputs, or waits for them, and runs the combinations of these numbers.
    The first failure ends it."""
    sys.path[:1] = [str(ROOT), str(ROOT / "recipes")]  # the recipes' modules, and not those of benchmarks
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)  # by which all ranks but one would end without a sentence
    import beginning  # noqa: F401 (before torch)
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from benchmarks import shipped_inputs

    Accelerator.end_training = lambda self: None  # type: ignore[method-assign]  # the job's processes stay joined
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank == 0 and not (folder / "inputs").exists():
        shipped_inputs.make(folder / "new")
        (folder / "new").rename(folder / "inputs")
    while not (folder / "inputs").exists():
        time.sleep(0.1)

    def note(number: int, status: str, **more: Any) -> None:
        with (folder / "events").open("a") as file:
            file.write(json.dumps({"run": number, "status": status, **more}) + "\n")

    if rank == 0:
        (folder / f"machine_{size}.json").write_text(json.dumps(shipped_inputs.machine(size)))
    runs = [run for run, _ in combinations()]
    for number in numbers:
        start, done = time.perf_counter(), list[str]()
        if rank == 0:
            note(number, "begun")
        try:
            for step in steps(runs[number], folder, f"{number}_{size}", size, number in followed):
                done.append(step)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            kind = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: "
            note(number, "failed", steps=done, reason=f"{kind}{error}"[:600])
            sys.stderr.flush()
            os._exit(1)
        if rank == 0:
            note(number, "ok", steps=done, seconds=round(time.perf_counter() - start, 1))
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        gc.collect()
        torch.cuda.empty_cache()


def steps(run: Run, folder: Path, name: str, size: int, follow: bool) -> Iterator[str]:
    """Runs a combination, and yields the name of each part when it is done."""
    import torch
    import torch.distributed as dist
    from benchmarks.shipped_inputs import load, processors

    def script(recipe: str, *arguments: str) -> None:
        sys.argv = [f"{recipe}.py", *arguments]
        runpy.run_path(str(ROOT / f"recipes/{recipe}.py"), run_name="__main__")
        if dist.is_initialized():  # the first rank writes longer than the others
            dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)

    inputs, output = folder / "inputs", folder / name
    with processors(run.model):
        script(run.recipe, *command(run, inputs, output, size))
    if run.recipe == "evaluate":
        yield "evaluate"
        return
    yield "train"
    model = output.with_name(f"{output.name}_merged") if is_adapter(run) else output
    if is_adapter(run):
        yield "merge"
    load(model)
    yield "load"
    if follow and run.recipe != "reward":
        small = ("--lengths", "512", "--depths", "2", "--samples", "1", "--windows", "1", "--ruler", "none")
        evaluation = ("--config", str(CONFIGS / "evaluate_1gpu.yaml"), *small, "--output_dir", f"{output}_evaluated")
        script("evaluate", *evaluation, "--model_name_or_path", str(output))
        yield "evaluate"
        script("ask", str(model), str(inputs / "texts"), "--questions", str(inputs / "questions.txt"), "--tokens", "4")
        yield "ask"


def job(wrapping: str, processes: int, folder: Path, numbers: Sequence[int], followed: Sequence[int]) -> list[str]:
    """The command that launches a job."""
    launcher = ["--num_processes", str(processes), "--main_process_port", "0"]
    if wrapping == "ddp":
        launcher += ["--config_file", str(CONFIGS / "accelerate_2_processes.yaml")]
    elif wrapping == "none":
        launcher += ["--cpu"] if os.environ.get("ACCELERATE_USE_CPU") else []  # which this launcher overrules
    else:
        launcher += ["--config_file", str(CONFIGS / f"accelerate_{wrapping.replace('hsdp', 'fsdp2')}.yaml")]
    chosen = ["--work", str(folder), "--these", *map(str, numbers), "--followed", *map(str, followed)]
    return [sys.executable, "-m", "accelerate.commands.launch", *launcher, __file__, *chosen]


def finish(
    wrapping: str, processes: int, folder: Path, left: list[int], followed: set[int], limit: float
) -> Iterator[Row]:
    """Runs combinations in as few jobs as their failures allow; yields what became of each."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
    }
    environment |= {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"} if wrapping == "hsdp" else {}
    environment.setdefault("OMP_NUM_THREADS", "1" if os.environ.get("ACCELERATE_USE_CPU") else "8")
    while left:
        (folder / "events").write_text("")
        with (folder / "log").open("ab") as log:
            given = job(wrapping, processes, folder, left, sorted(followed & set(left)))
            started = subprocess.Popen(given, env=environment, stdout=log, stderr=log, start_new_session=True)
        seen, changed, current, ended, late = 0, time.monotonic(), left[0], False, False
        try:
            while not ended and not late:
                time.sleep(0.2)
                ended, text = started.poll() is not None, (folder / "events").read_text()
                for event in map(json.loads, text[: text.rfind("\n") + 1].splitlines()[seen:]):
                    seen, changed, current = seen + 1, time.monotonic(), event.pop("run")
                    if event["status"] != "begun" and current in left:
                        left.remove(current)
                        yield {"run": current, **event}
                late = time.monotonic() - changed > (limit if seen else START_S)
        finally:
            started.terminate()  # torch's launcher ends its processes, which are in sessions of their own
            with suppress(subprocess.TimeoutExpired):
                started.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
        reason = f"longer than {limit:.0f} s" if late else f"the job ended by {started.returncode}; see the log"
        for number in [current] if seen and current in left else [] if seen else list(left):
            left.remove(number)
            yield {"run": number, "status": "failed", "reason": reason}


def positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no number of processes; give at least 1")
    return int(word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--processes", type=positive, default=2, help="of the lines for several GPUs")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names of files, such as 'sft_*'")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that a combination may take")
    parser.add_argument("--commit", help="where the checkout has none")
    parser.add_argument("--out", type=Path, default=Path("outputs/as_shipped.json"))
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    for name in ("--these", "--followed"):
        parser.add_argument(name, type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        return work(args.work, args.these, args.followed)
    every = combinations()
    chosen = [
        at for at, (_, files) in enumerate(every) if any(fnmatch(file, one) for file in files for one in args.only)
    ]
    if not chosen:
        raise SystemExit(f"--only is {args.only}; no file of {CONFIGS} has such a name.")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    plain = [at for at in chosen if is_adapter(every[at][0]) and every[at][0].model == "llama"]
    followed = {every[at][0].recipe: at for at in reversed(plain)}
    jobs: dict[tuple[str, int], list[int]] = {}
    for at in chosen:
        alone = args.processes == 1 or every[at][0].wrapping == "none"
        jobs.setdefault(("none", 1) if alone else (every[at][0].wrapping, args.processes), []).append(at)
    held = json.loads(args.out.read_text())["results"] if args.out.exists() else []
    if left := sum("shipped" not in row for row in held):
        print(f"{args.out}: {left} rows of an earlier format do not say what is shipped, and are left out.")
    held = [row for row in held if combination(row) in [run.combination for run, _ in every]]
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for (wrapping, processes), numbers in jobs.items():
            missing = wrapping.startswith("zero") and find_spec("deepspeed") is None
            reason = (
                "needs deepspeed" if missing else "needs 4 processes" if wrapping == "hsdp" and processes < 4 else ""
            )
            skipped = [{"run": at, "status": "not run", "reason": reason} for at in numbers]
            ran = finish(wrapping, processes, folder, numbers, set(followed.values()), args.limit)
            for result in skipped if reason else ran:
                run, files = every[result.pop("run")]
                own = {name: value for name, value in asdict(run).items() if name not in ("file", "more")}
                own |= {"wrapping": wrapping, "shipped": run.wrapping, "processes": processes}
                row = {"files": files, **own, **result, **({} if reason else provenance(args, folder, processes))}
                same = [(combination(other), other["processes"]) == (run.combination, processes) for other in held]
                held = [other for other, old in zip(held, same, strict=True) if not old] + [row]
                failed |= row["status"] == "failed"
                write(args, folder, held)
                said = f"{row['status']:>8} {row.get('seconds', ''):>6}  {processes} x {wrapping:<6} {run.recipe:<23}"
                print(f"{said} {run.model:<17} {', '.join(files)} {row.get('reason') or ''}", flush=True)
    sys.exit(failed)


def provenance(args: argparse.Namespace, folder: Path, processes: int) -> Row:
    """Where and with what a row ran; nothing is known where no job of so many processes began."""
    machine = folder / f"machine_{processes}.json"
    known = json.loads(machine.read_text()) if machine.exists() else {"hardware": None, "versions": None}
    return {**known, "git_commit": args.commit or known.get("git_commit")}


def write(args: argparse.Namespace, folder: Path, rows: list[Row]) -> None:
    """Writes the result, and the log beside it."""
    result: Row = {"command": shlex.join(["as_shipped.py", *sys.argv[1:]])}
    result |= {"schema": 1, "results": rows}  # provenance.SCHEMA_VERSION, whose module imports torch
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if (folder / "log").exists():
        args.out.with_suffix(".log").write_bytes((folder / "log").read_bytes())


if __name__ == "__main__":
    main()
