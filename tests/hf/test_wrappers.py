"""Wrappers around a patched model: FSDP2, mixed precision, torch.compile and peft, beside one unpatched process."""

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import Trainer, TrainingArguments

import hf_burst
from hf_burst.errors import BatchError
from tests.support import models, trainers
from tests.support.ranks import RankError, RankPool, reset_accelerate
from tests.support.trainers import collate, lora_config, samples

Ranks = Callable[[int], RankPool]
STEPS, ACCUMULATION, CLIP = 3, 2, 0.1


@dataclass(frozen=True)
class Case:
    """One way to train: `data` groups of `burst` ranks, weights in `replicas` copies; `burst = 0` is one process, not
    patched and not wrapped."""

    data: int = 1
    burst: int = 2
    kind: str = "padded"
    lora: bool = False
    checkpointing: bool = False
    explicit: bool = False
    reshard: bool | int = True
    dtype: torch.dtype = torch.float32
    half: bool = False
    steps: int = STEPS
    replicas: int = 1

    @property
    def alone(self) -> "Case":
        return replace(self, data=1, burst=0, checkpointing=False, explicit=False, replicas=1)

    @property
    def ranks(self) -> int:
        return self.data * max(self.burst, 1)

    @property
    def mesh(self) -> hf_burst.BurstParallelismConfig | None:
        """What is passed to accelerate; the size of `dp_shard` follows."""
        if not self.burst:
            return None
        return hf_burst.BurstParallelismConfig(burst_size=self.burst, dp_replicate_size=self.replicas)

    @property
    def full(self) -> "Case":
        return replace(self.alone, half=False)


@cache
def mesh_of(data: int, burst: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of groups, and the flat one over which accelerate shards a model."""
    mesh = init_device_mesh("cpu", (data, burst), mesh_dim_names=("dp_shard", "cp"))
    return mesh, mesh._flatten("dp_shard_cp")


def make_trainee(lora: bool) -> nn.Module:
    model = models.make_model("llama")
    if lora:
        from peft import get_peft_model

        model = get_peft_model(model, lora_config())
    return model


def shard_weights(model: nn.Module, mesh: DeviceMesh, case: Case) -> FSDPModule:
    """FSDP2 for each layer and at the root, as accelerate applies it."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.half else MixedPrecisionPolicy()
    options = {"mesh": mesh, "reshard_after_forward": case.reshard, "mp_policy": policy}
    base = model.get_base_model() if case.lora else model
    for layer in base.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(rank: int, size: int, case: Case) -> dict[str, Any]:
    """SGD with gradient accumulation over unequal batches, and clipping."""
    model = models.make_model("llama", torch.float64) if case.dtype == torch.float64 else make_trainee(case.lora)
    model.train()
    model.config.use_cache = False  # with a cache, plain attention ignores where packed documents begin
    row, rows = 0, 2
    if case.burst:
        mesh, flat = mesh_of(case.data, case.burst)
        models.patch(model, group=mesh)
        if case.checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        row, rows = mesh.get_local_rank("dp_shard"), 2 // case.data
        shard_weights(model, flat, case)
    elif dist.is_initialized():
        shard_weights(model, init_device_mesh("cpu", (1,)), case)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batches: Iterator[list[dict[str, torch.Tensor]]] = iter(
        [samples(case.kind)[at : at + 2][row * rows : (row + 1) * rows] for at in range(0, 12, 2)]
    )
    log: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for _ in range(case.steps):
        group = [collate(next(batches)) for _ in range(ACCUMULATION)]
        if case.explicit:
            group = [hf_burst.shard_batch(batch, mesh) for batch in group]
        targets = [batch["shift_labels"] if case.explicit else batch["labels"][:, 1:] for batch in group]
        items = torch.stack([(target != -100).sum() for target in targets]).sum()
        if case.burst:
            dist.all_reduce(items)
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(group):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(index == ACCUMULATION - 1)
            if case.burst:
                loss = model(**batch, num_items_in_batch=items).loss * size
                every = loss.detach().double() / size
                dist.all_reduce(every)
                total += every
            else:
                labels = models.shifted(batch.pop("labels")).flatten()
                logits = model(**batch).logits.flatten(0, 1)
                wide = logits if case.dtype == torch.float64 else logits.float()
                loss = nn.functional.cross_entropy(wide, labels, reduction="sum") / items
                total += loss.detach()
            loss.backward()
        log["losses"].append(total.item())
        log["gradients"].append([whole(p.grad) for p in model.parameters() if p.requires_grad])
        log["norms"].append(whole(nn.utils.clip_grad_norm_(model.parameters(), CLIP)).item())
        optimizer.step()
        optimizer.zero_grad()
    log["weights"] = {name: whole(value) for name, value in model.state_dict().items()}
    return log


def compare(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found["losses"], wanted["losses"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found["norms"], wanted["norms"], rtol=tolerance, atol=tolerance)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=tolerance)


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors])


