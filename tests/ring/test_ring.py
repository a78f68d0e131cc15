"""Attention over ranks is attention over the whole sequence: values, gradients, messages, and what torch sees of it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hf_burst.ring.sharded
from hf_burst.attention import AttentionRequest, ContextGroup, SequenceLayout, burst_attention
from hf_burst.config import Schedule
from hf_burst.errors import KernelError
from hf_burst.kernels import BackwardInputs, KernelRequest, Scores, select_kernel
from hf_burst.numerics import accumulation_dtype
from hf_burst.plan import (
    Mask,
    MaskPattern,
    Plan,
    Shapes,
    Traffic,
    assign,
    balance,
    make_plan,
    make_sharding,
    rank_traffic,
)
from hf_burst.ring import Exchanges, HeadSizes, PeerToPeer, ShardedAttention, merge_
from hf_burst.ring.loop import RingAttention, backward, forward
from tests.plan.test_balance import imbalance_of_steps
from tests.support import models
from tests.support.oracle import admitted_pairs, relative_error, softmax_attention
from tests.support.ranks import RankError, forked
from tests.support.traffic import Counted

SCHEDULES = ("kv_ring", "burst", "ulysses")
PRODUCTS = {
    1: (),
    2: (),
    3: (),
    4: ("ulysses_2+kv_ring", "ulysses_2+burst", "ulysses_4+burst"),
    8: ("ulysses_2+kv_ring", "ulysses_4+burst"),
}
ROTATING = ("kv", "q")
RESULTS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """An attention over a whole sequence; its tensors follow from the seed, in every process alike.

    `sizes` are factors of `dout` in every other token, and of `dlse`.
    """

    documents: tuple[tuple[int, ...], ...]
    causal: bool = True
    window: int | None = None
    chunking: str | tuple[int, ...] = "balanced"
    schedule: str = "kv_ring"
    kernel: str = "cpu_flash"
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (5, 5)
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    chunk: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    loss: str = "out and lse"
    sizes: tuple[float, float] = (1.0, 1.0)
    seed: int = 0
    transport: str = "auto"
    head_groups: int = 1
    ranks_per_host: int | None = None

    @property
    def length(self) -> int:
        return self.documents[0][-1]

    def request(self, group: ContextGroup) -> AttentionRequest:
        """What the case asks for."""
        scale = self.dims[0] ** -0.5 if self.scale is None else self.scale
        return AttentionRequest(
            group=group,
            pattern=MaskPattern(self.causal, self.window, self.chunk),
            scores=Scores(scale, self.softcap),
            kernel=self.kernel,
            schedule=self.schedule,
            transport=self.transport,
            head_groups=self.head_groups,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """q, k, v, dout and dlse of the whole sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        rows, (q_heads, kv_heads), (head_dim, value_dim) = len(self.documents), self.heads, self.dims
        sizes = {
            "q": (q_heads, head_dim),
            "k": (kv_heads, head_dim),
            "v": (kv_heads, value_dim),
            "dout": (q_heads, value_dim),
            "dlse": (q_heads,),
        }
        made = {
            name: torch.randn(rows, self.length, *size, generator=generator, dtype=torch.float64).to(self.dtype)
            for name, size in sizes.items()
        }
        made["dout"][:, ::2] *= self.sizes[0]
        made["dlse"] = made["dlse"].to(accumulation_dtype(self.dtype)) * self.sizes[1]
        if "out" not in self.loss:
            made["dout"].zero_()
        if "lse" not in self.loss:
            made["dlse"].zero_()
        return made

    def admitted(self) -> torch.Tensor:
        masks = [admitted_pairs(self.length, self.causal, self.window, row, self.chunk) for row in self.documents]
        return torch.tensor(masks)

    def sink_scores(self) -> list[torch.Tensor]:
        """The sinks, if there are any, of moderate size, one far above and one far below the scores."""
        values = torch.linspace(-1, 1, self.heads[0], dtype=self.dtype)
        values[0], values[-1] = -30, 30
        return [values.requires_grad_()] if self.sinks else []

    @property
    def results(self) -> tuple[str, ...]:
        return (*RESULTS, "dsinks") if self.sinks else RESULTS


def backpropagate(case: Case, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor) -> None:
    """The gradients that a loss on `out`, on `lse` or on both has; what is not in the loss has none at all."""
    parts = [(out, dout)] if "out" in case.loss else []
    parts += [(lse, dlse)] if "lse" in case.loss else []
    torch.autograd.backward([result for result, _ in parts], [gradient for _, gradient in parts])


