"""Graphs of a CPU's operations: a stand-in for CUDA graphs, which plays what was recorded, at the same places."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select")  # of a GPU for its result


class OpGraph(TorchDispatchMode):
    """Operations and their tensors. Recorded ones compute nothing that lasts, as those of CUDA."""

    played = 0

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in _WAITS):
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        outputs = args[0] if "index_copy_" in str(func) else func(*args, **(kwargs or {}))  # which would last
        self.operations.append((func, args, kwargs or {}, outputs))
        return outputs

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
    aside = nullcontext

    def __init__(self, device: torch.device) -> None:
        pass

    def begin(self) -> OpGraph:
        return OpGraph()

    @staticmethod
    @contextmanager
    def noticed_waits() -> Iterator[list[str]]:
        yield []
