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

_THREADS = 16  # most per process


@cache
def tune_in_parallel() -> None:
    """Changes how Triton tunes kernels in this process, once: a backward pass runs in threads of its own, and kernels
    of several models are the same ones. Without Triton nothing changes.

    The times lie with Triton's compiled kernels (`TRITON_CACHE_DIR`), as if `TRITON_CACHE_AUTOTUNING` were 1; set it
    to 0 to tune in each process.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    prune, bench = Autotuner.prune_configs, Autotuner._bench
    keep = os.environ.get("TRITON_CACHE_AUTOTUNING", "1") != "0"
    threads = max(1, min(_THREADS, (os.cpu_count() or 1) // max(1, torch.cuda.device_count())))

    def candidates(tuner: Any, settings: dict[str, Any]) -> Any:
        """What a call with new sizes will time. The file of the times is JSON, which has no other keys."""
        sizes = {**tuner.nargs, **settings}
        simple = all(isinstance(sizes.get(key), int | float | str | None) for key in tuner.keys)
        tuner.cache_results = tuner.cache_results or (keep and simple)
        tuner.waiting = prune(tuner, settings)
        return tuner.waiting

    def compile_first(tuner: Any, *args: Any, config: Any, **settings: Any) -> Any:
        waiting, tuner.waiting = tuner.waiting, ()
        if len(waiting) > 1:
            name = tuner.base_fn.__name__
            logger.info("Triton tunes %s: %d candidates, compiled by %d threads", name, len(waiting), threads)
            with ThreadPoolExecutor(threads) as executor, AsyncCompileMode(executor, ignore_errors=True):
                for candidate in waiting:
                    with suppress(Exception):  # it recurs when the candidate is timed
                        tuner.fn.run(*args, **{**settings, "warmup": True}, **candidate.all_kwargs())
        return bench(tuner, *args, config=config, **settings)

    Autotuner.prune_configs, Autotuner._bench = candidates, compile_first
