"""What a later run finds as it was: random numbers, modes and attributes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import get_device_states, set_device_states


@contextmanager
def instead(value: Any, name: str, *holders: Any) -> Iterator[None]:
    """Gives objects another value of an attribute, and their own ones back afterwards."""
    own = [getattr(holder, name) for holder in holders]
    try:
        for holder in holders:
            setattr(holder, name, value)
        yield
    finally:
        for holder, before in zip(holders, own, strict=True):
            setattr(holder, name, before)


def draws_as_now(*tensors: Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Records the random states of the host and of the tensors' devices. Returns a factory of contexts that have
    them."""
    on_host, kind = torch.get_rng_state(), tensors[0].device.type
    devices, states = get_device_states(*tensors)

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(devices, device_type=kind):
            torch.set_rng_state(on_host)
            set_device_states(devices, states, device_type=kind)
            yield

    return again


def function_modes_as_now() -> Callable[[], AbstractContextManager[None]]:
    """Returns a factory of contexts with the present torch function modes, such as the default device, which autograd
    doesn't carry into a backward pass."""
    modes = _get_current_function_mode_stack()

    @contextmanager
    def again() -> Iterator[None]:
        for mode in modes:
            _push_mode(mode)  # their own `__enter__` would change their state
        try:
            yield
        finally:
            for _ in modes:
                _pop_mode()

    return again