def written_out(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The oracle: the whole sequence in one softmax, once for all schedules, cuts and kernels."""
    anyhow = replace(case, schedule="kv_ring", chunking="balanced", kernel="cpu_flash", transport="auto", head_groups=1)
    return _written_out(anyhow, dtype)


@lru_cache(maxsize=32)
def _written_out(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    whole = {name: tensor.to(dtype) for name, tensor in case.tensors().items()}
    inputs = [whole[name].requires_grad_() for name in "qkv"]
    inputs += [sinks.detach().to(dtype).requires_grad_() for sinks in case.sink_scores()]
    scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
    out, lse = softmax_attention(*inputs[:3], case.admitted(), scale, case.softcap, *inputs[3:])
    backpropagate(case, out, lse, whole["dout"], whole["dlse"])
    values = [out.detach(), lse.detach(), *(tensor.grad for tensor in inputs)]
    return {
        name: torch.zeros_like(like) if value is None else value
        for name, value, like in zip(case.results, values, (out, lse, *inputs), strict=True)
    }


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills whatever torch allocates without a value with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def context_group(size: int) -> ContextGroup:
    return ContextGroup() if size == 1 else ContextGroup.from_mesh(None)


def attend(rank: int, size: int, case: Case, device: str = "cpu") -> list:
    """One rank of [`burst_attention`], forward and backward; its results as arrays in the order of `RESULTS`. On CPUs
    memory is poisoned; on GPUs that would choose other kernels."""
    layout = SequenceLayout.for_batch(case.documents, size, case.chunking)
    local = {name: layout.shard(tensor, rank).to(device) for name, tensor in case.tensors().items()}
    inputs = [local[name].requires_grad_() for name in "qkv"]
    sinks = [scores.detach().to(device).requires_grad_() for scores in case.sink_scores()]
    with poisoned_memory() if device == "cpu" else nullcontext(), models.hosts_of(case.ranks_per_host):
        out, lse = burst_attention(
            *inputs, layout, case.request(context_group(size)), sinks=sinks[0] if sinks else None
        )
        assert out.dtype == case.dtype
        assert lse.dtype == accumulation_dtype(case.dtype)
        backpropagate(case, out, lse, local["dout"], local["dlse"])
    assert all(tensor.grad.dtype == case.dtype for tensor in inputs)
    return [tensor.detach().double().cpu().numpy() for tensor in (out, lse, *(one.grad for one in inputs + sinks))]


def attend_to_all(rank: int, size: int, cases: list[Case]) -> list:
    return [attend(rank, size, case) for case in cases]


def whole_results(ranks, size: int, cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    """The results of `cases` over `size` ranks, put together to whole sequences."""
    every = [attend_to_all(0, 1, cases)] if size == 1 else ranks(size).run(attend_to_all, cases)
    return put_together(every, size, cases)


def put_together(every: list[list], size: int, cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    """The results of all ranks as those of whole sequences."""
    found = []
    for index, case in enumerate(cases):
        layout = SequenceLayout.for_batch(case.documents, size, case.chunking)
        shards = zip(*(results[index] for results in every), strict=True)
        tensors = [[torch.from_numpy(shard) for shard in part] for part in shards]
        found.append(
            {
                name: sum(part) if name == "dsinks" else layout.unshard(part)
                for name, part in zip(case.results, tensors, strict=True)
            }
        )
    return found


def fitting(size: int, cases: list[Case]) -> list[Case]:
    """The cases, with so many times more heads that they can be spread over the ranks."""
    found = []
    for case in cases:
        ulysses = Schedule.parse(case.schedule, size).ulysses
        fits = case.heads[1] % ulysses == 0
        found.append(case if fits else replace(case, heads=(case.heads[0] * ulysses, case.heads[1] * ulysses)))
    return found


def dealt(ranks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Owners of one to three chunks a rank, in any order."""
    return (
        st.integers(1, 2 if ranks > 3 else 3).flatmap(lambda each: st.permutations([*range(ranks)] * each)).map(tuple)
    )


@st.composite
def cases(draw, ranks: int, longest: int = 41, flash: str = "cpu_flash") -> Case:
    """Masks, lengths, assignments and schedules; by a flash kernel or the reference, which knows soft-capped scores."""
    chunking = draw(st.sampled_from(["balanced", "zigzag", "contiguous", "documents"]) | dealt(ranks))
    length = draw(st.integers(2 * ranks if isinstance(chunking, str) else max(2, len(chunking)), longest))
    kernel = draw(st.sampled_from([flash, "reference"]))
    schedule = draw(st.sampled_from([*SCHEDULES, *PRODUCTS[ranks]]))
    rows = draw(st.lists(st.sets(st.integers(1, length - 1), max_size=7), min_size=1, max_size=3))
    return Case(
        documents=tuple((0, *sorted(cuts), length) for cuts in rows),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(0, length)),
        chunking=chunking,
        schedule=schedule,
        kernel=kernel,
        softcap=draw(st.sampled_from([0.0, 0.7])) if kernel == "reference" else 0.0,
        heads=draw(st.sampled_from([(2, 2), (4, 1), (8, 1), (4, 2)])),
        loss=draw(st.sampled_from(["out", "out and lse"])),
        scale=draw(st.sampled_from([None, 0.3])),
        chunk=draw(st.none() | st.integers(1, length)),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        head_groups=draw(st.sampled_from([1, 1, 2, 3])),
        ranks_per_host=draw(st.sampled_from([None, *(size for size in range(1, ranks + 1) if ranks % size == 0)])),
    )


