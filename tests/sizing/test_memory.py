"""The choice of settings that let a step fit: on paper, and where a model is trained."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM

import hf_burst
from hf_burst.errors import ConfigError
from hf_burst.hf import attention
from hf_burst.hf.models.model_size import model_size, shape_named
from hf_burst.hf.parts import memory
from hf_burst.hf.parts.memory import MemoryRule
from hf_burst.sizing import memory_rule
from hf_burst.sizing.gpus import Capacity, capacity_of, gpu_named
from hf_burst.sizing.memory import estimate_memory, memory_of_step
from hf_burst.sizing.memory_rule import HOST_ROOM, SETTINGS, Fit, bucket, fit, fits, levels, longest
from hf_burst.sizing.model import ModelSize, Training
from hf_burst.sizing.seconds import estimate_seconds
from tests.hf.test_checkpointing import counted, expected_gradients
from tests.hf.test_patch import group_mean, part_of
from tests.support import models
from tests.support.ranks import RankError, RankPool
from tests.support.trainers import small_pages

Ranks = Callable[[int], RankPool]
AUTO: dict[str, Any] = {}  # the default
MANUAL: dict[str, Any] = {"memory": "manual"}
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
    assert chosen.training == steps[chosen.level]
    assert chosen.memory == estimate_memory(LLAMA, chosen.training, capacity)
    assert chosen.fits == fits(chosen.memory, capacity)
    assert not any(fits(estimate_memory(LLAMA, how, capacity), capacity) for how in steps[: chosen.level])
    totals = [estimate_memory(LLAMA, how, capacity).total for how in steps]
    assert chosen.fits or chosen.memory.total == min(totals)
    assert steps[0] == training
    last = fit(LLAMA, training, capacity, first_level=99)
    assert (last.level, last.training) == (len(steps) - 1, steps[-1])
    assert fit(LLAMA, training, capacity, first_level=1).level >= max(1, chosen.level * chosen.fits)
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
    host, tiles = ["activation_offloading=1"], ["tiled_mlp=16384", "head_groups=4"]
    assert added(32768) == [*host, *tiles, *shared, "head_groups=8"]
    assert added(32767) == ["tiled_mlp=4096", "head_groups=4", *host, *shared, "head_groups=8"]
    assert added(4096) == ["", "head_groups=4", *host, *shared, "head_groups=8"], "as many levels for any length"
    assert added(65536, checkpointing=False) == tiles


def test_the_host_has_as_many_layers_as_it_holds() -> None:
    training = Training(524288, 1, 1)
    layer = (2 * 4096 + 2 * 4096 + 4 * 32) * 524288
    capacity = replace(H200, host_memory=int(5.5 * layer / HOST_ROOM))
    shares = [how.activation_offloading * 32 for how in levels(LLAMA, training, capacity)]
    assert shares[:4] == [0, 5, 5, 5]
    assert shares[4:] == sorted(shares[4:]), "more of them where each keeps less"
    assert shares[-1] > 10


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
    assert longest(LLAMA, training, H200, held=0.0) > most > longest(LLAMA, training, H200, held=60.0 * 2**30)
    assert longest(LLAMA, replace(training, expandable_segments=True), H200) > 1.02 * most


def test_what_is_taken_beside_tensors() -> None:
    """Margins that were measured: gaps of the allocator are largest among gradients, and smaller with expandable
    segments; kernels of recurrent layers take memory of their own while they are tuned."""
    training = Training(65536, 2, 2, weights="fp32")
    memory = estimate_memory(LLAMA, training, H200)
    shard = 4 * LLAMA.weights / 2
    assert memory.gaps == pytest.approx(0.2 * (memory.tensors - memory.held) + 0.25 * shard)
    assert memory.total == memory.tensors + memory.exchange + memory.gaps + memory.outside
    assert estimate_memory(LLAMA, replace(training, expandable_segments=True), H200).gaps < 0.8 * memory.gaps
    assert memory.outside == 2.25 * 2**30
    hybrid = model_size(Qwen3_5ForCausalLM, shape_named("qwen3.6-27b"), "qwen3.6-27b")
    assert estimate_memory(hybrid, training, H200).outside == 9.25 * 2**30
    known = estimate_memory(LLAMA, training, H200, held=7.0)
    assert (known.held, known.gaps) == (7.0, memory.gaps)
    assert estimate_memory(LLAMA, training, replace(H200, on_gpu=False)).gaps == 0


def test_kernels_that_are_tuned_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, set_to = torch.device("cuda", 0), [1.0]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: set_to[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: set_to.append(share))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 19 * 2**30)
    room = memory.RoomForKernels(gpu)
    assert set_to == [1.0, 72 / 80], "but for 1 GiB of others, and 7 for the kernels"
    room.end()
    assert set_to[-1] == 1.0
    room = memory.RoomForKernels(gpu)
    set_to.append(0.5)
    room.end()
    assert set_to[-1] == 0.5, "a user has set it since"
    assert memory.RoomForKernels(gpu).share == 0.5


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


@contextmanager
def small_gpu(room: float, held: Callable[[int], float], rank: int) -> Iterator[None]:
    """As if ranks ran on GPUs with so many bytes, of which so many are held."""
    with ExitStack() as stack:
        for patch in (
            small_pages(),
            mock.patch.multiple(memory_rule, SHORT_TILE=5),
            mock.patch.object(memory, "held_bytes", return_value=held(rank)),
            mock.patch.object(memory, "gpu_memory", return_value=int(room)),
            mock.patch.object(memory, "share_of_host", return_value=2**30),
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
            latest = part_of(model, MemoryRule).latest
            settings = latest[-1].settings if latest else {name: getattr(hf_burst.Memory(), name) for name in SETTINGS}
            chosen.append(str(settings))
    return chosen, error


def room_for(level: int, ranks: int, groups: int = 1) -> float:
    """Bytes of a GPU on which a batch of 160 tokens fits with a level of the rule, and with none before it; of several
    groups of ranks, which shard weights."""
    size = model_size(LlamaForCausalLM, models.make_model("llama").config)
    capacity = Capacity(2**40, 2**30, on_gpu=False)
    sharded = "fsdp2" if groups > 1 else "ddp"
    how = Training(160, ranks * groups, ranks, sharded=sharded, weights="fp32", fused=False)
    with mock.patch.multiple(memory_rule, SHORT_TILE=5):
        takes = [
            estimate_memory(size, step, capacity, 1000.0 * (ranks - 1)).total for step in levels(size, how, capacity)
        ]
    assert takes[level] < min(takes[:level], default=float("inf"))
    return takes[level]


PLAIN = str({name: getattr(hf_burst.Memory(), name) for name in SETTINGS})


def test_a_step_is_made_to_fit(ranks: Ranks) -> None:
    for room, config in ((room_for(0, 2), AUTO), (room_for(2, 2), MANUAL)):
        for chosen, error in ranks(2).run(train, room, config):
            assert chosen == [PLAIN, PLAIN]
            assert error < 1e-5
    results = ranks(2).run(train, room_for(2, 2), AUTO)
    assert results[0][0] == results[1][0], "the same on all ranks"
    for (short, long), error in results:
        assert short == PLAIN
        assert "'tiled_mlp': 5" in long
        assert error < 1e-5
    for chosen, error in ranks(2).run(train, room_for(2, 2), {"memory": hf_burst.Memory(tiled_mlp=3)}):
        assert chosen == [PLAIN, PLAIN], "settings that are given stay as they are, and nothing is chosen"
        assert error < 1e-5
    for (_, long), error in ranks(2).run(train, 2000.0, AUTO):
        assert "'activation_offloading': 1.0" in long, "all that there is"
        assert error < 1e-5


def test_one_process_says_what_it_does(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> list[tuple[int, str]]:
        records = [record for record in caplog.records if record.name.endswith("memory")]
        return [(record.levelno, record.getMessage()) for record in records]

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)  # which recipes set
    with caplog.at_level(logging.INFO, "hf_burst"):
        train(0, 1, room_for(1, 1), AUTO)
        (level, text), (_, advice) = told()
        assert (level, "2 x 80 tokens with tiled_mlp=5: predicted are" in text) == (logging.INFO, True)
        assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in advice
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8,expandable_segments:True")
        train(0, 1, 1200.0, AUTO)
    level, text = told()[-1]
    assert (level, "may run out of memory" in text, "0 tokens fit" in text) == (logging.WARNING, True, True)
    with pytest.raises(ConfigError, match="'auto', 'manual'"):
        hf_burst.BurstConfig(memory="little")


def keep_a_part(rank: int, size: int, keep: float, chunking: str) -> list[bool]:
    """With memory for half of the attention: whether it could be kept of batches of two lengths."""
    model, able = models.make_model("llama", torch.float64).train(), []
    batches = [models.make_batch("plain", length) for length in (40, 43)]
    wanted = [expected_gradients(copy.deepcopy(model), batch) for batch in batches]
    models.patch(model, hf_burst.BurstConfig(chunking=chunking, schedule="kv_ring"))
    model.gradient_checkpointing_enable()

    def choose(sizes: ModelSize, training: Training, capacity: Capacity, fixed: Any, held: Any, least: int = 0) -> Fit:
        how = replace(training, attention_keep=keep)
        return Fit(1, how, estimate_memory(sizes, how, capacity), True)

    with small_gpu(2**30, lambda rank: 0.0, rank), mock.patch.object(memory, "fit", choose):
        for batch, gradients in zip(batches, wanted, strict=True):
            model.zero_grad()
            with counted() as queries:
                loss = model(**batch).loss
                whole = sum(queries)
                loss.backward()
            again = (sum(queries) - whole) / whole
            able.append(again < 1)
            assert again == (pytest.approx(1 - keep, abs=0.02) if able[-1] else 1)
            for found, gradient in zip(group_mean(model), gradients, strict=True):
                torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-10)
    return able


@pytest.mark.parametrize(
    ("size", "chunking", "able"), [(1, "balanced", True), (2, "zigzag", True), (2, "contiguous", False)]
)
def test_half_of_the_attention_is_kept_where_batches_allow_it(
    ranks: Ranks, size: int, chunking: str, able: bool
) -> None:
    for found in ranks(size).run(keep_a_part, 0.5, chunking):
        assert found == [able, able]


def test_what_is_chosen_reaches_the_attention() -> None:
    model = models.patch(models.make_model("llama").train())

    def choose(sizes: ModelSize, training: Training, capacity: Capacity, fixed: Any, held: Any, least: int = 0) -> Fit:
        how = replace(training, head_groups=2)
        return Fit(1, how, estimate_memory(sizes, how, capacity), True)

    with (
        small_gpu(2**30, lambda rank: 0.0, 0),
        mock.patch.object(memory, "fit", choose),
        mock.patch.object(attention, "attend", wraps=attention.attend) as attend,
    ):
        model(**models.make_batch("plain"))
    requests = [call.args[6] for call in attend.call_args_list]
    assert [request.head_groups for request in requests] == [2] * model.config.num_hidden_layers


def run_short(rank: int, size: int, room: float) -> tuple[list[int], list[str]]:
    """The level of five steps, the second and third of which run out of memory; and what the errors advise."""
    model, found, notes = models.make_model("llama").train(), list[int](), []
    models.patch(model)
    model.gradient_checkpointing_enable()
    long, short = (models.make_batch("plain", length) for length in (80, 24))
    with small_gpu(room, lambda rank: 0.0, rank), mock.patch.object(memory, "out_of_memory") as counted:
        counted.return_value = 0
        for step, batch in enumerate((long, long, long, short, long)):
            model(**batch).loss.backward()
            part = part_of(model, MemoryRule)
            found.append(part.latest[-1].level)
            if step in (1, 2):
                counted.return_value += 1
                problem = torch.OutOfMemoryError("CUDA out of memory.")
                part.advise(problem)
                notes += problem.__notes__
    return found, notes


def test_a_step_that_ran_out_is_followed_by_a_more_frugal_one(caplog: pytest.LogCaptureFixture) -> None:
    found, notes = run_short(0, 1, 2.0**30)
    assert found == [0, 0, 1, 0, 2], "for batches of as many tokens"
    assert "run the step again, and it is trained with tiled_mlp=5" in notes[0]
    said = [record.getMessage() for record in caplog.records if "ran out of memory" in record.getMessage()]
    assert [text.split(" with ")[1].split(". ")[0] for text in said] == ["nothing changed", "tiled_mlp=5"]


def test_over_ranks_the_error_names_the_settings_to_take(ranks: Ranks) -> None:
    for found, notes in ranks(2).run(run_short, 2.0**30):
        assert found == [0] * 5, "ranks go on alike, whichever of them counts an error"
        assert "start again with BurstConfig(memory=hf_burst.Memory(activation_offloading=0.0, tiled_mlp=5" in notes[0]


def two_groups(rank: int, size: int, room: float, config: Any) -> tuple[list[int], float]:
    """The levels of two steps of two groups of ranks that share weights, of which one has longer batches; and the
    largest error of a gradient."""
    model = models.make_model("llama").train()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))
    group, reference, found, error = rank // (size // 2), copy.deepcopy(model), [], 0.0
    models.patch(model, config[group] if isinstance(config, list) else config, mesh)
    model.gradient_checkpointing_enable()
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh._flatten("shards"))
    batches = [models.make_batch("plain", length) for length in ((80, 24) if group else (24, 24))]
    with small_gpu(room, lambda rank: 0.0, rank):
        for batch in batches:
            model(**batch).loss.backward()
            found.append(part_of(model, MemoryRule).latest[-1].level if part_of(model, MemoryRule).latest else 0)
            for other in range(2):
                models.plain_loss(
                    reference, models.make_batch("plain", 80 if other and batch is batches[0] else 24)
                ).backward()
            for weight, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                error = max(error, float((weight.grad.full_tensor() - wanted.grad / 2).abs().max()))
            model.zero_grad()
            reference.zero_grad()
    return found, error


def test_groups_that_share_weights_gather_layers_in_one_order(ranks: Ranks) -> None:
    for found, error in ranks(4).run(two_groups, room_for(1, 2, groups=2), None):
        assert found == [1, 0], "also of the group whose batch is short"
        assert error < 1e-5


def test_groups_that_share_weights_have_one_config(ranks: Ranks) -> None:
    configs = [hf_burst.BurstConfig(memory=hf_burst.Memory(layers_per_checkpoint=count)) for count in (1, 4)]
    with pytest.raises(RankError, match="patched with different settings") as caught:
        ranks(4).run(two_groups, 2.0**30, configs)
    assert all(isinstance(error, ConfigError) for error in caught.value.errors)


def compile_on_one_rank(rank: int, size: int) -> list[str]:
    """What is not chosen, where a rank has compiled a module and the other has not."""
    model = models.make_model("llama").train()
    models.patch(model, hf_burst.BurstConfig(schedule="kv_ring", chunking="zigzag"))
    model.gradient_checkpointing_enable()
    if rank == 1:
        model.model.norm.compile(backend="eager")
    with small_gpu(2**30, lambda rank: 0.0, rank):
        model(**models.make_batch("plain", 40)).loss.backward()
    part = part_of(model, MemoryRule)
    return sorted(part.fixed)


def test_what_one_rank_cannot_do_none_does(ranks: Ranks) -> None:
    assert ranks(2).run(compile_on_one_rank) == 2 * [["activation_offloading", "layers_per_checkpoint"]]


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
    assert two_passes(0, 1, room_for(1, 1), order) < 1e-5


def test_a_model_that_checkpoints_otherwise_is_chosen_for_anew() -> None:
    """As the trainers of a notebook do, one after another, with the same patched model."""
    model = models.patch(models.make_model("llama").train(), hf_burst.BurstConfig(**AUTO))
    batch, chosen = models.make_batch("plain", 80), list[tuple[int, float]]()
    with small_gpu(2000.0, lambda rank: 0.0, 0):
        for reentrant in (None, False, True, False):
            if reentrant is not None:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model(**batch).loss.backward()
            settings = part_of(model, MemoryRule).latest[-1].settings
            chosen.append((settings["layers_per_checkpoint"], settings["activation_offloading"]))
    assert chosen == [(1, 0.0), (4, 1.0), (1, 1.0), (4, 1.0)]


def test_weights_that_are_taken_apart_are_in_no_tiles() -> None:
    model = models.patch(models.make_model("llama").train(), hf_burst.BurstConfig(**AUTO))
    model.gradient_checkpointing_enable()
    with (
        small_gpu(room_for(1, 1), lambda rank: 0.0, 0),
        mock.patch.object(memory, "takes_weights_apart", return_value=True),
    ):
        model(**models.make_batch("plain", 80))
    assert part_of(model, MemoryRule).latest[-1].settings["tiled_mlp"] == 0
