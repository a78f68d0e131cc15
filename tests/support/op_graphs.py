"""Graphs of a CPU's operations: a stand-in for CUDA graphs, which plays what was recorded, at the same places.

It keeps all tensors: what streams, or memory that pieces share, do wrong on a GPU is tested there alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select")  # of a GPU for its result


class OpGraph(TorchDispatchMode):
    """Operations and their tensors. Recorded ones compute nothing that lasts, as those of CUDA."""

    played = 0

    def __init__(self) -> None:
        super().__init__()
        self.own: set[int] = set()  # memory
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in WAITS):
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        changed = [value for value in func._schema.arguments if value.alias_info and value.alias_info.is_write]
        if changed and changed[0].name == func._schema.arguments[0].name and not self._made(args[0]):
            outputs = args[0]  # the change would last
        else:
            outputs = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, outputs))
        if not any(value.alias_info for value in func._schema.returns):
            tensors = (output for output in tree_leaves(outputs) if isinstance(output, Tensor))
            self.own |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return outputs

    def _made(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the graph's own."""
        return tensor.untyped_storage().data_ptr() in self.own

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        for func, *_, outputs in self.operations:
            for output in tree_leaves(outputs):
                made = not any(value.alias_info for value in func._schema.returns)  # not a view, nor changed in place
                if made and isinstance(output, Tensor) and output.is_floating_point():
                    output.fill_(torch.nan)

    def replay(self) -> None:
        type(self).played += 1
        for func, args, kwargs, outputs in self.operations:
            again = tree_leaves(func(*args, **kwargs))
            for output, now in zip(tree_leaves(outputs), again, strict=True):
                if isinstance(output, Tensor) and output.data_ptr() != now.data_ptr():
                    output.copy_(now)


class OpGraphs:
    """In the place of `CudaGraphs`."""

    device_type = "cpu"
    aside = staticmethod(nullcontext)

    def __init__(self, device: torch.device) -> None:
        self.under_way = False

    def begin(self) -> OpGraph:
        self.under_way = True
        return OpGraph()

    def end(self, graph: OpGraph) -> None:
        if self.under_way:
            self.under_way = False
            graph.capture_end()

    @staticmethod
    @contextmanager
    def noticed_waits() -> Iterator[list[str]]:
        yield []