def assert_exact(case: Case, found: dict[str, torch.Tensor], tolerance: float = 1e-10) -> None:
    for name, want in written_out(case).items():
        assert found[name].shape == want.shape, (name, case)
        error = ((found[name] - want).abs().amax() / want.abs().amax().clamp_min(1)).item()
        assert error <= tolerance, (name, case)


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_chunks_that_were_swapped_for_even_rounds_are_exact(ranks, size):
    """Cut as finely as long sequences are, of which all that follows is the owners."""
    documents = (0, 41, 48, 80, 83, 131)
    masks = (Mask(131, documents=documents),)
    with mock.patch.multiple(balance, _SMALLEST=1, _TOKENS_OF_A_TRY=1):
        owners = assign.__wrapped__(masks, size)
    dealt_only = balance._dealt_out(balance._work(masks, (), len(owners)), size, 1)
    assert owners != dealt_only
    assert imbalance_of_steps(masks, owners) < imbalance_of_steps(masks, dealt_only)
    names = (*SCHEDULES, *PRODUCTS[size])
    many = [
        Case((documents,), chunking=owners, schedule=name, head_groups=groups) for name in names for groups in (1, 2)
    ]
    many = fitting(size, many)
    for case, found in zip(many, whole_results(ranks, size, many), strict=True):
        assert_exact(case, found)


def assert_as_close_as_plain(case: Case, found: dict[str, torch.Tensor]) -> None:
    """Errors are at most twice those of plain attention in the dtype of the case, or the rounding of results in it."""
    plain, rounding = written_out(case, case.dtype), torch.finfo(case.dtype).eps
    for name, exact in written_out(case).items():
        error, rough = ((tensor.double() - exact).norm() for tensor in (found[name], plain[name]))
        size = exact.norm().item()
        if name == "dsinks":  # a few sums over all rows, which may cancel
            size = max(size, (len(case.documents) * case.length) ** 0.5)
        floor = max(rounding * size, 1e-5 * exact.numel() ** 0.5)  # what is 0 may be what fp32 leaves of it
        assert error <= max(2 * rough, floor), (name, case)


PACKED = ((0, 1, 2, 3, 16, 29, 30, 41), (0, 41), (0, 11, 24, 41))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full), 3, 4])
def test_attention_over_ranks_is_exact(ranks, size):
    batch = st.lists(cases(size), min_size=4, max_size=4)

    @settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
    @given(drawn=batch)
    @example(
        drawn=[Case(PACKED, schedule=schedule, kernel=k) for schedule in SCHEDULES for k in ("cpu_flash", "reference")]
    )
    @example(
        drawn=[
            Case(PACKED, causal, 6, chunking, "burst")
            for causal in (True, False)
            for chunking in ("zigzag", "contiguous")
        ]
    )
    @example(
        drawn=[Case(((0, 1, 2, 3, 16, 29, 30, 41),), True, w, "documents", s) for w in (None, 6) for s in SCHEDULES]
    )
    @example(drawn=[Case((tuple(range(9)),) * 2, schedule=schedule) for schedule in SCHEDULES])
    @example(drawn=[Case(((0, 23),), causal, None, schedule=s) for causal in (True, False) for s in SCHEDULES])
    def every_case_is_exact(drawn):
        drawn = fitting(size, drawn)
        for case, found in zip(drawn, whole_results(ranks, size, drawn), strict=True):
            assert_exact(case, found)

    every_case_is_exact()


@pytest.mark.parametrize("size", [2, 3])
def test_one_token_a_rank_is_enough(ranks, size):
    """Also for the choice of a schedule."""
    rows = ((0, size), (0, 1, size))
    cases = [Case(rows, schedule="auto"), *fitting(size, [Case(rows, schedule=schedule) for schedule in SCHEDULES])]
    for case, found in zip(cases, whole_results(ranks, size, cases), strict=True):
        assert_exact(case, found)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel", ["cpu_flash", "reference"])
def test_a_loss_on_lse_alone_has_gradients(ranks, size, schedule, kernel):
    case = fitting(size, [Case(PACKED, schedule=schedule, kernel=kernel, loss="lse")])[0]
    assert_exact(case, whole_results(ranks, size, [case])[0])


@pytest.mark.parametrize(
    ("dtype", "loss", "kernel"),
    [  # any two values meet
        pytest.param(dtype, loss, kernel, marks=[pytest.mark.full] * ((number + place + index) % 2))
        for number, dtype in enumerate((torch.float32, torch.bfloat16))
        for place, loss in enumerate(("lse", "out and lse"))
        for index, kernel in enumerate(("cpu_flash", "reference"))
    ],
)
def test_a_large_gradient_into_lse_is_accurate(ranks, dtype, loss, kernel):
    """As with loss scaling; a row may have a gradient into lse and next to none into out."""
    one = Case(PACKED, kernel=kernel, dtype=dtype, loss=loss, sizes=(1e-6, 64.0), heads=(4, 4))
    many = [replace(one, schedule=schedule) for schedule in SCHEDULES]
    for case, found in zip(many, whole_results(ranks, 2, many), strict=True):
        for name, exact in written_out(case).items():
            if exact.any():
                assert relative_error(found[name], exact) <= 4 * torch.finfo(dtype).eps, (name, case)


