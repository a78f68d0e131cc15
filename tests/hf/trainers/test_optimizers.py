"""Optimizers and weights that take less memory: over ranks they train as in one process."""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers.optimization import Adafactor

import hf_burst
from hf_burst.hf.view import device_of
from recipes.benchmarks.training_job import quantise
from tests.support import models, trainers
from tests.support.ranks import RankPool
from tests.support.trainers import Case

Ranks = Callable[[int], RankPool]
Parameters = Iterable[nn.Parameter]
LENGTH = 43


def of_bitsandbytes(name: str, parameters: Parameters) -> torch.optim.Optimizer:
    """One whose states have 8 bits, of small weights, too."""
    from bitsandbytes import optim

    made: torch.optim.Optimizer = getattr(optim, name)(parameters, lr=1e-2, min_8bit_size=0)
    return made


def of_torchao(name: str, parameters: Parameters) -> torch.optim.Optimizer:
    """One whose states have 8 or 4 bits, of weights of 4,096 numbers and more."""
    optim = import_module("torchao.optim")
    made: torch.optim.Optimizer = getattr(optim, name)(parameters, lr=1e-2)
    return made


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "Adafactor": lambda parameters: Adafactor(parameters, lr=1e-2, relative_step=False),
    "AdamW8bit": lambda parameters: of_bitsandbytes("AdamW8bit", parameters),
    "Lion8bit": lambda parameters: of_bitsandbytes("Lion8bit", parameters),
    "AdamW8bit of torchao": lambda parameters: of_torchao("AdamW8bit", parameters),
    "AdamW4bit of torchao": lambda parameters: of_torchao("AdamW4bit", parameters),
}


NEEDED = {"bitsandbytes": ["AdamW8bit", "Lion8bit"], "torchao": ["AdamW8bit of torchao", "AdamW4bit of torchao"]}


def moved(rank: int, size: int, folder: str, case: Case, name: str, noise: float = 0.0) -> torch.Tensor:
    """By how much the weights move in a few steps of the Trainer; with relative noise upon the gradients."""
    with mock.patch.dict(models._SIZES, intermediate_size=128):
        model = trainers.make_model(case)
    before = torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])
    generator = torch.Generator().manual_seed(4)
    for weight in model.parameters() if noise else ():
        weight.register_hook(lambda grad: grad * (1 + noise * torch.randn(grad.shape, generator=generator)))
    trainer = trainers.make_trainer(case, folder, model=model)
    trainer.optimizer = OPTIMIZERS[name](model.parameters())
    with mock.patch.object(torch, "compile", lambda function, **_: function):  # torchao compiles each step
        trainer.train()
    states = [state for entry in trainer.optimizer.state.values() for state in entry.values()]
    held = {str(kind) for state in states for kind in (type(state), getattr(state, "dtype", None))}
    assert "torchao" not in name or any("OptimState" in kind for kind in held), held
    assert not name.endswith("8bit") or "torch.uint8" in held, held
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return after - before


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in ("AdamW", "AdamW8bit"))) for n in OPTIMIZERS]
)
def test_optimizers_over_ranks(ranks: Ranks, tmp_path: Any, name: str) -> None:
    """The weights move as in one process, up to what rounding of the gradients makes of it there."""
    for package, optimizers in NEEDED.items():
        if name in optimizers and find_spec(package) is None:
            pytest.skip(f"needs {package}")
    case = Case(checkpointing=True, little=True)
    wanted = moved(0, 1, str(tmp_path), case.alone, name)
    rounded = moved(0, 1, str(tmp_path), case.alone, name, 1e-6)
    least = float((rounded - wanted).norm() / wanted.norm())
    for found in ranks(2).run(moved, str(tmp_path), case, name):
        assert float((found - wanted).norm() / wanted.norm()) <= 4 * least
    assert least < 0.02


def adapters_on_four_bits(rank: int, size: int, patched: bool) -> list[torch.Tensor]:
    """The loss and the gradients of adapters beside weights of 4 bits."""
    batch, model = models.make_batch("packed", LENGTH), models.make_model("llama", layers=4).train()
    quantise(model, torch.device("cpu"))
    model.enable_input_require_grads()
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    if patched:
        config = hf_burst.BurstConfig(
            memory=hf_burst.Memory(tiled_mlp=7, layers_per_checkpoint=2, activation_offloading=0.5)
        )
        models.patch(adapted, config)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = adapted(**batch).loss if patched else models.plain_loss(adapted, batch)
    loss.backward()
    learned = [weight for weight in adapted.parameters() if weight.requires_grad]
    gradients = [weight.grad for weight in learned]
    if size > 1:
        for gradient in gradients:
            dist.all_reduce(gradient)
    return [loss.detach(), *(gradient / size for gradient in gradients)]


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_weights_of_four_bits_over_ranks(ranks: Ranks, size: int) -> None:
    wanted = adapters_on_four_bits(0, 1, False)
    assert len(wanted) == 1 + 2 * 7 * 4
    for found in ranks(size).run(adapters_on_four_bits, True):
        for value, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def weights_elsewhere(rank: int, size: int) -> None:
    with torch.device("meta"):
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (size,)))
    assert model.weight.device.type == "meta", "where they wait, as on the host of a GPU"
    assert device_of(model) == torch.device("cpu"), "where the mesh computes and communicates"


def test_weights_wait_elsewhere_than_their_ranks_communicate(ranks: Ranks) -> None:
    ranks(2).run(weights_elsewhere)


def weights_on_the_host(rank: int, size: int) -> None:
    batch, model = models.make_batch("packed", LENGTH), models.make_model("llama", torch.float64, layers=4).train()
    models.plain_loss(model, batch).backward()
    wanted = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    models.patch(
        model,
        hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7, layers_per_checkpoint=2, activation_offloading=0.5)),
    )
    model.gradient_checkpointing_enable()
    options = {"mesh": init_device_mesh("cpu", (size,)), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model(**batch).loss.backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad.full_tensor(), wanted[name], rtol=1e-10, atol=1e-10)


def test_weights_that_fsdp2_keeps_on_the_host(ranks: Ranks) -> None:
    ranks(2).run(weights_on_the_host)
