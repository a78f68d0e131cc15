"""What `hf-burst plan` predicts for the whole steps that were measured on GPUs. Needs no GPU.

    python -m tests.support.predictions    # writes results/predictions.md, docs/how-to/sizing.md

Predicted are all steps of hf_burst in `training_*.json`, `fits_*.json`, `engines_*.json` and `beginnings_*.json` of
recipes/benchmarks/results. No rate belongs to a case.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from hf_burst.hf.models.layer_sizes import FUSED_NORM
from hf_burst.hf.models.model_size import model_size
from hf_burst.plan.memory_levels import SETTINGS
from hf_burst.sizing.gpus import Capacity, capacity_of, data_sheet
from hf_burst.sizing.memory import LOADING, MemoryEstimate, memory_of_step
from hf_burst.sizing.model import ModelSize, Training
from hf_burst.sizing.seconds import estimate_seconds
from hf_burst.sizing.shapes import SHAPES
from recipes.benchmarks.training_job import config_of

GIB = 2**30
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "recipes/benchmarks/results"
_SIZES: dict[str, ModelSize] = {}  # by config
PAGE, TABLE = ROOT / "docs/how-to/sizing.md", RESULTS / "predictions.md"
# what fits.py calls them, as [`Training`] has them
WEIGHTS: dict[str, dict[str, Any]] = {
    "all": {"weights": "fp32"},
    "lora": {"weights": "fp32", "lora": 16},
    "qlora": {"weights": "4bit", "lora": 16},
}
# contenders of results that do not tell their settings, or whose way is none of them
NAMED: dict[str, dict[str, Any]] = {
    "hf_burst, attention saved": {},
}
BEGIN, END = "<!-- predictions -->", "<!-- end of predictions -->"


@dataclass(frozen=True)
class Step:
    """A measured training step, and its prediction."""

    file: str
    kind: str  # its row of the summary
    device: str
    model: str
    length: int
    kept: str
    seconds: float
    predicted_seconds: float
    gib: float
    predicted_gib: float
    timed: bool = True  # whether seconds compare: copies of all weights are not predicted

    @property
    def time_error(self) -> float:
        """How far the prediction is above the measured seconds."""
        return self.predicted_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float:
        """How far the prediction is above the measured memory."""
        return self.predicted_gib / self.gib - 1


def measured_steps() -> Iterator[Step]:
    """All measured steps of hf_burst. Their memory is that of torch's allocator, which does not hold symmetric
    buffers."""
    for file in sorted(RESULTS.glob("training_*.json")):
        result = json.loads(file.read_text())
        for row in result["results"]:
            if "median_s" in row and settings_of(row) is not None:
                yield _training_step(file.stem, result, row)
    latest: dict[tuple[Any, ...], Step] = {}  # with the same settings, of several processes
    for file in [*sorted(RESULTS.glob("fits_*.json")), *sorted(RESULTS.glob("engines_*H?00_*.json"))]:
        for row in json.loads(file.read_text()):
            settings = _chosen_or_named(row)
            if row["status"] == "ok" and settings is not None and len(row["steps"]) > 2:
                step = _trainer_step(file.stem, row, settings)
                latest[step.model, step.device, step.length, step.kept, step.kind] = step
    yield from latest.values()
    for file in sorted(RESULTS.glob("beginnings_*.json")):
        result = json.loads(file.read_text())
        for row in result["results"]:
            if "median_s" in row:
                yield _beginnings_step(file.stem, result, row)


def settings_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """What a row of a result was trained with, as [`Training`] has it; `None` if it cannot be predicted."""
    if row["contender"] in NAMED:
        return NAMED[row["contender"]]
    settings = row.get("settings")
    return None if settings is None else {name: settings[name] for name in SETTINGS if name in settings}


def size_of(config: PreTrainedConfig) -> ModelSize:
    """The sizes of a model, which is built for them, once."""
    key = config.to_json_string()
    if key not in _SIZES:
        _SIZES[key] = model_size(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    return _SIZES[key]


def as_measured(model: ModelSize, result: dict[str, Any]) -> ModelSize:
    """A model whose recurrent layers take the memory that they took with the kernels and releases of a result."""
    kernels: dict[str, Any] = {"norm_copies": FUSED_NORM} if result.get("gated_norms") else {}
    if "causal-conv1d" in result["versions"]:
        kernels["convolution_copies"] = 1
    elif result["versions"]["transformers"] == "5.17.0":  # repeats keys for every head of values
        kernels["repeats_keys"] = True
    return replace(model, recurrent=tuple(replace(size, **kernels) for size in model.recurrent))


def _predicted(result: dict[str, Any], training: Training) -> dict[str, float]:
    """The `predicted_seconds` and `predicted_gib` of a step, without symmetric buffers, which are not torch's."""
    layers, sheet = result["layers"], data_sheet(result["hardware"]["device"])
    assert sheet is not None, "no result is of another GPU"
    config = config_of(result["shape"], **({} if layers is None else {"num_hidden_layers": layers}))
    model, capacity = as_measured(size_of(config), result), capacity_of(sheet)
    if "ffpa" in result.get("kernel", ""):
        capacity, sheet = replace(capacity, ffpa=True), sheet._replace(widest="ffpa")
    return {
        "predicted_seconds": estimate_seconds(model, training, sheet).total,
        "predicted_gib": fullest(model, training, capacity).tensors / GIB,
    }


