"""The only distributed object: the group of ranks that share a sequence, which agree before they communicate."""

import hashlib
import ipaddress
import json
import os
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import BurstError, ConfigError, LostRankError, RankMismatchError
from .host import address_towards
from .watch import LEFT, START_ANEW, Watch, group_key, watch_of_process

CP_DIM = "cp"
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # public from torch 2.14 on
_EXCHANGES = "times that layers have exchanged values with other ranks"
_SAME_BATCHES = (
    "If their batches differ: Accelerator(parallelism_config=hf_burst.BurstParallelismConfig(burst_size=N)), or "
    "TrainingArguments(parallelism_config=...), makes the data loader give every rank of a group the same one; without "
    "it plain data parallelism hands every rank a batch of its own (for which do not patch the model). A loader that "
    "shuffles needs the same seed on all ranks: accelerate.utils.set_seed(seed)."
)


def group_by_name(name: str) -> dist.ProcessGroup:
    """Looks up a process group by name, as torch's functional collectives do."""
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    except RuntimeError as problem:
        raise ConfigError(
            f"torch.distributed has no process group {name!r} (any more). Make the mesh anew, and pass it anew: "
            "unpatch_model(model), then patch_model(model, group=mesh)."
        ) from problem


@dataclass
class Agreement:
    """What must be equal on all ranks that share the batch, see [`ContextGroup.agree`]."""

    facts: dict[str, Any] = field(default_factory=dict)
    checksums: dict[str, Tensor] = field(default_factory=dict)  # scalars, for which nobody waits before
    advice: dict[str, str] = field(default_factory=dict)  # what to do if the ranks differ in a fact or a checksum
    seed: int = 0  # of dropout; the first rank's counts

    def add(self, name: str, value: Any, advice: str = "") -> None:
        """Adds a fact, or a checksum if it is a tensor, and what to do if the ranks differ in it."""
        (self.checksums if isinstance(value, Tensor) else self.facts)[name] = value
        if advice:
            self.advice[name] = advice


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share one sequence.

    Args:
        rank (`int`): This process's rank in the group.
        size (`int`): Number of processes in the group; 1 communicates nothing.
        name (`str`): The process group's name in torch.distributed, empty for one process.
        members (`tuple[int, ...]`): The group's global ranks in torch.distributed, empty for one process.
    """

    rank: int = 0
    size: int = 1
    name: str = ""
    members: tuple[int, ...] = ()

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh | dist.ProcessGroup | None) -> "ContextGroup":
        """Makes the group of a mesh (its `"cp"` or only dimension), of a process group, or of all ranks for `None`.

        Raises:
            ConfigError: If the mesh has several dimensions but no `"cp"`, or this process is not in it.
        """
        if mesh is None:
            if not dist.is_initialized():
                return cls()
            mesh = dist.group.WORLD
        if isinstance(mesh, DeviceMesh):
            names = mesh.mesh_dim_names or ()
            if CP_DIM in names and mesh.ndim > 1:
                mesh = mesh[CP_DIM]
            if mesh.ndim != 1:
                raise ConfigError(
                    f"The mesh has {mesh.ndim} dimensions {names}; pass a mesh with a dimension called {CP_DIM!r}, or "
                    "the one-dimensional mesh of the ranks that share a sequence."
                )
            mesh = mesh.get_group()
        if not isinstance(mesh, dist.ProcessGroup):
            raise ConfigError(
                f"A mesh is a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}. (Is this process in the group?)"
            )
        return cls.from_name(mesh.group_name) if dist.get_world_size(mesh) > 1 else cls()

    @classmethod
    def from_name(cls, name: str) -> "ContextGroup":
        """Makes the group of a process group's name; an empty name means one process."""
        return cls._of(group_by_name(name)) if name else cls()

    @classmethod
    def _of(cls, group: dist.ProcessGroup) -> "ContextGroup":
        """Makes the group of a process group, which may have one rank."""
        return cls(group.rank(), group.size(), group.group_name, tuple(dist.get_process_group_ranks(group)))

    def renewed(self) -> "ContextGroup":
        """Returns the group that has this name now, with this process's current rank, because ranks may have changed.

        Raises:
            ConfigError: If there is none, or its members differ.
        """
        now = ContextGroup.from_name(self.name)
        if now.members != self.members:
            raise self._made_anew(now)
        return now

    def part(self, ranks: Sequence[int], device: torch.device) -> "ContextGroup":
        """Makes a process group of a subset of these ranks that includes this one. All ranks of this group call it at
        the same time, each with the ranks of its own part.

        `torch.distributed.new_group` names groups by the number of groups a rank knows, which may differ between ranks.
        Therefore the first rank draws a unique name.

        Args:
            ranks (sequence of `int`): Their ranks in this group, ascending.
            device (`torch.device`): The device they communicate on; its backend's time limit stays the same.
        """
        drawn = self.gather(uuid4().hex, device, f"the making of a group of ranks {list(ranks)}")
        if len(ranks) == 1:
            return ContextGroup()
        members = [self.members[rank] for rank in ranks]
        c10d: Any = dist.distributed_c10d
        backend, store = c10d._world.pg_map[dist.group.WORLD]
        name, own = f"{drawn[0]}/{ranks[0]}", list(ranks).index(self.rank)
        group, _ = c10d._new_process_group_helper(
            len(ranks), own, members, backend, store, name, timeout=self.time_limit(device)
        )
        c10d._world.pg_group_ranks[group] = {member: number for number, member in enumerate(members)}
        _open(group, device)
        return ContextGroup.from_mesh(group)

    def gather(self, mine: Any, device: torch.device, doing: str) -> list[Any]:
        """Gathers any objects from all ranks, in rank order. All ranks call this at the same time. Like [`agree`], it
        sends nothing on the process group itself.

        Args:
            mine (`Any`): This rank's object.
            device (`torch.device`): As in [`agree`].
            doing (`str`): As in [`agree`].

        Raises:
            As [`agree`].
        """
        self.agree({"call": "gather"}, None, device, doing=doing)  # else its sizes could pair with another call
        if self.size == 1:
            return [mine]
        with _agreeing(self.process_group, device, doing) as control:
            return control.gather_objects(mine)

    def first_says(self, mine: bytes, device: torch.device, doing: str, error: BaseException | None = None) -> bytes:
        """Broadcasts the first rank's bytes, in two messages. All ranks call this at the same time, as [`gather`].

        Args:
            mine (`bytes`): The bytes on the first rank; empty on the others.
            device (`torch.device`): As in [`agree`].
            doing (`str`): As in [`agree`].
            error (`BaseException`, *optional*): As in [`agree`].

        Raises:
            As [`agree`].
        """
        length, _ = self.agree({"call": "first_says"}, error, device, len(mine), doing=doing)
        if self.size == 1 or not length:
            return mine
        content = torch.frombuffer(bytearray(mine or length), dtype=torch.uint8)
        with _agreeing(self.process_group, device, doing) as control:
            return control.broadcast(content).numpy().tobytes()

    def time_limit(self, device: torch.device) -> timedelta:
        """Returns how long the device's backend waits for other ranks."""
        return _limit_of(self.process_group, device)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group; only for `size > 1`. Raises a ConfigError if its name now belongs to another group."""
        group = group_by_name(self.name)
        refusal = self._refusal(group)
        if refusal is not None:
            raise refusal
        return group

    def agree(
        self,
        facts: dict[str, Any],
        error: BaseException | None,
        device: torch.device,
        tally: int = 0,
        checksums: Mapping[str, Tensor] | None = None,
        advice: Mapping[str, str] | None = None,
        doing: str = "a comparison of what ranks hold",
        seed: int = 0,
    ) -> tuple[int, int]:
        """Returns the sum of all tallies and the first rank's seed once all ranks agree; otherwise raises an error on
        all of them.

        Every rank calls it at the same time: one small all-gather on the [`ControlGroup`], never on the user's group.
        Ranks exchange facts only if something differs. The [`Watch`] detects a rank that calls something else
        meanwhile.

        Args:
            facts (`dict`): Values that must be equal on all ranks; JSON-serializable.
            error (`BaseException`, *optional*): An error that this rank found by itself, or an interrupt. This rank
                raises it; an interrupt even if the ranks reach no agreement.
            device (`torch.device`): Where the process group communicates; its time limit there applies.
            tally (`int`, defaults to 0): A number to sum over the ranks.
            checksums (mapping from `str` to scalar `torch.LongTensor`, *optional*): Numbers that must be equal on all
                ranks, on any device. The host reads one sum of them.
            advice (mapping from `str` to `str`, *optional*): What to do if the fact or checksum of this name differs.
            doing (`str`, *optional*): What the ranks are about to do, for errors of other ranks.
            seed (`int`, defaults to 0): A number; the first rank's is returned.

        Raises:
            ConfigError: If the process group was destroyed or made anew with other ranks, or if an earlier pass over it
                ended in the middle.
            RankMismatchError: If another rank met an error, the facts differ, or ranks wait in different places.
            LostRankError: If another rank ended, or did not arrive within the time limit.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return tally, seed
        process_group = group_by_name(self.name)
        interrupt = None if isinstance(error, Exception) else error  # by the user, sys.exit, or cancelled
        error = interrupt or self._refusal(process_group) or error
        facts = facts | {_EXCHANGES: watch_of_process().counts_of(process_group).exchanges}
        text = json.dumps(facts, sort_keys=True, default=str)
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        contents = torch.zeros((), dtype=torch.int64, device=device)
        for name, checksum in (checksums or {}).items():
            contents += checksum.to(device) * (zlib.crc32(name.encode()) | 1)
        numbers = [digest, int(error is not None), tally, int(contents) if checksums else 0, seed]
        mine = torch.tensor(numbers, device="cpu")  # whatever the default device is
        try:
            with _agreeing(process_group, device, doing) as control:
                digests, flags, tallies, sums, seeds = control.gather(mine).unbind(1)
                if not flags.any() and (digests == digest).all() and (sums == sums[0]).all():
                    if device.type not in control.opened:
                        _open(process_group, device)
                        control.opened.add(device.type)
                    return int(tallies.sum()), int(seeds[0])
                facts = facts | {name: f"{int(checksum) % 2**64:x}" for name, checksum in (checksums or {}).items()}
                said = ""
                if error is not None:
                    said = repr(error) if interrupt else str(error) or repr(error)
                reports = control.gather_objects({"facts": facts, "error": said, "doing": doing})
        except BurstError as problem:
            if interrupt is not None:
                raise interrupt from problem
            raise
        if error is not None:
            raise error
        raise _mismatch(reports, {_EXCHANGES: f"{LEFT} {START_ANEW}", **(advice or {})})

    @contextmanager
    def agreeing(self, device: torch.device, doing: str) -> Iterator[Agreement]:
        """Yields an [`Agreement`] for facts that must be equal on all ranks, and compares it at the end by [`agree`],
        whose arguments and errors these are. An error or interrupt of one rank is raised on all."""
        found = Agreement()
        error: BaseException | None = None
        try:
            yield found
        except BaseException as problem:  # the other ranks must not wait for this one
            error = problem
        self.agree(found.facts, error, device, 0, found.checksums, found.advice, doing)

    def messages(self) -> AbstractContextManager[None]:
        """Surrounds the messages of one exchange, to record a failure in the middle and name lost ranks. All ranks
        enter it equally often between two calls of [`agree`], which compares the counts. Compiled graphs leave it out.
        """
        if self.size == 1 or torch.compiler.is_compiling():
            return nullcontext()
        return watch_of_process().messaging(self.process_group)

    def interrupted(self, problem: BaseException) -> None:
        """Tells ranks that wait for a pass's messages that this rank was interrupted in the middle. From now on, calls
        over the group are refused."""
        if self.size == 1:
            return
        watch_of_process().give_up(self.process_group, problem)

    @property
    def broken(self) -> bool:
        """Whether a pass over the group ended in the middle on this rank, so that calls over it are refused."""
        return self.size > 1 and bool(watch_of_process().counts_of(self.process_group).broken)

    def _refusal(self, process_group: dist.ProcessGroup) -> ConfigError | None:
        """Returns an error if the process group of this name is no longer this object's."""
        now = ContextGroup._of(process_group)
        return None if now == self else self._made_anew(now)

    def _made_anew(self, now: "ContextGroup") -> ConfigError:
        return ConfigError(
            f"The process group {self.name!r} was made anew: this process was rank {self.rank} of {self.members} and "
            f"is rank {now.rank} of {now.members}. Pass the mesh anew: unpatch_model(model), then patch_model(model, "
            "group=mesh)."
        )


