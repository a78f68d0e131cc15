"""What `hf-burst plan` predicts beside what was measured. Needs no GPU.

    python recipes/benchmarks/predictions.py --write    # the tables of docs/sizing.md
    python recipes/benchmarks/predictions.py --check    # whether they are those of this version

Predicted is every result of hf_burst in `results/training_*.json`, `results/attention_*.json` and those of
`recipes/sft.py` in `recipes/results`, with the numbers of GPUs that are built in (`hf_burst/plan/machine.py`). None of
these numbers belongs to a case.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from hf_burst.config import Schedule
from hf_burst.hf.models.model_size import model_size
from hf_burst.plan import Training, estimate, estimate_memory, estimate_step
from hf_burst.plan.machine import h200
from recipes.benchmarks.choice import layer_of, measured
from recipes.benchmarks.training_job import SHAPES
from recipes.benchmarks.training_plan import GIB, predict, settings_of

RESULTS = Path(__file__).parent / "results"
RECIPES = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "docs/sizing.md"
# inputs of layers that stayed on the GPU when these were measured, and no longer do: beside adapters the embeddings'
# output, and a shared checkpoint's own beside those that are computed from it
MORE_INPUTS = {
    "training_1xH200_lora_32k": 1,
    "training_1xH200_lora_256k_8_layers": 1,
    "training_1xH200_lora_512k": 1,
    "training_1xH200_lora_512k_packed": 1,
    "training_1xH200_qlora_750k_packed": 1,
    "training_1xH200_lora_512k_80gb_packed": 2,
    "training_1xH200_lora_1m_packed": 2,
}
BEGIN, END = "<!-- predictions -->", "<!-- end of predictions -->"


class Step(NamedTuple):
    """A measured training step beside its prediction."""

    file: str
    gpus: int
    model: str
    length: int
    kept: str
    seconds: float  # without the host's waits for page-locked memory, once a run
    waited: float  # such waits; the GPU may have computed meanwhile
    predicted_seconds: float
    gib: float
    predicted_gib: float
    plain: bool  # norms, rotary positions and SwiGLU without Liger
    compiled: bool
    first: bool  # the first step of its run
    by_peft: bool  # whether peft computed adapters, in passes and products that are spared since

    @property
    def time_error(self) -> float:
        """How far the prediction is above the measured seconds; of a range, above its nearer end, or not at all."""
        nearest = min(max(self.predicted_seconds, self.seconds), self.seconds + self.waited)
        return self.predicted_seconds / nearest - 1

    @property
    def memory_error(self) -> float:
        """How far the prediction is above the measured memory."""
        return self.predicted_gib / self.gib - 1


def training_steps() -> Iterator[Step]:
    """All measured steps of hf_burst. Their memory is that of torch's allocator: symmetric buffers lie beside it, and
    the first step of a run ends before the optimizer has its states."""
    for file in sorted(RESULTS.glob("training_*.json")):
        result = json.loads(file.read_text())
        layers, adapters = result.get("layers"), ", QLoRA" if result.get("four_bits") else ", LoRA"
        rows = [row for row in result["results"] if "median_s" in row]
        for row in rows:
            if (settings := settings_of(row)) is None:
                continue
            shortest = statistics.median(step["seconds"] - step.get("page_locking_s", 0.0) for step in row["steps"])
            waited = statistics.median(step["seconds"] for step in row["steps"]) - shortest
            first = row is rows[0] and len(row["steps"]) == 1 and "--warmup 0" in result["command"]
            predicted = predict(result, row, layers, first)
            if settings.get("activation_offloading"):
                width = SHAPES[result["shape"]][2]["hidden_size"]
                state = 2 * width * row["length"] / result["hardware"]["ranks"] / GIB
                predicted["peak_memory_gib"] += MORE_INPUTS.get(file.stem, 0) * state
            yield Step(
                file=file.stem,
                gpus=result["hardware"]["ranks"],
                model=result["shape"] + (adapters if result["lora"] else "") + (f", {layers} layers" if layers else ""),
                length=row["length"],
                kept=row["contender"].removeprefix("hf_burst, ")
                + (", packed documents" if result.get("document") else ""),
                seconds=shortest,
                waited=waited if waited > 0.01 * shortest else 0.0,
                predicted_seconds=predicted["seconds"],
                gib=row["peak_memory_gib"],
                predicted_gib=predicted["peak_memory_gib"],
                plain=not result.get("liger"),
                compiled=bool(result.get("compiled")),
                first=first,
                by_peft=result["lora"] and result.get("adapters") != "hf_burst",
            )


def recipe_steps() -> Iterator[Step]:
    """The steps of recipes/sft.py under accelerate's bf16 mixed precision and FSDP2, of all weights. Those of adapters
    were measured with the casts and passes of peft."""
    machine, model_class, sizes = h200(), SHAPES["llama-8b"][0], SHAPES["llama-8b"]
    model = model_size(model_class, sizes[1](**sizes[2]))
    for file in sorted(RECIPES.glob("sft_*_2xH200.json")):
        result = json.loads(file.read_text())
        words, gpus = result["command"], result["processes"]
        if "--use_peft" in words:
            continue
        length = int(words[words.index("--max_length") + 1])
        timed = result["steps"][1:]  # the first step compiles
        speeds = [step.get("tokens_per_second") or gpus * step["tokens_per_second_per_gpu"] for step in timed]
        training = Training(length, gpus, gpus, weights="fp32")
        memory = estimate_memory(model, training, machine)
        yield Step(
            file=file.stem,
            gpus=gpus,
            model="llama-8b",
            length=length,
            kept="attention saved, sft.py: fp32, FSDP2",
            seconds=length / statistics.median(speeds),
            waited=0.0,
            predicted_seconds=estimate_step(model, training, machine).total_s,
            gib=max(step.get("memory_gib") or step["peak_memory_gib"] for step in timed),
            predicted_gib=memory.tensors / GIB,
            plain=False,
            compiled=False,
            first=False,
            by_peft=False,
        )


class Attention(NamedTuple):
    """A measured attention, both passes, beside its prediction."""

    file: str
    gpus: int
    length: int
    kv_heads: int
    kernel: str
    mask: str
    schedule: str
    milliseconds: float
    predicted: float

    @property
    def error(self) -> float:
        """How far the prediction is above the measured time."""
        return self.predicted / self.milliseconds - 1


def attentions() -> Iterator[Attention]:
    """All measured attentions of hf_burst with chunks cut as by default."""
    for file in sorted(RESULTS.glob("attention_*.json")):
        for case in measured(file):
            layer, ranks = layer_of(case), case["ranks"]
            count, window = len(layer.masks[0].documents) - 1, case.get("window")
            mask = f"{count:,} documents" if count > 1 else f"window {window + 1:,}" if window else "whole"
            for name, milliseconds in case["ms"].items():
                cost = estimate(Schedule.parse(name, ranks), layer, h200(case["kernel"]))
                values = (ranks, case["length"], case["kv_heads"], case["kernel"], mask, name)
                yield Attention(file.stem, *values, milliseconds, 1e3 * cost.total_s)


def kind_of(case: Attention) -> str:
    """The row of the table that a measured attention belongs to."""
    if case.mask == "whole":
        return f"one document, {'at least' if case.length >= 8192 * case.gpus else 'fewer than'} 8,192 tokens a GPU"
    if case.mask.startswith("window"):
        return "one document, window of 4,096 tokens"
    return "documents of 512 to 65,536 tokens" if case.mask == "17 documents" else "documents of about 100 tokens"


def markdown() -> str:
    """Both tables."""
    lines = ["| model | GPUs | tokens | kept for the backward pass | seconds | predicted | GiB | predicted |"]
    lines.append("|---|---:|---:|---|---:|---:|---:|---:|")
    for step in chain(training_steps(), recipe_steps()):
        notes = [word for word, holds in (("compiled", step.compiled), ("without Liger", step.plain)) if holds]
        notes += ["first step"] if step.first else []
        kept = ", ".join([step.kept, *notes])
        predicted = (
            ""
            if step.by_peft
            else f"{step.predicted_seconds:.2f} ({f'{step.time_error:+.0%}' if step.time_error else 'within'})"
        )
        longest = f" to {step.seconds + step.waited:.2f}" if step.waited else ""
        seconds = f"{step.seconds:.2f}{longest} | {predicted}"
        memory = f"{step.gib:.1f} | {step.predicted_gib:.1f} ({step.memory_error:+.0%})"
        lines.append(f"| {step.model} | {step.gpus} | {step.length:,} | {kept} | {seconds} | {memory} |")
    kinds: dict[str, list[float]] = {}
    for case in attentions():
        kinds.setdefault(kind_of(case), []).append(case.error)
    lines += ["", "| attention of | results | median error | from | to |", "|---|---:|---:|---:|---:|"]
    for kind, errors in kinds.items():
        spread = " | ".join(f"{value:+.0%}" for value in (statistics.median(errors), min(errors), max(errors)))
        lines.append(f"| {kind} | {len(errors)} | {spread} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write the tables into docs/sizing.md")
    what.add_argument("--check", action="store_true", help="fail if docs/sizing.md has others")
    arguments = parser.parse_args()
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    page = f"{before}{begin}\n{markdown()}\n{end}{after}"
    if arguments.write:
        PAGE.write_text(page)
    elif page != PAGE.read_text():
        print(f"{PAGE} has other tables: python recipes/benchmarks/predictions.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
