"""A route: heads over neighbouring ranks, the sequence over the rest, and what happens between these."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from ..config import Schedule
from ..errors import ConfigError
from ..kernels import Kernel, OutputBuffers, Scores
from ..mesh import ContextGroup
from ..plan import Mask, Sharding, head_slices, make_plan
from ..plan.steps import Rotating
from .exchange import Exchange, PeerToPeer, Pending
from .gather import gather_backward, gather_forward
from .loop import Attention, backward, forward
from .merge import accumulation_dtype, by_head, heads_first
from .symmetric import Symmetric, SymmetricPool, open_pool
from .ulysses import HeadsIn, HeadsOut, UlyssesRanks, ulysses_ranks_of


class HeadSizes(NamedTuple):
    """Heads of an attention, and their sizes."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    def shapes(self, batch: int, tokens: int) -> list[tuple[int, int, int, int]]:
        """The shapes of q, k and v."""
        return [
            (batch, tokens, heads, dim)
            for heads, dim in (
                (self.q_heads, self.head_dim),
                (self.kv_heads, self.head_dim),
                (self.kv_heads, self.value_dim),
            )
        ]

    def piece(self, pieces: int) -> list[tuple[int, int]]:
        """Heads and head sizes of q, k and v when the heads are cut into pieces."""
        return [(heads // pieces, dim) for _, _, heads, dim in self.shapes(0, 0)]


def kept_shapes(
    route: Schedule, ranks: int, batch: int, tokens: int, sizes: HeadSizes, device: torch.device
) -> list[tuple[int, int, int]]:
    """What the forward pass of a route keeps instead of q, k and v, if it does."""
    if route.ulysses == 1:
        return []
    slices = head_slices(
        route, ranks, (sizes.q_heads, sizes.kv_heads), int(tokens), 2048 if device.type == "cuda" else 0
    )
    width = sum(heads * dim for heads, dim in sizes.piece(route.ulysses * slices))
    return [(batch, tokens * route.ulysses, width)] * slices


def unpack(packed: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The tensors of `(heads, dim)` that lie side by side in the last dimension."""
    ends = [0]
    for heads, dim in sizes:
        ends.append(ends[-1] + heads * dim)
    return [packed[..., a:b].unflatten(2, size) for (a, b), size in zip(pairwise(ends), sizes, strict=True)]


@dataclass(frozen=True, eq=False)
class ShardedAttention:
    """One attention over a group; one object for all layers, which remembers what follows from its arguments.

    Args:
        route ([`Schedule`]): How it is spread.
        group ([`ContextGroup`]): Over which ranks.
        masks (`tuple[Mask, ...]`): One mask for every row of the batch.
        sharding ([`Sharding`]): Who holds what.
        kernel ([`Kernel`]): What computes a tile.
        scores ([`Scores`]): Scale and soft-capping.
    """

    route: Schedule
    group: ContextGroup
    masks: tuple[Mask, ...]
    sharding: Sharding
    kernel: Kernel
    scores: Scores

    def forward(
        self,
        exchange: Exchange,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Attention of this rank's queries over the keys of all ranks.

        Args:
            exchange ([`Exchange`]): The messages.
            q (`torch.Tensor` of shape `(B, n, Hq, D)`): This rank's queries.
            k (`torch.Tensor` of shape `(B, n, Hkv, D)`): This rank's keys.
            v (`torch.Tensor` of shape `(B, n, Hkv, Dv)`): This rank's values.
            sinks (`torch.Tensor` of shape `(Hq,)`, *optional*): A further score of every row, whose value is 0.

        Returns:
            `out` of shape `(B, n, Hq, Dv)`, `lse` of shape `(B, n, Hq)`, and what the backward pass wants instead of
            q, k and v: nothing, or all of this rank's heads, a slice each.
        """
        if self.route.ulysses == 1:
            return *self._forward(exchange, q, k, v, sinks), []
        kept, some, under_way = self._fetch(exchange, q, k, v, waits=True)
        mates, slices = self._mates, len(kept)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = heads_first(tuple(q.shape[:3]), accumulation_dtype(q.dtype), q.device)
        leaving = HeadsOut(exchange, mates, (out, lse.unsqueeze(3)), slices)
        own_sinks = None if sinks is None else sinks.chunk(self.route.ulysses)[mates.member].chunk(slices)
        for index, (posted, (own_q, own_k, own_v)) in enumerate(zip(under_way, some, strict=True)):
            posted.wait()
            given_sinks = None if own_sinks is None else own_sinks[index]
            rows = (*own_q.shape[:3],)
            place, lse_place = leaving.room((((*rows, v.shape[3]), q.dtype), ((*rows, 1), lse.dtype)))
            into = (place, None if lse_place is None else lse_place.squeeze(3))
            part, part_lse = self._forward(exchange, own_q, own_k, own_v, given_sinks, into)
            leaving.send(index, (part, part_lse.unsqueeze(3)))
        leaving.finish()
        return out, lse, kept

    def exchanged(self, exchange: Exchange, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """What [`ShardedAttention.forward`] keeps instead of q, k and v where heads are exchanged, without the attention.
        It may be under way until the next pass begins."""
        kept, _, under_way = self._fetch(exchange, q, k, v, waits=False)
        for posted in under_way:
            exchange.leave(posted)
        return kept

    def _fetch(
        self, exchange: Exchange, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, waits: bool
    ) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[Pending]]:
        """This rank's heads of all mates on their way: where they come to lie, slice by slice, as q, k and v. `waits`
        says that the first slice is waited for. Where nothing is, products of matrices run beside the copies, which
        many multiprocessors held for a short time disturb less than some for a long time."""
        sizes = HeadSizes(q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        shapes = kept_shapes(self.route, self.group.size, q.shape[0], q.shape[1], sizes, q.device)
        kept = [q.new_empty(shape) for shape in shapes]
        if waits:
            _go_inline(exchange, len(kept), self.route.ulysses == self.group.size)
        arriving = HeadsIn(exchange, self._mates, (q, k, v), len(kept))
        some = [unpack(packed, sizes.piece(self.route.ulysses * len(kept))) for packed in kept]
        return kept, some, [arriving.fetch(index, own, behind=waits and index > 0) for index, own in enumerate(some)]

    def backward(
        self,
        exchange: Exchange,
        sizes: HeadSizes,
        dout: torch.Tensor,
        inputs: list[torch.Tensor],
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of this rank's q, k and v.

        Args:
            exchange ([`Exchange`]): The messages.
            sizes ([`HeadSizes`]): Of the forward pass.
            dout (`torch.Tensor` of shape `(B, n, Hq, Dv)`): Gradient of `out`.
            inputs (`list[torch.Tensor]`): What the forward pass kept, or q, k and v if it kept nothing.
            out (`torch.Tensor`, *optional*): Its output, if `rowsum(dout * out) = delta`.
            lse (`torch.Tensor` of shape `(B, n, Hq)`): Its log-sum-exp.
            delta (`torch.Tensor` of shape `(B, n, Hq)`, *optional*): `rowsum(dout * out)` less the gradient of `lse`;
                may be left out beside `out` unless `sends_delta`.
        """
        if self.route.ulysses == 1:
            q, k, v = inputs
            return self._backward(exchange, dout, q, k, v, out, lse, delta)
        assert delta is not None, "delta is sent"
        mates, slices, (lse, delta) = self._mates, len(inputs), (by_head(tensor) for tensor in (lse, delta))
        _go_inline(exchange, slices, self.route.ulysses == self.group.size)
        batch, tokens = dout.shape[:2]
        arriving = HeadsIn(exchange, mates, (dout, lse.unsqueeze(3), delta.unsqueeze(3)), slices)
        dq, dk, dv = (dout.new_empty(shape) for shape in sizes.shapes(batch, tokens))
        leaving = HeadsOut(exchange, mates, (dq, dk, dv), slices)
        pieces = self.route.ulysses * slices
        heads = sizes.q_heads // pieces

        def fetch(index: int) -> tuple[Pending, torch.Tensor, list[torch.Tensor]]:
            own_dout = dout.new_empty(batch, mates.tokens, heads, sizes.value_dim)
            scalars = [heads_first((batch, mates.tokens, heads), lse.dtype, dout.device) for _ in range(2)]
            posted = arriving.fetch(index, (own_dout, *(tensor.unsqueeze(3) for tensor in scalars)), index > 0)
            return posted, own_dout, scalars

        under_way = [fetch(index) for index in range(slices)]
        for index, ((posted, own_dout, (own_lse, own_delta)), packed) in enumerate(zip(under_way, inputs, strict=True)):
            posted.wait()
            q, k, v = unpack(packed, sizes.piece(pieces))
            into = leaving.room([(tensor.shape, dout.dtype) for tensor in (q, k, v)])
            found = self._backward(exchange, own_dout, q, k, v, None, own_lse, own_delta, into)
            leaving.send(index, found)
        leaving.finish()
        return dq, dk, dv

    @property
    def sends_delta(self) -> bool:
        """Whether the backward pass needs delta even where it is given the output."""
        others = self.group.size > 1 and (self.route.ulysses > 1 or self.route.ring == "burst")
        return others or not self.kernel.capabilities.derives_delta

    def _forward(
        self,
        exchange: Exchange,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        into: OutputBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._gathers:
            return gather_forward(self._ring, exchange, q, k, v, sinks)
        return forward(self._ring, exchange, q, k, v, sinks, into)

    def _backward(
        self,
        exchange: Exchange,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        into: OutputBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._gathers:
            return gather_backward(self._ring, exchange, dout, q, k, v, out, lse, delta)
        rotating: Rotating = "q" if self.route.ring == "burst" else "kv"
        return backward(self._ring, exchange, rotating, dout, q, k, v, out, lse, delta, into)

    @property
    def _gathers(self) -> bool:
        return self.route.ring == "all_gather" and self.group.size > self.route.ulysses

    @cached_property
    def _ring(self) -> Attention:
        """What a place of the ring does."""
        places, ulysses = self.group.size // self.route.ulysses, self.route.ulysses
        place, member = divmod(self.group.rank, ulysses)
        plan = make_plan(self.masks, self.sharding.joined(ulysses))
        peers = tuple(other * ulysses + member for other in range(places))
        return Attention(plan, place, peers, self.kernel, self.scores)

    @cached_property
    def _mates(self) -> UlyssesRanks:
        return ulysses_ranks_of(
            self.sharding, self.sharding.joined(self.route.ulysses), self.group.rank, self.route.ulysses
        )


def _go_inline(exchange: Exchange, slices: int, alone: bool) -> None:
    """Where nothing is computed meanwhile (one slice, and no ring besides), copies need no stream of their own."""
    if slices == 1 and alone and isinstance(exchange, Symmetric):
        exchange.go_inline()


def open_exchange(transport: str, group: ContextGroup, device: torch.device) -> Exchange:
    """The messages of one pass, by a transport of [`BurstConfig`].

    Raises:
        ConfigError: If the ranks cannot read each other's memory although that was asked for, or the caller records a
            CUDA graph, in which what the ranks publish would not take its turn.
    """
    if group.size == 1 or transport == "p2p" or (transport == "auto" and device.type != "cuda"):
        return PeerToPeer(group, device)
    pool = open_pool(group, device)
    if isinstance(pool, SymmetricPool):
        if pool.failed:
            raise ConfigError(
                f"An attention over these ranks ended in the middle ({pool.failed}), so that they no longer agree on "
                "what was sent. Start the job anew, with smaller batches if memory was short."
            )
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "Attention over ranks cannot be part of a CUDA graph of yours while ranks read each other's memory. "
                "Set BurstConfig(transport='p2p'), or leave it out of the graph."
            )
        pool.settle()
        return Symmetric(pool)
    if transport == "symmetric":
        raise ConfigError(
            f"BurstConfig(transport='symmetric') cannot be had: {pool}. Take 'auto', which falls back to 'p2p'."
        )
    return PeerToPeer(group, device)
