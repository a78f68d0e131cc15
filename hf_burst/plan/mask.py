"""Attention masks as data: one interval of admitted keys for every query."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

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

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once, since there may be thousands of documents. It holds in other processes, too."""
        return hash((self.low is None, self.low or 0, self.high is None, self.high or 0, self.documents))

    def shift(self, rows: int) -> "Band":
        """The band as counted from a corner that lies `rows` further down."""
        return Band(None if self.low is None else self.low - rows, None if self.high is None else self.high - rows)

    def crop(self, height: int, width: int) -> "tuple[tuple[int, int], tuple[int, int], Band] | None":
        """The rows `[start, stop)` of a rectangle that see something, the columns that are seen, and the band between
        them; `None` if nothing is admitted.

        The band has no documents. In the result every row sees a column, every column is seen, and a bound that binds
        nothing is `None`.
        """
        first = 0 if self.low is None else max(0, self.low)
        last = height if self.high is None else min(height, width + self.high)
        left = 0 if self.high is None else max(0, first - self.high)
        right = width if self.low is None else min(width, last - self.low)
        crossed = self.low is not None and self.high is not None and self.low > self.high
        if crossed or first >= last or left >= right:
            return None
        moved = self.shift(first - left)
        low = None if moved.low is None or moved.low <= left - right + 1 else moved.low
        high = None if moved.high is None or moved.high >= last - first - 1 else moved.high
        return (first, last), (left, right), Band(low, high)

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
            inner, sizes = Band(self.low, self.high), (stop - start for start, stop in pairwise(self.documents))
            return sum(inner.pairs(size, size) for size in sizes)

        def triangle(side: int) -> int:
            return side * (side + 1) // 2 if side > 0 else 0

        def at_least(distance: int) -> int:
            side = rows - distance
            return triangle(side) - triangle(side - rows) - triangle(side - columns) + triangle(side - rows - columns)

        admitted = rows * columns if self.low is None else at_least(self.low)
        return admitted if self.high is None else admitted - at_least(self.high + 1)


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

    def mask(self, length: int, documents: tuple[int, ...]) -> "Mask":
        """The [`Mask`] of one packed sequence with these cumulative boundaries of documents."""
        size = self.attention_chunk_size
        if size is not None:
            starts = [start for first, stop in pairwise(documents) for start in range(first, stop, size)]
            documents = (*starts, documents[-1])
        return Mask(length, self.causal, self.window, documents)


@dataclass(frozen=True)
class Mask:
    """Which (query, key) pairs of one sequence are admitted.

    Args:
        length (`int`): Tokens in the sequence.
        causal, window: As in [`MaskPattern`].
        documents (`tuple[int, ...]`, defaults to one document): Cumulative boundaries `(0, ..., length)` of the
            packed documents; a query sees keys of its own document only.
    """

    length: int
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()

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

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once for thousands of documents, of numbers alone, so that it holds in other processes, too."""
        return hash((self.length, self.causal, -1 if self.window is None else self.window, self.documents))

    def document(self, token: int) -> tuple[int, int]:
        """The `(start, stop)` of the document that holds `token`."""
        index = bisect_right(self.documents, token)
        return self.documents[index - 1], self.documents[index]

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The documents that reach into `[start, stop)`, cut to it."""
        index = bisect_right(self.documents, start)
        while start < stop:
            end = min(stop, self.documents[index])
            yield start, end
            start, index = end, index + 1

    @cached_property
    def band(self) -> Band:
        """The pairs of a query and a key inside of their document."""
        if self.window is None:
            return Band(0 if self.causal else None)
        return Band(0 if self.causal else -self.window, self.window)

    def keys(self, query: int) -> tuple[int, int]:
        """The keys `[start, stop)` that `query` sees: always one interval."""
        return self.band.columns(query, *self.document(query))

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs are admitted."""
        sizes = (stop - start for start, stop in pairwise(self.documents))
        return sum(self.band.pairs(size, size) for size in sizes)
