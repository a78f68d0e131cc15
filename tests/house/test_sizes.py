"""The house does not grow by itself: each room has a number of lines. A commit of its own raises one, and says why."""

from tests.house.sizes import measure

LINES = {
    ".": 493,
    "attention": 1_287,
    "check": 984,
    "cli": 1_054,
    "hf": 2_664,
    "hf/batches": 1_190,
    "hf/generation": 1_554,
    "hf/models": 1_333,
    "hf/parts": 3_599,
    "hf/spread": 756,
    "hf/trainers": 1_698,
    "kernels": 1_408,
    "layers": 1_802,
    "plan": 2_329,
    "ranks": 1_473,
    "recurrent": 1_262,
    "ring": 2_291,
    "sizing": 1_230,
}
NODES, TUPLES, REFUSING, RAISES = 138_174, 0.17, 1_932, 383


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
