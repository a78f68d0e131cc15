"""What a benchmark compares: the limit without communication and hf_burst's schedules. Recipes add their peers.

Every contender does causal attention of a sequence that lies over the ranks, each in the layout that it wants: one
document or several, with or without a window.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..config import BurstConfig, Chunking, Schedule
from ..errors import ConfigError
from ..kernels import KernelRequest, explain_kernels, select_kernel
from ..layout import SequenceLayout
from ..mesh import ContextGroup
from ..op import burst_attention
from ..plan import Layer, Mask, MaskPattern, Plan, Shapes, rank_traffic
from ..plan.traffic import Pass
from ..plan.work import gathered_rows, rotating_of
from ..ring import accumulation_dtype
from .bench_ranks import Ranks

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
AttendMasked = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mask], torch.Tensor]
_PASSES: tuple[Pass, Pass] = ("forward", "backward")


@dataclass(frozen=True)
class Native:
    """A kernel as its own package offers it: causal attention of `(B, S, H, D)` tensors on one device, with autograd.

    Args:
        name (`str`): As in `BurstConfig(kernel=...)`.
        attend (`Callable`): q, k, v and the mask of every row to out.
    """

    name: str
    attend: AttendMasked


@dataclass(frozen=True)
class Documents:
    """Lengths of packed documents, drawn so that every contender takes them.

    Args:
        shortest, longest (`int`): Tokens of a document; the logarithms between them are uniform.
        seed (`int`, defaults to 0): Others are other draws.
    """

    shortest: int
    longest: int
    seed: int = 0

    def bounds(self, length: int, multiple: int) -> tuple[int, ...]:
        """Cumulative boundaries of documents that fill `length` tokens, of multiples of `multiple` tokens each: some
        peers take no others. In short sequences they are shorter in proportion, so that there are several."""
        scale = min(1.0, length / (4 * self.longest))
        draw, bounds = random.Random(length + self.seed), [0]
        while bounds[-1] < length:
            size = scale * math.exp(draw.uniform(math.log(self.shortest), math.log(self.longest)))
            whole = max(multiple, round(size / multiple) * multiple)
            bounds.append(min(length, bounds[-1] + whole))
        return tuple(bounds)


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
        kernel (`str`): What was asked for: a name, or `"auto"`.
        documents ([`Documents`], *optional*): Those that fill the sequence; one by default.
        window (`int`, *optional*): Tokens that a query sees backwards beside itself.
        group (`ProcessGroup`, *optional*): The contender's own messages; `None` for one process.
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
        """That of every sequence."""
        bounds = self.documents.bounds(self.length, 2 * self.ranks) if self.documents else ()
        return Mask(self.length, window=self.window, documents=bounds)

    @property
    def whole(self) -> bool:
        """Whether a query sees all that is before it."""
        return self.documents is None and self.window is None

    def layout(self, chunking: Chunking = "zigzag") -> SequenceLayout:
        """Which rank holds which tokens."""
        return SequenceLayout.for_batch([self.mask.documents] * self.batch, self.ranks, chunking)

    def flops(self) -> dict[str, float]:
        """Floating point operations of a rank: two products forward, 4·Hq·D for each pair of a query and a key that it
        sees (2·S²·Hq·D for one document), 2.5 times as many backward (five products; FlashAttention-2, arXiv
        2307.08691, section 4.1)."""
        pairs = self.length**2 / 2 if self.whole else self.mask.pairs
        forward = 4 * pairs * self.q_heads * self.head_dim * self.batch / self.ranks
        return {"forward": forward, "backward": 2.5 * forward, "both": 3.5 * forward}


@dataclass(frozen=True)
class Sent:
    """Bytes that leave a rank (the largest number of any rank) in one call.

    Args:
        forward, backward (`int`): Bytes; `None` where nobody counted them.
        source (`str`): `"plan"` for what hf_burst's plan sends, else the formula.
    """

    forward: int | None = None
    backward: int | None = None
    source: str = "not counted"


@dataclass(frozen=True)
class Prepared:
    """A contender, ready for a case.

    Args:
        attend (`Callable`): This rank's q, k and v, as `cut` makes them, to out in the form of q.
        cut (`Callable`): From a whole tensor `(B, S, heads, D)` to this rank's part in the contender's own form. It
            moves no numbers but those, so that it tells shapes and strides of a tensor on the meta device.
        sent ([`Sent`]): The traffic.
        around (`Callable`): A context for calls, entered before the clock starts.
        complete (`tuple[str, ...]`): Which of out, dq, dk and dv are those of the whole attention.
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
        family (`str`): Contenders of a family share their connections.
        build (`Callable`): Makes it ready for a [`Case`], or raises the reason why it cannot; communicates nothing.
        config (`dict`): What a reader of the results should know.
    """

    name: str
    family: str
    build: Callable[[Case], Prepared]
    config: dict[str, Any] = field(default_factory=dict)


def limit() -> Contender:
    """The limit without communication: the same kernel on all tokens and a rank's share of the heads. As many floating
    point operations, and no messages."""

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
    """[`burst_attention`] by a schedule of [`BurstConfig`], and further settings of it."""
    settings = settings or {}

    def build(case: Case) -> Prepared:
        config = BurstConfig.from_dict({"kernel": case.kernel, **settings, "schedule": schedule})
        layout = case.layout(config.chunking_over(case.ranks))
        members = ContextGroup.from_mesh(case.group) if case.group else ContextGroup()

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return burst_attention(q, k, v, layout, members, window=case.window, config=config, check=False)[0]

        if layout.padding:
            raise ConfigError(f"{case.length} tokens cannot be cut into {len(layout.owners)} equal chunks.")
        return Prepared(attend, lambda whole: layout.shard(whole, case.rank), _planned(schedule, case, layout))

    chunking = settings.get("chunking", "balanced")
    name = " ".join(["hf_burst", schedule, *([chunking] if chunking != "balanced" else [])])
    return Contender(name, "hf_burst", build, {**settings, "schedule": schedule})


def _planned(schedule: str, case: Case, layout: SequenceLayout) -> Sent:
    """The bytes of a schedule: what the plan of its ring sends, and what its exchange of heads does. `"auto"` chooses
    while it runs, and logs what."""
    route = None if schedule == "auto" else Schedule.parse(schedule, case.ranks)
    refusal = route and route.refusal(case.ranks, case.q_heads, case.kv_heads)
    if refusal:
        raise ConfigError(f"The schedule {schedule!r} cannot run: {refusal}.")
    if case.ranks == 1:
        return Sent(0, 0, "plan")
    if route is None:
        return Sent(source="not counted: those of the schedule that was chosen, see `said`")
    ulysses = route.ulysses
    itemsize, accumulator = case.dtype.itemsize, accumulation_dtype(case.dtype).itemsize
    request = KernelRequest(case.device.type, case.dtype, case.head_dim, case.head_dim)
    kernel = select_kernel(case.kernel, request)
    returned = accumulator if kernel.capabilities.wide else itemsize
    heads, dims = (case.q_heads // ulysses, case.kv_heads // ulysses), (case.head_dim, case.head_dim)
    shapes = Shapes(*heads, *dims, itemsize, accumulator, returned)
    plan = Layer(layout.masks(MaskPattern(window=case.window)), layout.sharding, shapes).plan(ulysses)
    outputs = case.batch * case.tokens * case.q_heads * case.head_dim * itemsize
    inputs = outputs + 2 * case.batch * case.tokens * case.kv_heads * case.head_dim * itemsize
    scalars = case.batch * case.tokens * case.q_heads * accumulator
    exchanged = {"forward": inputs + outputs + scalars, "backward": outputs + 2 * scalars + inputs}
    forward, backward = (
        max(_around(route, plan, place, direction, shapes) for place in range(plan.queries.ranks))
        + exchanged[direction] * (ulysses - 1) // ulysses
        for direction in _PASSES
    )
    return Sent(forward, backward, "plan")


def _around(route: Schedule, plan: Plan, place: int, direction: Pass, shapes: Shapes) -> int:
    """Bytes that a place of the ring sends in one pass. Gathered keys are fetched again in the backward pass, and their
    gradients return as sums."""
    if route.ring != "all_gather":
        return rank_traffic(plan, place, direction, rotating_of(route, direction), shapes).bytes
    row = len(plan.masks) * shapes.kv_heads * (shapes.head_dim + shapes.value_dim)
    fetched, given = gathered_rows(plan, place)
    returned = fetched * shapes.accumulator_itemsize if direction == "backward" else 0
    return row * (given * shapes.itemsize + returned)


def choose_native(
    requested: str, ranks: Ranks, dtype: torch.dtype, head_dim: int, mask: Mask
) -> tuple[Native, list[str]]:
    """The kernel of the limit: the one asked for, or the fastest that computes such a mask here forward and backward.

    Returns:
        The kernel, and why faster ones cannot run.

    Raises:
        ConfigError: If none can.
    """
    refusals: list[str] = []
    for name, load in _natives(ranks.device):
        if requested not in ("auto", name):
            continue

        def trial(load: Callable[[], AttendMasked] = load) -> AttendMasked:
            attend = load()
            shape = (1, mask.length, 2, head_dim)
            q, k, v = (torch.randn(shape, dtype=dtype, device=ranks.device, requires_grad=True) for _ in range(3))
            out = attend(q, k, v, mask)
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            return attend

        attend, failure = ranks.attempt(trial)
        if attend is not None and failure is None:
            return Native(name, attend), refusals
        refusals.append(f"{name}: {failure}")
    if not refusals:
        lacks = dict(explain_kernels(KernelRequest(ranks.device.type, dtype, head_dim, head_dim))).get(requested)
        lacks = lacks or f"is none of the limit's (--burst kernel={requested} sets that of hf_burst alone)"
        refusals = [f"{requested} {lacks}"]
    known = [name for name, _ in _natives(ranks.device)]
    raise ConfigError(
        f"No kernel for --kernel {requested} on {ranks.device.type} in {dtype} with head size {head_dim}: "
        f"{'; '.join(refusals)}. Known here: {', '.join(known)}."
    )


def _natives(device: torch.device) -> list[tuple[str, Callable[[], AttendMasked]]]:
    """Kernels and how to load them, the fastest first."""
    if device.type == "cpu":
        return [("cpu_flash", lambda: _cpu_flash)]
    natives = {
        "flash_attn_4": _flash_attn_4,
        "flash_attn_3": _flash_attn_3,
        "torch_cudnn": lambda: _torch_cudnn,
        "flash_attn_2": _flash_attn_2,
        "torch_flash": lambda: _torch_flash,
    }
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    order = list(natives) if hopper else ["flash_attn_2", "torch_flash", "torch_cudnn", "flash_attn_4", "flash_attn_3"]
    return [(name, natives[name]) for name in order]


def _flash_attn_4() -> AttendMasked:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    return _flash(flash_attn_func, flash_attn_varlen_func, None)


def _flash_attn_3() -> AttendMasked:
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    return _flash(flash_attn_func, flash_attn_varlen_func, -1)


def _flash_attn_2() -> AttendMasked:
    from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    return _flash(flash_attn_func, flash_attn_varlen_func, -1)


def _flash(dense: Callable[..., Any], varlen: Callable[..., Any], no_window: int | None) -> AttendMasked:
    """The two functions of a FlashAttention package as one."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        window = (no_window if mask.window is None else mask.window, no_window if mask.window is None else 0)
        if len(mask.documents) == 2:
            return _first(dense(q, k, v, causal=True, window_size=window))
        bounds, longest = cu_seqlens(mask, q.shape[0], q.device)
        flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
        lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return _first(varlen(*flat, **lengths, causal=True, window_size=window)).unflatten(0, q.shape[:2])

    return attend


