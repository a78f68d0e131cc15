"""The state of one answer over ranks, and what happens to keys in each of its phases.

Filling     reads the prompt: each rank keeps the keys of its own tokens
Stepping    reads new tokens, which every rank computes: rank i mod ranks stores token i
Fixed       reads one new token, with tensors at the same addresses in every step
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ..attention.shared_keys import Exchange, Expand, Keys, attend_to_shared, exchanged
from ..errors import BatchError, UnsupportedModelError
from ..kernels import Scores
from ..layers.surroundings import instead
from ..plan import MaskPattern
from ..ranks.collectives import group_sum
from ..ranks.group import ContextGroup
from ..ranks.layout import SequenceLayout

_ROOM = 64  # tokens that a layer first allocates


@dataclass(frozen=True)
class Filling:
    """The pass that reads the prompts, one per row. Each rank computes, and keeps, its part of the tokens."""

    rows: int
    length: int  # tokens in each, padding included
    positions: Tensor  # of the tokens on this rank, -1 for padding, `(rows or 1, n)`
    starts: tuple[int, ...] = (0,)  # padding tokens of each row; one for all if there is none
    layout: SequenceLayout | None = None  # `None` for a document that was read before

    @classmethod
    def of(cls, layout: SequenceLayout, rank: int, device: torch.device) -> "Filling":
        """Returns the prompts of a batch that is laid over the ranks."""
        own, length = layout.indices(rank), layout.length - layout.padding
        assert bool((own.diff() > 0).all()), "what fills the last chunk stands last on its rank"
        starts = tuple(start for start, _ in layout.real)
        starts = starts if any(starts) else (0,)
        own = own[own < length] - torch.tensor(starts, device="cpu")[:, None]
        return cls(layout.batch_size, length, own.clamp(min=-1).to(device), starts, layout)

    def take(self, layer: "ShardedLayer", keys: Tensor, values: Tensor) -> None:
        """Stores the keys of this rank's tokens."""
        own = self.positions.shape[1]  # without the tokens that fill the last chunk
        keys, values = keys[:, :, :own].contiguous(), values[:, :, :own].contiguous()
        layer.document = Keys(keys, values, self.positions, before=not any(self.starts))

    def free(self, layer: "ShardedLayer", pattern: MaskPattern) -> None:
        """Frees the keys of a layer that no later token will see."""
        held, longest = layer.document, min(self.starts)
        first = min(self._first_seen(start, pattern) for start in self.starts)
        if held is None or first <= longest:
            return
        seen = held.positions[self.starts.index(longest)] >= first - longest
        if not bool(seen.all()):
            kept = seen.nonzero().flatten()
            keys, values = (part.index_select(2, kept) for part in (held.keys, held.values))
            layer.document = Keys(keys, values, held.positions[:, kept], held.before)

    def _first_seen(self, start: int, pattern: MaskPattern) -> int:
        """Returns the first token that a later one may see in a row with so much padding."""
        seen = start if pattern.window is None else max(start, self.length - pattern.window)
        chunk = pattern.attention_chunk_size
        return seen if chunk is None else max(seen, self.length - (self.length - start) % chunk)

    def last(self, inputs: Tensor, size: int, group: ContextGroup) -> Tensor:
        """Returns the last `size` inputs `(batch, channels, size)` of rows spread over the ranks, on every rank, with
        zeros before the first token."""
        assert self.layout is not None, "documents have no states"
        places = self.layout.indices(group.rank) - (self.length - size)
        own = ((places >= 0) & (places < size)).nonzero().flatten()
        part = inputs.new_zeros(*inputs.shape[:2], size)
        part[..., places[own].to(inputs.device)] = inputs[..., own.to(inputs.device)]
        return group_sum(part, group)  # only one rank is nonzero at each place


class _Lent(int):
    """A length given to a model, recognized by its identity."""


@dataclass
class Answer:
    """The state that all layers of a sharded cache share."""

    group: ContextGroup
    prompt: Filling | None = None  # set when its pass begins
    new: Tensor | None = None  # positions of the tokens after the prompt, `(batch, n)`
    unpadded: bool = True  # whether none of these is padding
    phase: "Filling | Stepping | None" = None  # the pass that is under way, or that failed

    def lend(self, length: int) -> int:
        """Returns a length to be given to a model. A step at fixed places records it."""
        if not isinstance(self.phase, Fixed):
            return length
        self.phase.lent.append(_Lent(length))
        return self.phase.lent[-1]

    def hand_back(self, values: Iterable[Any]) -> None:
        """Forgets lengths that went into a mask, because masks use token positions instead."""
        if isinstance(self.phase, Fixed):
            known = set(map(id, values))
            self.phase.lent = [length for length in self.phase.lent if id(length) not in known]

    def own(self, count: int) -> int:
        """Returns how many of `count` new tokens this rank stores."""
        return len(range(self.group.rank, count, self.group.size))


