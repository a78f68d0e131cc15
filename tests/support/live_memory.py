"""Counts the bytes of the tensors that are alive, on any device, and has them computed fast."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_PRODUCTS = (
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.addmm_,
    torch.ops.aten.bmm,
    torch.ops.aten._grouped_mm,
)


class LiveMemory(TorchDispatchMode):
    """While it is active, `now` are the bytes of all tensors that operators have returned since, and live; `peak` the
    most so far. What operators hold while they run does not count, nor do pages of host memory (`torch.uint8`).

    Args:
        *tensors (`torch.Tensor`): Some that live already, and count.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = set[int]()
        for tensor in tensors:
            self._count(tensor.detach())

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._known or tensor.dtype == torch.uint8:
            return
        self._known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self._count(result)
        return results


def _wide(factor: Any) -> Any:
    return factor.float() if isinstance(factor, torch.Tensor) and factor.dtype == torch.bfloat16 else factor


class FastProducts(TorchDispatchMode):
    """While it is active, products of bf16 are computed in fp32. CPUs without instructions for bf16 take many times as
    long else.

    Args:
        as_zeros (`bool`, defaults to `False`): Whether products are zeros instead, which take as much memory.
    """

    def __init__(self, as_zeros: bool = False) -> None:
        super().__init__()
        self.as_zeros = as_zeros

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        into = kwargs.get("out", args[0] if function.overloadpacket is torch.ops.aten.addmm_ else None)
        named = function._overloadname == "dtype" or kwargs.get("out_dtype") is not None
        if named or function.overloadpacket not in _PRODUCTS or args[0].dtype != torch.bfloat16:
            return function(*args, **kwargs)
        left, right = args[-2:]
        if self.as_zeros and function.overloadpacket is not torch.ops.aten._grouped_mm:
            return left.new_zeros(*left.shape[:-1], right.shape[-1]) if into is None else into.zero_()
        options = {name: value for name, value in kwargs.items() if name != "out"}
        product = getattr(torch, function.overloadpacket.__name__.rstrip("_"))(*tree_map(_wide, args), **options)
        return product.bfloat16() if into is None else into.copy_(product)
