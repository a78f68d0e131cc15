"""The kernels of merges and sums in Triton beside plain torch: on a GPU, or interpreted on a CPU (see conftest.py)."""

from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from hf_burst.ring import MAX_TENSORS, merge

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # of the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(509, 64), (4096, 128), (1024, 80), (300, 256)] if DEVICE == "cuda" else [(37, 16), (150, 80)]
TIMES = 200 if DEVICE == "cuda" else 2


@pytest.fixture(autouse=True)
def any_device() -> Iterator[None]:
    """Kernels run on the device of their tensors; there is none to change to on a CPU."""
    context = nullcontext() if DEVICE == "cuda" else mock.patch("torch.cuda.device", return_value=nullcontext())
    with context:
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(11)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-4}


@pytest.mark.parametrize(
    ("rows", "head_dim", "dtype"),
    [
        pytest.param(*shape, dtype, marks=[pytest.mark.full] * (shape[0] == 150 and dtype != torch.float32))
        for shape in SHAPES
        for dtype in DTYPES
    ],
)
def test_merges_are_exact_each_time(generator: torch.Generator, dtype: torch.dtype, rows: int, head_dim: int) -> None:
    """Whatever the order in which the threads of a kernel come to read and write."""
    from hf_burst.ring import fused

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, device=DEVICE, generator=generator)

    out, part = normal(rows, 6, head_dim).to(dtype), normal(rows // 2, 6, head_dim).to(dtype)
    lse, part_lse = normal(6, rows).transpose(1, 2), normal(6, rows // 2).transpose(1, 2)
    for values, scores, row in ((out, lse, 3), (out, lse, rows // 3), (part, part_lse, 0), (part, part_lse, 7)):
        values[1, row], scores[1, row] = 0, -torch.inf
    first = rows // 3
    place = (slice(None), slice(first, first + rows // 2))
    wanted, wanted_lse = out.double(), lse.double()
    merge.merge_(wanted[place], wanted_lse[place], part, part_lse)
    for index in range(TIMES):
        given, given_lse = out.clone(), lse.transpose(1, 2).clone().transpose(1, 2)
        result = given if index % 2 and dtype == torch.float32 else torch.empty_like(out)
        fused.combine(result, given, given_lse, part, part_lse, (0, 2), (first, first + rows // 2))
        torch.testing.assert_close(result.double(), wanted, **tolerance(dtype))
        torch.testing.assert_close(given_lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_sums_are_exact(generator: torch.Generator, dtype: torch.dtype, in_place: bool) -> None:
    from hf_burst.ring import fused

    total = torch.randn(2, 67, 3, 24, device=DEVICE, generator=generator)
    part = torch.randn(1, 30, 3, 24, device=DEVICE, generator=generator).to(dtype)
    wanted = total.clone()
    wanted[1:, 11:41] += part
    result = total if in_place else torch.empty_like(total, dtype=dtype)
    fused.combine(result, total, None, part, None, (1, 2), (11, 41))
    torch.testing.assert_close(result.float(), wanted, **tolerance(torch.float32 if in_place else dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_products_of_rows_are_exact(generator: torch.Generator, dtype: torch.dtype, with_lse: bool) -> None:
    from hf_burst.ring import fused

    dout, out = (torch.randn(2, 43, 3, 72, device=DEVICE, generator=generator).to(dtype) for _ in range(2))
    dlse = torch.randn(2, 43, 3, device=DEVICE, generator=generator) if with_lse else None
    delta = merge.heads_first((2, 43, 3), torch.float32, dout.device)
    fused.product(dout, out, dlse, delta)
    wanted = (dout.double() * out.double()).sum(-1) - (0 if dlse is None else dlse)
    torch.testing.assert_close(delta.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behind", "dtype"),
    [
        (True, torch.float32),
        pytest.param(False, torch.bfloat16, marks=pytest.mark.full),
        pytest.param(False, torch.float32, marks=pytest.mark.full),
        pytest.param(True, torch.bfloat16, marks=pytest.mark.full),
    ],
)
def test_every_copy_of_a_table_ends_up_in_its_place(
    generator: torch.Generator, dtype: torch.dtype, behind: bool
) -> None:
    """Heads of several sources side by side in rows, and scalars of rows, in pieces of another number each, and into
    destinations laid out as those that the table was made with."""
    from hf_burst.ring import fused

    peers = [torch.randn(2, 70, 6, 16, device=DEVICE, generator=generator).to(dtype) for _ in range(3)]
    scalars = [torch.randn(2, 6, 70, device=DEVICE, generator=generator).transpose(1, 2) for _ in range(3)]

    def destinations() -> list[torch.Tensor]:
        rows = torch.zeros(2, 210, 5, 16, device=DEVICE, dtype=dtype)
        more = [torch.zeros(2, 210, 2, 16, device=DEVICE, dtype=dtype) for _ in range(MAX_TENSORS - 2)]
        return [rows[:, :, 1:3], torch.zeros(2, 2, 210, device=DEVICE).transpose(1, 2).unsqueeze(3), *more]

    made, into, wanted = destinations(), destinations(), destinations()
    pairs = []
    for peer, (heads, rows) in enumerate(zip(peers, scalars, strict=True)):
        for start, stop in ((0, 19), (19, 69)):  # a row of each is nobody's
            here = slice(70 * peer + start, 70 * peer + stop)
            sources = [rows.unsqueeze(3)[:, start:stop, 2:4], heads[:, start:stop, 2:4]]
            others = [(index, heads[:, start:stop, index % 5 :][:, :, :2]) for index in range(2, MAX_TENSORS)]
            for index, source in ((1, sources[0]), (0, sources[1]), *others):
                pairs.append((source, made[index][:, here], index))
                wanted[index][:, here] = source
    with mock.patch.multiple(fused, _TILE=64, _LARGE_TILE=128, _FEW=5):
        table = fused.Table(pairs, made)
        table.run(into, behind)
    assert min(table.tiles.values()) > 1
    for found, right in zip(into, wanted, strict=True):
        assert torch.equal(found, right)
