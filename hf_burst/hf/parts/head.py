"""The head of a model: the logits that a pass returns or what is asked in their place, and its other outputs."""

import logging
import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import BatchError
from ..batches.cutting import kept_tokens
from ..forward_pass import Batch, Call, ForwardPass
from ..spread.value import PutOffHead, Spread, check_head_again, needs_logits
from ..view import is_partitioned
from .base import Outputs, Part
from .key_cache import repeated
from .replicas import refuse_partitioned

logger = logging.getLogger(__name__)

Fate = Literal["show", "defer", "drop"]

LOGITS_LIMIT_GIB = 4.0  # for logits gathered over the ranks
_ALONE = "Pass logits_to_keep=1 (or as many as you need), or take hf_burst.token_losses for the loss of every token."
_IN_TRAINER = (
    "Trainer asks for them where it has label_smoothing_factor, compute_loss_func or metrics: leave that out, lower "
    "per_device_train_batch_size or per_device_eval_batch_size, shorten the rows, or set prediction_loss_only=True."
)


class Head(Part):
    """Decides what happens to the logits: `"show"` those of all ranks, `"defer"` until something is computed from them
    (see [`Spread`]), or `"drop"`. To defer or drop logits, the head is put off: a loss asks it for the scores of some
    tokens at a time. Outputs of a batch that arrived sharded stay sharded."""

    def __init__(self) -> None:
        self.lazy: PutOffHead | None = None
        self.logits: Fate = "show"
        self.about = ""  # why deferred logits may not be gathered
        self.kept: Tensor | None = None  # where each kept token stands among this rank's tokens, or -1

    def check(self, call: Call, batch: Batch) -> None:
        call.agreement.add("hidden states", bool(call.given.get("output_hidden_states")))
        if call.needs_states:
            return
        if call.asked.numbers is not None:
            if batch.targets is None:
                raise BatchError("The labels are missing; give some of the shape of input_ids, -100 where none counts.")
            batch.lies.check_texts()
            if torch.is_grad_enabled() and (module := call.model.get_output_embeddings()) is not None:
                refuse_partitioned(module, "Losses of tokens are not trained")
        keep = batch.given.get("logits_to_keep", 0)
        tokens: list[int] | None = None
        if isinstance(keep, Tensor) or keep:
            tokens = list(kept_tokens(keep, batch.layout.length - batch.layout.padding))
            self.kept = batch.lies.local[tokens]
        self.logits = self._fate(call, batch)
        head = None if self.logits == "show" else call.model.get_output_embeddings()
        call.agreement.add("hooks on the head", head is not None and needs_logits(head))
        call.agreement.facts |= {"logits to keep": tokens, "logits": self.logits}

    def begin(self, run: ForwardPass) -> None:
        if run.call.needs_states:
            return
        if run.call.sharing and not run.model.training:  # groups with other lengths gather the head at another time
            drops = run.call.largest([self.logits == "drop"])[0] > 0
            self.logits = "drop" if drops else self.logits
        module = run.model.get_output_embeddings()
        if self.lazy is not None and self.lazy.module is not module:  # adapters have replaced it
            self.lazy.remove()
            self.lazy = None
        if module is not None:
            vocabulary = run.model.config.get_text_config().vocab_size
            self.lazy = PutOffHead.put(module, vocabulary)  # or that of a model that shares it
            self.lazy.under_way = self.logits != "show" and not run.batch.inputs.get("fused_lm_head")

    def arguments(self, run: ForwardPass) -> dict[str, Any]:
        if self.kept is None or not run.call.task.generates:
            return {}
        return {"logits_to_keep": self.kept[self.kept >= 0]}  # a number would make Gemma 4 slice its mask

    def after(self, run: ForwardPass, outputs: Outputs) -> None:
        lies, sharded = run.batch.lies, run.batch.sharded
        if "log_probs" in outputs:
            _gather_fused(run, outputs)
            return
        if run.call.needs_states:
            outputs |= {name: value.whole() for name, value in outputs.items() if isinstance(value, Spread)}
        elif run.call.asked.numbers is not None and run.batch.targets is not None:
            check_head_again(run.model.get_output_embeddings())
            scores = replace(Spread.of(outputs.pop("logits")), lies=lies)
            values = lies.batch(run.call.asked.numbers(scores, run.batch.targets), scores=True)
            outputs["loss"] = functional.pad(values, (1, 0))[:, :-1] if run.call.task.causal else values
        else:
            self._decide_logits(run, outputs)
        if "hidden_states" in outputs:
            states = outputs["hidden_states"] if sharded else map(lies.batch, outputs["hidden_states"])
            outputs["hidden_states"] = tuple(repeated(state, run.call.cache) for state in states)
        layers = outputs.pop("router_logits", None)
        if layers and run.group.size == 1:
            outputs["router_logits"] = tuple(lies.batch(layer[None]).flatten(0, 1) for layer in layers)

    def end(self) -> None:
        self.kept = None
        if self.lazy is not None:
            self.lazy.under_way = False

    def _fate(self, call: Call, batch: Batch) -> Fate:
        model, labels, alone = call.model, batch.inputs.get("labels") is not None, call.group.size == 1
        if self.kept is not None and (call.asked.numbers or (not alone and (labels or batch.sharded))):
            raise BatchError("logits_to_keep is for full batches without labels, whose loss needs every token.")
        if call.asked.numbers is not None:
            return "drop"
        fused = bool(batch.inputs.get("fused_lm_head"))
        if labels and model.training and not fused:
            _check_unread(call, "are never in memory while the model trains with labels")
        tokens = math.prod(batch.lies.shape) if self.kept is None else batch.layout.batch_size * len(self.kept)
        gib = tokens * model.config.get_text_config().vocab_size * model.dtype.itemsize / 2**30
        output = model.get_output_embeddings()
        defers = model.training and self.kept is None and output is not None and not is_partitioned(output)
        if labels and (model.training or (fused and not alone)):
            why = "Logits are not in memory while a model trains with labels in the batch"
            self.about = why if gib > LOGITS_LIMIT_GIB else ""
            return "defer" if defers and not fused and not batch.sharded else "drop"
        if batch.sharded or alone or gib <= LOGITS_LIMIT_GIB:
            return "show"
        sentence = self.about = (
            f"The logits of {tokens:,} tokens take {gib:.1f} GiB on every rank, and up to "
            f"{LOGITS_LIMIT_GIB:g} GiB are gathered"
        )
        if not labels and defers and torch.is_grad_enabled():
            return "defer"
        if not labels:
            raise BatchError(f"{sentence}. {_ALONE if call.trainer_and_readers[0] is None else _IN_TRAINER}")
        _check_unread(call, f"are not gathered. {sentence}")
        logger.warning("%s, so they are not gathered and outputs.logits is None.", sentence)
        return "drop"

    def _decide_logits(self, run: ForwardPass, outputs: Outputs) -> None:
        lies, logits = run.batch.lies, outputs.pop("logits", None)
        if self.logits == "drop":
            return
        if self.logits == "defer":
            outputs["logits"] = Spread.of(logits).handed_out(lies, self.about, outputs.get("loss"))
        elif self.kept is not None:
            rows = self.kept[self.kept >= 0]
            # Gemma 4 keeps all rows if its own input_ids are longer than what it computed
            if not run.call.task.generates or logits.shape[1] != len(rows):
                logits = logits[:, rows.to(logits.device)]
            outputs["logits"] = repeated(lies.by_rows(lies.from_kept(logits, self.kept)), run.call.cache)
        else:
            outputs["logits"] = repeated(logits if run.batch.sharded else lies.batch(logits), run.call.cache)


def _gather_fused(run: ForwardPass, outputs: Outputs) -> None:
    """Gathers TRL's outputs for `fused_lm_head=True`, one value per token, from which its trainers compute their losses
    without looking at other ranks. In training on a sharded batch they stay local, because `num_items_in_batch` counts
    every label once there. Evaluation has no such number and needs the whole batch."""
    for name, values in outputs.items():
        if values.ndim == 2:
            if not (run.batch.sharded and run.model.training):
                values = run.batch.lies.batch(values, scores=True)
            # as without `shift_labels`; FSDP2 warns of views
            outputs[name] = values if run.batch.sharded else values[:, :-1].clone()


def _check_unread(call: Call, why: str) -> None:
    """Raises if a trainer would give `None` instead of logits to a function of its user."""
    _, readers = call.trainer_and_readers
    if readers:
        given = f"{', '.join(readers)} would be given outputs.logits=None"
        raise BatchError(f"{given}: logits {why}. {_IN_TRAINER}")
