"""Hidden states of a rank's tokens that stand for those of the whole batch, behind a decoder or encoder.

What a head computes token by token is computed for this rank's tokens; whatever else it does meets what is gathered. So
a classifier's own pooling and loss run on the whole batch, and a score of few labels a token is all that is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ...errors import BatchError, ConfigError, UnsupportedModelError
from ...layers.loss import IGNORE_INDEX
from ...numerics import accumulation_dtype
from ...ranks.collectives import gather_kept, gather_tokens, group_sum
from ...ranks.group import ContextGroup
from ...ranks.layout import SequenceLayout
from ..forward_pass import Agreement, Batch, Call, ForwardPass
from ..lazy_head import is_partitioned
from ..models.cut_point import reader_of
from ..view import ModelView
from .base import Handles, Part
from .dropout import DropoutStreams

# functions of a token that give no token what another one holds, for tensors whose last dimension is not that of tokens
_BY_TOKEN = {
    *(functional.linear, functional.dropout, functional.layer_norm, functional.gelu, functional.relu, functional.silu),
    *(functional.tanh, torch.relu, torch.tanh, torch.nn.functional.rms_norm),
}
_METHODS = ("to", "float", "contiguous", "clone")
_EACH_TOKEN = "ForTokenClassification"  # in names of classes that judge each token
_SPAN = "ForQuestionAnswering"  # of those that choose among all tokens
POOLINGS = ("first", "last", "mean")  # of embeddings


@dataclass
class ShardedStates:
    """Values of this rank's tokens, `(batch, n, ...)`, in the place of those of all tokens, `(batch, tokens, ...)`."""

    own: Tensor
    layout: SequenceLayout
    group: ContextGroup
    share: Callable[[], None]  # is called before anything follows from the whole batch

    __iter__ = None  # a tensor that is asked for it is gathered by name

    @cached_property
    def whole(self) -> Tensor:
        self.share()
        return gather_tokens(self.own, self.layout, self.group).contiguous()

    @property
    def shape(self) -> torch.Size:
        rows, _, *width = self.own.shape
        return torch.Size((rows, self.layout.length - self.layout.padding, *width))

    @property
    def dtype(self) -> torch.dtype:
        return self.own.dtype

    @property
    def device(self) -> torch.device:
        return self.own.device

    def then(self, own: Tensor) -> "ShardedStates":
        return ShardedStates(own, self.layout, self.group, self.share)

    def __getitem__(self, key: Any) -> Tensor:
        if isinstance(key, tuple) and len(key) == 2 and key[0] == slice(None) and type(key[1]) is int:
            return self._token(range(self.shape[1])[key[1]])  # or an IndexError, as of a tensor
        return self.whole[key]

    def _token(self, token: int) -> Tensor:
        """The values of one token of every row, `(batch, ...)`, which its owner sends."""
        self.share()
        tokens = [self.layout.indices(rank).tolist() for rank in range(self.group.size)]
        kept = [(0,) if token in held else () for held in tokens]
        held = tokens[self.group.rank]
        own = self.own[:, held.index(token)][:, None] if token in held else self.own[:, :0]
        return gather_kept(own, kept, self.group)[:, 0]

    def __mul__(self, other: Any) -> Tensor:
        return self.whole * other

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Tensor:
        return self.whole + other

    __radd__ = __add__

    def __truediv__(self, other: Any) -> Tensor:
        return self.whole / other

    def __getattr__(self, name: str) -> Any:
        if name in ("own", "layout", "group", "share") or name.startswith("__"):
            raise AttributeError(name)  # of a copy that is being made, or of what is no tensor
        if name in _METHODS:
            return lambda *args, **kwargs: self.then(getattr(self.own, name)(*args, **kwargs))
        return getattr(self.whole, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _BY_TOKEN and isinstance(args[0], cls):
            return args[0].then(function(args[0].own, *args[1:], **kwargs))
        leaves, form = pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, cls))
        tensors, options = pytree.tree_unflatten([whole(leaf) for leaf in leaves], form)
        return function(*tensors, **options)


# FSDP2 finds the tensors that a module returns this way, and learns from their gradients when the backward pass begins
pytree.register_pytree_node(
    ShardedStates,
    lambda states: ([states.own], (states.layout, states.group, states.share)),
    lambda children, context: ShardedStates(next(iter(children)), *context),
)


def _judges(model: PreTrainedModel) -> str:
    """The names of a model's class and of those that it is made from, which say what its head judges."""
    return " ".join(base.__name__ for base in type(model).__mro__)


