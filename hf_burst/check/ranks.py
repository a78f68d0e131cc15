"""Processes of this machine that stand for ranks. They never hang: a function has a time limit."""

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
    """Runs a function in two new processes that are joined by gloo.

    Args:
        function (`Callable`): A function that other processes can import.
        arguments: Its arguments, which must be picklable.
        limit (`float`): Seconds that it may take.

    Returns:
        What rank 0 returns.

    Raises:
        ConfigError: If a rank ended, or did not answer in time; with what can be done.
        Exception: What the first rank raised: a `ValueError` as it is, another one as a `RuntimeError`.
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
            name, code = problem.signal_name, problem.exit_code
            raise ConfigError(
                f"A rank of the comparison ended {f'by the signal {name}' if name else f'with exit code {code}'}; its "
                "own message stands above. A killed one needed more memory. A script that checks a model needs "
                '`if __name__ == "__main__":`, and the class a module that others can import (no notebook).'
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
    """A rank: leaves what the function returns, or the `ValueError` that it raises, in a file."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which `spawn` sends when the process that waits has ended
    for name in filter(tells_of_launch, list(os.environ)):
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logging.disable(logging.WARNING)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    store, forever = f"file://{folder}/store", timedelta(days=1)  # the process that waits has the time limit
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=forever)
    answer = Path(folder, f"rank{rank}")
    try:
        answer.write_bytes(pickle.dumps(function(*arguments)))
    except ValueError as error:
        answer.write_bytes(pickle.dumps(error))
        raise
