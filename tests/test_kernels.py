"""One contract for every kernel: a tile of attention, forward and backward, against attention written out in fp64."""

import logging
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_burst import BurstConfig, ContextGroup, SequenceLayout, burst_attention
from hf_burst.errors import KernelError
from hf_burst.kernels import KERNELS, Band, Card, Kernel, Scores, project_out, reference, select_kernel
from hf_burst.ring import accumulation_dtype, merge_
from tests.oracle import relative_error, softmax_attention

LOW_PRECISION = (torch.bfloat16, torch.float16)
ROUNDING = {torch.float64: 2e-15, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}
LSE_ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-4, torch.float16: 1e-4}
CPU_KERNELS = [kernel for kernel in KERNELS if "cpu" in kernel.card.devices]


def device_of(kernel: Kernel) -> str:
    if "cpu" in kernel.card.devices:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip(f"{kernel.card.name} runs on {kernel.card.devices}, which this machine lacks")


def head_size_of(card: Card) -> int:
    return max(card.head_dims[0], card.head_multiple * -(-12 // card.head_multiple))


def kernels_and_dtypes() -> list:
    return [
        pytest.param(kernel, dtype, id=f"{kernel.card.name}-{str(dtype)[6:]}")
        for kernel in KERNELS
        for dtype in kernel.card.dtypes
    ]


def kernels(chosen: tuple[Kernel, ...] | list[Kernel] = KERNELS) -> list:
    return [pytest.param(kernel, id=kernel.card.name) for kernel in chosen]


def admitted(band: Band, rows: int, columns: int) -> torch.Tensor:
    """Who sees whom in a tile, pair by pair from the definition: `torch.BoolTensor` of shape `(1, rows, columns)`."""

    def square(position: int) -> int:
        return sum(position >= end for end in band.segments[1:])

    def sees(row: int, column: int) -> bool:
        above = band.low is None or row - column >= band.low
        below = band.high is None or row - column <= band.high
        return above and below and (not band.segments or square(row) == square(column))

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
    "documents": Shape(13, 13, Band(segments=(0, 5, 13))),
    "causal documents of 1 token": Shape(13, 13, Band(0, None, (0, 1, 2, 7, 8, 13)), heads=(4, 1)),
    "only documents of 1 token": Shape(5, 5, Band(0, None, (0, 1, 2, 3, 4, 5))),
    "documents with a window": Shape(23, 23, Band(0, 2, (0, 1, 12, 23)), heads=(8, 1)),
    "documents with a two-sided window": Shape(23, 23, Band(-2, 2, (0, 3, 22, 23))),
    "long, windowed": Shape(1031, 1031, Band(0, 70), heads=(1, 1), batch=1),
    "long, offset band": Shape(700, 1100, Band(-650, -100), heads=(2, 1), batch=1),
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
    """A tile that is all of an attention."""
    device = device_of(kernel)
    tensors = tensors.to(device=device)
    out, lse = kernel.forward(tensors.q, tensors.k, tensors.v, band, tensors.scores)
    delta = product(tensors.dout, out)
    given_out = out if kernel.card.wants_out else None
    gradients = kernel.backward(
        tensors.dout, tensors.q, tensors.k, tensors.v, given_out, lse, delta, band, tensors.scores
    )
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
@pytest.mark.parametrize("name", SHAPES)
def test_a_kernel_computes_a_tile_as_written_out(kernel, dtype, name):
    shape = SHAPES[name]
    if shape.rows > 512 and dtype not in (torch.float32, torch.bfloat16):
        pytest.skip("long tiles in fp32 and bf16 only")
    tensors = make_tensors(shape, dtype, head_size_of(kernel.card))
    answer = by_kernel(kernel, tensors, shape.band)
    allowed = {accumulation_dtype(dtype)} if kernel.card.wide else {dtype, accumulation_dtype(dtype)}
    assert {tensor.dtype for tensor in (answer.out, answer.dq, answer.dk, answer.dv)} <= allowed
    assert answer.lse.dtype == accumulation_dtype(dtype)
    seen = admitted(shape.band, shape.rows, shape.columns)
    rough = written_out(tensors, seen) if dtype in LOW_PRECISION else None
    check(answer, written_out(tensors.to(torch.float64), seen), dtype, rough)


@pytest.mark.parametrize("kernel", kernels())
def test_a_row_that_sees_nothing_weighs_nothing(kernel):
    shape = Shape(13, 9, Band(low=4))
    dtype = kernel.card.dtypes[0]
    tensors = make_tensors(shape, dtype, head_size_of(kernel.card))
    answer = by_kernel(kernel, tensors, shape.band)
    assert (answer.out[:, :4] == 0).all()
    assert (answer.lse[:, :4] == -torch.inf).all()
    assert (answer.dq[:, :4] == 0).all()
    tensors.dout[:, :4] *= 1e3
    again = by_kernel(kernel, tensors, shape.band)
    assert torch.equal(again.dk, answer.dk)
    assert torch.equal(again.dv, answer.dv)


def in_a_larger_one(tensor: torch.Tensor) -> torch.Tensor:
    larger = torch.full((tensor.shape[0] + 1, tensor.shape[1] + 5, *tensor.shape[2:]), torch.nan, dtype=tensor.dtype)
    larger[1:, 2:-3] = tensor
    return larger[1:, 2:-3]


STRIDES = {
    "heads first": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "in a larger one": in_a_larger_one,
    "every other element": lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2],
    "expanded batch": lambda tensor: tensor[:1].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize(("kernel", "dtype"), kernels_and_dtypes())
@pytest.mark.parametrize("strides", STRIDES)
def test_strides_do_not_matter(kernel, dtype, strides):
    shape = Shape(13, 13, Band(0, None, (0, 4, 13)))
    tensors = make_tensors(shape, dtype, head_size_of(kernel.card))
    if strides == "expanded batch":
        tensors = Tensors(*(t[:1].repeat(2, 1, 1, 1) for t in (tensors.q, tensors.k, tensors.v, tensors.dout)), 0.37)
    straight = by_kernel(kernel, tensors, shape.band)
    changed = Tensors(*map(STRIDES[strides], (tensors.q, tensors.k, tensors.v, tensors.dout)), tensors.scale)
    assert not changed.q.is_contiguous()
    for name, got in by_kernel(kernel, changed, shape.band).items():
        assert relative_error(got, getattr(straight, name).double()) <= (1e-2 if dtype in LOW_PRECISION else 1e-6), name


@pytest.mark.parametrize(("kernel", "dtype"), kernels_and_dtypes())
def test_inputs_of_a_kernel_stay_as_they_are(kernel, dtype):
    shape = Shape(13, 13, Band(0, 4))
    device = device_of(kernel)
    tensors = make_tensors(shape, dtype, head_size_of(kernel.card)).to(device=device)
    out, lse = kernel.forward(tensors.q, tensors.k, tensors.v, shape.band, tensors.scores)
    delta = product(tensors.dout, out)
    given = [tensors.dout, tensors.q, tensors.k, tensors.v, out, lse, delta]
    before = [tensor.clone() for tensor in given]
    kernel.backward(*given, shape.band, tensors.scores)
    kernel.forward(tensors.q, tensors.k, tensors.v, shape.band, tensors.scores)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))


