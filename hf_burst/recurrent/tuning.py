"""Kernels of Triton that choose among candidates by timing them: the candidates are compiled at once, by threads."""

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

logger = logging.getLogger(__name__)

_THREADS = 16  # of a process at most
_TOLD_S = 5.0


@contextmanager
def tuning(what: str) -> Iterator[None]:
    """Inside, Triton compiles all candidates of a kernel at the same time before it times them one after another. The
    log says how long it took, if that is long. Where the GPU has no room, kernels are tuned when they first run.

    Args:
        what (`str`): What is tuned, for the log.
    """
    start = time.monotonic()
    try:
        with _compiling_at_once():
            yield
    except torch.OutOfMemoryError as problem:
        logger.info("%s are tuned within the step, since the GPU has no room before it: %s", what, problem)
        return
    seconds = time.monotonic() - start
    if seconds > _TOLD_S:
        logger.info(
            "Triton tuned %s in %.0f s. It keeps what it compiled for other runs, in TRITON_CACHE_DIR or "
            "~/.triton/cache.",
            what,
            seconds,
        )


@contextmanager
def _compiling_at_once() -> Iterator[None]:
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:  # an older Triton compiles one after another
        yield
        return
    bench = Autotuner._bench
    compiled: dict[Any, Any] = {}  # of which call all candidates of a kernel are compiled, by the call's own arguments
    processes = max(1, torch.cuda.device_count())
    threads = max(1, min(_THREADS, (os.cpu_count() or 1) // processes))

    def compile_first(tuner: Any, *args: Any, config: Any, **settings: Any) -> Any:
        if compiled.get(tuner) is not tuner.nargs:
            compiled[tuner] = tuner.nargs
            with AsyncCompileMode(executor, ignore_errors=True):
                for candidate in tuner.configs:
                    with suppress(Exception):  # it is met again where the candidate is timed
                        tuner.fn.run(*args, **{**settings, "warmup": True}, **candidate.all_kwargs())
        return bench(tuner, *args, config=config, **settings)

    with ThreadPoolExecutor(threads) as executor:
        Autotuner._bench = compile_first
        try:
            yield
        finally:
            Autotuner._bench = bench
