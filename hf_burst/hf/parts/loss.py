"""The loss of the whole batch, weighted by tokens over all ranks."""

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import BatchError, ConfigError, UnsupportedModelError
from ...layers.loss import IGNORE_INDEX, rows_by_weight
from ...ranks.collectives import group_sum
from ...ranks.group import ContextGroup
from ..context import PASS_KEY
from ..forward_pass import LOSS, Call, ForwardPass
from ..groups import resolve_group
from ..models.bypassed import forward_name
from ..models.task import calls_loss_function, computes_loss, task_of
from ..spread.value import Spread
from ..view import ModelView
from .base import Outputs, Part
from .experts import balance_share

_ITEMS = "num_items_in_batch (labels of all ranks: Trainer counts them unless average_tokens_across_devices=False)"
_PAST_US = (
    "The model did not compute its loss by model.loss_function, where ranks add up theirs: its forward is {}. Switch "
    "fused losses off, as Liger's by liger_kernel_config={{'fused_linear_cross_entropy': False}}, and let a forward of "
    "your own call self.loss_function(logits=..., labels=..., vocab_size=..., **kwargs)."
)


class Loss(Part):
    """Replaces the model's loss function."""

    def __init__(self, view: ModelView, group: ContextGroup | None) -> None:
        self.group, self.reads = group, view.find(task_of).reads
        computes = computes_loss(view)
        self.plain = computes.loss_function
        self.was_set = "_loss_function" in vars(computes)  # on the model, instead of by its class
        self.averages = not calls_loss_function(view.root)  # each batch alone, whatever num_items_in_batch is
        self.items: float | None = None  # `num_items_in_batch` of the pass
        self.wanted = False  # whether there are targets for a loss
        self.computed = False  # whether the model has called the loss function
        self.weights: dict[int, Tensor] | None = None  # targets by how often they count, unless all count once

    def install(self, view: ModelView) -> None:
        if not self.reads:
            computes_loss(view).loss_function = self.compute

    def admit(self, call: Call) -> None:
        if not self.reads and computes_loss(call.view).loss_function != self.compute:
            raise ConfigError(
                "The loss function of the model was changed after it was patched. Unpatch it first, then change it."
            )
        forward = forward_name(call.model)
        call.agreement.add("forward of the model", forward, "Replace or wrap it on all ranks, or on none.")
        if forward.startswith("liger_kernel."):
            raise ConfigError(_PAST_US.format(forward))
        self.items = None if call.items is None else float(call.items)
        call.agreement.add(_ITEMS, self.items)

    def begin(self, run: ForwardPass) -> None:
        items, tokens = self.items, run.label_count
        self.wanted = run.batch.targets is not None and run.call.asked == LOSS
        counted = items is not None and self.averages and self.wanted
        fused = run.batch.inputs.get("fused_lm_head")  # TRL's trainers go on, with log_probs that are all 0
        BatchError.refuse(
            (
                items is not None and not items > 0 and (tokens or items),
                f"num_items_in_batch is {items}; it counts the labels of all ranks, and is above 0. Leave it out to "
                "average this batch by itself.",
            ),
            (
                counted and run.model.training and not run.call.multiplies_losses,
                f"Trainer gives {type(run.model).__name__} the labels of one process, and would not multiply its loss "
                "by their number. Leave average_tokens_across_devices=False out.",
            ),
        )
        if counted:  # all groups take part, which have not agreed on this pass
            mine = run.batch.label_count if run.batch.sharded else tokens
            doing = "a count of the labels of all ranks"
            self.items, _ = ContextGroup.from_mesh(None).agree({}, None, run.device, mine, doing=doing)
        if run.model.training and self.wanted and tokens == 0 and not self.items and not fused:
            raise BatchError(
                f"All labels of the batch are {IGNORE_INDEX}, or no token predicts them, so nothing is to be learned. "
                "Drop such batches, or check how the labels are masked."
            )
        self.computed = False
        counts = run.batch.lies.counts
        self.weights = None if counts is None else rows_by_weight(counts, run.device)

    def arguments(self, run: ForwardPass) -> dict[str, Any]:
        cached = run.call.cache is not None  # some models return no cache by default
        return run.call.task.overrides(use_cache=cached or (run.batch.lies.alone and not run.model.training))

    def after(self, run: ForwardPass, outputs: Outputs) -> None:
        if "log_probs" in outputs:  # TRL's output for `fused_lm_head=True`; its trainers look at no other rank
            scores, counts = outputs["log_probs"], run.batch.lies.counts
            if counts is not None:
                scores = scores * counts.to(scores.device)
            loss = batch_loss(-scores.sum(), run, self.items if run.label_count else 1)  # 0 and not nan, as in TRL
            if "aux_loss" in outputs:  # already that of the whole batch
                factor = run.model.config.get_text_config().router_aux_loss_coef * balance_share(run)
                loss = loss + factor * outputs["aux_loss"]
            outputs["loss"] = loss
        elif self.reads:
            if outputs.get("loss") is not None and self.items is not None and run.call.multiplies_losses:
                outputs["loss"] = outputs["loss"] / run.group.size  # every rank holds that of the whole batch
        elif self.wanted and not run.call.task.generates and run.batch.targets is not None:
            outputs["loss"] = batch_loss(Spread.of(outputs["logits"]).loss_sum(run.batch.targets), run, self.items)
        elif self.wanted and not self.computed and outputs.get("loss") is not None:
            raise ConfigError(_PAST_US.format(forward_name(run.model)))

    def end(self) -> None:
        self.weights = None

    def remove(self, view: ModelView) -> None:
        computes = computes_loss(view)
        if not self.reads:
            vars(computes).pop("_loss_function", None)
        if self.was_set:
            computes.loss_function = self.plain

    @torch.compiler.disable  # a graph would be made anew for each number of labels
    def compute(self, logits: Tensor | Spread, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the cross-entropy of the whole batch in place of the model's `loss_function`, see [`batch_loss`]."""
        if kwargs.pop(PASS_KEY, None) is None:
            if resolve_group(self.group).size > 1:
                raise UnsupportedModelError(
                    "model.forward(...) was called, past the hooks that cut the batch, as the peft method AdaLoRA "
                    "does, which is not served. Call model(...) itself."
                )
            return self.plain(logits, labels, *args, **kwargs)
        assert self.run is not None, "a loss is computed in a pass"
        self.computed = True
        local = Spread.of(logits).loss_sum(kwargs["shift_labels"], self.weights)
        return batch_loss(local, self.run, self.items)


def batch_loss(local_sum: Tensor, run: ForwardPass, items: float | None) -> Tensor:
    """Returns the loss of the whole batch, weighted by tokens over all ranks.

    As in Transformers, a token counts 1 / `items` (`num_items_in_batch`), a batch without tokens has the loss nan, and
    the trainer multiplies the loss by the number of processes, because gradients are averaged over them. Without
    `items` a token counts 1 / tokens of the group. `items` are summed over all ranks: each rank of a group counts a
    full batch, but a sharded batch is counted once.
    """
    counted = run.label_count if items is None else items * run.group.size if run.batch.sharded else items
    return group_sum(local_sum * (1 / counted if counted else math.nan), run.group)
