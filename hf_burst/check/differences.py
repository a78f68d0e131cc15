"""Differences of loss and gradients between several ranks and one process."""

import torch
import torch.distributed as dist
from transformers import PreTrainedModel


def gradients(model: PreTrainedModel, loss: torch.Tensor, ranks: int = 1) -> list[torch.Tensor]:
    """Computes the gradients of all weights, averaged over ranks, and clears them in the model."""
    loss.backward()
    found = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    model.zero_grad()
    if ranks > 1:
        for gradient in found:
            dist.all_reduce(gradient)
            gradient /= ranks
    return found


def worst_error(patched: PreTrainedModel, loss: torch.Tensor, plain: PreTrainedModel, expected: torch.Tensor) -> float:
    """Returns the largest error of the loss or a gradient, each relative to its largest entry.

    Args:
        patched (`PreTrainedModel`): The model over the ranks.
        loss (`torch.Tensor`): Its loss.
        plain (`PreTrainedModel`): The same model in one process.
        expected (`torch.Tensor`): The loss of `plain`.
    """
    wanted = gradients(plain, expected)
    errors = [abs(loss - expected) / abs(expected)]
    # vanishing gradients, such as those of key biases, are compared with the largest gradient
    least = 1e-3 * max(gradient.abs().max() for gradient in wanted)
    for averaged, gradient in zip(gradients(patched, loss, dist.get_world_size()), wanted, strict=True):
        errors.append((averaged - gradient).abs().max() / max(gradient.abs().max(), least))
    worst = torch.stack([error.detach() for error in errors]).max()  # nan if any error is nan
    return float(f"{float(worst):.0e}")
