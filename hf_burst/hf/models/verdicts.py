"""Why a class is served: hf_burst comes with its comparison, or `hf-burst check` found it exact on this machine."""

import hashlib
import json
import logging
import os
import re
import shlex
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from ...errors import ConfigError, UnsupportedModelError
from ...version import __version__
from ..view import ModelView
from .cut_point import has_language_head

logger = logging.getLogger(__name__)

# written by tests/support/coverage.py: the classes it found exact, each with a hash of its source in this Transformers
_TABLE = json.loads(Path(__file__).with_name("served.json").read_text())
TESTED: str = _TABLE["transformers"]
SERVED: dict[str, str] = _TABLE["classes"]

# libraries whose classes treat each token by itself, or are compared by the tests: no verdict depends on their source
_LIBRARIES = re.compile(
    r"builtins|abc|typing|collections|transformers|torch|peft|accelerate|trl|liger_kernel|hf_burst|deepspeed|torchao|"
    r"transformer_engine|bitsandbytes|gptqmodel|awq|hqq|eetq|aqlm|optimum|compressed_tensors|auto_round|spqr_quant|"
    r"vptq|quark|sinq|fouroversix|fp_quant"
)
_NORMS = re.compile(r"fla\.modules\.[\w.]*Norm\w*")  # of flash-linear-attention, which has convolutions there, too


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison of two ranks with one process."""

    result: str  # "exact", "wrong", "refused" (by the sentence in `note`) or "not buildable"
    # by kind of batch, the greatest error of the loss or a gradient, relative to its greatest entry
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""
    fingerprint: str = ""  # what the verdict holds for, see [`fingerprint`]
    uncompared: str = ""  # such as "images and videos": with what the class is served besides text


def source_hash(module: str) -> str | None:
    """A short hash of the source of a loaded Python module; `None` if it has no file, as in a notebook."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return _digest(Path(file).read_bytes()) if file else None
    except OSError:
        return None


def own_classes(view: ModelView) -> list[type]:
    """The classes of a model and its layers that come from none of the known libraries, by their names."""
    classes = {base for kind in view.classes for base in kind.__mro__}
    own = [kind for kind in classes if not _LIBRARIES.fullmatch(kind.__module__.partition(".")[0])]
    own = [kind for kind in own if not _NORMS.fullmatch(f"{kind.__module__}.{kind.__qualname__}")]
    return sorted(own, key=lambda kind: kind.__qualname__)


def fingerprint(view: ModelView) -> str | None:
    """A hash, 12 hexadecimal digits, of what a verdict on a model holds for: its class, the source of the class, of its
    layers and of the modules that these import, and the versions of Transformers, torch and hf_burst; `None` if the
    class has no source file."""
    own = view.find(own_classes)
    roots = {kind.__module__.partition(".")[0] for kind in own}
    pending = {cls.__module__ for kind in view.classes for cls in kind.__mro__}
    hashes: dict[str, str | None] = {}
    while pending:
        name = pending.pop()
        in_transformers = name.startswith("transformers.models.")
        if name in hashes or not (in_transformers or name.partition(".")[0] in roots):
            continue
        hashes[name] = source_hash(name)
        names = vars(sys.modules[name]) if name in sys.modules and not in_transformers else {}
        if "__path__" not in names:  # the names in a package follow from what else was imported
            pending |= {str(getattr(value, "__module__", getattr(value, "__name__", ""))) for value in names.values()}
    if None in hashes.values():
        return None
    sources = sorted(map(str, {*hashes.values()}))
    versions = [transformers.__version__, torch.__version__, __version__]
    parts = [type(view.root).__qualname__, [kind.__qualname__ for kind in own], sources, versions]
    return _digest(json.dumps(parts).encode())


