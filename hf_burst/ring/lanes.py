"""Streams on which independent parts of a pass alternate, so that one begins while the last blocks of another end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Lanes:
    """Two streams, the current one and another, or nothing on CPUs.

    What is made on one lane and read on another is kept until `join`: memory that was let go would be taken anew by a
    stream that knows nothing of the other.

    Args:
        device (`torch.device`): Where the work is done.
        parts (`int`): How many there are.
    """

    def __init__(self, device: torch.device, parts: int) -> None:
        self.kept: list[Any] = []
        self.main = torch.cuda.current_stream(device) if device.type == "cuda" and parts > 1 else None
        self.side: torch.cuda.Stream | None = None
        if self.main is not None:
            self.side = torch.cuda.Stream(device)
            self.side.wait_stream(self.main)

    @contextmanager
    def lane(self, index: int) -> Iterator[None]:
        """The stream of the part `index`."""
        if self.side is None or index % 2 == 0:
            yield
            return
        with torch.cuda.stream(self.side):
            yield

    def keep(self, *values: Any) -> None:
        """Keeps values until all lanes have met."""
        self.kept += values

    def join(self) -> None:
        """Lets the current stream wait for both lanes."""
        if self.main is not None and self.side is not None:
            self.main.wait_stream(self.side)
        self.kept.clear()
