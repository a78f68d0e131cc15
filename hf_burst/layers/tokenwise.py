"""Tests whether a module treats every token by itself, by running it on a few tokens.

Two parts of these tokens must have the same results and gradients together as each part alone, as in a tile.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .graph import leaves_behind, new_node
from .surroundings import draws_as_now
from .tiled import Forward

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
    kind = inputs[0].device.type
    trial, notes = _Trial(module, forward, inputs), _Notes(module)
    try:
        with (
            _disable_current_modes(),
            # detached: a result that its own node saves would keep the graph of a run that has no backward pass
            saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor),
            torch.no_grad(),
            trial.draws(),
            torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False),
            _without_zeros(module),
        ):
            trial.run(whole)
            trial.compare(sample)
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

    def compare(self, tokens: Sequence[Tensor]) -> None:
        """Raises `_NoTiles` if the module does not treat each token by itself. The second part of the tokens gets
        random values, because tokens of a batch may all be the same, which would hide a mean of them."""
        count = tokens[0].shape[-2]
        size = (count // 2 - 1) | 1  # 31 and 33 of 64 tokens, so that groups of tokens straddle both parts
        for tensor in filter(torch.is_floating_point, tokens):
            scale = tensor.double().square().mean().sqrt().clamp(min=1e-3).to(tensor.dtype)
            others = tensor.narrow(-2, size, count - size)
            others.copy_(torch.randn_like(others) * scale)
        together = self.run(tokens)
        if torch.equal(together[0].narrow(-2, 0, size), together[0].narrow(-2, size, size)):
            raise _NoTiles("what it returns for a token does not depend on it")
        notes = _Notes(self.module)
        for part in ((0, size), (size, count - size)):
            alone = self.run([tensor.narrow(-2, *part) for tensor in tokens])
            if not self.close(alone, [tensor.narrow(-2, *part) for tensor in together]):
                raise _NoTiles("some tokens alone have other results or gradients than among others")
        if not notes.hold():
            raise _NoTiles("it changes its attributes or buffers")

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
    before = list[tuple[nn.Parameter, Tensor]]()
    try:
        for weight in module.parameters():
            if type(weight) is nn.Parameter and _is_wide(weight):
                data, zeros = weight.data, weight.data == 0
                if data.dim() < 2 and data.abs().max() < _SMALL_GATE:
                    others = torch.randn_like(data)
                elif zeros.sum() > _MANY_ZEROS * data.numel():
                    others = torch.where(zeros, torch.randn_like(data) * data.shape[-1] ** -0.5, data)
                else:
                    continue
                before.append((weight, data))
                weight.data = others
        yield
    finally:
        for weight, data in before:
            weight.data = data


class _Notes:
    """A snapshot of a module's attributes and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = [(vars(inner), dict(vars(inner))) for inner in module.modules()]
        self.buffers = [(each, each.clone() if each.numel() <= _SMALL else each) for each in module.buffers()]
        self.marks = [(name, _mark(value)) for _, own in self.attributes for name, value in own.items()]
        self.marks += [("", _mark(buffer)) for buffer, copy in self.buffers if copy is buffer]

    def hold(self) -> bool:
        """Whether they are unchanged."""
        now = _Notes(self.module)
        pairs = zip(now.buffers, self.buffers, strict=True)
        return now.marks == self.marks and all(torch.equal(one, other) for (_, one), (_, other) in pairs)

    def restore(self) -> None:
        """Restores them, except large buffers."""
        for own, before in self.attributes:
            own.clear()
            own.update(before)
        for buffer, value in self.buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _mark(value: Any) -> Any:
    """Returns what changes with the value of an attribute, or with the attribute itself."""
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    return id(value), len(value) if isinstance(value, list | dict | set) else 0
