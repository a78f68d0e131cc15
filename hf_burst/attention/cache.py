"""What checkpointed layers keep of their attention, so that the backward pass does not compute it a second time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KernelError
from ..layout import SequenceLayout
from ..offload import Kept, kept_here
from ..resources import resources_of
from .operator import TrackedAttention
from .prepare import InputKind, sharded_attention
from .request import AttentionRequest


class CachedAttention(NamedTuple):
    """The results of an attention: all of them, or the last rows of every rank."""

    out: Kept  # (B, rows, Hq, Dv)
    lse: Kept  # (B, rows, Hq)
    beginning: SequenceLayout | None  # of the tokens whose rows are missing
    shape: torch.Size  # of q
    request: AttentionRequest

    def recall(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, encoded: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The results of the operator for the same inputs: missing rows are computed, heads are exchanged again."""
        request, out, lse = self.request, self.out(), self.lse()
        if self.beginning is not None:
            rows = q.shape[1] - out.shape[1]
            first = (tensor[:, :rows] for tensor in (q, k, v))
            first_out, first_lse, _ = torch.ops.hf_burst.attention(
                *first, sinks, self.beginning.encode(), *request.flatten()
            )
            out = torch.cat([first_out, out], 1)
            lse = torch.cat([first_lse.transpose(1, 2), lse.transpose(1, 2)], 2).transpose(1, 2)
        resources = resources_of(request.group)
        attention = sharded_attention(resources, request.flatten(), encoded, InputKind.of(q, k, v))
        if attention.schedule.ulysses == 1:
            return out, lse, []
        with resources.messages(q.device, request.transport, attention.near_ranks) as exchanges:
            return out, lse, attention.exchanged(exchanges, q, k, v)


class AttentionCache:
    """The attentions of one run of a checkpointed region, in their order.

    Args:
        share (`float`): How much is kept, from the end of the sequence; see [`BurstConfig`].
        keep (callable): From a tensor to what returns it again.
    """

    def __init__(self, share: float, keep: Callable[[Tensor], Kept] = kept_here) -> None:
        self.share, self.keep = share, keep
        self.entries: list[CachedAttention] = []
        self.position: int | None = None  # of the next entry where the region runs again

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, encoded: Tensor, request: AttentionRequest
    ) -> Tensor:
        """`torch.ops.hf_burst.attention` without its `lse`: computed, or recalled where the region runs again."""
        tracked = torch.is_grad_enabled()  # an attention without a graph is none that the backward pass asks for
        if tracked and self.position is not None and self.position < len(self.entries):
            entry = self.entries[self.position]
            self.position += 1
            _check_unchanged(entry, q, request)
            recalled: Any = TrackedAttention.apply(q, k, v, sinks, encoded, request.flatten(), entry.recall)
            again: Tensor = recalled[0]
            return again
        out: Tensor
        out, lse, _ = torch.ops.hf_burst.attention(q, k, v, sinks, encoded, *request.flatten())
        if tracked and self.position is None:
            kept_out, kept_lse, beginning = out.detach(), lse.detach(), None
            if request.pattern.causal and self.share < 1:
                beginning = SequenceLayout.decode(encoded.numpy().tobytes()).beginning(1 - self.share)
            if beginning is not None:
                rows = beginning.length // beginning.ranks
                kept_out, kept_lse = kept_out[:, rows:].clone(), kept_lse[:, rows:].clone()
            kept = self.keep(kept_out), self.keep(kept_lse)
            self.entries.append(CachedAttention(*kept, beginning, q.shape, request))
        return out


def _check_unchanged(entry: CachedAttention, q: Tensor, request: AttentionRequest) -> None:
    """Raises if the region runs otherwise than it did first."""
    if (entry.shape, entry.request) != (q.shape, request):
        raise KernelError(
            "A checkpointed layer called its attention in another order when it ran again. Keep nothing of it: "
            "BurstConfig(attention_keep=0.0)."
        )
