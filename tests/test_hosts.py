"""The hosts of `tests/hosts.py`: what crosses between them is counted and takes the time that the link allows."""

import logging
import os
import subprocess
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

import hf_burst
from hf_burst import calibrate as calibration
from hf_burst.calibrate import calibrate, default_kernel
from hf_burst.mesh import ContextGroup
from tests.hosts import INTERFACE, HostPool

SENT = 10_000_000  # bytes


@pytest.fixture(scope="module")
def pool(hosts) -> HostPool:
    return hosts(2, 2)


def test_ranks_sum_over_hosts(pool):
    answers = pool.run(_sum)
    assert answers == [(6.0, f"host{rank // 2}", rank % 2) for rank in range(4)]


@pytest.mark.parametrize(("source", "target"), [(0, 2), (3, 1), (0, 1), (3, 2)])
def test_bytes_that_leave_a_host_are_counted(pool, source, target):
    pool.run(_message, source, target, 1)  # opens the connection
    before = pool.network.sent()
    pool.run(_message, source, target, SENT)
    left = [after - earlier for after, earlier in zip(pool.network.sent(), before, strict=True)]
    if source // 2 == target // 2:
        assert max(left) < 0.01 * SENT
    else:
        assert SENT < left[source // 2] < 1.05 * SENT
        assert left[target // 2] < 0.05 * SENT


def test_a_shaped_link_takes_its_time(pool):
    """Two pairs at once share the link of their hosts; each way has its own. Inside a host nothing is slower. The best
    of a few tries counts: a busy machine, and acknowledgements behind the data of the other way, only take longer."""

    def seconds(function, *arguments, tries=4):
        return min(max(pool.run(function, *arguments)) for _ in range(tries))

    length = SENT // 4
    least = length * 8 / 100e6
    pool.network.shape(100)
    try:
        assert 0.95 * least < seconds(_message, 0, 2, length) < 1.3 * least
        assert 0.95 * least < seconds(_exchange, 2, length // 2) < 1.5 * least
        assert seconds(_message, 0, 1, length) < least / 3
    finally:
        pool.network.shape(None)
    assert seconds(_message, 0, 2, length) < least / 3


def test_a_host_sees_its_own_interfaces_only(pool):
    seen = subprocess.run(pool.network.command(1, ["ip", "-o", "addr"]), capture_output=True, text=True, check=True)
    assert {line.split()[1] for line in seen.stdout.splitlines()} == {"lo", INTERFACE}
    assert pool.network.addresses[1] in seen.stdout
    assert pool.network.addresses[0] not in seen.stdout


def test_a_closed_pool_leaves_nothing(pool):
    other = HostPool(2, 1)  # beside the first, with the same addresses
    assert other.run(_sum)[0][0] == 1.0
    names = [other.network.switch, *other.network.namespaces]
    assert set(names) <= set(os.listdir("/run/netns"))
    other.close()
    assert not set(names) & set(os.listdir("/run/netns"))


@pytest.mark.parametrize(("order", "said"), [([0, 0, 1, 1], 0), ([0, 1, 0, 1], 1)], ids=["block", "cyclic"])
def test_groups_across_hosts_are_warned_of(pool, order, said):
    """As SLURM numbers the ranks with `--distribution=cyclic`."""
    answers = pool.run(_warnings, order)
    assert [len(warnings) for warnings in answers] == [said, 0, 0, 0]
    assert all("not neighbours" in warning for warning in answers[0])


def _warnings(rank, size, order):
    heard = []
    with (
        mock.patch.dict(os.environ, NCCL_HOSTID=f"host{order[rank]}"),
        mock.patch.object(
            logging.getLogger("hf_burst.hf.accelerate"), "warning", lambda text, *values: heard.append(text % values)
        ),
    ):
        Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig(burst_size=2))
    return heard


def test_calibrate_measures_the_share_of_a_rank(pool, tmp_path):
    """All ranks of a host send through its one link at once; the ranks of a host meet no limit."""
    pool.network.shape(800)
    try:
        machines = pool.run(_calibrate, str(tmp_path))
    finally:
        pool.network.shape(None)
    assert all(machine == machines[0] for machine in machines)
    machine = machines[0]
    assert machine.ranks_per_host == 2
    assert 0.5 < machine.between_hosts.bandwidth / 50e6 < 1.05
    assert machine.p2p.bandwidth > 4 * machine.between_hosts.bandwidth


def _calibrate(rank, size, home):
    os.environ["HF_HOME"] = f"{home}/{rank}"
    sizes = calibration._CPU._replace(rows=(16, 32, 64), copied=1 << 20)
    with mock.patch.object(calibration, "_CPU", sizes):
        device = torch.device("cpu")
        return calibrate(ContextGroup.from_mesh(None), device, default_kernel(device))


def _sum(rank, size):
    number = torch.tensor(float(rank))
    dist.all_reduce(number)
    return float(number), os.environ["NCCL_HOSTID"], int(os.environ["LOCAL_RANK"])


def _message(rank, size, source, target, length):
    """Seconds in which a message arrived, 0 elsewhere."""
    block = torch.zeros(length, dtype=torch.uint8)
    dist.barrier()
    started = time.perf_counter()
    if rank == source:
        dist.send(block, target)
    if rank == target:
        dist.recv(block, source)
        return time.perf_counter() - started
    return 0.0


def _exchange(rank, size, distance, length):
    """Seconds in which every rank has sent to one and received from one `distance` ranks away."""
    mine, theirs = torch.zeros(length, dtype=torch.uint8), torch.empty(length, dtype=torch.uint8)
    dist.barrier()
    started = time.perf_counter()
    calls = [dist.P2POp(dist.isend, mine, (rank + distance) % size)]
    calls.append(dist.P2POp(dist.irecv, theirs, (rank - distance) % size))
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return time.perf_counter() - started
