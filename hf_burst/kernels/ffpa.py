"""FFPA from its package, `ffpa-attn`: the fastest for heads above 256 on Hopper, such as Gemma 4's of 512.

Read in version 0.2.4, whose `_ffpa_attn_forward_sm90` and `_ffpa_attn_backward_sm90` are private. A version whose
parameters have other names is refused. Both give the same bits each time: no block adds to what another one wrote. The
scheduler of causal squares counts the bytes of keys and values in 32 bits. Documents are one call each: calls of
variable length were not tried, nor the kernels for other GPUs.
"""

from dataclasses import replace

from torch import Tensor

from ..errors import KernelError
from ..plan import Band
from .base import BackwardInputs, Gradients, OutputBuffers, Outputs, Scores
from .flash import FLASH, aligned, gradient_buffers
from .library import Signatures, gpu_refusal, package_refusal
from .pieces import Piece, SquareKernel

_SIGNATURES: Signatures = (
    ("_ffpa_attn_forward_sm90", ("q", "k", "v", "softmax_scale", "causal", "return_lse", "out", "lse")),
    ("_ffpa_attn_backward_sm90", ("q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal", "dq", "dk", "dv")),
)
_MOST_BYTES = 2**31  # of a head's keys and values under a causal mask


class FfpaKernel(SquareKernel):
    """`_ffpa_attn_forward_sm90` and `_ffpa_attn_backward_sm90` of `ffpa_attn.cute`."""

    module = "ffpa_attn.cute"
    capabilities = replace(
        FLASH, name="ffpa", most_head_dim=512, head_sizes=(320, 384, 512), softcap=False, windows=False
    )

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        return gpu_refusal((9, 0), (10, 0)) or package_refusal("ffpa-attn", self.module, _SIGNATURES)

    def forward_piece(
        self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        """See [`PiecewiseKernel.forward_piece`].

        Raises:
            KernelError: If the scheduler cannot count the keys.
        """
        causal = piece.band != Band()
        if causal and piece.width * (k.shape[3] + v.shape[3]) * k.element_size() >= _MOST_BYTES:
            raise KernelError(
                f"ffpa computes causal squares of less than {_MOST_BYTES // (4 * k.shape[3]):,} keys of {k.shape[3]} "
                f'elements, not of {piece.width:,}. Set BurstConfig(kernel="torch_efficient") for this attention.'
            )
        out, lse = buffers or (None, None)
        lse = None if lse is None else lse.transpose(1, 2)
        q, k, v = map(aligned, (q, k, v))
        out, lse = self.library._ffpa_attn_forward_sm90(
            q, k, v, softmax_scale=scores.scale, causal=causal, return_lse=True, out=out, lse=lse
        )
        return out, lse.transpose(1, 2)

    def backward_piece(
        self, piece: Piece, inputs: BackwardInputs, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        dout, q, k, v, out = map(aligned, inputs.with_out)
        lse, causal = inputs.lse.transpose(1, 2), piece.band != Band()
        gradients = gradient_buffers(inputs, buffers)
        return self.library._ffpa_attn_backward_sm90(
            q, k, v, out, dout, lse, softmax_scale=scores.scale, causal=causal, **gradients
        )
