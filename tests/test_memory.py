"""The choice of settings that let a step fit: on paper, and where a model is trained."""

import copy
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM

import hf_burst
from hf_burst.errors import ConfigError
from hf_burst.hf.model_size import model_size, shape_named
from hf_burst.hf.parts import memory
from hf_burst.hf.parts.memory import Memory
from hf_burst.plan import (
    SETTINGS,
    Fit,
    Machine,
    ModelSize,
    Training,
    estimate_memory,
    estimate_step,
    fit,
    fits,
    longest,
    memory_of_step,
    named,
)
from hf_burst.resources import GroupResources
from tests import models
from tests.ranks import RankPool
from tests.test_checkpointing import counted, expected_gradients
from tests.test_patch import group_mean, part_of
from tests.trainers import small_pages

Ranks = Callable[[int], RankPool]
AUTO: dict[str, Any] = {}  # the default
NAMED = {"memory": "named"}
LLAMA = model_size(LlamaForCausalLM, shape_named("llama-3-8b"), "llama-3-8b")
H200 = named("h200")
fitting = importlib.import_module("hf_burst.plan.fit")  # the package has a function of this name


@settings(deadline=None, max_examples=40)
@given(
    st.integers(10, 21).map(lambda power: 2**power),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (8, 8)]),
    st.sampled_from([0, 16]),
    st.sampled_from(["h200", "h100", "rtx4090"]),
    st.booleans(),
)
def test_what_is_chosen_fits_and_nothing_faster_does(
    length: int, gpus: tuple[int, int], lora: int, device: str, checkpointing: bool
) -> None:
    machine = named(device)
    training = Training(length, *gpus, lora=lora, checkpointing=checkpointing)
    chosen = fit(LLAMA, training, machine)
    assert chosen.fits == fits(chosen.memory, machine)
    assert chosen.memory == estimate_memory(LLAMA, chosen.training, machine)
    plain = estimate_memory(LLAMA, training, machine)
    if fits(plain, machine):
        assert chosen.fits
        assert chosen.step.total_s <= estimate_step(LLAMA, training, machine).total_s
    for name, value in (("tiled_mlp", 4096), ("activation_offloading", 0.5), ("attention_keep", 0.0)):
        asked = replace(training, **{name: value})
        assert getattr(fit(LLAMA, asked, machine, {name}).training, name) == value
    for share in (0.25, 1.0) if checkpointing else ():
        for keep in (1.0, 0.0):
            other = replace(chosen.training, activation_offloading=share, attention_keep=keep)
            if fits(estimate_memory(LLAMA, other, machine), machine):
                assert chosen.fits
                assert chosen.step.total_s <= estimate_step(LLAMA, other, machine).total_s * (1 + 1e-9)


def test_the_longest_sequence_is_the_longest() -> None:
    training = Training(1, 2, 2)
    most = longest(LLAMA, training, H200)
    assert most % 2048 == 0
    assert fit(LLAMA, replace(training, length=most), H200).fits
    assert not fit(LLAMA, replace(training, length=most + 2048), H200).fits
    assert most > 1.9 * longest(LLAMA, training, H200, SETTINGS)
    assert longest(LLAMA, Training(1, 1, 1), named("rtx4090")) == 0
    assert longest(LLAMA, training, replace(H200, host_memory=0)) < most
    assert longest(LLAMA, training, H200, held=0.0) > most > longest(LLAMA, training, H200, held=60.0 * 2**30)


