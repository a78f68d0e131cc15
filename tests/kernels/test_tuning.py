"""How Triton tunes kernels: all candidates are compiled together before one is timed, and the times are kept."""

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hf_burst.kernels import tuning


class Kernel:
    """A kernel that notes what is compiled and what runs. Compiling the wrong candidate raises."""

    def __init__(self) -> None:
        self.did = list[tuple[str, int]]()

    def run(self, *args: Any, size: int, warmup: bool = False) -> None:
        if warmup:
            assert active, "compiled alone"
            active[0](self.did.append, ("compiled", size))
            if size == 3:
                raise RuntimeError("no such size")
        else:
            self.did.append(("run", size))


class Candidate:
    def __init__(self, size: int) -> None:
        self.size = size

    def all_kwargs(self) -> dict[str, int]:
        return {"size": self.size}

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"size": self.size, "dtype": torch.float32} if self.size > 50 else {"size": self.size}


active = list[Any]()
timings = list[tuple[int, int]]()


def timed_for(call: Any, quantiles: Any, warmup: int = 25, rep: int = 100) -> None:
    """Stands in for Triton's `do_bench`."""
    timings.append((warmup, rep))
    call()


@contextmanager
def compile_together(executor: ThreadPoolExecutor, *, ignore_errors: bool) -> Iterator[None]:
    """Stands in for Triton's mode, which waits for its threads at the end."""
    assert ignore_errors
    assert threading.current_thread() is threading.main_thread()
    futures = list[Future[None]]()
    active.append(lambda *call: futures.append(executor.submit(*call)))
    yield
    active.pop()
    wait(futures)


@pytest.fixture
def interpreted() -> bool:
    return False


@pytest.fixture
def autotuner(monkeypatch: pytest.MonkeyPatch, interpreted: bool) -> Any:
    """Triton's class as far as it is used, changed by hf_burst."""

    class Autotuner:
        def __init__(self, sizes: list[int], cache_results: bool = False) -> None:
            self.fn, self.base_fn, self.cache_results = Kernel(), Kernel.run, cache_results
            self.keys, self.nargs = ["tokens", "absent"], dict[str, Any]()
            self.configs, self.best = [Candidate(size) for size in sizes], dict[Any, Any]()
            self._do_bench: Any = None

        def prune_configs(self, settings: dict[str, Any]) -> list[Candidate]:
            return [candidate for candidate in self.configs if candidate.size != 9]

        def _bench(self, *args: Any, config: Candidate, **settings: Any) -> int:
            timed = self._do_bench or timed_for
            timed(lambda: self.fn.run(*args, **settings, **config.all_kwargs()), quantiles=(0.5,))
            return config.size

        def run(self, *args: Any, **settings: Any) -> None:
            self.nargs = {"tokens": args[0]}
            if args not in self.best:
                chosen = self.prune_configs(settings)
                self.best[args] = min(self._bench(*args, config=one, **settings) for one in chosen)

    told = os.environ.get("TRITON_CACHE_AUTOTUNING")
    knobs = SimpleNamespace(
        runtime=SimpleNamespace(interpret=interpreted), autotuning=SimpleNamespace(cache=told in ("1", "on"))
    )
    timings.clear()
    driver = SimpleNamespace(active=SimpleNamespace(get_benchmarker=lambda: timed_for))
    modules: dict[str, Any] = {"triton": {"knobs": knobs}, "triton.runtime": {"driver": driver}}
    modules["triton.runtime.autotuner"] = {"Autotuner": Autotuner}
    modules["triton.runtime._async_compile"] = {"AsyncCompileMode": compile_together, "FutureKernel": object}
    modules["triton.runtime.jit"] = {"JITFunction": SimpleNamespace(run=None)}
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    assert not tuning.tune_in_parallel.__wrapped__(), "a launch does not wait for its kernel, as before Triton 3.7"
    return Autotuner


def test_candidates_are_compiled_before_one_is_timed(autotuner: Any) -> None:
    tuner = autotuner([5, 3, 7, 9])
    for _ in range(2):
        tuner.run("small")
    assert sorted(tuner.fn.did[:3]) == [("compiled", 3), ("compiled", 5), ("compiled", 7)]
    assert tuner.fn.did[3:] == [("run", 5), ("run", 3), ("run", 7)]
    tuner.run("large")
    assert len(tuner.fn.did) == 12
    assert not active


def test_candidates_are_timed_shortly_unless_the_kernel_says_how(autotuner: Any) -> None:
    plain, own = autotuner([5, 7]), autotuner([5, 7])
    own._do_bench = lambda call, quantiles: timed_for(call, quantiles, 1, 1)
    plain.run("small")
    own.run("small")
    assert timings == [(5, 20)] * 2 + [(1, 1)] * 2


def test_a_single_candidate_is_left_alone(autotuner: Any) -> None:
    tuner = autotuner([5])
    tuner.run("small")
    assert tuner.fn.did == [("run", 5)]


@pytest.mark.parametrize(("told", "kept"), [(None, True), ("1", True), ("on", True), ("0", False), ("false", False)])
def test_times_are_kept_unless_the_user_says_no(
    told: str | None, kept: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)
    if told is not None:
        monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", told)
    kind = request.getfixturevalue("autotuner")
    tuners = [kind([5, 7]), kind([5, 7], cache_results=True)]
    for tuner in tuners:
        tuner.run("small")
    assert [tuner.cache_results for tuner in tuners] == [kept, True]


def test_times_that_no_file_can_hold_are_not_kept(autotuner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)
    tuner, odd = autotuner([5, 7]), autotuner([5, 70])
    odd.run(None)
    assert not odd.cache_results, "a candidate has a dtype"
    for size, kept in ((None, True), (torch.bfloat16, False), (4, True)):
        tuner.run(size)
        assert tuner.cache_results == kept
    assert tuner.fn.did[-1] == ("run", 7)


@pytest.mark.parametrize("interpreted", [True])
def test_interpreted_kernels_are_left_alone(autotuner: Any) -> None:
    tuner = autotuner([5, 7])
    tuner.run("small")
    assert tuner.fn.did == [("run", 5), ("run", 7)]
    assert not tuner.cache_results


def test_a_candidate_that_is_timed_alone(autotuner: Any) -> None:
    tuner = autotuner([5, 7])
    assert tuner._bench(config=tuner.configs[1]) == 7


@pytest.mark.parametrize("absent", ["triton", "triton.runtime._async_compile"])
def test_without_triton_or_its_threads_nothing_changes(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    assert not tuning.tune_in_parallel.__wrapped__()
