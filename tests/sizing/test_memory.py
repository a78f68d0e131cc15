"""The choice of settings that let a step fit, by its prediction."""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, Qwen3_5ForCausalLM

from hf_burst.config import Memory
from hf_burst.hf.models.layer_sizes import layer_sizes
from hf_burst.hf.models.model_size import model_size, shape_named
from hf_burst.hf.view import ModelView
from hf_burst.plan.layer_sizes import StepEstimate
from hf_burst.plan.memory_levels import HOST_ROOM, SETTINGS, MeasuredLevels, Size, levels_for
from hf_burst.sizing.fit import bucket, fit, fits, levels, longest
from hf_burst.sizing.gpus import capacity_of, gpu_named
from hf_burst.sizing.memory import estimate_memory, memory_of_step
from hf_burst.sizing.model import Training
from hf_burst.sizing.seconds import estimate_seconds
from hf_burst.sizing.shapes import SHAPES

LLAMA = model_size(LlamaForCausalLM, shape_named("llama-3-8b"), "llama-3-8b")
H200 = capacity_of(gpu_named("h200"))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(10, 21).map(lambda power: 2**power),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (8, 8)]),
    st.sampled_from([0, 16]),
    st.sampled_from(["h200", "h100", "rtx4090"]),
    st.booleans(),
)
def test_the_first_level_that_fits_is_taken(
    length: int, gpus: tuple[int, int], lora: int, device: str, checkpointing: bool
) -> None:
    capacity = capacity_of(gpu_named(device))
    training = Training(length, *gpus, lora=lora, checkpointing=checkpointing)
    chosen, steps = fit(LLAMA, training, capacity), levels(LLAMA, training, capacity)
    level = steps.index(chosen.training)
    assert chosen.memory == estimate_memory(LLAMA, chosen.training, capacity)
    assert chosen.fits == fits(chosen.memory, capacity)
    assert not any(fits(estimate_memory(LLAMA, how, capacity), capacity) for how in steps[:level])
    totals = [estimate_memory(LLAMA, how, capacity).total for how in steps]
    assert chosen.fits or chosen.memory.total == min(totals)
    assert steps[0] == training
    for name, value in (("tiled_mlp", 1024), ("activation_offloading", 0.5), ("attention_keep", 0.0)):
        asked = replace(training, **{name: value})
        assert {getattr(how, name) for how in levels(LLAMA, asked, capacity, {name})} == {value}


def added(tokens: int, **options: Any) -> list[str]:
    """What the levels of a rule add, one after another."""
    steps = levels(LLAMA, Training(tokens, 1, 1, **options), replace(H200, host_memory=2**50))
    return [
        ", ".join(f"{name}={getattr(how, name):g}" for name in SETTINGS if getattr(how, name) != getattr(before, name))
        for before, how in pairwise(steps)
    ]


def test_the_rule() -> None:
    shared = ["layers_per_checkpoint=2", "layers_per_checkpoint=4", "attention_keep=0.5", "attention_keep=0"]
    host, tiles = ["activation_offloading=1"], ["tiled_mlp=4096", "head_groups=4"]
    assert added(32768) == [*host, *tiles, *shared, "head_groups=8"]
    assert added(32767) == ["tiled_mlp=4096", "head_groups=4", *host, *shared, "head_groups=8"]
    assert added(4096) == ["", "head_groups=4", *host, *shared, "head_groups=8"], "as many levels for any length"
    tiles[0] = "tiled_mlp=16384"
    assert added(65536) == [*host, *tiles, *shared, "head_groups=8"]
    assert added(65536, checkpointing=False) == tiles


def test_the_host_has_as_many_layers_as_it_holds() -> None:
    training = Training(524288, 1, 1)
    layer = (2 * 4096 + 2 * 4096 + 4 * 32) * 524288
    capacity = replace(H200, host_memory=int(5.5 * layer / HOST_ROOM))
    shares = [how.activation_offloading * 32 for how in levels(LLAMA, training, capacity)]
    assert shares[:4] == [0, 5, 5, 5]
    assert shares[4:] == sorted(shares[4:]), "more of them where each keeps less"
    assert shares[-1] > 10


