"""Head sizes that a kernel does not take, brought to one that it does by zeros."""

from dataclasses import replace

import torch
from torch.nn import functional

from .base import Band, Kernel, Scores


class PaddedHeads:
    """A kernel that wants one head size for q, k and v, or a multiple of some number, made to take any.

    Zeros appended to q and k add nothing to a score, and those appended to v nothing but columns of zeros to the
    output, which are cut off.

    Args:
        kernel ([`Kernel`]): The kernel that is given padded heads.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.card = replace(kernel.card, head_dims=(1, kernel.card.head_dims[1]), head_multiple=1, own_value_dim=True)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`Kernel.forward`]."""
        size = self._size(q, v)
        out, lse = self.kernel.forward(_pad(q, size), _pad(k, size), _pad(v, size), band, scores)
        return out[..., : v.shape[3]], lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor,
        band: Band,
        scores: Scores,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See [`Kernel.backward`]."""
        size = self._size(q, v)
        dq, dk, dv = self.kernel.backward(
            _pad(dout, size),
            _pad(q, size),
            _pad(k, size),
            _pad(v, size),
            None if out is None else _pad(out, size),
            *(lse, delta, band, scores),
        )
        return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]]

    def _size(self, q: torch.Tensor, v: torch.Tensor) -> int:
        """The smallest head size that the kernel takes and that holds both."""
        card = self.kernel.card
        largest = max(q.shape[3], v.shape[3], card.head_dims[0])
        return largest + -largest % card.head_multiple


def _pad(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor if tensor.shape[3] == size else functional.pad(tensor, (0, size - tensor.shape[3]))
