"""Streams on which independent parts of a pass alternate, so that one begins while the last blocks of another end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Lanes:
    """Two streams, the current one and another.

    What is made on one lane and read on another is kept until `join`: memory that was let go would be taken anew by a
    stream that knows nothing of the other.

    Args:
        side (`torch.cuda.Stream`, *optional*): The other stream; without it everything stays on the current one.
    """

    def __init__(self, side: torch.cuda.Stream | None) -> None:
        self.kept: list[Any] = []
        self.side = side
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())

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
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
        self.kept.clear()
