"""Attention masks as data: one interval of admitted keys for every query."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..errors import BatchError, ConfigError


@dataclass(frozen=True)
class Band:
    """The pairs of a row and a column that a tile admits: `low <= row - column <= high`, inside of the squares between
    the cumulative boundaries `documents`, if any. `None` is no bound. With documents the diagonal is admitted, since
    every row of a variable-length call sees something."""

    low: int | None = None
    high: int | None = None
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert not self.documents or (self.low or 0) <= 0 <= (self.high or 0), f"{self} leaves out the diagonal"

    def shift(self, rows: int) -> "Band":
        """The band as counted from a corner that lies `rows` further down."""
        return Band(None if self.low is None else self.low - rows, None if self.high is None else self.high - rows)

    def crop(self, height: int, width: int) -> "tuple[tuple[int, int], tuple[int, int], Band] | None":
        """The rows `[start, stop)` of a rectangle that see something, the columns that are seen, and the band between
        them; `None` if nothing is admitted.

        The band has no documents. In the result every row sees a column, every column is seen, and a bound that binds
        nothing is `None`.
        """
        low = -width if self.low is None else self.low  # no pair is that far apart
        high = height if self.high is None else self.high
        first = max(0, low)
        last = min(height, width + high)
        left = max(0, first - high)
        right = min(width, last - low)
        if low > high or first >= last or left >= right:
            return None
        low -= first - left
        high -= first - left
        inside = Band(low if low > left - right + 1 else None, high if high < last - first - 1 else None)
        return (first, last), (left, right), inside

    def columns(self, row: int, start: int, stop: int) -> tuple[int, int]:
        """The columns of `[start, stop)` that a row sees: always one interval."""
        if self.high is not None:
            start = max(start, row - self.high)
        if self.low is not None:
            stop = min(stop, row - self.low + 1)
        return start, stop

    def pairs(self, rows: int, columns: int) -> int:
        """How many pairs of a rectangle are admitted."""
        if self.documents:
            inner = Band(self.low, self.high)
            sizes = (stop - start for start, stop in pairwise(self.documents))
            return sum(inner.pairs(size, size) for size in sizes)

        def triangle(side: int) -> int:
            return side * (side + 1) // 2 if side > 0 else 0

        def at_least(distance: int) -> int:
            side = rows - distance
            return triangle(side) - triangle(side - rows) - triangle(side - columns) + triangle(side - rows - columns)

        admitted = rows * columns if self.low is None else at_least(self.low)
        return admitted if self.high is None else admitted - at_least(self.high + 1)

    def pairs_between(self, rows: tuple[int, int], columns: tuple[int, int]) -> int:
        """How many pairs of rows `[start, stop)` and columns `[start, stop)` are admitted."""
        return self.shift(rows[0] - columns[0]).pairs(rows[1] - rows[0], columns[1] - columns[0])


@dataclass(frozen=True)
class MaskPattern:
    """What a layer's queries see inside of their document, whatever the batch.

    Args:
        causal (`bool`, defaults to `True`): Whether a query sees no later key.
        window (`int`, *optional*): How many tokens before itself a query sees (for Transformers' causal models
            `sliding_window - 1`); without `causal`, as many after it, too. `None` is unlimited.
        attention_chunk_size (`int`, *optional*): Documents are cut into pieces of this many tokens, which do not
            see each other (the chunked attention of Llama 4).
    """

    causal: bool = True
    window: int | None = None
    attention_chunk_size: int | None = None

    def mask(self, length: int, documents: tuple[int, ...], parents: tuple[int, ...] = ()) -> "Mask":
        """The [`Mask`] of one packed sequence with these cumulative boundaries of documents, which may continue
        others."""
        size = self.attention_chunk_size
        if size is not None:
            documents, parents = _chunked(Mask(length, self.causal, None, documents, parents), size)
        return Mask(length, self.causal, self.window, documents, parents)


class Reach(NamedTuple):
    """Queries that see keys of their document, or of one that theirs continues.

    Args:
        queries (`tuple[int, int]`): Tokens `[start, stop)`.
        keys (`tuple[int, int]`): Tokens `[start, stop)`.
        band ([`Band`]): The pairs that are admitted, by the tokens of the sequence.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    band: Band


