"""Heads exchanged for tokens (DeepSpeed Ulysses, arXiv 2309.14509): before attention every rank gives its tokens of
most heads away and gets the tokens of neighbouring ranks for its own heads; afterwards results go back.

The heads go in slices, so that the next slice is on its way while one is computed.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from ..plan import Sharding
from .exchange import Exchange, Part, Posted, Shape


class Mates:
    """The ranks that exchange heads, and where their tokens lie in the shard that they have together.

    Args:
        sharding ([`Sharding`]): Who of the whole group holds what.
        together ([`Sharding`]): What the places of the ring hold.
        rank (`int`): This rank of the group.
        ulysses (`int`): How many ranks exchange heads.
    """

    def __init__(self, sharding: Sharding, together: Sharding, rank: int, ulysses: int) -> None:
        self.place, self.member = divmod(rank, ulysses)
        self.ranks = tuple(range(self.place * ulysses, (self.place + 1) * ulysses))
        shared = together.runs(self.place)
        # for each mate: where its rows go, from which row on, how many
        self.spans: list[list[tuple[int, int, int]]] = []
        for mate in self.ranks:
            spans = []
            for run in sharding.runs(mate):
                home = next(whole for whole in shared if whole.start <= run.start < whole.stop)
                spans.append((home.local + run.start - home.start, run.local, run.size))
            self.spans.append(spans)
        self.tokens = together.tokens(self.place)

    @property
    def own(self) -> list[tuple[int, int, int]]:
        """The spans of this rank."""
        return self.spans[self.member]


class HeadsIn:
    """Tensors on their way from a rank's tokens of all heads to all tokens of a rank's heads.

    Args:
        exchange ([`Exchange`]): The messages.
        mates ([`Mates`]): Who exchanges.
        groups (sequence of sequences of `torch.Tensor` of shape `(B, n, H, D)`): What is exchanged; tensors of a group
            have one dtype and travel together.
        slices (`int`): Into how many slices the heads of a rank are cut.
    """

    def __init__(self, exchange: Exchange, mates: Mates, groups: Sequence[Sequence[torch.Tensor]], slices: int) -> None:
        self.exchange, self.mates, self.slices = exchange, mates, slices
        self.batch, self.rows = groups[0][0].shape[:2]
        self.pieces = len(mates.ranks) * slices  # a piece is what one rank gets in one slice
        self.sizes = [[(t.shape[2] // self.pieces, t.shape[3]) for t in group] for group in groups]
        widths = [sum(heads * dim for heads, dim in sizes) for sizes in self.sizes]
        self.shapes: tuple[Shape, ...] = tuple(
            ((self.pieces * self.batch, self.rows, width), group[0].dtype)
            for width, group in zip(widths, groups, strict=True)
        )
        self.packed = exchange.room("heads in", self.shapes)
        for packed, group, sizes in zip(self.packed, groups, self.sizes, strict=True):
            ahead = 0
            for tensor, (heads, dim) in zip(group, sizes, strict=True):
                # (slice, mate, B, n, ...) from heads in the order (mate, slice, ...)
                source = tensor.unflatten(2, (len(mates.ranks), slices, heads)).permute(3, 2, 0, 1, 4, 5)
                width = heads * dim
                place = packed[..., ahead : ahead + width].unflatten(2, (heads, dim))
                place.unflatten(0, (slices, len(mates.ranks), self.batch)).copy_(source)
                ahead += width
        exchange.publish("heads in", self.packed, sum(tensor.nbytes for tensor in self.packed))

    def fetch(self, index: int) -> "Arriving":
        """Starts to fetch a slice."""
        mates, sends, receives = self.mates, [], []
        landing = [
            torch.empty(self.batch, mates.tokens, shape[2], dtype=dtype, device=packed.device)
            for packed, (shape, dtype) in zip(self.packed, self.shapes, strict=True)
        ]
        into = []
        for mate, rank in enumerate(mates.ranks):
            given, wanted = self._piece(index, mate), self._piece(index, mates.member)
            for which, packed in enumerate(self.packed):
                if mate == mates.member:
                    for there, here, size in mates.own:
                        source = packed[slice(*wanted), here : here + size]
                        landing[which][:, there : there + size].copy_(source)
                    continue
                sends += [(packed[slice(*given), here : here + size], rank) for _, here, size in mates.own]
                for there, here, size in mates.spans[mate]:
                    receives.append(Part(rank, self.shapes, which, here, here + size, wanted))
                    into.append(landing[which][:, there : there + size])
        posted = self.exchange.fetch("heads in", sends, receives, tag=2 * index, into=into)
        return Arriving(posted, landing, self.sizes)

    def _piece(self, index: int, mate: int) -> tuple[int, int]:
        first = (index * len(self.mates.ranks) + mate) * self.batch
        return first, first + self.batch


class Arriving:
    """A slice under way.

    Args:
        posted ([`Posted`]): Its messages.
        landing (sequence of `torch.Tensor` of shape `(B, N, width)`): Where each group lands.
        sizes (sequence): Heads and head size of every tensor of every group.
    """

    def __init__(
        self, posted: Posted, landing: Sequence[torch.Tensor], sizes: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        self.posted, self.landing, self.sizes = posted, landing, sizes

    def wait(self) -> list[torch.Tensor]:
        """All tensors of all groups, `(B, N, H / ranks / slices, D)`, views of `landing`."""
        self.posted.wait()
        return [
            tensor for landed, sizes in zip(self.landing, self.sizes, strict=True) for tensor in unpack(landed, sizes)
        ]


def unpack(packed: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The tensors of `(heads, dim)` that lie side by side in the last dimension."""
    ends = [0]
    for heads, dim in sizes:
        ends.append(ends[-1] + heads * dim)
    return [packed[..., a:b].unflatten(2, size) for (a, b), size in zip(pairwise(ends), sizes, strict=True)]


