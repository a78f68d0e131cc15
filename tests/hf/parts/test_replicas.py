"""What ranks must have in common beside their batches: weights, averaged gradients, autocast, and one another."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hf_burst
from hf_burst.errors import ConfigError, RankMismatchError
from hf_burst.hf.batches import sharded
from hf_burst.hf.batches.sharded import sum_of_bits
from hf_burst.hf.groups import PATCH
from hf_burst.hf.parts.replicas import Replicas, check_averaged
from hf_burst.hf.view import ModelView
from hf_burst.ranks.group import ContextGroup
from tests.support import models
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
ROOT = Path(__file__).parents[3]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An update of a training loop."""
    model(**models.make_batch("plain")).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def refused(ranks: RankPool, function: Callable[..., Any], *arguments: Any) -> list[str]:
    """What each rank says; none of them may be silent."""
    with pytest.raises(RankError) as caught:
        ranks.run(function, *arguments, timeout=60)
    assert all(isinstance(error, ConfigError | RankMismatchError) for error in caught.value.errors)
    return [str(error) for error in caught.value.errors]


def train_unprepared(rank: int, size: int) -> None:
    model = hf_burst.patch_model(models.make_model("llama").train())
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("size", [2, 3])
def test_a_model_that_was_not_prepared_is_not_trained(ranks: Ranks, size: int) -> None:
    for sentence in refused(ranks(size), train_unprepared):
        assert "Nothing averages the gradients" in sentence
        assert "accelerator.prepare(model, optimizer)" in sentence
        assert "gradients='manual'" in sentence


def evaluate_and_differentiate(rank: int, size: int) -> None:
    """Passes that train nothing need nobody who averages."""
    model = hf_burst.patch_model(models.make_model("llama"))
    batch = models.make_batch("plain")
    model.eval()(**batch).loss.backward()  # saliency
    with torch.no_grad():
        model.train()(**batch)
    model.requires_grad_(False)(**batch)


def test_passes_that_do_not_train_are_served(ranks: Ranks) -> None:
    ranks(2).run(evaluate_and_differentiate)


def train_wrapped(rank: int, size: int, wrapper: str) -> float:
    """Two updates under something that averages, and the sum of all weights."""
    model = hf_burst.patch_model(models.make_model("llama").train())
    wrapped: torch.nn.Module = model
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    elif wrapper == "compiled ddp":
        wrapped = torch.compile(DistributedDataParallel(model), backend="eager")
    elif wrapper == "fsdp":
        fully_shard(model)
    elif wrapper == "hook":

        def average(parameter: torch.nn.Parameter) -> None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= size

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(average)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        step(wrapped, optimizer)
    wrapped(**models.make_batch("plain"))
    assert all(part.settled for part in getattr(model, PATCH).parts if isinstance(part, Replicas))
    return sum(float(parameter.detach().sum()) for parameter in model.parameters())


@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("compiled ddp", marks=pytest.mark.full), "fsdp", "hook"])
def test_whoever_averages_gradients_is_recognised(ranks: Ranks, wrapper: str) -> None:
    first, second = ranks(2).run(train_wrapped, wrapper)
    assert first == second


def train_unfrozen(rank: int, size: int, when: str) -> float:
    """A layer is unfrozen by hand, as a callback does it, and the weights of all ranks."""
    model = hf_burst.patch_model(models.make_model("llama").train())
    first, second = model.model.layers[:2]
    first.requires_grad_(when == "frozen afterwards")
    wrapped: torch.nn.Module = model
    if when == "fsdp":
        fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    if when == "before the first pass":
        first.requires_grad_(True)
    elif when == "frozen afterwards":
        first.requires_grad_(False)
    step(wrapped, optimizer)
    before = whole(first.self_attn.q_proj.weight).clone()
    first.requires_grad_(True)
    second.requires_grad_(when != "in turn")
    for _ in range(2):
        step(wrapped, optimizer)
    assert not torch.equal(before, whole(first.self_attn.q_proj.weight))
    wrapped(**models.make_batch("plain"))
    return sum(float(whole(parameter).sum()) for parameter in model.parameters())


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


