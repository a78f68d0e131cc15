"""Under FSDP2 a loss keeps its dtype, and a backward pass ends behind what was gathered."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import DistributedType, PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import hf_burst
from hf_burst.hf.parts import fsdp2
from hf_burst.hf.view import is_sharded_head
from tests.hf.test_wrappers import make_trainee, whole
from tests.support import models
from tests.support.ranks import RankPool, reset_accelerate
from tests.support.tiny_models import tiny_model

Ranks = Callable[[int], RankPool]


class Collectives(TorchDispatchMode):
    """Notes gathers of whole tensors."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather_base" in func.name():
            self.seen.append("gather")
        return func(*args, **(kwargs or {}))


def backward(rank: int, size: int, lora: bool, early: bool, by_logits: bool) -> tuple[list[str], bool]:
    """What happens in a backward pass, and whether it is the stream of FSDP2's gathers that is waited for. Embeddings,
    layers and head are units, as accelerate makes them."""
    model = make_trainee(lora)
    mesh = init_device_mesh("cpu", (size,))
    models.patch(model, group=dist.group.WORLD)
    base = model.get_base_model() if lora else model
    for unit in (base.model.embed_tokens, *base.model.layers, base.lm_head, model):
        fully_shard(unit, mesh=mesh)
    batch, seen, streams = models.make_batch("packed"), list[str](), list[Any]()
    labels = batch.pop("labels") if by_logits else None

    def wait_stream(stream: Any) -> None:
        seen.append("wait")
        streams.append(stream)

    with mock.patch.object(fsdp2, "frees_early", return_value=early):
        outputs = model(**batch)
    loss = torch.nn.functional.cross_entropy(outputs.logits[0], labels[0]) if by_logits else outputs.loss
    current = SimpleNamespace(current_stream=lambda _: SimpleNamespace(wait_stream=wait_stream))
    with Collectives(seen), mock.patch.object(fsdp2.torch, "get_device_module", return_value=current):
        loss.backward()
    of_gathers = base.model.embed_tokens._get_fsdp_state()._comm_ctx.all_gather_stream
    return seen, all(stream is of_gathers for stream in streams)


