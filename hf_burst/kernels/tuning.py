"""Tuning of Triton kernels, which time their candidates when they are first called, such as Liger's experts and fla's
delta rules: threads compile all candidates of a kernel in parallel, and the times are kept on disk. Kernels that will
be called soon are compiled ahead, many at once.

By Triton alone, candidates are compiled one after another, for minutes, in each new process.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_THREADS = 32  # most per process
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
        `bool`: Whether kernels can be rehearsed, too: by a Triton that waits for a kernel when it is launched (3.7).
    """
    try:
        from triton import knobs
        from triton.runtime import driver
        from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction
    except ImportError:
        return False
    if knobs.runtime.interpret:  # nothing is compiled
        return False
    prune, bench, tune, launch = Autotuner.prune_configs, Autotuner._bench, Autotuner.run, JITFunction.run
    keep = knobs.autotuning.cache or "TRITON_CACHE_AUTOTUNING" not in os.environ
    threads = _threads()

    def candidates(tuner: Any, settings: dict[str, Any]) -> Any:
        """What a call with new sizes will time."""
        found = tuner.waiting = prune(tuner, settings)
        sizes = {**(tuner.nargs or {}), **settings}
        kept = [sizes.get(key) for key in tuner.keys] + [value for each in found for value in each.kwargs.values()]
        own = vars(tuner).setdefault("asked_to_keep", tuner.cache_results)
        tuner.cache_results = own or (keep and all(isinstance(value, _IN_FILES) for value in kept))
        return found

    def time_shortly(call: Any, quantiles: Any) -> Any:
        return driver.active.get_benchmarker()(call, quantiles=quantiles, **_TIMES_MS)

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
            logger.info("Triton tunes %s: %d candidates, compiled by %d threads", name, len(waiting), threads)
            if "_do_bench" in vars(tuner) and tuner._do_bench is None:  # the kernel does not say how it is timed
                tuner._do_bench = time_shortly
            pool = ThreadPoolExecutor(threads)
            with suppress(Exception), pool, AsyncCompileMode(pool, ignore_errors=True):
                submit(tuner, waiting, *args, **settings)
        return bench(tuner, *args, config=config, **settings)

    def tune_or_submit(tuner: Any, *args: Any, **settings: Any) -> Any:
        with suppress(_Enough):
            return tune(tuner, *args, **settings)

    def launch_or_submit(kernel: Any, *args: Any, warmup: bool, **settings: Any) -> Any:
        return launch(kernel, *args, warmup=warmup or _rehearses.get(), **settings)

    Autotuner.prune_configs, Autotuner._bench, Autotuner.run = candidates, compile_first, tune_or_submit
    JITFunction.run = launch_or_submit
    return hasattr(FutureKernel, "__getattr__")


def compile_ahead(function: Callable[..., Any], *tensors: Tensor | None, packed: bool = False, **settings: Any) -> None:
    """Has threads compile the kernels of a function and of its backward pass, once for tensors of these forms: when it
    is called, the first of them waits for itself alone, and not each one for those before it.

    Args:
        function (callable): Takes the tensors and the settings, and returns a tensor or a tuple that begins with one.
        tensors (`torch.Tensor` or `None`): The first is of shape `(batch, tokens, ...)`. On CPUs nothing is done.
        packed (`bool`, defaults to `False`): Whether it is given the bounds of documents as `cu_seqlens`. The rehearsal
            makes its own, because it cannot know whether those of a stream have been computed.
        settings: Further arguments, which can be hashed.
    """
    if torch.compiler.is_compiling() or tensors[0] is None or tensors[0].device.type != "cuda":
        return
    if not torch.cuda.is_current_stream_capturing():
        forms = tuple(None if tensor is None else _Form.of(tensor) for tensor in tensors)
        _compile_ahead(function, forms, tensors[0].device if packed else None, tuple(settings.items()))


@cache
def _compile_ahead(
    function: Callable[..., Any],
    forms: tuple["_Form | None", ...],
    packed: torch.device | None,
    settings: tuple[tuple[str, Any], ...],
) -> None:
    def run() -> None:
        tensors, options = [None if form is None else form.tensor() for form in forms], dict(settings)
        if packed is not None and tensors[0] is not None:
            tokens = tensors[0].shape[1]
            options["cu_seqlens"] = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32, device=packed)
        out = function(*tensors, **options)
        out = out[0] if isinstance(out, tuple) else out
        learned = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
        if out.requires_grad:
            torch.autograd.grad(out, learned, torch.empty_like(out), allow_unused=True)

    rehearse(run)


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


def rehearse(run: Callable[[], object]) -> None:
    """Has threads compile the Triton kernels that a function launches, all candidates of all of them at once, and
    returns before they are done: a launch waits for its own kernel. The rehearsal launches nothing, and is held in a
    thread of its own, where no checkpoint and no mode of torch counts what it does.

    Args:
        run (callable): Takes nothing, computes with tensors of the device `meta`, and what it returns is dropped. It
            is not called where kernels cannot be rehearsed. If it fails, kernels are compiled when they are called.
    """
    if not tune_in_parallel():
        return
    from triton.runtime._async_compile import AsyncCompileMode, active_mode

    def called(device: int) -> None:
        pool = ThreadPoolExecutor(_threads())
        active_mode.set(AsyncCompileMode(pool, ignore_errors=True))
        _rehearses.set(True)
        try:
            with torch.cuda.device(device):
                run()
        except Exception as problem:
            logger.info("Kernels are compiled when they are called, since they cannot be rehearsed: %r", problem)
        pool.shutdown(wait=False)

    thread = Thread(target=called, args=[torch.cuda.current_device() if torch.cuda.is_available() else -1])
    thread.start()
    thread.join()


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_THREADS, cores // max(1, torch.cuda.device_count())))
