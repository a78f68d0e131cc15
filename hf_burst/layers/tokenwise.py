"""Tests whether a module treats every token by itself, by running it on a few tokens.

After half of the tokens are replaced, the results and gradients of the other half must stay the same. They must also
match a run on that half alone, as in a tile.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .surroundings import autocast_as_now, draws_as_now
from .tiled import Forward, leaves_behind, new_node

_TOKENS = 64
_MANY_ZEROS = 0.1  # share of a weight's entries
_SMALL_GATE = 0.1  # a vector below this everywhere may be a gate that hides its input
_SMALL = 2**16  # entries of a buffer
_Results = list[Tensor]  # the output, and the gradients of floating-point inputs


class _NoTiles(Exception):
    """The reason why a module cannot be computed in tiles."""


def obstacle_to_tiles(module: nn.Module, forward: Forward, inputs: Sequence[Tensor], tile: int) -> str:
    """Returns why a module cannot be computed in tiles.

    The first run is on a whole tile, because kernels such as those of Liger's experts may be tuned by their first call,
    whatever the sizes of later ones.

    The runs leave no trace: random states, autocast's cache, checkpoints, operator counters, and the module's
    attributes and buffers are as before. Dropout is skipped. If many entries of a weight are zero, they get other
    values meanwhile, because a gate initialized to zero hides what it will let through.

    Args:
        module (`torch.nn.Module`): The module.
        forward (callable): Its forward.
        inputs (`torch.Tensor` of shape `(..., n, features)`): Its inputs, of at least two tokens.
        tile (`int`): Tokens of a tile.

    Returns:
        `str`: The reason; empty if it can.
    """
    rows, tokens = inputs[0].shape[:-2].numel(), inputs[0].shape[-2]
    count, most = (min(max(2, some // max(1, rows)), tokens) for some in (_TOKENS, tile))
    sample, whole = (
        [tensor.detach().narrow(-2, 0, some).nan_to_num(0.0, 0.0, 0.0) for tensor in inputs] for some in (count, most)
    )
    trial, notes = _Trial(module, forward, inputs), _Notes(module)
    try:
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
            stack.enter_context(torch.no_grad())
            stack.enter_context(trial.draws())
            stack.enter_context(autocast_as_now(inputs[0].device.type, cache=False)())
            stack.enter_context(_without_zeros(module))
            trial.run(whole)
            trial.compare(sample, count)
    except _NoTiles as obstacle:
        return str(obstacle)
    except torch.OutOfMemoryError:  # says nothing about the module
        raise
    except Exception as problem:  # a module may raise anything for a few tokens
        return f"it raises {type(problem).__name__}: {str(problem).split(chr(10))[0][:200]}"
    finally:
        notes.restore()
    return ""


class _Trial:
    """Runs of a module that all draw the same random numbers."""

    def __init__(self, module: nn.Module, forward: Forward, inputs: Sequence[Tensor]) -> None:
        self.module, self.forward, self.draws = module, forward, draws_as_now(*inputs)
        self.learns = not torch.is_inference_mode_enabled()  # a layer may run under no_grad first
        kind = inputs[0].device.type
        given = [tensor for tensor in inputs if tensor.is_floating_point()]
        # 8- and 4-bit weights are multiplied in 16 bits
        weights = [weight.dtype if _is_wide(weight) else torch.bfloat16 for weight in module.parameters()]
        self.dtypes = {*weights, *(tensor.dtype for tensor in given)}
        if torch.is_autocast_enabled(kind):
            self.dtypes.add(torch.get_autocast_dtype(kind))

    def compare(self, tokens: Sequence[Tensor], count: int) -> None:
        """Raises `_NoTiles` if the module does not treat each token by itself."""
        expected = self.run(tokens)
        notes = _Notes(self.module)
        size = (count // 2 - 1) | 1  # 31 and 33 of 64 tokens, so that groups of tokens straddle both parts
        parts = (0, size), (size, count - size)
        for some, others in (parts, parts[::-1]):
            found = self.run(_with_others(tokens, *others))
            if not self.close(_part(found, *some), _part(expected, *some)):
                raise _NoTiles("what it returns for a token depends on others")
            if torch.equal(found[0].narrow(-2, *others), expected[0].narrow(-2, *others)):
                raise _NoTiles("what it returns for a token does not depend on it")
            if not notes.hold():
                raise _NoTiles("it changes its attributes or buffers")
            if not self.close(self.run(_part(tokens, *some)), _part(expected, *some)):
                raise _NoTiles("some tokens alone have other results or gradients than among others")

    def run(self, tokens: Sequence[Tensor]) -> _Results:
        """Returns the output and gradients; raises `_NoTiles` if a tile's run could not be repeated for gradients."""
        given = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tokens]
        learn = [tensor.requires_grad_() for tensor in given if self.learns and tensor.is_floating_point()]
        with self.draws(), _NoDropout(), torch.set_grad_enabled(self.learns):
            begun = new_node() if self.learns else None
            out: Any = self.forward(*given)
        if type(out) is not Tensor or not out.is_floating_point() or out.shape[:-1] != given[0].shape[:-1]:
            raise _NoTiles("it does not return one tensor with a row for each token")
        if not all(map(torch.equal, given, tokens)):
            raise _NoTiles("it changes its inputs")
        if not out.requires_grad:
            return [out]
        if leaves_behind(out, begun, given) is None:
            raise _NoTiles("it uses a tensor that is computed of others outside of it, and learns")
        dout = torch.arange(out.shape[-1], device=out.device).sin().to(out.dtype).expand_as(out)
        gradients = torch.autograd.grad(out, learn, dout, allow_unused=True)
        return [out.detach(), *(part for part in gradients if part is not None)]

    def close(self, found: _Results, expected: _Results) -> bool:
        """Whether results agree up to rounding, because other shapes may use other kernels."""
        dtypes = {*self.dtypes, *(tensor.dtype for tensor in found)}
        tolerance = 1e-10
        if dtypes != {torch.float64}:
            tolerance = max(1e-3, 2 * max(torch.finfo(dtype).eps for dtype in dtypes))
        pairs = [(one.double(), other.double()) for one, other in zip(found, expected, strict=True)]
        return all(bool((one - other).norm() <= tolerance * other.norm()) for one, other in pairs)


