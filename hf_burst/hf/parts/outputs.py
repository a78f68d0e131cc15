"""The outputs of a pass: from this rank's tokens to the whole batch."""

from dataclasses import replace
from typing import Any

import torch

from ...ranks.collectives import gather_kept, gather_tokens
from ..batches.joining import Joined
from ..forward_pass import Agreement, Call, ForwardPass
from ..lazy_head import logits_of_some
from .base import Part
from .deferred_logits import DeferredLogits, writes
from .head import Head
from .key_cache import repeated
from .states import whole
from .token_losses import check_head_again

# one value a token, in TRL's output for `fused_lm_head=True`, which holds no logits
_FUSED_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


class Outputs(Part):
    """Gathers outputs in sequence order. Those of a batch that arrived sharded stay sharded."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def admit(self, call: Call, agreement: Agreement) -> None:
        agreement.add("hidden states", bool(call.given.get("output_hidden_states")))

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        layout, group = run.batch.layout, run.group
        if "log_probs" in outputs:
            _gather_fused(run, outputs)
            return
        if run.call.task.reads or run.call.pooling:
            outputs |= {name: whole(value) for name, value in outputs.items()}
        else:
            self._decide_logits(run, outputs)
        if "hidden_states" in outputs and not run.batch.sharded and group.size > 1:
            outputs["hidden_states"] = tuple(gather_tokens(state, layout, group) for state in outputs["hidden_states"])
        if "hidden_states" in outputs:
            outputs["hidden_states"] = tuple(repeated(state, run.call.cache) for state in outputs["hidden_states"])
        if run.batch.joined is not None:
            _restore(run.batch.joined, outputs, self.head.asked, alone=group.size == 1)

    def _decide_logits(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        layout, group, head = run.batch.layout, run.group, self.head
        logits = outputs.pop("logits", None)
        # Gemma 4 leaves out no rows where its own input_ids are longer than what it computed
        if head.rows is not None and (not head.by_model or logits.shape[1] != len(head.rows)):
            logits = logits[:, head.rows.to(logits.device)]
        if head.logits == "gather" and head.kept is not None:
            outputs["logits"] = gather_kept(logits, head.kept, group)
        elif head.logits == "gather":
            outputs["logits"] = gather_tokens(logits, layout, group)
        elif head.logits == "keep":
            outputs["logits"] = logits
        elif head.logits == "defer":
            outputs["logits"] = replace(_deferred(run, logits, head.about, outputs.get("loss")), fits=head.fits)
        if "logits" in outputs and head.logits != "defer":
            outputs["logits"] = repeated(outputs["logits"], run.call.cache)


def _deferred(run: ForwardPass, logits: Any, about: str, loss: torch.Tensor | None) -> DeferredLogits:
    if loss is None:
        check_head_again(run.model.get_output_embeddings())
    layout, joined = run.batch.layout, run.batch.joined
    shape = (layout.batch_size, layout.length - layout.padding) if joined is None else tuple(joined.places.shape)
    places = torch.arange(shape[0] * shape[1], device="cpu").view(shape)
    vocabulary = run.model.config.get_text_config().vocab_size
    anchor = logits_of_some(logits, slice(0, 1)) if loss is None else loss
    return DeferredLogits(logits, layout, run.group, joined, places, vocabulary, about, anchor, written=writes(logits))


def _restore(joined: Joined, outputs: dict[str, Any], chosen: bool, alone: bool) -> None:
    """Outputs of joined texts as those of their batch; logits may be of `chosen` tokens, all rows one after another.
    Routers' logits are there in one process alone."""
    rows = len(joined.places)
    if "logits" in outputs:
        logits = outputs["logits"]
        if not isinstance(logits, DeferredLogits):
            outputs["logits"] = logits.unflatten(1, (rows, -1))[0] if chosen else joined.restored(logits)
    if "hidden_states" in outputs:
        outputs["hidden_states"] = tuple(map(joined.restored, outputs["hidden_states"]))
    layers = outputs.pop("router_logits", None)
    if layers and alone:
        outputs["router_logits"] = tuple(joined.restored(layer[None]).flatten(0, 1) for layer in layers)


def _gather_fused(run: ForwardPass, outputs: dict[str, Any]) -> None:
    """TRL's per-token outputs. Its trainers compute their losses from these and look at no other rank.

    In training on a sharded batch they stay this rank's, since `num_items_in_batch` counts every label once there.
    Evaluation has no such number and needs the whole batch.
    """
    for name in _FUSED_FIELDS:
        if name in outputs and not (run.batch.sharded and run.model.training):
            outputs[name] = gather_tokens(outputs[name], run.batch.layout, run.group)
        if name in outputs and run.batch.joined is not None:
            outputs[name] = run.batch.joined.restored_scores(outputs[name])
        if name in outputs and not run.batch.sharded:  # as without `shift_labels`: the last token predicts nothing
            outputs[name] = outputs[name][:, :-1]
