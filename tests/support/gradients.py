"""Loss and all gradients of a pass over ranks, beside those of one process."""

from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_burst.check.tiny import Double

Result = tuple[float, dict[str, torch.Tensor]]
TOLERANCE = 1e-9


def loss_and_gradients(model: PreTrainedModel, batch: dict[str, Any], single: bool = False) -> Result:
    """Loss and gradients of a pass, in fp64; `single` leaves what Transformers computes in fp32 as it is. Gradients
    that are sharded are gathered."""
    with nullcontext() if single else Double():
        loss = model(**batch).loss
        loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}
    return loss.item(), whole


def assert_equal(found: list[Result], wanted: Result, tolerance: float = TOLERANCE) -> None:
    """Compares the losses of all ranks, and the mean of their gradients, with those of one process."""
    loss, gradients = wanted
    assert len(gradients) > 20
    assert all(abs(own - loss) < tolerance * abs(loss) for own, _ in found)
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        mean = sum(own.get(name, torch.zeros(())) for _, own in found) / len(found)
        error = float((mean - gradient).norm())
        assert error <= tolerance * max(float(gradient.norm()), 1e-4 * largest), name
