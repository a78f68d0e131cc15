"""Several hosts on one machine: network namespaces of Linux, joined by a switch whose links can be made slow.

```
host 0: eth0 10.77.0.1 ── link ─┐
host 1: eth0 10.77.0.2 ── link ─┤ switch, in a namespace of its own
host 2: eth0 10.77.0.3 ── link ─┘
```

A [`Network`] is these hosts. `command` runs a program on one of them, as a user would; a [`HostPool`] runs functions on
ranks that are spread over them. `sent` counts the bytes that left each host. All addresses are those of the namespaces:
nothing outside is reached, and several networks may exist at once. The kernel's name of a host is the same everywhere,
so `NCCL_HOSTID` tells the hosts apart.
"""

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from tests.support.ranks import RankPool, answer, forked, join

INTERFACE = "eth0"
PORT = 29500  # of the store of a pool: any is free on a network of its own
_PREFIX = "hf_burst"
_FOLDER = Path("/run/netns")  # where `ip netns` keeps them
_TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}  # the same on every machine
_CLONE_NEWNET = 0x40000000
_TIMEOUT = timedelta(minutes=3)
_numbers = count()


def refusal() -> str | None:
    """Why this machine cannot have such hosts, found by making a link between two namespaces and shaping it."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"network namespaces need the programs {missing}, which are not installed"
    try:
        Network(1, megabits=100).close()
    except subprocess.CalledProcessError as problem:
        return f"this machine allows no network namespaces: {' '.join(problem.cmd)}: {problem.stderr.strip()}"
    return None


class Network:
    """`hosts` hosts. Their links carry `megabits` a second each way at once, or as much as the machine can."""

    def __init__(self, hosts: int, megabits: float | None = None) -> None:
        _sweep()
        name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.switch, self.namespaces = f"{name}-switch", [f"{name}-host{host}" for host in range(hosts)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        try:
            for namespace in (self.switch, *self.namespaces):
                _run("ip", "netns", "add", namespace)
            _inside(self.switch, "link add bridge type bridge", "link set bridge addrgenmode none up")
            for host, namespace in enumerate(self.namespaces):
                _inside(
                    self.switch,
                    f"link add port{host} type veth peer name {INTERFACE} netns {namespace}",
                    f"link set port{host} addrgenmode none master bridge up",
                )
                _inside(
                    namespace,
                    "link set lo up",
                    f"link set {INTERFACE} addrgenmode none up",
                    f"addr add {self.addresses[host]}/24 dev {INTERFACE}",
                )
                for setting, value in _TCP.items():
                    _run(*self.command(host, ["sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}"]))
                # nothing is lost here: a long queue is no reason to send twice
                _inside(namespace, f"route change 10.77.0.0/24 dev {INTERFACE} rto_min 2s")
            if megabits is not None:
                self.shape(megabits)
        except BaseException:
            self.close()
            raise

    def shape(self, megabits: float | None) -> None:
        """Makes every link carry so much a second each way; `None` takes the limit away."""
        ends = [(namespace, INTERFACE) for namespace in self.namespaces]
        ends += [(self.switch, f"port{host}") for host in range(len(self.namespaces))]
        for namespace, device in ends:
            if megabits is None:
                subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)
                continue
            burst = max(1 << 17, int(megabits * 1e6 / 8 * 0.004))  # whole packets of 64 KiB, and 4 ms between ticks
            bucket = f"tbf rate {megabits}mbit burst {burst} limit {1 << 26}"  # a queue so long that nothing is lost
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket.split())

    def sent(self) -> list[int]:
        """The bytes that have left each host so far, with all headers."""
        ports = json.loads(_run("ip", "-n", self.switch, "-s", "-j", "link", "show", "type", "veth"))
        arrived = {port["ifname"]: int(port["stats64"]["rx"]["bytes"]) for port in ports}
        return [arrived[f"port{host}"] for host in range(len(self.namespaces))]

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """What to give `subprocess` to run a command on a host."""
        return ["ip", "netns", "exec", self.namespaces[host], *command]

    def environment(self, host: int) -> dict[str, str]:
        """The variables that a process on a host needs."""
        return {"NCCL_HOSTID": f"host{host}", "GLOO_SOCKET_IFNAME": INTERFACE, "MASTER_ADDR": self.addresses[0]}

    def close(self) -> None:
        """Takes the hosts down. A namespace is gone when its last process has ended."""
        for namespace in (self.switch, *self.namespaces):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


class HostPool(RankPool):
    """Ranks joined by gloo, `per_host` neighbours on each host of a network of their own."""

    def __init__(self, hosts: int, per_host: int, megabits: float | None = None) -> None:
        self.network = Network(hosts, megabits)
        try:
            self._start(forked(), hosts * per_host, _serve, self.network, per_host)
        except BaseException:
            self.network.close()
            raise

    def close(self) -> None:
        """Ends the ranks, and takes their network down."""
        super().close()
        self.network.close()


def _serve(rank: int, size: int, pipe: Connection, network: Network, per_host: int) -> None:
    host, local = divmod(rank, per_host)
    _enter(network.namespaces[host])
    os.environ.update(MASTER_PORT=str(PORT), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(per_host))
    os.environ.update(network.environment(host))
    store = dist.TCPStore(network.addresses[0], PORT, size, is_master=rank == 0, timeout=_TIMEOUT)
    join(rank, size, store)
    answer(rank, size, pipe)


def _enter(namespace: str) -> None:
    """Moves this thread, and those that it starts, into a namespace; `os.setns` is younger than the oldest Python."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(_FOLDER / namespace) as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)


def _sweep() -> None:
    """Removes the namespaces of processes that ended without doing so."""
    for found in _FOLDER.glob(f"{_PREFIX}-*-*-*"):
        if not Path("/proc", found.name.split("-")[1]).exists():
            subprocess.run(["ip", "netns", "del", found.name], capture_output=True)


def _inside(namespace: str, *lines: str) -> None:
    """Runs lines of `ip` in a namespace."""
    _run("ip", "-n", namespace, "-batch", "-", given="\n".join(lines))


def _run(*command: str, given: str | None = None) -> str:
    return subprocess.run(command, input=given, check=True, capture_output=True, text=True).stdout
