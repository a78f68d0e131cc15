"""One contract for every kernel: a tile of attention, forward and backward, against attention written out in fp64."""

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_burst.attention import AttentionRequest, MaskPattern, SequenceLayout, burst_attention
from hf_burst.errors import KernelError
from hf_burst.kernels import (
    KERNELS,
    BackwardInputs,
    Band,
    Kernel,
    KernelRequest,
    Scores,
    explain_kernels,
    flash,
    make_kernels,
    project_out,
    reference,
    select_kernel,
)
from hf_burst.kernels.base import Capabilities
from hf_burst.kernels.ffpa import FfpaKernel
from hf_burst.kernels.flash import aligned
from hf_burst.kernels.flash_2 import FlashAttn2Kernel, TorchFlashKernel
from hf_burst.kernels.flash_attn_4 import FlashAttn4Kernel, _cudnn_knows_wide_heads, _keep_compiled
from hf_burst.kernels.library import gpu_refusal, package_refusal
from hf_burst.kernels.select import PaddedHeads
from hf_burst.kernels.torch_cudnn import TorchCudnnKernel
from hf_burst.kernels.torch_efficient import TorchEfficientKernel
from hf_burst.numerics import accumulation_dtype
from hf_burst.ring import merge_
from tests.support import flash_libraries
from tests.support.oracle import relative_error, softmax_attention

LOW_PRECISION = (torch.bfloat16, torch.float16)
ROUNDING = {torch.float64: 2e-15, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}
LSE_ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-4, torch.float16: 1e-4}
HEAD_SIZE = 12  # which some kernels pad
CPU_KERNELS = [kernel for kernel in KERNELS if "cpu" in kernel.capabilities.devices]


def calling(library: Any, kernel: Any) -> Any:
    """A kernel whose library is one of `tests.support.flash_libraries`."""
    kernel.library = library
    return kernel


def on_a_stand_in(library: Any, kernel: Any, name: str) -> Kernel:
    calling(library, kernel)
    kernel.capabilities = replace(kernel.capabilities, name=f"{name} on a stand-in", devices=("cpu",))
    return PaddedHeads(kernel)


STAND_INS = [
    on_a_stand_in(flash_libraries.FlashAttn4(), FlashAttn4Kernel(), "flash_attn_4"),
    on_a_stand_in(flash_libraries.FlashAttn2(), FlashAttn2Kernel(), "flash_attn_2"),
    on_a_stand_in(flash_libraries.Aten(), TorchFlashKernel(), "torch_flash"),
    on_a_stand_in(flash_libraries.Aten(), TorchCudnnKernel(), "torch_cudnn"),
    on_a_stand_in(flash_libraries.Ffpa(), FfpaKernel(), "ffpa"),
    on_a_stand_in(flash_libraries.Aten(), TorchEfficientKernel(), "torch_efficient"),
]
ALL_KERNELS = [*KERNELS, *STAND_INS]


def unpadded(kernel: Kernel) -> int:
    """The smallest head size in use that a kernel takes as it is."""
    return min(size for size in kernel.capabilities.head_sizes or (64,) if size >= 64)


def device_of(kernel: Kernel) -> str:
    if "cpu" in kernel.capabilities.devices:
        return "cpu"
    missing = kernel.unavailable(unpadded(kernel), unpadded(kernel))
    if missing is not None:
        pytest.skip(f"{kernel.capabilities.name} {missing}")
    return "cuda"


def spare(kernel: Kernel, dtype: torch.dtype, kept: bool = True) -> None:
    """Leaves out cases for libraries that compile or plan each kind of call, up to two seconds at a time."""
    if kernel.capabilities.name in ("flash_attn_4", "torch_cudnn", "ffpa") and not (kept and dtype == torch.bfloat16):
        pytest.skip(f"{kernel.capabilities.name} compiles each kind of call")


def kernels_and_dtypes() -> list:
    return [
        pytest.param(kernel, dtype, id=f"{kernel.capabilities.name}-{str(dtype)[6:]}")
        for kernel in ALL_KERNELS
        for dtype in kernel.capabilities.dtypes
    ]


def kernels(chosen: list[Kernel] = ALL_KERNELS) -> list:
    return [pytest.param(kernel, id=kernel.capabilities.name) for kernel in chosen]


def admitted(band: Band, rows: int, columns: int) -> torch.Tensor:
    """Who sees whom in a tile, pair by pair from the definition: `torch.BoolTensor` of shape `(1, rows, columns)`."""

    def square(position: int) -> int:
        return sum(position >= end for end in band.documents[1:])

    def sees(row: int, column: int) -> bool:
        above = band.low is None or row - column >= band.low
        below = band.high is None or row - column <= band.high
        return above and below and (not band.documents or square(row) == square(column))

    return torch.tensor([[[sees(row, column) for column in range(columns)] for row in range(rows)]])


@dataclass(frozen=True)
class Shape:
    rows: int
    columns: int
    band: Band
    heads: tuple[int, int] = (4, 2)
    batch: int = 2


SHAPES = {
    "square": Shape(13, 13, Band()),
    "one row, one column": Shape(1, 1, Band()),
    "one row, many columns": Shape(1, 17, Band()),
    "many rows, one column": Shape(17, 1, Band()),
    "causal": Shape(13, 13, Band(low=0), heads=(4, 4)),
    "causal 4 to 1": Shape(23, 23, Band(low=0), heads=(4, 1)),
    "causal 8 to 1": Shape(11, 11, Band(low=0), heads=(8, 1)),
    "more columns than rows": Shape(7, 19, Band()),
    "more rows than columns": Shape(19, 7, Band(), heads=(8, 2)),
    "causal, more columns than rows": Shape(7, 19, Band(low=0)),
    "causal, more rows than columns": Shape(19, 7, Band(low=0)),
    "causal from the bottom right": Shape(7, 19, Band(low=-12)),
    "the diagonal": Shape(13, 13, Band(0, 0)),
    "causal window": Shape(19, 19, Band(0, 3)),
    "two-sided window": Shape(17, 17, Band(-4, 4), heads=(8, 1)),
    "window, more columns than rows": Shape(7, 19, Band(-12, -7)),
    "only an upper bound": Shape(9, 13, Band(None, 2)),
    "an upper bound below zero": Shape(9, 13, Band(None, -3)),
    "the first rows see nothing": Shape(13, 9, Band(low=4)),
    "the last rows see nothing": Shape(13, 9, Band(high=2)),
    "rows at both ends see nothing": Shape(19, 5, Band(3, 7)),
    "no row sees anything": Shape(7, 9, Band(low=50)),
    "documents": Shape(13, 13, Band(documents=(0, 5, 13))),
    "causal documents of 1 token": Shape(13, 13, Band(0, None, (0, 1, 2, 7, 8, 13)), heads=(4, 1)),
    "only documents of 1 token": Shape(5, 5, Band(0, None, (0, 1, 2, 3, 4, 5))),
    "documents with a window": Shape(23, 23, Band(0, 2, (0, 1, 12, 23)), heads=(8, 1)),
    "documents with a two-sided window": Shape(23, 23, Band(-2, 2, (0, 3, 22, 23))),
    "long, windowed": Shape(1031, 1031, Band(0, 70), heads=(1, 1), batch=1),
    "long, offset band": Shape(700, 1100, Band(-650, -100), heads=(2, 1), batch=1),
}


