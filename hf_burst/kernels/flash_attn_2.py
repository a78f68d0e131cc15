"""FlashAttention-2 (arXiv 2307.08691) from its package, `flash-attn`: as in torch, and soft-capped scores.

Read in version 2.8.3.post2.
"""

from importlib import import_module
from typing import Any

import torch

from .base import Capabilities, OutputBuffers
from .flash import Call, Given, aligned, unbounded_is_negative
from .library import Calls, package_refusal
from .torch_flash import Flash2Kernel

_MODULE = "flash_attn.flash_attn_interface"
_SCORES = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_GIVEN = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
_CALLS: Calls = (
    ("_flash_attn_forward", ("q", "k", "v", *_SCORES, "return_softmax")),
    ("_flash_attn_varlen_forward", ("q", "k", "v", *_LENGTHS, *_SCORES, "return_softmax")),
    ("_flash_attn_backward", (*_GIVEN, *_SCORES, "deterministic")),
    ("_flash_attn_varlen_backward", (*_GIVEN, *_LENGTHS, *_SCORES, "deterministic")),
)


class FlashAttn2Kernel(Flash2Kernel):
    """`_flash_attn_forward`, `_flash_attn_backward` and their `_varlen_` forms."""

    capabilities = Capabilities(
        name="flash_attn_2",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(8, 256),
        head_multiple=8,
        own_value_dim=False,
        wide=False,
        wants_out=True,
        softcap=True,
        deterministic=True,
        derives_delta=True,
    )

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        """See [`Kernel.unavailable`]."""
        return super().unavailable(head_dim, value_dim) or package_refusal("flash-attn", _MODULE, _CALLS)

    def load(self) -> Any:
        """See [`FlashKernel.load`]."""
        return import_module(_MODULE)

    def launch_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, into: OutputBuffers | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`FlashKernel.launch_forward`]."""
        library = self.library
        function = library._flash_attn_varlen_forward if call.packed else library._flash_attn_forward
        out, lse, *_ = function(aligned(q), aligned(k), aligned(v), **_keywords(call), return_softmax=False)
        return out, lse

    def launch_backward(self, given: Given, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See [`FlashKernel.launch_backward`]."""
        assert given.out is not None, "the card says wants_out"
        library = self.library
        function = library._flash_attn_varlen_backward if call.packed else library._flash_attn_backward
        gradients = given.empty_gradients()
        function(
            *map(aligned, (given.dout, given.q, given.k, given.v, given.out)),
            given.lse.contiguous(),  # its strides are not asked for
            **{**gradients, **_keywords(call), "deterministic": self.deterministic},
        )
        return gradients["dq"], gradients["dk"], gradients["dv"]


def _keywords(call: Call) -> dict[str, Any]:
    causal, left, right = unbounded_is_negative(call.window)
    scores = (0.0, call.scores.scale, causal, left, right, call.scores.softcap, None)
    lengths = dict(zip(_LENGTHS, call.lengths, strict=True)) if call.packed else {}
    return {**lengths, **dict(zip(_SCORES, scores, strict=True))}
