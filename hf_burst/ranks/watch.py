"""The side channel of a job: ranks that do different things end with an error; slow ranks never do.

On every rank a thread, the heart, posts the state of the rank's calls to the job's store once a second. A rank that
waits for some seconds reads the others' reports. It raises an error only on proof: ranks wait for each other in a
cycle, or for one that has ended, seen twice and unchanged. Then they show their stacks and end with one message.
"""

import faulthandler
import logging
import math
import multiprocessing.util
import os
import pickle
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, lru_cache
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from ..errors import BurstError, ConfigError, LostRankError, RankMismatchError

logger = logging.getLogger(__name__)

START_ANEW = (
    "Start the job anew: resume_from_checkpoint=True goes on from the last checkpoint, and torchrun --max-restarts "
    "starts it by itself (docs/how-to/resume.md)."
)
LEFT = (
    "The script of a rank left out the backward pass of a batch, or caught an error in the middle of a pass, such as a "
    "lack of memory, and others went on with it. Let such an error end the job, and all ranks do the same."
)
TOO_SLOW = (
    "If a rank was slow, raise the limit (ddp_timeout=SECONDS, init_process_group(timeout=...)); else see its stacks."
)
_MEND = "That error ended the job: mend it."
_TOGETHER = "Let all ranks call the model equally often, and in one order (docs/how-to/troubleshooting.md, 'It hangs')."


@lru_cache(maxsize=64)
def group_key(name: str, members: tuple[int, ...]) -> str:
    """Returns a name for a process group that is the same on all ranks and unique among their groups."""
    return f"{name}/{zlib.crc32(repr(members).encode()):x}"


@dataclass
class Counts:
    """A rank's counters for a process group: calls in which all ranks meet, exchanges, and collectives of other code
    since the last call over any group. `exact` says that these exclude messages between two ranks, `base` is the
    backend's count before, and `broken` is the problem that ended a pass midway."""

    agreed: int = 0
    exchanges: int = 0
    since: int = 0
    exact: bool = False
    base: int = 0
    broken: str = ""


@dataclass(frozen=True)
class Report:
    """A rank's report to the others: the report's number, the last completed call, the one under way, the counts for
    each group, and how the rank ended, if it did."""

    rank: int
    beat: int = 0
    latest: str = "its start"
    met: str = ""
    kind: str = ""  # or "agree", "messages"
    doing: str = ""
    group: str = ""
    members: Sequence[int] = ()
    number: int = 0
    counts: dict[str, Counts] = field(default_factory=dict)
    ended: str = ""

    def needs(self, other: "Report") -> bool:
        """Whether this rank waits for something that the other one has not begun; if no call of hf_burst is under way,
        that is a collective of other code."""
        if self.kind:
            there = other.over(self.group)
            begun = there.agreed if self.kind == "agree" else there.exchanges
            return begun < self.number or bool(there.broken)
        return any(
            self.met == other.met and own.since > theirs.since and (own.exact or not theirs.since)
            for key, own in self.counts.items()
            if (theirs := other.counts.get(key)) is not None
        )

    def has_left(self, other: "Report") -> bool:
        """Whether this rank is already in a call while the other is still in exchanges of the pass before."""
        ahead = self.over(self.group).exchanges < other.over(self.group).exchanges
        return self.kind == "agree" and self.needs(other) and ahead

    def over(self, group: str) -> Counts:
        return self.counts.get(group) or Counts()

    @property
    def broken(self) -> str:
        return next((own.broken for own in self.counts.values() if own.broken), "")

    @property
    def state(self) -> str:
        """A string that stays the same while the rank makes no progress."""
        begun = sum(own.agreed + own.base + own.since for own in self.counts.values())
        return f"{self.kind} {self.number} of {self.group} {begun} {self.ended}"

    def __str__(self) -> str:
        if self.ended:
            return f"Rank {self.rank} {self.ended} after {self.latest}."
        if self.broken:
            return f"Rank {self.rank} cannot go on: a pass ended in the middle ({self.broken})."
        if self.kind:
            return f"Rank {self.rank} {'is' if self.kind == 'messages' else 'waits'} in {self.doing}."
        since = sum(own.since for own in self.counts.values())
        called = f" and {since} other collective{'s' * (since > 1)}" if since else ""
        return f"Rank {self.rank} runs its own code after {self.latest}{called}."


