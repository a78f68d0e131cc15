"""The interface of a kernel: two methods on one tile, and its capabilities. Kernels know nothing of ranks.

Shapes: B batch rows, Sq and Sk rows of the tile, Hq and Hkv heads (Hq a multiple of Hkv), D head size of q and k,
Dv head size of v.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..plan import Band

# `out` and `lse`, and the gradients of q, k and v
Outputs = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]
# where results may be written, in the order in which they are returned: `None` where the kernel allocates, empty where
# it allocates everything
OutputBuffers = Sequence[Tensor | None]


@dataclass(frozen=True)
class Scores:
    """How the score of a query and a key follows from their product: `scale` times it, or with a `softcap` above 0
    `softcap * tanh(scale * product / softcap)` (Gemma 2, arXiv 2408.00118, section 2)."""

    scale: float
    softcap: float = 0.0


class KernelRequest(NamedTuple):
    """The properties of an attention that a choice of kernel depends on.

    Args:
        device (`str`): Type of the device.
        dtype (`torch.dtype`): Dtype of q, k and v.
        head_dim, value_dim (`int`): Head size of q and k, and that of v.
        softcap (`bool`, defaults to `False`): Whether scores are soft-capped.
        deterministic (`bool`, defaults to `False`): Whether the backward pass must give the same bits each time.
        window (`bool`, defaults to `False`): Whether there is a sliding window.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    softcap: bool = False
    deterministic: bool = False
    window: bool = False