def assert_as_close(found: torch.Tensor, rough: torch.Tensor, exact: torch.Tensor) -> None:
    """An error at most twice that of a plain run in the same precision, and that one small."""
    assert 0 < (found - exact).norm() <= 2 * (rough - exact).norm()
    assert 2 * (rough - exact).norm() < 0.1 * exact.norm()


# groups of two ranks, kind, LoRA, checkpointing: with each value of each of them
SUBSET = {(1, "padded", True, False), (2, "packed", False, True)}


@pytest.mark.parametrize(
    ("data", "kind", "lora", "checkpointing"),
    [
        pytest.param(*values, marks=() if values in SUBSET else pytest.mark.full)
        for values in itertools.product((1, 2), ("padded", "packed"), (False, True), (False, True))
    ],
)
def test_fsdp2_equals_one_process(ranks: Ranks, data: int, kind: str, lora: bool, checkpointing: bool) -> None:
    case = Case(data, 2, kind, lora, checkpointing, explicit=checkpointing != lora)
    wanted = train(0, 1, case.alone)
    for found in ranks(data * 2).run(train, case):
        compare(found, wanted)
    assert min(wanted["norms"]) > CLIP, "the clipping must be felt"
    assert len(set(wanted["losses"])) == STEPS


@pytest.mark.parametrize(
    ("data", "burst", "reshard"),
    [
        (1, 3, True),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((1, 2, False), (1, 2, True), (2, 2, False))),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, 2, True), (1, 3, False))),
    ],
)
def test_fsdp2_in_float64(ranks: Ranks, data: int, burst: int, reshard: bool) -> None:
    case = Case(data, burst, "packed", checkpointing=not reshard, reshard=reshard, dtype=torch.float64)
    wanted = train(0, 1, case.alone)
    for found in ranks(data * burst).run(train, case):
        compare(found, wanted, 1e-10)


