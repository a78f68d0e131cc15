"""`check_model`: from a model's name to a remembered verdict."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from huggingface_hub import file_exists
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from ..errors import BatchError, ConfigError
from ..hf.admission import Verdict, remember
from .compare import BatchComparison, compare, compare_batch
from .ranks import RANKS, run_on_ranks
from .tiny import prepare, tiny_copy

_CLASSES: dict[str, Any] = {
    "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING,
    "AutoModelForMaskedLM": MODEL_FOR_MASKED_LM_MAPPING,
    "AutoModelForImageTextToText": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}
_NAMES = "a name on the hub, a folder or config.json of a model, or a class of Transformers such as LlamaForCausalLM"
_COPIES = 2 * RANKS  # weights and gradients
_SHARE = 0.7  # of the free memory


@dataclass(frozen=True)
class Target:
    """The class to check, its full-size config, and the folder of its weights, if any."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    folder: Path | None = None


def check_model(
    model: str | PreTrainedModel | PreTrainedConfig, trust_remote_code: bool = False, time_limit: float = 300.0
) -> Verdict:
    """Compares two ranks of this machine with one process on a tiny model of the same class and config, and remembers
    the verdict: [`patch_model`] then accepts an exact class. The batches are text. To compare images, videos and sound,
    give a batch of yours: `hf-burst check FOLDER --batch FILE`.

    Args:
        model (`str`, `PreTrainedModel` or `PreTrainedConfig`): A name on the hub, a folder or `config.json`, or a class
            of Transformers; or a model or config in memory. Its sizes shrink, but its structure stays.
        trust_remote_code (`bool`, defaults to `False`): Whether code that comes with the model may run.
        time_limit (`float`, defaults to 300.0): The time limit of the comparison in seconds.

    Returns:
        [`Verdict`]: The `result` is `"exact"`, `"wrong"`, `"refused"` or `"not buildable"`.

    Raises:
        ConfigError: If there is no such language model, or the comparison died or ran out of time.
    """
    target = find_target(model, trust_remote_code)
    try:
        verdict: Verdict = run_on_ranks(
            compare, partial(tiny_copy, target.model_class, target.config), limit=time_limit
        )
    except RuntimeError as problem:
        return Verdict("wrong", note=f"the comparison failed: {problem}")
    if verdict.fingerprint:
        remember(verdict)
    return verdict


def check_batch(
    model: str | PreTrainedModel | PreTrainedConfig,
    batch: Mapping[str, torch.Tensor],
    trust_remote_code: bool = False,
    time_limit: float = 300.0,
) -> tuple[BatchComparison, str]:
    """Compares a batch's loss and gradient norm over two ranks of this machine with those of one process, in fp32.

    Args:
        model, trust_remote_code, time_limit: As in [`check_model`]. A folder's weights are used if they fit in memory,
            else the random weights of a tiny model with the same vocabulary.
        batch (mapping): A collator's output, with labels.

    Returns:
        `tuple[BatchComparison, str]`: The comparison, and a description of the weights.

    Raises:
        BurstError: If the model or the batch is not supported.
    """
    target = find_target(model, trust_remote_code)
    obstacle = _cannot_load(target)
    make, weights, advice = partial(_load, target), f"the weights in {target.folder}", ""
    if obstacle:
        make = partial(tiny_copy, target.model_class, target.config, batch["labels"].shape[1])
        weights = f"random weights of a tiny model ({obstacle})"
        advice = f" It was a tiny model, because {obstacle}; give a folder with weights that fit."
    try:
        comparison: BatchComparison = run_on_ranks(compare_batch, make, dict(batch), limit=time_limit)
    except RuntimeError as problem:
        raise ConfigError(f"The model could not compute this batch: {problem}{advice}") from problem
    return comparison, weights


def read_batch(path: Path) -> dict[str, torch.Tensor]:
    """Reads a batch that was saved by `torch.save(dict(batch), path)`.

    Raises:
        BatchError: If the file holds no batch with labels.
    """
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {str(key): value for key, value in values.items() if value is not None}
    except Exception as problem:  # other files may raise anything
        raise _no_batch(path, str(problem).strip().split("\n")[0]) from problem
    labels = tensors.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or not {"input_ids", "inputs_embeds"} & set(tensors):
        raise _no_batch(path, "it lacks input_ids, or labels of shape (batch, tokens)")
    wrong = [key for key, value in tensors.items() if not isinstance(value, torch.Tensor | int)]
    if wrong:
        raise _no_batch(path, f"of its values, {', '.join(wrong)} are no tensors")
    return tensors


