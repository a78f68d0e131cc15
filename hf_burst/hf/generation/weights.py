"""Gathers weights that FSDP2 shards once for all tokens of a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..view import ModelView


@contextmanager
def gathered_once(model: nn.Module) -> Iterator[None]:
    """Makes FSDP2 keep the weights that the first pass gathers, until the end. Every rank then holds all weights, so
    ranks that share weights but no prompt may generate different numbers of tokens."""
    modules = ModelView(model).units_of_fsdp2
    states: list[Any] = [module._get_fsdp_state() for module in modules]  # torch has no public accessor
    before = [(state, state._auto_reshard_after_forward) for state in states]
    groups = [(state, group, group.post_forward_mesh_info) for state in states for group in _groups(state)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for state, auto in before:
            state._auto_reshard_after_forward = auto
        for state, group, info in groups:
            group.post_forward_mesh_info = None if state._auto_reshard_after_forward and state._is_root else info
        for module in modules:
            module.reshard()


def _groups(state: Any) -> list[Any]:
    """Returns the parameter groups that a module gathers together; torch 2.11 has one per module."""
    several = getattr(state, "_fsdp_param_groups", None)
    return list(several) if several is not None else [state._fsdp_param_group] * (state._fsdp_param_group is not None)
