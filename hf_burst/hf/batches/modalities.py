"""Images and sound in batches: which models support them, and what all ranks must have in common."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from ...errors import BatchError
from ..admission import row_of
from .documents import BOUNDARY_KEYS, TOKEN_KEYS, TYPE_KEYS, described, holds_values, tensors_in, texts_of

SAME_MODALITIES = "Each rank that shares a batch needs all of its images and sound: give all of them the same batch."
_TOKEN_TYPES = TYPE_KEYS[:2]  # keys with a known type number for text
_OF_TYPE = {1: "images", 2: "videos", 3: "sound"}  # as processors number them
# in names of arguments with sound, its lengths or its padding
_SOUND = ("audio", "input_features", "input_values", "feature_attention_mask", "padding_mask")
_TOKEN_ID = re.compile("(image|video|audio|vision|media).*_token_(id|index)$")  # config entries with placeholder tokens
_TEXT = {*TOKEN_KEYS, "position_ids", *BOUNDARY_KEYS, *_TOKEN_TYPES, "attention_mask", "labels"}


def check_modalities(batch: Mapping[str, Any], kind: type, text_type: int = 0) -> str:
    """Returns a description of the inputs besides text in a batch of a multimodal model, to be equal on all ranks:
    names and shapes. Raises for those that its class was not compared on. `text_type` is the type of text tokens in
    `token_type_ids`."""
    name, held = kind.__name__, {key: value for key, value in batch.items() if holds_values(key, value)}
    marked = {key: text_type if key == "token_type_ids" else 0 for key in _TOKEN_TYPES}
    others = [key for key in held if key not in _TEXT]
    others += [key for key in _TOKEN_TYPES if key in held and (held[key] != marked[key]).any()]
    served = row_of(kind).modalities
    asked = {modality for key in others for modality in _modalities_of(key, held[key], marked.get(key))}
    *first, last = "text", *served
    known = f"{', '.join(first)} and {last} are" if first else "text is"
    packed = "cu_seq_lens_q" in held and "position_ids" not in held
    BatchError.refuse(
        (
            not asked <= {*served},
            f"The batch holds {', '.join(others)}. Of {name} {known} served: more was not compared over several ranks. "
            "Give batches without the rest.",
        ),
        (
            text_type and "token_type_ids" not in held,
            f"In {name} tokens see later ones unless token_type_ids say that they do not. Give token_type_ids of 1.",
        ),
        (
            others and row_of(kind).positions == "row" and packed,
            f"The documents of a packed row have images, and {name} counts positions through the whole row. Give "
            "position_ids that begin anew in each document, or one document a row.",
        ),
    )
    return ", ".join(f"{key} {described(held[key])}" for key in sorted(others))


def _modalities_of(key: str, value: Any, text_type: int | None) -> set[str]:
    """Returns the modalities of an argument, according to its token types or its name."""
    if text_type is not None:
        return {_OF_TYPE.get(kind, "images") for kind in value.unique().tolist() if kind != text_type}
    sounds = any(word in key for word in _SOUND) and "video" not in key
    return {"sound" if sounds else "videos" if "video" in key else "images"}


def values_besides_text(batch: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the values of a batch that are not text, including those in containers."""
    for key in sorted(batch):
        if key not in _TEXT:
            yield from tensors_in(batch[key])


def same_for_every_text(batch: Mapping[str, Any], config: PreTrainedConfig) -> bool:
    """Returns whether all texts of a full batch have the same images and sound, or none.

    Every other value then consists of one equal part per text, and all texts have the same number of placeholder
    tokens of each kind. Different numbers of placeholders would mean that parts and texts do not match.
    """
    values = [value for key, value in batch.items() if key not in _TEXT and holds_values(key, value)]
    if not values:
        return True
    known = (value for name, value in config.to_dict().items() if _TOKEN_ID.search(name))
    kinds = {number for number in known if isinstance(number, int)}
    if not kinds or not all(isinstance(value, torch.Tensor) for value in values):
        return False
    ids, texts = batch["input_ids"], texts_of(batch)
    if any(len(value) % len(texts) for value in values):
        return False
    marks = torch.stack([ids == kind for kind in kinds])
    counts = torch.stack([marks[:, text.row, text.start : text.stop].sum(1) for text in texts])
    parts = [counts, *(value.unflatten(0, (len(texts), -1)) for value in values)]
    return bool(torch.stack([(part == part[:1]).all().to(ids.device) for part in parts]).all())  # one GPU sync
