"""The states behind the last token of each row, with which generation goes on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..plan import Segments
from ..ranks.collectives import all_gather
from ..ranks.group import ContextGroup


@dataclass
class LastStates:
    """Takes up the states at the end of rows, each on the rank that holds the last token.

    Args:
        places (sequence of `tuple[int, int]`): For each row, this rank, and the segment there.
        group ([`ContextGroup`]): The ranks.
        states (`dict`): Those that this rank found, by segment; one of several in a segment's place is another row's.
    """

    places: Sequence[tuple[int, int]]
    group: ContextGroup
    states: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Segments, group: ContextGroup, stops: Sequence[int]) -> "LastStates":
        """Those of rows that end before these tokens."""
        return cls([segments.holder(row, stop - 1) for row, stop in enumerate(stops)], group)

    @property
    def own(self) -> set[int]:
        """The segments of this rank whose end is asked for."""
        return {index for rank, index in self.places if rank == self.group.rank}

    def on_all_ranks(self, like: Tensor) -> Tensor:
        """All of them, `(rows, ...)`, on every rank, which all call it.

        Args:
            like (`torch.Tensor`): Of the shape and dtype of one.
        """
        mine = like.new_zeros(len(self.places), *like.shape)
        for row, (rank, index) in enumerate(self.places):
            if rank == self.group.rank:
                mine[row] = self.states[index]
        every = all_gather(mine, self.group)
        return torch.stack([every[rank][row] for row, (rank, _) in enumerate(self.places)])
