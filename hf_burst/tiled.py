"""Modules that treat every token by itself, computed some tokens at a time: what a tile needs inside is there for one
tile only, in both passes.

The forward pass keeps the input alone. The backward pass computes each tile again, but for a last product whose result
is the output, and adds up gradients of weights in fp32 (fp64 for fp64).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import get_device_states, set_device_states

from .adapted_linear import adapted_linear, autocast_dtype, plain_weight, wide, wide_product
from .collectives import refuse_second_derivative
from .errors import KernelError

Forward = Callable[..., Tensor]
Casts = dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]


@torch.compiler.disable
def tiled(module: nn.Module, forward: Forward, tokens: int, *inputs: Tensor) -> Tensor:
    """What a module returns for its inputs, computed tile by tile.

    Args:
        module (`torch.nn.Module`): Whose weights learn. It is not changed.
        forward (callable): Its forward, or another one: from inputs `(..., tokens, features)` to an output of that
            form, each token by itself.
        tokens (`int`): Most tokens of a tile, of all rows of the batch together.
        inputs (`torch.Tensor` of shape `(..., n, features)`): What the module is given. Tensors of other forms among
            them are not cut, so that all is computed at once.

    Returns:
        `torch.Tensor` of shape `(..., n, features)`.
    """
    rows = inputs[0].shape[:-2].numel()
    size = max(1, tokens // max(1, rows))
    if inputs[0].shape[-2] <= size or len({tensor.shape[:-1] for tensor in inputs}) > 1:
        return forward(*inputs)
    call = _Call(module, forward, size, inputs[0].device.type, [tensor.requires_grad for tensor in inputs])
    if not torch.is_grad_enabled():
        return call.compute(inputs)
    anchor = torch.empty(0, requires_grad=True)  # there is a node behind the inputs, also if they need no gradient
    kept = _Keep.apply(anchor, *inputs)
    return _Tiled.apply(call, kept[0].grad_fn, len(kept), *kept, *call.weights)


class _Keep(torch.autograd.Function):
    """The inputs, saved before the module runs. A checkpoint that computes its layer again may stop here."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor in inputs if not tensor.is_floating_point()))
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients


