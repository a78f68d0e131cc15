"""A Transformers `Cache` whose keys and values lie on the ranks that computed them. Lengths are those of the sequence.

    prompt      each rank keeps the keys of its own tokens, as the prompt was cut over the ranks
    new tokens  every rank computes their keys, and they are dealt out one by one: token i lies on rank i mod ranks

Beams, return sequences and questions share the keys of one prompt, which are kept once.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ..attention.shared_keys import Expand, Keys
from ..errors import BatchError, UnsupportedModelError
from ..plan import MaskPattern
from ..ranks.group import ContextGroup
from ..ranks.layout import SequenceLayout
from .cached_tokens import CachedTokens, FixedStep
from .row_states import RowStates

_ROOM = 64  # tokens for which a layer makes room at first
_FROM_LAYERS = not hasattr(Cache, "get_conv_state")  # whether models take states from layers, as with Transformers 5.17


class ShardedLayer(CacheLayerMixin):
    """What a rank holds of one layer."""

    is_sliding = False
    is_croppable = True
    record_past = False  # asked where models take states from layers

    def __init__(self, tokens: CachedTokens) -> None:
        super().__init__()
        self.tokens = tokens
        self.document: Keys | None = None
        self.keys: Tensor | None = None  # of new tokens, with room for more
        self.values: Tensor | None = None
        self.count = 0  # new tokens, on all ranks
        self.read = False  # whether the layer has read the prompt
        self._latest: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes up the keys and values of this rank's part of the prompt, or of new tokens, and returns these alone."""
        self.lazy_initialization(key_states, value_states)
        self._latest = weakref.ref(key_states), weakref.ref(value_states)
        keys = key_states.to(value_states.dtype)  # under autocast or peft, norms may leave them in fp32
        (self._fill if self.tokens.filling else self._append)(keys, value_states)
        return key_states, value_states

    def returned(self, keys: Tensor, values: Tensor) -> bool:
        """Whether these are the keys and values of the latest update."""
        return self._latest is not None and self._latest[0]() is keys and self._latest[1]() is values

    def keep(self, pattern: MaskPattern) -> None:
        """Frees the keys of the prompt that no later token will see."""
        held, tokens = self.document, self.tokens
        first = tokens.first_seen(pattern)
        if held is None or tokens.whole or first <= min(tokens.starts or (0,)):
            return
        longest = min(tokens.starts or (0,))
        row = tokens.starts.index(longest) if tokens.starts else 0
        seen = held.positions[row] >= first - longest
        if not bool(seen.all()):
            kept = seen.nonzero().flatten()
            keys, values = (part.index_select(2, kept) for part in (held.keys, held.values))
            self.document = Keys(keys, values, held.positions[:, kept], held.before)

    def held(self, expand: Expand | None) -> list[Keys]:
        """All keys of this rank: those of the prompt, and those of new tokens, if there are any on some rank."""
        parts = []
        if self.document is not None:
            known = self.document
            parts.append(Keys(known.keys, known.values, known.positions, known.before, expand))
        own, fixed = self._own(self.count), self.tokens.fixed
        if self.count:
            assert self.keys is not None, "there are new tokens"
            assert self.values is not None, "there are new tokens"
            assert self.tokens.new is not None, "there are new tokens"
            if fixed is not None:
                return [*parts, Keys(self.keys, self.values, fixed.positions, expand=expand)]
            group = self.tokens.group
            positions = self.tokens.new[:, group.rank :: group.size][:, :own]
            seen = self.tokens.unpadded and self.tokens.latest == 1  # all, by the only query
            parts.append(Keys(self.keys[:, :, :own], self.values[:, :, :own], positions, seen, expand))
        return parts

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.tokens.note_question()
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        self.tokens.note_question()
        return self.length

    @property
    def length(self) -> int:
        """Tokens that it has taken up."""
        return (self.tokens.length if self.read else 0) + self.count

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.document, self.keys, self.values, self.count, self.read = None, None, None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; a negative number, as in Transformers. Only with one prompt may it reach into it, of
        which guesses of a prompt lookup are read."""
        rest = -tokens_to_remove - self.count
        self.count += min(0, max(tokens_to_remove, -self.count))
        if rest > 0 and self.document is not None:
            if not self.tokens.whole:
                raise BatchError(
                    f"crop({tokens_to_remove}) would remove tokens of the prompt. Read the shorter prompt anew."
                )
            held, stop = self.document, int(self.tokens.shown[0, 0]) - rest
            kept = int((held.positions[0] < stop).sum())  # they rise
            keys, values = held.keys[:, :, :kept].contiguous(), held.values[:, :, :kept].contiguous()
            self.document = Keys(keys, values, held.positions[:, :kept], held.before)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams of a row share its prompt, so only new tokens move."""
        own = self._own(self.count)
        if own and self.keys is not None and self.values is not None:
            for part in (self.keys, self.values):
                part[:, :, :own] = part[:, :, :own].index_select(0, beam_idx.to(part.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (part.repeat_interleave(repeats, 0) for part in (self.keys, self.values))

    def batch_select_indices(self, indices: Tensor) -> None:
        raise UnsupportedModelError(
            "Rows cannot be taken out of a cache over ranks, since they share the keys of a prompt. Generate for the "
            "rows that you need."
        )

    def _fill(self, keys: Tensor, values: Tensor) -> None:
        own = self.tokens.own.shape[1]  # without the tokens that fill the last chunk
        keys, values = keys[:, :, :own].contiguous(), values[:, :, :own].contiguous()
        self.document = Keys(keys, values, self.tokens.own, not any(self.tokens.starts))
        self.read = True

    @property
    def room(self) -> int:
        """New tokens for which this rank has room."""
        return 0 if self.keys is None else self.keys.shape[2] - 1

    @property
    def places(self) -> tuple[tuple[Any, ...], ...]:
        """Where its tensors lie in memory, and their shapes."""
        document = () if self.document is None else (self.document.keys, self.document.values, self.document.positions)
        return tuple((part.data_ptr(), part.shape) for part in (self.keys, self.values, *document) if part is not None)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        fixed = self.tokens.fixed
        if fixed is not None and self.keys is not None and self.values is not None:
            self.keys.index_copy_(2, fixed.place, keys)
            self.values.index_copy_(2, fixed.place, values)
            fixed.layers.append(self)
            return
        group, new = self.tokens.group, keys.shape[2]
        before, after = self._own(self.count), self._own(self.count + new)
        first = (group.rank - self.count) % group.size
        self.count += new
        self.keys = _with_room(self.keys, keys, before, after)
        self.values = _with_room(self.values, values, before, after)
        if after > before:
            self.keys[:, :, before:after] = keys[:, :, first :: group.size]
            self.values[:, :, before:after] = values[:, :, first :: group.size]

    def _own(self, count: int) -> int:
        """How many of so many new tokens lie on this rank."""
        return len(range(self.tokens.group.rank, count, self.tokens.group.size))


class ShardedCache(Cache):
    """Keys and values of a model over the ranks of a group.

    Args:
        group ([`ContextGroup`]): The ranks.
        copies (`int`, defaults to 1): How often each prompt stands in the batch: rows that follow each other.
        convolutions (`int`, defaults to 1): Most convolutions of a layer that carry a state.
    """

    def __init__(self, group: ContextGroup, copies: int = 1, convolutions: int = 1) -> None:
        self.tokens, self.copies = CachedTokens(group), copies
        self.states = RowStates(convolutions)
        self.failed = False  # whether a pass has ended in its middle
        self.compares = False  # whether who chooses the tokens has compared those of all ranks
        layer: Any = partial(ShardedLayer, self.tokens)  # made when it first comes
        self.layers: list[Any]
        super().__init__(layer_class_to_replicate=layer)

    @classmethod
    def of_document(cls, group: ContextGroup, length: int, layers: Sequence[Keys | None]) -> "ShardedCache":
        """A cache that begins with a document of so many tokens, which this rank holds a part of."""
        cache = cls(group)
        cache.tokens.length = length
        cache.tokens.own = next(keys.positions for keys in layers if keys is not None)
        for document in layers:
            layer = ShardedLayer(cache.tokens)
            layer.document, layer.read, layer.is_initialized = document, True, True
            cache.layers.append(layer)
        return cache

    @property
    def is_read(self) -> bool:
        """Whether it holds a prompt."""
        return self.tokens.length > 0 and not self.tokens.filling

    def begin_prompt(self, layout: SequenceLayout, device: torch.device) -> None:
        """Before the pass that reads the prompt, of which each rank computes its part."""
        tokens = self.tokens
        tokens.rows, self.states.layout = layout.batch_size, layout
        tokens.length, tokens.filling = layout.length - layout.padding, True
        starts = tuple(start for start, _ in layout.real)
        tokens.starts = starts if any(starts) else ()
        own = layout.indices(tokens.group.rank)
        assert bool((own.diff() > 0).all()), "what fills the last chunk stands last on its rank"
        own = own[own < tokens.length] - torch.tensor(tokens.starts or (0,), device="cpu")[:, None]
        tokens.own = own.clamp(min=-1).to(device)

    def end_prompt(self) -> None:
        """After that pass."""
        self.tokens.filling, self.states.layout = False, None
        self.states.repeat(self.copies)

    def begin_step(self, rows: int, new: int, shown: Tensor | None) -> Tensor:
        """Before a pass over new tokens, which every rank computes. Returns their positions, `(batch, new)`.

        Args:
            rows, new (`int`): Rows of the batch, and the new tokens of each.
            shown (`torch.Tensor` of shape `(batch, tokens)`, *optional*): The padding mask, of all tokens so far.
        """
        tokens, length = self.tokens, self.get_seq_length()
        if self.failed:
            raise BatchError("A pass over this cache ended in its middle, so its layers differ. Make a new one.")
        prompts = tokens.rows
        if rows % prompts:
            raise BatchError(f"The cache holds {prompts} prompts, and a batch of {rows} rows was given.")
        if shown is not None and tuple(shown.shape) != (rows, length + new):
            raise BatchError(
                f"attention_mask has shape {tuple(shown.shape)}; behind {length} tokens in the cache it must be "
                f"({rows}, {length + new})."
            )
        before = tokens.shown.repeat_interleave(rows // len(tokens.shown), 0)
        if tokens.new is not None:
            before = before + (tokens.new >= 0).sum(1, keepdim=True)
        # of a question that is shorter than others the last tokens are new; before them stand some of the document
        real = new if shown is None else (shown != 0).sum(1, keepdim=True).to(before) - before
        positions = before + real - new + torch.arange(new, device=before.device)
        positions = positions.masked_fill(positions < before, -1)
        tokens.unpadded = tokens.unpadded and (shown is None or bool((positions >= 0).all()))
        tokens.new = positions if tokens.new is None else torch.cat([tokens.new, positions], 1)
        tokens.latest, self.failed = new, True
        return positions

    def end_step(self, logits: Tensor | None) -> Tensor | None:
        """After that pass, unless it failed. Returns the logits of the first rank: sums of experts may be rounded
        otherwise on each, and all must choose the same token."""
        self.failed, group = False, self.tokens.group
        if logits is None or group.size == 1:
            return logits
        chosen = logits.contiguous()
        with group.messages():
            dist.broadcast(chosen, group.members[0], group=group.process_group)
        return chosen

    @property
    def is_padded(self) -> bool:
        """Whether some of its tokens are padding."""
        return bool(self.tokens.starts) or not self.tokens.unpadded

    @property
    def places(self) -> tuple[tuple[Any, ...], ...]:
        """Where the tensors of its layers lie in memory."""
        return (*(layer.places for layer in self.layers), tuple(state.data_ptr() for state in self.states.tensors))

    def fixed_step(self) -> FixedStep | None:
        """A step at fixed places, behind steps for which layers have made room; `None` if they have not."""
        rooms = {layer.room for layer in self.layers if layer.keys is not None}
        return FixedStep(self.tokens, rooms.pop()) if len(rooms) == 1 else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer has taken up, or where it takes up none, the first one that does."""
        self.tokens.note_question()
        return self._length(layer_idx)

    def _length(self, layer_idx: int) -> int:
        own = self.layers[layer_idx : layer_idx + 1]
        read = [layer for layer in (own if self.tokens.filling else (*own, *self.layers)) if layer.read]
        if read:
            return int(read[0].length)
        written = 0 if self.tokens.new is None else self.tokens.new.shape[1]
        return self.tokens.length + written if self.is_read else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self.tokens.note_question()
        return self._length(layer_idx) + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        self.tokens.note_question()
        return self._length(layer_idx)

    @torch.compiler.disable  # in a graph its counts would be constants: a new graph for each token
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.convolution(layer_idx, state_idx)

    @torch.compiler.disable
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.recurrent(layer_idx, state_idx)

    @torch.compiler.disable
    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        found = self.states.take_inputs(conv_states, layer_idx, state_idx, self.tokens.group, **kwargs)
        self._show_states(layer_idx)
        return found

    @torch.compiler.disable
    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        found = self.states.layer(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self._show_states(layer_idx)
        return found

    def _show_states(self, index: int) -> None:
        """Lets a layer have its states where models look for them."""
        if _FROM_LAYERS:
            while len(self.layers) <= index:
                self.layers.append(ShardedLayer(self.tokens))
            layer, known = self.layers[index], self.states.layer(index)
            layer.conv_states, layer.recurrent_states = known.conv_states, known.recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.states.layers) and not self.tokens.filling

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def layer_of(self, module: nn.Module, keys: Tensor, values: Tensor) -> tuple[ShardedLayer, Expand | None]:
        """The layer whose keys an attention module was given, and how it makes them of latent ones.

        Raises:
            UnsupportedModelError: If they are not what the cache returned.
        """
        index: Any = getattr(module, "layer_idx", None)
        own = [self.layers[index]] if isinstance(index, int) and index < len(self.layers) else []
        found = next((layer for layer in (*own, *self.layers) if layer.returned(keys, values)), None)
        if found is not None:
            return found, None
        if own and hasattr(module, "expand_kv"):
            expand: Any = module.expand_kv
            return own[0], expand
        raise UnsupportedModelError(
            f"{type(module).__name__} changes the keys or values that its cache returned, in a way that is not known. "
            "Generation over ranks is not served for it; model.generate holds the whole prompt on each rank."
        )

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        written = 0 if self.tokens.new is None else self.tokens.new.shape[1]
        if self.tokens.new is not None and tokens_to_remove:
            self.tokens.new = self.tokens.new[:, : max(0, written + tokens_to_remove)]
        self.tokens.length -= max(0, -tokens_to_remove - written)

    def activate_past_recording(self) -> None:
        """Before guesses are read, of which some are taken back."""
        self.tokens.whole = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self.layers:
            layer.reorder_cache(beam_idx)
        for state in self.states.tensors:
            state.copy_(state.index_select(0, beam_idx.to(state.device)))
        if self.tokens.new is not None:
            self.tokens.new = self.tokens.new.index_select(0, beam_idx.to(self.tokens.new.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.states.repeat(repeats)
        if self.tokens.new is not None:
            self.tokens.new = self.tokens.new.repeat_interleave(repeats, 0)

    def reset(self) -> None:
        super().reset()
        self.states.layers.clear()
        self.tokens.length, self.tokens.starts, self.tokens.new, self.tokens.unpadded = 0, (), None, True


def _with_room(room: Tensor | None, new: Tensor, before: int, after: int) -> Tensor:
    """A tensor with room for `after` tokens and one more: the one that there is, or one twice as large with its first
    `before`."""
    if room is not None and after < room.shape[2]:
        return room
    rows, heads, _, size = new.shape
    larger = new.new_zeros(rows, heads, max(_ROOM, 2 * after) + 1, size)  # no NaN, which masks would not hide
    if room is not None:
        larger[:, :, :before] = room[:, :, :before]
    return larger
