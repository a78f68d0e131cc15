"""Partial attentions merged by their log-sum-exp, and gradients summed, in the accumulation dtype.

What is alone is kept as the kernel made it: nothing is filled with zeros, widened, rounded or touched without need.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

from ..numerics import accumulation_dtype

Span = tuple[int, int]


class _Partial(NamedTuple):
    """What a kernel made for some of the rows of some sequences."""

    batch: Span
    rows: Span
    value: Tensor
    lse: Tensor | None = None

    @property
    def place(self) -> tuple[slice, slice]:
        return slice(*self.batch), slice(*self.rows)

    def meets(self, other: "_Partial") -> bool:
        """Whether a row is in both."""
        spans = (self.batch, other.batch), (self.rows, other.rows)
        return all(first[0] < second[1] and second[0] < first[1] for first, second in spans)


def heads_first(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor of shape `(B, S, H)`, with which `shape` begins. In memory it is `(B, H, S)`, as flash kernels
    have their scalars."""
    return torch.empty(shape[0], shape[2], shape[1], dtype=dtype, device=device).transpose(1, 2)


def by_head(scalars: Tensor) -> Tensor:
    """Scalars of shape `(B, S, H)` as they lie by [`heads_first`]; a copy if they do not."""
    if scalars.transpose(1, 2).is_contiguous():
        return scalars
    return heads_first(scalars.shape, scalars.dtype, scalars.device).copy_(scalars)


class _Accumulator:
    """Rows whose values come in parts.

    A part that covers all rows, or several in a row that do together, is kept as it is; each row may have one more that
    waits. If a row has a further one, all are widened to the accumulation dtype, so that no sum of several is rounded
    in between. What waits at the end is merged where it belongs, without a pass over the other rows.

    Args:
        shape (`tuple[int, ...]`): `(B, S, H, D)` of the result.
        like (`torch.Tensor`): A tensor with its dtype, on its device.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self.shape, self.dtype, self.device = shape, like.dtype, like.device
        self.accumulator = accumulation_dtype(like.dtype)
        self.whole: Tensor | None = None
        self.lse: Tensor | None = None
        self.waiting: list[_Partial] = []

    def add(self, batch: Span, rows: Span, value: Tensor, lse: Tensor | None = None) -> None:
        """Merges or adds a part, now or later, into some of the rows.

        Args:
            batch, rows (`tuple[int, int]`): Which.
            value (`torch.Tensor` of shape `(b, s, H, D)`): The part, of any dtype; kept, and possibly changed.
            lse (`torch.Tensor` of shape `(b, s, H)`, *optional*): The log-sum-exp of a partial attention.
        """
        part = _Partial(batch, rows, value, lse)
        if any(part.meets(other) for other in self.waiting):
            self._settle(self.accumulator)
        self.waiting.append(part)
        held = sum(other.value.shape[0] * other.value.shape[1] for other in self.waiting)
        if self.whole is None and held == self.shape[0] * self.shape[1]:
            self._join()

    def _settle(self, dtype: torch.dtype) -> Tensor:
        """The whole in a dtype, with what waits; a change of dtype is made in passing, where wider numbers go in first
        and narrower ones come out last."""
        if self.whole is None:
            self.whole = torch.zeros(self.shape, dtype=self.accumulator, device=self.device)
            if self.waiting and self.waiting[0].lse is not None:
                self.lse = self._lse().fill_(-torch.inf)
        parts, self.waiting = self.waiting, []
        for index, part in enumerate(parts):
            changes = index == 0 if dtype == self.accumulator else index + 1 == len(parts)
            self.whole = _combined(self.whole, dtype if changes else self.whole.dtype, part, self.lse)
        self.whole = self.whole.to(dtype)
        return self.whole

    def _join(self) -> None:
        """Makes the parts that cover all rows, each once, the whole."""
        first, *others = self.waiting
        if not others:
            self.whole, self.lse = first.value, None if first.lse is None else first.lse.to(self.accumulator)
        else:
            widest = max((part.value.dtype for part in self.waiting), key=lambda dtype: dtype.itemsize)
            self.whole = torch.empty(self.shape, dtype=widest, device=self.device)
            self.lse = None if first.lse is None else self._lse()
            for part in self.waiting:
                self.whole[part.place] = part.value
                if self.lse is not None and part.lse is not None:
                    self.lse[part.place] = part.lse
        self.waiting = []

    def _lse(self) -> Tensor:
        return heads_first(self.shape, self.accumulator, self.device)


class Merged(_Accumulator):
    """The output of rows whose keys come in parts.

    Args:
        shape, like: As in [`_Accumulator`], of the output.
        sinks (`torch.Tensor` of shape `(H,)`, *optional*): Scores of every row, whose values are 0.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor, sinks: Tensor | None) -> None:
        super().__init__(shape, like)
        self.sinks = sinks

    def result(self) -> tuple[Tensor, Tensor]:
        """`out` in its dtype and `lse` of shape `(B, S, H)`; rows that nothing was merged into are 0 and -inf, or the
        score of their sink."""
        kept = self.whole is not None and self.whole.dtype == self.dtype and not self.waiting
        narrow = self.sinks is None or kept  # else it is rounded once, at the end
        out = self._settle(self.dtype if narrow else self.accumulator)
        lse = self._lse().fill_(-torch.inf) if self.lse is None else self.lse
        if self.sinks is not None:
            total = torch.logaddexp(lse, self.sinks.to(lse.dtype))
            out.mul_(_weight(lse, total))
            lse = total
        return out.to(self.dtype).contiguous(), by_head(lse)


