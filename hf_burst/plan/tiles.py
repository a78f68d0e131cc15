"""Tiles: the part of a mask between two shards, cut into pieces that one kernel call computes."""

from dataclasses import dataclass, replace
from itertools import pairwise

from .mask import Band, Mask
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

    def columns(self, row: int) -> tuple[int, int]:
        """The admitted columns `[start, stop)` of a row; both are counted from the tile's corner."""
        whole = 0, self.k[1] - self.k[0]
        if self.band.documents:
            whole = next(span for span in pairwise(self.band.documents) if row < span[1])
        return self.band.columns(row, *whole)


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
    reaching = _reaching(mask, q_runs, k_runs)
    if q_runs == k_runs and mask.window is None:
        return (_own_tile(mask, q_runs, 0, 0), *_join(reaching))
    tiles: list[Tile | None] = []
    k_pieces = _cut_at(k_runs, q_runs)
    for q_run in _cut_at(q_runs, k_runs):
        first, last = mask.keys(q_run.start)[0], mask.keys(q_run.stop - 1)[1]  # the later a query, the later its keys
        for k_run in k_pieces:
            if k_run.stop <= first or k_run.start >= last:
                continue
            same = q_run.start == k_run.start
            tiles.append(
                _own_tile(mask, (q_run,), q_run.local, k_run.local) if same else _off_diagonal(mask, q_run, k_run)
            )
    return _join([tile for tile in (*tiles, *reaching) if tile is not None])


def _reaching(mask: Mask, q_runs: tuple[Run, ...], k_runs: tuple[Run, ...]) -> list[Tile]:
    """The tiles of queries and keys of documents that theirs continue: rectangles, of windows bands."""
    tiles = list[Tile | None]()
    for reach in mask.reaches:
        keys = [part for run in k_runs if (part := _part(run, reach.keys))]
        for query in (part for run in q_runs if (part := _part(run, reach.queries))):
            tiles += [_cropped(reach.band(mask.window, query.start, key.start), query, key) for key in keys]
    return [tile for tile in tiles if tile is not None]


def _part(run: Run, span: tuple[int, int]) -> Run | None:
    """The tokens of a run that lie in a span; `None` for none."""
    start, stop = max(run.start, span[0]), min(run.stop, span[1])
    return Run(start, stop, run.local + start - run.start) if start < stop else None


def _cut_at(runs: tuple[Run, ...], others: tuple[Run, ...]) -> list[Run]:
    """Runs cut where other runs begin and end, so that two of both are the same tokens or have none in common."""
    bounds = sorted({bound for other in others for bound in (other.start, other.stop)})
    pieces = []
    for run in runs:
        inside = [bound for bound in bounds if run.start < bound < run.stop]
        for start, stop in pairwise((run.start, *inside, run.stop)):
            pieces.append(Run(start, stop, run.local + start - run.start))
    return pieces


def _own_tile(mask: Mask, runs: tuple[Run, ...], row: int, column: int) -> Tile:
    """The queries and the keys of the same tokens, which lie together from a row and a column on. Runs of one document
    that do not touch are for masks without a window, where order is all that counts."""
    boundaries, previous = [0], None
    for run in runs:
        for start, stop in mask.overlapping(run.start, run.stop):
            document = mask.document(start)
            if document != previous:
                boundaries.append(boundaries[-1])
            boundaries[-1] += stop - start
            previous = document
    size, documents = boundaries[-1], tuple(boundaries) if len(boundaries) > 2 else ()
    return Tile((row, row + size), (column, column + size), replace(mask.band, documents=documents))


def _off_diagonal(mask: Mask, q_run: Run, k_run: Run) -> Tile | None:
    """Two runs without a common token: at most one document is in both, so this is one rectangle."""
    later = q_run.start > k_run.start
    if mask.causal and not later:
        return None
    start, stop = mask.document((k_run if later else q_run).stop - 1)
    if stop <= (q_run if later else k_run).start:
        return None
    q_part, k_part = (
        Run(max(run.start, start), min(run.stop, stop), run.local + max(0, start - run.start)) for run in (q_run, k_run)
    )
    return _cropped(mask.band.shift(q_part.start - k_part.start), q_part, k_part)


def _cropped(band: Band, q_run: Run, k_run: Run) -> Tile | None:
    """The tile of a band between two runs, cut to the rows that see a column and to the columns that are seen."""
    cropped = band.crop(q_run.size, k_run.size)
    if cropped is None:
        return None
    (first, last), (left, right), inner = cropped
    return Tile((q_run.local + first, q_run.local + last), (k_run.local + left, k_run.local + right), inner)


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
