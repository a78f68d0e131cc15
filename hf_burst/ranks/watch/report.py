"""What ranks tell each other, and the proof that some of them wait for ever: values only, without processes."""

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
    """A name of a process group that all ranks give it, and no other group of theirs."""
    return f"{name}/{zlib.crc32(repr(members).encode()):x}"


@dataclass
class Counts:
    """What a rank has begun over a process group: calls in which all meet, exchanges of attention, and collectives of
    others since the last call over any group. `exact` says that these are counted without messages between two ranks,
    `base` what the backend had counted before, and `broken` what ended a pass midway."""

    agreed: int = 0
    exchanges: int = 0
    since: int = 0
    exact: bool = False
    base: int = 0
    broken: str = ""


@dataclass(frozen=True)
class Report:
    """What a rank tells the others: the number of the report, the last call that it came through, the one under way,
    its counts for each group, and how it ended, if it did."""

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
        """Whether this rank waits for something that the other one has not begun: for a collective of others, if no
        call of hf_burst is under way."""
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
        """Whether this rank is in a call already, and the other one still in exchanges of the pass before."""
        ahead = self.over(self.group).exchanges < other.over(self.group).exchanges
        return self.kind == "agree" and self.needs(other) and ahead

    def over(self, group: str) -> Counts:
        return self.counts.get(group) or Counts()

    @property
    def broken(self) -> str:
        return next((own.broken for own in self.counts.values() if own.broken), "")

    @property
    def state(self) -> str:
        """What stays the same while the rank is held up."""
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
    """The reports by which `rank`, at the end of a path, waits for ever: a chain to a rank that has ended, or a circle.
    Empty if there is no proof of one. Out of a collective of others the chain only leads back."""
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
    """The sentence on what was proved, and the ranks that it names with their states."""

    text: str
    states: dict[int, str]

    @classmethod
    def of(cls, found: Sequence[Report]) -> "Verdict":
        """That of ranks that are [`stuck`]."""
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
    """What a rank knows of the others, and advises, when messages did not come through: by the time limit if `late`.
    `found` has what they posted, `None` if they never did; the silent ones no longer do. None was asked if the store
    was not `reached`."""
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
