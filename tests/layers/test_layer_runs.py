"""Layers that do not keep their input: training is as if they did, bit by bit, and what is kept is what was said."""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils import _device
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_burst
from hf_burst.errors import ConfigError, KernelError
from hf_burst.hf.parts import checkpointing
from hf_burst.hf.parts.checkpointing import Checkpointing
from hf_burst.layers.layer_runs import LayerRun
from hf_burst.layers.surroundings import function_modes_as_now
from hf_burst.plan.layer_sizes import keeping
from tests.hf.parts.test_checkpointing import SWITCHES, counted, expected_gradients
from tests.hf.test_patch import group_mean, part_of
from tests.layers.test_offload import gradients
from tests.support import models
from tests.support.ranks import RankError, RankPool
from tests.support.trainers import small_pages

Ranks = Callable[[int], RankPool]
LENGTH, LAYERS = 43, 7


@given(st.integers(1, 40), st.integers(1, 45))
def test_which_layers_keep_their_input(layers: int, per_checkpoint: int) -> None:
    counts = [keeping(first, layers, per_checkpoint) for first in range(layers + 1)]
    keep = [after - before for before, after in itertools.pairwise(counts)]
    last = max(0, layers - per_checkpoint)
    assert keep == [int(index % per_checkpoint == 0 or index >= last) for index in range(layers)]


@contextmanager
def runs_of(model: PreTrainedModel) -> Iterator[list[int]]:
    """The layers that run, in their order."""
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    ran: list[int] = []
    inside = [next(layer.children()) for layer in layers]
    handles = [
        module.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
        for index, module in enumerate(inside)
    ]
    yield ran
    for handle in handles:
        handle.remove()


def all_pages_are_free(model: nn.Module) -> bool:
    home = part_of(model, Checkpointing).host
    if home is None:
        return True
    home.settle()
    return len(home.free) == home.size // home.page_bytes


def bit_equal(
    rank: int, size: int, name: str, kind: str, settings: dict[str, Any], counts: tuple[int, ...], switch: str
) -> list[bool]:
    """Whether the loss and all gradients are as if each layer kept its input; nothing is left behind."""
    results, batch = [], models.make_batch(kind, LENGTH)
    with small_pages():
        for count in (1, *counts):
            model = models.make_model(name, layers=LAYERS).train()
            models.patch(model, models.config_of(layers_per_checkpoint=count, **settings))
            SWITCHES[switch][0](model)
            results.append(gradients(model, batch))
            assert all(map(torch.equal, gradients(model, batch), results[-1])), "twice the same"
            gc.collect()
            assert all_pages_are_free(model)
    return [all(map(torch.equal, results[0], result)) for result in results]


@pytest.mark.parametrize(
    ("switch", "share"),
    [
        *(("not reentrant", 0.5), ("wrapped", 1.0)),
        *(pytest.param("not reentrant", share, marks=pytest.mark.full) for share in (0.0, 1.0)),
        *(pytest.param("wrapped", share, marks=pytest.mark.full) for share in (0.0, 0.5)),
    ],
)
def test_one_process_trains_as_without(switch: str, share: float) -> None:
    settings = {"activation_offloading": share}
    assert all(bit_equal(0, 1, "llama", "packed", settings, (2, 3, 4, 100), switch))


@pytest.mark.parametrize(
    ("name", "size", "kind", "settings"),
    [
        pytest.param("qwen3_5", 2, "packed", {"activation_offloading": 0.5}, marks=pytest.mark.full),
        ("llama", 2, "left", {"attention_keep": 1.0, "activation_offloading": 1.0, "tiled_mlp": 7}),
        ("mistral", 3, "plain", {"attention_keep": 0.0}),
        ("gpt2", 2, "right", {"schedule": "ulysses"}),
        pytest.param("llama", 4, "packed", {"schedule": "ulysses_2+burst"}, marks=pytest.mark.full),
        pytest.param("granite", 2, "packed", {}, marks=pytest.mark.full),
    ],
)
def test_ranks_train_as_without(ranks: Ranks, name: str, size: int, kind: str, settings: dict[str, Any]) -> None:
    assert all(map(all, ranks(size).run(bit_equal, name, kind, settings, (3,), "not reentrant")))


def exact(rank: int, size: int) -> None:
    """Beside one process that holds the whole sequence, in fp64."""
    batch = models.make_batch("packed", LENGTH)
    model = models.make_model("llama", torch.float64, layers=LAYERS).train()
    expected_loss, wanted = models.plain_loss(model, batch).detach(), expected_gradients(model, batch)
    model.zero_grad()
    config = hf_burst.BurstConfig(
        memory=hf_burst.Memory(layers_per_checkpoint=3, activation_offloading=0.5, tiled_mlp=5)
    )
    models.patch(model, config)
    model.gradient_checkpointing_enable()
    with small_pages():
        loss = model(**batch).loss
        loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-10, atol=1e-10)
    for found, gradient in zip(group_mean(model), wanted, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.full) for size in (2, 4)), 3])
