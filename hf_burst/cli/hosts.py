"""Problems of multi-host launches, for `hf-burst doctor`. Ranks report through the launcher's store, which needs
neither NCCL nor gloo, so that what prevents a connection is reported before they try."""

import json
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.utils.store import synchronize

from ..errors import ConfigError
from ..ranks.host import HOST_VARIABLE, SIZE_VARIABLE, host_id, misplaced
from ..version import __version__

_PREFIXES = ("HF_BURST_", "NCCL_", "TORCH_NCCL_", "GLOO_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "OMP_NUM_")
_OWN = {HOST_VARIABLE, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"}  # may differ between hosts
_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "trl",
    "peft",
    "triton",
    "flash-attn",
    "flash-attn-4",
    "ffpa-attn",
    "liger-kernel",
)
_CARDS = Path("/sys/class/infiniband")
_REPORTED = 120.0  # seconds
_FAMILIES = (socket.AF_INET, socket.AF_INET6)  # link-local addresses (fe80) do not count
_LOOPBACK = ("127.", "::1")
_LINKED = "the number of InfiniBand cards with a link"


@dataclass(frozen=True)
class Report:
    """A rank's description of its host.

    Args:
        host (`str`): The result of [`host_id`].
        name (`str`): The readable name of the host.
        backend (`str`): `"nccl"` or `"gloo"`.
        facts (mapping from `str` to `str`): Versions of packages and NCCL, the GPU's name, the number of InfiniBand or
            RoCE cards with a link, and the variables that hf_burst, torch, NCCL and accelerate read.
        interfaces (sequence of `str`): The network interfaces that are up and have an address.
        address (`str`): The address of the host's own name, empty if it has none.
    """

    host: str
    name: str
    backend: str
    facts: Mapping[str, str]
    interfaces: Sequence[str]
    address: str


def report(backend: str) -> Report:
    """Returns the report of this rank."""
    told = versions() | variables()
    linked = {port.parts[-4] for port in _CARDS.glob("*/ports/*/state") if "ACTIVE" in port.read_text()}
    told[_LINKED] = str(len(linked))
    if torch.cuda.is_available():
        told |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "GPU": torch.cuda.get_device_name()}
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    reached = {
        name
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in _FAMILIES and not one.address.startswith("fe80")
    }
    return Report(
        host=host_id(),
        name=os.environ.get(HOST_VARIABLE) or socket.gethostname(),
        backend=backend,
        facts=told,
        interfaces=sorted(up & reached),
        address=_own_address(),
    )


