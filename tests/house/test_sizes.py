"""The house does not grow by itself: each room has a number of lines. A commit of its own raises one, and says why."""

from tests.house.sizes import measure

LINES = {
    ".": 493,
    "attention": 1_287,
    "check": 984,
    "cli": 1_060,
    "hf": 2_672,
    "hf/batches": 1_190,
    "hf/generation": 1_570,
    "hf/models": 1_362,
    "hf/parts": 3_620,
    "hf/spread": 757,
    "hf/trainers": 1_749,
    "kernels": 1_408,
    "layers": 1_802,
    "plan": 2_252,
    "ranks": 1_473,
    "recurrent": 1_262,
    "ring": 2_291,
    "sizing": 1_352,
}
NODES, TUPLES, REFUSING, RAISES = 138_867, 0.17, 1_769, 361


def test_rooms_keep_to_their_numbers() -> None:
    lines = measure().lines
    assert lines.keys() == LINES.keys()
    assert not {room: count for room, count in lines.items() if count > LINES[room]}


def test_what_went_is_code_and_not_air() -> None:
    sizes = measure()
    assert sizes.nodes <= NODES
    assert sizes.tuples < TUPLES
    assert sizes.refusing <= REFUSING
    assert sizes.raises <= RAISES
