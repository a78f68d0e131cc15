"""K and V of all ranks at once, some heads at a time; dK and dV return summed over the rows of a rank.

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
from ..kernels import BackwardInputs
from ..numerics import accumulation_dtype
from ..plan import head_slices
from ..plan.sharding import Run, placed
from .exchange import Exchange, Exchanges, Incoming, Pending, Region, Round, Shape
from .loop import add_tiles, with_out
from .merge import Merged, Summed
from .rounds import RingAttention


def gather_forward(
    attention: RingAttention, exchanges: Exchanges, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As [`forward`], by all-gathers."""
    keys = _GatheredKeys(attention, exchanges, q.shape[2], k, v)
    outs, lses = [], []
    for index, (heads, _) in enumerate(groups_of_heads(keys.count, q.shape[2], k.shape[2])):
        q_slice, slice_sinks = q[:, :, heads], None if sinks is None else sinks[heads]
        merged = Merged((*q_slice.shape[:3], v.shape[3]), q.dtype, q.device, slice_sinks)
        all_keys = keys.take(index)
        for tile in attention.plan.gathered(attention.ring_rank):
            batch, rows, columns = slice(*tile.batch), slice(*tile.q), slice(*tile.k)
            tile_k, tile_v = (tensor[batch, columns] for tensor in all_keys)
            out, lse = attention.kernel.forward(q_slice[batch, rows], tile_k, tile_v, tile.band, attention.scores)
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
    q, k, v = inputs.q, inputs.k, inputs.v
    inputs = with_out(attention.kernel, inputs)
    keys = _GatheredKeys(attention, exchanges, q.shape[2], k, v)
    returns = _returns(attention, exchanges, k, v)
    dqs = []
    for index, (heads, kv_heads) in enumerate(groups_of_heads(keys.count, q.shape[2], k.shape[2])):
        all_k, all_v = keys.take(index)
        part = inputs.of_heads(heads, kv_heads)._replace(k=all_k, v=all_v)
        dq, dk, dv = (Summed(tuple(x.shape), q.dtype, q.device) for x in (part.q, all_k, all_v))
        add_tiles(attention, attention.plan.gathered(attention.ring_rank), part, (dq, dk, dv))
        dqs.append(dq.result())
        returns.send(index, kv_heads, (dk.wide, dv.wide))
    dk_sum, dv_sum = returns.finish()
    return torch.cat(dqs, 2), dk_sum.to(k.dtype), dv_sum.to(v.dtype)


def groups_of_heads(count: int, q_heads: int, kv_heads: int) -> list[tuple[slice, slice]]:
    """Query heads and key heads of each of `count` groups."""
    q_size, kv_size = q_heads // count, kv_heads // count
    return [
        (slice(index * q_size, (index + 1) * q_size), slice(index * kv_size, (index + 1) * kv_size))
        for index in range(count)
    ]


@dataclass(frozen=True, eq=False)
class _Hop:
    """One hop of keys to the ranks that look at them: inside a host or, before, between hosts.

    Args:
        inside (`bool`): Whether it is the hop inside a host.
        number (`int`): The number of this rank among those of the hop.
        peers (`tuple[int, ...]`): The number of each rank of the hop in its exchange.
        held (`tuple[tuple[Run, ...], ...]`): The keys that each of them holds before.
        found (`tuple[Run, ...]`): Where keys lie after the hop: all of the sequence, or those of this rank's number on
            all hosts.
        seen (`tuple[tuple[int, int], ...]`): The first key and the end of those that the queries of each rank, or of
            its host, see.
    """

    inside: bool
    number: int
    peers: tuple[int, ...]
    held: tuple[tuple[Run, ...], ...]
    found: tuple[Run, ...]
    seen: tuple[tuple[int, int], ...]

    def rows(self, number: int) -> int:
        """How many keys a rank holds before."""
        return sum(run.size for run in self.held[number])

    def spans(self, looking: int, owner: int) -> list[tuple[int, int, int]]:
        """The keys of `owner` that `looking` fetches: first row where they go, first row of `owner`, how many."""
        return placed(self.held[owner], self.found, *self.seen[looking])

    @cached_property
    def own(self) -> list[tuple[int, int, int]]:
        """The own keys, which stay here."""
        return self.spans(self.number, self.number)


