"""The verdict on a class with images: two ranks beside one process, in fp64. Runs on all ranks."""

import inspect
from functools import partial

import torch
from transformers import PreTrainedModel

from hf_burst.check.compare import TOLERANCE, compare
from hf_burst.check.modalities import error_on
from hf_burst.check.tiny_pictures import KINDS, WITH_VIDEO
from hf_burst.check.tiny_seeing import FAMILIES, seeing_model
from hf_burst.errors import BurstError
from hf_burst.hf.models.verdicts import Verdict
from hf_burst.hf.patch import patch_under_check
from recipes.tiny_models import tiny_model
from recipes.tiny_wrappers import tiny_wrapper, wrapper_names

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
