"""The states after each row's last token, from which generation continues."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..plan import Segments
from ..ranks.collectives import all_gather
from ..ranks.group import ContextGroup


@dataclass
class LastStates:
    """Collects the final states of rows, each on the rank that holds the last token.

    Args:
        places (sequence of `tuple[int, int]`): For each row, the rank with its last token, and the segment there.
        group ([`ContextGroup`]): The ranks.
        states (`dict`): The states found by this rank, by segment.
    """

    places: Sequence[tuple[int, int]]
    group: ContextGroup
    states: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Segments, group: ContextGroup, stops: Sequence[int]) -> "LastStates":
        """Makes the collector for rows that end before the tokens `stops`."""
        return cls([segments.holder(row, stop - 1) for row, stop in enumerate(stops)], group)

    @property
    def own(self) -> set[int]:
        """This rank's segments whose final states are needed."""
        return {index for rank, index in self.places if rank == self.group.rank}

    def on_all_ranks(self, like: Tensor) -> Tensor:
        """Gathers all final states, `(rows, ...)`, on every rank. All ranks call it.

        Args:
            like (`torch.Tensor`): A tensor with the shape and dtype of one state.
        """
        mine = like.new_zeros(len(self.places), *like.shape)
        for row, (rank, index) in enumerate(self.places):
            if rank == self.group.rank:
                mine[row] = self.states[index]
        every = all_gather(mine, self.group)
        return torch.stack([every[rank][row] for row, (rank, _) in enumerate(self.places)])
