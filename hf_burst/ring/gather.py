"""K and V of all ranks at once, some heads at a time; dK and dV go home summed over the rows of a rank.

Every row of the output has one kernel call. The next heads are under way while some are computed, and so are the
gradients of the heads before. Over several hosts every key crosses once to a host: first the ranks of one number gather
theirs, then the ranks of a host. Gradients take the same way back, summed on the host before they cross.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..config import Schedule
from ..kernels import BackwardInputs, project_out
from ..numerics import accumulation_dtype
from ..plan import head_slices
from ..plan.sharding import Run
from .exchange import Exchange, Exchanges, Incoming, Outgoing, Pending, Round, Shape
from .loop import Keys, RingAttention, Rows, add_tiles
from .merge import Merged, Summed

# for each part of a round where it goes: which tensor, its first token or row, how many
_Targets = list[tuple[int, int, int]]


def gather_forward(
    attention: RingAttention, exchanges: Exchanges, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As [`forward`], by all-gathers."""
    keys = _GatheredKeys(attention, exchanges, q.shape[2], k, v)
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
    attention: RingAttention, exchanges: Exchanges, inputs: BackwardInputs
) -> tuple[Tensor, Tensor, Tensor]:
    """As [`backward`], by all-gathers and reduce-scatters."""
    q, k, v, dout, out, delta = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.out, inputs.delta
    if out is None and attention.kernel.capabilities.wants_out:
        assert delta is not None, "there is out or delta"
        dout, out = project_out(dout, delta)
    keys = _GatheredKeys(attention, exchanges, q.shape[2], k, v)
    home = _gradients_home(attention, exchanges, k, v)
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


@dataclass(frozen=True)
class _Hop:
    """One hop of keys to the ranks that look at them: inside a host or, before, between hosts.

    Args:
        attention ([`RingAttention`]): Whose plan it follows.
        inside (`bool`): Whether it is the hop inside a host.
    """

    attention: RingAttention
    inside: bool

    @cached_property
    def number(self) -> int:
        """The number of this rank among those of the hop."""
        number, host = self.attention.ring_rank % self._per_host, self.attention.ring_rank // self._per_host
        return number if self.inside else host

    @cached_property
    def ring_ranks(self) -> range:
        """The ring ranks of the hop."""
        rank, per_host = self.attention.ring_rank, self._per_host
        first = rank - rank % per_host
        return (
            range(first, first + per_host)
            if self.inside
            else range(rank % per_host, self.attention.plan.ranks, per_host)
        )

    @property
    def _per_host(self) -> int:
        return self.attention.plan.per_host

    def holds(self, number: int) -> tuple[Run, ...]:
        """The keys that a rank holds before the hop."""
        plan = self.attention.plan
        return plan.keys_on_host.runs(number) if self.inside else plan.keys.runs(self.ring_ranks[number])

    def rows(self, number: int) -> int:
        """How many they are."""
        return sum(run.size for run in self.holds(number))

    @cached_property
    def found(self) -> tuple[Run, ...]:
        """Where keys lie after the hop: all of the sequence, or those of this rank's number on all hosts."""
        plan = self.attention.plan
        if self.inside:
            return (Run(plan.keys.start, plan.keys.stop, 0),)
        return plan.keys_on_host.runs(self.attention.ring_rank % self._per_host)

    @lru_cache(maxsize=1024)  # noqa: B019, since hops are values
    def spans(self, looking: int, home: int) -> list[tuple[int, int, int]]:
        """The keys of `home` between the first and the last that the queries of `looking`, a rank or a host, see: first
        row where they go, first row of `home`, how many."""
        plan, rank = self.attention.plan, self.ring_ranks[looking]
        start, stop = plan.key_span(rank) if self.inside else plan.key_span_on_host(rank)
        spans = []
        for run in self.holds(home):
            first, last = max(run.start, start), min(run.stop, stop)
            if first < last:
                place = next(place for place in self.found if place.start <= first < place.stop)
                spans.append((place.local + first - place.start, run.local + first - run.start, last - first))
        return spans


