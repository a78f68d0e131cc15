"""Models of several modalities on text, over ranks, beside one process."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import hf_burst
from hf_burst.check.compare import KINDS, compare, make_batch
from hf_burst.check.tiny import tiny_copy
from hf_burst.errors import BatchError, UnsupportedModelError
from hf_burst.hf.patch import patch_under_check
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
CLASSES = (
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)


def make(name: str) -> PreTrainedModel:
    kind = getattr(transformers, name)
    return tiny_copy(kind, kind.config_class()).to(torch.get_default_dtype())


def compare_on_ranks(rank: int, size: int, name: str) -> tuple[str, dict[str, float], str]:
    verdict = compare(partial(make, name))
    return verdict.result, verdict.errors, verdict.note


@pytest.mark.parametrize(("size", "name"), zip((2, 3, 3, 2), CLASSES, strict=True))
def test_text_is_exact(ranks: Ranks, name: str, size: int) -> None:
    for result, errors, note in ranks(size).run(compare_on_ranks, name):
        assert result == "exact", note
        assert set(errors) == set(KINDS)


def test_what_is_not_text_is_refused_with_a_sentence() -> None:
    model = patch_under_check(make(CLASSES[2]))
    batch = make_batch("one sequence", model)
    with pytest.raises(BatchError, match=r"holds pixel_values\. Of Mistral3ForConditionalGeneration text is served"):
        model(**batch, pixel_values=torch.zeros(1, 3, 28, 28))
    gemma = patch_under_check(make(CLASSES[0]))
    with pytest.raises(BatchError, match="holds token_type_ids"):
        gemma(**batch, token_type_ids=torch.ones_like(batch["input_ids"]))


def test_a_class_that_nobody_compared_says_how_to() -> None:
    with pytest.raises(UnsupportedModelError, match="has not been checked to be exact"):
        hf_burst.patch_model(make(CLASSES[1]))
