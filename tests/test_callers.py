"""Which functions of a trainer's user are certain to read logits after they have called the model."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from hf_burst.hf.callers import _will_read_logits

found: list[bool] = []
rare = False


class Outputs(dict):
    """What a model returns."""


def model() -> Any:
    caller = sys._getframe(1)
    found.append(_will_read_logits(caller.f_code, caller.f_lasti))
    outputs = Outputs(logits=1)
    outputs.loss, outputs.logits = 0, 1
    return outputs


def attribute() -> Any:
    return model().logits


def item() -> Any:
    outputs = model()
    return outputs["logits"]


def method() -> Any:
    outputs = model()
    return outputs.get("logits")


def in_a_block() -> Any:
    with pytest.MonkeyPatch.context():
        outputs = model()
    for _ in range(2):
        pass
    return outputs.logits if rare else outputs["logits"]


def or_an_error() -> Any:
    outputs = model()
    if rare:
        raise ValueError
    return outputs.logits


def another_way() -> Any:
    if rare:
        return model().logits
    return model().loss


def before() -> Any:
    if not rare:
        return model().loss
    return model().logits


def one_way() -> Any:
    outputs = model()
    return (outputs.loss, outputs.logits) if rare else outputs.loss


def asks() -> Any:
    outputs = model()
    return outputs.loss if outputs.logits is None else outputs.logits


def in_a_loop() -> None:
    for _ in range(2):
        outputs = model()
        if not rare:
            continue
        outputs.logits  # noqa: B018


def writes() -> Any:
    return {"logits": model().loss}


@pytest.mark.parametrize("function", [attribute, item, method, in_a_block, or_an_error])
def test_what_reads_logits_is_known(function: Callable[[], Any]) -> None:
    found.clear()
    function()
    assert found == [True]


@pytest.mark.parametrize("function", [another_way, before, one_way, asks, in_a_loop, writes])
def test_what_may_go_on_without_them_is_left_alone(function: Callable[[], Any]) -> None:
    found.clear()
    function()
    assert not any(found)
