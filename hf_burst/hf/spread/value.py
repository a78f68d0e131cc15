"""The spread value itself, and the head of a model, which is put off."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils import _pytree as pytree

from ...errors import BatchError, UnsupportedModelError
from ...layers.by_parts import token_values
from ...layers.linear_loss import Linear, learned_by, linear_loss_sum, rows_at_a_time
from ...layers.loss import token_loss_sum, weighted_loss_sum
from ...layers.surroundings import draws_as_now, instead
from ..batches.sharded import sum_of_bits
from ..models.adapters import adapters_at_work, is_adapted
from ..overrides import Override
from ..view import children_of, inner_modules, is_partitioned, is_sharded_head
from .functions import SERVED, PutOffCall, by_tokens, name_of
from .where import Where

_UNWRITTEN = "Values on several ranks are not changed in place; torch.where and x = x / 2 make others of them."
_CHANGED = (
    "{} was asked of logits behind an update of the head, or where other adapters of it work. Read logits, and run the "
    "backward pass of what is computed from them, before a step of the optimizer and before adapters are switched."
)
_FACTS = ("requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta")
_WRAPPERS = ("torch.distributed.", "deepspeed.", "accelerate.", "trl.")  # their hooks manage weights and memory
Compute = Callable[[Tensor], Tensor]
TokenValue = Callable[[Tensor, slice], Tensor]  # from scores `(m, vocabulary)` and their places to values `(m,)`
Weights = Mapping[int, Tensor] | None  # tokens by how often they count; by default all count once


@dataclass(frozen=True)
class Limit:
    """The terms of a value that was handed out: all ranks must use it alike, which is compared."""

    about: str  # why not all of it may be gathered, if so
    anchor: Tensor  # computed from the weights, so that DDP finds those that will get gradients
    state: tuple[Any, ...]  # of the head
    put_off: int  # how many functions the model put off; those behind them see zeros at padding of joined texts


@dataclass(eq=False)
class Spread:
    """A stand-in for a tensor of all chosen tokens, `(..., width)`, of which this rank holds some."""

    own: Tensor  # this rank's values, `(batch, n, ...)`, or the inputs of `head` if it is put off
    head: "PutOffHead | None" = None  # scores some tokens at a time
    autocast: tuple[bool, torch.dtype] = (False, torch.bfloat16)  # whether the head runs under it, and its dtype
    draws: Callable[[], AbstractContextManager[None]] = nullcontext  # the random numbers of the head's call
    put_off: tuple[PutOffCall, ...] = ()  # the functions to apply after the head
    lies: Where | None = None  # where all tokens lie; by default the value has this rank's only, as in a model
    places: Tensor | None = None  # the tokens in it, see `chosen`; all by default
    limit: Limit | None = None  # set if it was handed out, so that any code may use it
    learns: bool = True  # whether gradients flow back

    @classmethod
    def of(cls, value: "Tensor | Spread") -> "Spread":
        return value if isinstance(value, Spread) else cls(value)

    def handed_out(self, lies: Where, about: str, loss: Tensor | None) -> "Spread":
        """Returns the same value for any code, see [`Limit`]. Under autocast it is converted to fp32."""
        if self.head is not None and loss is None:
            check_head_again(self.head.module)
        anchor = self.some(slice(0, 1)) if loss is None else loss
        state = () if self.head is None else self.head.state
        value = self.map("float", Tensor.float) if self.autocast[0] else self
        return replace(value, lies=lies, limit=Limit(about, anchor, state, len(value.put_off)))

    # -- this rank's tokens

    @torch.compiler.disable
    def loss_sum(self, targets: Tensor, weights: Weights = None) -> Tensor:
        """Returns the summed cross-entropy of this rank's tokens for shifted labels of shape `(batch, n)`, see
        [`token_loss_sum`]; with `weights`, see [`weighted_loss_sum`]."""

        def of_some(values: Tensor, labels: Tensor) -> Tensor:
            if self.head is None:
                return token_loss_sum(values, labels)
            return linear_loss_sum(values, labels, self._scores, self.head.vocabulary, self.linear)

        def compute(values: Tensor) -> Tensor:
            return of_some(values, targets) if weights is None else weighted_loss_sum(of_some, values, targets, weights)

        return self._by_head(compute)

    def own_values(self, value: TokenValue, share: int = 1) -> Tensor:
        """Returns `value` of each of this rank's tokens, `(batch, n)`; it makes `share` tensors as wide as scores."""
        if (head := self.head) is None:
            own = self._after(self.own.flatten(0, 1))
            return value(own, slice(0, len(own))).view(self.own.shape[:-1])

        adapters = head.adapters

        def of_states(states: Tensor, part: slice) -> Tensor:
            if head.adapters != adapters:
                raise BatchError(_CHANGED.format("The gradient"))
            with self._precision():  # also in the backward pass
                scores = head.plain(states)[0]
            with torch.autocast(scores.device.type, enabled=False):  # which would return fp32
                return value(self._after(scores), part)

        def compute(hidden: Tensor) -> Tensor:
            with self.draws():
                learned = learned_by(self._scores, hidden) if torch.is_grad_enabled() else []
            with self.draws():  # as for [`score`]
                return token_values(hidden, of_states, rows_at_a_time(head.vocabulary, share), learned)

        return self._by_head(compute)

    def some(self, part: slice) -> Tensor:
        """Returns the scores of some of this rank's tokens, flat, `(m, width)`."""
        with self._precision():
            return self._scores(self.own.flatten(0, -2)[None, part])[0]

    def score(self) -> Tensor:
        """Returns all of this rank's values, and stores them, so that they can be changed."""
        with self.draws():
            own = self.own if self.head is None else self._by_head(self.head.plain)
        self.own, self.head, self.put_off = self._after(own), None, ()
        return self.own

    @property
    def linear(self) -> Linear | None:
        """The head as a linear layer, if it is one and its logits are at most soft-capped."""
        assert self.head is not None, "it is put off"
        module = self.head.module
        plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if not plain or self.head.own is not None or "weight" not in module._parameters:  # it is computed from others
            return None
        steps = [step for step in self.put_off if (step.name, step.args) not in _SAME]
        if not steps:
            return Linear(module.weight, module.bias, None)
        if [step.name for step in steps] == ["div", "tanh", "mul"] and steps[0].args == steps[2].args:
            return Linear(module.weight, module.bias, float(steps[0].args[0]))
        return None

    def _scores(self, states: Tensor) -> Tensor:
        return self._after(states if self.head is None else self.head.plain(states))

    def _after(self, scores: Tensor, done: int = 0) -> Tensor:
        for step in self.put_off[done:]:
            scores = step(scores)
        return scores

    def _precision(self) -> Any:
        enabled, dtype = self.autocast
        return torch.autocast(self.own.device.type, dtype, enabled=enabled)

    def _by_head(self, compute: Compute) -> Tensor:
        """Calls `compute` with this rank's values, as if it ran where the head was called."""
        if self.head is None:
            return compute(self.own)
        with self._precision():
            return self.head.within(compute, self.own)

    # -- all tokens

    def map(self, name: str, function: Callable[..., Tensor], *args: Any, **options: Any) -> "Spread":
        """Applies a function to each token; puts it off if the head is put off, or the value was handed out."""
        step = PutOffCall(name, function, args, options)
        now = self.head is None and self.limit is None
        return replace(self, own=step(self.own)) if now else replace(self, put_off=(*self.put_off, step))

    def rows(self, own: Tensor) -> Tensor:
        """Returns some of this rank's tokens, as one row."""
        return self.own.flatten(0, 1).index_select(0, own.to(self.device))[None]

    def reduce(
        self, name: str, value: Callable[[Tensor, Tensor], Tensor], words: Tensor | None = None, ignored: Any = None
    ) -> Tensor:
        """Returns a number for each chosen token, on every rank. `value` gets the scores of some tokens and their
        indices among the chosen; `words` are its inputs, one per token."""
        lies, limit = self._agree(name, words, ignored)
        if not self.chosen.numel():
            none = limit.anchor if self.learns else limit.anchor.detach()
            return (none.sum().nan_to_num(0.0, 0.0, 0.0) * 0).to(self.dtype).expand(self.chosen.shape)

        def compute(own: Tensor, at: Tensor, padding: Tensor) -> Tensor:
            numbers, hidden = at.to(self.device), padding.to(self.device)

            def of_some(scores: Tensor, part: slice) -> Tensor:
                shown = scores.masked_fill(hidden[part, None], 0.0)
                return value(self._after(shown, limit.put_off), numbers[part])

            mine = replace(self, own=self.rows(own), put_off=self.put_off[: limit.put_off])
            return mine.own_values(of_some, 2 + len(self.put_off)).flatten()

        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns):
            return lies.values_at(self.chosen.flatten(), compute).view(self.chosen.shape)

    def whole(self, what: str = "whole") -> Tensor:
        """Returns the values of all chosen tokens, on every rank; raises if there are too many."""
        if self.lies is None:
            return self.score()
        if self.limit is None:
            return self.lies.batch(self.own).contiguous()
        if self.limit.about:
            raise BatchError(f"{self.limit.about}, and {what} was asked of them. {SERVED}")
        lies, limit = self._agree(what)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns):
            # a copy: values without gradients would stay
            every = lies.batch(replace(self, put_off=self.put_off[: limit.put_off]).score())
            every = every.contiguous() if self.places is None else every.flatten(0, 1)[self.places.to(every.device)]
            return self._after(every, limit.put_off)

    def _agree(self, name: str, words: Tensor | None = None, ignored: Any = None) -> tuple[Where, Limit]:
        """Raises on every rank if one of them asks for something else, or for a word outside the vocabulary."""
        assert self.lies is not None, "it was handed out"
        assert self.limit is not None, "it was handed out"
        problem = ""
        if self.head is not None:
            check_head_again(self.head.module)  # a wrapper may have resharded it since
            if self.limit.state != self.head.state:
                problem = _CHANGED.format(name)
        checksums = {"tokens whose logits are asked for (checksum)": sum_of_bits(self.chosen)}
        if words is not None:
            checksums["words whose logits are asked for (checksum)"] = sum_of_bits(words)
            wrong = words[((words < 0) | (words >= self._width)) & (words != ignored)]
            if len(wrong):
                known = f"0 to {self._width - 1}; labels of -100 take .clamp(min=0) before a gather"
                problem = f"{name} was asked for the word {int(wrong[0])}, and there are those from {known}."
        what = " of ".join([name, *(str(step) for step in reversed(self.put_off)), str(tuple(self.shape))])
        error = BatchError(problem) if problem else None
        self.lies.group.agree({"logits are asked for": what}, error, self.device, 0, checksums, doing=name)
        return self.lies, self.limit

    # -- as a tensor

    @property
    def shape(self) -> torch.Size:
        if self.lies is None:
            return self.score().shape
        chosen = self.lies.shape if self.places is None else self.places.shape
        return torch.Size((*chosen, *self.own.shape[2:-1], self._width))

    @property
    def ndim(self) -> int:
        return self.own.ndim if self.places is None else self.places.ndim + self.own.ndim - 2

    @property
    def dtype(self) -> torch.dtype:
        return self._sample.dtype

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def _sample(self) -> Tensor:
        """Scores of no tokens."""
        width = self.own.shape[-1] if self.head is None else self.head.vocabulary
        return self._after(self.own.new_empty(0, width))

    @property
    def _width(self) -> int:
        return self._sample.shape[-1]

    @property
    def chosen(self) -> Tensor:
        """The tokens in this value, `row * tokens + token`."""
        if self.places is not None:
            return self.places
        assert self.lies is not None, "it is of several ranks"
        rows, tokens = self.lies.shape
        return torch.arange(rows * tokens, device="cpu").view(rows, tokens)

    def __len__(self) -> int:
        return len(self.own) if self.lies is None else self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if self.lies is not None and self.limit is None:  # code that rebuilds an output checks whether it holds pairs
            raise TypeError("Values of a pass under way are not iterated over; unbind gathers them.")
        return (self._called(Tensor.__getitem__, index) for index in range(len(self)))

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.lies is not None:
            raise TypeError(_UNWRITTEN)
        self.score()[key] = value

    def __getattr__(self, name: str) -> Any:
        if name == "own" or name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)  # for copies under construction, and names that tensors do not have
        if name in _FACTS and self.limit is not None:
            return getattr(self.limit.anchor, name)
        there = getattr(Tensor, name)
        return partial(self._called, there) if callable(there) else getattr(self.whole(name), name)

    def _called(self, function: Any, *args: Any, **options: Any) -> Any:
        return self.__torch_function__(function, (), (self, *args), options)

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        first, *others = args or (options.pop("input", None),)
        if isinstance(first, cls):
            if name_of(function).endswith("_") and first.lies is not None:
                raise TypeError(_UNWRITTEN)
            found = by_tokens(first, function, others, options)
            if found is not NotImplemented:
                return found
        what = f"{name_of(function)}({', '.join(str(each) for each in others if not hasattr(each, 'shape'))})"
        tensors, named = pytree.tree_map_only(
            cls, lambda value: value.whole(what), (args, kwargs or {}), is_leaf=lambda leaf: isinstance(leaf, cls)
        )
        return function(*tensors, **named)