def fullest(model: ModelSize, training: Training, capacity: Capacity) -> MemoryEstimate:
    """The moment of a step when its tensors take the most. What is read before a step is not measured."""
    moments = memory_of_step(model, training, capacity)
    return max((each for each in moments if each.moment != LOADING), key=attrgetter("tensors"))


def _training_step(file: str, result: dict[str, Any], row: dict[str, Any]) -> Step:
    """A row of training.py."""
    layers, ranks, lora = result["layers"], result["hardware"]["ranks"], result["lora"]
    settings = {"lora": 16 * lora, "fused": bool(result["liger"]), **(settings_of(row) or {})}
    return Step(
        file=file,
        kind="hybrid" if "hybrid" in result["shape"] else "adapters" if lora else "all weights",
        device=f"{ranks} x {result['hardware']['device']}",
        model=result["shape"] + (", LoRA" if lora else "") + (f", {layers} layers" if layers else ""),
        length=row["length"],
        kept=row["contender"].removeprefix("hf_burst, "),
        seconds=row["median_s"],
        gib=row["peak_memory_gib"],
        **_predicted(result, Training(row["length"], ranks, ranks, **settings)),
    )


def _beginnings_step(file: str, result: dict[str, Any], row: dict[str, Any]) -> Step:
    """A row of beginnings.py: texts that continue one of others, each of them whole, or one text of as many tokens."""
    beginning, endings, hardware = result["beginning"], [result["ending"]] * result["endings"], result["hardware"]
    whole = [beginning + ending for ending in endings]
    sizes = {"shared": [beginning, *endings], "rows": whole, "limit": [beginning + sum(endings)]}[row["contender"]]
    training = Training(
        sum(sizes),
        hardware["ranks"],
        hardware["ranks"],
        documents=tuple(accumulate(sizes, initial=0)),
        parents=(-1, *[0] * len(endings)) if row["contender"] == "shared" else (),
        reference=result["what"] == "pairs",
        lora=16,
        fused=result["liger"],
        **{name: row["settings"][name] for name in SETTINGS},
    )
    what = "a pair, LoRA" if training.reference else f"{len(endings)} answers, LoRA"
    return Step(
        file=file,
        kind="texts that begin alike" if row["contender"] == "shared" else "whole texts, adapters",
        device=f"{hardware['ranks']} x {hardware['device']}",
        model=f"{result['shape']}, {what}",
        length=training.length,
        kept={"shared": "beginning once", "rows": "all of each", "limit": "one text"}[row["contender"]],
        seconds=row["median_s"],
        gib=row["peak_memory_gib"],
        **_predicted(result, training),
    )


