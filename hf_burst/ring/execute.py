"""The loop that executes any schedule, forward and backward. The only code that communicates inside of attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..kernels import Band, Kernel, Scores, project_out
from ..plan import Plan, Step, Tile, Transfer
from ..plan.schedule import Visitor, goes_ahead
from .exchange import Exchange, Expected, Posted
from .merge import accumulation_dtype, merge_

# What a step does with its visitors: returns their gradients, empty if nothing goes home.
Visit = Callable[[Step, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Attention:
    """One attention over a group: what is the same for its forward and its backward pass.

    Args:
        plan ([`Plan`]): What is computed, by whom.
        rank (`int`): This rank of the group.
        kernel ([`Kernel`]): What computes a tile.
        scores ([`Scores`]): Scale and soft-capping.
    """

    plan: Plan
    rank: int
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
        `out` of shape `(B, n, Hq, Dv)` in the dtype of q, and `lse` of shape `(B, n, Hq)` in fp32 (fp64 for fp64).
    """
    wide = accumulation_dtype(q.dtype)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
    if sinks is None:
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    else:  # what is merged first
        lse = sinks.to(wide).expand(q.shape[:3]).clone()

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
            merge_(_cut(out, tile.batch, tile.q), _cut(lse, tile.batch, tile.q), part, part_lse)
        return ()

    _circulate(attention.plan.schedule(attention.rank, "kv"), exchange, (k, v), visit)
    return out.to(q.dtype), lse


