"""Runs the doors of hf_burst, by which users come in (training, packed rows, answers, GRPO), under other versions of
torch, Transformers and TRL: two processes over gloo beside one that is not patched and holds whole sequences, on tiny
models that need no download.

    python -m tests.support.versions oldest tested newest --write               # each in an environment that it makes
    python -m tests.support.versions --torch 2.13.0 --transformers 5.24.0       # of versions of your own
    python -m tests.support.versions --python /path/to/bin/python --doors GRPO  # in an environment that exists

`oldest` and `tested` are the extras `oldest` and `test` of setup.cfg, the latter with the torch of CONTRIBUTING.md, and
`newest` what pip takes for `.[trl]` today. Each environment takes several GB for its time, in a temporary folder.
`--write` writes recipes/results/versions.json and versions.md after each environment. What did not run this time stays
there: other environments, and other doors of one whose versions are the same.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from configparser import ConfigParser
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT, PAGE = (ROOT / "recipes/results" / f"versions.{kind}" for kind in ("json", "md"))
EXTRAS = {"oldest": "oldest", "tested": "test"}
NEEDED = ("torch", "transformers", "accelerate", "trl", "peft", "datasets")
LIMIT = 600  # seconds of a door
VERSIONS = (
    "import json, sys; from importlib.metadata import version; print(json.dumps({n: version(n) for n in sys.argv[1:]}))"
)
TOLERANCE = 1e-6  # of losses and weights in fp64, which logs round


def make_model(patched: bool) -> Any:
    """A tiny Llama in fp64, the same in every process, that knows the tokens of `byte_tokenizer`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_burst

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=260, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1, **heads)
    model = LlamaForCausalLM(config).double()
    return hf_burst.patch_model(model) if patched else model


def learned(kind: str, rows: Any, patched: bool, more: dict[str, Any], **given: Any) -> list[float]:
    """Losses and norms of weights after three steps of a trainer of Transformers or TRL."""
    import transformers
    import trl
    from datasets import Dataset

    import hf_burst
    from recipes.byte_tokenizer import byte_tokenizer

    settings = {"max_steps": 3, "use_cpu": True, "bf16": False, "logging_steps": 1, "save_strategy": "no"}
    settings |= {"report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2, "per_device_train_batch_size": 2}
    if patched:
        settings["parallelism_config"] = hf_burst.BurstParallelismConfig(burst_size=2)
    make, config = transformers.Trainer, transformers.TrainingArguments
    if kind != "Trainer":
        make, config = getattr(trl, kind), getattr(trl, kind.replace("Trainer", "Config"))
        given["processing_class"] = byte_tokenizer()
    else:
        given["data_collator"] = transformers.default_data_collator
    with TemporaryDirectory() as folder:
        args = config(output_dir=folder, **settings, **more)
        trainer = make(make_model(patched), args=args, train_dataset=Dataset.from_list(rows), **given)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses + [float(weight.norm()) for weight in trainer.model.parameters()]


def train(patched: bool) -> list[float]:
    rows = [[4 + (place * (row + 3)) % 256 for place in range(37)] for row in range(6)]
    return learned("Trainer", [{"input_ids": row, "labels": row} for row in rows], patched, {})


def prefer(patched: bool) -> list[float]:
    rows = [{"prompt": "a" * (5 + size), "chosen": "bcd" * size, "rejected": "e"} for size in range(1, 7)]
    return learned("DPOTrainer", rows, patched, {"max_length": 64}, ref_model=make_model(patched))


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(completion.encode()) % 17) for completion in completions]


def reinforce(patched: bool) -> list[float]:
    rows = [{"prompt": "ab" * size} for size in range(3, 9)]
    return learned(
        "GRPOTrainer", rows, patched, {"num_generations": 2, "max_completion_length": 6}, reward_funcs=reward
    )


