"""The house does not grow by itself: each room has a number of lines. A commit of its own raises one, and says why."""

from tests.house.sizes import measure

LINES = {
    ".": 420,
    "attention": 1_239,
    "check": 893,
    "cli": 926,
    "hf": 2_416,
    "hf/batches": 1_069,
    "hf/generation": 1_505,
    "hf/models": 1_271,
    "hf/parts": 3_029,
    "hf/spread": 623,
    "hf/trainers": 1_339,
    "kernels": 1_320,
    "layers": 1_666,
    "plan": 2_141,
    "ranks": 1_360,
    "recurrent": 1_143,
    "ring": 2_083,
    "sizing": 1_205,
}
NODES, TUPLES, REFUSING, RAISES = 127_162, 0.17, 1_464, 274


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
