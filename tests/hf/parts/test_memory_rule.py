"""`BurstConfig(memory="auto")` where a model is trained: what a step is given, and what it is measured by."""

import copy
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import hf_burst
from hf_burst.config import KernelName, Memory
from hf_burst.errors import ConfigError
from hf_burst.hf import attention
from hf_burst.hf.forward_pass import Checkpoints
from hf_burst.hf.parts import memory
from hf_burst.hf.parts.allocator import RoomForKernels, expand_segments
from hf_burst.hf.parts.memory import MemoryRule, Step
from hf_burst.hf.view import ModelView
from hf_burst.kernels.ffpa import FfpaKernel
from tests.hf.parts.test_checkpointing import counted, expected_gradients
from tests.hf.test_patch import group_mean, part_of
from tests.support import models
from tests.support.ranks import RankError, RankPool
from tests.support.small_gpu import as_estimated, room_for, small_gpu

Ranks = Callable[[int], RankPool]
AUTO: dict[str, Any] = {}  # the default
MANUAL: dict[str, Any] = {"memory": "manual"}


def room(level: int, ranks: int = 1, groups: int = 1) -> float:
    """Bytes of a GPU on which 160 tokens are given a level by the first step."""
    return room_for(level, models.make_model("llama"), 160, ranks, groups)


def test_kernels_that_are_tuned_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, set_to = torch.device("cuda", 0), [1.0]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: set_to[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: set_to.append(share))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 19 * 2**30)
    room = RoomForKernels(gpu)
    assert set_to == [1.0, 72 / 80], "but for 1 GiB of others, and 7 for the kernels"
    room.end()
    assert set_to[-1] == 1.0
    room = RoomForKernels(gpu)
    set_to.append(0.5)
    room.end()
    assert set_to[-1] == 0.5, "a user has set it since"
    assert RoomForKernels(gpu).share == 0.5


def train(rank: int, size: int, room: float, config: dict[str, Any]) -> tuple[list[Memory], float]:
    """What is chosen for two lengths, and the largest error of a gradient beside one process."""
    model, error, chosen = models.make_model("llama").train(), 0.0, []
    batches = [models.make_batch("plain", length) for length in (24, 80)]
    expected = []
    for batch in batches:
        models.plain_loss(model, batch).backward()
        expected.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    models.patch(model, hf_burst.BurstConfig(**config))
    model.gradient_checkpointing_enable()
    with small_gpu(room):
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
            chosen.append(latest.settings if latest else Memory())
    return chosen, error


def test_a_step_is_made_to_fit(ranks: Ranks) -> None:
    for gpu, config in ((room(0, 2), AUTO), (room(2, 2), MANUAL), (room(2, 2), {"memory": Memory(tiled_mlp=3)})):
        for chosen, error in ranks(2).run(train, gpu, config):
            assert chosen == [Memory(), Memory()], "settings that are given stay as they are, and nothing is chosen"
            assert error < 1e-5
    for chosen, error in ranks(2).run(train, room(1, 2), AUTO):
        assert chosen == [Memory(), Memory(tiled_mlp=5)]
        assert error < 1e-5
    for (_, long), error in ranks(2).run(train, 2000.0, AUTO):
        assert long.tiled_mlp == 5
        assert long.head_groups > 1
        assert error < 1e-5


def test_one_process_says_what_it_does(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> list[tuple[int, str]]:
        records = [record for record in caplog.records if record.name.endswith("memory")]
        return [(record.levelno, record.getMessage()) for record in records]

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)  # which recipes set
    with caplog.at_level(logging.INFO, "hf_burst"):
        train(0, 1, room(1), AUTO)
        assert told() == [(logging.INFO, "hf_burst trains 2 x 80 tokens with tiled_mlp=5")]
        train(0, 1, 1200.0, AUTO)
    level, text = told()[-1]
    assert (level, "may run out of memory" in text, "24 tokens" in text) == (logging.WARNING, True, True)
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    with pytest.raises(ConfigError, match="'auto', 'manual'"):
        hf_burst.BurstConfig(memory="little")


def test_the_allocator_is_asked_for_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append, raising=False)
    for given, wanted, settings in (
        ("", True, ["expandable_segments:True"]),
        ("pinned_use_cuda_host_register:True", True, ["pinned_use_cuda_host_register:True,expandable_segments:True"]),
        ("expandable_segments:True", True, []),
        ("expandable_segments:False", False, []),
        ("backend:cudaMallocAsync", False, []),
    ):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
        assert expand_segments() is wanted
        assert asked == settings
        asked.clear()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    assert not expand_segments()
    assert not asked, "vLLM's pools cannot have them"


