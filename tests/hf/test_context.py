"""The context of layers: each pass has its own, also where passes of several models are interrupted."""

from hf_burst.hf.context import LayerContext, PassContext, current


def tile_of_now() -> int | None:
    context = current()
    return None if context is None else context.tile


def begin(model: PassContext, tile: int) -> None:
    """As the hooks of a model do: a pass that was interrupted ends first."""
    model.leave()
    model.enter(LayerContext(tile=tile))


def test_passes_inside_of_each_other() -> None:
    outer, inner = PassContext(), PassContext()
    begin(outer, 1)
    begin(inner, 2)
    assert tile_of_now() == 2
    inner.leave()
    assert tile_of_now() == 1
    outer.leave()
    assert tile_of_now() is None
    outer.leave()
    assert tile_of_now() is None


def test_an_interrupted_pass_leaves_nothing_to_the_next_ones() -> None:
    """A student calls a teacher, the user interrupts inside of the teacher, and runs both again."""
    student, teacher = PassContext(), PassContext()
    begin(student, 1)
    begin(teacher, 2)
    begin(student, 3)
    begin(teacher, 4)
    assert tile_of_now() == 4
    teacher.leave()
    assert tile_of_now() == 3, "not the first pass of the student"
    student.leave()
    assert tile_of_now() is None


def test_interrupted_passes_of_two_models_in_turn() -> None:
    first, second = PassContext(), PassContext()
    begin(first, 1)
    begin(second, 2)
    begin(first, 3)
    first.leave()
    begin(second, 4)
    assert tile_of_now() == 4
    second.leave()
    assert tile_of_now() is None
