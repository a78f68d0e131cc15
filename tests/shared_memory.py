"""Symmetric memory on CPUs: files that all ranks map, for what `hf_burst.ring.symmetric` does beside streams."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hf_burst.op
from hf_burst.kernels import Band, Into, Kernel, Scores
from hf_burst.mesh import ContextGroup
from hf_burst.plan import Traffic
from hf_burst.ring import routes, symmetric


class Mapped:
    """What `torch.distributed._symmetric_memory` offers, by files in a folder that all ranks see."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.count = folder, rank, 0

    def map(self, count: int, rank: int, size: int) -> torch.Tensor:
        return torch.from_file(f"{self.folder}/{count}_{rank}", shared=True, size=size, dtype=torch.uint8)

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.count += 1
        return self.map(self.count, self.rank, size).fill_(255)  # NaN in every dtype

    def rendezvous(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        count = self.count
        dist.barrier(group)

        def get_buffer(peer: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            whole = buffer if peer == self.rank else self.map(count, peer, buffer.numel())
            return whole.view(dtype)[: shape[0]]

        def barrier(channel: int, timeout_ms: int) -> None:
            dist.barrier(group)

        return SimpleNamespace(get_buffer=get_buffer, barrier=barrier)


class Table:
    """As that of `hf_burst.ring.fused`."""

    def __init__(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor, int]],
        into: Sequence[torch.Tensor],
        sent: Traffic,
    ) -> None:
        self.sent = sent
        self.copies = [
            (source, place.shape, place.stride(), place.storage_offset() - into[index].storage_offset(), index)
            for source, place, index in pairs
        ]

    def run(self, into: Sequence[torch.Tensor], behind: bool) -> None:
        for source, shape, strides, ahead, index in self.copies:
            into[index].as_strided(shape, strides, into[index].storage_offset() + ahead).copy_(source)


class Stream:
    """Where everything is done at once."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any) -> None: ...


class InPlace:
    """A kernel that writes where it may."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.card, self.unavailable = kernel, kernel.card, kernel.unavailable
        self.written = {"forward": 0, "backward": 0}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scores: Scores, into: Into | None = None
    ) -> list[torch.Tensor]:
        return self._put("forward", self.kernel.forward(q, k, v, band, scores), into)

    def backward(self, *arguments: Any) -> list[torch.Tensor]:
        into = arguments[9] if len(arguments) > 9 else None
        return self._put("backward", self.kernel.backward(*arguments[:9]), into)

    def _put(self, direction: str, results: Sequence[torch.Tensor], into: Into | None) -> list[torch.Tensor]:
        places = [None] * len(results) if into is None else into
        self.written[direction] += sum(place is not None for place in places)
        return [result if place is None else place.copy_(result) for result, place in zip(results, places, strict=True)]


@contextmanager
def shared_memory(folder: Path, group: ContextGroup) -> Iterator[list[InPlace]]:
    """Lets attention over a group go through shared memory; yields the kernels that were taken."""
    fused = ModuleType("fused")
    fused.Table = Table  # type: ignore[attr-defined]
    fakes = {
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *device: Stream(),
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda *device: None,
        "is_current_stream_capturing": lambda: False,
    }
    kernels: list[InPlace] = []
    select = hf_burst.op.select_kernel

    def in_place(*wanted: Any) -> InPlace:
        kernels.append(InPlace(select(*wanted)))
        return kernels[-1]

    mapped = Mapped(folder, group.rank)
    with (
        mock.patch.object(symmetric, "symmetric_memory", mapped),
        mock.patch.dict("sys.modules", {"hf_burst.ring.fused": fused}),
        mock.patch.multiple(torch.cuda, **fakes),
        mock.patch.object(torch.Tensor, "record_stream"),
        mock.patch.object(hf_burst.op, "select_kernel", in_place),
    ):
        hf_burst.op._prepared.cache_clear()
        arena = symmetric.Arena(group, torch.device("cpu"), 10_000)
        with mock.patch.object(routes, "open_arena", return_value=arena):
            yield kernels
    hf_burst.op._prepared.cache_clear()
