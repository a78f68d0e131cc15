"""FlashAttention-2 (arXiv 2307.08691) from its package, `flash-attn`: as in torch, and soft-capped scores.

Read in version 2.8.3.post2.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from .base import BackwardInputs, OutputBuffers, Scores
from .flash import FLASH, FlashCall, aligned, gradient_buffers, unbounded_is_negative
from .library import Signatures, package_refusal
from .torch_flash import Flash2Kernel

_SCORES = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_TENSORS = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
_SIGNATURES: Signatures = (
    ("_flash_attn_forward", ("q", "k", "v", *_SCORES, "return_softmax")),
    ("_flash_attn_varlen_forward", ("q", "k", "v", *_LENGTHS, *_SCORES, "return_softmax")),
    ("_flash_attn_backward", (*_TENSORS, *_SCORES, "deterministic")),
    ("_flash_attn_varlen_backward", (*_TENSORS, *_LENGTHS, *_SCORES, "deterministic")),
)


class FlashAttn2Kernel(Flash2Kernel):
    """`_flash_attn_forward`, `_flash_attn_backward` and their `_varlen_` forms."""

    module = "flash_attn.flash_attn_interface"
    capabilities = replace(FLASH, name="flash_attn_2")

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        """See [`Kernel.unavailable`]."""
        return super().unavailable(head_dim, value_dim) or package_refusal("flash-attn", self.module, _SIGNATURES)

    def launch_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall, scores: Scores, buffers: OutputBuffers | None = None
    ) -> tuple[Tensor, Tensor]:
        """See [`FlashKernel.launch_forward`]."""
        library = self.library
        function = library._flash_attn_varlen_forward if call.packed else library._flash_attn_forward
        out, lse, *_ = function(aligned(q), aligned(k), aligned(v), **_keywords(call, scores), return_softmax=False)
        return out, lse

    def launch_backward(
        self, inputs: BackwardInputs, call: FlashCall, scores: Scores, buffers: OutputBuffers | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See [`FlashKernel.launch_backward`]."""
        assert inputs.out is not None, "the capabilities say wants_out"
        library = self.library
        function = library._flash_attn_varlen_backward if call.packed else library._flash_attn_backward
        gradients = gradient_buffers(inputs, buffers)
        function(
            *map(aligned, (inputs.dout, inputs.q, inputs.k, inputs.v, inputs.out)),
            inputs.lse.contiguous(),  # the library takes no strides for it
            **{**gradients, **_keywords(call, scores), "deterministic": self.deterministic},
        )
        return gradients["dq"], gradients["dk"], gradients["dv"]


def _keywords(call: FlashCall, scores: Scores) -> dict[str, Any]:
    causal, left, right = unbounded_is_negative(call.window)
    values = (0.0, scores.scale, causal, left, right, scores.softcap, None)
    lengths = dict(zip(_LENGTHS, call.lengths, strict=True)) if call.packed else {}
    return {**lengths, **dict(zip(_SCORES, values, strict=True))}
