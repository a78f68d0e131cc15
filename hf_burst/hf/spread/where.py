"""Where the tokens of a batch lie: on which rank, and in which of the joined texts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...errors import BatchError
from ...ranks.collectives import all_gather, group_sum
from ...ranks.group import ContextGroup
from ...ranks.layout import SequenceLayout
from ..batches.joining import Joined


@dataclass(frozen=True, eq=False)
class Where:
    """Where the tokens of a batch lie."""

    layout: SequenceLayout  # how the tokens are cut
    group: ContextGroup
    joined: Joined | None = None  # the texts that were joined into one row, if any begin alike
    share: Callable[[], None] = lambda: None  # called before anything is computed from tokens of other ranks

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of the batch as it was given."""
        if self.joined is None:
            return self.layout.batch_size, self.layout.length - self.layout.padding
        rows, tokens = self.joined.places.shape
        return rows, tokens

    @property
    def alone(self) -> bool:
        """Whether this rank holds all tokens as they were given."""
        return self.group.size == 1 and self.joined is None

    @cached_property
    def counts(self) -> Tensor | None:
        """How often each target of this rank counts, `(1, n)`, if texts were joined; `None` if each counts once."""
        return None if self.joined is None else self.layout.shard(self.joined.scored, self.group.rank)

    def check_texts(self) -> None:
        """Raises if tokens stand for several texts, and nothing tells which."""
        if self.joined is None and self.layout.parents:
            raise BatchError("Texts were joined when it was sharded. Leave share_prefixes=True out of BurstCollator.")

    def batch(self, own: Tensor, scores: bool = False) -> Tensor:
        """Returns values of all given tokens on every rank, from those of this rank's tokens, `(batch, n, ...)`.
        `scores` are 0 where the next token has no label."""
        self.share()
        row = self.layout.unshard(all_gather(own, self.group)) if self.group.size > 1 else own
        if self.joined is None:
            return row
        return self.joined.restored_scores(row) if scores else self.joined.restored(row)

    def by_rows(self, kept: Tensor) -> Tensor:
        """Returns values of kept tokens by rows; those of joined texts stand one after another."""
        return kept if self.joined is None else kept.unflatten(1, (len(self.joined.places), -1))[0]

    def from_kept(self, own: Tensor, local: Tensor) -> Tensor:
        """Returns values of kept tokens on every rank, `(batch, kept, ...)`, from those that this rank kept."""
        mine = (local >= 0).nonzero().flatten().to(own.device)
        every = own.new_zeros(len(own), len(local), *own.shape[2:]).index_copy(1, mine, own)
        return group_sum(every, self.group)

    @cached_property
    def local(self) -> Tensor:
        """Where each token of a row stands among this rank's tokens, or -1."""
        held = self.layout.indices(self.group.rank)
        local = torch.full((self.layout.length,), -1, device="cpu")
        local[held] = torch.arange(len(held), device="cpu")
        return local

    def values_at(self, places: Tensor, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Returns values of some tokens of the given batch, `row * tokens + token`, on every rank. All ranks call
        `compute`, so that all gather weights: it returns those of this rank, from their indices here, those among the
        chosen, and whether they stand for padding of joined texts."""
        self.share()
        row, token = places // self.shape[1], places % self.shape[1]
        if self.joined is not None:
            token, row = self.joined.places.flatten()[places], torch.zeros_like(places)
        local = self.local[token].masked_fill(token < 0, 0 if self.group.rank == 0 else -1)
        mine = (local >= 0).nonzero().flatten()
        at = mine if len(mine) else torch.zeros(1, dtype=torch.int64, device="cpu")
        own = row[at] * (self.layout.length // self.group.size) + local[at].clamp(min=0)
        found = compute(own, at, token[at] < 0)[: len(mine)]
        return self.from_kept(found[None], local)[0]
