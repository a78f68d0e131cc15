"""`AttentionRequest`, one value that describes an attention: built once, and flattened only at the operator."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import Schedule
from ..kernels import Scores
from ..plan import MaskPattern, name_of
from ..ranks.group import ContextGroup
from ..ring import HeadSizes

# A request as torch.library declares it. The group "" is one process.
SCHEMA = (
    "bool causal, int? window, int? attention_chunk_size, float scale, float softcap, int head_groups, "
    "str kernel, str schedule, str transport, str group"
)
_ONE_PROCESS, _CAUSAL = ContextGroup(), MaskPattern()
Flat = tuple[bool, int | None, int | None, float, float, int, str, str, str, str]


@dataclass(frozen=True)
class AttentionRequest:
    """The description of an attention, except its tensors and the layout of its batch.

    Args:
        group ([`ContextGroup`], defaults to one process): The ranks that hold the sequence.
        pattern ([`MaskPattern`], defaults to causal): What queries see inside their document.
        scores ([`Scores`], *optional*): Scale and soft-capping; the scale `head_dim ** -0.5` by default.
        kernel (`str`, defaults to `"auto"`): As in [`BurstConfig`].
        schedule (`str` or [`Schedule`], defaults to `"auto"`): As in [`BurstConfig`], or the chosen one.
        transport (`str`, defaults to `"auto"`): As in [`BurstConfig`].
        head_groups (`int`, defaults to 1): As in [`Memory`].
    """

    group: ContextGroup = _ONE_PROCESS
    pattern: MaskPattern = _CAUSAL
    scores: Scores | None = None
    kernel: str = "auto"
    schedule: str | Schedule = "auto"
    transport: str = "auto"
    head_groups: int = 1

    def with_scale(self, head_dim: int) -> "AttentionRequest":
        """Returns the request with default scores for this head size, if it has none."""
        return self if self.scores is not None else replace(self, scores=Scores(head_dim**-0.5))

    def flatten(self) -> Flat:
        """Flattens the request for the operator, in the order of `SCHEMA`."""
        assert self.scores is not None, "with_scale sets them"
        return (
            self.pattern.causal,
            self.pattern.window,
            self.pattern.attention_chunk_size,
            self.scores.scale,
            self.scores.softcap,
            self.head_groups,
            self.kernel,
            name_of(self.schedule, self.group.size) if isinstance(self.schedule, Schedule) else self.schedule,
            self.transport,
            self.group.name,
        )

    @classmethod
    def restore(cls, flat: Flat) -> "AttentionRequest":
        """Restores a request from [`AttentionRequest.flatten`]."""
        head_groups, kernel, schedule, transport, name = flat[5:]
        group, pattern, scores = ContextGroup.from_name(name), MaskPattern(*flat[:3]), Scores(*flat[3:5])
        asked = schedule if schedule == "auto" else Schedule.parse(schedule, group.size)
        return cls(group, pattern, scores, kernel, asked, transport, head_groups)


class InputKind(NamedTuple):
    """Heads, batch rows, tokens of this rank, dtype and device of q, k and v."""

    sizes: HeadSizes
    batch: int
    tokens: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> "InputKind":
        """Makes the kind of these tensors."""
        return cls(HeadSizes.of(q, k, v), q.shape[0], q.shape[1], q.dtype, q.device)
