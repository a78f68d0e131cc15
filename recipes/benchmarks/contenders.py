"""The contenders of attention.py: the limit without communication, and the schedules of hf_burst.

Every contender computes causal attention of one sequence that lies over the ranks, each in its own layout. The sequence
is one document or several, with or without a window. The attention of other packages is in peers.py.
"""

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hf_burst import BurstConfig
from hf_burst.attention import AttentionRequest, ContextGroup, SequenceLayout, burst_attention
from hf_burst.config import Chunking, Schedule
from hf_burst.errors import ConfigError
from hf_burst.plan import Mask, MaskPattern
from recipes.benchmarks.native import Native

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Documents:
    """Lengths of packed documents, drawn so that every contender takes them."""

    shortest: int  # tokens of a document; their logarithms are uniform up to those of the longest
    longest: int

    def bounds(self, length: int, multiple: int) -> tuple[int, ...]:
        """Cumulative boundaries of documents that fill `length` tokens.

        Every document has a multiple of `multiple` tokens, since some peers take no others. Documents of a short
        sequence are shorter in proportion, so that there are several.
        """
        scale = min(1.0, length / (4 * self.longest))
        draw, bounds = random.Random(length), [0]
        while bounds[-1] < length:
            size = scale * math.exp(draw.uniform(math.log(self.shortest), math.log(self.longest)))
            whole = max(multiple, round(size / multiple) * multiple)
            bounds.append(min(length, bounds[-1] + whole))
        return tuple(bounds)


@dataclass(frozen=True)
class Case:
    """One point of the matrix, as one rank sees it."""

    length: int  # tokens of the whole sequence
    q_heads: int  # heads of the whole attention
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of q, k and v
    device: torch.device  # where they lie
    rank: int
    ranks: int  # that share the sequence
    native: Native  # the kernel of the limit and of peers that let one choose
    kernel: str  # the requested kernel: a name, or `"auto"`
    documents: Documents | None = None  # the documents that fill the sequence; one document by default
    window: int | None = None  # tokens that a query sees backwards beside itself
    group: dist.ProcessGroup | None = None  # the contender's own process group; `None` for one process

    @property
    def tokens(self) -> int:
        """Tokens of a rank."""
        return self.length // self.ranks

    @property
    def mask(self) -> Mask:
        """The mask of the sequence."""
        bounds = self.documents.bounds(self.length, 2 * self.ranks) if self.documents else ()
        return Mask(self.length, window=self.window, documents=bounds)

    @property
    def whole(self) -> bool:
        """Whether every query sees all tokens before it."""
        return self.documents is None and self.window is None

    def layout(self, chunking: Chunking = "zigzag") -> SequenceLayout:
        """How the sequence lies over the ranks."""
        return SequenceLayout.for_batch([self.mask.documents], self.ranks, chunking)

    def flops(self) -> dict[str, float]:
        """Floating point operations of a rank in each pass.

        The forward pass has two products: 4·Hq·D for each pair of a query and a visible key, 2·S²·Hq·D for one
        document. The backward pass has five products (FlashAttention-2, arXiv 2307.08691, section 4.1).
        """
        pairs = self.length**2 / 2 if self.whole else self.mask.pairs
        forward = 4 * pairs * self.q_heads * self.head_dim / self.ranks
        return {"forward": forward, "backward": 2.5 * forward, "both": 3.5 * forward}


@dataclass(frozen=True)
class Prepared:
    """A contender, ready for a case."""

    attend: Attend  # computes out, in the form of q, from this rank's q, k and v as `cut` makes them
    # cuts this rank's part, in the contender's own form, out of a whole tensor `(B, S, heads, D)`; of one on the meta
    # device too, which then tells shapes and strides
    cut: Callable[[torch.Tensor], torch.Tensor]
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # entered before the clock of a call starts
    complete: tuple[str, ...] = ("out", "dq", "dk", "dv")  # results that equal those of the whole attention


@dataclass(frozen=True)
class Contender:
    """Something to measure."""

    name: str  # its name in results
    family: str  # contenders of one family share a process group
    # prepares it for a [`Case`], or raises the reason why it cannot run; sends nothing
    build: Callable[[Case], Prepared]
    config: dict[str, Any] = field(default_factory=dict)  # its settings, for readers of the results


def limit() -> Contender:
    """The limit without communication: the same kernel on all tokens and a rank's share of the heads.

    It computes as many floating point operations as the sharded attention, and sends nothing.
    """

    def build(case: Case) -> Prepared:
        ranks, kv_heads = case.ranks, case.kv_heads
        if case.q_heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            raise ConfigError(f"{case.q_heads} query and {kv_heads} key heads do not divide evenly over {ranks} ranks.")
        whole = kv_heads % ranks == 0

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            heads = tensor.shape[2]
            share = max(heads // ranks, 1)
            first = case.rank * heads // ranks
            return tensor[:, :, first : first + share].contiguous()

        complete = ("out", "dq", "dk", "dv") if whole else ("out", "dq")
        mask = case.mask
        return Prepared(lambda q, k, v: case.native.attend(q, k, v, mask), cut, complete=complete)

    return Contender("limit", "limit", build)


def hf_burst(name: str, settings: dict[str, Any] | None = None) -> Contender:
    """[`burst_attention`] with the schedule of a name and further settings of [`BurstConfig`]."""
    settings = settings or {}

    def build(case: Case) -> Prepared:
        config = BurstConfig.from_dict({"kernel": case.kernel, **settings, "schedule": name})
        layout = case.layout(config.chunking_over(case.ranks))
        request = AttentionRequest(
            group=ContextGroup.from_mesh(case.group) if case.group else ContextGroup(),
            pattern=MaskPattern(window=case.window),
            kernel=config.kernel,
            schedule=config.schedule,
            transport=config.transport,
        )

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return burst_attention(q, k, v, layout, request, check=False)[0]

        schedule = None if name == "auto" else Schedule.parse(name, case.ranks)
        refusal = schedule and schedule.refusal(case.ranks, case.q_heads, case.kv_heads)
        if refusal:
            raise ConfigError(f"The schedule {name!r} cannot run: {refusal}.")
        if layout.padding:
            raise ConfigError(f"{case.length} tokens cannot be cut into {len(layout.owners)} equal chunks.")
        return Prepared(attend, lambda whole: layout.shard(whole, case.rank))

    chunking = settings.get("chunking", "balanced")
    title = " ".join(["hf_burst", name, *([chunking] if chunking != "balanced" else [])])
    return Contender(title, "hf_burst", build, {**settings, "schedule": name})
