"""The sums between two kernels of attention as one pass over memory each, in Triton. Accumulators are fp32.

Tensors are `(B, S, H, D)` with adjacent elements of a head, log-sum-exps `(B, S, H)`, both of any other strides.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels import from_host
from .exchange import MAX_TENSORS

_TILE, _LARGE_TILE = 2048, 8192  # words that a program copies at a time
_FEW = 16  # programs of a copy that runs while other kernels do


def combine(
    result: Tensor,
    so_far: Tensor,
    lse: Tensor | None,
    part: Tensor,
    part_lse: Tensor | None,
    batch: tuple[int, int],
    rows: tuple[int, int],
) -> None:
    """Merges (with log-sum-exps) or adds (without) a part into some of the rows. Others are only converted, or left
    alone if `result` is `so_far`.

    Args:
        result (`torch.Tensor` of shape `(B, S, H, D)`): Where it goes, of any dtype.
        so_far (`torch.Tensor` of shape `(B, S, H, D)`): What there is, of any dtype; may be `result`.
        lse (`torch.Tensor` of shape `(B, S, H)`, *optional*): Its log-sum-exp in fp32, changed in place.
        part (`torch.Tensor` of shape `(b, s, H, D)`): What comes in addition.
        part_lse (`torch.Tensor` of shape `(b, s, H)`, *optional*): Its log-sum-exp.
        batch, rows (`tuple[int, int]`): Sequences and rows of the part.
    """
    in_place = result is so_far
    first_batch, last_batch = batch if in_place else (0, so_far.shape[0])
    first_row, last_row = rows if in_place else (0, so_far.shape[1])
    _, _, heads, dim = so_far.shape
    width = triton.next_power_of_2(dim)
    block = max(1, 4096 // width)
    scalars = (0, 0, 0) if lse is None else lse.stride()
    part_scalars = (0, 0, 0) if part_lse is None else part_lse.stride()
    grid = (triton.cdiv(last_row - first_row, block), heads, last_batch - first_batch)
    with torch.cuda.device(result.device):
        _combine[grid](
            *(result, so_far, lse, part, part_lse),
            *(*result.stride()[:3], *so_far.stride()[:3], *scalars, *part.stride()[:3], *part_scalars),
            *(first_batch, first_row, last_row, *batch, *rows),
            dim=dim,
            width=width,
            block=block,
            merges=lse is not None,
        )


_SPANS = ["first_batch", "first_row", "last_row", "batch_start", "batch_stop", "row_start", "row_stop"]


@triton.jit(do_not_specialize=_SPANS)  # those of packed documents are others in every batch
def _combine(
    result, so_far, lse, part, part_lse,
    r_b, r_s, r_h, a_b, a_s, a_h, l_b, l_s, l_h, p_b, p_s, p_h, m_b, m_s, m_h,
    first_batch, first_row, last_row, batch_start, batch_stop, row_start, row_stop,
    dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr, merges: tl.constexpr,
):  # fmt: skip
    b = (first_batch + tl.program_id(2)).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    s = (first_row + tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
    d = tl.arange(0, width)
    here = s < last_row
    inside = here & (s >= row_start) & (s < tl.where((b >= batch_start) & (b < batch_stop), row_stop, row_start))
    some = here[:, None] & (d < dim)[None]
    added = inside[:, None] & (d < dim)[None]
    old = tl.load(so_far + b * a_b + s[:, None] * a_s + h * a_h + d[None], mask=some, other=0.0).to(tl.float32)
    place = part + (b - batch_start) * p_b + (s[:, None] - row_start) * p_s + h * p_h + d[None]
    new = tl.load(place, mask=added, other=0.0).to(tl.float32)
    if merges:
        old_place = lse + b * l_b + s * l_s + h * l_h
        new_place = part_lse + (b - batch_start) * m_b + (s - row_start) * m_s + h * m_h
        one = tl.load(old_place, mask=here, other=0.0)
        other = tl.load(new_place, mask=inside, other=-float("inf"))
        most = tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)
        nothing = most == -float("inf")
        most = tl.where(nothing, 0.0, most)
        total = tl.where(nothing, -float("inf"), most + tl.log(tl.exp(one - most) + tl.exp(other - most)))
        base = tl.where(nothing, 0.0, total)
        old = old * tl.where(one == -float("inf"), 0.0, tl.exp(one - base))[:, None]
        new = new * tl.where(other == -float("inf"), 0.0, tl.exp(other - base))[:, None]
        tl.debug_barrier()  # other threads of the program may have yet to read what is written here
        tl.store(old_place, total, mask=inside)
    else:
        tl.debug_barrier()
    tl.store(result + b * r_b + s[:, None] * r_s + h * r_h + d[None], old + new, mask=some)


def product(dout: Tensor, out: Tensor, dlse: Tensor | None, delta: Tensor) -> None:
    """Writes `rowsum(dout * out) - dlse` of shape `(B, S, H)`, in fp32, to `delta`."""
    batch, rows, heads, dim = dout.shape
    width = triton.next_power_of_2(dim)
    block = max(1, 4096 // width)
    scalars = (0, 0, 0) if dlse is None else dlse.stride()
    with torch.cuda.device(dout.device):
        _product[(triton.cdiv(rows, block), heads, batch)](
            *(dout, out, dlse, delta, *dout.stride()[:3], *out.stride()[:3], *scalars, *delta.stride(), rows),
            dim=dim,
            width=width,
            block=block,
            less=dlse is not None,
        )


@triton.jit
def _product(
    dout, out, dlse, delta, g_b, g_s, g_h, o_b, o_s, o_h, l_b, l_s, l_h, d_b, d_s, d_h, rows,
    dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr, less: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    s = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
    d = tl.arange(0, width)
    here = s < rows
    some = here[:, None] & (d < dim)[None]
    one = tl.load(dout + b * g_b + s[:, None] * g_s + h * g_h + d[None], mask=some, other=0.0).to(tl.float32)
    other = tl.load(out + b * o_b + s[:, None] * o_s + h * o_h + d[None], mask=some, other=0.0).to(tl.float32)
    product = tl.sum(one * other, 1)
    if less:
        product -= tl.load(dlse + b * l_b + s * l_s + h * l_h, mask=here, other=0.0)
    tl.store(delta + b * d_b + s * d_s + h * d_h, product, mask=here)


class Table:
    """Many strided copies as one kernel: what is fixed about them, on the device.

    Sources stay where they are; destinations are given with each run. All copies go on at the same time, a piece of
    each in turn: one after the other, all ranks would read from one peer, at a fraction of what the links can do.

    Args:
        pairs (sequence of `(source, target, index)`): Tensors of shape `(B, S, H, D)`; each target is a part of the
            destination `index`.
        into (sequence of `torch.Tensor`): At most `MAX_TENSORS` destinations.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor, int]], into: Sequence[Tensor]) -> None:
        entries = []
        for source, target, index in pairs:
            for one, other, outer, inner, *steps in _runs(source, target):
                ahead, size = other.data_ptr() - into[index].data_ptr(), source.element_size()
                numbers = (one.data_ptr(), ahead, *(number * size for number in (inner, *steps)))
                entries.append((*numbers, outer, index, 0))
        bases = [tensor.data_ptr() for tensor in into]
        bytes_of = [number for entry in entries for number in entry[:5]]
        self.unit = next(unit for unit in (16, 8, 4, 2, 1) if all(number % unit == 0 for number in [*bytes_of, *bases]))
        self.word = min(self.unit, 8)
        self.kind = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[self.word]
        sizes = [(entry[2] // self.word, entry[5]) for entry in entries]
        self.width = min(256, triton.next_power_of_2(max(words for words, _ in sizes)))
        self.tiles = {
            tile: max(
                triton.cdiv(words, self.width) * triton.cdiv(rows, max(1, tile // self.width)) for words, rows in sizes
            )
            for tile in (_TILE, _LARGE_TILE)
        }
        self.count = len(entries)
        self.table = from_host(entries, torch.int64, into[0].device)

    def run(self, into: Sequence[Tensor], during_kernel: bool) -> None:
        """Copies into these destinations, which are laid out as those that the table was made with.

        Args:
            into (sequence of `torch.Tensor`): The destinations.
            during_kernel (`bool`): Whether it runs while other kernels do. It then takes few multiprocessors, and each
                has as much under way as it can: a copy that waits for a peer's memory keeps other kernels out.
        """
        addresses = [tensor.data_ptr() for tensor in into]
        targets = [*addresses, *addresses[:1] * (MAX_TENSORS - len(addresses))]
        tile = _LARGE_TILE if during_kernel else _TILE
        work = self.tiles[tile] * self.count
        with torch.cuda.device(into[0].device):
            _copy[(min(work, _FEW) if during_kernel else work,)](
                *(self.table, *targets, self.count, work),
                kind=self.kind,
                word=self.word,
                aligned=self.unit,
                width=self.width,
                height=max(1, tile // self.width),
                num_warps=32 if during_kernel else 4,
            )


def _runs(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor, int, int, int, int]]:
    """Each copy as runs of adjacent elements: where the first ones begin, how many runs, how long, and both steps."""
    rows, heads, dim = source.shape[1:]
    for one, other in zip(source, target, strict=True):
        if one.stride(2) == other.stride(2) == 1 and one.stride(1) == other.stride(1) == dim:
            yield one, other, rows, heads * dim, one.stride(0), other.stride(0)
        elif dim == 1 and one.stride(0) == other.stride(0) == 1:
            yield one, other, heads, rows, one.stride(1), other.stride(1)
        else:
            for head in range(heads):
                for element in range(dim):
                    first, second = one[:, head, element:], other[:, head, element:]
                    yield first, second, rows, 1, first.stride(0), second.stride(0)


@triton.jit(do_not_specialize=["first", "second", "third", "fourth", "fifth", "sixth", "count", "work"])
def _copy(
    table, first, second, third, fourth, fifth, sixth, count, work,
    kind: tl.constexpr, word: tl.constexpr, aligned: tl.constexpr, width: tl.constexpr, height: tl.constexpr,
):  # fmt: skip
    for part in range(tl.program_id(0), work, tl.num_programs(0)):
        entry, tile = table + part % count * 8, part // count
        source, ahead, inner = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2) // word
        source_step, place_step = tl.load(entry + 3) // word, tl.load(entry + 4) // word
        outer, index = tl.load(entry + 5), tl.load(entry + 6)
        base = tl.where(index == 0, first, tl.where(index == 1, second, third))
        last = tl.where(index == 3, fourth, tl.where(index == 4, fifth, sixth))
        base = tl.where(index < 3, base, last)
        columns = tl.cdiv(inner, width)
        row = tile // columns * height + tl.arange(0, height)
        column = tile % columns * width + tl.arange(0, width)
        here = (row < outer)[:, None] & (column < inner)[None]
        start = tl.multiple_of(source.to(tl.pointer_type(kind)), aligned)
        stop = tl.multiple_of((base + ahead).to(tl.pointer_type(kind)), aligned)
        if aligned == 16:
            source_step, place_step = tl.multiple_of(source_step, 2), tl.multiple_of(place_step, 2)
        values = tl.load(start + row[:, None] * source_step + column[None], mask=here)
        tl.store(stop + row[:, None] * place_step + column[None], values, mask=here)
