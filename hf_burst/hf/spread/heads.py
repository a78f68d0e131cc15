"""Checks of a language-model head before it is put off: who watches it, and who shards its weights."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ...errors import UnsupportedModelError
from ..view import inner_modules

_WRAPPERS = ("torch.distributed.", "deepspeed.", "accelerate.", "trl.")  # their hooks manage weights and memory


def is_hooked(module: nn.Module) -> bool:
    """Returns whether forward hooks need a head's logits. Hooks of wrappers that manage weights and memory do not."""
    modules = list(inner_modules(module))
    hooks = [hook for inner in modules for hook in inner._forward_hooks.values()]
    hooks += _global_forward_hooks.values()
    again = is_partitioned(module)  # the head is then called a second time, with its pre-hooks
    hooks += [hook for inner in modules[0 if again else 1 :] for hook in inner._forward_pre_hooks.values()]
    hooks += _global_forward_pre_hooks.values() if again else ()
    return any(not str(hook.__module__).startswith(_WRAPPERS) for hook in hooks)


def is_watched(module: nn.Module) -> bool:
    """Returns whether hooks need a head's gradients, which are complete only with all logits, or a weight is computed
    from others before the head runs."""
    modules = list(inner_modules(module))
    tensors = [tensor for inner in modules for tensor in (*inner._parameters.values(), *vars(inner).values())]
    return any(inner._backward_hooks or inner._backward_pre_hooks for inner in modules) or any(
        tensor._backward_hooks or not tensor.is_leaf for tensor in tensors if isinstance(tensor, torch.Tensor)
    )


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
