"""Logits of the whole batch that are too large to gather: what follows token by token is computed where tokens lie."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from ...errors import BatchError
from ...ranks.collectives import gather_tokens, group_sum
from ...ranks.group import ContextGroup
from ...ranks.layout import SequenceLayout
from ..batches.joining import Joined
from ..batches.sharded import sum_of_bits
from ..lazy_head import LazyLogits, values_of_tokens
from .token_losses import check_head_again

_SERVED = (
    "Served are slices of rows and tokens, log_softmax, softmax, logsumexp, gather, sum and mean over words, "
    "cross_entropy, and the mean of all. For other losses take hf_burst.token_losses or token_divergences."
)
Step = tuple[str, Callable[[Tensor], Tensor]]  # its name, and from scores of some tokens to others, `(m, vocabulary)`
Value = Callable[[Tensor, Tensor], Tensor]  # from these and the places of the tokens that were asked for to `(m,)`


class _NotByTokensError(BatchError):
    """An operation that takes more than the scores of one token."""


def writes(logits: Tensor | LazyLogits) -> tuple[int, ...]:
    """How often weights were written to with which logits are still to be computed; FSDP2's are looked at elsewhere."""
    weights = logits.head.module.parameters() if isinstance(logits, LazyLogits) else ()
    return tuple(weight._version for weight in weights if not isinstance(weight, DTensor))


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Stands for logits of all tokens, `(..., vocabulary)`. All ranks of the group ask it alike.

    Args:
        own (`torch.Tensor` or [`LazyLogits`] of shape `(batch, n, vocabulary)`): Those of this rank's tokens.
        layout ([`SequenceLayout`]): How the batch is cut.
        group ([`ContextGroup`]): Its ranks.
        joined ([`Joined`], *optional*): The texts that were joined, if any begin alike.
        places (`torch.LongTensor`): Which tokens of the batch it stands for: row * tokens + token.
        vocabulary (`int`): Words.
        about (`str`): Why they are not gathered.
        anchor (`torch.Tensor`): Scores of a token, by which DDP finds the weights that gradients are to come for.
        steps (tuple of `Step`): What is done with the scores of each token first.
        learns (`bool`, defaults to `True`): Whether gradients flow back.
        fits (`bool`, defaults to `False`): Whether they may be gathered for what is not computed where tokens lie.
        written (tuple of `int`): How often the weights of the head had been written to.
    """

    own: Tensor | LazyLogits
    layout: SequenceLayout
    group: ContextGroup
    joined: Joined | None
    places: Tensor
    vocabulary: int
    about: str
    anchor: Tensor
    steps: tuple[Step, ...] = ()
    learns: bool = True
    fits: bool = False
    written: tuple[int, ...] = ()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.places.shape, self.vocabulary))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.steps_on(torch.empty(0, self.vocabulary, dtype=self.own.dtype)).dtype

    @property
    def device(self) -> torch.device:
        return (self.own.hidden if isinstance(self.own, LazyLogits) else self.own).device

    def steps_on(self, scores: Tensor) -> Tensor:
        for _, step in self.steps:
            scores = step(scores)
        return scores

    def then(self, name: str, step: Callable[[Tensor], Tensor]) -> "DeferredLogits":
        return replace(self, steps=(*self.steps, (name, step)))

    def values(self, name: str, value: Value, words: Tensor | None = None, ignored: int | None = None) -> Tensor:
        """A value of each token, of the shape of `places`, on every rank; `words` are what it reads, one a token."""
        if isinstance(self.own, LazyLogits):  # a wrapper may have sharded it since
            check_head_again(self.own.head.module)
        self._agree(name, words, ignored)
        flat = self.places.flatten()
        if not len(flat):
            none = self.anchor if self.learns else self.anchor.detach()
            return (none.sum().nan_to_num(0.0, 0.0, 0.0) * 0).to(self.dtype).expand(self.places.shape)
        row, token = flat // (length := self._length), flat % length
        if self.joined is not None:
            token, row = self.joined.places.flatten()[flat], torch.zeros_like(flat)
        held = self.layout.indices(self.group.rank)
        local = torch.full((self.layout.length + 1,), -1, device="cpu")  # and one more, for padding of joined texts
        local[held] = torch.arange(len(held), device="cpu")
        local[-1] = 0 if self.group.rank == 0 else -1
        mine = (local[token] >= 0).nonzero().flatten()
        own = (
            mine if len(mine) else torch.zeros(1, dtype=torch.int64, device="cpu")
        )  # all ranks take part, so that weights learn
        padding = (token[own] < 0).to(self.device)
        source = (row[own] * len(held) + local[token[own]].clamp(min=0)).to(self.device)
        own = own.to(self.device)

        def of_some(scores: Tensor, part: slice) -> Tensor:
            with torch.autocast(scores.device.type, enabled=False):  # under it scores are returned in fp32
                shown = scores.float() if isinstance(self.own, LazyLogits) and self.own.autocast[0] else scores
                return value(self.steps_on(shown.masked_fill(padding[part, None], 0.0)), own[part])

        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns):
            found = values_of_tokens(self._rows(source), of_some, 2 + len(self.steps)).flatten()
            found = found if len(mine) else found.nan_to_num(0.0, 0.0, 0.0) * 0
            whole = found.new_zeros(len(flat)).index_copy(0, own, found)
            return group_sum(whole, self.group).view(self.places.shape)

    def whole(self, name: str) -> Tensor:
        """The logits themselves, on every rank, for an operation of this name; raises if they do not fit."""
        if not self.fits:
            self.refuse(name)
        if isinstance(self.own, LazyLogits):
            check_head_again(self.own.head.module)
        self._agree(name, None, None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns):
            own = self.own
            if isinstance(own, LazyLogits):
                casts, own = own.autocast[0], replace(own).whole  # anew: one without gradients stays
                own = own.float() if casts else own  # as values() has them
            every = gather_tokens(own, self.layout, self.group) if self.group.size > 1 else own
            every = every if self.joined is None else self.joined.restored(every)
            return self.steps_on(every.flatten(0, 1)[self.places.to(every.device)])

    def _agree(self, name: str, words: Tensor | None, ignored: int | None) -> None:
        """Raises on every rank if one asks for something else, or for a word that there is not."""
        error: BatchError | None = None
        if self.written != writes(self.own):
            error = BatchError(
                f"{name} was asked of logits behind an update of the head, by which they would be others. Read "
                "outputs.logits before the optimizer's step."
            )
        checksums = {"tokens whose logits are asked for (checksum)": sum_of_bits(self.places)}
        if words is not None:
            checksums["words whose logits are asked for (checksum)"] = sum_of_bits(words)
            outside = (words < 0) | (words >= self.vocabulary)
            wrong = words[outside if ignored is None else outside & (words != ignored)]
            if len(wrong):
                error = BatchError(
                    f"{name} was asked for the word {int(wrong[0])}, and there are those from 0 to "
                    f"{self.vocabulary - 1}. Labels of -100 take .clamp(min=0) before a gather, and no part in a sum."
                )
        asked = " of ".join([name, *(step for step, _ in reversed(self.steps)), str(tuple(self.shape))])
        self.group.agree({"logits are asked for": asked}, error, self.device, 0, checksums, doing=name)

    @property
    def _length(self) -> int:
        """Tokens of a row of the given batch."""
        return self.layout.length - self.layout.padding if self.joined is None else self.joined.places.shape[1]

    def _rows(self, source: Tensor) -> Tensor | LazyLogits:
        """The scores of some of this rank's tokens, `(1, m, vocabulary)`."""
        if isinstance(self.own, LazyLogits):
            return replace(self.own, hidden=self.own.hidden.flatten(0, 1).index_select(0, source)[None])
        return self.own.flatten(0, 1).index_select(0, source)[None]

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator["DeferredLogits"]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        keys = tuple(each.cpu() if isinstance(each, Tensor) else each for each in keys)
        masks = sum(each.ndim - 1 for each in keys if isinstance(each, Tensor) and each.dtype == torch.bool)
        if (
            any(each is Ellipsis for each in keys)
            or len(keys) + masks - sum(each is None for each in keys) == self.ndim
        ):
            if not isinstance(keys[-1], slice) or keys[-1] != slice(None):
                return self.whole("some words")[key]
            keys = keys[:-1]
        return replace(self, places=self.places[keys])

    def by_tokens(self, name: str, otherwise: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An operation where the tokens lie, or else of the logits themselves, if they fit."""
        try:
            return _METHODS[name](self, *args, **kwargs)
        except _NotByTokensError:
            if not self.fits:
                raise
        return otherwise(self.whole(name), *args, **kwargs)

    def __neg__(self) -> "DeferredLogits":
        return self.then("neg", torch.neg)

    def __truediv__(self, other: Any) -> Any:
        if not isinstance(other, int | float):
            return self.whole("a product with a tensor") / other
        return self.then(f"1/{float(other)!r}", lambda scores: scores / other)

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int | float):
            return self.whole("a product with a tensor") * other
        return self.then(f"{float(other)!r} times", lambda scores: scores * other)

    __rmul__ = __mul__

    def refuse(self, what: str) -> Any:
        raise _NotByTokensError(f"{self.about}, and {what} was asked of them. {_SERVED}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        if name in _FACTS:
            return getattr(self.anchor, name)
        if name not in _METHODS:
            return getattr(self.whole(name), name)
        return partial(self.by_tokens, name, getattr(Tensor, name))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(function, "__name__", str(function)), dict(kwargs or {})
        logits, *others = args or (given.pop("input", None),)
        if isinstance(logits, cls) and name in _METHODS:
            return logits.by_tokens(name, function, *others, **given)
        leaves, form = pytree.tree_flatten(
            (args, kwargs or {}), cls.is_one
        )  # they may be elsewhere among the arguments
        tensors, options = pytree.tree_unflatten(
            [each.whole(name) if cls.is_one(each) else each for each in leaves], form
        )
        return function(*tensors, **options)

    @classmethod
    def is_one(cls, value: Any) -> bool:
        return isinstance(value, cls)


for _operator in ("add", "radd", "sub", "rsub", "pow", "rtruediv", "abs", "gt", "ge", "lt", "le", "matmul"):
    _name = f"__{_operator}__"
    setattr(DeferredLogits, _name, lambda logits, *args, _name=_name: getattr(logits.whole(_name), _name)(*args))


def _over_words(logits: DeferredLogits, dim: Any, name: str) -> None:
    if dim not in (-1, logits.ndim - 1):
        logits.refuse(f"{name} over another dimension than that of words")


def _normalized(name: str) -> Callable[..., DeferredLogits]:
    function: Any = getattr(torch, name)

    def normalize(logits: DeferredLogits, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> DeferredLogits:
        _over_words(logits, dim, name)
        kind = _stacklevel if isinstance(_stacklevel, torch.dtype) else dtype  # where methods of tensors have it
        return logits.then(name, lambda scores: function(scores, -1, dtype=kind))

    return normalize


def _reduced(name: str) -> Callable[..., Tensor]:
    function: Any = getattr(torch, name)

    def reduce(logits: DeferredLogits, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        if dim is None and name == "mean":
            return logits.values(name, lambda scores, _: scores.mean(-1)).mean()
        _over_words(logits, dim, name)
        found = logits.values(name, lambda scores, _: function(scores, dim=-1, **options))
        return found.unsqueeze(-1) if keepdim else found

    return reduce


def _gather(logits: DeferredLogits, dim: Any, index: Tensor) -> Tensor:
    _over_words(logits, dim, "gather")
    if index.shape != (*logits.places.shape, 1):
        logits.refuse(f"gather with an index of shape {tuple(index.shape)}")
    words = index.flatten()
    return logits.values("gather", lambda scores, at: scores.gather(-1, words[at][:, None])[:, 0], words)[..., None]


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    if weight is not None or target.shape != logits.places.shape or target.ndim != 1 or target.is_floating_point():
        logits.refuse("cross_entropy of other than (tokens, vocabulary) and labels (tokens,), or with weights of words")
    options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
    losses = logits.values(
        f"cross_entropy with label_smoothing={label_smoothing!r}",
        lambda scores, at: functional.cross_entropy(scores, target[at], **options),
        target,
        ignore_index,
    )
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


def _reshaped(logits: DeferredLogits, *shape: Any) -> DeferredLogits:
    sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if sizes[-1] != logits.vocabulary:
        logits.refuse(f"a shape of {tuple(sizes)}, which mixes words and tokens,")
    return replace(logits, places=logits.places.reshape(sizes[:-1]))


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits:
    return logits.then("to", lambda scores: scores.to(*args, **kwargs))


def _size(logits: DeferredLogits, dim: int | None = None) -> Any:
    return logits.shape if dim is None else logits.shape[dim]


_FACTS = ("requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta")
_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _normalized(name) for name in ("log_softmax", "softmax")},
    **{name: _reduced(name) for name in ("logsumexp", "sum", "mean")},
    **dict.fromkeys(("view", "reshape"), _reshaped),
    "gather": _gather,
    "cross_entropy": _cross_entropy,
    "contiguous": lambda logits: logits,
    "detach": lambda logits: replace(logits, learns=False),
    "to": _to,
    "float": lambda logits: _to(logits, torch.float32),
    "neg": lambda logits: -logits,
    "size": _size,
    "dim": lambda logits: logits.ndim,
    "numel": lambda logits: logits.shape.numel(),
    "element_size": lambda logits: logits.dtype.itemsize,
    "is_floating_point": lambda logits: True,
    "stride": lambda logits, dim: 0,  # it lies nowhere
}

# FSDP2 finds the tensors that a module returns this way, and learns from their gradients when the backward pass begins
pytree.register_pytree_node(
    DeferredLogits,
    lambda logits: ([logits.own], logits),
    lambda children, logits: replace(logits, own=next(iter(children))),
)
