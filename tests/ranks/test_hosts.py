"""The hosts of `support/hosts.py`: what crosses between them is counted and takes the time that the link allows."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

import hf_burst
from tests.hf import test_wrappers
from tests.support import trainers
from tests.support.hosts import INTERFACE, HostPool, Network, refusal

ROOT = Path(__file__).parents[2]
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
    """Two pairs at once share the link of their hosts; each way has its own: a link that both ways share would take
    twice as long. Inside a host nothing is slower. A busy machine only takes longer, so the best of many tries counts,
    up to the first that is fast enough."""

    def seconds(function, *arguments, within):
        best = float("inf")
        for _ in range(20):
            best = min(best, *[max(pool.run(function, *arguments)) for _ in range(2)])
            if best < within:
                break
        return best

    length = SENT // 4
    least = length * 8 / 100e6
    pool.network.shape(100)
    try:
        assert 0.95 * least < seconds(_message, 0, 2, length, within=1.6 * least) < 1.6 * least
        assert 0.95 * least < seconds(_exchange, 2, length // 2, within=1.6 * least) < 1.6 * least
        assert seconds(_message, 0, 1, length, within=least / 3) < least / 3
    finally:
        pool.network.shape(None)
    assert seconds(_message, 0, 2, length, within=least / 3) < least / 3


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
            logging.getLogger("hf_burst.hf.trainers.accelerate"),
            "warning",
            lambda text, *values: heard.append(text % values),
        ),
    ):
        Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig(burst_size=2))
    return heard


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


@pytest.mark.parametrize(("data", "burst"), [(2, 2), (1, 4)], ids=["inside hosts", "across hosts"])
def test_groups_inside_and_across_hosts_train_as_one_process(pool, tmp_path, data, burst):
    case = trainers.Case(data=data, burst=burst)
    wanted = trainers.train(0, 1, str(tmp_path), case.alone)
    for found in pool.run(trainers.train, str(tmp_path), case):
        test_wrappers.compare(found, wanted)


def test_copies_of_sharded_weights_send_gradients_alone(pool, tmp_path):
    """HSDP: a copy lies inside each host, and its layers are gathered there."""
    case = test_wrappers.Case(data=2, burst=2, replicas=2)
    wanted = test_wrappers.train_by_accelerate(0, 1, str(tmp_path), case.alone, "cpu")
    sent = []
    for replicas in (1, 2):
        before = pool.network.sent()
        one = replace(case, replicas=replicas)
        for found in pool.run(test_wrappers.train_by_accelerate, str(tmp_path), one, "cpu"):
            test_wrappers.compare(found, wanted)
        sent.append(max(after - earlier for after, earlier in zip(pool.network.sent(), before, strict=True)))
    assert sent[1] < sent[0] / 2


RECIPE = ["recipes/finetune_long_document.py", "--config", "recipes/configs/text_cpu.yaml"]
SHORT = ["--warmup_steps", "1", "--max_steps", "3", "--max_length", "512", "--output_dir"]
SCONTROL = """#!/bin/sh
printf '%s\\n' {addresses}
"""
SRUN = """#!{python}
# As SLURM: the command once on each node, with the number of the node.
import os, subprocess, sys

command = [word for word in sys.argv[1:] if not word.startswith("--kill")]
assert os.environ["SRUN_CPUS_PER_TASK"] == os.environ["SLURM_CPUS_PER_TASK"]
nodes = []
for node, inside in enumerate({inside}):
    own = {{"SLURM_NODEID": str(node), "NCCL_HOSTID": str(node), "SLURMD_NODENAME": {addresses}[node]}}
    nodes.append(subprocess.Popen([*inside, *command], env={{**os.environ, **own}}))
sys.exit(max(abs(node.wait()) for node in nodes))
"""


KILL = """
import os, pathlib, signal, threading, time
folder = pathlib.Path({folder!r})

def kill():
    while not (folder / "out/checkpoint-1").exists():
        time.sleep(0.001)
    (folder / "once").unlink()
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == "1" and (folder / "once").exists():
    threading.Thread(target=kill, daemon=True).start()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[float]:
    """The losses of the recipe in one process."""
    folder = tmp_path_factory.mktemp("alone")
    done = _start([sys.executable, *RECIPE, *SHORT, str(folder)])
    assert _ends([done]) == [0]
    return _losses(folder)


@pytest.mark.full
@pytest.mark.parametrize("per_host", [1, 2])
def test_accelerate_launch_on_two_hosts(network, alone, tmp_path, per_host):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += ["recipes/configs/accelerate_2_hosts.yaml", "--num_processes", str(2 * per_host)]
    launch += ["--mixed_precision", "no", "--main_process_ip", network.addresses[0], "--machine_rank"]
    words = [*RECIPE, *SHORT, str(tmp_path)]
    hosts = [_start(network.command(host, [*launch, str(host), *words]), network, host) for host in range(2)]
    assert _ends(hosts) == [0, 0]
    assert _losses(tmp_path) == pytest.approx(alone, rel=1e-5)
    assert min(network.sent()) > 1e6  # both take part


@pytest.mark.full
def test_the_script_for_slurm_on_two_hosts(network, alone, tmp_path):
    """`torchrun --nnodes 2` by the very script, with stand-ins for `srun` and `scontrol`. A rank is killed in the first
    save: all start again, and losses are the same."""
    inside = [network.command(host, []) for host in range(2)]
    programs = {
        "scontrol": SCONTROL.format(addresses=" ".join(network.addresses)),
        "srun": SRUN.format(python=sys.executable, inside=inside, addresses=network.addresses),
        "sitecustomize.py": KILL.format(folder=str(tmp_path)),
    }
    (tmp_path / "once").touch()
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    given = {"PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])}
    given |= {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NNODES": "2", "GPUS": "1", "HF_BURST_SIZE": "2"}
    given |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "1"}
    given |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    out, saving = tmp_path / "out", ["--save_strategy", "steps", "--save_steps", "1"]
    words = [*RECIPE[1:], *saving, *SHORT, str(out)]
    assert _ends([_start(["bash", "recipes/configs/slurm_2_nodes.sbatch", *words], network, 0, given)]) == [0]
    assert not (tmp_path / "once").exists(), "it was killed"
    assert _losses(out) == pytest.approx(alone, rel=1e-5)


@pytest.fixture
def network() -> Iterator[Network]:
    problem = refusal()
    if problem:
        pytest.skip(problem)
    with Network(2) as made:
        yield made


def _start(command, network=None, host=0, more=None):
    """Starts a command as a user does."""
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **(more or {}),
    }
    environment |= network.environment(host) if network else {}
    environment.pop("MASTER_ADDR", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def _ends(processes):
    """The exit statuses; what they said if one is not 0."""
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    codes = [process.returncode for process in processes]
    if any(codes):
        print("\n".join(text[-4000:] for text in said))
    return codes


def _losses(folder):
    return [step["loss"] for step in json.loads((Path(folder) / "training_log.json").read_text())["steps"]]
