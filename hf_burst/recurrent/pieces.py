"""Calls a model's own function once for many independent pieces of sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..kernels import from_host
from ..plan import Segment, Segments

_Made = TypeVar("_Made")
Function = Callable[[Sequence[Tensor], Tensor | None, Tensor | None, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Rule:
    """A recurrent function over tokens.

    Args:
        function (callable): Takes tensors of shape `(batch, tokens, ...)`, initial states of shape `(batch, ...)`
            (`None`: zeros), the bounds of the pieces in a row (`None`: one piece per row), and whether to return final
            states; returns an output of shape `(batch, tokens, ...)` and the final states.
        packed (`bool`): Whether it accepts a row of several pieces with their bounds.
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
        """Applies the function to each piece independently.

        Args:
            segments ([`Segments`]): The segments of the pieces. They cache the bounds for the next layer, because a
                kernel that gets the same tensor again need not read its values from the device.
            rows (sequence of `torch.Tensor` of shape `(tokens, ...)`): The concatenated pieces.
            sizes (sequence of `int`): Tokens of each piece.
            begin (`torch.Tensor`, *optional*): The initial state of every piece; zeros by default.
            ends (`bool`, defaults to `False`): Whether to return final states.

        Returns:
            The outputs, `(tokens, ...)`, and the final state of each piece.
        """
        states = None if begin is None else begin.expand(len(sizes), *begin.shape)
        if self.packed or len(sizes) == 1:
            on_device = made_once(segments, _bounds, rows[0].device, tuple(sizes)) if len(sizes) > 1 else None
            out, last = self.function([row[None] for row in rows], states, on_device, ends)
            return out[0], [] if last is None else list(last.unbind())
        bounds, outputs, lasts = [0, *accumulate(sizes)], dict[int, Tensor](), dict[int, Tensor]()
        for size in sorted(set(sizes)):  # pieces of one size form a batch
            places = [index for index, own in enumerate(sizes) if own == size]
            batch = [torch.stack([row[bounds[index] :][:size] for index in places]) for row in rows]
            out, last = self.function(batch, None if states is None else states[: len(places)], None, ends)
            outputs |= dict(zip(places, out, strict=True))
            lasts |= {} if last is None else dict(zip(places, last, strict=True))
        return torch.cat([outputs[index] for index in sorted(outputs)]), [lasts[index] for index in sorted(lasts)]


def _bounds(_: Segments, device: torch.device, sizes: tuple[int, ...]) -> Tensor:
    return from_host([0, *accumulate(sizes)], torch.int32, device)


def joined(tensors: Sequence[Tensor], segments: Sequence[Segment]) -> list[Tensor]:
    """Concatenates the tokens of segments, `(tokens, ...)`, of tensors `(batch, n, ...)`. Copies nothing if they are
    contiguous already."""
    spans: list[tuple[int, int]] = []
    for segment in segments:
        start = spans.pop()[0] if spans and spans[-1][1] == segment.local else segment.local
        spans.append((start, segment.local + segment.size))
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    if spans == [(0, len(flat[0]))]:
        return flat  # the backward pass would copy a slice of everything
    if len(spans) == 1:
        return [tensor[slice(*spans[0])] for tensor in flat]
    return [torch.cat([tensor[start:stop] for start, stop in spans]) for tensor in flat]


def made_once(segments: Segments, make: Callable[..., _Made], device: torch.device, *arguments: Any) -> _Made:
    """Returns `make(segments, device, *arguments)`, made once on the first caller's stream for all layers and passes of
    the batch. During CUDA graph capture it is made anew, because the result belongs to that graph."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    made, key = {} if capturing else segments.made, (make, device, *arguments)
    if key not in made:
        with torch.inference_mode(False):  # a later pass over the same batch may train
            made[key] = make(segments, device, *arguments)
    found: _Made = made[key]
    return found
