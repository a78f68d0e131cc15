"""A number for every token of a batch in the place of its logits: those of a long sequence are never in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ...errors import BatchError, UnsupportedModelError
from ...ranks.collectives import gather_tokens
from ...ranks.layout import SequenceLayout
from ..batches.joining import Joined
from ..batches.sharded import sum_of_bits
from ..forward_pass import Agreement, Batch, Call, ForwardPass
from ..lazy_head import LazyLogits, is_partitioned
from .base import Part

_AGAIN = "{}, and losses of tokens need it once more in the backward pass. {}."
_TAIL = "Wrap it together with the last norm, with reshard_after_forward=False, or leave it to the whole model"


@dataclass(frozen=True)
class Scores:
    """The scores of a model for this rank's tokens, and where these lie in the batch.

    Args:
        logits (`torch.Tensor` or [`LazyLogits`] of shape `(batch, n, vocabulary)`): The scores.
        layout ([`SequenceLayout`]): How the batch is cut.
        joined ([`Joined`], *optional*): The texts that were joined, if any begin alike.
    """

    logits: Tensor | LazyLogits
    layout: SequenceLayout
    joined: Joined | None

    def fit(self, batch: Batch) -> bool:
        """Whether the tokens of a batch lie as these do."""
        own, other = self.joined, batch.joined
        if own is None or other is None:
            return own is other and self.layout == batch.layout
        return self.layout == batch.layout and torch.equal(own.places, other.places)


@dataclass(frozen=True)
class Question:
    """What a pass is asked for in the place of logits.

    Args:
        answer (`Callable`): From the scores and targets of this rank's tokens to a number each, `(batch, n)`.
        facts (`dict`): For the ranks to agree on.
        weights (`torch.Tensor` of shape `(batch, tokens)`, *optional*): What the answers are multiplied with.
        teacher ([`Scores`], *optional*): Those of another model, whose tokens must lie as those of the pass.
    """

    answer: Callable[[Scores, Tensor], Tensor]
    facts: dict[str, Any]
    weights: Tensor | None = None
    teacher: Scores | None = None


def check_weights(weights: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises for weights that do not fit the labels of a whole batch."""
    if weights is None:
        return
    if tuple(weights.shape) != shape or not weights.is_floating_point():
        raise BatchError(
            f"The weights are {weights.dtype} of shape {tuple(weights.shape)}; for this batch they must be "
            f"floating point numbers of shape {shape}, one for every label of the whole batch."
        )
    if not bool(weights.isfinite().all()):
        raise BatchError("The weights of tokens hold numbers that are not finite.")


def is_sharded_head(head: nn.Module | None) -> bool:
    """Whether FSDP2 shards a head."""
    return head is not None and any(isinstance(weight, DTensor) for weight in head.parameters())


def check_head_again(head: nn.Module | None) -> None:
    """Raises behind a pass whose backward pass would not find the whole head any more."""
    if torch.is_grad_enabled() and is_sharded_head(head):
        raise UnsupportedModelError(_AGAIN.format("FSDP2 has sharded the head again after its pass", _TAIL))


class TokenLosses(Part):
    """Answers a [`Question`] of [`hf_burst.token_losses`] about each token, in the place of the logits."""

    def __init__(self) -> None:
        self.asked: Question | None = None

    def check(self, call: Call, batch: Batch, agreement: Agreement) -> None:
        if self.asked is None:
            return
        layout, joined = batch.layout, batch.joined
        if batch.given.get("logits_to_keep"):
            raise BatchError("token_losses and token_divergences score all tokens. Leave logits_to_keep out.")
        if batch.targets is None:
            raise BatchError(
                "The labels are missing; token_losses and token_divergences need labels of the shape of input_ids, in "
                "which -100 is not predicted."
            )
        if joined is None and layout.parents:
            raise BatchError(
                "The texts of the batch were joined when it was sharded, so that their tokens stand for several. Leave "
                "share_prefixes=True out of the config of BurstCollator, or give full batches."
            )
        whole = (layout.batch_size, layout.length - layout.padding)
        check_weights(self.asked.weights, whole if joined is None else tuple(joined.places.shape))
        if self.asked.teacher is not None and not self.asked.teacher.fit(batch):
            raise BatchError(
                "The layers of the teacher see otherwise far than those of the model, or share other beginnings, so "
                "each would cut the batch in its own way. Give both the same shards: batches of hf_burst.shard_batch "
                "or BurstCollator."
            )
        head = call.model.get_output_embeddings()
        if torch.is_grad_enabled() and head is not None and is_partitioned(head):
            raise UnsupportedModelError(_AGAIN.format("ZeRO-3 shards the head", "Use ZeRO-2"))
        weights = self.asked.weights
        agreement.facts |= self.asked.facts
        summed = None if weights is None else sum_of_bits(weights.to(call.device))
        agreement.add("weights of tokens (checksum)", summed)

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        if self.asked is None or run.batch.targets is None:
            return
        check_head_again(run.model.get_output_embeddings())
        layout, joined, weights = run.batch.layout, run.batch.joined, self.asked.weights
        own = self.asked.answer(Scores(outputs["logits"], layout, joined), run.batch.targets)
        values = gather_tokens(own, layout, run.group)
        if joined is not None:
            values = joined.restored_scores(values)
        if run.call.task.causal:
            values = functional.pad(values, (1, 0))[:, :-1]
        outputs["loss"] = values if weights is None else values * weights.to(values)
