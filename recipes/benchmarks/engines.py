"""One training by several engines: losses, seconds and memory for the same rows, seed and first weights.

    bash recipes/benchmarks/engines.sh --model outputs/smollm2 --length 65536 --steps 60 --out outputs/engines.json
    python recipes/benchmarks/engines.py --table outputs/engines.json --picture outputs/engines.png

Every launch trains by TRL's `SFTTrainer` (ms-swift by its own) and adds a row to the file `--out`: loss and gradient
norm of every step, its seconds and peaks, or the error that ended all ranks. `ENGINES` has all that differs. Unsloth
and ms-swift draw their adapters themselves, so that losses differ from the second step on. `--table` compares rows.
"""

import argparse
import ast
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoTokenizer, set_seed

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from recipes.benchmarks.engine_setups import ENGINES, SEED
from recipes.benchmarks.fits import GIB, SHAPES, Measure, chosen_of, expandable_segments, one_gpu_each, quiet, run
from recipes.benchmarks.harness import Row, begin, file_to_write, options_of, rows_in, table, write
from recipes.benchmarks.ranks import Ranks
from recipes.byte_tokenizer import byte_tokenizer

# of agents' trajectories half have 40,000 tokens at most and 95 % have 75,000, in rows of 131,072 (NeMo Automodel 0.7)
MEDIAN, SPREAD = 40_000 / 131_072, math.log(75 / 40) / 1.645
ALIKE = ("model", "layers", "weights", "data", "unpacked", "length", "learning_rate")  # rows that are compared


def settings_of(arguments: argparse.Namespace, gpus: int) -> trl.SFTConfig:
    """The settings that all engines have, and those of one."""
    engine, cuda = ENGINES[arguments.engine], torch.cuda.is_available()
    offload = {"offload": True} if arguments.offload and arguments.engine != "hf_burst" else {}
    common = quiet(not cuda) | {
        "output_dir": arguments.folder,
        "max_steps": arguments.steps,
        "max_length": arguments.length,
        "packing": arguments.packed,
        "per_device_train_batch_size": 1,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing_kwargs": {"use_reentrant": False, **offload},
        "use_liger_kernel": cuda and not arguments.no_liger,
        "optim": "adamw_torch_fused",
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "constant",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "seed": SEED,
    }
    return one_gpu_each(trl.SFTConfig(**common | engine.settings(arguments, gpus)))


