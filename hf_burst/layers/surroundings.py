"""In what something runs, noted so that it can run again in the same: each function here is called at the first run,
and returns a function that makes a context for later ones."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import get_device_states, set_device_states

Surrounding = Callable[[], AbstractContextManager[Any]]


def autocast_as_now(device: str, cache: bool | None = None) -> Surrounding:
    """Autocast of a kind of device; with another setting of its cache of weights if one is given."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    cache = torch.is_autocast_cache_enabled() if cache is None else cache
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled, cache_enabled=cache)


def draws_as_now(*tensors: Tensor) -> Surrounding:
    """Random numbers, as they are drawn from now on where the tensors are and on the host."""
    on_host, kind = torch.get_rng_state(), tensors[0].device.type
    devices, states = get_device_states(*tensors)

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(devices, device_type=kind):
            torch.set_rng_state(on_host)
            set_device_states(devices, states, device_type=kind)
            yield

    return again


def function_modes_as_now() -> Surrounding:
    """Modes of torch functions, such as the default device, which autograd does not take into a backward pass."""
    modes = _get_current_function_mode_stack()

    @contextmanager
    def again() -> Iterator[None]:
        for mode in modes:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in modes:
                _pop_mode()

    return again


def training_as_now(module: nn.Module) -> Surrounding:
    """Training or evaluation of a module and those inside: `model.eval()` may come before the backward pass."""
    flags = [inner.training for inner in module.modules()]

    @contextmanager
    def again() -> Iterator[None]:
        inside = list(module.modules())
        before = [inner.training for inner in inside]
        for inner, training in zip(inside, flags, strict=False):  # adapters may have been merged meanwhile
            inner.training = training
        try:
            yield
        finally:
            for inner, training in zip(inside, before, strict=True):
                inner.training = training

    return again
