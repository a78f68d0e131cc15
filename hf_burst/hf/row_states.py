"""States of recurrent layers behind a prompt, the same on every rank: each computes all new tokens by itself."""

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ..errors import UnsupportedModelError
from ..ranks.collectives import all_gather
from ..ranks.group import ContextGroup
from ..ranks.layout import SequenceLayout


class RowStates:
    """The states of the layers that have some.

    Args:
        convolutions (`int`): Most convolutions of a layer.
    """

    def __init__(self, convolutions: int) -> None:
        self.convolutions = convolutions
        self.layers: dict[int, LinearAttentionLayer] = {}
        self.layout: SequenceLayout | None = None  # of the prompt, while it is read

    def layer(self, index: int) -> LinearAttentionLayer:
        """The states of a layer, made when they first come."""
        if index not in self.layers:
            self.layers[index] = LinearAttentionLayer(self.convolutions)
        return self.layers[index]

    def convolution(self, index: int, place: int) -> Tensor | None:
        """The last inputs of a convolution; `None` before the prompt was read."""
        known = self.layers.get(index)
        return known.conv_states[place] if known is not None and known.has_previous_state[place] else None

    def recurrent(self, index: int, place: int) -> Tensor | None:
        """A recurrent state; `None` before the prompt was read."""
        known = self.layers.get(index)
        return known.recurrent_states[place] if known is not None and known.has_previous_state[place] else None

    def take_inputs(
        self, inputs: Tensor, index: int, place: int, group: ContextGroup, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Keeps the last inputs of a convolution, `(batch, channels, n)`, and returns what it convolves: those of this
        rank's tokens while the prompt is read, and afterwards new ones behind those that were kept."""
        if self.layout is None:
            return self.layer(index).update_conv_state(inputs, place, conv_kernel_size=conv_kernel_size)
        if conv_kernel_size is None:
            raise UnsupportedModelError(
                f"Layer {index} does not say how long its convolution is. model.generate holds the whole prompt on "
                "each rank."
            )
        last = _last(inputs, self.layout, group, conv_kernel_size)
        self.layer(index).update_conv_state(last, place, conv_kernel_size=conv_kernel_size)
        return inputs

    @property
    def tensors(self) -> list[Tensor]:
        """All states."""
        kinds = (states for layer in self.layers.values() for states in (layer.conv_states, layer.recurrent_states))
        return [state for states in kinds for state in states.values() if state is not None]

    def repeat(self, copies: int) -> None:
        """Has each row as often as it stands in the batch, one after another."""
        for layer in self.layers.values() if copies > 1 else ():
            for states in (layer.conv_states, layer.recurrent_states):
                for place, state in states.items():
                    states[place] = None if state is None else state.repeat_interleave(copies, 0)


def _last(inputs: Tensor, layout: SequenceLayout, group: ContextGroup, size: int) -> Tensor:
    """The last inputs of rows that lie over ranks, on every rank; zeros before the first."""
    places = layout.indices(group.rank) - (layout.length - layout.padding - size)
    own = ((places >= 0) & (places < size)).nonzero().flatten()
    part = inputs.new_zeros(*inputs.shape[:2], size)
    part[..., places[own].to(inputs.device)] = inputs[..., own.to(inputs.device)]
    return torch.stack(all_gather(part, group)).sum(0)  # each place has one that is not zero
