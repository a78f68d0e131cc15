"""What the recipes say: lengths of the documents, how the processes share them, and the log of a training."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import models
import numpy
import torch
from benchmarks.provenance import made_by
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import SaveStrategy
from trl import DPOTrainer, RewardTrainer

import hf_burst
from hf_burst.kernels import KernelRequest, explain_kernels

FEW = 10  # optimizer steps
MARKS = {"8K": 2**13, "32K": 2**15, "64K": 2**16, "128K": 2**17, "256K": 2**18, "1M": 2**20}


def retention(lengths: numpy.ndarray, longest: int | numpy.ndarray) -> tuple[Any, Any]:
    """Share of the documents that stay whole in sequences of `longest` tokens, and share of the tokens in them."""
    ordered = numpy.sort(lengths)
    whole = numpy.searchsorted(ordered, longest, side="right")
    tokens = numpy.concatenate([[0], numpy.cumsum(ordered)])
    return whole / len(ordered), tokens[whole] / tokens[-1]


def report_lengths(lengths: numpy.ndarray, max_length: int, folder: str, name: str = "documents") -> None:
    """Prints how long the documents are, and draws how many stay whole at each length."""
    middle, longest = int(median(lengths)), int(max(lengths))
    enough = next((mark for mark in MARKS.values() if mark >= longest), longest)
    marks = {label: mark for label, mark in MARKS.items() if mark <= enough}
    marks[f"max_length {max_length:,}"] = max_length
    print(f"{name}: {len(lengths):,}, tokens: {lengths.sum():,}; median {middle:,}, longest {longest:,}. Whole in")
    for label, mark in sorted(marks.items(), key=lambda item: item[1]):
        documents, tokens = retention(lengths, mark)
        print(f"  {label:>20}: {documents:6.1%} of {name}, {tokens:6.1%} of tokens")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    ends = min(*lengths, max_length), max(*lengths, max_length)
    points = numpy.geomspace(max(1, ends[0] / 2), ends[1] * 2, 500).astype(int)
    for share, label, style in zip(retention(lengths, points), (name, "tokens"), ("-", "--"), strict=True):
        axes.step(points, share, style, where="post", label=label)
    axes.axvline(max_length, color="black", linestyle=":", label=f"max_length {max_length:,}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of a sequence", ylabel="share that stays whole", ylim=(0, 1.04))
    axes.xaxis.set_major_formatter(lambda tokens, _: short(tokens))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_title(f"How much stays whole ({name}: {len(lengths):,})")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(Path(folder) / "lengths.png", dpi=120)


def short(tokens: float) -> str:
    """A length as people say it: 128K, but 1,500."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size:,.0f}{unit}"
    return f"{tokens:,.0f}"


def warn(training: TrainingArguments, warning: str | None) -> None:
    """Prints a warning once, if there is one."""
    if warning is not None and training.process_index == 0:
        print(f"WARNING: {warning}", file=sys.stderr)


class Bar(ProgressCallback):
    """Transformers' bar alone: the lines are those of `BurstCallback` and `Evaluations`."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Writes nothing."""


class Evaluations(TrainerCallback):
    """A line for each evaluation, and every so many seconds that it takes one of the time that is left."""

    def __init__(self, every: float = 60.0) -> None:
        self.every = every
        self.batches = 0
        self.began = self.told = 0.0

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Counts a batch; writes on one process."""
        if not state.is_world_process_zero:
            return
        now, count = perf_counter(), len(eval_dataloader)
        if self.batches == 0:  # its time is unknown
            self.began = self.told = now
        self.batches += 1
        if self.batches >= count:  # the next evaluation begins anew
            self.batches = 0
        elif now - self.told >= self.every:
            self.told = now
            each = (now - self.began) / (self.batches - 1)
            left = timedelta(seconds=round(each * (count - self.batches)))
            tqdm.write(f"evaluation: batch {self.batches:,} of {count:,}, {left} left")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Writes the evaluation loss, on one process."""
        if state.is_world_process_zero and "eval_loss" in (logs or {}):
            tqdm.write(f"step {state.global_step:,}: evaluation loss {logs['eval_loss']:.4g}")


