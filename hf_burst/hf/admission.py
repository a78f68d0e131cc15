"""The models that are served, by the table `admission.toml`: classes, modalities, layers, adapters, trainers.

    row_of(type(model))        how ranks share images, videos and sound of a class, and where it is cut
    served_by(view)            which comparison vouches for a model
    admit(MyModel)             adds a row for your own class
    check_adapters(model)      raises for adapters that were not compared
    trainer_role(type(trainer))

`models/support.py` and `models/task.py` refuse what is never served, whatever a comparison finds.
"""

import hashlib
import json
import logging
import os
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigError, UnsupportedModelError
from ..version import __version__
from .view import ModelView, has_language_head

logger = logging.getLogger(__name__)

Admitted = TypeVar("Admitted", bound=type[PreTrainedModel])
ROW = "_hf_burst_row"  # the attribute of an admitted class
_ALLOWED = {
    "images": ("patches", "images", "all"),
    "videos": ("patches", "images", "frames", "all"),
    "sound": ("clips", "all"),
    "positions": ("row",),
}
_NORMS = re.compile(r"fla\.modules\.[\w.]*Norm\w*")  # of flash-linear-attention, which has convolutions there, too


@dataclass(frozen=True)
class Row:
    """A row of the table, explained there; empty for most classes."""

    source: str | None = None
    images: str | None = None
    videos: str | None = None
    sound: str | None = None
    positions: str | None = None
    cut: str = ""

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in (None, *allowed):
                known = " or ".join(map(repr, allowed))
                raise ConfigError(f"{name}={getattr(self, name)!r}", "nothing is shared in this way", f"Give {known}")

    @property
    def modalities(self) -> list[str]:
        """The modalities that batches may hold besides text."""
        return [name for name in ("images", "videos", "sound") if getattr(self, name)]


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TESTED: str = _TABLE["transformers"]
CLASSES: Mapping[str, Row] = MappingProxyType({name: Row(**row) for name, row in _TABLE["classes"].items()})
LAYERS: Mapping[str, str] = MappingProxyType(_TABLE["layers"])
ON_GPUS = frozenset(name for name, devices in _TABLE["recurrent"].items() if "cuda" in devices)
ATTENTION_FUNCTIONS = frozenset(_TABLE["attention"]["functions"])
TRAINERS: Mapping[str, str] = MappingProxyType(_TABLE["trainers"])
PEFT_METHODS: Mapping[str, list[str]] = MappingProxyType(_TABLE["peft"]["methods"])


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison of two ranks with one process."""

    result: str  # "exact", "wrong", "refused" (for the reason in `note`) or "not buildable"
    # by kind of batch, the largest error of the loss or a gradient, relative to its largest entry
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""
    fingerprint: str = ""  # identifies what the verdict holds for, see [`fingerprint`]
    uncompared: str = ""  # served modalities that were not compared, such as "images and videos"


def admit(
    model_class: Admitted,
    source: str | None = None,
    images: str | None = None,
    videos: str | None = None,
    sound: str | None = None,
    positions: str | None = None,
    cut: str | None = None,
) -> Admitted:
    """Lets [`patch_model`] serve your own class and its subclasses, after you have compared the class with one process:
    by [`check_model`], and with images or sound by `hf-burst check FOLDER --batch FILE`. What is never exact, such as
    cross attention, stays refused. Call it where the class is defined, so that every rank does.

    Args:
        model_class (`type`): A subclass of `PreTrainedModel`.
        source (`str`, *optional*): The hash of the file that you compared. If the file has changed, a warning names
            both hashes.
        images (`str`, *optional*): How ranks share images in `get_image_features`: by `"patches"`, which grids count,
            by `"images"` of one row each, or not (`"all"`: each encodes all). Arguments that are left out are inherited
            from the base class; images, videos and sound are refused if neither names them.
        videos (`str`, *optional*): The same for `get_video_features`, or `"frames"` if grids count patches and each
            frame is encoded separately.
        sound (`str`, *optional*): `"clips"` if `get_audio_features` encodes each row separately, or `"all"`.
        positions (`str`, *optional*): `"row"` if the positions of images depend on earlier documents of a row.
        cut (`str`, *optional*): The inner model that takes a part of the tokens, such as `"model.decoder"`. Found by
            default.

    Returns:
        The same class.

    Raises:
        ConfigError: If `model_class` is not such a class, or another argument is not one of the values above.

    Example:

    ```python
    >>> hf_burst.admit(MyModelForCausalLM)
    ```
    """
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ConfigError(f"admit was given {model_class!r}", "it is no class of models", "Give one of PreTrainedModel")
    given = {"images": images, "videos": videos, "sound": sound, "positions": positions, "cut": cut}
    known = {name: value for name, value in given.items() if value is not None}
    setattr(model_class, ROW, replace(row_of(model_class), source=source, **known))
    return model_class


def row_of(kind: type) -> Row:
    """Returns the row of a class, or of its first base class with one, because FSDP2 and users derive classes."""
    return _listed(kind)[1]


def _listed(kind: type) -> tuple[type | None, Row]:
    """Returns the class that has the row, and the row."""
    for base in kind.__mro__:
        shipped = CLASSES.get(base.__name__) if base.__module__.startswith("transformers.") else None
        row = vars(base).get(ROW, shipped)
        if row is not None:
            return base, row
    return None, Row()


def _listed_for(view: ModelView) -> tuple[type | None, Row]:
    """Returns the same for a model. A bare decoder or encoder takes the row of a class with a head in its file."""
    model, kind = view.root, type(view.root)
    found = _listed(kind)
    if found[0] is None and model.base_model is model and not view.find(has_language_head):
        heads = [head for base in kind.__mro__ if base.__module__ in sys.modules for head in _beside(base)]
        found = next((_listed(head) for head in heads if _listed(head)[0] is head), found)
    return found


def _beside(kind: type) -> list[type[PreTrainedModel]]:
    """Returns the classes of the same file that share its config class."""
    config, file = getattr(kind, "config_class", None), kind.__module__
    classes = [own for own in vars(sys.modules[file]).values() if isinstance(own, type) and own.__module__ == file]
    models = [own for own in classes if issubclass(own, PreTrainedModel)]
    return [own for own in models if own.config_class is config is not None]


def served_by(view: ModelView) -> str:
    """Returns which comparison vouches for a model; ranks that share a sequence must agree on it: `"shipped"` if
    hf_burst comes with the comparison of its class, or of one that it is made from, `"admitted <source>"` if somebody
    else vouches for that class, else `"checked <fingerprint>"`. Warns of what the comparison does not cover.

    Raises:
        UnsupportedModelError: If nobody compared the model, or a comparison on this machine found it wrong.
    """
    kind, verdict, command = type(view.root), _verdict_for(fingerprint(view)), _command(view.root)
    listed, row = _listed_for(view)
    source = None if listed is None else source_hash(listed.__module__)
    admitted = listed is not None and ROW in vars(listed)
    home = _package(listed or kind) if admitted else "transformers"
    own = [own for own in view.find(own_classes) if _package(own) != home]
    newer = Version(transformers.__version__).release[:2] > Version(TESTED).release[:2]
    unchanged = row.source in (None, source) or not (admitted or newer)
    stock = listed is not None and not own and (listed is kind or listed not in kind.__mro__)
    if verdict is not None and verdict.result != "exact":
        reasons = ", ".join(f"{batch}: {error:.0e}" for batch, error in verdict.errors.items()) or verdict.note
        raise UnsupportedModelError(
            f"{kind.__name__} was found {verdict.result} over several ranks ({reasons})",
            "hf-burst check compared it with one process",
            f"Once its source is changed, {command} compares it anew",
        )
    if verdict is not None and verdict.uncompared and not (stock and unchanged):
        logger.warning(
            "%s was compared with one process on text, and not on %s. Compare a batch of yours: run hf-burst check "
            "FOLDER --batch FILE.",
            *(kind.__name__, verdict.uncompared),
        )
    if verdict is not None and not stock:
        return f"checked {verdict.fingerprint}"
    if listed is None:
        raise UnsupportedModelError(
            f"{kind.__name__} has not been checked to be exact over several ranks",
            "what it computes over tokens may be computed over those of one rank only",
            f"To compare it with one process and have it served, run on every node: {command}",
        )
    if verdict is None and not unchanged and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "The source of %s (transformers %s, hash %s) differs from the one that was compared (hash %s). To compare "
            "it with one process, run on every node: %s",
            *(listed.__name__, transformers.__version__, source, row.source, command),
        )
    names = [own.__qualname__ for own in own]
    if not names and kind.forward.__module__.partition(".")[0] not in (home, "transformers"):
        names = [f"{kind.__qualname__}.forward"]
    if names:
        logger.warning(
            "From outside of %s, and not compared with one process: %s. Whatever it computes over tokens is computed "
            "over those of one rank only. Compare it: run hf-burst check, or hf_burst.check_model(model).",
            *("Transformers" if home == "transformers" else home, ", ".join(names)),
        )
    return f"admitted {source}" if admitted else "shipped"


def _command(model: PreTrainedModel) -> str:
    """Returns the command that compares a model with one process."""
    name, in_python = model.config.name_or_path, "hf_burst.check_model(model)"
    return f"hf-burst check {shlex.quote(name)} (or, in Python, {in_python})" if name else in_python


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def own_classes(view: ModelView) -> list[type]:
    """Returns the classes of a model and its layers that no known library defines, sorted by name."""
    classes = {base for kind in view.classes for base in kind.__mro__}
    own = [kind for kind in classes if _package(kind) not in _TABLE["libraries"]["names"]]
    own = [kind for kind in own if not _NORMS.fullmatch(f"{kind.__module__}.{kind.__qualname__}")]
    return sorted(own, key=lambda kind: kind.__qualname__)


def fingerprint(view: ModelView) -> str | None:
    """Returns a hash, 12 hexadecimal digits, of what a verdict on a model depends on: its class, the source of the
    class, of its layers and of the modules that they import, and the versions of Transformers, torch and hf_burst;
    `None` if one of them has no source file."""
    own = view.find(own_classes)
    roots = set(map(_package, own))
    pending = {cls.__module__ for kind in view.classes for cls in kind.__mro__}
    hashes: dict[str, str | None] = {}
    while pending:
        name = pending.pop()
        in_transformers = name.startswith("transformers.models.")
        if name in hashes or not (in_transformers or name.partition(".")[0] in roots):
            continue
        hashes[name] = source_hash(name)
        names = vars(sys.modules[name]) if name in sys.modules and not in_transformers else {}
        if "__path__" not in names:  # a package's names depend on what else was imported
            pending |= {str(getattr(value, "__module__", getattr(value, "__name__", ""))) for value in names.values()}
    if None in hashes.values():
        return None
    sources = sorted(map(str, {*hashes.values()}))
    versions = [transformers.__version__, torch.__version__, __version__]
    parts = [type(view.root).__qualname__, [kind.__qualname__ for kind in own], sources, versions]
    return _digest(json.dumps(parts).encode())


def source_hash(module: str) -> str | None:
    """Returns a short hash of the source of a loaded Python module; `None` if it has no file, as in a notebook."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return _digest(Path(file).read_bytes()) if file else None
    except OSError:
        return None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def remember(verdict: Verdict) -> Path:
    """Writes a verdict to disk for [`served_by`] and returns the path. Raises a ConfigError if it cannot."""
    path = _remembered(verdict.fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(json.dumps(asdict(verdict), indent=1))
        os.chmod(file.name, 0o644)  # other users may share the folder
        os.replace(file.name, path)  # atomic, so no other process reads half of it
    except OSError as problem:
        raise ConfigError(
            f"The verdict ({verdict.result}) cannot be remembered", str(problem), "Set HF_HOME to a folder to write in"
        ) from problem
    return path


def _verdict_for(found_for: str | None) -> Verdict | None:
    """Returns the verdict on disk; `None` if there is none, or something else wrote the file."""
    with suppress(OSError, ValueError, TypeError):
        return Verdict(**json.loads(_remembered(found_for or "").read_text()))
    return None


def _remembered(found_for: str) -> Path:
    """Returns the file of a verdict, in `$HF_HOME/hf_burst`, `$XDG_CACHE_HOME/hf_burst` or `~/.cache/hf_burst`."""
    home = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "hf_burst" / f"check-{found_for}.json"


def check_adapters(model: nn.Module) -> None:
    """Raises for peft adapters that are not served exactly, whether they came before or after the patch."""
    why = "it has not been found exact where every rank holds a part of the tokens"
    for name, config in getattr(model, "peft_config", {}).items():
        method = getattr(config.peft_type, "value", config.peft_type)
        adapter = f"The adapter {name!r} of the peft method {method}"
        if method not in PEFT_METHODS:
            raise UnsupportedModelError(f"{adapter} is not served", why, f"Served are {', '.join(PEFT_METHODS)}")
        for option, value, default in _changed(config):
            if option not in (*_TABLE["peft"]["every_method"], *PEFT_METHODS[method]):
                raise UnsupportedModelError(f"{adapter} sets {option}={value!r}", why, f"Leave it at {default!r}")
            for inner, needed in _TABLE["peft"]["within"].get(option, {}).items():
                if getattr(value, inner) != needed:
                    raise UnsupportedModelError(
                        f"{adapter} sets {option} with {inner}={getattr(value, inner)!r}",
                        why,
                        f"Set {inner}={needed!r} there, or leave out {option}",
                    )


def _changed(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the options of a config that differ from their defaults: name, value and default."""
    for option in fields(config):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        value = getattr(config, option.name)
        if value != default and (value or default):  # an empty list counts as None
            yield option.name, value, default


def trl_classes(kind: type) -> list[type]:
    """Returns the classes of TRL among a class and its bases, in the order in which Python looks them up."""
    return [base for base in kind.__mro__ if base.__module__.startswith("trl.")]


def trainer_role(trainer: type) -> str | None:
    """Returns `"generates"` or `"distills"` if the table says so of a trainer, or of the nearest TRL class that the
    user's trainer inherits from; TRL's other subclasses have other losses."""
    own = (*trl_classes(trainer), trainer)[0]
    return TRAINERS.get(f"{own.__module__}.{own.__name__}")
