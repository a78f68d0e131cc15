"""Runs a function on local processes that act as ranks, within a time limit, so that it never hangs."""

import logging
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from ..errors import ConfigError
from ..hf.groups import tells_of_launch

RANKS = 2


def run_on_ranks(function: Callable[..., Any], *arguments: Any, limit: float) -> Any:
    """Runs a function in two new processes that are connected by gloo.

    Args:
        function (`Callable`): A function that other processes can import.
        arguments: Its arguments, which must be picklable.
        limit (`float`): The time limit in seconds.

    Returns:
        The result of rank 0.

    Raises:
        ConfigError: If a rank died or did not answer in time; says what to do.
        Exception: The error of the first rank that failed: a `ValueError` unchanged, others as `RuntimeError`.
    """
    last = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="hf_burst_check_") as folder:
        ranks: Any = spawn(_serve, (folder, function, arguments), RANKS, join=False, daemon=True)
        try:
            while not ranks.join(max(0.0, last - time.monotonic()), grace_period=1.0):
                if time.monotonic() >= last:
                    raise ConfigError(
                        f"The comparison did not end within {limit:g} seconds. Give it more (--limit, time_limit), or "
                        "look for a forward in which a rank waits for another."
                    )
        except ProcessExitedException as problem:
            end = f"with exit code {problem.exit_code}"
            if problem.signal_name:
                end = f"by the signal {problem.signal_name}"
            raise ConfigError(
                f"A rank of the comparison ended {end}; its own message stands above. A killed one needed more memory. "
                'A script that checks a model needs `if __name__ == "__main__":`, and the class a module that others '
                "can import (no notebook)."
            ) from problem
        except ProcessRaisedException as problem:
            error = Path(folder, f"rank{problem.error_index}")
            if error.exists():
                raise pickle.loads(error.read_bytes()) from None
            raise RuntimeError(str(problem).strip().split("\n")[-1]) from None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return pickle.loads(Path(folder, "rank0").read_bytes())


def _serve(rank: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Runs the function as one rank, and writes its result or `ValueError` to a file."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # `spawn` sends it when the parent process has ended
    for name in filter(tells_of_launch, list(os.environ)):
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logging.disable(logging.WARNING)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(days=1),  # the parent process has the time limit
    )
    answer = Path(folder, f"rank{rank}")
    try:
        answer.write_bytes(pickle.dumps(function(*arguments)))
    except ValueError as error:
        answer.write_bytes(pickle.dumps(error))
        raise