WINDOWS = {
    "causal from the bottom right",
    "the diagonal",
    "causal window",
    "two-sided window",
    "window, more columns than rows",
    "only an upper bound",
    "an upper bound below zero",
    "the last rows see nothing",
    "rows at both ends see nothing",
    "documents with a window",
    "documents with a two-sided window",
    "long, windowed",
    "long, offset band",
}


@dataclass
class Tensors:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    scale: float
    softcap: float = 0.0

    @property
    def scores(self) -> Scores:
        return Scores(self.scale, self.softcap)

    def backward_inputs(self, out: torch.Tensor | None, lse: torch.Tensor, delta: torch.Tensor | None):
        return BackwardInputs(self.dout, self.q, self.k, self.v, out, lse, delta)

    def to(self, dtype: torch.dtype | None = None, device: str | None = None) -> "Tensors":
        moved = (tensor.to(dtype=dtype, device=device) for tensor in (self.q, self.k, self.v, self.dout))
        return Tensors(*moved, self.scale, self.softcap)


def make_tensors(shape: Shape, dtype: torch.dtype, head_dim: int, value_dim: int | None = None) -> Tensors:
    generator = torch.Generator().manual_seed(shape.rows * 1000 + shape.columns)
    q_heads, kv_heads = shape.heads
    value_dim = value_dim or head_dim

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    return Tensors(
        normal(shape.batch, shape.rows, q_heads, head_dim),
        normal(shape.batch, shape.columns, kv_heads, head_dim),
        normal(shape.batch, shape.columns, kv_heads, value_dim),
        normal(shape.batch, shape.rows, q_heads, value_dim),
        scale=0.37,
    )


@dataclass
class Answer:
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    def items(self) -> list[tuple[str, torch.Tensor]]:
        return list(vars(self).items())