def test_each_setting_takes_away_what_it_says() -> None:
    training = Training(524288, 2, 2)
    plain = memory_of_step(LLAMA, training, H200)[1]  # at the last layer
    offloaded = memory_of_step(LLAMA, replace(training, activation_offloading=1.0), H200)[1]
    assert offloaded.layer_inputs == 2 * plain.layer_inputs / 32, "the last one stays, the one before it comes back"
    assert offloaded.host == 31 / 32 * (plain.layer_inputs + plain.attention)
    tiles = memory_of_step(LLAMA, replace(training, tiled_mlp=16384), H200)[1]
    small = memory_of_step(LLAMA, replace(training, tiled_mlp=65536), H200)[1]
    more = 2 * 262144 * 4096 + 4 * LLAMA.mlp  # the gradient of all of the input, and those of weights in fp32
    assert plain.activations - small.activations == pytest.approx(2 * (262144 - 65536) * 4 * 14336 - more)
    # then the most is where attention runs backward: two hidden states, the inputs and dO, and dQ, dK, dV, also in fp32
    assert tiles.activations == 262144 * (2 * (2 * 4096 + 2 * 6144 + 4096) + 4 * 6144)
    assert pytest.approx(3 * 4096 * 14336, rel=0.01) == LLAMA.mlp
    fourth = memory_of_step(LLAMA, replace(training, layers_per_checkpoint=4), H200)
    kept = plain.layer_inputs / 32
    # 0, 4, ..., 24, 28 to 31 keep their inputs; before the last of a checkpoint runs backward, 3 are computed again
    assert [moment.layer_inputs / kept for moment in fourth[:7]] == [11, 11, 10, 9, 8, 10, 9]
    assert fourth[1].attention == plain.attention
    again = replace(training, layers_per_checkpoint=4)
    assert estimate_step(LLAMA, again, H200).products_s > estimate_step(LLAMA, training, H200).products_s
    assert estimate_step(LLAMA, again, H200).attention_s == estimate_step(LLAMA, training, H200).attention_s
    groups = memory_of_step(LLAMA, replace(training, head_groups=4), H200)[1]
    assert groups.exchange == pytest.approx(plain.exchange / 4, rel=0.01)
    times = [estimate_step(LLAMA, how, H200) for how in (training, replace(training, activation_offloading=1.0))]
    assert times[0].total_s == times[1].total_s, "copies hide"
    slow = replace(H200, host_bandwidth=1e9)
    assert estimate_step(LLAMA, replace(training, activation_offloading=1.0), slow).host_s > 50


@pytest.mark.parametrize("length", [512, 2**15])
@pytest.mark.parametrize("tied", [False, True])
def test_all_gradients_are_there_at_the_end(length: int, tied: bool) -> None:
    sizes, training = replace(LLAMA, tied=tied), Training(length, 1, 1)
    *earlier, last = memory_of_step(sizes, training, H200)
    assert last.moment == "the backward pass of the embeddings"
    assert last.gradients == 2 * training.trained(sizes)
    assert all(moment.gradients <= last.gradients for moment in earlier)
    table = 2 * sizes.vocabulary * sizes.hidden
    assert earlier[-1].gradients == pytest.approx(last.gradients - (0 if tied else table))
    assert estimate_memory(sizes, training, H200).total >= last.held + last.gradients
    assert "embeddings" not in memory_of_step(sizes, replace(training, lora=16), H200)[-1].moment


def test_the_backward_pass_of_a_recurrent_layer_is_counted() -> None:
    """It is the most of a layer where the MLP runs in tiles."""
    sizes = model_size(Qwen3_5ForCausalLM, shape_named("qwen3.6-27b"), "qwen3.6-27b")
    training = Training(65536, 1, 1, tiled_mlp=4096)
    (size,) = sizes.recurrent
    layer = memory_of_step(sizes, training, H200)[1]
    assert layer.activations == 2 * 65536 * (size.backward_elements + 2 * sizes.hidden)


@contextmanager
def small_gpu(room: float, held: Callable[[int], float], rank: int) -> Iterator[None]:
    """As if ranks ran on GPUs with so many bytes, of which so many are held."""
    machine = replace(H200, memory=int(room), host_memory=2**30)
    with ExitStack() as stack:
        for patch in (
            small_pages(),
            mock.patch.multiple(fitting, TILE=5),
            mock.patch.object(memory, "held_bytes", return_value=held(rank)),
            mock.patch.object(GroupResources, "machine", return_value=machine),
        ):
            stack.enter_context(patch)
        yield


