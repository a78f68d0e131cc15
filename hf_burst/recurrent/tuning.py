"""Tuning of Triton kernels, which time their candidates: threads compile all candidates in parallel."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

logger = logging.getLogger(__name__)

_THREADS = 16  # most per process


@contextmanager
def tuning(what: str) -> Iterator[None]:
    """Lets Triton compile all candidates of a kernel in parallel before timing them one after another. If the
    GPU has no room, kernels are tuned when they first run.

    Args:
        what (`str`): The name of the kernels, for the log.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    bench = Autotuner._bench
    compiled: dict[Any, Any] = {}  # by kernel, the arguments of the call whose candidates are compiled
    threads = max(1, min(_THREADS, (os.cpu_count() or 1) // max(1, torch.cuda.device_count())))

    def compile_first(tuner: Any, *args: Any, config: Any, **settings: Any) -> Any:
        if compiled.get(tuner) is not tuner.nargs:
            compiled[tuner] = tuner.nargs
            with AsyncCompileMode(executor, ignore_errors=True):
                for candidate in tuner.configs:
                    with suppress(Exception):  # it recurs when the candidate is timed
                        tuner.fn.run(*args, **{**settings, "warmup": True}, **candidate.all_kwargs())
        return bench(tuner, *args, config=config, **settings)

    try:
        with ThreadPoolExecutor(threads) as executor:
            Autotuner._bench = compile_first
            yield
    except torch.OutOfMemoryError as problem:
        logger.info("%s are tuned within the step, since the GPU has no room before it: %s", what, problem)
    finally:
        Autotuner._bench = bench
