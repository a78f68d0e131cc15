"""Where a batch is cut. Attention wants even work. States of recurrent layers want few runs of tokens, which begin
where documents begin."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from ..config import Chunking
from .balance import assign
from .mask import Mask, MaskPattern
from .recurrence import RecurrentSize
from .sharding import Batch, Sharding, cut, pattern
from .work import pairs_of_chunks

_BUNDLES = 8  # parts of a rank's tokens, up to which short documents are dealt out together
_MAX_RUNS = 24  # of a rank


def sharding_for(
    documents: Batch,
    layers: Mapping[MaskPattern, int],
    ranks: int,
    chunking: Chunking,
    stretches: int = 1,
    hybrid: tuple[RecurrentSize, ...] = (),
    parents: Batch = (),
) -> Sharding:
    """Who holds what of a batch, by the name of a chunking.

    For a model whose layers pass states, `"balanced"` is `"contiguous"` if it has no attention, `"documents"` if no
    document is longer than the tokens of a rank, and else `"zigzag"`, where every rank has two runs of tokens.

    Args:
        documents (`tuple[tuple[int, ...], ...]`): Cumulative boundaries for each row, all of one length. The ranks
            divide it, and so do the chunks of every cut, see [`chunks_per_rank`].
        layers (mapping from [`MaskPattern`] to `int`): How many layers see how far; empty without attention.
        ranks (`int`): Ranks of the group.
        chunking (`str`): As in [`BurstConfig`].
        stretches (`int`, defaults to 1): Equal parts of the sequence, each of which is dealt out by itself.
        hybrid (`tuple[RecurrentSize, ...]`, *optional*): The recurrent layers of the model, if it has any.
        parents (`tuple[tuple[int, ...], ...]`, *optional*): Which documents of each row continue others, see [`Mask`].

    Raises:
        ConfigError: If there is no such chunking.
        ShardingError: If there are more chunks than tokens, or no ranks.
    """
    length = documents[0][-1]
    if chunking == "balanced" and ranks > 1 and hybrid and (any(size.slot_bytes for size in hybrid) or not layers):
        chunking = _chunking_for_states(documents, layers, ranks, stretches)
    if chunking == "documents":
        whole = by_documents(documents, tuple(layers.items()), ranks, parents)
        return whole or cut(length, pattern(ranks, "contiguous"))
    masks, weights = _masks(documents, layers or {MaskPattern(): 1}, parents)
    return cut(length, assign(masks, ranks, chunking, weights, stretches))


def _chunking_for_states(documents: Batch, layers: Mapping[MaskPattern, int], ranks: int, stretches: int) -> Chunking:
    length = documents[0][-1]
    if not layers or length < 2 * ranks * stretches:
        return "contiguous"
    longest = max(stop - start for start, stop in pairwise(_common_bounds(documents)))
    if stretches == 1 and longest <= length // ranks and by_documents(documents, tuple(layers.items()), ranks):
        return "documents"
    return "zigzag"


@lru_cache(maxsize=64)
def by_documents(
    documents: Batch, layers: tuple[tuple[MaskPattern, int], ...], ranks: int, parents: Batch = ()
) -> Sharding | None:
    """A cut in which documents stay whole as far as every rank holds as many tokens.

    They are dealt out by their work, short neighbours together, and over as few ranks as hold them. Those for which
    there is no room fill the ranks up.

    Args:
        documents (`tuple[tuple[int, ...], ...]`): As in [`sharding_for`]. Those count that all rows have in common.
        layers (`tuple[tuple[MaskPattern, int], ...]`): How many layers see how far, for the work.
        ranks (`int`): Ranks of the group.
        parents (`tuple[tuple[int, ...], ...]`, *optional*): As in [`sharding_for`].

    Returns:
        The cut; `None` where a rank would have too many runs, or the ranks do not divide the tokens.
    """
    if documents[0][-1] % ranks:
        return None
    tokens = documents[0][-1] // ranks
    bundles = list[tuple[int, int]]()
    for start, stop in pairwise(_common_bounds(documents)):  # short neighbours together
        if bundles and stop - bundles[-1][0] <= tokens // _BUNDLES:
            bundles[-1] = (bundles[-1][0], stop)
        else:
            bundles.append((start, stop))
    work = _work(documents, dict(layers), [0, *(stop for _, stop in bundles)], parents)
    boundaries = [0]
    owners = list[int]()
    for _, stop, owner in sorted(_dealt(bundles, work, ranks, tokens)):
        if owners and owners[-1] == owner:
            boundaries[-1] = stop
        else:
            boundaries.append(stop)
            owners.append(owner)
    sharding = Sharding(tuple(boundaries), tuple(owners), ranks)
    return sharding if all(len(sharding.runs(rank)) <= _MAX_RUNS for rank in range(ranks)) else None


def _common_bounds(documents: Batch) -> list[int]:
    return sorted(set.intersection(*map(set, documents)) | {0})


def _dealt(
    bundles: Sequence[tuple[int, int]], work: Sequence[int], ranks: int, tokens: int
) -> list[tuple[int, int, int]]:
    """Bundles dealt out, the largest first, to the ranks with the least work of those that have room: each holds
    `tokens`. What they have no room for is cut to fill them up.

    Returns:
        Start, stop and rank of each piece.
    """
    dealt = list[tuple[int, int, int]]()
    room = [tokens] * ranks
    loads = [0.0] * ranks
    rest = []

    def give(start: int, stop: int, rank: int) -> None:
        dealt.append((start, stop, rank))
        room[rank] -= stop - start

    for index in sorted(range(len(bundles)), key=lambda index: bundles[index][0] - bundles[index][1]):
        start, stop = bundles[index]
        count = -(-(stop - start) // tokens)
        parts = pattern(count, "zigzag")
        chosen = list[int]()
        if stop - start >= len(parts):
            pieces = cut(stop - start, parts)
            able = [rank for rank in range(ranks) if room[rank] >= pieces.most_tokens]
            chosen = sorted(able, key=lambda rank: (loads[rank], -room[rank]))[:count]
        if len(chosen) < count:
            rest.append((start, stop))
            continue
        for (first, last), part in zip(pairwise(pieces.boundaries), parts, strict=True):
            give(start + first, start + last, chosen[part])
        for rank in chosen:
            loads[rank] += work[index] / count
    for start, stop in sorted(rest):
        while start < stop:
            rank = room.index(max(room))
            size = min(stop - start, room[rank])
            give(start, start + size, rank)
            start += size
    return dealt


def _masks(
    documents: Batch, layers: Mapping[MaskPattern, int], parents: Batch
) -> tuple[tuple[Mask, ...], tuple[int, ...]]:
    rows = zip(documents, parents or ((),) * len(documents), strict=True)
    masks = tuple(kind.mask(row[-1], row, continued) for row, continued in rows for kind in layers)
    return masks, tuple(layers.values()) * len(documents)


def _work(documents: Batch, layers: Mapping[MaskPattern, int], edges: Sequence[int], parents: Batch) -> list[int]:
    """The pairs between edges; tokens for models without attention."""
    if not layers:
        return [stop - start for start, stop in pairwise(edges)]
    masks, weights = _masks(documents, layers, parents)
    return pairs_of_chunks(masks, edges, weights)