@pytest.mark.parametrize("by_logits", [False, True], ids=["loss", "logits"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_backward_pass_waits_for_all_gathers_at_its_end(
    ranks: Ranks, lora: bool, early: bool, by_logits: bool
) -> None:
    for seen, same in ranks(2).run(backward, lora, early, by_logits):
        assert same
        assert seen.count("gather") >= 3
        assert ("wait" in seen) == early
        assert "gather" not in seen[seen.index("wait") :] if early else True


@pytest.mark.parametrize("name", ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Qwen3_5ForCausalLM"])
def test_accelerate_finds_the_layers_that_are_there(name: str) -> None:
    """Transformers names layers of towers that these models lack, and accelerate fails at the first of them."""
    model = tiny_model(name)
    names = set(model._no_split_modules)
    options = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
    with pytest.raises(ValueError, match="Could not find the transformer layer class"):
        FullyShardedDataParallelPlugin(**options).set_auto_wrap_policy(model)
    hf_burst.patch_model(model)
    plugin = FullyShardedDataParallelPlugin(**options)
    plugin.set_auto_wrap_policy(model)
    assert type(model.get_decoder().layers[0]) in plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    hf_burst.unpatch_model(model)
    assert model._no_split_modules == names


def encode(rank: int, size: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of an encoder that accelerate shards, and its gradients."""
    reset_accelerate()
    model, batch = models.make_model("modernbert"), models.make_batch("plain")
    if size > 1:
        hf_burst.patch_model(model)
        with mock.patch.dict(os.environ, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2"):
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
            mesh = hf_burst.BurstParallelismConfig()
            accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=mesh)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    loss = model.train()(**batch).loss
    loss.backward()
    return float(loss.detach()), {path: whole(weight.grad) for path, weight in model.named_parameters()}


def test_accelerate_shards_embeddings_once(ranks: Ranks) -> None:
    """Transformers names the module around an encoder's embeddings, too, and accelerate fails at those inside."""
    wanted = encode(0, 1)
    for found in ranks(2).run(encode):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_torch_waits_itself_from_2_15_on() -> None:
    device = torch.device("cuda")
    for version, early in (("2.11.0+cu130", True), ("2.14.1", True), ("2.15.0+cu132", False), ("2.16.0", False)):
        with mock.patch.object(fsdp2.torch, "__version__", version):
            assert fsdp2.frees_early(device) == early
    assert not fsdp2.frees_early(torch.device("cpu"))


def losses(rank: int, size: int, lora: bool, output: torch.dtype | None) -> list[torch.Tensor]:
    """A loss in training and one in an evaluation, and one after the patch was taken away, as FSDP2 returns them."""
    model = make_trainee(lora)
    mesh = init_device_mesh("cpu", (size,))
    models.patch(model, group=dist.group.WORLD)
    base = model.get_base_model() if lora else model
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output)
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    root = fully_shard(model, mesh=mesh, mp_policy=policy)
    batch, found = models.make_batch("packed"), []
    for training in (True, False):
        model.train(training)
        found.append(model(**batch).loss)
    found[0].backward()
    hf_burst.unpatch_model(model)
    assert root._get_fsdp_state()._mp_policy.output_dtype == output
    return [loss.detach() for loss in (*found, model(**batch).loss)]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_loss_is_not_rounded_by_the_outermost_unit(ranks: Ranks, lora: bool) -> None:
    """accelerate's policy for bf16 rounds it; that of torch, and one of fp64, leave it."""
    kinds = (torch.bfloat16, None, torch.float64)
    for found, exact, wide in zip(*(ranks(2).run(losses, lora, kind) for kind in kinds), strict=True):
        assert [loss.dtype for loss in found] == [torch.float32, torch.float32, torch.bfloat16]
        assert [loss.dtype for loss in wide] == [torch.float64] * 3
        torch.testing.assert_close(found[:2], exact[:2], rtol=1e-6, atol=1e-6)


def fused(rank: int, size: int) -> dict[str, torch.dtype]:
    """What a pass returns whose head is not called, but read, as by TRL, with the group that accelerate makes of it."""
    from trl.trainer.utils import add_fused_lm_head

    model = make_trainee(False)
    add_fused_lm_head(model)
    mesh = init_device_mesh("cpu", (size,))
    models.patch(model, group=dist.group.WORLD)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for unit in ([model.model.norm, model.lm_head], model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    outputs = model.train()(**models.make_batch("packed"), fused_lm_head=True)
    return {name: outputs[name].dtype for name in ("loss", "log_probs")}


def test_what_a_head_returns_that_is_only_read_is_not_rounded(ranks: Ranks) -> None:
    for dtypes in ranks(2).run(fused):
        assert dtypes == {"loss": torch.float32, "log_probs": torch.float32}


def read_head(rank: int, size: int, kind: str) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """Gradients by a head that is read and not called: as a unit of its own, `joined` with the last norm, or without an
    outermost unit. Between the passes and the backward pass a reference is asked, and the head called. Also whether
    the head is sharded after each."""
    from trl.trainer.utils import add_fused_lm_head

    model = make_trainee(False)
    add_fused_lm_head(model)
    models.patch(model, group=dist.group.WORLD)
    mesh, batch = init_device_mesh("cpu", (size,)), models.make_batch("packed")
    head = [model.model.norm, model.lm_head] if kind == "joined" else model.lm_head
    for unit in (*model.model.layers, head, *([] if kind == "rootless" else [model])):
        fully_shard(unit, mesh=mesh, reshard_after_forward=kind != "joined")
    sharded = list[bool]()

    def run(learns: bool, fused: bool = True) -> torch.Tensor:
        with torch.set_grad_enabled(learns):
            loss: torch.Tensor = model(**batch, **({"fused_lm_head": True} if fused else {})).loss
        sharded.append(is_sharded_head(model.lm_head))
        return loss

    loss = (run(True) + run(True)) / 2
    run(False)
    if kind != "rootless":  # a call would make the head a root
        run(False, fused=False)
    loss.backward()
    learning = model.lm_head if kind == "rootless" else model  # what no unit has is averaged by nobody
    return {name: whole(weight.grad) for name, weight in learning.named_parameters()}, sharded


@pytest.mark.parametrize("kind", ["alone", "joined", "rootless"])
def test_gradients_of_a_head_that_is_only_read(ranks: Ranks, kind: str) -> None:
    model = make_trainee(False)
    models.plain_loss(model, models.make_batch("packed")).backward()
    learning = model.lm_head if kind == "rootless" else model
    for gradients, sharded in ranks(2).run(read_head, kind):
        for name, weight in learning.named_parameters():
            torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-5, atol=1e-6)
        assert kind == "joined" or all(sharded)


def one_by_one(rank: int, size: int) -> float:
    """The loss where layers are units without an outermost one, and one of the units never runs."""
    model = make_trainee(False)
    model.spare = torch.nn.Linear(8, 8)
    mesh = init_device_mesh("cpu", (size,))
    models.patch(model, group=dist.group.WORLD)
    for unit in (*model.model.layers, model.spare):
        fully_shard(unit, mesh=mesh)
    with mock.patch.object(fsdp2, "frees_early", return_value=True):
        loss = model(**models.make_batch("packed")).loss
    current = SimpleNamespace(current_stream=lambda _: SimpleNamespace(wait_stream=lambda _: None))
    with mock.patch.object(fsdp2.torch, "get_device_module", return_value=current):
        loss.backward()
    return float(loss.detach())


def test_units_without_an_outermost_one(ranks: Ranks) -> None:
    wanted = float(models.plain_loss(make_trainee(False), models.make_batch("packed")).detach())
    assert ranks(2).run(one_by_one) == pytest.approx([wanted] * 2, rel=1e-5)
