"""The pieces into which kernels cut a tile hold every admitted pair once, as calls that the libraries get right."""

import itertools

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_burst.kernels import Band
from hf_burst.kernels.cpu_flash import CpuFlashKernel
from hf_burst.kernels.flash import window_of
from hf_burst.kernels.flash_2 import TorchFlashKernel
from hf_burst.kernels.pieces import Piece

bounds = st.none() | st.integers(-16, 16)


def pairs(band: Band, rows: int, columns: int) -> set[tuple[int, int]]:
    return {
        (row, column)
        for row, column in itertools.product(range(rows), range(columns))
        if (band.low is None or row - column >= band.low) and (band.high is None or row - column <= band.high)
    }


def check(pieces: list[Piece], band: Band, rows: int, columns: int) -> None:
    held: list[tuple[int, int]] = []
    for piece in pieces:
        own = pairs(piece.band, piece.height, piece.width)
        assert {row for row, _ in own} == set(range(piece.height)), "every row sees a column"
        held += [(row + piece.rows.start, column + piece.columns.start) for row, column in own]
    assert len(held) == len(set(held))
    assert set(held) == pairs(band, rows, columns)
    taken = [row for piece in pieces for row in range(piece.rows.start, piece.rows.stop)]
    assert len(taken) == len(set(taken)), "rows belong to one piece"


@example(2, 4, 0, -1)
@given(st.integers(1, 15), st.integers(1, 15), bounds, bounds)
def test_pieces_of_the_cuda_kernel(rows: int, columns: int, low: int | None, high: int | None) -> None:
    band = Band(low, high)
    pieces = list(TorchFlashKernel().cut(Piece(slice(0, rows), slice(0, columns), band)))
    check(pieces, band, rows, columns)
    for piece in pieces:
        causal, left, right = window_of(piece.band, piece.width - piece.height)
        for window in (left, right):
            assert window is None or (0 <= window < piece.width and not causal), "longer windows count as infinite"


@example(2, 4, 0, -1)
@given(st.integers(1, 15), st.integers(1, 15), bounds, bounds)
def test_pieces_of_the_cpu_kernel(rows: int, columns: int, low: int | None, high: int | None) -> None:
    q, k = (torch.empty(1, size, 1, 1, device="meta") for size in (rows, columns))
    check(list(CpuFlashKernel().pieces(Band(low, high), q, k)), Band(low, high), rows, columns)
