"""Partial attentions merged by their log-sum-exp, and gradients summed, in the accumulation dtype.

What is alone is kept as the kernel made it: nothing is filled with zeros, widened or rounded without need.
"""

import math
from functools import lru_cache
from importlib.util import find_spec

import torch

Span = tuple[int, int]
_Waiting = tuple[Span, Span, torch.Tensor, torch.Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else."""
    return torch.promote_types(dtype, torch.float32)


def heads_first(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor of shape `(B, S, H)` that lies as `(B, H, S)` in memory, as flash kernels have their scalars."""
    return torch.empty(shape[0], shape[2], shape[1], dtype=dtype, device=device).transpose(1, 2)


def by_head(scalars: torch.Tensor) -> torch.Tensor:
    """Scalars of shape `(B, S, H)` as they lie by [`heads_first`]; a copy if they do not."""
    if scalars.transpose(1, 2).is_contiguous():
        return scalars
    return heads_first(tuple(scalars.shape), scalars.dtype, scalars.device).copy_(scalars)


class Merged:
    """The output of rows whose keys come in parts.

    The last part waits until it is known whether it is the last: then the merged rows are rounded as they are written.

    Args:
        shape (`tuple[int, ...]`): `(B, S, H, D)` of the output.
        dtype (`torch.dtype`): Dtype of the result.
        device (`torch.device`): Where.
        sinks (`torch.Tensor` of shape `(H,)`, *optional*): Scores that are merged first, whose values are 0.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, sinks: torch.Tensor | None
    ) -> None:
        self.shape, self.dtype, self.device, self.sinks = shape, dtype, device, sinks
        self.wide = accumulation_dtype(dtype)
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None
        self.waiting: _Waiting | None = None

    def add(self, batch: Span, rows: Span, part: torch.Tensor, part_lse: torch.Tensor) -> None:
        """Merges a partial attention into some of the rows.

        Args:
            batch, rows (`tuple[int, int]`): Which.
            part (`torch.Tensor` of shape `(b, s, H, D)`): Its output, of any dtype; kept for a while.
            part_lse (`torch.Tensor` of shape `(b, s, H)`): Its log-sum-exp.
        """
        if self.out is None and self.sinks is None and _is_all(self.shape, batch, rows):
            self.out, self.lse = part, part_lse.to(self.wide)
            return
        self._merge_waiting(self.wide)
        self.waiting = batch, rows, part, part_lse

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`out` in its dtype and `lse` of shape `(B, S, H)`; rows that nothing was merged into are 0 and -inf."""
        out, lse = self._merge_waiting(self.dtype)
        return out.to(self.dtype).contiguous(), by_head(lse)

    def _merge_waiting(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Merges the part that waits; where that takes a pass over all rows, they are written in `dtype`."""
        if self.out is None or self.lse is None:
            self.out = torch.zeros(self.shape, dtype=self.wide, device=self.device)
            self.lse = heads_first(self.shape[:3], self.wide, self.device)
            if self.sinks is None:
                self.lse.fill_(-torch.inf)
            else:
                self.lse.copy_(self.sinks.expand(self.shape[:3]))
        if self.waiting is not None:
            batch, rows, part, part_lse = self.waiting
            self.out = _combined(self.out, dtype, batch, rows, part, self.lse, part_lse)
            self.waiting = None
        return self.out, self.lse


class Summed:
    """A gradient that comes in parts. As in [`Merged`], the last part waits.

    Args:
        shape (`tuple[int, ...]`): `(B, S, H, D)` of the gradient.
        dtype (`torch.dtype`): Dtype of the result.
        device (`torch.device`): Where.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.total: torch.Tensor | None = None
        self.waiting: tuple[Span, Span, torch.Tensor] | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of all sequences in the accumulation dtype."""
        return math.prod(self.shape) // self.shape[1] * accumulation_dtype(self.dtype).itemsize

    def add(self, batch: Span, rows: Span, part: torch.Tensor) -> None:
        """Adds `part` of shape `(b, s, H, D)`, which is kept for a while, to some of the rows."""
        if self.total is None and self.waiting is None and _is_all(self.shape, batch, rows):
            self.total = part
            return
        if self.waiting is not None:
            self._add_waiting(accumulation_dtype(self.dtype))
        self.waiting = batch, rows, part

    @property
    def only_part(self) -> torch.Tensor:
        """The sum of a single part that covers all rows, as it was given."""
        assert self.total is not None
        assert self.waiting is None, "there are several parts"
        return self.total

    @property
    def wide(self) -> torch.Tensor:
        """The sum in the accumulation dtype; zeros where nothing was added."""
        wide = accumulation_dtype(self.dtype)
        return self._add_waiting(wide).to(wide)

    def result(self) -> torch.Tensor:
        """The sum in its dtype."""
        return self._add_waiting(self.dtype).to(self.dtype).contiguous()

    def _add_waiting(self, dtype: torch.dtype) -> torch.Tensor:
        """Adds the part that waits; where that takes a pass over all rows, they are written in `dtype`."""
        if self.total is None:
            self.total = torch.zeros(self.shape, dtype=accumulation_dtype(self.dtype), device=self.device)
        if self.waiting is not None:
            self.total = _combined(self.total, dtype, *self.waiting)
            self.waiting = None
        return self.total


def _is_all(shape: tuple[int, ...], batch: Span, rows: Span) -> bool:
    return (batch, rows) == ((0, shape[0]), (0, shape[1]))


def _combined(
    so_far: torch.Tensor,
    dtype: torch.dtype,
    batch: Span,
    rows: Span,
    part: torch.Tensor,
    lse: torch.Tensor | None = None,
    part_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """A part merged into what there is (`lse` in place), or added to it, in place if that has the accumulation dtype
    and is not asked for in another one."""
    wide = accumulation_dtype(so_far.dtype)
    if so_far.is_cuda and wide == torch.float32 and _has_triton():
        from .fused import combine

        result = so_far if so_far.dtype == dtype == wide else torch.empty_like(so_far, dtype=dtype)
        combine(result, so_far, lse, part, part_lse, batch, rows)
        return result
    result = so_far.to(wide)
    where = (slice(*batch), slice(*rows))
    if lse is None or part_lse is None:
        result[where].add_(part)
    else:
        merge_(result[where], lse[where], part, part_lse)
    return result


def row_products(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """`rowsum(dout * out)`, less the gradient of the log-sum-exp: `(B, S, H)` in the accumulation dtype."""
    wide = accumulation_dtype(dout.dtype)
    if dout.is_cuda and wide == torch.float32 and dout.stride(3) == out.stride(3) == 1 and _has_triton():
        from .fused import product

        delta = heads_first(tuple(dout.shape[:3]), wide, dout.device)
        product(dout, out, dlse, delta)
        return delta
    delta = (dout.to(wide) * out.to(wide)).sum(-1)
    return delta if dlse is None else delta - dlse


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges a partial attention into another one, in place (BurstAttention, arXiv 2403.09347, equations 5 to 7).

    A row that admits nothing has `out = 0` and `lse = -inf`, in either part or in both; it weighs nothing.

    Args:
        out (`torch.Tensor` of shape `(B, S, H, D)`): Merged so far, fp32 or fp64; changed.
        lse (`torch.Tensor` of shape `(B, S, H)`): Its log-sum-exp, of the same dtype; changed.
        part (`torch.Tensor` of shape `(B, S, H, D)`): What comes in addition, of any dtype.
        part_lse (`torch.Tensor` of shape `(B, S, H)`): Its log-sum-exp.
    """
    total = torch.logaddexp(lse, part_lse.to(lse.dtype))
    out.mul_(_weight(lse, total)).addcmul_(part.to(out.dtype), _weight(part_lse, total))
    lse.copy_(total)


def _weight(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0, torch.exp(lse - total)).unsqueeze(-1)
