"""K and V of all ranks at once, some heads at a time; dK and dV go home summed over the rows of a rank.

Every row of the output has one kernel call. The next heads are under way while some
are computed, and so are the gradients of the heads before.
"""

from collections.abc import Sequence

import torch

from ..kernels import Band, project_out
from .exchange import Exchange, Part, Posted
from .execute import Attention
from .merge import Merged, Summed, accumulation_dtype

_SLICES = 4


def gather_forward(
    attention: Attention,
    exchange: Exchange,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As [`forward`], by all-gathers."""
    keys = _Gathered(attention, exchange, k, v)
    merged = []
    for index, (heads, _) in enumerate(keys.slices(q)):
        some = q[:, :, heads]
        part = Merged((*some.shape[:3], v.shape[3]), q.dtype, q.device, None if sinks is None else sinks[heads])
        all_k, all_v = keys.take(index)
        for tile in attention.plan.gathered(attention.place):
            batch, rows, columns = slice(*tile.batch), slice(*tile.q), slice(*tile.k)
            out, lse = attention.kernel.forward(
                some[batch, rows],
                all_k[batch, columns],
                all_v[batch, columns],
                Band(tile.low, tile.high, tile.segments),
                attention.scores,
            )
            part.add(tile.batch, tile.q, out, lse)
        merged.append(part.result())
    if len(merged) == 1:
        return merged[0]
    outs, lses = zip(*merged, strict=True)
    return torch.cat(outs, 2), torch.cat([lse.transpose(1, 2) for lse in lses], 1).transpose(1, 2)


def gather_backward(
    attention: Attention,
    exchange: Exchange,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As [`backward`], by all-gathers and reduce-scatters."""
    if out is None and attention.kernel.card.wants_out:
        dout, out = project_out(dout, delta)
    keys = _Gathered(attention, exchange, k, v)
    home = _Scattered(attention, exchange, k, v)
    dqs = []
    for index, (heads, kv_heads) in enumerate(keys.slices(q)):
        all_k, all_v = keys.take(index)
        some = q[:, :, heads]
        dq = Summed(tuple(some.shape), q.dtype, q.device)
        dk, dv = (Summed(tuple(tensor.shape), q.dtype, q.device) for tensor in (all_k, all_v))
        for tile in attention.plan.gathered(attention.place):
            batch, rows, columns = slice(*tile.batch), slice(*tile.q), slice(*tile.k)
            gradients = attention.kernel.backward(
                dout[batch, rows, heads],
                some[batch, rows],
                all_k[batch, columns],
                all_v[batch, columns],
                None if out is None else out[batch, rows, heads],
                lse[batch, rows, heads],
                delta[batch, rows, heads],
                Band(tile.low, tile.high, tile.segments),
                attention.scores,
            )
            for total, gradient, place in zip((dq, dk, dv), gradients, (tile.q, tile.k, tile.k), strict=True):
                total.add(tile.batch, place, gradient)
        dqs.append(dq.result())
        home.send(index, kv_heads, (dk.wide, dv.wide))
    dk_home, dv_home = home.finish()
    return torch.cat(dqs, 2), dk_home.to(k.dtype), dv_home.to(v.dtype)


class _Gathered:
    """K and V of all ranks, slice by slice of their heads.

    Args:
        attention, exchange: As in [`gather_forward`].
        k, v (`torch.Tensor` of shape `(B, n, Hkv, D)`): Those of this rank.
    """

    def __init__(self, attention: Attention, exchange: Exchange, k: torch.Tensor, v: torch.Tensor) -> None:
        self.attention, self.exchange = attention, exchange
        self.count = next(count for count in range(_SLICES, 0, -1) if k.shape[2] % count == 0)
        cut = zip(k.chunk(self.count, 2), v.chunk(self.count, 2), strict=True)
        self.blocks = [block.contiguous() for pair in cut for block in pair]
        rows = attention.plan.sharding.most_tokens
        exchange.publish("visitors", self.blocks, sum(block.nbytes for block in self.blocks) // k.shape[1] * rows)
        self.arriving: tuple[Posted, list[torch.Tensor]] | None = None

    def slices(self, q: torch.Tensor) -> list[tuple[slice, slice]]:
        """Query heads and key heads of every slice."""
        each, kv_each = q.shape[2] // self.count, self.blocks[0].shape[2]
        return [
            (slice(index * each, (index + 1) * each), slice(index * kv_each, (index + 1) * kv_each))
            for index in range(self.count)
        ]

    def take(self, index: int) -> list[torch.Tensor]:
        """K and V of a slice, `(B, S, heads, D)`, filled where this rank's queries look; the next slice is fetched
        meanwhile."""
        arrived = self.arriving or self._fetch(index)
        self.arriving = self._fetch(index + 1) if index + 1 < self.count else None
        posted, landing = arrived
        posted.wait()
        return landing

    def _fetch(self, index: int) -> tuple[Posted, list[torch.Tensor]]:
        attention, sharding = self.attention, self.attention.plan.sharding
        blocks = self.blocks[2 * index : 2 * index + 2]
        landing = [block.new_empty(block.shape[0], sharding.length, *block.shape[2:]) for block in blocks]
        sends, receives, into = [], [], []
        for place, peer in enumerate(attention.peers):
            given, taken = _spans(attention, place, attention.place), _spans(attention, attention.place, place)
            shapes = tuple(((b.shape[0], sharding.tokens(place), *b.shape[2:]), b.dtype) for b in self.blocks)
            for which, (block, landed) in enumerate(zip(blocks, landing, strict=True)):
                if place == attention.place:
                    for token, row, size in taken:
                        landed[:, token : token + size].copy_(block[:, row : row + size])
                    continue
                sends += [(block[:, row : row + size], peer) for _, row, size in given]
                receives += [Part(peer, shapes, 2 * index + which, row, row + size) for _, row, size in taken]
                into += [landed[:, token : token + size] for token, _, size in taken]
        return self.exchange.fetch("visitors", sends, receives, tag=2 * index, into=into), landing


class _Scattered:
    """dK and dV on their way home, slice by slice, and summed there: the home's own first, then in rank order.

    Args:
        attention, exchange, k, v: As in [`_Gathered`].
    """

    def __init__(self, attention: Attention, exchange: Exchange, k: torch.Tensor, v: torch.Tensor) -> None:
        self.attention, self.exchange = attention, exchange
        wide = accumulation_dtype(k.dtype)
        self.home = [torch.zeros(tensor.shape, dtype=wide, device=k.device) for tensor in (k, v)]
        self.under_way: tuple[slice, Posted, list[tuple[int, int, int]]] | None = None

    def send(self, index: int, heads: slice, totals: Sequence[torch.Tensor]) -> None:
        """Sends the gradients of a slice, `(B, S, heads, D)`, home; adds those of the slice before."""
        attention, here = self.attention, self.attention.place
        shapes = tuple((tuple(total.shape), total.dtype) for total in totals)
        self.exchange.publish("gradients", totals, sum(total.nbytes for total in totals))
        sends, receives, places = [], [], []
        for place, peer in enumerate(attention.peers):
            given, taken = _spans(attention, here, place), _spans(attention, place, here)
            for which, total in enumerate(totals):
                if place == here:
                    for token, row, size in taken:
                        self.home[which][:, row : row + size, heads].add_(total[:, token : token + size])
                    continue
                sends += [(total[:, token : token + size], peer) for token, _, size in given]
                receives += [Part(peer, shapes, which, token, token + size) for token, _, size in taken]
                places += [(which, row, size) for _, row, size in taken]
        posted = self.exchange.fetch("gradients", sends, receives, tag=2 * index + 1)
        self._welcome()
        self.under_way = heads, posted, places

    def finish(self) -> list[torch.Tensor]:
        """The gradients of this rank's K and V."""
        self._welcome()
        return self.home

    def _welcome(self) -> None:
        if self.under_way is None:
            return
        heads, posted, places = self.under_way
        for (which, row, size), part in zip(places, posted.wait(), strict=True):
            self.home[which][:, row : row + size, heads].add_(part)
        self.under_way = None


def _spans(attention: Attention, looking: int, home: int) -> list[tuple[int, int, int]]:
    """Which keys of `home` the queries of `looking` look at: first token, row of it, how many."""
    start, stop = attention.plan.reach(looking)
    found = []
    for run in attention.plan.sharding.runs(home):
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            found.append((first, first - run.start + run.local, last - first))
    return found
