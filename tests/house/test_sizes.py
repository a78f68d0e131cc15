"""The house does not grow by itself: each room has a number of lines. A commit of its own raises one, and says why."""

from tests.house.sizes import PACKAGE, measure

LINES = {
    ".": 406,
    "attention": 1_182,
    "check": 1_133,
    "cli": 1_169,
    "hf": 2_412,
    "hf/batches": 1_088,
    "hf/generation": 1_461,
    "hf/models": 1_477,
    "hf/parts": 3_150,
    "hf/spread": 639,
    "hf/trainers": 1_385,
    "kernels": 1_761,
    "layers": 1_710,
    "plan": 2_200,
    "ranks": 1_374,
    "recurrent": 1_153,
    "ring": 2_053,
    "sizing": 1_472,
}
RECIPES = 10_177  # their benchmarks, too
NODES, TUPLES, REFUSING, RAISES = 132_480, 0.17, 1_490, 283


def test_rooms_keep_to_their_numbers() -> None:
    lines = measure().lines
    assert lines.keys() == LINES.keys()
    assert not {room: count for room, count in lines.items() if count > LINES[room]}


def test_recipes_keep_to_their_number() -> None:
    sources = (PACKAGE.parent / "recipes").rglob("*.py")
    assert sum(len(source.read_text().splitlines()) for source in sources) <= RECIPES


def test_what_went_is_code_and_not_air() -> None:
    sizes = measure()
    assert sizes.nodes <= NODES
    assert sizes.tuples < TUPLES
    assert sizes.refusing <= REFUSING
    assert sizes.raises <= RAISES
