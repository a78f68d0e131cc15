"""Checksums as one pass over memory, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # words of a program


def sums_of_words(words: Tensor, place: int, spread: int) -> Tensor:
    """Returns sums of mixed words, as [`sum_of_bits`] has them, of each block of a tensor on a GPU."""
    sums = torch.empty(max(1, triton.cdiv(words.numel(), _BLOCK)), dtype=torch.int64, device=words.device)
    with torch.cuda.device(words.device):
        _sums[sums.shape](words, sums, words.numel(), place, spread=spread, block=_BLOCK, num_warps=8)
    return sums


@triton.jit(do_not_specialize=["count", "place"])  # those of each weight are others
def _sums(words, sums, count: tl.int64, place: tl.int64, spread: tl.constexpr, block: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mixed = tl.load(words + index, mask=index < count, other=0) + (place + index + 1) * spread
    mixed = (mixed ^ ((mixed >> 30) & ((1 << 34) - 1))) * spread
    mixed = (mixed ^ ((mixed >> 27) & ((1 << 37) - 1))) * spread
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(index < count, mixed, 0), 0))
