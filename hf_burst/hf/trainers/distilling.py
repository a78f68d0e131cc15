"""Distillation by TRL's `GKDTrainer`, with each group of ranks as one process.

The loss compares the logits of two models, which are too large to gather for long sequences, so
[`hf_burst.token_divergences`] computes it in chunks of tokens. The ranks of a group generate answers together.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import GenerationConfig

from ...layers.loss import IGNORE_INDEX
from ...ranks.group import CP_DIM, ContextGroup
from ..admission import trl_classes
from ..generation.scores import token_divergences
from ..generation.settings import with_settings
from .first_rank import FirstRank, patch_as, wrap_steps

_LOSS = ("compute_loss", "generalized_jsd_loss")
_READ = ("input_ids", "attention_mask", "labels")


class Distillation:
    """Replaces the steps of a trainer that would hold all logits, or generate different answers on each rank."""

    def __init__(self, trainer: Any, accelerator: Accelerator, size: int) -> None:
        wrap_steps(trainer, compute_loss=self.compute_loss, generate_on_policy_outputs=self.generate)
        self.trainer, self.device, self.size = trainer, accelerator.device, size
        self.sharded = accelerator.distributed_type is DistributedType.FSDP
        self.first = FirstRank(ContextGroup.from_mesh(accelerator.torch_device_mesh[CP_DIM]), accelerator.device)
        kind = type(trainer)
        known = trl_classes(kind)[0]
        self.own_loss = any(getattr(kind, name) is not getattr(known, name) for name in _LOSS)  # the user's

    def take_teacher(self, teacher: nn.Module) -> None:
        """Patches the teacher, which the trainer may have loaded itself, with the student's settings. Under FSDP it
        moves to the device, because accelerate leaves it on the host."""
        if self.sharded and not getattr(teacher, "is_quantized", False):  # quantized models are placed at loading
            teacher.to(self.device)
        patch_as(self.trainer.model, teacher)

    def compute_loss(
        self,
        method: Callable[..., Any],
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Returns the loss of a batch. `Trainer` has counted its tokens once per rank of the group."""
        trainer, items = self.trainer, num_items_in_batch
        if items is not None and trainer.args.average_tokens_across_devices:
            items = items / self.size
        if return_outputs or self.own_loss:
            return method(model, inputs, return_outputs=return_outputs, num_items_in_batch=items)
        batch, beta = {name: inputs[name] for name in _READ}, float(trainer.beta)
        options: Any = {"kind": {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")}
        options |= {"beta": beta} if 0 < beta < 1 else {}
        total = token_divergences(model, trainer.teacher_model, batch, **options).sum()
        if items is None:
            items = (batch["labels"][:, 1:] != IGNORE_INDEX).sum().clamp(min=1)
        return total / torch.as_tensor(items, device=total.device)

    def generate(
        self, method: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], generation_config: GenerationConfig
    ) -> Any:
        """Returns answers of the model or its teacher, with the cache on; TRL turns it off with checkpointing."""
        with self.first.answering(model):
            cached = with_settings(generation_config, use_cache=True)
            return self.first.result(lambda: method(model, inputs, cached), "answers")
