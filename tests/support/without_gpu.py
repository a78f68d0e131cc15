"""Triton's own classes without a GPU: what is compiled and launched is noted, and neither happens. Run by
`kernels/test_rehearsal.py` as a program of its own, because Triton interprets in the other tests.

    TRITON_INTERPRET=0 python -m tests.support.without_gpu 8192 checkpointed
"""

import gc
import json
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

from hf_burst.kernels import tuning


class Driver:
    """As far as a launch asks the driver of a GPU. Of the candidates the one with fewest warps is the fastest."""

    launcher_cls = None
    utils = SimpleNamespace(
        get_device_properties=lambda index: {"max_shared_mem": 232_448, "multiprocessor_count": (132,)[index]}
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        def timed(call: Any, quantiles: Any, **times: Any) -> list[float]:
            call()
            return [float(did[-1].split()[-1])] * 3

        return timed


did = list[str]()


def compiled(source: Any, target: Any, options: Any, _env_vars: Any = None) -> Any:
    """Stands in for the compiler, which threads call when they find the time."""
    name = f"{source.fn.__name__} {options['num_warps']}"
    if "uncompiled" in sys.argv and options["num_warps"] == 8:
        raise PTXASError("too many registers")
    if "ending" in sys.argv:
        print("begun", name, flush=True)
        time.sleep(1)

    def run(*arguments: Any) -> None:
        did.append(f"launched {name}")
        if "lacking" in sys.argv and options["num_warps"] == 8:
            refuse(OutOfResources(300_000, 232_448, "shared memory"))

    return SimpleNamespace(
        launch_metadata=lambda *arguments: None,
        run=run,
        function=None,
        packed_metadata=None,
    )


def refuse(problem: Exception) -> None:
    """As in Triton: the frame and the traceback hold each other."""
    raise problem


def asked(kernel: Any, *call: Any) -> Any:
    """Where Triton asks for a kernel to be compiled."""
    did.append(f"compiled {kernel.fn.__name__} {call[4].num_warps}")
    return ask(kernel, *call)


driver.set_active(Driver())
torch.cuda.device, torch.cuda.current_device, torch.cuda.device_count = nullcontext, lambda: 0, lambda: 1
ask, JITFunction._do_compile = JITFunction._do_compile, asked
triton.compiler.compile = compiled
CANDIDATES = [triton.Config({}, num_warps=warps) for warps in (8, 2, 4)]


@triton.autotune(CANDIDATES, key=["size"])
@triton.jit
def forward(x, y, size):
    tl.store(y + tl.program_id(0), tl.load(x + tl.program_id(0)))


@triton.jit
def plain(x, y, size):
    tl.store(y + tl.program_id(0), tl.load(x + tl.program_id(0)))


@triton.autotune(CANDIDATES, key=["size"])
@triton.jit
def backward(x, y, size):
    tl.store(y + tl.program_id(0), tl.load(x + tl.program_id(0)))


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bounds: Tensor | None) -> Tensor:
        y, ends = torch.empty_like(x), None if bounds is None else bounds.tolist()
        assert ends in (None, [0, x.shape[1] // 2, x.shape[1]])
        ctx.save_for_backward(y)
        forward[(1,)](x, y, x.numel())
        plain[(1,)](x, y, x.numel())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        backward[(1,)](dy, torch.empty_like(y), y.numel())
        return torch.empty_like(y), None


def copy(x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """By three kernels, of which two are tuned."""
    return Copy.apply(x, cu_seqlens)


def failing(x: Tensor) -> float:
    return copy(x).item()


def ahead(function: Any, *tensors: Tensor | None, packed: bool = False, **settings: Any) -> None:
    """As for tensors of a GPU."""
    forms = tuple(None if tensor is None else tuning._Form.of(tensor) for tensor in tensors)
    tuning._compile_ahead(function, torch.device("cpu"), forms, packed, tuple(settings.items()))


def main(tokens: int, how: str) -> None:
    tuning.tune_in_parallel()
    x = torch.zeros(1, tokens, 16, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        if how != "alone":
            ahead(failing if how == "failing" else copy, x, packed=how == "packed")
        did.append("called")
        return copy(x)

    if how in ("lacking", "uncompiled"):
        gc.disable()
    if how == "ending":
        tuning._THREADS = 1
        ahead(copy, x)
        raise SystemExit
    out = checkpoint(step, x, use_reentrant=False) if how == "checkpointed" else step(x)
    did.append("backward")
    out.sum().backward()
    if how in ("lacking", "uncompiled"):
        del out
        did.append(str(sum(isinstance(each, Tensor) for each in gc.get_objects())))
    print(json.dumps(did))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
