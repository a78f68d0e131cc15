"""The reports that ranks post, and the proof that some of them wait forever: values only, without processes."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

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
        what, advice = "Ranks wait for each other in different places, and none would ever go on.", _TOGETHER
        if last.ended:
            what = "A rank has ended, and others wait for it."
        elif last.broken:
            what, advice = "A rank cannot go on, and others wait for it.", "Take smaller batches if memory was short."
        elif any(one.has_left(two) or (one.kind == "messages" and one.needs(two)) for one in found for two in found):
            what, advice = "A rank has left a pass that others went on with.", LEFT
        text = " ".join([what, *map(str, found), advice, START_ANEW])
        return cls(text, {one.rank: "" if one.broken else one.state for one in found})


def why_lost(late: bool, found: dict[int, Report | None], silent: Sequence[int], reached: bool) -> str:
    """Returns what a rank knows about the others, and advice, after messages failed (`late`: at the time limit).
    `found` has their reports, `None` for ranks that never posted; `silent` ranks stopped posting. If the store was not
    `reached`, no rank was asked."""
    known = [] if reached else ["The store of the job cannot be reached: mostly rank 0, which holds it, has ended."]
    for rank, report in found.items():
        if report is None:
            known.append(f"Rank {rank} never came to a call of hf_burst.")
        elif late or report.ended or report.broken:
            known.append(str(report))
    if silent and reached:
        known.append(f"Nothing was heard of rank {', '.join(map(str, silent))}: killed, stalled, or out of reach.")
    look = "Look for the first error in the logs of the other ranks, at the memory of their hosts, and at the network."
    return " ".join([*known, TOO_SLOW if late and reached and not silent else look, START_ANEW])
