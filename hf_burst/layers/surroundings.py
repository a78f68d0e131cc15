"""Records the environment of a run, so that it can be repeated in the same one. Each function here is called at the
first run, and returns a factory of context managers for later runs."""

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
    """Records autocast for a device type; `cache` overrides whether it caches weights."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    cache = torch.is_autocast_cache_enabled() if cache is None else cache
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled, cache_enabled=cache)


def draws_as_now(*tensors: Tensor) -> Surrounding:
    """Records the random states of the host and of the tensors' devices."""
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
    """Records torch function modes, such as the default device, which autograd doesn't carry into a backward pass."""
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
    """Records the training flags of a module and its submodules: `model.eval()` may come before the backward pass."""
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
