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
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, thread
from dataclasses import dataclass
from threading import main_thread
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, KernelError
from .host_limits import host_memory, processes

_MAKERS = 12  # threads per host that make blocks
_PIECE = 2**25  # bytes written by one call of torch, few enough that torch starts no threads of its own


@dataclass
class Page:
    """A page of host memory, and the event after which it may be overwritten."""

    memory: Tensor  # uint8
    read: Any = None


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
        self._process = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMemory, (self.device,)

    @property
    def _ahead(self) -> deque[Future[Tensor]]:
        """Requested blocks that nobody has taken; a forked process begins without any, since threads don't follow."""
        if self._process != os.getpid():
            self._process, self._requested = os.getpid(), deque[Future[Tensor]]()
            self._makers = ThreadPoolExecutor(max(1, min(_MAKERS, _cores() // processes())), "hf_burst host memory")
            weakref.finalize(self, self._makers.shutdown, wait=False, cancel_futures=True)
        return self._requested

    @property
    def computing(self) -> Any:
        """The stream on which the device computes."""
        return self.module.current_stream(self.device)

    @property
    def most(self) -> int:
        """Bytes made or requested so far, plus those the host still has for this process."""
        unmade = sum(not block.done() for block in self._ahead)
        left = host_memory()[1] // processes() - unmade * self.block_bytes
        return self.size + len(self._ahead) * self.block_bytes + max(0, left)

    def reserve(self, size: int) -> None:
        """Ensures that `size` bytes exist in total, or will when they are taken.

        Args:
            size (`int`): Bytes in total.

        Raises:
            ConfigError: If the host has less.
            KernelError: If the driver refuses to page-lock.
        """
        taken, most = self.size + len(self._ahead) * self.block_bytes, self.most
        if size > most:
            raise ConfigError(
                f"Activation offloading needs {size / 2**30:.1f} GiB of host memory for each of {processes()} "
                f"processes, of which {taken / 2**30:.1f} are taken and {(most - taken) / 2**30:.1f} are left. Lower "
                "Memory(activation_offloading=...), the share of the layers that are offloaded, or attention_keep."
            )
        self._request(size - taken)
        if self.size < size:
            self._lock(1)  # a driver that cannot page-lock fails here, where all ranks can be told

    def take(self, size: int) -> list[Page]:
        """Returns pages for `size` bytes.

        Raises:
            KernelError: If there is no more memory.
        """
        count = -(-size // self.page_bytes)
        blocks = -(-(count - len(self.free)) * self.page_bytes // self.block_bytes)
        self._request((blocks - len(self._ahead)) * self.block_bytes)
        self._lock(blocks)
        return [self.free.pop() for _ in range(count)]

    def settle(self) -> None:
        """Makes the device wait for the copies to the host so far, after which device memory may be reused."""
        left, self.leaving = self.leaving, []
        for _, _, copied in left:
            self.computing.wait_event(copied)
        for tensor, version, _ in left:
            check_unchanged(tensor, version)

    def _request(self, size: int) -> None:
        """Has threads make the blocks of so many bytes. Where none can be started, whoever asks makes them."""
        for _ in range(-(-size // self.block_bytes)):
            ahead = self._ahead
            try:
                block = self._makers.submit(_new_block, self.block_bytes, self.device)
            except RuntimeError:
                block = Future[Tensor]()
                try:
                    block.set_result(_new_block(self.block_bytes, self.device))
                except Exception as problem:  # raised by `_lock`
                    block.set_exception(problem)
            ahead.append(block)

    def _lock(self, blocks: int) -> None:
        """Waits for requested blocks and adds their pages to the free ones."""
        start, refusal = time.perf_counter(), None
        for _ in range(blocks):
            block = self._ahead.popleft()
            refusal = block.exception()  # not raised here, because its traceback would hold the callers' tensors
            if refusal is not None:
                break
            self.free.extend(Page(page) for page in block.result().split(self.page_bytes))
            self.size += self.block_bytes
        self.seconds += time.perf_counter() - start
        if refusal is not None:
            while self._ahead:
                self._ahead.pop().cancel()
            raise KernelError(
                f"There are no {self.block_bytes / 2**20:.0f} MiB more of host memory for offloading: {refusal}. Lower "
                "Memory(activation_offloading=...), or give the container more memory."
            ) from None


class _LockedMemory(mmap.mmap):
    """Host memory that may be page-locked, and then is until it is freed."""

    device: torch.device | None = None  # for which it is page-locked

    def lock(self, memory: Tensor, device: torch.device) -> None:
        """Page-locks this memory, of which `memory` is the tensor; raises a `MemoryError` if the driver refuses."""
        driver: Any = torch.cuda.cudart()
        with torch.cuda.device(device):
            status = driver.cudaHostRegister(memory.data_ptr(), len(memory), 0)
        if int(status):
            raise MemoryError(f"the driver could not page-lock them: {driver.cudaGetErrorString(status)}")
        self.device, self.address = device, memory.data_ptr()

    def __del__(self) -> None:
        if self.device is not None and main_thread().is_alive():  # at exit the driver frees everything
            torch.cuda.synchronize(self.device)  # copies may be pending
            driver: Any = torch.cuda.cudart()
            driver.cudaHostUnregister(self.address)


def check_unchanged(tensor: Tensor, version: int) -> None:
    """Raises a KernelError if a saved tensor was changed in place since it had this version."""
    if tensor._version != version:
        raise KernelError(
            f"A tensor of shape {tuple(tensor.shape)} that a checkpointed layer keeps was changed in place. Change a "
            "copy. If it is what attention returned, Memory(attention_keep=0.0) keeps nothing of it."
        )


def _new_block(size: int, device: torch.device) -> Tensor:
    """Returns new page-locked host memory for a device; for a CPU, memory that is not locked."""
    if getattr(thread, "_shutdown", False):  # the interpreter would wait for all blocks that were requested
        raise MemoryError("the process ends")
    if not _locks(device):
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    pages = _LockedMemory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # else the first write after a fork would go to a copy
    with contextlib.suppress(OSError):  # kernels without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    for piece in memory.split(_PIECE):  # writes every page, which is faster here than in the driver
        piece[:: mmap.PAGESIZE].zero_()
    pages.lock(memory, device)
    return memory


def _locks(device: torch.device) -> bool:
    """Whether this module page-locks memory for the device; otherwise torch does, or it isn't needed."""
    return sys.platform == "linux" and device.type == "cuda"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