@pytest.mark.parametrize("when", ["before the first pass", "later", "in turn"])
def test_layers_unfrozen_after_ddp_was_made_are_refused(ranks: Ranks, when: str) -> None:
    """DDP does not average their gradients."""
    for sentence in refused(ranks(2), train_unfrozen, when):
        assert "differ after an update" in sentence
        assert "ddp_find_unused_parameters=True" in sentence


@pytest.mark.parametrize("when", ["frozen afterwards", "fsdp"])
def test_the_ways_out_for_layers_that_are_unfrozen_later(ranks: Ranks, when: str) -> None:
    first, second = ranks(2).run(train_unfrozen, when)
    assert first == second


def train_partitioned(rank: int, size: int) -> None:
    """As ZeRO-3 leaves weights: no rank holds all of one, so there is nothing to compare again."""
    model = models.patch(models.make_model("llama").train())
    for parameter in model.parameters():
        parameter.ds_id = 0
    model(**models.make_batch("plain"))
    (part,) = (part for part in getattr(model, PATCH).parts if isinstance(part, Replicas))
    assert part.settled


def test_weights_that_are_partitioned_are_compared_once(ranks: Ranks) -> None:
    ranks(2).run(train_partitioned)


def test_deepspeed_need_not_leave_a_hook() -> None:
    model, group = models.make_model("llama").train(), ContextGroup(0, 2, "pair", (0, 1))
    for kind in (DistributedType.DEEPSPEED, DistributedType.NO):
        allowed = contextlib.nullcontext() if kind == DistributedType.DEEPSPEED else pytest.raises(ConfigError)
        with mock.patch("hf_burst.hf.parts.replicas.AcceleratorState") as state, allowed:
            state._shared_state = {"distributed_type": kind}
            check_averaged(ModelView(model), list(model.parameters()), group)


