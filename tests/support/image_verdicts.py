"""The verdict on a class with images: two ranks beside one process, in fp64, by a tiny model of the family. Runs on all
ranks."""

import inspect
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_burst.check.compare import TOLERANCE, compare, worst_error
from hf_burst.check.tiny import Double
from hf_burst.errors import BurstError
from hf_burst.hf.admission import Verdict
from hf_burst.hf.patch import patch_under_check
from hf_burst.layers.loss import IGNORE_INDEX
from tests.support.tiny_models import tiny_model, tiny_wrapper, wrapper_names
from tests.support.tiny_pictures import KINDS, WITH_VIDEO, Batch, documents, seeing_batch
from tests.support.tiny_seeing import FAMILIES, seeing_model

_FILMS = "pixel_values_videos"


def compare_images(name: str) -> Verdict:
    """The errors of a class by kind of batch; or, if images are refused, those on text and the reason."""
    family = name.removesuffix("ForConditionalGeneration")
    if family not in FAMILIES:
        return _refused(name)
    errors = {kind: error_on(family, kind) for kind in KINDS if kind != "video" or family in WITH_VIDEO}
    exact = all(error <= TOLERANCE for error in errors.values())  # false for nan
    model = seeing_model(family)
    watches = "video" in errors or _FILMS not in inspect.signature(model.forward).parameters
    return Verdict("exact" if exact else "wrong", errors, "" if watches else _sentence(model, _FILMS))


def error_on(family: str, kind: str) -> float:
    """The greatest error of the loss or of a gradient on one kind of batch, each relative to its greatest entry."""
    with Double():
        plain, patched, batch = seeing_model(family), seeing_model(family), seeing_batch(family, kind)
        if kind == "packed":
            expected, positions = _one_by_one(plain, documents(family))
            batch |= positions
        else:
            expected = plain(**batch).loss
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


def _refused(name: str) -> Verdict:
    """Of a class that takes text alone, or nothing."""
    make = partial(tiny_wrapper if name in wrapper_names() else tiny_model, name)
    verdict = compare(make)
    if verdict.result != "exact":
        return Verdict(verdict.result, note=verdict.note)
    model = make()
    arguments = inspect.signature(model.forward).parameters
    pixels = next((key for key in arguments if "pixel" in key or "patches" in key), None)
    if pixels is None:
        return Verdict("refused", {"text": max(verdict.errors.values())}, f"{name} takes no images.")
    return Verdict("refused", {"text": max(verdict.errors.values())}, _sentence(model, pixels))


def _sentence(model: PreTrainedModel, argument: str) -> str:
    """By which a batch with this argument is refused."""
    ids = torch.ones(1, 8, dtype=torch.long)
    patch_under_check(model)
    try:
        model(input_ids=ids, labels=ids, **{argument: torch.zeros(1, 3, 16, 16)})
    except BurstError as problem:
        return str(problem)
    raise AssertionError(f"{type(model).__name__} takes {argument}, and was not compared on it.")
