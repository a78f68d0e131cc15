"""Images in the batches of models that see: which are served, and what ranks must have in common."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...errors import BatchError
from ..models.cut_point import TOKEN_INPUTS, dealt_by, watches
from .documents import BOUNDARY_KEYS

SAME_IMAGES = "Each rank that shares a batch needs all of its images: give all of them the same batch."
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # not 0 where a token stands for an image or sound
_SOUND = ("audio", "input_features", "feature_attention_mask", "input_values")  # parts of the names of its arguments
_TEXT = {*(known.name for known in TOKEN_INPUTS), *BOUNDARY_KEYS, *_TOKEN_TYPES, "attention_mask", "labels"}


def check_modalities(batch: Mapping[str, Any], kind: type, text_type: int = 0) -> str:
    """What a batch of a model with several modalities holds besides text, to be the same on all ranks.

    Args:
        batch (mapping): The arguments of the model.
        kind (`type`): Its class.
        text_type (`int`, defaults to 0): The type of a token of text, where the batch has `token_type_ids`.

    Returns:
        `str`: Names and shapes; empty for text.

    Raises:
        BatchError: If it holds images, and the class was not compared on images, or it holds sound.
    """
    name, held = kind.__name__, {key: value for key, value in batch.items() if _holds_values(value)}
    marked = {key: text_type if key == "token_type_ids" else 0 for key in _TOKEN_TYPES}
    others = [key for key in held if key not in _TEXT]
    others += [key for key in _TOKEN_TYPES if key in held and (held[key] != marked[key]).any()]
    sees, watching = dealt_by(kind) is not None, watches(kind)
    hears = any(part in key for part in _SOUND for key in others)
    if others and (not sees or hears or (any("video" in key for key in others) and not watching)):
        served = "text, images and videos" if watching else "text and images" if sees else "text"
        raise BatchError(
            f"The batch holds {', '.join(others)}. Of {name} {served} is served: more was not compared over several "
            "ranks. Give batches without the rest."
        )
    if text_type and "token_type_ids" not in held:
        raise BatchError(
            f"In {name} tokens see later ones unless token_type_ids say that they do not. Give token_type_ids of 1."
        )
    shapes = {key: tuple(held[key].shape) if isinstance(held[key], torch.Tensor) else "" for key in sorted(others)}
    return ", ".join(f"{key} {shape}" for key, shape in shapes.items())


def pixels_of(batch: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The values of a batch that are no text, in containers too."""
    for key in sorted(batch):
        if key not in _TEXT:
            yield from _tensors(batch[key])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor) and value.ndim:
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(torch.tensor([inner]) if isinstance(inner, int | float) else inner)


def _holds_values(value: Any) -> bool:
    """Whether an argument is a tensor, or several, and no setting."""
    return bool(value.ndim) if isinstance(value, torch.Tensor) else isinstance(value, Mapping | list | tuple)
