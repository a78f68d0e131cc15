"""One call of a model's own function for many pieces of sequences, each of which is treated by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..kernels import from_host
from ..plan import Segment, Segments
from .once import made_once

Function = Callable[[Sequence[Tensor], Tensor | None, Tensor | None, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Rule:
    """A function that treats tokens one after another.

    Args:
        function (callable): From tensors of shape `(batch, tokens, ...)`, the states of shape `(batch, ...)` with which
            the sequences begin (`None`: zeros), the bounds of the pieces in a row (`None`: one piece a row) and whether
            the states at the end are asked for, to an output of shape `(batch, tokens, ...)` and these states.
        packed (`bool`): Whether it takes a row of several pieces, with their bounds.
    """

    function: Function
    packed: bool

    def __call__(
        self,
        segments: Segments,
        rows: Sequence[Tensor],
        sizes: Sequence[int],
        begin: Tensor | None = None,
        ends: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Treats pieces, each by itself.

        Args:
            segments ([`Segments`]): Of which they are pieces. They keep the bounds for the next layer: kernels that get
                the same tensor again need not ask the device for its numbers.
            rows (sequence of `torch.Tensor` of shape `(tokens, ...)`): The pieces one after another.
            sizes (sequence of `int`): How many tokens each of them has.
            begin (`torch.Tensor`, *optional*): The state with which each begins; zeros by default.
            ends (`bool`, defaults to `False`): Whether the states at the end are asked for.

        Returns:
            The outputs, `(tokens, ...)`, and the state at the end of each piece.
        """
        states = None if begin is None else begin.expand(len(sizes), *begin.shape)
        if self.packed or len(sizes) == 1:
            on_device = made_once(segments, _bounds, rows[0].device, tuple(sizes)) if len(sizes) > 1 else None
            out, last = self.function([row[None] for row in rows], states, on_device, ends)
            return out[0], [] if last is None else list(last.unbind())
        bounds, outputs, lasts = [0, *accumulate(sizes)], dict[int, Tensor](), dict[int, Tensor]()
        for size in sorted(set(sizes)):  # pieces of one size are a batch
            places = [index for index, own in enumerate(sizes) if own == size]
            batch = [torch.stack([row[bounds[index] :][:size] for index in places]) for row in rows]
            out, last = self.function(batch, None if states is None else states[: len(places)], None, ends)
            outputs |= dict(zip(places, out, strict=True))
            lasts |= {} if last is None else dict(zip(places, last, strict=True))
        return torch.cat([outputs[index] for index in sorted(outputs)]), [lasts[index] for index in sorted(lasts)]


def _bounds(_: Segments, device: torch.device, sizes: tuple[int, ...]) -> Tensor:
    return from_host([0, *accumulate(sizes)], torch.int32, device)


def joined(tensors: Sequence[Tensor], segments: Sequence[Segment]) -> list[Tensor]:
    """The tokens of segments one after another, `(tokens, ...)`, of tensors `(batch, n, ...)`. Nothing is copied where
    they lie so."""
    spans: list[tuple[int, int]] = []
    for segment in segments:
        start = spans.pop()[0] if spans and spans[-1][1] == segment.local else segment.local
        spans.append((start, segment.local + segment.size))
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    if spans == [(0, len(flat[0]))]:
        return flat  # a slice of all would be copied in the backward pass
    if len(spans) == 1:
        return [tensor[slice(*spans[0])] for tensor in flat]
    return [torch.cat([tensor[start:stop] for start, stop in spans]) for tensor in flat]
