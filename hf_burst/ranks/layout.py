"""Applies a plan's sharding to tensors: shards a batch of sequences over the ranks, and gathers it again."""

import marshal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..config import Chunking
from ..errors import BatchError, ShardingError, UnsupportedModelError
from ..plan import Mask, MaskPattern, RecurrentSize, Segments, Sharding, chunks_per_rank, cut, imbalance, sharding_for
from ..plan.blocks import LaterKeys, Rows, later_keys
from ..plan.sharding import Batch

Blocks = tuple[Rows, ...]  # for every row of the batch, tokens [start, stop)


@dataclass(frozen=True)
class SequenceLayout:
    """How a batch of sequences is cut over the ranks of a group. Plain numbers: equal on every rank, and hashable.

    Args:
        length (`int`): Tokens per row over all ranks, including padding.
        owners (`tuple[int, ...]`): For each chunk, the rank of the group that holds it.
        documents (`tuple[tuple[int, ...], ...]`): Cumulative document boundaries, one tuple for every row of the batch.
        padding (`int`, defaults to 0): Tokens appended at the end of `length` to fill the last chunk.
        real (`tuple[tuple[int, int], ...]`, defaults to all): For each row, the tokens `[start, stop)` that are not
            padding. Tokens before them form a separate document and see nothing.
        boundaries (`tuple[int, ...]`, defaults to equal chunks): Cumulative boundaries of the chunks. Every rank holds
            the same number of tokens.
        blocks (`tuple`, defaults to none): For each row, the tokens `[start, stop)` of blocks whose tokens all see each
            other, even later ones, such as an image's. Documents cut blocks.
        parents (`tuple[tuple[int, ...], ...]`, defaults to none): For each row, which documents continue others, as
            answers continue a shared question: see [`hf_burst.plan.Mask`].
    """

    length: int
    owners: tuple[int, ...]
    documents: Batch
    padding: int = 0
    real: Rows = ()
    boundaries: tuple[int, ...] = ()
    blocks: Blocks = ()
    parents: Batch = ()

    @classmethod
    def for_batch(
        cls,
        documents: Sequence[tuple[int, ...]],
        ranks: int,
        chunking: Chunking | Sequence[int] = "balanced",
        real: Rows = (),
        patterns: Mapping[MaskPattern, int] | None = None,
        stretches: int = 1,
        hybrid: tuple[RecurrentSize, ...] = (),
        parents: Sequence[tuple[int, ...]] = (),
    ) -> "SequenceLayout":
        """Builds the layout of a batch, padded to a whole number of equal chunks; the padding is a separate document.

        Args:
            documents (sequence of `tuple[int, ...]`): Cumulative boundaries of the documents of each row.
            ranks (`int`): Ranks of the group.
            chunking (`str` or sequence of `int`, defaults to `"balanced"`): Which rank owns which chunk, as in
                [`BurstConfig`]; or the owner of each equal chunk, the same number of chunks for every rank.
            real (`tuple[tuple[int, int], ...]`, defaults to all): The tokens of each row that are not padding.
            patterns (mapping from [`MaskPattern`] to `int`, *optional*): The number of layers with each pattern, for
                the balance. By default all are causal and see whole documents.
            stretches (`int`, defaults to 1): Equal parts of the sequence; each is distributed separately.
            hybrid (`tuple[RecurrentSize, ...]`, *optional*): The model's recurrent layers, for which `"balanced"` cuts
                differently, see [`sharding_for`]. `patterns` may then be empty.
            parents (sequence of `tuple[int, ...]`, *optional*): For each row, the number of the document that each
                document continues, or -1.

        Raises:
            BatchError: If the batch is empty.
            ConfigError: If there is no such chunking.
            ShardingError: If the ranks do not own the same number of chunks.
        """
        documents, parents, real = _plain(documents), _plain(parents), _plain(real)
        if not documents or documents[0][-1] < 1:
            raise BatchError(f"The batch is empty: {len(documents)} sequences. Give at least one token.")
        length = documents[0][-1]
        if any(row[-1] != length for row in documents):
            raise BatchError(
                f"The rows of the batch end at {sorted({row[-1] for row in documents})} tokens; they must be of one "
                "length. Pad them first."
            )
        if ranks == 1:  # one rank holds all of every part, so no padding is needed
            stretches = 1
        each = chunks_per_rank(length, ranks, chunking, stretches) if isinstance(chunking, str) else 0
        chunks = ranks * each or len(chunking)
        padding = -length % max(1, chunks)
        if padding:
            length += padding
            documents = tuple((*row, length) for row in documents)
            parents = tuple((*row, -1) for row in parents)
        boundaries: tuple[int, ...] = ()
        if isinstance(chunking, str):
            layers = patterns or ({} if hybrid else {MaskPattern(): 1})
            sharding = sharding_for(documents, layers, ranks, chunking, stretches, hybrid, parents)
            owners = sharding.owners
            if sharding != cut(length, owners):
                boundaries = sharding.boundaries
        else:
            owners = tuple(map(int, chunking))
            counts = {owners.count(rank) for rank in range(ranks)}
            if len(counts) != 1 or 0 in counts or len(owners) != ranks * max(counts):
                raise ShardingError(
                    f"Chunks with owners {owners} do not give each of {ranks} ranks as many, and at least one. Name "
                    f"the rank, 0 to {ranks - 1}, of every chunk, or take 'balanced', 'documents', 'zigzag' or "
                    "'contiguous'."
                )
        return cls(length, owners, documents, padding, real, boundaries, parents=parents)

    @property
    def ranks(self) -> int:
        """Number of ranks of the group."""
        return self.sharding.ranks

    @cached_property
    def sharding(self) -> Sharding:
        """The owner of each chunk, with the chunks' boundaries."""
        equal = cut(self.length, self.owners)
        return Sharding(self.boundaries, self.owners, equal.ranks) if self.boundaries else equal

    @cached_property
    def segments(self) -> Segments:
        """The pieces of documents on each rank, for layers that carry a state; shared by all layers of a pass."""
        return Segments(self.sharding, self.documents, self.parents)

    @cached_property
    def imbalance(self) -> float:
        """How far the busiest rank's pairs exceed the mean in a causal layer: 0.02 is 2 %."""
        return imbalance(self.masks(MaskPattern()), self.owners, boundaries=self.boundaries)

    @property
    def batch_size(self) -> int:
        return len(self.documents)

    @property
    def spans(self) -> Rows:
        """For each row, the tokens `[start, stop)` that are not padding."""
        return self.real or ((0, self.length - self.padding),) * self.batch_size

    @property
    def real_documents(self) -> Batch:
        """The boundaries of each row's documents, without its padding."""
        rows = zip(self.spans, self.documents, strict=True)
        return tuple((start, *(cut for cut in row if start < cut < stop), stop) for (start, stop), row in rows)

    @lru_cache(maxsize=64)  # noqa: B019, since layouts are values
    def beginning(self, share: float) -> "SequenceLayout | None":
        """Returns the layout of the first `share` of the sequence, which holds each rank's first tokens, equally many
        on each; `None` if it cannot be cut there."""
        if self.ranks > 1:
            chunks = len(self.owners) * share
            owners = self.owners[: round(chunks)]
            length = self.length // len(self.owners) * len(owners)
            even = len({owners.count(rank) for rank in range(self.ranks)}) == 1
            fits = even and 0 < len(owners) == chunks and not self.boundaries
        else:  # one rank holds all of every part
            owners, length = (0,), round(self.length * share)
            fits = 0 < length < self.length
        if not fits or any(start < length < stop for row in self.blocks for start, stop in row):
            return None  # some of these tokens see later ones
        blocks = tuple(tuple(block for block in row if block[1] <= length) for row in self.blocks)
        rows = tuple((*(bound for bound in row if bound < length), length) for row in self.documents)
        real = tuple((min(a, length), min(b, length)) for a, b in self.real)
        kept = tuple(row[: len(bounds) - 1] for row, bounds in zip(self.parents, rows, strict=False))
        return SequenceLayout(length, owners, rows, 0, real, blocks=blocks, parents=kept)

    @property
    def later_keys(self) -> LaterKeys | None:
        """The later keys that blocks add to causal attention, or `None` without blocks."""
        return later_keys(self.blocks, self.documents, self.sharding) if any(self.blocks) else None

    @lru_cache(maxsize=64)  # noqa: B019, since layouts are values
    def masks(self, pattern: MaskPattern) -> tuple[Mask, ...]:
        """Returns each row's mask for layers with this pattern."""
        rows = zip(self.documents, self.parents or ((),) * self.batch_size, strict=True)
        return tuple(pattern.mask(self.length, bounds, parents) for bounds, parents in rows)

    def indices(self, rank: int) -> Tensor:
        """Returns the tokens that `rank` holds, in its order: `torch.LongTensor` of shape `(length / ranks,)`."""
        return torch.cat([torch.arange(run.start, run.stop, device="cpu") for run in self.sharding.runs(rank)])

    def fully_masked(self, rank: int) -> Tensor | None:
        """Returns a mask of `rank`'s tokens that see nothing, `(batch, length / ranks)`; `None` if there are none."""
        starts = [start for start, _ in self.real]
        return self.indices(rank) < torch.tensor(starts, device="cpu")[:, None] if any(starts) else None

    def counted(self, rank: int) -> Tensor:
        """Returns a mask of `rank`'s tokens that are not padding: `torch.BoolTensor`, `(batch, length / ranks)`."""
        starts, stops = torch.tensor(self.spans, device="cpu").T[..., None]
        tokens = self.indices(rank)
        return (tokens >= starts) & (tokens < stops)

    def places(self, rank: int) -> Tensor:
        """Returns the position of each token of `rank` in its row, padding included; in packed rows, the position in
        its document, after those it continues. `torch.LongTensor` of shape `(batch, length / ranks)`."""
        rows = []
        for mask, (start, stop) in zip(self.masks(MaskPattern()), self.spans, strict=True):
            packed = sum(start <= bound < stop for bound in mask.documents) > 1
            shifts = [first - depth for first, depth in zip(mask.documents, mask.depths, strict=False)]
            rows.append(shifts if packed else [0] * len(shifts))
        return self.indices(rank) - self._by_token(rows, rank)

    def texts(self, rank: int) -> Tensor:
        """Returns how many texts contain each token of `rank`: the number of final continuations of its document.
        `torch.LongTensor` of shape `(batch, length / ranks)`."""
        rows = []
        for bounds, parents in zip(self.documents, self.parents or ((),) * self.batch_size, strict=True):
            counts = [0] * (len(bounds) - 1)
            for document in reversed(range(len(counts))):
                counts[document] = counts[document] or 1
                if parents and parents[document] >= 0:
                    counts[parents[document]] += counts[document]
            rows.append(counts)
        return self._by_token(rows, rank)

    def _by_token(self, rows: list[list[int]], rank: int) -> Tensor:
        """Returns the number of its document for each token of `rank`, from those of each row's documents."""
        spread = [
            torch.tensor(numbers, device="cpu").repeat_interleave(torch.tensor(bounds, device="cpu").diff())
            for numbers, bounds in zip(rows, self.documents, strict=True)
        ]
        return torch.stack(spread)[:, self.indices(rank)]

    def shard(self, tensor: Tensor, rank: int, pad_value: float | int = 0, dim: int = 1) -> Tensor:
        """Returns a copy of a rank's shard, with `length / ranks` tokens along `dim` in the order of the shard.

        Args:
            tensor (`torch.Tensor`): The whole batch, with `length - padding` tokens along `dim`.
            rank (`int`): The rank.
            pad_value (`float` or `int`, defaults to 0): The value of the appended tokens.
            dim (`int`, defaults to 1): The dimension of the tokens.
        """
        dim = dim % tensor.ndim
        if tensor.shape[dim] != self.length - self.padding:
            raise BatchError(
                f"A tensor of shape {tuple(tensor.shape)} does not fit a layout of {self.length - self.padding} tokens."
            )
        if self.padding:
            tensor = functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, self.padding), value=pad_value)
        return torch.cat([tensor.narrow(dim, run.start, run.size) for run in self.sharding.runs(rank)], dim=dim)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Joins the shards of all ranks, in rank order, to the whole batch without padding."""
        pieces = [shards[rank][:, run.local : run.local + run.size] for run, rank in self.sharding.places]
        return torch.cat(pieces, dim=1)[:, : self.length - self.padding]

    @lru_cache(maxsize=64)  # noqa: B019, since layouts are values
    def encode(self) -> Tensor:
        """Encodes the layout for the operator, as a one-dimensional `torch.ByteTensor` on the CPU."""
        fields = self.length, self.owners, self.documents, self.padding, self.real, self.boundaries, self.blocks
        content = bytearray(marshal.dumps((*fields, self.parents), 2))  # version 2: equal layouts have equal bytes
        with torch.inference_mode(False):  # a later pass may save it for backward
            return torch.frombuffer(content, dtype=torch.uint8)

    @classmethod
    @lru_cache(maxsize=64)
    def decode(cls, encoded: bytes) -> "SequenceLayout":
        """Decodes the bytes of a tensor from [`SequenceLayout.encode`]."""
        return cls(*marshal.loads(encoded))


def _plain(rows: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """Returns rows of numbers, which may be of numpy or torch, as plain ones."""
    return tuple(tuple(map(int, row)) for row in rows)


def blocks_of(numbers: torch.Tensor, layout: SequenceLayout) -> Blocks:
    """Returns the runs of tokens in one document with the same number of at least 0; padding has none.

    Args:
        numbers (`torch.LongTensor` of shape `(batch, tokens)`): As `block_sequence_ids` of Transformers.
        layout ([`SequenceLayout`]): The layout of the batch.

    Raises:
        UnsupportedModelError: If tokens of one number are not adjacent, so that their keys are not an interval.
    """
    rows = zip(numbers.cpu(), layout.spans, layout.documents, strict=True)
    return tuple(tuple(_runs(*row)) for row in rows)


def _runs(numbers: torch.Tensor, real: tuple[int, int], documents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the blocks of one row."""
    first, last = real[0], min(real[1], len(numbers))
    changes = (numbers[first + 1 : last] != numbers[first : last - 1]).nonzero().flatten() + first + 1
    edges, seen = set(documents), set[int]()
    bounds = sorted({first, last, *changes.tolist(), *(edge for edge in edges if first < edge < last)})
    for start, stop in pairwise(bounds):
        if start in edges:
            seen.clear()
        number = int(numbers[start])
        if number in seen:
            raise UnsupportedModelError(
                f"Token {start} sees tokens of an image or a prefix that do not lie beside it, with text between them. "
                "Over ranks a token sees one interval of others. Put them side by side."
            )
        if number >= 0:
            seen.add(number)
            yield start, stop


def check_prefixes(types: torch.Tensor, layout: SequenceLayout, config: Any) -> None:
    """Raises for PaliGemma prefixes, whose tokens of type 0 see each other, if they are not contiguous, or longer than
    the sliding window of the language model's config. No rank has sent anything yet."""
    blocks = blocks_of(torch.where(types == 0, 0, -1), layout)
    window: int | None = getattr(config, "sliding_window", None)
    if window is not None:
        check_window(blocks, window - 1)


def check_window(blocks: Blocks, window: int, sees: Callable[[int, int, int], bool] | None = None) -> None:
    """Raises for tokens that see each other beyond a sliding window. `sees` tells for a row and a longer block's start
    and stop whether they do; all do by default."""
    for row, spans in enumerate(blocks):
        for start, stop in spans:
            if stop - start > window + 1 and (sees is None or sees(row, start, stop)):
                raise UnsupportedModelError(
                    f"Tokens {start} to {stop - 1} see each other, {stop - start} of them, and the sliding window "
                    f"reaches {window} back. Make the image or the prefix shorter."
                )
