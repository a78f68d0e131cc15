"""How a batch lies over the ranks, as a value: encoded and back, padding, chunks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_burst.attention import SequenceLayout
from hf_burst.hf.batches.documents import documents_of, real_tokens
from hf_burst.plan import MaskPattern

RANKS = (1, 2, 3, 4)


@st.composite
def layouts(draw) -> SequenceLayout:
    ranks, length = draw(st.sampled_from(RANKS)), draw(st.integers(8, 60))
    rows = draw(st.lists(st.sets(st.integers(1, length - 1), max_size=5), min_size=1, max_size=3))
    spans = draw(st.booleans())
    real = [sorted(draw(st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True))) for _ in rows]
    documents = [(0, *sorted(cuts), length) for cuts in rows]
    chunking = draw(
        st.sampled_from(["balanced", "zigzag", "contiguous", "documents"]) | st.permutations([*range(ranks)] * 2)
    )
    return SequenceLayout.for_batch(documents, ranks, chunking, tuple(map(tuple, real)) if spans else ())


@given(layout=layouts())
def test_a_layout_survives_its_encoding(layout):
    assert SequenceLayout.decode(layout.encode().numpy().tobytes()) == layout


def test_numbers_of_numpy_and_torch_are_plain_in_a_layout():
    plain = SequenceLayout.for_batch([(0, 4, 8)], 2, (0, 1), ((0, 8),), parents=[(-1, 0)])
    for numbers in (np.array, torch.tensor):
        rows = numbers([0, 4, 8]), numbers([0, 1]), numbers([0, 8]), numbers([-1, 0])
        documents, owners, real, parents = map(tuple, rows)
        layout = SequenceLayout.for_batch([documents], 2, owners, (real,), parents=[parents])
        assert str(layout) == str(plain)
        SequenceLayout.encode.cache_clear()
        assert SequenceLayout.decode(layout.encode().numpy().tobytes()) == plain


@given(layout=layouts())
def test_every_token_that_is_not_padding_is_counted_once(layout):
    length = layout.length - layout.padding
    spans = layout.real or ((0, length),) * layout.batch_size
    wanted = torch.tensor([[start <= token < stop for token in range(length)] for start, stop in spans])
    found = [layout.counted(rank) for rank in range(layout.ranks)]
    assert torch.equal(layout.unshard(found), wanted)
    assert sum(int(counted.sum()) for counted in found) == wanted.sum(), "nor is what fills the last chunk"


@given(layout=layouts())
def test_what_stands_before_a_sequence_sees_nothing(layout):
    length = layout.length - layout.padding
    found = [layout.fully_masked(rank) for rank in range(layout.ranks)]
    if not any(start for start, _ in layout.real):
        assert found == [None] * layout.ranks
        return
    wanted = torch.tensor([[token < start for token in range(length)] for start, _ in layout.real])
    assert torch.equal(layout.unshard(found), wanted)


def test_a_padding_mask_says_which_tokens_are_real():
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]])
    batch = {"input_ids": mask, "attention_mask": mask}
    assert real_tokens(batch) == ((0, 5), (2, 5), (0, 3), (1, 4))
    assert documents_of(batch) == [(0, 5), (0, 2, 5), (0, 5), (0, 1, 5)]
    assert real_tokens({"input_ids": mask, "attention_mask": torch.ones_like(mask)}) == ()


@pytest.mark.parametrize(
    ("documents", "chunk", "wanted"),
    [
        ((0, 10), 4, (0, 4, 8, 10)),
        ((0, 3, 10), 4, (0, 3, 7, 10)),
        ((0, 3, 4, 8), 4, (0, 3, 4, 8)),
        ((0, 5), 1, (0, 1, 2, 3, 4, 5)),
        ((0, 10), 100, (0, 10)),
    ],
)
def test_every_document_begins_its_chunks_anew(documents, chunk, wanted):
    (mask,) = SequenceLayout.for_batch([documents], 1).masks(MaskPattern(attention_chunk_size=chunk))
    assert mask.documents == wanted


def test_places_count_padding_in_rows_and_begin_anew_in_documents():
    layout = SequenceLayout.for_batch([(0, 2, 7), (0, 7)], 1, real=((2, 7), (0, 7)))
    assert layout.places(0).tolist() == [list(range(7))] * 2
    layout = SequenceLayout.for_batch([(0, 3, 5, 6, 9)], 1, parents=[(-1, 0, 1, -1)])
    assert layout.places(0).tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2]]
    layout = SequenceLayout.for_batch([(0, 3, 7)], 2)
    whole = layout.unshard([layout.places(rank) for rank in range(2)])
    assert whole.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
