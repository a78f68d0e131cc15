"""Attention over a group as one operator of torch.library: what autograd, `torch.compile`, FSDP2 and selective
checkpointing see.

`torch.ops.hf_burst.attention` returns `(out, lse, kept)`, all saved for the backward pass, which is the operator
`torch.ops.hf_burst.attention_backward`; `kept` are the exchanged q, k and v, where there are such. Everything that is
not a tensor enters as plain numbers, and the layout as a small CPU tensor, so that a new packing is a new input and no
new graph.
"""

import logging
import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from .calibrate import machine_for
from .config import BurstConfig, Schedule
from .errors import BatchError, ConfigError, KernelError, ShardingError
from .kernels import Kernel, Scores, select_kernel
from .layout import SequenceLayout
from .mesh import ContextGroup, group_by_name
from .plan import Machine, Mask, MaskPattern, Sharding, assign, choose, cut, name_of
from .ring import Exchange, HeadSizes, ShardedAttention, accumulation_dtype, kept_shapes, open_exchange, row_products
from .ring.replay import Pass, recorded, recurs
from .ring.symmetric import Symmetric

logger = logging.getLogger(__name__)


def burst_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: SequenceLayout,
    group: ContextGroup,
    *,
    causal: bool = True,
    window: int | None = None,
    attention_chunk_size: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    config: BurstConfig | None = None,
    check: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over a sequence that lies on the ranks of a group (BurstAttention, arXiv 2403.09347).

    Args:
        q (`torch.Tensor` of shape `(batch, n, q_heads, head_dim)`): This rank's queries, `n = layout.length / ranks`.
        k (`torch.Tensor` of shape `(batch, n, kv_heads, head_dim)`): This rank's keys; `kv_heads` divides `q_heads`.
        v (`torch.Tensor` of shape `(batch, n, kv_heads, value_dim)`): This rank's values.
        layout ([`SequenceLayout`]): How the batch lies over the ranks; equal on all of them.
        group ([`ContextGroup`]): The ranks.
        causal (`bool`, defaults to `True`): Whether a query sees no later key.
        window (`int`, *optional*): Tokens that a query sees backwards beside itself (`sliding_window - 1`).
        attention_chunk_size (`int`, *optional*): Into pieces of how many tokens every document is cut; a query sees its
            own only.
        scale (`float`, *optional*): Factor of the scores; `head_dim ** -0.5` by default.
        softcap (`float`, defaults to 0.0): Where scores saturate, by a hyperbolic tangent; 0 is nowhere.
        sinks (`torch.Tensor` of shape `(q_heads,)`, *optional*): A further score of every row, whose value is 0.
        config ([`BurstConfig`], *optional*): Schedule, kernel and transport.
        check (`bool`, defaults to `True`): Whether the ranks compare what they are about to compute: one small
            all-gather, without which different inputs on the ranks hang the job.

    Returns:
        `out` of shape `(batch, n, q_heads, value_dim)` in the dtype of q, and `lse` of shape `(batch, n, q_heads)` in
        fp32 (fp64 for fp64), the log-sum-exp of the scores of each row, that of its sink included.

    Raises:
        BurstError: If inputs are wrong, on every rank (with `check`) and before any of them is sent.
    """
    config = config or BurstConfig()
    error: Exception | None = None
    facts: dict[str, Any] = {}
    try:
        _validate(q, k, v, layout, group)
        _validate_scores(q, attention_chunk_size, softcap, sinks)
        layout.masks(MaskPattern(causal, window, attention_chunk_size))
        windowed = window is not None
        if config.schedule != "auto":
            windowed |= _named(config.schedule, _sizes(q, k, v), group.size).ring == "all_gather"
        facts = {
            "shapes of q, k, v": [list(tensor.shape) for tensor in (q, k, v)],
            "dtype": str(q.dtype),
            "layout": str(layout.encode().tolist()),
            "causal, window, attention_chunk_size": [causal, window, attention_chunk_size],
            "scale, softcap, sinks": [scale, softcap, sinks is not None],
            "config": str(config),
            "kernel": _kernel(config.kernel, q.device, q.dtype, _sizes(q, k, v), softcap, windowed).capabilities.name,
            "gradients": torch.is_grad_enabled() and any(one.requires_grad for one in (q, k, v)),
        }
    except Exception as problem:  # whatever it is, the other ranks must not wait for this one
        error = problem
    if check:
        group.agree(facts, error, _device_of(q, group))
        prepare(config.schedule, config.kernel, q.device, group)
    elif error is not None:
        raise error
    schedule = schedule_for(config, q, k, v, layout, group, (causal, window, attention_chunk_size))
    out, lse, _ = torch.ops.hf_burst.attention(
        *(q, k, v, sinks, layout.encode(), causal, -1 if window is None else window, attention_chunk_size or 0),
        *(q.shape[-1] ** -0.5 if scale is None else scale, softcap, config.kernel, schedule),
        *(config.transport, config.record, group.name),
    )
    return out, lse


def schedule_for(
    config: BurstConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: SequenceLayout,
    group: ContextGroup,
    mask: tuple[bool, int | None, int | None],
) -> str:
    """The schedule to ask the operator for: the one of the config, or for `"auto"` the one that the rule names for the
    documents of this batch and the owners of its chunks.

    While a graph is compiled it stays `"auto"`, since the graph is to serve other batches too: the operator then goes
    by one whole document.

    Args:
        config ([`BurstConfig`]): What was asked for.
        q (`torch.Tensor`): As in [`burst_attention`], like `k` and `v`: of interest for shapes and dtype.
        k (`torch.Tensor`): See q.
        v (`torch.Tensor`): See q.
        layout ([`SequenceLayout`]): How the batch lies over the ranks.
        group ([`ContextGroup`]): The ranks, all of which call it: the first time they agree on what machine they run.
        mask (`tuple[bool, int, int]`): Causal, window and chunk, as in [`SequenceLayout.masks`].
    """
    if config.schedule != "auto" or group.size == 1 or torch.compiler.is_compiling():
        return config.schedule
    machine = _machine("auto", config.kernel, q.device, group)
    assert machine is not None, "there are several ranks, and they choose"
    masks = layout.masks(MaskPattern(*mask))
    return name_of(_chosen(_sizes(q, k, v), masks, layout.sharding, machine, group), group.size)


_before = globals().get("_library")
if _before is not None:  # this module is loaded anew, as notebooks do
    _before._destroy()
_library = torch.library.Library("hf_burst", "DEF")  # a call through torch.library.custom_op costs the host far more
_SETTINGS = (
    "Tensor layout, bool causal, int window, int chunk, float scale, float softcap, str kernel, str schedule, "
    "str transport, bool record, str group"
)
_TAGS = (torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag)
_library.define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_SETTINGS}) -> (Tensor, Tensor, Tensor[])", tags=_TAGS
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor[] inputs, Tensor out, Tensor lse, int kv_heads, "
    f"int head_dim, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
@torch.compiler.disable
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    layout: torch.Tensor,
    causal: bool,
    window: int,
    chunk: int,
    scale: float,
    softcap: float,
    kernel: str,
    schedule: str,
    transport: str,
    record: bool,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The operator; see [`burst_attention`]. No window is -1, no chunk and no softcap 0, one process `group = ""`.

    Its third result is what the backward pass wants instead of q, k and v, where heads were exchanged.
    """
    members = _members(group)
    sizes = _sizes(q, k, v)
    request = _request(
        q, sizes, layout, (causal, window, chunk), Scores(scale, softcap), kernel, schedule, transport, members
    )
    work = _prepared(request)

    def run(exchange: Exchange, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        q, k, v = inputs
        out, lse, kept = work.forward(exchange, q, k, v, sinks)
        return [out, lse, *kept]

    exchange = open_exchange(transport, members, q.device)
    recurring = record and sinks is None and isinstance(exchange, Symmetric) and recurs(work.masks, q)
    out, lse, *kept = _carry_out(exchange, ("forward", request) if recurring else None, run, (q, k, v))
    return out, lse, kept


@torch.library.register_fake("hf_burst::attention", lib=_library)
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, layout: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulation_dtype(q.dtype)).transpose(1, 2)
    kernel, schedule, transport, _, group = settings[-5:]
    sizes, members = _sizes(q, k, v), _members(group)
    machine = _machine(schedule, kernel, q.device, members)
    route = _route(schedule, transport, sizes, q.shape[0], q.shape[1], q.dtype, settings[:3], members, machine)
    kept = kept_shapes(route, members.size, q.shape[0], q.shape[1], sizes, q.device)
    return out, lse, [q.new_empty(shape) for shape in kept]


