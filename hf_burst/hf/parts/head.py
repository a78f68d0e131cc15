"""The head of a model: which logits a pass returns, and the loss without logits in memory."""

import logging
import math
from typing import Any, Literal

import torch

from ...errors import BatchError
from ..batches.cutting import kept_tokens
from ..callers import Callers
from ..forward_pass import Agreement, Batch, Call, ForwardPass
from ..spread.heads import is_hooked, is_partitioned, is_watched
from ..spread.value import PutOffHead
from .base import Part
from .token_losses import TokenLosses

logger = logging.getLogger(__name__)

Fate = Literal["keep", "gather", "defer", "drop"]

LOGITS_LIMIT_GIB = 4.0  # for logits gathered over the ranks
_SMALLER = "lower per_device_train_batch_size or per_device_eval_batch_size, or shorten the rows"


class Head(Part):
    """Decides what happens to the logits: `"keep"` as they are, `"gather"` over the ranks, `"defer"` until something is
    computed from them (see [`Spread`]), or `"drop"`. To defer or drop logits, the head is put off: a loss asks it for
    the scores of some tokens at a time."""

    def __init__(self, token_losses: TokenLosses) -> None:
        self.token_losses = token_losses
        self.lazy: PutOffHead | None = None
        self.logits: Fate = "keep"
        self.fits = False  # whether the logits of a batch with labels may be gathered
        self.about = ""  # why not
        self.selects = False  # whether `logits_to_keep` is given
        self.kept: torch.Tensor | None = None  # where each kept token stands among this rank's tokens, or -1
        self.by_model = True  # whether the model selects the kept tokens

    def check(self, call: Call, batch: Batch, agreement: Agreement) -> None:
        if call.task.reads or call.pooling:
            return
        keep = batch.given.get("logits_to_keep", 0)
        selects = self.selects = isinstance(keep, torch.Tensor) or bool(keep)
        tokens: list[int] | None = None
        cached = call.cache is not None  # a number would make Gemma 4 slice its mask
        if selects and (call.group.size > 1 or cached or not call.task.generates):
            tokens = list(kept_tokens(keep, batch.layout.length - batch.layout.padding))
            self.kept, self.by_model = batch.lies.local[tokens], call.task.generates
        self.logits = self._fate(call, batch)
        head = call.model.get_output_embeddings() if self.logits in ("defer", "drop") else None
        agreement.add("hooks on the head", head is not None and [is_hooked(head), is_watched(head)])
        agreement.facts |= {"logits to keep": tokens, "logits": self.logits}

    def begin(self, run: ForwardPass) -> None:
        if run.call.task.reads or run.call.pooling:
            return
        if run.call.sharing and not run.model.training:  # groups with other lengths gather the head at another time
            drops = run.call.largest([self.logits == "drop"])[0] > 0
            self.logits = "drop" if drops and self.logits == "gather" else self.logits
        module = run.model.get_output_embeddings()
        if self.lazy is not None and self.lazy.module is not module:  # adapters have replaced it
            self.lazy.remove()
        vocabulary = run.model.config.get_text_config().vocab_size
        self.lazy = None if module is None else PutOffHead.put(module, vocabulary)  # or that of a model that shares it
        if self.lazy is not None:
            self.lazy.under_way = self.logits in ("defer", "drop") and not run.batch.inputs.get("fused_lm_head")

    def arguments(self, run: ForwardPass) -> dict[str, Any]:
        return {"logits_to_keep": self.kept[self.kept >= 0]} if self.kept is not None and self.by_model else {}

    def end(self) -> None:
        self.kept = None
        if self.lazy is not None:
            self.lazy.under_way = False

    def _fate(self, call: Call, batch: Batch) -> Fate:
        """Returns what happens to the logits."""
        model, labels = call.model, batch.inputs.get("labels") is not None
        self.fits = False
        if self.token_losses.question is not None:
            return "drop"
        if self.kept is not None and (labels or batch.sharded):
            raise BatchError(
                "logits_to_keep is for full batches without labels; with labels the loss needs every token. Leave one "
                "of them out."
            )
        fused = bool(batch.inputs.get("fused_lm_head"))
        if labels and model.training and not fused:
            _check_unread(call.callers, "are never in memory while the model trains with labels")
        tokens = math.prod(batch.lies.shape) if self.kept is None else batch.layout.batch_size * len(self.kept)
        values = tokens * model.config.get_text_config().vocab_size
        gib = values * model.dtype.itemsize / 2**30
        output = model.get_output_embeddings()
        defers = model.training and self.kept is None and output is not None and not is_partitioned(output)
        if labels and (model.training or (call.group.size > 1 and fused)):
            self.about = "Logits are not in memory while a model trains with labels in the batch"
            self.fits = gib <= LOGITS_LIMIT_GIB
            return "defer" if defers and not fused and not batch.sharded else "drop"
        if batch.sharded or call.group.size == 1:
            return "keep"
        if gib <= LOGITS_LIMIT_GIB:
            return "gather"
        sentence = self.about = (
            f"The logits of {tokens:,} tokens take {gib:.1f} GiB on every rank, and up to "
            f"{LOGITS_LIMIT_GIB:g} GiB are gathered"
        )
        if not labels and defers and torch.is_grad_enabled():
            return "defer"
        if not labels:
            raise BatchError(f"{sentence}. {_way_out(call.callers, model.training)}")
        _check_unread(call.callers, f"are not gathered. {sentence}")
        logger.warning("%s, so they are not gathered and outputs.logits is None.", sentence)
        return "drop"


def _check_unread(callers: Callers, why: str) -> None:
    """Raises if a trainer would give `None` instead of logits to a function of its user."""
    if callers.readers:
        raise BatchError(
            f"{', '.join(callers.readers)} would be given outputs.logits=None: logits {why}. {_SMALLER.capitalize()}; "
            "prediction_loss_only=True evaluates without them, and hf_burst.token_losses returns the loss of every "
            "token."
        )


def _way_out(callers: Callers, training: bool) -> str:
    """Returns what to do if the logits that somebody wants are too large."""
    if callers.trainer is None:
        return (
            "Pass logits_to_keep=1 (or as many as you need), or take hf_burst.token_losses for the loss of every token."
        )
    askers = " and ".join(callers.ask_for_logits(training)) or "what asks for them"
    return f"Trainer wants them for {askers}: {_SMALLER}, or leave that out."
