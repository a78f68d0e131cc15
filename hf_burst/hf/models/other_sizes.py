"""A checkpoint of a model of other sizes, from which a `Trainer` is to go on."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ...errors import ConfigError
from ..callers import _frames as frames


def refuse_other_sizes(model: PreTrainedModel, weights: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
    """The hook before weights are loaded into a model: where `Trainer` goes on from a checkpoint of a model of other
    sizes, one sentence that names both, since torch would list all weights.

    Raises:
        ConfigError: If a weight of the checkpoint has another size than that of the model. Every rank reads the same.
    """
    folder = _checkpoint_of_trainer()
    if folder is None:
        return
    for name, own in model.named_parameters():
        held = weights.get(prefix + name)
        if held is not None and held.shape != own.shape:
            config = Path(folder) / "adapter_config.json"
            base = json.loads(config.read_text())["base_model_name_or_path"] if config.exists() else None
            of = "a model" if base is None else f"an adapter of {base!r}"
            here = model.config.name_or_path or type(model).__name__
            raise ConfigError(
                f"{folder} is a checkpoint of {of}, whose sizes are not those of this model, {here!r}: {name} has "
                f"{tuple(held.shape)} there and {tuple(own.shape)} here. Load the model that it was trained with. To "
                "train this one, set another output_dir, or remove the checkpoints."
            )


def _checkpoint_of_trainer() -> str | None:
    """The folder from which a `Trainer` loads whole weights now."""
    module: Any = sys.modules.get("transformers.trainer")  # without which none runs
    for frame in frames() if module is not None else ():
        trainer = frame.f_locals.get("self") if frame.f_code.co_name == "_load_from_checkpoint" else None
        if isinstance(trainer, module.Trainer) and not trainer.is_fsdp_enabled:
            folder: str = frame.f_locals["resume_from_checkpoint"]
            return folder
    return None
