"""The later keys that blocks of tokens which see each other add to causal attention, see [`hf_burst.plan.blocks`].

A separate attention over the rows of blocks computes them, and is merged by log-sum-exp. In the backward pass each of
the two attentions computes its part of the gradients from the merged output.
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
        attention ([`ShardedAttention`]): The attention over the packed rows of blocks.
        plan ([`LaterKeys`]): The rows of the blocks.
    """

    attention: ShardedAttention
    plan: LaterKeys

    def rows(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Copies the queries, keys and values of blocks, each `(1, rows, heads, head size)`."""
        queries, keys = self._places(q.device)
        return [_take(tensor, place) for tensor, place in ((q, queries), (k, keys), (v, keys))]

    def merge_(self, exchanges: Exchanges, rows: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
        """Computes this attention and merges it into the causal one.

        Args:
            exchanges ([`Exchanges`]): The messages.
            rows (sequence of `torch.Tensor`): From [`LaterAttention.rows`].
            out (`torch.Tensor` of shape `(B, n, Hq, Dv)`): Causal output of this rank's queries, changed in place.
            lse (`torch.Tensor` of shape `(B, n, Hq)`): Its log-sum-exp, changed in place.
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
        """Adds this attention's part of the gradients.

        Args:
            exchanges ([`Exchanges`]): The messages.
            rows (sequence of `torch.Tensor`): From [`LaterAttention.rows`].
            outputs (`tuple`): `dout`, `out`, `lse` and `delta` of the merged attention, as in
                [`ShardedAttention.backward`].
            gradients (sequence of `torch.Tensor`): `dq`, `dk` and `dv` of the causal attention, changed in place.
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
    """Drops the last row, which is a placeholder."""
    return place[0][:-1], place[1][:-1]


def _take(tensor: Tensor, place: Place) -> Tensor:
    """Copies these rows of `(batch, rows, ...)` to `(1, rows, ...)`. With one index a GPU copies whole rows; with two
    it looks up every element."""
    return tensor[0][place[1]][None] if len(tensor) == 1 else tensor[place][None]


def _put_(tensor: Tensor, place: Place, rows: Tensor) -> None:
    """Writes `rows` to their places."""
    if len(tensor) == 1:
        tensor[0][place[1]] = rows
    else:
        tensor[place] = rows


@lru_cache(maxsize=8)
def _places(spans: tuple[LocalSpan, ...], device: torch.device) -> Place:
    """Returns the rows of spans, each from end to start. The copies block the host, so every stream can read them."""
    rows = torch.cat([torch.full((stop - start,), row) for row, start, stop in spans])
    places = torch.cat([torch.arange(stop - 1, start - 1, -1) for _, start, stop in spans])
    return rows.to(device), places.to(device)
