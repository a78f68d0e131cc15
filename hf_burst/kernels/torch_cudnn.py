"""cuDNN's attention through torch: the fastest on Hopper without a package, where it can be used.

Torch gives cuDNN no windows and does not ask for its deterministic backward. Its call of variable length builds a plan
each time, and its two passes offset the log-sum-exp differently, so documents are one call each here. The causal mask
begins at the top left corner: it is used on squares only. A plan is made for every new shape and looked up by the
strides of q, k and v alone, as if those of `out`, `dout` and the log-sum-exp followed from them. So everything is made
contiguous. cuDNN refuses a single row or column, which plain torch computes.

On Hopper the backward pass of a whole tile counts 64 keys that are not there, if it has 64 more than a multiple of 128
(pytorch/pytorch#196678). Rows of small log-sum-exp then have NaN for gradients. So such tiles are cut.
"""

import torch
from torch import Tensor

from ..plan import Band
from .base import BackwardInputs, Capabilities, Gradients, OutputBuffers, Outputs, Scores
from .flash import aligned
from .library import gpu_refusal
from .pieces import Piece, SquareKernel
from .reference import ReferenceKernel

_OLDEST = 90000  # below it, rows and columns have to come in multiples of 64
_BLOCK = 128  # keys of a block on Hopper


class TorchCudnnKernel(SquareKernel):
    """`aten::_scaled_dot_product_cudnn_attention` and its backward."""

    reference = ReferenceKernel()

    capabilities = Capabilities(
        name="torch_cudnn",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        most_head_dim=128,
        head_multiple=8,
        own_value_dim=True,
        wants_out=True,
        windows=False,
        auto_refusal="is taken by name only, since it computes no windows and documents one by one",
    )

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        refusal = gpu_refusal((8, 0))
        if refusal is not None:
            return refusal
        own = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return None if own is not None and own >= _OLDEST else f"needs cuDNN {_OLDEST} or above, torch has {own}"

    def forward_piece(
        self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        if min(piece.height, piece.width) == 1:
            out, lse = self.reference.forward(q, k, v, piece.band, scores)
            return out.to(q.dtype), lse
        causal = piece.band == Band(low=0)
        out, lse, *_ = self.library._scaled_dot_product_cudnn_attention(
            *map(_heads_first, (q, k, v)), None, True, 0.0, causal, False, scale=scores.scale
        )
        return out.transpose(1, 2), lse.squeeze(-1).transpose(1, 2)

    def backward_piece(
        self, piece: Piece, inputs: BackwardInputs, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        if min(piece.height, piece.width) == 1:
            return self.reference.backward(inputs, piece.band, scores)
        if piece.band == Band() and piece.width % _BLOCK == _BLOCK // 2:
            return self._backward_by_columns(inputs, piece, scores)
        causal, no_dropout = piece.band == Band(low=0), torch.empty((), dtype=torch.long, device=inputs.q.device)
        gradients = self.library._scaled_dot_product_cudnn_attention_backward(
            *map(_heads_first, inputs.with_out),
            inputs.lse.transpose(1, 2).contiguous().unsqueeze(-1),
            *(no_dropout, no_dropout, None, None, None, piece.height, piece.width, 0.0, causal),
            scale=scores.scale,
        )
        dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
        return dq, dk, dv

    def _backward_by_columns(self, inputs: BackwardInputs, piece: Piece, scores: Scores) -> Gradients:
        """The gradients of a whole tile whose last keys would be half a block, in columns that end otherwise."""
        rows, stop, quarter, parts = slice(0, piece.height), piece.width, _BLOCK // 4, []
        bounds = sorted({0, stop - 2 * quarter, stop - quarter, stop})
        for columns in map(slice, bounds, bounds[1:]):
            part = Piece(rows, slice(0, columns.stop - columns.start), Band())
            parts.append(self.backward_piece(part, inputs.cut(rows, columns), scores))
        dqs, dks, dvs = zip(*parts, strict=True)
        return torch.stack(dqs).sum(0, dtype=torch.float32), torch.cat(dks, 1), torch.cat(dvs, 1)


def _heads_first(tensor: Tensor) -> Tensor:
    """`(B, H, S, D)`, contiguous as `(B, S, H, D)` and aligned."""
    return aligned(tensor.contiguous()).transpose(1, 2)
