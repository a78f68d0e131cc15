"""Partial attentions merged by their log-sum-exp, and gradients summed, in the accumulation dtype.

What is alone is kept as the kernel made it: nothing is filled with zeros, widened or rounded without need.
"""

import math

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else."""
    return torch.promote_types(dtype, torch.float32)


def heads_first(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor of shape `(B, S, H)` that lies as `(B, H, S)` in memory, as flash kernels have their scalars."""
    return torch.empty(shape[0], shape[2], shape[1], dtype=dtype, device=device).transpose(1, 2)


class Merged:
    """The output of rows whose keys come in parts.

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
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None

    def add(
        self, batch: tuple[int, int], rows: tuple[int, int], part: torch.Tensor, part_lse: torch.Tensor
    ) -> None:
        """Merges a partial attention into some of the rows.

        Args:
            batch, rows (`tuple[int, int]`): Which.
            part (`torch.Tensor` of shape `(b, s, H, D)`): Its output, of any dtype; may be kept.
            part_lse (`torch.Tensor` of shape `(b, s, H)`): Its log-sum-exp.
        """
        wide = accumulation_dtype(self.dtype)
        if self.out is None and self.sinks is None and (batch, rows) == ((0, self.shape[0]), (0, self.shape[1])):
            self.out, self.lse = part, part_lse.to(wide)
            return
        out, lse = self._wide()
        where = (slice(*batch), slice(*rows))
        merge_(out[where], lse[where], part, part_lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`out` in its dtype and `lse` of shape `(B, S, H)`; rows that nothing was merged into are 0 and -inf."""
        if self.out is None or self.lse is None:
            self._wide()
        assert self.out is not None and self.lse is not None
        return self.out.to(self.dtype).contiguous(), self.lse.transpose(1, 2).contiguous().transpose(1, 2)

    def _wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp as accumulators."""
        wide = accumulation_dtype(self.dtype)
        if self.out is None or self.lse is None:
            self.out = torch.zeros(self.shape, dtype=wide, device=self.device)
            self.lse = heads_first(self.shape[:3], wide, self.device)
            if self.sinks is None:
                self.lse.fill_(-torch.inf)
            else:
                self.lse.copy_(self.sinks.expand(self.shape[:3]))
        self.out = self.out.to(wide)
        return self.out, self.lse


class Summed:
    """A gradient that comes in parts.

    Args:
        shape (`tuple[int, ...]`): `(B, S, H, D)` of the gradient.
        dtype (`torch.dtype`): Dtype of the result.
        device (`torch.device`): Where.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.total: torch.Tensor | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of all sequences in the accumulation dtype."""
        return math.prod(self.shape) // self.shape[1] * accumulation_dtype(self.dtype).itemsize

    def add(self, batch: tuple[int, int], rows: tuple[int, int], part: torch.Tensor) -> None:
        """Adds `part` of shape `(b, s, H, D)`, which may be kept, to some of the rows."""
        if self.total is None and (batch, rows) == ((0, self.shape[0]), (0, self.shape[1])):
            self.total = part
            return
        self.total = self.wide
        self.total[slice(*batch), slice(*rows)].add_(part)

    @property
    def so_far(self) -> torch.Tensor:
        """The sum, in the dtype of its only part or in the accumulation dtype."""
        return self.wide if self.total is None else self.total

    @property
    def wide(self) -> torch.Tensor:
        """The sum in the accumulation dtype; zeros where nothing was added."""
        wide = accumulation_dtype(self.dtype)
        if self.total is None:
            return torch.zeros(self.shape, dtype=wide, device=self.device)
        return self.total.to(wide)

    def result(self) -> torch.Tensor:
        """The sum in its dtype."""
        return self.so_far.to(self.dtype).contiguous()


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
