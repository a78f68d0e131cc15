"""How ranks agree before a pass: over a separate gloo group for each process group of the user.

On the user's group, if only one rank called the model, its agreement would pair with a collective of the others, which
would receive our numbers as data. Gloo takes no GPU memory, and detects a killed rank at once. Messages of a pass use
the user's group: no rank leaves an agreement before all have arrived, so nothing can come in between.
"""

import ipaddress
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LostRankError
from .host import address_towards
from .watch import Watch, group_key, watch_of_process


class ControlGroup:
    """The gloo group of a process group. All ranks make it at the same time, within a time limit. They meet through the
    job's store, so that a rank that waits in vain sends nothing."""

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
def agreeing(group: dist.ProcessGroup, device: torch.device, doing: str) -> Iterator[ControlGroup]:
    """Surrounds a call in which all ranks of a process group meet, see [`Watch.calling`]. Yields their control group,
    which they make at its first use, with the time limit of the process group on the device."""
    limit = limit_of(group, device)
    with watch_of_process().calling(group, doing) as watch:
        control: ControlGroup = watch.controls.get(group) or ControlGroup(group, watch, limit)
        watch.controls[group] = control
        control.limit = limit
        yield control


def limit_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Returns how long a process group waits for other ranks."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit
