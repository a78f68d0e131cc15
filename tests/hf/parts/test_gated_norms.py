"""Norms of gated outputs: which are computed by a kernel of flash-linear-attention, and that nothing else changes."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module, distribute_tensor
from torch.nn import functional
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

import hf_burst
from hf_burst.check.tiny import prepare
from hf_burst.hf.models import layer_sizes as sizes_of_layers
from hf_burst.hf.models.gated_norm import ACTIVATIONS, activation_of, gated_norms
from hf_burst.hf.models.layer_sizes import recurrent_sizes
from hf_burst.hf.parts import gated_norms as part
from hf_burst.hf.parts.gated_norms import GatedNorm, depends_on
from hf_burst.hf.view import ModelView
from tests.support import models
from tests.support.ranks import RankPool
from tests.support.tiny_models import OVERRIDES, tiny_config


class GateFirst(Qwen3_5RMSNormGated):
    """As Mamba2 does it."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = hidden_states * functional.silu(gate)
        return self.weight * gated * (gated.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


class OneMore(Qwen3_5RMSNormGated):
    """A weight around 0."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = super().forward(hidden_states, gate)
        return normed * (1 + self.weight) / self.weight


class OtherEpsilon(Qwen3_5RMSNormGated):
    """`eps` is another than the norm says."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states * (variance + 2e-6).rsqrt() * functional.silu(gate)


class OtherGate(Qwen3_5RMSNormGated):
    """Another activation than it says."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states * (variance + self.variance_epsilon).rsqrt() * functional.gelu(gate)


class OfGroups(Qwen3_5RMSNormGated):
    """Groups of 16 within a row."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        groups = hidden_states.unflatten(-1, (-1, 16))
        normed = groups * (groups.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return self.weight * normed.flatten(-2) * functional.silu(gate)


class OfThreeDimensions(Qwen3_5RMSNormGated):
    """It says what no gated norm says."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> Any:
        batch, tokens, width = hidden_states.shape
        return batch, tokens, width


class Pair(Qwen3_5RMSNormGated):
    """Two outputs."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> Any:
        return super().forward(hidden_states, gate), gate


def formula(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str) -> torch.Tensor:
    """What the kernel computes, in place of it."""
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * ACTIVATIONS[activation](gate)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("Qwen3_5ForCausalLM", "silu"),
        ("Qwen3NextForCausalLM", "silu"),
        ("OlmoHybridForCausalLM", "silu"),
        ("KimiLinearForCausalLM", "sigmoid"),
    ],
)
def test_norms_of_delta_rules_are_found(name: str, activation: str) -> None:
    kind = getattr(transformers, name)
    config = tiny_config(kind.config_class, OVERRIDES.get(name, {}))
    prepare(config)
    model = kind(config)
    wanted = [module for module in model.modules() if type(module).__name__.endswith("RMSNormGated")]
    assert wanted
    assert {(id(norm), found) for norm, found in gated_norms(ModelView(model))} == {
        (id(norm), activation) for norm in wanted
    }


@pytest.mark.parametrize("name", ["llama", "lfm2", "granite", "zamba"])
def test_other_models_have_none(name: str) -> None:
    """Granite's Mamba2 layers gate before they norm."""
    model = models.make_model(name)
    assert gated_norms(ModelView(model)) == []


