"""An [`Exchange`] inside of one host: every rank reads what its peers have published straight from their memory. Whole
rows are read by the copy engines, which leaves the multiprocessors to attention; heads by a kernel.

What is published lies in segments that take turns: two where it is copied to, three where kernels write it in place. A
barrier on the stream of the copies says that every rank has published; since copies of what was published before come
ahead of it in the same stream, the segment of the time before is free behind it. Buffers are as large as the largest
block so far, and stay for later passes. Barriers end the process after the time limit of the process group, so that the
ranks that are left do not hang when one is gone.
"""

import logging
import math
import socket
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from ..mesh import ContextGroup
from ..plan import Traffic
from .exchange import Channel, HeadRound, Pending, Round, Shape

if TYPE_CHECKING:
    from .fused import Table

logger = logging.getLogger(__name__)

_ALIGNMENT = 256
_GRANULE = 2 << 20
_TENSORS = 16  # at most that many are published at once
_REMEMBERED = 256
_IN_PLACE: tuple[Channel, ...] = ("gradients", "heads out")  # what kernels write to where it is published


class Segments:
    """The buffer of one channel on all ranks: segments of `size` bytes.

    Args:
        group ([`ContextGroup`]): The ranks.
        device (`torch.device`): This rank's device.
        size (`int`): Bytes of a segment.
        count (`int`): How many take turns.
    """

    def __init__(self, group: ContextGroup, device: torch.device, size: int, count: int) -> None:
        self.size, self.count, self.published = size, count, 0
        with torch.inference_mode(False):  # later passes may train
            self.buffer = symmetric_memory.empty(count * size, dtype=torch.uint8, device=device)
        self.handle = symmetric_memory.rendezvous(self.buffer, group.process_group)
        self.met: deque[torch.cuda.Event] = deque(maxlen=count - 1)  # the barriers so far, the oldest first
        self.bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.views: dict[Hashable, list[torch.Tensor]] = {}
        self.tables: dict[Hashable, Table] = {}

    def places(self, peer: int, turn: int, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """The tensors of these shapes that a peer publishes in turn `turn`. Rows lie next to each other where they are
        scalars, `(B, S, H, 1)`."""
        key = (peer, turn % self.count, *shapes)
        found = self.views.get(key)
        if found is None:
            found = []
            for (shape, dtype), offset in zip(shapes, _offsets(tuple(shapes)), strict=True):
                start = (turn % self.count * self.size + offset) // dtype.itemsize
                found.append(self._base(peer, dtype).as_strided(shape, _strides(shape), start))
            remember(self.views, key, found)
        return found

    def parts(self, which: Round, turn: int) -> list[torch.Tensor]:
        """What is fetched in a round of what was published in turn `turn`."""
        key = (which, turn % self.count)
        found = self.views.get(key)
        if found is None:
            found = [
                self.places(part.peer, turn, part.shapes)[part.index][:, part.start : part.stop]
                for part in which.incoming
            ]
            remember(self.views, key, found)
        return found

    def _base(self, peer: int, dtype: torch.dtype) -> torch.Tensor:
        base = self.bases.get((peer, dtype))
        if base is None:
            count = self.count * self.size // dtype.itemsize
            with torch.inference_mode(False):
                base = self.bases[peer, dtype] = self.handle.get_buffer(peer, (count,), dtype)
        return base


class SymmetricPool:
    """The symmetric memory of a group, and the stream on which copies go. One for all passes.

    Args:
        group ([`ContextGroup`]): The ranks, all of one host.
        device (`torch.device`): This rank's device.
        milliseconds (`int`): How long a barrier waits for the other ranks.
    """

    def __init__(self, group: ContextGroup, device: torch.device, milliseconds: int) -> None:
        self.group, self.device, self.milliseconds = group, device, milliseconds
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.channels: dict[Channel, Segments] = {}
        self.sightings: dict[Hashable, int] = {}  # how often passes came that may be recorded
        self.passes: dict[Hashable, Any] = {}  # those that are recorded, and, as `None`, those that could not be
        self.left: list[tuple[Pending, torch.cuda.Stream]] = []  # rounds for which the stream has not waited
        self.failed = ""  # what ended a pass in the middle, after which ranks need not agree on what was published

    def segments(self, channel: Channel, nbytes: int) -> Segments:
        """The buffer of a channel, made larger on all ranks at once if it has to be."""
        found = self.channels.get(channel)
        if found is None or found.size < nbytes:
            torch.cuda.synchronize(self.device)  # nobody reads the old one when all ranks have met
            size = -(-nbytes // _GRANULE) * _GRANULE
            found = self.channels[channel] = Segments(self.group, self.device, size, 3 if channel in _IN_PLACE else 2)
        return found

    def settle(self) -> None:
        """Lets the current stream wait for the rounds that were left under way, and the streams that left them, whose
        memory may then be free."""
        current = torch.cuda.current_stream(self.device) if self.left else None
        for posted, stream in self.left:
            posted.wait()
            if stream != current:
                with torch.cuda.stream(stream):
                    posted.wait()
        self.left = []

    @cached_property
    def recordings(self) -> "SymmetricPool":
        """Another one for the same ranks, for passes that are recorded."""
        return SymmetricPool(self.group, self.device, self.milliseconds)

    def restart(self) -> None:
        """Forgets what was published: the next to use it waits for nobody."""
        for segments in self.channels.values():
            segments.published = 0
            segments.met.clear()

    def meet(self) -> None:
        """Waits on the current stream until all ranks are here."""
        segments = next(iter(self.channels.values()), None)
        if segments is not None:
            segments.handle.barrier(channel=1, timeout_ms=self.milliseconds)


@dataclass
class _Copies:
    """Copies under way on the stream of the pool, or, without an event, on the current one."""

    into: Sequence[torch.Tensor]
    done: torch.cuda.Event | None
    device: torch.device
    table: "Table | None" = None  # which the kernel reads

    def wait(self) -> list[torch.Tensor]:
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)
        return list(self.into)


@dataclass
class Symmetric:
    """An [`Exchange`] by copies from the memory of peers.

    Args:
        pool ([`SymmetricPool`]): The memory.
        aside (`bool`, defaults to `True`): Whether copies go on a stream of their own; on the current one they hide
            behind nothing, and cost the host less.
        sent ([`Traffic`]): What has left this rank so far.
    """

    pool: SymmetricPool
    aside: bool = True
    sent: Traffic = field(default_factory=Traffic)
    held: list[Any] = field(default_factory=list)  # what a recording reads and nobody else may keep
    first: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # published first, and where

    def go_inline(self) -> None:
        """From now on copies go on the current stream, behind those of passes before."""
        self.aside = False
        torch.cuda.current_stream(self.pool.device).wait_stream(self.pool.stream)

    def room(self, channel: Channel, shapes: Sequence[Shape], most: int) -> Sequence[torch.Tensor | None]:
        """See [`Exchange.room`]."""
        segments = self.pool.segments(channel, _capacity(most))
        if segments.count < 3:
            return [None] * len(shapes)
        if len(segments.met) == segments.met.maxlen:  # before that nothing was ever there
            torch.cuda.current_stream(self.pool.device).wait_event(segments.met[0])
        return segments.places(self.pool.group.rank, segments.published, shapes)

    def publish(self, channel: Channel, tensors: Sequence[torch.Tensor], most: int) -> None:
        """See [`Exchange.publish`]."""
        segments = self.pool.segments(channel, _capacity(most))
        turn = segments.published
        places = segments.places(self.pool.group.rank, turn, [(tensor.shape, tensor.dtype) for tensor in tensors])
        recording = torch.cuda.is_current_stream_capturing()
        with self._stream():
            for tensor, place in zip(tensors, places, strict=True):
                if turn == 0:
                    self.first.append((tensor, place))
                if place.data_ptr() == tensor.data_ptr():
                    continue
                place.copy_(tensor, non_blocking=True)
                if recording:
                    self.held.append(tensor)
                elif self.aside:
                    tensor.record_stream(self.pool.stream)
            segments.handle.barrier(channel=0, timeout_ms=self.pool.milliseconds)
            if segments.count > 2:
                segments.met.append(self._event())
        segments.published += 1

    def fetch(
        self,
        channel: Channel,
        which: Round,
        tensors: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor] | None = None,
    ) -> _Copies:
        """See [`Exchange.fetch`]; what peers fetch costs this rank nothing."""
        segments = self.pool.channels[channel]
        sources = segments.parts(which, segments.published - 1)
        if into is None:
            into = []
            for part in which.incoming:
                shape, dtype = part.shape
                into.append(torch.empty(shape, dtype=dtype, device=self.pool.device))
        with self._stream():  # which waits for the current one, where the memory may have been in use
            for source, place in zip(sources, into, strict=True):
                place.copy_(source, non_blocking=True)
            done = self._event() if self.aside else None
        self.sent += which.sent
        return _Copies(into, done, self.pool.device)

    def move(
        self,
        channel: Channel,
        moves: HeadRound,
        sources: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        tag: int,
        behind: bool = False,
    ) -> _Copies:
        """See [`Exchange.move`]; one kernel reads from all peers."""
        segments = self.pool.channels[channel]
        turn = segments.published - 1
        inline = not self.aside and self.pool.device.type == "cuda"
        stream = torch.cuda.current_stream(self.pool.device) if inline else None  # on which a new table arrives
        shapes = ((tensor.shape, tensor.stride(), tensor.dtype) for tensor in into)
        key = (moves, turn % segments.count, stream, *shapes)
        table = segments.tables.get(key)
        recording = torch.cuda.is_current_stream_capturing()
        if table is None:
            table = self._table(segments, turn, moves, sources, into)
            if not recording:  # what is recorded is written when it is replayed, if it ever is
                remember(segments.tables, key, table)
        if recording:
            self.held.append(table)
        with self._stream():
            table.run(into, behind)
            done = self._event() if self.aside else None
        self.sent += table.sent
        return _Copies(into, done, self.pool.device, table)

    def leave(self, posted: Pending) -> None:
        """See [`Exchange.leave`]."""
        self.pool.left.append((posted, torch.cuda.current_stream(self.pool.device)))

    def _stream(self) -> AbstractContextManager[None]:
        """Where copies go; they wait for what the current stream has done so far."""
        if not self.aside:
            return nullcontext()
        self.pool.stream.wait_stream(torch.cuda.current_stream(self.pool.device))
        context: AbstractContextManager[None] = torch.cuda.stream(self.pool.stream)
        return context

    def _event(self) -> torch.cuda.Event:
        """Marks how far the current stream is."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.pool.device))
        return event

    def _table(
        self,
        segments: Segments,
        turn: int,
        moves: HeadRound,
        sources: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
    ) -> "Table":
        from .fused import Table

        shapes = [(tensor.shape, tensor.dtype) for tensor in sources]
        pairs = []
        for move in moves.incoming:
            index = move.source.index
            whole = segments.places(move.source.peer, turn, shapes)[index]
            place = into[index][:, slice(*move.rows), slice(*move.heads)]
            pairs.append((move.source.of(whole), place, index))
        others = [block for block in moves.outgoing if block.peer != self.pool.group.rank]
        sent = Traffic(len(others), sum(block.of(sources[block.index]).nbytes for block in others))
        return Table(pairs, into, sent)


def _capacity(most: int) -> int:
    """Bytes of a segment, the same on ranks that publish more and fewer tensors."""
    return most + _TENSORS * _ALIGNMENT


def remember(memory: dict[Any, Any], key: Hashable, value: Any) -> None:
    """Keeps a value, and forgets the oldest if there are many; lengths that come and go do not fill the memory."""
    if key not in memory and len(memory) >= _REMEMBERED:
        del memory[next(iter(memory))]
    memory[key] = value


def _strides(shape: Sequence[int]) -> list[int]:
    """Those of a contiguous tensor; of scalars of rows, `(B, S, H, 1)`, those of `(B, H, S)`."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    if len(shape) == 4 and shape[3] == 1:
        strides[1], strides[2] = 1, shape[1]
    return strides


