"""The processes of a benchmark, one device each.

A contender may fail on one rank only. The ranks agree about it, drop that contender and go on together.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import parse_flag_from_env

from hf_burst.cli.launch import launched
from hf_burst.errors import ConfigError

T = TypeVar("T")
_GRACE_S = 30.0
_POLL_S = 2e-5


class PeerFailed(Exception):
    """Another rank met an error, so its messages will not come."""


class Ranks:
    """All processes of a job that `torchrun` or `accelerate launch` started, or this process alone.

    Each family of contenders has a process group of its own, which is aborted when a contender fails. The ranks agree
    about failures over gloo, beside the devices. One call of a contender may take `timeout_s`.
    """

    def __init__(self, device: str = "auto", timeout_s: float = 120.0) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU") else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda needs a GPU that torch sees; there is none. Use --device cpu.")
        self.cuda = device == "cuda"
        self.timeout_s = timeout_s
        self.size, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else launched()
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        if self.cuda and local >= torch.cuda.device_count():
            raise ConfigError(
                f"Local rank {local} has no GPU: there are {torch.cuda.device_count()}. Start fewer processes."
            )
        self.device = torch.device("cuda", local) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        self._opened = self.size > 1 and not dist.is_initialized()
        if self._opened:
            dist.init_process_group("nccl" if self.cuda else "gloo", timeout=timedelta(seconds=2 * timeout_s + 60))
        # a long time limit: other ranks reach it only after they have given up a call
        self._control = self._new_group("gloo", 4 * timeout_s + 120) if self.size > 1 else None
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._calls = 0

    def group(self, family: str) -> dist.ProcessGroup | None:
        """The process group of a family of contenders, `None` for one process. All ranks call it together."""
        if self.size == 1:
            return None
        if family not in self._groups:
            # on GPUs this class gives up a call itself, before NCCL's watchdog would end the process
            backend, limit_s = ("nccl", 4 * self.timeout_s + 120) if self.cuda else ("gloo", self.timeout_s)
            self._groups[family] = self._new_group(backend, limit_s)
        return self._groups[family]

    def attempt(self, function: Callable[[], T], family: str = "") -> tuple[T | None, str | None]:
        """Calls a function on every rank, and returns its result and the failure, if any rank had one.

        If it fails on some ranks only, the others wait for messages that do not come. On CPUs they wait until the
        group's time limit. On GPUs they hear of the failure, and abort the group of the family that the function
        communicates over.

        Returns:
            The result, or `None` after a failure; and the failure as a sentence, or `None`, alike on all ranks.
        """
        self._calls += 1
        result: T | None = None
        problem: tuple[float, str] | None = None
        try:
            result = function()
            self._finish(family)
        except Exception as error:
            self._tell()
            problem = (time.time(), _sentence(error))
        failure = self.agree(problem)
        if failure is not None:
            result = None
            self._give_up(family)
        return result, failure

    def agree(self, problem: tuple[float, str] | None) -> str | None:
        """Joins the problems of all ranks in one sentence, the earliest first; `None` if no rank has one."""
        problems = sorted((*report, rank) for rank, report in enumerate(self.gather(problem)) if report)
        if len(problems) == self.size and len({text for _, text, _ in problems}) == 1:
            return str(problems[0][1])
        return "; ".join(f"rank {rank}: {text}" for _, text, rank in problems) or None

    def largest(self, values: Sequence[float]) -> list[float]:
        """The element-wise maximum over the ranks."""
        numbers = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._control)
        return numbers.tolist()  # type: ignore[no-any-return]

    def slowest(self, values: dict[str, float]) -> dict[str, float]:
        """The largest of each value over the ranks."""
        return dict(zip(values, self.largest([*values.values()]), strict=True))

    def gather(self, value: Any) -> list[Any]:
        """A value of every rank, in rank order."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self._control)
        return values

    def align(self) -> None:
        """Lets all ranks start together: the hosts by a barrier, the devices by a tiny all-reduce."""
        if self.size > 1 and self.cuda:
            dist.barrier(device_ids=[self.device.index])
            torch.cuda.synchronize()
            dist.all_reduce(torch.zeros(1, device=self.device))
        elif self.size > 1:
            dist.barrier(group=self._control)
        else:
            self.wait()

    def wait(self) -> None:
        """Waits until this rank's device has finished."""
        if self.cuda:
            torch.cuda.synchronize()

    def time(self, function: Callable[[], Any], calls: int = 1) -> float:
        """Seconds of a call on this rank, of so many in a row."""
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        self.wait()
        return (time.perf_counter() - start) / calls

    def say(self, text: str) -> None:
        """Writes a line of progress to stderr, on rank 0."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._opened:
            dist.destroy_process_group()

    def _new_group(self, backend: str, timeout_s: float) -> dist.ProcessGroup:
        return dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))

    def _finish(self, family: str) -> None:
        """Waits for the device until the time limit, or until another rank has failed."""
        if not self.cuda:
            return
        event = torch.cuda.Event()
        event.record()
        start, heard = time.perf_counter(), 0.0
        while not event.query():
            waited = time.perf_counter() - start
            if waited > self.timeout_s:
                self._abort(family, event)
                raise TimeoutError(f"the GPU did not finish within {self.timeout_s:.0f} s")
            if self.size > 1 and waited - heard > 0.5:
                heard = waited
                if self._store().check([self._key()]):
                    self._abort(family, event)
                    raise PeerFailed("waited for a rank that failed")
            time.sleep(_POLL_S)
        torch.cuda.synchronize()  # raises errors of the device

    def _abort(self, family: str, event: torch.cuda.Event) -> None:
        """Aborts the group of a family, and ends the job if the device is stuck even so."""
        self._tell()
        if family in self._groups:
            dist.distributed_c10d._abort_process_group(self._groups.pop(family))
        start = time.perf_counter()
        while not event.query():
            if time.perf_counter() - start > _GRACE_S:
                print(f"rank {self.rank}: the GPU is stuck in {family}; the benchmark ends here", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)
            time.sleep(0.1)

    def _give_up(self, family: str) -> None:
        """Drops the group of a failed contender, and the memory that its errors held."""
        group = self._groups.pop(family, None)
        if group is not None and self.cuda:
            dist.distributed_c10d._abort_process_group(group)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def _tell(self) -> None:
        if self.size > 1:
            self._store().set(self._key(), "1")

    def _key(self) -> str:
        return f"hf_burst_benchmark/failed/{self._calls}"

    def _store(self) -> Any:
        return dist.distributed_c10d._get_default_store()


def _sentence(error: Exception) -> str:
    text = (str(error) or repr(error)).strip().splitlines()[0]
    return f"{type(error).__name__}: {text}"[:500]