def stuck(rank: int, read: Callable[[int], Report | None], path: tuple[Report, ...] = ()) -> tuple[Report, ...]:
    """Returns the reports that prove that `rank`, reached by a path, waits forever: a chain to a rank that has ended,
    or a cycle; empty without proof. From other code's collectives, the chain only leads back to earlier ranks."""
    report = read(rank)
    if report is None:
        return ()
    path = (*path, report)
    for number in report.members or [earlier.rank for earlier in path]:
        other = None if number == rank else read(number)
        if other is None or not report.needs(other):
            continue
        if other in path:
            return path
        if other.ended or other.over(report.group).broken or report.has_left(other):
            return (*path, other)
        found = stuck(number, read, path)
        if found:
            return found
    return ()


@dataclass(frozen=True)
class Verdict:
    """The message about a proof, and the ranks that it names with their states."""

    text: str
    states: dict[int, str]

    @classmethod
    def of(cls, found: Sequence[Report]) -> "Verdict":
        """Makes the verdict on ranks that are [`stuck`]."""
        last = found[-1]
        left = any(one.has_left(two) or (one.kind == "messages" and one.needs(two)) for one in found for two in found)
        what, advice = "Ranks wait for each other in different places, and none would ever go on.", _TOGETHER
        if last.ended:
            what = "A rank has ended, and others wait for it."
            advice = _MEND if "ended by" in last.ended else advice
        elif last.broken:
            what, advice = "A rank cannot go on, and others wait for it.", "Take smaller batches if memory was short."
        elif left:
            what, advice = "A rank has left a pass that others went on with.", LEFT
        text = " ".join([what, *map(str, found), advice, START_ANEW])
        return cls(text, {one.rank: "" if one.broken else one.state for one in found})


