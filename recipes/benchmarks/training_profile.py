"""On what the time of a training step goes."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

# what a kernel is, by words in its name, the first that fits; where several run at a time, the first counts
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn"),
    "matrix products": ("nvjet", "gemm", "cutlass", "xmma", "cublas"),
    "merging": ("_combine", "_accumulate"),
    "loss": ("cross_entropy", "element_mul"),
    "optimizer": ("adam", "multi_tensor"),
    "messages": ("nccl", "PtoP", "Memcpy DtoD", "barrier"),
    "the rest": ("",),
}


# where in a step a timeline is drawn, and of how much of it: within a layer's forward pass, and its backward pass
WINDOWS = ((0.15, 0.02), (0.6, 0.03))


@dataclass(frozen=True)
class Event:
    """Something that ran on the device: when, in seconds, on which stream, and the index of its kind in `KINDS`."""

    start: float
    stop: float
    stream: int
    kind: int


def profiled(run: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """On what the time of one step goes, in seconds (see [`spent`]), and what ran when in parts of it.

    Args:
        run (`Callable`): Makes the step; how many `"seconds"` it took.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as recorder:
        found = run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(path))
        events = device_events(json.loads(path.read_text())["traceEvents"], found["seconds"])
    parts = spent(events)
    return {
        "profile": parts | {"nothing": found["seconds"] - sum(parts.values())},
        "timeline": [timeline(events, begin, share) for begin, share in WINDOWS],
    }


def device_events(trace: Sequence[dict[str, Any]], seconds: float) -> list[Event]:
    """What a Chrome trace has of kernels and copies in its last seconds, which are those of the step: before it the
    ranks wait for each other."""
    found = []
    for event in trace:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = event["name"].lower()
            kind = next(at for at, words in enumerate(KINDS.values()) if any(word.lower() in name for word in words))
            start = event["ts"] / 1e6
            found.append(Event(start, start + event["dur"] / 1e6, event["args"]["stream"], kind))
    last = max((event.stop for event in found), default=0.0)
    return [event for event in found if event.start >= last - seconds]


def spent(events: Sequence[Event]) -> dict[str, float]:
    """Seconds in which a kind ran and none of those before it in `KINDS`."""
    changes = [(event.start, event.kind, 1) for event in events] + [(event.stop, event.kind, -1) for event in events]
    kinds = list(KINDS)
    found, running, before = dict.fromkeys(kinds, 0.0), [0] * len(kinds), 0.0
    for moment, kind, change in sorted(changes):
        first = next((at for at, count in enumerate(running) if count), None)
        if first is not None:
            found[kinds[first]] += moment - before
        running[kind] += change
        before = moment
    return found


def timeline(events: Sequence[Event], begin: float, share: float) -> list[dict[str, Any]]:
    """What ran in a part of a step that begins at a share of it and is as long as another share: milliseconds from the
    beginning of that part."""
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