class _GatheredKeys:
    """K and V of all ranks, slice by slice of their heads."""

    def __init__(self, attention: RingAttention, exchanges: Exchanges, q_heads: int, k: Tensor, v: Tensor) -> None:
        self.attention, self.exchanges = attention, exchanges
        self.hops = _hops(attention)
        ranks, most, heads = attention.plan.keys.ranks, attention.most_tokens["kv"], (q_heads, k.shape[2])
        slicing = attention.slice_blocks, attention.head_groups
        self.count = head_slices(Schedule("all_gather"), ranks, heads, most, *slicing)
        slices = zip(k.chunk(self.count, 2), v.chunk(self.count, 2), strict=True)
        self.blocks = [tensor.contiguous() for pair in slices for tensor in pair]
        self.row = sum(block.nbytes for block in self.blocks) // k.shape[1]
        self.crossing: tuple[Pending, list[Tensor]] | None = None
        self.arriving: tuple[Pending, list[Tensor]] | None = None
        if len(self.hops) == 1:
            self._exchange(self.hops[0]).publish("blocks", self.blocks, self.row * most)
            return
        self.on_host = self.row // self.count * attention.plan.keys_on_host.most_tokens
        exchanges.near.reserve("blocks", self.on_host)

    def slices(self, q: Tensor) -> list[tuple[slice, slice]]:
        """Query heads and key heads of every slice."""
        count, kv_count = q.shape[2] // self.count, self.blocks[0].shape[2]
        return [
            (slice(index * count, (index + 1) * count), slice(index * kv_count, (index + 1) * kv_count))
            for index in range(self.count)
        ]

    def take(self, index: int) -> list[Tensor]:
        """K and V of a slice, `(B, S, heads, D)`, filled where this rank's queries look. The next one is fetched
        meanwhile; over several hosts it crosses."""
        if len(self.hops) > 1:
            pending, landing = self._fetch_crossed(index)
        else:
            pending, landing = self.arriving or self._fetch(self.hops[0], self.blocks, 2 * index)
            last = index + 1 == self.count
            self.arriving = None if last else self._fetch(self.hops[0], self.blocks, 2 * index + 2)
        pending.wait()
        return landing

    def _fetch_crossed(self, index: int) -> tuple[Pending, list[Tensor]]:
        inside, across = self.hops
        crossing, blocks = self.crossing or self._fetch(across, self.blocks, 2 * index)
        crossing.wait()
        self.exchanges.near.publish("blocks", blocks, self.on_host)
        fetched = self._fetch(inside, blocks, 0)
        last = index + 1 == self.count
        self.crossing = None if last else self._fetch(across, self.blocks, 2 * index + 2)
        return fetched

    def _exchange(self, hop: _Hop) -> Exchange:
        return self.exchanges.near if hop.inside else self.exchanges.far

    def _fetch(self, hop: _Hop, blocks: Sequence[Tensor], first: int) -> tuple[Pending, list[Tensor]]:
        """K and V on their way by a hop; they are `first` and the next one of these blocks."""
        rows = sum(place.size for place in hop.found)
        landing = [block.new_empty(block.shape[0], rows, *block.shape[2:]) for block in blocks[first : first + 2]]
        for block, landed in zip(blocks[first:], landing, strict=False):
            for place, row, size in hop.spans(hop.number, hop.number):
                landed[:, place : place + size].copy_(block[:, row : row + size])
        shapes = tuple((block.shape, block.dtype) for block in blocks)
        this_round, targets = _round(hop, first, shapes, gradients=False)
        into = [landing[tensor][:, place : place + size] for tensor, place, size in targets]
        return self._exchange(hop).fetch("blocks", this_round, blocks, into), landing


