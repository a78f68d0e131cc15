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


# Parts of a step that a timeline shows, as (beginning, share of the step): in a layer's forward and backward pass.
WINDOWS = ((0.15, 0.02), (0.6, 0.03))


@dataclass(frozen=True)
class Event:
    """A kernel or copy on the device: start and stop in seconds, its stream, and the index of its kind in `KINDS`."""

    start: float
    stop: float
    stream: int
    kind: int


def profiled(run: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """Profiles one step: seconds of each kind (see [`spent`]), and timelines of two parts of the step.

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
    return {
        "profile": parts | {"nothing": timed["seconds"] - sum(parts.values())},
        "timeline": [timeline(events, begin, share) for begin, share in WINDOWS],
    }


def device_events(trace: Sequence[dict[str, Any]], seconds: float) -> list[Event]:
    """Kernels and copies in the last seconds of a Chrome trace. Before them the ranks wait for each other."""
    events = []
    for entry in trace:
        if entry.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = entry["name"].lower()
            kind = next(at for at, words in enumerate(KINDS.values()) if any(word.lower() in name for word in words))
            start = entry["ts"] / 1e6
            events.append(Event(start, start + entry["dur"] / 1e6, entry["args"]["stream"], kind))
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


def timeline(events: Sequence[Event], begin: float, share: float) -> list[dict[str, Any]]:
    """The events of a part of a step, in milliseconds from the beginning of that part.

    Args:
        events (sequence of [`Event`]): The events of the step.
        begin (`float`): Where the part begins, as a share of the step.
        share (`float`): How long it is, as a share of the step.
    """
    if not events:
        return []
    first, last = min(event.start for event in events), max(event.stop for event in events)
    start, stop = first + begin * (last - first), first + (begin + share) * (last - first)
    kinds = list(KINDS)
    return [
        {
            "stream": event.stream,
            "kind": kinds[event.kind],
            "start_ms": round(1e3 * (max(event.start, start) - start), 4),
            "stop_ms": round(1e3 * (min(event.stop, stop) - start), 4),
        }
        for event in sorted(events, key=lambda event: event.start)
        if event.stop > start and event.start < stop
    ]
