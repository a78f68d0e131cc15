"""Identifies hosts as NCCL does, so that both agree on which ranks reach each other without a network."""

import math
import os
import socket
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import ConfigError

HOST_VARIABLE = "NCCL_HOSTID"
SIZE_VARIABLE = "HF_BURST_SIZE"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def size_from_env() -> int | None:
    """Returns the number of ranks that share a sequence from `HF_BURST_SIZE`, or `None` if it is not set."""
    value = os.environ.get(SIZE_VARIABLE)
    if value is not None and (not value.isdecimal() or int(value) < 1):
        raise ConfigError(f"{SIZE_VARIABLE}={value!r} is not a number of ranks; set it to an integer of at least 1.")
    return None if value is None else int(value)


def neighbours_per_host(hosts: Sequence[str]) -> int:
    """Returns the largest size of blocks of neighbouring ranks, each on one host, that divide the group."""
    return math.gcd(*(len(list(run)) for _, run in groupby(hosts)))


def host_id() -> str:
    """Returns an identifier of this process's host, equal for two ranks on the same host.

    This is `NCCL_HOSTID` if it is set, even if empty. Otherwise it is the host name and the boot id. The boot id tells
    apart hosts of the same name. Containers on one host differ by name, and NCCL connects them over the network.
    Source: `getHostHashOnce` in NCCL's `src/misc/utils.cc`.
    """
    named = os.environ.get(HOST_VARIABLE)
    if named is not None:
        return named
    try:
        boot = _BOOT.read_text().strip()
    except OSError:  # not on Linux
        return socket.gethostname()
    return f"{socket.gethostname()} (boot {boot[:8]})"  # short enough to read in a message


def address_towards(store: Any) -> str:
    """Returns the address by which this host reaches a store; empty for a file store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "port"):
        return ""
    family, kind, protocol, _, there = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # sends nothing
        return str(probe.getsockname()[0])


def misplaced(hosts: Sequence[str], size: int) -> str | None:
    """Returns why groups of neighbouring ranks span more hosts than necessary, and what to do; `None` if they don't.

    Args:
        hosts (sequence of `str`): The hosts of all ranks, in rank order.
        size (`int`): Ranks of a group; divides the number of all ranks.
    """
    if size == 1:
        return None
    fewest = -(-size // max(hosts.count(host) for host in hosts))
    for first in range(0, len(hosts), size):
        runs = [host for host, _ in groupby(hosts[first : first + size])]
        if len(runs) > min(len(set(runs)), fewest):
            return (
                f"Ranks {first} to {first + size - 1} share a sequence over {', '.join(dict.fromkeys(runs))}: ranks of "
                "a host are not neighbours, or fewer hosts would do. Number the ranks host by host (srun "
                "--distribution=block, or torchrun and accelerate launch once on every host), and choose a burst_size "
                "that divides the ranks of every host, or a multiple."
            )
    return None