def test_a_gradient_into_lse_is_refused_in_fp16(ranks):
    with pytest.raises(RankError) as caught:
        whole_results(ranks, 2, [Case(PACKED, dtype=torch.float16, loss="lse")])
    for error in caught.value.errors:
        assert pytest.RaisesExc(KernelError, match="Use bfloat16, or detach lse").matches(error), error


DIMS = ((6, 3), (3, 6))


@pytest.mark.parametrize("size", [2, 3])
def test_values_of_another_head_size_are_exact(ranks, size):
    kernels = ("reference", "cpu_flash")
    many = [Case(PACKED, schedule=s, kernel=k, dims=dims) for s in SCHEDULES for k in kernels for dims in DIMS]
    many = fitting(size, many)
    for case, found in zip(many, whole_results(ranks, size, many), strict=True):
        assert_exact(case, found)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *((torch.float64, 1), (torch.bfloat16, 2), (torch.float64, 4)),
        *(pytest.param(torch.bfloat16, size, marks=pytest.mark.full) for size in (1, 4)),
        pytest.param(torch.float64, 2, marks=pytest.mark.full),
    ],
)
def test_sinks_soft_caps_and_chunks_are_exact(ranks, size, dtype):
    one = Case(PACKED, kernel="reference", dtype=dtype)
    kinds = [
        replace(one, sinks=True, kernel="cpu_flash"),
        replace(one, sinks=True, window=4, loss="out"),
        replace(one, softcap=0.5),
        replace(one, softcap=2.0, sinks=True, chunk=7),
        replace(one, chunk=5, kernel="cpu_flash"),
        replace(one, chunk=1),
        replace(one, chunk=41, causal=False),
    ]
    many = fitting(size, [replace(case, schedule=schedule) for case in kinds for schedule in SCHEDULES])
    for case, found in zip(many, whole_results(ranks, size, many), strict=True):
        (assert_exact if dtype == torch.float64 else assert_as_close_as_plain)(case, found)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_fp32_over_ranks_is_as_accurate_as_fp32_in_one_process(ranks, size):
    rounding = torch.finfo(torch.float32).eps
    many = [
        Case(documents, causal, window, "zigzag", schedule, dims=(16, 16), dtype=torch.float32, seed=seed)
        for seed, (documents, causal, window) in enumerate(
            [(((0, 97),), True, None), (((0, 97),), False, None), (((0, 5, 60, 97), (0, 97)), True, 20)]
        )
        for schedule in SCHEDULES
    ]
    many = fitting(size, many)
    over_ranks, alone = whole_results(ranks, size, many), whole_results(ranks, 1, many)
    for case, ours, single in zip(many, over_ranks, alone, strict=True):
        plain = written_out(case, torch.float32)
        for name, exact in written_out(case).items():
            error = relative_error(ours[name], exact)
            assert error <= max(2.5 * relative_error(single[name], exact), rounding), (name, case)
            assert error <= max(2.5 * relative_error(plain[name], exact), rounding), (name, case)


@pytest.mark.parametrize(
    ("schedule", "kernel"),
    [
        ("burst", "reference"),
        *(pytest.param(*pair, marks=pytest.mark.full) for pair in (("kv_ring", "cpu_flash"), ("ulysses", "reference"))),
    ],
)
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=["fp32", "bf16"]
)
def test_the_error_does_not_grow_from_1_to_8_ranks(ranks, dtype, schedule, kernel):
    for causal in (True, False):
        case = Case(((0, 512),), causal, schedule=schedule, kernel=kernel, dims=(16, 16), dtype=dtype, loss="out")
        case = fitting(8, [case])[0]
        exact, plain = written_out(case), written_out(case, dtype)
        found = {size: whole_results(ranks, size, [case])[0] for size in (1, 2, 4, 8)}
        for name in ("out", "dq", "dk", "dv"):
            errors = {size: relative_error(results[name], exact[name]) for size, results in found.items()}
            # fp32 feels the rounding of every sum, and of every merge, which rounds the log-sum-exp as well
            growth = 1.05 if dtype == torch.bfloat16 else 1.5 if name == "out" else 1.25
            assert max(errors.values()) <= growth * errors[1], (name, case, errors)
            if dtype == torch.bfloat16:
                assert max(errors.values()) <= 2 * relative_error(plain[name], exact[name]), (name, case, errors)


def direct(plan: Plan, rank: int, size: int, rotating: str, heads: tuple[int, int], dtype: torch.dtype) -> list:
    """One rank of a plan, executed without the operator: results, what it sent forward, and backward."""
    dims = (5, 5)
    case = Case(tuple(mask.documents for mask in plan.masks), heads=heads, dims=dims, dtype=dtype)
    rows = torch.cat([torch.arange(run.start, run.stop) for run in plan.queries.runs(rank)])
    key_rows = torch.cat([torch.arange(run.start, run.stop) for run in plan.keys.runs(rank)])
    whole = case.tensors()
    q, dout, dlse = (whole[name][:, rows] for name in ("q", "dout", "dlse"))
    k, v = (whole[name][:, key_rows] for name in ("k", "v"))
    kernel = select_kernel("cpu_flash", KernelRequest("cpu", dtype, *dims))
    attention = RingAttention(plan, rank, tuple(range(size)), kernel, Scores(dims[0] ** -0.5))
    group = context_group(size)
    there, back = Counted(group, q.device), Counted(group, q.device)
    with poisoned_memory():
        out, lse = forward(attention, Exchanges(there, there), q, k, v)
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1) - dlse
        inputs = BackwardInputs(dout=dout, q=q, k=k, v=v, out=None, lse=lse, delta=delta)
        gradients = backward(attention, Exchanges(back, back), rotating, inputs)
    arrays = [tensor.double().numpy() for tensor in (out, lse, *gradients)]
    return [arrays, rows.numpy(), there.sent, back.sent]


