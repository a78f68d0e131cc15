"""The loop that executes the schedule of a ring, forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from ..kernels import BackwardInputs, Band, Kernel, OutputBuffers, Scores, project_out
from ..plan import Plan, Step, Tile, Transfer
from ..plan.steps import Rotating, goes_ahead
from .exchange import Exchange, Incoming, Outgoing, Pending, Round, Shape
from .merge import Merged, Summed, accumulation_dtype

# What a step does with its visitors: returns their gradients, empty if nothing goes home, possibly where it is told to.
Visit = Callable[[Step, Sequence[torch.Tensor], OutputBuffers], Sequence[torch.Tensor]]


_BANDS = 1024


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention over a ring: what is the same for its forward and its backward pass, and from layer to layer.

    Args:
        plan ([`Plan`]): What is computed, by which place of the ring.
        place (`int`): This rank's place.
        peers (`tuple[int, ...]`): The rank of the group that stands at each place.
        kernel ([`Kernel`]): What computes a tile.
        scores ([`Scores`]): Scale and soft-capping.
        bands (`dict`): What `band` has made.
    """

    plan: Plan
    place: int
    peers: tuple[int, ...]
    kernel: Kernel
    scores: Scores
    bands: dict[int, tuple[Tile, Band]] = field(default_factory=dict, repr=False)

    def band(self, tile: Tile) -> Band:
        """What a tile of the plan admits, as kernels are told: one object for all calls, which remembers its hash."""
        found = self.bands.get(id(tile))  # whose tile is kept, so that nothing else has its id
        if found is None:
            if len(self.bands) >= _BANDS:
                self.bands.clear()
            found = self.bands[id(tile)] = tile, Band(tile.low, tile.high, tile.segments)
        return found[1]

    @cached_property
    def alone(self) -> bool:
        """Whether one tile covers all rows and columns of this place, which is the only one."""
        if self.plan.sharding.ranks > 1:
            return False
        steps, rows = self.plan.steps(0, "kv"), (0, self.plan.sharding.length)
        tiles = [(tile.batch, tile.q, tile.k) for step in steps for tile in step.tiles]
        return tiles == [((0, len(self.plan.masks)), rows, rows)]