@torch.library.impl(_library, "attention_backward", "CompositeExplicitAutograd")
@torch.compiler.disable
def _attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    inputs: list[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    kv_heads: int,
    head_dim: int,
    layout: torch.Tensor,
    causal: bool,
    window: int,
    chunk: int,
    scale: float,
    softcap: float,
    kernel: str,
    schedule: str,
    transport: str,
    record: bool,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `hf_burst::attention` with respect to q, k and v; that of the sinks follows from `lse` alone.

    `inputs` are q, k and v, or what the forward pass kept of them.
    """
    members = _members(group)
    sizes = HeadSizes(dout.shape[2], kv_heads, head_dim, dout.shape[3])
    request = _request(
        dout, sizes, layout, (causal, window, chunk), Scores(scale, softcap), kernel, schedule, transport, members
    )
    work = _prepared(request)
    exchange = open_exchange(transport, members, dout.device)
    recurring = record and isinstance(exchange, Symmetric) and recurs(work.masks, dout)
    # a recording is the same on all ranks, also where one alone has a gradient into lse
    true_out = dlse is None and not recurring
    delta = row_products(dout, out, dlse) if work.sends_delta or not true_out else None
    extras = [tensor for tensor in (delta, out if true_out else None) if tensor is not None]
    count = len(inputs)

    def run(exchange: Exchange, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        dout, lse, *rest = tensors
        inputs, more = rest[:count], rest[count:]
        own_out = more.pop() if true_out else None
        return list(work.backward(exchange, sizes, dout, inputs, own_out, lse, more[0] if more else None))

    key = ("backward", request) if recurring else None
    dq, dk, dv = _carry_out(exchange, key, run, (dout, lse, *inputs, *extras))
    return dq, dk, dv


@torch.library.register_fake("hf_burst::attention_backward", lib=_library)
def _(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    inputs: list[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    kv_heads: int,
    head_dim: int,
    *settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_shape, k_shape, v_shape = HeadSizes(dout.shape[2], kv_heads, head_dim, dout.shape[3]).shapes(*dout.shape[:2])
    return dout.new_empty(q_shape), dout.new_empty(k_shape), dout.new_empty(v_shape)


class Found(NamedTuple):
    """What an attention found: all of it, or the last rows of every rank beside the layout of those before them.

    Args:
        out (`torch.Tensor` of shape `(B, rows, Hq, Dv)`): The outputs.
        lse (`torch.Tensor` of shape `(B, rows, Hq)`): The log-sum-exps.
        beginning ([`SequenceLayout`], *optional*): Of the tokens whose rows are missing.
        settings (`tuple`): What the operator was asked for.
        version (`int`): How often the outputs had been changed in place by then.
    """

    out: torch.Tensor
    lse: torch.Tensor
    beginning: SequenceLayout | None
    settings: tuple[Any, ...]
    version: int


class Memory:
    """What the attentions of a checkpointed region found when they first ran, in their order, for when the backward
    pass runs the region again.

    Args:
        share (`float`): How much is kept, from the end of the sequence; see [`BurstConfig`].
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.found: list[Found] = []
        self.next: int | None = None

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> torch.Tensor:
        """`torch.ops.hf_burst.attention` without its `lse`: computed, or remembered where the region runs again."""
        tracked = torch.is_grad_enabled()  # an attention without a graph is none that the backward pass asks for
        if tracked and self.next is not None and self.next < len(self.found):
            known = self.found[self.next]
            self.next += 1
            if known.settings != (q.shape, others[2:]):
                raise KernelError(
                    "A checkpointed layer called its attention in another order when it ran again. Keep nothing of it: "
                    "BurstConfig(attention_keep=0.0)."
                )
            if known.out._version != known.version:
                raise KernelError(
                    "A checkpointed layer changed what its attention returned in place, so that it is not there when "
                    "the layer runs again. Change a copy, or keep nothing: BurstConfig(attention_keep=0.0)."
                )
            again: torch.Tensor = _Attention.apply(q, k, v, *others, known)[0]
            return again
        out, lse, _ = torch.ops.hf_burst.attention(q, k, v, *others)
        if tracked and self.next is None:
            self.found.append(self._kept(out.detach(), lse.detach(), others[1], (q.shape, others[2:])))
        result: torch.Tensor = out
        return result

    def _kept(self, out: torch.Tensor, lse: torch.Tensor, encoded: torch.Tensor, settings: tuple[Any, ...]) -> Found:
        causal = settings[1][0]
        parts = causal and self.share < 1
        beginning = SequenceLayout.decode(encoded.numpy().tobytes()).beginning(1 - self.share) if parts else None
        if beginning is not None:
            rows = beginning.length // beginning.ranks
            out, lse = out[:, rows:].clone(), lse[:, rows:].clone()
        return Found(out, lse, beginning, settings, out._version)


class _Attention(torch.autograd.Function):
    """What autograd knows of the operator."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> Any:
        *others, known = given
        sinks, layout, *settings = others
        with torch._C._AutoDispatchBelowAutograd():
            if known is None:
                out, lse, kept = torch.ops.hf_burst.attention(q, k, v, *others)
            else:
                with _disable_current_modes():  # selective checkpointing expects what ran the first time
                    out, lse, kept = _remembered(known, q, k, v, *others)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sinks, layout, out, lse, *(kept or (q, k, v)))
        ctx.sizes = k.shape[2], k.shape[3]
        ctx.settings = settings
        return out, lse, kept

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, dkept: Any) -> Any:
        sinks, layout, out, lse, *inputs = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        if dlse is not None and out.dtype == torch.float16:
            raise KernelError(
                "A gradient into lse in torch.float16 overflows on its way into flash kernels. Use bfloat16, or detach "
                "lse."
            )
        gradients = torch.ops.hf_burst.attention_backward(
            dout, dlse, inputs, out, lse, *ctx.sizes, layout, *ctx.settings
        )
        dsinks = _sink_gradient(sinks, dout, out, lse, dlse) if ctx.needs_input_grad[3] else None
        return *gradients, dsinks, *[None] * (2 + len(ctx.settings))


def _remembered(
    known: Found, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The operator's results where they are known already, at least for the last rows."""
    sinks, encoded, *settings = others
    out, lse = known.out.detach(), known.lse.detach()
    if known.beginning is not None:
        rows = q.shape[1] - out.shape[1]
        first = (tensor[:, :rows] for tensor in (q, k, v))
        first_out, first_lse, _ = torch.ops.hf_burst.attention(*first, sinks, known.beginning.encode(), *settings)
        out = torch.cat([first_out, out], 1)
        lse = torch.cat([first_lse.transpose(1, 2), lse.transpose(1, 2)], 2).transpose(1, 2)
    causal, window, chunk, scale, softcap, kernel, schedule, transport, _, group = settings
    sizes, members = _sizes(q, k, v), _members(group)
    request = _request(
        q, sizes, encoded, (causal, window, chunk), Scores(scale, softcap), kernel, schedule, transport, members
    )
    work = _prepared(request)
    if work.route.ulysses == 1:
        return out, lse, []
    exchange = open_exchange(transport, members, q.device)
    kept = _carry_out(exchange, None, lambda exchange, inputs: work.exchanged(exchange, *inputs), (q, k, v))
    return out, lse, kept


class _AttentionBackward(torch.autograd.Function):
    """The end of what autograd knows."""

    @staticmethod
    def forward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor | None, count: int, *others: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.hf_burst.attention_backward(dout, dlse, list(others[:count]), *others[count:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise KernelError(
            "Attention over ranks has no second derivative: hf_burst::attention_backward is not differentiable. Do "
            "without create_graph=True, or detach the gradients."
        )


@torch.library.impl(_library, "attention", "Autograd")
@torch.compiler.disable
def _(*arguments: Any) -> Any:
    if _is_tracked(arguments[:4]):
        return _Attention.apply(*arguments, None)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.hf_burst.attention(*arguments)


@torch.library.impl(_library, "attention_backward", "Autograd")
@torch.compiler.disable
def _(dout: torch.Tensor, dlse: torch.Tensor | None, inputs: list[torch.Tensor], *others: Any) -> Any:
    if _is_tracked((dout, dlse, *inputs, *others[:2])):
        return _AttentionBackward.apply(dout, dlse, len(inputs), *inputs, *others)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.hf_burst.attention_backward(dout, dlse, inputs, *others)


def _is_tracked(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether autograd has to know of what is computed from these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _carry_out(
    exchange: Exchange, key: Hashable | None, run: Pass, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """A pass, recorded or replayed where it has a key and that is possible."""
    if not isinstance(exchange, Symmetric):
        return list(run(exchange, inputs))
    try:
        known = None if key is None else recorded(exchange.pool, key, run, inputs)
        return list(run(exchange, inputs)) if known is None else known(inputs)
    except Exception as problem:
        exchange.pool.failed = repr(problem).splitlines()[0]
        raise


def _sink_gradient(
    sinks: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """A sink's share of a row, times what its score changes: its value is 0, so only `-delta` remains."""
    delta = row_products(dout, out, dlse)
    return -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum((0, 1)).to(sinks.dtype)


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> HeadSizes:
    """Of fake tensors, too: heads are never symbols."""
    return HeadSizes(int(q.shape[2]), int(k.shape[2]), int(q.shape[3]), int(v.shape[3]))


def _members(name: str) -> ContextGroup:
    if not name:
        return ContextGroup()
    group = group_by_name(name)
    return ContextGroup(group.rank(), group.size(), name)


class _Request(NamedTuple):
    """All that an attention of a rank follows from, beside the content of its tensors."""

    layout: bytes
    mask: tuple[bool, int, int]
    scores: Scores
    kernel: str
    schedule: str
    transport: str
    sizes: HeadSizes
    batch: int
    tokens: int
    dtype: torch.dtype
    device: torch.device
    deterministic: bool
    members: ContextGroup
    machine: Machine | None


def _request(
    like: torch.Tensor,
    sizes: HeadSizes,
    encoded: torch.Tensor,
    mask: tuple[bool, int, int],
    scores: Scores,
    kernel: str,
    schedule: str,
    transport: str,
    members: ContextGroup,
) -> _Request:
    return _Request(
        *(encoded.numpy().tobytes(), mask, scores, kernel, schedule, transport, sizes, like.shape[0], like.shape[1]),
        *(like.dtype, like.device, _deterministic(), members),
        _machine(schedule, kernel, like.device, members),
    )


@lru_cache(maxsize=64)
def _prepared(request: _Request) -> ShardedAttention:
    """What carries an attention out: made once, for all layers and steps that ask for the same."""
    layout = SequenceLayout.decode(request.layout)
    causal, window, chunk = request.mask
    masks = layout.masks(MaskPattern(causal, None if window < 0 else window, chunk or None))
    route = _route(
        *(request.schedule, request.transport, request.sizes, request.batch, request.tokens, request.dtype),
        *(request.mask, request.members, request.machine),
    )
    windowed = window >= 0 or route.ring == "all_gather"  # whose tiles have the corner of a causal mask elsewhere
    kernel = _kernel(request.kernel, request.device, request.dtype, request.sizes, request.scores.softcap, windowed)
    return ShardedAttention(route, request.members, masks, layout.sharding, kernel, request.scores)


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _kernel(
    requested: Any, device: torch.device, dtype: torch.dtype, sizes: HeadSizes, softcap: float, window: bool
) -> Kernel:
    """The kernel for an attention; under torch's deterministic mode one that is."""
    return select_kernel(
        *(requested, device.type, dtype, sizes.head_dim, sizes.value_dim, softcap > 0, _deterministic(), window)
    )


def prepare(schedule: str, kernel: str, device: torch.device, group: ContextGroup) -> None:
    """Lets the ranks of a group agree on what machine they run on, if they have not yet: what a schedule is chosen by.

    The operator does it by itself, but not while it is traced.

    Args:
        schedule (`str`): As in [`BurstConfig`].
        kernel (`str`): As in [`BurstConfig`].
        device (`torch.device`): Where they compute.
        group ([`ContextGroup`]): The ranks; every one of them calls it.
    """
    _machine(schedule, kernel, device, group)


@lru_cache(maxsize=16)
def _machine(schedule: str, kernel: str, device: torch.device, group: ContextGroup) -> Machine | None:
    """By what a schedule is chosen, if it is: the machine, with the rates of the kernel that was asked for."""
    if schedule != "auto" or group.size == 1:
        return None
    return machine_for(group, device, None if kernel == "auto" else kernel)


def _route(
    schedule: str,
    transport: str,
    sizes: HeadSizes,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    mask: tuple[bool, int, int],
    members: ContextGroup,
    machine: Machine | None,
) -> Schedule:
    """The schedule asked for, or the one that the rule names for one whole document of that length, where the documents
    of a batch are not known."""
    if schedule != "auto":
        return _named(schedule, sizes, members.size)
    if machine is None:
        return Schedule()
    batch, tokens = int(batch), int(tokens)  # which makes a graph one of this length
    causal, window, chunk = mask
    back = min([reach for reach in (window, chunk - 1) if reach >= 0], default=None)
    masks = (Mask(tokens * members.size, causal, back),) * batch
    return _chosen(sizes, masks, cut(masks[0].length, assign(masks, members.size)), machine, members)


@lru_cache(maxsize=64)
def _named(schedule: str, sizes: HeadSizes, ranks: int) -> Schedule:
    route = Schedule.parse(schedule, ranks)
    refusal = route.refusal(ranks, sizes.q_heads, sizes.kv_heads)
    if refusal is not None:
        raise ConfigError(
            f"The schedule {schedule!r} cannot be had: {refusal}. Take one that can (BurstConfig(schedule='auto') "
            "does), or another number of ranks."
        )
    return route


@lru_cache(maxsize=64)
def _chosen(
    sizes: HeadSizes, masks: tuple[Mask, ...], sharding: Sharding, machine: Machine, members: ContextGroup
) -> Schedule:
    choice = choose(masks, sharding, sizes.q_heads, sizes.kv_heads, machine.ranks_per_host)
    if members.rank == 0:
        _announce(choice.schedule, choice.reason, masks, sizes, members)
    return choice.schedule


def _announce(route: Schedule, reason: str, masks: tuple[Mask, ...], sizes: HeadSizes, members: ContextGroup) -> None:
    """Logs a choice, that of packed documents quietly: there is one for every batch."""
    documents = sum(len(mask.documents) - 1 for mask in masks)
    logger.log(
        logging.INFO if documents == len(masks) else logging.DEBUG,
        "hf_burst runs %s for %d x %d tokens, %d query and %d key heads, documents: %d (%s)",
        *(name_of(route, members.size), len(masks), masks[0].length, sizes.q_heads, sizes.kv_heads, documents, reason),
    )


def _device_of(q: Any, group: ContextGroup) -> torch.device:
    """Where the ranks speak to each other: that of the queries, or of the backend where they are none."""
    if isinstance(q, torch.Tensor) and q.device.type in ("cpu", "cuda"):
        return q.device
    on_gpus = group.size > 1 and dist.get_backend(group.process_group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def _validate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout, group: ContextGroup) -> None:
    """Raises for inputs that do not fit each other, the layout or the group."""
    if not all(isinstance(tensor, torch.Tensor) for tensor in (q, k, v)) or not isinstance(layout, SequenceLayout):
        kinds = ", ".join(type(given).__name__ for given in (q, k, v, layout))
        raise BatchError(f"Attention takes three tensors and a SequenceLayout, got {kinds}.")
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip("qkv", (q, k, v), strict=True))
    if any(tensor.ndim != 4 for tensor in (q, k, v)):
        raise BatchError(f"q, k and v are (batch, tokens, heads, head size), got {shapes}.")
    if len({(tensor.dtype, tensor.device) for tensor in (q, k, v)}) > 1:
        kinds = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in (q, k, v))
        raise BatchError(f"q, k and v need one dtype and one device, got {kinds}.")
    if (
        0 in (*q.shape, *v.shape)
        or q.shape[:2] != k.shape[:2]
        or k.shape[:3] != v.shape[:3]
        or q.shape[3] != k.shape[3]
    ):
        raise BatchError(f"q, k and v do not belong together: {shapes}. Batch, tokens and head sizes must agree.")
    if q.shape[2] % k.shape[2]:
        raise KernelError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads: it must be a whole multiple.")
    if layout.ranks != group.size:
        raise ShardingError(
            f"The layout is for {layout.ranks} ranks, the group has {group.size}. Shard the batch for the group that "
            "the attention runs on."
        )
    if layout.length % len(layout.sharding.owners):
        raise ShardingError(
            f"The layout has {layout.length} tokens in {len(layout.sharding.owners)} chunks, which are not equal. Make "
            "it by SequenceLayout.for_batch, which pads."
        )
    if len({layout.owners.count(rank) for rank in range(layout.ranks)}) > 1:
        raise ShardingError(
            f"The layout's chunks have owners {layout.owners}: every rank must hold as many. Make it by "
            "SequenceLayout.for_batch."
        )
    own = layout.sharding.tokens(group.rank)
    if q.shape[1] != own or q.shape[0] != layout.batch_size:
        raise ShardingError(
            f"Rank {group.rank} of {group.size} should hold {layout.batch_size} x {own} tokens of a batch of "
            f"{layout.batch_size} x {layout.length}, q has {q.shape[0]} x {q.shape[1]}. Shard the batch with "
            "hf_burst.shard_batch."
        )


def _validate_scores(q: torch.Tensor, chunk: int | None, softcap: float, sinks: torch.Tensor | None) -> None:
    """Raises for a chunk, a soft-capping or sinks that mean nothing."""
    if chunk is not None and chunk < 1:
        raise BatchError(
            f"attention_chunk_size is {chunk}; give the tokens of a piece, at least 1, or None for whole documents."
        )
    if not 0 <= softcap < math.inf:
        raise BatchError(f"softcap is {softcap}; give a positive number, or 0 for none.")
    if sinks is not None and (sinks.shape != q.shape[2:3] or sinks.device != q.device):
        raise BatchError(
            f"sinks are of shape {tuple(sinks.shape)} on {sinks.device}; give one score a query head, ({q.shape[2]},), "
            f"on {q.device}."
        )