def _part(tensors: Sequence[Tensor], start: int, size: int) -> list[Tensor]:
    return [tensor.narrow(-2, start, size) for tensor in tensors]


def _with_others(tokens: Sequence[Tensor], start: int, size: int) -> list[Tensor]:
    """Returns copies with some tokens replaced. Integers, such as expert indices, are taken from an unchanged token."""
    copies, stays = [tensor.clone() for tensor in tokens], 0 if start else size
    for copy in copies:
        part, one = copy.narrow(-2, start, size), copy.narrow(-2, stays, 1)
        if copy.is_floating_point():
            part.copy_(torch.randn_like(part) * copy.double().square().mean().sqrt().clamp(min=1e-3).to(copy.dtype))
        else:
            part.copy_(one.expand_as(part))
    return copies


def _is_wide(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.dtype.itemsize > 1


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.dropout:
            return args[0]
        return function(*args, **(kwargs or {}))


@contextmanager
def _without_zeros(module: nn.Module) -> Iterator[None]:
    """Replaces the zeros of weights that have many, and small vectors, because such gates hide what they will let
    through."""
    weights = [weight for weight in module.parameters() if type(weight) is nn.Parameter and _is_wide(weight)]
    zeros = [(weight, weight.data) for weight in weights if (weight == 0).sum() > _MANY_ZEROS * weight.numel()]
    small = [(weight, weight.data) for weight in weights if weight.dim() < 2 and weight.abs().max() < _SMALL_GATE]
    before = [*zeros, *small]
    try:
        for weight, data in zeros:
            weight.data = torch.where(data == 0, torch.randn_like(data) * (data.shape or (1,))[-1] ** -0.5, data)
        for weight, data in small:
            weight.data = torch.randn_like(data)
        yield
    finally:
        for weight, data in before:
            weight.data = data


class _Notes:
    """A snapshot of a module's attributes and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = [(inner, dict(vars(inner))) for inner in module.modules()]
        self.lengths = [_length(value) for _, own in self.attributes for value in own.values()]
        self.buffers = list(module.buffers())
        self.values = [buffer.clone() if buffer.numel() <= _SMALL else buffer for buffer in self.buffers]
        # versions of the tensors that are not copied
        attributes = [value for _, own in self.attributes for value in own.values() if isinstance(value, Tensor)]
        large = [buffer for buffer in self.buffers if buffer.numel() > _SMALL]
        self.versions = [-1 if tensor.is_inference() else tensor._version for tensor in (*attributes, *large)]
        self.module = module

    def hold(self) -> bool:
        """Whether they are unchanged."""
        now = _Notes(self.module)
        same = [own.keys() == then.keys() for (_, own), (_, then) in zip(now.attributes, self.attributes, strict=True)]
        same += [now.lengths == self.lengths, now.versions == self.versions]
        if not all(same) or len(now.buffers) != len(self.buffers):
            return False
        for (_, own), (_, then) in zip(now.attributes, self.attributes, strict=True):
            for name, value in own.items():
                if value is not then[name] and not (isinstance(value, int | float | str) and value == then[name]):
                    return False
        return all(map(torch.equal, now.values, self.values))

    def restore(self) -> None:
        """Restores them."""
        for inner, own in self.attributes:
            for name in vars(inner).keys() - own.keys():
                del vars(inner)[name]
            vars(inner).update(own)
        for buffer, value in zip(self.buffers, self.values, strict=True):
            if buffer is not value and not torch.equal(buffer, value):
                buffer.copy_(value)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict | set) else 0
