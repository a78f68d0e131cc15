"""How far the loss and the gradients over ranks are from those of one process."""

import torch
import torch.distributed as dist
from transformers import PreTrainedModel


def gradients(model: PreTrainedModel, loss: torch.Tensor, ranks: int = 1) -> list[torch.Tensor]:
    """The gradients of all weights, averaged over ranks; taken out of the model."""
    loss.backward()
    found = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    model.zero_grad()
    if ranks > 1:
        for gradient in found:
            dist.all_reduce(gradient)
            gradient /= ranks
    return found


def worst_error(patched: PreTrainedModel, loss: torch.Tensor, plain: PreTrainedModel, expected: torch.Tensor) -> float:
    """The greatest error of the loss or of a gradient, each relative to its greatest entry.

    Args:
        patched (`PreTrainedModel`): The model over the ranks.
        loss (`torch.Tensor`): What it computed.
        plain (`PreTrainedModel`): The same model in one process.
        expected (`torch.Tensor`): The loss of that.
    """
    wanted = gradients(plain, expected)
    errors = [abs(loss - expected) / abs(expected)]
    # gradients that vanish, as that of a key's bias, are compared with the greatest one
    least = 1e-3 * max(gradient.abs().max() for gradient in wanted)
    for averaged, gradient in zip(gradients(patched, loss, dist.get_world_size()), wanted, strict=True):
        errors.append((averaged - gradient).abs().max() / max(gradient.abs().max(), least))
    worst = torch.stack([error.detach() for error in errors]).max()  # nan if any is
    return float(f"{float(worst):.0e}")