class _Homeward:
    """dK and dV on their way back by a hop, slice by slice, and summed where they come: the own ones first, then those
    of the next ranks in turn. Then they take the hop before.

    Args:
        hop ([`_Hop`]): The hop that K and V have taken.
        exchange ([`Exchange`]): Its messages.
        sums (sequence of `torch.Tensor` of shape `(B, S, Hkv, D)`): Zeros for what K and V were before it.
        before ([`_Homeward`], *optional*): The hop before.
    """

    def __init__(
        self, hop: _Hop, exchange: Exchange, sums: Sequence[Tensor], before: "_Homeward | None" = None
    ) -> None:
        self.hop, self.exchange, self.sums, self.before = hop, exchange, sums, before
        self.pending: tuple[int, slice, Pending, _Targets] | None = None

    def send(self, index: int, heads: slice, totals: Sequence[Tensor]) -> None:
        """Sends the gradients of a slice, `(B, S, heads, D)`, back; adds those of the slice before."""
        self.exchange.publish("gradients", totals, sum(total.nbytes for total in totals))
        for home, total in zip(self.sums, totals, strict=True):
            for place, row, size in self.hop.spans(self.hop.number, self.hop.number):
                home[:, row : row + size, heads].add_(total[:, place : place + size])
        shapes = tuple((total.shape, total.dtype) for total in totals)
        this_round, targets = _round(self.hop, 0, shapes, gradients=True)
        pending = self.exchange.fetch("gradients", this_round, totals)
        self._add_pending()
        self.pending = index, heads, pending, targets

    def finish(self) -> Sequence[Tensor]:
        """The gradients of this rank's K and V."""
        self._add_pending()
        return self.sums if self.before is None else self.before.finish()

    def _add_pending(self) -> None:
        if self.pending is None:
            return
        index, heads, pending, targets = self.pending
        for (tensor, row, size), gradient in zip(targets, pending.wait(), strict=True):
            self.sums[tensor][:, row : row + size, heads].add_(gradient)
        self.pending = None
        if self.before is not None:
            self.before.send(index, heads, [total[:, :, heads] for total in self.sums])


def _gradients_home(attention: RingAttention, exchanges: Exchanges, k: Tensor, v: Tensor) -> _Homeward:
    """The way of dK and dV."""
    way = None
    for hop in reversed(_hops(attention)):
        exchange = exchanges.near if hop.inside else exchanges.far
        wide, rows = accumulation_dtype(k.dtype), hop.rows(hop.number)
        sums = [torch.zeros(tensor.shape[0], rows, *tensor.shape[2:], dtype=wide, device=k.device) for tensor in (k, v)]
        way = _Homeward(hop, exchange, sums, way)
    assert way is not None
    return way


@lru_cache(maxsize=128)
def _hops(attention: RingAttention) -> tuple[_Hop, ...]:
    """The hop inside a host, and the one between hosts where there are several; the second alone if each has one ring
    rank."""
    inside, across = _Hop(attention, True), _Hop(attention, False)
    if attention.plan.hosts == 1:
        return (inside,)
    return (across,) if attention.plan.per_host == 1 else (inside, across)


@lru_cache(maxsize=256)
def _round(hop: _Hop, first: int, shapes: tuple[Shape, ...], gradients: bool) -> tuple[Round, _Targets]:
    """How K and V, `first` and the next one of the tensors of these shapes that this rank has published, are fetched by
    a hop; or how their `gradients`, of these shapes on every rank, go back. And where what comes is put.
    The next rank is first, so that no two ranks read from the same one at the same time.
    """
    own, ranks = hop.number, len(hop.ring_ranks)
    outgoing, incoming, targets = [], [], []
    for number in ((own + ahead) % ranks for ahead in range(1, ranks)):
        peer, rows = hop.attention.peers[hop.ring_ranks[number]], hop.rows(number)
        theirs = tuple(((batch, rows, *rest), dtype) for (batch, _, *rest), dtype in shapes)
        leaving = [(row, size) for _, row, size in hop.spans(number, own)]
        coming = [(row, place, size) for place, row, size in hop.spans(own, number)]
        if gradients:
            theirs = shapes
            leaving, coming = [(place, size) for _, place, size in coming], hop.spans(number, own)
        for tensor in range(2):
            outgoing += [Outgoing(peer, first + tensor, start, start + size) for start, size in leaving]
            incoming += [Incoming(peer, theirs, first + tensor, start, start + size) for start, _, size in coming]
            targets += [(tensor, target, size) for _, target, size in coming]
    return Round(shapes, tuple(outgoing), tuple(incoming), first + gradients), targets
