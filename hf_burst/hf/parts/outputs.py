"""The outputs of a pass: from this rank's tokens to the whole batch."""

from typing import Any

from ..forward_pass import ForwardPass
from ..spread.value import Spread
from .base import Part
from .experts import RouterLogits
from .head import Head
from .key_cache import KeyCache
from .loss import Loss
from .shared_beginnings import SharedBeginnings
from .states import States
from .token_losses import TokenLosses

# one value a token, in TRL's output for `fused_lm_head=True`, which holds no logits
_FUSED_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


class Outputs(Part):
    """Gathers outputs in sequence order. Those of a batch that arrived sharded stay sharded."""

    # RouterLogits adds to the loss; the latter three read logits before they are gathered or dropped, or put states off
    needs = (SharedBeginnings, RouterLogits, Loss, TokenLosses, States)

    def __init__(self, head: Head, key_cache: KeyCache) -> None:
        self.head, self.key_cache = head, key_cache

    def prepare(self, run: ForwardPass) -> None:
        run.agreement.add("hidden states", bool(run.batch.given.get("output_hidden_states")))

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        if "log_probs" in outputs:
            _gather_fused(run, outputs)
            return
        if run.task.reads or run.pooling:
            outputs |= {name: value.whole() for name, value in outputs.items() if isinstance(value, Spread)}
        else:
            self._decide_logits(run, outputs)
        if "hidden_states" in outputs:
            states = outputs["hidden_states"]
            states = states if run.batch.sharded else map(run.lies.batch, states)
            outputs["hidden_states"] = tuple(map(self.key_cache.repeated, states))
        layers = outputs.pop("router_logits", None)
        if layers and run.group.size == 1:
            outputs["router_logits"] = tuple(run.lies.batch(layer[None]).flatten(0, 1) for layer in layers)

    def _decide_logits(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        head, logits = self.head, outputs.pop("logits", None)
        # Gemma 4 leaves out no rows where its own input_ids are longer than what it computed
        rows = None if head.kept is None else head.kept[head.kept >= 0]
        if rows is not None and (not head.by_model or logits.shape[1] != len(rows)):
            logits = logits[:, rows.to(logits.device)]
        if head.logits == "defer":
            outputs["logits"] = Spread.of(logits).handed_out(run.lies, head.fits, head.about, outputs.get("loss"))
        elif head.logits != "drop":
            if head.logits == "gather" and head.kept is not None:
                logits = run.lies.kept(logits, head.kept)
            if head.asked:
                logits = run.lies.by_rows(logits)
            elif not run.batch.sharded:
                logits = run.lies.batch(logits)
            outputs["logits"] = self.key_cache.repeated(logits)


def _gather_fused(run: ForwardPass, outputs: dict[str, Any]) -> None:
    """TRL's per-token outputs. Its trainers compute their losses from these and look at no other rank.

    In training on a sharded batch they stay this rank's, since `num_items_in_batch` counts every label once there.
    Evaluation has no such number and needs the whole batch.
    """
    for name in filter(outputs.__contains__, _FUSED_FIELDS):
        values = outputs[name]
        if not (run.batch.sharded and run.model.training):
            values = run.lies.numbers(values)
        outputs[name] = values if run.batch.sharded else values[:, :-1]  # as without `shift_labels`
