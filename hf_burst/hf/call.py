"""How a forward pass is called: its arguments by name, and the value that travels through the model beside them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..attention import AttentionCache
from ..config import BurstConfig
from ..errors import BatchError
from ..layout import SequenceLayout
from ..mesh import ContextGroup

CALL_KEY = "burst_call"  # the keyword argument by which a ForwardCall comes to the layers
TOKEN_KEYS = ("input_ids", "inputs_embeds")


@dataclass(frozen=True)
class ForwardCall:
    """What the layers of a model know of one sharded forward pass; the keyword argument `burst_call`.

    Args:
        layout ([`SequenceLayout`]): How the batch lies over the ranks.
        group ([`ContextGroup`]): The ranks.
        config ([`BurstConfig`]): Schedule, kernel and transport.
        encoded (`torch.Tensor`): The layout as the operator takes it.
        causal (`bool`): Whether queries see no later key.
        positions (`torch.LongTensor` of shape `(batch, n)`, *optional*): This rank's, known from the cut point on.
        fully_masked (`torch.BoolTensor` of shape `(batch, n)`, *optional*): This rank's tokens that see nothing.
        cache (`Callable`, *optional*): Returns the [`AttentionCache`] of the layer that runs, if it is checkpointed.
    """

    layout: SequenceLayout
    group: ContextGroup
    config: BurstConfig
    encoded: torch.Tensor
    causal: bool = True
    positions: torch.Tensor | None = None
    fully_masked: torch.Tensor | None = None
    cache: Callable[[], AttentionCache | None] | None = None


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass by name.

    A class of the user's may hand on `*args`. The names are those of its first base class that names tokens.
    """
    signatures = [inspect.signature(vars(cls)["forward"]) for cls in type(module).__mro__ if "forward" in vars(cls)]
    naming = [signature for signature in signatures if set(TOKEN_KEYS) & set(signature.parameters)]
    bound = (naming or signatures)[0].bind_partial(module, *args, **kwargs)
    arguments: dict[str, Any] = {}
    for index, (name, value) in enumerate(bound.arguments.items()):
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        elif index:  # the first is the model
            arguments[name] = value
    return arguments


def tokens_of(batch: Mapping[str, Any]) -> torch.Tensor:
    """The `input_ids` of a batch, `(batch, tokens)`, or else its `inputs_embeds`, `(batch, tokens, hidden)`.

    Raises:
        BatchError: If it has neither, or an empty one.
    """
    for key in TOKEN_KEYS:
        tensor = batch.get(key)
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2 or tensor.numel() == 0:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise BatchError(f"{key} is {shape}; it must be a tensor of shape (batch, tokens), neither of them 0.")
        return tensor
    raise BatchError(
        f"The batch holds {sorted(batch)}; it needs input_ids (or inputs_embeds) of shape (batch, tokens)."
    )


def batch_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """`(batch, tokens)` of a batch."""
    rows, length = tokens_of(batch).shape[:2]
    return rows, length
