"""The functions of torch, by name, that do not need a spread value to be gathered.

Each is called with the value and the arguments, and returns `NotImplemented` if these mix tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

SERVED = (
    "Served are slices, products with numbers, log_softmax, softmax, logsumexp, gather, sum, mean and cross_entropy "
    "over words. For other losses take hf_burst.token_losses or token_divergences."
)
_NAMES = {"truediv": "div", "true_divide": "div", "rmul": "mul", "multiply": "mul", "radd": "add", "negative": "neg"}
_CASTS = ("float", "to", "clone", "contiguous")
_OF_NUMBERS = ("mul", "div", "add", "neg", "tanh")
# layers with weights or random numbers, which are not put off
_LAYERS = ("linear", "dropout", "layer_norm", "rms_norm", "gelu", "relu", "silu")
_OF_WORDS = ("log_softmax", "softmax", "logsumexp", "sum", "mean", "gather")
_OF_SHAPE = ("size", "dim", "numel", "element_size", "is_floating_point", "stride")


class PutOffCall(NamedTuple):
    """A function whose call is put off."""

    name: str
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self, scores: Tensor) -> Tensor:
        return self.function(scores, *self.args, **self.options)

    def __str__(self) -> str:
        return f"{self.name}{(*self.args, *self.options.items())}"


def name_of(function: Any) -> str:
    """Returns the name of an operator without its underscores; a trailing one, of functions in place, stays."""
    name = getattr(function, "__name__", str(function))
    name = name.strip("_") if name.startswith("__") else name
    return _NAMES.get(name, name)


def by_tokens(value: Any, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Returns a torch function's result if the tokens of a [`Spread`] can stay in place; else `NotImplemented`."""
    name, given = name_of(function), (*args, *options.values())
    numbers = all(isinstance(each, int | float) for each in given)
    row = name == "add" and value.limit is None and all(isinstance(each, Tensor) and each.ndim < 2 for each in given)
    layer = name in _LAYERS and value.head is None and value.limit is None
    if layer or name in _CASTS or (name in _OF_NUMBERS and (numbers or row)):
        return value.map(name, function, *args, **options)
    if name in _OF_WORDS:
        return _of_words(value, name, function, list(args) or [options.pop("dim", None)], options)
    if name == "getitem":
        return _item(value, *args)
    if value.limit is None:
        return NotImplemented
    if name in _OF_SHAPE:
        return function(torch.empty(value.shape, dtype=value.dtype, device="meta"), *args, **options)
    return _ASKED[name](value, *args, **options) if name in _ASKED else NotImplemented


def _of_words(value: Any, name: str, function: Any, args: list[Any], options: dict[str, Any]) -> Any:
    """Serves a function of the scores of each token; `args` begin with the dimension."""
    if args == [None] and name == "mean" and value.limit is not None:
        return _of_words(value, name, function, [-1], options).mean()
    if args.pop(0) not in (-1, value.ndim - 1):
        return NotImplemented
    if "softmax" in name:
        return value.map(name, function, -1, *args, **options)
    if value.limit is None:
        return NotImplemented
    words, keeps = None, args[0] if args else options.get("keepdim")  # behind the dimension: `keepdim`, or an index
    if name == "gather":
        index = args.pop() if args else options.pop("index")
        if index.shape != (*value.shape[:-1], 1):
            return NotImplemented
        words, keeps = index.flatten(), True

    def compute(scores: Tensor, at: Tensor) -> Tensor:
        own = [] if words is None else [words[at][:, None]]
        found: Tensor = function(scores, -1, *args, *own, **options)
        return found.flatten()

    found = value.reduce(name, compute, words)
    return found[..., None] if keeps else found


def _item(value: Any, key: Any) -> Any:
    keys = key if isinstance(key, tuple) else (key,)
    masks = sum(each.ndim - 1 for each in keys if isinstance(each, Tensor) and each.dtype == torch.bool)
    if any(each is Ellipsis for each in keys) or len(keys) + masks - sum(each is None for each in keys) == value.ndim:
        if not isinstance(keys[-1], slice):
            return NotImplemented
        words = (Ellipsis, keys[-1])
        value = value if keys[-1] == slice(None) else value.map("getitem", Tensor.__getitem__, words)
        keys = keys[:-1]
        if len(keys) == 1 and keys[0] is Ellipsis:
            return value
    if value.limit is None:
        if value.lies is None or len(keys) != 2 or keys[0] != slice(None) or type(keys[1]) is not int:
            return NotImplemented
        return value.lies.values_at(value.chosen[:, keys[1]], lambda own, *_: value.rows(own)[0])  # sent by its owner
    on_host = tuple(each.cpu() if isinstance(each, Tensor) else each for each in keys)
    return replace(value, places=value.chosen[on_host])


def _cross_entropy(
    value: Any, target: Tensor, weight: Any = None, *old: Any, reduction: str = "mean", **options: Any
) -> Any:
    given = weight, *old, options.pop("size_average", None), options.pop("reduce", None)
    if any(each is not None for each in given) or target.shape != value.shape[:-1] or target.ndim != 1:
        return NotImplemented
    compute: Callable[..., Tensor] = partial(functional.cross_entropy, reduction="none", **options)
    ignored = options.get("ignore_index", -100)
    what = f"cross_entropy with {options}"
    losses = value.reduce(what, lambda scores, at: compute(scores, target[at]), target, ignored)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignored).sum()


def _reshaped(value: Any, *shape: Any) -> Any:
    sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if sizes[-1] != value.shape[-1]:
        return NotImplemented
    return replace(value, places=value.chosen.reshape(sizes[:-1]))


_ASKED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "reshape"), _reshaped),
    "cross_entropy": _cross_entropy,
    "detach": lambda value: replace(value, learns=False),
}