def run_directly(rank: int, size: int, plans: list[Plan], rotating: str, heads: tuple[int, int], dtype) -> list:
    return [direct(plan, rank, size, rotating, heads, dtype) for plan in plans]


def odd_plans(size: int) -> list[Plan]:
    """Lengths that no chunk divides, and masks that differ from row to row of the batch."""
    plans = []
    for chunking in ("zigzag", "contiguous"):
        sharding = make_sharding(43, size, chunking)
        plans += [
            make_plan((Mask(43),) * 2, sharding),
            make_plan((Mask(43, False),), sharding),
            make_plan((Mask(43, True, None, (0, 1, 2, 20, 43)), Mask(43, False, 4)), sharding),
            make_plan((Mask(43, True, 3, (0, 19, 43)), Mask(43, True, 3, (0, 19, 43)), Mask(43)), sharding),
            make_plan((Mask(43, False, None, (0, 30, 31, 43)), Mask(43, True, None, tuple(range(44)))), sharding),
        ]
    return plans


@pytest.mark.parametrize("rotating", ROTATING)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_uneven_shards_and_a_mask_for_every_row_are_exact(ranks, size, rotating):
    plans = odd_plans(size)
    arguments = (plans, rotating, (4, 2), torch.float64)
    every = [run_directly(0, 1, *arguments)] if size == 1 else ranks(size).run(run_directly, *arguments)
    for index, plan in enumerate(plans):
        case = Case(tuple(mask.documents for mask in plan.masks))
        seen = [admitted_pairs(mask.length, mask.causal, mask.window, mask.documents) for mask in plan.masks]
        whole = case.tensors()
        inputs = [whole[name].requires_grad_() for name in "qkv"]
        out, lse = softmax_attention(*inputs, torch.tensor(seen), 5**-0.5)
        backpropagate(case, out, lse, whole["dout"], whole["dlse"])
        wanted = [out.detach(), lse.detach(), *(tensor.grad for tensor in inputs)]
        for arrays, rows, _, _ in (results[index] for results in every):
            for name, array, want in zip(RESULTS, arrays, wanted, strict=True):
                error = (torch.from_numpy(array) - want[:, rows]).abs().amax().item()
                assert error <= 1e-10, (name, str(plan))


@pytest.mark.parametrize(
    ("size", "rotating", "dtype"),
    [  # any two values meet
        pytest.param(size, rotating, dtype, marks=[pytest.mark.full] * ((size + number + place) % 2))
        for size in (1, 2, 3, 4)
        for number, rotating in enumerate(ROTATING)
        for place, dtype in enumerate((torch.float64, torch.bfloat16))
    ],
)
def test_messages_and_bytes_are_those_of_the_plan(ranks, size, rotating, dtype):
    plans, heads = odd_plans(size), (4, 2)
    arguments = (plans, rotating, heads, dtype)
    every = [run_directly(0, 1, *arguments)] if size == 1 else ranks(size).run(run_directly, *arguments)
    accumulator = accumulation_dtype(dtype).itemsize
    shapes = Shapes(*heads, 5, 5, dtype.itemsize, accumulator, accumulator)
    for index, plan in enumerate(plans):
        for rank, results in enumerate(every):
            _, _, there, back = results[index]
            assert there == rank_traffic(plan, rank, "forward", "kv", shapes)
            assert back == rank_traffic(plan, rank, "backward", rotating, shapes)
            assert (there.messages > 0) == any(step.send for step in plan.steps(rank, "kv"))
    assert size == 1 or any(results[0][2] != Traffic() for results in every)


def count_messages_of_the_operator(rank: int, size: int, case: Case) -> int:
    sent = []
    post = dist.batch_isend_irecv

    def counting(operations):
        sent.extend(operation for operation in operations if operation.op is dist.isend)
        return post(operations)

    with mock.patch.object(dist, "batch_isend_irecv", counting):
        attend(rank, size, case)
    return len(sent)


def test_documents_that_stay_on_their_rank_are_not_sent(ranks):
    alone = Case(((0, 8, 16, 24),), chunking="contiguous")
    assert ranks(3).run(count_messages_of_the_operator, alone) == [0, 0, 0]
    joined = replace(alone, documents=((0, 8, 24),))
    assert ranks(3).run(count_messages_of_the_operator, joined) == [0, 2 + 2, 2]