@pytest.mark.parametrize(("data", "burst"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_fsdp2_in_bfloat16(ranks: Ranks, data: int, burst: int) -> None:
    """Gradients of the first step at most twice as far off as those of FSDP2 in bf16 over one process."""
    case = Case(data, burst, "packed", half=True, steps=1)
    exact = train(0, 1, case.alone)
    rough = ranks(1).run(train, case.alone)[0]
    for found in ranks(data * burst).run(train, case):
        assert found["losses"] == pytest.approx(exact["losses"], rel=1e-2)
        assert_as_close(*(flat(run["gradients"][0]) for run in (found, rough, exact)))


def train_by_accelerate(rank: int, size: int, folder: str, case: Case, device: str) -> dict[str, Any]:
    """Trainer and accelerate's own FSDP2 (`burst = 0`: not patched, and wrapped in bf16 only).

    accelerate ignores FSDP on CPUs, so there it is told that they are GPUs once it knows the device.
    """
    reset_accelerate()
    outer = dict(os.environ)
    model = make_trainee(case.lora)
    if case.burst:
        models.patch(model)
    model.config.use_cache = False
    wrapped = bool(case.burst or case.half)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=device == "cpu",
        max_steps=case.steps,
        per_device_train_batch_size=max(1, 2 // case.data),
        gradient_accumulation_steps=min(ACCUMULATION, 2 * ACCUMULATION // case.data),
        max_grad_norm=CLIP,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        bf16=case.half,
        gradient_checkpointing=case.checkpointing,
        fsdp="full_shard" if wrapped else None,
        fsdp_config={"version": 2, "reshard_after_forward": case.reshard} if wrapped else None,
        parallelism_config=case.mesh,
    )
    assert arguments.device.type == device
    if device == "cpu" and wrapped:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    collator = hf_burst.BurstCollator(collate) if case.explicit else collate
    try:
        trainer = Trainer(model=model, args=arguments, train_dataset=samples(case.kind), data_collator=collator)
        trainer.train()
    finally:
        os.environ.clear()
        os.environ.update(outer)
    assert isinstance(trainer.model_wrapped, FSDPModule) == wrapped
    if wrapped:
        mesh = next(model.parameters()).device_mesh  # replicas, and the ranks that share one copy of the weights
        assert tuple(mesh.shape) == (case.replicas, case.ranks // case.replicas)[case.replicas == 1 :]
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "losses": [entry["loss"] for entry in steps],
        "norms": [entry["grad_norm"] for entry in steps],
        "weights": {name: whole(value).cpu() for name, value in model.state_dict().items()},
    }


def assert_half_as_close(ranks: Ranks, folder: str, case: Case, device: str) -> None:
    """What the weights moved in bf16: at most twice as far off as that of one process in bf16."""
    exact, rough = (ranks(1).run(train_by_accelerate, folder, one, device)[0] for one in (case.full, case.alone))
    start = flat(list(make_trainee(case.lora).state_dict().values()))
    wanted, plain = (flat(list(run["weights"].values())) - start for run in (exact, rough))
    for found in ranks(case.data * case.burst).run(train_by_accelerate, folder, case, device):
        assert found["losses"] == pytest.approx(exact["losses"], rel=1e-2)
        assert_as_close(flat(list(found["weights"].values())) - start, plain, wanted)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(1, 2, "padded"), marks=pytest.mark.full),
        pytest.param(Case(1, 2, "packed", lora=True, checkpointing=True, explicit=True), marks=pytest.mark.full),
        pytest.param(Case(2, 2, "packed", reshard=False), marks=pytest.mark.full),
        Case(2, 2, "padded", explicit=True, replicas=2),
        pytest.param(Case(4, 1, "packed", replicas=2), marks=pytest.mark.full),
        pytest.param(Case(4, 2, "packed", checkpointing=True, replicas=2), marks=pytest.mark.full),
    ],
    ids=["1x2", "1x2 lora", "2x2", "2 copies x1x2", "2 copies x2x1", "2 copies x2x2"],
)
def test_fsdp2_by_accelerate(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    wanted = train_by_accelerate(0, 1, str(tmp_path), case.alone, "cpu")
    for found in ranks(case.data * case.burst).run(train_by_accelerate, str(tmp_path), case, "cpu"):
        compare(found, wanted)


def lay_mesh(rank: int, size: int, replicas: int) -> tuple[int, ...]:
    """The mesh of groups of one rank under FSDP2, by the environment alone; of what size is each dimension?"""
    reset_accelerate()
    copies = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(replicas), "HF_BURST_SIZE": "1"}
    with mock.patch.dict(os.environ, {**copies, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}):
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        accelerator = Accelerator(parallelism_config=hf_burst.BurstParallelismConfig.from_env())
    return tuple(accelerator.torch_device_mesh.shape)


