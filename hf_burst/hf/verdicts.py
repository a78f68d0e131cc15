"""How a class came to be served: shipped with hf_burst, or found exact by `hf-burst check` and remembered here."""

import hashlib
import json
import logging
import shlex
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from ..cache import cache_file, own_version, write_whole
from ..errors import UnsupportedModelError
from .served import SERVED, TESTED

logger = logging.getLogger(__name__)

_NOT_STRUCTURE = {
    *("architectures", "transformers_version", "dtype", "torch_dtype", "auto_map", "id2label", "label2id", "use_cache"),
    *("return_dict", "output_hidden_states", "output_attentions", "problem_type", "quantization_config"),
}


@dataclass(frozen=True)
class Verdict:
    """What a comparison of two ranks with one process found.

    Args:
        result (`str`): `"exact"`, `"wrong"`, `"refused"` (by the sentence in `note`) or `"not buildable"`.
        errors (`dict`): For each kind of batch the greatest error of the loss or a gradient, relative to the greatest
            entry.
        note (`str`): What else there is to know.
        fingerprint (`str`): What the verdict holds for, see [`fingerprint`].
    """

    result: str
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""
    fingerprint: str = ""


def source_hash(module: str) -> str | None:
    """A short hash of the source of a loaded Python module; `None` if it has no file, as in a notebook."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return _digest(Path(file).read_bytes()) if file else None
    except OSError:
        return None


def fingerprint(model: PreTrainedModel) -> str | None:
    """What a verdict on a model holds for: the source of its class and layers, the settings of its config that are no
    sizes, and the versions of Transformers, torch and hf_burst.

    Args:
        model (`PreTrainedModel`): The model, of any size.

    Returns:
        `str`, *optional*: 12 hexadecimal digits; `None` if the class has no source file.
    """
    root = type(model).__module__.partition(".")[0]
    classes = {*type(model).__mro__, *(cls for module in model.modules() for cls in type(module).__mro__)}
    modules = {
        cls.__module__
        for cls in classes
        if cls.__module__.startswith("transformers.models.")
        or (root != "transformers" and cls.__module__.partition(".")[0] == root)
    }
    hashes = [source_hash(module) for module in modules]
    if None in hashes:
        return None
    parts = [
        type(model).__qualname__,
        sorted(map(str, hashes)),
        _structure(model.config.to_dict()),
        [transformers.__version__, torch.__version__, own_version()],
    ]
    return _digest(json.dumps(parts, sort_keys=True, default=str).encode())


def remember(verdict: Verdict) -> Path:
    """Writes a verdict down for [`served_by`].

    Raises:
        OSError: If it cannot be written.
    """
    path = _path(verdict.fingerprint)
    write_whole(path, json.dumps(asdict(verdict), indent=1))
    return path


def recall(model: PreTrainedModel) -> Verdict | None:
    """The verdict on a model that this machine remembers."""
    digest = fingerprint(model)
    try:
        return None if digest is None else Verdict(**json.loads(_path(digest).read_text()))
    except (OSError, ValueError, TypeError):  # none, or one that something else wrote
        return None


def served_by(model: PreTrainedModel) -> str:
    """By which comparison a model is served. Ranks that share a sequence must agree on it.

    Args:
        model (`PreTrainedModel`): The model.

    Returns:
        `str`: `"shipped"` if hf_burst comes with the comparison, of the class or of one that it is made from; else
        `"checked <fingerprint>"`.

    Raises:
        UnsupportedModelError: If it was compared by nobody, or was found wrong here.
    """
    shipped = next((cls for cls in type(model).__mro__ if _is_shipped(cls)), None)
    unchanged = shipped is not None and (not _newer() or source_hash(shipped.__module__) == SERVED[shipped.__name__])
    if shipped is type(model) and unchanged:
        return "shipped"
    verdict = recall(model)
    if verdict is not None and verdict.result == "exact":
        return f"checked {verdict.fingerprint}"
    name = type(model).__name__
    if verdict is not None:
        reasons = ", ".join(f"{kind}: {error:.0e}" for kind, error in verdict.errors.items()) or verdict.note
        raise UnsupportedModelError(
            f"{name} was compared with one process by hf-burst check and found {verdict.result} over several ranks "
            f"({reasons}), so it is refused. Once its source is changed, {_command(model)} compares it anew."
        )
    if shipped is None:
        raise UnsupportedModelError(
            f"{name} has not been checked to be exact over several ranks, so it is refused. To compare it with one "
            f"process and have it served, run on every node: {_command(model)}"
        )
    if not unchanged:
        logger.warning(
            "The source of %s in transformers %s differs from that in %s, the newest that hf_burst was tested with. To "
            "compare it with one process, run on every node: %s",
            *(shipped.__name__, transformers.__version__, TESTED, _command(model)),
        )
    return "shipped"


def _is_shipped(cls: type) -> bool:
    return cls.__module__.startswith("transformers.models.") and cls.__name__ in SERVED


def _newer() -> bool:
    """Whether the installed Transformers is newer than those that were tested."""
    return Version(transformers.__version__).release[:2] > Version(TESTED).release[:2]


def _command(model: PreTrainedModel) -> str:
    """What the user may type or call to have a model checked."""
    call = "hf_burst.check_model(model)"
    name = model.config.name_or_path
    return f"hf-burst check {shlex.quote(name)} (or, in Python, {call})" if name else call


def _path(digest: str) -> Path:
    return cache_file("check", digest)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def _structure(value: Any) -> Any:
    """A config without its sizes: numbers count as set or not, lists by the kinds of entries that they hold."""
    if isinstance(value, dict) and all(str(key).isdecimal() for key in value):  # of layers
        value = list(value.values())
    if isinstance(value, dict):
        entries = {
            str(key): _structure(entry)
            for key, entry in value.items()
            if key not in _NOT_STRUCTURE
            and not str(key).startswith("_")
            and not str(key).endswith(("token_id", "_ids"))
        }
        return {key: entry for key, entry in entries.items() if entry}
    if isinstance(value, list | tuple | set):
        return sorted({json.dumps(_structure(entry), sort_keys=True) for entry in value})
    return bool(value) if isinstance(value, int | float) else value
