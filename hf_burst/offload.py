"""Activation offloading: tensors that wait in host memory until the backward pass asks for them.

Copies run on streams of their own, in both directions at a time, and host memory is page-locked and used again. What a
layer keeps leaves while the layer computes, and comes back while the layer after it is computed again.
"""

import contextlib
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from .errors import ConfigError, KernelError

PAGE = 2**24  # bytes; a tensor takes whole pages
_GROWTH = 2**28  # bytes that are page-locked at a time
_SMALL = 2**20  # bytes; smaller tensors stay
_MAKERS = 8  # threads that make pages of host memory
_CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))

Kept = Callable[[], Tensor]  # the tensor that is kept, wherever it is


class Page:
    """A page of host memory, and the event behind which it may be written again."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # uint8
        self.read: Any = None


class HostMemory:
    """Host memory for the tensors of one device, and the streams on which they are copied. A copy of it is empty.

    Memory is made in pages of one size, so that tensors of any size use again what others gave back.

    Args:
        device (`torch.device`): Where the tensors come from.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.outward, self.inward = self.module.Stream(device), self.module.Stream(device)
        self.free: list[Page] = []
        self.size, self.seconds = 0, 0.0  # bytes of all pages, and how long it took to make them
        self.leaving: list[tuple[Tensor, int, Any]] = []  # with their version, and the event of the copy

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMemory, (self.device,)

    @property
    def computing(self) -> Any:
        """The stream on which the device computes."""
        return self.module.current_stream(self.device)

    def reserve(self, size: int) -> None:
        """Sees to it that so many bytes are there in all.

        Raises:
            ConfigError: If the host has not as many.
        """
        missing, processes = size - self.size, _processes()
        if missing > 0 and missing > (room := host_memory()[1] // processes):
            raise ConfigError(
                f"Activation offloading needs {size / 2**30:.1f} GiB of host memory for each of {processes} processes, "
                f"of which {self.size / 2**30:.1f} are taken and {room / 2**30:.1f} are left. Lower "
                "BurstConfig(activation_offloading=...), the share of the layers that are offloaded, or attention_keep."
            )
        self._grow(missing)

    def take(self, size: int) -> list[Page]:
        """Pages for so many bytes."""
        count = -(-size // PAGE)
        self._grow((count - len(self.free)) * PAGE)
        return [self.free.pop() for _ in range(count)]

    def settle(self) -> None:
        """Waits, on the device, for the tensors that left so far, whose memory there may then be used again."""
        left, self.leaving = self.leaving, []
        for _, _, copied in left:
            self.computing.wait_event(copied)
        for tensor, version, _ in left:
            _check_unchanged(tensor, version)

    def _grow(self, size: int) -> None:
        """Makes pages of so many bytes or more."""
        start = time.perf_counter()
        for _ in range(-(-size // _GROWTH)):
            memory = _page_locked(_GROWTH, self.device)
            if _locks(self.device):
                weakref.finalize(self, _unlock, memory, self.device).atexit = False
            self.free.extend(Page(page) for page in memory.split(PAGE))
            self.size += _GROWTH
        self.seconds += time.perf_counter() - start


class OffloadedTensor:
    """A tensor that begins to leave for host memory now, and can be fetched as often as it is asked for.

    Args:
        tensor (`torch.Tensor`): Not to be changed before [`HostMemory.settle`].
        home ([`HostMemory`]): Where it goes.
    """

    def __init__(self, tensor: Tensor, home: HostMemory) -> None:
        self.home, self.pages = home, list[Page]()
        self.coming: tuple[Tensor, Any] | None = None
        dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        left = tensor.detach() if dense else tensor.detach().contiguous()
        self.form = left.shape, left.stride(), left.dtype
        self.pages = home.take(left.nbytes)
        self.copied = home.module.Event()
        home.outward.wait_stream(home.computing)
        with home.module.stream(home.outward):
            for page, part in zip(self.pages, _bytes(left).split(PAGE), strict=True):
                if page.read is not None:
                    home.outward.wait_event(page.read)
                page.memory[: len(part)].copy_(part, non_blocking=True)
            self.copied.record(home.outward)
        home.leaving.append((left, left._version, self.copied))

    def prefetch(self) -> None:
        """Starts to bring the tensor back, behind what the device has been given to do so far."""
        if self.coming is not None:
            return
        home, (shape, stride, dtype) = self.home, self.form
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=home.device)
        arrived = home.module.Event()
        home.inward.wait_stream(home.computing)
        home.inward.wait_event(self.copied)
        with home.module.stream(home.inward):
            for page, part in zip(self.pages, _bytes(tensor).split(PAGE), strict=True):
                part.copy_(page.memory[: len(part)], non_blocking=True)
            arrived.record(home.inward)
        for page in self.pages:
            page.read = arrived
        self.coming = tensor, arrived

    def fetch(self) -> Tensor:
        """The tensor on its device again. It belongs to the caller."""
        self.prefetch()
        assert self.coming is not None
        (tensor, arrived), self.coming = self.coming, None
        self.home.computing.wait_event(arrived)
        return tensor

    def __del__(self) -> None:
        if self.coming is not None:  # memory that is still written to must not be used again
            self.home.computing.wait_event(self.coming[1])
        self.home.free.extend(self.pages)


class KeptByLayer:
    """What one run of a checkpointed layer keeps for its backward pass, on the host or where it is.

    When the layer runs again, what is asked for next begins to come back.

    Args:
        home ([`HostMemory`]): Where it leaves for.
        leaves (`bool`): Whether it does.
        following ([`KeptByLayer`], *optional*): That of the layer which the backward pass runs next.
    """

    def __init__(self, home: HostMemory, leaves: bool, following: "KeptByLayer | None") -> None:
        home.settle()
        self.home, self.leaves, self.following = home, leaves, following
        self.offloaded: list[OffloadedTensor] = []
        self.comes = False

    def keep(self, tensor: Tensor) -> Kept:
        """Keeps a tensor, on the host if the layer `leaves` and the tensor is not small."""
        if not self.leaves or tensor.nbytes < _SMALL or tensor.device != self.home.device:
            return _Kept(self, kept_here(tensor))
        self.offloaded.append(OffloadedTensor(tensor, self.home))
        return _Kept(self, self.offloaded[-1].fetch)

    def prefetch(self) -> None:
        """Everything begins to come back, once."""
        if not self.comes:
            self.comes = True
            for tensor in self.offloaded:
                tensor.prefetch()

    @contextlib.contextmanager
    def once_more(self) -> Iterator[None]:
        """What is fetched meanwhile is to come back once more, and nothing follows it."""
        following, self.following = self.following, None
        try:
            yield
        finally:
            self.following, self.comes = following, False


@dataclass(frozen=True)
class _Kept:
    """What [`KeptByLayer`] hands out: where the layer runs again, its tensor."""

    layer: KeptByLayer
    fetch: Kept

    def __call__(self) -> Tensor:
        self.layer.home.settle()
        self.layer.prefetch()
        tensor = self.fetch()
        if self.layer.following is not None:
            self.layer.following.prefetch()
        return tensor


class _Unheld(torch.autograd.Function):
    """A leaf's values in a graph that begins with a number instead. Whoever has the leaf by then gets its gradient."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, values: Tensor, leaf: "weakref.ref[Tensor]") -> Tensor:
        ctx.leaf = leaf
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        if (leaf := ctx.leaf()) is not None:
            leaf.backward(gradients[0])
        return None, None, None


def unheld(leaf: Tensor) -> Tensor:
    """A leaf, for a graph that does not keep it: graphs hold their leaves until the backward pass has ended, wherever
    what was kept of them went."""
    number = torch.zeros((), device=leaf.device, requires_grad=True)
    result: Tensor = _Unheld.apply(number, leaf.detach(), weakref.ref(leaf))
    return result


def kept_here(tensor: Tensor) -> Kept:
    """Keeps a tensor where it is, and raises when it is asked for if it was changed in place meanwhile."""
    version, tensor = tensor._version, tensor.detach()

    def kept() -> Tensor:
        _check_unchanged(tensor, version)
        return tensor

    return kept


def _check_unchanged(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise KernelError(
            f"A tensor of shape {tuple(tensor.shape)} that a checkpointed layer keeps was changed in place. Change a "
            "copy. If it is what attention returned, BurstConfig(attention_keep=0.0) keeps nothing of it."
        )


def _page_locked(size: int, device: torch.device) -> Tensor:
    """Host memory that a device copies from and to by itself. On GPUs of Linux the caller gives it to [`_unlock`].

    The driver makes one page after another, and so threads make them before.

    Args:
        size (`int`): Bytes.
        device (`torch.device`): The device.

    Returns:
        `torch.ByteTensor` of shape `(size,)`: The memory.

    Raises:
        KernelError: If the driver refuses.
    """
    if not _locks(device):
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # or the first write behind a fork would go to a copy
    with contextlib.suppress(OSError):  # kernels without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    threads = max(1, min(_MAKERS, len(os.sched_getaffinity(0)) // _processes()))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: part[:: mmap.PAGESIZE].zero_(), memory.chunk(_MAKERS)))
    driver: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        status = driver.cudaHostRegister(memory.data_ptr(), size, 0)
    if int(status):
        raise KernelError(
            f"The driver could not page-lock {size / 2**20:.0f} MiB of host memory for offloading: "
            f"{driver.cudaGetErrorString(status)}. Lower BurstConfig(activation_offloading=...), or give the container "
            "more memory."
        )
    return memory


def _unlock(memory: Tensor, device: torch.device) -> None:
    """Gives memory that was page-locked back, after the copies that are under way."""
    torch.cuda.synchronize(device)
    driver: Any = torch.cuda.cudart()
    driver.cudaHostUnregister(memory.data_ptr())


def _locks(device: torch.device) -> bool:
    """Whether memory for this device is made here; torch makes it otherwise."""
    return sys.platform == "linux" and device.type == "cuda"


def _processes() -> int:
    """How many processes share the host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_memory() -> tuple[int, int]:
    """Bytes of host memory that there are, and that are available, also inside of a container."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, usage in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" where there is none
            most, used = (int((Path("/sys/fs/cgroup") / name).read_text()) for name in (limit, usage))
            total, available = min(total, most), min(available, most - used + _reclaimable())
    return total, max(0, available)


def _reclaimable() -> int:
    """Bytes that a container counts as used for files, and gives back when they are needed."""
    for place in ("memory.stat", "memory/memory.stat"):
        with contextlib.suppress(OSError, ValueError):
            rows = (line.split() for line in (Path("/sys/fs/cgroup") / place).read_text().splitlines())
            counts = {name: int(count) for name, count in rows}
            return counts.get("total_inactive_file", counts.get("inactive_file", 0))
    return 0


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
