"""What ranks tell each other, and the proof that some of them wait for ever: values only, without processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

START_ANEW = (
    "Start the job anew: resume_from_checkpoint=True goes on from the last checkpoint, and torchrun --max-restarts "
    "starts it by itself (docs/how-to/resume.md)."
)
_NO_STORE = "the process that holds it, mostly rank 0, ended, or the network to its host is down"
_TOGETHER = (
    "Every rank of a group must call the model equally often, and in the same turn: let all ranks evaluate, and save "
    "or print on one (docs/how-to/troubleshooting.md, 'It hangs')."
)
LEFT = (
    "The script of a rank left out the backward pass of a batch, or caught an error in the middle of a pass, such as a "
    "lack of memory, and others went on with it. Let such an error end the job, and all ranks do the same."
)

StoreState = Literal["open", "lost", "closed"]


@dataclass(frozen=True)
class Report:
    """What one rank tells the others.

    Args:
        rank (`int`): Its number in the job.
        polls (`int`): How high the poll counter was by then.
        latest (`str`): The last call of hf_burst that it came through.
        line (`str`): The line of the user's code that its main thread runs.
        kind (`str`): What holds the main thread up: `"agree"`, another `"collective"`, `"messages"` of an attention;
            empty if it runs.
        doing (`str`): The same in words.
        group (`str`), members (`tuple[int, ...]`): The ranks that take part in it.
        number (`int`): Which one of the group it is.
        counted (`bool`): Whether the numbers of collectives prove that a rank did not begin it.
        agreed, begun (`dict[str, int]`): For each group, the calls of `agree` and the collectives that it has begun.
        exchanges (`dict[str, int]`): For each group, the exchanges of attention that it has begun.
        idle (`dict[str, int]`): For groups over which nothing began since, the last call of `agree` that ended well.
        broken (`dict[str, str]`): The groups over which a pass ended in the middle, and by what.
        ended (`str`): How the process ended, if it did.
    """

    rank: int
    polls: int
    latest: str
    line: str = ""
    kind: Literal["", "agree", "collective", "messages"] = ""
    doing: str = ""
    group: str = ""
    members: Sequence[int] = ()
    number: int = 0
    counted: bool = True
    agreed: dict[str, int] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    exchanges: dict[str, int] = field(default_factory=dict)
    idle: dict[str, int] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    ended: str = ""

    def needs(self, other: "Report") -> bool:
        """Whether this rank waits for something that the other one has not begun."""
        if self.kind == "agree":
            return other.agreed.get(self.group, 0) < self.number or self.group in other.broken
        if self.kind == "collective" and not self.counted:
            return other.idle.get(self.group) == self.agreed.get(self.group, 0)
        if self.kind == "collective":
            return other.begun.get(self.group, self.number) < self.number
        return self.is_left_by(other) or (self.kind == "messages" and self.group in other.broken)

    def is_left_by(self, other: "Report") -> bool:
        """Whether this rank is in an exchange that the other one has not begun."""
        return self.kind == "messages" and other.exchanges.get(self.group, self.number) < self.number

    def has_left(self, other: "Report") -> bool:
        """Whether this rank has left a pass in its middle that the other one went on with: it is in a call already that
        the other one has not begun, so that it will begin no exchange of the pass any more."""
        ahead = self.exchanges.get(self.group, 0) < other.exchanges.get(self.group, 0)
        return self.kind == "agree" and other.agreed.get(self.group, 0) < self.number and ahead

    def gives_up(self, group: str) -> bool:
        """Whether this rank will never again take part in a group."""
        return bool(self.ended) or group in self.broken

    @property
    def state(self) -> str:
        """What stays the same while the rank is held up."""
        return f"{self.kind} {self.number} of {self.group}, {self.line} {self.ended}"

    def __str__(self) -> str:
        if self.ended:
            return f"Rank {self.rank} {self.ended} after {self.latest}."
        if self.broken:
            return f"Rank {self.rank} cannot go on: a pass ended in the middle ({next(iter(self.broken.values()))})."
        where = f" ({self.line})" if self.line else ""
        does = {"": "runs", "messages": "is in"}.get(self.kind, "waits in")  # between messages it computes, too
        return f"Rank {self.rank} {does} {self.doing or 'its own code'}{where}."


def stuck(rank: int, read: Callable[[int], Report | None]) -> list[Report]:
    """The ranks by which `rank` waits for ever: a chain to a rank that has ended, or into a circle. Empty if there is
    no proof of one.

    Args:
        rank (`int`): Where the chain begins.
        read (`Callable`): The report of a rank, `None` if it has not answered.
    """
    seen: set[int] = set()

    def follow(report: Report, path: list[Report]) -> list[Report]:
        path = [*path, report]
        seen.add(report.rank)
        for number in report.members:
            other = None if number == report.rank else read(number)
            if other is None or not report.needs(other):
                continue
            if any(other.rank == earlier.rank for earlier in path):
                return path
            if other.gives_up(report.group) or report.has_left(other):
                return [*path, other]
            found = follow(other, path) if other.rank not in seen else []
            if found:
                return found
        return []

    own = read(rank)
    return [] if own is None else follow(own, [])


def why_lost(
    late: bool, reports: Sequence[Report], unknown: Sequence[int], silent: Sequence[int], store: StoreState
) -> str:
    """What a rank knows of the others, and advises, when messages did not come through.

    Args:
        late (`bool`): Whether it waited until the time limit; else a connection broke.
        reports (sequence of [`Report`]): What other ranks answered.
        unknown (sequence of `int`): The ranks that never made a watch.
        silent (sequence of `int`): Those that made one and did not answer.
        store (`str`): Whether the store of the job answered (`"open"`) or not (`"lost"`), or told that it ends with
            the process that holds it, so that nobody was asked (`"closed"`).
    """
    known = [f"Rank {', '.join(map(str, unknown))} never came to a call of hf_burst."] if unknown else []
    known += [str(report) for report in reports if late or report.gives_up("")]
    names, network = ", ".join(map(str, silent)), "Look at the network between the hosts, and at the logs of"
    if late and store == "lost":
        first = f"Neither the other ranks nor the store of the job could be reached: {_NO_STORE}."
        advice = f"{network} the other ranks."
    elif late and silent and store == "open":
        first = f"Rank {names} could not be reached: it was killed, is stalled, or its host or network is down."
        advice = f"{network} these ranks."
    elif late:
        first = ""
        if store == "closed":
            known.append("The store of the job ended with it, so that other ranks could not be asked.")
        advice = (
            "If a rank was slow, raise the limit: TrainingArguments(ddp_timeout=SECONDS), or "
            "init_process_group(timeout=...). Else look at the log of the rank that did not come."
        )
    else:
        lost = f"Nothing was heard of rank {names}, which was killed or left the process group." if silent else ""
        first = {"open": lost, "lost": f"The store of the job cannot be reached: {_NO_STORE}.", "closed": ""}[store]
        advice = "Look for the first error in the logs of the other ranks, and for a lack of memory of their hosts."
    return " ".join(filter(None, [first, *known, advice, START_ANEW]))


@dataclass(frozen=True)
class Verdict:
    """What was proved: the sentence, and where the ranks stood that it names."""

    text: str
    states: dict[str, str]  # by rank, see [`Report.state`]
    polls: int = 0  # how high the counter was by then

    @classmethod
    def of(cls, found: Sequence[Report]) -> "Verdict":
        """That of ranks that are [`stuck`]."""
        *_, last = found
        if last.broken and not last.ended:
            what, advice = "A rank cannot go on, and others wait for it.", "Take smaller batches if memory was short."
        elif last.ended:
            what, advice = "A rank has ended, and others wait for it.", _TOGETHER
        elif any(one.has_left(other) or other.is_left_by(one) for one in found for other in found):
            what, advice = "A rank has left a pass that others went on with.", LEFT
        else:
            what, advice = "Ranks wait for each other in different places, and none would ever go on.", _TOGETHER
        text = " ".join([what, *map(str, found), advice, START_ANEW])
        return cls(text, {str(report.rank): report.state for report in found})

    def concerns(self, members: Sequence[int]) -> bool:
        """Whether one of these ranks is named, so that nothing over them will come to an end."""
        return any(str(rank) in self.states for rank in members)
