"""Head sizes that a kernel does not take, brought to ones that it does by zeros."""

from torch import Tensor
from torch.nn import functional

from ..plan import Band
from .base import BackwardInputs, Capabilities, Kernel, OutputBuffers, Scores


class PaddedHeads:
    """A kernel that wants one head size for q, k and v, or a multiple of some number, made to take any.

    Zeros appended to q and k add nothing to a score. Those appended to v add columns of zeros to the output, which are
    cut off. Sizes that the kernel takes stay as they are.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.capabilities = kernel.capabilities

    def for_sizes(self, head_dim: int, value_dim: int) -> Kernel:
        """The kernel for heads of these sizes: the inner one alone if it takes them as they are."""
        sizes, capabilities = (head_dim, value_dim), self.kernel.capabilities
        return self.kernel if all(padded_sizes(capabilities, *sizes, way) == sizes for way in (True, False)) else self

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        return self.kernel.unavailable(*padded_sizes(self.kernel.capabilities, head_dim, value_dim, shared=True))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores, buffers: OutputBuffers | None = None
    ) -> tuple[Tensor, Tensor]:
        """See [`Kernel.forward`]; padded results are written elsewhere."""
        size, value_size = self._sizes(q, v)
        out, lse = self.kernel.forward(_pad(q, size), _pad(k, size), _pad(v, value_size), band, scores)
        return out[..., : v.shape[3]], lse

    def backward(
        self, inputs: BackwardInputs, band: Band, scores: Scores, buffers: OutputBuffers | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See [`Kernel.backward`]; padded results are written elsewhere."""
        dout, q, k, v, out, *_ = inputs
        size, value_size = self._sizes(q, v)
        padded = inputs._replace(
            dout=_pad(dout, value_size),
            q=_pad(q, size),
            k=_pad(k, size),
            v=_pad(v, value_size),
            out=None if out is None else _pad(out, value_size),
        )
        dq, dk, dv = self.kernel.backward(padded, band, scores)
        return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]]

    def _sizes(self, q: Tensor, v: Tensor) -> tuple[int, int]:
        return padded_sizes(self.kernel.capabilities, q.shape[3], v.shape[3], shared=q.shape[2] != v.shape[2])


def padded_sizes(capabilities: Capabilities, head_dim: int, value_dim: int, shared: bool) -> tuple[int, int]:
    """The smallest head sizes of q and k and of v that a kernel takes and that hold these; `shared` says whether query
    heads share key heads."""
    if (head_dim, value_dim) in capabilities.value_dims and not shared:
        return head_dim, value_dim
    size, value_size = (_enough(capabilities, dim) for dim in (head_dim, value_dim))
    return (size, value_size) if capabilities.own_value_dim else (max(size, value_size),) * 2


def _enough(capabilities: Capabilities, dim: int) -> int:
    if capabilities.head_sizes:
        return min(size for size in capabilities.head_sizes if size >= dim)
    return dim + -dim % capabilities.head_multiple


def _pad(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[3] == size else functional.pad(tensor, (0, size - tensor.shape[3]))
