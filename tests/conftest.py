"""Fixtures: pools of ranks, shared by all tests of a session."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.hosts import HostPool, refusal
from tests.ranks import RankPool

settings.register_profile(
    "hf_burst", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("hf_burst")
torch.set_num_threads(1)
# flash-attn 4 compiles each kind of call for a second or two: once for all ranks, not once for each
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton


@pytest.fixture(scope="session", autouse=True)
def mypy(request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str] | None"]:
    """The check of types, which takes most of a minute: on the core that other tests leave idle, if it is to run."""
    if not any(item.name == "test_types" for item in request.session.items):
        yield None
        return
    command = ["nice", "-n", "5", sys.executable, "-m", "mypy"]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        yield process
        process.kill()


@pytest.fixture(scope="session", autouse=True)
def notebooks_in_background(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path | None]:
    """The folder in which notebooks are executed, one after another, beside other tests, if theirs are to run."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == "test_runs_from_its_folder"]
    if not items:
        yield None
        return
    folder, root = tmp_path_factory.mktemp("notebooks"), Path(__file__).parents[1]
    command = ["nice", "-n", "5", sys.executable, "-m", "tests.notebooks", str(folder)]
    command += [item.callspec.params["notebook"].stem for item in items]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    with subprocess.Popen(command, cwd=root, env=environment, start_new_session=True) as process:
        yield folder
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # kernels too


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(size)` is the pool of that many processes."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size in pools and not pools[size].alive:
            pools.pop(size).close()  # ranks that are left would keep pytest from ending
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield pool
    for opened in pools.values():
        opened.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Callable[..., HostPool]]:
    """`hosts(hosts, per_host)` is the pool of ranks on so many hosts, which are network namespaces of this machine."""
    problem = refusal()
    if problem:
        pytest.skip(problem)
    pools: dict[tuple[int, int], HostPool] = {}

    def pool(hosts: int, per_host: int) -> HostPool:
        key = (hosts, per_host)
        if key in pools and not pools[key].alive:
            pools.pop(key).close()
        if key not in pools:
            pools[key] = HostPool(hosts, per_host)
        return pools[key]

    yield pool
    for opened in pools.values():
        opened.close()
