"""Times parts of a call: on GPUs by events on the stream, on CPUs by the host's clock."""

import time
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """Marks moments of a call, and tells the seconds between them.

    Args:
        cuda (`bool`): Whether the moments are those of the current GPU's stream.
    """

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Marks this moment."""
        if not self.cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Seconds between neighbouring marks, followed by those between the first and the last mark."""
        first, last = self._marks[0], self._marks[-1]
        if self.cuda:
            last.synchronize()
        return [*(self._between(start, stop) for start, stop in pairwise(self._marks)), self._between(first, last)]

    def _between(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) / 1e3 if self.cuda else stop - start
