"""How much of a host's memory a process plans with: control groups, other GPUs, optimizers that are there already."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch

from hf_burst.hf.parts.checkpointing import Checkpointing
from hf_burst.layers import host_limits
from hf_burst.layers.host_memory import HostMemory
from tests.hf.test_patch import group_mean, part_of
from tests.support import models
from tests.support.ranks import RankPool
from tests.support.small_gpu import small_gpu

Ranks = Callable[[int], RankPool]
GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A host of 512 GiB, 400 of them available, whose control groups are files of a folder."""
    monkeypatch.setattr(host_limits, "_PROCESS", tmp_path / "cgroup")
    monkeypatch.setattr(host_limits, "_MOUNT", tmp_path / "mount")
    memory = SimpleNamespace(total=512 * GIB, available=400 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def write(path: str, **files: str) -> None:
        folder = tmp_path / "mount" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    return write


def test_a_host_without_control_groups(groups: Callable[..., None]) -> None:
    assert host_limits.host_memory() == (512 * GIB, 400 * GIB)


def test_the_innermost_control_group_counts(groups: Callable[..., None], tmp_path: Path) -> None:
    """As of a SLURM job, whose limit is not that of the root."""
    (tmp_path / "cgroup").write_text("0::/slurm/job_7/step_0\n")
    groups("", memory__max="max", memory__current=str(100 * GIB))
    groups("slurm/job_7", memory__max=str(64 * GIB), memory__current=str(40 * GIB))
    groups("slurm/job_7", memory__stat=f"anon 7\ninactive_file {10 * GIB}\n")
    groups("slurm/job_7/step_0", memory__max="max", memory__current=str(40 * GIB))
    assert host_limits.host_memory() == (64 * GIB, 34 * GIB)


def test_control_groups_of_version_1(groups: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/b/c\n0::/\n")
    limit, usage = "memory__limit_in_bytes", "memory__usage_in_bytes"
    groups("memory/b", **{limit: str(32 * GIB), usage: str(8 * GIB), "memory__stat": f"total_inactive_file {GIB}\n"})
    assert host_limits.host_memory() == (32 * GIB, 25 * GIB)
    (tmp_path / "cgroup").write_text("4:memory:/outside/of/the/container\n")
    groups("memory", **{limit: str(16 * GIB), usage: str(4 * GIB)})
    assert host_limits.host_memory() == (16 * GIB, 12 * GIB), "in a container the root is the innermost one"


def test_gpus_of_a_host_share_its_memory(groups: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 4)
    assert host_limits.share_of_host(gpu) == 128 * GIB, "three other jobs may have a GPU each"
    assert host_limits.share_of_host(cpu) == 400 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_limits.share_of_host(gpu) == 100 * GIB, "of what is available"
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: -1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_limits.share_of_host(gpu) == 50 * GIB


def others_take_memory(rank: int, size: int) -> tuple[int, float]:
    """How many layers leave for a host that has less than was promised, and the largest error of a gradient."""
    model, batch = models.make_model("llama", layers=4).train(), models.make_batch("plain", 80)
    models.plain_loss(model, batch).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    models.patch(model)
    model.gradient_checkpointing_enable()
    error = 0.0
    most = property(lambda home: 2**30 if rank else 14000)
    with small_gpu(2000.0), mock.patch.object(HostMemory, "most", most):
        for _ in range(2):
            model(**batch).loss.backward()
            for found, gradient in zip(group_mean(model), expected, strict=True):
                error = max(error, float((found - gradient).abs().max()))
            model.zero_grad()
    return part_of(model, Checkpointing).host.size, error


@pytest.mark.slow
def test_a_promise_that_the_host_cannot_keep(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    """Settings that were chosen are taken back; those that were named raise, see tests/layers/test_offload.py."""
    results = ranks(2).run(others_take_memory)
    assert results[0][0] == results[1][0] <= 14000 + 4096
    assert all(error < 1e-5 for _, error in results)
    others_take_memory(0, 1)
    told = [record.getMessage() for record in caplog.records if "instead of" in record.getMessage()]
    assert len(told) == 1, "once"
    assert "layers are offloaded" in told[0]
