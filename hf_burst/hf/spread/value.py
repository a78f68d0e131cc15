"""The value itself, and the head of a model that is put off."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from transformers.utils import logging

from ...errors import BatchError
from ...layers.linear_loss import Linear, learned_by, linear_loss_sum, rows_at_a_time
from ...layers.loss import token_loss_sum, weighted_loss_sum
from ...layers.token_values import token_values
from ..batches.sharded import sum_of_bits
from ..overrides import Override
from ..view import children_of
from .functions import SERVED, Step, by_tokens, name_of
from .heads import check_head_again, is_hooked, is_partitioned, is_sharded_head, is_watched
from .where import Where

_HOOKED = (
    "The head of the model has a forward hook. It is given the logits of this rank's tokens, which are all in memory: "
    "tokens x vocabulary values. Remove the hook for long sequences."
)
_FACTS = ("requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta")
logger = logging.get_logger(__name__)
Compute = Callable[[Tensor], Tensor]
TokenValue = Callable[[Tensor, slice], Tensor]  # from scores `(m, vocabulary)` and their places to values `(m,)`
Weights = Mapping[int, Tensor] | None  # the tokens that count so many times; all of them count once by default


@dataclass(frozen=True)
class Limit:
    """What holds for a value that was handed out, of which any code may ask anything.

    Args:
        fits (`bool`): Whether all of it may be gathered.
        about (`str`): Why not.
        anchor (`torch.Tensor`): Follows from the weights; by it DDP finds those that gradients are to come for.
        steps (`int`): How many of its steps are the model's own.
        written (tuple of `int`): How often the weights of the head had been written to.
    """

    fits: bool
    about: str
    anchor: Tensor
    steps: int
    written: tuple[int, ...]


@dataclass(eq=False)
class Spread:
    """Looks like a tensor of all tokens that were chosen, `(..., width)`, of which this rank holds some.

    Args:
        own (`torch.Tensor` of shape `(batch, n, ...)`): This rank's values; what `head` is given, if it is put off.
        head ([`PutOffHead`], *optional*): Scores some tokens at a time.
        autocast (`tuple[bool, torch.dtype]`): Whether the head runs under it, and in which dtype.
        steps (tuple of [`Step`]): What follows the head.
        lies ([`Where`], *optional*): Where all tokens lie; by default it stands for this rank's own, as in a model.
        places (`torch.LongTensor`, *optional*): The tokens that it stands for, see `chosen`; all by default.
        limit ([`Limit`], *optional*): Of a value that was handed out: all ranks ask it alike, which is compared.
        learns (`bool`, defaults to `True`): Whether gradients flow back.
    """

    own: Tensor
    head: "PutOffHead | None" = None
    autocast: tuple[bool, torch.dtype] = (False, torch.bfloat16)
    steps: tuple[Step, ...] = ()
    lies: Where | None = None
    places: Tensor | None = None
    limit: Limit | None = None
    learns: bool = True

    @classmethod
    def of(cls, value: "Tensor | Spread") -> "Spread":
        return value if isinstance(value, Spread) else cls(value)

    def handed_out(self, lies: Where, fits: bool, about: str, loss: Tensor | None) -> "Spread":
        """The same for everybody, see [`Limit`]. What was computed under autocast is returned in fp32."""
        if self.head is not None and loss is None:
            check_head_again(self.head.module)
        anchor = self.some(slice(0, 1)) if loss is None else loss
        written = () if self.head is None else self.head.written
        value = self.map("float", Tensor.float) if self.autocast[0] else self
        return replace(value, lies=lies, limit=Limit(fits, about, anchor, len(value.steps), written))

    # -- this rank's tokens

    @torch.compiler.disable
    def loss_sum(self, targets: Tensor, weights: Weights = None) -> Tensor:
        """The sum of the cross-entropies of this rank's tokens for shifted labels of shape `(batch, n)`, see
        [`token_loss_sum`]; with `weights`, see [`weighted_loss_sum`]."""

        def of_some(values: Tensor, labels: Tensor) -> Tensor:
            if self.head is None:
                return token_loss_sum(values, labels)
            return linear_loss_sum(values, labels, self._scores, self.head.vocabulary, self.linear)

        def compute(values: Tensor) -> Tensor:
            return of_some(values, targets) if weights is None else weighted_loss_sum(of_some, values, targets, weights)

        return self._by_head(compute)

    def own_values(self, value: TokenValue, share: int = 1) -> Tensor:
        """A value of each of this rank's tokens, `(batch, n)`; `value` has so many tensors as wide as scores."""
        if (head := self.head) is None:
            return value(self.own.flatten(0, 1), slice(0, self.own[..., 0].numel())).view(self.own.shape[:-1])

        def of_states(states: Tensor, part: slice) -> Tensor:
            with self._precision():  # in the backward pass, too
                return value(self._scores(states)[0], part)

        def compute(hidden: Tensor) -> Tensor:
            learned = learned_by(self._scores, hidden) if torch.is_grad_enabled() else []
            return token_values(hidden, of_states, rows_at_a_time(head.vocabulary, share), learned)

        return self._by_head(compute)

    def some(self, part: slice) -> Tensor:
        """The scores of some of this rank's tokens, flat, `(m, width)`."""
        with self._precision():
            return self._scores(self.own.flatten(0, -2)[None, part])[0]

    def score(self) -> Tensor:
        """All of this rank's values. They stay: they may be changed."""
        if self.head is not None:
            self.own = self._after(self._by_head(self.head.plain))
            self.head, self.steps = None, ()
        return self.own

    @property
    def linear(self) -> Linear | None:
        """The head as a linear layer, if it is one and its logits are at most soft-capped."""
        assert self.head is not None, "it is put off"
        module = self.head.module
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            return None
        if self.head.own is not None or "weight" not in module._parameters:  # which follows from others
            return None
        steps = [step for step in self.steps if (step.name, step.args) not in _SAME]
        if not steps:
            return Linear(module.weight, module.bias, None)
        if [step.name for step in steps] == ["div", "tanh", "mul"] and steps[0].args == steps[2].args:
            return Linear(module.weight, module.bias, float(steps[0].args[0]))
        return None

    def _scores(self, states: Tensor) -> Tensor:
        return states if self.head is None else self._after(self.head.plain(states))

    def _after(self, scores: Tensor, done: int = 0) -> Tensor:
        for step in self.steps[done:]:
            scores = step(scores)
        return scores

    def _precision(self) -> Any:
        enabled, dtype = self.autocast
        return torch.autocast(self.own.device.type, dtype, enabled=enabled)

    def _by_head(self, compute: Compute) -> Tensor:
        """Calls a function of this rank's values, as if it ran where the head was called."""
        if self.head is None:
            return compute(self.own)
        with self._precision():
            return self.head.within(compute, self.own)

    # -- all tokens

    def map(self, name: str, function: Callable[..., Tensor], *args: Any, **options: Any) -> "Spread":
        """What a function gives for each token; put off where the head is."""
        step = Step(name, function, args, options)
        return replace(self, own=step(self.own)) if self.head is None else replace(self, steps=(*self.steps, step))

    def token(self, token: int) -> Tensor:
        """The values of one token of every row, `(batch, ...)`, which its owner sends."""
        assert self.lies is not None, "it is of several ranks"
        return self.lies.chosen(self.chosen[:, token], lambda own, _, __: self._rows(own)[0])

    def reduce(
        self, name: str, value: Callable[[Tensor, Tensor], Tensor], words: Tensor | None = None, ignored: Any = None
    ) -> Tensor:
        """A number of each token that was chosen, on every rank. `value` is given the scores of some, and which of the
        chosen they are; `words` are what it reads, one a token."""
        lies, limit = self._agree(name, words, ignored)
        if not self.chosen.numel():
            none = limit.anchor if self.learns else limit.anchor.detach()
            return (none.sum().nan_to_num(0.0, 0.0, 0.0) * 0).to(self.dtype).expand(self.chosen.shape)

        def compute(own: Tensor, at: Tensor, padding: Tensor) -> Tensor:
            numbers, hidden = at.to(self.device), padding.to(self.device)

            def of_some(scores: Tensor, part: slice) -> Tensor:
                with torch.autocast(scores.device.type, enabled=False):  # under it scores are returned in fp32
                    shown = scores.masked_fill(hidden[part, None], 0.0)
                    return value(self._after(shown, limit.steps), numbers[part])

            mine = replace(self, own=self._rows(own), steps=self.steps[: limit.steps])
            return mine.own_values(of_some, 2 + len(self.steps) - len(mine.steps)).flatten()

        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns):
            return lies.chosen(self.chosen.flatten(), compute).view(self.chosen.shape)

    def whole(self, asked: str = "whole") -> Tensor:
        """The values of all tokens that were chosen, on every rank; raises if there are too many."""
        if self.lies is None:
            return self.score()
        if self.limit is None:
            return self._gathered
        if not self.limit.fits:
            raise BatchError(f"{self.limit.about}, and {asked} was asked of them. {SERVED}")
        lies, limit = self._agree(asked)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns):
            own = replace(self, steps=self.steps[: limit.steps]).score()  # anew: one without gradients stays
            every = lies.batch(own)
            every = every.contiguous() if self.places is None else every.flatten(0, 1)[self.places.to(every.device)]
            return self._after(every, limit.steps)

    @cached_property
    def _gathered(self) -> Tensor:
        assert self.lies is not None, "it is of several ranks"
        return self.lies.batch(self.own).contiguous()

    def _rows(self, own: Tensor) -> Tensor:
        """Some of this rank's tokens, as those of one row."""
        return self.own.flatten(0, 1).index_select(0, own.to(self.device))[None]

    def _agree(self, name: str, words: Tensor | None = None, ignored: Any = None) -> tuple[Where, Limit]:
        """Raises on every rank if one asks for something else, or for a word that there is not."""
        assert self.lies is not None, "it was handed out"
        assert self.limit is not None, "it was handed out"
        error: BatchError | None = None
        if self.head is not None:  # a wrapper may have sharded it since
            check_head_again(self.head.module)
        if self.head is not None and self.limit.written != self.head.written:
            error = BatchError(
                f"{name} was asked of logits behind an update of the head, by which they would be others. Read "
                "outputs.logits before the optimizer's step."
            )
        checksums = {"tokens whose logits are asked for (checksum)": sum_of_bits(self.chosen)}
        if words is not None:
            checksums["words whose logits are asked for (checksum)"] = sum_of_bits(words)
            outside = (words < 0) | (words >= self._width)
            wrong = words[outside if ignored is None else outside & (words != ignored)]
            if len(wrong):
                error = BatchError(
                    f"{name} was asked for the word {int(wrong[0])}, and there are those from 0 to {self._width - 1}. "
                    "Labels of -100 take .clamp(min=0) before a gather, and no part in a sum."
                )
        asked = " of ".join([name, *(str(step) for step in reversed(self.steps)), str(tuple(self.shape))])
        self.lies.group.agree({"logits are asked for": asked}, error, self.device, 0, checksums, doing=name)
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
        """Scores of no token."""
        width = self.own.shape[-1] if self.head is None else self.head.vocabulary
        return self._after(self.own.new_empty(0, width))

    @property
    def _width(self) -> int:
        return self._sample.shape[-1]

    @property
    def chosen(self) -> Tensor:
        """The tokens that it stands for, `row * tokens + token`."""
        if self.places is not None:
            return self.places
        assert self.lies is not None, "it is of several ranks"
        rows, tokens = self.lies.shape
        return torch.arange(rows * tokens, device="cpu").view(rows, tokens)

    def __len__(self) -> int:
        return len(self.own) if self.lies is None else self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if self.lies is not None and self.limit is None:  # an output that is made anew asks whether it holds pairs
            raise TypeError("Values of a pass under way are not iterated over; unbind gathers them.")
        return (self._asked(Tensor.__getitem__, index) for index in range(len(self)))

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.lies is not None:
            raise TypeError("Values that lie on several ranks are not written to; torch.where makes others of them.")
        self.score()[key] = value

    def __getattr__(self, name: str) -> Any:
        if name == "own" or name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)  # of a copy that is being made, or of what is no tensor
        if name in _FACTS and self.limit is not None:
            return getattr(self.limit.anchor, name)
        there = getattr(Tensor, name)
        return partial(self._asked, there) if callable(there) else getattr(self.whole(name), name)

    def _asked(self, function: Any, *args: Any, **options: Any) -> Any:
        return self.__torch_function__(function, (), (self, *args), options)

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        first, *others = args or (options.pop("input", None),)
        if isinstance(first, cls):
            found = by_tokens(first, function, others, options)
            if found is not NotImplemented:
                return found
        asked = f"{name_of(function)}({', '.join(str(each) for each in others if not hasattr(each, 'shape'))})"
        leaves, form = pytree.tree_flatten((args, kwargs or {}), is_leaf=lambda leaf: isinstance(leaf, cls))
        leaves = [leaf.whole(asked) if isinstance(leaf, cls) else leaf for leaf in leaves]
        tensors, named = pytree.tree_unflatten(leaves, form)
        return function(*tensors, **named)


