"""How ranks agree before a pass: by a gloo group of its own next to each process group of the user.

On the user's group the agreement of a rank that alone calls the model would pair with a collective of the others, and
they would receive our numbers as data. Gloo takes no GPU memory, and notices at once that a rank was killed. Messages
of a pass do use the user's group: no rank leaves an agreement before all have come, so that nothing comes between.
"""

import ipaddress
import os
import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LostRankError
from .host import address_towards
from .watch import Watch, group_key


class ControlGroup:
    """The group of gloo's that belongs to a process group. All of its ranks make it at the same time, within a limit.
    They find each other through the store of the job, so that a rank which waits in vain sends nothing."""

    def __init__(self, group: dist.ProcessGroup, watch: Watch, limit: timedelta) -> None:
        self.watch = watch
        self.size = group.size()
        self.opened = set[str]()  # devices on which all ranks have called the process group itself
        key = f"control {group_key(group.group_name, tuple(dist.get_process_group_ranks(group)))}"
        came = watch.store.add(key, 1)
        all_came = -(-came // self.size) * self.size  # earlier groups of this name may have been made
        try:
            watch.wait(lambda: int(watch.store.add(key, 0)) >= all_came, limit)
        except BaseException:  # also when the user interrupts: whoever comes later must not connect to this rank
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

    def gather(self, mine: Tensor, limit: timedelta) -> Tensor:
        """What all ranks hold, in rank order: one more dimension in front. Tensors of one shape, on CPUs."""
        every = [torch.empty_like(mine) for _ in range(self.size)]
        work = self.backend.allgather(every, mine, limit)
        try:
            work.wait(timedelta(seconds=self.watch.interval))
        except RuntimeError:  # it has failed, or some rank is late
            self.watch.wait(work.is_completed, limit)
            work.wait()
        return torch.stack(every)

    def broadcast(self, content: Tensor, limit: timedelta) -> Tensor:
        """Fills a tensor of one length on all ranks, on CPUs, with that of the first."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = limit
        work = self.backend.broadcast([content], options)
        self.watch.wait(work.is_completed, limit)
        work.wait()
        return content

    def gather_objects(self, mine: Any, limit: timedelta) -> list[Any]:
        """The objects of all ranks, in rank order."""
        content = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes = self.gather(torch.tensor(len(content), device="cpu"), limit).tolist()
        rows = self.gather(torch.nn.functional.pad(content, (0, max(sizes) - len(content))), limit)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _connect(group: dist.ProcessGroup, store: Any, limit: timedelta) -> Any:
    """The backend. It listens where torch chooses if that serves the users' group already, or users name an interface.
    Else the name of a host may lead nowhere, and it listens at the address of this process towards the store."""
    gloo: Any = dist.ProcessGroupGloo
    served = "gloo" in dist.get_backend(group) or "GLOO_SOCKET_IFNAME" in os.environ
    address = "" if served else address_towards(store)
    if not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return gloo(store, group.rank(), group.size(), limit)
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=address)], limit
    return gloo(store, group.rank(), group.size(), options)


def control_of(group: dist.ProcessGroup, watch: Watch, limit: timedelta) -> ControlGroup:
    """The control group of a process group: made at its first use, by all ranks. It goes with the process group."""
    found: ControlGroup = watch.controls.get(group) or ControlGroup(group, watch, limit)
    watch.controls[group] = found
    return found
