"""FlashAttention-2 (arXiv 2307.08691) from its package, `flash-attn`: as in torch, and soft-capped scores.

Read in version 2.8.3.post2.
"""

from dataclasses import replace

from torch import Tensor

from .base import BackwardInputs, OutputBuffers, Scores
from .flash import FLASH, LENGTHS, aligned, gradient_buffers, library_keywords
from .library import Signatures, package_refusal
from .pieces import Piece
from .torch_flash import TorchFlashKernel

_SCORES = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
_UNUSED = {"dropout_p": 0.0, "alibi_slopes": None}
_TENSORS = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
_SIGNATURES: Signatures = (
    ("_flash_attn_forward", ("q", "k", "v", *_SCORES, "return_softmax")),
    ("_flash_attn_varlen_forward", ("q", "k", "v", *LENGTHS, *_SCORES, "return_softmax")),
    ("_flash_attn_backward", (*_TENSORS, *_SCORES, "deterministic")),
    ("_flash_attn_varlen_backward", (*_TENSORS, *LENGTHS, *_SCORES, "deterministic")),
)


class FlashAttn2Kernel(TorchFlashKernel):
    """`_flash_attn_forward`, `_flash_attn_backward` and their `_varlen_` forms."""

    module = "flash_attn.flash_attn_interface"
    capabilities = replace(FLASH, name="flash_attn_2")

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        return super().unavailable(head_dim, value_dim) or package_refusal("flash-attn", self.module, _SIGNATURES)

    def launch_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Piece, scores: Scores, buffers: OutputBuffers | None = None
    ) -> tuple[Tensor, Tensor]:
        library = self.library
        function = library._flash_attn_varlen_forward if call.packed else library._flash_attn_forward
        keywords = {**_UNUSED, **library_keywords(call, scores), "return_softmax": False}
        out, lse, *_ = function(aligned(q), aligned(k), aligned(v), **keywords)
        return out, lse

    def launch_backward(
        self, inputs: BackwardInputs, call: Piece, scores: Scores, buffers: OutputBuffers | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert inputs.out is not None, "the capabilities say wants_out"
        library = self.library
        function = library._flash_attn_varlen_backward if call.packed else library._flash_attn_backward
        gradients = gradient_buffers(inputs, buffers)
        keywords = {**_UNUSED, **library_keywords(call, scores), **gradients, "deterministic": self.deterministic}
        tensors = map(aligned, (inputs.dout, inputs.q, inputs.k, inputs.v, inputs.out))
        function(*tensors, inputs.lse.contiguous(), **keywords)  # the library takes no strides for lse
        return gradients["dq"], gradients["dk"], gradients["dv"]