class ShardedLayer(LinearAttentionLayer, CacheLayerMixin):
    """What a rank stores of one layer: its keys, and the states of a recurrent one, which are equal on all ranks."""

    is_sliding = is_compileable = is_croppable = False

    def __init__(self, answer: Answer, convolutions: int = 1, document: Keys | None = None) -> None:
        CacheLayerMixin.__init__(self)
        LinearAttentionLayer.__init__(self, convolutions)
        self.answer, self.document = answer, document
        self.keys: Tensor | None = None  # of new tokens, with spare room
        self.values: Tensor | None = None
        self.count = 0  # new tokens on all ranks
        self._latest: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of this rank's part of the prompt, or of new tokens, and returns only these."""
        self._latest = weakref.ref(key_states), weakref.ref(value_states)
        assert self.answer.phase is not None, "a pass is under way"
        # under autocast or peft, norms may leave keys in fp32
        self.answer.phase.take(self, key_states.to(value_states.dtype), value_states)
        return key_states, value_states

    def returned(self, keys: Tensor, values: Tensor) -> bool:
        """Returns whether these are the keys and values of the latest update."""
        return self._latest is not None and self._latest[0]() is keys and self._latest[1]() is values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.answer.lend(self.length + query_length), 0

    def get_seq_length(self) -> int:
        return self.answer.lend(self.length)

    @property
    def length(self) -> int:
        """Number of tokens stored on all ranks."""
        prompt = self.answer.prompt
        return self.count + (0 if self.document is None or prompt is None else prompt.length)

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders new tokens and states only, because beams of a row share its prompt."""
        own = self.answer.own(self.count)
        if own and self.keys is not None and self.values is not None:
            for part in (self.keys, self.values):
                part[:, :, :own] = part[:, :, :own].index_select(0, beam_idx.to(part.device))
        for state in self.state_tensors:
            state.copy_(state.index_select(0, beam_idx.to(state.device)))

    @property
    def state_tensors(self) -> list[Tensor]:
        states = (*self.conv_states.values(), *self.recurrent_states.values())
        return [state for state in states if state is not None]

    @property
    def room(self) -> int:
        """Number of new tokens that fit on this rank."""
        return 0 if self.keys is None else self.keys.shape[2] - 1

    @property
    def places(self) -> tuple[tuple[Any, ...], ...]:
        """Addresses and shapes of its tensors."""
        document = () if self.document is None else (self.document.keys, self.document.values, self.document.positions)
        held = (self.keys, self.values, *document, *self.state_tensors)
        return tuple((part.data_ptr(), part.shape) for part in held if part is not None)


def layer_of(
    layers: Sequence[ShardedLayer], module: Any, keys: Tensor, values: Tensor
) -> tuple[ShardedLayer, Expand | None]:
    """Returns the layer that an attention module got keys from, and the function that expands them if they are latent.

    Raises:
        UnsupportedModelError: If no layer returned these keys.
    """
    index = getattr(module, "layer_idx", None)
    own = [layers[index]] if isinstance(index, int) and index < len(layers) else []
    found = next((layer for layer in (*own, *layers) if layer.returned(keys, values)), None)
    if found is not None:
        return found, None
    if own and hasattr(module, "expand_kv"):
        return own[0], module.expand_kv
    raise UnsupportedModelError(
        f"{type(module).__name__} changes the keys or values that its cache returned, in a way that is not known. "
        "Generation over ranks is not served for it; model.generate holds the whole prompt on each rank."
    )


@dataclass
class Stepping:
    """A pass over new tokens, which every rank computes."""

    answer: Answer  # already includes these tokens
    layers: list[ShardedLayer]
    positions: Tensor  # of the new tokens, `(batch, n)`
    exchange: Exchange = exchanged  # combines the partial attentions of all ranks

    def take(self, layer: ShardedLayer, keys: Tensor, values: Tensor) -> None:
        """Stores the keys of the new tokens that belong to this rank."""
        group = self.answer.group
        first = (group.rank - layer.count) % group.size
        before = self.answer.own(layer.count)
        layer.count += keys.shape[2]
        after = self.answer.own(layer.count)
        layer.keys = _with_room(layer.keys, keys, before, after)
        layer.values = _with_room(layer.values, values, before, after)
        if after > before:
            layer.keys[:, :, before:after] = keys[:, :, first :: group.size]
            layer.values[:, :, before:after] = values[:, :, first :: group.size]

    def attend(
        self,
        module: nn.Module,
        states: tuple[Tensor, Tensor, Tensor],
        pattern: MaskPattern,
        scores: Scores,
        sinks: Tensor | None,
    ) -> Tensor:
        """Returns the attention of new queries over the keys of the prompt and of new tokens on all ranks."""
        query, key, value = states
        if any(state.requires_grad for state in states):
            raise BatchError("Tokens behind a cache over ranks have no gradient. Call the model in torch.no_grad().")
        layer, expand = layer_of(self.layers, module, key, value)
        held = [] if layer.document is None else [replace(layer.document, expand=expand)]
        if layer.count and layer.keys is not None and layer.values is not None:
            held.append(self._new(layer, layer.keys, layer.values, expand))
        masked = self.positions, held, pattern, scores, sinks
        return attend_to_shared(query.to(value.dtype), *masked, self.answer.group, value.shape[-1], self.exchange)

    def _new(self, layer: ShardedLayer, keys: Tensor, values: Tensor, expand: Expand | None) -> Keys:
        """Returns the keys of new tokens on this rank."""
        assert self.answer.new is not None, "there are new tokens"
        own = self.answer.own(layer.count)
        group = self.answer.group
        positions = self.answer.new[:, group.rank :: group.size][:, :own]
        seen = self.answer.unpadded and self.positions.shape[1] == 1  # the only query sees all of them
        return Keys(keys[:, :, :own], values[:, :, :own], positions, seen, expand)


@dataclass
class Fixed(Stepping):
    """A step of one token whose tensors keep their addresses, so that a recording of it can be replayed. What differs
    between steps is in these tensors: no shape and no Python number changes."""

    place: Tensor = field(kw_only=True)  # where layers write the token's key; the last place if another rank stores it
    held: Tensor = field(kw_only=True)  # positions of this rank's new keys, -1 for none, `(batch, places)`
    lent: list[int] = field(default_factory=list)  # lengths that no mask handed back: the model computes with them

    def move(self) -> bool:
        """Moves to the latest token of the answer, and returns whether there was room for it."""
        new = self.answer.new
        assert new is not None, "there is a new token"
        group = self.answer.group
        other = self.held.shape[1] - 1
        own = new[:, group.rank :: group.size]
        last = new.shape[1] - 1
        if own.shape[1] > other:
            return False
        self.positions.copy_(new[:, last:])
        self.place.fill_(last // group.size if last % group.size == group.rank else other)
        self.held.fill_(-1)
        self.held[:, : own.shape[1]] = own
        return True

    @contextmanager
    def entered(self, exchange: Exchange) -> Iterator[None]:
        """Makes layers write keys at these places, without counting them."""
        self.exchange = exchange
        with instead(self, "phase", self.answer):
            yield

    def take(self, layer: ShardedLayer, keys: Tensor, values: Tensor) -> None:
        """Writes the token's key at its place."""
        assert layer.keys is not None, "earlier steps have made room"
        assert layer.values is not None
        layer.keys.index_copy_(2, self.place, keys)
        layer.values.index_copy_(2, self.place, values)

    def _new(self, layer: ShardedLayer, keys: Tensor, values: Tensor, expand: Expand | None) -> Keys:
        return Keys(keys, values, self.held, expand=expand)

    def count(self) -> None:
        """Adds the token to the counts of its layers, after the step."""
        for layer in self.layers:
            layer.count += layer.keys is not None


def _with_room(room: Tensor | None, new: Tensor, before: int, after: int) -> Tensor:
    """Returns `room` if it holds `after` tokens and one more, else a tensor twice as large with the first `before` of
    `room`."""
    if room is not None and after < room.shape[2]:
        return room
    rows, heads, _, size = new.shape
    larger = new.new_zeros(rows, heads, max(_ROOM, 2 * after) + 1, size)  # zeros, because masks do not hide NaN
    if room is not None:
        larger[:, :, :before] = room[:, :, :before]
    return larger