@pytest.mark.parametrize(
    ("kernel", "size", "ffpa"), [("auto", 512, True), ("auto", 64, False), ("torch_efficient", 512, False)]
)
def test_ffpa_is_counted_where_it_computes(
    monkeypatch: pytest.MonkeyPatch, kernel: KernelName, size: int, ffpa: bool
) -> None:
    monkeypatch.setattr(FfpaKernel, "unavailable", lambda *_: None)
    sizes = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=size)
    view = ModelView(model := LlamaForCausalLM(sizes))
    config, group = hf_burst.BurstConfig(kernel=kernel), SimpleNamespace(size=1)
    call: Any = SimpleNamespace(view=view, config=config, group=group, device=model.device)
    assert MemoryRule(config)._rule(call, Checkpoints(), []).estimate.ffpa == ffpa


def chooses(**settings: Any) -> Any:
    """A rule that gives every step these settings."""
    return mock.patch.object(memory, "levels_for", return_value=(Memory(**settings),))


def keep_a_part(rank: int, size: int, keep: float, chunking: str) -> list[bool]:
    """With memory for half of the attention: whether it could be kept of batches of two lengths."""
    model, able = models.make_model("llama", torch.float64).train(), []
    batches = [models.make_batch("plain", length) for length in (40, 43)]
    wanted = [expected_gradients(copy.deepcopy(model), batch) for batch in batches]
    models.patch(model, hf_burst.BurstConfig(chunking=chunking, schedule="kv_ring"))
    model.gradient_checkpointing_enable()

    with small_gpu(2**30), chooses(attention_keep=keep):
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
    with (
        small_gpu(2**30),
        chooses(head_groups=2),
        mock.patch.object(attention, "attend", wraps=attention.attend) as attend,
    ):
        model(**models.make_batch("plain"))
    requests = [call.args[6] for call in attend.call_args_list]
    assert [request.head_groups for request in requests] == [2] * model.config.num_hidden_layers


def measured(rank: int, size: int, wrong: float, room: float) -> list[Memory]:
    """The settings of steps that take so many times what is estimated, more on the last rank."""
    model, found = models.patch(models.make_model("llama").train()), []
    model.gradient_checkpointing_enable()

    def takes(step: Step) -> float:
        activations = as_estimated(step) - step.rule.gradients
        return step.rule.gradients + activations * (wrong if rank == size - 1 else 1)

    with small_gpu(room, takes):
        for length in (80, 80, 80, 80, 24):
            model(**models.make_batch("plain", length)).loss.backward()
            found.append(part_of(model, MemoryRule).latest.settings)
            model.zero_grad()
    return found


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_steps_are_measured(ranks: Ranks, size: int) -> None:
    """What the fullest rank took counts for all."""
    gpu = room(0, size)
    found = [measured(0, 1, wrong, gpu) for wrong in (1, 2.2)] if size == 1 else []
    for results in (ranks(2).run(measured, wrong, gpu) for wrong in (1, 2.2)) if size == 2 else ():
        assert results[0] == results[1], "the same on all ranks"
        found.append(results[0])
    assert found[0] == [Memory()] * 5
    first, second, third, fourth, short = found[1]
    assert (first, short) == (Memory(), Memory())
    assert second != Memory()
    assert third == fourth != Memory(), "which what the second took has settled"


def test_a_pass_whose_graph_waits_is_not_measured() -> None:
    """Only the last of several passes before a backward pass tells what one takes."""
    model = models.patch(models.make_model("llama").train())
    with small_gpu(2**30):
        losses = [model(**models.make_batch("plain", length)).loss for length in (80, 24)]
        (rule,) = part_of(model, MemoryRule).rules.values()
        assert rule.known == {}
        sum(losses).backward()
        assert [taken.size.tokens for taken in rule.known.values()] == [2 * 24]
        model(**models.make_batch("plain", 24)).logits.float().sum().backward()
    assert {added for _, added in rule.known} == {False, True}, "there were gradients before"


def test_every_way_of_training_is_known_by_itself() -> None:
    model = models.patch(models.make_model("llama").train())
    with small_gpu(2**30):
        for checkpoints, learns in ((False, True), (True, True), (True, False)):
            if checkpoints:
                model.gradient_checkpointing_enable()
            model.get_input_embeddings().requires_grad_(learns)
            for _ in range(2):
                model(**models.make_batch("plain", 24)).loss.backward()
    rules = list(part_of(model, MemoryRule).rules.values())
    assert [rule.estimate.checkpointing for rule in rules] == [False, True, True]
    table = model.get_input_embeddings().weight.nbytes
    assert [rules[0].gradients - rule.gradients for rule in rules] == [0, 0, table]


def run_short(rank: int, size: int) -> tuple[list[Memory], list[str]]:
    """The settings of five steps, of which the second runs out of memory; and what the error advises."""
    model, found, notes = models.patch(models.make_model("llama").train()), list[Memory](), []
    model.gradient_checkpointing_enable()
    long, short = (models.make_batch("plain", length) for length in (80, 24))
    with small_gpu(room(0, size)) as gpu:
        for step, batch in enumerate((long, long, long, short, long)):
            model(**batch).loss.backward()
            model.zero_grad()
            part = part_of(model, MemoryRule)
            found.append(part.latest.settings)
            if step == 1:
                gpu.errors += 1
                problem = torch.OutOfMemoryError("CUDA out of memory.")
                part.advise(problem)
                notes += problem.__notes__
    return found, notes