class Summed(_Accumulator):
    """A gradient that comes in parts."""

    @property
    def only_part(self) -> Tensor:
        """The sum of a single part that covers all rows, as it was given."""
        assert self.whole is not None
        assert not self.waiting, "there are several parts"
        return self.whole

    @property
    def wide(self) -> Tensor:
        """The sum in the accumulation dtype; zeros where nothing was added."""
        return self._settle(self.accumulator)

    def result(self) -> Tensor:
        """The sum in its dtype."""
        return self._settle(self.dtype).contiguous()


def _combined(so_far: Tensor, dtype: torch.dtype, part: _Partial, lse: Tensor | None = None) -> Tensor:
    """A part merged into what there is (`lse` in place), or added to it: in place if that has the dtype asked for, else
    with a pass over all rows."""
    wide = accumulation_dtype(so_far.dtype)
    if so_far.is_cuda and wide == torch.float32 and has_triton_package():
        from .fused import combine

        result = so_far if so_far.dtype == dtype else torch.empty_like(so_far, dtype=dtype)
        combine(result, so_far, lse, part.value, part.lse, part.batch, part.rows)
        return result
    result = so_far.to(dtype if dtype == wide else so_far.dtype)
    rows = result[part.place]
    total = rows.to(wide)  # the rows themselves if they are wide
    if lse is None or part.lse is None:
        total.add_(part.value)
    else:
        merge_(total, lse[part.place], part.value, part.lse)
    if total is not rows:
        rows.copy_(total)
    return result.to(dtype)


def row_products(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """`rowsum(dout * out)`, less the gradient of the log-sum-exp: `(B, S, H)` in the accumulation dtype."""
    wide = accumulation_dtype(dout.dtype)
    if dout.is_cuda and wide == torch.float32 and dout.stride(3) == out.stride(3) == 1 and has_triton_package():
        from .fused import product

        delta = heads_first(dout.shape, wide, dout.device)
        product(dout, out, dlse, delta)
        return delta
    delta = (dout.to(wide) * out.to(wide)).sum(-1)
    return delta if dlse is None else delta - dlse


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
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


def _weight(lse: Tensor, total: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0, torch.exp(lse - total)).unsqueeze(-1)