class HeadsOut:
    """Results on their way back, slice by slice.

    Args:
        exchange ([`Exchange`]): The messages.
        mates ([`Mates`]): Who exchanges.
        results (sequence of `torch.Tensor` of shape `(B, n, H, D)`): Where results go, of any strides.
        slices (`int`): Into how many slices the heads of a rank are cut.
    """

    def __init__(self, exchange: Exchange, mates: Mates, results: Sequence[torch.Tensor], slices: int) -> None:
        self.exchange, self.mates, self.results, self.slices = exchange, mates, results, slices
        self.under_way: tuple[int, Posted, list[torch.Tensor]] | None = None

    def send(self, index: int, tensors: Sequence[torch.Tensor]) -> None:
        """Sends the results of a slice, each of shape `(B, N, H / ranks / slices, D)`, and puts those of the slice
        before in place."""
        mates = self.mates
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        self.exchange.publish("heads out", tensors, sum(tensor.nbytes for tensor in tensors))
        landing = [
            tensor.new_empty(len(mates.ranks), tensor.shape[0], result.shape[1], *tensor.shape[2:])
            for tensor, result in zip(tensors, self.results, strict=True)
        ]
        sends, receives, into = [], [], []
        for mate, rank in enumerate(mates.ranks):
            for which, tensor in enumerate(tensors):
                if mate == mates.member:
                    for there, here, size in mates.own:
                        landing[which][mate][:, here : here + size].copy_(tensor[:, there : there + size])
                    continue
                sends += [(tensor[:, there : there + size], rank) for there, _, size in mates.spans[mate]]
                for there, here, size in mates.own:
                    receives.append(Part(rank, shapes, which, there, there + size))
                    into.append(landing[which][mate][:, here : here + size])
        posted = self.exchange.fetch("heads out", sends, receives, tag=2 * index + 1, into=into)
        self.finish()
        self.under_way = index, posted, landing

    def finish(self) -> None:
        """Puts in place what is still under way."""
        if self.under_way is None:
            return
        index, posted, landing = self.under_way
        posted.wait()
        for result, landed in zip(self.results, landing, strict=True):
            heads = landed.shape[3]
            place = result.unflatten(2, (len(self.mates.ranks), self.slices, heads))[:, :, :, index]
            place.copy_(landed.permute(1, 2, 0, 3, 4))
        self.under_way = None
