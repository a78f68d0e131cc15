"""K and V of all ranks at once, some heads at a time; dK and dV go home summed over the rows of a rank.

Every row of the output has one kernel call. The next heads are under way while some are computed, and so are the
gradients of the heads before.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..config import Schedule
from ..kernels import BackwardInputs, project_out
from ..plan import head_slices
from .exchange import Exchange, Incoming, Outgoing, Pending, Round, Shape
from .loop import Keys, RingAttention, Rows, add_tiles
from .merge import Merged, Summed, accumulation_dtype

# for each part of a round where it goes: which tensor, its first token or row, how many
_Targets = list[tuple[int, int, int]]


def gather_forward(
    attention: RingAttention, exchange: Exchange, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As [`forward`], by all-gathers."""
    keys = _GatheredKeys(attention, exchange, q.shape[2], k, v)
    outs, lses = [], []
    for index, (heads, _) in enumerate(keys.slices(q)):
        q_slice = q[:, :, heads]
        slice_sinks = None if sinks is None else sinks[heads]
        merged = Merged((*q_slice.shape[:3], v.shape[3]), q.dtype, q.device, slice_sinks)
        all_k, all_v = keys.take(index)
        for tile in attention.gathered:
            batch, rows, columns = slice(*tile.batch), slice(*tile.q), slice(*tile.k)
            tile_q, tile_k, tile_v = q_slice[batch, rows], all_k[batch, columns], all_v[batch, columns]
            out, lse = attention.kernel.forward(tile_q, tile_k, tile_v, attention.band(tile), attention.scores)
            merged.add(tile.batch, tile.q, out, lse)
        out, lse = merged.result()
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, 2), torch.cat([lse.transpose(1, 2) for lse in lses], 1).transpose(1, 2)


def gather_backward(
    attention: RingAttention, exchange: Exchange, inputs: BackwardInputs
) -> tuple[Tensor, Tensor, Tensor]:
    """As [`backward`], by all-gathers and reduce-scatters."""
    q, k, v, dout, out, delta = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.out, inputs.delta
    if out is None and attention.kernel.capabilities.wants_out:
        assert delta is not None, "there is out or delta"
        dout, out = project_out(dout, delta)
    keys = _GatheredKeys(attention, exchange, q.shape[2], k, v)
    home = _ScatteredGradients(attention, exchange, k, v)
    dqs = []
    for index, (heads, kv_heads) in enumerate(keys.slices(q)):
        all_k, all_v = keys.take(index)
        q_slice = q[:, :, heads]
        dq = Summed(tuple(q_slice.shape), q.dtype, q.device)
        dk, dv = (Summed(tuple(tensor.shape), q.dtype, q.device) for tensor in (all_k, all_v))
        delta_slice, out_slice = (None if tensor is None else tensor[:, :, heads] for tensor in (delta, out))
        rows = Rows(q_slice, dout[:, :, heads], inputs.lse[:, :, heads], delta_slice, out_slice, 0, dq)
        add_tiles(attention, attention.gathered, rows, Keys(all_k, all_v, 0, dk, dv))
        dqs.append(dq.result())
        home.send(index, kv_heads, (dk.wide, dv.wide))
    dk_home, dv_home = home.finish()
    return torch.cat(dqs, 2), dk_home.to(k.dtype), dv_home.to(v.dtype)


class _GatheredKeys:
    """K and V of all ranks, slice by slice of their heads."""

    def __init__(self, attention: RingAttention, exchange: Exchange, q_heads: int, k: Tensor, v: Tensor) -> None:
        self.attention, self.exchange = attention, exchange
        ranks, most, heads = attention.plan.keys.ranks, attention.most_tokens["kv"], (q_heads, k.shape[2])
        slicing = attention.slice_blocks, attention.head_groups
        self.count = head_slices(Schedule("all_gather"), ranks, heads, most, *slicing)
        slices = zip(k.chunk(self.count, 2), v.chunk(self.count, 2), strict=True)
        self.blocks = [tensor.contiguous() for pair in slices for tensor in pair]
        capacity = sum(block.nbytes for block in self.blocks) // k.shape[1] * attention.most_tokens["kv"]
        exchange.publish("blocks", self.blocks, capacity)
        self.arriving: tuple[Pending, list[Tensor]] | None = None

    def slices(self, q: Tensor) -> list[tuple[slice, slice]]:
        """Query heads and key heads of every slice."""
        count, kv_count = q.shape[2] // self.count, self.blocks[0].shape[2]
        return [
            (slice(index * count, (index + 1) * count), slice(index * kv_count, (index + 1) * kv_count))
            for index in range(self.count)
        ]

    def take(self, index: int) -> list[Tensor]:
        """K and V of a slice, `(B, S, heads, D)`, filled where this rank's queries look, while the next is fetched."""
        pending, landing = self.arriving or self._fetch(index)
        self.arriving = self._fetch(index + 1) if index + 1 < self.count else None
        pending.wait()
        return landing

    def _fetch(self, index: int) -> tuple[Pending, list[Tensor]]:
        attention, own = self.attention, self.attention.ring_rank
        landing = [
            block.new_empty(block.shape[0], attention.plan.keys.length, *block.shape[2:])
            for block in self.blocks[2 * index : 2 * index + 2]
        ]
        for block, landed in zip(self.blocks[2 * index :], landing, strict=False):
            for column, row, size in _key_spans(attention, own, own):
                landed[:, column : column + size].copy_(block[:, row : row + size])
        shapes = tuple((block.shape, block.dtype) for block in self.blocks)
        this_round, targets = _round(attention, index, shapes, gradients=False)
        into = [landing[tensor][:, column : column + size] for tensor, column, size in targets]
        return self.exchange.fetch("blocks", this_round, self.blocks, into), landing


