"""What parts hand to the model besides its tokens: without it results are right, and work is done for nothing."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

import hf_burst
from hf_burst.hf.parts.loss import Loss
from tests.hf.test_patch import part_of
from tests.support import models
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


def given_to(model: Any, call: Callable[[], Any]) -> dict[str, Any]:
    """The arguments that a model's own forward is given in a call."""
    with mock.patch.object(type(model), "forward", autospec=True, side_effect=type(model).forward) as forward:
        call()
    return forward.call_args.kwargs


def arguments(rank: int, size: int) -> tuple[int, list[Any], bool, bool]:
    """How many rows of logits are asked of this rank, the caches of a training and an evaluation, and whether losses of
    tokens come with labels and with a loss of the model."""
    model, batch = models.patch(models.make_model("llama")), models.make_batch("plain")
    model.eval()
    kept = given_to(model, lambda: model(input_ids=batch["input_ids"], use_cache=False, logits_to_keep=3))
    caches = []
    for train in (True, False):
        model.train(train)
        caches.append(given_to(model, lambda: model(**batch))["use_cache"])
    asked = given_to(model, lambda: hf_burst.token_losses(model, batch))
    computed = part_of(model, Loss).computed
    return len(kept["logits_to_keep"]), caches, asked.get("labels") is not None, computed


@pytest.mark.parametrize("size", [2, 3])
def test_the_model_does_nothing_in_vain(ranks: Ranks, size: int) -> None:
    rows, *others = zip(*ranks(size).run(arguments), strict=True)
    assert sum(rows) == 3, "of all ranks together, and not of each"
    assert others == [([False, False],) * size, (False,) * size, (False,) * size]
