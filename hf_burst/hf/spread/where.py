"""Where the tokens of a batch lie: on which rank, and in which of the texts that were joined."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import BatchError
from ...ranks.collectives import gather_tokens
from ...ranks.group import ContextGroup
from ...ranks.layout import SequenceLayout
from ..batches.joining import Joined


class Held(NamedTuple):
    """What a rank holds of chosen tokens; where it holds none, one that does not count, so that all ranks take part.

    Args:
        chosen (`torch.LongTensor` of shape `(m,)`): Their numbers among the chosen.
        own (`torch.LongTensor` of shape `(m,)`): Their numbers among the rank's tokens.
        padding (`torch.BoolTensor` of shape `(m,)`): Those that stand for padding of joined texts: of the first rank.
        counts (`bool`): Whether there is any.
    """

    chosen: Tensor
    own: Tensor
    padding: Tensor
    counts: bool


@dataclass(frozen=True, eq=False)
class Where:
    """Where the tokens of a batch lie.

    Args:
        layout ([`SequenceLayout`]): How they are cut.
        group ([`ContextGroup`]): The ranks.
        joined ([`Joined`], *optional*): The texts that one row stands for, if any begin alike.
        share (`Callable`, *optional*): Is called before anything follows from tokens of other ranks.
    """

    layout: SequenceLayout
    group: ContextGroup
    joined: Joined | None = None
    share: Callable[[], None] = lambda: None

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
        """How often each target of this rank counts, `(1, n)`, where texts were joined; else once."""
        return None if self.joined is None else self.layout.shard(self.joined.scored, self.group.rank)

    def fits(self, other: "Where") -> bool:
        """Whether the tokens of another batch lie as these do."""
        one, two = self.joined, other.joined
        same = one is two if one is None or two is None else torch.equal(one.places, two.places)
        return same and self.layout == other.layout

    def check_texts(self) -> None:
        """Raises where tokens stand for several texts, and nothing tells which."""
        if self.joined is None and self.layout.parents:
            raise BatchError(
                "The texts of the batch were joined when it was sharded, so that their tokens stand for several. Leave "
                "share_prefixes=True out of the config of BurstCollator, or give full batches."
            )

    def batch(self, own: Tensor) -> Tensor:
        """Values of this rank's tokens, `(batch, n, ...)`, for all tokens as they were given, on every rank."""
        row = self._gathered(own)
        return row if self.joined is None else self.joined.restored(row)

    def numbers(self, own: Tensor) -> Tensor:
        """The same for numbers that tokens have where what follows them has a label."""
        row = self._gathered(own)
        return row if self.joined is None else self.joined.restored_scores(row)

    def by_rows(self, kept: Tensor) -> Tensor:
        """Values of tokens that were kept, by rows; those of joined texts stand one after another."""
        return kept if self.joined is None else kept.unflatten(1, (len(self.joined.places), -1))[0]

    def held(self, places: Tensor) -> Held:
        """What this rank holds of tokens of the given batch, `row * tokens + token`."""
        self.share()
        tokens = self.shape[1]
        row, token = places // tokens, places % tokens
        if self.joined is not None:
            token, row = self.joined.places.flatten()[places], torch.zeros_like(places)
        held = self.layout.indices(self.group.rank)
        local = torch.full((self.layout.length + 1,), -1, device="cpu")  # and one more, for padding of joined texts
        local[held] = torch.arange(len(held), device="cpu")
        local[-1] = 0 if self.group.rank == 0 else -1
        mine = (local[token] >= 0).nonzero().flatten()
        chosen = mine if len(mine) else torch.zeros(1, dtype=torch.int64, device="cpu")
        own = row[chosen] * len(held) + local[token[chosen]].clamp(min=0)
        return Held(chosen, own, token[chosen] < 0, len(mine) > 0)

    def _gathered(self, own: Tensor) -> Tensor:
        self.share()
        return gather_tokens(own, self.layout, self.group) if self.group.size > 1 else own