def remember(verdict: Verdict) -> Path:
    """Writes a verdict down for [`served_by`]; raises a ConfigError if it cannot."""
    path = _remembered(verdict.fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(json.dumps(asdict(verdict), indent=1))
        os.chmod(file.name, 0o644)  # other users may share the folder
        os.replace(file.name, path)  # all at once: no other process reads half of it
    except OSError as problem:
        raise ConfigError(
            f"The verdict ({verdict.result}) cannot be remembered: {problem}. Set HF_HOME to a folder that can be "
            "written."
        ) from problem
    return path


def served_by(view: ModelView) -> str:
    """By which comparison a model is served, on which ranks that share a sequence must agree: `"shipped"` if hf_burst
    comes with the comparison, of the class or of one that it is made from; else `"checked <fingerprint>"`.

    Raises:
        UnsupportedModelError: If it was compared by nobody, or was found wrong here.
    """
    model = view.root
    name, config_name = type(model).__name__, model.config.name_or_path
    command = "hf_burst.check_model(model)"
    if config_name:
        command = f"hf-burst check {shlex.quote(config_name)} (or, in Python, {command})"
    bases = [cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models.")]
    shipped = next((cls for cls in bases if cls.__name__ in SERVED), None)
    bare = shipped is None and model.base_model is model and not view.find(has_language_head)
    if bare:  # a decoder or encoder alone, that of a class with a head
        shipped = next((cls for own in bases for cls in _with_heads(own) if cls.__name__ in SERVED), None)
    newer = Version(transformers.__version__).release[:2] > Version(TESTED).release[:2]
    unchanged = shipped is not None and (not newer or source_hash(shipped.__module__) == SERVED[shipped.__name__])
    stock = (shipped is type(model) or (bare and shipped is not None)) and not view.find(own_classes)
    verdict = _verdict_for(fingerprint(view))
    if verdict is not None and verdict.result != "exact":
        reasons = ", ".join(f"{kind}: {error:.0e}" for kind, error in verdict.errors.items()) or verdict.note
        raise UnsupportedModelError(
            f"{name} was compared with one process by hf-burst check and found {verdict.result} over several ranks "
            f"({reasons}), so it is refused. Once its source is changed, {command} compares it anew."
        )
    if verdict is not None and verdict.uncompared and not (stock and unchanged):
        logger.warning(
            "%s was compared with one process on text, and not on %s. Compare a batch of yours: run hf-burst check "
            "FOLDER --batch FILE.",
            *(name, verdict.uncompared),
        )
    if stock and (unchanged or verdict is not None):
        return "shipped"
    if verdict is not None:
        return f"checked {verdict.fingerprint}"
    if shipped is None:
        raise UnsupportedModelError(
            f"{name} has not been checked to be exact over several ranks, so it is refused. To compare it with one "
            f"process and have it served, run on every node: {command}"
        )
    if not unchanged and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "The source of %s in transformers %s differs from that in %s, the newest that hf_burst was tested with. "
            "To compare it with one process, run on every node: %s",
            *(shipped.__name__, transformers.__version__, TESTED, command),
        )
    return "shipped"


def _with_heads(kind: type) -> list[type[PreTrainedModel]]:
    """The classes of the same file that are made from the same config."""
    config, names = getattr(kind, "config_class", None), vars(sys.modules[kind.__module__])
    classes = [own for own in names.values() if isinstance(own, type) and issubclass(own, PreTrainedModel)]
    return [own for own in classes if own.config_class is config and own.__module__ == kind.__module__]


def _verdict_for(found_for: str | None) -> Verdict | None:
    """The verdict that is remembered; `None` if there is none, or something else wrote it."""
    with suppress(OSError, ValueError, TypeError):
        return Verdict(**json.loads(_remembered(found_for or "").read_text()))
    return None


def _remembered(found_for: str) -> Path:
    """The file of a verdict, in `$HF_HOME/hf_burst`, `$XDG_CACHE_HOME/hf_burst` or `~/.cache/hf_burst`."""
    home = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "hf_burst" / f"check-{found_for}.json"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()
