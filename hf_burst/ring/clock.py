"""How long a rank does nothing but exchange, measured without a host that waits."""

import time
from collections.abc import Callable
from typing import Any

import torch

from .exchange import Exchange


class ExchangeClock:
    """Adds up the time in which messages hold up a rank: sends, barriers, copies on the stream of the kernels, and
    waits. Messages during a kernel count for as long as something waits for them.

    Args:
        device (`torch.device`): Where the rank computes. GPUs are timed by events on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[Any, Any]] = []

    def watch(self, exchange: Exchange) -> Exchange:
        """Times the messages of one pass. Returns the same object."""
        for name in ("publish", "fetch"):
            setattr(exchange, name, self._timed(getattr(exchange, name)))
        return exchange

    def seconds(self) -> float:
        """The time so far; the host waits until the device has come that far."""
        if self.device.type != "cuda":
            return float(sum(stop - start for start, stop in self.spans))
        torch.cuda.synchronize(self.device)
        return float(sum(start.elapsed_time(stop) for start, stop in self.spans)) / 1e3

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = self._now()
            result = call(*args, **options)
            self.spans.append((start, self._now()))
            if hasattr(result, "wait"):
                result.wait = self._timed(result.wait)
            return result

        return timed

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