ROWS = json.loads((Path(__file__).parents[2] / "recipes/benchmarks/results/fits_1xH100.json").read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['weights']}")
def test_a_run_takes_what_the_plan_promises(row: dict[str, Any]) -> None:
    """Steps of a run that measures, on an H100 that takes what is predicted, with expandable segments."""
    length, weights, host = row["length"], row["weights"], 2**37
    config = AutoConfig.for_model(**SHAPES[row["model"]])
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    model, room = model_size(type(made), config), capacity_of(gpu_named("h100"))
    how = {"weights": "4bit" if weights == "qlora" else "fp32", "lora": 0 if weights == "all" else 16}
    training = Training(length, 1, 1, (*range(0, length, 4096), length), expandable_segments=True, **how)
    while not fit(model, training, room).fits:  # it was promised more than it is now
        length -= 4096
        training = replace(training, length=length, documents=(*range(0, length, 4096), length))
    sizes = layer_sizes(ModelView(made))
    assert (sizes.layers, sizes.hidden, sizes.kv_heads) == (model.layers, model.hidden, model.kv_heads)
    assert (sizes.queries, sizes.keys) == (model.queries, model.keys)
    estimate = StepEstimate(sizes, training.itemsize, True, False)
    rule = MeasuredLevels(estimate, training.trained(model) * training.number, sharded=False)
    chosen, found = levels_for(estimate, Memory(), length, host), list[int]()
    for step in range(4):
        plain = estimate_memory(model, training, room)
        held = plain.weights + (plain.optimizer if step else 0)
        level, _ = rule.choose(chosen, Size(length), room.gpu_memory - plain.outside - held, expandable=True)
        memory = estimate_memory(model, replace(training, **asdict(chosen[level])), room)
        taken = memory.tensors - memory.held
        assert held + memory.outside + memory.gaps + taken <= room.gpu_memory
        rule.measured(chosen[level], Size(length), taken)
        found.append(level)
    promised = levels(model, training, room).index(fit(model, training, room).training)
    assert promised <= found[-1] <= promised + 1, "as cheap, up to the margin"
    assert found[2] == found[3]


def test_lengths_come_in_buckets() -> None:
    known = [bucket(tokens) for tokens in range(1, 5000)]
    assert all(tokens <= most < tokens * 17 / 16 + 1 for tokens, most in enumerate(known, 1))
    assert known == sorted(known)
    assert len(set(known[2048:4096])) == 16
    assert bucket(65536) == 65536
    assert bucket(65537) == 65536 + 4096


def test_the_longest_sequence_is_the_longest() -> None:
    training = Training(1, 2, 2)
    most = longest(LLAMA, training, H200)
    assert most % 2048 == 0
    assert most == bucket(most)  # the rule rounds up: what is promised fits as it is run
    assert fit(LLAMA, replace(training, length=most), H200).fits
    assert not fit(LLAMA, replace(training, length=bucket(most + 2048)), H200).fits
    assert most > 1.9 * longest(LLAMA, training, H200, SETTINGS)
    assert longest(LLAMA, Training(1, 1, 1), capacity_of(gpu_named("rtx4090"))) == 0
    assert longest(LLAMA, training, replace(H200, host_memory=0)) < most
    assert longest(LLAMA, replace(training, expandable_segments=True), H200) > 1.02 * most