@pytest.mark.parametrize("given_out", ["true", "projected"])
@pytest.mark.parametrize(("kernel", "dtype"), kernels_and_dtypes())
@pytest.mark.parametrize("window", [None, 6])
def test_two_tiles_with_the_global_lse_are_the_whole(kernel, dtype, window, given_out):
    rows, cut = 21, 8
    shape = Shape(rows, rows, Band(0, window), heads=(4, 2))
    tensors = make_tensors(shape, dtype, head_size_of(kernel.card))
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
    dout, given = (t.dout, out) if given_out == "true" else project_out(t.dout, delta)
    given = given if kernel.card.wants_out else None
    parts = [
        kernel.backward(dout, t.q, t.k[:, columns], t.v[:, columns], given, lse, delta, band, t.scores)
        for columns, band in halves
    ]
    dq = parts[0][0].to(wide) + parts[1][0].to(wide)
    dk, dv = (torch.cat([part[index] for part in parts], 1) for index in (1, 2))
    answer = Answer(*(tensor.cpu() for tensor in (out, lse, dq, dk, dv)))
    rough = written_out(tensors, seen) if dtype in LOW_PRECISION else None
    check(answer, exact, dtype, rough)


@pytest.mark.parametrize("kernel", kernels([kernel for kernel in KERNELS if kernel.card.own_value_dim]))
@pytest.mark.parametrize("sizes", [(6, 10), (24, 16), (5, 5)])
@pytest.mark.parametrize("band", [Band(-5), Band(0, None, (0, 4, 13))], ids=["band", "documents"])
def test_values_of_another_head_size(kernel, sizes, band):
    shape = Shape(13, 13, band)
    dtype = kernel.card.dtypes[0]
    tensors = make_tensors(shape, dtype, *sizes)
    seen = admitted(shape.band, 13, 13)
    rough = written_out(tensors, seen) if dtype in LOW_PRECISION else None
    check(by_kernel(kernel, tensors, shape.band), written_out(tensors.to(torch.float64), seen), dtype, rough)


