"""Parts of rows put together: as exact as one sum, whatever the order, and nothing touched that has no part in it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_burst.ring.merge import Merged, Summed, heads_first

SHAPE = (2, 12, 3, 4)
spans = st.tuples(st.integers(0, SHAPE[1] - 1), st.integers(1, SHAPE[1])).filter(lambda span: span[0] < span[1])
batches = st.sampled_from([(0, 2), (0, 1), (1, 2)])
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])
halves = [((0, 2), (0, 7)), ((0, 2), (7, 12))]


@st.composite
def places(draw) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where parts lie: often one that covers all, or two that do together, first."""
    start = draw(st.sampled_from([[], [((0, 2), (0, 12))], halves, halves[::-1]]))
    return start + draw(st.lists(st.tuples(batches, spans), max_size=5))


@settings(max_examples=150)
@given(where=places(), dtype=dtypes, kept=st.booleans(), seed=st.integers(0, 99))
def test_sums_of_parts_are_rounded_once(where, dtype, kept, seed):
    generator = torch.Generator().manual_seed(seed)
    made = torch.promote_types(dtype, torch.float32) if kept else dtype
    wanted, total = torch.zeros(SHAPE, dtype=torch.float64), Summed(SHAPE, torch.empty(0, dtype=dtype))
    size = torch.zeros(SHAPE, dtype=torch.float64)
    for batch, rows in where:
        shape = (batch[1] - batch[0], rows[1] - rows[0], *SHAPE[2:])
        part = torch.randn(shape, generator=generator).to(made)
        wanted[slice(*batch), slice(*rows)] += part.double()
        size[slice(*batch), slice(*rows)] += part.double().abs()
        total.add(batch, rows, part)
    found = total.result()
    assert found.dtype == dtype
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    rounded = 0.5 * torch.finfo(dtype).eps * wanted.abs().clamp(min=torch.finfo(dtype).tiny)  # subnormal numbers, too
    assert ((found.double() - wanted).abs() <= 1.01 * rounded + 8 * wide * size).all()


@settings(max_examples=150)
@given(where=places(), dtype=dtypes, with_sinks=st.booleans(), seed=st.integers(0, 99), empty=st.booleans())
def test_merged_parts_are_one_softmax(where, dtype, with_sinks, seed, empty):
    generator = torch.Generator().manual_seed(seed)
    sinks = torch.randn(SHAPE[2], generator=generator) if with_sinks else None
    merged = Merged(SHAPE, torch.empty(0, dtype=dtype), sinks)
    wide = torch.promote_types(dtype, torch.float32)
    values = torch.zeros(SHAPE, dtype=torch.float64)
    weights = torch.zeros(SHAPE[:3], dtype=torch.float64)
    if sinks is not None:
        weights += sinks.double().exp()
    for index, (batch, rows) in enumerate(where):
        shape = (batch[1] - batch[0], rows[1] - rows[0], *SHAPE[2:])
        part = torch.randn(shape, generator=generator).to(dtype)
        lse = heads_first(shape[:3], wide, part.device).copy_(torch.randn(shape[:3], generator=generator))
        if empty and index % 2:  # a row that sees nothing here
            part[:, 0], lse[:, 0] = 0, -torch.inf
        place = slice(*batch), slice(*rows)
        values[place] += part.double() * lse.double().exp().unsqueeze(-1)
        weights[place] += lse.double().exp()
        merged.add(batch, rows, part, lse)
    out, found = merged.result()
    wanted = values / torch.where(weights == 0, 1, weights).unsqueeze(-1)
    assert (out.dtype, found.dtype) == (dtype, wide)
    eps, wide_eps = torch.finfo(dtype).eps, torch.finfo(wide).eps
    assert ((out.double() - wanted).abs() <= 0.51 * eps * wanted.abs() + 40 * wide_eps).all()
    torch.testing.assert_close(found.double(), weights.log(), rtol=1e-5, atol=1e-5)


def test_rows_without_a_further_part_are_left_alone():
    """What a kernel made is the result, not a copy, and merging into some rows reads no others."""
    out = torch.randn(SHAPE).bfloat16()
    out[:, 6:] = torch.nan  # would spread if these rows were weighed
    lse = torch.zeros(SHAPE[:3])
    merged = Merged(SHAPE, out, None)
    merged.add((0, 2), (0, 12), out, lse)
    merged.add((0, 2), (1, 3), torch.zeros(2, 2, *SHAPE[2:]).bfloat16(), torch.zeros(2, 2, SHAPE[2]))
    first = out.clone()
    found, _ = merged.result()
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(found[:, 3:6], first[:, 3:6])
    torch.testing.assert_close(found[:, 1:3], first[:, 1:3] / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_with_many_parts_is_not_rounded_in_between(dtype):
    """A hundred small parts would be lost one by one beside a large one."""
    total = Summed((1, 1, 1, 1), torch.empty(0, dtype=dtype))
    total.add((0, 1), (0, 1), torch.full((1, 1, 1, 1), 256.0, dtype=dtype))
    for _ in range(100):
        total.add((0, 1), (0, 1), torch.full((1, 1, 1, 1), 0.5, dtype=dtype))
    assert total.result().item() == 306
