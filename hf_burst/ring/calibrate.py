"""Measuring a machine for the cost model of `hf_burst.plan`, and remembering it: its kernel, memory and links."""

import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..cache import cache_file, write_whole
from ..errors import RankMismatchError
from ..kernels import BackwardInputs, Band, Kernel, KernelRequest, Scores, project_out, select_kernel
from ..layers.host_limits import gpus_of_host, host_memory
from ..plan import KernelRate, Link, Machine, built_in
from ..ranks.group import ContextGroup
from ..ranks.host import host_id
from ..version import __version__
from . import PeerToPeer
from .exchange import Incoming, Outgoing, Round

logger = logging.getLogger(__name__)

Start = Callable[[], Callable[[], Any]]  # starts messages, and returns what waits for them

_REPEATS = 7
_BARRIER_MS = 60_000


class _Sizes(NamedTuple):
    """The heads of a kind of device, rows of causal squares, and bytes of messages and of a copy in memory."""

    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    rows: tuple[int, ...]
    messages: tuple[int, int, int]
    copied: int


_GPU = _Sizes(torch.bfloat16, 32, 8, 128, (1024, 2048, 4096, 8192, 16384), (1 << 20, 1 << 24, 1 << 27), 1 << 28)
_CPU = _Sizes(torch.float32, 4, 2, 64, (64, 256, 1024), (1 << 16, 1 << 20, 1 << 23), 1 << 25)


