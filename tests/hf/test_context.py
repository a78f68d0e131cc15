"""The context of layers: each pass has its own, also where passes of several models are interrupted."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hf_burst
from hf_burst.hf.context import LayerContext, begin_pass, current, end_pass
from hf_burst.hf.groups import PATCH
from tests.support import models, trainers


class Patch:
    """Begins and ends passes."""

    def is_called(self) -> bool:
        return True


def tile_of_now() -> int | None:
    context = current()
    return None if context is None else context.tile


def begin(model: Patch, tile: int) -> None:
    """As the hooks of a model do: a pass that was interrupted ends first."""
    end_pass(model)
    begin_pass(model, LayerContext(tile=tile))


def test_passes_inside_of_each_other() -> None:
    outer, inner = Patch(), Patch()
    begin(outer, 1)
    begin(inner, 2)
    assert tile_of_now() == 2
    end_pass(inner)
    assert tile_of_now() == 1
    end_pass(outer)
    assert tile_of_now() is None
    end_pass(outer)
    assert tile_of_now() is None


def test_an_interrupted_pass_leaves_nothing_to_the_next_ones() -> None:
    """A student calls a teacher, the user interrupts inside of the teacher, and runs both again."""
    student, teacher = Patch(), Patch()
    begin(student, 1)
    begin(teacher, 2)
    begin(student, 3)
    begin(teacher, 4)
    assert tile_of_now() == 4
    end_pass(teacher)
    assert tile_of_now() == 3, "not the first pass of the student"
    end_pass(student)
    assert tile_of_now() is None


def test_interrupted_passes_of_two_models_in_turn() -> None:
    first, second = Patch(), Patch()
    begin(first, 1)
    begin(second, 2)
    begin(first, 3)
    end_pass(first)
    begin(second, 4)
    assert tile_of_now() == 4
    end_pass(second)
    assert tile_of_now() is None


def interrupt(*given: Any) -> None:
    raise KeyboardInterrupt


def run_the_model(folder: Path) -> list[Any]:
    model = hf_burst.patch_model(models.make_model("llama"))
    model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**models.make_batch("plain"))
    return [model, getattr(model, PATCH)]


def run_the_decoder_alone(folder: Path) -> list[Any]:
    model = hf_burst.patch_model(models.make_model("llama"))
    model.model(models.make_batch("plain")["input_ids"])
    return [model, getattr(model, PATCH)]


def run_a_trainer(folder: Path) -> list[Any]:
    trainer = trainers.make_trainer(trainers.Case("Trainer", burst=1), str(folder))
    trainer.model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return [trainer, trainer.model, getattr(trainer.model, PATCH)]


@pytest.mark.parametrize("run", [run_the_model, run_the_decoder_alone, run_a_trainer])
def test_what_was_interrupted_and_dropped_is_freed(tmp_path: Path, run: Callable[[Path], list[Any]]) -> None:
    """A notebook cell that was interrupted, and a new model in the next one."""
    left = [weakref.ref(each) for each in run(tmp_path)]
    gc.collect()
    assert [each() for each in left] == [None] * len(left)


def test_generation_after_an_interrupted_training_makes_masks_of_its_own() -> None:
    """Caches of a fixed size have their masks made before the model is called."""
    ids, options = models.make_batch("plain")["input_ids"], {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    model = hf_burst.patch_model(models.make_model("llama")).train()
    stop = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**models.make_batch("plain"))
    stop.remove()
    found = model.eval().generate(ids, cache_implementation="static", **options)
    assert found.tolist() == models.make_model("llama").eval().generate(ids, **options).tolist()