_SAME: tuple[Any, ...] = (("float", ()), ("to", (torch.float32,)), ("clone", ()), ("contiguous", ()))
for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "neg"),
    *("abs", "gt", "ge", "lt", "le", "getitem"),
):
    setattr(Spread, f"__{_name}__", partialmethod(Spread._called, getattr(Tensor, f"__{_name}__")))

# lets FSDP2 find the tensors that a module returns, because their gradients tell it that the backward pass begins
pytree.register_pytree_node(
    Spread, lambda value: ([value.own], value), lambda children, value: replace(value, own=next(iter(children)))
)


def needs_logits(module: nn.Module) -> bool:
    """Returns whether hooks need a head's logits, or its gradients, which are complete only with all logits, or a
    weight is computed from others before it runs. Hooks of wrappers that manage weights and memory need none."""
    modules, again = list(inner_modules(module)), is_partitioned(module)  # then it is called twice, with its pre-hooks
    hooks = [*_global_forward_hooks.values(), *(_global_forward_pre_hooks.values() if again else ())]
    hooks += [hook for inner in modules for hook in inner._forward_hooks.values()]
    hooks += [hook for inner in modules[0 if again else 1 :] for hook in inner._forward_pre_hooks.values()]
    watched = any(inner._backward_hooks or inner._backward_pre_hooks for inner in modules)
    if watched or any(not str(hook.__module__).startswith(_WRAPPERS) for hook in hooks):
        return True
    held = (value for inner in modules for value in (*inner._parameters.values(), *vars(inner).values()))
    tensors = (value for value in held if isinstance(value, torch.Tensor))
    return any(tensor._backward_hooks or not tensor.is_leaf for tensor in tensors)


