"""Turns the outputs of this rank's tokens into those of the whole batch."""

from typing import Any

from ..forward_pass import Agreement, Call, ForwardPass
from ..spread.value import Spread
from .base import Part
from .head import Head
from .key_cache import repeated

# one value per token, in TRL's output for `fused_lm_head=True`, which holds no logits
_FUSED_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


class Outputs(Part):
    """Gathers outputs in sequence order. Outputs of a batch that arrived sharded stay sharded."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def admit(self, call: Call, agreement: Agreement) -> None:
        agreement.add("hidden states", bool(call.given.get("output_hidden_states")))

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        if "log_probs" in outputs:
            _gather_fused(run, outputs)
            return
        if run.call.task.reads or run.call.pooling:
            outputs |= {name: value.whole() for name, value in outputs.items() if isinstance(value, Spread)}
        else:
            self._decide_logits(run, outputs)
        if "hidden_states" in outputs:
            states = outputs["hidden_states"]
            states = states if run.batch.sharded else map(run.batch.lies.batch, states)
            outputs["hidden_states"] = tuple(repeated(state, run.call.cache) for state in states)
        layers = outputs.pop("router_logits", None)
        if layers and run.group.size == 1:
            outputs["router_logits"] = tuple(run.batch.lies.batch(layer[None]).flatten(0, 1) for layer in layers)

    def _decide_logits(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        head, logits = self.head, outputs.pop("logits", None)
        # Gemma 4 keeps all rows if its own input_ids are longer than what it computed
        rows = None if head.kept is None else head.kept[head.kept >= 0]
        if rows is not None and (not head.by_model or logits.shape[1] != len(rows)):
            logits = logits[:, rows.to(logits.device)]
        if head.logits == "defer":
            outputs["logits"] = Spread.of(logits).handed_out(run.batch.lies, head.fits, head.about, outputs.get("loss"))
        elif head.logits != "drop":
            if head.logits == "gather" and head.kept is not None:
                logits = run.batch.lies.from_kept(logits, head.kept)
            if head.selects:
                logits = run.batch.lies.by_rows(logits)
            elif not run.batch.sharded:
                logits = run.batch.lies.batch(logits)
            outputs["logits"] = repeated(logits, run.call.cache)


def _gather_fused(run: ForwardPass, outputs: dict[str, Any]) -> None:
    """Gathers TRL's per-token outputs, from which its trainers compute their losses without looking at other ranks.

    In training on a sharded batch they stay local, because `num_items_in_batch` counts every label once there.
    Evaluation has no such number and needs the whole batch.
    """
    for name in filter(outputs.__contains__, _FUSED_FIELDS):
        values = outputs[name]
        if not (run.batch.sharded and run.model.training):
            values = run.batch.lies.numbers(values)
        outputs[name] = values if run.batch.sharded else values[:, :-1]  # as without `shift_labels`
