"""An [`Exchange`] inside of one host: every rank reads what its peers have published straight from their memory. Whole
rows are read by the copy engines, which leaves the multiprocessors to attention; heads are read by a kernel.

Published tensors lie in segments that take turns: two where tensors are copied into them, three where kernels write
there. A barrier on the stream of the copies says that every rank has published. Copies of the tensors published before
come ahead of it in the same stream, so the segment before is free behind it. Barriers end the process after the time
limit of the process group.
"""

import logging
import math
import os
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from ..errors import RankMismatchError
from ..plan import Traffic
from ..ranks.group import ContextGroup
from ..ranks.host import host_id
from .exchange import Channel, Pending, Round, Shape

if TYPE_CHECKING:
    from .fused import Table

logger = logging.getLogger(__name__)

_ALIGNMENT = 256
_GRANULE = 2 << 20
_SPARE = 256 << 20  # bytes that stay free behind such memory
_TENSORS = 16  # at most that many are published at once
_REMEMBERED = 256
_IN_PLACE: tuple[Channel, ...] = ("gradients", "heads to tokens")  # kernels write these where they are published


class ChannelBuffer:
    """The buffer of one channel on all ranks: `count` segments of `size` bytes that take turns."""

    def __init__(self, group: ContextGroup, device: torch.device, size: int, count: int) -> None:
        self.size, self.count, self.published = size, count, 0
        self.buffer = _allocated(group, device, count * size)
        self.handle = symmetric_memory.rendezvous(self.buffer, group.process_group)
        self.met: deque[torch.cuda.Event] = deque(maxlen=count - 1)  # the barriers so far, the oldest first
        self.bases: dict[tuple[int, torch.dtype], Tensor] = {}
        self.views: dict[Hashable, list[Tensor]] = {}
        self.tables: dict[Hashable, Table] = {}

    def tensors(self, peer: int, turn: int, shapes: Sequence[Shape]) -> list[Tensor]:
        """The tensors of these shapes that a peer publishes in a turn. Scalars, `(B, S, H, 1)`, lie heads first."""
        key = (peer, turn % self.count, *shapes)
        views = self.views.get(key)
        if views is None:
            views = []
            for (shape, dtype), offset in zip(shapes, _offsets(tuple(shapes)), strict=True):
                start = (turn % self.count * self.size + offset) // dtype.itemsize
                views.append(self._base(peer, dtype).as_strided(shape, _strides(shape), start))
            remember(self.views, key, views)
        return views

    def incoming(self, this_round: Round, turn: int) -> list[Tensor]:
        """The parts that are fetched in a round, of the tensors published in a turn."""
        key = (this_round, turn % self.count)
        views = self.views.get(key)
        if views is None:
            views = [part.source.of(self.tensors(part.peer, turn, part.shapes)) for part in this_round.incoming]
            remember(self.views, key, views)
        return views

    def _base(self, peer: int, dtype: torch.dtype) -> Tensor:
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
        self.last = self.stream  # of the latest copies; those on another one have to wait for it
        self.channels: dict[Channel, ChannelBuffer] = {}
        self.pending: list[tuple[Pending, torch.cuda.Stream]] = []  # rounds for which no stream has waited
        self.failure = ""  # the error that ended a pass in the middle: ranks may disagree on what was published

    def buffer(self, channel: Channel, capacity: int) -> ChannelBuffer:
        """The buffer of a channel, made larger on all ranks at once if it has to be."""
        nbytes = capacity + _TENSORS * _ALIGNMENT  # the same on ranks that publish more and fewer tensors
        buffer = self.channels.get(channel)
        if buffer is None or buffer.size < nbytes:
            torch.cuda.synchronize(self.device)  # nobody reads the old one when all ranks have met
            size = -(-nbytes // _GRANULE) * _GRANULE
            buffer = ChannelBuffer(self.group, self.device, size, 3 if channel in _IN_PLACE else 2)
            self.channels[channel] = buffer
        return buffer

    def settle(self) -> None:
        """Lets the current stream wait for the rounds that were left under way, and so the streams that left them."""
        current = torch.cuda.current_stream(self.device) if self.pending else None
        for pending, stream in self.pending:
            pending.wait()
            if stream != current:
                with torch.cuda.stream(stream):
                    pending.wait()
        self.pending = []

    def close(self) -> None:
        """Frees the memory once the device has done all that was asked of it."""
        torch.cuda.synchronize(self.device)
        self.pending = []
        self.channels.clear()


@dataclass
class _Copies:
    """Copies under way on the stream of the pool, or, without an event, on the current one."""

    into: Sequence[Tensor]
    done: torch.cuda.Event | None
    device: torch.device
    table: "Table | None" = None  # which the kernel reads

    def wait(self) -> list[Tensor]:
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)
        return list(self.into)