def test_what_is_taken_beside_tensors() -> None:
    """Margins that were measured: gaps of the allocator are largest among gradients, and smaller with expandable
    segments; kernels of recurrent layers take memory of their own while they are tuned."""
    training = Training(65536, 2, 2, weights="fp32")
    memory = estimate_memory(LLAMA, training, H200)
    shard = 4 * LLAMA.weights / 2
    assert memory.gaps == pytest.approx(0.16 * (memory.tensors - memory.held) + 0.35 * shard)
    assert memory.total == memory.tensors + memory.exchange + memory.gaps + memory.outside
    offloaded = estimate_memory(LLAMA, replace(training, offloaded_weights=True), H200)
    assert offloaded.gaps == pytest.approx(0.16 * offloaded.tensors + 0.35 * shard)
    assert estimate_memory(LLAMA, replace(training, expandable_segments=True), H200).gaps < 0.8 * memory.gaps
    assert memory.outside == 2.25 * 2**30
    hybrid = model_size(Qwen3_5ForCausalLM, shape_named("qwen3.6-27b"), "qwen3.6-27b")
    assert estimate_memory(hybrid, training, H200).outside == 9.25 * 2**30
    assert estimate_memory(LLAMA, training, replace(H200, on_gpu=False)).gaps == 0


def test_hidden_states_are_in_fp32_where_autocast_begins_so() -> None:
    def kept(**options: Any) -> float:
        return memory_of_step(LLAMA, Training(65536, **options), H200)[1].layer_inputs

    assert kept(gpus=1, burst_size=1, weights="fp32") == 2 * kept(gpus=1, burst_size=1)
    assert kept(gpus=2, burst_size=2, weights="fp32") == kept(gpus=2, burst_size=2), "FSDP2 casts them"
    assert kept(gpus=1, burst_size=1, weights="fp32", lora=16) == kept(gpus=1, burst_size=1)


def test_each_setting_takes_away_what_it_says() -> None:
    training = Training(524288, 2, 2)
    plain = memory_of_step(LLAMA, training, H200)[1]  # at the last layer
    offloaded = memory_of_step(LLAMA, replace(training, activation_offloading=1.0), H200)[1]
    rotary = 262144 * 16 * 128 * 2
    kept = (plain.layer_inputs - rotary) / 32
    assert offloaded.layer_inputs == 2 * kept + rotary, "the last one stays, the one before it comes back"
    assert offloaded.host == 31 * (kept + plain.attention / 32)
    tiles = memory_of_step(LLAMA, replace(training, tiled_mlp=16384), H200)[1]
    small = memory_of_step(LLAMA, replace(training, tiled_mlp=65536), H200)[1]
    more = 2 * 262144 * 4096 + 4 * LLAMA.mlp  # the gradient of all of the input, and those of weights in fp32
    assert plain.activations - small.activations == pytest.approx(2 * (262144 - 65536) * 4 * 14336 - more)
    # then the most is where attention runs backward: two hidden states, the inputs and dO, and dQ, dK, dV, also in fp32
    assert tiles.activations == 262144 * (2 * (2 * 4096 + 2 * 6144 + 4096) + 4 * (6144 + 2 * 32))
    assert pytest.approx(3 * 4096 * 14336, rel=0.01) == LLAMA.mlp
    fourth = memory_of_step(LLAMA, replace(training, layers_per_checkpoint=4), H200)
    # 0, 4, ..., 24, 28 to 31 keep their inputs; before the last of a checkpoint runs backward, 3 are computed again
    assert [(moment.layer_inputs - rotary) / kept for moment in fourth[:7]] == [11, 11, 10, 9, 8, 10, 9]
    assert fourth[1].attention == plain.attention
    again = replace(training, layers_per_checkpoint=4)
    sheet = gpu_named("h200")
    assert estimate_seconds(LLAMA, again, sheet).products > estimate_seconds(LLAMA, training, sheet).products
    assert estimate_seconds(LLAMA, again, sheet).attention == estimate_seconds(LLAMA, training, sheet).attention
    groups = memory_of_step(LLAMA, replace(training, head_groups=4), H200)[1]
    assert groups.exchange == pytest.approx(plain.exchange / 4, rel=0.01)
    on_host = replace(training, activation_offloading=1.0)
    times = [estimate_seconds(LLAMA, how, sheet) for how in (training, on_host)]
    assert times[0].total == times[1].total, "copies hide"
    assert estimate_seconds(LLAMA, on_host, sheet._replace(host=1e9)).host > 50


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