class _ScatteredGradients:
    """dK and dV on their way home, slice by slice, and summed there: the home's own first, then those of the next ranks
    in turn."""

    def __init__(self, attention: RingAttention, exchange: Exchange, k: Tensor, v: Tensor) -> None:
        self.attention, self.exchange = attention, exchange
        wide = accumulation_dtype(k.dtype)
        self.home = [torch.zeros(tensor.shape, dtype=wide, device=k.device) for tensor in (k, v)]
        self.pending: tuple[slice, Pending, _Targets] | None = None

    def send(self, index: int, heads: slice, totals: Sequence[Tensor]) -> None:
        """Sends the gradients of a slice, `(B, S, heads, D)`, home; adds those of the slice before."""
        self.exchange.publish("gradients", totals, sum(total.nbytes for total in totals))
        own = self.attention.ring_rank
        for home, total in zip(self.home, totals, strict=True):
            for column, row, size in _key_spans(self.attention, own, own):
                home[:, row : row + size, heads].add_(total[:, column : column + size])
        shapes = tuple((total.shape, total.dtype) for total in totals)
        this_round, targets = _round(self.attention, index, shapes, gradients=True)
        pending = self.exchange.fetch("gradients", this_round, totals)
        self._add_pending()
        self.pending = heads, pending, targets

    def finish(self) -> list[Tensor]:
        """The gradients of this rank's K and V."""
        self._add_pending()
        return self.home

    def _add_pending(self) -> None:
        if self.pending is None:
            return
        heads, pending, targets = self.pending
        for (tensor, row, size), gradient in zip(targets, pending.wait(), strict=True):
            self.home[tensor][:, row : row + size, heads].add_(gradient)
        self.pending = None


@lru_cache(maxsize=128)
def _round(attention: RingAttention, index: int, shapes: tuple[Shape, ...], gradients: bool) -> tuple[Round, _Targets]:
    """How K and V of a slice are fetched, if all slices of this rank have these shapes; or how their `gradients`, of
    these shapes on every rank, go home. And where what comes is put: at columns, or rows.
    The next rank is first, so that no two ranks read from the same one at the same time.
    """
    own, ranks, first = attention.ring_rank, len(attention.peers), 0 if gradients else 2 * index
    outgoing, incoming, targets = [], [], []
    for ring_rank in ((own + ahead) % ranks for ahead in range(1, ranks)):
        peer, tokens = attention.peers[ring_rank], attention.plan.keys.tokens(ring_rank)
        theirs = tuple(((batch, tokens, *rest), dtype) for (batch, _, *rest), dtype in shapes)
        leaving = [(row, size) for _, row, size in _key_spans(attention, ring_rank, own)]
        coming = [(row, column, size) for column, row, size in _key_spans(attention, own, ring_rank)]
        if gradients:
            theirs = shapes
            leaving, coming = [(column, size) for _, column, size in coming], _key_spans(attention, ring_rank, own)
        for tensor in range(2):
            outgoing += [Outgoing(peer, first + tensor, start, start + size) for start, size in leaving]
            incoming += [Incoming(peer, theirs, first + tensor, start, start + size) for start, _, size in coming]
            targets += [(tensor, target, size) for _, target, size in coming]
    return Round(shapes, tuple(outgoing), tuple(incoming), 2 * index + gradients), targets


@lru_cache(maxsize=1024)
def _key_spans(attention: RingAttention, rank: int, home: int) -> list[tuple[int, int, int]]:
    """The keys of `home` between the first and the last that the queries of `rank` see: first column among all keys,
    first row of `home`, how many."""
    start, stop = attention.plan.key_span(rank)
    keys, spans = attention.plan.keys, []
    for run in keys.runs(home):
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            spans.append((first - keys.start, first - run.start + run.local, last - first))
    return spans