def refuse_or_go_on(kernel: Kernel, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    """Ends a test of head sizes that the kernel does not compute; it says which."""
    device = device_of(kernel)
    refusal = kernel.capabilities.refusal(KernelRequest(device, dtype, head_dim, value_dim))
    if refusal is None and device == "cuda":
        refusal = kernel.unavailable(head_dim, value_dim)
    if refusal is not None:
        assert str(max(head_dim, value_dim)) in refusal
        pytest.skip(f"{kernel.capabilities.name} {refusal}")


def written_out(tensors: Tensors, seen: torch.Tensor, dlse: torch.Tensor | None = None) -> Answer:
    """The oracle, in the dtype of the tensors."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (tensors.q, tensors.k, tensors.v)]
    out, lse = softmax_attention(*inputs, seen, tensors.scale, tensors.softcap)
    loss = (out * tensors.dout).sum()
    if dlse is not None:
        loss = loss + (lse * dlse).sum()
    return Answer(out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs))


def product(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    wide = accumulation_dtype(out.dtype)
    return (dout.to(wide) * out.to(wide)).sum(-1)


def by_kernel(kernel: Kernel, tensors: Tensors, band: Band) -> Answer:
    """A tile that is all of an attention; its backward pass is given `out` only if it must be."""
    device = device_of(kernel)
    tensors = tensors.to(device=device)
    out, lse = kernel.forward(tensors.q, tensors.k, tensors.v, band, tensors.scores)
    delta = product(tensors.dout, out)
    given_out = out if kernel.capabilities.wants_out else None
    gradients = kernel.backward(tensors.backward_inputs(given_out, lse, delta), band, tensors.scores)
    return Answer(*(tensor.cpu() for tensor in (out, lse, *gradients)))


def check(answer: Answer, exact: Answer, dtype: torch.dtype, rough: Answer | None = None) -> None:
    """Tolerances are earned: rounding of the accumulators, else twice the error of plain torch in the same dtype."""
    for name, got in answer.items():
        want = getattr(exact, name)
        assert got.shape == want.shape, name
        assert not got.isnan().any(), name
        assert torch.equal(got == -torch.inf, want == -torch.inf), name
        finite = want != -torch.inf
        got, want = got[finite].double(), want[finite]
        if name == "lse":
            assert (got - want).abs().le(LSE_ROUNDING[dtype] * want.abs().clamp_min(1)).all(), name
            continue
        allowed = ROUNDING[dtype] * max(want.norm().item(), len(want) ** 0.5)
        if rough is not None:
            allowed += 2 * (getattr(rough, name)[finite].double() - want).norm().item()
        if dtype in LOW_PRECISION:
            allowed = max(allowed, torch.finfo(dtype).eps / 2 * want.norm().item())
        assert (got - want).norm().item() <= allowed, name


@pytest.mark.parametrize(("kernel", "dtype"), kernels_and_dtypes())
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name == "long, offset band")) for name in SHAPES]
)
def test_a_kernel_computes_a_tile_as_written_out(kernel, dtype, name):
    shape = SHAPES[name]
    if shape.rows > 512 and dtype not in (torch.float32, torch.bfloat16):
        pytest.skip("long tiles in fp32 and bf16 only")
    spare(kernel, dtype)
    if kernel.capabilities.name == "flash_attn_4" and shape.rows < 512 and "to 1" not in name:
        shape = replace(shape, heads=(4, 2))
    tensors = make_tensors(shape, dtype, HEAD_SIZE)
    if not kernel.capabilities.windows and name in WINDOWS:
        device = device_of(kernel)
        with pytest.raises(KernelError, match=r"whole tiles and causal squares, not .* Set BurstConfig"):
            by_kernel(kernel, tensors.to(device=device), shape.band)
        return
    answer = by_kernel(kernel, tensors, shape.band)
    allowed = {accumulation_dtype(dtype)} if kernel.capabilities.wide else {dtype, accumulation_dtype(dtype)}
    assert {tensor.dtype for tensor in (answer.out, answer.dq, answer.dk, answer.dv)} <= allowed
    assert answer.lse.dtype == accumulation_dtype(dtype)
    seen = admitted(shape.band, shape.rows, shape.columns)
    rough = written_out(tensors, seen) if dtype in LOW_PRECISION else None
    check(answer, written_out(tensors.to(torch.float64), seen), dtype, rough)


@pytest.mark.parametrize("kernel", kernels())
def test_a_row_that_sees_nothing_weighs_nothing(kernel):
    shape = Shape(13, 9, Band(low=4))
    dtype = kernel.capabilities.dtypes[0]
    tensors = make_tensors(shape, dtype, HEAD_SIZE)
    answer = by_kernel(kernel, tensors, shape.band)
    assert (answer.out[:, :4] == 0).all()
    assert (answer.lse[:, :4] == -torch.inf).all()
    assert (answer.dq[:, :4] == 0).all()
    tensors.dout[:, :4] *= 1e3
    again = by_kernel(kernel, tensors, shape.band)
    assert torch.equal(again.dk, answer.dk)
    assert torch.equal(again.dv, answer.dv)


def in_a_larger_one(tensor: torch.Tensor) -> torch.Tensor:
    larger = tensor.new_full((tensor.shape[0] + 1, tensor.shape[1] + 5, *tensor.shape[2:]), torch.nan)
    larger[1:, 2:-3] = tensor
    return larger[1:, 2:-3]


STRIDES = {
    "heads first": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "in a larger one": in_a_larger_one,
    "every other element": lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2],
    "odd steps": lambda tensor: torch.cat([tensor, tensor[..., :1]], -1)[..., :-1],
    "odd offset": lambda tensor: torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape),
    "expanded batch": lambda tensor: tensor[:1].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize(("kernel", "dtype"), kernels_and_dtypes())
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("segments", [(), (0, 4, 13)], ids=["dense", "documents"])
def test_strides_do_not_matter(kernel, dtype, strides, segments):
    spare(kernel, dtype)
    shape = Shape(13, 13, Band(0, None, segments))
    tensors = make_tensors(shape, dtype, unpadded(kernel))
    if strides == "expanded batch":
        tensors = Tensors(*(t[:1].repeat(2, 1, 1, 1) for t in (tensors.q, tensors.k, tensors.v, tensors.dout)), 0.37)
    tensors = tensors.to(device=device_of(kernel))  # which would make what is strided contiguous
    straight = by_kernel(kernel, tensors, shape.band)
    changed = Tensors(*map(STRIDES[strides], (tensors.q, tensors.k, tensors.v, tensors.dout)), tensors.scale)
    assert not changed.q.is_contiguous() or changed.q.storage_offset() % 2
    for name, got in by_kernel(kernel, changed, shape.band).items():
        assert relative_error(got, getattr(straight, name).double()) <= (1e-2 if dtype in LOW_PRECISION else 1e-6), name


def test_boundaries_of_documents_belong_to_a_stream():
    """They are copied behind its work; another stream would not wait for them."""
    band, cpu = Band(0, None, (0, 3, 4, 9)), torch.device("cpu")
    first, second = flash._packed_calls(band, 2, cpu, "one stream"), flash._packed_calls(band, 2, cpu, "another")
    assert first is flash._packed_calls(band, 2, cpu, "one stream")
    assert first is not second
    for (call,) in (first, second):
        bounds, _, longest, _ = call.lengths
        assert call.lengths == (bounds, bounds, longest, longest)
        assert bounds.dtype == torch.int32
        assert (bounds.tolist(), longest) == ([0, 3, 4, 9, 12, 13, 18], 5)


@pytest.mark.parametrize(("kernel", "dtype"), kernels_and_dtypes())
def test_inputs_of_a_kernel_stay_as_they_are(kernel, dtype):
    spare(kernel, dtype)
    shape = Shape(13, 13, Band(0, 4) if kernel.capabilities.windows else Band(0))
    device = device_of(kernel)
    tensors = make_tensors(shape, dtype, HEAD_SIZE).to(device=device)
    out, lse = kernel.forward(tensors.q, tensors.k, tensors.v, shape.band, tensors.scores)
    delta = product(tensors.dout, out)
    inputs = tensors.backward_inputs(out, lse, delta)
    before = [tensor.clone() for tensor in inputs]
    kernel.backward(inputs, shape.band, tensors.scores)
    kernel.forward(tensors.q, tensors.k, tensors.v, shape.band, tensors.scores)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))


@pytest.mark.parametrize(("kernel", "dtype"), kernels_and_dtypes())
@pytest.mark.parametrize("segments", [(), (0, 5, 64)], ids=["dense", "documents"])
def test_results_may_be_written_to_buffers(kernel, dtype, segments):
    """A kernel writes there or elsewhere, the same values; and one that derives delta needs none beside `out`."""
    spare(kernel, dtype)
    shape = Shape(64, 64, Band(0, None, segments), batch=1)
    device = device_of(kernel)
    kernel = kernel.for_sizes(64, 64) if isinstance(kernel, PaddedHeads) else kernel
    t = make_tensors(shape, dtype, 64).to(device=device)
    own_buffers = [torch.full_like(tensor, torch.nan) for tensor in (t.dout, t.q, t.k, t.v)]
    lse_buffer = torch.full((1, 4, 64), torch.nan, device=device).transpose(1, 2)
    results = []
    for buffers, gradient_buffers in (
        ((), ()),
        ((own_buffers[0], lse_buffer), (None, *own_buffers[2:])),
        ((), own_buffers[1:]),
    ):
        out, lse = kernel.forward(t.q, t.k, t.v, shape.band, t.scores, buffers)
        delta = None if kernel.capabilities.derives_delta else product(t.dout, out)
        inputs = t.backward_inputs(out.to(dtype), lse, delta)
        gradients = kernel.backward(inputs, shape.band, t.scores, gradient_buffers)
        results.append([out, lse, *gradients])
    for written in results[1:]:
        for own, buffer in zip(results[0], written, strict=True):
            assert torch.allclose(own.double(), buffer.double(), rtol=1e-2, atol=1e-2)
    if kernel.capabilities.name.startswith("flash_attn_4"):
        assert [tensor.data_ptr() for tensor in results[2][2:]] == [buffer.data_ptr() for buffer in own_buffers[1:]]
        assert segments or results[1][0].data_ptr() == own_buffers[0].data_ptr()


@pytest.mark.parametrize("given_out", ["true", "none or projected"])
@pytest.mark.parametrize(("kernel", "dtype"), kernels_and_dtypes())
@pytest.mark.parametrize("window", [None, 6])
def test_two_tiles_with_the_global_lse_are_the_whole(kernel, dtype, window, given_out):
    spare(kernel, dtype)
    if window is not None and not kernel.capabilities.windows:
        pytest.skip(f"{kernel.capabilities.name} computes no windows")
    rows, cut = 21, 8
    shape = Shape(rows, rows, Band(0, window), heads=(4, 2))
    tensors = make_tensors(shape, dtype, HEAD_SIZE)
    seen = admitted(shape.band, rows, rows)
    exact = written_out(tensors.to(torch.float64), seen)
    device = device_of(kernel)
    t = tensors.to(device=device)
    halves = [
        (slice(0, cut), shape.band),
        (slice(cut, rows), Band(cut, None if window is None else window + cut)),
    ]
    wide = accumulation_dtype(dtype)
    out = torch.zeros(t.dout.shape, dtype=wide, device=device)
    lse = torch.full(t.dout.shape[:3], -torch.inf, dtype=wide, device=device)
    for columns, band in halves:
        merge_(out, lse, *kernel.forward(t.q, t.k[:, columns], t.v[:, columns], band, t.scores))
    out = out.to(dtype)
    delta = product(t.dout, out)
    dout, tile_out = t.dout, None
    if given_out == "true":
        tile_out = out
    elif kernel.capabilities.wants_out:
        dout, tile_out = project_out(t.dout, delta)
    inputs = BackwardInputs(dout, t.q, t.k, t.v, tile_out, lse, delta)
    parts = [kernel.backward(inputs.cut(slice(0, rows), columns), band, t.scores) for columns, band in halves]
    dq = parts[0][0].to(wide) + parts[1][0].to(wide)
    dk, dv = (torch.cat([part[index] for part in parts], 1) for index in (1, 2))
    answer = Answer(*(tensor.cpu() for tensor in (out, lse, dq, dk, dv)))
    rough = written_out(tensors, seen) if dtype in LOW_PRECISION else None
    check(answer, exact, dtype, rough)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("sizes", [(6, 10), (24, 16), (5, 5), (192, 128)])
@pytest.mark.parametrize("band", [Band(-5), Band(0, None, (0, 4, 13))], ids=["band", "documents"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_values_of_another_head_size(kernel, sizes, band, heads):
    dtype = kernel.capabilities.dtypes[0]
    spare(kernel, dtype, kept=(sizes, heads, bool(band.documents)) == ((6, 10), (4, 2), False) or sizes == (192, 128))
    refuse_or_go_on(kernel, dtype, *sizes)
    shape = Shape(13, 13, band if kernel.capabilities.windows or band.documents else Band(0), heads=heads)
    tensors = make_tensors(shape, dtype, *sizes)
    tensors.scale = sizes[0] ** -0.5
    seen = admitted(shape.band, 13, 13)
    rough = written_out(tensors, seen) if dtype in LOW_PRECISION else None
    check(by_kernel(kernel, tensors, shape.band), written_out(tensors.to(torch.float64), seen), dtype, rough)


@pytest.mark.parametrize(
    ("kernel", "dtype"), [pair for pair in kernels_and_dtypes() if pair.values[0].capabilities.softcap]
)
@pytest.mark.parametrize("name", ["causal 4 to 1", "two-sided window", "the first rows see nothing", "documents"])
@pytest.mark.parametrize("softcap", [0.3, 5.0])
def test_scores_are_soft_capped(kernel, dtype, name, softcap):
    spare(kernel, dtype, kept=softcap == 5.0 and name in ("two-sided window", "documents"))
    shape = SHAPES[name]
    tensors = make_tensors(shape, dtype, HEAD_SIZE)
    tensors.softcap = softcap
    seen = admitted(shape.band, shape.rows, shape.columns)
    rough = written_out(tensors, seen) if dtype in LOW_PRECISION else None
    check(by_kernel(kernel, tensors, shape.band), written_out(tensors.to(torch.float64), seen), dtype, rough)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.rows < 512])
@pytest.mark.parametrize("block", [1, 64, 500])
def test_the_reference_is_the_same_in_blocks(monkeypatch, name, block):
    shape = SHAPES[name]
    tensors = make_tensors(shape, torch.float64, 8)
    monkeypatch.setattr(reference, "_BLOCK_SCORES", block)
    seen = admitted(shape.band, shape.rows, shape.columns)
    check(by_kernel(reference.ReferenceKernel(), tensors, shape.band), written_out(tensors, seen), torch.float64)


@pytest.mark.parametrize(
    ("kernel", "dtype"), [pair for pair in kernels_and_dtypes() if pair.values[1] in LOW_PRECISION]
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes(kernel, dtype, head_dim):
    spare(kernel, torch.bfloat16 if head_dim in (64, 128) else dtype)
    refuse_or_go_on(kernel, dtype, head_dim, head_dim)
    shape = Shape(67, 67, Band(0))
    tensors = make_tensors(shape, dtype, head_dim)
    tensors.scale = head_dim**-0.5
    seen = admitted(shape.band, 67, 67)
    rough = written_out(tensors, seen)
    check(by_kernel(kernel, tensors, shape.band), written_out(tensors.to(torch.float64), seen), dtype, rough)


@pytest.mark.parametrize("kernel", kernels(list(make_kernels(True))))
@pytest.mark.parametrize(
    ("band", "heads"),
    [
        pytest.param(band, heads, marks=[pytest.mark.full] * (heads != always))
        for band, always in ((Band(0), (8, 2)), (Band(0, 100), (4, 4)), (Band(0, None, (0, 300, 517)), (8, 2)))
        for heads in ((4, 4), (8, 2))
    ],
    ids=str,
)
def test_a_deterministic_kernel_gives_the_same_bits_each_time(kernel, heads, band):
    capabilities = kernel.capabilities
    device = device_of(kernel)
    if not capabilities.deterministic:
        refusal = f"deterministic=True.*{capabilities.name} cannot give the same bits each time"
        request = KernelRequest(device, capabilities.dtypes[0], 64, 64, deterministic=True)
        with pytest.raises(KernelError, match=refusal):
            select_kernel(capabilities.name, request)
        return
    if not capabilities.windows and band.high is not None:
        pytest.skip(f"{capabilities.name} computes no windows")
    dtype = torch.bfloat16
    spare(kernel, dtype, kept=heads == (8, 2))
    shape = Shape(517, 517, band, heads=heads, batch=1)
    tensors = make_tensors(shape, dtype, unpadded(kernel))
    tensors.scale = 0.125
    torch.use_deterministic_algorithms(capabilities.name == "torch_flash")  # which has no switch of its own
    try:
        first, *others = (by_kernel(kernel, tensors, band) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    for again in others:
        for name, value in again.items():
            assert torch.equal(value, getattr(first, name)), name


@pytest.mark.parametrize("kernel", kernels())
def test_scores_far_from_zero_do_not_overflow(kernel):
    shape = Shape(13, 13, Band(0))
    dtype = next(dtype for dtype in (torch.float32, *kernel.capabilities.dtypes) if dtype in kernel.capabilities.dtypes)
    tensors = make_tensors(shape, dtype, HEAD_SIZE)
    tensors.scale = 40.0
    seen = admitted(shape.band, 13, 13)
    exact, got = written_out(tensors.to(torch.float64), seen), by_kernel(kernel, tensors, shape.band)
    rough = written_out(tensors, seen)
    for name, value in got.items():
        plain = relative_error(getattr(rough, name), getattr(exact, name))
        assert relative_error(value, getattr(exact, name)) <= max(1e-4, 2 * plain), name


def flash_kernels() -> list:
    named = ("flash_attn_4", "flash_attn_2", "torch_flash")
    return kernels([kernel for kernel in ALL_KERNELS if kernel.capabilities.name.startswith(named)])


@pytest.mark.parametrize("kernel", flash_kernels())
@pytest.mark.parametrize(
    ("band", "batch"),
    [(Band(0), 2), (Band(-3), 2), (Band(0, None, (0, 4, 13)), 1)],
    ids=["causal", "band", "documents"],
)
def test_a_flash_kernel_returns_its_lse_as_it_stored_it(kernel, band, batch):
    tensors = make_tensors(Shape(13, 13, band, batch=batch), torch.bfloat16, 64).to(device=device_of(kernel))
    _, lse = kernel.forward(tensors.q, tensors.k, tensors.v, band, tensors.scores)
    assert lse.shape == (batch, 13, 4)
    assert lse.transpose(1, 2).is_contiguous()


class Disk:
    """As flash-attn 4 keeps kernels, without a room for them."""

    def _try_load_from_storage(self, key: str) -> bool:
        raise RuntimeError(f"Timed out waiting for the lock of {key}")

    def _try_export_to_storage(self, key: str, kernel: str) -> None:
        raise OSError(f"No space for {kernel}, {key}")


@pytest.fixture
def keeping(monkeypatch, tmp_path) -> Callable[..., list[str | None]]:
    """What flash-attn 4 reads when it is imported: whether it keeps kernels, and where."""
    names = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR")]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "kernels_of_tests", module := ModuleType("kernels_of_tests"))
    module.__spec__ = ModuleSpec("kernels_of_tests", None)
    for name, value in (("kernels_of_tests.cute", module), ("kernels_of_tests.cute.cache_utils", module)):
        monkeypatch.setitem(sys.modules, name, value)
    module.JITPersistentCache = type("Cache", (Disk,), {})

    def kept(package: str = "kernels_of_tests", **given: str) -> list[str | None]:
        _keep_compiled.cache_clear()
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path)}):
            for name in names:
                os.environ.pop(name, None)
            os.environ |= {names[0 if key == "enabled" else 1]: value for key, value in given.items()}
            _keep_compiled(package)
            return [os.environ.get(name) for name in names]

    kept.module, kept.cache = module, module.JITPersistentCache()
    yield kept
    _keep_compiled.cache_clear()


def test_flash_attn_4_keeps_kernels_where_nobody_else_writes(keeping, tmp_path, monkeypatch):
    own = tmp_path / "hf_burst" / "flash_attn_4-sm90"
    assert keeping("no_such_package") == [None, None]
    assert keeping(enabled="0") == ["0", None]
    assert keeping(where="/shared") == [None, "/shared"]
    assert not own.exists()
    assert keeping() == keeping() == ["1", str(own)]
    assert own.stat().st_mode & 0o777 == 0o700
    for mode in (0o755, 0o777):
        own.chmod(mode)
        assert keeping() == [None, None]
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    assert keeping() == [None, None]
    own.unlink()
    own.touch()
    assert keeping() == [None, None]
    own.unlink()
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError("not supported")))
    assert keeping() == [None, None]


def test_flash_attn_4_is_imported_without_a_disk_that_fails(keeping, monkeypatch):
    """Its import makes folders, and would fail again."""
    monkeypatch.setattr("hf_burst.kernels.flash_attn_4.import_module", mock.Mock(side_effect=OSError("no space")))
    assert keeping() == [None, None]
    assert keeping.module.CUTE_DSL_CACHE_ENABLED is False


@pytest.mark.parametrize("parent", [False, True])
def test_a_disk_that_fails_costs_flash_attn_4_a_compilation_only(keeping, parent):
    """Also in a process that another one began."""
    with pytest.raises(RuntimeError):
        keeping.cache._try_load_from_storage("key")
    own = keeping()
    if parent:
        keeping.module.JITPersistentCache = type("Cache", (Disk,), {})
        keeping.cache = keeping.module.JITPersistentCache()
        assert keeping(enabled=own[0], where=own[1]) == own
    assert keeping.cache._try_load_from_storage("key") is False
    assert not keeping.cache._try_export_to_storage("key", "kernel")


@pytest.fixture
def flash_attn_4() -> tuple[FlashAttn4Kernel, list[dict[str, Any]]]:
    """The kernel, and what its backward calls are given."""
    library = flash_libraries.FlashAttn4()
    return calling(library, FlashAttn4Kernel()), library.backward_calls


def backward_inputs(batch: int) -> tuple[Tensors, torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = make_tensors(Shape(24, 24, Band(0), batch=batch), torch.bfloat16, 64)
    out = torch.randn(tensors.dout.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    lse = torch.full((batch, 4, 24), 8.0).transpose(1, 2)
    return tensors, out, lse, product(tensors.dout, out)


@pytest.mark.parametrize(("segments", "batch"), [((), 2), ((0, 8, 24), 1)], ids=["dense", "documents"])
def test_flash_attn_4_reads_out_or_delta_without_a_copy(flash_attn_4, segments, batch):
    kernel, calls = flash_attn_4
    t, out, lse, delta = backward_inputs(batch)
    band = Band(0, None, segments)
    gradients = [kernel.backward(t.backward_inputs(read, lse, delta), band, t.scores) for read in (out, None)]
    for by_out, by_delta in zip(*gradients, strict=True):
        assert relative_error(by_delta, by_out.double()) < 1e-5
    with_out, with_delta = calls
    assert with_out["dlse"] is None
    assert with_out["out"].data_ptr() == out.data_ptr()
    assert set(with_delta["out"].stride()[:-1]) == {0}, "one vector, expanded"
    assert (with_delta["out"] == 0).all()
    assert with_delta["dlse"].is_contiguous()
    assert torch.equal(with_delta["dlse"].flatten(), -delta.transpose(1, 2).flatten())
    assert {call["lse"].data_ptr() for call in calls} == {lse.data_ptr()}


def test_flash_attn_4_cuts_rows_out_of_a_log_sum_exp_that_is_stored_by_head_without_a_copy(flash_attn_4):
    kernel, calls = flash_attn_4
    t, out, lse, delta = backward_inputs(2)
    rows = slice(12, 24)
    kernel.backward(t.backward_inputs(out, lse, delta).cut(rows, slice(0, 24)), Band(), t.scores)
    assert calls[0]["lse"].data_ptr() == lse[:, rows].data_ptr()
    assert calls[0]["lse"].stride(-1) == 1


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_flash_attn_4_takes_the_heads_of_deepseek_as_they_are_if_none_are_shared(heads):
    library = flash_libraries.FlashAttn4()
    kernel = PaddedHeads(calling(library, FlashAttn4Kernel()))
    tensors = make_tensors(Shape(13, 13, Band(0), heads=heads), torch.bfloat16, 192, 128)
    out, lse = kernel.forward(tensors.q, tensors.k, tensors.v, Band(0), tensors.scores)
    assert out.shape[3] == 128
    kernel.backward(tensors.backward_inputs(None, lse, product(tensors.dout, out)), Band(0), tensors.scores)
    assert library.backward_calls[0]["out"].shape[3] == (128 if heads == (4, 4) else 192)


def wide_backward(
    band: Band,
    head_dim: int = 256,
    rows: int = 128,
    columns: int = 128,
    softcap: float = 0.0,
    reads: str = "out",
    deterministic: bool = False,
) -> tuple[Any, Any, list[int]]:
    """Gradients by FlashAttention-4 with cuDNN beside it, those by the former alone, and how often it was called."""
    tensors = make_tensors(Shape(rows, columns, band), torch.bfloat16, head_dim)
    tensors.softcap = softcap
    called, results = [], []
    for cudnn in (calling(flash_libraries.Aten(), TorchCudnnKernel()), None):
        library = flash_libraries.FlashAttn4()
        kernel = calling(library, FlashAttn4Kernel(deterministic))
        if cudnn is not None:
            kernel.cudnn = cudnn
        else:
            kernel._is_faster_by_cudnn = lambda *arguments: False
        out, lse = kernel.forward(tensors.q, tensors.k, tensors.v, band, tensors.scores)
        read = out if reads == "out" else None
        inputs = tensors.backward_inputs(read, lse, None if read is not None else product(tensors.dout, out))
        results.append(kernel.backward(inputs, band, tensors.scores))
        called.append(len(library.backward_calls))
    return results[0], results[1], called


@pytest.fixture
def wide_heads_on_hopper(monkeypatch):
    monkeypatch.setattr("hf_burst.kernels.flash_attn_4._LONG_TILE", 16)
    monkeypatch.setattr("hf_burst.kernels.flash_attn_4._cudnn_knows_wide_heads", lambda device: True)


WIDE = [
    {"band": Band(0)},
    {"band": Band(0), "rows": 24, "columns": 24},
    {"band": Band()},
    {"band": Band(), "rows": 40},
    {"band": Band(-200)},
]


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_long_tiles_of_wide_heads_go_backward_by_cudnn(wide_heads_on_hopper, case):
    gradients, expected, called = wide_backward(**case)
    assert called == [0, 1]
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert relative_error(gradient, wanted.double()) < 5e-3


OTHERS = [
    {"head_dim": 128},
    {"band": Band(0, None, (0, 20, 128))},
    {"band": Band(0, 20)},
    {"rows": 160},
    {"band": Band(), "columns": 144},
    {"band": Band(), "rows": 8},
    {"softcap": 3.0},
    {"reads": "delta"},
    {"deterministic": True},
]


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_other_tiles_stay_with_flash_attn_4(wide_heads_on_hopper, changes):
    gradients, expected, called = wide_backward(**{"band": Band(0), **changes})
    assert called[0] == called[1] > 0
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, wanted)


def test_cudnn_is_given_no_more_elements_than_were_tried(wide_heads_on_hopper, monkeypatch):
    elements = make_tensors(Shape(128, 128, Band(0)), torch.bfloat16, 256).q.numel()
    for most, called in ((elements, 1), (elements + 1, 0)):
        monkeypatch.setattr("hf_burst.kernels.flash_attn_4._MAX_ELEMENTS", most)
        assert wide_backward(Band(0))[2] == [called, 1]
    # of 40 queries, but the gradients of 128 keys for every query head
    assert wide_backward(Band(), rows=40)[2] == [0, 1]
    monkeypatch.setattr("hf_burst.kernels.flash_attn_4._MAX_ELEMENTS", elements)
    assert wide_backward(Band(), rows=40)[2] == [1, 1]


def test_cudnn_knows_wide_heads_on_hopper_from_some_version_on(monkeypatch):
    knows, device = _cudnn_knows_wide_heads, torch.device("cuda", 0)
    for capability, version, expected in (((9, 0), 91500, True), ((9, 0), 91400, False), ((10, 0), 91900, False)):
        knows.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert knows(device) is expected
    knows.cache_clear()


@pytest.mark.parametrize("columns", [64, 192, 1088])
def test_half_a_block_of_keys_is_cut_off_for_cudnn(columns):
    """The stand-in refuses them, as cuDNN would count keys that are not there."""
    kernel, band = calling(flash_libraries.Aten(), TorchCudnnKernel()), Band()
    tensors = make_tensors(Shape(40, columns, band), torch.bfloat16, 64)
    out, lse = kernel.forward(tensors.q, tensors.k, tensors.v, band, tensors.scores)
    gradients = kernel.backward(tensors.backward_inputs(out, lse, None), band, tensors.scores)
    fourth = calling(flash_libraries.FlashAttn4(), FlashAttn4Kernel())
    expected = fourth.backward(tensors.backward_inputs(out, lse, None), band, tensors.scores)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert gradient.shape == wanted.shape
        assert relative_error(gradient, wanted.double()) < 5e-3


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("segments", [(), (0, 8, 24)], ids=["dense", "documents"])
def test_libraries_are_asked_for_determinism(deterministic, segments):
    fourth, second, aten = flash_libraries.FlashAttn4(), flash_libraries.FlashAttn2(), flash_libraries.Aten()
    t, out, lse, delta = backward_inputs(1)
    for kernel in (
        calling(fourth, FlashAttn4Kernel(deterministic)),
        calling(second, FlashAttn2Kernel(deterministic)),
        calling(aten, TorchEfficientKernel(deterministic)),
    ):
        kernel.backward(t.backward_inputs(out, lse, delta), Band(0, None, segments), t.scores)
    asked = [fourth.backward_calls[0]["deterministic"], *second.deterministic, *aten.deterministic]
    assert len(asked) == 3 + bool(segments)  # torch_efficient computes two documents one by one
    assert set(asked) == {deterministic}


def test_aligned_copies_only_what_is_not():
    tensor = torch.randn(2, 6, 4, 16).bfloat16()
    for fine in (tensor, tensor[:, 1:3], tensor[:, :, 1:], tensor[..., :8], tensor[:1].expand(3, -1, -1, -1)):
        assert aligned(fine) is fine
    for name in ("every other element", "odd steps", "odd offset"):
        changed = STRIDES[name](tensor)
        copy = aligned(changed)
        assert torch.equal(copy, changed)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    size=st.sampled_from([1e-20, 1e-12, 1.0, 1e12]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_project_out_has_the_product_and_is_no_longer_than_the_true_out(seed, size, dtype):
    generator = torch.Generator().manual_seed(seed)
    dout = (torch.randn(2, 5, 3, 8, generator=generator, dtype=torch.float64) * size).to(dtype)
    out = torch.randn(2, 5, 3, 8, generator=generator, dtype=torch.float64).to(dtype)
    delta = product(dout, out)
    same, projected = project_out(dout, delta)
    assert torch.equal(same, dout)
    assert projected.dtype == dtype
    assert projected.shape == dout.shape
    rounding = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    dout, out, projected, delta = dout.double(), out.double(), projected.double(), delta.double()
    lengths = dout.norm(dim=-1) * out.norm(dim=-1)
    assert ((dout * projected).sum(-1) - delta).abs().le(2 * rounding * lengths).all()
    assert projected.norm(dim=-1).le(out.norm(dim=-1) * (1 + 2 * rounding)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_project_out_is_zero_where_dout_and_delta_are(dtype):
    dout = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    dout[:, 1] = 0
    dout[:, 2, 1] = 0
    delta = torch.where((dout == 0).all(-1), 0, 1.0).to(accumulation_dtype(dtype))
    same, projected = project_out(dout, delta)
    assert torch.equal(same, dout)
    assert projected.isfinite().all()
    assert (projected[:, 1] == 0).all()
    assert (projected[:, 2, 1] == 0).all()
    assert (projected[:, 0] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_project_out_gives_a_row_without_dout_a_tiny_one(dtype):
    dout = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    dout[:, 1] = 0
    delta = torch.tensor([-2.0, 0.5, 100.0, -30.0]).view(1, 4, 1).expand(1, 4, 2).to(accumulation_dtype(dtype))
    changed, projected = project_out(dout, delta)
    others = torch.arange(4) != 1
    assert torch.equal(changed[:, others], dout[:, others])
    assert changed[:, 1].norm() < 1e-3
    assert projected.isfinite().all()
    assert torch.allclose(product(changed, projected), delta, rtol=8 * torch.finfo(dtype).eps)


def test_project_out_survives_gradients_whose_square_underflows():
    dout = torch.tensor([3e-20, -4e-20, 0.0]).view(1, 1, 1, 3)
    delta = torch.tensor([5e-20]).view(1, 1, 1)
    same, projected = project_out(dout, delta)
    assert torch.equal(same, dout)
    assert torch.allclose(projected.flatten(), torch.tensor([0.6, -0.8, 0.0]))
    assert torch.allclose((projected.double() * dout.double()).sum(-1), delta.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "loss", ["out and lse", *(pytest.param(each, marks=pytest.mark.full) for each in ("out", "lse"))]
)
@pytest.mark.parametrize("kernel", kernels(CPU_KERNELS))
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None)])
def test_gradcheck_of_the_operator(kernel, causal, window, loss):
    generator = torch.Generator().manual_seed(7)
    layout = SequenceLayout.for_batch([(0, 1, 5, 7), (0, 7)], 1)
    request = AttentionRequest(pattern=MaskPattern(causal, window), kernel=kernel.capabilities.name)
    shapes = ((2, 7, 4, 3), (2, 7, 2, 3), (2, 7, 2, 3))
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    def attend(q, k, v):
        out, lse = burst_attention(q, k, v, layout, request)
        if loss == "out and lse":
            return torch.cat([out, lse.unsqueeze(-1)], -1)
        return out if loss == "out" else lse

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=loss != "lse")


def test_a_second_derivative_is_refused():
    layout = SequenceLayout.for_batch([(0, 5)], 1)
    q, k, v = (torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    out, _ = burst_attention(q, k, v, layout, AttentionRequest())
    with pytest.raises(KernelError, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.fixture
def chosen(caplog):
    """Chooses a kernel as if for the first time; returns it and what was logged."""

    def choose(requested: str, *properties) -> tuple[Kernel, str]:
        select_kernel.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="hf_burst"):
            kernel = select_kernel(requested, KernelRequest(*properties))
        return kernel, caplog.text

    yield choose
    select_kernel.cache_clear()


def test_auto_takes_the_flash_kernel_on_a_cpu_and_says_why(chosen):
    kernel, log = chosen("auto", "cpu", torch.float32, 64, 64)
    assert kernel.capabilities.name == "cpu_flash"
    assert "cpu_flash (cpu, torch.float32, head size 64): " in log
    assert log.rsplit(": ", 1)[1].strip()


def test_auto_says_why_the_faster_kernel_was_not_taken(chosen):
    kernel, log = chosen("auto", "cpu", torch.float32, 64, 64, True)
    assert kernel.capabilities.name == "reference"
    assert "cpu_flash knows no soft-capping of scores" in log


def test_plain_torch_on_a_gpu_is_warned_of(chosen, caplog):
    """As for soft-capped heads of 512, which no kernel takes."""
    kernel, log = chosen("auto", "cuda", torch.bfloat16, 512, 512, True)
    assert kernel.capabilities.name == "reference"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the kernel reference (cuda, torch.bfloat16, head size 512): " in log
    assert "Plain torch takes some 17 times as long as a kernel" in log
    for requested, *kind in (("reference", "cuda", torch.bfloat16), ("auto", "cpu", torch.float64)):
        assert "Plain torch" not in chosen(requested, *kind, 512, 512)[1], "asked for, or no slower than others"


@pytest.mark.parametrize("kernel", kernels(CPU_KERNELS))
def test_a_kernel_asked_for_is_the_one_taken(kernel, chosen):
    taken, log = chosen(kernel.capabilities.name, "cpu", torch.bfloat16, 16, 16)
    assert taken.capabilities.name == kernel.capabilities.name
    assert "asked for" in log


def test_a_choice_is_logged_once(chosen, caplog):
    _, log = chosen("auto", "cpu", torch.float32, 24, 24)
    assert log.count("hf_burst computes attention") == 1
    with caplog.at_level(logging.INFO, logger="hf_burst"):
        select_kernel("auto", KernelRequest("cpu", torch.float32, 24, 24))
    assert caplog.text == log


def test_auto_on_a_cpu_does_not_speak_of_gpus(chosen):
    _, log = chosen("auto", "cpu", torch.float32, 64, 64)
    assert "flash_attn" not in log
    assert "the fastest for this device" in log


@pytest.fixture
def hopper(monkeypatch):
    """A machine with a Hopper GPU, as far as one can tell before anything runs on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


@pytest.fixture
def installed(monkeypatch):
    """`installed(module, library)` installs a library, or for `None` makes sure that it is not."""

    def install(module: str, library: object) -> None:
        monkeypatch.setitem(sys.modules, module, library)
        package_refusal.cache_clear()

    yield install
    package_refusal.cache_clear()


LIBRARIES: dict[str, tuple[str, Callable[[], object]]] = {
    "flash_attn_4": ("flash_attn.cute.interface", flash_libraries.FlashAttn4),
    "flash_attn_2": ("flash_attn.flash_attn_interface", flash_libraries.FlashAttn2),
    "ffpa": ("ffpa_attn.cute", flash_libraries.Ffpa),
}


@pytest.fixture
def all_installed(installed):
    for module, library in LIBRARIES.values():
        installed(module, library())


def test_a_warning_of_the_compiler_of_flash_attn_4_is_not_shown(installed):
    """Only this one, and only once the library is loaded."""

    class Warns(flash_libraries.FlashAttn4):
        def _flash_attn_fwd(self, *arguments, **keywords):
            warnings.warn("While it compiles:\naux_data (position 17) of type list cannot be converted", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
            return super()._flash_attn_fwd(*arguments, **keywords)

    installed(LIBRARIES["flash_attn_4"][0], Warns())
    tensors = make_tensors(Shape(13, 13, Band(0)), torch.bfloat16, 64)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for deterministic in (False, True):
            kernel = FlashAttn4Kernel(deterministic)
            kernel.forward(tensors.q, tensors.k, tensors.v, Band(0), tensors.scores)
    assert [str(warning.message) for warning in shown] == ["something else"] * 2


def test_auto_goes_from_the_fastest_to_what_is_installed(hopper, installed, all_installed, chosen):
    for name in ("flash_attn_4", "flash_attn_2"):
        kernel, log = chosen("auto", "cuda", torch.bfloat16, 128, 128)
        assert kernel.capabilities.name == name
        installed(LIBRARIES[name][0], None)
    kernel, log = chosen("auto", "cuda", torch.bfloat16, 128, 128)
    assert kernel.capabilities.name == "torch_flash"
    assert "flash_attn_4 needs the package flash-attn-4, and flash_attn.cute.interface cannot be imported (" in log
    assert "torch_cudnn is taken by name only, since it computes no windows" in log
    assert "flash_attn_2 needs the package flash-attn, " in log
    assert "cpu_flash" not in log
    assert chosen("torch_cudnn", "cuda", torch.bfloat16, 128, 128)[0].capabilities.name == "torch_cudnn"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((torch.float16, 128, 128), "flash_attn_4"),
        ((torch.bfloat16, 128, 128, True), "flash_attn_4"),
        ((torch.bfloat16, 192, 128, False, True, True), "flash_attn_4"),
        ((torch.bfloat16, 5, 256), "flash_attn_4"),
        ((torch.float32, 64, 64), "reference"),
        ((torch.bfloat16, 512, 512), "ffpa"),
        ((torch.bfloat16, 512, 512, False, False, True), "torch_efficient"),
    ],
)
def test_auto_on_hopper(hopper, all_installed, chosen, arguments, name):
    assert chosen("auto", "cuda", *arguments)[0].capabilities.name == name


