"""Tiles: the part of a mask between two shards, cut into pieces that one kernel call computes."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from .mask import Band, Mask, Reach
from .sharding import Run


@dataclass(frozen=True)
class Tile:
    """One kernel call: a rectangle of rows of a query shard and columns of a key shard, and the band admitted in it.

    Args:
        q (`tuple[int, int]`): Rows `[start, stop)` of the query shard.
        k (`tuple[int, int]`): Rows `[start, stop)` of the key shard, the columns of the tile.
        band ([`Band`]): The pairs that are admitted, both counted from the tile's corner.
        batch (`tuple[int, int]`): The rows `[start, stop)` of the batch that the tile is for.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    band: Band
    batch: tuple[int, int] = (0, 1)

    @property
    def pairs(self) -> int:
        """How many pairs are admitted in one row of the batch."""
        return self.band.pairs(self.q[1] - self.q[0], self.k[1] - self.k[0])


def tiles_between(mask: Mask, q_runs: tuple[Run, ...], k_runs: tuple[Run, ...]) -> tuple[Tile, ...]:
    """The tiles that compute `mask` between a shard of queries and a shard of keys.

    Every row of a tile admits at least one of its columns, and rectangles that lie together in both shards are one.

    Args:
        mask ([`Mask`]): The mask of the whole sequence.
        q_runs (`tuple[Run, ...]`): The tokens whose queries are there, see [`Sharding.runs`].
        k_runs (`tuple[Run, ...]`): The tokens whose keys are there.

    Returns:
        `tuple[Tile, ...]`: In rows of the two shards; empty if the mask admits no pair.
    """
    reaching = [tile for reach in mask.reaches for tile in _tiles(reach, q_runs, k_runs)]
    if q_runs == k_runs and mask.window is None:
        return (_own_tile(mask, q_runs, 0, 0), *_join(reaching))
    tiles: list[Tile] = []
    k_pieces = _cut_at(k_runs, q_runs)
    for q_run in _cut_at(q_runs, k_runs):
        first = mask.keys(q_run.start)[0]
        last = mask.keys(q_run.stop - 1)[1]  # the later a query, the later its keys
        for k_run in k_pieces:
            if k_run.stop <= first or k_run.start >= last:
                continue
            if q_run.start == k_run.start:
                tiles.append(_own_tile(mask, (q_run,), q_run.local, k_run.local))
            else:  # at most one document is in both
                document = mask.document(min(q_run, k_run).stop - 1)
                tiles += _tiles(Reach(document, document, mask.band), (q_run,), (k_run,))
    return _join(tiles + reaching)


def _cut_at(runs: tuple[Run, ...], others: tuple[Run, ...]) -> list[Run]:
    """Runs cut where other runs begin and end, so that two of both are the same tokens or have none in common."""
    bounds = sorted({bound for other in others for bound in (other.start, other.stop)})
    pieces = []
    for run in runs:
        inside = [bound for bound in bounds if run.start < bound < run.stop]
        pieces += [part for span in pairwise((run.start, *inside, run.stop)) for part in run.within(span)]
    return pieces


def _own_tile(mask: Mask, runs: tuple[Run, ...], row: int, column: int) -> Tile:
    """The queries and the keys of the same tokens, which lie together from a row and a column on. Runs of one document
    that do not touch are for masks without a window, where order is all that counts."""
    sizes = Counter[tuple[int, int]]()  # of what is there of each document
    for run in runs:
        token = run.start
        while token < run.stop:
            document = mask.document(token)
            stop = min(run.stop, document[1])
            sizes[document] += stop - token
            token = stop
    bounds = tuple(accumulate(sizes.values(), initial=0))
    band = replace(mask.band, documents=bounds if len(sizes) > 1 else ())
    return Tile((row, row + bounds[-1]), (column, column + bounds[-1]), band)


def _tiles(reach: Reach, q_runs: tuple[Run, ...], k_runs: tuple[Run, ...]) -> list[Tile]:
    """The tiles of what queries see by a reach, cut to the rows that see a column and to the columns that are seen."""
    keys = [part for run in k_runs for part in run.within(reach.keys)]
    tiles = []
    for query in (part for run in q_runs for part in run.within(reach.queries)):
        for key in keys:
            cropped = reach.band.shift(query.start - key.start).crop(query.size, key.size)
            if cropped is not None:
                (first, last), (left, right), band = cropped
                rows = query.local + first, query.local + last
                tiles.append(Tile(rows, (key.local + left, key.local + right), band))
    return tiles


def _join(tiles: list[Tile]) -> tuple[Tile, ...]:
    """Joins rectangles that share their rows and touch by their columns, or the other way round."""
    joined: list[Tile] = []
    for tile in tiles:
        for index, other in enumerate(joined):
            whole = tile.band == other.band == Band()
            if whole and tile.q == other.q and other.k[1] == tile.k[0]:
                joined[index] = replace(other, k=(other.k[0], tile.k[1]))
                break
            if whole and tile.k == other.k and other.q[1] == tile.q[0]:
                joined[index] = replace(other, q=(other.q[0], tile.q[1]))
                break
        else:
            joined.append(tile)
    return tuple(joined) if len(joined) == len(tiles) else _join(joined)