def check_head_again(head: nn.Module | None) -> None:
    if torch.is_grad_enabled() and is_sharded_head(head):
        raise UnsupportedModelError(
            "FSDP2 has sharded the head again, and losses of tokens need it in the backward pass. Wrap it together "
            "with the last norm, with reshard_after_forward=False, or leave it to the whole model."
        )


class PutOffHead(Override):
    """The head of a model, which is put off while `under_way`. Graphs break here."""

    def __init__(self, module: nn.Module, own: Any, vocabulary: int) -> None:
        super().__init__(module, own, vocabulary)
        self.vocabulary, self.strong = vocabulary, module  # a loss may outlive its model
        self.under_way = False
        self.next_call: Compute | None = None  # what it computes in place of the head

    @torch.compiler.disable
    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        if self.next_call is not None:
            return self.next_call(hidden)
        if args or kwargs or not self.under_way:
            return self.plain(hidden, *args, **kwargs)
        kind = hidden.device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        half = torch.float16 in (hidden.dtype, autocast[1] if autocast[0] else None)
        # in fp16, gradients would wait for their scale; weights inside an adapter are gathered only in its call
        if half or needs_logits(self.module) or any(map(is_partitioned, children_of(self.module).values())):
            return self.plain(hidden)
        # FSDP2 puts a hook on the output, and warns of views
        own = hidden.clone() if isinstance(self.module, FSDPModule) else hidden
        return Spread(own, self, autocast, draws_as_now(hidden))

    @property
    def state(self) -> tuple[Any, ...]:
        """How often its weights were written to, those of FSDP2 being checked elsewhere, and its adapters."""
        weights = self.module.parameters()
        return (*(weight._version for weight in weights if not isinstance(weight, DTensor)), *self.adapters)

    @property
    def adapters(self) -> list[list[str]]:
        """The adapters that work in each module of the head that has some."""
        return [adapters_at_work(module) for module in inner_modules(self.module) if is_adapted(module)]

    def within(self, compute: Compute, hidden: Tensor) -> Tensor:
        """Calls a function that applies the head to hidden states, gathering its weights again if needed.

        FSDP2 is asked to gather them. DeepSpeed gathers when the module is called, and again in the backward pass.
        """
        if is_partitioned(self.module):
            with instead(compute, "next_call", self):
                return self.module(hidden)
        if not (is_sharded_head(self.module) and isinstance(self.module, FSDPModule)):
            return compute(hidden)
        self.module.unshard()
        try:
            return compute(hidden)
        finally:
            self.module.reshard()
