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
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ..linear_loss import Linear, linear_loss_sum
from ..loss import token_loss_sum

# what is noted down: methods, and operators
_METHODS: dict[str, Callable[..., torch.Tensor]] = {
    "float": torch.Tensor.float,
    "to": torch.Tensor.to,
    "tanh": torch.Tensor.tanh,
}
_OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "mul": operator.mul,
    "truediv": operator.truediv,
    "getitem": operator.getitem,
}
Step = tuple[str, tuple[Any, ...]]


@dataclass
class DeferredLogits:
    """What a head would return, and what the model does with it afterwards (scaling, soft-capping, casts): noted down.
    Whoever asks for anything else gets it from the logits themselves.

    Args:
        head ([`DeferringHead`]): The head.
        hidden (`torch.Tensor` of shape `(batch, n, hidden)`): What it was given.
        steps (`tuple`): Names of operations, and their operands.
    """

    head: "DeferringHead"
    hidden: torch.Tensor
    steps: tuple[Step, ...] = ()

    def loss_sum(self, targets: torch.Tensor) -> torch.Tensor:
        """The sum of the cross-entropies of these tokens, see [`linear_loss_sum`].

        Args:
            targets (`torch.LongTensor` of shape `(batch, n)`): Shifted labels.
        """

        def compute(plain: Callable[[torch.Tensor], torch.Tensor], module: nn.Module) -> torch.Tensor:
            return linear_loss_sum(
                self.hidden,
                targets,
                lambda hidden: self._after(plain(hidden)),
                list(module.parameters()),
                self.head.vocabulary,
                self._linear(module),
            )

        return self.head.within(compute)

    @cached_property
    def whole(self) -> torch.Tensor:
        """The logits."""
        return self._after(self.head.within(lambda plain, _: plain(self.hidden)))

    @property
    def dtype(self) -> torch.dtype:
        """That of the logits, as far as the steps tell."""
        return torch.float32 if any(name == "float" for name, _ in self.steps) else self.hidden.dtype

    def _after(self, logits: torch.Tensor) -> torch.Tensor:
        for name, operands in self.steps:
            logits = (_METHODS | _OPERATORS)[name](logits, *operands)
        return logits

    def _then(self, name: str, *operands: Any) -> "DeferredLogits":
        return DeferredLogits(self.head, self.hidden, (*self.steps, (name, operands)))

    def _linear(self, module: nn.Module) -> Linear | None:
        """The head as a linear layer, if it is one and its logits are at most soft-capped."""
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            return None
        steps = [step for step in self.steps if step[0] != "float" and step != ("to", (torch.float32,))]
        if not steps:
            return Linear(module.weight, module.bias, None)
        if [name for name, _ in steps] == ["truediv", "tanh", "mul"] and steps[0][1] == steps[2][1]:
            return Linear(module.weight, module.bias, float(steps[0][1][0]))
        return None

    def __mul__(self, other: Any) -> Any:
        return self._then("mul", other) if isinstance(other, int | float) else self.whole * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._then("truediv", other) if isinstance(other, int | float) else self.whole / other

    def __add__(self, other: Any) -> Any:
        return self.whole + other

    def __getitem__(self, key: Any) -> Any:
        vocabulary = isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis and isinstance(key[1], slice)
        return self._then("getitem", key) if vocabulary else self.whole[key]

    def __getattr__(self, name: str) -> Any:
        if name in ("head", "hidden", "steps") or name.startswith("__"):
            raise AttributeError(name)  # a copy that is being made
        return partial(self._then, name) if name in _METHODS else getattr(self.whole, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.tanh and not kwargs:
            return args[0]._then("tanh")
        leaves, form = pytree.tree_flatten((args, kwargs or {}), is_leaf=lambda given: isinstance(given, cls))
        given, named = pytree.tree_unflatten([leaf.whole if isinstance(leaf, cls) else leaf for leaf in leaves], form)
        return function(*given, **named)


@torch.compiler.disable
def loss_sum(logits: torch.Tensor | DeferredLogits, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the cross-entropies of this rank's tokens, see [`token_loss_sum`]."""
    return logits.loss_sum(targets) if isinstance(logits, DeferredLogits) else token_loss_sum(logits, targets)


# FSDP2 finds the tensors that a module returns this way, and learns from their gradients when the backward pass begins
pytree.register_pytree_node(
    DeferredLogits,
    lambda logits: ([logits.hidden], (logits.head, logits.steps)),
    lambda children, context: DeferredLogits(context[0], next(iter(children)), context[1]),
)


class DeferringHead:
    """Stands for the `forward` of a model's head, and puts it off while `under_way`. A graph ends here.

    Args:
        module (`nn.Module`): The head.
        vocabulary (`int`): Logits of a token.
    """

    def __init__(self, module: nn.Module, vocabulary: int) -> None:
        self.module, self.vocabulary = module, vocabulary
        self.own = vars(module).get("forward")
        self.under_way = False
        module.forward = self

    @property
    def plain(self) -> Callable[..., torch.Tensor]:
        """The head's own `forward`."""
        own: Callable[..., torch.Tensor] = self.own or partial(type(self.module).forward, self.module)
        return own

    def remove(self) -> None:
        """Puts the head's own `forward` back."""
        if self.own is None:
            del self.module.forward
        else:
            self.module.forward = self.own

    @torch.compiler.disable
    def __call__(self, hidden: Any, *args: Any, inside: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if inside is not None:
            return inside()
        if args or kwargs or not self.under_way:
            return self.plain(hidden, *args, **kwargs)
        # FSDP2 hangs a hook on what comes out, and warns of views
        return DeferredLogits(self, hidden.clone() if isinstance(self.module, FSDPModule) else hidden)

    def within(self, compute: Callable[..., torch.Tensor]) -> torch.Tensor:
        """What a function finds with the head's own `forward` and its weights. Where FSDP2 has sharded these again,
        they are gathered once more."""
        found: list[torch.Tensor] = []

        def inside() -> None:
            found.append(compute(self.plain, self.module))

        if any(isinstance(parameter, DTensor) for parameter in self.module.parameters()):
            self.module(torch.empty(0), inside=inside)
        else:
            inside()
        return found[0]


def deferring_head(model: PreTrainedModel, known: DeferringHead | None) -> DeferringHead | None:
    """The head of a model, able to put itself off; the one that is known, unless adapters have taken its place."""
    module = model.get_output_embeddings()
    if known is not None and known.module is module and module.forward is known:
        return known
    if known is not None and known.module.forward is known:
        known.remove()
    return None if module is None else DeferringHead(module, model.config.get_text_config().vocab_size)
