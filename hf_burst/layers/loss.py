"""The cross-entropy of tokens, summed or per token."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ..numerics import accumulation_dtype

IGNORE_INDEX = -100


def shift_labels(labels: Tensor) -> Tensor:
    """Shifts labels so that token i holds the label of token i + 1; ignores the last. To be done before sharding."""
    return functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].contiguous()


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sums the cross-entropies of this rank's tokens, in fp32 (fp64 for fp64).

    Args:
        logits (`torch.Tensor` of shape `(batch, n, vocabulary)`): Scores.
        targets (`torch.LongTensor` of shape `(batch, n)`): Shifted labels of the same tokens; -100 does not count.
    """
    return token_losses(logits.flatten(0, -2), targets.flatten(), "sum")


def token_losses(logits: Tensor, targets: Tensor, reduction: str = "none") -> Tensor:
    """Returns the cross-entropy of each token, `(m,)`, which [`token_loss_sum`] sums; 0 for targets of -100.

    Args:
        logits (`torch.Tensor` of shape `(m, vocabulary)`): Scores.
        targets (`torch.LongTensor` of shape `(m,)`): Shifted labels of the same tokens.
        reduction (`str`, defaults to `"none"`): As torch's; `"sum"` for one number.
    """
    wide = logits.to(accumulation_dtype(logits.dtype))
    return functional.cross_entropy(wide, targets.to(logits.device), ignore_index=IGNORE_INDEX, reduction=reduction)


def token_divergences(
    logits: Tensor,
    teacher: Tensor,
    targets: Tensor,
    kind: str,
    top_k: int | None,
    temperature: float,
    beta: float = 0.5,
) -> Tensor:
    """Returns the divergence of two next-token distributions for each token, `(m,)`; 0 for targets of -100.

    Args:
        logits (`torch.Tensor` of shape `(m, vocabulary)`): Scores of the student.
        teacher (`torch.Tensor` of shape `(m, vocabulary)`): Scores of the teacher.
        targets (`torch.LongTensor` of shape `(m,)`): Shifted labels of the same tokens.
        kind (`str`): `"forward_kl"`, KL(teacher | student); `"reverse_kl"`, KL(student | teacher); or `"jsd"`, the
            generalized Jensen-Shannon divergence (arXiv 2306.13649, equation 1).
        top_k (`int`, *optional*): Restricts both to the teacher's likeliest `top_k` tokens, and normalizes them over
            these.
        temperature (`float`): Divides the scores of both.
        beta (`float`, defaults to 0.5): The teacher's share of the mixture for `"jsd"`, between 0 and 1.
    """
    if top_k is not None and top_k < teacher.shape[-1]:
        chosen = teacher.topk(top_k, dim=-1).indices
        logits, teacher = logits.gather(-1, chosen), teacher.gather(-1, chosen)
    wide = accumulation_dtype(logits.dtype)
    own, other = (functional.log_softmax(scores.to(wide) / temperature, dim=-1) for scores in (logits, teacher))
    if kind == "jsd":
        never = (own == -math.inf) & (other == -math.inf)  # the mixture's gradient would be NaN
        own, other = own.masked_fill(never, 0.0), other.masked_fill(never, 0.0)
        mixture = torch.logaddexp(own + math.log1p(-beta), other + math.log(beta))
        divergences = beta * _divergences(other, mixture) + (1 - beta) * _divergences(own, mixture)
    else:
        divergences = _divergences(other, own) if kind == "forward_kl" else _divergences(own, other)
    return divergences.masked_fill(targets.to(divergences.device) == IGNORE_INDEX, 0.0)


def _divergences(first: Tensor, second: Tensor) -> Tensor:
    """Returns KL(first | second), `(m,)`, from log probabilities, `(m, words)`."""
    ratios = (first - second).masked_fill_(first == -math.inf, 0.0)  # words of probability 0 add nothing
    return (first.exp() * ratios).sum(-1)


def rows_by_weight(weights: Tensor, device: torch.device) -> dict[int, Tensor]:
    """Returns the flat indices, on `device`, of each nonzero weight in a host tensor of weights."""
    flat = weights.flatten()
    numbers = (number for number in flat.unique().tolist() if number)
    return {number: (flat == number).nonzero().flatten().to(device) for number in numbers}


def weighted_loss_sum(
    loss_sum: Callable[[Tensor, Tensor], Tensor], values: Tensor, targets: Tensor, rows: Mapping[int, Tensor]
) -> Tensor:
    """Sums the cross-entropies of this rank's tokens, each multiplied by its weight.

    Args:
        loss_sum (`Callable`): Returns the sum for values of shape `(1, m, ...)` and targets `(1, m)`.
        values (`torch.Tensor` of shape `(batch, n, ...)`): Scores, or the hidden states to score.
        targets (`torch.LongTensor` of shape `(batch, n)`): As in [`token_loss_sum`].
        rows (mapping from `int` to `torch.LongTensor`): The tokens of each weight, see [`rows_by_weight`].
    """
    if values.shape[:2] != targets.shape:
        raise ValueError(f"Scores of {tuple(values.shape[:2])} tokens do not fit targets of {tuple(targets.shape)}.")
    flat, labels = values.flatten(0, 1), targets.flatten().to(values.device)
    sums = [
        weight * loss_sum(flat.index_select(0, index)[None], labels.index_select(0, index)[None])
        for weight, index in rows.items()
    ]
    if not sums:  # all ranks join the head's collectives
        return loss_sum(values[:1, :1], targets[:1, :1].new_full((1, 1), IGNORE_INDEX))
    return sum(sums[1:], start=sums[0])