def test_copies_of_the_weights_by_the_environment(ranks: Ranks) -> None:
    assert ranks(4).run(lay_mesh, 2) == [(2, 2)] * 4
    with pytest.raises(RankError, match="dp_replicate_size=4 under FSDP2: each of 4 ranks"):
        ranks(4).run(lay_mesh, 4)
    with pytest.raises(RankError, match="burst_size=1 x dp_replicate_size=3 x dp_shard_size=1 is 3 ranks"):
        ranks(4).run(lay_mesh, 3)


def test_fsdp2_by_accelerate_in_bfloat16(ranks: Ranks, tmp_path: Path) -> None:
    assert_half_as_close(ranks, str(tmp_path), Case(1, 2, "packed", half=True), "cpu")


def packed(cuts: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, models.VOCABULARY, (1, sum(cuts)), generator=generator)
    labels = ids.clone()
    labels[:, : 3 + seed] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.cat([torch.arange(cut) for cut in cuts])[None]}


def recording(graphs: list[bool], name: str) -> Callable[..., Any]:
    """A backend of torch.compile that notes of each graph whether it holds attention."""

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(any(str(node.target).startswith("hf_burst.attention") for node in module.graph.nodes))
        return torch._dynamo.lookup_backend(name)(module, inputs)

    return backend


def compile_model(rank: int, size: int, how: str) -> None:
    """A compiled model beside an eager one, both patched; another packing compiles no layer anew."""
    torch._dynamo.reset()
    graphs: list[bool] = []
    backend = recording(graphs, "aot_eager")
    eager = models.patch(models.make_model("llama", torch.float64).train())
    model = compiled = models.make_model("llama", torch.float64).train()
    if how in ("patched, then wrapped", "patched, then compiled"):
        models.patch(model)
    if how == "patched, then compiled":
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    if how == "run, then patched":
        compiled(**packed((40,), 0)).loss.backward()
        model.zero_grad()
        assert not any(graphs)
        graphs.clear()
        assert models.patch(compiled) is compiled
    for index, cuts in enumerate([(40,), (7, 33), (1, 9, 30), (5, 5, 20, 10), (20, 20)]):
        batch = packed(cuts, index)
        given = hf_burst.shard_batch(batch) if how == "patched, then compiled" else batch
        wanted, loss = eager(**batch).loss, compiled(**given).loss
        wanted.backward()
        loss.backward()
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12)
        model.zero_grad()
        eager.zero_grad()
        if index == 1:  # by now the number of labels is a variable of the loss
            settled = len(graphs)
    assert graphs.count(True) == 1, f"{graphs}: the layers are one graph, and were not compiled anew"
    if Version(transformers.__version__) >= Version("5.23"):  # older ones have more graphs outside of the layers
        assert len(graphs) == settled, f"{graphs}: another packing is not another graph"
    if how == "run, then patched":
        hf_burst.unpatch_model(compiled)
        batch = packed((40,), 9)
        torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
        assert not hasattr(model, "_hf_burst")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("patched, then wrapped", marks=pytest.mark.full),
        pytest.param("patched, then compiled", marks=pytest.mark.slow),
        pytest.param("run, then patched", marks=pytest.mark.full),
    ],
)
def test_torch_compile_changes_nothing(ranks: Ranks, how: str) -> None:
    ranks(2).run(compile_model, how, timeout=400)


