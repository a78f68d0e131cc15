"""Processes of this machine that stand for ranks. They never hang: each function has a time limit."""

import logging
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..errors import ConfigError

_GRACE = 30.0  # seconds for the other ranks when one has failed
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """Two processes, joined by gloo, that run one function after another; started with the first.

    Args:
        size (`int`, defaults to 2): How many processes.
    """

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def run(self, function: Callable[..., Any], *arguments: Any, limit: float) -> Any:
        """Runs a function on every rank.

        Args:
            function (`Callable`): A function that other processes can import.
            arguments: Its arguments, which must be picklable.
            limit (`float`): Seconds that it may take.

        Returns:
            What rank 0 returns.

        Raises:
            ConfigError: If a rank ended, or did not answer in time; with what can be done.
            Exception: What a rank raised, the first of them.
        """
        if not self._processes:
            self._start()
        answers: dict[int, tuple[Any, BaseException | None]] = {}
        last = time.monotonic() + limit
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
            while len(answers) < self.size and not any(error for _, error in answers.values()):
                waiting = [rank for rank in range(self.size) if rank not in answers]
                ready = wait([self._pipes[rank] for rank in waiting], max(0.0, last - time.monotonic()))
                if not ready:
                    raise ConfigError(
                        f"The comparison did not end within {limit:g} seconds. Give it more (--limit, time_limit), or "
                        "look for a forward in which a rank waits for another."
                    )
                for rank in waiting:
                    if self._pipes[rank] in ready:
                        answers[rank] = self._pipes[rank].recv()
        except (EOFError, OSError) as problem:
            raise ConfigError(self._died()) from problem
        finally:
            if len(answers) < self.size or any(error for _, error in answers.values()):
                self.close()
        for _, error in answers.values():
            if error is not None:
                raise error
        return answers[0][0]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], ""

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.mkdtemp(prefix="hf_burst_check_")
        for rank in range(self.size):
            here, there = context.Pipe()
            options = (rank, self.size, os.path.join(self._folder, "store"), there)
            process = context.Process(target=_serve, args=options, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def _died(self) -> str:
        for process in self._processes:
            process.join(_GRACE)
        codes = [process.exitcode for process in self._processes]
        names = [signal.Signals(-code).name for code in codes if code is not None and code < 0]
        why = f"by the signal {names[0]}" if names else f"with exit codes {codes}"
        return (
            f"A rank of the comparison ended {why}; its own message stands above. A killed one needed more memory. "
            'A script that checks a model needs `if __name__ == "__main__":`, and the class a module that others can '
            "import (no notebook)."
        )


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    """A rank: runs what it is sent until the other end of the pipe is gone."""
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logging.disable(logging.WARNING)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    limit = timedelta(days=1)  # the process that waits for the answers has the time limit
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer: tuple[Any, BaseException | None] = function(*arguments), None
        except BaseException as error:
            trace = traceback.format_exc()
            answer = None, error if isinstance(error, ValueError) else RuntimeError(trace.strip().split("\n")[-1])
        pipe.send(answer)