def test_a_step_that_ran_out_is_followed_by_a_more_frugal_one(caplog: pytest.LogCaptureFixture) -> None:
    found, notes = run_short(0, 1)
    assert found[:2] == [Memory(), Memory()]
    assert Memory() not in (found[2], found[4]), "it is measured, and may be cheaper, but for what ran out"
    assert found[3] == Memory(), "of fewer tokens"
    assert f"run the step again, and it is trained with {memory.named(found[2])}" in notes[0]
    (said,) = [record.getMessage() for record in caplog.records if "ran out of memory" in record.getMessage()]
    assert "with nothing changed" in said


def test_over_ranks_the_error_names_the_settings_to_take(ranks: Ranks) -> None:
    for found, notes in ranks(2).run(run_short):
        settings = ", ".join(f"{name}={getattr(found[2], name)!r}" for name in memory.SETTINGS)
        assert f"start again with BurstConfig(memory=hf_burst.Memory({settings}))" in notes[0]


def test_an_error_of_an_evaluation_says_what_else_helps() -> None:
    model, problem = models.patch(models.make_model("llama")), torch.OutOfMemoryError("CUDA out of memory.")
    with small_gpu(2**30), torch.no_grad():
        model(**models.make_batch("plain"))
        part_of(model, MemoryRule).advise(problem)
    assert "gradient_checkpointing=True" in problem.__notes__[0]


def test_an_evaluation_with_longer_rows_has_tiles() -> None:
    model, found = models.patch(models.make_model("llama")), []
    with small_gpu(2**30) as gpu, mock.patch.object(attention, "attend", wraps=attention.attend) as attend:
        for length in (24, 80):
            model(**models.make_batch("plain", 24)).loss.backward()
            (rule,) = part_of(model, MemoryRule).rules.values()
            gpu.room = 4.1 * 24 * rule.estimate.working(Memory())
            with torch.no_grad():
                attend.reset_mock()
                model(**models.make_batch("plain", length))
                found.append({call.args[6].head_groups for call in attend.call_args_list})
            gpu.room = 2**30
    assert found[0] == {1}
    assert found[1] != {1}


def two_groups(rank: int, size: int, room: float, config: Any) -> tuple[list[Memory], float]:
    """The settings of two steps of two groups of ranks that share weights, of which one has longer batches; and the
    largest error of a gradient."""
    model = models.make_model("llama").train()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))
    group, reference, found, error = rank // (size // 2), copy.deepcopy(model), [], 0.0
    models.patch(model, config[group] if isinstance(config, list) else config, mesh)
    model.gradient_checkpointing_enable()
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh._flatten("shards"))
    batches = [models.make_batch("plain", length) for length in ((80, 24) if group else (24, 24))]
    with small_gpu(room):
        for batch in batches:
            model(**batch).loss.backward()
            found.append(part_of(model, MemoryRule).latest.settings)
            for other in range(2):
                models.plain_loss(
                    reference, models.make_batch("plain", 80 if other and batch is batches[0] else 24)
                ).backward()
            for weight, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                error = max(error, float((weight.grad.full_tensor() - wanted.grad / 2).abs().max()))
            model.zero_grad()
            reference.zero_grad()
    (rule,) = part_of(model, MemoryRule).rules.values()
    assert rule.sharded >= sum(weight.to_local().nbytes for weight in model.parameters())
    return found, error


def test_groups_that_share_weights_gather_layers_in_one_order(ranks: Ranks) -> None:
    for found, error in ranks(4).run(two_groups, room(1, 2, groups=2), None):
        assert found == [Memory(tiled_mlp=5), Memory()], "also of the group whose batch is short"
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
    with small_gpu(2**30):
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
    with small_gpu(room):
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
    assert two_passes(0, 1, room(1), order) < 1e-5


def test_a_model_that_checkpoints_otherwise_is_chosen_for_anew() -> None:
    """As the trainers of a notebook do, one after another, with the same patched model."""
    model = models.patch(models.make_model("llama").train(), hf_burst.BurstConfig(**AUTO))
    batch, chosen = models.make_batch("plain", 80), list[tuple[bool, float]]()
    with small_gpu(2000.0):
        for reentrant in (None, False, True, False):
            if reentrant is not None:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model(**batch).loss.backward()
            settings = part_of(model, MemoryRule).latest.settings
            chosen.append((settings.layers_per_checkpoint > 1, settings.activation_offloading))
    assert [share for _, share in chosen] == [0.0, 1.0, 1.0, 1.0]
    assert not chosen[0][0]
    assert not chosen[2][0]


def test_weights_that_are_taken_apart_are_in_no_tiles() -> None:
    model = models.patch(models.make_model("llama").train(), hf_burst.BurstConfig(**AUTO))
    model.gradient_checkpointing_enable()
    with small_gpu(room(1)), mock.patch.object(memory, "takes_weights_apart", return_value=True):
        model(**models.make_batch("plain", 80))
    assert part_of(model, MemoryRule).latest.settings.tiled_mlp == 0
