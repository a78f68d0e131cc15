"""Where a batch is cut for a model with recurrent layers. Attention wants even work; states want few runs of
tokens, which begin where documents begin. Each cut is priced for the whole model, and the cheapest is taken."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..config import Chunking, Schedule
from .balance import assign
from .choose import choose
from .cost import estimate
from .machine import Machine
from .mask import Mask, MaskPattern
from .recurrence import Recurrence, RecurrenceChoice, RecurrentSize, choose_recurrence
from .segments import Segments
from .sharding import Sharding, cut, pattern
from .traffic import Shapes
from .work import Layer, pairs_of_chunks

_SHARES = (math.inf, 1.0, 0.5)  # of a rank's tokens, above which a document is dealt out over all ranks
_BUNDLES = 8  # parts of a rank's tokens, up to which short documents are dealt out together
_MOST_RUNS = 24  # of a rank


@dataclass(frozen=True)
class Hybrid:
    """A model with recurrent layers, as its batches are cut for it.

    Args:
        recurrent (`tuple[RecurrentSize, ...]`): Its recurrent layers.
        shapes ([`Shapes`], *optional*): Heads of its attention; `None` if it has none.
        machine ([`Machine`]): On what it runs; equal on all ranks.
        recurrence (`str`, defaults to `"auto"`): The way that recurrent layers take, `"states"` or `"heads"`; chosen by
            default.
        schedule (`str`, defaults to `"auto"`): As in [`BurstConfig`].
    """

    recurrent: tuple[RecurrentSize, ...]
    shapes: Shapes | None
    machine: Machine
    recurrence: Recurrence = "auto"
    schedule: str = "auto"


@dataclass(frozen=True)
class Cut:
    """A cut of a batch, and the predicted seconds of all layers with one, forward and backward.

    Args:
        chunking (`str`): Its name, as in [`BurstConfig`].
        sharding ([`Sharding`]): Which rank holds what.
        attention_s (`float`): Seconds of attention.
        recurrence ([`RecurrenceChoice`]): How recurrent layers pass what they know, and their seconds.
        most_slots (`int`): States that the rank with the most of them hands on.
    """

    chunking: Chunking
    sharding: Sharding
    attention_s: float
    recurrence: RecurrenceChoice
    most_slots: int

    @property
    def total_s(self) -> float:
        """Seconds of both."""
        return self.attention_s + self.recurrence.seconds


Batch = tuple[tuple[int, ...], ...]  # cumulative boundaries of the documents of each row
Patterns = tuple[tuple[MaskPattern, int], ...]  # how many layers see how far


def cuts(documents: Batch, patterns: Patterns, ranks: int, hybrid: Hybrid, stretches: int = 1) -> list[Cut]:
    """The cuts that a model may take, with their prices: contiguous, zigzag, balanced for attention, and by documents.

    Args:
        documents (`tuple[tuple[int, ...], ...]`): Cumulative boundaries for each row, all of one length, of which the
            ranks and the chunks of every cut are divisors, see [`chunks_per_rank`].
        patterns (`tuple[tuple[MaskPattern, int], ...]`): How many layers see how far; empty without attention.
        ranks (`int`): Ranks of the group.
        hybrid ([`Hybrid`]): The model.
        stretches (`int`, defaults to 1): Equal parts of the sequence, each of which is dealt out by itself.
    """
    length, layers = documents[0][-1], dict(patterns)
    shardings: dict[Sharding, Chunking] = {}
    for name in ("contiguous", "zigzag"):
        owners = pattern(ranks, name) * stretches
        if length >= len(owners):
            shardings.setdefault(cut(length, owners), name)
    if layers:
        masks, weights = _masks(documents, layers)
        shardings.setdefault(cut(length, assign(masks, ranks, "balanced", weights, stretches)), "balanced")
    for sharding in by_documents(documents, layers, ranks) if stretches == 1 else ():
        shardings.setdefault(sharding, "documents")
    return [_priced(name, sharding, documents, layers, hybrid) for sharding, name in shardings.items()]


@lru_cache(maxsize=64)
def cheapest_cut(documents: Batch, patterns: Patterns, ranks: int, hybrid: Hybrid, stretches: int = 1) -> Cut:
    """The cut that takes the layers of a model the least time; the first of equals. Arguments as in [`cuts`]."""
    return min(cuts(documents, patterns, ranks, hybrid, stretches), key=lambda priced: priced.total_s)


def by_documents(documents: Batch, layers: Mapping[MaskPattern, int], ranks: int) -> list[Sharding]:
    """Cuts in which documents stay whole as far as every rank holds as many tokens.

    Documents longer than a share of a rank's tokens lie over all ranks, two pieces a rank as in `"zigzag"`. The others
    are dealt out by their work, short neighbours together, and over as few ranks as hold them. Those for which there is
    no room fill the ranks up.

    Args:
        documents (`tuple[tuple[int, ...], ...]`): As in [`cuts`]. Those count that all rows have in common.
        layers (mapping from [`MaskPattern`] to `int`): How many layers see how far, for the work.
        ranks (`int`): Ranks of the group.

    Returns:
        One cut for each share; none where a rank would have too many runs, or the ranks do not divide the tokens.
    """
    if documents[0][-1] % ranks:
        return []
    bounds = sorted(set.intersection(*map(set, documents)) | {0})
    shardings = []
    for share in _SHARES:
        pieces = _Pieces(bounds, ranks, share)
        if pieces.fits:
            bundles = pieces.bundles()
            edges = sorted({0, bounds[-1], *(edge for bundle in bundles for edge in bundle)})
            work = _work(documents, layers, edges)
            pieces.deal(bundles, [work[bisect_left(edges, start)] for start, _ in bundles])
            sharding = pieces.sharding()
            if max(len(sharding.runs(rank)) for rank in range(ranks)) <= _MOST_RUNS:
                shardings.append(sharding)
    return list(dict.fromkeys(shardings))


def sharding_for(
    documents: Batch,
    layers: Mapping[MaskPattern, int],
    ranks: int,
    chunking: Chunking,
    stretches: int = 1,
    hybrid: Hybrid | None = None,
) -> Sharding:
    """Who holds what of a batch: by the name of a chunking, or for a [`Hybrid`] and `"balanced"` the cheapest cut.

    Args:
        documents, ranks, stretches, hybrid: As in [`cuts`].
        layers (mapping from [`MaskPattern`] to `int`): How many layers see how far; empty without attention.
        chunking (`str`): As in [`BurstConfig`].

    Raises:
        ConfigError: If there is no such chunking.
        ShardingError: If there are more chunks than tokens, or no ranks.
    """
    if hybrid is not None and chunking == "balanced" and ranks > 1:
        return cheapest_cut(documents, tuple(layers.items()), ranks, hybrid, stretches).sharding
    if chunking == "documents":
        contiguous = cut(documents[0][-1], pattern(ranks, "contiguous"))
        return next(iter(by_documents(documents, layers, ranks)), contiguous) if ranks > 1 else contiguous
    masks, weights = _masks(documents, layers or {MaskPattern(): 1})
    return cut(documents[0][-1], assign(masks, ranks, chunking, weights, stretches))


class _Pieces:
    """Pieces of a row, each with the rank that owns it."""

    def __init__(self, bounds: Sequence[int], ranks: int, share: float) -> None:
        self.ranks, self.tokens = ranks, bounds[-1] // ranks
        self.owned: list[tuple[int, int, int]] = []  # start, stop, rank
        limit = share * self.tokens
        self.long = [span for span in pairwise(bounds) if span[1] - span[0] > limit]
        self.short = [span for span in pairwise(bounds) if span[1] - span[0] <= limit]
        self.room = [self.tokens] * ranks
        self.fits = self._lay_long()

    def _lay_long(self) -> bool:
        """Lays long documents over all ranks, of which every rank then holds as many tokens but for one; whether these
        have enough tokens."""
        total, held = sum(stop - start for start, stop in self.long), [0] * self.ranks
        for index, (start, stop) in enumerate(self.long):
            owners = pattern(self.ranks, "zigzag")
            count = len(owners)
            edges = [start + place * (stop - start) // count for place in range(count + 1)]
            for (first, last), owner in zip(pairwise(edges), owners, strict=True):
                held[owner] += last - first
            if index == len(self.long) - 1:  # edges between neighbours move until all is even
                moved = 0
                for rank in range(self.ranks - 1):
                    wanted = total * (rank + 1) // self.ranks - total * rank // self.ranks
                    moved += wanted - held[rank]
                    edges[rank + 1] += moved
            if any(first >= last for first, last in pairwise(edges)):
                return False
            self._own(edges, owners)
        return True

    def _own(self, edges: Sequence[int], owners: Sequence[int]) -> None:
        for (start, stop), owner in zip(pairwise(edges), owners, strict=True):
            self.owned.append((start, stop, owner))
            self.room[owner] -= stop - start

    def bundles(self) -> list[tuple[int, int]]:
        """Short documents, neighbours together as long as they are a small part of a rank's tokens."""
        bundles: list[tuple[int, int]] = []
        for start, stop in self.short:
            if bundles and bundles[-1][1] == start and stop - bundles[-1][0] <= self.tokens // _BUNDLES:
                bundles[-1] = (bundles[-1][0], stop)
            else:
                bundles.append((start, stop))
        return bundles

    def deal(self, bundles: Sequence[tuple[int, int]], work: Sequence[int]) -> None:
        """Deals bundles out, the largest first, to the ranks with the least work of those that have room. What they
        have no room for is cut to fill them up."""
        loads, rest = [0.0] * self.ranks, []
        order = sorted(range(len(bundles)), key=lambda index: (bundles[index][0] - bundles[index][1], index))
        for index in order:
            start, stop = bundles[index]
            count = -(-(stop - start) // self.tokens)
            parts = pattern(count, "zigzag")
            edges = [start + place * (stop - start) // len(parts) for place in range(len(parts) + 1)]
            shares = [0] * count
            for (first, last), part in zip(pairwise(edges), parts, strict=True):
                shares[part] += last - first
            able = [rank for rank in range(self.ranks) if self.room[rank] >= max(shares)]
            chosen = sorted(able, key=lambda rank: (loads[rank], -self.room[rank], rank))[:count]
            if len(chosen) < count or any(first >= last for first, last in pairwise(edges)):
                rest.append((start, stop))
                continue
            self._own(edges, [chosen[part] for part in parts])
            for rank in chosen:
                loads[rank] += work[index] / count
        for start, stop in sorted(rest):
            while start < stop:
                rank = max(range(self.ranks), key=lambda rank: (self.room[rank], -rank))
                size = min(stop - start, self.room[rank])
                self._own((start, start + size), (rank,))
                start += size

    def sharding(self) -> Sharding:
        """All pieces, neighbours of one rank joined."""
        boundaries, owners = [0], list[int]()
        for _, stop, owner in sorted(self.owned):
            if owners and owners[-1] == owner:
                boundaries[-1] = stop
            else:
                boundaries.append(stop)
                owners.append(owner)
        return Sharding(tuple(boundaries), tuple(owners), self.ranks)


def _masks(documents: Batch, layers: Mapping[MaskPattern, int]) -> tuple[tuple[Mask, ...], tuple[int, ...]]:
    """The masks of all rows and layers, and how often each is computed."""
    masks = tuple(kind.mask(row[-1], row) for row in documents for kind in layers)
    return masks, tuple(layers.values()) * len(documents)


def _work(documents: Batch, layers: Mapping[MaskPattern, int], edges: Sequence[int]) -> list[int]:
    """The pairs between edges; tokens for models without attention."""
    if not layers:
        return [stop - start for start, stop in pairwise(edges)]
    masks, weights = _masks(documents, layers)
    return pairs_of_chunks(masks, edges, weights)


def _priced(
    name: Chunking, sharding: Sharding, documents: Batch, layers: Mapping[MaskPattern, int], hybrid: Hybrid
) -> Cut:
    """A cut with what its layers cost."""
    attention = sum(
        count * _attention_s(tuple(kind.mask(row[-1], row) for row in documents), sharding, hybrid)
        for kind, count in layers.items()
    )
    segments = Segments(sharding, documents)
    choice = choose_recurrence(hybrid.recurrent, segments, hybrid.machine, hybrid.recurrence)
    return Cut(name, sharding, attention, choice, segments.most_slots)


def _attention_s(masks: tuple[Mask, ...], sharding: Sharding, hybrid: Hybrid) -> float:
    """Seconds of an attention layer under the schedule that it will have."""
    shapes, machine = hybrid.shapes, hybrid.machine
    if shapes is None:
        return 0.0
    heads, ranks = (shapes.q_heads, shapes.kv_heads), sharding.ranks
    layer = Layer(masks, sharding, shapes)
    schedule = None if hybrid.schedule == "auto" else Schedule.parse(hybrid.schedule, ranks)
    if schedule is None or schedule.refusal(ranks, *heads):
        schedule = choose(layer, machine).schedule
    return estimate(schedule, layer, machine).total_s
