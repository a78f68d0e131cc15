"""Tuning of Triton kernels, which time their candidates when they are first called, such as Liger's experts and fla's
delta rules: threads compile all candidates of a kernel in parallel, and the times are kept on disk.

By Triton alone, candidates are compiled one after another, for minutes, in each new process.
"""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

_THREADS = 32  # most per process
# of a candidate: in Triton's own 25 and 100 a small kernel is launched thousands of times
_TIMES_MS = {"warmup": 5, "rep": 20}
_IN_FILES = int | float | str | None  # what a file of times can hold, which is JSON


@cache
def tune_in_parallel() -> None:
    """Changes how Triton tunes kernels in this process, once: a backward pass runs in threads of its own, and kernels
    of several models are the same ones. Without Triton nothing changes.

    The times lie with Triton's compiled kernels (`TRITON_CACHE_DIR`), as if `TRITON_CACHE_AUTOTUNING` were 1; set it
    to 0 to tune in each process.
    """
    try:
        from triton import knobs
        from triton.runtime import driver
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    if knobs.runtime.interpret:  # nothing is compiled
        return
    prune, bench = Autotuner.prune_configs, Autotuner._bench
    keep = knobs.autotuning.cache or "TRITON_CACHE_AUTOTUNING" not in os.environ
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(_THREADS, cores // max(1, torch.cuda.device_count())))

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

    def compile_first(tuner: Any, *args: Any, config: Any, **settings: Any) -> Any:
        waiting, tuner.waiting = getattr(tuner, "waiting", ()), ()
        if len(waiting) > 1:
            name = tuner.base_fn.__name__
            logger.info("Triton tunes %s: %d candidates, compiled by %d threads", name, len(waiting), threads)
            if "_do_bench" in vars(tuner) and tuner._do_bench is None:  # the kernel does not say how it is timed
                tuner._do_bench = time_shortly
            pool = ThreadPoolExecutor(threads)
            with suppress(Exception), pool, AsyncCompileMode(pool, ignore_errors=True):
                for candidate in waiting:
                    with suppress(Exception):  # it recurs when the candidate is timed
                        tuner.fn.run(*args, **{**settings, "warmup": True}, **candidate.all_kwargs())
        return bench(tuner, *args, config=config, **settings)

    Autotuner.prune_configs, Autotuner._bench = candidates, compile_first