def whole(value: Any) -> Any:
    """The values of the whole batch, if these are of one rank."""
    return value.whole if isinstance(value, ShardedStates) else value


def documents_in(layout: SequenceLayout) -> list[tuple[int, ...]]:
    """The boundaries of the documents of each row, without its padding."""
    real = layout.real or ((0, layout.length - layout.padding),) * layout.batch_size
    return [
        (start, *(cut for cut in bounds if start < cut < stop), stop)
        for (start, stop), bounds in zip(real, layout.documents, strict=True)
    ]


def vectors_of_documents(states: ShardedStates, pooling: str) -> Tensor:
    """The sum over ranks of what their own tokens add to a vector of each document, `(documents, width)`, row by row:
    the state of its first or its last token, or the mean of all."""
    layout, wide = states.layout, accumulation_dtype(states.dtype)
    tokens = layout.indices(states.group.rank)
    chosen, owners, sizes = list[Tensor](), list[Tensor](), list[Tensor]()
    for row, cuts in enumerate(documents_in(layout)):
        bounds = torch.tensor(cuts, device="cpu")  # as the indices
        number = torch.bucketize(tokens, bounds, right=True) - 1
        inside = (number >= 0) & (number < len(bounds) - 1)
        number = number.clamp(0, len(bounds) - 2)
        if pooling != "mean":
            inside &= tokens == (bounds[number] if pooling == "first" else bounds[number + 1] - 1)
        chosen.append(inside.nonzero()[:, 0] + row * len(tokens))
        owners.append(number[inside] + sum(map(len, sizes)))
        sizes.append(bounds.diff())
    counts = torch.cat(sizes).to(states.device, wide)
    places, documents = torch.cat(chosen).to(states.device), torch.cat(owners).to(states.device)
    states.share()
    with torch.autocast(states.device.type, enabled=False):  # sums are wide
        own = states.own.flatten(0, 1).index_select(0, places).to(wide)
        total = own.new_zeros(len(counts), own.shape[-1]).index_add(0, documents, own)
        return group_sum(total / counts[:, None] if pooling == "mean" else total, states.group)


