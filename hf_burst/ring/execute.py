"""The loop that executes the schedule of a ring, forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..kernels import Band, Kernel, Scores, project_out
from ..plan import Plan, Step, Tile, Transfer
from ..plan.schedule import Visitor, goes_ahead
from .exchange import Exchange, Part, Posted, Shape
from .merge import Merged, Summed, accumulation_dtype

# What a step does with its visitors: returns their gradients, empty if nothing goes home.
Visit = Callable[[Step, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Attention:
    """One attention over a ring: what is the same for its forward and its backward pass.

    Args:
        plan ([`Plan`]): What is computed, by which place of the ring.
        place (`int`): This rank's place.
        peers (`tuple[int, ...]`): The rank of the group that stands at each place.
        kernel ([`Kernel`]): What computes a tile.
        scores ([`Scores`]): Scale and soft-capping.
    """

    plan: Plan
    place: int
    peers: tuple[int, ...]
    kernel: Kernel
    scores: Scores


def forward(
    attention: Attention,
    exchange: Exchange,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries over the keys of all ranks. K and V visit.

    Args:
        attention ([`Attention`]): What to compute.
        exchange ([`Exchange`]): The messages.
        q (`torch.Tensor` of shape `(B, n, Hq, D)`): This rank's queries.
        k (`torch.Tensor` of shape `(B, n, Hkv, D)`): This rank's keys.
        v (`torch.Tensor` of shape `(B, n, Hkv, Dv)`): This rank's values.
        sinks (`torch.Tensor` of shape `(Hq,)`, *optional*): A further score of every row, whose value is 0.

    Returns:
        `out` of shape `(B, n, Hq, Dv)` in the dtype of q, and `lse` of shape `(B, n, Hq)` in fp32 (fp64 for fp64), in
        memory `(B, Hq, n)`.
    """
    merged = Merged((*q.shape[:3], v.shape[3]), q.dtype, q.device, sinks)

    def visit(step: Step, visitors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        keys, values = visitors
        first = step.recv.start if step.recv else 0
        for tile in step.tiles:
            part, part_lse = attention.kernel.forward(
                _cut(q, tile.batch, tile.q),
                _cut(keys, tile.batch, tile.k, first),
                _cut(values, tile.batch, tile.k, first),
                _band(tile),
                attention.scores,
            )
            merged.add(tile.batch, tile.q, part, part_lse)
        return ()

    _circulate(attention, "kv", exchange, (k, v), visit)
    return merged.result()


def backward(
    attention: Attention,
    exchange: Exchange,
    visitor: Visitor,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's q, k and v.

    Args:
        attention ([`Attention`]): As in the forward pass.
        exchange ([`Exchange`]): The messages.
        visitor (`str`): `"kv"`: K and V visit, dK and dV return. `"q"`: Q, dO, lse and delta visit, dQ returns.
        dout (`torch.Tensor` of shape `(B, n, Hq, Dv)`): Gradient of the output.
        q, k, v (`torch.Tensor`): Inputs of the forward pass.
        out (`torch.Tensor` of shape `(B, n, Hq, Dv)`, *optional*): Its output, if `rowsum(dout * out) = delta`.
        lse (`torch.Tensor` of shape `(B, n, Hq)`): Its log-sum-exp.
        delta (`torch.Tensor` of shape `(B, n, Hq)`): `rowsum(dout * out)` less the gradient of `lse`.

    Returns:
        `dq`, `dk` and `dv` in the shapes and dtypes of q, k and v.
    """
    dq, dk, dv = (Summed(tuple(tensor.shape), tensor.dtype, q.device) for tensor in (q, k, v))
    rows, keys = _Rows(q, dout, lse, delta, out, 0, dq), _Keys(k, v, 0, dk, dv)
    if out is None:
        rows = _rows_without_out(attention.kernel, (q, dout, lse, delta), 0, dq)

    def visit(step: Step, visitors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if step.recv is None:
            _add_tiles(attention, step, rows, keys)
            return ()
        first, lone = step.recv.start, step.recv.lone
        sums = [Summed(tuple(guest.shape), guest.dtype, q.device) for guest in visitors[: len(home)]]
        if visitor == "kv":
            _add_tiles(attention, step, rows, _Keys(visitors[0], visitors[1], first, sums[0], sums[1]))
        else:
            _add_tiles(attention, step, _rows_without_out(attention.kernel, visitors, first, sums[0]), keys)
        return [total.only_part if lone else total.wide for total in sums]

    payload, home = ((k, v), (dk, dv)) if visitor == "kv" else ((q, dout, lse, delta), (dq,))
    lone_dtype = accumulation_dtype(q.dtype) if attention.kernel.card.wide else q.dtype
    _circulate(attention, visitor, exchange, payload, visit, home, lone_dtype)
    return dq.result(), dk.result(), dv.result()


@dataclass(frozen=True)
class _Rows:
    """A block of queries and what belongs to them in the backward pass, of which row 0 is row `first` of its shard.

    `out` is as the kernel wants it.
    """

    q: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    out: torch.Tensor | None
    first: int
    dq: Summed


@dataclass(frozen=True)
class _Keys:
    """A block of keys and values, of which row 0 is row `first` of its shard, and where gradients are added."""

    k: torch.Tensor
    v: torch.Tensor
    first: int
    dk: Summed
    dv: Summed


def _rows_without_out(kernel: Kernel, block: Sequence[torch.Tensor], first: int, dq: Summed) -> _Rows:
    """Rows whose output is elsewhere, or does not have the product `delta`."""
    q, dout, lse, delta = block
    out = None
    if kernel.card.wants_out:
        dout, out = project_out(dout, delta)
    return _Rows(q, dout, lse, delta, out, first, dq)


def _add_tiles(attention: Attention, step: Step, rows: _Rows, keys: _Keys) -> None:
    """Adds the gradients of a step's tiles to the sums of its blocks."""
    for tile in step.tiles:
        q_place, k_place = (tile.batch, tile.q, rows.first), (tile.batch, tile.k, keys.first)
        gradients = attention.kernel.backward(
            _cut(rows.dout, *q_place),
            _cut(rows.q, *q_place),
            _cut(keys.k, *k_place),
            _cut(keys.v, *k_place),
            None if rows.out is None else _cut(rows.out, *q_place),
            _cut(rows.lse, *q_place),
            _cut(rows.delta, *q_place),
            _band(tile),
            attention.scores,
        )
        for total, gradient, (batch, (start, stop), first) in zip(
            (rows.dq, keys.dk, keys.dv), gradients, (q_place, k_place, k_place), strict=True
        ):
            total.add(batch, (start - first, stop - first), gradient)


def _circulate(
    attention: Attention,
    visitor: Visitor,
    exchange: Exchange,
    payload: Sequence[torch.Tensor],
    visit: Visit,
    home: Sequence[Summed] = (),
    lone_dtype: torch.dtype | None = None,
) -> None:
    """Runs a schedule: visitors of the next step are under way while this step computes, and so are the gradients of
    the step before on their way home, where they are added to `home`.

    Args:
        attention ([`Attention`]): Whose schedule.
        visitor (`str`): What travels.
        exchange ([`Exchange`]): The messages.
        payload (sequence of `torch.Tensor`): This rank's tensors that visit others.
        visit (`Callable`): What a step does with its visitors.
        home (sequence of [`Summed`]): Where gradients are added that come home; none in the forward pass.
        lone_dtype (`torch.dtype`, *optional*): In which dtype gradients of a single tile travel; others travel in the
            accumulation dtype.
    """
    steps, places = attention.plan.schedule(attention.place, visitor), attention.plan.sharding.ranks
    if places == 1:
        for step in steps:
            visit(step, payload)
        return
    returns = _Returns(attention, exchange, home, lone_dtype)
    most = sum(tensor.nbytes for tensor in payload) // payload[0].shape[1] * attention.plan.sharding.most_tokens
    exchange.publish("visitors", payload, most)
    arriving: Posted | None = None
    for index, step in enumerate(steps):
        if index == 0 and step.distance:
            arriving = _fetch_visitors(attention, exchange, step, payload)
        visitors = arriving.wait() if step.distance and arriving else payload
        following = steps[index + 1] if index + 1 < len(steps) else None
        ahead = following is not None and goes_ahead(step, following, bool(home))
        if following is not None and ahead:
            arriving = _fetch_visitors(attention, exchange, following, payload)
        gradients = visit(step, visitors) if step.tiles else ()
        if home and step.distance:
            returns.send(step, gradients)
        if following is not None and not ahead:
            arriving = _fetch_visitors(attention, exchange, following, payload)
    returns.finish()


def _fetch_visitors(attention: Attention, exchange: Exchange, step: Step, payload: Sequence[torch.Tensor]) -> Posted:
    send, recv = step.send, step.recv
    sends, receives = [], []
    if send:
        sends = [(tensor[:, send.start : send.stop], attention.peers[send.peer]) for tensor in payload]
    if recv:
        tokens = attention.plan.sharding.tokens(recv.peer)
        shapes = tuple(((tensor.shape[0], tokens, *tensor.shape[2:]), tensor.dtype) for tensor in payload)
        peer = attention.peers[recv.peer]
        receives = [Part(peer, shapes, index, recv.start, recv.stop) for index in range(len(payload))]
    return exchange.fetch("visitors", sends, receives, tag=2 * step.distance)


class _Returns:
    """The gradients of visitors on their way home, step by step.

    Args:
        attention, exchange, home, lone_dtype: As in [`_circulate`].
    """

    def __init__(
        self, attention: Attention, exchange: Exchange, home: Sequence[Summed], lone_dtype: torch.dtype | None
    ) -> None:
        self.attention, self.exchange, self.home, self.lone_dtype = attention, exchange, home, lone_dtype
        self.under_way: tuple[Transfer | None, Posted] | None = None
        self.distance = 0

    def send(self, step: Step, gradients: Sequence[torch.Tensor]) -> None:
        """Sends the gradients of a step's visitors home, and adds those of the step before that came home."""
        self._skip_to(step.distance)
        shapes = self._shapes(step.recv) if step.recv else ()
        block = [gradient.to(dtype) for gradient, (_, dtype) in zip(gradients, shapes, strict=True)]
        self._publish(block)
        sends = [(gradient, self.attention.peers[step.recv.peer]) for gradient in block] if step.recv else []
        receives = []
        if step.send:
            expected, peer = self._shapes(step.send), self.attention.peers[step.send.peer]
            receives = [Part(peer, expected, index, 0, step.send.rows) for index in range(len(expected))]
        posted = self.exchange.fetch("gradients", sends, receives, tag=2 * step.distance + 1)
        self._welcome()
        self.under_way = step.send, posted

    def finish(self) -> None:
        """Adds what is still under way."""
        if self.home:
            self._skip_to(self.attention.plan.sharding.ranks)
        self._welcome()

    def _skip_to(self, distance: int) -> None:
        """Publishes nothing in the rounds that this rank leaves out."""
        for _ in range(self.distance + 1, distance):
            self._publish(())
        self.distance = distance

    def _publish(self, block: Sequence[torch.Tensor]) -> None:
        wide = sum(total.row_nbytes for total in self.home)
        self.exchange.publish("gradients", block, wide * self.attention.plan.sharding.most_tokens)

    def _shapes(self, transfer: Transfer) -> tuple[Shape, ...]:
        """What returns from a visit."""
        found = []
        for total in self.home:
            batch, _, *rest = total.shape
            dtype = self.lone_dtype if transfer.lone and self.lone_dtype else accumulation_dtype(total.dtype)
            found.append(((batch, transfer.rows, *rest), dtype))
        return tuple(found)

    def _welcome(self) -> None:
        if self.under_way is None:
            return
        transfer, posted = self.under_way
        gradients = posted.wait()
        if transfer is not None:
            for total, gradient in zip(self.home, gradients, strict=True):
                total.add((0, total.shape[0]), (transfer.start, transfer.stop), gradient)
        self.under_way = None


def _cut(tensor: torch.Tensor, batch: tuple[int, int], rows: tuple[int, int], first: int = 0) -> torch.Tensor:
    """The part of a block, whose row 0 is row `first` of its shard, that a tile names."""
    return tensor[batch[0] : batch[1], rows[0] - first : rows[1] - first]


def _band(tile: Tile) -> Band:
    return Band(tile.low, tile.high, tile.segments)
