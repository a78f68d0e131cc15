"""What the plan of hf_burst predicts of a step that training.py measured."""

from dataclasses import replace
from typing import Any

from hf_burst.hf.models.model_size import model_size
from hf_burst.sizing.gpus import Capacity, capacity_of, data_sheet
from hf_burst.sizing.memory import estimate_memory
from hf_burst.sizing.memory_rule import SETTINGS
from hf_burst.sizing.model import Training
from hf_burst.sizing.seconds import estimate_seconds
from recipes.benchmarks.training_contenders import BY_PEFT
from recipes.benchmarks.training_job import SHAPES

GIB = 2**30
FUSED_NORM = (3, 2)  # copies of a gated output that a fused norm keeps, and those of its gradients
# contenders of results that do not tell their settings, or whose way is none of them
NAMED: dict[str, dict[str, Any]] = {
    "hf_burst, attention saved": {},
    "hf_burst, half of it saved": {"attention_keep": 0.5},
    "hf_burst, attention recomputed": {"attention_keep": 0.0},
    "hf_burst, everything saved": {"checkpointing": False},
}


def settings_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """What a row of a result was trained with, as [`Training`] has it; `None` if it cannot be predicted."""
    if row["contender"] in NAMED:
        return NAMED[row["contender"]]
    settings = None if row["contender"] == BY_PEFT else row.get("settings")
    return None if settings is None else {name: settings[name] for name in SETTINGS if name in settings}


def predict(result: dict[str, Any], row: dict[str, Any], layers: int | None, first: bool = False) -> dict[str, Any]:
    """Predicts a step.

    Args:
        result (`dict`): A result of training.py.
        row (`dict`): One of its rows, of hf_burst.
        layers (`int`, *optional*): How many the model has; those of its shape by default.
        first (`bool`, defaults to `False`): Whether the step ends before the optimizer has its states.

    Returns:
        `dict`: Its `seconds` (`None` for devices without a data sheet), `peak_memory_gib` of torch's allocator, which
        does not hold symmetric buffers, and `host_memory_gib`.
    """
    model_class, config_class, sizes = SHAPES[result["shape"]]
    changes = {} if layers is None else {"num_hidden_layers": layers}
    model, ranks = model_size(model_class, config_class(**{**sizes, **changes})), result["hardware"]["ranks"]
    if result.get("gated_norms"):
        model = replace(model, recurrent=tuple(replace(size, norm_copies=FUSED_NORM) for size in model.recurrent))
    length, document = row["length"], result.get("document")
    training = Training(
        length,
        ranks,
        ranks,
        documents=(*range(0, length, document), length) if document else (),
        lora=16 * result["lora"],
        weights="4bit" if result.get("four_bits") else "bf16",
        fused=bool(result.get("liger")),
        **(settings_of(row) or {}),
    )
    sheet = data_sheet(result["hardware"]["device"])
    memory = estimate_memory(model, training, capacity_of(sheet) if sheet else Capacity(0, on_gpu=False))
    allocated = memory.tensors - (memory.optimizer if first else 0)
    return {
        "seconds": estimate_seconds(model, training, sheet).total if sheet else None,
        "peak_memory_gib": allocated / GIB,
        "host_memory_gib": memory.host / GIB,
    }