def _chosen_or_named(row: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of `Memory` of a row of fits.py or engines.py; `None` if another engine, or peft, computed it."""
    named = row.get("settings", {}).get("memory", {"activation_offloading": 1.0} if row.get("offload") else None)
    known = {"engine": "hf_burst", "contender": "hf_burst", "adapters": "hf_burst"}
    if any(row.get(name, value) != value for name, value in known.items()):
        return None
    return row["chosen"]["settings"] if row["chosen"] else named


def _trainer_step(file: str, row: dict[str, Any], settings: dict[str, Any]) -> Step:
    """A row of fits.py or engines.py, with settings of `Memory`."""
    steps = row["steps"][1:]  # the first one compiles
    kept = ", ".join(f"{name}={value:g}" for name, value in settings.items())
    length, document = row["length"], row.get("document")
    documents = (*range(0, length, document), length) if document else ()
    seconds, gib = statistics.median(step["seconds"] for step in steps), max(step["allocated_gib"] for step in steps)
    changes = {"num_hidden_layers": row["layers"]} if row["layers"] else {}
    name = row["model"] + (f", {row['layers']} layers" if row["layers"] else "")
    name += {"all": "", "lora": ", LoRA", "qlora": ", QLoRA"}[row["weights"]]
    name += ", weights on the host" if row.get("offloaded_weights") else ""
    sheet = data_sheet(row["hardware"]["device"])
    assert sheet is not None, "no result is of another GPU"
    config = AutoConfig.for_model(**{**SHAPES[row["model"]], **changes})
    gated = row["versions"]["transformers"] != "5.17.0"  # older results are of before fla computed these norms
    model, ranks = as_measured(size_of(config), row | {"gated_norms": gated}), row["hardware"]["ranks"]
    settings = {
        **settings,
        **WEIGHTS[row["weights"]],
        "quantized_experts": row["weights"] == "qlora" and model.fused > 0,
        "offloaded_weights": row.get("offloaded_weights", False),
        "sharded": "ddp" if row.get("distributed", "").startswith("MULTI") else "fsdp2",
    }
    training = Training(length, ranks, ranks, documents, **settings)
    capacity = capacity_of(sheet)
    if "ffpa-attn" in row["versions"]:
        capacity, sheet = replace(capacity, ffpa=True), sheet._replace(widest="ffpa")
    return Step(
        file=file,
        kind=f"{'adapters' if training.lora else 'all weights'}, Trainer",
        device=f"{ranks} x {row['hardware']['device']}",
        model=name,
        length=length,
        kept=kept,
        seconds=seconds,
        predicted_seconds=estimate_seconds(model, training, sheet).total,
        gib=gib,
        predicted_gib=fullest(model, training, capacity).tensors / GIB,
        timed=not training.offloaded_weights,
    )


def table(steps: list[Step]) -> str:
    """All steps."""
    lines = ["| model | GPUs | tokens | kept for the backward pass | seconds | predicted | GiB | predicted |"]
    lines.append("|---|---|---:|---|---:|---:|---:|---:|")
    for step in steps:
        predicted = f"{step.predicted_seconds:.2f} ({step.time_error:+.0%})" if step.timed else ""
        cells = [step.model, step.device, f"{step.length:,}", step.kept, f"{step.seconds:.2f}", predicted]
        cells += [f"{step.gib:.1f}", f"{step.predicted_gib:.1f} ({step.memory_error:+.0%})"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def summary(steps: list[Step]) -> str:
    """The errors of all steps by kind: the median of their sizes, and the worst."""
    lines = ["| steps of | measured | seconds: median | worst | memory: median | worst |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for kind in dict.fromkeys(step.kind for step in steps):
        own = [step for step in steps if step.kind == kind]
        times = [step.time_error for step in own if step.timed]
        memory = [step.memory_error for step in own]
        cells = [
            f"{statistics.median(map(abs, errors)):.0%} | {max(errors, key=abs):+.0%}" for errors in (times, memory)
        ]
        lines.append(f"| {kind} | {len(times)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Writes both tables."""
    steps = list(measured_steps())
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text(f"{before}{begin}\n{summary(steps)}\n{end}{after}")
    TABLE.write_text(table(steps))


if __name__ == "__main__":
    main()