def attend_and_compare_inputs(rank: int, size: int, case: Case) -> list[str]:
    """The names of the tensors that the attention changed."""
    layout = SequenceLayout.for_batch(case.documents, size, case.chunking)
    kept = {name: layout.shard(tensor, rank) for name, tensor in case.tensors().items()}
    inputs = [kept[name].requires_grad_() for name in "qkv"]
    out, lse = burst_attention(*inputs, layout, case.request(context_group(size)))
    kept |= {"out": out, "lse": lse}
    before = {name: tensor.detach().clone() for name, tensor in kept.items()}
    for _ in range(2):
        torch.autograd.grad([out, lse], inputs, [kept["dout"], kept["dlse"]], retain_graph=True)
    burst_attention(*inputs, layout, case.request(context_group(size)))
    return [name for name, tensor in kept.items() if not torch.equal(tensor, before[name])]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_tensors_of_the_user_stay_as_they_are(ranks, size, dtype, schedule):
    case = fitting(size, [Case(PACKED, schedule=schedule, dtype=dtype, window=9)])[0]
    if size == 1:
        assert attend_and_compare_inputs(0, 1, case) == []
    else:
        assert ranks(size).run(attend_and_compare_inputs, case) == [[]] * size


def attend_with_a_nan(rank: int, size: int, case: Case, name: str, token: int) -> list:
    """[`attend`] with a NaN in every head of one token of one tensor."""
    tensors = case.tensors()
    tensors[name][0, token] = torch.nan
    with mock.patch.object(Case, "tensors", return_value=tensors):
        return attend(rank, size, case)


@pytest.mark.parametrize("kernel", ["cpu_flash", "reference"])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_a_nan_passes_through_to_what_sees_it(ranks, size, name, kernel):
    token, documents = 13, ((0, 4, 24),)
    seen = Case(documents).admitted()[0]
    for schedule in SCHEDULES:
        case = fitting(size, [Case(documents, schedule=schedule, kernel=kernel)])[0]
        arguments = (case, name, token)
        every = [attend_with_a_nan(0, 1, *arguments)] if size == 1 else ranks(size).run(attend_with_a_nan, *arguments)
        layout = SequenceLayout.for_batch(documents, size)
        found = {
            key: layout.unshard([torch.from_numpy(array) for array in arrays]).isnan()[0].flatten(1).any(1)
            for key, arrays in zip(RESULTS, zip(*every, strict=True), strict=True)
        }
        queries, keys = seen[:, token], seen[token]
        if name in ("k", "v"):
            assert found["out"][queries].all()
            assert found["dq"][queries].all()
            assert name == "v" or found["lse"][queries].all()
        else:
            assert found["dq"][token]
            assert found["dk"][keys].all()
            assert found["dv"][keys].all()
        if name == "q":
            assert found["out"][token]
            assert found["lse"][token]
        if name in ("q", "dout"):
            others = torch.arange(24) != token
            assert not found["out"][others].any()
            assert not found["dq"][others].any()