@lru_cache(maxsize=128)
def _hops(attention: RingAttention) -> tuple[_Hop, ...]:
    """The hop inside a host, and the one between hosts where there are several; the second alone if each has one ring
    rank."""
    plan, rank, keys = attention.plan, attention.ring_rank, attention.plan.keys
    host, number = divmod(rank, plan.per_host)
    neighbours, counterparts = plan.host(rank), range(number, plan.ranks, plan.per_host)
    on_host = plan.keys_on_host
    spans = [plan.key_span(one) for one in range(plan.ranks)]
    inside = _Hop(
        inside=True,
        number=number,
        peers=tuple(attention.peers[one] for one in neighbours),
        held=tuple(on_host.runs(number) for number in range(plan.per_host)),
        found=(Run(keys.start, keys.stop, 0),),
        seen=tuple(spans[one] for one in neighbours),
    )
    across = _Hop(
        inside=False,
        number=host,
        peers=tuple(attention.peers[one] for one in counterparts),
        held=tuple(keys.runs(one) for one in counterparts),
        found=on_host.runs(number),
        seen=tuple(_joined([spans[one] for one in plan.host(other)]) for other in counterparts),
    )
    if plan.hosts == 1:
        return (inside,)
    return (across,) if plan.per_host == 1 else (inside, across)


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """From the first start to the last end."""
    return min(start for start, _ in spans), max(stop for _, stop in spans)


class _GatheredKeys:
    """K and V of all ranks, slice by slice of their heads."""

    def __init__(self, attention: RingAttention, exchanges: Exchanges, q_heads: int, k: Tensor, v: Tensor) -> None:
        self.exchanges, self.hops, keys = exchanges, _hops(attention), attention.plan.keys
        most, heads = keys.most_tokens, (q_heads, k.shape[2])
        slicing = attention.on_gpus, attention.head_groups
        self.count = head_slices(Schedule("all_gather"), keys.ranks, heads, most, *slicing)
        slices = zip(k.chunk(self.count, 2), v.chunk(self.count, 2), strict=True)
        self.blocks = [tensor.contiguous() for pair in slices for tensor in pair]
        row = sum(block.nbytes for block in self.blocks) // k.shape[1]
        self.ahead: tuple[Pending, list[Tensor]] | None = None  # the next slice, on its first hop
        if len(self.hops) == 1:
            self._exchange(self.hops[0]).publish("blocks", self.blocks, row * most)
            return
        self.on_host = row // self.count * attention.plan.keys_on_host.most_tokens
        exchanges.near.reserve("blocks", self.on_host)

    def take(self, index: int) -> list[Tensor]:
        """K and V of a slice, `(B, S, heads, D)`, filled where this rank's queries look. The next one is fetched
        meanwhile; over several hosts it crosses."""
        first_hop = self.hops[-1]
        pending, landing = self.ahead or self._fetch(first_hop, self.blocks, 2 * index)
        last = index + 1 == self.count
        if len(self.hops) > 1:
            pending.wait()
            self.exchanges.near.publish("blocks", landing, self.on_host)
            pending, landing = self._fetch(self.hops[0], landing, 0)
        self.ahead = None if last else self._fetch(first_hop, self.blocks, 2 * index + 2)
        pending.wait()
        return landing

    def _exchange(self, hop: _Hop) -> Exchange:
        return self.exchanges.near if hop.inside else self.exchanges.far

    def _fetch(self, hop: _Hop, blocks: Sequence[Tensor], first: int) -> tuple[Pending, list[Tensor]]:
        """K and V on their way by a hop; they are `first` and the next one of these blocks."""
        rows = sum(place.size for place in hop.found)
        landing = [block.new_empty(block.shape[0], rows, *block.shape[2:]) for block in blocks[first : first + 2]]
        for block, landed in zip(blocks[first:], landing, strict=False):
            for place, row, size in hop.own:
                landed[:, place : place + size].copy_(block[:, row : row + size])
        this_round = _round(hop, first, tuple((block.shape, block.dtype) for block in blocks), gradients=False)
        return self._exchange(hop).fetch("blocks", this_round, blocks, landing), landing


