"""Activation offloading: what comes back is what left, and training is as without, bit by bit."""

import contextlib
import copy
import errno
import gc
import mmap
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef

import hf_burst
from hf_burst import host_memory
from hf_burst.errors import ConfigError, KernelError, RankMismatchError
from hf_burst.hf.parts.checkpointing import Checkpointing
from hf_burst.host_memory import HostMemory
from hf_burst.offload import KeptByLayer, OffloadedTensor
from tests import models
from tests.ranks import RankError, RankPool
from tests.test_checkpointing import SWITCHES
from tests.test_patch import part_of
from tests.trainers import small_pages

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
    """CUDA's, as far as memory is page-locked: it knows what is, and has room for three pieces."""

    def __init__(self) -> None:
        self.locked: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if len(self.locked) == 3:
            return 2
        assert (size, flags) == (256, 0)
        self.locked.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.locked.remove(address)

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return "out of memory"


def test_memory_is_locked_until_nothing_needs_it(tiny_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(host_memory, "_locks", lambda device: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    home = HostMemory(CPU)
    home.reserve(700)
    assert driver.locked == [home.free[0].memory.data_ptr()], "where the driver refuses, all ranks are told before"
    home.free.extend(home.take(700))
    assert len(driver.locked) == 3
    assert 0 < home.seconds < 5
    left = OffloadedTensor(torch.arange(64.0), home)
    with pytest.raises(KernelError, match=r"page-lock 0 MiB .*: out of memory\. Lower .*activation_offloading"):
        home.reserve(1024)
    del home
    gc.collect()
    assert len(driver.locked) == 3
    assert torch.equal(left.fetch(), torch.arange(64.0))
    del left
    gc.collect()
    assert driver.locked == []


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


def makers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hf_burst host memory"]


def test_blocks_are_made_while_others_compute(tiny_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, make = threading.Semaphore(1), host_memory._new_block

    def slow(size: int, device: torch.device) -> torch.Tensor:
        assert allowed.acquire(timeout=60)
        return make(size, device)

    monkeypatch.setattr(host_memory, "_new_block", slow)
    home = HostMemory(CPU)
    home.reserve(8 * 256)  # comes back with one block
    left = OffloadedTensor(torch.arange(64.0), home)
    assert home.size == 256
    waiter = threading.Timer(0.3, allowed.release)
    waiter.start()
    others = OffloadedTensor(torch.arange(64.0), home)
    assert home.seconds > 0.2, "it waited for its block"
    assert torch.equal(left.fetch(), others.fetch())
    allowed.release(6)
    home.free.extend(home.take(6 * 256))
    assert home.size == 8 * 256
    for thread in makers():
        thread.join(60)
        assert not thread.is_alive(), "nothing more was asked for"
    allowed.release()
    home.reserve(12 * 256)
    del home, left, others
    gc.collect()
    allowed.release(host_memory._MAKERS)
    for thread in makers():
        thread.join(60)
        assert not thread.is_alive(), "nobody takes what is made"


def test_memory_that_is_refused(tiny_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    home = HostMemory(CPU)
    with pytest.raises(
        KernelError, match=r"refused 0 MiB .*: .*Cannot allocate memory\. Lower .*activation_offloading"
    ):
        home.reserve(256)
    monkeypatch.undo()
    assert len(home.take(256)) == 4


ENDS = """
import time, torch
from hf_burst import host_memory
make = host_memory._new_block
host_memory._new_block = lambda *options: [time.sleep(0.2), make(*options)][1]
home = host_memory.HostMemory(torch.device("cpu"))
home.block_bytes = home._ahead.size = 4096
home.reserve(4096 * 4000)
raise SystemExit(7)
"""


def test_a_process_that_ends_does_not_make_the_rest() -> None:
    start = time.monotonic()
    assert subprocess.run([sys.executable, "-c", ENDS], timeout=100).returncode == 7
    assert time.monotonic() - start < 60  # of 100 s and more


def test_a_tensor_that_changes_is_noticed(tiny_pages: None) -> None:
    home, tensor = HostMemory(CPU), torch.ones(8)
    layer = KeptByLayer(home, True, None)
    kept = layer.keep(tensor)
    tensor.add_(1)
    with pytest.raises(KernelError, match="in place"):
        kept()
    assert not home.leaving, "the next pass is another one"
    stays = KeptByLayer(home, False, None).keep(tensor)
    tensor.add_(1)
    with pytest.raises(KernelError, match="in place"):
        stays()


def test_the_layer_before_comes_back_meanwhile(tiny_pages: None) -> None:
    home, layers = HostMemory(CPU), list[KeptByLayer]()
    for index in range(4):
        layers.append(KeptByLayer(home, index < 3, layers[-1] if layers else None))
    kept = [[layer.keep(torch.full((8,), index + part)) for part in (0, 10)] for index, layer in enumerate(layers)]

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
            models.patch(model, hf_burst.BurstConfig(activation_offloading=share, attention_keep=keep))
            SWITCHES[switch][0](model)
            results.append(gradients(model, batch))
            home = part_of(model, Checkpointing).home
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
    config = hf_burst.BurstConfig(activation_offloading=1.0, layers_per_checkpoint=count)
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
    home = part_of(model, Checkpointing).home
    del losses, loss
    gc.collect()
    home.settle()
    assert len(home.free) == home.size // home.page_bytes


@pytest.mark.parametrize("count", [1, 2])
@small_pages()
def test_embeddings_beside_adapters_are_let_go(count: int) -> None:
    batch, found, freed, norms = models.make_batch("plain", LENGTH), [], [], []
    for share in (0.0, 1.0):
        model = models.make_model("llama", layers=3).train()
        adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
        config = hf_burst.BurstConfig(activation_offloading=share, layers_per_checkpoint=count if share else 1)
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


def short_host(rank: int, size: int) -> None:
    model = models.patch(models.make_model("llama").train(), hf_burst.BurstConfig(activation_offloading=1.0))
    model.gradient_checkpointing_enable()
    with mock.patch.object(host_memory, "host_memory", return_value=(2**40, 2**40 if rank else 100)):
        model(**models.make_batch("plain"))


def test_what_cannot_be_is_said_on_every_rank(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="GiB of host memory") as caught:
        ranks(2).run(short_host)
    first, second = caught.value.errors
    assert isinstance(first, ConfigError)
    assert isinstance(second, RankMismatchError)
    model = models.patch(models.make_model("llama").train(), hf_burst.BurstConfig(activation_offloading=True))
    with pytest.raises(ConfigError, match="gradient_checkpointing_enable"):
        model(**models.make_batch("plain"))
    model.eval()(**models.make_batch("plain"))
    model.train().gradient_checkpointing_enable()
    model.model.layers[0].compile(backend="eager")
    with pytest.raises(ConfigError, match="nothing of compiled layers"):
        model(**models.make_batch("plain"))
    for share in (-0.1, 1.5, "all", float("nan")):
        with pytest.raises(ConfigError, match="share from"):
            hf_burst.BurstConfig(activation_offloading=share)
    total, available = host_memory.host_memory()
    assert 0 < available < total < 2**45