def rows_of(arguments: argparse.Namespace, vocabulary: int) -> Dataset:
    """Tokens and labels of rows: texts of `--length` tokens, or agents' trajectories, three for a packed row. Of every
    256th of a row, agents read three quarters and learn to write the last one."""
    count = arguments.steps * (3 if arguments.packed else 1)
    sizes = [arguments.length] * count
    if arguments.data == "agents":
        drawn = torch.randn(count, generator=torch.Generator().manual_seed(SEED))
        sizes = (arguments.length * MEDIAN * (SPREAD * drawn).exp()).clamp(max=arguments.length).int().tolist()
    tokens, span, rows = stream(arguments.model, sum(sizes), vocabulary), max(1, arguments.length // 1024), []
    for size in sizes:
        ids = [next(tokens) for _ in range(size)]
        agent = arguments.data == "agents"
        labels = [-100 if agent and place // span % 4 < 3 else token for place, token in enumerate(ids)]
        rows.append({"input_ids": ids, "labels": labels})
    return Dataset.from_list(rows)


def stream(model: str, count: int, vocabulary: int) -> Iterator[int]:
    """Tokens: of the sources of Python's library, again and again, or random ones for random weights."""
    if model in SHAPES:
        yield from torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(SEED)).tolist()
        return
    tokenizer = AutoTokenizer.from_pretrained(model)
    files = [file for file in sorted(Path(os.__file__).parent.rglob("*.py")) if "-packages" not in str(file)]
    while True:
        for file in files:
            yield from tokenizer(file.read_text(encoding="utf-8", errors="replace"), verbose=False)["input_ids"]


def make_trainer(arguments: argparse.Namespace, args: trl.SFTConfig, measure: Measure) -> Any:
    """TRL's trainer, as a script makes it."""
    engine, make_rows = ENGINES[arguments.engine], partial(rows_of, arguments)
    if engine.trainer is not None:
        return engine.trainer(arguments, measure, make_rows)
    model = engine.load(arguments)
    if engine.change is not None:
        engine.change(model, arguments)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    tokenizer = byte_tokenizer() if arguments.model in SHAPES else AutoTokenizer.from_pretrained(arguments.model)
    set_seed(SEED)  # of adapters
    return trl.SFTTrainer(
        model,
        args,
        train_dataset=make_rows(model.config.get_text_config().vocab_size),
        processing_class=tokenizer,
        peft_config=lora if arguments.weights == "lora" and not isinstance(model, PeftModel) else None,
        callbacks=[measure],
    )


def tell(trainer: Any, arguments: argparse.Namespace, ranks: Ranks) -> Row:
    """What was learnt, of which rows, and what the processes hold on the host in the end."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    ours, host = arguments.engine == "hf_burst", torch.cuda.host_memory_stats() if ranks.cuda else {}
    locked = host.get("reserved_bytes.peak", host.get("allocated_bytes.peak", 0))  # by torch, whose older name is last
    return {
        "distributed": trainer.accelerator.distributed_type.value,
        "chosen": chosen_of(trainer.accelerator.unwrap_model(trainer.model)) if ours else None,
        "losses": [entry["loss"] for entry in logged],
        "gradient_norms": [float(entry["grad_norm"]) for entry in logged],
        "tokens": [len(ids) for ids in trainer.train_dataset[: arguments.steps]["input_ids"]],
        "host_gib": sum(ranks.gather(psutil.Process().memory_info().rss / GIB)),
        "page_locked_gib": sum(ranks.gather(locked / GIB)),
    }


def compared(rows: Sequence[Row]) -> Iterator[tuple[str, Row, list[float], float | None]]:
    """Labels and rows; how far their losses are from those of one GPU, step by step, and the seconds of hf_burst, where
    these trained alike."""
    for row in rows:
        told = [row["engine"], *(name.replace("_", " ") for name in ("offload", "no_liger") if row[name])]
        told += [f"{name} {value}" for name, value in row["settings"].items()]
        told += ["DDP"] if row.get("distributed", "").startswith("MULTI") else []
        told += ["peft's adapters"] if row["adapters"] == "peft" else []
        same = [other for other in rows if other["hardware"]["device"] == row["hardware"]["device"]]
        alike = [other for other in same if other["status"] == "ok" and all(other[key] == row[key] for key in ALIKE)]
        alike.sort(
            key=lambda other: bool(other["offload"] or other["settings"])
        )  # the first plain row is compared with
        found = {other["engine"]: other for other in reversed(alike)}
        pairs = zip(row.get("losses", []), found.get("one-gpu", {}).get("losses", []), strict=False)
        ours = seconds_of(found["hf_burst"]) if "hf_burst" in found else None
        yield ", ".join(told), row, [abs(loss - other) for loss, other in pairs], ours


def seconds_of(row: Row) -> float:
    """Of the median step behind the warm-up."""
    return statistics.median(step["seconds"] for step in row["steps"][row["warmup"] :] or row["steps"])


def as_table(rows: Sequence[Row]) -> str:
    """A line for each row."""
    heads = ["engine", "s a step", "times hf_burst's", "GiB allocated", "GiB reserved", "host GiB"]
    lines = []
    for label, row, apart, ours in compared(rows):
        if row["status"] != "ok":
            lines.append([label, row["reason"].partition("\n")[0][:200]])
            continue
        cells = [f"{seconds_of(row):.3g}", f"{seconds_of(row) / ours:.2f}" if ours else "-"]
        for name in ("allocated_gib", "reserved_gib"):
            cells.append(f"{max(step.get(name, 0) for step in row['steps']):.1f}")
        off = [f"{value:.1e}" for value in (max(apart), statistics.mean(apart))] if apart else []
        lines.append([label, *cells, f"{row['host_gib']:.1f}", *off])
    return table([*heads, "loss off by, at most", "on average"], lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """The curves of losses, and below how far each is from that of one GPU."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    curves, apart = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for index, (label, row, far, _) in enumerate(compared(rows)):
        style = {"color": f"C{index}", "linestyle": ("-", "--", ":", "-.")[index % 4]}
        curves.plot(range(1, len(row.get("losses", [])) + 1), row.get("losses", []), label=label, **style)
        apart.plot(range(1, len(far) + 1), far, **style)
    curves.set(ylabel="loss")
    apart.set(xlabel="step", ylabel="from one GPU's")
    apart.set_yscale("symlog", linthresh=1e-6)
    curves.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def read_arguments() -> argparse.Namespace:
    parser = options_of(__doc__, timeout_s=None)
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--model", help=f"a folder, or random weights: {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, help="of random weights (default those of the shape)")
    parser.add_argument("--weights", choices=("lora", "all"), default="lora", help="(default %(default)s, of rank 16)")
    parser.add_argument("--data", choices=("text", "agents"), default="text", help="(default %(default)s)")
    parser.add_argument("--unpacked", action="store_true", help="one agent's trajectory a row")
    parser.add_argument("--length", type=int, default=65536, help="tokens of a row (default %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="(default %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps whose time does not count (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="(default %(default)s)")
    parser.add_argument("--offload", action="store_true", help="layers' inputs stay on the host")
    parser.add_argument("--no-liger", action="store_true", help="without Liger's kernels")
    parser.add_argument("--settings", type=ast.literal_eval, default={}, help="of BurstConfig, as a dictionary")
    parser.add_argument("--adapters", choices=("hf_burst", "peft"), default="hf_burst", help="who computes hf_burst's")
    parser.add_argument("--folder", default="outputs/engines", help="of the trainer")
    parser.add_argument("--table", nargs="+", type=Path, help="instead of training: the files to compare")
    parser.add_argument("--picture", type=file_to_write, help="where a picture of their losses goes")
    arguments = parser.parse_args()
    if not arguments.table and not (arguments.engine and arguments.model):
        parser.error("give --engine and --model, or --table")
    arguments.packed = arguments.data == "agents" and not arguments.unpacked  # by TRL
    return arguments


def main() -> None:
    """Trains and adds a row to the file, or compares the rows of files."""
    arguments, gpus = read_arguments(), int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.table:
        rows = [row for file in arguments.table for row in json.loads(file.read_text())]
        print(as_table(rows))
        if arguments.picture:
            draw(rows, arguments.picture)
        return
    args = settings_of(arguments, gpus)  # joins the processes
    told = ("engine", *ALIKE, "steps", "warmup", "offload", "no_liger", "settings", "adapters")
    ranks, row = begin(arguments, *told, device=args.device.type)
    row["expandable_segments"] = expandable_segments()
    row |= run(partial(make_trainer, arguments, args), partial(tell, arguments=arguments, ranks=ranks), ranks)
    write(arguments.out, [*rows_in(arguments.out), row], ranks)


if __name__ == "__main__":
    main()
