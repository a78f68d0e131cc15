"""The cross-entropy of tokens, as sums and one by one."""

from collections.abc import Callable

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
    """The cross-entropy of each token, `(batch, n)`, as [`token_loss_sum`] adds them up; 0 for targets of -100."""
    wide = logits.to(accumulation_dtype(logits.dtype)).transpose(1, 2)
    return functional.cross_entropy(wide, targets.to(logits.device), ignore_index=IGNORE_INDEX, reduction="none")


def weighted_loss_sum(
    loss_sum: Callable[[Tensor, Tensor], Tensor], values: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """The sum of the cross-entropies of this rank's tokens, each counted several times.

    Args:
        loss_sum (`Callable`): Gives the sum for values of shape `(1, m, ...)` and targets `(1, m)`.
        values (`torch.Tensor` of shape `(batch, n, ...)`): Scores, or what is scored.
        targets (`torch.LongTensor` of shape `(batch, n)`): As in [`token_loss_sum`].
        weights (`torch.LongTensor` of shape `(batch, n)`): How often each target counts; few different numbers.
    """
    targets = targets.to(values.device)
    weights = weights.to(values.device).masked_fill(targets == IGNORE_INDEX, 0)
    sums = []
    for weight in weights.unique().tolist():
        rows = weights == weight
        if weight:
            sums.append(weight * loss_sum(values[rows][None], targets[rows][None]))
    return sum(sums[1:], start=sums[0]) if sums else loss_sum(values[:1, :1], targets[:1, :1])
