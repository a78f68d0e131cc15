"""TRL's `GKDTrainer`, which learns from a teacher: to it, a group of ranks is one process.

Its loss follows from the logits of two models, which are too large to gather for long sequences. So it is computed by
[`hf_burst.token_divergences`], some tokens at a time. Answers that it learns from are generated over all ranks.
"""

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import GenerationConfig

from ...layers.loss import IGNORE_INDEX
from ...ranks.group import CP_DIM, ContextGroup
from ..generation.scores import token_divergences
from .answering import Answers, check_steps, patch_as

_GKD = ("trl.experimental.gkd.gkd_trainer", "GKDTrainer")
DISTILLING = {_GKD}
_LOSS = ("compute_loss", "generalized_jsd_loss")
_READ = ("input_ids", "attention_mask", "labels")


class Distillation:
    """Wraps the methods of one trainer in which ranks of a group would come apart, or hold all logits.

    Args:
        trainer (`GKDTrainer`): It is being made.
        accelerator (`Accelerator`): Its accelerator.
        size (`int`): The ranks of a group.

    Raises:
        ConfigError: Under DeepSpeed, or if its steps are not those that are known.
    """

    def __init__(self, trainer: Any, accelerator: Accelerator, size: int) -> None:
        kind, steps = type(trainer), (*_LOSS, "generate_on_policy_outputs")
        check_steps(trainer, accelerator, steps, ", or take hf_burst.token_divergences in a loss of your own")
        self.trainer, self.device, self.size = trainer, accelerator.device, size
        self.sharded = accelerator.distributed_type is DistributedType.FSDP
        group = ContextGroup.from_mesh(accelerator.torch_device_mesh[CP_DIM])
        self.answers = Answers(group, accelerator.device)
        (known,) = (each for each in kind.__mro__ if (each.__module__, each.__name__) == _GKD)
        self.own_loss = any(getattr(kind, name) is not getattr(known, name) for name in _LOSS)  # the user's
        for name, wrapper in (("compute_loss", self.compute_loss), ("generate_on_policy_outputs", self.generate)):
            method = getattr(trainer, name)
            setattr(trainer, name, update_wrapper(partial(wrapper, method), method))

    def take_teacher(self, teacher: nn.Module) -> None:
        """Patches the teacher, which the trainer may have loaded by itself, as the model. accelerate leaves it on the
        host where FSDP shards the model."""
        if self.sharded and not getattr(teacher, "is_quantized", False):  # which was placed when it was loaded
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
        """The loss of a batch, whose tokens `Trainer` has counted once for each rank of the group."""
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
        """Answers of the model, or of its teacher. With a cache, also beside checkpoints, which TRL switches off."""
        config = GenerationConfig(**{**generation_config.to_dict(), "use_cache": True})
        with self.answers.answering(model):
            return method(model, inputs, config)
