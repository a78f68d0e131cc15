"""What the operator asks of a kernel: bands of its own for windows."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from hf_burst.attention import AttentionRequest, ContextGroup, SequenceLayout, burst_attention, prepare
from hf_burst.plan import MaskPattern
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


def asked(rank: int, size: int, window: int | None) -> set[bool]:
    """The values of `windowed` with which kernels were chosen."""
    found, choose = set[bool](), prepare.kernel_for

    def kernel_for(request: Any, inputs: Any, windowed: bool, same_bits: bool) -> Any:
        found.add(windowed)
        return choose(request, inputs, windowed, same_bits)

    layout = SequenceLayout.for_batch([(0, 24)], size)
    q, k, v = (torch.randn(1, layout.sharding.tokens(rank), 2, 8) for _ in range(3))
    with mock.patch.object(prepare, "kernel_for", kernel_for):
        prepare._prepared.cache_clear()
        group, pattern = ContextGroup.from_mesh(None), MaskPattern(window=window)
        burst_attention(q, k, v, layout, AttentionRequest(group, pattern))
    return found


@pytest.mark.parametrize("window", [None, 5])
def test_kernels_are_asked_for_the_bands_that_tiles_have(ranks: Ranks, window: int | None) -> None:
    assert ranks(2).run(asked, window) == [{window is not None}] * 2
