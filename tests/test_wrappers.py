"""Wrappers around a patched model: FSDP2, mixed precision, torch.compile and peft, beside one unpatched process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import hf_burst
from tests import models
from tests.ranks import RankPool
from tests.test_training import collate, make_trainee, samples

Ranks = Callable[[int], RankPool]
STEPS, ACCUMULATION, CLIP = 3, 2, 0.1


@dataclass(frozen=True)
class Case:
    """One way to train: `burst = 0` is one process, not patched and not wrapped."""

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

    @property
    def alone(self) -> "Case":
        return replace(self, data=1, burst=0, checkpointing=False, explicit=False)


@cache
def mesh_of(data: int, burst: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of groups, and the flat one over which accelerate shards a model."""
    mesh = init_device_mesh("cpu", (data, burst), mesh_dim_names=("dp_shard", "cp"))
    return mesh, mesh._flatten("dp_shard_cp")


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
    if case.dtype == torch.float64:
        model = models.make_model("llama", torch.float64)
    else:
        model = make_trainee(case.kind, case.lora)
    model.train()
    model.config.use_cache = False  # with a cache, plain attention ignores where packed documents begin
    row, rows = 0, 2
    if case.burst:
        mesh, flat = mesh_of(case.data, case.burst)
        hf_burst.patch_model(model, mesh=mesh)
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


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(("data", "burst"), [(1, 2), (2, 2)])
def test_fsdp2_equals_one_process(
    ranks: Ranks, data: int, burst: int, kind: str, lora: bool, checkpointing: bool
) -> None:
    case = Case(data, burst, kind, lora, checkpointing, explicit=checkpointing != lora)
    wanted = train(0, 1, case.alone)
    for found in ranks(data * burst).run(train, case):
        compare(found, wanted)
    assert min(wanted["norms"]) > CLIP, "the clipping must be felt"
    assert len(set(wanted["losses"])) == STEPS


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize(("data", "burst"), [(1, 2), (2, 2), (1, 3)])
def test_fsdp2_in_float64(ranks: Ranks, data: int, burst: int, reshard: bool) -> None:
    case = Case(data, burst, "packed", checkpointing=not reshard, reshard=reshard, dtype=torch.float64)
    wanted = train(0, 1, case.alone)
    for found in ranks(data * burst).run(train, case):
        compare(found, wanted, 1e-10)


@pytest.mark.parametrize(("data", "burst"), [(1, 2), (2, 2)])
def test_fsdp2_in_bfloat16(ranks: Ranks, data: int, burst: int) -> None:
    """Gradients of the first step at most twice as far off as those of FSDP2 in bf16 over one process."""
    case = Case(data, burst, "packed", half=True, steps=1)
    exact = train(0, 1, case.alone)
    rough = ranks(1).run(train, case.alone)[0]
    for found in ranks(data * burst).run(train, case):
        assert found["losses"] == pytest.approx(exact["losses"], rel=1e-2)
        assert_as_close(*(flat(run["gradients"][0]) for run in (found, rough, exact)))


def packed(cuts: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, models.VOCABULARY, (1, sum(cuts)), generator=generator)
    labels = ids.clone()
    labels[:, : 3 + seed] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.cat([torch.arange(cut) for cut in cuts])[None]}


def compile_model(rank: int, size: int, how: str) -> None:
    """A compiled model beside an eager one, both patched; another packing compiles no layer anew."""
    torch._dynamo.reset()
    graphs: list[bool] = []  # whether a graph holds attention

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(any(str(node.target).startswith("hf_burst.attention") for node in module.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    eager = hf_burst.patch_model(models.make_model("llama", torch.float64).train())
    model = compiled = models.make_model("llama", torch.float64).train()
    if how in ("patched, then wrapped", "patched, then compiled"):
        hf_burst.patch_model(model)
    if how == "patched, then compiled":
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    if how == "run, then patched":
        compiled(**packed((40,), 0)).loss.backward()
        model.zero_grad()
        assert not any(graphs)
        graphs.clear()
        assert hf_burst.patch_model(compiled) is compiled
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
        if index == 0:
            assert graphs == [True, False], f"{graphs}: the layers are one graph, the sum of the loss another"
    assert graphs[2:] == [False], "another number of labels is a variable of the loss, and no layer was compiled anew"
    if how == "run, then patched":
        hf_burst.unpatch_model(compiled)
        batch = packed((40,), 9)
        torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
        assert not hasattr(model, "_hf_burst")


@pytest.mark.parametrize("how", ["patched, then wrapped", "patched, then compiled", "run, then patched"])
def test_torch_compile_changes_nothing(ranks: Ranks, how: str) -> None:
    ranks(2).run(compile_model, how, timeout=400)