class FewSteps(TrainerCallback):
    """Says that a training takes few steps where accumulation makes them few, and that none is saved on the way."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the lines, on one process."""
        batches, every = args.gradient_accumulation_steps, state.save_steps
        if not state.is_world_process_zero:
            return
        if args.max_steps <= 0 and state.max_steps < FEW and batches > 1:
            steps = f"{state.max_steps} step{'s' * (state.max_steps > 1)} of up to {batches} batches each"
            tqdm.write(f"The whole training has {steps}; gradient_accumulation_steps: 1 makes more steps of them.")
        goes_on = state.global_step < state.max_steps
        if args.save_strategy == SaveStrategy.STEPS and every >= state.max_steps > 1 and goes_on:
            steps = f"{state.max_steps:,} steps, and save_steps is {every:,}"
            fewer = f"save_steps: {-(-state.max_steps // 4)} saves on the way"
            tqdm.write(f"The whole training has {steps}: it is saved at its end alone, and {fewer}.")


def follow(trainer: Trainer) -> None:
    """One line for each log, with speed, memory and the time that is left; and a bar, if somebody watches."""
    bar = trainer.pop_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if bar is not None and sys.stderr.isatty():
        trainer.add_callback(Bar)
    trainer.add_callback(Evaluations)
    trainer.add_callback(FewSteps)
    trainer.add_callback(hf_burst.BurstCallback(trainer))  # its numbers are in every log
    trainer.accelerator.print(describe(trainer))


def describe(trainer: Trainer) -> str:
    """How the processes share the sequences, and what a step takes."""
    ranks, training = trainer.accelerator.num_processes, trainer.args
    size = training.parallelism_config.burst_size or ranks
    groups = ranks // size
    rows = training.per_device_train_batch_size * groups * training.gradient_accumulation_steps
    length = training.max_length
    if length is None:
        tokens = "of any length"
    else:
        together = f": at most {rows * length:,} tokens a step" * (rows > 1)
        tokens = f"of at most {length:,} tokens, {-(-length // size):,} a rank{together}"
    alone = ranks == 1 and training.use_cpu and "ACCELERATE_MIXED_PRECISION" in os.environ  # by accelerate launch
    hint = "; for several processes on a CPU take --config_file recipes/configs/accelerate_2_processes.yaml" * alone
    return (
        f"{ranks} rank{'s' * (ranks > 1)} in {groups} group{'s' * (groups > 1)} of {size}; a step takes {rows} "
        f"sequence{'s' * (rows > 1)} {tokens}{hint}"
    )


def kernels(trainer: Trainer) -> str:
    """Which kernels run, and what is missing for the published speed."""
    training, config = trainer.args, trainer.model.config.get_text_config()
    device, dtype = training.device, torch.bfloat16 if training.bf16 else torch.float32
    found = {}
    for layer in config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]:
        heads = getattr(layer, "num_attention_heads", None) or 1
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        request = KernelRequest(device.type, dtype, size, size)
        found[size] = next((kernel for kernel, refusal in explain_kernels(request) if refusal is None), "none")
    several = len(set(found.values())) > 1
    names = [f"{kernel} (heads of {size})" if several else kernel for size, kernel in sorted(found.items())]
    name = ", ".join(dict.fromkeys(names))
    if device.type != "cuda":
        return f"kernels: attention by {name}; published speeds are those of GPUs"
    liger = _liger(trainer.model.config.model_type) if training.use_liger_kernel else "the rest by torch"
    lacks = [] if training.use_liger_kernel else ["Liger"]
    if torch.cuda.get_device_capability(device) >= (9, 0) and "flash_attn_4" not in found.values():
        lacks.append("flash-attn 4")
    missing = f'; for the published speed {" and ".join(lacks)}: pip install ".[fast]" in a clone' if lacks else ""
    return f"kernels: attention by {name}, {liger}{missing}"


def _liger(kind: str) -> str:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

    return "norms and MLPs by Liger" if kind in KNOWN else f"the loss by Liger, which has no others for {kind}"


