"""The head of a model: which of its logits a pass is to have, and the loss without any in memory."""

import logging
from typing import Any, Literal

import torch

from ...errors import BatchError
from ...ranks.layout import SequenceLayout
from ..batches.cutting import kept_tokens
from ..callers import Callers
from ..forward_pass import Agreement, Batch, Call, ForwardPass
from ..lazy_head import LazyHead, is_hooked, is_partitioned, is_watched, lazy_head
from .base import Part
from .token_losses import TokenLosses

logger = logging.getLogger(__name__)

Fate = Literal["keep", "gather", "defer", "drop"]
KeptRows = tuple[tuple[int, ...], ...]  # for each rank, where the rows that it kept stand in the gathered logits

LOGITS_LIMIT_GIB = 4.0  # of logits gathered over the ranks
_SMALLER = "lower per_device_train_batch_size or per_device_eval_batch_size, or shorten the rows"


class Head(Part):
    """Decides what becomes of the logits: `"keep"` as they are, `"gather"` over the ranks, `"defer"` until something
    follows from them (see [`DeferredLogits`]), or `"drop"`. The head whose logits are deferred or dropped is put off,
    see [`LazyHead`]: a loss asks it for the scores of some tokens at a time."""

    def __init__(self, token_losses: TokenLosses) -> None:
        self.token_losses = token_losses
        self.lazy: LazyHead | None = None
        self.logits: Fate = "keep"
        self.fits = False  # whether those of a batch with labels may be gathered
        self.about = ""  # why logits are not gathered
        self.asked = False  # whether there are `logits_to_keep`
        self.kept: KeptRows | None = None  # of these
        self.rows: torch.Tensor | None = None  # this rank's rows of them
        self.by_model = True  # whether the model chooses them

    def check(self, call: Call, batch: Batch, agreement: Agreement) -> None:
        if call.task.reads or call.pooling:
            return
        keep = batch.given.get("logits_to_keep", 0)
        asked = self.asked = isinstance(keep, torch.Tensor) or bool(keep)
        cached = call.cache is not None  # a number would have Gemma 4 slice its mask
        if asked and (call.group.size > 1 or cached or not call.task.generates):
            self.kept, self.rows = keep_rows(keep, batch.layout, call.group.rank)
            self.by_model = call.task.generates
        self.logits = self._fate(call, batch)
        head = call.model.get_output_embeddings() if self.logits in ("defer", "drop") else None
        agreement.add("hooks on the head", head is not None and [is_hooked(head), is_watched(head)])
        agreement.facts |= {"logits to keep": self.kept, "logits": self.logits}

    def begin(self, run: ForwardPass) -> None:
        if run.call.task.reads or run.call.pooling:
            return
        if run.call.sharing and not run.model.training:  # groups with other lengths gather the head at another time
            drops = run.call.largest([self.logits == "drop"])[0] > 0
            self.logits = "drop" if drops and self.logits == "gather" else self.logits
        self.lazy = lazy_head(run.model, self.lazy)
        if self.lazy is not None:
            self.lazy.under_way = self.logits in ("defer", "drop") and not run.batch.inputs.get("fused_lm_head")

    def arguments(self, run: ForwardPass) -> dict[str, Any]:
        return {} if self.rows is None or not self.by_model else {"logits_to_keep": self.rows}

    def end(self) -> None:
        self.kept = self.rows = None
        if self.lazy is not None:
            self.lazy.under_way = False

    def _fate(self, call: Call, batch: Batch) -> Fate:
        """What becomes of the logits."""
        labels, layout = batch.inputs.get("labels") is not None, batch.layout
        model, group = call.model, call.group
        self.fits = False
        if self.token_losses.asked is not None:
            return "drop"
        if self.kept is not None and (labels or batch.sharded):
            raise BatchError(
                "logits_to_keep is for full batches without labels; with labels the loss needs every token. Leave one "
                "of them out."
            )
        fused = bool(batch.inputs.get("fused_lm_head"))
        if labels and model.training and not fused:
            _check_unread(call.callers, "are never in memory while the model trains with labels")
        rows = layout.length - layout.padding if self.kept is None else sum(map(len, self.kept))
        tokens = layout.batch_size * rows
        if batch.joined is not None and self.kept is None:
            tokens = batch.joined.places.numel()  # of all texts
        values = tokens * model.config.get_text_config().vocab_size
        gib = values * model.dtype.itemsize / 2**30
        output = model.get_output_embeddings()
        defers = model.training and self.kept is None and output is not None and not is_partitioned(output)
        if labels and (model.training or (group.size > 1 and fused)):
            self.about = "Logits are not in memory while a model trains with labels in the batch"
            self.fits = gib <= LOGITS_LIMIT_GIB
            return "defer" if defers and not fused and not batch.sharded else "drop"
        if batch.sharded or group.size == 1:
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
    """Raises if a function of a trainer's user would meet `None` in the place of logits."""
    if callers.readers:
        raise BatchError(
            f"{', '.join(callers.readers)} would be given outputs.logits=None: logits {why}. {_SMALLER.capitalize()}; "
            "prediction_loss_only=True evaluates without them, and hf_burst.token_losses returns the loss of every "
            "token."
        )


def _way_out(callers: Callers, training: bool) -> str:
    """What to do where logits are wanted that are too large."""
    if callers.trainer is None:
        return (
            "Pass logits_to_keep=1 (or as many as you need), or take hf_burst.token_losses for the loss of every token."
        )
    askers = " and ".join(callers.ask_for_logits(training)) or "what asks for them"
    return f"Trainer wants them for {askers}: {_SMALLER}, or leave that out."


def keep_rows(keep: int | torch.Tensor, layout: SequenceLayout, rank: int) -> tuple[KeptRows, torch.Tensor]:
    """For `logits_to_keep`: for each rank, the places of its rows in the result; and this rank's rows."""
    wanted = torch.tensor(kept_tokens(keep, layout.length - layout.padding), dtype=torch.int64, device="cpu")
    rows = []
    for holder in range(layout.ranks):
        held, passed = torch.full_like(wanted, -1), 0
        for run in layout.sharding.runs(holder):
            held = torch.where((wanted >= run.start) & (wanted < run.stop), wanted - run.start + passed, held)
            passed += run.stop - run.start
        rows.append(held)
    places = tuple(tuple(torch.nonzero(held >= 0).flatten().tolist()) for held in rows)
    return places, rows[rank][rows[rank] >= 0]
