"""Processes that stand for ranks: started once for each world size, then sent one function after another.

A test gives `run` a module-level function; it runs on every rank as `function(rank, size, *arguments)` and its results
come back as a list. What a rank raises is raised in the test as `RankError`, with all ranks' errors, and a rank that
does not answer in time ends the whole pool, so a hang is a failure and never a stuck job.

Ranks are forks of a server, which is itself a fork of this process: it has imported all that this process had, which
takes many seconds, and runs nothing. Ranks with GPUs are started from nothing: each of them hashes strings by a seed of
its own, as ranks of users do, and as those of the tests that are launched.
"""

import faulthandler
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any
from unittest import mock

import datasets
import huggingface_hub
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate.state import AcceleratorState, GradientState

_GRACE = 30.0  # seconds for the others when a rank has raised
_IMPORTED = [  # what ranks import, if pytest did not for the tests that were chosen
    "peft",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
]
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its workers would outlive a rank and keep pytest from ending
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without which products on GPUs refuse to be deterministic
}


class RankError(Exception):
    """What the ranks raised: `errors[rank]` is the exception, or `None`."""

    def __init__(self, errors: list[BaseException | None], traces: list[str | None]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, trace in enumerate(traces) if trace))


@cache
def forked() -> BaseContext:
    """Starts processes as forks of a server, which is a fork of this process as it is with the first call."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    resource_tracker.ensure_running()  # a program of its own
    with mock.patch("multiprocessing.util.spawnv_passfds", _fork_server):
        forkserver.ensure_running()
    return context


def _fork_server(path: str, arguments: list[str], passed: list[int]) -> int:
    """Forks this process instead of starting a program that imports all anew; the fork runs what that one would."""
    process = os.fork()
    if process:
        return process
    try:
        for each in set(map(int, os.listdir("/dev/fd"))) - {0, 1, 2, *passed}:
            os.dup2(2, each, inheritable=False)  # pipes, whose ends others wait for, and pytest's files
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.environ.update(_ENVIRONMENT, OMP_NUM_THREADS="1")
        # what was read from the environment
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        torch._inductor.config.compile_threads = 1
        exec(arguments[-1])
    finally:
        os._exit(0)


class RankPool:
    """`size` processes of this machine, joined by gloo, or by NCCL on GPUs."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that is free
        context = mp.get_context("spawn") if backend == "nccl" else forked()
        self._start(context, size, _serve, self.store.port, backend)

    def _start(self, context: BaseContext, size: int, serve: Callable[..., None], *arguments: Any) -> None:
        """Starts the processes, each as `serve(rank, size, pipe, *arguments)`."""
        self.size = size
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, there, *arguments))
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 180.0) -> list[Any]:
        """Runs a function on every rank and returns what they return, in rank order. Ranks that wait for one that
        raised are ended."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers: dict[int, tuple[Any, BaseException | None, str | None]] = {}
        last = time.monotonic() + timeout
        while len(answers) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = wait(waiting, max(0.0, last - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self.processes[rank].join(_GRACE)
                    how = f"died with exit code {self.processes[rank].exitcode}"  # a signal is negative
                    answers[rank] = None, RuntimeError(f"rank {rank} of {self.size} {how}"), f"it {how}"
                if answers[rank][1] is not None:
                    last = min(last, time.monotonic() + _GRACE)
        late = [rank for rank in range(self.size) if rank not in answers]
        errors = [answers[rank][1] if rank in answers else None for rank in range(self.size)]
        traces = [answers[rank][2] if rank in answers else "did not answer" for rank in range(self.size)]
        if late or not self.alive:
            self.close()
        if late and not any(errors):
            raise TimeoutError(f"ranks {late} of {self.size} did not answer within {timeout} s: they hang")
        if any(error is not None for error in errors):
            raise RankError(errors, traces)
        return [answers[rank][0] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def reset_accelerate() -> None:
    """Forgets accelerate's state, which lives as long as a process and would reach from one test into the next."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def join(rank: int, size: int, store: dist.Store, backend: str = "gloo") -> None:
    """Makes this process a rank, on one thread; gloo's ranks are on CPUs for accelerate, too."""
    faulthandler.enable()  # a rank that is killed by a fault of native code says where
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), **_ENVIRONMENT)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(gpu_of(rank))
    else:
        os.environ["ACCELERATE_USE_CPU"] = "1"
        # workers of data loaders are forks, as where users launch; a fork of the server could ask it for none
        mp.set_start_method("fork", force=True)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def answer(rank: int, size: int, pipe: Connection) -> None:
    """Runs what comes through a pipe, and sends back what it returns or raises, until the pipe is closed."""
    gc.freeze()  # what was imported is never garbage; looking through it took a fifth of the tests' time
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        reset_accelerate()
        try:
            pipe.send((function(rank, size, *arguments), None, None))
        except BaseException as error:
            trace = traceback.format_exc()
            try:
                pipe.send((None, error, trace))
            except Exception:
                pipe.send((None, RuntimeError(str(error)), trace))


def gpu_of(rank: int) -> torch.device:
    """The GPU of a rank. Ranks share GPUs where there are fewer."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def share_gpus(rank: int) -> None:
    """Lets this process be a rank beside others on its GPU: NCCL takes them for hosts and sends through sockets, and
    they read each other's memory all the same."""
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    for module in ("ring.resources", "ring.symmetric", "hf.trainers.accelerate"):
        mock.patch(f"hf_burst.{module}.host_id", return_value="this host").start()  # for as long as the process lives


def _serve(rank: int, size: int, pipe: Connection, port: int, backend: str) -> None:
    local = gpu_of(rank).index if backend == "nccl" else rank
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(size))
    if backend == "nccl" and size > torch.cuda.device_count():
        share_gpus(rank)
    join(rank, size, dist.TCPStore("127.0.0.1", port, is_master=False), backend)
    answer(rank, size, pipe)