def _open(group: dist.ProcessGroup, device: torch.device) -> None:
    """Makes the first call of a process group, in which NCCL needs all ranks, because messages may leave some out."""
    if device.type != "cpu":
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _mismatch(reports: Sequence[Mapping[str, Any]], advice: Mapping[str, str]) -> RankMismatchError:
    """Returns the error for the ranks' reports: the first reported error, or the facts that differ."""
    for rank, report in enumerate(reports):
        if report["error"]:
            return RankMismatchError(f"Rank {rank} of the group stopped before any communication: {report['error']}")
    facts = [report["facts"] for report in reports]
    said, sentences = list[str](), dict[str, None]()
    if len({report["doing"] for report in reports}) > 1:
        said.append("; ".join(f"rank {rank}: {report['doing']}" for rank, report in enumerate(reports)))
    for name in sorted(set().union(*facts)):
        if len({json.dumps(own.get(name), default=str) for own in facts}) > 1:
            values = ", ".join(f"rank {rank} has {own.get(name)}" for rank, own in enumerate(facts))
            said.append(f"{name}: {values}")
            sentences[advice.get(name, _SAME_BATCHES)] = None
    what = "The ranks that share a sequence are about to compute different things"
    return RankMismatchError(f"{'. '.join([what, *said])}. {' '.join(sentences)}")


