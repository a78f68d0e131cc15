"""The contenders of attention.py: the limit without communication, and the schedules of hf_burst.

Every contender computes causal attention of one sequence that lies over the ranks, each in its own layout. The sequence
is one document or several, with or without a window. The attention of other packages is in peers.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from hf_burst import BurstConfig
from hf_burst.attention import AttentionRequest, ContextGroup, SequenceLayout, burst_attention
from hf_burst.config import Chunking, Schedule
from hf_burst.errors import ConfigError
from hf_burst.kernels import KernelRequest, select_kernel
from hf_burst.numerics import accumulation_dtype
from hf_burst.plan import Layer, Mask, MaskPattern, Plan, Shapes, rank_traffic
from hf_burst.plan.traffic import Pass
from hf_burst.plan.work import gathered_rows, rotating_of
from recipes.benchmarks.documents import Documents
from recipes.benchmarks.native import Native

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_PASSES: tuple[Pass, Pass] = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """One point of the matrix, as one rank sees it.

    Args:
        length (`int`): Tokens of the whole sequence.
        q_heads, kv_heads, head_dim (`int`): Heads of the whole attention.
        batch (`int`): Sequences.
        dtype (`torch.dtype`): Of q, k and v.
        device (`torch.device`): Where they lie.
        rank, ranks (`int`): This rank, and how many share the sequence.
        native ([`Native`]): The kernel of the limit and of peers that let one choose.
        kernel (`str`): The requested kernel: a name, or `"auto"`.
        documents ([`Documents`], *optional*): The documents that fill the sequence; one document by default.
        window (`int`, *optional*): Tokens that a query sees backwards beside itself.
        group (`ProcessGroup`, *optional*): The contender's own process group; `None` for one process.
    """

    length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    batch: int
    dtype: torch.dtype
    device: torch.device
    rank: int
    ranks: int
    native: Native
    kernel: str
    documents: Documents | None = None
    window: int | None = None
    group: dist.ProcessGroup | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a rank."""
        return self.length // self.ranks

    @property
    def mask(self) -> Mask:
        """The mask of every sequence of the batch."""
        bounds = self.documents.bounds(self.length, 2 * self.ranks) if self.documents else ()
        return Mask(self.length, window=self.window, documents=bounds)

    @property
    def whole(self) -> bool:
        """Whether every query sees all tokens before it."""
        return self.documents is None and self.window is None

    def layout(self, chunking: Chunking = "zigzag") -> SequenceLayout:
        """How the sequence lies over the ranks."""
        return SequenceLayout.for_batch([self.mask.documents] * self.batch, self.ranks, chunking)

    def flops(self) -> dict[str, float]:
        """Floating point operations of a rank in each pass.

        The forward pass has two products: 4·Hq·D for each pair of a query and a visible key, 2·S²·Hq·D for one
        document. The backward pass has five products (FlashAttention-2, arXiv 2307.08691, section 4.1).
        """
        pairs = self.length**2 / 2 if self.whole else self.mask.pairs
        forward = 4 * pairs * self.q_heads * self.head_dim * self.batch / self.ranks
        return {"forward": forward, "backward": 2.5 * forward, "both": 3.5 * forward}


@dataclass(frozen=True)
class Sent:
    """Bytes that leave a rank (the largest number of any rank) in one call.

    Args:
        forward, backward (`int`): Bytes of a pass, or `None` if they are not counted.
        source (`str`): `"plan"` for numbers of hf_burst's plan, otherwise the formula.
    """

    forward: int | None = None
    backward: int | None = None
    source: str = "not counted"


@dataclass(frozen=True)
class Prepared:
    """A contender, ready for a case.

    Args:
        attend (`Callable`): Computes out, in the form of q, from this rank's q, k and v as `cut` makes them.
        cut (`Callable`): Cuts this rank's part, in the contender's own form, out of a whole tensor `(B, S, heads, D)`.
            It works on the meta device too, where it tells shapes and strides.
        sent ([`Sent`]): The bytes that a rank sends.
        around (`Callable`): Makes a context for calls, which is entered before the clock starts.
        complete (`tuple[str, ...]`): Names of the results that equal those of the whole attention.
    """

    attend: Attend
    cut: Callable[[torch.Tensor], torch.Tensor]
    sent: Sent
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    complete: tuple[str, ...] = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Contender:
    """Something to measure.

    Args:
        name (`str`): Its name in results.
        family (`str`): Contenders of one family share a process group.
        build (`Callable`): Prepares it for a [`Case`], or raises the reason why it cannot run. Sends nothing.
        config (`dict`): Its settings, for readers of the results.
    """

    name: str
    family: str
    build: Callable[[Case], Prepared]
    config: dict[str, Any] = field(default_factory=dict)


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
        return Prepared(lambda q, k, v: case.native.attend(q, k, v, mask), cut, Sent(0, 0, "none"), complete=complete)

    return Contender("limit", "limit", build)


