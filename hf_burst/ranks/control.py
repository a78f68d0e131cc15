"""How ranks agree before a pass, by a gloo group of its own next to each process group of the user.

The agreement cannot use the user's group. A rank that alone calls the model waits in the agreement, while other ranks
may be in any collective of the user, and on one group the two would pair: the user would receive our numbers as data.
Gloo serves ranks on GPUs too, because an agreement is a few numbers of the host, a communicator of NCCL takes GPU
memory, and gloo notices at once that a rank was killed.

Messages of a pass, such as those of the ring, do use the user's group. No rank leaves the agreement of a pass before
all have come to it, and until the pass is over every rank runs our code in the same order. So no collective of the user
can come between, and the watch tells the others of a rank that fails in the middle.
"""

import ipaddress
import os
import pickle
import socket
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LostRankError
from .watch import Watch, group_key

_CONNECT = timedelta(minutes=1)  # all ranks have come by then


class ControlGroup:
    """The group of gloo's that belongs to a process group. All of its ranks make it at the same time.

    They find each other through the store of the job, so that a rank which waits for the others in vain sends nothing.

    Args:
        group (`ProcessGroup`): The ranks.
        watch ([`Watch`]): That of this process.
        limit (`timedelta`): How long this rank waits for the others.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch, limit: timedelta) -> None:
        self.watch, self.size = watch, group.size()
        key = f"control {group_key(group.group_name, tuple(dist.get_process_group_ranks(group)))}"
        came = watch.store.add(key, 1)
        all_came = -(-came // self.size) * self.size  # earlier groups of this name may have been made
        try:
            watch.until(lambda: watch.store.add(key, 0) >= all_came, limit)
        except BaseException:  # also when the user interrupts: whoever comes later must not connect to this rank
            watch.store.add(key, -1)
            raise
        store = dist.PrefixStore(f"{key} {all_came}", watch.store)  # type: ignore[attr-defined]
        try:
            self.backend = _connect(group, store, min(limit, _CONNECT))
        except RuntimeError as problem:
            raise LostRankError(
                f"The ranks could not be connected by gloo, by which they agree: {problem}. Set GLOO_SOCKET_IFNAME to "
                "the interface by which their hosts reach each other; or look for the first error of another rank."
            ) from problem
        self.opened = set[str]()  # devices on which all ranks have called the process group itself

    def gather(self, mine: Tensor, limit: timedelta) -> Tensor:
        """What all ranks hold, in rank order: one more dimension in front. Tensors of one shape, on CPUs."""
        every = [torch.empty_like(mine) for _ in range(self.size)]
        self.watch.wait(self.backend.allgather(every, mine, limit))
        return torch.stack(every)

    def broadcast(self, content: Tensor, limit: timedelta) -> Tensor:
        """Fills a tensor of one length on all ranks, on CPUs, with that of the first."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = limit
        self.watch.wait(self.backend.broadcast([content], options))
        return content

    def gather_objects(self, mine: Any, limit: timedelta) -> list[Any]:
        """The objects of all ranks, in rank order."""
        content = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes = self.gather(torch.tensor(len(content), device="cpu"), limit).tolist()
        padded = torch.nn.functional.pad(content, (0, max(sizes) - len(content)))
        rows = self.gather(padded, limit)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _connect(group: dist.ProcessGroup, store: Any, limit: timedelta) -> Any:
    """The backend. It listens where torch chooses if that serves the users' group already, or if a user named an
    interface. Else the name of a host may lead to an address that no other host reaches, and so gloo listens at the one
    by which this process reaches the store of the job."""
    gloo: Any = dist.ProcessGroupGloo
    served = "gloo" in dist.get_backend(group) or "GLOO_SOCKET_IFNAME" in os.environ
    address = "" if served else address_towards(store)
    if not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return gloo(store, group.rank(), group.size(), limit)
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=address)], limit
    return gloo(store, group.rank(), group.size(), options)


def address_towards(store: Any) -> str:
    """The address of this host on the way to a store; empty for one in files."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "port"):
        return ""
    family, kind, protocol, _, there = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # sends nothing
        return str(probe.getsockname()[0])


_CONTROLS: WeakKeyDictionary[dist.ProcessGroup, ControlGroup] = WeakKeyDictionary()


def control_of(group: dist.ProcessGroup, watch: Watch, limit: timedelta) -> ControlGroup:
    """The control group of a process group: made at its first use, by all ranks. It goes with the process group."""
    found = _CONTROLS.get(group)
    if found is None:
        found = _CONTROLS[group] = ControlGroup(group, watch, limit)
    return found


def end_control(group: dist.ProcessGroup) -> None:
    """Ends the control group of a process group, if there is one. All ranks call this, or none makes one again."""
    _CONTROLS.pop(group, None)