@pytest.mark.parametrize(
    ("capability", "sizes", "names"),
    [
        ((7, 5), (64, 64), ["reference"]),
        ((8, 0), (64, 64), ["flash_attn_2", "torch_flash", "torch_efficient", "reference"]),
        ((8, 9), (208, 208), ["torch_efficient", "reference"]),
        ((8, 6), (512, 512), ["torch_efficient", "reference"]),
        ((9, 0), (512, 512), ["ffpa", "torch_efficient", "reference"]),
        ((9, 0), (576, 512), ["torch_efficient", "reference"]),
        ((8, 9), (256, 256), ["flash_attn_2", "torch_flash", "torch_efficient", "reference"]),
        ((9, 0), (256, 256), ["flash_attn_4", "flash_attn_2", "torch_flash", "ffpa", "torch_efficient", "reference"]),
        ((10, 0), (128, 128), ["flash_attn_4", "flash_attn_2", "torch_flash", "torch_efficient", "reference"]),
        ((10, 0), (100, 192), ["flash_attn_2", "torch_flash", "torch_efficient", "reference"]),
        ((12, 0), (64, 64), ["flash_attn_2", "torch_flash", "torch_efficient", "reference"]),
    ],
)
def test_gpus_have_their_kernels(monkeypatch, hopper, all_installed, capability, sizes, names):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    explained = explain_kernels(KernelRequest("cuda", torch.bfloat16, *sizes))
    assert [name for name, _ in explained] == [kernel.capabilities.name for kernel in KERNELS]
    assert [name for name, refusal in explained if refusal is None] == names
    assert all(refusal for name, refusal in explained if name not in names)