def next_steps(trainer: Trainer, trained: str) -> str:
    """What can be done with what was trained, and lies in a folder."""
    folder, rewards = Path(trained), isinstance(trainer, RewardTrainer)
    configs, processes = Path("recipes/configs"), trainer.args.world_size
    several = configs / f"evaluate_{processes}gpu.yaml"
    launch, config = "python", configs / f"evaluate_{'cpu' if trainer.args.use_cpu else '1gpu'}.yaml"
    if processes > 1 and not trainer.args.use_cpu and (Path(__file__).parents[1] / several).exists():
        launch, config = f"accelerate launch --multi_gpu --num_processes {processes}", several
    chats = Path(sys.argv[0]).name == "sft.py" or isinstance(trainer, DPOTrainer)
    measured = "--tasks none --documents CHATS.jsonl" if chats else "--tasks single --documents TEXTS/"
    evaluate = (
        f"evaluate it (minutes): {launch} recipes/evaluate.py --config {config} --model_name_or_path {folder} "
        f"--output_dir {folder}_evaluation --ruler none {measured}"
    )
    if (folder / "adapter_config.json").exists():
        merge = f"next: merge it: python recipes/merge_adapter.py {folder} {folder}_merged"
        return merge if rewards else f"{merge}; {evaluate}"
    reader = ", and its AutoProcessor" * (folder / "processor_config.json").exists()
    load = f"next: load it: {models.auto_class(trainer.model.config).__name__}.from_pretrained({str(folder)!r}){reader}"
    return load if rewards else f"{load}; {evaluate}"


def write_log(trainer: Trainer) -> None:
    """Writes the log, with what it was made by, and a picture of the loss beside the checkpoint; of what generates, in
    which the loss tells nothing, of the reward."""
    folder = Path(trainer.args.output_dir)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    name = "reward" if steps and "reward" in steps[-1] else "loss"
    evaluations = [entry for entry in trainer.state.log_history if f"eval_{name}" in entry]
    lines = ",\n  ".join(json.dumps(entry) for entry in steps)  # a line a step
    log = json.dumps({**made_by(trainer.accelerator.num_processes), "evaluations": evaluations, "steps": []}, indent=1)
    (folder / "training_log.json").write_text(log.replace('"steps": []', f'"steps": [\n  {lines}\n ]') + "\n")
    ends = evaluations if len(evaluations) < 2 else [evaluations[0], evaluations[-1]]
    values = " -> ".join(f"{entry[f'eval_{name}']:.3f}" for entry in ends)
    held_out = f"; evaluation {name} {values}" if values else ""
    if not steps:
        print(f"checkpoint in {folder}; no step was logged (logging_steps is {trainer.args.logging_steps}){held_out}")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for entries, key, style, label in (steps, name, ".-", "training"), (evaluations, f"eval_{name}", "o", "evaluation"):
        axes.plot([entry["step"] for entry in entries], [entry[key] for entry in entries], style, label=label)
    if evaluations:
        axes.legend()
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)" if name == "loss" else "mean reward")
    axes.set_title(describe(trainer).split(";")[0])
    axes.grid(alpha=0.3)
    figure.savefig(folder / f"{name}.png", dpi=150)
    first, last = ends_of(steps, name)
    few, count = steps[max(1, len(steps) // 10) - 1]["step"], steps[-1]["step"]
    said = f"{name} {first:.3f} -> {last:.3f}, means of the first and last {few:,} of {count:,} steps"
    if len(steps) == 1:
        said = f"{name} {first:.3f}, the mean of {count:,} step{'s' * (count > 1)}"
    if key := next((key for key in ("rewards/accuracies", "accuracy") if key in steps[-1]), None):  # of DPO, rewards
        first, last = ends_of(steps, key)
        began = "" if isinstance(trainer, DPOTrainer) or len(steps) == 1 else f"{first:.0%} -> "  # DPO begins with ties
        held_out = f"; the preferred answer is ahead in {began}{last:.0%} of pairs{held_out}"
    print(f"{said}{held_out}; checkpoint, {name}.png and log are in {folder}")


def ends_of(steps: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Means of the first and of the last tenth of the steps, of one at least: a single batch tells little."""
    values, few = [entry[name] for entry in steps if name in entry], max(1, len(steps) // 10)
    return fmean(values[:few]), fmean(values[-few:])
