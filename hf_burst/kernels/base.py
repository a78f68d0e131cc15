"""What a kernel is: two methods on one tile, and a card of what they can do. Kernels know nothing of ranks.

Shapes: B batch rows, Sq and Sk rows of the tile, Hq and Hkv heads (Hq a multiple of Hkv), D head size of q and k,
Dv head size of v.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

# where results may be written, in the order in which they are returned; `None` for memory of the kernel's own
OutputBuffers = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Band:
    """What a tile admits: `low <= row - column <= high`, inside of the squares between `segments` if there are any.

    With segments the diagonal is admitted (`low <= 0 <= high`): in a variable-length call every row sees something.
    """

    low: int | None = None
    high: int | None = None
    segments: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Once: there may be thousands of segments."""
        return hash((self.low, self.high, self.segments))

    def __post_init__(self) -> None:
        assert not self.segments or (self.low or 0) <= 0 <= (self.high or 0), f"{self} leaves out the diagonal"


@dataclass(frozen=True)
class Scores:
    """How the score of a query and a key follows from their product.

    Args:
        scale (`float`): Its factor.
        softcap (`float`, defaults to 0.0): Where it saturates: `softcap * tanh(scale * product / softcap)` (Gemma 2,
            arXiv 2408.00118, section 2); 0 is nowhere.
    """

    scale: float
    softcap: float = 0.0


@dataclass(frozen=True)
class Capabilities:
    """What a kernel can do.

    Args:
        name (`str`): Its name in [`BurstConfig`].
        devices (`tuple[str, ...]`): Types of devices.
        dtypes (`tuple[torch.dtype, ...]`): Dtypes of q, k and v.
        head_dims (`tuple[int, int]`): Smallest and largest head size.
        head_multiple (`int`): What head sizes must be a multiple of.
        own_value_dim (`bool`): Whether v may have any other head size than q and k.
        wide (`bool`): Whether what it returns is in fp32 (fp64 for fp64 inputs) and not rounded to the dtype of the
            inputs: then the error does not depend on how many tiles an attention is cut into.
        wants_out (`bool`): Whether `backward` has to be given `out`, whose product with `dout` is `delta`.
        softcap (`bool`, defaults to `False`): Whether scores may be capped.
        deterministic (`bool`, defaults to `False`): Whether its backward can give the same bits each time.
        windows (`bool`, defaults to `True`): Whether it takes any band; if not, whole tiles and causal squares only.
        value_dims (`tuple[tuple[int, int], ...]`, defaults to none): Pairs of different head sizes of q and k and of v
            that it takes in spite of `own_value_dim`, where each query head has key heads of its own.
        head_sizes (`tuple[int, ...]`, defaults to `()`): The only head sizes, where they are few; they go before
            `head_multiple`.
        derives_delta (`bool`, defaults to `False`): Whether `backward` needs no delta where it is given `out`.
        by_name (`str`, defaults to `""`): Why `"auto"` passes it over; empty if it does not.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, int]
    head_multiple: int
    own_value_dim: bool
    wide: bool
    wants_out: bool
    softcap: bool = False
    deterministic: bool = False
    windows: bool = True
    value_dims: tuple[tuple[int, int], ...] = ()
    head_sizes: tuple[int, ...] = ()
    derives_delta: bool = False
    by_name: str = ""

    def refusal(
        self,
        device: str,
        dtype: torch.dtype,
        head_dim: int,
        value_dim: int,
        softcap: bool = False,
        deterministic: bool = False,
        window: bool = False,
    ) -> str | None:
        """Why the kernel cannot compute such an attention; `None` if it can."""
        smallest, largest = self.head_dims
        if device not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {device}"
        if dtype not in self.dtypes:
            return f"takes {', '.join(map(str, self.dtypes))}, not {dtype}"
        if softcap and not self.softcap:
            return "knows no soft-capping of scores"
        if deterministic and not self.deterministic:
            return "cannot give the same bits each time"
        if window and not self.windows:
            return "computes no windows"
        if not self.own_value_dim and value_dim != head_dim and (head_dim, value_dim) not in self.value_dims:
            return f"needs one head size, got {head_dim} for q and k and {value_dim} for v"
        for size in (head_dim, value_dim):
            if self.head_sizes and size not in self.head_sizes:
                return f"takes head sizes {', '.join(map(str, self.head_sizes))}, not {size}"
            if not smallest <= size <= largest or size % self.head_multiple:
                return f"takes head sizes {smallest} to {largest} in steps of {self.head_multiple}, not {size}"
        return None


class Kernel(Protocol):
    """Attention on one tile."""

    capabilities: Capabilities

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        """What this machine lacks to compute such heads (a package, a GPU); `None` if nothing. Asked after the card,
        since it may import the kernel's library."""
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        band: Band,
        scores: Scores,
        into: OutputBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the rows of a tile over its columns.

        Args:
            q (`torch.Tensor` of shape `(B, Sq, Hq, D)`): Queries, any strides.
            k (`torch.Tensor` of shape `(B, Sk, Hkv, D)`): Keys.
            v (`torch.Tensor` of shape `(B, Sk, Hkv, Dv)`): Values.
            band ([`Band`]): What is admitted.
            scores ([`Scores`]): Scale and soft-capping.
            into (sequence of `torch.Tensor`, *optional*): Where `out` and `lse` may be written, laid out as flash
                kernels have them; a kernel that cannot returns others.

        Returns:
            `out` of shape `(B, Sq, Hq, Dv)` in the dtype of q or wider, and `lse`, the log-sum-exp of the
            scores, of shape `(B, Sq, Hq)` in fp32 (fp64 for fp64 inputs), any strides: flash kernels store it by head.
            A row that admits nothing has `out` = 0 and `lse` = -inf.
        """
        ...

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
        """Gradients of the tile, given the log-sum-exp of each row over all tiles.

        Args:
            dout (`torch.Tensor` of shape `(B, Sq, Hq, Dv)`): Gradient of the merged output.
            q, k, v (`torch.Tensor`): As in `forward`.
            out (`torch.Tensor` of shape `(B, Sq, Hq, Dv)`, *optional*): With `rowsum(dout * out) = delta`, in the dtype
                of dout. Needed if the card says `wants_out`; others may read it instead of delta.
            lse (`torch.Tensor` of shape `(B, Sq, Hq)`): Log-sum-exp over all tiles. Like delta it is passed on without
                a copy if it is stored by head, `(B, Hq, Sq)` in memory.
            delta (`torch.Tensor` of shape `(B, Sq, Hq)`, *optional*): `rowsum(dout * out)` of the merged output, in the
                dtype of lse. Not needed beside `out` if the card says `derives_delta`.
            band ([`Band`]): What is admitted.
            scores ([`Scores`]): As in `forward`.
            into (sequence of `torch.Tensor`, *optional*): Where `dq`, `dk` and `dv` may be written, in the dtype of q;
                a kernel that cannot returns others.

        Returns:
            `dq`, `dk` and `dv` in the shapes of q, k and v, in their dtypes or wider.
        """
        ...


def from_host(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers as a tensor on a device. What follows on the current stream waits for the copy, the host does not.

    A CUDA graph that is captured would copy them from where they no longer are when it is replayed: there kernels write
    them, one number each.
    """
    host = torch.tensor(numbers, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return host.to(device)
    if torch.cuda.is_current_stream_capturing():
        each = [torch.full((), number, dtype=dtype, device=device) for number in host.flatten().tolist()]
        return torch.stack(each).view(host.shape)
    return host.pin_memory().to(device, non_blocking=True)


def project_out(dout: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