def test_determinism_is_had_or_refused(hopper, all_installed, chosen):
    kernel, log = chosen("auto", "cuda", torch.bfloat16, 128, 128, False, True)
    assert kernel.capabilities.name == "flash_attn_4"
    assert kernel.deterministic
    assert "deterministic" in log
    assert not chosen("auto", "cuda", torch.bfloat16, 128, 128)[0].deterministic
    with pytest.raises(KernelError) as caught:
        select_kernel("torch_cudnn", KernelRequest("cuda", torch.bfloat16, 128, 128, deterministic=True))
    assert "torch_cudnn cannot give the same bits each time" in str(caught.value)


def test_windows_are_refused_by_what_knows_none(hopper):
    with pytest.raises(KernelError, match=r"window=True\): torch_cudnn computes no windows"):
        select_kernel("torch_cudnn", KernelRequest("cuda", torch.bfloat16, 128, 128, window=True))


def test_old_cudnn_is_refused(monkeypatch, hopper):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8907)
    with pytest.raises(KernelError, match="torch_cudnn needs cuDNN 90000 or above, torch has 8907"):
        select_kernel("torch_cudnn", KernelRequest("cuda", torch.bfloat16, 96, 96))


def test_a_library_that_is_not_the_one_that_was_read_is_refused(installed):
    calls = (("attend", ("q", "k", "scale")),)

    def refusal(library: object) -> str | None:
        installed("some_module", library)
        return package_refusal("some-package", "some_module", calls)

    def module(function: Callable) -> SimpleNamespace:
        return SimpleNamespace(attend=function)

    @torch.library.custom_op("hf_burst_tests::attend", mutates_args=())
    def operator(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        return q @ k * scale

    assert refusal(module(lambda q, k, *, scale=None, more=0: 0)) is None
    assert refusal(module(operator)) is None
    release = "the some-package that is installed"
    for library in (SimpleNamespace(), module(lambda q: 0), module(lambda q, k, scale, mask: 0)):
        called = "calls some_module.attend(q, k, scale)"
        assert refusal(library) == f"{called}, which {release} does not have: reinstall it"
    missing = "needs the package some-package, and some_module cannot be imported (ModuleNotFoundError: "
    assert (refusal(None) or "").startswith(missing)


def test_a_library_that_breaks_while_it_is_imported_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a_broken_module.py").write_text("raise OSError('undefined symbol: x\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    refusal = package_refusal("broken", "a_broken_module", ())
    assert refusal == "needs the package broken, and a_broken_module cannot be imported (OSError: undefined symbol: x)"


def test_importing_hf_burst_imports_no_library(tmp_path):
    for name in ("flash_attn", "ffpa_attn"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported')")
    program = "import hf_burst.kernels, sys; assert not {'flash_attn', 'ffpa_attn'} & set(sys.modules)"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": paths})


def test_gpu_refusals(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_refusal((8, 0)) == "needs a GPU, and torch can use none here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert gpu_refusal((8, 0)) is None
    assert gpu_refusal((9, 0)) == "needs compute capability 9.0 or above, this GPU has 8.6"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    wanted = "needs compute capability 9.0 or above and below 12.0, this GPU has 12.0"
    assert gpu_refusal((9, 0), (12, 0)) == wanted


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("cpu_flash", "cuda", torch.float32, 64, 64), ["cpu_flash", "runs on cpu, not on cuda"]),
        (("cpu_flash", "cpu", torch.int32, 64, 64), ["takes torch.float64", "not torch.int32"]),
        (("cpu_flash", "cpu", torch.float32, 64, 32, True), ["cpu_flash knows no soft-capping", "softcap=True"]),
        (("reference", "cpu", torch.float32, 1 << 17, 64), ["head sizes up to 65536", "not 131072"]),
        (("reference", "cpu", torch.complex64, 64, 64), ["reference takes", "not torch.complex64"]),
        (("reference", "mps", torch.float32, 64, 64), ["runs on cpu, cuda, not on mps"]),
        (("torch_flash", "cpu", torch.bfloat16, 64, 64), ["torch_flash runs on cuda, not on cpu"]),
        (("auto", "mps", torch.float32, 64, 64), ["cpu_flash runs on cpu", "reference runs on cpu, cuda"]),
    ],
)
def test_what_was_asked_for_and_is_impossible_raises(arguments, parts):
    with pytest.raises(KernelError) as caught:
        select_kernel(arguments[0], KernelRequest(*arguments[1:]))
    for part in (str(arguments[2]), arguments[1], str(arguments[3]), "BurstConfig(kernel=...)", *parts):
        assert part in str(caught.value)


def test_capabilities_refuse_what_a_kernel_cannot_compute():
    request = KernelRequest("cpu", torch.float32, 64, 64)
    some = Capabilities("some", ("cpu",), (torch.float32,), 256, 8)
    assert some.refusal(request._replace(value_dim=255)) is None  # padded
    assert some.refusal(request._replace(softcap=True)) == "knows no soft-capping of scores"
    assert some.refusal(request._replace(deterministic=True)) == "cannot give the same bits each time"
    assert replace(some, windows=False).refusal(request._replace(window=True)) == "computes no windows"
    for sizes in ((264, 64), (64, 264)):
        refusal = some.refusal(KernelRequest("cpu", torch.float32, *sizes))
        assert refusal == "takes head sizes up to 256, not 264"
