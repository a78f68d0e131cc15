"""Weights of 4 bits that are dequantized when they are read.

bitsandbytes' own parametrization adds the scales to state dicts by a hook, which FSDP2 cannot follow.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached, register_parametrization

from ..errors import ConfigError


class Dequantized(nn.Module):
    """The parametrization of a weight of 4 bits: its scales, and the dtype as which its bits are stored."""

    def __init__(self, state: Any, stored: torch.dtype) -> None:
        super().__init__()
        self.state, self.stored = state, stored

    @torch.no_grad()
    def forward(self, packed: Tensor) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        self._follow(packed)
        return dequantize_4bit(packed, self.state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Dequantized":
        self._follow(fn(torch.empty(0, dtype=self.stored, device=self.state.absmax.device)))  # before the bits are cast
        return super()._apply(fn, recurse)

    def _follow(self, packed: Tensor) -> None:
        if packed.dtype != self.stored:
            raise ConfigError(
                f"A weight of 4 bits is stored as {self.stored}, and is cast to {packed.dtype}",
                "other numbers would be read",
                "Load the model again, in the dtype in which it computes",
            )
        self.state.to(packed.device)


def dequantize_when_read(module: nn.Module, name: str) -> None:
    """Has reading a `Params4bit` of a module dequantize it, once in a call of the module."""
    packed: Any = module._parameters[name]
    state, packed.quant_state = packed.quant_state, None
    register_parametrization(module, name, Dequantized(state, packed.dtype), unsafe=True)
    own: Any = type(module)  # a class of this module alone, made by torch

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with cached():
            return super(own, self).__call__(*args, **kwargs)

    own.__call__ = call
