"""Applies a plan's sharding to tensors: shards a batch of sequences over the ranks, and gathers it again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from ..config import Chunking
from ..errors import BatchError, ShardingError
from ..plan import Mask, MaskPattern, RecurrentSize, Segments, Sharding, chunks_per_rank, cut, imbalance, sharding_for
from ..plan.blocks import LaterKeys, later_keys


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
    documents: tuple[tuple[int, ...], ...]
    padding: int = 0
    real: tuple[tuple[int, int], ...] = ()
    boundaries: tuple[int, ...] = ()
    blocks: tuple[tuple[tuple[int, int], ...], ...] = ()
    parents: tuple[tuple[int, ...], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, cached for thousands of documents; of numbers only, so that other processes agree on it."""
        rows = self.documents, self.real, self.blocks, self.parents
        return hash((self.length, self.owners, self.padding, self.boundaries, rows))

    @classmethod
    def for_batch(
        cls,
        documents: Sequence[tuple[int, ...]],
        ranks: int,
        chunking: Chunking | Sequence[int] = "balanced",
        real: tuple[tuple[int, int], ...] = (),
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
        filled = tuple((*row, length + padding) if padding else tuple(row) for row in documents)
        continued = tuple((*row, -1) if padding else tuple(row) for row in parents)
        if isinstance(chunking, str):
            layers = patterns or ({} if hybrid else {MaskPattern(): 1})
            sharding = sharding_for(filled, layers, ranks, chunking, stretches, hybrid, continued)
            owners = sharding.owners
            boundaries = () if sharding == cut(length + padding, owners) else sharding.boundaries
        else:
            boundaries = ()
            owners = tuple(chunking)
            counts = {owners.count(rank) for rank in range(ranks)}
            if len(counts) != 1 or 0 in counts or len(owners) != ranks * max(counts):
                raise ShardingError(
                    f"Chunks with owners {owners} do not give each of {ranks} ranks as many, and at least one. Name "
                    f"the rank, 0 to {ranks - 1}, of every chunk, or take 'balanced', 'documents', 'zigzag' or "
                    "'contiguous'."
                )
        return cls(length + padding, owners, filled, padding, real, boundaries, parents=continued)

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
    def spans(self) -> tuple[tuple[int, int], ...]:
        """For each row, the tokens `[start, stop)` that are not padding."""
        return self.real or ((0, self.length - self.padding),) * self.batch_size

    @lru_cache(maxsize=64)  # noqa: B019, since layouts are values
    def beginning(self, share: float) -> "SequenceLayout | None":
        """Returns the layout of the first `share` of the sequence, which holds each rank's first tokens, equally many
        on each; `None` if it cannot be cut there."""
        chunks = round(len(self.owners) * share)
        owners, length = self.owners[:chunks], self.length // len(self.owners) * chunks
        even = len({owners.count(rank) for rank in range(self.ranks)}) == 1
        if self.ranks == 1:  # one rank holds all of every part
            owners, length = (0,), round(self.length * share)
            even = 0 < length < self.length
        elif self.boundaries or chunks != len(self.owners) * share or not owners:
            return None
        if not even:
            return None
        if any(start < length < stop for row in self.blocks for start, stop in row):
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
        for row, (bounds, (start, stop)) in enumerate(zip(self.documents, self.spans, strict=True)):
            packed = sum(start <= bound < stop for bound in bounds) > 1
            ends = list[int]()  # each document's end, in its own positions
            shifts = list[int]()
            for document, (first, end) in enumerate(pairwise(bounds)):
                parent = self.parents[row][document] if self.parents else -1
                shifts.append(first - (ends[parent] if parent >= 0 else 0) if packed else 0)
                ends.append(end - shifts[-1])
            sizes = torch.tensor(bounds, device="cpu").diff()
            rows.append(torch.tensor(shifts, device="cpu").repeat_interleave(sizes))
        tokens = self.indices(rank)
        return tokens - torch.stack(rows)[:, tokens]

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
            sizes = torch.tensor(bounds, device="cpu").diff()
            rows.append(torch.tensor(counts, device="cpu").repeat_interleave(sizes))
        return torch.stack(rows)[:, self.indices(rank)]

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
        """Encodes the layout for the operator, as a one-dimensional `torch.LongTensor` on the CPU."""
        numbers = [self.length, self.padding, self.batch_size, len(self.owners), *self.owners]
        numbers += [2 * len(self.real), *chain.from_iterable(self.real), len(self.boundaries), *self.boundaries]
        numbers += [*map(len, self.documents), *chain.from_iterable(self.documents)]
        numbers += [len(self.blocks), *map(len, self.blocks)]
        numbers += [token for row in self.blocks for block in row for token in block]
        numbers += chain.from_iterable(self.parents)  # one per document, or none
        with torch.inference_mode(False):  # a later pass may save it for backward
            return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    @classmethod
    @lru_cache(maxsize=64)
    def decode(cls, encoded: bytes) -> "SequenceLayout":
        """Decodes the bytes of a tensor from [`SequenceLayout.encode`]."""
        length, padding, rows, chunks, *rest = memoryview(encoded).cast("q").tolist()
        owners, bounds, rest = tuple(rest[:chunks]), rest[chunks], rest[chunks + 1 :]
        real = tuple(zip(rest[:bounds:2], rest[1:bounds:2], strict=True))
        edges, rest = rest[bounds], rest[bounds + 1 :]
        boundaries, sizes, rest = tuple(rest[:edges]), rest[edges : edges + rows], rest[edges + rows :]
        documents = tuple(tuple(rest[start:stop]) for start, stop in pairwise([0, *accumulate(sizes)]))
        count, *rest = rest[sum(sizes) :]
        sizes, rest = rest[:count], rest[count:]
        flat, rest = rest[: 2 * sum(sizes)], rest[2 * sum(sizes) :]
        spans = list(zip(flat[::2], flat[1::2], strict=True))
        blocks = tuple(tuple(spans[start:stop]) for start, stop in pairwise([0, *accumulate(sizes)]))
        ends = [0, *accumulate(len(row) - 1 for row in documents)] if rest else []
        parents = tuple(tuple(rest[start:stop]) for start, stop in pairwise(ends))
        return cls(length, owners, documents, padding, real, boundaries, blocks, parents)
