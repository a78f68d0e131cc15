"""Tuning of Triton kernels, which time their candidates when they are first called, such as Liger's experts and fla's
delta rules: threads compile all candidates of a kernel in parallel, and the times are kept on disk. Kernels that will
be called soon are compiled ahead, many at once.

By Triton alone, candidates are compiled one after another, for minutes, in each new process.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_THREADS = 32  # most for each purpose
# of a candidate: in Triton's own 25 and 100 a small kernel is launched thousands of times
_TIMES_MS = {"warmup": 5, "rep": 20}
_IN_FILES = int | float | str | None  # what a file of times can hold, which is JSON
_rehearses = ContextVar("rehearses", default=False)


class _Enough(Exception):
    """Ends the tuning of a kernel in a rehearsal, before a candidate is timed."""


@cache
def tune_in_parallel() -> bool:
    """Changes how Triton tunes kernels in this process, once: a backward pass runs in threads of its own, and kernels
    of several models are the same ones. Without Triton nothing changes.

    The times lie with Triton's compiled kernels (`TRITON_CACHE_DIR`), as if `TRITON_CACHE_AUTOTUNING` were 1; set it
    to 0 to tune in each process.

    Returns:
        `bool`: Whether kernels can be compiled ahead, which needs launches that wait for their kernel (Triton 3.7).
    """
    try:
        from triton import knobs
        from triton.compiler.errors import CompileTimeAssertionFailure
        from triton.runtime import driver
        from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.errors import OutOfResources, PTXASError
        from triton.runtime.jit import JITFunction
    except ImportError:
        return False
    if knobs.runtime.interpret:  # nothing is compiled
        return False
    prune, bench, tune, launch = Autotuner.prune_configs, Autotuner._bench, Autotuner.run, JITFunction.run
    lacking = OutOfResources, CompileTimeAssertionFailure, PTXASError  # for which a candidate is left out
    keep = knobs.autotuning.cache or "TRITON_CACHE_AUTOTUNING" not in os.environ

    def candidates(tuner: Any, settings: dict[str, Any]) -> Any:
        """What a call with new sizes will time."""
        found = tuner.waiting = prune(tuner, settings)
        sizes = {**(tuner.nargs or {}), **settings}
        kept = [sizes.get(key) for key in tuner.keys] + [value for each in found for value in each.kwargs.values()]
        own = vars(tuner).setdefault("asked_to_keep", tuner.cache_results)
        tuner.cache_results = own or (keep and all(isinstance(value, _IN_FILES) for value in kept))
        return found

    def time_shortly(call: Any, quantiles: Any) -> Any:
        try:
            return driver.active.get_benchmarker()(call, quantiles=quantiles, **_TIMES_MS)
        except torch.OutOfMemoryError:  # for the 256 MB by which it empties the cache between two launches
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            return [begin.elapsed_time(end)] * len(quantiles)
        except lacking as problem:
            # its own frames hold its traceback, or a failed compilation does; and that holds what the layer around does
            raise copy(problem.with_traceback(None)) from None

    def submit(tuner: Any, candidates: Any, *args: Any, **settings: Any) -> None:
        for candidate in candidates:
            with suppress(Exception):  # it recurs when the candidate is timed
                tuner.fn.run(*args, **{**settings, "warmup": True}, **candidate.all_kwargs())

    def compile_first(tuner: Any, *args: Any, config: Any, **settings: Any) -> Any:
        waiting, tuner.waiting = getattr(tuner, "waiting", ()), ()
        if _rehearses.get():
            submit(tuner, waiting, *args, **settings)
            raise _Enough
        if len(waiting) > 1:
            name = tuner.base_fn.__name__
            logger.info("Triton tunes %s: %d candidates", name, len(waiting))
            if "_do_bench" in vars(tuner) and tuner._do_bench is None:  # the kernel does not say how it is timed
                tuner._do_bench = time_shortly
            with suppress(Exception), AsyncCompileMode(_pool("a call"), ignore_errors=True):
                submit(tuner, waiting, *args, **settings)
        return bench(tuner, *args, config=config, **settings)

    def tune_or_submit(tuner: Any, *args: Any, **settings: Any) -> Any:
        with suppress(_Enough):
            return tune(tuner, *args, **settings)

    def launch_or_submit(kernel: Any, *args: Any, **settings: Any) -> Any:
        if _rehearses.get():
            settings["warmup"] = True
        return launch(kernel, *args, **settings)

    Autotuner.prune_configs, Autotuner._bench, Autotuner.run = candidates, compile_first, tune_or_submit
    JITFunction.run = launch_or_submit
    return hasattr(FutureKernel, "__getattr__")


def compile_ahead(function: Callable[..., Any], *tensors: Tensor | None, packed: bool = False, **settings: Any) -> None:
    """Has threads compile the kernels of a function and of its backward pass, all candidates of all of them at once,
    and returns before they are done: a launch waits for its own kernel. This is done once for tensors of these forms.
    If it fails, kernels are compiled when they are called, as without it.

    A rehearsal, in which kernels are submitted and not launched, calls the function with tensors of the device `meta`,
    in a thread of its own, where no checkpoint and no mode of torch counts what it does.

    Args:
        function (callable): Takes the tensors and the settings, and returns a tensor or a tuple that begins with one.
        tensors (`torch.Tensor` or `None`): Those of the call. On CPUs, and while a graph is captured, nothing is done.
        packed (`bool`, defaults to `False`): Whether it is given the bounds of documents as `cu_seqlens`. A rehearsal
            makes its own on the GPU, because it cannot know whether those of a stream have been computed.
        settings: Further arguments, which can be hashed.
    """
    device = next(tensor.device for tensor in tensors if tensor is not None)
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        forms = tuple(None if tensor is None else _Form.of(tensor) for tensor in tensors)
        _compile_ahead(function, device, forms, packed, tuple(settings.items()))


@cache
def _compile_ahead(
    function: Callable[..., Any],
    device: torch.device,
    forms: tuple["_Form | None", ...],
    packed: bool,
    settings: tuple[tuple[str, Any], ...],
) -> None:
    def rehearse() -> None:
        tensors, options = [None if form is None else form.tensor() for form in forms], dict(settings)
        try:
            with torch.cuda.device(device):
                if packed:
                    tokens = next(tensor.shape[1] for tensor in tensors if tensor is not None)
                    options["cu_seqlens"] = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32, device=device)
                _submit_to("the forward pass")
                out = function(*tensors, **options)
                out = out[0] if isinstance(out, tuple) else out
                if out.requires_grad:
                    _submit_to("the backward pass")
                    learned = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
                    torch.autograd.grad(out, learned, torch.empty_like(out), allow_unused=True)
        except Exception as problem:
            logger.info("Kernels of %s are compiled when they are called: %r", function.__name__, problem)

    if tune_in_parallel():
        thread = Thread(target=rehearse)
        thread.start()
        thread.join()


def _submit_to(purpose: str) -> None:
    """From here on, what this thread launches is only compiled, by the threads for this purpose."""
    from triton.runtime._async_compile import AsyncCompileMode, active_mode

    active_mode.set(AsyncCompileMode(_pool(purpose), ignore_errors=True))
    _rehearses.set(True)


@cache
def _pool(purpose: str) -> ThreadPoolExecutor:
    """Threads that compile. When the process ends, they leave what they have not begun: without this it would wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(max(1, min(_THREADS, cores // max(1, torch.cuda.device_count()))))
    threading._register_atexit(pool.shutdown, wait=False, cancel_futures=True)  # type: ignore[attr-defined]
    return pool


@dataclass(frozen=True)
class _Form:
    """What compiled kernels depend on. Of sizes, one in each power of two counts: most kernels are the same for all."""

    shape: torch.Size = field(compare=False)
    stride: tuple[int, ...] = field(compare=False)
    size: int
    inner: torch.Size
    dtype: torch.dtype
    learns: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "_Form":
        learns = tensor.requires_grad and torch.is_grad_enabled()
        size, inner = tensor.numel().bit_length(), tensor.shape[2:] or tensor.shape[-1:]
        return cls(tensor.shape, tensor.stride(), size, inner, tensor.dtype, learns)

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta", requires_grad=self.learns)