@dataclass(frozen=True)
class Capabilities:
    """The attention that a kernel can compute, on any machine.

    Args:
        name (`str`): Its name in [`BurstConfig`].
        devices (`tuple[str, ...]`): Types of devices.
        dtypes (`tuple[torch.dtype, ...]`): Dtypes of q, k and v.
        most_head_dim (`int`): Largest head size. Others are padded, see [`PaddedHeads`].
        head_multiple (`int`, defaults to 1): Head sizes are multiples of it.
        head_sizes (`tuple[int, ...]`, defaults to `()`): The only head sizes, if they are few.
        own_value_dim (`bool`, defaults to `False`): Whether v may have any other head size than q and k.
        value_dims (`tuple[tuple[int, int], ...]`, defaults to `()`): Pairs of different head sizes of q and k and of v
            that it takes in spite of `own_value_dim`, where query heads share no key heads.
        wide (`bool`, defaults to `False`): Whether results are in fp32 (fp64 for fp64 inputs), so that the error does
            not depend on the number of tiles of an attention.
        wants_out (`bool`, defaults to `False`): Whether `backward` needs `out`.
        derives_delta (`bool`, defaults to `False`): Whether `backward` needs no `delta` if it is given `out`.
        softcap (`bool`, defaults to `False`): Whether scores may be capped.
        deterministic (`bool`, defaults to `False`): Whether its backward can give the same bits each time.
        windows (`bool`, defaults to `True`): Whether it takes any band, not only whole tiles and causal squares.
        auto_refusal (`str`, *optional*): Why `"auto"` passes it over.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    most_head_dim: int
    head_multiple: int = 1
    head_sizes: tuple[int, ...] = ()
    own_value_dim: bool = False
    value_dims: tuple[tuple[int, int], ...] = ()
    wide: bool = False
    wants_out: bool = False
    derives_delta: bool = False
    softcap: bool = False
    deterministic: bool = False
    windows: bool = True
    auto_refusal: str | None = None

    def refusal(self, request: KernelRequest) -> str | None:
        """Why the kernel cannot compute such an attention; `None` if it can."""
        largest = max(request.head_dim, request.value_dim)
        if request.device not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {request.device}"
        if request.dtype not in self.dtypes:
            return f"takes {', '.join(map(str, self.dtypes))}, not {request.dtype}"
        if request.softcap and not self.softcap:
            return "knows no soft-capping of scores"
        if request.deterministic and not self.deterministic:
            return "cannot give the same bits each time"
        if request.window and not self.windows:
            return "computes no windows"
        return f"takes head sizes up to {self.most_head_dim}, not {largest}" if largest > self.most_head_dim else None


class BackwardInputs(NamedTuple):
    """The tensors that a backward pass of a tile reads.

    Args:
        dout (`torch.Tensor` of shape `(B, Sq, Hq, Dv)`): Gradient of the merged output, in the dtype of q.
        q, k, v (`torch.Tensor`): As in [`Kernel.forward`].
        out (`torch.Tensor` of shape `(B, Sq, Hq, Dv)`, *optional*): With `rowsum(dout * out) = delta`, in the dtype
            of dout. Needed if the capabilities say `wants_out`; other kernels may read it instead of delta.
        lse (`torch.Tensor` of shape `(B, Sq, Hq)`): Log-sum-exp over all tiles, in fp32 (fp64 for fp64 inputs). Like
            delta it is passed on without a copy if it is stored by head, `(B, Hq, Sq)` in memory.
        delta (`torch.Tensor` of shape `(B, Sq, Hq)`, *optional*): `rowsum(dout * out)` of the merged output, in the
            dtype of lse. Not needed with `out` if the capabilities say `derives_delta`.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor
    delta: Tensor | None

    @property
    def with_out(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`dout`, q, k, v and `out`, for kernels whose capabilities say `wants_out`."""
        assert self.out is not None, "the capabilities say wants_out"
        return self.dout, self.q, self.k, self.v, self.out

    def of_heads(self, heads: slice, kv_heads: slice) -> "BackwardInputs":
        """Views of some query heads and their key heads."""
        return self._select((slice(None), slice(None), heads), (slice(None), slice(None), kv_heads))

    def cut(self, rows: slice, columns: slice, batch: slice = slice(None)) -> "BackwardInputs":
        """Views of some rows and columns, of some rows of the batch."""
        return self._select((batch, rows), (batch, columns))

    def _select(self, of_queries: tuple[slice, ...], of_keys: tuple[slice, ...]) -> "BackwardInputs":
        parts = {"k": of_keys, "v": of_keys}
        selected: dict[str, Any] = {
            name: tensor if tensor is None else tensor[parts.get(name, of_queries)]
            for name, tensor in self._asdict().items()
        }
        return BackwardInputs(**selected)


class Kernel(Protocol):
    """Attention on one tile."""

    capabilities: Capabilities

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        """The package or GPU that this machine lacks for such heads, as a sentence; `None` if it lacks nothing. Asked
        after the capabilities, since it may import the kernel's library."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        """Attention of the rows of a tile over its columns.

        Args:
            q (`torch.Tensor` of shape `(B, Sq, Hq, D)`): Queries, any strides.
            k (`torch.Tensor` of shape `(B, Sk, Hkv, D)`): Keys.
            v (`torch.Tensor` of shape `(B, Sk, Hkv, Dv)`): Values.
            band ([`Band`]): The pairs that are admitted.
            scores ([`Scores`]): Scale and soft-capping.
            buffers (sequence of `torch.Tensor`, *optional*): Where `out` and `lse` may be written, laid out as flash
                kernels have them. A kernel that cannot write there returns other tensors.

        Returns:
            `out` of shape `(B, Sq, Hq, Dv)` in the dtype of q or wider, and `lse`, the log-sum-exp of the scores, of
            shape `(B, Sq, Hq)` in fp32 (fp64 for fp64 inputs), any strides: flash kernels store it by head. A row that
            admits nothing has `out` = 0 and `lse` = -inf.
        """

    def backward(self, inputs: BackwardInputs, band: Band, scores: Scores, buffers: OutputBuffers = ()) -> Gradients:
        """Gradients of the tile, from the log-sum-exp of each row over all tiles.

        Args:
            inputs ([`BackwardInputs`]): Tensors of the tile.
            band ([`Band`]): The pairs that are admitted.
            scores ([`Scores`]): As in `forward`.
            buffers (sequence of `torch.Tensor`, *optional*): As in `forward`: `dq`, `dk` and `dv` in the dtype of q.

        Returns:
            `dq`, `dk` and `dv` in the shapes of q, k and v, in their dtypes or wider.
        """


def from_host(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor on a device. The current stream waits for the copy, the host does not.

    While a CUDA graph is captured, kernels write the numbers one by one: its replay would copy from freed host memory.
    """
    host = torch.tensor(numbers, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return host.to(device)
    if torch.cuda.is_current_stream_capturing():
        scalars = [torch.full((), number, dtype=dtype, device=device) for number in host.flatten().tolist()]
        return torch.stack(scalars).view(host.shape)
    return host.pin_memory().to(device, non_blocking=True)


def project_out(dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """An `out` for kernels that compute delta themselves: the multiple of `dout` with `rowsum(dout * out) = delta`.

    Of all outputs with that product it is the shortest, so the kernel's rounding of it weighs least. Rows are scaled by
    their largest element first: the square of gradients near 1e-20 underflows in fp32. A row whose `dout` is 0 while
    its delta is not (a gradient into the log-sum-exp alone) is given a `dout` too small to matter.

    Args:
        dout (`torch.Tensor` of shape `(B, S, H, D)`): Gradient of the output.
        delta (`torch.Tensor` of shape `(B, S, H)`): The product wanted, fp32 or fp64.

    Returns:
        `dout` and `out`, both of shape `(B, S, H, D)` and in the dtype of `dout`.
    """
    wide = dout.to(delta.dtype)
    largest = wide.abs().amax(-1, keepdim=True)
    lost = (largest == 0) & (delta.unsqueeze(-1) != 0)
    tiny = 2.0**-60  # fp16 has no such number, and no gradients into lse
    first = torch.arange(dout.shape[-1], device=dout.device) == 0
    wide = torch.where(lost & first, tiny, wide)
    largest = torch.where(lost, tiny, torch.where(largest == 0, 1, largest))
    unit = wide / largest
    square = unit.square().sum(-1, keepdim=True)
    factor = delta.unsqueeze(-1) / largest / torch.where(square == 0, 1, square)
    return wide.to(dout.dtype), (unit * factor).to(dout.dtype)
