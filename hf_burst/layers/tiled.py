"""Tokenwise modules computed some tokens at a time, so that only one tile's intermediate tensors are in memory, in both
passes.

The forward pass keeps only the input, and records the leaves that each tile's result depends on. The backward pass
recomputes each tile, differentiates it with torch's autograd, and sums gradients in fp32 (fp64 for fp64).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import KernelError
from ..numerics import accumulation_dtype, refuse_second_derivative
from .adapted_linear import adapted_linear
from .graph import Kept, leaves_behind, new_node
from .surroundings import draws_as_now, function_modes_as_now, instead

Forward = Callable[..., Tensor]


@torch.compiler.disable
def tiled(module: nn.Module, forward: Forward, tokens: int, *inputs: Tensor) -> Tensor:
    """Computes a module's output tile by tile.

    Args:
        module (`torch.nn.Module`): The module, which is not changed.
        forward (callable): Its forward or a replacement: maps inputs `(..., tokens, features)` to an output of that
            form, each token by itself. All leaves it uses get their gradients.
        tokens (`int`): Most tokens of a tile, counted over all rows of the batch.
        inputs (`torch.Tensor` of shape `(..., n, features)`): The module's inputs, of the same tokens.

    Returns:
        `torch.Tensor` of shape `(..., n, features)`.

    Raises:
        KernelError: If the result depends on tensors that were computed outside and need a gradient.
    """
    rows = inputs[0].shape[:-2].numel()
    size = max(1, tokens // max(1, rows))
    call = _Call(module, forward, size, [tensor.requires_grad for tensor in inputs])
    if not torch.is_grad_enabled():
        return call.compute(inputs)
    anchor = torch.empty(0, requires_grad=True)  # gives the inputs a graph node even if they need no gradient
    begun, *kept = Kept.apply(inputs, anchor, *inputs)
    call.kept = begun.grad_fn
    kind = inputs[0].device.type
    call.modes = function_modes_as_now()
    call.cast, call.draws = torch.autocast(kind, enabled=torch.is_autocast_enabled(kind)), draws_as_now(*inputs)
    output = [call.compute(inputs)]
    if not call.leaves and not any(call.learn):
        return output.pop()
    return _Tiled.apply(call, output, *kept, *call.leaves.values())


class _Tiled(torch.autograd.Function):
    """The output as a function of the inputs saved by a [`Kept`] node and of all leaves."""

    @staticmethod
    def forward(ctx: Any, call: "_Call", output: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.call = call
        return output.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        return None, None, *ctx.call.differentiate(gradient)


class _Run(NamedTuple):
    """One run of a tile."""

    inputs: list[Tensor]  # leaves of the graph
    out: Tensor
    leaves: dict[int, Tensor]  # other leaves that the result depends on, by id
    ended: int  # the 1-based index of the product that the tile returned directly; else 0


@dataclass
class _Call:
    """One call of a module, tile by tile."""

    module: nn.Module
    forward: Forward
    size: int  # tokens of a tile
    learn: Sequence[bool]  # the inputs that need gradients
    kept: Any = None  # the node that saved the inputs; `None` without gradients
    cast: Any = None  # autocast of the forward pass
    draws: Any = None  # its random numbers
    modes: Any = None  # its torch function modes
    runs: list[tuple[set[int], int]] = field(default_factory=list)  # for each tile, the leaves' ids and `_Run.ended`
    leaves: dict[int, Tensor] = field(default_factory=dict)  # the leaves of all tiles
    versions: list[int | None] = field(default_factory=list)

    def compute(self, inputs: Sequence[Tensor]) -> Tensor:
        """Returns the output without a graph; with gradients, records the leaves it depends on."""
        out: Tensor | None = None
        for start, tile in self._tiles(inputs):
            if self.kept is None:
                part = self.forward(*tile)
            else:
                with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):  # save nothing in this graph
                    run = self._run(tile)
                self.leaves |= run.leaves
                self.runs.append((set(run.leaves), run.ended))
                part = run.out.detach()
            if out is None:
                out = part.new_empty(*inputs[0].shape[:-1], part.shape[-1])
            out.narrow(-2, start, part.shape[-2]).copy_(part)
        assert out is not None, "several tiles"
        self.versions = self._versions() if self.kept is not None else []
        return out

    def differentiate(self, gradient: Tensor) -> list[Tensor | None]:
        """Returns the gradients of the inputs that `learn` and of the leaves."""
        now = self._versions()
        both = zip(self.versions, now, strict=False)
        if len(now) != len(self.versions) or any(one != two for one, two in both if None not in (one, two)):
            raise KernelError(
                f"Weights of a {type(self.module).__name__}, or its mode (train, eval), changed before its backward "
                "pass, which computes its tiles again. Change them after the backward pass."
            )
        inputs: Sequence[Tensor] = self.kept.saved_tensors
        whole = [torch.empty_like(tensor) if own else None for tensor, own in zip(inputs, self.learn, strict=True)]
        sums: dict[int, Tensor] = {}
        with self.cast, self.draws(), self.modes():
            for (start, tile), (expected, ended) in zip(self._tiles(inputs), self.runs, strict=True):
                run, count = self._run(tile, ended), tile[0].shape[-2]
                if set(run.leaves) != expected:
                    raise KernelError(
                        f"A {type(self.module).__name__} that is computed in tiles was another one in the backward "
                        "pass: an adapter, a weight, or a requires_grad changed after the forward pass. Change it "
                        "after the backward pass, or set Memory(tiled_mlp=0)."
                    )
                parts = [None if total is None else total.narrow(-2, start, count) for total in whole]
                _differentiate(run, gradient.narrow(-2, start, count), parts, sums)
                del run  # before the next one begins
        # one after another: a sum takes twice the memory of its gradient
        return [*whole, *(sums.pop(key).to(leaf.dtype) if key in sums else None for key, leaf in self.leaves.items())]

    def _tiles(self, inputs: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yields the first token and the inputs of each tile."""
        tokens = inputs[0].shape[-2]
        for start in range(0, tokens, self.size):
            tile = (tensor.narrow(-2, start, min(self.size, tokens - start)) for tensor in inputs)
            yield start, [tensor.contiguous() for tensor in tile]  # some modules flatten the rows with `view`

    def _run(self, tile: Sequence[Tensor], skipped: int = 0) -> _Run:
        """Runs a tile with a graph, without computing the product numbered `skipped`, because nobody reads it."""
        inputs = [part.detach().requires_grad_(own) for part, own in zip(tile, self.learn, strict=True)]
        with torch.enable_grad():
            begun = new_node()
            # views, because autocast would cache the leaf and its cast copy until the whole forward pass ends
            given = [part.view_as(part) if part.requires_grad else part for part in inputs]
            with _Products(skipped) as products:
                out = self.forward(*given)
        leaves = leaves_behind(out, begun, inputs)
        if leaves is None:
            raise KernelError(
                f"A {type(self.module).__name__} that is computed in tiles uses a tensor that is computed of others "
                "outside of it, and learns. Compute it inside, or set Memory(tiled_mlp=0)."
            )
        return _Run(inputs, out, leaves, products.count if products.latest is out else 0)

    def _versions(self) -> list[int | None]:
        """Returns which modules train, and each weight's version; `None` for frozen ones, which peft's ParamWrapper
        swaps out and back whenever a layer runs."""
        # the module's current weights: a wrapper may have replaced them by others of the same shapes
        weights = [weight for weight in self.module.parameters() if weight.is_floating_point()]
        versions = (weight._version if weight.requires_grad else None for weight in (*weights, *self.leaves.values()))
        return [*(inner.training for inner in self.module.modules()), *versions]


