"""Symmetric memory on CPUs: files that all ranks map, and streams that do everything at once but know what they have
waited for: from their clocks follows which reads and writes a GPU may do in another order (Lamport's happened-before;
vector clocks of Fidge and Mattern)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hf_burst.attention import prepare
from hf_burst.kernels import BackwardInputs, Band, Kernel, OutputBuffers, Scores
from hf_burst.ranks.group import ContextGroup
from hf_burst.ranks.watch import watch_of_process
from hf_burst.ring import resources, symmetric


def forget_resources(group: ContextGroup) -> None:
    """Lets a group begin without symmetric memory, known hosts and groups of hosts, and with a new control group."""
    known = resources._OPEN.pop(group.process_group, None)
    for levels in () if known is None else known._levels.values():
        for level in levels:
            if level.size > 1 and level.name != group.name:
                forget_resources(level)
                dist.destroy_process_group(level.process_group)
    watch_of_process().controls.pop(group.process_group, None)


class Mapped:
    """What `torch.distributed._symmetric_memory` offers, by files in a folder that all ranks see."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.count = folder, rank, 0
        self.mapped: list[tuple[int, int, tuple[int, int]]] = []  # first and last address, buffer and its rank

    def map(self, count: int, rank: int, size: int) -> torch.Tensor:
        found = torch.from_file(f"{self.folder}/{count}_{rank}", shared=True, size=size, dtype=torch.uint8)
        self.mapped.append((found.data_ptr(), found.data_ptr() + size, (count, rank)))
        return found

    def place(self, tensor: torch.Tensor) -> tuple[tuple[int, int], int, int] | None:
        """In which buffer a tensor lies, and from which byte to which; `None` if it lies in memory of its own."""
        address = tensor.data_ptr()
        extent = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        for first, last, buffer in self.mapped:
            if first <= address < last:
                return buffer, address - first, address - first + extent * tensor.element_size()
        return None

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
            stream = Stream.current
            clocks: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(clocks, stream.tick(), group=group)
            for clock in clocks:
                stream.meet(clock)

        return SimpleNamespace(get_buffer=get_buffer, barrier=barrier)


class Table:
    """As that of `hf_burst.ring.fused`."""

    def __init__(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor, int]],
        into: Sequence[torch.Tensor],
    ) -> None:
        self.copies = [
            (source, place.shape, place.stride(), place.storage_offset() - into[index].storage_offset(), index)
            for source, place, index in pairs
        ]

    def run(self, into: Sequence[torch.Tensor], during_kernel: bool) -> None:
        for source, shape, strides, ahead, index in self.copies:
            into[index].as_strided(shape, strides, into[index].storage_offset() + ahead).copy_(source)


Clock = dict[tuple[int, int], int]


class Stream:
    """Does everything at once, and counts what it has done and what it knows to be done on others."""

    rank = 0
    made = 0
    current: "Stream"

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        Stream.made += 1
        self.key, self.clock = (Stream.rank, Stream.made), Clock()

    def tick(self) -> Clock:
        self.clock[self.key] = self.clock.get(self.key, 0) + 1
        return dict(self.clock)

    def meet(self, clock: Clock) -> None:
        for key, time in clock.items():
            self.clock[key] = max(time, self.clock.get(key, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.meet(other.tick())

    def wait_event(self, event: "Event") -> None:
        self.meet(event.clock)


class Event:
    """What a stream had done when it was recorded."""

    def record(self, stream: Stream) -> None:
        self.clock = stream.tick()


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


@dataclass
class Access:
    """A read or a write of bytes of a buffer, and what its stream knew."""

    kind: str
    buffer: tuple[int, int]
    start: int
    stop: int
    stream: tuple[int, int]
    clock: Clock

    def before(self, other: "Access") -> bool:
        return other.clock.get(self.stream, 0) >= self.clock[self.stream]


def races(accesses: Sequence[Access]) -> list[tuple[Access, Access]]:
    """Accesses of the same bytes, one of them a write, in no order."""
    by_buffer: dict[tuple[int, int], list[Access]] = {}
    for access in accesses:
        by_buffer.setdefault(access.buffer, []).append(access)
    return [
        (one, other)
        for same in by_buffer.values()
        for one in same
        if one.kind == "write"
        for other in same
        if one is not other and one.start < other.stop and other.start < one.stop
        if not one.before(other) and not other.before(one)
    ]


class InPlace:
    """A kernel that writes where it may."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.capabilities, self.unavailable = kernel, kernel.capabilities, kernel.unavailable
        self.written = {"forward": 0, "backward": 0}

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        band: Band,
        scores: Scores,
        buffers: OutputBuffers = (),
    ) -> list[torch.Tensor]:
        return self._put("forward", self.kernel.forward(q, k, v, band, scores), buffers)

    def backward(
        self, inputs: BackwardInputs, band: Band, scores: Scores, buffers: OutputBuffers = ()
    ) -> list[torch.Tensor]:
        return self._put("backward", self.kernel.backward(inputs, band, scores), buffers)

    def _put(self, direction: str, results: Sequence[torch.Tensor], buffers: OutputBuffers) -> list[torch.Tensor]:
        places = buffers or [None] * len(results)
        self.written[direction] += sum(place is not None for place in places)
        return [result if place is None else place.copy_(result) for result, place in zip(results, places, strict=True)]


@contextmanager
def shared_memory(folder: Path, group: ContextGroup, accesses: list[Access] | None = None) -> Iterator[list[InPlace]]:
    """Lets attention over a group go through shared memory; yields the kernels that were taken, and notes accesses."""
    fused = ModuleType("fused")
    fused.Table = Table  # type: ignore[attr-defined]
    Stream.rank, Stream.current = group.rank, Stream()
    fakes = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *device: Stream.current,
        "stream": on,
        "synchronize": lambda *device: None,
        "is_current_stream_capturing": lambda: False,
    }
    kernels: list[InPlace] = []
    select = prepare.select_kernel

    def in_place(*wanted: Any) -> InPlace:
        kernels.append(InPlace(select(*wanted)))
        return kernels[-1]

    mapped = Mapped(folder, group.rank)
    copy = torch.Tensor.copy_

    def noted(place: torch.Tensor, source: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        for kind, tensor in (("read", source), ("write", place)):
            where = mapped.place(tensor)
            if where is not None and accesses is not None and tensor.numel():
                accesses.append(Access(kind, *where, Stream.current.key, Stream.current.tick()))
        return copy(place, source, *arguments, **keywords)

    with (
        mock.patch.object(symmetric, "symmetric_memory", mapped),
        mock.patch.dict("sys.modules", {"hf_burst.ring.fused": fused}),
        mock.patch.multiple(torch.cuda, **fakes),
        mock.patch.object(torch.Tensor, "record_stream"),
        mock.patch.object(torch.Tensor, "copy_", noted),
        mock.patch.object(prepare, "select_kernel", in_place),
    ):
        prepare._prepared.cache_clear()
        pool = symmetric.SymmetricPool(group, torch.device("cpu"), 10_000)
        forget_resources(group)  # tests before may have found that there is no symmetric memory
        with mock.patch.object(resources, "open_pool", return_value=pool):
            yield kernels
        forget_resources(group)
    prepare._prepared.cache_clear()