def hf_burst(schedule: str, settings: dict[str, Any] | None = None) -> Contender:
    """[`burst_attention`] with a schedule and further settings of [`BurstConfig`]."""
    settings = settings or {}

    def build(case: Case) -> Prepared:
        config = BurstConfig.from_dict({"kernel": case.kernel, **settings, "schedule": schedule})
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

        if layout.padding:
            raise ConfigError(f"{case.length} tokens cannot be cut into {len(layout.owners)} equal chunks.")
        return Prepared(attend, lambda whole: layout.shard(whole, case.rank), planned_bytes(schedule, case, layout))

    chunking = settings.get("chunking", "balanced")
    name = " ".join(["hf_burst", schedule, *([chunking] if chunking != "balanced" else [])])
    return Contender(name, "hf_burst", build, {**settings, "schedule": schedule})


def planned_bytes(name: str, case: Case, layout: SequenceLayout) -> Sent:
    """The bytes that a schedule sends: in the ring, by its plan, and in the exchange of heads.

    Bytes of `"auto"` are not counted, since it chooses a schedule while it runs.
    """
    schedule = None if name == "auto" else Schedule.parse(name, case.ranks)
    refusal = schedule and schedule.refusal(case.ranks, case.q_heads, case.kv_heads)
    if refusal:
        raise ConfigError(f"The schedule {name!r} cannot run: {refusal}.")
    if case.ranks == 1:
        return Sent(0, 0, "plan")
    if schedule is None:
        return Sent(source="not counted: those of the schedule that was chosen, see `said`")
    ulysses = schedule.ulysses
    itemsize, accumulator = case.dtype.itemsize, accumulation_dtype(case.dtype).itemsize
    request = KernelRequest(case.device.type, case.dtype, case.head_dim, case.head_dim)
    kernel = select_kernel(case.kernel, request)
    shapes = Shapes(
        q_heads=case.q_heads // ulysses,
        kv_heads=case.kv_heads // ulysses,
        head_dim=case.head_dim,
        value_dim=case.head_dim,
        itemsize=itemsize,
        accumulator_itemsize=accumulator,
        gradient_itemsize=accumulator if kernel.capabilities.wide else itemsize,
    )
    plan = Layer(layout.masks(MaskPattern(window=case.window)), layout.sharding, shapes).plan(ulysses)
    outputs = case.batch * case.tokens * case.q_heads * case.head_dim * itemsize
    inputs = outputs + 2 * case.batch * case.tokens * case.kv_heads * case.head_dim * itemsize
    scalars = case.batch * case.tokens * case.q_heads * accumulator
    exchanged = {"forward": inputs + outputs + scalars, "backward": outputs + 2 * scalars + inputs}
    forward, backward = (
        max(_ring_bytes(schedule, plan, ring_rank, direction, shapes) for ring_rank in range(plan.queries.ranks))
        + exchanged[direction] * (ulysses - 1) // ulysses
        for direction in _PASSES
    )
    return Sent(forward, backward, "plan")


def _ring_bytes(schedule: Schedule, plan: Plan, ring_rank: int, direction: Pass, shapes: Shapes) -> int:
    """Bytes that a ring rank sends in one pass.

    With `"all_gather"`, keys are fetched again in the backward pass, and their gradients return as sums.
    """
    if schedule.ring != "all_gather":
        return rank_traffic(plan, ring_rank, direction, rotating_of(schedule, direction), shapes).bytes
    row = len(plan.masks) * shapes.kv_heads * (shapes.head_dim + shapes.value_dim)
    rows_fetched, rows_sent = gathered_rows(plan, ring_rank)
    returned = rows_fetched * shapes.accumulator_itemsize if direction == "backward" else 0
    return row * (rows_sent * shapes.itemsize + returned)


def for_group(case: Case, group: dist.ProcessGroup | None) -> Case:
    """The case with a contender's own process group."""
    return replace(case, group=group)