@pytest.mark.parametrize(("kernel", "dtype"), [pair for pair in kernels_and_dtypes() if pair.values[0].card.softcap])
@pytest.mark.parametrize("name", ["causal 4 to 1", "two-sided window", "the first rows see nothing", "documents"])
@pytest.mark.parametrize("softcap", [0.3, 5.0])
def test_scores_are_soft_capped(kernel, dtype, name, softcap):
    shape = SHAPES[name]
    tensors = make_tensors(shape, dtype, head_size_of(kernel.card))
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


@pytest.mark.parametrize("kernel", kernels())
def test_scores_far_from_zero_do_not_overflow(kernel):
    shape = Shape(13, 13, Band(0))
    dtype = next(dtype for dtype in (torch.float32, *kernel.card.dtypes) if dtype in kernel.card.dtypes)
    tensors = make_tensors(shape, dtype, head_size_of(kernel.card))
    tensors.scale = 40.0
    seen = admitted(shape.band, 13, 13)
    exact, got = written_out(tensors.to(torch.float64), seen), by_kernel(kernel, tensors, shape.band)
    rough = written_out(tensors, seen)
    for name, value in got.items():
        plain = relative_error(getattr(rough, name), getattr(exact, name))
        assert relative_error(value, getattr(exact, name)) <= max(1e-4, 2 * plain), name


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


@pytest.mark.parametrize("loss", ["out", "out and lse", "lse"])
@pytest.mark.parametrize("kernel", kernels(CPU_KERNELS))
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None)])
def test_gradcheck_of_the_operator(kernel, causal, window, loss):
    generator = torch.Generator().manual_seed(7)
    layout = SequenceLayout.for_batch([(0, 1, 5, 7), (0, 7)], 1)
    config = BurstConfig(kernel=kernel.card.name)
    shapes = ((2, 7, 4, 3), (2, 7, 2, 3), (2, 7, 2, 3))
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    def attend(q, k, v):
        out, lse = burst_attention(q, k, v, layout, ContextGroup(), causal=causal, window=window, config=config)
        if loss == "out and lse":
            return torch.cat([out, lse.unsqueeze(-1)], -1)
        return out if loss == "out" else lse

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=loss != "lse")


