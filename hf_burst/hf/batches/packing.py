"""Joins samples with images or sound into one packed row."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import BatchError
from ...layers.loss import IGNORE_INDEX
from .documents import BOUNDARY_KEYS, TYPE_KEYS, batch_shape, described, real_tokens

_PER_TOKEN = ("input_ids", "labels", *TYPE_KEYS, "position_ids")
# defaults for samples that lack a key: no label, and text
_FILLED = {"labels": IGNORE_INDEX, "mm_token_type_ids": 0, "moe_mm_token_type_ids": 0}


def join_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins samples into one packed row. They do not see each other.

    Args:
        samples (sequence of mappings): A collator's output for each single sample: per-token tensors of shape
            `(1, tokens)`, and others whose first dimension counts images, patches, tiles or clips.

    Returns:
        `dict`: The concatenated tokens without padding, the other values concatenated, an `attention_mask` of ones, and
        the boundaries `cu_seq_lens_q` and `cu_seq_lens_k`. The first token of a sample has the label -100.

    Raises:
        BatchError: If a sample has several rows, or its tensors cannot be concatenated.
    """
    bounds, parts = [0], list[dict[str, Any]]()
    for sample in samples:
        rows, length = batch_shape(sample)
        if rows != 1:
            raise BatchError(f"The collator made {rows} rows of one sample; packing joins samples of one row.")
        start, stop = (real_tokens(sample) or ((0, length),))[0]
        own = {name: value for name, value in sample.items() if name != "attention_mask"}
        _check(own, length)
        for name in own.keys() & {*_PER_TOKEN}:
            own[name] = own[name].narrow(-1, start, stop - start).clone()
        if "labels" in own:
            own["labels"][:, 0] = IGNORE_INDEX
        parts.append(own)
        bounds.append(bounds[-1] + stop - start)
    names = dict.fromkeys(name for part in parts for name in part)
    joined = {name: _joined(name, parts) for name in names}
    edges = torch.tensor(bounds, dtype=torch.int32)
    whole = torch.ones_like(joined["input_ids"])  # trainers count tokens by it
    return {**joined, "attention_mask": whole, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges}


def _check(sample: Mapping[str, Any], length: int) -> None:
    """Raises for values that cannot be joined: unknown per-token values, and patches of all images in one row."""
    others = [
        name
        for name, value in sample.items()
        if name not in _PER_TOKEN and isinstance(value, Tensor) and tuple(value.shape) == (1, length)
    ]
    refused = [*others, *(name for name in (*BOUNDARY_KEYS, "target_sizes") if sample.get(name) is not None)]
    if refused:
        raise BatchError(
            f"A sample holds {', '.join(refused)}, which packing cannot join. Give samples of one document each, whose "
            f"values a token are {', '.join(_PER_TOKEN)}; or leave out packing for this model."
        )


def _joined(name: str, parts: Sequence[Mapping[str, Any]]) -> Any:
    """Joins the values of one argument over all samples."""
    if name in _PER_TOKEN:
        if name not in _FILLED and any(name not in part for part in parts):
            raise BatchError(f"Some samples have {name}, and others have none. Give it to all, or to none.")
        held = [part.get(name, torch.full_like(part["input_ids"], _FILLED.get(name, 0))) for part in parts]
        return torch.cat(held, dim=-1)
    values = [part[name] for part in parts if part.get(name) is not None]
    if all(isinstance(value, list | tuple) for value in values):
        return [item for value in values for item in value]
    tensors = [value for value in values if isinstance(value, Tensor) and value.ndim]
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(tensors) != len(values) or len(shapes) > 1 or any(tensor.ndim > 4 for tensor in tensors):
        found = ", ".join(str(described(value)) for value in values)
        raise BatchError(
            f"{name} of the samples is {found}: packing joins tensors of at most 4 dimensions that are equal but for "
            "the first, which counts images, patches or clips. Leave out packing for this model."
        )
    return torch.cat(tensors)