def attend_in_pairs(rank: int, size: int, by_pair: list[Case]) -> list:
    """Ranks 0, 1 and ranks 2, 3 attend to a batch of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group = ContextGroup.from_mesh(mesh)
    assert (group.rank, group.size) == (rank % 2, 2)
    with mock.patch(f"{__name__}.context_group", return_value=group):
        return attend(group.rank, 2, by_pair[rank // 2])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_of_a_mesh_attend_apart(ranks, schedule):
    by_pair = [Case(PACKED, schedule=schedule, seed=1), Case(((0, 10, 33),), schedule=schedule, seed=2)]
    every = ranks(4).run(attend_in_pairs, by_pair)
    for pair, case in enumerate(by_pair):
        layout = SequenceLayout.for_batch(case.documents, 2)
        shards = zip(*every[2 * pair : 2 * pair + 2], strict=True)
        parts = {
            n: layout.unshard([torch.from_numpy(s) for s in part]) for n, part in zip(RESULTS, shards, strict=True)
        }
        assert_exact(case, parts)


@settings(max_examples=40)
@given(seed=st.integers(0, 999), empty=st.sampled_from(["none", "first", "second", "both"]))
def test_merging_two_halves_of_the_keys_is_the_whole(seed, empty):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 6, 2, 3, generator=generator, dtype=torch.float64) for _ in "qkv")
    seen = torch.rand(2, 6, 6, generator=generator) < 0.6
    seen[:, 1, :3] &= empty not in ("first", "both")
    seen[:, 1, 3:] &= empty not in ("second", "both")
    halves = [softmax_attention(q, k[:, part], v[:, part], seen[:, :, part], 1.0) for part in (slice(3), slice(3, 6))]
    out, lse = (tensor.clone() for tensor in halves[0])
    part = tuple(tensor.clone() for tensor in halves[1])
    merge_(out, lse, *part)
    want_out, want_lse = softmax_attention(q, k, v, seen, 1.0)
    assert torch.allclose(out, want_out, rtol=1e-12, atol=1e-12)
    assert torch.allclose(lse, want_lse, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(part, halves[1], strict=True))


def test_merging_accumulates_in_fp32_whatever_the_part():
    out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
    for value in (1.0, 1.0078125, 1.015625):
        merge_(out, lse, torch.full((1, 1, 1, 2), value, dtype=torch.bfloat16), torch.zeros(1, 1, 1))
    assert out.dtype == torch.float32
    assert torch.allclose(out, torch.full_like(out, 1.0078125), rtol=1e-6)
    assert torch.allclose(lse, torch.tensor(3.0).log())
    assert accumulation_dtype(torch.bfloat16) == accumulation_dtype(torch.float16) == torch.float32
    assert accumulation_dtype(torch.float64) == torch.float64


def operator_arguments(grad: bool, schedule: str = "burst") -> tuple:
    case = Case(((0, 3, 9), (0, 9)), schedule=schedule)
    whole = case.tensors()
    layout = SequenceLayout.for_batch(case.documents, 1)
    inputs = [whole[name].requires_grad_(grad) for name in "qkv"]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0][: inputs[0].shape[2]], dtype=inputs[0].dtype).requires_grad_(grad)
    return (*inputs, sinks, layout.encode(), True, 4, 6, 0.5, 0.0, 1, "auto", schedule, "auto", "")


OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("check", OPCHECKS)
@pytest.mark.parametrize("grad", [True, False])
def test_opcheck_of_the_forward_operator(check, grad):
    torch.library.opcheck(torch.ops.hf_burst.attention.default, operator_arguments(grad), test_utils=check)


@pytest.mark.parametrize("check", OPCHECKS)
@pytest.mark.parametrize("with_dlse", [True, False])
def test_opcheck_of_the_backward_operator(check, with_dlse):
    q, k, v, sinks, *settings_ = operator_arguments(grad=False)
    out, lse, _ = torch.ops.hf_burst.attention(q, k, v, sinks, *settings_)
    dlse = torch.ones_like(lse) if with_dlse else None
    arguments = (torch.ones_like(out), dlse, [q, k, v], out, lse, *k.shape[2:], *settings_)
    torch.library.opcheck(torch.ops.hf_burst.attention_backward.default, arguments, test_utils=check)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_fake_operator_has_shapes_dtypes_and_strides_of_the_real_one(dtype):
    q, k, v, *settings_ = operator_arguments(grad=False)
    real = torch.ops.hf_burst.attention(*(tensor.to(dtype) for tensor in (q, k, v)), *settings_)
    fake = torch.ops.hf_burst.attention(*(tensor.to(dtype).to("meta") for tensor in (q, k, v)), *settings_)
    for one, other in zip(real[:2], fake[:2], strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compiled_without_a_break_it_gives_the_same(schedule):
    def block(q, k, v, *settings_):
        out, lse, _ = torch.ops.hf_burst.attention(q * 1.5, k, v.sin(), *settings_)
        return out.cos().sum() + lse.sum()

    results = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        q, k, v, *settings_ = operator_arguments(grad=True, schedule=schedule)
        loss = function(q, k, v, *settings_)
        loss.backward()
        results.append([loss.detach(), q.grad, k.grad, v.grad, settings_[0].grad])
    for plain, compiled in zip(*results, strict=True):
        assert torch.allclose(plain, compiled, rtol=1e-12, atol=1e-12)


def test_a_new_packing_compiles_nothing_new():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    attend_once = torch.compile(
        lambda *arguments: torch.ops.hf_burst.attention(*arguments)[0], fullgraph=True, backend=backend
    )
    q, k, v, sinks, _, *settings_ = operator_arguments(grad=False)
    for documents in ([(0, 3, 9), (0, 9)], [(0, 4, 9), (0, 9)], [(0, 9), (0, 5, 9)]):
        layout = SequenceLayout.for_batch(documents, 1).encode()
        got = attend_once(q, k, v, sinks, layout, *settings_)
        assert torch.equal(got, torch.ops.hf_burst.attention(q, k, v, sinks, layout, *settings_)[0])
    assert len(compiled) == 1


def test_another_length_of_one_process_compiles_once_more_and_no_further():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    attend_once = torch.compile(
        lambda *arguments: torch.ops.hf_burst.attention(*arguments)[0], fullgraph=True, backend=backend
    )
    settings_ = operator_arguments(grad=False)[5:]
    for length in (16, 20, 24, 28, 32):
        q, k, v = (torch.randn(1, length, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
        attend_once(q, k, v, None, SequenceLayout.for_batch([(0, length)], 1).encode(), *settings_)
    assert len(compiled) <= 2


def test_all_lengths_of_one_process_have_one_dynamic_graph():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    attend_once = torch.compile(
        lambda *arguments: torch.ops.hf_burst.attention(*arguments)[0], fullgraph=True, backend=backend, dynamic=True
    )
    settings_ = operator_arguments(grad=False, schedule="auto")[5:]
    for length in (16, 20, 24):
        q, k, v = (torch.randn(1, length, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
        attend_once(q, k, v, None, SequenceLayout.for_batch([(0, length)], 1).encode(), *settings_)
    assert len(compiled) == 1


@pytest.mark.slow
def test_the_module_of_the_operator_can_be_loaded_anew():
    script = (
        "import importlib, torch, hf_burst.attention.operator as operator; importlib.reload(operator); "
        "torch.ops.hf_burst.attention"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.fixture
def forward_calls(monkeypatch):
    calls = []

    def counting(*arguments):
        calls.append(arguments)
        return forward(*arguments)

    monkeypatch.setattr(hf_burst.ring.sharded, "forward", counting)
    return calls


def checkpointed(**options) -> list[torch.Tensor]:
    q, k, v, *settings_ = operator_arguments(grad=True)

    def block(q, k, v):
        out, lse, _ = torch.ops.hf_burst.attention(q.sin(), k.sin(), v.sin(), *settings_)
        return out.sin().sum() + lse.sin().sum()

    loss = checkpoint(block, q, k, v, use_reentrant=False, **options) if options else block(q, k, v)
    loss.backward()
    return [q.grad, k.grad, v.grad]


def test_checkpointing_runs_the_forward_operator_twice(forward_calls):
    plain = checkpointed()
    assert len(forward_calls) == 1
    again = checkpointed(preserve_rng_state=False)
    assert len(forward_calls) == 3
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_selective_checkpointing_that_saves_the_operator_runs_it_once(forward_calls):
    def policy(context, operator, *arguments, **keywords):
        saved = operator is torch.ops.hf_burst.attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    plain = checkpointed()
    selective = checkpointed(context_fn=lambda: create_selective_checkpoint_contexts(policy))
    assert len(forward_calls) == 2
    assert all(torch.equal(one, other) for one, other in zip(plain, selective, strict=True))


class Asked(PeerToPeer):
    """Messages, and what the ranks would have to agree on where they read each other's memory."""

    def __init__(self, group: ContextGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.asked: list[tuple[str, int, bool]] = []

    def publish(self, channel, tensors, capacity):
        self.asked.append((channel, capacity, sum(tensor.nbytes for tensor in tensors) <= capacity))


def ask_for_capacity(rank: int, size: int, case: Case) -> list:
    layout = SequenceLayout.for_batch(case.documents, size, case.chunking)
    q, k, v, dout = (layout.shard(case.tensors()[name], rank) for name in ("q", "k", "v", "dout"))
    masks = layout.masks(MaskPattern(case.causal, case.window))
    kernel = select_kernel(case.kernel, KernelRequest("cpu", case.dtype, *case.dims))
    attention = ShardedAttention(
        schedule=Schedule.parse(case.schedule, size),
        group=context_group(size),
        masks=masks,
        queries=layout.sharding,
        keys=layout.sharding,
        kernel=kernel,
        scores=Scores(1.0),
    )
    exchange = Asked(attention.group, q.device)
    exchanges = Exchanges(exchange, exchange)
    out, lse, kept = attention.forward(exchanges, q, k, v)
    sizes = HeadSizes(*case.heads, *case.dims)
    attention.backward(exchanges, sizes, kept or [q, k, v], dout, out, lse, (dout * out).sum(-1))
    return exchange.asked


@pytest.mark.parametrize(
    "schedule",
    [*SCHEDULES, *(pytest.param(name, marks=[pytest.mark.full] * (name != "ulysses_2+burst")) for name in PRODUCTS[4])],
)
def test_all_ranks_publish_alike_and_ask_for_as_much_capacity(ranks, schedule):
    """Also where some of them leave rounds out: their buffers grow together, and their barriers meet."""
    for documents in (((0, 12, 40, 48, 64),), ((0, 64),), tuple(tuple(range(65)) for _ in range(2))):
        for window in (None, 3):
            for chunking in ("zigzag", "contiguous"):
                case = Case(documents, window=window, chunking=chunking, schedule=schedule, heads=(8, 4))
                first, *others = ranks(4).run(ask_for_capacity, case)
                assert all(asked == first for asked in others), case
                assert all(fits for _, _, fits in first), case


def lose_a_rank(rank: int, port: int, schedule: str, pipe: Connection) -> None:
    """The last of three ranks is killed in the middle of a step; the others report what they are told."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3, timeout=timedelta(seconds=20))
    case = Case(((0, 48),), schedule=schedule, heads=(6, 3))
    attend(rank, 3, case)
    if rank == 2:
        layout = SequenceLayout.for_batch(case.documents, 3)
        local = [layout.shard(case.tensors()[name], rank).requires_grad_() for name in "qkv"]
        burst_attention(*local, layout, case.request(context_group(3)))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        attend(rank, 3, case)
    except RuntimeError as error:
        pipe.send(str(error))
    else:
        pipe.send(None)
    os._exit(0)


@pytest.mark.parametrize("schedule", ["burst", pytest.param("ulysses", marks=pytest.mark.full)])
def test_a_rank_that_is_killed_in_a_step_ends_the_others_with_a_message(schedule):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = forked()
    pipes = [context.Pipe() for _ in range(3)]
    processes = [
        context.Process(target=lose_a_rank, args=(rank, port, schedule, there)) for rank, (_, there) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        for here, _ in pipes[:2]:
            assert here.poll(60), "a rank waits for one that is gone"
            assert here.recv(), "a rank has not noticed"
    finally:
        for process in processes:
            process.kill()
            process.join()
