"""Activation offloading: tensors that wait in host memory until the backward pass needs them.

Copies run on their own streams, in both directions at once, and reuse page-locked host memory. A layer's saved tensors
leave while the layer computes, and come back while the layer after it is recomputed.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import KernelError
from .host_memory import HostMemory, Page, check_unchanged

logger = logging.getLogger(__name__)

_SMALL = 2**20  # bytes; smaller tensors stay

Saved = Callable[[], Tensor]  # returns the saved tensor, wherever it is


class OffloadedTensor:
    """A tensor whose copy to host memory starts now, and that can be fetched any number of times.

    Args:
        tensor (`torch.Tensor`): Must not change before [`HostMemory.settle`].
        host ([`HostMemory`]): The destination.
    """

    def __init__(self, tensor: Tensor, host: HostMemory) -> None:
        self.host, self.pages = host, list[Page]()
        self.coming: tuple[Tensor, Any] | None = None
        dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        left = tensor.detach() if dense else tensor.detach().contiguous()
        self.form = left.shape, left.stride(), left.dtype
        self.pages = host.take(left.nbytes)
        self.copied = host.module.Event()
        host.outward.wait_stream(host.computing)
        with host.module.stream(host.outward):
            for page, part in zip(self.pages, _bytes(left).split(host.page_bytes), strict=True):
                if page.read is not None:
                    host.outward.wait_event(page.read)
                page.memory[: len(part)].copy_(part, non_blocking=True)
            self.copied.record(host.outward)
        host.leaving.append((left, left._version, self.copied))

    def prefetch(self) -> None:
        """Starts copying the tensor back, after the device's pending work."""
        if self.coming is not None:
            return
        host, (shape, stride, dtype) = self.host, self.form
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=host.device)
        arrived = host.module.Event()
        host.inward.wait_stream(host.computing)
        host.inward.wait_event(self.copied)
        with host.module.stream(host.inward):
            for page, part in zip(self.pages, _bytes(tensor).split(host.page_bytes), strict=True):
                part.copy_(page.memory[: len(part)], non_blocking=True)
            arrived.record(host.inward)
        for page in self.pages:
            page.read = arrived
        self.coming = tensor, arrived

    def fetch(self) -> Tensor:
        """Returns the tensor on its device. The caller owns it."""
        self.prefetch()
        assert self.coming is not None
        (tensor, arrived), self.coming = self.coming, None
        self.host.computing.wait_event(arrived)
        return tensor

    def __del__(self) -> None:
        if self.coming is not None:  # memory must not be reused while it is being written
            self.host.computing.wait_event(self.coming[1])
        self.host.free.extend(self.pages)


class SavedByLayer:
    """The tensors that one run of a checkpointed layer saves for its backward pass, on the host or in place.

    When the layer is recomputed, the tensors needed next start to come back.

    Args:
        host ([`HostMemory`]): Memory for offloaded tensors.
        offloads (`bool`): Whether to offload.
    """

    def __init__(self, host: HostMemory, offloads: bool) -> None:
        host.settle()
        self.host, self.offloads = host, offloads
        self.following: SavedByLayer | None = None  # that of the layer that the backward pass runs next
        self.offloaded: list[OffloadedTensor] = []
        self.comes = False

    def save(self, tensor: Tensor) -> Saved:
        """Saves a tensor, on the host if the layer offloads, the tensor is not small, and the host has room."""
        fits = tensor.nbytes >= _SMALL and tensor.device == self.host.device
        if self.offloads and fits and self.host.refused is None:
            try:
                self.offloaded.append(OffloadedTensor(tensor, self.host))
                return partial(self._fetch, self.offloaded[-1].fetch)
            except KernelError as problem:  # raising mid-step would leave the other ranks waiting
                self.host.refused = problem.with_traceback(None)  # its frames would hold tensors
                logger.warning("hf_burst keeps tensors on the GPU until this step ends: %s", problem)
        return partial(self._fetch, saved_in_place(tensor))

    def prefetch(self) -> None:
        """Starts copying everything back, once."""
        if not self.comes:
            self.comes = True
            for tensor in self.offloaded:
                tensor.prefetch()

    @contextlib.contextmanager
    def once_more(self) -> Iterator[None]:
        """Lets tensors fetched inside be prefetched again later, and prefetches no following layer."""
        following, self.following = self.following, None
        try:
            yield
        finally:
            self.following, self.comes = following, False

    def _fetch(self, fetch: Saved) -> Tensor:
        """Returns a saved tensor when the layer is recomputed, and starts copying back what is needed next."""
        self.host.settle()
        self.prefetch()
        tensor = fetch()
        if self.following is not None:
            self.following.prefetch()
        return tensor


class _DetachedLeaf(torch.autograd.Function):
    """A leaf's values in a graph that starts at a dummy scalar. The leaf gets its gradient if it is still alive."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, values: Tensor, leaf: "weakref.ref[Tensor]") -> Tensor:
        ctx.leaf = leaf
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        if (leaf := ctx.leaf()) is not None:
            leaf.backward(gradients[0])
        return None, None, None


def detached_leaf(leaf: Any) -> Any:
    """Returns an argument that the autograd graph doesn't keep alive, if it is a leaf, such as embeddings beside frozen
    weights. Graphs normally hold their leaves until the backward pass ends, even if the saved copies are offloaded."""
    if type(leaf) is not Tensor or not leaf.is_leaf or not leaf.requires_grad:
        return leaf
    number = torch.zeros((), device=leaf.device, requires_grad=True)
    return _DetachedLeaf.apply(number, leaf.detach(), weakref.ref(leaf))


def saved_in_place(tensor: Tensor) -> Saved:
    """Saves a tensor in place. Reading it raises a KernelError if it was changed in place meanwhile."""
    version, tensor = tensor._version, tensor.detach()

    def kept() -> Tensor:
        check_unchanged(tensor, version)
        return tensor

    return kept


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
