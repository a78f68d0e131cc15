"""The house does not grow by itself: each room has a number of lines. A commit of its own raises one, and says why."""

from tests.house.sizes import measure

LINES = {
    ".": 491,
    "attention": 1_286,
    "check": 960,
    "cli": 1_012,
    "hf": 2_661,
    "hf/batches": 1_160,
    "hf/generation": 1_568,
    "hf/models": 1_330,
    "hf/parts": 3_590,
    "hf/spread": 757,
    "hf/trainers": 1_742,
    "kernels": 1_408,
    "layers": 1_757,
    "plan": 2_329,
    "ranks": 1_464,
    "recurrent": 1_228,
    "ring": 2_291,
    "sizing": 1_230,
}
NODES, TUPLES, REFUSING, RAISES = 136_976, 0.17, 1_647, 288


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
