"""Fixtures: pools of ranks, shared by all tests of a file."""

import gc
import os
from collections.abc import Callable, Generator, Iterator
from functools import partial

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings

from tests.support.hosts import HostPool, refusal
from tests.support.ranks import RankPool, forked

settings.register_profile(
    "hf_burst", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("hf_burst")
torch.set_num_threads(1)
# torch makes the pool of threads of a fork anew when it is first asked for; two threads at once find none and raise
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes run tests, each some files of them: few, since most tests start ranks; on GPUs one alone."""
    return 0 if torch.cuda.is_available() else min(os.cpu_count() or 1, 4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Llama 4 with a tower raises by itself in some versions of Transformers, on any number of processes."""
    files = ("test_images.py", "test_shared_images.py")
    for item in (item for item in items if item.path.name in files and "[Llama4" in item.name):
        from tests.support.coverage import KEPT  # which takes a second to import

        version, why = KEPT["Llama4ForConditionalGeneration"]
        if transformers.__version__.startswith(f"{version}."):
            item.add_marker(pytest.mark.skip(f"in Transformers {version} {why}"))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest adds its handlers of logs
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """What was imported is never garbage: collections, of which trainers make many, need not look through it. Ranks are
    forks of this process as it is now."""
    gc.freeze()
    if session.testscollected:  # not in the process that only tells others what to run
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # what ranks write is shown with the test that fails
        forked()
        capture.suspend_global_capture()
    return (yield)


@pytest.fixture(scope="module")  # ranks grow with what they compute
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


@pytest.fixture
def in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of `hf-burst check` run in forks, for whose imports nobody waits."""
    from torch.multiprocessing.spawn import start_processes

    from hf_burst.check import ranks

    forked()
    monkeypatch.setattr(ranks, "spawn", partial(start_processes, start_method="forkserver"))


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