def train_compiled(rank: int, size: int, folder: str) -> dict[str, Any]:
    torch._dynamo.reset()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    found = trainers.finish(trainers.make_trainer(trainers.Case(kind="packed"), folder, **options))
    return {**found, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


@pytest.mark.slow
def test_trainer_compiles_a_patched_model(ranks: Ranks, tmp_path: Path) -> None:
    wanted = trainers.train(0, 1, str(tmp_path), trainers.Case(kind="packed").alone)
    for found in ranks(2).run(train_compiled, str(tmp_path), timeout=400):
        assert found["graphs"] > 0
        compare(found, wanted)


def mix_precision(rank: int, size: int, name: str) -> list[torch.Tensor]:
    """Gradients under accelerate's autocast; one process is not patched."""
    reset_accelerate()
    model = models.make_model(name).train()
    mesh = None
    if size > 1:
        mesh = hf_burst.BurstParallelismConfig()
        models.patch(model)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", parallelism_config=mesh)
    wrapped = accelerator.prepare(model)
    loss = wrapped(**models.make_batch("plain", 97), use_cache=False).loss
    assert loss.dtype == torch.float32
    accelerator.backward(loss)
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_mixed_precision_by_accelerate(ranks: Ranks, name: str) -> None:
    """qwen3's norms leave queries and keys in fp32 beside values in bf16."""
    rough_loss, *rough = mix_precision(0, 1, name)
    model = models.make_model(name).train()
    exact = models.plain_loss(model, models.make_batch("plain", 97))
    exact.backward()
    wanted = flat([parameter.grad for parameter in model.parameters()])
    for loss, *found in ranks(2).run(mix_precision, name):
        assert abs(loss - exact) <= max(2 * abs(rough_loss - exact), 1e-3)
        assert_as_close(flat(found), flat(rough), wanted)


def gradients_of(model: nn.Module, size: int) -> dict[str, torch.Tensor]:
    """As a data-parallel wrapper averages them."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for gradient in found.values() if size > 1 else ():
        dist.all_reduce(gradient)
        gradient /= size
    model.zero_grad()
    return found


def adapt(rank: int, size: int, folder: str, dora: bool, patch_first: bool) -> None:
    """An adapter through its life: trained, switched off, joined by another, saved, loaded, merged, unpatched."""
    from peft import LoraConfig, PeftModel, get_peft_model

    batch = models.make_batch("packed")
    settings = [
        LoraConfig(r=rank_, target_modules=names, init_lora_weights=False, use_dora=dora)
        for rank_, names in ((2, ["q_proj", "v_proj"]), (3, ["k_proj", "up_proj"]))
    ]

    def build(patched: bool) -> nn.Module:
        base = models.make_model("llama", torch.float64)
        torch.manual_seed(3)
        model = get_peft_model(models.patch(base) if patched and patch_first else base, settings[0])
        model.add_adapter("second", settings[1])
        return models.patch(model) if patched and not patch_first else model

    def check(model: nn.Module, plain: nn.Module) -> float:
        found, wanted = model(**batch).loss, models.plain_loss(plain, batch)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        if wanted.requires_grad:
            found.backward()
            wanted.backward()
            mine, other = gradients_of(model, size), gradients_of(plain, 1)
            assert mine.keys() == other.keys()
            for name, gradient in other.items():
                torch.testing.assert_close(mine[name], gradient, rtol=1e-10, atol=1e-10)
        return wanted.item()

    model, plain = build(True).train(), build(False).train()
    losses = [check(model, plain)]
    with model.disable_adapter(), plain.disable_adapter():
        losses.append(check(model, plain))
    for one in (model, plain):
        one.set_adapter("second")
    losses.append(check(model, plain))
    assert len(set(losses)) == 3, "the adapters must be felt"
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    loaded = PeftModel.from_pretrained(
        models.patch(models.make_model("llama", torch.float64)),
        f"{folder}/second",
        autocast_adapter_dtype=False,
    )
    with torch.no_grad():
        torch.testing.assert_close(loaded.train()(**batch).loss.item(), losses[2], rtol=1e-10, atol=1e-10)
    merged, wanted = model.merge_and_unload(), plain.merge_and_unload()
    assert merged.config._attn_implementation == "hf_burst"
    check(merged, wanted)
    hf_burst.unpatch_model(merged)
    assert "hf_burst" not in str(merged.config)
    torch.testing.assert_close(models.plain_loss(merged, batch), models.plain_loss(wanted, batch))


@pytest.mark.parametrize(
    ("dora", "patch_first"),
    [
        *((False, True), (True, False)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((False, False), (True, True))),
    ],
)
def test_the_life_of_an_adapter(ranks: Ranks, tmp_path: Path, dora: bool, patch_first: bool) -> None:
    ranks(2).run(adapt, str(tmp_path), dora, patch_first)


def deepen(kind: str) -> nn.Module:
    """A model with more layers than it was made with: one of them twice, a copy of it, or copies by peft."""
    model = models.make_model("llama", torch.float64)
    layers = model.model.layers
    if kind == "by peft":
        from peft import LoraConfig, get_peft_model

        options: dict[str, Any] = {"target_modules": "all-linear", "init_lora_weights": False}
        torch.manual_seed(3)
        return get_peft_model(model, LoraConfig(r=2, layer_replication=[(0, 2), (0, 2)], **options)).double().train()
    layers.append(layers[0] if kind == "shared" else copy.deepcopy(layers[0]))
    model.config.num_hidden_layers = len(layers)
    return model.train()


def repeat_layers(rank: int, size: int, kind: str, settings: dict[str, Any]) -> None:
    batch = models.make_batch("packed")
    plain, model = deepen(kind), models.patch(deepen(kind), models.config_of(**settings))
    if kind == "copied":
        for each, other in ((plain, models.make_model("llama", torch.float64)), (model, plain)):
            each.model.layers.append(copy.deepcopy(other.model.layers[0]))
            each.config.num_hidden_layers += 1
    if settings:
        base = model.get_base_model() if kind == "by peft" else model
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
    found, wanted = model(**batch).loss, models.plain_loss(plain, batch)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    found.backward()
    wanted.backward()
    mine, other = gradients_of(model, size), gradients_of(plain, 1)
    assert mine.keys() == other.keys() != set()
    for name, gradient in other.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-10, atol=1e-12)
    hf_burst.unpatch_model(model)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    assert not any("hf_burst" in str(config._attn_implementation) for config in configs if config is not None)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(kind, settings, marks=[pytest.mark.full] * (bool(settings) != always))
        for kind, always in (("shared", True), ("copied", False), ("by peft", True))
        for settings in ({}, {"layers_per_checkpoint": 2, "tiled_mlp": 7})
    ],
)
def test_layers_that_are_copies(ranks: Ranks, kind: str, settings: dict[str, Any]) -> None:
    """The config of a copied layer is a copy, too."""
    ranks(2).run(repeat_layers, kind, settings)


def learn_prompts(rank: int, size: int) -> None:
    """RingKind a patched model: a prompt of embeddings is part of the full batch, a prefix of keys is refused."""
    from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model

    batch = models.make_batch("right")
    for settings in (
        PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
        PromptEncoderConfig(num_virtual_tokens=5, task_type="CAUSAL_LM", encoder_hidden_size=16),
    ):
        torch.manual_seed(2)
        plain = get_peft_model(models.make_model("llama", torch.float64), settings).double().train()
        model = get_peft_model(models.patch(models.make_model("llama", torch.float64)), settings)
        model.double().train().load_state_dict(plain.state_dict())
        wanted, found = plain(**batch).loss, model(**batch).loss
        wanted.backward()
        found.backward()
        torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=1e-6)
        mine, other = gradients_of(model, size), gradients_of(plain, 1)
        assert mine.keys() == other.keys()
        assert len(other) > 0
        for name, gradient in other.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-5, atol=1e-7)
        with pytest.raises(BatchError, match="position_ids of a sharded batch is missing"):
            model(**hf_burst.shard_batch(batch))
    model = get_peft_model(
        models.patch(models.make_model("llama")),
        PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    ).train()
    with pytest.raises(BatchError, match="in training or with labels cannot be sharded"):
        model(**batch)


def test_prompt_learning_around_a_patched_model(ranks: Ranks) -> None:
    ranks(2).run(learn_prompts)