@lru_cache(maxsize=16)
def cu_seqlens(mask: Mask, batch: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Boundaries of the documents of all rows as flash kernels take them, and the longest document."""
    bounds = [row * mask.length + stop for row in range(batch) for stop in mask.documents[1:]]
    longest = max(stop - start for start, stop in pairwise(mask.documents))
    return torch.tensor([0, *bounds], dtype=torch.int32, device=device), longest


def _first(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The output, which some versions return with the log-sum-exp."""
    return result[0] if isinstance(result, tuple) else result


def _torch_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    window = {} if mask.window is None else {"window_size_left": mask.window, "window_size_right": 0}
    if len(mask.documents) == 2:
        dense = (None, None, q.shape[1], k.shape[1])
        out: torch.Tensor = torch.ops.aten._flash_attention_forward(q, k, v, *dense, 0.0, True, False, **window)[0]
        return out
    bounds, longest = cu_seqlens(mask, q.shape[0], q.device)
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    lengths = (bounds, bounds, longest, longest)
    out = torch.ops.aten._flash_attention_forward(*flat, *lengths, 0.0, True, False, **window)[0]
    return out.unflatten(0, q.shape[:2])


def _torch_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    _only_whole(mask, "torch's cuDNN kernel")
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads_first, None, True, 0.0, True)[0]
    return out.transpose(1, 2)