def backward(
    attention: Attention,
    exchange: Exchange,
    visitor: Visitor,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's q, k and v.

    Args:
        attention ([`Attention`]): As in the forward pass.
        exchange ([`Exchange`]): The messages.
        visitor (`str`): `"kv"`: K and V visit, dK and dV return. `"q"`: Q, dO, lse and delta visit, dQ returns.
        dout (`torch.Tensor` of shape `(B, n, Hq, Dv)`): Gradient of `out`.
        q, k, v, out, lse (`torch.Tensor`): Inputs and results of the forward pass.
        dlse (`torch.Tensor` of shape `(B, n, Hq)`, *optional*): Gradient of `lse`.

    Returns:
        `dq`, `dk` and `dv` in the shapes and dtypes of q, k and v.
    """
    wide = accumulation_dtype(q.dtype)
    delta = (dout.to(wide) * out.to(wide)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=wide, device=q.device) for tensor in (q, k, v))
    rows, keys = _Rows(q, dout, lse, delta, out, 0, dq), _Keys(k, v, 0, dk, dv)
    if dlse is not None:
        rows = _rows_without_out(attention.kernel, (q, dout, lse, delta), 0, dq)

    def visit(step: Step, visitors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if step.recv is None:
            _add_tiles(attention, step, rows, keys)
            return ()
        first, lone = step.recv.start, step.recv.lone
        sums = [
            None if lone else torch.zeros(guest.shape, dtype=wide, device=q.device) for guest in visitors[: len(home)]
        ]
        if visitor == "kv":
            guest_keys = _Keys(visitors[0], visitors[1], first, sums[0], sums[1])
            found = _add_tiles(attention, step, rows, guest_keys)[1:]
        else:
            guest_rows = _rows_without_out(attention.kernel, visitors, first, sums[0])
            found = _add_tiles(attention, step, guest_rows, keys)[:1]
        return [gradient if total is None else total for gradient, total in zip(found, sums, strict=True)]

    payload, home = ((k, v), (dk, dv)) if visitor == "kv" else ((q, dout, lse, delta), (dq,))
    lone_dtype = wide if attention.kernel.card.wide else q.dtype
    _circulate(attention.plan.schedule(attention.rank, visitor), exchange, payload, visit, home, lone_dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@dataclass(frozen=True)
class _Rows:
    """A block of queries and what belongs to them in the backward pass, of which row 0 is row `first` of its shard.

    `out` is as the kernel wants it; gradients are added to `dq`, or nowhere for `None`.
    """

    q: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    out: torch.Tensor | None
    first: int
    dq: torch.Tensor | None


@dataclass(frozen=True)
class _Keys:
    """A block of keys and values, of which row 0 is row `first` of its shard, and where gradients are added."""

    k: torch.Tensor
    v: torch.Tensor
    first: int
    dk: torch.Tensor | None
    dv: torch.Tensor | None


def _rows_without_out(kernel: Kernel, block: Sequence[torch.Tensor], first: int, dq: torch.Tensor | None) -> _Rows:
    """Rows whose output is elsewhere, or does not have the product `delta`."""
    q, dout, lse, delta = block
    out = None
    if kernel.card.wants_out:
        dout, out = project_out(dout, delta)
    return _Rows(q, dout, lse, delta, out, first, dq)


def _add_tiles(attention: Attention, step: Step, rows: _Rows, keys: _Keys) -> Sequence[torch.Tensor]:
    """Adds the gradients of a step's tiles to the sums of its blocks; returns those of the last tile."""
    gradients: Sequence[torch.Tensor] = ()
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
        for total, gradient, place in zip(
            (rows.dq, keys.dk, keys.dv), gradients, (q_place, k_place, k_place), strict=True
        ):
            if total is not None:
                _cut(total, *place).add_(gradient)
    return gradients


def _circulate(
    steps: Sequence[Step],
    exchange: Exchange,
    payload: Sequence[torch.Tensor],
    visit: Visit,
    home: Sequence[torch.Tensor] = (),
    lone_dtype: torch.dtype | None = None,
) -> None:
    """Runs a schedule: visitors of the next step are under way while this step computes, and so are the gradients of
    the step before on their way home, where they are added to `home`.

    Args:
        steps (sequence of [`Step`]): The schedule of this rank.
        exchange ([`Exchange`]): The messages.
        payload (sequence of `torch.Tensor`): This rank's tensors that visit others.
        visit (`Callable`): What a step does with its visitors.
        home (sequence of `torch.Tensor`): Where gradients are added that come home; none in the forward pass.
        lone_dtype (`torch.dtype`, *optional*): In which dtype gradients of a single tile travel; others travel in that
            of `home`.
    """
    returning: tuple[Transfer | None, Posted] | None = None
    arriving = _post_visitors(exchange, steps[0], payload)
    for index, step in enumerate(steps):
        visitors = arriving.wait() if step.distance else payload
        following = steps[index + 1] if index + 1 < len(steps) else None
        ahead = following is not None and goes_ahead(step, following, bool(home))
        if following is not None and ahead:
            arriving = _post_visitors(exchange, following, payload)
        gradients = visit(step, visitors) if step.tiles else ()
        if home and step.distance:
            posted = _post_gradients(exchange, step, gradients, home, lone_dtype)
            _welcome(returning, home)
            returning = (step.send, posted)
        if following is not None and not ahead:
            arriving = _post_visitors(exchange, following, payload)
    _welcome(returning, home)


def _post_visitors(exchange: Exchange, step: Step, payload: Sequence[torch.Tensor]) -> Posted:
    send, recv = step.send, step.recv
    sends = [(tensor[:, send.start : send.stop], send.peer) for tensor in payload] if send else []
    expected = [_expected(tensor, recv, tensor.dtype) for tensor in payload] if recv else []
    return exchange.post(sends, expected, tag=2 * step.distance)


def _post_gradients(
    exchange: Exchange,
    step: Step,
    gradients: Sequence[torch.Tensor],
    home: Sequence[torch.Tensor],
    lone_dtype: torch.dtype | None,
) -> Posted:
    """Sends the gradients of the visitors home, and expects those of the rows that this rank sent out."""

    def travelling(transfer: Transfer, total: torch.Tensor) -> torch.dtype:
        return lone_dtype if transfer.lone and lone_dtype else total.dtype

    send, recv = step.send, step.recv
    sends, expected = [], []
    if recv:
        sends = [
            (gradient.to(travelling(recv, total)), recv.peer) for gradient, total in zip(gradients, home, strict=True)
        ]
    if send:
        expected = [_expected(total, send, travelling(send, total)) for total in home]
    return exchange.post(sends, expected, tag=2 * step.distance + 1)


def _expected(like: torch.Tensor, transfer: Transfer, dtype: torch.dtype) -> Expected:
    return Expected((like.shape[0], transfer.rows, *like.shape[2:]), dtype, transfer.peer)


def _welcome(returning: tuple[Transfer | None, Posted] | None, home: Sequence[torch.Tensor]) -> None:
    """Adds the gradients that came home."""
    if returning is None:
        return
    transfer, posted = returning
    gradients = posted.wait()
    if transfer is not None:
        for total, gradient in zip(home, gradients, strict=True):
            total[:, transfer.start : transfer.stop].add_(gradient)


def _cut(tensor: torch.Tensor, batch: tuple[int, int], rows: tuple[int, int], first: int = 0) -> torch.Tensor:
    """The part of a block, whose row 0 is row `first` of its shard, that a tile names."""
    return tensor[batch[0] : batch[1], rows[0] - first : rows[1] - first]


def _band(tile: Tile) -> Band:
    return Band(tile.low, tile.high, tile.segments)
