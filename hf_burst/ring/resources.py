"""What the ranks of a process group hold together: symmetric memory, and what they know of their hosts.

Each is made or agreed on at its first use, by all ranks at the same time. It lives as long as the process group itself:
a group that is destroyed takes its resources along, and one that is made anew begins without any. The process groups of
hosts end with the default group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..ranks.group import ContextGroup, group_by_name
from ..ranks.host import host_id, neighbours_per_host
from .exchange import Exchange, ExchangeClock, Exchanges, PeerToPeer
from .symmetric import Symmetric, SymmetricPool, open_pool, remembered

_NOT_SYMMETRIC = "BurstConfig(transport='symmetric') cannot be had: {}. Take 'auto', which falls back to 'p2p'."


class GroupResources:
    """The resources of one group. Every rank of it calls the methods at the same time.

    Args:
        group ([`ContextGroup`]): The ranks.
    """

    def __init__(self, group: ContextGroup) -> None:
        self.group = group
        self.clock: ExchangeClock | None = None  # times the messages of all passes, while there is one
        self._ranks_per_host: int | None = None
        self._pools: dict[torch.device, SymmetricPool | str] = {}
        self._levels: dict[int, tuple[ContextGroup, ContextGroup]] = {}
        self._unreached: dict[int, str] = {}

    @property
    def knows_hosts(self) -> bool:
        """Whether the ranks have told each other their hosts, so that [`ranks_per_host`] sends nothing."""
        return self.group.size == 1 or self._ranks_per_host is not None

    def ranks_per_host(self, device: torch.device) -> int:
        """How many neighbouring ranks run on each host. The first call sends the name of each rank's host."""
        if self.group.size == 1:
            return 1
        if self._ranks_per_host is None:
            hosts = self.group.gather(host_id(), device, "the names of all hosts")
            self._ranks_per_host = neighbours_per_host(hosts)
        return self._ranks_per_host

    def pool(self, device: torch.device) -> SymmetricPool | str:
        """The symmetric memory of the ranks on this rank's device, or why they have none."""
        return remembered(self._pools, device, lambda: open_pool(self.group, device))

    def levels(self, device: torch.device, per_host: int) -> tuple[ContextGroup, ContextGroup]:
        """The ranks on the host of this rank, of `per_host` ranks each, and those of its number on all hosts.

        They have process groups of their own, so that what travels inside does not wait for what crosses.
        """
        if per_host not in self._levels:
            number, ranks = self.group.rank % per_host, range(self.group.size)
            first = self.group.rank - number
            near = self.group.part(ranks[first : first + per_host], device)
            far = self.group if per_host == 1 else self.group.part(ranks[number::per_host], device)
            self._levels[per_host] = near, far
        return self._levels[per_host]

    def _check_reach(self, device: torch.device, per_host: int) -> None:
        """Raises a ConfigError on all ranks if those of some host cannot read each other's memory."""
        if per_host not in self._unreached:
            near, _ = self.levels(device, per_host)
            pool = resources_of(near).pool(device) if near.size > 1 else ""
            own = pool if isinstance(pool, str) else ""
            every = self.group.gather(own, device, "the reach of symmetric memory")
            self._unreached[per_host] = "; ".join(dict.fromkeys(filter(None, every)))
        if self._unreached[per_host]:
            raise ConfigError(_NOT_SYMMETRIC.format(self._unreached[per_host]))

    @contextmanager
    def messages(self, device: torch.device, transport: str, near_ranks: int | None = None) -> Iterator[Exchanges]:
        """The messages of one pass, by a transport of [`BurstConfig`]. After a failure in its middle, later ones are
        refused, see [`ContextGroup.messages`].

        Args:
            device (`torch.device`): This rank's device.
            transport (`str`): As in [`BurstConfig`]; between hosts ranks always send and receive.
            near_ranks (`int`, *optional*): As in [`ShardedAttention`]; all ranks by default.

        Raises:
            ConfigError: If the ranks cannot read each other's memory although that was asked for; if an attention ended
                in the middle; or if the caller records a CUDA graph, which would not take part in the turns in which
                ranks publish.
        """
        if near_ranks in (None, self.group.size):
            exchanges = [self._exchange(device, transport)]
        else:
            near, far = self.levels(device, near_ranks)
            if transport == "symmetric":
                self._check_reach(device, near_ranks)
            exchanges = [resources_of(near)._exchange(device, transport), PeerToPeer(far, device)]
        if self.clock is not None:
            for exchange in exchanges:
                self.clock.watch(exchange)
        with self.group.messages():
            yield Exchanges(exchanges[0], exchanges[-1])

    def _exchange(self, device: torch.device, transport: str) -> Exchange:
        """The messages among the ranks of this group."""
        direct = self.group.size == 1 or transport == "p2p" or (transport == "auto" and device.type != "cuda")
        pool = "" if direct else self.pool(device)
        if isinstance(pool, str):
            if pool and transport == "symmetric":
                raise ConfigError(_NOT_SYMMETRIC.format(pool))
            return PeerToPeer(self.group, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "Attention over ranks cannot be part of a CUDA graph of yours while ranks read each other's memory. "
                "Set BurstConfig(transport='p2p'), or leave it out of the graph."
            )
        pool.settle()
        return Symmetric(pool)


_OPEN: WeakKeyDictionary[dist.ProcessGroup, GroupResources] = WeakKeyDictionary()
_ONE_PROCESS = GroupResources(ContextGroup())  # which shares nothing, and so never holds anything


def resources_of(group: ContextGroup | str) -> GroupResources:
    """The resources of a group, given as itself or by the name under which torch.distributed knows it."""
    name = group if isinstance(group, str) else group.name
    if not name:
        return _ONE_PROCESS
    process_group = group_by_name(name)
    if process_group not in _OPEN:
        _OPEN[process_group] = GroupResources(ContextGroup.from_name(name))
    return _OPEN[process_group]
