"""FFPA from its package, `ffpa-attn`: the fastest for heads above 256 on Hopper, such as Gemma 4's of 512.

Read in version 0.2.4, whose `_ffpa_attn_forward_sm90` and `_ffpa_attn_backward_sm90` are private. A version whose
parameters have other names is refused. It computes whole tiles and causal squares, and packed documents in a call of
variable length. Its kernels for other GPUs were not tried.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..plan import Band
from .base import BackwardInputs, Gradients, OutputBuffers, Outputs, Scores
from .flash import FLASH, LENGTHS, FlashKernel, gradient_buffers
from .library import Signatures, gpu_refusal, package_refusal
from .pieces import Piece, causal_pieces, need_square

_SCORES = ("softmax_scale", "causal")
_SIGNATURES: Signatures = (
    ("_ffpa_attn_forward_sm90", ("q", "k", "v", *LENGTHS, *_SCORES, "return_lse", "out", "lse")),
    ("_ffpa_attn_backward_sm90", ("q", "k", "v", "out", "dout", "lse", *LENGTHS, *_SCORES, "dq", "dk", "dv")),
)


class FfpaKernel(FlashKernel):
    """`_ffpa_attn_forward_sm90` and `_ffpa_attn_backward_sm90` of `ffpa_attn.cute`."""

    module = "ffpa_attn.cute"
    capabilities = replace(
        FLASH, name="ffpa", most_head_dim=512, head_sizes=(320, 384, 512), softcap=False, windows=False
    )

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        return gpu_refusal((9, 0), (10, 0)) or package_refusal("ffpa-attn", self.module, _SIGNATURES)

    def cut(self, piece: Piece) -> Iterator[Piece]:
        """See [`FlashKernel.cut`]."""
        return causal_pieces(piece)

    def pieces(self, band: Band, q: Tensor, k: Tensor) -> Iterator[Piece]:
        for piece in super().pieces(band, q, k):
            need_square("ffpa", piece.band)
            yield piece

    def launch_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Piece, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        out, lse = buffers or (None, None)
        return self.library._ffpa_attn_forward_sm90(q, k, v, **_call(call, scores), return_lse=True, out=out, lse=lse)

    def launch_backward(
        self, inputs: BackwardInputs, call: Piece, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        assert inputs.out is not None, "the capabilities say wants_out"
        dout, q, k, v, out, lse, _ = inputs
        gradients = gradient_buffers(inputs, buffers)
        return self.library._ffpa_attn_backward_sm90(q, k, v, out, dout, lse, **_call(call, scores), **gradients)


def _call(call: Piece, scores: Scores) -> dict[str, Any]:
    """A call in the words of the package."""
    lengths = zip(LENGTHS, call.lengths, strict=True) if call.packed else ()
    return {"softmax_scale": scores.scale, "causal": call.window[0], **dict(lengths)}
