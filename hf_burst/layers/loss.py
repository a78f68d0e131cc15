"""The cross-entropy of tokens, as sums and one by one."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ..numerics import accumulation_dtype

IGNORE_INDEX = -100


def shift_labels(labels: Tensor) -> Tensor:
    """Labels moved so that token i holds the label of token i + 1; the last one is ignored. Before any sharding."""
    return functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].contiguous()


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies of this rank's tokens, in fp32 (fp64 for fp64).

    Args:
        logits (`torch.Tensor` of shape `(batch, n, vocabulary)`): Scores.
        targets (`torch.LongTensor` of shape `(batch, n)`): Shifted labels of the same tokens; -100 does not count.
    """
    wide, labels = logits.to(accumulation_dtype(logits.dtype)).flatten(0, -2), targets.flatten().to(logits.device)
    return functional.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each token, `(m,)`, as [`token_loss_sum`] adds them up; 0 for targets of -100.

    Args:
        logits (`torch.Tensor` of shape `(m, vocabulary)`): Scores.
        targets (`torch.LongTensor` of shape `(m,)`): Shifted labels of the same tokens.
    """
    wide = logits.to(accumulation_dtype(logits.dtype))
    return functional.cross_entropy(wide, targets.to(logits.device), ignore_index=IGNORE_INDEX, reduction="none")


def token_divergences(
    logits: Tensor,
    teacher: Tensor,
    targets: Tensor,
    kind: str,
    top_k: int | None,
    temperature: float,
    beta: float = 0.5,
) -> Tensor:
    """The divergence of two distributions of the next word for each token, `(m,)`; 0 for targets of -100.

    Args:
        logits (`torch.Tensor` of shape `(m, vocabulary)`): Scores of the student.
        teacher (`torch.Tensor` of shape `(m, vocabulary)`): Scores of the teacher.
        targets (`torch.LongTensor` of shape `(m,)`): Shifted labels of the same tokens.
        kind (`str`): `"forward_kl"`, KL(teacher | student); `"reverse_kl"`, KL(student | teacher); or `"jsd"`, the
            generalized Jensen-Shannon divergence (arXiv 2306.13649, equation 1).
        top_k (`int`, *optional*): Both are restricted to the words that are likeliest for the teacher, and add up to 1
            over these.
        temperature (`float`): Divides the scores of both.
        beta (`float`, defaults to 0.5): For `"jsd"` the share of the teacher in the mixture, between 0 and 1.
    """
    if top_k is not None and top_k < teacher.shape[-1]:
        chosen = teacher.topk(top_k, dim=-1).indices
        logits, teacher = logits.gather(-1, chosen), teacher.gather(-1, chosen)
    wide = accumulation_dtype(logits.dtype)
    own, other = (functional.log_softmax(scores.to(wide) / temperature, dim=-1) for scores in (logits, teacher))
    if kind == "jsd":
        never = (own == -math.inf) & (other == -math.inf)  # of the mixture, too, which would have no gradient
        own, other = own.masked_fill(never, 0.0), other.masked_fill(never, 0.0)
        mixture = torch.logaddexp(own + math.log1p(-beta), other + math.log(beta))
        divergences = beta * _divergences(other, mixture) + (1 - beta) * _divergences(own, mixture)
    else:
        divergences = _divergences(other, own) if kind == "forward_kl" else _divergences(own, other)
    return divergences.masked_fill(targets.to(divergences.device) == IGNORE_INDEX, 0.0)


def _divergences(first: Tensor, second: Tensor) -> Tensor:
    """KL(first | second), `(m,)`, of logarithms of probabilities, `(m, words)`."""
    ratios = (first - second).masked_fill_(first == -math.inf, 0.0)  # words that are never said add nothing
    return (first.exp() * ratios).sum(-1)


def rows_by_weight(weights: Tensor, device: torch.device) -> dict[int, Tensor]:
    """Where each weight but 0 stands in a tensor of them on the host: indices into its elements, on a device."""
    flat = weights.flatten()
    numbers = (number for number in flat.unique().tolist() if number)
    return {number: (flat == number).nonzero().flatten().to(device) for number in numbers}


def weighted_loss_sum(
    loss_sum: Callable[[Tensor, Tensor], Tensor], values: Tensor, targets: Tensor, rows: Mapping[int, Tensor]
) -> Tensor:
    """The sum of the cross-entropies of this rank's tokens, each counted several times.

    Args:
        loss_sum (`Callable`): Gives the sum for values of shape `(1, m, ...)` and targets `(1, m)`.
        values (`torch.Tensor` of shape `(batch, n, ...)`): Scores, or what is scored.
        targets (`torch.LongTensor` of shape `(batch, n)`): As in [`token_loss_sum`].
        rows (mapping from `int` to `torch.LongTensor`): The tokens that count so many times, see [`rows_by_weight`].
    """
    if values.shape[:2] != targets.shape:
        raise ValueError(f"Scores of {tuple(values.shape[:2])} tokens do not fit targets of {tuple(targets.shape)}.")
    flat, labels = values.flatten(0, 1), targets.flatten().to(values.device)
    sums = [
        weight * loss_sum(flat.index_select(0, index)[None], labels.index_select(0, index)[None])
        for weight, index in rows.items()
    ]
    if not sums:  # all ranks take part in what the head gathers
        return loss_sum(values[:1, :1], targets[:1, :1].new_full((1, 1), IGNORE_INDEX))
    return sum(sums[1:], start=sums[0])
