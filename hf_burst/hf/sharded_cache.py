"""A Transformers `Cache` whose keys and values stay on the ranks that computed them. Lengths are of whole sequences.

Beams, return sequences and questions share the keys of one prompt, which are stored once. Every rank has the same
recurrent states, because each computes all new tokens by itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..attention.shared_keys import Keys
from ..errors import BatchError, UnsupportedModelError
from ..plan import MaskPattern
from ..ranks.group import ContextGroup
from ..ranks.layout import SequenceLayout
from .answer import Answer, Filling, Fixed, ShardedLayer, Stepping, layer_of


class ShardedCache(Cache):
    """Keys and values of a model, spread over the ranks of a group."""

    def __init__(self, group: ContextGroup, copies: int = 1, convolutions: int = 1) -> None:
        self.answer = Answer(group)
        self.copies = copies  # of each prompt in the batch, in consecutive rows
        self.convolutions = convolutions  # the most of a layer that carry a state
        self.compares = False  # whether the caller that chooses tokens has compared those of all ranks
        super().__init__(layers=[])
        self.layers: list[Any]

    @classmethod
    def of_document(cls, group: ContextGroup, length: int, layers: Sequence[Keys | None]) -> "ShardedCache":
        """Returns a cache that begins with a document of `length` tokens, from this rank's part of it."""
        cache = cls(group)
        positions = next(keys.positions for keys in layers if keys is not None)
        cache.answer.prompt = Filling(1, length, positions)
        cache.layers += [ShardedLayer(cache.answer, document=document) for document in layers]
        return cache

    @property
    def is_read(self) -> bool:
        """Whether it holds a prompt that was read."""
        return self.answer.prompt is not None and not isinstance(self.answer.phase, Filling)

    is_initialized = is_read  # as Transformers calls it

    @property
    def is_within_pass(self) -> bool:
        """Whether a pass has begun and not ended. If the pass failed, the layers differ."""
        return self.answer.phase is not None

    def begin_prompt(self, layout: SequenceLayout, device: torch.device) -> None:
        """Begins the pass that reads the prompt."""
        self.answer.prompt = self.answer.phase = Filling.of(layout, self.answer.group.rank, device)

    def end_prompt(self) -> None:
        """Ends the pass that reads the prompt, and repeats each row of the states for its copies."""
        self.answer.phase = None
        for layer in self.layers if self.copies > 1 else ():
            for states in (layer.conv_states, layer.recurrent_states):
                for place, state in states.items():
                    states[place] = None if state is None else state.repeat_interleave(self.copies, 0)

    def begin_step(self, rows: int, new: int, shown: Tensor | None) -> Tensor:
        """Begins a pass over `new` tokens of each row and returns their positions, `(rows, new)`. `shown` is the
        padding mask of all tokens so far."""
        answer = self.answer
        prompt = answer.prompt
        assert prompt is not None, "it was read"
        if rows % prompt.rows:
            raise BatchError(f"The cache holds {prompt.rows} prompts, and a batch of {rows} rows was given.")
        before = prompt.length - torch.tensor(prompt.starts, device=prompt.positions.device)[:, None]  # of tokens
        before = before.repeat_interleave(rows // len(before), 0)
        if answer.new is not None:
            before = before + (answer.new >= 0).sum(1, keepdim=True)
        # the last tokens of a question that is shorter than others are new; the tokens before them are the document's
        real = new if shown is None else (shown != 0).sum(1, keepdim=True).to(before) - before
        positions = before + real - new + torch.arange(new, device=before.device)
        positions = positions.masked_fill(positions < before, -1)
        answer.unpadded = answer.unpadded and (shown is None or bool((positions >= 0).all()))
        answer.new = positions if answer.new is None else torch.cat([answer.new, positions], 1)
        answer.phase = Stepping(answer, self.layers, positions)
        return positions

    def end_step(self, logits: Tensor | None) -> Tensor | None:
        """Ends the pass, unless it failed. Returns the logits of the first rank, because sums of experts may round
        differently on each rank and all must choose the same token."""
        self.answer.phase = None
        group = self.answer.group
        if logits is None or group.size == 1:
            return logits
        first = logits.contiguous()
        with group.messages():
            dist.broadcast(first, group.members[0], group=group.process_group)
        return first

    def free(self, module: nn.Module, keys: Tensor, values: Tensor, pattern: MaskPattern) -> None:
        """Frees the prompt's keys that no later token of an attention module will see."""
        assert isinstance(self.answer.phase, Filling), "the prompt is read in a sharded pass"
        self.answer.phase.free(layer_of(self.layers, module, keys, values)[0], pattern)

    @torch.compiler.disable  # it reads counts, which would be constants of a graph: a new graph for each token
    def attend(self, *given: Any) -> Tensor:
        """Returns the attention of new tokens over the keys on all ranks, see `Stepping`."""
        assert isinstance(self.answer.phase, Stepping), "new tokens have no sharded pass"
        return self.answer.phase.attend(*given)

    @property
    def is_padded(self) -> bool:
        """Whether some of its tokens are padding."""
        prompt = self.answer.prompt
        return bool(prompt and any(prompt.starts)) or not self.answer.unpadded

    @property
    def state_tensors(self) -> list[Tensor]:
        """The states of all recurrent layers."""
        return [state for layer in self.layers for state in layer.state_tensors]

    @property
    def places(self) -> tuple[tuple[Any, ...], ...]:
        """Addresses of its layers' tensors."""
        return tuple(layer.places for layer in self.layers)

    def fixed_step(self) -> Fixed | None:
        """Returns a step at fixed places, or `None` before the layers have allocated equal room in earlier steps."""
        rooms = {layer.room for layer in self.layers if layer.keys is not None}
        new = self.answer.new
        if len(rooms) != 1 or new is None:
            return None
        held = new.new_empty(len(new), rooms.pop() + 1)
        return Fixed(self.answer, self.layers, new.new_empty(len(new), 1), place=new.new_empty(1), held=held)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns how many tokens a layer holds, or if it stores no keys, the first layer that does."""
        return self.answer.lend(self._length(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.answer.lend(self._length(layer_idx) + query_length), 0

    def _length(self, layer_idx: int) -> int:
        own = self.layers[layer_idx : layer_idx + 1]
        among = (*own, *self.layers) if self.is_read else own
        read = next((layer for layer in among if layer.document is not None), None)
        if read is not None:
            return read.length
        prompt, new = self.answer.prompt, self.answer.new
        if prompt is None or not self.is_read:
            return 0
        return prompt.length + (0 if new is None else new.shape[1])

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self._layer(layer_idx).update(key_states, value_states)

    def _layer(self, index: int) -> ShardedLayer:
        while len(self.layers) <= index:
            self.layers.append(ShardedLayer(self.answer, self.convolutions))
        return self.layers[index]

    @torch.compiler.disable
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._layer(layer_idx).conv_states[state_idx]

    @torch.compiler.disable
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._layer(layer_idx).recurrent_states[state_idx]

    @torch.compiler.disable
    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Stores the last inputs of a convolution, `(batch, channels, n)`, and returns what it convolves: this rank's
        tokens while the prompt is read, and afterwards the new tokens behind the stored ones."""
        phase = self.answer.phase
        inputs = conv_states
        if isinstance(phase, Filling):
            if conv_kernel_size is None:
                raise UnsupportedModelError(
                    f"Layer {layer_idx} does not say how long its convolution is. model.generate holds the whole "
                    "prompt on each rank."
                )
            inputs = phase.last(conv_states, conv_kernel_size, self.answer.group)
        kept = self._layer(layer_idx).update_conv_state(inputs, state_idx, conv_kernel_size=conv_kernel_size)
        return conv_states if isinstance(phase, Filling) else kept

    @torch.compiler.disable
    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return self._layer(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.is_read

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        if self.answer.new is not None:
            self.answer.new = self.answer.new.index_select(0, beam_idx.to(self.answer.new.device))

    def reset(self, *_: Any, **__: Any) -> None:
        """Raises, as do all methods that would change the rows or remove tokens."""
        raise UnsupportedModelError(
            "Rows of a cache over ranks share the keys of a prompt, and stay as they are. Generate for the rows that "
            "you need, with a new cache."
        )

    crop = batch_repeat_interleave = batch_select_indices = reset