class _Tiled(torch.autograd.Function):
    """The module, of inputs that a [`_Keep`] node saved."""

    @staticmethod
    def forward(ctx: Any, call: "_Call", kept: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.call, ctx.kept = call, kept
        ctx.versions = [weight._version for weight in tensors[count:]]
        call.surroundings = [_autocast(call.device), _random_state(tensors[:count])]
        return call.compute(tensors[:count])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        weights = ctx.call.weights  # a wrapper may have put others of the same shapes in their place
        if [weight._version for weight in weights] != ctx.versions:
            raise KernelError(
                f"Weights of a {type(ctx.call.module).__name__} changed between its forward and backward pass, which "
                "computes its tiles again. Update weights after the backward pass."
            )
        return None, None, None, *ctx.call.differentiate(ctx.kept.saved_tensors, weights, gradient)


@dataclass
class _Call:
    """One call of a module, tile by tile."""

    module: nn.Module
    forward: Forward
    size: int  # tokens of a tile
    device: str
    learn: Sequence[bool]  # the inputs that need gradients
    products: int = 0  # linear layers that a tile goes through
    ends_in_product: bool = False  # whether the output is the result of the last of them
    surroundings: Sequence[Callable[[], AbstractContextManager[Any]]] = ()  # in which the forward pass ran

    @property
    def weights(self) -> list[Tensor]:
        """Those that learn, in the module's order."""
        return [weight for weight in self.module.parameters() if weight.requires_grad]

    def compute(self, inputs: Sequence[Tensor]) -> Tensor:
        """The output."""
        casts: Casts = {}
        out: Tensor | None = None
        for start, tile in self._tiles(inputs):
            with _Linears(casts) as linears:
                part = self.forward(*tile)
            if out is None:
                self.products, self.ends_in_product = linears.count, linears.ended(part)
                out = part.new_empty(*inputs[0].shape[:-1], part.shape[-1])
            out.narrow(-2, start, part.shape[-2]).copy_(part)
        assert out is not None, "several tiles"
        return out

    def differentiate(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], gradient: Tensor
    ) -> list[Tensor | None]:
        """The gradients of inputs that `learn`, and of the weights."""
        whole = [torch.empty_like(tensor) if own else None for tensor, own in zip(inputs, self.learn, strict=True)]
        sums, casts = {id(weight): _Sum() for weight in weights}, Casts()
        skipped = self.products if self.ends_in_product else 0
        with ExitStack() as stack:
            for surrounding in self.surroundings:
                stack.enter_context(surrounding())
            for start, tile in self._tiles(inputs):
                leaves = [part.detach().requires_grad_(own) for part, own in zip(tile, self.learn, strict=True)]
                with torch.enable_grad(), _Linears(casts, sums, skipped):
                    out = self.forward(*leaves)
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                dout = gradient.narrow(-2, start, out.shape[-2])
                with _without_hooks(weights):
                    parts = iter(torch.autograd.grad(out, [*wanted, *weights], dout, allow_unused=True))
                for total in whole:
                    if total is not None:
                        part = next(parts)
                        tile_of_total = total.narrow(-2, start, out.shape[-2])
                        tile_of_total.zero_() if part is None else tile_of_total.copy_(part)
                for weight, part in zip(weights, parts, strict=True):
                    sums[id(weight)].add(part)
        return [*whole, *(sums[id(weight)].of(weight) for weight in weights)]

    def _tiles(self, inputs: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """The first token, and the inputs, of each tile."""
        tokens = inputs[0].shape[-2]
        for start in range(0, tokens, self.size):
            tile = (tensor.narrow(-2, start, min(self.size, tokens - start)) for tensor in inputs)
            yield start, [tensor.contiguous() for tensor in tile]  # some modules view all rows as one


class _Linears(TorchFunctionMode):
    """Linear layers of a tile. A weight is cast, or made of 4 bits, once for all tiles. In the backward pass the result
    of the one that is `skipped` is not computed, and gradients of weights go into their `sums`.

    Args:
        casts (`dict`): Weights, and what they are cast to, by the id of the weight and the dtype.
        sums (mapping from `int` to `_Sum`, *optional*): By the id of the weight.
        skipped (`int`, defaults to 0): The place of a layer among them, from 1 on; 0 for none.
    """

    def __init__(self, casts: Casts, sums: Mapping[int, "_Sum"] | None = None, skipped: int = 0) -> None:
        super().__init__()
        self.casts, self.sums, self.skipped = casts, sums, skipped
        self.count = 0
        self.latest: tuple[Tensor, int] | None = None  # the last result, and its version

    def ended(self, output: Tensor) -> bool:
        """Whether an output is the result of the last linear layer, as it was."""
        return self.latest is not None and output is self.latest[0] and output._version == self.latest[1]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        product: Forward
        if function is adapted_linear:
            product = self._adapted
        elif function is functional.linear and len(args) > 1 and type(args[1]) is nn.Parameter:
            product = self._linear
        else:
            return function(*args, **kwargs)  # of one expert, or quantised
        self.count += 1
        out = product(*args, **kwargs)
        self.latest = None if out.is_inference() else (out, out._version)
        return out

    def _adapted(self, tensor: Tensor, weight: Tensor, *factors: Any, **options: Any) -> Tensor:
        """See [`adapted_linear`]."""
        if self.sums is not None:
            _, down, up, _ = factors
            options |= {"totals": (self._sum(down), self._sum(up)), "skipped": self.count == self.skipped}
        dtype = autocast_dtype(tensor, weight) or tensor.dtype
        return adapted_linear(tensor, self._cast(weight, dtype), *factors, **options)

    def _linear(self, tensor: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype, cast, cast_bias = autocast_dtype(tensor, weight), weight.detach(), bias
        if dtype is not None:
            tensor, cast = tensor.to(dtype), self._cast(weight, dtype)
            cast_bias = None if bias is None else bias.to(dtype)
        if self.sums is None:
            return functional.linear(tensor, cast, cast_bias)
        of_weight = self._sum(weight)
        if bias is not None and bias.requires_grad and id(bias) not in self.sums:  # it follows from others
            return functional.linear(tensor, weight, bias)
        sums, skipped = (of_weight, self.sums.get(id(bias))), self.count == self.skipped
        out: Tensor = _Linear.apply(tensor, weight, bias, (cast, cast_bias), sums, skipped)
        return out

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        key = id(weight), dtype
        if key not in self.casts:  # the weight stays, or another might get its id
            self.casts[key] = weight, plain_weight(weight, dtype)
        return self.casts[key][1]

    def _sum(self, weight: Tensor) -> "_Sum | None":
        """That of the gradients of a weight; `None` for one that does not learn."""
        assert self.sums is not None, "in a backward pass"
        if weight.requires_grad and id(weight) not in self.sums:
            raise KernelError(
                f"A module that is computed in tiles multiplies by a weight of shape {tuple(weight.shape)} that learns "
                "and belongs to another module. Set BurstConfig(tiled_mlp=0)."
            )
        return self.sums.get(id(weight))


class _Linear(torch.autograd.Function):
    """A linear layer whose gradients of weight and bias are added to sums."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast: tuple[Tensor, Tensor | None],
        sums: Sequence["_Sum | None"],
        skipped: bool,
    ) -> Tensor:
        ctx.save_for_backward(tensor, cast[0])
        ctx.sums = sums
        out = tensor.new_empty(*tensor.shape[:-1], len(weight))  # no view, which could not be changed in place
        if not skipped:
            factors = tensor.flatten(0, -2), cast[0].T
            rows = out.view(-1, len(weight))
            torch.mm(*factors, out=rows) if cast[1] is None else torch.addmm(cast[1], *factors, out=rows)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight = ctx.saved_tensors
        (of_weight, of_bias), rows = ctx.sums, gradient.flatten(0, -2)
        with torch.autocast(gradient.device.type, enabled=False):  # all have the dtype of the product by now
            if of_weight is not None:
                of_weight.add_product(rows.T, tensor.flatten(0, -2))
            if of_bias is not None:
                of_bias.add(rows.sum(0, dtype=wide(rows.dtype)))
            return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None, None, None


class _Sum:
    """The gradient of a weight, added up tile by tile."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def add(self, part: Tensor | None) -> None:
        if part is not None:
            # a copy, as autograd may hand out one tensor for several weights
            self.value = part.to(wide(part.dtype), copy=True) if self.value is None else self.value.add_(part)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Adds a product of matrices, which is not rounded to their dtype first."""
        if self.value is None:
            self.value = wide_product(left, right)
        elif self.value.dtype == left.dtype or left.device.type != "cuda":
            self.value.add_(wide_product(left, right))
        else:
            torch.addmm(self.value, left, right, out_dtype=self.value.dtype, out=self.value)

    def of(self, weight: Tensor) -> Tensor | None:
        """The gradient in the dtype of its weight; `None` for one that was not used, if no hook would be given that."""
        if self.value is None:
            return torch.zeros_like(weight) if weight._backward_hooks else None
        return self.value.to(weight.dtype)


@contextmanager
def _without_hooks(weights: Sequence[Tensor]) -> Iterator[None]:
    """Hooks of weights see the whole gradient later, and not those of tiles."""
    hooks: list[Any] = [weight._backward_hooks for weight in weights]
    for weight in weights:
        weight._backward_hooks = None
    try:
        yield
    finally:
        for weight, own in zip(weights, hooks, strict=True):
            weight._backward_hooks = own


def _autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Autocast as it is now."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return partial(
        torch.autocast, device, dtype=dtype, enabled=enabled, cache_enabled=torch.is_autocast_cache_enabled()
    )


def _random_state(inputs: Sequence[Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    """Random numbers as they are drawn from now on."""
    on_host, kind = torch.get_rng_state(), inputs[0].device.type
    devices, states = get_device_states(*inputs)

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(devices, device_type=kind):
            torch.set_rng_state(on_host)
            set_device_states(devices, states, device_type=kind)
            yield

    return again