def test_a_second_derivative_is_refused():
    layout = SequenceLayout.for_batch([(0, 5)], 1)
    q, k, v = (torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    out, _ = burst_attention(q, k, v, layout, ContextGroup())
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        dq.sum().backward()


@pytest.fixture
def chosen(caplog):
    """Chooses a kernel as if for the first time; returns it and what was logged."""

    def choose(*arguments) -> tuple[Kernel, str]:
        select_kernel.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="hf_burst"):
            kernel = select_kernel(*arguments)
        return kernel, caplog.text

    yield choose
    select_kernel.cache_clear()


def test_auto_takes_the_flash_kernel_on_a_cpu_and_says_why(chosen):
    kernel, log = chosen("auto", "cpu", torch.float32, 64, 64)
    assert kernel.card.name == "cpu_flash"
    assert "cpu_flash (cpu, torch.float32, head size 64): " in log
    assert log.rsplit(": ", 1)[1].strip()


def test_auto_says_why_the_faster_kernel_was_not_taken(chosen):
    kernel, log = chosen("auto", "cpu", torch.float32, 64, 64, True)
    assert kernel.card.name == "reference"
    assert "cpu_flash knows no soft-capping of scores" in log


@pytest.mark.parametrize("kernel", kernels(CPU_KERNELS))
def test_a_kernel_asked_for_is_the_one_taken(kernel, chosen):
    taken, log = chosen(kernel.card.name, "cpu", torch.bfloat16, 16, 16)
    assert taken is kernel
    assert "asked for" in log


def test_a_choice_is_logged_once(chosen, caplog):
    _, log = chosen("auto", "cpu", torch.float32, 24, 24)
    assert log.count("hf_burst computes attention") == 1
    with caplog.at_level(logging.INFO, logger="hf_burst"):
        select_kernel("auto", "cpu", torch.float32, 24, 24)
    assert caplog.text == log


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("cpu_flash", "cuda", torch.float32, 64, 64), ["cpu_flash", "runs on cpu, not on cuda"]),
        (("cpu_flash", "cpu", torch.int32, 64, 64), ["takes torch.float64", "not torch.int32"]),
        (("cpu_flash", "cpu", torch.float32, 64, 32, True), ["cpu_flash knows no soft-capping", "soft-capped scores"]),
        (("reference", "cpu", torch.float32, 1 << 17, 64), ["head sizes 1 to 65536", "not 131072"]),
        (("reference", "cpu", torch.complex64, 64, 64), ["reference takes", "not torch.complex64"]),
        (("reference", "mps", torch.float32, 64, 64), ["runs on cpu, cuda, not on mps"]),
        (("torch_flash", "cpu", torch.bfloat16, 64, 64), ["torch_flash runs on cuda, not on cpu"]),
        (("auto", "mps", torch.float32, 64, 64), ["cpu_flash runs on cpu", "reference runs on cpu, cuda"]),
    ],
)
def test_what_was_asked_for_and_is_impossible_raises(arguments, parts):
    with pytest.raises(KernelError) as caught:
        select_kernel(*arguments)
    for part in (str(arguments[2]), arguments[1], str(arguments[3]), "BurstConfig(kernel=...)", *parts):
        assert part in str(caught.value)


def test_a_card_refuses_head_sizes_out_of_step():
    card = Card("some", ("cpu",), (torch.float32,), (8, 256), 8, own_value_dim=True, wide=True, wants_out=False)
    assert card.refusal("cpu", torch.float32, 64, 256) is None
    alike = replace(card, own_value_dim=False)
    assert alike.refusal("cpu", torch.float32, 64, 256) == "needs one head size, got 64 for q and k and 256 for v"
    assert card.refusal("cpu", torch.float32, 64, 64, softcap=True) == "knows no soft-capping of scores"
    for size in (4, 12, 264):
        for sizes in ((size, 64), (64, size)):
            refusal = card.refusal("cpu", torch.float32, *sizes)
            assert refusal == f"takes head sizes 8 to 256 in steps of 8, not {size}"
