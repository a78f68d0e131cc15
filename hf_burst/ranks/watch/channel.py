"""The side channel of a job: ranks that do different things end by an error, and slow ranks never do.

Nothing is posted while all goes well. A rank that waits for longer than some seconds raises a poll counter in the store
of the job. A thread of every process sees it, and posts where its main thread stands. Only a proof is an error: ranks
that wait for each other in a circle, or for one that has ended. The proof must be seen twice, unchanged. A rank that
posts nothing counts as slow.
"""

import json
import logging
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from threading import Event, Thread, get_ident
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from ...errors import BurstError, ConfigError, LostRankError, RankMismatchError
from .counts import Counts, begun_over, group_key
from .report import START_ANEW, Report, StoreState, Verdict, stuck, why_lost
from .stack import stand_of
from .worker import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Call:
    """What the ranks of a group do together, as a [`Report`] has it."""

    kind: Literal["agree", "collective", "messages"]
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
        self.handled = id(sys.exc_info()[1])  # a fork inherits what its parent handles
        self.call: _Call | None = None
        self.latest = "its start"
        self.counts: WeakKeyDictionary[dist.ProcessGroup, Counts] = WeakKeyDictionary()
        self.verdict: Verdict | None = None
        self.heard = False  # whether the ranks that it names know of it
        self.last_report: Report | None = None  # of the process that holds the store, and takes it along
        self.born = self._polls()  # what is older is of another default group over the same store
        self.store.set(f"watch {self.rank}", "")
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
        counts = self.counts.setdefault(group, Counts())
        if counts.broken:
            raise ConfigError(
                f"A pass over these ranks ended in the middle ({counts.broken}), so that they no longer agree "
                f"on what was sent. Take smaller batches if memory was short. {START_ANEW}"
            )
        self.thread = get_ident()
        counts.agreed += 1
        with self._under_way("agree", group, doing):
            yield self
        counts.met = counts.agreed
        counts.mark = begun_over(group) - counts.own
        self.latest = doing

    @contextmanager
    def messaging(self, group: dist.ProcessGroup) -> Iterator[None]:
        """The messages of one attention, or of another exchange. If they end in the middle, no rank is sure any more of
        what was sent: the others are told, and calls over these ranks are refused."""
        before, counts = begun_over(group), self.counts.setdefault(group, Counts())
        counts.exchanges += 1
        try:
            with self._under_way("messages", group, f"the messages after {self.latest}"):
                yield
        finally:
            counts.own += begun_over(group) - before

    def exchanges(self, group: dist.ProcessGroup) -> int:
        """How many exchanges of attention this rank has begun over a group."""
        counts = self.counts.get(group)
        return 0 if counts is None else counts.exchanges

    @contextmanager
    def _under_way(self, kind: Literal["agree", "messages"], group: dist.ProcessGroup, doing: str) -> Iterator[None]:
        members, counts = tuple(dist.get_process_group_ranks(group)), self.counts[group]
        outer = self.call
        number = counts.agreed if kind == "agree" else counts.exchanges
        self.call = _Call(kind, group_key(group.group_name, members), members, number, doing)
        try:
            yield
        except BaseException as problem:  # also when the user interrupts
            self.give_up(group, problem)  # what was sent would meet what another rank sends later
            if lost(problem):
                raise self.explain(problem, members, doing) from problem
            raise
        finally:
            self.call = outer

    def give_up(self, group: dist.ProcessGroup, problem: BaseException) -> None:
        """Tells the ranks of a group that a pass over them ended on this one by a problem, and refuses later calls."""
        counts = self.counts.setdefault(group, Counts())
        counts.broken = counts.broken or repr(problem).splitlines()[0][:300]
        self.worker.within(self.interval, self._tell)

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
        if self.verdict is None or self.call is None or not self.verdict.concerns(self.call.members):
            return
        if self.heard or self.stopped.is_set():
            raise RankMismatchError(self.verdict.text)

    def explain(self, problem: BaseException, members: Sequence[int], doing: str) -> BurstError:
        """The error that stands for one of torch.distributed, after what the others answer within some seconds."""
        at_once = "hf_burst: rank %d lost another rank in %s. Look for the first error in the logs of the others."
        logger.error(at_once, self.rank, doing)  # a launcher ends the rank soon
        answered: dict[int, Report] = {}
        unknown: list[int] = []
        reached = self.worker.within(4 * self.interval, lambda: self._ask(members, answered, unknown))
        reports = {rank: report for rank, report in list(answered.items()) if rank != self.rank}
        if self.last_report is not None:
            reports.setdefault(self.last_report.rank, self.last_report)
        if self.verdict is not None and self.verdict.concerns([self.rank, *members]):
            return RankMismatchError(self.verdict.text)
        store: StoreState = "closed" if self.last_report is not None else "open" if reached else "lost"
        never = [rank for rank in unknown if rank not in reports] if store == "open" else []
        silent = [rank for rank in members if rank not in {self.rank, *reports, *never}]
        late = "imed out" in str(problem) or "timeout" in str(problem)
        what = f"Rank {self.rank} lost the connection to another rank in {doing}."
        if late:
            what = f"Rank {self.rank} waited in {doing} until the time limit of the process group ran out."
        return LostRankError(f"{what} {why_lost(late, list(reports.values()), never, silent, store)}")

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
        if report.kind == "agree" and self.verdict is not None and not self.heard:
            self._hear()
        elif report.kind and self.verdict is not None and self.verdict.states.get(str(self.rank)) == report.state:
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
        found = stuck(self.rank, self._reader(reports, self.stopped.is_set, 3 * self.interval))
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
        """Tells all ranks, since the end of this one may take the store along."""
        before, known = self._decided()
        if known is None:
            self.store.compare_set("verdict", before, json.dumps(asdict(replace(verdict, polls=self.answered))))
        self._tell()
        self.verdict = self.verdict or verdict
        self._free(own)

    def _hear(self) -> None:
        """Waits until the ranks that a verdict names know of it. Then this one may raise: the connections that it
        closes by that are errors of gloo on the others, which say the verdict first."""
        assert self.verdict is not None, "it is known"
        try:
            if self.last_report is None:
                read = self._reader({}, self.stopped.is_set, self.grace)
                for rank in self.verdict.states:
                    read(int(rank))
                self.stopped.wait(self.interval)  # and the look that follows
        finally:
            self.heard = True

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
        call, stand = self.call, stand_of(self.thread)
        report = Report(self.rank, polls, self.latest, stand.line, ended=ended)
        groups: dict[str, tuple[str, tuple[int, ...], str]] = {}
        world: Any = dist.distributed_c10d._world
        for group, (backend, _) in list(world.pg_map.items()):  # the main thread may destroy them meanwhile
            members = tuple(world.pg_group_ranks.get(group, ()))
            key, counts = group_key(group.group_name, members), self.counts.get(group) or Counts()
            groups[group.group_name] = key, members, backend
            report.agreed[key] = counts.agreed
            report.begun[key], report.exchanges[key] = begun_over(group) - counts.own, counts.exchanges
            if report.begun[key] == counts.mark:
                report.idle[key] = counts.met
            if counts.broken:
                report.broken[key] = counts.broken
        if stand.group in groups and not ended and (call is None or call.kind == "messages"):
            key, members, backend = groups[stand.group]
            counted = stand.meets or "gloo" not in backend
            if call is None or counted:  # else messages prove more
                collective = _Call("collective", key, members, report.begun[key], stand.doing)
                return replace(report, **vars(collective), counted=counted)
        return report if call is None else replace(report, **vars(call))

    def _answer(self, polls: int, ended: str = "") -> None:
        """Posts where this rank stands, if the counter has risen since, and reads what was decided."""
        if polls == self.answered and not ended:
            return
        self.answered = polls
        if self.verdict is None:  # before it answers, so that who answers knows
            self.verdict = self._decided()[1]
        self.store.set(f"rank {self.rank}", json.dumps(asdict(self._report(polls, ended))))
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
        if self.last_report is None:
            unknown += [rank for rank in members if not self.store.check([f"watch {rank}"])]
            read = self._reader(reports, lambda: False, 3 * self.interval)
            for rank in members:
                read(rank)

    def _reader(
        self, reports: dict[int, Report], given_up: Callable[[], bool], seconds: float
    ) -> Callable[[int], Report | None]:
        """Makes the others look, and collects what a rank then answers; `None` if it does not in time."""
        polls, last = self._ask_all(), time.monotonic() + seconds
        self._answer(polls)

        def read(rank: int) -> Report | None:
            while rank not in reports:
                report = self._read(rank)
                if report is not None and (report.polls >= polls or report.ended):
                    reports[rank] = report
                elif given_up() or time.monotonic() > last:
                    return None
                else:
                    self._answer(self._polls())
                    time.sleep(self.interval / 10)
            return reports[rank]

        return read

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
                problem = _uncaught()
                if problem is None or id(problem) == self.handled:
                    ended = "ended"
                else:
                    ended = f"ended by {problem!r}".splitlines()[0][:300]
                    if lost(problem):
                        everyone = range(dist.get_world_size())
                        explained = self.explain(problem, everyone, "a message of torch.distributed")
                        logger.error("hf_burst: %s", explained)
                if answers:
                    self.worker.within(4 * self.interval, lambda: self._leave(ended))
        self.worker.end()
        return answers

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
    if not isinstance(problem, RuntimeError) or isinstance(problem, BurstError):
        return False
    return isinstance(problem, dist.DistError) or "gloo/" in str(problem) or "NCCL" in str(problem)


_WATCHES: WeakKeyDictionary[dist.ProcessGroup, Watch] = WeakKeyDictionary()


def watch_of_process() -> Watch:
    """The watch of this process; for processes that torch.distributed has joined."""
    world = dist.group.WORLD
    assert world is not None, "asked by one of several ranks"
    found = _WATCHES.get(world)
    if found is None:
        found = _WATCHES[world] = Watch(world)
    return found
