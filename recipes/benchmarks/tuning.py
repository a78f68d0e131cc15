"""Triton's autotuner with many cores. It compiles the candidates of a kernel one after another, when it meets a new
shape. For all kernels of a gated delta rule that takes minutes. Here they are compiled side by side."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def compiled_side_by_side(threads: int | None = None) -> Iterator[None]:
    """Has Triton compile all candidates of a kernel at once, before it times them one after another.

    Args:
        threads (`int`, *optional*): How many compile; this process's share of the cores by default.
    """
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    threads = threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    prune = Autotuner.prune_configs

    def prune_and_compile(self: Any, options: dict[str, Any]) -> list[Any]:
        """The candidates that are about to be timed, compiled. Those that fail are left to the autotuner."""
        candidates: list[Any] = prune(self, options)
        named = {name: value for name, value in options.items() if name != "warmup"}
        if len(candidates) > 1:
            with AsyncCompileMode(pool, ignore_errors=True):
                for candidate in candidates:
                    self.fn.warmup(*self.nargs.values(), **named, **candidate.all_kwargs())
        return candidates

    with ThreadPoolExecutor(threads) as pool, mock.patch.object(Autotuner, "prune_configs", prune_and_compile):
        yield
