"""One call of a model's own function for many pieces of sequences, each of which is treated by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import Segment

Function = Callable[[Sequence[Tensor], Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Rule:
    """A function that treats tokens one after another.

    Args:
        function (callable): From tensors of shape `(batch, tokens, ...)`, the states of shape `(batch, ...)` with which
            the sequences begin (`None`: zeros), and the bounds of the pieces in a row (`None`: one piece a row), to an
            output of shape `(batch, tokens, ...)` and the states at the end (`None` if there are none).
        packed (`bool`): Whether it takes a row of several pieces, with their bounds.
    """

    function: Function
    packed: bool

    def __call__(
        self, pieces: Sequence[Sequence[Tensor]], states: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Treats pieces.

        Args:
            pieces (sequence of sequences of `torch.Tensor` of shape `(tokens, ...)`): The tensors of each piece.
            states (sequence of `torch.Tensor`, *optional*): With what each begins.

        Returns:
            For each piece its output, and its state at the end if there is one.
        """
        sizes = [piece[0].shape[0] for piece in pieces]
        if self.packed:
            bounds = torch.tensor([0, *sizes]).cumsum(0).int().to(pieces[0][0].device)
            rows = [torch.cat(column)[None] for column in zip(*pieces, strict=True)]
            out, last = self.function(rows, None if states is None else torch.stack(list(states)), bounds)
            return list(out[0].split(sizes)), [] if last is None else list(last.unbind())
        outputs, lasts = dict[int, Tensor](), dict[int, Tensor]()
        for size in sorted(set(sizes)):  # pieces of one size are a batch
            places = [index for index, own in enumerate(sizes) if own == size]
            rows = [torch.stack(column) for column in zip(*(pieces[index] for index in places), strict=True)]
            begin = None if states is None else torch.stack([states[index] for index in places])
            out, last = self.function(rows, begin, None)
            outputs |= dict(zip(places, out, strict=True))
            lasts |= {} if last is None else dict(zip(places, last, strict=True))
        return [outputs[index] for index in sorted(outputs)], [lasts[index] for index in sorted(lasts)]


def cut(tensors: Sequence[Tensor], segments: Sequence[Segment]) -> list[list[Tensor]]:
    """The pieces of tensors `(batch, n, ...)`, one list of `(tokens, ...)` for each segment of this rank."""
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    return [[tensor[piece.local : piece.local + piece.size] for tensor in flat] for piece in segments]


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype of states: fp64 for fp64, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
