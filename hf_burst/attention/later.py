"""What blocks of tokens that see each other add to a causal attention: their later keys, see [`hf_burst.plan.blocks`].

They are computed as an attention of their own over the rows of blocks, and merged by log-sum-exp. In the backward pass
each of the two attentions has its part of the gradients, from the merged output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..plan.blocks import LaterKeys, LocalSpan
from ..ring import Exchanges, HeadSizes, ShardedAttention, merge_

Place = tuple[Tensor, Tensor]  # rows of the batch, and rows of a shard


@dataclass(frozen=True, eq=False)
class LaterAttention:
    """The attention of queries to later keys of their blocks.

    Args:
        attention ([`ShardedAttention`]): Over the packed rows of blocks.
        plan ([`LaterKeys`]): Which rows these are.
    """

    attention: ShardedAttention
    plan: LaterKeys

    def rows(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """The queries, keys and values of blocks: copies of shape `(1, rows, heads, head size)`."""
        queries, keys = self._places(q.device)
        return [_take(tensor, place) for tensor, place in ((q, queries), (k, keys), (v, keys))]

    def merge_(self, exchanges: Exchanges, rows: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
        """Merges it into the causal attention.

        Args:
            exchanges ([`Exchanges`]): The messages.
            rows (sequence of `torch.Tensor`): Those of [`LaterAttention.rows`].
            out (`torch.Tensor` of shape `(B, n, Hq, Dv)`): The causal output of this rank's queries; changed.
            lse (`torch.Tensor` of shape `(B, n, Hq)`): Its log-sum-exp; changed.
        """
        q, k, v = rows
        part, part_lse, _ = self.attention.forward(exchanges, q, k, v)
        place = _real(self._places(q.device)[0])
        total, total_lse = _take(out, place)[0].to(lse.dtype), _take(lse, place)[0]
        merge_(total, total_lse, part[0, :-1], part_lse[0, :-1])
        _put_(out, place, total.to(out.dtype))
        _put_(lse, place, total_lse)

    def add_gradients_(
        self,
        exchanges: Exchanges,
        rows: Sequence[Tensor],
        outputs: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
        gradients: Sequence[Tensor],
    ) -> None:
        """Adds its part of the gradients.

        Args:
            exchanges ([`Exchanges`]): The messages.
            rows (sequence of `torch.Tensor`): Those of [`LaterAttention.rows`].
            outputs (`tuple`): `dout`, `out`, `lse` and `delta` of the merged attention, as in
                [`ShardedAttention.backward`].
            gradients (sequence of `torch.Tensor`): `dq`, `dk` and `dv` of the causal attention; changed.
        """
        queries, keys = self._places(rows[0].device)
        dout, out, lse, delta = (None if value is None else _take(value, queries) for value in outputs)
        assert dout is not None
        assert lse is not None
        added = self.attention.backward(exchanges, HeadSizes.of(*rows), rows, dout, out, lse, delta)
        for total, part, place in zip(gradients, added, map(_real, (queries, keys, keys)), strict=True):
            _put_(total, place, _take(total, place)[0] + part[0, :-1])

    def _places(self, device: torch.device) -> tuple[Place, Place]:
        rank = self.attention.group.rank
        return _places(self.plan.query_spans[rank], device), _places(self.plan.key_spans[rank], device)


def _real(place: Place) -> Place:
    """Without the last row, which stands for nothing."""
    return place[0][:-1], place[1][:-1]


def _take(tensor: Tensor, place: Place) -> Tensor:
    """A copy of these rows of `(batch, rows, ...)`, as `(1, rows, ...)`. With one index a GPU copies whole rows; with
    two it asks for the place of each element."""
    return tensor[0][place[1]][None] if len(tensor) == 1 else tensor[place][None]


def _put_(tensor: Tensor, place: Place, rows: Tensor) -> None:
    """Writes these rows."""
    if len(tensor) == 1:
        tensor[0][place[1]] = rows
    else:
        tensor[place] = rows


@lru_cache(maxsize=8)
def _places(spans: tuple[LocalSpan, ...], device: torch.device) -> Place:
    """The rows of spans, each from its end to its start. They are there for every stream, since the host waits."""
    rows = torch.cat([torch.full((stop - start,), row) for row, start, stop in spans])
    places = torch.cat([torch.arange(stop - 1, start - 1, -1) for _, start, stop in spans])
    return rows.to(device), places.to(device)
