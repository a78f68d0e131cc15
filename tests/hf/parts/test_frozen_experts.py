"""Experts that do not learn are computed by Transformers, not by Liger, with the same results."""

from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch

from hf_burst.hf.parts import frozen_experts
from hf_burst.hf.view import ModelView
from tests.support import models
from tests.support.tiny_models import tiny_model


def liger(module: Any) -> Any:
    """A forward as Liger binds one to experts, which counts its calls."""

    def forward(self: Any, *args: Any) -> Any:
        forward.calls += 1
        return type(module).forward(self, *args)

    forward.calls, forward.__module__ = 0, "liger_kernel.transformers.swiglu"
    return MethodType(forward, module)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("tile", [0, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_that_do_not_learn_are_not_computed_by_liger(dtype: torch.dtype, frozen: bool, tile: int) -> None:
    model = tiny_model("Qwen3MoeForCausalLM").to(dtype).train()
    model.set_experts_implementation("grouped_mm")
    found = frozen_experts.experts(ModelView(model))
    assert len(found) == 4
    for module in found:
        module.requires_grad_(not frozen)
    batch = models.make_batch("packed")
    wanted = models.plain_loss(model, batch)
    wanted.backward()
    gradients = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    own = [liger(module) for module in found]
    for module, forward in zip(found, own, strict=True):
        module.forward = forward
    models.patch(model, models.config_of(memory="manual", tiled_mlp=tile))
    with mock.patch.object(frozen_experts, "grouped_products", return_value=True):
        loss = model(**batch).loss
        loss.backward()
    assert [bool(forward.calls) for forward in own] == [not frozen or dtype == torch.float32] * 4
    close = {"check_dtype": False, "rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(loss, wanted, **close)
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        assert (weight.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(weight.grad, gradient, **close)
