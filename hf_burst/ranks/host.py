"""Which host a process is on, by what NCCL goes by: so both agree on which ranks reach each other without a network."""

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import ConfigError

HOST_VARIABLE = "NCCL_HOSTID"
SIZE_VARIABLE = "HF_BURST_SIZE"
NEIGHBOURS = (
    "Number the ranks host by host: srun --distribution=block, or torchrun and accelerate launch once on every host."
)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def size_from_env() -> int | None:
    """The ranks that share a sequence, of the environment variable; `None` where it is not set."""
    value = os.environ.get(SIZE_VARIABLE)
    if value is not None and (not value.isdecimal() or int(value) < 1):
        raise ConfigError(f"{SIZE_VARIABLE}={value!r} is not a number of ranks; set it to an integer of at least 1.")
    return None if value is None else int(value)


@dataclass(frozen=True)
class Topology:
    """What a run needs to know of its machines. Equal on all ranks of a group.

    Args:
        ranks_per_host (`int`, defaults to 1): Ranks of the group on one host, neighbours of each other.
        on_gpus (`bool`, defaults to `False`): Whether the ranks compute on GPUs.
    """

    ranks_per_host: int = 1
    on_gpus: bool = False


def neighbours_per_host(hosts: Sequence[str]) -> int:
    """The most neighbouring ranks that cut a group into blocks of one host each; `hosts` are those of the ranks."""
    return math.gcd(*(len(list(run)) for _, run in groupby(hosts)))


def host_id() -> str:
    """The host of this process: equal for two ranks if they are on one.

    This is `NCCL_HOSTID` where it is set, even to nothing. Otherwise it is the host's name and the number of its boot.
    Hosts of one name differ by that number. Containers of one host differ by their names, and NCCL joins them by the
    network. Source: `getHostHashOnce` of NCCL's `src/misc/utils.cc`.
    """
    named = os.environ.get(HOST_VARIABLE)
    if named is not None:
        return named
    try:
        boot = _BOOT.read_text().strip()
    except OSError:  # not on Linux
        return socket.gethostname()
    return f"{socket.gethostname()} (boot {boot[:8]})"  # as long as a person reads it in a message


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


def misplaced(hosts: Sequence[str], size: int) -> str | None:
    """Why groups of neighbouring ranks reach over more hosts than they must, and what to do; `None` if they do not.

    Args:
        hosts (sequence of `str`): The hosts of all ranks, in rank order.
        size (`int`): Ranks of a group; divides the ranks.
    """
    if size == 1:
        return None
    runs = [host for host, _ in groupby(hosts)]
    counts = {host: hosts.count(host) for host in hosts}
    for first in range(0, len(hosts), size):
        used = list(dict.fromkeys(hosts[first : first + size]))
        apart = len(list(groupby(hosts[first : first + size]))) > len(used)
        if not apart and len(used) <= -(-size // max(counts.values())):
            continue
        if len(runs) > len(counts):
            order = ", ".join(f"rank {rank} on {host}" for rank, host in enumerate(hosts[:4]))
            text = f"Ranks of a host are not neighbours ({order}, ...), so groups of {size} cross the network."
            return f"{text} {NEIGHBOURS}"
        held = ", ".join(f"{count} on {host}" for host, count in counts.items())
        return (
            f"The group of ranks {first} to {first + size - 1} reaches over {len(used)} hosts ({held}), although "
            f"{size} ranks need fewer. Choose a burst_size that divides the ranks of every host, or a multiple."
        )
    return None