class _Returns:
    """dK and dV on their way back by a hop, slice by slice, and summed where they come: the own ones first, then those
    of the next ranks in turn. Then they take the hop before.

    Args:
        hop ([`_Hop`]): The hop that K and V have taken.
        exchange ([`Exchange`]): Its messages.
        sums (sequence of `torch.Tensor` of shape `(B, S, Hkv, D)`): Zeros for what K and V were before it.
        before ([`_Returns`], *optional*): The hop before.
    """

    def __init__(self, hop: _Hop, exchange: Exchange, sums: Sequence[Tensor], before: "_Returns | None" = None) -> None:
        self.hop, self.exchange, self.sums, self.before = hop, exchange, sums, before
        self.pending: tuple[int, slice, Round, Pending] | None = None

    def send(self, index: int, heads: slice, totals: Sequence[Tensor]) -> None:
        """Sends the gradients of a slice, `(B, S, heads, D)`, back; adds those of the slice before."""
        self.exchange.publish("gradients", totals, sum(total.nbytes for total in totals))
        for owned, total in zip(self.sums, totals, strict=True):
            for place, row, size in self.hop.own:
                owned[:, row : row + size, heads].add_(total[:, place : place + size])
        this_round = _round(self.hop, 0, tuple((total.shape, total.dtype) for total in totals), gradients=True)
        pending = self.exchange.fetch("gradients", this_round, totals)
        self._add_pending()
        self.pending = index, heads, this_round, pending

    def finish(self) -> Sequence[Tensor]:
        """The gradients of this rank's K and V."""
        self._add_pending()
        return self.sums if self.before is None else self.before.finish()

    def _add_pending(self) -> None:
        if self.pending is None:
            return
        index, heads, this_round, pending = self.pending
        for part, gradient in zip(this_round.incoming, pending.wait(), strict=True):
            part.target.of(self.sums)[:, :, heads].add_(gradient)
        self.pending = None
        if self.before is not None:
            self.before.send(index, heads, [total[:, :, heads] for total in self.sums])


def _returns(attention: RingAttention, exchanges: Exchanges, k: Tensor, v: Tensor) -> _Returns:
    """The hops of dK and dV, the last one of K and V first."""
    returns = None
    for hop in reversed(_hops(attention)):
        exchange = exchanges.near if hop.inside else exchanges.far
        wide, rows = accumulation_dtype(k.dtype), hop.rows(hop.number)
        sums = [torch.zeros(tensor.shape[0], rows, *tensor.shape[2:], dtype=wide, device=k.device) for tensor in (k, v)]
        returns = _Returns(hop, exchange, sums, returns)
    assert returns is not None
    return returns


@lru_cache(maxsize=256)
def _round(hop: _Hop, first: int, shapes: tuple[Shape, ...], gradients: bool) -> Round:
    """How K and V, `first` and the next one of the tensors of these shapes that this rank has published, are fetched by
    a hop; or how their `gradients`, of these shapes on every rank, go back. The next rank is first, so that no two
    ranks read from the same one at the same time."""
    own, ranks = hop.number, len(hop.peers)
    outgoing, incoming = list[tuple[int, Region]](), list[Incoming]()
    for number in ((own + ahead) % ranks for ahead in range(1, ranks)):
        peer, rows = hop.peers[number], hop.rows(number)
        theirs = tuple(((batch, rows, *rest), dtype) for (batch, _, *rest), dtype in shapes)
        leaving = [(row, size) for _, row, size in hop.spans(number, own)]
        coming = [(row, place, size) for place, row, size in hop.spans(own, number)]
        if gradients:
            theirs = shapes
            leaving, coming = [(place, size) for _, place, size in coming], hop.spans(number, own)
        for tensor in range(2):
            outgoing += [(peer, Region(first + tensor, (row, row + size))) for row, size in leaving]
            incoming += [
                Incoming(
                    peer, theirs, Region(first + tensor, (row, row + size)), Region(tensor, (target, target + size))
                )
                for row, target, size in coming
            ]
    return Round(shapes, tuple(outgoing), tuple(incoming), first + gradients)
