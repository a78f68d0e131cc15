"""What the ranks of a job do, told on the side: so that ranks which differ end by an error, and slow ones never do.

Nothing is posted while all goes well. A rank that waits for longer than some seconds raises a poll counter in the store
of the job. A thread of every process sees it, and posts where its main thread stands. Only a proof is an error: ranks
that wait for each other in a circle, or for one that has ended. It must be seen twice, unchanged. Who says nothing is
slow.
"""

import json
import logging
import multiprocessing.util
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from threading import Event, Thread, get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from ...errors import BurstError, ConfigError, LostRankError, RankMismatchError
from .counts import Counts, begun_over, group_key
from .report import NO_STORE, START_ANEW, Report, Verdict, after_the_limit, stuck
from .stack import stand_of
from .worker import Worker

logger = logging.getLogger(__name__)


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
    interval = 1.0  # seconds between two looks at the poll counter
    grace = 15.0  # seconds in which a rank that is stuck in code of others may be freed by an error there
    warns = 60.0  # seconds after which a waiting rank says for whom it waits

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world, self.rank = ref(world), dist.get_rank()
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self.store = dist.PrefixStore("hf_burst", store)  # type: ignore[attr-defined]
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self.in_processes = hasattr(store, "port")  # or in files
        self.thread = get_ident()
        self.process = f"process {os.getpid()} on {socket.gethostname()}"
        self.handled = id(sys.exc_info()[1])  # a fork inherits what its parent handles
        self.call: _Call | None = None
        self.messages: tuple[str, tuple[int, ...]] | None = None  # the group over which an attention is under way
        self.latest = "its start"
        self.counts: WeakKeyDictionary[dist.ProcessGroup, Counts] = WeakKeyDictionary()
        self.verdict: Verdict | None = None
        self.last_report: Report | None = None  # of the process that holds the store, and takes it along
        self.born = self._polls()  # what is older is of another default group over the same store
        self.store.set(f"watch {self.rank}", self.process)
        self.answered, self.told = 0, False
        self.place = ""
        self.since, self.again = time.monotonic(), 0.0
        self.suspected: list[str] = []
        self.stopped = Event()
        self.worker = Worker()
        self.listener = Thread(target=self._run, name="hf_burst watch", daemon=True)
        self.listener.start()
        threads = self.listener, self.worker.thread
        # of children of multiprocessing, too. It stays when this watch has gone: its threads may still be on their way
        multiprocessing.util.Finalize(None, _end, args=(ref(self), threads, self.patience), exitpriority=1)

    @contextmanager
    def calling(self, group: dist.ProcessGroup, doing: str) -> Iterator["Watch"]:
        """A call in which all ranks of a group meet, and this watch to wait for it by [`wait`] and [`until`]. After one
        that this rank gave up, it refuses all later ones over these ranks, and the others are told.

        Raises:
            ConfigError: If a pass over them ended in the middle before.
            RankMismatchError: If they wait in different places.
            LostRankError: If one of them ended, or did not come within the time limit.
        """
        members = tuple(dist.get_process_group_ranks(group))
        counts = self.counts.setdefault(group, Counts())
        if counts.broken:
            raise ConfigError(
                f"A pass over these ranks ended in the middle ({counts.broken}), so that they no longer agree "
                f"on what was sent. Take smaller batches if memory was short. {START_ANEW}"
            )
        self.thread = get_ident()
        counts.agreed += 1
        self.call = _Call(group_key(group.group_name, members), members, counts.agreed, doing)
        try:
            yield self
            counts.met, counts.mark = counts.agreed, begun_over(group) - counts.own
            self.latest = doing
        except BaseException as problem:  # also when the user interrupts
            # what this rank has sent would meet what another one sends later
            counts.end_in_the_middle(problem)
            self.worker.within(self.interval, self._tell)
            if isinstance(problem, RuntimeError) and lost(problem):
                raise self.explain(problem, members, doing) from problem
            raise
        finally:
            self.call = None

    def wait(self, work: dist.Work) -> None:
        """Waits for a collective by gloo of the call under way, and ends with it if that is proved to be hopeless."""
        while True:
            self._check_call()
            try:
                work.wait(timedelta(seconds=self.interval))
                return
            except RuntimeError:
                if work.is_completed():  # it may have ended well just after the second was over
                    work.wait()
                    return

    def until(self, ready: Callable[[], bool], limit: timedelta) -> None:
        """Asks the store until all have come to the call under way, and ends as [`wait`] does."""
        began = time.monotonic()
        while not ready():
            self._check_call()
            waited = time.monotonic() - began
            if waited > limit.total_seconds():
                raise dist.DistStoreError(f"timed out after {limit}")
            time.sleep(min(0.05, 0.001 + waited / 20))

    def _check_call(self) -> None:
        if self.verdict is not None and self.call is not None and self.verdict.concerns(self.call.members):
            raise RankMismatchError(self.verdict.text)

    @contextmanager
    def messaging(self, group: dist.ProcessGroup) -> Iterator[None]:
        """The messages of one attention. If they end in the middle, no rank is sure any more of what was sent: the
        others are told, and calls over these ranks are refused."""
        members = tuple(dist.get_process_group_ranks(group))
        counts = self.counts.setdefault(group, Counts())
        self.messages = group_key(group.group_name, members), members
        before = begun_over(group)
        try:
            yield
        except BaseException as problem:  # also when the user interrupts
            counts.end_in_the_middle(problem)
            self.worker.within(self.interval, self._tell)
            if lost(problem):
                raise self.explain(problem, members, f"the attention after {self.latest}") from problem
            raise
        finally:
            self.messages = None
            counts.own += begun_over(group) - before

    def explain(self, problem: BaseException, members: Sequence[int], doing: str) -> BurstError:
        """The error that stands for one of torch.distributed, after what the others answer within some seconds."""
        at_once = "hf_burst: rank %d lost another rank in %s. Look for the first error in the logs of the others."
        logger.error(at_once, self.rank, doing)  # a launcher ends the rank soon
        answered: dict[int, Report] = {}
        unknown_ranks: list[int] = []
        reached = self.worker.within(4 * self.interval, lambda: self._ask(members, answered, unknown_ranks))
        reports = dict(answered)  # a task that is late may add more
        if self.last_report is not None:
            reports.setdefault(self.last_report.rank, self.last_report)
        if self.verdict is not None and self.verdict.concerns([self.rank, *members]):
            return RankMismatchError(self.verdict.text)
        ended = [str(report) for report in reports.values() if report.gives_up("")]
        asked = reached and self.last_report is None  # else the store is gone, and silence proves nothing
        silent = [rank for rank in members if rank not in reports and rank != self.rank]
        unknown = [rank for rank in silent if asked and rank in unknown_ranks]
        lacking = [rank for rank in silent if rank not in unknown]
        never = [f"Rank {', '.join(map(str, unknown))} never came to a call of hf_burst."] if unknown else []
        if "imed out" in str(problem) or "timeout" in str(problem):
            answers = [str(report) for rank, report in reports.items() if rank != self.rank]
            return LostRankError(
                f"Rank {self.rank} waited in {doing} until the time limit of the process group ran out. "
                f"{after_the_limit([*never, *answers], lacking, asked, self.last_report is not None)} {START_ANEW}"
            )
        ended[:0] = never
        if lacking and asked:
            killed = ", ".join(map(str, lacking))
            ended.insert(0, f"Nothing was heard of rank {killed}, which was killed or left the process group.")
        elif lacking and self.last_report is None:
            ended.insert(0, f"The store of the job cannot be reached: {NO_STORE}.")
        return LostRankError(
            f"Rank {self.rank} lost the connection to another rank in {doing}. {' '.join(ended)} Look for the first "
            f"error in the logs of the other ranks, and for a lack of memory of their hosts. {START_ANEW}"
        )

    def _run(self) -> None:
        """The thread: reads the poll counter, answers, and asks if the main thread waits."""
        failed = False
        while not self.stopped.wait(self.interval) and dist.is_initialized() and dist.group.WORLD is self.world():
            try:
                self._turn()
            except dist.DistError as problem:  # the store has gone with the process that holds it
                logger.debug("hf_burst no longer hears of the other ranks: %s", problem)
                break
            except Exception:  # it looks again: what the user changes meanwhile may be whole by then
                if not failed:
                    logger.exception("hf_burst, rank %d, failed to look where ranks wait.", self.rank)
                failed = True
        if not self.stopped.is_set():  # else the process ends, and has something to tell
            self.stopped.set()
            self.worker.end()

    def _turn(self) -> None:
        if self.last_report is None:
            self._answer(self._polls())
        report, now = self._report(self.answered), time.monotonic()
        if report.state != self.place:
            self.place, self.since, self.again = report.state, now, now + self.patience
            self.told, self.suspected = False, []
        if report.kind and self.verdict is not None and self.verdict.states.get(str(self.rank)) == report.state:
            self._free(report)
        elif not report.kind or now < self.again:
            return
        elif self.last_report is None:
            self._look(now)
        elif self.last_report.rank in report.members and report.needs(self.last_report):
            self.verdict = Verdict.of([report, self.last_report])

    def _look(self, now: float) -> None:
        """Asks the others, and decides when it has seen the same proof twice."""
        reports: dict[int, Report] = {}
        polls = self._ask_all()
        self._answer(polls)
        last = now + 3 * self.interval

        def read(rank: int) -> Report | None:
            while rank not in reports:
                report = self._read(rank)
                if report is not None and (report.polls >= polls or report.ended):
                    reports[rank] = report
                elif self.stopped.is_set() or time.monotonic() > last:
                    return None
                else:
                    self._answer(self._polls())
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
        before, known = self._decided()
        if known is None:
            self.store.compare_set("verdict", before, json.dumps(asdict(replace(verdict, polls=self.answered))))
        self._tell()
        if own.kind == "agree":
            self.stopped.wait(2 * self.interval)
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
            self.worker.within(
                4 * self.interval, lambda: self._leave("was ended by hf_burst, since it waited for ever,")
            )
            self.worker.within(self.interval, _flush)
            os._exit(1)

    def _report(self, polls: int, ended: str = "") -> Report:
        call = self.call
        facts: dict[str, Any] = {"agreed": {}, "broken": {}, "begun": {}, "idle": {}, "ended": ended}
        groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        by_gloo: set[str] = set()
        world: Any = dist.distributed_c10d._world
        for group, (backend, _) in list(world.pg_map.items()):  # the main thread may destroy them meanwhile
            name, members = group.group_name, tuple(world.pg_group_ranks.get(group, ()))
            groups[name] = key, _ = group_key(name, members), members
            counts = self.counts.get(group) or Counts()
            begun = facts["begun"][key] = begun_over(group) - counts.own
            facts["agreed"][key] = counts.agreed
            if begun == counts.mark:
                facts["idle"][key] = counts.met
            if counts.broken:
                facts["broken"][key] = counts.broken
            if "gloo" in backend:
                by_gloo.add(name)
        stand = stand_of(self.thread)
        facts["line"] = stand.line
        if call is not None:
            facts |= {"kind": "agree", "doing": call.doing, "group": call.group, "members": call.members}
            facts["number"] = call.number
        elif stand.group in groups and not ended:
            key, members = groups[stand.group]
            facts |= {"kind": "collective", "doing": stand.doing, "group": key, "members": members}
            facts["number"], facts["counted"] = facts["begun"][key], stand.meets or stand.group not in by_gloo
        elif self.messages is not None:
            key, members = self.messages
            facts |= {"kind": "messages", "doing": f"the attention after {self.latest}", "group": key}
            facts |= {"members": members, "number": facts["agreed"].get(key, 0)}
        return Report(self.rank, polls, self.process, self.latest, **facts)

    def _answer(self, polls: int, ended: str = "") -> None:
        """Posts where this rank stands, if the counter has risen since, and reads what was decided."""
        if polls == self.answered and not ended:
            return
        self.answered = polls
        self.store.set(f"rank {self.rank}", json.dumps(asdict(self._report(polls, ended))))
        if self.verdict is None:
            self.verdict = self._decided()[1]
        if self.store.check(["closed by"]):
            report = self._read(int(self.store.get("closed by")))
            self.last_report = report if report is not None and report.ended else None

    def _tell(self, ended: str = "") -> None:
        """Posts where this rank stands, and makes the others look."""
        if self.last_report is None:
            self._answer(self._ask_all(), ended)

    def _decided(self) -> tuple[str, Verdict | None]:
        """What the store holds of a verdict, and the one of these processes."""
        text = self.store.get("verdict").decode() if self.store.check(["verdict"]) else ""
        verdict = Verdict(**json.loads(text)) if text else None
        return text, verdict if verdict is not None and verdict.polls > self.born else None

    def _ask(self, members: Sequence[int], reports: dict[int, Report], unknown: list[int]) -> None:
        """Collects what these ranks answer within some seconds, and which of them never made a watch."""
        if self.last_report is not None:
            return
        unknown += [rank for rank in members if not self.store.check([f"watch {rank}"])]
        polls, last = self._ask_all(), time.monotonic() + 3 * self.interval
        while time.monotonic() < last and len(reports) < len(members):
            self._answer(self._polls())
            for rank in members:
                report = self._read(rank)
                if report is not None and (report.polls >= polls or report.ended):
                    reports[rank] = report
            time.sleep(self.interval / 10)

    def _ask_all(self) -> int:
        return int(self.store.add("polls", 1))

    def _polls(self) -> int:
        return int(self.store.get("polls")) if self.store.check(["polls"]) else 0

    def _read(self, rank: int) -> Report | None:
        key = f"rank {rank}"
        report = Report(**json.loads(self.store.get(key))) if self.store.check([key]) else None
        return None if report is not None and report.ended and report.polls <= self.born else report

    def end(self) -> bool:
        """Tells the others that this process ends, and the user what a lost connection means that ended it. Returns
        whether the store answered: the threads of this watch wait for one whose host is gone."""
        answers = True
        if not self.stopped.is_set():
            self.stopped.set()
            if dist.is_initialized():  # else the store may be gone as well
                answers = self.worker.within(2.0, self._polls)
                self._say_end(answers)
        self.worker.end()
        return answers

    def _say_end(self, answers: bool) -> None:
        problem = _uncaught()
        if id(problem) == self.handled:
            problem = None
        if isinstance(problem, RuntimeError) and lost(problem):
            everyone = range(dist.get_world_size())
            logger.error("hf_burst: %s", self.explain(problem, everyone, "a message of torch.distributed"))
        ended = f"ended by {problem!r}".splitlines()[0][:300] if problem is not None else "ended"
        if answers:
            self.worker.within(4 * self.interval, lambda: self._leave(ended))

    def _leave(self, ended: str) -> None:
        """Tells the others that this process ends, and gives them time if their store ends with it."""
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not self.in_processes
        closes = self.rank == 0 and not by_agent
        if closes:
            self.store.set("closed by", str(self.rank))
        self._tell(ended)
        if closes:
            time.sleep(1.5 * self.interval)  # until the others know, whom torch would show a trace for each question


def _end(watch: ref["Watch"], threads: Sequence[Thread], limit: float) -> None:
    """Ends the threads before the interpreter. One that came back from torch later would abort the process: Python ends
    it by unwinding its stack, which destructors of torch do not allow."""
    own = watch()
    last = time.monotonic() + (limit if own is None or own.end() else 0.5)
    for thread in threads:
        thread.join(max(0.0, last - time.monotonic()))
    time.sleep(0.05)  # gloo's own threads wait for the interpreter as well, to let go of the last collective's tensors


def _uncaught() -> BaseException | None:
    """What ends this process. A child of multiprocessing ends while it is raised; torch's `spawn` exits because of it,
    by `sys.exit(1)`."""
    of_script = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # in a notebook, of an old cell
    problem = sys.exc_info()[1] or of_script
    if isinstance(problem, SystemExit):
        return (problem.__context__ or problem) if problem.code else None
    return problem


def _flush() -> None:
    """Writes what is said but not yet written, before a process ends at once."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


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