def test_it_is_exact(ranks: Ranks, size: int) -> None:
    ranks(size).run(exact)


@pytest.mark.parametrize("keep", [1.0, 0.0])
def test_layers_run_once_more_and_kept_attention_does_not(keep: float) -> None:
    batch, model = models.make_batch("packed", LENGTH), models.make_model("llama", layers=LAYERS).train()
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=3, attention_keep=keep)))
    model.gradient_checkpointing_enable()
    loss = model(**batch).loss
    with runs_of(model) as ran, counted() as queries:
        loss.backward()
    # 0, and 3 to 6, keep their inputs
    assert ran == [6, 5, 4, 3, 0, 1, 2, 1, 0]
    assert len(queries) == (0 if keep else len(ran))


def kept_bytes(per_checkpoint: int) -> int:
    """Those of the hidden states that the graph of a loss holds."""
    batch, model = models.make_batch("packed", LENGTH), models.make_model("llama", layers=12).train()
    models.patch(
        model,
        hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=per_checkpoint, activation_offloading=1.0)),
    )
    model.gradient_checkpointing_enable()
    with small_pages():
        loss = model(**batch).loss
        home = part_of(model, Checkpointing).host
        taken = home.size - home.page_bytes * len(home.free)
        loss.backward()
    return taken


def test_so_many_inputs_leave_for_the_host() -> None:
    hidden = LENGTH * 32 * 4
    every, fourth = kept_bytes(1), kept_bytes(4)
    # of the 11 layers that offload, 0, 4, 8, 9 and 10 keep their inputs
    assert every - fourth == 6 * -(-hidden // 1024) * 1024


def test_adapters_and_autocast() -> None:
    batch, found = models.make_batch("packed", LENGTH), []
    for count in (1, 3):
        model = models.make_model("llama", layers=LAYERS).train()
        model.enable_input_require_grads()
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3))
        models.patch(adapted, hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=count)))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(2)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = adapted(**batch).loss
                loss.backward()
        found.append([parameter.grad for parameter in adapted.parameters() if parameter.requires_grad])
    assert all(map(torch.equal, *found))
    assert len(found[0]) == 2 * 7 * LAYERS


def test_runs_live_as_long_as_the_graph() -> None:
    alive: list[weakref.ref[LayerRun]] = []

    class Noted(LayerRun):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.append(weakref.ref(self))

    batch, model = models.make_batch("plain", LENGTH), models.make_model("llama", layers=LAYERS).train()
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=2)))
    model.gradient_checkpointing_enable()
    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(checkpointing, "LayerRun", Noted):
            loss = model(**batch).loss
        assert [run() is not None for run in alive] == [True] * LAYERS
        loss.backward()
        assert not any(run().ready for run in alive if run() is not None)
        del loss
        assert not any(run() for run in alive)
    finally:
        gc.enable()


class Doubling(nn.Module):
    """A layer between two others that changes what one hands to the next."""

    def __init__(self, layer: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = layer, in_place

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("layer", "in_place") else getattr(self.layer, name)

    def forward(self, hidden: torch.Tensor, **named: Any) -> torch.Tensor:
        hidden = hidden.mul_(2) if self.in_place else hidden * 2
        output: torch.Tensor = self.layer(hidden, **named)
        return output


@pytest.mark.parametrize("in_place", [False, True])
def test_an_input_that_is_not_the_output_before_it_is_kept(in_place: bool) -> None:
    batch, results = models.make_batch("plain", LENGTH), []
    for count in (1, 3):
        model = models.make_model("llama", layers=LAYERS).train()
        model.model.layers[1] = Doubling(model.model.layers[1], in_place)
        models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=count)))
        model.gradient_checkpointing_enable()
        results.append(gradients(model, batch))
    assert all(map(torch.equal, *results))


def test_an_input_that_its_layer_changes_is_noticed() -> None:
    model = models.make_model("llama", layers=LAYERS).train()
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=3)))
    model.gradient_checkpointing_enable()
    norm = model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda module, inputs, output: inputs[0].add_(1) * 0 + output)
    loss = model(**models.make_batch("plain", LENGTH)).loss
    with pytest.raises(KernelError, match="in place"):
        loss.backward()


