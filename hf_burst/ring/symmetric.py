"""An [`Exchange`] inside of one host: every rank reads what its peers have published straight from their memory. Whole
rows are read by the copy engines, which leaves the multiprocessors to attention; heads by a kernel.

What is published lies in two segments that take turns. A barrier on the stream of the copies says that every rank has
published; since copies of what was published before come ahead of it in the same stream, the segment after next is free
behind it. Buffers are as large as the largest block so far, and stay for later passes. Barriers end the process after
the time limit of the process group, so that the ranks that are left do not hang when one is gone.
"""

import logging
import math
import socket
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
from .exchange import Channel, Moves, Part, Shape

if TYPE_CHECKING:
    from .fused import Table

logger = logging.getLogger(__name__)

_ALIGNMENT = 256
_GRANULE = 2 << 20
_TENSORS = 16  # at most that many are published at once
_TABLES = 256


class Segments:
    """The buffer of one channel on all ranks: two segments of `size` bytes.

    Args:
        group ([`ContextGroup`]): The ranks.
        device (`torch.device`): This rank's device.
        size (`int`): Bytes of a segment.
    """

    def __init__(self, group: ContextGroup, device: torch.device, size: int) -> None:
        self.size, self.published = size, 0
        with torch.inference_mode(False):  # later passes may train
            self.buffer = symmetric_memory.empty(2 * size, dtype=torch.uint8, device=device)
        self.handle = symmetric_memory.rendezvous(self.buffer, group.process_group)
        self.tables: dict[Hashable, Table] = {}
        self.bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def place(
        self, peer: int, turn: int, offset: int, shape: Sequence[int], dtype: torch.dtype, transposed: bool = False
    ) -> torch.Tensor:
        """A tensor in the segment that a peer publishes in turn `turn`, `offset` bytes from its start; `transposed` if
        rows lie next to each other (scalars of rows, heads first)."""
        base = self.bases.get((peer, dtype))
        if base is None:
            count = 2 * self.size // dtype.itemsize
            with torch.inference_mode(False):
                base = self.bases[peer, dtype] = self.handle.get_buffer(peer, (count,), dtype)
        strides = [1] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * shape[dim + 1]
        if transposed:
            strides[1], strides[2] = 1, shape[1]
        return base.as_strided(shape, strides, (turn % 2 * self.size + offset) // dtype.itemsize)


class Arena:
    """The symmetric memory of a group, and the streams of its passes beside the current one: one for copies, one for
    kernels that alternate. One for all passes.

    Args:
        group ([`ContextGroup`]): The ranks, all of one host.
        device (`torch.device`): This rank's device.
        milliseconds (`int`): How long a barrier waits for the other ranks.
    """

    def __init__(self, group: ContextGroup, device: torch.device, milliseconds: int) -> None:
        self.group, self.device, self.milliseconds = group, device, milliseconds
        self.stream, self.side = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
        self.channels: dict[Channel, Segments] = {}
        self.passes: dict[Hashable, Any] = {}  # those that are recorded
        self.failed = ""  # what ended a pass in the middle, after which ranks need not agree on what was published

    def segments(self, channel: Channel, nbytes: int) -> Segments:
        """The buffer of a channel, made larger on all ranks at once if it has to be."""
        found = self.channels.get(channel)
        if found is None or found.size < nbytes:
            torch.cuda.synchronize(self.device)  # nobody reads the old one when all ranks have met
            found = self.channels[channel] = Segments(self.group, self.device, -(-nbytes // _GRANULE) * _GRANULE)
        return found

    @cached_property
    def recordings(self) -> "Arena":
        """Another one for the same ranks, for passes that are recorded."""
        return Arena(self.group, self.device, self.milliseconds)

    def restart(self) -> None:
        """Forgets what was published: the next to use it waits for nobody."""
        for segments in self.channels.values():
            segments.published = 0

    def meet(self) -> None:
        """Waits on the current stream until all ranks are here."""
        segments = next(iter(self.channels.values()), None)
        if segments is not None:
            segments.handle.barrier(channel=1, timeout_ms=self.milliseconds)


@dataclass
class _Copies:
    """Copies under way on the stream of the arena, or, without an event, on the current one."""

    into: Sequence[torch.Tensor]
    done: torch.cuda.Event | None
    device: torch.device

    def wait(self) -> list[torch.Tensor]:
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)
        return list(self.into)


@dataclass
class Symmetric:
    """An [`Exchange`] by copies from the memory of peers.

    Args:
        arena ([`Arena`]): The memory.
        aside (`bool`, defaults to `True`): Whether copies go on a stream of their own; on the current one they hide
            behind nothing, and cost the host less.
        sent ([`Traffic`]): What has left this rank so far.
    """

    arena: Arena
    aside: bool = True
    sent: Traffic = field(default_factory=Traffic)
    held: list[torch.Tensor] = field(default_factory=list)  # in a recording, to its end
    places: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # of what was published first

    @property
    def side(self) -> torch.cuda.Stream | None:
        """See [`Exchange.side`]."""
        return self.arena.side if self.aside else None

    def go_inline(self) -> None:
        """From now on copies go on the current stream, behind those of passes before."""
        self.aside = False
        torch.cuda.current_stream(self.arena.device).wait_stream(self.arena.stream)

    def publish(self, channel: Channel, tensors: Sequence[torch.Tensor], most: int) -> None:
        """See [`Exchange.publish`]."""
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        offsets, _ = _offsets(shapes)
        segments = self.arena.segments(channel, _capacity(most))
        turn = segments.published
        with self._stream():
            here: list[torch.Tensor] = []
            there: list[torch.Tensor] = []
            for tensor, offset, (shape, dtype) in zip(tensors, offsets, shapes, strict=True):
                place = segments.place(self.arena.group.rank, turn, offset, shape, dtype, _is_transposed(tensor))
                if turn == 0:
                    self.places.append((tensor, place))
                if place.data_ptr() != tensor.data_ptr():
                    here.append(tensor)
                    there.append(place)
            _copy_all(there, here)
            self._hold(here)
            segments.handle.barrier(channel=0, timeout_ms=self.arena.milliseconds)
        segments.published += 1

    def fetch(
        self,
        channel: Channel,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[Part],
        tag: int,
        into: Sequence[torch.Tensor] | None = None,
    ) -> _Copies:
        """See [`Exchange.fetch`]; what peers fetch costs this rank nothing."""
        segments = self.arena.channels[channel]
        turn = segments.published - 1
        if into is None:
            into = []
            for part in receives:
                shape, dtype = part.shape
                into.append(torch.empty(shape, dtype=dtype, device=self.arena.device))
        with self._stream():  # which waits for the current one, where the memory may have been in use
            for part, place in zip(receives, into, strict=True):
                offset = _offsets(part.shapes)[0][part.index]
                shape, dtype = part.shapes[part.index]
                whole = segments.place(part.peer, turn, offset, shape, dtype)
                place.copy_(whole[:, part.start : part.stop], non_blocking=True)
            done = self._done()
        self.sent += Traffic(len(sends), sum(tensor.nbytes for tensor, _ in sends))
        return _Copies(into, done, self.arena.device)

    def move(
        self,
        channel: Channel,
        moves: Moves,
        sources: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        tag: int,
    ) -> _Copies:
        """See [`Exchange.move`]; one kernel reads from all peers."""
        segments = self.arena.channels[channel]
        turn = segments.published - 1
        key = (moves, turn % 2, _laid_out(sources), _laid_out(into))
        table = segments.tables.get(key)
        if table is None:
            if len(segments.tables) >= _TABLES:  # lengths that come and go
                segments.tables.clear()
            table = segments.tables[key] = self._table(segments, turn, moves, sources, into)
        with self._stream():
            table.run(into)
            done = self._done()
        self.sent += table.sent
        return _Copies(into, done, self.arena.device)

    def _stream(self) -> AbstractContextManager[None]:
        """Where copies go; they wait for what the current stream has done so far."""
        if not self.aside:
            return nullcontext()
        self.arena.stream.wait_stream(torch.cuda.current_stream(self.arena.device))
        context: AbstractContextManager[None] = torch.cuda.stream(self.arena.stream)
        return context

    def _hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sees to it that the memory of tensors is not taken anew while it is copied."""
        if torch.cuda.is_current_stream_capturing():
            self.held += tensors
        elif self.aside:
            for tensor in tensors:
                tensor.record_stream(self.arena.stream)

    def _done(self) -> torch.cuda.Event | None:
        """Marks the end of copies on a stream of their own."""
        if not self.aside:
            return None
        done = torch.cuda.Event()
        done.record(self.arena.stream)
        return done

    def _table(
        self,
        segments: Segments,
        turn: int,
        moves: Moves,
        sources: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
    ) -> "Table":
        from .fused import Table

        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in sources)
        offsets, _ = _offsets(shapes)
        pairs = []
        for move in moves.taken:
            index = move.source.index
            whole = segments.place(
                move.source.peer, turn, offsets[index], *shapes[index], _is_transposed(sources[index])
            )
            place = into[index][:, slice(*move.rows), slice(*move.heads)]
            pairs.append((move.source.of(whole), place, index))
        others = [block for block in moves.given if block.peer != self.arena.group.rank]
        sent = Traffic(len(others), sum(block.of(sources[block.index]).nbytes for block in others))
        return Table(pairs, into, sent)


def _capacity(most: int) -> int:
    """Bytes of a segment, the same on ranks that publish more and fewer tensors."""
    return most + _TENSORS * _ALIGNMENT


def _copy_all(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copies by the copy engines; in a recording by a kernel, for which the priority of the stream holds."""
    if not torch.cuda.is_current_stream_capturing():
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)
        return
    for dtype in {tensor.dtype for tensor in tensors}:
        pairs = [(p, t) for p, t in zip(places, tensors, strict=True) if t.dtype == dtype]
        torch._foreach_copy_([place for place, _ in pairs], [tensor for _, tensor in pairs], non_blocking=True)


def _laid_out(tensors: Sequence[torch.Tensor]) -> tuple[Hashable, ...]:
    return tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors)