def generate(patched: bool) -> list[float]:
    """Tokens behind a prompt, and behind a text that is remembered."""
    import torch

    import hf_burst

    ids = torch.randint(4, 260, (1, 45), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model = make_model(patched).eval()
    if not patched:
        whole = model.generate(ids, **options)[0, 38:]
        return [float(token) for token in (*whole, *whole)]
    whole = hf_burst.generate(model, input_ids=ids, **options)[0, 38:]
    read = hf_burst.remember(model, ids[:, :38])
    asked = hf_burst.generate(model, input_ids=ids[:, 38:], document=read, **options)[0]
    return [float(token) for token in (*whole, *asked)]


def compared(name: str, kind: str | None, patched: bool) -> list[float]:
    """The errors of a class, as the tables of coverage have them, whose comparisons run on all processes."""
    from hf_burst.check.compare import compare
    from tests.support.image_verdicts import compare_images
    from tests.support.tiny_models import tiny_model

    if not patched:
        return []
    verdict = compare_images(name) if kind == "images" else compare(partial(tiny_model, name))
    if verdict.result != "exact":
        raise RuntimeError(f"{name} is {verdict.result}: {verdict.errors} {verdict.note}")
    return [verdict.errors[kind]] if kind in verdict.errors else list(verdict.errors.values())


DOORS: dict[str, Callable[[bool], list[float]]] = {
    "train": train,
    "packed": partial(compared, "LlamaForCausalLM", "packed"),
    "generate": generate,
    "GRPO": reinforce,
    "images": partial(compared, "Qwen2_5_VLForConditionalGeneration", "images"),
    "hybrid": partial(compared, "Qwen3_5ForCausalLM", None),
    "DPO": prefer,
}


def joined(door: str) -> list[float]:
    """A door on a process of two, which are joined already."""
    import torch.distributed as dist

    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}  # as launchers say it
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "MASTER_ADDR": "127.0.0.1"}
    return DOORS[door](True)


def open_door(door: str) -> None:
    """Prints the greatest error of a door."""
    from hf_burst.check.ranks import run_on_ranks

    found = run_on_ranks(joined, door, limit=LIMIT)
    pairs = zip(found, DOORS[door](False) or [0.0] * len(found), strict=True)
    error = max(abs(one - other) / max(abs(other), 1.0) for one, other in pairs)
    print(json.dumps({"error": error}))


def install(folder: Path, packages: Sequence[str]) -> Path:
    """A new environment with these packages, and this checkout; its interpreter.

    Raises:
        subprocess.CalledProcessError: If pip finds no versions that fit, or the network or the disk fails.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *packages], cwd=ROOT, check=True)
    return python


def packages_of(preset: str) -> list[str]:
    """What pip is given for a preset."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pins = setup["options.extras_require"][EXTRAS[preset]].split("\n") if preset in EXTRAS else []
    pins += re.findall(r"torch==[\d.]+", (ROOT / "CONTRIBUTING.md").read_text())[:1] if preset == "tested" else []
    return [".[trl]", *(pin for pin in pins if pin.partition("==")[0] in NEEDED)]


def last_words(command: Sequence[str], limit: float = 2 * LIMIT) -> tuple[bool, str]:
    """Whether a command succeeded within `limit` seconds, and its last line: of stdout if so, else of stderr. Whatever
    happens, its processes have ended afterwards."""
    own = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=os.environ | own, **pipes) as process:  # type: ignore[call-overload]
        try:
            out, problem = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return False, f"no end within {limit:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
    well = process.returncode == 0
    lines = (out if well else problem).strip().splitlines()
    return well and bool(lines), lines[-1] if lines else f"no output; exit code {process.returncode}"


def run(python: Path, doors: Sequence[str]) -> dict[str, Any]:
    """The doors, each in a process of its own.

    Raises:
        RuntimeError: If the interpreter does not know the versions of what is needed.
    """
    from recipes.benchmarks.provenance import git_commit

    well, told = last_words([str(python), "-c", VERSIONS, *NEEDED])
    if not well:
        raise RuntimeError(f"{python} has not all of {', '.join(NEEDED)}: {told}")
    made: dict[str, Any] = {"versions": json.loads(told), "doors": {}}
    for door in doors:
        begun = time.monotonic()
        well, told = last_words([str(python), "-m", "tests.support.versions", "--door", door])
        error = json.loads(told)["error"] if well else None
        exact = error is not None and error <= TOLERANCE  # false for nan
        row = {"result": "exact" if exact else "wrong" if well else "fails", "error": error}
        row |= {"seconds": round(time.monotonic() - begun, 1), "said": "" if well else told[:300]}
        made["doors"][door] = row | {"date": str(date.today()), "git_commit": git_commit(ROOT)}
        print(door, row, flush=True)
    return made