@pytest.mark.parametrize("kind", [GateFirst, OneMore, OtherEpsilon, OtherGate, OfGroups, OfThreeDimensions, Pair])
def test_a_norm_of_another_formula_stays_as_it_is(kind: type[Qwen3_5RMSNormGated]) -> None:
    assert activation_of(Qwen3_5RMSNormGated(64)) == "silu"
    assert activation_of(kind(64)) is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_norm_is_known_wherever_its_weight_is(activation: str) -> None:
    """ZeRO-3 leaves a weight without elements outside of passes."""
    norm: Any = Qwen3_5RMSNormGated(64)
    norm.activation = activation
    norm.weight.data = torch.empty(0)
    assert activation_of(norm) == activation
    norm.to("meta")
    assert activation_of(norm) == activation


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_a_patched_model_computes_the_same_by_the_kernel(name: str) -> None:
    model, batch = models.make_model(name).train(), models.make_batch("packed")
    loss = models.plain_loss(model, batch)
    loss.backward()
    wanted = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    model.zero_grad()
    norms = [norm for norm, _ in gated_norms(ModelView(model))]
    models.patch(model, hf_burst.BurstConfig())
    with (
        mock.patch.object(part, "fla_compared", return_value=True),
        mock.patch.object(part, "fla_gated_norm", side_effect=formula) as kernel,
    ):
        loss = model(**batch).loss
        loss.backward()
        assert kernel.call_count == len(norms)
        norms[0](torch.ones(3, norms[0].weight.shape[0]), torch.ones(3, norms[0].weight.shape[0]))  # in no pass
        assert kernel.call_count == len(norms)
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    for own, tensor in zip(found, wanted, strict=True):
        assert torch.allclose(own, tensor, rtol=1e-4, atol=1e-5)
    copied = copy.deepcopy(norms[0])
    assert isinstance(copied.forward, GatedNorm)
    assert copied.forward.module is copied
    assert copied.forward.more[1] == depends_on(copied), "it is computed by the kernel, too"
    assert pickle.loads(pickle.dumps(norms[0])).forward.more[1] == depends_on(norms[0])
    hf_burst.unpatch_model(model)
    assert not any("forward" in vars(norm) for norm in norms)


def test_a_model_is_patched_whatever_the_default_device_is() -> None:
    model = models.make_model("qwen3_5")
    with torch.device("meta"):
        models.patch(model, hf_burst.BurstConfig())
    assert isinstance(vars(gated_norms(ModelView(model))[0][0])["forward"], GatedNorm)


@contextmanager
def called() -> Iterator[mock.Mock]:
    """Within a pass on a device that has the kernel."""
    with (
        mock.patch.object(part, "fla_compared", return_value=True),
        mock.patch.object(part, "current", return_value=object()),
        mock.patch.object(part, "fla_gated_norm", side_effect=formula) as kernel,
    ):
        yield kernel


def test_what_the_kernel_cannot_compute_is_left_to_the_norm() -> None:
    """fp64, which it would round; a formula that has changed since the norm was asked."""
    norm: Any = Qwen3_5RMSNormGated(8)
    GatedNorm.put(norm, "silu", depends_on(norm))
    x, gate = torch.randn(2, 3, 8)
    with called() as kernel:
        torch.testing.assert_close(norm(x, gate), Qwen3_5RMSNormGated.forward(norm, x, gate))
        assert kernel.call_count == 1
        norm(x.double(), gate.double())
        norm.activation = "sigmoid"
        torch.testing.assert_close(norm(x, gate), Qwen3_5RMSNormGated.forward(norm, x, gate))
        norm.activation = "silu"
        with mock.patch.object(Qwen3_5RMSNormGated, "forward", GateFirst.forward):
            torch.testing.assert_close(norm(x, gate), GateFirst.forward(norm, x, gate))
        assert kernel.call_count == 1


def with_shards(rank: int, size: int) -> int:
    """How often the kernel is given a weight that is a shard."""
    mesh = init_device_mesh("cpu", (size,))
    norm: Any = distribute_module(Qwen3_5RMSNormGated(8), mesh)
    GatedNorm.put(norm, "silu", depends_on(norm))
    x, gate = (distribute_tensor(torch.ones(4, 8), mesh) for _ in range(2))
    with called() as kernel:
        norm(x, gate)
    return kernel.call_count


def test_shards_of_weights_are_left_to_the_norm(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(with_shards) == [0, 0]


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_the_plan_knows_what_the_kernel_keeps(name: str) -> None:
    model = models.make_model(name)
    (plain,) = recurrent_sizes(ModelView(model))
    with mock.patch.object(sizes_of_layers, "fla_installed", return_value=True):
        assert recurrent_sizes(ModelView(model)) == (replace(plain, norm_copies=(3, 2)),)


def test_a_forward_of_its_own_stays() -> None:
    model = models.make_model("qwen3_5")
    norm: Any = gated_norms(ModelView(model))[0][0]

    def own(hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        plain: torch.Tensor = type(norm).forward(norm, hidden_states, gate)
        return plain

    norm.forward = own
    models.patch(model, hf_burst.BurstConfig())
    assert norm.forward is own
    hf_burst.unpatch_model(model)
    assert norm.forward is own