@lru_cache(maxsize=1024)
def _offsets(shapes: tuple[Shape, ...]) -> list[int]:
    """Where in a segment each tensor begins, in bytes."""
    offsets, total = [], 0
    for shape, dtype in shapes:
        offsets.append(total)
        total += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets


@lru_cache(maxsize=64)
def open_pool(group: ContextGroup, device: torch.device) -> SymmetricPool | str:
    """The pool of a group, or why its ranks cannot read each other's memory; on all of them alike. Collective, once.

    Args:
        group ([`ContextGroup`]): The ranks.
        device (`torch.device`): This rank's device.
    """
    refusal = _refusal(device)
    mine = (socket.gethostname(), device.index, refusal)
    seen: list[tuple[str, int, str | None]] = [mine] * group.size
    dist.all_gather_object(seen, mine, group=group.process_group)
    problems = [f"rank {rank}: {problem}" for rank, (_, _, problem) in enumerate(seen) if problem]
    if len({host for host, _, _ in seen}) > 1:
        problems.append("the ranks are on several hosts")
    elif len({index for _, index, _ in seen}) < group.size and not problems:
        problems.append("every rank sees one GPU as its first; let all see all GPUs of the host")
    if problems:
        return "; ".join(problems)
    pool = SymmetricPool(group, device, _time_limit(group, device))
    problem = _trial(pool, [index for _, index, _ in seen])
    found: list[str | None] = [problem] * group.size
    dist.all_gather_object(found, problem, group=group.process_group)
    problems = [f"rank {rank}: {problem}" for rank, problem in enumerate(found) if problem]
    if problems:
        logger.warning("hf_burst sends and receives, since symmetric memory cannot be had: %s", "; ".join(problems))
    return "; ".join(problems) if problems else pool


def _trial(pool: SymmetricPool, indices: Sequence[int]) -> str | None:
    """Why the ranks cannot read each other's memory, found by trying."""
    own = pool.device.index
    fully_masked = [index for index in indices if index != own and not torch.cuda.can_device_access_peer(own, index)]
    try:
        pool.segments("visitors", 1)
    except RuntimeError as problem:  # containers may forbid what it takes
        return str(problem).splitlines()[0]
    return f"cannot read the memory of devices {fully_masked}" if fully_masked else None


def _refusal(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"symmetric memory is for GPUs, not for {device.type}"
    if find_spec("triton") is None:
        return "symmetric memory needs Triton"
    if torch.version.hip is not None:
        return "symmetric memory was not tried on ROCm"
    return None


def _time_limit(group: ContextGroup, device: torch.device) -> int:
    """Milliseconds after which the process group gives up, too."""
    options = group.process_group._get_backend(device).options
    return int(1000 * options._timeout.total_seconds())
