"""Segments: the pieces of documents on each rank, against what token after token says."""

from itertools import pairwise

from hypothesis import given

from hf_burst.attention import SequenceLayout
from hf_burst.plan import Segment, Segments
from tests.ranks.test_layout import layouts


@given(layout=layouts())
def test_every_token_is_in_one_segment_of_its_rank_and_document(layout: SequenceLayout) -> None:
    segments = layout.segments
    for rank, own in enumerate(segments.by_rank):
        held = layout.indices(rank).tolist()
        tokens = [(row, token) for row in range(layout.batch_size) for token in held]
        assert [(piece.row, token) for piece in own for token in range(piece.start, piece.stop)] == tokens
        for index, piece in enumerate(own):
            bounds = layout.documents[piece.row]
            assert piece.document == max(bound for bound in bounds if bound <= piece.start)
            assert not any(piece.start < bound < piece.stop for bound in bounds), "one document"
            assert piece.local == piece.row * len(held) + held.index(piece.start)
            assert {segments.holder(piece.row, token) for token in range(piece.start, piece.stop)} == {(rank, index)}


@given(layout=layouts())
def test_segments_are_as_few_as_can_be_and_hand_on_where_a_document_goes_on(layout: SequenceLayout) -> None:
    segments, pieces = layout.segments, {}
    for rank, own in enumerate(segments.by_rank):
        for index, piece in enumerate(own):
            pieces[rank, index] = piece
        runs = [(piece.row, piece.document, piece.start, piece.stop) for piece in own]
        assert not any(one[:2] == two[:2] and one[3] == two[2] for one, two in pairwise(runs))
    for place, piece in pieces.items():
        assert piece.opens == (place not in segments.before)
        if not piece.opens:
            before = pieces[segments.before[place]]
            assert (before.row, before.document, before.stop) == (piece.row, piece.document, piece.start)
    assert len(set(segments.before.values())) == len(segments.before)
    last = [piece for place, piece in pieces.items() if place not in segments.before.values()]
    assert all(piece.stop in layout.documents[piece.row] for piece in last)


@given(layout=layouts())
def test_slots_number_those_that_hand_on(layout: SequenceLayout) -> None:
    segments = layout.segments
    handing = sorted(set(segments.before.values()))
    assert sorted(segments.slots) == handing
    counts = [sum(rank == owner for owner, _ in handing) for rank in range(layout.ranks)]
    assert segments.most_slots == max(counts)
    for rank, count in enumerate(counts):
        assert [place for (owner, _), place in segments.slots.items() if owner == rank] == list(range(count))


@given(layout=layouts())
def test_whole_segments_are_the_documents(layout: SequenceLayout) -> None:
    (own,) = layout.segments.whole.by_rank
    assert own == tuple(
        Segment(row, start, stop, start, row * layout.length + start)
        for row, bounds in enumerate(layout.documents)
        for start, stop in pairwise(bounds)
    )
    assert layout.segments.whole.most_slots == 0


def test_a_layout_makes_them_once() -> None:
    layout = SequenceLayout.for_batch([(0, 5, 48)], 3)
    assert isinstance(layout.segments, Segments)
    assert layout.segments is layout.segments
    assert layout.segments.whole is layout.segments.whole
    assert layout.segments.by_rank is layout.segments.by_rank


def test_endings_follow_the_last_tokens_of_their_beginning() -> None:
    layout = SequenceLayout.for_batch([(0, 6, 7, 12, 18)], 3, parents=[(-1, 0, 1, 0)], chunking=(0, 1, 2))
    segments = layout.segments
    found = {
        (rank, index): (piece.start, piece.stop)
        for rank in range(3)
        for index, piece in enumerate(segments.by_rank[rank])
    }
    assert {found[place]: found[before] for place, before in segments.before.items()} == {
        (6, 7): (0, 6),
        (7, 12): (6, 7),
        (12, 18): (0, 6),
    }
    third = segments.by_rank[2][0]
    assert list(segments.text_before(third)) == [5, 4, 3, 2, 1, 0]
    assert list(segments.text_before(segments.by_rank[1][1])) == [6, 5, 4, 3, 2, 1, 0]
    assert segments.most_slots == 1
    assert [piece.opens for piece in segments.whole.by_rank[0]] == [True, False, False, False]
