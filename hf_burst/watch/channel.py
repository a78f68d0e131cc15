"""What the ranks of a job do, told on the side: so that ranks which differ end by an error, and slow ones never do.

Nothing is posted while all goes well. A rank that waits for longer than some seconds rings a bell in the store of the
job. A thread of every process hears it, and posts where its main thread stands. Only a proof is an error: ranks that
wait for each other in a circle, or for one that has ended. It must be seen twice, unchanged. Who says nothing is slow.
"""

import json
import logging
import multiprocessing.util
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from threading import Event, Thread, get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from ..errors import BurstError, ConfigError, LostRankError, RankMismatchError
from .report import START_ANEW, Report, Verdict, stuck
from .stack import stand_of

logger = logging.getLogger(__name__)


@lru_cache(maxsize=64)
def group_key(name: str, members: tuple[int, ...]) -> str:
    """A name of a process group that all ranks give it, and no other group of theirs."""
    return f"{name}/{zlib.crc32(repr(members).encode()):x}"


def _begun(group: Any) -> int:
    """How many collectives of a process group this rank has begun; of gloo, messages between two ranks as well."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return 0


@dataclass(frozen=True)
class _Call:
    """A call of hf_burst in which all ranks of a group meet."""

    group: str
    members: tuple[int, ...]
    number: int
    doing: str


class Watch:
    """The side channel of one process, made at its first call over ranks; it ends with the processes' default group.

    Args:
        world (`ProcessGroup`): The default group.
    """

    patience = 3.0  # seconds that a rank waits before it asks
    interval = 1.0  # seconds between two looks at the bell
    grace = 5.0  # seconds in which a rank that is stuck in code of others may be freed by an error there
    warns = 60.0  # seconds after which a waiting rank says for whom it waits

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world, self.rank = ref(world), dist.get_rank()
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self.store = dist.PrefixStore("hf_burst", store)  # type: ignore[attr-defined]
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self.in_processes = hasattr(store, "port")  # or in files
        self.thread, self.pid = get_ident(), os.getpid()
        self.process = f"process {self.pid} on {socket.gethostname()}"
        self.call: _Call | None = None
        self.messages: tuple[str, tuple[int, ...]] | None = None  # the group over which an attention is under way
        self.latest = "its start"
        self.agreed: dict[str, int] = {}
        self.own: dict[str, int] = {}  # how many of the collectives that the backend counts hf_burst began
        self.broken: dict[str, str] = {}
        self.verdict: Verdict | None = None
        self.farewell: Report | None = None  # of the process that holds the store, and takes it along
        self.heard, self.told = 0, False
        self.place = ""
        self.since, self.again = time.monotonic(), 0.0
        self.suspected: list[str] = []
        self.stopped = Event()
        multiprocessing.util.Finalize(None, self._end, exitpriority=1)  # of children of multiprocessing, too
        Thread(target=self._run, name="hf_burst watch", daemon=True).start()

    @contextmanager
    def calling(self, name: str, members: tuple[int, ...], doing: str) -> Iterator[Callable[[dist.Work, bool], None]]:
        """A call in which all ranks of a group meet, by one collective, and the function to wait for that.

        Raises:
            ConfigError: If an attention over them ended in the middle before.
            RankMismatchError: If they wait in different places.
            LostRankError: If one of them ended, or did not come within the time limit.
        """
        key = group_key(name, members)
        if key in self.broken:
            raise ConfigError(
                f"An attention over these ranks ended in the middle ({self.broken[key]}), so that they no longer agree "
                f"on what was sent. Take smaller batches if memory was short. {START_ANEW}"
            )
        self.thread = get_ident()
        number = self.agreed[key] = self.agreed.get(key, 0) + 1
        self.own[key] = self.own.get(key, 0) + 1
        self.call = _Call(key, members, number, doing)
        try:
            yield self._wait
            self.latest = doing
        except RuntimeError as problem:
            if lost(problem):
                raise self.explain(problem, members, doing) from problem
            raise
        finally:
            self.call = None

    def _wait(self, work: dist.Work, on_gloo: bool) -> None:
        """Waits for a collective of the call under way, and ends with it if the call is proved to be hopeless."""
        began = time.monotonic()
        while True:
            if self.verdict is not None and self.call is not None and self.verdict.concerns(self.call.members):
                raise RankMismatchError(self.verdict.text)
            if on_gloo:
                try:
                    work.wait(timedelta(seconds=self.interval))
                    return
                except RuntimeError:
                    if work.is_completed():
                        raise
            elif work.is_completed():
                work.wait()
                return
            else:
                time.sleep(min(0.0005, (time.monotonic() - began) / 200))  # beside a GPU that is busy

    @contextmanager
    def messaging(self, group: dist.ProcessGroup, members: tuple[int, ...]) -> Iterator[None]:
        """The messages of one attention. If they end in the middle, no rank is sure any more of what was sent: the
        others are told, and calls over these ranks are refused."""
        self.messages = key, _ = group_key(group.group_name, members), members
        before = _begun(group)
        try:
            yield
        except BaseException as problem:  # also when the user interrupts
            self.broken.setdefault(key, repr(problem).splitlines()[0][:300])
            self._within(self.interval, self._tell)
            if lost(problem):
                raise self.explain(problem, members, f"the attention after {self.latest}") from problem
            raise
        finally:
            self.messages = None
            self.own[key] = self.own.get(key, 0) + _begun(group) - before

    def explain(self, problem: BaseException, members: Sequence[int], doing: str) -> BurstError:
        """The error that stands for one of torch.distributed, after what the others answer within some seconds."""
        at_once = "hf_burst: rank %d lost another rank in %s. Look for the first error in the logs of the others."
        logger.error(at_once, self.rank, doing)  # a launcher ends the rank soon
        reports: dict[int, Report] = {}
        reached = self._within(4 * self.interval, lambda: self._ask(members, reports))
        if self.farewell is not None:
            reports.setdefault(self.farewell.rank, self.farewell)
        if self.verdict is not None and self.verdict.concerns([self.rank, *members]):
            return RankMismatchError(self.verdict.text)
        ended = [str(report) for report in reports.values() if report.gives_up("")]
        silent = [str(rank) for rank in members if rank not in reports]
        if "imed out" in str(problem) or "timeout" in str(problem):
            others = " ".join(str(report) for rank, report in reports.items() if rank != self.rank)
            return LostRankError(
                f"Rank {self.rank} waited in {doing} until the time limit of the process group ran out. {others} "
                "If a rank was slow, raise the limit: TrainingArguments(ddp_timeout=SECONDS), or "
                f"init_process_group(timeout=...). Else look at the log of the rank that did not come. {START_ANEW}"
            )
        if silent and reached:
            ended.insert(0, f"Nothing was heard of rank {', '.join(silent)}, which was probably killed.")
        elif silent and self.farewell is None:
            ended.insert(0, "The store of the job cannot be reached: the process that holds it, mostly rank 0, ended.")
        return LostRankError(
            f"Rank {self.rank} lost the connection to another rank in {doing}. {' '.join(ended)} Look for the first "
            f"error in the logs of the other ranks, and for a lack of memory of their hosts. {START_ANEW}"
        )

    def _run(self) -> None:
        """The thread: hears the bell, answers, and asks if the main thread waits."""
        while not self.stopped.wait(self.interval):
            try:
                if dist.is_initialized() and dist.group.WORLD is self.world():
                    self._turn()
                    continue
            except RuntimeError as problem:  # the store has gone with the process that holds it
                logger.debug("hf_burst no longer hears of the other ranks: %s", problem)
            self.stopped.set()

    def _turn(self) -> None:
        if self.farewell is None:
            self._answer(self._rung())
        report, now = self._report(self.heard), time.monotonic()
        if report.state != self.place:
            self.place, self.since, self.again = report.state, now, now + self.patience
            self.told, self.suspected = False, []
        if report.kind and self.verdict is not None and self.verdict.states.get(str(self.rank)) == report.state:
            self._free(report)
        elif not report.kind or now < self.again:
            return
        elif self.farewell is None:
            self._look(now)
        elif self.farewell.rank in report.members and report.needs(self.farewell):
            self.verdict = Verdict.of([report, self.farewell])

    def _look(self, now: float) -> None:
        """Asks the others, and decides when it has seen the same proof twice."""
        reports: dict[int, Report] = {}
        bell = self._ring()
        self._answer(bell)
        last = now + 3 * self.interval

        def read(rank: int) -> Report | None:
            while rank not in reports:
                report = self._read(rank)
                if report is not None and (report.bell >= bell or report.ended):
                    reports[rank] = report
                elif time.monotonic() > last:
                    return None
                else:
                    self._answer(self._rung())
                    time.sleep(self.interval / 10)
            return reports[rank]

        found = stuck(self.rank, read)
        states, waited = [report.state for report in found], now - self.since
        self.again = now if found else now + min(15.0, max(self.interval, waited / 2))
        if found and states == self.suspected:
            self._decide(Verdict.of(found), found[0])
        elif waited > self.warns and not self.told:
            self.told = True
            others = " ".join(str(report) for rank, report in reports.items() if rank != self.rank)
            logger.warning("hf_burst: rank %d has waited for %.0f s. %s", self.rank, waited, others)
        self.suspected = states

    def _decide(self, verdict: Verdict, own: Report) -> None:
        """Tells all ranks before this one raises, since its end may take connections and the store along."""
        self.store.compare_set("verdict", "", json.dumps(asdict(verdict)))
        self._tell()
        if own.kind == "agree":
            time.sleep(2 * self.interval)
        self.verdict = self.verdict or verdict
        self._free(own)

    def _free(self, report: Report) -> None:
        """Says the verdict on a rank that hangs in code of others, where nothing can be raised, and ends it if the
        errors of other ranks do not."""
        assert self.verdict is not None, "it is known"
        if report.kind == "agree":
            return  # raises by itself
        if not self.told:
            self.told, self.again = True, time.monotonic() + self.grace
            logger.error("hf_burst, rank %d: %s", self.rank, self.verdict.text)
        elif time.monotonic() >= self.again:
            logger.critical("hf_burst ends rank %d, whose main thread waits for ever (%s).", self.rank, report.line)
            os._exit(1)

    def _report(self, bell: int, ended: str = "") -> Report:
        call = self.call
        facts: dict[str, Any] = {"agreed": dict(self.agreed), "broken": dict(self.broken), "begun": {}, "ended": ended}
        groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        if dist.is_initialized():
            for group, ranks in list(dist.distributed_c10d._world.pg_group_ranks.items()):
                name, members = group.group_name, tuple(ranks)
                groups[name] = key, _ = group_key(name, members), members
                facts["begun"][key] = _begun(group) - self.own.get(key, 0)
        stand = stand_of(self.thread)
        facts["line"] = stand.line
        if call is not None:
            facts |= {"kind": "agree", "doing": call.doing, "group": call.group, "members": call.members}
            facts["number"] = call.number
        elif stand.group in groups and not ended:
            key, members = groups[stand.group]
            facts |= {"kind": "collective", "doing": stand.doing, "group": key, "members": members}
            facts["number"] = facts["begun"][key]
        elif self.messages is not None:
            key, members = self.messages
            facts |= {"kind": "messages", "doing": f"the attention after {self.latest}", "group": key}
            facts |= {"members": members, "number": self.agreed.get(key, 0)}
        return Report(self.rank, bell, self.process, self.latest, **facts)

    def _answer(self, bell: int, ended: str = "") -> None:
        """Posts where this rank stands, if the bell was rung since, and reads what was decided."""
        if bell == self.heard and not ended:
            return
        self.heard = bell
        self.store.set(f"rank {self.rank}", json.dumps(asdict(self._report(bell, ended))))
        if self.verdict is None and self.store.check(["verdict"]):
            self.verdict = Verdict(**json.loads(self.store.get("verdict")))
        if self.store.check(["closed by"]):
            self.farewell = self._read(int(self.store.get("closed by")))

    def _tell(self, ended: str = "") -> None:
        """Posts where this rank stands, and makes the others look."""
        if self.farewell is None:
            self._answer(self._ring(), ended)

    def _ask(self, members: Sequence[int], reports: dict[int, Report]) -> None:
        """Collects what these ranks answer within some seconds."""
        if self.farewell is not None:
            return
        bell, last = self._ring(), time.monotonic() + 3 * self.interval
        while time.monotonic() < last and len(reports) < len(members):
            self._answer(self._rung())
            for rank in members:
                report = self._read(rank)
                if report is not None and (report.bell >= bell or report.ended):
                    reports[rank] = report
            time.sleep(self.interval / 10)

    def _ring(self) -> int:
        return int(self.store.add("bell", 1))

    def _rung(self) -> int:
        return int(self.store.get("bell")) if self.store.check(["bell"]) else 0

    def _read(self, rank: int) -> Report | None:
        key = f"rank {rank}"
        return Report(**json.loads(self.store.get(key))) if self.store.check([key]) else None

    def _within(self, seconds: float, ask: Callable[[], None]) -> bool:
        """Whether the store answers in time; a lost connection may hold a thread up for long, but not this one."""
        answered = Event()

        def run() -> None:
            try:
                ask()
                answered.set()
            except RuntimeError as problem:
                logger.debug("hf_burst cannot reach the store of the job: %s", problem)

        thread = Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        return answered.is_set()

    def _end(self) -> None:
        """Tells the others that this process ends, and the user what a lost connection means that ended it."""
        if os.getpid() != self.pid or self.stopped.is_set():
            return
        self.stopped.set()
        if not dist.is_initialized():
            return  # and the store may be gone as well
        problem = getattr(sys, "last_value", None)
        if isinstance(problem, RuntimeError) and lost(problem):
            everyone = range(dist.get_world_size())
            logger.error("hf_burst: %s", self.explain(problem, everyone, "a message of torch.distributed"))
        ended = f"ended by {problem!r}".splitlines()[0][:300] if problem is not None else "ended without an error"
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not self.in_processes
        closes = self.rank == 0 and not by_agent

        def tell() -> None:
            if closes:
                self.store.set("closed by", str(self.rank))
            self._tell(ended)

        if self._within(2 * self.interval, tell) and closes:
            time.sleep(1.5 * self.interval)  # until the others know, whom torch would show a trace for each question


def lost(problem: BaseException) -> bool:
    """Whether an error is that of a backend of torch.distributed whose messages do not come through."""
    ours = isinstance(problem, BurstError)
    return not ours and (isinstance(problem, dist.DistError) or "gloo/" in str(problem) or "NCCL" in str(problem))


_WATCHES: WeakKeyDictionary[dist.ProcessGroup, Watch] = WeakKeyDictionary()


def watch_of_process() -> Watch:
    """The watch of this process; for processes that torch.distributed has joined."""
    world = dist.group.WORLD
    assert world is not None, "asked by one of several ranks"
    found = _WATCHES.get(world)
    if found is None:
        found = _WATCHES[world] = Watch(world)
    return found
