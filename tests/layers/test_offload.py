"""Activation offloading: what comes back is what left, and training is as without, bit by bit."""

import contextlib
import copy
import errno
import gc
import mmap
import pickle
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef

import hf_burst
from hf_burst.config import Memory
from hf_burst.errors import ConfigError, KernelError, RankMismatchError
from hf_burst.hf.parts.checkpointing import Checkpointing
from hf_burst.layers import host_memory
from hf_burst.layers.host_memory import HostMemory
from hf_burst.layers.offload import OffloadedTensor, SavedByLayer
from tests.hf.parts.test_checkpointing import SWITCHES
from tests.hf.test_patch import part_of
from tests.support import models
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_pictures import seeing_batch
from tests.support.tiny_seeing import seeing_model
from tests.support.trainers import small_pages

Ranks = Callable[[int], RankPool]
CPU, LENGTH = torch.device("cpu"), 43


@pytest.fixture
def tiny_pages() -> Iterator[None]:
    with small_pages(64, 256):
        yield


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.permutations(range(4)), st.data())
def test_tensors_come_back_as_they_left(sizes: list[int], order: list[int], data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    with small_pages(64, 256):
        home = HostMemory(CPU)
        tensor = torch.randn(sizes).to(dtype)
        tensor = tensor.permute([axis for axis in order if axis < tensor.ndim])
        if data.draw(st.booleans()):
            tensor = tensor.repeat_interleave(2, 0)[::2]  # with gaps
        left = OffloadedTensor(tensor, home)
        for _ in range(2):
            back = left.fetch()
            assert torch.equal(back, tensor)
            assert back.data_ptr() != tensor.data_ptr()
        taken = home.size // 64 - len(home.free)
        assert taken == -(-tensor.nbytes // 64)
        del left
        assert len(home.free) == home.size // 64


class Driver:
    """CUDA's, as far as memory is page-locked: it knows what is, and has room for some pieces."""

    def __init__(self, room: int) -> None:
        self.room, self.locked = room, list[int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if len(self.locked) == self.room:
            return 2
        assert (size, flags) == (256, 0)
        self.locked.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.locked.remove(address)

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return "out of memory"


@contextlib.contextmanager
def locking(room: int = 100) -> Iterator[Driver]:
    """As if a GPU read the host's memory: threads make it, and a driver page-locks tiny blocks."""
    driver = Driver(room)
    with contextlib.ExitStack() as stack:
        for patch in (
            small_pages(64, 256),
            mock.patch.object(host_memory, "_locks", return_value=True),
            mock.patch.object(torch.cuda, "cudart", return_value=driver),
            mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
            mock.patch.object(torch.cuda, "synchronize"),
        ):
            stack.enter_context(patch)
        yield driver
        gc.collect()  # what is left is given back to this driver


def taken(home: HostMemory, blocks: int) -> list[torch.Tensor]:
    """Pages of so many blocks, which are not given back."""
    return [page.memory for page in home.take(blocks * 256)]


@locking(3)
def test_memory_is_locked_until_nothing_needs_it() -> None:
    driver = torch.cuda.cudart()
    home = HostMemory(CPU)
    home.reserve(700)
    assert home.size == 256, "where the driver refuses, all ranks are told before"
    made(home)
    assert len(driver.locked) == 3, "threads page-lock what they make"
    assert home.free[0].memory.data_ptr() in driver.locked
    home.reserve(700)
    home.free.extend(home.take(700))
    assert len(driver.locked) == 3
    left = OffloadedTensor(torch.arange(64.0), home)
    for _ in range(2):
        with pytest.raises(KernelError, match=r"could not page-lock .*: out of memory\. Lower .*activation_offloading"):
            home.reserve(1024)
    waited = home.seconds
    assert 0 < waited < 5
    del home
    gc.collect()
    assert len(driver.locked) == 3
    assert torch.equal(left.fetch(), torch.arange(64.0))
    del left
    gc.collect()
    assert driver.locked == []
    home = HostMemory(CPU)
    home.reserve(700)
    made(home)
    assert len(driver.locked) == 3
    del home
    gc.collect()
    assert driver.locked == [], "also what nobody took"


def test_pages_are_used_again(tiny_pages: None) -> None:
    home = HostMemory(CPU)
    home.reserve(700)
    assert home.size == 256
    home.reserve(700)
    home.free.extend(home.take(700))
    assert home.size == 768
    for size in (80, 8, 40, 80):
        left = [OffloadedTensor(torch.arange(size) + start, home) for start in range(1)]
        assert torch.equal(left[0].fetch(), torch.arange(size))
        del left
    assert home.size == 768
    assert copy.deepcopy(home).size == pickle.loads(pickle.dumps(home)).size == 0


class Slow:
    """Makes blocks when it is allowed to, and counts them."""

    def __init__(self) -> None:
        self.allowed, self.make = threading.Semaphore(0), host_memory._new_block
        self.begun, self.at_once, self.most = 0, 0, 0
        self.lock = threading.Lock()

    def __call__(self, size: int, device: torch.device) -> torch.Tensor:
        with self.lock:
            self.begun, self.at_once = self.begun + 1, self.at_once + 1
            self.most = max(self.most, self.at_once)
        assert self.allowed.acquire(timeout=60)
        with self.lock:
            self.at_once -= 1
        return self.make(size, device)

    def until(self, begun: int) -> None:
        """Waits until so many blocks were begun."""
        stop = time.monotonic() + 20
        while self.begun < begun:
            assert time.monotonic() < stop, f"{self.begun} blocks were begun, not {begun}"
            time.sleep(0.01)


def made(home: HostMemory) -> None:
    """Waits for all blocks that were requested."""
    assert not wait(home._ahead, 60).not_done


@locking()
@mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="4")
def test_blocks_are_made_while_others_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(host_memory, "_new_block", slow)
    monkeypatch.setattr(host_memory, "_cores", lambda: 13)
    home = HostMemory(CPU)
    slow.allowed.release(3)
    home.reserve(8 * 256)
    slow.until(6)
    assert (home.size, slow.begun, slow.most) == (256, 6, 3), "a fourth of 13 cores makes blocks"
    left = OffloadedTensor(torch.arange(64.0), home)
    taker = threading.Thread(target=partial(taken, home, 7))
    taker.start()
    waited = home.seconds
    assert taker.is_alive(), "it waits for blocks that are made"
    slow.allowed.release(5)
    taker.join(60)
    assert not taker.is_alive()
    assert home.seconds > waited
    assert torch.equal(left.fetch(), torch.arange(64.0))
    home.reserve(8 * 256)
    assert (home.size, slow.begun, slow.most) == (8 * 256, 8, 3), "all of it is there"
    slow.allowed.release(3)
    home.reserve(40 * 256)
    slow.until(8 + 6)
    threads = home._makers._threads
    del home, left, taker
    gc.collect()
    slow.allowed.release(40)
    for thread in threads:
        thread.join(60)
    assert slow.begun == 8 + 6, "nobody takes what would be made"


@locking()
def test_memory_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    home = HostMemory(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "_LockedMemory", refuse)
        with pytest.raises(KernelError, match=r"no 0 MiB more .*: .*Cannot allocate memory\. Lower"):
            home.reserve(10 * 256)
        with pytest.raises(KernelError, match="Cannot allocate memory"):
            home.reserve(256)
        layer = SavedByLayer(home, True)
        kept = layer.save(torch.arange(64.0))
        assert torch.equal(kept(), torch.arange(64.0)), "it stays where it is"
        assert "Cannot allocate memory" in str(home.refused)
    assert len(taken(home, 1)) == 4


def test_memory_that_is_refused_holds_no_tensors(tiny_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_new_block", mock.Mock(side_effect=MemoryError("no more")))
    layer = SavedByLayer(HostMemory(CPU), True)

    def compute() -> weakref.ref[torch.Tensor]:
        activation = torch.ones(8)
        layer.save(torch.ones(8))
        return weakref.ref(activation)

    gc.disable()
    try:
        assert compute()() is None
    finally:
        gc.enable()
    assert "no more" in str(layer.host.refused)


def test_without_threads_whoever_asks_makes_the_memory(tiny_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    home = HostMemory(CPU)
    home.reserve(700)
    home.free.extend(home.take(700))
    assert home.size == 768
    monkeypatch.setattr(host_memory, "_new_block", mock.Mock(side_effect=MemoryError("no more")))
    with pytest.raises(KernelError, match="no more"):
        home.take(1024)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_forked_process_makes_its_own_memory() -> None:
    assert subprocess.run([sys.executable, "-c", FORKS], timeout=60).returncode == 7


FORKS = """
import os, signal, torch
from hf_burst.layers import host_memory
host_memory.HostMemory.page_bytes, host_memory.HostMemory.block_bytes = 64, 256
home = host_memory.HostMemory(torch.device("cpu"))
home.reserve(1024)
child = os.fork()
if not child:
    signal.alarm(20)
    home.take(2048)
    os._exit(7)
os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


def test_room_is_that_of_all_processes(tiny_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(host_memory, "host_memory", lambda: (2**20, 2 * 1024))
    slow = Slow()
    monkeypatch.setattr(host_memory, "_new_block", slow)
    monkeypatch.setattr(host_memory, "_cores", lambda: 2)
    home = HostMemory(CPU)
    with pytest.raises(ConfigError, match=r"each of 2 processes, of which 0\.0 are taken"):
        home.reserve(1025)
    slow.allowed.release(1)
    home.reserve(1024)  # of which 768 are not made
    slow.allowed.release(1)
    home.reserve(1024)
    slow.allowed.release(1)
    home.reserve(1024 + 512)
    with pytest.raises(ConfigError):
        home.reserve(1024 + 512 + 257)
    slow.allowed.release(9)
    taken(home, 6)
    home.reserve(2 * 1024)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_are_there_and_no_fork_copies_them() -> None:
    before = psutil.Process().memory_info().rss
    unlocked = mock.patch.object(host_memory._LockedMemory, "lock")
    with mock.patch.object(host_memory, "_locks", return_value=True), unlocked:
        memory = host_memory._new_block(2**26, CPU)
    assert psutil.Process().memory_info().rss - before > 2**26 * 0.9
    flags = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= memory.data_ptr() < int(match[2], 16)
        elif line.startswith("VmFlags") and inside:
            flags = line.split()
    assert flags is not None
    assert "dc" in flags  # do not copy


ENDS = """
import time, torch
from hf_burst.layers import host_memory
host_memory._locks, host_memory._LockedMemory.lock = lambda device: True, lambda *options: time.sleep(0.2)
host_memory.HostMemory.block_bytes = 4096
home = host_memory.HostMemory(torch.device("cpu"))
home.reserve(4096 * 4000)
raise SystemExit(7)
"""


def test_a_process_that_ends_does_not_make_the_rest() -> None:
    assert subprocess.run([sys.executable, "-c", ENDS], timeout=60).returncode == 7  # all would take 100 s and more


def refused_on_one_rank(rank: int, size: int, count: int) -> tuple[list[str], bool]:
    """What two steps end as, where a driver refuses in the midst of the first; and whether its loss and gradients are
    as without offloading."""
    lines, results, batch = list[str](), [], models.make_batch("plain", LENGTH)
    with locking(2 if rank == 0 else 10**6) as driver:
        for share in (0.0, 1.0, 1.0):
            if len(results) < 2:
                model = models.make_model("llama").train()
                models.patch(
                    model,
                    hf_burst.BurstConfig(
                        memory=hf_burst.Memory(activation_offloading=share, layers_per_checkpoint=count)
                    ),
                )
                model.gradient_checkpointing_enable()
            try:
                results.append(gradients(model, batch))
            except (KernelError, RankMismatchError) as problem:
                lines.append(type(problem).__name__)
        locked = len(driver.locked)
        model.eval()
        with torch.no_grad():
            model(**batch)
        del model
    assert locked == 2 if rank == 0 else locked > 2
    return lines, all(map(torch.equal, *results))


@pytest.mark.parametrize("count", [1, 2])
def test_memory_that_is_refused_on_one_rank(ranks: Ranks, count: int) -> None:
    """The step ends as it would, and the next one raises on all ranks."""
    expected = [(["KernelError"], True), (["RankMismatchError"], True)]
    assert ranks(2).run(refused_on_one_rank, count) == expected


def test_a_tensor_that_changes_is_noticed(tiny_pages: None) -> None:
    home, tensor = HostMemory(CPU), torch.ones(8)
    layer = SavedByLayer(home, True)
    kept = layer.save(tensor)
    tensor.add_(1)
    with pytest.raises(KernelError, match="in place"):
        kept()
    assert not home.leaving, "the next pass is another one"
    stays = SavedByLayer(home, False).save(tensor)
    tensor.add_(1)
    with pytest.raises(KernelError, match="in place"):
        stays()


def test_the_layer_before_comes_back_meanwhile(tiny_pages: None) -> None:
    home, layers = HostMemory(CPU), list[SavedByLayer]()
    for index in range(4):
        layers.append(SavedByLayer(home, index < 3))
        layers[-1].following = layers[-2] if index else None
    kept = [[layer.save(torch.full((8,), index + part)) for part in (0, 10)] for index, layer in enumerate(layers)]

    def coming() -> list[int]:
        return [sum(tensor.coming is not None for tensor in layer.offloaded) for layer in layers]

    states = []
    for tensors in reversed(kept):
        for tensor in tensors:
            tensor()
            states.append(coming())
    assert states[0] == [0, 0, 2, 0]
    assert states[2:4] == [[0, 2, 1, 0], [0, 2, 0, 0]]
    assert states[-1] == [0, 0, 0, 0]
    again = [[int(tensor()[0]) for tensor in tensors] for tensors in kept]
    assert again == [[index, index + 10] for index in range(4)]


def gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def bit_equal(rank: int, size: int, name: str, kind: str, keep: float = 1.0, switch: str = "wrapped") -> list[bool]:
    """Whether the loss and all gradients are as without offloading; no page is lost."""
    results, batch = [], models.make_batch(kind, LENGTH)
    with small_pages():
        for share in (0.0, 1.0, 0.5):
            model = models.make_model(name).train()
            models.patch(
                model, hf_burst.BurstConfig(memory=hf_burst.Memory(activation_offloading=share, attention_keep=keep))
            )
            SWITCHES[switch][0](model)
            results.append(gradients(model, batch))
            home = part_of(model, Checkpointing).host
            if share == 1.0:
                full, again = home.size, gradients(model, batch)
                assert all(map(torch.equal, again, results[-1]))
        gc.collect()
        assert len(home.free) == home.size // home.page_bytes, "all pages are free again"
        assert 0 < home.size <= full
    return [all(map(torch.equal, results[0], result)) for result in results]


@pytest.mark.parametrize("switch", [switch for switch in SWITCHES if switch != "none"])
def test_one_process_trains_as_without(switch: str) -> None:
    assert all(bit_equal(0, 1, "llama", "packed", switch=switch))


@pytest.mark.parametrize(
    ("name", "size", "kind", "keep"),
    [
        ("qwen3_5", 2, "packed", 1.0),
        pytest.param("llama", 3, "left", 0.5, marks=pytest.mark.full),
        ("mistral", 2, "plain", 0.0),
    ],
)
def test_ranks_train_as_without(ranks: Ranks, name: str, size: int, kind: str, keep: float) -> None:
    assert all(map(all, ranks(size).run(bit_equal, name, kind, keep)))


@pytest.mark.parametrize("count", [1, 3])
@small_pages()
def test_graphs_that_run_twice_and_passes_that_fail(count: int) -> None:
    batch = models.make_batch("plain", LENGTH)
    config = hf_burst.BurstConfig(memory=hf_burst.Memory(activation_offloading=1.0, layers_per_checkpoint=count))
    model = models.patch(models.make_model("llama", layers=5).train(), config)
    model.gradient_checkpointing_enable()
    wanted = gradients(model, batch)[1:]
    model.zero_grad()
    losses = [model(**batch).loss for _ in range(2)]
    broken = mock.patch.object(type(model.model.norm), "forward", side_effect=KeyboardInterrupt)
    with broken, pytest.raises(KeyboardInterrupt):
        model(**batch)
    with torch.no_grad():
        model(**batch)
    for loss in losses:
        loss.backward(retain_graph=True)
    losses[0].backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, 3 * gradient, rtol=1e-4, atol=1e-5)
    home = part_of(model, Checkpointing).host
    del losses, loss
    gc.collect()
    home.settle()
    assert len(home.free) == home.size // home.page_bytes


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.full), 2])
@small_pages()
def test_embeddings_beside_adapters_are_let_go(count: int) -> None:
    batch, found, freed, norms = models.make_batch("plain", LENGTH), [], [], []
    for share in (0.0, 1.0):
        model = models.make_model("llama", layers=3).train()
        adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
        config = hf_burst.BurstConfig(
            memory=hf_burst.Memory(activation_offloading=share, layers_per_checkpoint=count if share else 1)
        )
        models.patch(adapted, config)
        adapted.gradient_checkpointing_enable()
        adapted.enable_input_require_grads()
        outputs: list[torch.Tensor] = []
        embeddings = model.get_input_embeddings()
        embeddings.register_forward_hook(lambda *call, to=outputs: to.append(call[2]))
        hooks = list(embeddings._forward_hooks)
        for _ in range(2):
            found.append(gradients(adapted, batch))
            norms.append(outputs.pop().grad.norm())  # a user's own hook sees the gradient
        loss = adapted(**batch).loss
        storage = StorageWeakRef(outputs.pop().untyped_storage())
        gc.collect()
        freed.append(storage.expired())
        loss.backward()
        assert list(embeddings._forward_hooks) == hooks
    assert freed == [False, True]
    assert len(found[0]) > 1
    assert all(all(map(torch.equal, found[0], others)) for others in found)
    assert len({float(norm) for norm in norms}) == 1


@pytest.mark.parametrize("settings", [{"activation_offloading": 1.0}, {"layers_per_checkpoint": 2}])
@small_pages()
def test_embeddings_beside_images_are_let_go(settings: dict[str, Any]) -> None:
    model = seeing_model("Gemma3").requires_grad_(False).train()
    for layer in model.model.language_model.layers:
        layer.self_attn.requires_grad_(True)
    models.patch(model, models.config_of(**settings))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    outputs: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda *call: outputs.append(call[2]))
    for kind in ("text", "images"):
        loss = model(**seeing_batch("Gemma3", kind)).loss
        storage = StorageWeakRef(outputs.pop().untyped_storage())
        gc.collect()
        assert storage.expired()
        loss.backward()


@small_pages()
def test_a_host_that_is_short_is_asked_once() -> None:
    part, device = Checkpointing(lambda error: None), torch.device("cpu")
    part.count, part._bytes_of_host = 4, lambda run, leaving: 80 * leaving  # type: ignore[method-assign]
    largest = mock.Mock(return_value=[-100.0])
    call = SimpleNamespace(config=SimpleNamespace(memory_settings=Memory()), largest=largest)
    group = mock.MagicMock(rank=0)
    run: Any = SimpleNamespace(memory=Memory(activation_offloading=1.0), call=call, group=group, device=device)
    for _ in range(2):
        part._prepare_host(run)
        assert part.offloading == 1
    largest.assert_called_once()


def short_host(rank: int, size: int) -> None:
    model = models.patch(
        models.make_model("llama").train(), hf_burst.BurstConfig(memory=hf_burst.Memory(activation_offloading=1.0))
    )
    model.gradient_checkpointing_enable()
    with mock.patch.object(host_memory, "host_memory", return_value=(2**40, 2**40 if rank else 100)):
        model(**models.make_batch("plain"))


def test_what_cannot_be_is_said_on_every_rank(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="GiB of host memory") as caught:
        ranks(2).run(short_host)
    first, second = caught.value.errors
    assert isinstance(first, ConfigError)
    assert isinstance(second, RankMismatchError)
    model = models.patch(
        models.make_model("llama").train(), hf_burst.BurstConfig(memory=hf_burst.Memory(activation_offloading=True))
    )
    with pytest.raises(ConfigError, match="gradient_checkpointing_enable"):
        model(**models.make_batch("plain"))
    model.eval()(**models.make_batch("plain"))
    model.train().gradient_checkpointing_enable()
    model.model.layers[0].compile(backend="eager")
    with pytest.raises(ConfigError, match="nothing of compiled layers"):
        model(**models.make_batch("plain"))
    for share in (-0.1, 1.5, "all", float("nan")):
        with pytest.raises(ConfigError, match="share from"):
            hf_burst.BurstConfig(memory=hf_burst.Memory(activation_offloading=share))
    total, available = host_memory.host_memory()
    assert 0 < available < total < 2**45