def write(name: str, new: dict[str, Any], command: list[str]) -> None:
    """Puts an environment into the result, and writes its table."""
    known = json.loads(RESULT.read_text())["environments"] if RESULT.exists() else {}
    before = known.get(name, {"versions": None, "doors": {}})
    same = before["versions"] == new["versions"]
    known[name] = new | {"doors": (before["doors"] if same else {}) | new["doors"]}
    commit = next(reversed(new["doors"].values()))["git_commit"]  # each door has its own, of the call that ran it
    made = {"command": command, "git_commit": commit, "device": f"CPU, {os.cpu_count()} cores"}
    made |= {"versions": new["versions"], "environments": known}
    RESULT.write_text(json.dumps(made, indent=1) + "\n")
    lines = [
        "# The doors under other versions",
        "",
        "Made by `python -m tests.support.versions`; seconds include imports.",
        "",
    ]
    heads = ["environment", "date", *NEEDED[:4], *DOORS]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, each in known.items():
        doors = [each["doors"].get(door) for door in DOORS]
        cells = [f"{door['result']}, {door['seconds']:.0f} s" if door else "-" for door in doors]
        versions = [each["versions"].get(package, "-") for package in NEEDED[:4]]
        day = max(door["date"] for door in each["doors"].values())
        lines.append(f"| {' | '.join([name, day, *versions, *cells])} |")
    said = [(name, door, each["said"]) for name, one in known.items() for door, each in one["doors"].items()]
    lines += [f"\n{name}, {door}: {told}" for name, door, told in said if told]
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    presets = (*EXTRAS, "newest")
    parser.add_argument("presets", nargs="*", metavar="|".join(presets), help="which environments to make")
    for package in ("torch", "transformers", "trl"):
        parser.add_argument(f"--{package}", help="its version, in an environment that is made")
    parser.add_argument("--python", type=Path, help="the interpreter of an environment that exists")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS), help="(default all)")
    parser.add_argument("--write", action="store_true", help="write the result and its table")
    parser.add_argument("--door", choices=DOORS, help=argparse.SUPPRESS)  # in the environment
    given = parser.parse_args()
    if given.door:
        open_door(given.door)
        return 0
    if unknown := sorted({*given.presets} - {*presets}):
        parser.error(f"{', '.join(unknown)} is none of {', '.join(presets)}")
    if given.python and not (given.python.is_file() and os.access(given.python, os.X_OK)):
        parser.error(f"{given.python} is no interpreter that can be run")
    pins = [f"{name}=={version}" for name in NEEDED if (version := getattr(given, name, None))]
    wanted: dict[str, list[str] | None] = {preset: packages_of(preset) for preset in given.presets}
    wanted |= {" ".join(pins): [".[trl]", *pins]} if pins else {}
    wanted |= {"an environment that exists": None} if given.python else {}
    if not wanted:
        parser.error("name oldest, tested or newest, or versions, or --python")
    exact = True
    for name, packages in wanted.items():
        with TemporaryDirectory() as folder:
            try:
                made = run(given.python if packages is None else install(Path(folder), packages), given.doors)
            except (subprocess.CalledProcessError, RuntimeError) as problem:
                print(f"{name} did not run: {problem}", file=sys.stderr)
                exact = False
                continue
        exact &= all(door["result"] == "exact" for door in made["doors"].values())
        if given.write:
            write(name, made, [Path(sys.argv[0]).name, *sys.argv[1:]])
    return int(not exact)


if __name__ == "__main__":
    sys.exit(main())
