"""Attention through memory that ranks read of each other: segments that take turns, and what is written in place."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_burst import BurstConfig
from hf_burst.ring import symmetric
from tests.shared_memory import shared_memory
from tests.test_ring import PRODUCTS, SCHEDULES, Case, assert_exact, attend, context_group, fitting, put_together

PACKED = ((0, 1, 2, 3, 16, 29, 30, 41), (0, 41), (0, 11, 24, 41))


class Shared(Case):
    """A case whose blocks travel through shared memory."""

    @property
    def config(self) -> BurstConfig:
        return replace(super().config, transport="symmetric", record=False)


def attend_again_and_again(rank: int, size: int, folder: Path, cases: list[Case]) -> list:
    """The results of every case, the sizes of which come and go; all in one memory."""
    torch.manual_seed(rank)
    with shared_memory(folder, context_group(size)) as kernels:
        results = [attend(rank, size, case) for case in [*cases, *cases]]
        assert any(kernel.written for kernel in kernels), "no kernel wrote in place"
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("slices", [1, 3])
def test_attention_through_shared_memory_is_exact(ranks, size, slices, tmp_path):
    kinds = [
        Shared(PACKED, kernel="reference"),
        Shared(((0, 67),), kernel="reference", seed=1),
        Shared(((0, 23),), kernel="reference", heads=(6, 3), dtype=torch.float32, seed=2),
        Shared(((0, 48),), window=5, chunking="contiguous", seed=3),
        Shared(((0, 48),), causal=False, dims=(6, 3), kernel="reference", sinks=True, seed=4),
    ]
    names = [*SCHEDULES, *PRODUCTS[size]]
    many = fitting(size, [replace(case, schedule=name) for name in names for case in kinds])
    if slices > 1:
        many = [replace(case, heads=(case.heads[0] * slices, case.heads[1] * slices)) for case in many]
    every = ranks(size).run(attend_again_and_again, tmp_path, many)
    for case, found in zip([*many, *many], put_together(every, size, [*many, *many]), strict=True):
        assert_exact(case, found, 1e-10 if case.dtype == torch.float64 else 2e-5)


def test_what_is_remembered_does_not_grow_for_ever():
    memory: dict = {}
    for number in range(1000):
        symmetric.remember(memory, number, str(number))
        assert memory[number] == str(number)
    assert len(memory) <= 256
