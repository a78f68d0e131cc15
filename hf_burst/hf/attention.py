"""Attention and mask as Transformers knows them: two functions registered under the name `"hf_burst"`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .. import op  # noqa: F401  (registers the operator)
from ..errors import UnsupportedModelError
from .batch import ForwardCall

NAME = "hf_burst"
# arguments that change the result and are not served
_REFUSED = ("softcap", "s_aux", "sinks", "position_bias", "indices")


@dataclass
class DeferredMask:
    """The arguments of a mask that sharded attention never needs, built only if plain attention asks for it."""

    arguments: dict[str, Any]

    def build(self) -> torch.Tensor | None:
        """The boolean mask of shape `(batch, 1, q_length, kv_length)`, `None` for plain causal attention."""
        mask: torch.Tensor | None = sdpa_mask(**self.arguments)
        return mask


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: "DeferredMask | torch.Tensor | None",
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    burst_call: ForwardCall | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form of Transformers' `AttentionInterface`.

    Without `burst_call` (a cached generation step, a submodule called directly) every rank holds the whole sequence,
    and this is Transformers' own sdpa attention.

    Args:
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(batch, q_heads, n, head_dim)`): Queries of this rank.
        key, value (`torch.Tensor` of shape `(batch, kv_heads, n, head_dim)`): Keys and values of this rank.
        attention_mask ([`DeferredMask`] or `torch.Tensor`, *optional*): Used without `burst_call` only.
        scaling (`float`, *optional*): Factor of the scores.
        is_causal (`bool`, *optional*): Overrules the layer's own attribute.
        sliding_window (`int`, *optional*): Tokens that a query sees, itself included.
        burst_call ([`ForwardCall`], *optional*): How the batch is sharded.

    Returns:
        `torch.Tensor` of shape `(batch, n, q_heads, head_dim)`, and `None` for the weights.
    """
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if refused:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(refused)} to its attention, which hf_burst does not serve. "
            "Unpatch the model (hf_burst.unpatch_model) and use another attention implementation."
        )
    if burst_call is None:
        mask = attention_mask.build() if isinstance(attention_mask, DeferredMask) else attention_mask
        out: torch.Tensor = sdpa_attention_forward(
            module, query, key, value, mask, scaling=scaling, is_causal=is_causal, **kwargs
        )[0]
        return out, None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    dtype = value.dtype  # under peft or autocast, norms may leave q and k in fp32
    out, _ = torch.ops.hf_burst.attention(
        query.to(dtype).transpose(1, 2),
        key.to(dtype).transpose(1, 2),
        value.transpose(1, 2),
        burst_call.encoded,
        causal,
        -1 if sliding_window is None else sliding_window - 1,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        burst_call.config.kernel,
        burst_call.config.backward,
        burst_call.group.name,
    )
    return out, None


def attention_mask(**arguments: Any) -> DeferredMask | torch.Tensor | None:
    """The mask in the form of Transformers' `AttentionMaskInterface`: nothing is built.

    Only generation has padding masks, or keys besides those of its queries; it is given its mask at once.
    """
    deferred = DeferredMask(arguments)
    square = arguments["q_length"] == arguments["kv_length"]
    return deferred if square and arguments.get("attention_mask") is None else deferred.build()


def register() -> None:
    """Makes the name known to Transformers; doing so again changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
