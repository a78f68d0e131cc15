"""cuDNN's attention through torch: the fastest on Hopper without a package, where it can be used.

Torch gives cuDNN no windows. Its call of variable length builds a plan each time, and its two passes offset the
log-sum-exp differently, so documents are one call each here. The causal mask begins at the top left corner: it is used
on squares only. A plan is made for every new shape and looked up by the strides of q, k and v alone, as if those of
`out`, `dout` and the log-sum-exp followed from them; everything is made contiguous. A single row or column, which cuDNN
refuses, is computed by plain torch. Torch does not ask cuDNN for its deterministic backward.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from ..errors import KernelError
from .base import Band, Capabilities, OutputBuffers, Scores
from .flash import aligned
from .library import gpu_refusal
from .pieces import Piece, backward_pieces, crop, forward_pieces
from .reference import ReferenceKernel

_OLDEST = 90000  # below it, rows and columns have to come in multiples of 64


class TorchCudnnKernel:
    """`aten::_scaled_dot_product_cudnn_attention` and its backward.

    Args:
        library (module, *optional*): In place of `torch.ops.aten`, for tests.
    """

    capabilities = Capabilities(
        name="torch_cudnn",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(8, 128),
        head_multiple=8,
        own_value_dim=True,
        wide=False,
        wants_out=True,
        windows=False,
        by_name="is taken by name only, since it computes no windows and documents one by one",
    )

    def __init__(self, library: Any = None) -> None:
        self.library = torch.ops.aten if library is None else library
        self.rest = ReferenceKernel()

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        """See [`Kernel.unavailable`]."""
        refusal = gpu_refusal((8, 0))
        if refusal is not None:
            return refusal
        own = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return None if own is not None and own >= _OLDEST else f"needs cuDNN {_OLDEST} or above, torch has {own}"

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        band: Band,
        scores: Scores,
        into: OutputBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`Kernel.forward`].

        Raises:
            KernelError: If the tile is neither whole nor causal.
        """

        def call(piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = (q[:, piece.rows], k[:, piece.columns], v[:, piece.columns])
            if min(piece.height, piece.width) == 1:
                out, lse = self.rest.forward(*inputs, piece.band, scores)
                return out.to(q.dtype), lse
            out, lse, *_ = self.library._scaled_dot_product_cudnn_attention(
                *map(_heads_first, inputs), None, True, 0.0, piece.band == Band(low=0), False, scale=scores.scale
            )
            return out.transpose(1, 2), lse.squeeze(-1).transpose(1, 2)

        return forward_pieces(q, v, _pieces(band, q.shape[1], k.shape[1]), call)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        band: Band,
        scores: Scores,
        into: OutputBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See [`Kernel.backward`]; raises as `forward` does."""
        assert out is not None, "the card says wants_out"
        assert delta is not None, "the card does not say derives_delta"

        def call(piece: Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            rows, columns = piece.rows, piece.columns
            inputs = (dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows])
            if min(piece.height, piece.width) == 1:
                return self.rest.backward(*inputs, lse[:, rows], delta[:, rows], piece.band, scores)
            no_dropout = torch.empty((), dtype=torch.long, device=q.device)
            gradients = self.library._scaled_dot_product_cudnn_attention_backward(
                *map(_heads_first, inputs),
                lse[:, rows].transpose(1, 2).contiguous().unsqueeze(-1),
                *(no_dropout, no_dropout, None, None, None, piece.height, piece.width, 0.0, piece.band == Band(low=0)),
                scale=scores.scale,
            )
            dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
            return dq, dk, dv

        return backward_pieces((q, k, v), _pieces(band, q.shape[1], k.shape[1]), call)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """`(B, H, S, D)`, contiguous as `(B, S, H, D)` and aligned."""
    return aligned(tensor.contiguous()).transpose(1, 2)


def _pieces(band: Band, rows: int, columns: int) -> Iterator[Piece]:
    """Documents one by one, whole or as a causal square, under which all rows see all columns."""
    spans = [(slice(*span), slice(*span)) for span in pairwise(band.segments)] or [(slice(0, rows), slice(0, columns))]
    for row_span, column_span in spans:
        piece = crop(Band(band.low, band.high), row_span, column_span)
        if piece is None:
            continue
        if piece.band not in (Band(), Band(low=0)):
            raise KernelError(
                f"torch_cudnn computes whole tiles and causal squares, not the rows and columns of {band}. Set "
                "BurstConfig(kernel=...) to another one for this attention."
            )
        middle = piece.rows.stop if piece.band == Band() else piece.rows.start + piece.width
        yield Piece(slice(piece.rows.start, middle), piece.columns, piece.band)
        if middle < piece.rows.stop:
            yield Piece(slice(middle, piece.rows.stop), piece.columns, Band())
