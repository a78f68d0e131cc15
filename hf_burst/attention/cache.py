"""Saved attention results of checkpointed layers, so that the backward pass does not recompute them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import KernelError
from ..layers.offload import Saved, saved_in_place
from ..ranks.layout import SequenceLayout
from ..ring.resources import resources_of
from .operator import Results, TrackedAttention
from .prepare import sharded_attention
from .request import AttentionRequest, InputKind


class CachedAttention(NamedTuple):
    """The results of an attention: all rows, or the last ones of every rank."""

    out: Saved  # (B, rows, Hq, Dv)
    lse: Saved  # (B, rows, Hq)
    beginning: SequenceLayout | None  # the layout of the missing rows
    shape: torch.Size  # of q
    request: AttentionRequest

    def output(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Returns the operator's output for the same inputs, without `lse`; computes missing rows."""
        kept = self.out()
        first = self._missing(q, k, v, sinks, kept)
        return kept if first is None else torch.cat([first[0], kept], 1)

    def recall(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, encoded: Tensor) -> Results:
        """Returns the operator's results for the same inputs; computes missing rows and exchanges heads again."""
        request, out, lse = self.request, self.out(), self.lse()
        first = self._missing(q, k, v, sinks, out)
        if first is not None:
            out = torch.cat([first[0], out], 1)
            lse = torch.cat([first[1].transpose(1, 2), lse.transpose(1, 2)], 2).transpose(1, 2)
        resources = resources_of(request.group)
        attention, later = sharded_attention(resources, request.flatten(), encoded, InputKind.of(q, k, v))
        if attention.schedule.ulysses == 1:
            return out, lse, []
        with resources.messages(q.device, request.transport, attention.near_ranks) as exchanges:
            kept = attention.exchanged(exchanges, q, k, v)
        return out, lse, kept if later is None else [*kept, *later.rows(q, k, v)]

    def _missing(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kept: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Computes the first rows of the results if they were not saved."""
        if self.beginning is None:
            return None
        rows = q.shape[1] - kept.shape[1]
        first = (tensor[:, :rows] for tensor in (q, k, v))
        out, lse, _ = torch.ops.hf_burst.attention(*first, sinks, self.beginning.encode(), *self.request.flatten())
        return out, lse


class AttentionCache:
    """The attentions of one run of a checkpointed region, in order.

    Args:
        share (`float`): The share to save, from the end of the sequence; see [`BurstConfig`]. 0.0 saves nothing.
        keep (callable): Saves a tensor, and returns a function that returns it.
    """

    def __init__(self, share: float, keep: Callable[[Tensor], Saved] = saved_in_place) -> None:
        self.share, self.keep = share, keep
        # `None` for an attention without a graph, which the backward pass does not need
        self.entries: list[CachedAttention | None] = []
        self.position: int | None = None  # the next entry, if the region is recomputed
        self.for_output = False  # whether it is recomputed without a graph

    def start(self, again: bool, for_output: bool) -> None:
        """Starts a run of the region: the first one, or a recomputation (`again`) for its output only or its graph."""
        self.position = 0 if again else None
        self.for_output = for_output

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, encoded: Tensor, request: AttentionRequest
    ) -> Tensor:
        """Computes `torch.ops.hf_burst.attention` without `lse`, or recalls it if the region is recomputed."""
        tracked, entry = torch.is_grad_enabled(), None
        if self.position is not None and self.position < len(self.entries):
            entry = self.entries[self.position]
            self.position += 1
            _check_order(entry, q, request, tracked)
        if entry is not None:
            if self.for_output:
                return entry.output(q, k, v, sinks)
            return TrackedAttention.apply(q, k, v, sinks, encoded, request.flatten(), entry.recall)[0]
        out, lse, _ = torch.ops.hf_burst.attention(q, k, v, sinks, encoded, *request.flatten())
        first = self.position is None and self.share > 0
        if first and not tracked:
            self.entries.append(None)
        elif first:
            kept_out, kept_lse, beginning = out.detach(), lse.detach(), None
            if request.pattern.causal and self.share < 1:
                beginning = SequenceLayout.decode(encoded.numpy().tobytes()).beginning(1 - self.share)
            if beginning is not None:
                rows = beginning.length // beginning.ranks
                kept_out, kept_lse = kept_out[:, rows:].clone(), kept_lse[:, rows:].clone()
            kept = self.keep(kept_out), self.keep(kept_lse)
            self.entries.append(CachedAttention(*kept, beginning, q.shape, request))
        return out


def _check_order(entry: CachedAttention | None, q: Tensor, request: AttentionRequest, tracked: bool) -> None:
    """Raises a KernelError if the recomputation differs from the first run."""
    if tracked if entry is None else (entry.shape, entry.request) != (q.shape, request):
        raise KernelError(
            "A checkpointed layer called its attention in another order when it ran again. Keep nothing of it: "
            "BurstConfig(memory=hf_burst.Memory(attention_keep=0.0))."
        )