class Outer(GradientCheckpointingLayer):
    """A layer around a layer, that computes with what the inner one returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(32))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("layer", "scale") else getattr(self.layer, name)

    def forward(self, hidden: torch.Tensor, **named: Any) -> torch.Tensor:
        return torch.tanh(self.layer(hidden, **named) * self.scale) * 3


@pytest.mark.parametrize("keep", [1.0, 0.0])
@pytest.mark.parametrize(("count", "share"), [(1, 0.5), (3, 0.0), (3, 0.5)])
def test_layers_inside_of_layers(keep: float, count: int, share: float) -> None:
    batch, results = models.make_batch("plain", LENGTH), []
    for settings in ({}, {"layers_per_checkpoint": count, "activation_offloading": share}):
        model = models.make_model("llama", layers=LAYERS).train()
        for index in (1, 2):
            model.model.layers[index] = Outer(model.model.layers[index])
        models.patch(model, models.config_of(attention_keep=keep, **settings))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with small_pages():
            results.append(gradients(model, batch))
        assert part_of(model, Checkpointing).count == LAYERS
    assert all(map(torch.equal, *results))


def hooked_under_fsdp2(rank: int, size: int) -> None:
    """A hook changes what a layer is given. It is called once a pass, and gradients are as if each layer kept its
    input."""
    batch, found, calls = models.make_batch("packed", LENGTH), list[list[torch.Tensor]](), list[int]()
    for count in (1, 3):
        model = models.make_model("llama", layers=LAYERS).train()
        models.patch(
            model, hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=count, activation_offloading=0.5))
        )
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.model.layers[0].register_forward_pre_hook(lambda _, args: calls.append(0) or (2 * args[0], *args[1:]))
        mesh = init_device_mesh("cpu", (size,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with small_pages():
            loss = model(**batch).loss
            loss.backward()
        found.append([loss.detach(), *(weight.grad.full_tensor() for weight in model.parameters())])
    assert len(calls) == 2
    assert all(map(torch.equal, *found))


def test_hooks_of_layers_run_once_under_fsdp2(ranks: Ranks) -> None:
    ranks(2).run(hooked_under_fsdp2)


def test_what_comes_back_and_when() -> None:
    """While a layer runs again, what the backward pass asks for next comes back, and nothing else."""
    made: list[LayerRun] = []
    coming: list[tuple[int, list[tuple[int, int]]]] = []

    class Noted(LayerRun):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    model = models.make_model("llama", layers=9).train()
    models.patch(
        model, hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=3, activation_offloading=1.0))
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def note(index: int) -> None:
        if torch.is_grad_enabled():
            there = [(at, sum(one.coming is not None for one in run.saved.offloaded)) for at, run in enumerate(made)]
            coming.append((index, [(at, count) for at, count in there if count]))

    with small_pages(), mock.patch.object(checkpointing, "LayerRun", Noted):
        loss = model(**models.make_batch("plain", LENGTH)).loss
        for index, layer in enumerate(model.model.layers):
            layer.mlp.register_forward_pre_hook(lambda *_, index=index: note(index))
        loss.backward()
    # layers 0, 3, 6 and 7 keep inputs, attention and its lse on the host, 1, 2, 4 and 5 the latter two
    assert coming == [
        (8, [(7, 3)]),
        (7, [(6, 3)]),
        (6, [(3, 3)]),
        (5, [(3, 1), (4, 2)]),  # the lse of layer 3 is not asked for when it runs for its output alone
        (4, [(3, 3)]),
        (3, [(0, 3)]),
        (2, [(0, 1), (1, 2)]),
        (1, [(0, 3)]),
        (0, []),
    ]


@pytest.mark.parametrize("count", [0, 1.5, True, "2"])
def test_what_is_no_number(count: Any) -> None:
    with pytest.raises(ConfigError, match="layers_per_checkpoint"):
        hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=count))


def refused(rank: int, size: int, switch: str) -> None:
    model = models.make_model("llama", layers=LAYERS).train()
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=2)))
    if switch == "every second layer":
        model.gradient_checkpointing_enable({"use_reentrant": False}, every_n_layers=2)
    elif switch == "compiled":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.model.layers[0].compile(backend="eager")
    else:
        SWITCHES[switch][0](model)
    model(**models.make_batch("plain", LENGTH))


@pytest.mark.parametrize("switch", ["none", "reentrant", "selective", "every second layer", "compiled"])
def test_layers_that_cannot_run_again_are_refused(ranks: Ranks, switch: str) -> None:
    with pytest.raises(RankError, match="use_reentrant=False") as caught:
        ranks(2).run(refused, switch)
    assert all(isinstance(error, ValueError) for error in caught.value.errors)


def test_weights_that_are_taken_apart_are_refused() -> None:
    model = models.patch(
        models.make_model("llama").train(), hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=2))
    )
    model.gradient_checkpointing_enable()
    model.model.layers[0].mlp.up_proj.weight.ds_id = 3
    with pytest.raises(ConfigError, match="ZeRO-3"):
        model(**models.make_batch("plain"))


def test_modes_that_come_again_keep_their_state() -> None:
    torch.set_default_device("meta")
    again = function_modes_as_now()
    with again():
        assert torch.ones(1).device.type == "meta"
    torch.set_default_device(None)
    with again():
        assert torch.ones(1).device.type == "meta"
    assert _device.CURRENT_DEVICE is None
    assert torch.ones(1).device.type == "cpu"