def find_target(model: str | PreTrainedModel | PreTrainedConfig, trust_remote_code: bool = False) -> Target:
    """Returns the class and config that the user means.

    Raises:
        ConfigError: If there is no such language model.
    """
    if isinstance(model, PreTrainedModel):
        return Target(type(model), model.config)
    if isinstance(model, PreTrainedConfig):
        return Target(_class_of(model, None, trust_remote_code), model)
    named = getattr(transformers, model, None) if model.isidentifier() else None
    if isinstance(named, type) and issubclass(named, PreTrainedModel) and named.config_class is not None:
        return Target(named, _default_config(named))
    path = Path(model).expanduser()
    local = path.exists()
    if not local and (model.endswith((os.sep, ".json")) or model.startswith(("/", "./", "../", "~"))):
        raise ConfigError(f"{model!r} does not exist; the current folder is {Path.cwd()}. Give {_NAMES}.")
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        base = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
        raise ConfigError(f"{model!r} holds an adapter. Give its base model, {base!r}.")
    try:
        config = AutoConfig.from_pretrained(
            path if local else model,
            trust_remote_code=trust_remote_code,
            local_files_only=not local and not _hub_answers(model),
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as problem:
        if "trust_remote_code" in str(problem):
            raise ConfigError(
                f"{model!r} comes with code of its own; if you trust it, say --trust-remote-code "
                "(trust_remote_code=True)."
            ) from problem
        raise ConfigError(
            f"{model!r} names no model whose config can be read ({str(problem).strip().splitlines()[0][:200]}). "
            f"Give {_NAMES}. A class of your own is checked in Python: hf_burst.check_model(model)."
        ) from problem
    return Target(_class_of(config, model, trust_remote_code), config, path if path.is_dir() else None)


def _default_config(model_class: Any) -> PreTrainedConfig:
    """Returns a class's default config. It adds missing rotary sections, as for Qwen2.5-VL and GLM-4V, because the
    defaults in their code do not fit small heads; every checkpoint sets them."""
    config: PreTrainedConfig = model_class.config_class()
    text = config.get_text_config()
    if "mrope_section" in (getattr(text, "ignore_keys_at_rope_validation", None) or ()) and text.rope_parameters:
        text.rope_parameters.setdefault("mrope_section", [16, 24, 24])
    return config


def _hub_answers(name: str) -> bool:
    """Returns whether the hub answers one request. Transformers would retry for half a minute."""
    try:
        file_exists(name, "config.json")
    except (HfHubHTTPError, ValueError):  # the hub answered with an error, or the name is invalid
        return True
    except Exception:  # releases of huggingface_hub use different HTTP libraries
        return False
    return True


def _class_of(config: PreTrainedConfig, name: str | None, trust_remote_code: bool) -> type[PreTrainedModel]:
    """Returns the language-model class for a config: according to its `architectures`, else the first known."""
    remote = getattr(config, "auto_map", None) or {}
    own = [remote[key] for key in _CLASSES if key in remote]
    if own and name is not None and trust_remote_code:
        return get_class_from_dynamic_module(own[0], name)
    known: list[type[PreTrainedModel]] = [kinds[type(config)] for kinds in _CLASSES.values() if type(config) in kinds]
    if not known:
        raise ConfigError(
            f"{name or type(config).__name__!r} is a {type(config).__name__}, for which Transformers has no class of a "
            f"language model, so there is no loss to compare. Give {_NAMES}."
        )
    return next((cls for cls in known if cls.__name__ in (config.architectures or ())), known[0])


def _cannot_load(target: Target) -> str:
    """Returns why a model's weights are not used; empty if they are."""
    if target.folder is None:
        return "its weights are used only if a folder is given"
    if not [*target.folder.glob("*.safetensors"), *target.folder.glob("pytorch_model*.bin")]:
        return "the folder holds no weights"
    with torch.device("meta"):
        needed = _COPIES * 4 * target.model_class(target.config).num_parameters()
    free = int(_SHARE * psutil.virtual_memory().available)
    if needed > free:
        return f"two ranks need {needed / 2**30:.1f} GiB for its weights and gradients, of {free / 2**30:.1f} GiB"
    return ""


def _load(target: Target) -> PreTrainedModel:
    """Loads the model with its own weights, in fp32 and without dropout."""
    values = target.config.to_dict()
    quiet = {key: 0.0 for key, value in values.items() if "drop" in key and isinstance(value, float)}
    config = type(target.config).from_dict(values | quiet)
    prepare(config)
    return target.model_class.from_pretrained(target.folder, config=config, dtype=torch.float32).train()


def _no_batch(path: Path, why: str) -> BatchError:
    return BatchError(
        f"{str(path)!r} holds no batch: {why}. Save what your collator returns, with input_ids and labels: "
        "torch.save(dict(batch), 'batch.pt')."
    )