def machine_for(group: ContextGroup, device: torch.device, kernel: str | None = None) -> Machine:
    """The machine that a group runs on: as [`calibrate`] measured it, or else as its device is known. Every rank calls
    it, takes part in one small all-gather, and gets the same machine.

    Args:
        group ([`ContextGroup`]): The ranks.
        device (`torch.device`): Where they compute.
        kernel (`str`, *optional*): Name of the kernel that computes; the one chosen by itself by default.
    """
    name, kernel = device_name(device), kernel or default_kernel(device).capabilities.name
    profiles = _profiles(name, kernel, group.size) if group.rank == 0 else {}
    reports = _gather(group, {**_report(device), "name": name, "kernel": kernel, "profiles": profiles})
    first, memory = reports[0], min(report["memory"] for report in reports)
    per_host = ranks_per_host([report["host"] for report in reports])
    machine = _known(first["name"], first["kernel"], memory, per_host, first["profiles"])
    machine = replace(machine, host_memory=min(report["host_memory"] for report in reports) // per_host)
    return machine if all(report["reaches"] for report in reports) else replace(machine, symmetric=None)


def machine_of(device: torch.device, ranks: int, per_host: int, kernel: str | None = None) -> Machine:
    """The machine that a group of so many ranks, in all and on one host, would run on, as [`machine_for`] has it. Asks
    no other process, and assumes that GPUs of one host read each other's memory."""
    name, kernel = device_name(device), kernel or default_kernel(device).capabilities.name
    known = _known(name, kernel, _memory(device), per_host, _profiles(name, kernel, ranks))
    return replace(known, host_memory=host_memory()[0] // max(per_host, gpus_of_host(device)))


def calibrate(group: ContextGroup, device: torch.device, kernel: Kernel) -> Machine:
    """Measures the machine that a group runs on, in a few seconds, and writes it down for [`machine_for`]. The slowest
    rank's kernel, memory and links count. All ranks call this, and nothing else meanwhile.

    Args:
        group ([`ContextGroup`]): The ranks.
        device (`torch.device`): Where they compute.
        kernel ([`Kernel`]): What computes.

    Raises:
        RankMismatchError: If the ranks measure different kernels or devices, or one of them cannot measure.
    """
    sizes = _GPU if device.type == "cuda" else _CPU
    name, error = device_name(device), None
    alone: dict[str, Any] = {}
    try:
        alone = _measure_alone(kernel, sizes, device)
    except Exception as problem:  # whatever it is, the other ranks must not wait for this one
        error = problem
    group.agree({"kernel": kernel.capabilities.name, "device": name}, error, device)
    reports = _gather(group, {**_report(device), "day": time.strftime("%Y-%m-%d")})
    per_host, peer_memory = ranks_per_host([report["host"] for report in reports]), all(r["reaches"] for r in reports)
    known = _known(name, kernel.capabilities.name, min(report["memory"] for report in reports), per_host, {})
    known = replace(known, host_memory=min(report["host_memory"] for report in reports) // per_host)
    links = _measure_links(group, device, kernel, sizes, per_host, peer_memory)
    source = f"measured on {reports[0]['day']}"
    machine = _slowest(_gather(group, replace(known, **alone, **links, source=source)))
    if group.rank == 0:
        path = profile_path(name, machine.kernel, group.size, machine.ranks_per_host)
        try:
            write_whole(path, machine.to_json())
        except OSError as problem:
            logger.warning("hf_burst cannot remember what it measured in %s: %s", path, problem)
    return machine


def default_kernel(device: torch.device) -> Kernel:
    """The kernel that is chosen by itself for heads of 128: in bf16 on GPUs, in fp32 elsewhere."""
    dtype = (_GPU if device.type == "cuda" else _CPU).dtype
    return select_kernel("auto", KernelRequest(device.type, dtype, 128, 128))


def device_name(device: torch.device) -> str:
    """The name under which a machine is remembered; everything that is no GPU is `"CPU"`."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"


def ranks_per_host(hosts: Sequence[str]) -> int:
    """The most neighbouring ranks that cut a group into blocks of one host each; `hosts` are those of the ranks."""
    return math.gcd(*(len(list(run)) for _, run in groupby(hosts)))


def reaches_peers(device: torch.device) -> bool:
    """Whether a GPU reads the memory of all others that this process sees, and sees any."""
    if device.type != "cuda":
        return False
    here = torch.cuda.current_device() if device.index is None else device.index
    others = [index for index in range(torch.cuda.device_count()) if index != here]
    return bool(others) and all(torch.cuda.can_device_access_peer(here, index) for index in others)


def profile_path(device: str, kernel: str, ranks: int, per_host: int) -> Path:
    """Where a machine is remembered: a [`cache_file`] named by its device, kernel and ranks (in all and on a host)."""
    versions = (f"torch{torch.__version__}", f"hf_burst{__version__}")
    return cache_file(device, kernel, f"{ranks}x{per_host}", *versions)


def fit_link(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency (seconds, at least 0) and bandwidth (bytes/s) of a link, from the bytes of two or more messages and the
    seconds that they took: least squares of the relative errors of `latency + bytes / bandwidth`."""
    sizes, seconds = torch.tensor(points, dtype=torch.float64, device="cpu").unbind(1)
    speeds, scale = sizes / seconds, float(sizes.max())  # scaled, so that both unknowns are of one order
    rows = torch.stack([1 / seconds, speeds / scale], 1)
    latency, largest = torch.linalg.lstsq(rows, torch.ones(len(rows), 1, dtype=rows.dtype)).solution.flatten().tolist()
    if largest > 0 and latency >= 0:
        return latency, scale / largest
    return 0.0, float((speeds**2).sum() / speeds.sum())


def _measure_alone(kernel: Kernel, sizes: _Sizes, device: torch.device) -> dict[str, Any]:
    """What a rank measures without the others, as fields of a [`Machine`]."""
    rates = []
    for rows in sizes.rows:
        forward, backward = (_seconds(call, device) for call in _kernel_calls(kernel, sizes, rows, device))
        scores = rows * (rows + 1) // 2 * sizes.q_heads
        flops = scores * sizes.head_dim
        rates.append(KernelRate(scores, 4 * flops / forward, 10 * flops / backward))
    source = torch.ones(sizes.copied, dtype=torch.uint8, device=device)
    target, number = torch.empty_like(source), torch.zeros(1, device=device)
    launch = _seconds(lambda: [number.add_(1) for _ in range(200)], device) / 200
    bandwidth = 2 * sizes.copied / _seconds(lambda: target.copy_(source), device)
    rows, width = sizes.rows[-1], sizes.q_heads * sizes.head_dim
    left, right = (torch.randn(size, width, dtype=sizes.dtype, device=device) for size in (rows, 4 * width))
    products = 8 * rows * width**2 / _seconds(lambda: left @ right.T, device)
    on_host = torch.empty(sizes.copied, dtype=torch.uint8, pin_memory=device.type == "cuda")
    to_host = sizes.copied / _seconds(lambda: on_host.copy_(source, non_blocking=True), device)
    measured = {"launch": launch, "memory_bandwidth": bandwidth, "products": products, "host_bandwidth": to_host}
    return {"rates": tuple(rates), **measured}


def _kernel_calls(
    kernel: Kernel, sizes: _Sizes, rows: int, device: torch.device
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The kernel on a causal square, forward and backward."""
    options: dict[str, Any] = {"dtype": sizes.dtype, "device": device}
    q, dout = (torch.randn(1, rows, sizes.q_heads, sizes.head_dim, **options) for _ in range(2))
    k, v = (torch.randn(1, rows, sizes.kv_heads, sizes.head_dim, **options) for _ in range(2))
    band, scores = Band(low=0), Scores(sizes.head_dim**-0.5)
    out, lse = kernel.forward(q, k, v, band, scores)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dout, own_out = project_out(dout, delta) if kernel.capabilities.wants_out else (dout, None)
    inputs = BackwardInputs(dout=dout, q=q, k=k, v=v, out=own_out, lse=lse, delta=delta)
    return (lambda: kernel.forward(q, k, v, band, scores), lambda: kernel.backward(inputs, band, scores))


def _measure_links(
    group: ContextGroup, device: torch.device, kernel: Kernel, sizes: _Sizes, per_host: int, peer_memory: bool
) -> dict[str, Any]:
    """The links that there are, as fields of a [`Machine`]: to the neighbour on the host, to the counterpart on the
    next host, and to the neighbour's memory if all reach it (`peer_memory`)."""
    rank = group.rank
    first = rank - rank % per_host
    work = _kernel_calls(kernel, sizes, sizes.rows[len(sizes.rows) // 2], device)[0]
    links: dict[str, Any] = {"symmetric": None}
    if per_host > 1:
        peers = (first + (rank + 1) % per_host, first + (rank - 1) % per_host)
        links["p2p"] = _measure_link(_messages(group, device, peers), sizes.messages, work, device)
    if group.size > per_host:
        peers = ((rank + per_host) % group.size, (rank - per_host) % group.size)
        links["between_hosts"] = _measure_link(_messages(group, device, peers), sizes.messages, work, device)
    if per_host > 1 and peer_memory:
        error = None
        near = group if group.size == per_host else group.part(range(first, first + per_host), device)
        try:
            copies = _copies(near, device, max(sizes.messages))
        except RuntimeError as problem:  # containers may forbid it
            error = problem
        try:
            group.agree({}, error, device)  # or those that can would wait in a barrier for those that cannot
        except (RuntimeError, RankMismatchError) as problem:
            logger.warning("hf_burst measures no symmetric memory: %s", problem)
        else:
            links["symmetric"] = _measure_link(copies, sizes.messages, work, device)
        if near is not group:
            dist.destroy_process_group(near.process_group)
    return links


def _measure_link(
    transport: Callable[[int], Start], sizes: Sequence[int], work: Callable[[], Any], device: torch.device
) -> Link:
    """A link, and by how much a kernel beside its messages takes longer."""

    def seconds(size: int, beside: Callable[[], Any]) -> float:
        start = transport(size)

        def both() -> None:
            wait = start()
            beside()
            wait()

        return _seconds(both, device)

    points = [(size, seconds(size, lambda: None)) for size in sizes]
    alone, message = _seconds(work, device), points[1][1]
    drag = (seconds(sizes[1], work) - max(alone, message)) / min(alone, message)
    return Link(*fit_link(points), min(1.0, max(0.0, drag)))


def _messages(group: ContextGroup, device: torch.device, peers: tuple[int, int]) -> Callable[[int], Start]:
    """Messages to the first of two peers and from the second, as the ring sends them."""

    def transport(size: int) -> Start:
        block = torch.zeros(1, size, dtype=torch.uint8, device=device)
        shapes = ((tuple(block.shape), block.dtype),)
        messages = Round(shapes, (Outgoing(peers[0], 0, 0, size),), (Incoming(peers[1], shapes, 0, 0, size),), 0)
        return lambda: PeerToPeer(group, device).fetch("blocks", messages, [block]).wait

    return transport


def _copies(group: ContextGroup, device: torch.device, largest: int) -> Callable[[int], Start]:
    """Copies from the next rank's memory on a stream of their own, behind a barrier as in a pass."""
    import torch.distributed._symmetric_memory as symmetric  # CUDA only, and private

    buffer = symmetric.empty(largest, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(buffer, group.process_group)
    peer = handle.get_buffer((group.rank + 1) % group.size, (largest,), torch.uint8)
    stream = torch.cuda.Stream(device)
    landing = torch.empty(largest, dtype=torch.uint8, device=device)

    def transport(size: int) -> Start:
        def start() -> Callable[[], Any]:
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                handle.barrier(channel=0, timeout_ms=_BARRIER_MS)
                landing[:size].copy_(peer[:size])
            return lambda: torch.cuda.current_stream(device).wait_stream(stream)

        return start

    return transport


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median time of a call: on the GPU by its own events, elsewhere by the clock."""
    times = []
    for _ in range(_REPEATS + 2):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return max(statistics.median(times[2:]), 1e-9)  # the first two open connections, compile and allocate


def _slowest(machines: Sequence[Machine]) -> Machine:
    """The worst of all ranks' numbers."""

    def slowest(name: str) -> Link | None:
        links = [getattr(machine, name) for machine in machines]
        if None in links:
            return None
        latency, drag = max(link.latency for link in links), max(link.drag for link in links)
        return Link(latency, min(link.bandwidth for link in links), drag)

    rates = tuple(
        KernelRate(rates[0].scores, min(rate.forward for rate in rates), min(rate.backward for rate in rates))
        for rates in zip(*(machine.rates for machine in machines), strict=True)
    )
    links: dict[str, Any] = {name: slowest(name) for name in ("p2p", "between_hosts", "symmetric")}
    launch = max(machine.launch for machine in machines)
    names = ("memory_bandwidth", "products", "host_bandwidth")
    speeds = {name: min(getattr(machine, name) for machine in machines) for name in names}
    return replace(machines[0], rates=rates, launch=launch, **speeds, **links)


def _report(device: torch.device) -> dict[str, Any]:
    """What the ranks tell each other of the place where they run."""
    own = {"memory": _memory(device), "host_memory": host_memory()[0], "reaches": reaches_peers(device)}
    return {"host": host_id(), **own}


def _memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may take, or of the host."""
    if device.type == "cuda":
        total, share = torch.cuda.mem_get_info(device)[1], torch.cuda.get_per_process_memory_fraction(device)
        return int(total * share)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gather(group: ContextGroup, mine: Any) -> list[Any]:
    """What every rank reports, in rank order."""
    reports = [mine] * group.size
    if group.size > 1:
        dist.all_gather_object(reports, mine, group=group.process_group)
    return reports


def _known(device: str, kernel: str, memory: int, per_host: int, profiles: dict[int, Machine]) -> Machine:
    """What was measured, or else what is built in; `memory` is that of a GPU or of a host, now."""
    memory = memory // per_host if device == "CPU" else memory
    return replace(profiles.get(per_host) or built_in(device, kernel, memory, per_host), memory=memory)


def _profiles(device: str, kernel: str, ranks: int) -> dict[int, Machine]:
    """The machines that were measured, by their ranks on a host. Files that cannot be read are named in a warning."""
    profiles = {}
    for per_host in range(1, ranks + 1):
        path = profile_path(device, kernel, ranks, per_host)
        try:
            if ranks % per_host == 0 and path.exists():
                profiles[per_host] = Machine.from_json(path.read_text())
        except (OSError, ValueError) as problem:
            logger.warning("hf_burst ignores what it had measured, %s: %s", path, problem)
    return profiles
