"""K and V of all ranks at once, some heads at a time; dK and dV go home summed over the rows of a rank.

Every row of the output has one kernel call. The next heads are under way while some are computed, and so are the
gradients of the heads before.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from ..config import Schedule
from ..kernels import project_out
from ..plan import head_slices
from .exchange import Exchange, Incoming, Outgoing, Pending, Round, Shape
from .loop import Attention
from .merge import Merged, Summed, accumulation_dtype

# which tensor, first row or token, how many: where each part of a round goes
_Places = list[tuple[int, int, int]]


def gather_forward(
    attention: Attention,
    exchange: Exchange,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As [`forward`], by all-gathers."""
    keys = _Gathered(attention, exchange, q.shape[2], k, v)
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
                attention.band(tile),
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
    delta: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As [`backward`], by all-gathers and reduce-scatters."""
    if out is None and attention.kernel.capabilities.wants_out:
        assert delta is not None, "there is out or delta"
        dout, out = project_out(dout, delta)
    keys = _Gathered(attention, exchange, q.shape[2], k, v)
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
                None if delta is None else delta[batch, rows, heads],
                attention.band(tile),
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
        q_heads (`int`): Query heads.
        k, v (`torch.Tensor` of shape `(B, n, Hkv, D)`): Those of this rank.
    """

    def __init__(
        self, attention: Attention, exchange: Exchange, q_heads: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self.attention, self.exchange = attention, exchange
        places, heads = attention.plan.sharding.ranks, (q_heads, k.shape[2])
        self.count = head_slices(
            Schedule("all_gather"), places, heads, k.shape[1], 2048 if k.device.type == "cuda" else 0
        )
        cut = zip(k.chunk(self.count, 2), v.chunk(self.count, 2), strict=True)
        self.blocks = [block.contiguous() for pair in cut for block in pair]
        rows = attention.plan.sharding.most_tokens
        exchange.publish("visitors", self.blocks, sum(block.nbytes for block in self.blocks) // k.shape[1] * rows)
        self.arriving: tuple[Pending, list[torch.Tensor]] | None = None

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

    def _fetch(self, index: int) -> tuple[Pending, list[torch.Tensor]]:
        attention = self.attention
        landing = [
            block.new_empty(block.shape[0], attention.plan.sharding.length, *block.shape[2:])
            for block in self.blocks[2 * index : 2 * index + 2]
        ]
        for block, landed in zip(self.blocks[2 * index :], landing, strict=False):
            for token, row, size in _spans(attention, attention.place, attention.place):
                landed[:, token : token + size].copy_(block[:, row : row + size])
        shapes = tuple((block.shape, block.dtype) for block in self.blocks)
        which, places = _slice_gathered(attention, index, shapes)
        into = [landing[tensor][:, token : token + size] for tensor, token, size in places]
        return self.exchange.fetch("visitors", which, self.blocks, into), landing


class _Scattered:
    """dK and dV on their way home, slice by slice, and summed there: the home's own first, then those of the next ranks
    in turn.

    Args:
        attention, exchange, k, v: As in [`_Gathered`].
    """

    def __init__(self, attention: Attention, exchange: Exchange, k: torch.Tensor, v: torch.Tensor) -> None:
        self.attention, self.exchange = attention, exchange
        wide = accumulation_dtype(k.dtype)
        self.home = [torch.zeros(tensor.shape, dtype=wide, device=k.device) for tensor in (k, v)]
        self.under_way: tuple[slice, Pending, _Places] | None = None

    def send(self, index: int, heads: slice, totals: Sequence[torch.Tensor]) -> None:
        """Sends the gradients of a slice, `(B, S, heads, D)`, home; adds those of the slice before."""
        self.exchange.publish("gradients", totals, sum(total.nbytes for total in totals))
        for home, total in zip(self.home, totals, strict=True):
            for token, row, size in _spans(self.attention, self.attention.place, self.attention.place):
                home[:, row : row + size, heads].add_(total[:, token : token + size])
        shapes = tuple((total.shape, total.dtype) for total in totals)
        which, places = _slice_scattered(self.attention, index, shapes)
        posted = self.exchange.fetch("gradients", which, totals)
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


@lru_cache(maxsize=128)
def _slice_gathered(attention: Attention, index: int, shapes: tuple[Shape, ...]) -> tuple[Round, _Places]:
    """How K and V of a slice are fetched, if all slices of this rank have these shapes; and the tokens that come."""
    given, taken, places = [], [], []
    for place, peer in _others(attention):
        rows = attention.plan.sharding.tokens(place)
        theirs = tuple(((shape[0], rows, *shape[2:]), dtype) for shape, dtype in shapes)
        for tensor in range(2):
            for _, row, size in _spans(attention, place, attention.place):
                given.append(Outgoing(peer, 2 * index + tensor, row, row + size))
            for token, row, size in _spans(attention, attention.place, place):
                taken.append(Incoming(peer, theirs, 2 * index + tensor, row, row + size))
                places.append((tensor, token, size))
    return Round(shapes, tuple(given), tuple(taken), 2 * index), places


@lru_cache(maxsize=128)
def _slice_scattered(attention: Attention, index: int, shapes: tuple[Shape, ...]) -> tuple[Round, _Places]:
    """How dK and dV of a slice, of these shapes on every rank, go home; and the rows that come."""
    given, taken, places = [], [], []
    for place, peer in _others(attention):
        for tensor in range(2):
            for token, _, size in _spans(attention, attention.place, place):
                given.append(Outgoing(peer, tensor, token, token + size))
            for token, row, size in _spans(attention, place, attention.place):
                taken.append(Incoming(peer, shapes, tensor, token, token + size))
                places.append((tensor, row, size))
    return Round(shapes, tuple(given), tuple(taken), 2 * index + 1), places


def _others(attention: Attention) -> Iterator[tuple[int, int]]:
    """Place and rank of the others, the next one first: no two ranks read from the same one at the same time."""
    for ahead in range(1, len(attention.peers)):
        place = (attention.place + ahead) % len(attention.peers)
        yield place, attention.peers[place]


def _spans(attention: Attention, looking: int, home: int) -> list[tuple[int, int, int]]:
    """Which keys of `home` the queries of `looking` look at: first token, row of it, how many."""
    start, stop = attention.plan.reach(looking)
    found = []
    for run in attention.plan.sharding.runs(home):
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            found.append((first, first - run.start + run.local, last - first))
    return found
