"""A number for every token of a batch instead of its logits, which for a long sequence are never in memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import BatchError
from ..batches.documents import check_shape
from ..batches.sharded import sum_of_bits
from ..forward_pass import Agreement, Batch, Call, ForwardPass
from ..spread.heads import check_head_again
from ..spread.value import Spread
from .base import Part
from .replicas import refuse_partitioned


@dataclass(frozen=True)
class Question:
    """What a pass computes in the place of logits.

    Args:
        answer (`Callable`): From scores and targets of this rank's tokens to one number each, `(batch, n)`.
        facts (`dict`): Facts on which the ranks must agree.
        weights (`torch.Tensor` of shape `(batch, tokens)`, *optional*): Factors for the answers.
        teacher ([`Spread`], *optional*): Scores of another model, whose tokens must lie as those of the pass do.
    """

    answer: Callable[[Spread, Tensor], Tensor]
    facts: dict[str, Any]
    weights: Tensor | None = None
    teacher: Spread | None = None


def check_weights(weights: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises for weights that do not fit the labels of a whole batch."""
    if weights is None:
        return
    check_shape("The tensor of weights", weights, shape, ", one for every label of the whole batch")
    if not weights.is_floating_point() or not weights.isfinite().all():
        raise BatchError(
            f"The weights of tokens ({weights.dtype}) hold numbers that are not finite, or no floating point."
        )


class TokenLosses(Part):
    """Answers a [`Question`] of [`hf_burst.token_losses`] about each token, instead of returning logits."""

    def __init__(self) -> None:
        self.question: Question | None = None

    def check(self, call: Call, batch: Batch, agreement: Agreement) -> None:
        if self.question is None:
            return
        weights, teacher = self.question.weights, self.question.teacher
        BatchError.refuse(
            (
                batch.given.get("logits_to_keep"),
                "token_losses and token_divergences score all tokens. Leave logits_to_keep out.",
            ),
            (
                batch.targets is None,
                "The labels are missing; token_losses and token_divergences need labels of the shape of input_ids, in "
                "which -100 is not predicted.",
            ),
            (
                teacher is not None and not (teacher.lies and teacher.lies.fits(batch.lies)),
                "The layers of the teacher see otherwise far than those of the model, or share other beginnings, so "
                "each would cut the batch in its own way. Give both the same shards: batches of hf_burst.shard_batch "
                "or BurstCollator.",
            ),
        )
        batch.lies.check_texts()
        check_weights(weights, batch.lies.shape)
        head = call.model.get_output_embeddings()
        if torch.is_grad_enabled() and head is not None:
            refuse_partitioned(head, "Losses of tokens are not trained")
        agreement.facts |= self.question.facts
        summed = None if weights is None else sum_of_bits(weights.to(call.device))
        agreement.add("weights of tokens (checksum)", summed)

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        if self.question is None or run.batch.targets is None:
            return
        check_head_again(run.model.get_output_embeddings())
        weights, scores = self.question.weights, replace(Spread.of(outputs["logits"]), lies=run.batch.lies)
        values = run.batch.lies.numbers(self.question.answer(scores, run.batch.targets))
        if run.call.task.causal:
            values = functional.pad(values, (1, 0))[:, :-1]
        outputs["loss"] = values if weights is None else values * weights.to(values)
