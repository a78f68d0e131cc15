"""Images, videos and sound over ranks beside one process, in fp64, by a tiny model of the family. Runs on all ranks."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from ..hf.models.cut_point import family_of, served_modalities
from ..hf.patch import patch_under_check
from ..layers.loss import IGNORE_INDEX
from .differences import worst_error
from .tiny import Double
from .tiny_hearing import hearing_batch, hearing_model, padded
from .tiny_pictures import Batch, documents, seeing_batch
from .tiny_seeing import seeing_model

# kinds of batches of `tiny_pictures` and `tiny_hearing`, by what they hold
_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "images": ("one image", "images", "with and without", "packed"),
        "videos": ("video",),
        "sound": ("clips", "padded clips"),
    }
)


def errors_of_modalities(model_class: type[PreTrainedModel]) -> tuple[dict[str, float], str]:
    """The greatest error of the loss or of a gradient for each kind of batch that a class is served with besides text.

    The language model and the towers are those of the family's tiny model, whatever the config that is checked has.

    Args:
        model_class (`type`): The class, or one that is made from it.

    Returns:
        `tuple[dict[str, float], str]`: The errors, by names such as `"images, packed"`; and which modalities could not
        be compared, with the reason, because no tiny model could be made or computed in one process.
    """
    errors: dict[str, float] = {}
    missing: list[str] = []
    for modality in served_modalities(model_class):
        try:
            for kind in _KINDS[modality]:
                name = f"{modality}, {kind}" if len(_KINDS[modality]) > 1 else modality
                errors[name] = error_on(family_of(model_class), kind, model_class)
        except NotComparableError as problem:
            missing.append(f"{modality} ({problem})")
    return errors, ", ".join(missing)


class NotComparableError(Exception):
    """One process could not compute the tiny model of a family."""


def error_on(family: str, kind: str, model_class: Any = None) -> float:
    """The greatest error of the loss or of a gradient on one kind of batch, each relative to its greatest entry.

    Args:
        family (`str`): Which tiny model is made.
        kind (`str`): The kind of batch.
        model_class (`type`, *optional*): Of which class; by default that of the family.

    Raises:
        NotComparableError: If there is no loss of one process.
    """
    hears = kind in _KINDS["sound"]
    make: Callable[..., PreTrainedModel] = hearing_model if hears else seeing_model
    with Double():
        try:
            plain, patched = make(family, model_class), make(family, model_class)
            if hears:
                batch = hearing_batch(family) if kind == "clips" else padded(hearing_batch(family))
            else:
                batch = seeing_batch(family, kind)
            if kind == "packed":
                expected, positions = _one_by_one(plain, documents(family))
                batch |= positions
            else:
                expected = plain(**batch).loss
        except Exception as problem:  # whatever another version of a class makes of it
            lines = filter(None, str(problem).split("\n"))
            raise NotComparableError(f"{type(problem).__name__}: {next(lines, '')}") from problem
        patch_under_check(patched)
        return worst_error(patched, patched(**batch).loss, plain, expected)


def _one_by_one(model: Any, parts: list[Batch]) -> tuple[torch.Tensor, Batch]:
    """The loss of documents, and where they lie if places of images are positions: those of the packed row too."""
    seen: list[torch.Tensor | None] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs.get("position_ids")), with_kwargs=True
    )
    counts = [int((part["labels"][:, 1:] != IGNORE_INDEX).sum()) for part in parts]
    losses = [model(**part).loss * count for part, count in zip(parts, counts, strict=True)]
    hook.remove()
    axes = next((len(places) for places in seen if places is not None and places.ndim == 3), None)
    if axes is None:
        return torch.stack(losses).sum() / sum(counts), {}
    texts = [torch.arange(part["input_ids"].shape[1]).expand(axes, 1, -1) for part in parts]
    places = [text if own is None or own.ndim < 3 else own for own, text in zip(seen, texts, strict=True)]
    return torch.stack(losses).sum() / sum(counts), {"position_ids": torch.cat(places, dim=-1)}