class _Products(TorchFunctionMode):
    """Counts the linear layers of a tile, and remembers the latest result until another function is called.

    Args:
        skipped (`int`): The number of the product whose result is not computed; 0 for none.
    """

    def __init__(self, skipped: int) -> None:
        super().__init__()
        self.skipped, self.count = skipped, 0
        self.latest: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # without gradients it is inside another function, whose backward pass may read the result
        if function not in (functional.linear, adapted_linear) or not torch.is_grad_enabled():
            self.latest = None
            return function(*args, **kwargs)
        self.count += 1
        if self.count != self.skipped:
            self.latest = function(*args, **kwargs)
        elif function is adapted_linear:
            self.latest = function(*args, **{**kwargs, "skipped": True})
        else:
            with _Uncomputed():
                self.latest = function(*args, **kwargs)
        return self.latest


class _Uncomputed(TorchDispatchMode):
    """Replaces matrix products with uninitialized memory, which autograd does not notice."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        factors = {torch.ops.aten.mm.default: args[:2], torch.ops.aten.addmm.default: args[1:3]}.get(function)
        if factors is None or types:  # tensor subclasses
            return function(*args, **(kwargs or {}))
        return factors[0].new_empty(factors[0].shape[0], factors[1].shape[1])


def _differentiate(run: _Run, dout: Tensor, parts: Sequence[Tensor | None], sums: dict[int, Tensor]) -> None:
    """Writes the gradients of a tile's inputs into `parts` that are not `None`, and adds the leaves' to `sums`."""
    wanted = [*(tensor for tensor in run.inputs if tensor.requires_grad), *run.leaves.values()]
    gradients: Iterator[Tensor | None] = iter([None] * len(wanted))
    if run.out.requires_grad:
        # their hooks see the whole gradient later, not each tile's
        with instead(None, "_backward_hooks", *run.leaves.values()):
            gradients = iter(torch.autograd.grad(run.out, wanted, dout, allow_unused=True))
    for part in parts:
        if part is not None:
            found = next(gradients)
            part.zero_() if found is None else part.copy_(found)
    for key, found in zip(run.leaves, gradients, strict=True):
        if found is not None:  # a copy, as autograd may return one tensor for several leaves
            sums[key] = sums[key].add_(found) if key in sums else found.to(accumulation_dtype(found.dtype), copy=True)
