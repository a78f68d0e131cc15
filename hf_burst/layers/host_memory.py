"""Page-locked host memory of one device: made ahead by threads, used again, and given back.

An operating system makes a page of memory when it is first written, and virtual machines may ask their own host for it.
That takes longer than the copy of an activation, so threads write and page-lock blocks of memory before they are
needed, in pages of 2 MiB where the system has them.
"""

import contextlib
import mmap
import os
import sys
import time
import weakref
from queue import Empty, SimpleQueue
from threading import RLock, Thread, main_thread
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, KernelError
from .host_limits import host_memory, processes

_MAKERS = 12  # threads of a host that make blocks
_PIECE = 2**25  # bytes that are written by one call of torch, which has no threads of its own for so few


class Page:
    """A page of host memory, and the event behind which it may be written again."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # uint8
        self.read: Any = None


class HostMemory:
    """Host memory for the tensors of one device, and the streams on which they are copied. A copy of it is empty.

    Memory has pages of one size, so that tensors of any size use again what others gave back. It is page-locked by
    blocks of pages.

    Args:
        device (`torch.device`): Where the tensors come from.
    """

    page_bytes = 2**24
    block_bytes = 2**28

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.outward, self.inward = self.module.Stream(device), self.module.Stream(device)
        self.free: list[Page] = []
        self.size, self.seconds = 0, 0.0  # bytes of all pages, and how long their takers waited for them
        self.refused: KernelError | None = None  # why there is no more of it
        self.leaving: list[tuple[Tensor, int, Any]] = []  # with their version, and the event of the copy
        self._begin_anew()

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMemory, (self.device,)

    @property
    def computing(self) -> Any:
        """The stream on which the device computes."""
        return self.module.current_stream(self.device)

    @property
    def most(self) -> int:
        """Bytes that there are or were asked for, and those that the host still has for this process."""
        ahead = self._ahead
        left = host_memory()[1] // processes() - ahead.unmade * self.block_bytes
        return self.size + ahead.pending * self.block_bytes + max(0, left)

    def reserve(self, size: int, most: int | None = None) -> None:
        """Makes sure that `size` bytes are there in all, or will be when they are taken.

        Args:
            size (`int`): How many.
            most (`int`, *optional*): How many the host may be asked for; `self.most` by default.

        Raises:
            ConfigError: If the host has less.
            KernelError: If the driver refuses to page-lock.
        """
        taken = self.size + self._ahead.pending * self.block_bytes
        most = self.most if most is None else most
        if size > most:
            raise ConfigError(
                f"Activation offloading needs {size / 2**30:.1f} GiB of host memory for each of {processes()} "
                f"processes, of which {taken / 2**30:.1f} are taken and {(most - taken) / 2**30:.1f} are left. Lower "
                "Memory(activation_offloading=...), the share of the layers that are offloaded, or attention_keep."
            )
        self._ahead.ask(-(-(size - taken) // self.block_bytes))
        if self.size < size:
            self._lock(1)  # a driver that page-locks nothing refuses here, where all ranks can be told

    def take(self, size: int) -> list[Page]:
        """Pages for `size` bytes.

        Raises:
            KernelError: If there is no more memory.
        """
        count = -(-size // self.page_bytes)
        blocks = -(-(count - len(self.free)) * self.page_bytes // self.block_bytes)
        self._ahead.ask(blocks - self._ahead.pending)
        self._lock(blocks)
        return [self.free.pop() for _ in range(count)]

    def settle(self) -> None:
        """Waits, on the device, for the tensors that left so far, whose memory there may then be used again."""
        left, self.leaving = self.leaving, []
        for _, _, copied in left:
            self.computing.wait_event(copied)
        for tensor, version, _ in left:
            check_unchanged(tensor, version)

    def _begin_anew(self) -> None:
        """Nothing was asked for, and nothing is made."""
        self._ahead = _Ahead(self.block_bytes, self.device)
        weakref.finalize(self, self._ahead.end)

    def _lock(self, blocks: int) -> None:
        """Takes blocks that were asked for, and waits for them."""
        start = time.perf_counter()
        try:
            for _ in range(blocks):
                memory = self._ahead.take()
                weakref.finalize(self, _unlock, memory, self.device).atexit = False
                self.free.extend(Page(page) for page in memory.split(self.page_bytes))
                self.size += len(memory)
        except BaseException:
            self._ahead.end()
            self._begin_anew()
            raise
        finally:
            self.seconds += time.perf_counter() - start


class _Ahead:
    """Blocks of host memory that threads make while others compute, where making them takes long.

    Args:
        size (`int`): Bytes of a block.
        device (`torch.device`): Which device copies from and to them.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.pending = 0  # blocks that were asked for, and not taken
        self._waiting = 0  # those that nobody has begun
        self._threads, self._ended = 0, False
        # taken again by the thread that holds it, if that collects garbage
        self._lock, self._made = RLock(), SimpleQueue[Tensor | Exception]()

    @property
    def unmade(self) -> int:
        """Blocks that were asked for, and may not have their memory yet."""
        return self.pending - self._made.qsize()

    def ask(self, blocks: int) -> None:
        """Has blocks made, soon."""
        if blocks <= 0:
            return
        most = max(1, min(_MAKERS, _cores() // processes())) if _locks(self.device) else 0
        with self._lock:
            self.pending += blocks
            self._waiting += blocks
            starting = max(0, min(self._waiting, most - self._threads))
            self._threads += starting
        for _ in range(starting):
            try:
                Thread(target=self._make_all, name="hf_burst host memory").start()
            except RuntimeError:  # no thread is left for us: who takes a block makes it
                with self._lock:
                    self._threads -= 1

    def take(self) -> Tensor:
        """The next block. Waits until it is made, or makes it.

        Returns:
            `torch.ByteTensor` of shape `(size,)`: Its memory.

        Raises:
            KernelError: If there is no memory for it.
        """
        if not self._made.qsize():
            self._make_next()
        made = self._made.get()
        self.pending -= 1
        if isinstance(made, KernelError):
            raise made
        if isinstance(made, Exception):
            raise KernelError(
                f"There are no {self.size / 2**20:.0f} MiB more of host memory for offloading: {made}. Lower "
                "Memory(activation_offloading=...), or give the container more memory."
            ) from made
        return made

    def end(self) -> None:
        """No block is begun any more, and those that nobody took are given back."""
        with self._lock:
            self._ended = True
        with contextlib.suppress(Empty):
            while True:
                _unlock(self._made.get_nowait(), self.device)

    def _make_all(self) -> None:
        """What a thread does. The interpreter waits for it at its end, which is when the main thread has ended."""
        while main_thread().is_alive() and self._make_next():
            pass
        with self._lock:
            self._threads -= 1

    def _make_next(self) -> bool:
        """Makes a block that nobody has begun; whether there was one."""
        with self._lock:
            if self._ended or not self._waiting:
                return False
            self._waiting -= 1
        made: Tensor | Exception
        try:
            made = _new_block(self.size, self.device)
            _page_lock(made, self.device)
        except Exception as problem:  # who takes it is told
            made = problem
        with self._lock:
            if not self._ended:
                self._made.put(made)
                return True
        _unlock(made, self.device)
        return False


def check_unchanged(tensor: Tensor, version: int) -> None:
    """Raises where a tensor that is kept was changed in place since it had this version."""
    if tensor._version != version:
        raise KernelError(
            f"A tensor of shape {tuple(tensor.shape)} that a checkpointed layer keeps was changed in place. Change a "
            "copy. If it is what attention returned, Memory(attention_keep=0.0) keeps nothing of it."
        )


def _new_block(size: int, device: torch.device) -> Tensor:
    """New host memory for a device. Each page of what is to be page-locked here is written."""
    if not _locks(device):
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # or the first write behind a fork would go to a copy
    with contextlib.suppress(OSError):  # kernels without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    for piece in memory.split(_PIECE):
        piece[:: mmap.PAGESIZE].zero_()
    return memory


def _page_lock(memory: Tensor, device: torch.device) -> None:
    """Lets a device copy from and to host memory by itself, until [`_unlock`].

    Raises:
        KernelError: If the driver refuses.
    """
    if not _locks(device):
        return
    driver: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        status = driver.cudaHostRegister(memory.data_ptr(), len(memory), 0)
    if int(status):
        raise KernelError(
            f"The driver could not page-lock {len(memory) / 2**20:.0f} MiB of host memory for offloading: "
            f"{driver.cudaGetErrorString(status)}. Lower Memory(activation_offloading=...), or give the container "
            "more memory."
        )


def _unlock(memory: Tensor | Exception, device: torch.device) -> None:
    """Gives memory back that was page-locked, if any was, after the copies that are under way."""
    if not _locks(device) or isinstance(memory, Exception):
        return
    torch.cuda.synchronize(device)
    driver: Any = torch.cuda.cudart()
    driver.cudaHostUnregister(memory.data_ptr())


def _locks(device: torch.device) -> bool:
    """Whether memory for this device is page-locked here; elsewhere torch does, or nobody needs to."""
    return sys.platform == "linux" and device.type == "cuda"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