def train_in_pairs(rank: int, size: int) -> None:
    """Wrapped for the other rank of a pair, while all four share the sequence."""
    model = hf_burst.patch_model(models.make_model("llama").train())
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    wrapped = DistributedDataParallel(model, process_group=pairs[rank // 2])
    step(wrapped, torch.optim.SGD(model.parameters(), lr=0.1))


def test_gradients_averaged_over_too_few_ranks_are_refused(ranks: Ranks) -> None:
    for sentence in refused(ranks(4), train_in_pairs):
        assert "[0, 1, 2, 3] share a sequence" in sentence


def train_by_hand(rank: int, size: int, averages: bool, warmup: bool) -> tuple[int, str]:
    """A loop that averages by itself, or only says so: updates that changed weights, and the error that ended it."""
    model = models.patch(models.make_model("llama").train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if warmup else 0.1)
    updates = 0
    for index in range(4):
        for _ in range(2):  # accumulated
            try:
                model(**models.make_batch("plain")).loss.backward()
            except RankMismatchError as problem:
                return updates, str(problem)
        for parameter in model.parameters() if averages else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        updates += optimizer.param_groups[0]["lr"] > 0
        if index == 1:
            optimizer.param_groups[0]["lr"] = 0.1
    return updates, ""


@pytest.mark.parametrize("warmup", [pytest.param(False, marks=pytest.mark.full), True])
def test_weights_that_drift_apart_are_found_before_the_second_update(ranks: Ranks, warmup: bool) -> None:
    assert ranks(3).run(train_by_hand, True, warmup) == [(2 if warmup else 4, "")] * 3
    for updates, sentence in ranks(3).run(train_by_hand, False, warmup):
        assert updates == 1
        assert "weights (checksum): rank 0 has " in sentence
        assert "differ after an update" in sentence


def other_seed(rank: int) -> torch.nn.Module:
    return models.make_model("llama", seed=rank)


def other_frozen_weight(rank: int) -> torch.nn.Module:
    model = models.make_model("llama")
    model.lm_head.requires_grad_(False)
    if rank:
        with torch.no_grad():
            model.lm_head.weight[3, 3] += 1e-3
    return model


def other_layers(rank: int) -> torch.nn.Module:
    return models.llama_with({"rope_type": "default"}, num_hidden_layers=2 + rank)


@pytest.mark.parametrize("make", [other_seed, other_frozen_weight, other_layers])
@pytest.mark.parametrize("training", [False, True])
def test_weights_that_differ_are_refused_at_once(ranks: Ranks, make: Callable[..., Any], training: bool) -> None:
    for sentence in refused(ranks(2), pass_with, make, training):
        assert "begin with the same weights" in sentence
        assert "BurstParallelismConfig" not in sentence
        assert "weights (checksum)" in sentence


def pass_with(rank: int, size: int, make: Callable[..., Any], training: bool) -> None:
    models.patch(make(rank).train(training))(**models.make_batch("plain"))


def train_again(rank: int, size: int, kind: str) -> None:
    """Two updates by DDP, and then some more of the bare model, of a new adapter, or in evaluation mode."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(models.make_model("llama"), settings)
    config = hf_burst.BurstConfig(gradients="manual" if kind == "adapter" else "averaged_by_wrapper")
    hf_burst.patch_model(model, config).train()
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        step(wrapped, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped(**models.make_batch("plain"))
    if kind == "adapter":
        torch.manual_seed(rank)
        model.add_adapter("second", settings)
        model.set_adapter("second")
    model.train(kind != "evaluation")
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    for _ in range(2):
        step(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "sentence"), [("bare", "Nothing averages the gradients"), ("adapter", "begin with the same weights")]
)
def test_a_second_training_is_checked_as_the_first(ranks: Ranks, kind: str, sentence: str) -> None:
    for said in refused(ranks(2), train_again, kind):
        assert sentence in said


def train_in_evaluation_mode(rank: int, size: int) -> tuple[int, str]:
    """Without dropout, and without anybody who averages: the updates that were made, and the error that ended them."""
    model = hf_burst.patch_model(models.make_model("llama").eval())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(3):
        try:
            step(model, optimizer)
        except RankMismatchError as problem:
            return update, str(problem)
    return 3, ""


def test_weights_that_drift_apart_in_evaluation_mode_are_found(ranks: Ranks) -> None:
    for updates, sentence in ranks(2).run(train_in_evaluation_mode):
        assert updates == 1
        assert "differ after an update" in sentence


def train_under_fsdp1(rank: int, size: int, original: bool) -> None:
    model = hf_burst.patch_model(models.make_model("llama").train())
    layers = ModuleWrapPolicy({type(model.model.layers[0])})
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=layers, use_orig_params=original, device_id="cpu")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(3):
        step(wrapped, optimizer)


@pytest.mark.parametrize("original", [False, True])
def test_shards_of_fsdp1_are_not_compared(ranks: Ranks, original: bool) -> None:
    ranks(2).run(train_under_fsdp1, original)


def differ(rank: int, size: int, how: str) -> None:
    """Weights in fp64 that come from bf16, of which one differs; or the same in another order of the layers."""
    model = models.make_model("llama").bfloat16().double()
    with torch.no_grad():
        if how == "one":
            model.lm_head.weight[0, 0] = rank + 1
        elif rank == 1:
            first, second = (layer.self_attn.q_proj for layer in model.model.layers)
            first.weight, second.weight = second.weight, first.weight
    models.patch(model)(**models.make_batch("plain"))


@pytest.mark.parametrize("how", ["one", "order"])
def test_the_weights_that_differ_are_named(ranks: Ranks, how: str) -> None:
    for sentence in refused(ranks(2), differ, how):
        assert "weights (checksum): rank 0 has " in sentence


def test_without_a_compiler_torch_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hf_burst.hf.batches.fused_sums", None)
    assert sharded._fused_sums.__wrapped__(torch.device("cpu")) is None


def test_a_checksum_sees_order_and_takes_little_memory() -> None:
    weight = torch.randn(7, 5, dtype=torch.bfloat16)
    assert sum_of_bits(weight) == sum_of_bits(weight.clone())
    assert sum_of_bits(weight) == sum_of_bits(torch.cat([weight[:1], weight])[1:]), "wherever it lies in memory"
    assert sum_of_bits(weight) != sum_of_bits(weight.flip(0))
    assert sum_of_bits(weight) != sum_of_bits(-weight)
    assert sum_of_bits(torch.zeros(5)) != sum_of_bits(torch.zeros(6)), "a number more in the same eight bytes"
    few = torch.tensor([12345, -4354685564936857700])  # which shifts of signed numbers would mix to the same
    assert sum_of_bits(few[:1]) != sum_of_bits(few[1:])
    for piece in (1, 4, 5):  # a row is 5
        with mock.patch.object(sharded, "_PIECE", piece):
            assert sum_of_bits(weight) != sum_of_bits(weight.flip(0))
            assert sum_of_bits(weight) == sum_of_bits(weight.clone())


def adapt_after_a_pass(rank: int, size: int) -> None:
    """Adapters that come after the first pass are compared as well."""
    from peft import LoraConfig, get_peft_model

    base = models.patch(models.make_model("llama").eval())
    base(**models.make_batch("plain"))
    torch.manual_seed(rank)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).train()
    model(**models.make_batch("plain"))


def test_adapters_that_differ_are_refused(ranks: Ranks) -> None:
    for sentence in refused(ranks(2), adapt_after_a_pass):
        assert "begin with the same weights" in sentence


def under_autocast(rank: int, size: int, dtypes: tuple[torch.dtype | None, ...]) -> None:
    dtype = dtypes[rank]
    model = models.patch(models.make_model("llama").train())
    with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
        model(**models.make_batch("plain")).loss.backward()


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float16), (torch.bfloat16, None)])
def test_autocast_must_be_the_same_on_all_ranks(ranks: Ranks, dtypes: tuple[torch.dtype | None, ...]) -> None:
    for sentence in refused(ranks(2), under_autocast, dtypes):
        assert "autocast: rank 0 has torch.bfloat16, rank 1 has" in sentence


def without_cpu(rank: int, size: int, kind: str) -> None:
    """As under torchrun on CPUs: accelerate takes each process for the only one."""
    model = hf_burst.patch_model(models.make_model("llama").train())
    mesh = None if kind == "no mesh" else hf_burst.BurstParallelismConfig()
    with mock.patch.dict(os.environ):
        del os.environ["ACCELERATE_USE_CPU"]
        Accelerator(parallelism_config=mesh).prepare(model)(**models.make_batch("plain"))


@pytest.mark.parametrize("kind", ["mesh", "no mesh"])
def test_processes_that_accelerate_does_not_know_of_are_refused(ranks: Ranks, kind: str) -> None:
    for sentence in refused(ranks(2), without_cpu, kind):
        assert "accelerate knows of 1 of the 2 processes" in sentence
        assert "ACCELERATE_USE_CPU=1" in sentence


SCRIPT = """
import hf_burst
from tests.support import models
from transformers import Trainer, TrainingArguments

batch = models.make_batch("plain")
model = hf_burst.patch_model(models.make_model("llama").train())
try:
    model(**batch)
except ValueError as problem:
    print(problem, flush=True)
arguments = TrainingArguments("output", parallelism_config=hf_burst.BurstParallelismConfig())
Trainer(model, arguments, train_dataset=[{name: value[0] for name, value in batch.items()}]).train()
"""


@pytest.mark.full
@pytest.mark.slow
def test_torchrun_on_cpus_is_refused_with_the_line_that_mends_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, "script.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert run.returncode
    assert "Make the Accelerator before the first batch" in run.stdout
    assert "accelerate knows of 1 of the 2 processes" in run.stderr