def versions() -> dict[str, str]:
    """Returns the versions of hf_burst and of installed packages that it works with."""
    found = {"hf_burst": __version__}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def variables() -> dict[str, str]:
    """Returns the environment variables that hf_burst, torch, NCCL and accelerate read."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def gather(mine: Report, rank: int, size: int, store: Store) -> list[Report]:
    """Returns, for each rank in order, the report of the first rank of its host, with a unique host name.

    Raises:
        ConfigError: If a rank does not report in time.
    """
    store = PrefixStore("hf_burst_hosts", store)
    try:
        reports = synchronize(store, json.dumps(asdict(mine)).encode(), rank, size, "rank", _REPORTED)
    except RuntimeError as problem:
        missing = [peer for peer in range(size) if not store.check([f"rank{peer}"])]
        raise ConfigError(
            f"Ranks {missing} of {size} did not report within {_REPORTED:.0f} s. Start hf-burst doctor on all hosts at "
            "the same time, with the same MASTER_ADDR and MASTER_PORT."
        ) from problem
    return by_rank([Report(**json.loads(one)) for one in reports])


def by_rank(reports: Sequence[Report]) -> list[Report]:
    """Returns, for each rank, the first report of its host, with a unique host name."""
    ids = [one.host for one in reports]
    firsts = [ids.index(host) for host in ids]
    names = Counter(reports[first].name for first in set(firsts))
    found = [(reports[first], first) for first in firsts]
    return [one if names[one.name] == 1 else replace(one, name=f"{one.name} (rank {first})") for one, first in found]


def describe(reports: Sequence[Report]) -> str:
    """Returns a line about the hosts."""
    counts = Counter(first.name for first in reports)
    return f"hosts: {len(counts)}, {', '.join(f'{count} ranks on {host}' for host, count in counts.items())}"


def obstacles(reports: Sequence[Report]) -> list[str]:
    """Returns the problems that prevent a connection. The first rank of a host represents it."""
    hosts = {first.name: first for first in reports}
    return list(_interfaces(hosts.values())) if len(hosts) > 1 else []


def remarks(reports: Sequence[Report]) -> list[str]:
    """Returns the other problems, likewise."""
    return [*_places(reports), *_differences({first.name: first for first in reports})]


def chosen(variable: str, names: Sequence[str], backend: str) -> list[str]:
    """Returns the interfaces that a variable selects. gloo matches whole names; NCCL matches prefixes, after `=` whole
    names, and after `^` all others."""
    whole = backend == "gloo" or "=" in variable[:2]
    wanted = [name for name in variable.lstrip("^=").split(",") if name]
    meant = [name for name in names if any(name == one if whole else name.startswith(one) for one in wanted)]
    return [name for name in names if name not in meant] if variable.startswith("^") else meant


def _interfaces(hosts: Iterable[Report]) -> Iterator[str]:
    for host in hosts:
        variable = "NCCL_SOCKET_IFNAME" if host.backend == "nccl" else "GLOO_SOCKET_IFNAME"
        wanted = host.facts.get(variable)
        problem = ""
        if wanted:
            taken = chosen(wanted, host.interfaces, host.backend)
            if not taken or (host.backend == "gloo" and len(taken) < len(wanted.split(","))):
                problem = f"{variable} is {wanted} on {host.name}, where no such interface is up."
            elif taken == ["lo"]:
                problem = f"{variable} is {wanted} on {host.name}: no other host reaches it by its loopback."
        elif host.backend == "gloo" and (not host.address or host.address.startswith(_LOOPBACK)):
            known = f"has the address {host.address}" if host.address else "has no address"
            problem = f"The name of {host.name} {known} there, so gloo listens where no other host reaches it."
        if problem:
            has = ", ".join(host.interfaces) or "none"
            yield f"{problem} Set {variable} to the interface by which the other hosts reach it (it has {has})."


def _places(reports: Sequence[Report]) -> Iterator[str]:
    """Yields unequal numbers of ranks per host, and groups that span more hosts than necessary."""
    size = reports[0].facts.get(SIZE_VARIABLE, "")
    hosts = [first.name for first in reports]
    counts = Counter(hosts)
    if len(set(counts.values())) > 1:
        held = ", ".join(f"{count} on {host}" for host, count in counts.items())
        yield f"Hosts have different numbers of ranks: {held}. Start the same number on each, one a GPU."
    if size and not (size.isdecimal() and int(size) > 0 and len(hosts) % int(size) == 0):
        yield f"{SIZE_VARIABLE} is {size}, which does not divide {len(hosts)} ranks. Set a divisor."
    elif problem := misplaced(hosts, int(size or len(hosts))):
        yield problem


def _differences(hosts: Mapping[str, Report]) -> Iterator[str]:
    advice = {"GPU": "Use GPUs of one kind.", _LINKED: "All wait for the host with the fewest: see ibstat."}
    for name in sorted(set().union(*(host.facts for host in hosts.values())) - _OWN):
        places: dict[str, list[str]] = {}
        for host, own in hosts.items():
            places.setdefault(own.facts.get(name) or "nothing", []).append(host)
        if len(places) > 1:
            values = "; ".join(f"{value} on {', '.join(where)}" for value, where in places.items())
            yield f"{name} differs: {values}. {advice.get(name, 'Install or set the same on all hosts.')}"


def _own_address() -> str:
    """Returns the first address of the host's name, on which gloo listens; empty if it has none."""
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return ""
