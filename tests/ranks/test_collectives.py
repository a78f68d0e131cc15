"""Messages with a gradient, beside the sums that they stand for."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_burst.ranks.collectives import all_gather, gather_stacked
from hf_burst.ranks.group import ContextGroup
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


def numbers(rank: int, of: int, dtype: torch.dtype) -> Tensor:
    """The gradient of a rank for the tensor of another one: whole numbers, whose sums are exact."""
    return (torch.arange(21).view(7, 3) % 5 + rank - 2 * of).to(dtype)


def gathered(rank: int, size: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """All tensors, the gradient of this rank's, and that of a tensor of which each rank used its own alone."""
    group = ContextGroup.from_mesh(None)
    own = torch.full((3, 7), float(rank), dtype=dtype).mT.requires_grad_()  # not contiguous
    shards = all_gather(own, group)
    sum((shard * numbers(rank, of, dtype)).sum() for of, shard in enumerate(shards)).backward()
    alone = torch.ones(3, dtype=dtype, requires_grad=True)
    all_gather(alone, group)[rank].sum().backward()  # the others' gradients are zeros
    return [shard.detach() for shard in shards], own.grad, alone.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_of_gathered_tensors_are_summed(ranks: Ranks, size: int, dtype: torch.dtype) -> None:
    for rank, (shards, gradient, alone) in enumerate(ranks(size).run(gathered, dtype)):
        for of, shard in enumerate(shards):
            assert torch.equal(shard, torch.full((7, 3), float(of), dtype=dtype))
        assert torch.equal(gradient, sum(numbers(peer, rank, dtype) for peer in range(size)))
        assert torch.equal(alone, torch.ones(3, dtype=dtype))


def stacked(rank: int, size: int) -> tuple[Tensor, list[str]]:
    """The tensors of all ranks, and the warnings about it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        every = gather_stacked(torch.full((3, 2), float(rank)).T, ContextGroup.from_mesh(None))  # not contiguous
    return every, [str(warning.message) for warning in said]


def test_tensors_are_stacked_without_a_warning(ranks: Ranks) -> None:
    """torch 2.13 warns of the name that older releases have."""
    for every, said in ranks(2).run(stacked):
        assert torch.equal(every, torch.stack([torch.zeros(2, 3), torch.ones(2, 3)]))
        assert not said