@dataclass
class Symmetric:
    """An [`Exchange`] by copies from the memory of peers.

    Args:
        pool ([`SymmetricPool`]): The memory.
        own_stream (`bool`, defaults to `True`): Whether copies go on a stream of their own; on the current one they
            hide behind nothing, and cost the host less.
        sent ([`Traffic`]): Messages and bytes that have left this rank so far.
    """

    pool: SymmetricPool
    own_stream: bool = True
    sent: Traffic = field(default_factory=Traffic)

    def use_current_stream(self) -> None:
        """From now on copies go on the current stream, behind those of passes before."""
        self.own_stream = False
        current = torch.cuda.current_stream(self.pool.device)
        if current != self.pool.last:
            current.wait_stream(self.pool.last)
            self.pool.last = current

    def reserve(self, channel: Channel, capacity: int) -> None:
        """See [`Exchange.reserve`]; all ranks meet where the memory grows."""
        self.pool.buffer(channel, capacity)

    def output_buffers(self, channel: Channel, shapes: Sequence[Shape], capacity: int) -> Sequence[Tensor | None]:
        """See [`Exchange.output_buffers`]."""
        buffer = self.pool.buffer(channel, capacity)
        if buffer.count < 3:
            return [None] * len(shapes)
        if len(buffer.met) == buffer.met.maxlen:  # before that nothing was ever there
            torch.cuda.current_stream(self.pool.device).wait_event(buffer.met[0])
        return buffer.tensors(self.pool.group.rank, buffer.published, shapes)

    def publish(self, channel: Channel, tensors: Sequence[Tensor], capacity: int) -> None:
        """See [`Exchange.publish`]."""
        buffer = self.pool.buffer(channel, capacity)
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        published = buffer.tensors(self.pool.group.rank, buffer.published, shapes)
        with self._stream():
            for tensor, target in zip(tensors, published, strict=True):
                if target.data_ptr() == tensor.data_ptr():
                    continue
                target.copy_(tensor, non_blocking=True)
                if self.own_stream:
                    tensor.record_stream(self.pool.stream)
            buffer.handle.barrier(channel=0, timeout_ms=self.pool.milliseconds)
            if buffer.count > 2:
                buffer.met.append(self._event())
        buffer.published += 1

    def fetch(
        self,
        channel: Channel,
        this_round: Round,
        tensors: Sequence[Tensor],
        into: Sequence[Tensor] | None = None,
        during_kernel: bool = False,
    ) -> _Copies:
        """See [`Exchange.fetch`]. Rows are copied one part after another, heads by one kernel that reads from all
        peers. A fetch of a peer costs this rank nothing."""
        buffer = self.pool.channels[channel]
        turn = buffer.published - 1
        if this_round.of_heads:
            assert into is not None, "exchanged heads have their places"
            table = self._table(buffer, turn, this_round, into)
            with self._stream():
                table.run(into, during_kernel)
                done = self._event() if self.own_stream else None
            self.sent += this_round.sent
            return _Copies(into, done, self.pool.device, table)
        sources, targets = buffer.incoming(this_round, turn), this_round.targets(into, self.pool.device)
        with self._stream():  # which waits for the current one, where the memory may have been in use
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            done = self._event() if self.own_stream else None
        self.sent += this_round.sent
        return _Copies(targets, done, self.pool.device)

    def wait_later(self, pending: Pending) -> None:
        """See [`Exchange.wait_later`]."""
        self.pool.pending.append((pending, torch.cuda.current_stream(self.pool.device)))

    def _stream(self) -> AbstractContextManager[None]:
        """The stream of the copies; it waits for all that the current stream has been given so far."""
        if not self.own_stream:
            return nullcontext()
        pool = self.pool
        pool.stream.wait_stream(torch.cuda.current_stream(pool.device))
        if pool.last is not pool.stream:
            pool.stream.wait_stream(pool.last)
            pool.last = pool.stream
        context: AbstractContextManager[None] = torch.cuda.stream(pool.stream)
        return context

    def _event(self) -> torch.cuda.Event:
        """Marks how far the current stream is."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.pool.device))
        return event

    def _table(self, buffer: ChannelBuffer, turn: int, this_round: Round, into: Sequence[Tensor]) -> "Table":
        """The copies of a round of heads, made once for destinations that are laid out alike."""
        from .fused import Table

        current = not self.own_stream and self.pool.device.type == "cuda"
        stream = torch.cuda.current_stream(self.pool.device) if current else None  # on which a new table arrives
        layouts = ((tensor.shape, tensor.stride(), tensor.dtype) for tensor in into)
        key = (this_round, turn % buffer.count, stream, *layouts)
        table = buffer.tables.get(key)
        if table is None:
            sources = buffer.incoming(this_round, turn)
            table = Table(
                [
                    (source, part.target.of(into), part.target.index)
                    for source, part in zip(sources, this_round.incoming, strict=True)
                ],
                into,
            )
            remember(buffer.tables, key, table)
        return table


def _allocated(group: ContextGroup, device: torch.device, nbytes: int) -> Tensor:
    """Memory that peers can read, on all ranks or on none: a rank that has its own would wait for the others."""
    buffer, error = None, None
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < nbytes + _SPARE:
        torch.cuda.empty_cache()  # such memory is not taken from what torch has kept
    try:
        with torch.inference_mode(False):  # later passes may train
            buffer = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as problem:
        kind = torch.OutOfMemoryError if "out of memory" in str(problem) else RuntimeError
        reason = str(problem).splitlines()[0]
        error = kind(f"{nbytes / 2**30:.2f} GiB of memory that peers read could not be had: {reason}")
    group.agree({"shared bytes": nbytes}, error, device, doing="making memory that peers read")
    assert buffer is not None, "an error was raised"
    return buffer


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


def open_pool(group: ContextGroup, device: torch.device) -> SymmetricPool | str:
    """The symmetric memory of a group on this rank's device, or why its ranks cannot read each other's memory; on all
    of them alike. Every rank calls it at the same time. What it returns belongs to the group, see
    `hf_burst.ring.resources`.
    """
    refusal = _refusal(device)
    mine = (host_id(), device.index, refusal)
    reports: list[tuple[str, int, str | None]] = [mine] * group.size
    dist.all_gather_object(reports, mine, group=group.process_group)
    problems = _by_rank(problem for _, _, problem in reports)
    if len({host for host, _, _ in reports}) > 1:
        problems.append("the ranks are on several hosts")
    elif len({index for _, index, _ in reports}) < group.size and not problems and not _may_share_devices():
        problems.append("every rank sees one GPU as its first; let all see all GPUs of the host")
    if problems:
        return "; ".join(problems)
    limit = group.time_limit(device)  # after which the process group gives up, too
    pool = SymmetricPool(group, device, int(1000 * limit.total_seconds()))
    failure = _trial(pool, [index for _, index, _ in reports])
    failures: list[str | None] = [failure] * group.size
    dist.all_gather_object(failures, failure, group=group.process_group)
    problems = _by_rank(failures)
    if problems:
        logger.warning("hf_burst sends and receives, since symmetric memory cannot be had: %s", "; ".join(problems))
    return "; ".join(problems) if problems else pool


def _may_share_devices() -> bool:
    """Whether torch lets ranks of one GPU read each other's memory, as tests do."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


def _by_rank(problems: Iterable[str | None]) -> list[str]:
    return [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]


def _trial(pool: SymmetricPool, indices: Sequence[int]) -> str | None:
    """Why the ranks cannot read each other's memory, found by trying."""
    own = pool.device.index
    unreachable = [index for index in indices if index != own and not torch.cuda.can_device_access_peer(own, index)]
    try:
        pool.buffer("blocks", 1)
    except (RuntimeError, RankMismatchError) as problem:  # containers may forbid it
        return str(problem).splitlines()[0]
    return f"cannot read the memory of devices {unreachable}" if unreachable else None


def _refusal(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"symmetric memory is for GPUs, not for {device.type}"
    if find_spec("triton") is None:
        return "symmetric memory needs Triton"
    if torch.version.hip is not None:
        return "symmetric memory was not tried on ROCm"
    return None