def _cpu_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    """With a mask written out where torch's kernel knows none; on a CPU nothing is compared for its speed."""
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if len(mask.documents) == 2 and mask.window is None:
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, True)[0]
        return out.transpose(1, 2)
    added = torch.zeros(mask.length, mask.length, dtype=q.dtype).masked_fill_(~admitted(mask, q.device), -torch.inf)
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out = call(*heads_first, 0.0, False, attn_mask=added)[0]
    return out.transpose(1, 2)


def _only_whole(mask: Mask, what: str) -> None:
    if len(mask.documents) > 2 or mask.window is not None:
        raise ConfigError(f"{what} computes whole causal sequences only here, no documents and no windows.")


def admitted(mask: Mask, device: torch.device) -> torch.Tensor:
    """Which keys each query sees: `torch.BoolTensor` of shape `(S, S)`."""
    position = torch.arange(mask.length, device=device)
    document = torch.bucketize(position, torch.tensor(mask.documents[1:], device=device), right=True)
    distance = position[:, None] - position
    seen = (document[:, None] == document) & (distance >= 0)
    return seen if mask.window is None else seen & (distance <= mask.window)


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, mask: Mask
) -> dict[str, torch.Tensor]:
    """out, dq, dk and dv of attention, computed in fp64 one key head after another.

    Args:
        q, dout (`torch.Tensor` of shape `(B, S, Hq, D)`): Queries, and the gradient of the output.
        k, v (`torch.Tensor` of shape `(B, S, Hkv, D)`): Keys and values.
        mask ([`Mask`]): Of every row.

    Returns:
        `dict` of fp64 tensors in the shapes of q, q, k and v.
    """
    parts = list(_exact_heads(admitted(mask, q.device), *(tensor.double() for tensor in (q, k, v, dout))))
    return dict(
        zip(("out", "dq", "dk", "dv"), (torch.cat(part, dim=2) for part in zip(*parts, strict=True)), strict=True)
    )


def _exact_heads(
    seen: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    per_key = q.shape[2] // k.shape[2]
    for head in range(k.shape[2]):
        rows = slice(head * per_key, (head + 1) * per_key)
        inputs = [tensor.detach().requires_grad_() for tensor in (q[:, :, rows], k[:, :, [head]], v[:, :, [head]])]
        scores = torch.einsum("bihd,bjxd->bhij", inputs[0], inputs[1]) * q.shape[3] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("bhij,bjxd->bihd", weights, inputs[2])
        yield (out.detach(), *torch.autograd.grad(out, inputs, dout[:, :, rows]))


def for_group(case: Case, group: dist.ProcessGroup | None) -> Case:
    """The case with a contender's own messages."""
    return replace(case, group=group)
