"""Head sizes that a kernel does not take, brought to ones that it does by zeros."""

from dataclasses import replace

import torch
from torch.nn import functional

from .base import Band, Capabilities, Kernel, OutputBuffers, Scores


class PaddedHeads:
    """A kernel that wants one head size for q, k and v, or a multiple of some number, made to take any.

    Zeros appended to q and k add nothing to a score, and those appended to v nothing but columns of zeros to the
    output, which are cut off. Sizes that the kernel takes stay as they are.

    Args:
        kernel ([`Kernel`]): The kernel that is given padded heads.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        largest = kernel.capabilities.head_dims[1]
        self.capabilities = replace(
            kernel.capabilities, head_dims=(1, largest), head_multiple=1, head_sizes=(), own_value_dim=True
        )

    def for_sizes(self, head_dim: int, value_dim: int) -> Kernel:
        """What computes heads of these sizes: the kernel alone if it takes them as they are."""
        same = all(
            padded_sizes(self.kernel.capabilities, head_dim, value_dim, shared) == (head_dim, value_dim)
            for shared in (True, False)
        )
        return self.kernel if same else self

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        """See [`Kernel.unavailable`]."""
        return self.kernel.unavailable(*padded_sizes(self.kernel.capabilities, head_dim, value_dim, shared=True))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        band: Band,
        scores: Scores,
        into: OutputBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`Kernel.forward`]; padded results are written elsewhere."""
        size, value_size = self._sizes(q, v)
        out, lse = self.kernel.forward(_pad(q, size), _pad(k, size), _pad(v, value_size), band, scores)
        return _cut(out, v.shape[3]), lse

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
        """See [`Kernel.backward`]; padded results are written elsewhere."""
        size, value_size = self._sizes(q, v)
        dq, dk, dv = self.kernel.backward(
            _pad(dout, value_size),
            _pad(q, size),
            _pad(k, size),
            _pad(v, value_size),
            None if out is None else _pad(out, value_size),
            *(lse, delta, band, scores),
        )
        return _cut(dq, q.shape[3]), _cut(dk, k.shape[3]), _cut(dv, v.shape[3])

    def _sizes(self, q: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
        return padded_sizes(self.kernel.capabilities, q.shape[3], v.shape[3], shared=q.shape[2] != v.shape[2])


def padded_sizes(card: Capabilities, head_dim: int, value_dim: int, shared: bool) -> tuple[int, int]:
    """The smallest head sizes of q and k and of v that a kernel takes and that hold these.

    Args:
        card ([`Capabilities`]): The kernel's.
        head_dim (`int`): Head size of q and k.
        value_dim (`int`): Head size of v.
        shared (`bool`): Whether query heads share key heads.
    """
    if (head_dim, value_dim) in card.value_dims and not shared:
        return head_dim, value_dim
    size, value_size = (_enough(card, dim) for dim in (head_dim, value_dim))
    return (size, value_size) if card.own_value_dim else (max(size, value_size),) * 2


def _enough(card: Capabilities, dim: int) -> int:
    if card.head_sizes:
        return min(size for size in card.head_sizes if size >= dim)
    least = max(card.head_dims[0], dim)
    return least + -least % card.head_multiple


def _pad(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor if tensor.shape[3] == size else functional.pad(tensor, (0, size - tensor.shape[3]))


def _cut(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor if tensor.shape[3] == size else tensor[..., :size]
