"""What `hf-burst doctor` finds wrong with several hosts. Ranks report through the launcher's store, which needs neither
NCCL nor gloo, so that what keeps these from connecting is said before they try."""

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import ConfigError
from ..ranks.host import HOST_VARIABLE, host_id, misplaced

SIZE_VARIABLE = "HF_BURST_SIZE"
_PREFIXES = ("HF_BURST_", "NCCL_", "TORCH_NCCL_", "GLOO_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "OMP_NUM_")
_OWN = (HOST_VARIABLE, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")  # may well differ
_PACKAGES = ("torch", "hf_burst", "transformers", "accelerate", "trl", "peft", "triton", "flash-attn", "flash-attn-4")
_CARDS = Path("/sys/class/infiniband")
_DRIVER = Path("/proc/driver/nvidia/version")
_REPORTED = timedelta(minutes=2)
_FAMILIES = (socket.AF_INET, socket.AF_INET6)  # without addresses of a link alone (fe80)
_SHORTEST = 60  # seconds


@dataclass(frozen=True)
class Report:
    """What a rank says of the place where it runs.

    Args:
        host (`str`): As [`host_id`] has it.
        name (`str`): What people call the host.
        backend (`str`): `"nccl"` or `"gloo"`.
        versions (mapping from `str` to `str`): Of packages, NCCL, the driver and the GPU.
        environment (mapping from `str` to `str`): The variables that hf_burst, torch, NCCL and accelerate read.
        interfaces (mapping from `str` to sequence of `str`): Network interfaces that are up, and their addresses.
        address (`str`): The address of the host's own name, empty if it has none.
        cards (sequence of `str`): Cards of InfiniBand or RoCE that have a link.
    """

    host: str
    name: str
    backend: str
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    interfaces: Mapping[str, Sequence[str]]
    address: str
    cards: Sequence[str]


@dataclass(frozen=True)
class Finding:
    """What is wrong and what to do; ranks cannot connect if it `blocks`. What is inferred from names does not block."""

    text: str
    blocks: bool = False


def report(backend: str) -> Report:
    """What this rank says of itself."""
    versions = {name: _version(name) for name in _PACKAGES}
    if torch.cuda.is_available():
        versions |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "GPU": torch.cuda.get_device_name()}
        versions["driver"] = _driver()
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {
        name: [one.address for one in addresses if one.family in _FAMILIES and not one.address.startswith("fe80")]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return Report(
        host=host_id(),
        name=os.environ.get(HOST_VARIABLE) or socket.gethostname(),
        backend=backend,
        versions=versions,
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
        interfaces={name: addresses for name, addresses in found.items() if name in up and addresses},
        address=_own_address([address for addresses in found.values() for address in addresses]),
        cards=_linked(),
    )


def gather(mine: Report, rank: int, size: int, store: Store) -> list[Report]:
    """The reports of all ranks, in rank order.

    Raises:
        ConfigError: If a rank does not report in time.
    """
    store = PrefixStore("hf_burst_hosts", store)
    store.set(f"rank{rank}", json.dumps(asdict(mine)))
    _wait(store, "rank", size)
    reports = [Report(**json.loads(store.get(f"rank{peer}"))) for peer in range(size)]
    store.set(f"done{rank}", "")
    if rank == 0:
        _wait(store, "done", size)  # this process may hold the store, and end now
    return reports


def describe(reports: Sequence[Report]) -> str:
    """The hosts, in a line."""
    names = _names(reports)
    counted = {host: sum(one.host == host for one in reports) for host in names}
    return f"hosts: {len(names)}, " + ", ".join(f"{counted[host]} ranks on {name}" for host, name in names.items())


def findings(reports: Sequence[Report]) -> list[Finding]:
    """What is wrong, the worst first."""
    found = [*_interfaces(reports), *_cards(reports), *_places(reports), *_versions(reports)]
    found += [*_environment(reports), *_limits(reports)]
    return sorted(found, key=lambda finding: not finding.blocks)


def chosen(variable: str, names: Sequence[str]) -> list[str]:
    """The interfaces or cards that a variable of NCCL takes from those that there are: names or their beginnings, `=`
    for whole names, `^` for all others."""
    without, exact = variable.startswith("^"), variable.lstrip("^").startswith("=")
    wanted = [one.split(":")[0] for one in variable.lstrip("^=").split(",") if one]
    meant = [name for name in names if any(name == one if exact else name.startswith(one) for one in wanted)]
    return [name for name in names if name not in meant] if without else meant


def _interfaces(reports: Sequence[Report]) -> Iterator[Finding]:
    """Interfaces that are not there, or that no other host reaches."""
    names = _names(reports)
    if len(names) == 1:
        return
    taken = {}
    for host, first in _firsts(reports).items():
        variable = "NCCL_SOCKET_IFNAME" if first.backend == "nccl" else "GLOO_SOCKET_IFNAME"
        wanted, has = first.environment.get(variable), ", ".join(first.interfaces) or "none"
        others = [name for name in first.interfaces if not name.startswith(("lo", "docker", "virbr"))]
        advice = f"Set {variable} to the interface by which the other hosts reach it (it has {has})."
        if wanted:
            exact = first.backend == "gloo"
            named = [one for one in wanted.split(",") if one in first.interfaces]
            taken[host] = named if exact else chosen(wanted, list(first.interfaces))
            if not taken[host] or (exact and len(named) < len(wanted.split(","))):
                del taken[host]
                yield Finding(f"{variable} is {wanted} on {names[host]}, where no such interface is up. {advice}", True)
                continue
        elif first.backend == "gloo":
            taken[host] = [name for name, addresses in first.interfaces.items() if first.address in addresses]
            if _is_loopback(first.address) or not taken[host]:
                del taken[host]
                known = f"has the address {first.address}" if first.address else "has no address"
                text = f"The name of {names[host]} {known} there, so gloo listens where no other host reaches it."
                yield Finding(f"{text} {advice}", not first.address or _is_loopback(first.address))
                continue
        else:
            infiniband = [name for name in others if name.startswith("ib")]
            taken[host] = infiniband or others or list(first.interfaces)
        if not [name for name in taken[host] if name in others]:
            said = f"is {wanted}" if wanted else "is not set"
            text = f"{variable} {said} on {names[host]}, which takes {', '.join(taken[host]) or 'no interface'}:"
            yield Finding(f"{text} no other host reaches it by that. {advice}", taken[host] == ["lo"])
            del taken[host]
    used = [", ".join(sorted(interfaces)) for interfaces in taken.values()]
    if len(set(used)) > 1:
        values = "; ".join(f"{interfaces} on {names[host]}" for host, interfaces in zip(taken, used, strict=True))
        yield Finding(f"Hosts talk by interfaces of different names: {values}. See that these are of one network.")


def _cards(reports: Sequence[Report]) -> Iterator[Finding]:
    """Cards of InfiniBand that NCCL is told not to use, or that are not there."""
    names, firsts = _names(reports), _firsts(reports)
    if len(names) == 1 or all(first.backend != "nccl" for first in firsts.values()):
        return
    for host, first in firsts.items():
        count, disabled = len(first.cards), first.environment.get("NCCL_IB_DISABLE", "0") not in ("", "0")
        wanted = first.environment.get("NCCL_IB_HCA")
        if disabled and count:
            text = f"NCCL_IB_DISABLE is set on {names[host]}, which has InfiniBand: {', '.join(first.cards)}."
            yield Finding(f"{text} NCCL takes slower sockets. Unset it.")
        elif wanted and not chosen(wanted, first.cards):
            has = ", ".join(first.cards) or "none with a link"
            yield Finding(f"NCCL_IB_HCA is {wanted} on {names[host]}, whose cards are: {has}. Unset it, or name these.")
        elif wanted and not wanted.startswith("^") and len(chosen(wanted, first.cards)) < count:
            left = [card for card in first.cards if card not in chosen(wanted, first.cards)]
            text = f"NCCL_IB_HCA is {wanted} on {names[host]}, so that {', '.join(left)} are idle."
            yield Finding(f"{text} Unset it, unless these belong to storage.")
    if len({len(one.cards) for one in reports}) > 1:
        values = _apart([str(len(one.cards)) for one in reports], reports)
        yield Finding(f"InfiniBand cards with a link: {values}. All wait for the host with the fewest: see ibstat.")


def _places(reports: Sequence[Report]) -> Iterator[Finding]:
    """Hosts with different numbers of ranks, and groups that reach over more hosts than they must."""
    names, size = _names(reports), reports[0].environment.get(SIZE_VARIABLE, "")
    hosts = [names[one.host] for one in reports]
    counts = {name: hosts.count(name) for name in hosts}
    if len(set(counts.values())) > 1:
        held = ", ".join(f"{count} on {name}" for name, count in counts.items())
        yield Finding(f"Hosts have different numbers of ranks: {held}. Start as many on each, one a GPU.")
    if size and not (size.isdecimal() and int(size) > 0 and len(reports) % int(size) == 0):
        yield Finding(f"{SIZE_VARIABLE} is {size}, which does not divide {len(reports)} ranks. Set a divisor.")
        return
    problem = misplaced(hosts, int(size or len(reports)))
    if problem:
        yield Finding(problem)


def _versions(reports: Sequence[Report]) -> Iterator[Finding]:
    for name in dict.fromkeys(name for one in reports for name in one.versions):
        values = [one.versions.get(name, "") for one in reports]
        if len(set(values)) > 1:
            advice = "Use GPUs of one kind." if name == "GPU" else "Install the same on all hosts."
            yield Finding(f"{name} differs: {_apart(values, reports)}. {advice}")


def _environment(reports: Sequence[Report]) -> Iterator[Finding]:
    for name in sorted({name for one in reports for name in one.environment} - set(_OWN)):
        values = [one.environment.get(name, "") for one in reports]
        if len(set(values)) > 1:
            yield Finding(f"{name} differs: {_apart(values, reports)}. Launch with the same on all hosts.")


def _limits(reports: Sequence[Report]) -> Iterator[Finding]:
    """Settings by which ranks wait for ever, or not long enough."""
    names = _names(reports)
    for host, first in _firsts(reports).items():
        if first.environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
            text = f"TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 on {names[host]}"
            yield Finding(f"{text}: ranks would wait for ever for one that is gone. Unset it.")
        beats = first.environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
        if beats.isdecimal() and int(beats) < _SHORTEST:
            text = f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is {beats} on {names[host]}"
            yield Finding(f"{text}: a rank that compiles or saves would be ended. Unset it, or set {_SHORTEST}.")


def _apart(values: Sequence[str], reports: Sequence[Report]) -> str:
    """Which value is where: hosts by name, or ranks where those of one host differ."""
    names = _names(reports)
    places: dict[str, list[str]] = {}
    for rank, (value, one) in enumerate(zip(values, reports, strict=True)):
        mates = {other for other, peer in zip(values, reports, strict=True) if peer.host == one.host}
        place = names[one.host] if len(mates) == 1 else f"rank {rank}"
        where = places.setdefault(value or "nothing", [])
        if place not in where:
            where.append(place)
    return "; ".join(f"{value} on {', '.join(where)}" for value, where in places.items())


def _firsts(reports: Sequence[Report]) -> dict[str, Report]:
    """The first report of each host."""
    firsts: dict[str, Report] = {}
    for one in reports:
        firsts.setdefault(one.host, one)
    return firsts


def _names(reports: Sequence[Report]) -> dict[str, str]:
    """What to call each host: its name, with a rank where several have the same."""
    firsts, hosts = _firsts(reports), [one.host for one in reports]
    every = [first.name for first in firsts.values()]
    return {
        host: first.name if every.count(first.name) == 1 else f"{first.name} (rank {hosts.index(host)})"
        for host, first in firsts.items()
    }


def _wait(store: Store, kind: str, size: int) -> None:
    """Waits until all ranks have set a key of a kind. Raises a [`ConfigError`] that names those that did not."""
    try:
        store.wait([f"{kind}{rank}" for rank in range(size)], _REPORTED)
    except RuntimeError as problem:
        missing = [rank for rank in range(size) if not store.check([f"{kind}{rank}"])]
        raise ConfigError(
            f"Ranks {missing} of {size} did not report within {_REPORTED.total_seconds():.0f} s. Start hf-burst doctor "
            "on all hosts at the same time, with the same MASTER_ADDR and MASTER_PORT."
        ) from problem


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _own_address(held: Sequence[str]) -> str:
    """The first address of the host's name that an interface holds, as gloo takes it; else the first, if any."""
    try:
        known = [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        return ""
    return next((address for address in known if address in held), next(iter(known), ""))


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _driver() -> str:
    """The version of NVIDIA's driver, empty where it is not told."""
    told = re.search(r"Kernel Module.*?\s(\d+(\.\d+)+)\s", _DRIVER.read_text()) if _DRIVER.exists() else None
    return told[1] if told else ""


def _linked() -> list[str]:
    """The cards of InfiniBand or RoCE of which a port has a link."""
    ports = sorted(_CARDS.glob("*/ports/*/state"))
    return list(dict.fromkeys(port.parts[-4] for port in ports if "ACTIVE" in port.read_text()))