def train(rank: int, size: int, room: float, config: dict[str, Any]) -> tuple[list[str], float]:
    """What is chosen for two lengths, as it reads, and the largest error of a gradient beside one process."""
    model, error, chosen = models.make_model("llama").train(), 0.0, []
    batches = [models.make_batch("plain", length) for length in (24, 80)]
    expected = []
    for batch in batches:
        models.plain_loss(model, batch).backward()
        expected.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    models.patch(model, hf_burst.BurstConfig(**config))
    model.gradient_checkpointing_enable()
    with small_gpu(room, lambda rank: 1000.0 * rank, rank):
        with torch.no_grad():
            model(**batches[1])
        for batch, wanted in zip(batches, expected, strict=True):
            torch.manual_seed(7)
            model(**batch).loss.backward()
            assert torch.initial_seed() == 7
            for found, gradient in zip(group_mean(model), wanted, strict=True):
                error = max(error, float((found - gradient).abs().max()))
            model.zero_grad()
            part = part_of(model, Memory)
            latest = [*part.chosen.values()][-1:] or [hf_burst.BurstConfig(**config)]
            chosen.append(str({name: getattr(latest[0], name) for name in SETTINGS}))
    return chosen, error


def rooms(ranks: int) -> list[float]:
    """GPUs on which a batch of 80 tokens fits as it is, with something on the host, and never."""
    size = model_size(LlamaForCausalLM, models.make_model("llama").config)
    with mock.patch.multiple(fitting, TILE=5):
        takes = [
            estimate_memory(size, Training(160, ranks, ranks, sharded="ddp", weights="fp32", fused=False, **how), H200)
            for how in ({}, {"activation_offloading": 0.5, "tiled_mlp": 5, "head_groups": 2})
        ]
    return [(memory.total - memory.held) * 1.01 / 0.92 + 1100 for memory in takes] + [1200.0]


def test_a_step_is_made_to_fit(ranks: Ranks) -> None:
    roomy, tight, _ = rooms(2)
    assert roomy > tight
    plain = str(
        {
            "tiled_mlp": 0,
            "head_groups": 1,
            "activation_offloading": 0.0,
            "layers_per_checkpoint": 1,
            "attention_keep": 1.0,
        }
    )
    for room, config in ((2 * roomy, AUTO), (tight, NAMED)):
        for chosen, error in ranks(2).run(train, room, config):
            assert chosen == [plain, plain]
            assert error < 1e-5
    results = ranks(2).run(train, tight, AUTO)
    assert results[0][0] == results[1][0], "the same on all ranks"
    for (short, long), error in results:
        assert short == plain
        assert "'tiled_mlp': 5" in long
        assert error < 1e-5
    for (_, long), _ in ranks(2).run(train, tight, AUTO | {"tiled_mlp": 3, "attention_keep": 0.0}):
        assert "'tiled_mlp': 3" in long
        assert "'attention_keep': 0.0" in long


def test_one_process_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    _, tight, never = rooms(1)
    with caplog.at_level(logging.INFO, "hf_burst"):
        train(0, 1, tight, AUTO)
        told = [record for record in caplog.records if record.name.endswith("memory")]
        assert told[-1].levelno == logging.INFO
        assert "2 x 80 tokens with tiled_mlp=5" in told[-1].getMessage()
        train(0, 1, never, AUTO | {"activation_offloading": 1.0})
    told = [record for record in caplog.records if record.name.endswith("memory")]
    assert told[-1].levelno == logging.WARNING
    assert "may run out of memory" in told[-1].getMessage()
    assert "0 tokens fit" in told[-1].getMessage()
    with pytest.raises(ConfigError, match="'auto', 'named'"):
        hf_burst.BurstConfig(memory="little")


def keep_a_part(rank: int, size: int, keep: float, chunking: str) -> list[bool]:
    """As if parts of attention were the best to keep: whether a part could be kept of batches of two lengths."""
    model, able = models.make_model("llama", torch.float64).train(), []
    batches = [models.make_batch("plain", length) for length in (40, 43)]
    wanted = [expected_gradients(copy.deepcopy(model), batch) for batch in batches]
    models.patch(model, hf_burst.BurstConfig(chunking=chunking, schedule="kv_ring"))
    model.gradient_checkpointing_enable()

    def choose(sizes: ModelSize, training: Training, machine: Machine, fixed: Any, keeps: Any, held: Any) -> Fit:
        able.append(keep in keeps)
        how = replace(training, attention_keep=keep if able[-1] else 0.0)
        return Fit(how, estimate_step(sizes, how, machine), estimate_memory(sizes, how, machine), True)

    with small_gpu(2**30, lambda rank: 0.0, rank), mock.patch.object(memory, "fit", choose):
        for batch, gradients in zip(batches, wanted, strict=True):
            model.zero_grad()
            with counted() as queries:
                loss = model(**batch).loss
                whole = sum(queries)
                loss.backward()
            part = (sum(queries) - whole) / whole
            assert part == (pytest.approx(1 - keep, abs=0.02) if able[-1] else 1)
            for found, gradient in zip(group_mean(model), gradients, strict=True):
                torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-10)
    return able