class States(Part):
    """For models without a language-model head: puts [`ShardedStates`] where the decoder or encoder returns its hidden
    states, and before its pooler."""

    def __init__(self, streams: DropoutStreams) -> None:
        self.streams = streams
        self.run: ForwardPass | None = None
        self.pooled = False  # whether the pooler was given the whole batch in this pass

    def look(self, view: ModelView) -> Handles:
        reader = reader_of(view).root
        pooler = getattr(reader, "pooler", None)
        handles = []
        if reader is not view.root:
            handles.append(reader.register_forward_hook(self._returned))
        if isinstance(pooler, nn.Module):
            handles.append(pooler.register_forward_pre_hook(self._pooled))
        return handles

    def check(self, call: Call, batch: Batch, agreement: Agreement) -> None:
        agreement.add("pooling of embeddings", call.pooling)
        if call.pooling is not None:
            self._check_documents(call, batch, call.pooling)
            return
        if not call.task.reads:
            return
        name, given, judges = type(call.model).__name__, batch.given, _judges(call.model)
        layout, labels = batch.layout, given.get("labels")
        pools = reader_of(call.view) is not call.view and _EACH_TOKEN not in judges
        if pools and any(len(bounds) > 2 for bounds in documents_in(layout)):
            raise BatchError(
                f"The batch packs documents, and {name} judges a row as one. Give every document a row of its own "
                "(packing=False, no DataCollatorWithFlattening)."
            )
        if batch.sharded:
            raise BatchError(f"{name} needs the labels of whole rows. Give full batches (no BurstCollator).")
        if call.group.size > 1 and is_partitioned(call.model):
            raise UnsupportedModelError(
                f"{name} has no language-model head, and such models are not served over DeepSpeed ZeRO-3, which "
                "divides the weights of a head. Use FSDP2, DDP or ZeRO-2."
            )
        mask = given.get("attention_mask")
        if layout.real and mask is not None:
            self._check_padding(call, name, mask, labels)

    def _check_documents(self, call: Call, batch: Batch, pooling: str) -> None:
        """Raises for what has no embedding of each document."""
        name, lengths = type(call.model).__name__, batch.given.get("cu_seq_lens_q")
        if pooling not in POOLINGS:
            raise ConfigError(f"embeddings was given pooling={pooling!r}; it is one of {POOLINGS}.")
        if not call.task.reads and call.model.base_model is call.model:
            raise UnsupportedModelError(
                f"{name} has a head and no base model, of whose hidden states embeddings are made. Load the model by "
                "AutoModel.from_pretrained."
            )
        if batch.layout.parents:
            raise BatchError(
                "The texts of the batch were joined when it was sharded, so that their tokens stand for several. Leave "
                "share_prefixes=True out of the config of BurstCollator, or give full batches."
            )
        if lengths is not None and (torch.as_tensor(lengths).flatten().diff() == 0).any():
            raise BatchError(
                "cu_seq_lens_q has a document of no tokens, which has no embedding. Drop empty texts from the batch."
            )
        if call.group.size > 1 and is_partitioned(call.model):
            raise UnsupportedModelError("Embeddings are not served over DeepSpeed ZeRO-3. Use FSDP2, DDP or ZeRO-2.")

    def _check_padding(self, call: Call, name: str, mask: Tensor, labels: Any) -> None:
        """Raises where a result follows from the states of padding, which sees other tokens than unpatched."""
        judges = _judges(call.model)
        if _SPAN in judges:
            raise BatchError(
                f"{name} chooses among all tokens, those of padding too, whose states differ from those of an "
                "unpatched model. Give rows of one length, such as one row a batch, without padding."
            )
        if _EACH_TOKEN in judges:
            counted = labels is not None and ((labels != IGNORE_INDEX) & (mask == 0)).any()
            if counted:
                raise BatchError(
                    f"Tokens of padding that attention_mask hides have labels. Set them to {IGNORE_INDEX}."
                )
            return
        config, ids = call.model.config.get_text_config(), call.given.get("input_ids")
        if call.task.causal and reader_of(call.view) is not call.view:
            pad, last = config.pad_token_id, torch.arange(mask.shape[1], device=mask.device)
            seen = torch.ones_like(mask) if pad is None or ids is None else (ids != pad).to(mask)
            judged = (last * seen).argmax(-1)
            if not mask.gather(1, judged[:, None].to(mask.device)).all():
                raise BatchError(
                    f"{name} judges the last token that is not config.pad_token_id ({pad}), and attention_mask hides "
                    "it. Pad with this token, or set config.pad_token_id to the token that pads."
                )
        elif not call.task.causal and getattr(config, "classifier_pooling", "cls") != "mean":
            reads_first = reader_of(call.view) is not call.view or getattr(call.model, "pooler", None) is not None
            if reads_first and not mask[:, 0].all():
                raise BatchError(f"{name} judges the first token of a row, which is padding. Pad on the right.")

    def begin(self, run: ForwardPass) -> None:
        self.run, self.pooled = run if run.call.task.reads else None, False

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        if self.run is not None and reader_of(run.call.view) is run.call.view:
            self._check_pooled(run.model, outputs.get("pooler_output"))
            outputs["last_hidden_state"] = self._standing_for_all(outputs["last_hidden_state"])
        if run.call.pooling:
            outputs.pop("hidden_states", None)  # would be gathered
            states = outputs["last_hidden_state"]
            if isinstance(states, Tensor):  # of a model with a language-model head
                states = ShardedStates(states, run.batch.layout, run.group, self.streams.share)
            outputs["last_hidden_state"] = vectors_of_documents(states, run.call.pooling)

    def end(self) -> None:
        self.run = None

    def _standing_for_all(self, states: Any) -> Any:
        if self.run is None or not isinstance(states, Tensor):
            return states
        return ShardedStates(states, self.run.batch.layout, self.run.group, self.streams.share)

    def _returned(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.run is None:
            return output
        if isinstance(output, tuple):
            self._check_pooled(module, output[1] if getattr(module, "pooler", None) is not None else None)
            return (self._standing_for_all(output[0]), *output[1:])
        self._check_pooled(module, output.get("pooler_output"))
        output["last_hidden_state"] = self._standing_for_all(output["last_hidden_state"])
        return output

    def _pooled(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if self.run is None or not args or args[0].ndim != 3:
            return None  # which is noticed, if anything comes of it
        self.pooled = True
        return (self._standing_for_all(args[0]), *args[1:])

    def _check_pooled(self, module: nn.Module, pooled: Any) -> None:
        """Raises for an output that follows from a token, or from all, and was not given those of the whole batch."""
        if pooled is not None and not self.pooled:
            raise UnsupportedModelError(
                f"{type(module).__name__} pools tokens by no module that is called with those of all ranks. It is not "
                "served with its pooler: make it with add_pooling_layer=False, or take a class that judges tokens."
            )
