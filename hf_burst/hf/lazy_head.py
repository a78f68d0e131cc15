"""The language-model head, put off until the loss is asked for: then it scores some tokens at a time."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.utils import logging

from ..layers.linear_loss import Linear, learned_by, linear_loss_sum, rows_at_a_time
from ..layers.loss import token_loss_sum, weighted_loss_sum
from ..layers.token_values import token_values
from .overrides import Override
from .view import children_of, inner_modules

_WRAPPERS = ("torch.distributed.", "deepspeed.", "accelerate.", "trl.")  # whose hooks look after weights and memory
_HOOKED = (
    "The head of the model has a forward hook. It is given the logits of this rank's tokens, which are all in memory: "
    "tokens x vocabulary values. Remove the hook for long sequences."
)
_METHODS = ("float", "to", "tanh", "contiguous")
_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch.Tensor, name) for name in _METHODS},
    **{name: getattr(operator, name) for name in ("add", "mul", "truediv", "getitem")},
}
logger = logging.get_logger(__name__)
Step = tuple[str, tuple[Any, ...]]
Compute = Callable[[torch.Tensor], torch.Tensor]
TokenValue = Callable[[torch.Tensor, slice], torch.Tensor]
Weights = Mapping[int, torch.Tensor] | None  # the tokens that count so many times; all of them count once by default


@dataclass
class LazyLogits:
    """Logits that are not computed yet, and the steps that the model takes with them (scaling, soft-capping, casts).
    Anything else is answered by the logits themselves, which then stay: they may have been changed."""

    head: "LazyHead"
    hidden: torch.Tensor  # its input, `(batch, n, hidden)`
    steps: tuple[Step, ...] = ()  # names of operations, and their operands
    autocast: tuple[bool, torch.dtype] = (False, torch.bfloat16)  # whether the head runs under it, and in which dtype

    def loss_sum(self, targets: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The sum of the cross-entropies of these tokens for shifted labels of shape `(batch, n)`."""

        def of_some(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return linear_loss_sum(hidden, labels, self._score, self.head.vocabulary, self._linear(self.head.module))

        def compute(hidden: torch.Tensor) -> torch.Tensor:
            return of_some(hidden, targets) if weights is None else weighted_loss_sum(of_some, hidden, targets, weights)

        return loss_sum(self.whole, targets, weights) if "whole" in vars(self) else self._within(compute)

    def token_values(self, value: TokenValue, share: int) -> torch.Tensor:
        """The value of each of these tokens, `(batch, n)`, see [`values_of_tokens`]."""
        enabled, dtype = self.autocast

        def of_states(states: torch.Tensor, part: slice) -> torch.Tensor:
            with torch.autocast(states.device.type, dtype, enabled=enabled):  # in the backward pass, too
                return value(self._score(states)[0], part)

        def compute(hidden: torch.Tensor) -> torch.Tensor:
            learned = learned_by(self._score, hidden) if torch.is_grad_enabled() else []
            return token_values(hidden, of_states, rows_at_a_time(self.head.vocabulary, share), learned)

        return _values_of_all(self.whole, value) if "whole" in vars(self) else self._within(compute)

    def some(self, part: slice) -> torch.Tensor:
        """The logits of some tokens of the flattened batch, `(m, vocabulary)`."""
        states = self.hidden.flatten(0, -2)[None, part]
        enabled, dtype = self.autocast
        with torch.autocast(states.device.type, dtype, enabled=enabled):
            return self._score(states)[0]

    @cached_property
    def whole(self) -> torch.Tensor:
        return self._after(self._within(self.head.plain))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if any(name == "float" for name, _ in self.steps) else self.hidden.dtype

    def _score(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of some tokens, where the weights are."""
        return self._after(self.head.plain(hidden))

    def _within(self, compute: Compute) -> torch.Tensor:
        """Calls a function of the hidden states, as if it ran where the head was called."""
        enabled, dtype = self.autocast
        with torch.autocast(self.hidden.device.type, dtype, enabled=enabled):
            return self.head.within(compute, self.hidden)

    def _after(self, logits: torch.Tensor) -> torch.Tensor:
        for name, operands in self.steps:
            logits = _OPERATIONS[name](logits, *operands)
        return logits

    def _then(self, name: str, *operands: Any, **options: Any) -> Any:
        if "whole" in vars(self) or options:
            return _OPERATIONS[name](self.whole, *operands, **options)
        return LazyLogits(self.head, self.hidden, (*self.steps, (name, operands)), self.autocast)

    def _linear(self, module: nn.Module) -> Linear | None:
        """The head as a linear layer, if it is one and its logits are at most soft-capped."""
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            return None
        if self.head.own is not None or "weight" not in module._parameters:  # which follows from others
            return None
        same = ("float", ()), ("to", (torch.float32,)), ("contiguous", ())
        steps = [step for step in self.steps if step not in same]
        if not steps:
            return Linear(module.weight, module.bias, None)
        if [name for name, _ in steps] == ["truediv", "tanh", "mul"] and steps[0][1] == steps[2][1]:
            return Linear(module.weight, module.bias, float(steps[0][1][0]))
        return None

    def __mul__(self, factor: Any) -> Any:
        return self._then("mul", factor) if isinstance(factor, int | float) else self.whole * factor

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        return self._then("truediv", divisor) if isinstance(divisor, int | float) else self.whole / divisor

    def __add__(self, addend: Any) -> Any:
        row = isinstance(addend, int | float) or (isinstance(addend, torch.Tensor) and addend.ndim < 2)
        return self._then("add", addend) if row else self.whole + addend

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.whole - other

    def __neg__(self) -> Any:
        return self * -1

    def __setitem__(self, key: Any, value: Any) -> None:
        self.whole[key] = value

    def __getitem__(self, key: Any) -> Any:
        vocabulary = isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis and isinstance(key[1], slice)
        return self._then("getitem", key) if vocabulary else self.whole[key]

    def __getattr__(self, name: str) -> Any:
        if name in ("head", "hidden", "steps", "autocast") or name.startswith("_"):
            raise AttributeError(name)  # of a copy that is being made, or of what is no tensor
        return partial(self._then, name) if name in _METHODS else getattr(self.whole, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.tanh and not kwargs:
            return args[0]._then("tanh")
        leaves, form = pytree.tree_flatten((args, kwargs or {}), is_leaf=lambda leaf: isinstance(leaf, cls))
        leaves = [leaf.whole if isinstance(leaf, cls) else leaf for leaf in leaves]
        tensors, options = pytree.tree_unflatten(leaves, form)
        return function(*tensors, **options)


@torch.compiler.disable
def loss_sum(logits: torch.Tensor | LazyLogits, targets: torch.Tensor, weights: Weights = None) -> torch.Tensor:
    """The sum of the cross-entropies of this rank's tokens, see [`token_loss_sum`]; with `weights`, see
    [`weighted_loss_sum`]."""
    if isinstance(logits, LazyLogits):
        return logits.loss_sum(targets, weights)
    return (
        token_loss_sum(logits, targets)
        if weights is None
        else weighted_loss_sum(token_loss_sum, logits, targets, weights)
    )


@torch.compiler.disable
def values_of_tokens(logits: torch.Tensor | LazyLogits, value: TokenValue, share: int = 1) -> torch.Tensor:
    """A value of each of this rank's tokens, `(batch, n)`, that follows from its logits.

    Args:
        logits (`torch.Tensor` or [`LazyLogits`] of shape `(batch, n, vocabulary)`): Scores.
        value (`Callable`): From the logits of some tokens, `(m, vocabulary)`, and their places in the flattened batch,
            to their values `(m,)`.
        share (`int`, defaults to 1): How many tensors as wide as the logits `value` has in memory.
    """
    return logits.token_values(value, share) if isinstance(logits, LazyLogits) else _values_of_all(logits, value)


def _values_of_all(logits: torch.Tensor, value: TokenValue) -> torch.Tensor:
    return value(logits.flatten(0, 1), slice(0, logits.shape[:-1].numel())).view(logits.shape[:-1])


def logits_of_some(logits: torch.Tensor | LazyLogits, part: slice) -> torch.Tensor:
    """The logits of some tokens of the flattened batch, `(m, vocabulary)`."""
    return logits.some(part) if isinstance(logits, LazyLogits) else logits.flatten(0, 1)[part]


# FSDP2 finds the tensors that a module returns this way, and learns from their gradients when the backward pass begins
pytree.register_pytree_node(
    LazyLogits,
    lambda logits: ([logits.hidden], (logits.head, logits.steps, logits.autocast)),
    lambda children, context: LazyLogits(context[0], next(iter(children)), *context[1:]),
)


class LazyHead(Override):
    """The head of a model, which is put off while `under_way`. A graph ends here."""

    def __init__(self, module: nn.Module, own: Any, vocabulary: int) -> None:
        super().__init__(module, own)
        self.vocabulary, self.kept = vocabulary, module  # a loss may outlive its model
        self.under_way = False
        self.instead: Compute | None = None  # what the next call computes

    @torch.compiler.disable
    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        if self.instead is not None:
            return self.instead(hidden)
        if args or kwargs or not self.under_way:
            return self.plain(hidden, *args, **kwargs)
        kind = hidden.device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        if is_hooked(self.module):
            logger.warning_once(_HOOKED)
            return self.plain(hidden)
        half = torch.float16 in (hidden.dtype, autocast[1] if autocast[0] else None)
        # in fp16, gradients would have to wait for their scale; weights inside of an adapter are gathered there alone
        if half or is_watched(self.module) or any(map(is_partitioned, children_of(self.module).values())):
            return self.plain(hidden)
        # FSDP2 hangs a hook on what comes out, and warns of views
        return LazyLogits(self, hidden.clone() if isinstance(self.module, FSDPModule) else hidden, (), autocast)

    def within(self, compute: Compute, hidden: torch.Tensor) -> torch.Tensor:
        """Calls a function that takes hidden states to the head, whose weights may have to be gathered again.

        FSDP2 is asked to. DeepSpeed does it where the module is called, and once more in the backward pass.
        """
        if is_partitioned(self.module):
            self.instead = compute
            try:
                return self.module(hidden)
            finally:
                self.instead = None
        again = any(isinstance(parameter, DTensor) for parameter in self.module.parameters())
        if not (again and isinstance(self.module, FSDPModule)):
            return compute(hidden)
        self.module.unshard()
        try:
            return compute(hidden)
        finally:
            self.module.reshard()

    def _given(self) -> tuple[Any, ...]:
        return self.module, self.own, self.vocabulary


def is_hooked(module: nn.Module) -> bool:
    """Whether forward hooks on a head want its logits. Wrappers that look after weights and memory want them not."""
    modules = list(inner_modules(module))
    hooks = [hook for inner in modules for hook in inner._forward_hooks.values()]
    hooks += _global_forward_hooks.values()
    again = is_partitioned(module)  # the head is called a second time then, with its pre-hooks
    hooks += [hook for inner in modules[0 if again else 1 :] for hook in inner._forward_pre_hooks.values()]
    hooks += _global_forward_pre_hooks.values() if again else ()
    return any(not str(hook.__module__).startswith(_WRAPPERS) for hook in hooks)


def is_watched(module: nn.Module) -> bool:
    """Whether hooks on a head want gradients, which come once only with all logits, or a weight follows from others
    before the head runs."""
    modules = list(inner_modules(module))
    tensors = [tensor for inner in modules for tensor in (*inner._parameters.values(), *vars(inner).values())]
    return any(inner._backward_hooks or inner._backward_pre_hooks for inner in modules) or any(
        tensor._backward_hooks or not tensor.is_leaf for tensor in tensors if isinstance(tensor, torch.Tensor)
    )


def is_partitioned(module: nn.Module) -> bool:
    """Whether DeepSpeed ZeRO-3 divides weights over the ranks: elsewhere than in their own module they are empty."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def lazy_head(model: PreTrainedModel, known: LazyHead | None) -> LazyHead | None:
    """The head of a model, able to put itself off; the one that is known, unless adapters have taken its place."""
    module = model.get_output_embeddings()
    if known is not None and known.module is not module:
        known.remove()
    if module is None:
        return None
    return LazyHead.put(module, model.config.get_text_config().vocab_size)  # or that of a model that shares it