_SAME: tuple[Any, ...] = (("float", ()), ("to", (torch.float32,)), ("clone", ()))
for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "neg"),
    *("abs", "gt", "ge", "lt", "le", "getitem"),
):
    setattr(Spread, f"__{_name}__", partialmethod(Spread._asked, getattr(Tensor, f"__{_name}__")))

# FSDP2 finds the tensors that a module returns this way, and learns from their gradients when the backward pass begins
pytree.register_pytree_node(
    Spread, lambda value: ([value.own], value), lambda children, value: replace(value, own=next(iter(children)))
)


class PutOffHead(Override):
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
        return Spread(hidden.clone() if isinstance(self.module, FSDPModule) else hidden, self, autocast)

    @property
    def written(self) -> tuple[int, ...]:
        """How often its weights were written to; FSDP2's are looked at elsewhere."""
        weights = self.module.parameters()
        return tuple(weight._version for weight in weights if not isinstance(weight, DTensor))

    def within(self, compute: Compute, hidden: Tensor) -> Tensor:
        """Calls a function that takes hidden states to the head, whose weights may have to be gathered again.

        FSDP2 is asked to. DeepSpeed does it where the module is called, and once more in the backward pass.
        """
        if is_partitioned(self.module):
            self.instead = compute
            try:
                return self.module(hidden)
            finally:
                self.instead = None
        if not (is_sharded_head(self.module) and isinstance(self.module, FSDPModule)):
            return compute(hidden)
        self.module.unshard()
        try:
            return compute(hidden)
        finally:
            self.module.reshard()

    def _given(self) -> tuple[Any, ...]:
        return self.module, self.own, self.vocabulary
