"""The pieces into which kernels cut a tile hold every admitted pair once, as calls that the libraries get right."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hf_burst.kernels import cpu_flash, torch_flash
from hf_burst.kernels.base import Band
from hf_burst.kernels.pieces import Piece

bounds = st.none() | st.integers(-16, 16)


def pairs(band: Band, rows: int, columns: int) -> set[tuple[int, int]]:
    return {
        (row, column)
        for row, column in itertools.product(range(rows), range(columns))
        if (band.low is None or row - column >= band.low) and (band.high is None or row - column <= band.high)
    }


def check(pieces: list[Piece], band: Band, rows: int, columns: int) -> None:
    found: list[tuple[int, int]] = []
    for piece in pieces:
        own = pairs(piece.band, piece.height, piece.width)
        assert {row for row, _ in own} == set(range(piece.height)), "every row sees a column"
        found += [(row + piece.rows.start, column + piece.columns.start) for row, column in own]
    assert len(found) == len(set(found))
    assert set(found) == pairs(band, rows, columns)
    taken = [row for piece in pieces for row in range(piece.rows.start, piece.rows.stop)]
    assert len(taken) == len(set(taken)), "rows belong to one piece"


@given(st.integers(1, 15), st.integers(1, 15), bounds, bounds)
def test_pieces_of_the_cuda_kernel(rows: int, columns: int, low: int | None, high: int | None) -> None:
    band = Band(low, high)
    pieces = list(torch_flash._pieces(band, slice(0, rows), slice(0, columns)))
    check(pieces, band, rows, columns)
    for piece in pieces:
        (_, _, _, keys), (causal, left, right) = torch_flash._dense_call(piece)
        for window in (left, right):
            assert window is None or (0 <= window < keys and not causal), "longer windows count as infinite"


@given(st.integers(1, 15), st.integers(1, 15), bounds, bounds)
def test_pieces_of_the_cpu_kernel(rows: int, columns: int, low: int | None, high: int | None) -> None:
    check(list(cpu_flash._pieces(Band(low, high), rows, columns)), Band(low, high), rows, columns)