def _is_transposed(tensor: torch.Tensor) -> bool:
    """Whether it is `(B, S, H, 1)` with adjacent rows."""
    return tensor.ndim == 4 and tensor.shape[3] == 1 and tensor.stride(1) == 1


@lru_cache(maxsize=1024)
def _offsets(shapes: tuple[Shape, ...]) -> tuple[list[int], int]:
    """Where in a segment each tensor begins, in bytes, and how many bytes they take."""
    offsets, total = [], 0
    for shape, dtype in shapes:
        offsets.append(total)
        total += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


@lru_cache(maxsize=64)
def open_arena(group: ContextGroup, device: torch.device) -> Arena | str:
    """The arena of a group, or why its ranks cannot read each other's memory; on all of them alike. Collective, once.

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
    arena = Arena(group, device, _time_limit(group, device))
    problem = _trial(arena, [index for _, index, _ in seen])
    found: list[str | None] = [problem] * group.size
    dist.all_gather_object(found, problem, group=group.process_group)
    problems = [f"rank {rank}: {problem}" for rank, problem in enumerate(found) if problem]
    if problems:
        logger.warning("hf_burst sends and receives, since symmetric memory cannot be had: %s", "; ".join(problems))
    return "; ".join(problems) if problems else arena


def _trial(arena: Arena, indices: Sequence[int]) -> str | None:
    """Why the ranks cannot read each other's memory, found by trying."""
    own = arena.device.index
    blind = [index for index in indices if index != own and not torch.cuda.can_device_access_peer(own, index)]
    try:
        arena.segments("visitors", 1)
    except RuntimeError as problem:  # containers may forbid what it takes
        return str(problem).splitlines()[0]
    return f"cannot read the memory of devices {blind}" if blind else None


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