def forward(
    attention: Attention,
    exchange: Exchange,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    into: OutputBuffers | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries over the keys of all ranks. K and V visit.

    Args:
        attention ([`Attention`]): What to compute.
        exchange ([`Exchange`]): The messages.
        q (`torch.Tensor` of shape `(B, n, Hq, D)`): This rank's queries.
        k (`torch.Tensor` of shape `(B, n, Hkv, D)`): This rank's keys.
        v (`torch.Tensor` of shape `(B, n, Hkv, Dv)`): This rank's values.
        sinks (`torch.Tensor` of shape `(Hq,)`, *optional*): A further score of every row, whose value is 0.
        into (sequence of `torch.Tensor`, *optional*): Where `out` and `lse` may be written, if one tile is all.

    Returns:
        `out` of shape `(B, n, Hq, Dv)` in the dtype of q, and `lse` of shape `(B, n, Hq)` in fp32 (fp64 for fp64), in
        memory `(B, Hq, n)`.
    """
    into = into if attention.alone and sinks is None else None
    merged = Merged((*q.shape[:3], v.shape[3]), q.dtype, q.device, sinks)

    def visit(step: Step, visitors: Sequence[torch.Tensor], room: OutputBuffers) -> Sequence[torch.Tensor]:
        keys, values = visitors
        first = step.recv.start if step.recv else 0
        for tile in step.tiles:
            part, part_lse = attention.kernel.forward(
                _cut(q, tile.batch, tile.q),
                _cut(keys, tile.batch, tile.k, first),
                _cut(values, tile.batch, tile.k, first),
                attention.band(tile),
                attention.scores,
                into,
            )
            merged.add(tile.batch, tile.q, part, part_lse)
        return ()

    _circulate(attention, "kv", exchange, (k, v), visit)
    return merged.result()


def backward(
    attention: Attention,
    exchange: Exchange,
    rotating: Rotating,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor,
    delta: torch.Tensor | None,
    into: OutputBuffers | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's q, k and v.

    Args:
        attention ([`Attention`]): As in the forward pass.
        exchange ([`Exchange`]): The messages.
        rotating (`str`): `"kv"`: K and V visit, dK and dV return. `"q"`: Q, dO, lse and delta visit, dQ returns.
        dout (`torch.Tensor` of shape `(B, n, Hq, Dv)`): Gradient of the output.
        q, k, v (`torch.Tensor`): Inputs of the forward pass.
        out (`torch.Tensor` of shape `(B, n, Hq, Dv)`, *optional*): Its output, if `rowsum(dout * out) = delta`.
        lse (`torch.Tensor` of shape `(B, n, Hq)`): Its log-sum-exp.
        delta (`torch.Tensor` of shape `(B, n, Hq)`, *optional*): `rowsum(dout * out)` less the gradient of `lse`; may
            be left out if `out` is there, `rotating` is `"kv"` and the kernel's capabilities say `derives_delta`.
        into (sequence of `torch.Tensor`, *optional*): Where `dq`, `dk` and `dv` may be written, if one tile is all.

    Returns:
        `dq`, `dk` and `dv` in the shapes and dtypes of q, k and v.
    """
    into = into if attention.alone else None
    dq, dk, dv = (Summed(tuple(tensor.shape), tensor.dtype, q.device) for tensor in (q, k, v))
    rows, keys = _Rows(q, dout, lse, delta, out, 0, dq), _Keys(k, v, 0, dk, dv)
    if out is None:
        assert delta is not None, "there is out or delta"
        rows = _rows_without_out(attention.kernel, (q, dout, lse, delta), 0, dq)

    def visit(step: Step, visitors: Sequence[torch.Tensor], room: OutputBuffers) -> Sequence[torch.Tensor]:
        if step.recv is None:
            _add_tiles(attention, step, rows, keys, into)
            return ()
        first, lone = step.recv.start, step.recv.lone
        sums = [Summed(tuple(guest.shape), guest.dtype, q.device) for guest in visitors[: len(home)]]
        if rotating == "kv":
            guests = _Keys(visitors[0], visitors[1], first, sums[0], sums[1])
            _add_tiles(attention, step, rows, guests, (None, *room) if lone else None)
        else:
            guest_rows = _rows_without_out(attention.kernel, visitors, first, sums[0])
            _add_tiles(attention, step, guest_rows, keys, (*room, None, None) if lone else None)
        return [total.only_part if lone else total.wide for total in sums]

    home: tuple[Summed, ...] = (dk, dv)
    payload: tuple[torch.Tensor, ...] = (k, v)
    if rotating == "q" and attention.plan.sharding.ranks > 1:
        assert delta is not None, "delta visits"
        payload, home = (q, dout, lse, delta), (dq,)
    lone_dtype = accumulation_dtype(q.dtype) if attention.kernel.capabilities.wide else q.dtype
    _circulate(attention, rotating, exchange, payload, visit, home, lone_dtype)
    return dq.result(), dk.result(), dv.result()


@dataclass(frozen=True)
class _Rows:
    """A block of queries and what belongs to them in the backward pass, of which row 0 is row `first` of its shard.

    `out` is as the kernel wants it.
    """

    q: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor | None
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
    if kernel.capabilities.wants_out:
        dout, out = project_out(dout, delta)
    return _Rows(q, dout, lse, delta, out, first, dq)


def _add_tiles(attention: Attention, step: Step, rows: _Rows, keys: _Keys, into: OutputBuffers | None = None) -> None:
    """Adds the gradients of a step's tiles to the sums of its blocks; those of a lone tile may be written `into`."""
    for tile in step.tiles:
        q_place, k_place = (tile.batch, tile.q, rows.first), (tile.batch, tile.k, keys.first)
        inputs = BackwardInputs(
            _cut(rows.dout, *q_place),
            _cut(rows.q, *q_place),
            _cut(keys.k, *k_place),
            _cut(keys.v, *k_place),
            None if rows.out is None else _cut(rows.out, *q_place),
            _cut(rows.lse, *q_place),
            None if rows.delta is None else _cut(rows.delta, *q_place),
        )
        gradients = attention.kernel.backward(inputs, attention.band(tile), attention.scores, into)
        for total, gradient, (batch, (start, stop), first) in zip(
            (rows.dq, keys.dk, keys.dv), gradients, (q_place, k_place, k_place), strict=True
        ):
            total.add(batch, (start - first, stop - first), gradient)


def _circulate(
    attention: Attention,
    rotating: Rotating,
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
        rotating (`str`): What travels.
        exchange ([`Exchange`]): The messages.
        payload (sequence of `torch.Tensor`): This rank's tensors that visit others.
        visit (`Callable`): What a step does with its visitors.
        home (sequence of [`Summed`]): Where gradients are added that come home; none in the forward pass.
        lone_dtype (`torch.dtype`, *optional*): In which dtype gradients of a single tile travel; others travel in the
            accumulation dtype.
    """
    if attention.plan.sharding.ranks == 1:
        for step in attention.plan.steps(attention.place, rotating):
            visit(step, payload, ())
        return
    visits = _visits(attention, rotating, tuple((tensor.shape, tensor.dtype) for tensor in payload))
    returns = _Returns(attention, exchange, rotating, home, lone_dtype)
    most = sum(tensor.nbytes for tensor in payload) // payload[0].shape[1] * attention.plan.sharding.most_tokens
    exchange.publish("visitors", payload, most)
    arriving: Pending | None = None
    for index, (step, arrival) in enumerate(visits):
        if index == 0 and step.distance:
            arriving = exchange.fetch("visitors", arrival, payload)
        visitors = arriving.wait() if step.distance and arriving else payload
        following, departure = visits[index + 1] if index + 1 < len(visits) else (None, None)
        ahead = following is not None and goes_ahead(step, following, bool(home))
        if departure is not None and ahead:
            arriving = exchange.fetch("visitors", departure, payload)
        gradients: Sequence[torch.Tensor] = ()
        if step.tiles:
            gradients = visit(step, visitors, returns.room(step) if home and step.distance else ())
        if home and step.distance:
            returns.send(step, gradients)
        if departure is not None and not ahead:
            arriving = exchange.fetch("visitors", departure, payload)
    returns.finish()


@lru_cache(maxsize=128)
def _visits(attention: Attention, rotating: Rotating, shapes: tuple[Shape, ...]) -> list[tuple[Step, Round]]:
    """The steps of a place, and how their visitors come, if what visits has these shapes at home."""
    found = []
    for step in attention.plan.steps(attention.place, rotating):
        given: tuple[Outgoing, ...] = ()
        taken: tuple[Incoming, ...] = ()
        if step.send:
            peer, rows = attention.peers[step.send.peer], (step.send.start, step.send.stop)
            given = tuple(Outgoing(peer, index, *rows) for index in range(len(shapes)))
        if step.recv:
            tokens = attention.plan.sharding.tokens(step.recv.peer)
            theirs = tuple(((shape[0], tokens, *shape[2:]), dtype) for shape, dtype in shapes)
            peer, rows = attention.peers[step.recv.peer], (step.recv.start, step.recv.stop)
            taken = tuple(Incoming(peer, theirs, index, *rows) for index in range(len(shapes)))
        found.append((step, Round(shapes, given, taken, 2 * step.distance)))
    return found


class _Returns:
    """The gradients of visitors on their way home, step by step.

    Args:
        attention, exchange, rotating, home, lone_dtype: As in [`_circulate`].
    """

    def __init__(
        self,
        attention: Attention,
        exchange: Exchange,
        rotating: Rotating,
        home: Sequence[Summed],
        lone_dtype: torch.dtype | None,
    ) -> None:
        self.attention, self.exchange, self.home = attention, exchange, home
        self.under_way: tuple[Transfer | None, Pending] | None = None
        self.following = 1  # the distance whose gradients are published next
        self.most = sum(total.row_nbytes for total in home) * attention.plan.sharding.most_tokens
        shapes = tuple((total.shape, total.dtype) for total in home)
        self.rounds = _returns(attention, rotating, shapes, lone_dtype) if home else {}

    def room(self, step: Step) -> OutputBuffers:
        """Where the gradients of a step may be written."""
        self._skip_to(step.distance)
        shapes = self.rounds[step.distance].shapes
        return self.exchange.room("gradients", shapes, self.most) if shapes else ()

    def send(self, step: Step, gradients: Sequence[torch.Tensor]) -> None:
        """Sends the gradients of a step's visitors home, and adds those of the step before that came home."""
        self._skip_to(step.distance)
        which = self.rounds[step.distance]
        block = [gradient.to(dtype) for gradient, (_, dtype) in zip(gradients, which.shapes, strict=True)]
        self.exchange.publish("gradients", block, self.most)
        self.following = step.distance + 1
        posted = self.exchange.fetch("gradients", which, block)
        self._welcome()
        self.under_way = step.send, posted

    def finish(self) -> None:
        """Adds what is still under way."""
        if self.home:
            self._skip_to(self.attention.plan.sharding.ranks)
        self._welcome()

    def _skip_to(self, distance: int) -> None:
        """Publishes nothing in the rounds that this rank leaves out."""
        while self.following < distance:
            self.exchange.publish("gradients", (), self.most)
            self.following += 1

    def _welcome(self) -> None:
        if self.under_way is None:
            return
        transfer, posted = self.under_way
        gradients = posted.wait()
        if transfer is not None:
            for total, gradient in zip(self.home, gradients, strict=True):
                total.add((0, total.shape[0]), (transfer.start, transfer.stop), gradient)
        self.under_way = None


@lru_cache(maxsize=128)
def _returns(
    attention: Attention, rotating: Rotating, shapes: tuple[Shape, ...], lone_dtype: torch.dtype | None
) -> dict[int, Round]:
    """How the gradients of each distance go home, if those of a whole shard have these shapes and dtypes."""

    def returned(transfer: Transfer) -> tuple[Shape, ...]:
        found = []
        for (batch, _, *rest), dtype in shapes:
            wide = lone_dtype if transfer.lone and lone_dtype else accumulation_dtype(dtype)
            found.append(((batch, transfer.rows, *rest), wide))
        return tuple(found)

    rounds = {}
    for step in attention.plan.steps(attention.place, rotating):
        given: tuple[Outgoing, ...] = ()
        taken: tuple[Incoming, ...] = ()
        own = returned(step.recv) if step.recv else ()
        if step.recv:
            peer = attention.peers[step.recv.peer]
            given = tuple(Outgoing(peer, index, 0, step.recv.rows) for index in range(len(own)))
        if step.send:
            theirs, peer = returned(step.send), attention.peers[step.send.peer]
            taken = tuple(Incoming(peer, theirs, index, 0, step.send.rows) for index in range(len(theirs)))
        rounds[step.distance] = Round(own, given, taken, 2 * step.distance + 1)
    return rounds


def _cut(tensor: torch.Tensor, batch: tuple[int, int], rows: tuple[int, int], first: int = 0) -> torch.Tensor:
    """The part of a block, whose row 0 is row `first` of its shard, that a tile names."""
    if batch == (0, tensor.shape[0]) and rows == (first, first + tensor.shape[1]):
        return tensor
    return tensor[batch[0] : batch[1], rows[0] - first : rows[1] - first]
