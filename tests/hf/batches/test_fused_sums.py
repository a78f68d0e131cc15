"""The kernel of checksums in Triton beside plain torch: on a GPU, or interpreted on a CPU (see conftest.py)."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from hf_burst.hf.batches import sharded
from hf_burst.hf.batches.sharded import sum_of_bits

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PIECE = 2**17  # words
LENGTHS = [0, 1, 7, 8, 1001, 4096 * 4, 2 * PIECE, 3 * PIECE + 5]


def tensors() -> list[torch.Tensor]:
    """Of any length, dtype, and place in memory; one is not contiguous."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    values = [torch.randn(length, device=DEVICE, generator=generator) for length in LENGTHS]
    found = [value.to(dtype) for value in values for dtype in (torch.float32, torch.bfloat16, torch.uint8)]
    return [*found, values[-1].bfloat16()[3:], values[-2].view(2, -1).T, torch.tensor(3.0, device=DEVICE)]


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The last one is padded by zeros."""
    octets = tensor.contiguous().flatten().view(torch.uint8)
    return torch.cat([octets, octets.new_zeros(-len(octets) % 8)]).view(torch.int64)


def test_the_sum_of_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of all their words in a row."""
    words = torch.cat([words_of(tensor) for tensor in tensors()])
    wanted = int(sum_of_bits(words)) - words.numel() + sum(tensor.numel() for tensor in tensors())
    for piece in (PIECE, 1000):
        monkeypatch.setattr(sharded, "_PIECE", piece)
        assert int(sum_of_bits(iter(tensors()))) == wanted
    assert int(sum_of_bits(tensors()[::-1])) != wanted
    assert sum_of_bits([]) == 0


@pytest.mark.parametrize("place", [0, 5, 2**33])
def test_the_kernel(place: int) -> None:
    from hf_burst.hf.batches.fused_sums import sums_of_words

    with nullcontext() if DEVICE == "cuda" else mock.patch("torch.cuda.device", return_value=nullcontext()):
        for tensor in tensors():
            words = words_of(tensor)
            found = int(sums_of_words(words, place, sharded._SPREAD).sum())
            assert found == int(sharded._sums_of_words(words, place).sum()), (tensor.dtype, tensor.shape)
            for changed in {0, len(words) // 2, len(words) - 1} if len(words) else ():
                words[changed] ^= 1
                assert int(sums_of_words(words, place, sharded._SPREAD).sum()) != found, "each word counts"
                words[changed] ^= 1
