"""Checks of a language-model head before it is put off: who watches it, and who shards its weights."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ...errors import UnsupportedModelError
from ..view import inner_modules

_WRAPPERS = ("torch.distributed.", "deepspeed.", "accelerate.", "trl.")  # their hooks manage weights and memory


def needs_logits(module: nn.Module) -> bool:
    """Returns whether hooks need a head's logits, or its gradients, which are complete only with all logits, or a
    weight is computed from others before it runs. Hooks of wrappers that manage weights and memory need none."""
    modules, again = list(inner_modules(module)), is_partitioned(module)  # then it is called twice, with its pre-hooks
    hooks = [*_global_forward_hooks.values(), *(_global_forward_pre_hooks.values() if again else ())]
    hooks += [hook for inner in modules for hook in inner._forward_hooks.values()]
    hooks += [hook for inner in modules[0 if again else 1 :] for hook in inner._forward_pre_hooks.values()]
    watched = any(inner._backward_hooks or inner._backward_pre_hooks for inner in modules)
    if watched or any(not str(hook.__module__).startswith(_WRAPPERS) for hook in hooks):
        return True
    held = (value for inner in modules for value in (*inner._parameters.values(), *vars(inner).values()))
    tensors = (value for value in held if isinstance(value, torch.Tensor))
    return any(tensor._backward_hooks or not tensor.is_leaf for tensor in tensors)


def is_partitioned(module: nn.Module) -> bool:
    """Returns whether DeepSpeed ZeRO-3 shards the weights, which are then empty outside their own module's call."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def is_sharded_head(head: nn.Module | None) -> bool:
    """Returns whether FSDP2 shards a head."""
    return head is not None and any(isinstance(weight, DTensor) for weight in head.parameters())


def check_head_again(head: nn.Module | None) -> None:
    if torch.is_grad_enabled() and is_sharded_head(head):
        raise UnsupportedModelError(
            "FSDP2 has sharded the head again after its pass, and losses of tokens need it in the backward pass. Wrap "
            "it together with the last norm, with reshard_after_forward=False, or leave it to the whole model."
        )
