"""Towers that do not learn run once, without gradients, also where checkpoints and adapters ask for some."""

from collections.abc import Callable
from unittest import mock

import pytest
from transformers import PreTrainedModel

from hf_burst.hf.parts import towers
from tests.support import models
from tests.support.gradients import Result, assert_equal, loss_and_gradients
from tests.support.ranks import RankPool
from tests.support.tiny_pictures import seeing_batch
from tests.support.tiny_seeing import seeing_model

Ranks = Callable[[int], RankPool]


def train(family: str, patched: bool) -> tuple[Result, int]:
    """Loss and gradients of the language model, and how often the first norm of the tower ran."""
    model = adapted(family)
    if patched:
        models.patch(model, models.config_of())
    runs = list[int]()
    norms = (module for name, module in model.named_modules() if name.endswith(("blocks.0.norm1", "0.layer_norm1")))
    next(norms).register_forward_pre_hook(lambda *_: runs.append(1))
    return loss_and_gradients(model, seeing_batch(family), single=True), len(runs)


def adapted(family: str) -> PreTrainedModel:
    """A model whose tower does not learn, as trainers prepare it for checkpoints and adapters."""
    model = seeing_model(family).requires_grad_(False)
    model.get_decoder().requires_grad_(True)
    model.get_output_embeddings().requires_grad_(True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def on_ranks(rank: int, size: int, family: str) -> tuple[Result, int]:
    return train(family, patched=True)


@pytest.mark.parametrize("family", [pytest.param("Gemma3", marks=pytest.mark.full), "Llava", "Qwen2_5_VL"])
def test_a_frozen_tower_runs_once(ranks: Ranks, family: str) -> None:
    wanted, plain_runs = train(family, patched=False)
    found = ranks(2).run(on_ranks, family)
    assert_equal([result for result, _ in found], wanted, 1e-5)  # norms in fp32
    assert plain_runs == 2, "Transformers alone computes it again, for a gradient that nothing uses"
    assert {runs for _, runs in found} == {1}
    with mock.patch.object(towers, "learns", return_value=True):
        assert train(family, patched=True)[1] == 2


def test_the_gradient_of_pixels_is_there_if_it_is_asked_for() -> None:
    model, batch = models.patch(adapted("Llava"), models.config_of()), seeing_batch("Llava")
    batch["pixel_values"].requires_grad_(True)
    model(**batch).loss.backward()
    assert float(batch["pixel_values"].grad.norm()) > 0