class ControlGroup:
    """The gloo group of a process group, over which its ranks agree. All ranks make it at the same time, within a time
    limit. They meet through the job's store, so that a rank that waits in vain sends nothing.

    On the user's group, if only one rank called the model, its agreement would pair with a collective of the others,
    which would receive our numbers as data. Gloo takes no GPU memory, and detects a killed rank at once. Messages of a
    pass use the user's group: no rank leaves an agreement before all have arrived, so nothing can come in between.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch, limit: timedelta) -> None:
        self.watch, self.limit = watch, limit
        self.size = group.size()
        self.opened = set[str]()  # devices on which the process group has had its first call
        key = f"control {group_key(group.group_name, tuple(dist.get_process_group_ranks(group)))}"
        came = watch.store.add(key, 1)
        all_came = -(-came // self.size) * self.size  # earlier groups of this name may have been made
        try:
            watch.wait(lambda: int(watch.store.add(key, 0)) >= all_came, limit)
        except BaseException:  # interrupts too: later ranks must not try to connect to this one
            watch.store.add(key, -1)
            raise
        store = dist.PrefixStore(f"{key} {all_came}", watch.store)  # type: ignore[attr-defined]
        try:
            self.backend = _connect(group, store, min(limit, timedelta(minutes=1)))
        except RuntimeError as problem:
            raise LostRankError(
                f"The ranks could not be connected by gloo, by which they agree: {problem}. Set GLOO_SOCKET_IFNAME to "
                "the interface by which their hosts reach each other; or look for the first error of another rank."
            ) from problem

    def gather(self, mine: Tensor) -> Tensor:
        """Gathers CPU tensors of one shape from all ranks, stacked in rank order."""
        every = [torch.empty_like(mine) for _ in range(self.size)]
        work = self.backend.allgather(every, mine, self.limit)
        try:
            work.wait(timedelta(seconds=self.watch.interval))
        except RuntimeError:  # it failed, or a rank is late
            self.watch.wait(work.is_completed, self.limit)
            work.wait()
        return torch.stack(every)

    def broadcast(self, content: Tensor) -> Tensor:
        """Fills a CPU tensor, of one length on all ranks, with the first rank's content."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self.limit
        work = self.backend.broadcast([content], options)
        self.watch.wait(work.is_completed, self.limit)
        work.wait()
        return content

    def gather_objects(self, mine: Any) -> list[Any]:
        """Gathers the objects of all ranks, in rank order."""
        content = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes = self.gather(torch.tensor(len(content), device="cpu")).tolist()
        rows = self.gather(torch.nn.functional.pad(content, (0, max(sizes) - len(content))))
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _connect(group: dist.ProcessGroup, store: Any, limit: timedelta) -> Any:
    """Returns the gloo backend. It uses torch's default address if the user's group already uses gloo or the user names
    an interface. Otherwise host names may not resolve, so it listens at this host's address towards the store."""
    gloo: Any = dist.ProcessGroupGloo
    served = "gloo" in dist.get_backend(group) or "GLOO_SOCKET_IFNAME" in os.environ
    address = "" if served else address_towards(store)
    if not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return gloo(store, group.rank(), group.size(), limit)
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=address)], limit
    return gloo(store, group.rank(), group.size(), options)


@contextmanager
def _agreeing(group: dist.ProcessGroup, device: torch.device, doing: str) -> Iterator[ControlGroup]:
    """Surrounds a call in which all ranks of a process group meet, see [`Watch.calling`]. Yields their control group,
    which they make at its first use, with the time limit of the process group on the device."""
    limit = _limit_of(group, device)
    with watch_of_process().calling(group, doing) as watch:
        control: ControlGroup = watch.controls.get(group) or ControlGroup(group, watch, limit)
        watch.controls[group] = control
        control.limit = limit
        yield control


def _limit_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Returns how long a process group waits for other ranks."""
    return group._get_backend(device).options._timeout