@pytest.mark.parametrize(
    ("size", "keep", "chunking", "able"),
    [
        (1, 0.25, "balanced", True),
        (1, 0.75, "balanced", True),
        (2, 0.5, "zigzag", True),
        (2, 0.25, "zigzag", False),
        (2, 0.5, "contiguous", False),
    ],
)
def test_parts_of_attention_are_kept_where_batches_allow_it(
    ranks: Ranks, size: int, keep: float, chunking: str, able: bool
) -> None:
    for found in ranks(size).run(keep_a_part, keep, chunking):
        assert found == [able, able]


def compile_on_one_rank(rank: int, size: int) -> list[Any]:
    """What is not chosen, where a rank has compiled a module and the other has not."""
    model = models.make_model("llama").train()
    models.patch(model, hf_burst.BurstConfig(schedule="kv_ring", chunking="zigzag"))
    model.gradient_checkpointing_enable()
    if rank == 1:
        model.model.norm.compile(backend="eager")
    with small_gpu(2**30, lambda rank: 0.0, rank):
        model(**models.make_batch("plain", 40)).loss.backward()
    part = part_of(model, Memory)
    return [part.fixed, [keeps for _, keeps in part.chosen]]


def test_what_one_rank_cannot_do_none_does(ranks: Ranks) -> None:
    assert ranks(2).run(compile_on_one_rank) == 2 * [[["layers_per_checkpoint", "activation_offloading"], [(1.0, 0.0)]]]


def test_an_error_of_memory_says_what_to_turn() -> None:
    """In the forward pass, and where a checkpoint runs a layer again."""
    short = torch.OutOfMemoryError("CUDA out of memory.")
    for place in ("norm", "layers"):
        model = models.patch(models.make_model("llama").train())
        model.gradient_checkpointing_enable()
        module = model.model.norm if place == "norm" else model.model.layers[0].mlp
        loss = None if place == "norm" else model(**models.make_batch("plain")).loss
        with mock.patch.object(module, "forward", side_effect=short), pytest.raises(torch.OutOfMemoryError) as caught:
            model(**models.make_batch("plain")) if loss is None else loss.backward()
        assert ["activation_offloading=1.0" in note for note in caught.value.__notes__] == [True]
        del short.__notes__


def two_passes(rank: int, size: int, room: float, order: str) -> float:
    """The largest error of a gradient where another pass, in other tiles, comes before the backward pass."""
    model = models.make_model("llama").train()
    long, short = (models.make_batch("plain", length) for length in (80, 24))
    models.plain_loss(model, long).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    models.patch(model, hf_burst.BurstConfig(**AUTO))
    model.gradient_checkpointing_enable()
    with small_gpu(room, lambda rank: 1000.0, rank):
        if order == "reference first":
            with torch.no_grad():
                model(**short)
        loss = model(**long).loss
        with torch.set_grad_enabled(order != "reference"):
            model(**short)
        loss.backward()
    return max(float((a - b).abs().max()) for a, b in zip(group_mean(model), expected, strict=True))


@pytest.mark.parametrize("order", ["reference", "reference first", "another batch"])
def test_a_pass_before_the_backward_pass(order: str) -> None:
    assert two_passes(0, 1, rooms(1)[1], order) < 1e-5


def test_weights_that_are_taken_apart_are_in_no_tiles() -> None:
    model = models.patch(models.make_model("llama").train(), hf_burst.BurstConfig(**AUTO))
    model.gradient_checkpointing_enable()
    with (
        small_gpu(rooms(1)[1], lambda rank: 0.0, 0),
        mock.patch.object(memory, "takes_weights_apart", return_value=True),
    ):
        model(**models.make_batch("plain", 80))
    (chosen,) = part_of(model, Memory).chosen.values()
    assert chosen.tiled_mlp == 0
