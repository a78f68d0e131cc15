"""The parts of a training step's time, by torch's profiler."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

# The words in a kernel's name tell its kind; the first kind that fits counts. So does the first of kinds that overlap.
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn"),
    "matrix products": ("nvjet", "gemm", "cutlass", "xmma", "cublas"),
    "merging": ("_combine", "_accumulate"),
    "loss": ("cross_entropy", "element_mul"),
    "optimizer": ("adam", "multi_tensor"),
    "messages": ("nccl", "PtoP", "Memcpy DtoD", "barrier"),
    "the rest": ("",),
}


@dataclass(frozen=True)
class Event:
    """A kernel or copy on the device: start and stop in seconds, and the index of its kind in `KINDS`."""

    start: float
    stop: float
    kind: int


def profiled(run: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """Profiles one step: seconds of each kind (see [`spent`]).

    Args:
        run (`Callable`): Makes the step, and returns its time as `"seconds"`.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as recorder:
        timed = run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(path))
        events = device_events(json.loads(path.read_text())["traceEvents"], timed["seconds"])
    parts = spent(events)
    return {"profile": parts | {"nothing": timed["seconds"] - sum(parts.values())}}


def device_events(trace: Sequence[dict[str, Any]], seconds: float) -> list[Event]:
    """Kernels and copies in the last seconds of a Chrome trace. Before them the ranks wait for each other."""
    events = []
    for entry in trace:
        if entry.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = entry["name"].lower()
            kind = next(at for at, words in enumerate(KINDS.values()) if any(word.lower() in name for word in words))
            start = entry["ts"] / 1e6
            events.append(Event(start, start + entry["dur"] / 1e6, kind))
    last = max((event.stop for event in events), default=0.0)
    return [event for event in events if event.start >= last - seconds]


def spent(events: Sequence[Event]) -> dict[str, float]:
    """Seconds of each kind, in which it ran and no kind before it in `KINDS` did."""
    changes = [(event.start, event.kind, 1) for event in events] + [(event.stop, event.kind, -1) for event in events]
    kinds = list(KINDS)
    seconds, running, before = dict.fromkeys(kinds, 0.0), [0] * len(kinds), 0.0
    for moment, kind, change in sorted(changes):
        first = next((at for at, count in enumerate(running) if count), None)
        if first is not None:
            seconds[kinds[first]] += moment - before
        running[kind] += change
        before = moment
    return seconds
