"""Page-locked host memory of one device: threads prepare it ahead, tensors reuse it, and it is given back.

An operating system allocates a page when it is first written, and a virtual machine may have to ask its own host for
it. That takes longer than copying an activation, so threads write and page-lock blocks of memory before they are
needed, in pages of 2 MiB if the system has them.
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

_MAKERS = 12  # threads per host that make blocks
_PIECE = 2**25  # bytes written by one call of torch, few enough that torch starts no threads of its own


class Page:
    """A page of host memory, and the event after which it may be overwritten."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # uint8
        self.read: Any = None


class HostMemory:
    """Host memory for the tensors of one device, and the streams that copy them. A copy of this object is empty.

    All pages have one size, so that tensors of any size can reuse them. Memory is page-locked in blocks of pages.

    Args:
        device (`torch.device`): The tensors' device.
    """

    page_bytes = 2**24
    block_bytes = 2**28

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.outward, self.inward = self.module.Stream(device), self.module.Stream(device)
        self.free: list[Page] = []
        self.size, self.seconds = 0, 0.0  # bytes of all pages, and seconds spent waiting for them
        self.refused: KernelError | None = None  # why no more memory is available
        self.leaving: list[tuple[Tensor, int, Any]] = []  # tensors, their versions, and the events of their copies
        self._begin_anew()

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMemory, (self.device,)

    @property
    def computing(self) -> Any:
        """The stream on which the device computes."""
        return self.module.current_stream(self.device)

    @property
    def most(self) -> int:
        """Bytes made or requested so far, plus those the host still has for this process."""
        ahead = self._ahead
        left = host_memory()[1] // processes() - ahead.unmade * self.block_bytes
        return self.size + ahead.pending * self.block_bytes + max(0, left)

    def reserve(self, size: int, most: int | None = None) -> None:
        """Ensures that `size` bytes exist in total, or will when they are taken.

        Args:
            size (`int`): Bytes in total.
            most (`int`, *optional*): Most bytes that may be requested from the host; `self.most` by default.

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
            self._lock(1)  # a driver that cannot page-lock fails here, where all ranks can be told

    def take(self, size: int) -> list[Page]:
        """Returns pages for `size` bytes.

        Raises:
            KernelError: If there is no more memory.
        """
        count = -(-size // self.page_bytes)
        blocks = -(-(count - len(self.free)) * self.page_bytes // self.block_bytes)
        self._ahead.ask(blocks - self._ahead.pending)
        self._lock(blocks)
        return [self.free.pop() for _ in range(count)]

    def settle(self) -> None:
        """Makes the device wait for the copies to the host so far, after which device memory may be reused."""
        left, self.leaving = self.leaving, []
        for _, _, copied in left:
            self.computing.wait_event(copied)
        for tensor, version, _ in left:
            check_unchanged(tensor, version)

    def _begin_anew(self) -> None:
        """Resets to a state where no blocks are requested or made."""
        self._ahead = _Ahead(self.block_bytes, self.device)
        weakref.finalize(self, self._ahead.end)

    def _lock(self, blocks: int) -> None:
        """Waits for requested blocks and adds their pages to the free ones."""
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
    """Blocks of host memory that threads make in the background, because making them is slow.

    Args:
        size (`int`): Bytes of a block.
        device (`torch.device`): The device that copies from and to them.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.pending = 0  # blocks requested and not yet taken
        self._waiting = 0  # requested blocks that no thread has started
        self._threads, self._ended = 0, False
        # reentrant, because garbage collection may take it in a thread that already holds it
        self._lock, self._made = RLock(), SimpleQueue[Tensor | Exception]()

    @property
    def unmade(self) -> int:
        """Requested blocks that may not have their memory yet."""
        return self.pending - self._made.qsize()

    def ask(self, blocks: int) -> None:
        """Requests blocks, and starts threads to make them."""
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
            except RuntimeError:  # no more threads allowed: whoever takes a block makes it
                with self._lock:
                    self._threads -= 1

    def take(self) -> Tensor:
        """Waits for the next block, or makes it.

        Returns:
            `torch.ByteTensor` of shape `(size,)`: The block's memory.

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
        """Stops making blocks, and gives back those that nobody took."""
        with self._lock:
            self._ended = True
        with contextlib.suppress(Empty):
            while True:
                _unlock(self._made.get_nowait(), self.device)

    def _make_all(self) -> None:
        """Runs in a thread. The interpreter joins it at exit, so it stops when the main thread has ended."""
        while main_thread().is_alive() and self._make_next():
            pass
        with self._lock:
            self._threads -= 1

    def _make_next(self) -> bool:
        """Makes one waiting block; returns whether there was one."""
        with self._lock:
            if self._ended or not self._waiting:
                return False
            self._waiting -= 1
        made: Tensor | Exception
        try:
            made = _new_block(self.size, self.device)
            _page_lock(made, self.device)
        except Exception as problem:  # raised in whoever takes it
            made = problem
        with self._lock:
            if not self._ended:
                self._made.put(made)
                return True
        _unlock(made, self.device)
        return False


def check_unchanged(tensor: Tensor, version: int) -> None:
    """Raises a KernelError if a saved tensor was changed in place since it had this version."""
    if tensor._version != version:
        raise KernelError(
            f"A tensor of shape {tuple(tensor.shape)} that a checkpointed layer keeps was changed in place. Change a "
            "copy. If it is what attention returned, Memory(attention_keep=0.0) keeps nothing of it."
        )


def _new_block(size: int, device: torch.device) -> Tensor:
    """Returns new host memory for a device. Writes every page of memory that will be page-locked here."""
    if not _locks(device):
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # else the first write after a fork would go to a copy
    with contextlib.suppress(OSError):  # kernels without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    for piece in memory.split(_PIECE):
        piece[:: mmap.PAGESIZE].zero_()
    return memory


def _page_lock(memory: Tensor, device: torch.device) -> None:
    """Page-locks host memory for a device, until [`_unlock`].

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
    """Unlocks page-locked memory after pending copies; does nothing for an error."""
    if not _locks(device) or isinstance(memory, Exception):
        return
    torch.cuda.synchronize(device)
    driver: Any = torch.cuda.cudart()
    driver.cudaHostUnregister(memory.data_ptr())


def _locks(device: torch.device) -> bool:
    """Whether this module page-locks memory for the device; otherwise torch does, or it isn't needed."""
    return sys.platform == "linux" and device.type == "cuda"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