class Watch:
    """The side channel of one process, from its first call over ranks until the default group `world` ends."""

    patience = 3.0  # seconds that a rank waits before it checks the others
    interval = 1.0  # seconds between two beats
    grace = 15.0  # seconds for an error to free a rank that is stuck in other code

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = ref(world)
        self.rank = dist.get_rank()
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self.store: Any = dist.PrefixStore("hf_burst", store)  # type: ignore[attr-defined]
        self.store.delete_key(f"verdict {self.rank}")  # left by an earlier default group on the same store
        self.handled = id(sys.exc_info()[1])  # a fork inherits the exception its parent is handling
        self.counts: WeakKeyDictionary[dist.ProcessGroup, Counts] = WeakKeyDictionary()
        self.controls: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
        self.report = Report(self.rank)  # the last call, and whether it is under way
        self.beats = 0
        self.state = ""
        self.pause = self.patience  # seconds between two looks at the others, more and more in one state
        self.again, self.late = 0.0, 0.0  # when to look at them, and when to warn
        self.seen: dict[tuple[int, str], int] = {}  # the first beat at which each stuck rank was seen in its state
        self.verdict: Verdict | None = None  # the verdict that names this rank
        self.told = 0.0  # when this rank learned of it
        self.tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._post()
        self.heart = Thread(target=self._run, name="hf_burst watch", daemon=True)
        self.heart.start()
        # runs in multiprocessing children too, and after this watch is gone, because the thread may still be running
        multiprocessing.util.Finalize(None, _end, args=(ref(self), self.heart, self.patience), exitpriority=1)

    def counts_of(self, group: dist.ProcessGroup) -> Counts:
        return self.counts.setdefault(group, Counts())

    @contextmanager
    def calling(self, group: dist.ProcessGroup, doing: str) -> Iterator["Watch"]:
        """Surrounds a call in which all ranks of a group meet. Raises a ConfigError if a pass over it was given up."""
        counts = self._usable(group)
        counts.agreed += 1
        with self._under_way(group, "agree", doing, counts.agreed):
            yield self
        for known in list(dist.distributed_c10d._world.pg_map):
            self.counts_of(known).base = begun_over(known)
        self.report = replace(self.report, latest=doing, met=f"{group.group_name} {counts.agreed}")

    @contextmanager
    def messaging(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Surrounds the messages of one exchange. Raises as [`calling`]."""
        counts = self._usable(group)
        counts.exchanges += 1
        with self._under_way(group, "messages", f"the messages after {self.report.latest}", counts.exchanges):
            before = begun_over(group)
            yield
            counts.base += begun_over(group) - before

    def _usable(self, group: dist.ProcessGroup) -> Counts:
        """Returns the counts of a group over which no pass was given up."""
        counts = self.counts_of(group)
        if counts.broken:
            raise ConfigError(
                f"A pass over these ranks ended in the middle ({counts.broken}), so that they no longer agree "
                f"on what was sent. Take smaller batches if memory was short. {START_ANEW}"
            )
        return counts

    @contextmanager
    def _under_way(self, group: dist.ProcessGroup, kind: str, doing: str, number: int) -> Iterator[None]:
        members = tuple(dist.get_process_group_ranks(group))
        key, outer = group_key(group.group_name, members), self.report
        self.report = replace(outer, kind=kind, doing=doing, group=key, members=members, number=number)
        try:
            yield
        except BaseException as problem:  # interrupts too
            self.give_up(group, problem)  # messages already sent would pair with another rank's later ones
            if lost(problem):
                raise self.explain(problem, members, doing) from problem
            raise
        finally:
            self.report = outer

    def give_up(self, group: dist.ProcessGroup, problem: BaseException) -> None:
        """Tells the ranks of a group that a pass over it failed on this rank, and refuses later calls."""
        counts = self.counts_of(group)
        said = repr(problem).splitlines()[0][:300]
        closed = lost(problem) and "by peer" in said  # which says nothing of why
        counts.broken = counts.broken or ("another rank was lost" if closed else said)
        self._within(self.interval, self._post)

    def wait(self, ready: Callable[[], bool], limit: timedelta) -> None:
        """Waits in the current call until `ready`, which is asked less and less often; raises an error once the wait is
        proved to be in vain."""
        last, pause = time.monotonic() + limit.total_seconds(), 0.001
        while not ready():
            known = 0.0 < self.told < time.monotonic() - 2 * self.interval  # to the others as well
            if self.verdict is not None and known:
                raise RankMismatchError(self.verdict.text)
            if time.monotonic() > last:
                raise dist.DistStoreError(f"timed out after {limit}")
            time.sleep(pause)
            pause = min(1.2 * pause, 0.05)

    def explain(self, problem: BaseException, members: Sequence[int], doing: str) -> BurstError:
        """Returns the error to raise instead of torch.distributed's, after hearing the others for some seconds."""
        at_once = "hf_burst: rank %d lost another rank in %s. Look for the first error in the logs of the others."
        logger.error(at_once, self.rank, doing)  # a launcher may kill this rank soon
        late = "imed out" in str(problem) or "timeout" in str(problem)
        limit = f"waited in {doing} until the time limit of the process group ran out"
        what = f"Rank {self.rank} {limit if late else f'lost the connection to another rank in {doing}'}."
        others = [rank for rank in members if rank != self.rank]
        heard = dict[int, str]()
        told = f"{what} {TOO_SLOW} {START_ANEW}" if late else ""
        reached = self._within(4 * self.interval, lambda: self._hear(others, heard, told))
        if self.verdict is not None and not late:
            return RankMismatchError(self.verdict.text)
        heard_of = heard.copy()  # if the store is slow, the heart still fills it
        silent = ", ".join(str(rank) for rank in others if rank not in heard_of)
        gone = f"Nothing was heard of rank {silent}: killed, stalled, or out of reach." if silent else ""
        if not reached:
            gone = "The store of the job cannot be reached: mostly rank 0, which holds it, has ended."
        look = "Look for the first error in the logs of other ranks, at the memory of their hosts, and at the network."
        if any("ended by" in state for state in heard_of.values()):
            look = _MEND
        known = [what, *heard_of.values(), gone, TOO_SLOW if late and not gone else look, START_ANEW]
        return LostRankError(" ".join(filter(None, known)))

    def _hear(self, ranks: Sequence[int], heard: dict[int, str], told: str) -> None:
        """Fills `heard` with what is known of ranks that post within the next seconds, or never have. Ranks that are
        `told` something show their stacks, and raise it in a later call."""
        before = {rank: self._read(rank) for rank in ranks}
        if told:
            self._tell(Verdict(told, dict.fromkeys(ranks, "")))
        for _ in range(12):
            time.sleep(self.interval / 4)
            self._beat()
        for rank, earlier in before.items():
            report = self._read(rank)
            if report is None:
                heard[rank] = f"Rank {rank} never came to a call of hf_burst."
            elif earlier is None or report.ended or report.beat > earlier.beat:
                heard[rank] = str(report) if told or report.ended or report.broken else ""

    def _run(self) -> None:
        """Runs the heart, which also does the main thread's tasks. It ends with the store or the default group."""
        failed = False
        while dist.is_initialized() and dist.group.WORLD is self.world():
            try:
                task = self.tasks.get(timeout=self.interval)
            except Empty:
                task = self._beat
            try:
                task()
            except dist.DistError as problem:  # the process that holds the store is gone
                logger.debug("hf_burst no longer hears of the other ranks: %s", problem)
                return
            except Exception:  # try again: the user may have been changing the groups
                if not failed:
                    logger.exception("hf_burst, rank %d, failed to look where ranks wait.", self.rank)
                failed = True

    def _within(self, seconds: float, task: Callable[[], object]) -> bool:
        """Lets the heart do a task; returns whether it finished in time, because a lost store may block it for long."""
        done = Event()
        self.tasks.put(task)
        self.tasks.put(done.set)
        return self.heart.is_alive() and done.wait(seconds)

    def _beat(self) -> None:
        report = self._post()
        now = time.monotonic()
        if report.state != self.state:
            self.state, self.pause = report.state, self.patience
            self.again, self.late = now + self.pause, now + 60.0
        if self.verdict is not None:
            self._obey(self.verdict, report, now)
        elif report.kind and now >= self.again:
            self._look(now)

    def _look(self, now: float) -> None:
        """Reads the others' reports, and posts a verdict after seeing the same proof twice."""
        found = stuck(self.rank, cache(self._read))
        twice = [one.ended or one.beat > self.seen.setdefault((one.rank, one.state), one.beat) + 1 for one in found]
        if found and all(twice):
            self._tell(Verdict.of(found))
        self.pause = min(15.0, 1.5 * self.pause)
        self.again = now if found else now + self.pause
        if not found and now > self.late:
            self.late = math.inf
            logger.warning("hf_burst: rank %d has waited for more than 60 s in %s.", self.rank, self.report.doing)

    def _obey(self, verdict: Verdict, own: Report, now: float) -> None:
        """Shows the stacks of this rank. If it hangs in other code, where nothing can be raised, it logs the verdict,
        and ends the process unless another rank's error does."""
        hangs = own.kind != "agree" and verdict.states.get(self.rank) == own.state
        if not self.told:
            self.told = now
            faulthandler.dump_traceback(2)  # the real stderr, which notebooks replace
            if hangs:
                logger.error("hf_burst, rank %d: %s", self.rank, verdict.text)
        elif hangs and now > self.told + self.grace:
            logger.critical("hf_burst ends rank %d, whose main thread waits for ever.", self.rank)
            self._post("was ended by hf_burst, since it waited for ever,")
            logging.shutdown()
            sys.stdout.flush()
            os._exit(1)

    def _tell(self, verdict: Verdict) -> None:
        for rank in verdict.states:
            self.store.set(f"verdict {rank}", pickle.dumps(verdict))

    def _post(self, ended: str = "") -> Report:
        """Posts this rank's report, and reads the others' verdict."""
        self.beats += 1
        counts = dict[str, Counts]()
        world: Any = dist.distributed_c10d._world
        for group, (backend, _) in list(world.pg_map.items()):  # the main thread may destroy them meanwhile
            own = self.counts.get(group) or Counts()
            ranks = tuple(world.pg_group_ranks.get(group, ()))
            exact = "nccl" in backend or len(ranks) == 2
            counts[group_key(group.group_name, ranks)] = replace(own, since=begun_over(group) - own.base, exact=exact)
        report = replace(self.report, beat=self.beats, counts=counts, ended=ended)
        self.store.set(f"{self.rank}", pickle.dumps(report))
        self.verdict = self.verdict or self._read(f"verdict {self.rank}")
        return report

    def _read(self, key: int | str) -> Any:
        return pickle.loads(self.store.get(f"{key}")) if self.store.check([f"{key}"]) else None

    def end(self) -> bool:
        """Tells the others that this process ends, and explains a lost connection that ended it. Returns whether the
        store answered; if its host is gone, the heart blocks on it."""
        answers = self._within(2.0, self._post)
        problem = _uncaught()
        ended = "ended"
        if problem is not None and id(problem) != self.handled:
            ended = f"ended by {problem!r}".splitlines()[0][:300]
            if lost(problem):
                everyone = range(dist.get_world_size())
                logger.error("hf_burst: %s", self.explain(problem, everyone, "a message of torch.distributed"))
        if answers:
            self._within(4 * self.interval, lambda: self._post(ended))
        self.tasks.put(sys.exit)  # ends the thread
        return answers


def _end(watch: ref["Watch"], heart: Thread, limit: float) -> None:
    """Ends the heart before the interpreter. A thread that returns from torch later would abort the process, because
    Python ends it by unwinding its stack, which torch's destructors do not allow."""
    own = watch() if dist.is_initialized() else None  # else the heart is already ending
    heart.join(limit if own is None or own.end() else 0.5)
    time.sleep(0.05)  # gloo's threads also need the interpreter, to release the last collective's tensors


def _uncaught() -> BaseException | None:
    """Returns the exception that ends this process, also in a multiprocessing child or behind `spawn`'s `sys.exit`."""
    of_script = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # a notebook's is from an old cell
    problem = sys.exc_info()[1] or of_script
    if isinstance(problem, SystemExit):
        return (problem.__context__ or problem) if problem.code else None
    return problem


def begun_over(group: Any) -> int:
    """Returns how many collectives this rank has begun over a group; for gloo, including point-to-point messages."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return 0


def lost(problem: BaseException) -> bool:
    """Whether an error comes from a torch.distributed backend whose messages failed."""
    of_backend = isinstance(problem, dist.DistError) or "gloo/" in str(problem) or "NCCL" in str(problem)
    return of_backend and isinstance(problem, RuntimeError) and not isinstance(problem, BurstError)


_WATCHES: WeakKeyDictionary[dist.ProcessGroup, Watch] = WeakKeyDictionary()


def watch_of_process() -> Watch:
    """Returns this process's watch, made at the first call; torch.distributed must be initialized."""
    world = dist.group.WORLD
    assert world is not None, "asked by one of several ranks"
    if world not in _WATCHES:
        _WATCHES[world] = Watch(world)
    return _WATCHES[world]
