"""An override is put once, whatever somebody else has put around it."""

from copy import deepcopy
from functools import partial, wraps
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from hf_burst.hf.overrides import Override


class Doubled(Override):
    def __call__(self, *args: Any) -> Any:
        return 2 * self.plain(*args)


def by_closure(module: nn.Module) -> Any:
    inner = module.forward
    return lambda *args: inner(*args)


def by_wraps(module: nn.Module) -> Any:
    @wraps(module.forward)
    def around(*args: Any) -> Any:
        return around.__wrapped__(*args)  # type: ignore[attr-defined]

    return around


def by_partial(module: nn.Module) -> Any:
    return partial(module.forward)


def by_method(module: nn.Module) -> Any:
    inner = module.forward
    return MethodType(lambda self, *args: inner(*args), module)


@pytest.mark.parametrize("wrap", [by_closure, by_wraps, by_partial, by_method])
def test_a_wrapper_above_an_override_gets_none_above_it(wrap: Any) -> None:
    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    expected, own = 2 * module(x), Doubled.put(module)
    module.forward = wrapper = wrap(module)
    assert Doubled.put(module) is Doubled.of(module) is own
    assert module.forward is wrapper
    assert torch.equal(module(x), expected)


def test_an_override_of_another_module_is_none_of_this_one() -> None:
    module, other, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.ones(2, 3)
    Doubled.put(other)
    module.forward = by_closure(other)
    assert Doubled.of(module) is None
    expected = 2 * module(x)
    Doubled.put(module)
    assert torch.equal(module(x), expected)
    assert torch.equal(deepcopy(module)(x), expected)