@dataclass(frozen=True)
class Mask:
    """Which (query, key) pairs of one sequence are admitted.

    Args:
        length (`int`): Tokens in the sequence.
        causal, window: As in [`MaskPattern`].
        documents (`tuple[int, ...]`, defaults to one document): Cumulative boundaries `(0, ..., length)` of the
            packed documents; a query sees keys of its own document only.
        parents (`tuple[int, ...]`, defaults to none): For every document the number of an earlier one that it
            continues, or -1: its queries see the keys of that one, too, and of those that this one continues. Documents
            that continue one do not see each other. Distances are those of the text, as if each of them came at once.
    """

    length: int
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.length < 1:
            raise BatchError(f"A mask needs at least 1 token, got length={self.length}. Drop empty sequences.")
        if self.window is not None and self.window < 0:
            raise ConfigError(f"window={self.window} is negative; give the tokens visible backwards, or None for all.")
        if not self.documents:
            object.__setattr__(self, "documents", (0, self.length))
        ends = self.documents
        if (ends[0], ends[-1]) != (0, self.length) or any(a >= b for a, b in pairwise(ends)):
            shown = str(ends) if len(ends) <= 12 else f"{str(ends[:12])[:-1]}, ...)"
            raise BatchError(
                f"Document boundaries {shown} do not fit a sequence of {self.length} tokens: they must rise strictly "
                f"from 0 to {self.length}, as cu_seqlens do."
            )
        fit = len(self.parents) in (0, len(ends) - 1) and all(-1 <= one < at for at, one in enumerate(self.parents))
        if not fit or (self.parents and not self.causal):
            raise BatchError(
                f"The parents {str(self.parents)[:80]} do not fit {len(ends) - 1} documents: give for each of them the "
                "number of an earlier one that it continues, or -1; none for attention that is not causal."
            )

    def document(self, token: int) -> tuple[int, int]:
        """The `(start, stop)` of the document that holds `token`."""
        index = bisect_right(self.documents, token)
        return self.documents[index - 1], self.documents[index]

    @cached_property
    def band(self) -> Band:
        """The pairs of a query and a key inside of their document."""
        if self.window is None:
            return Band(0 if self.causal else None)
        return Band(0 if self.causal else -self.window, self.window)

    def keys(self, query: int) -> tuple[int, int]:
        """The keys `[start, stop)` of its own document that `query` sees: always one interval."""
        return self.band.columns(query, *self.document(query))

    def intervals(self, query: int) -> list[tuple[int, int]]:
        """All keys that `query` sees, as intervals; some may be empty."""
        found = [self.keys(query)]
        for (first, stop), keys, band in self.reaches:
            if first <= query < stop:
                found.append(band.columns(query, *keys))
        return found

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many tokens of the text come before each document."""
        depths = list[int]()
        for parent in self.parents or (-1,) * (len(self.documents) - 1):
            before = 0 if parent < 0 else depths[parent] + self.documents[parent + 1] - self.documents[parent]
            depths.append(before)
        return tuple(depths)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest document, with those that it continues."""
        return max(
            depth + stop - start for depth, (start, stop) in zip(self.depths, pairwise(self.documents), strict=True)
        )

    @cached_property
    def reaches(self) -> tuple[Reach, ...]:
        """What queries see beside their own document. Without a window, neighbours that continue one document are
        one."""
        found = dict[tuple[int, int], list[Reach]]()
        for at, parent in enumerate(self.parents):
            first, stop = self.documents[at : at + 2]
            while parent >= 0:
                keys = self.documents[parent], self.documents[parent + 1]
                nearer = first - self.depths[at] - keys[0] + self.depths[parent]  # in the text than in the sequence
                known = found.setdefault(keys, [])
                start = first
                if self.window is None and known and known[-1].queries[1] == first:
                    start = known.pop().queries[0]
                known.append(Reach((start, stop), keys, Band(None, self.window).shift(-nearer)))
                parent = self.parents[parent]
        return tuple(reach for known in found.values() for reach in known)

    @cached_property
    def _pairs_before(self) -> tuple[int, ...]:
        """The pairs of all documents that end at each boundary, or before."""
        sizes = (stop - start for start, stop in pairwise(self.documents))
        return tuple(accumulate((self.band.pairs(size, size) for size in sizes), initial=0))

    def pairs_until(self, token: int) -> int:
        """The pairs inside of documents whose query comes before a token."""
        index = max(0, bisect_left(self.documents, token) - 1)
        start, stop = self.documents[index : index + 2]
        return self._pairs_before[index] + self.band.pairs(token - start, stop - start)

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs are admitted."""
        return self._pairs_before[-1] + sum(band.pairs_between(*spans) for *spans, band in self.reaches)


def _chunked(mask: Mask, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Documents cut where the text reaches a multiple of `size` tokens, and which pieces continue others: those that
    begin between two multiples."""
    starts, parents, last_piece = list[int](), list[int](), list[int]()
    for at, (first, stop) in enumerate(pairwise(mask.documents)):
        inside = mask.depths[at] % size
        for start in (first, *range(first + size - inside, stop, size)):
            continues = bool(mask.parents) and start == first and inside
            parents.append(last_piece[mask.parents[at]] if continues else -1)
            starts.append(start)
        last_piece.append(len(starts) - 1)
    return (*starts, mask.length), tuple(parents) if mask.parents else ()
