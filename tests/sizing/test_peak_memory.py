"""The memory of a step as tensors take it, beside the plan's; with torch's own norms and MLPs, unless a test says."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama import modeling_llama

import hf_burst
from hf_burst.hf.models.model_size import model_size
from hf_burst.kernels import BackwardInputs
from hf_burst.kernels.cpu_flash import CpuFlashKernel
from hf_burst.sizing.gpus import Capacity
from hf_burst.sizing.memory import estimate_memory
from hf_burst.sizing.model import Training
from tests.support import models
from tests.support.live_memory import FastProducts, LiveMemory

LENGTH = 2048
ON_CPU = Capacity(0, on_gpu=False)
SIZES = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": LENGTH}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
CLASSES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 64}),  # norms of queries and keys
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),  # one product for three
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),  # norms behind attention and MLP
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
}


def made(name: str, layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class, config_class, changes = CLASSES[name]
    model = model_class(config_class(**SIZES, **changes, num_hidden_layers=layers)).bfloat16().train()
    model.gradient_checkpointing_enable()
    return model


def bytes_of_step(
    model: PreTrainedModel | PeftModel, batch: dict[str, torch.Tensor], settings: dict[str, Any], autocast: bool = False
) -> tuple[int, int]:
    """Bytes beside the weights, of a step that is not the first: those kept behind the forward pass, and the most."""
    hf_burst.patch_model(model, models.config_of(**{"memory": "manual", "gradients": "manual", **settings}))
    routed = hasattr(model.config, "num_local_experts")  # zeros would all go to the same experts
    with FastProducts(as_zeros=not routed), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**batch).loss.backward()
        model.zero_grad()
        with LiveMemory(*model.parameters()) as live:
            weights = live.now
            loss = model(**batch).loss
            kept = live.now - weights
            loss.backward()
    model.zero_grad()
    hf_burst.unpatch_model(model)
    return kept, live.peak - weights


SAVING = [
    {},
    {"tiled_mlp": 256},
    {"tiled_mlp": 256, "attention_keep": 0.0},
    {"tiled_mlp": 256, "activation_offloading": 1.0},
    {"tiled_mlp": 256, "layers_per_checkpoint": 2},
    {"tiled_mlp": 256, "layers_per_checkpoint": 3, "activation_offloading": 0.5},
]
STEPS = [(name, settings) for name in CLASSES for settings in SAVING]
ALWAYS = [("olmo2", SAVING[2]), ("llama", SAVING[5])]
LATER = [("llama", SAVING[0]), ("mixtral", SAVING[3])]


def some(cases: list[Any], always: Callable[[Any], bool], slow: Sequence[Any] = ()) -> list[Any]:
    """Cases, of which `pytest -m full` runs those that are neither run always nor `slow`."""
    marks = ((case, pytest.mark.slow if case in slow else pytest.mark.full) for case in cases)
    return [case if always(case) else pytest.param(*case, marks=mark) for case, mark in marks]


@pytest.mark.parametrize(("name", "settings"), some(STEPS, lambda case: case in ALWAYS, LATER), ids=str)
def test_the_peak_of_a_step_is_as_planned(name, settings):
    model, tokens = made(name, 6), torch.randint(0, 64, (1, LENGTH))
    _, peak = bytes_of_step(model, {"input_ids": tokens, "labels": tokens}, settings)
    training = Training(LENGTH, 1, 1, sharded="ddp", fused=False, **settings)
    planned = estimate_memory(model_size(type(model), model.config), training, ON_CPU)
    assert peak == pytest.approx(planned.total - planned.held, rel=0.1)


ADAPTERS = [(weights, settings) for weights in ("bf16", "fp32") for settings in SAVING]
ALWAYS_ADAPTED = [("fp32", SAVING[5]), ("bf16", SAVING[0])]


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "settings"), some(ADAPTERS, lambda case: case in ALWAYS_ADAPTED), ids=str)
def test_the_peak_of_adapters_is_as_planned(weights, settings):
    """Peft makes them in fp32, or in the dtype of the model."""
    model, tokens = made("llama", 6), torch.randint(0, 64, (1, LENGTH))
    model.enable_input_require_grads()
    lora = LoraConfig(r=16, target_modules="all-linear")
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=weights == "fp32")
    _, peak = bytes_of_step(adapted, {"input_ids": tokens, "labels": tokens}, settings, weights == "fp32")
    training = Training(LENGTH, 1, 1, sharded="ddp", fused=False, lora=16, weights=weights, **settings)
    planned = estimate_memory(model_size(LlamaForCausalLM, model.config), training, ON_CPU)
    assert peak == pytest.approx(planned.total - planned.held, rel=0.15)


class Normed(torch.autograd.Function):
    """A norm as Liger's kernels compute it, by what it keeps: its gradient takes the place of what comes."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.contiguous(), None


class Gated(torch.autograd.Function):
    """SwiGLU likewise: gradients take the places of both halves."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ctx.saved_tensors


def sums_in_fp32(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of a kernel that makes what flash-attn 4 makes beside its results."""

    def with_sums(kernel: CpuFlashKernel, inputs: BackwardInputs, *further: Any) -> Any:
        shared = (inputs.k, inputs.v) if inputs.q.shape[2] > inputs.k.shape[2] else ()
        sums = [torch.empty_like(tensor, dtype=torch.float32) for tensor in (inputs.q, *shared)]
        gradients = backward(kernel, inputs, *further)
        assert sums
        return gradients

    return with_sums


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> Capacity:
    """Fused kernels and sums in fp32, by the memory that they take; and what a step may take."""
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda norm, x: Normed.apply(x, norm.weight))
    monkeypatch.setattr(
        modeling_llama.LlamaMLP, "forward", lambda mlp, x: mlp.down_proj(Gated.apply(mlp.gate_proj(x), mlp.up_proj(x)))
    )
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *further, **named: (q, k))
    monkeypatch.setattr(CpuFlashKernel, "backward", sums_in_fp32(CpuFlashKernel.backward))
    monkeypatch.setattr("hf_burst.layers.adapted_linear.wide_product", lambda left, right: (left @ right).float())
    monkeypatch.setattr("hf_burst.layers.offload._SMALL", 1024)
    return Capacity(0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"tiled_mlp": 64}, marks=pytest.mark.slow),
        pytest.param({"tiled_mlp": 64, "head_groups": 8}, marks=pytest.mark.full),
        pytest.param({"tiled_mlp": 64, "attention_keep": 0.25}, marks=pytest.mark.slow),
        pytest.param(
            {"tiled_mlp": 64, "head_groups": 8, "attention_keep": 0.25, "layers_per_checkpoint": 3},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"tiled_mlp": 64, "head_groups": 8, "attention_keep": 0.25, "activation_offloading": 0.85},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_the_peak_of_adapters_is_as_planned_with_fused_kernels(as_on_gpus, settings):
    changes = {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 32, "num_key_value_heads": 8}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}, num_hidden_layers=6)).bfloat16().train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    lora = LoraConfig(r=2, target_modules="all-linear")
    adapted, tokens = get_peft_model(model, lora, autocast_adapter_dtype=False), torch.randint(0, 64, (1, LENGTH // 2))
    _, peak = bytes_of_step(adapted, {"input_ids": tokens, "labels": tokens}, settings)
    training = Training(LENGTH // 2, 1, 1, sharded="ddp", lora=2, **settings)
    planned = estimate_memory(model_size(LlamaForCausalLM, model.config), training, as_on_gpus)
    assert 0.97 * peak < planned.tensors - planned.held < 1.12 * peak


def kept_by_a_layer(rank: int, size: int, settings: dict[str, Any]) -> float:
    tokens = torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    less, more = (bytes_of_step(made("llama", layers), batch, settings)[0] for layers in (2, 4))
    return (more - less) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "schedule", "keep"),
    [
        *((1, "auto", 1.0), (1, "auto", 0.0)),
        *((2, "kv_ring", 0.0), (2, "burst", 1.0), (2, "ulysses", 0.0)),
        *(
            pytest.param(2, schedule, keep, marks=pytest.mark.full)
            for schedule, keep in (("kv_ring", 1.0), ("burst", 0.0), ("ulysses", 1.0))
        ),
    ],
)
def test_a_checkpointed_layer_keeps_its_input_and_attention(ranks, size, schedule, keep):
    settings = {"attention_keep": keep, "schedule": schedule, "tiled_mlp": 256, "head_groups": 2}
    sizes = model_size(LlamaForCausalLM, LlamaConfig(**SIZES))
    training = Training(LENGTH, size, size, attention_keep=keep)
    planned = training.tokens * sum(sizes.kept(training, training.itemsize))
    for kept in ranks(size).run(kept_by_a_layer, settings):
        assert kept == pytest.approx(planned, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["llama", "gpt2", *(pytest.param(n, marks=pytest.mark.full) for n in ("mistral", "granite", "zamba")), "qwen3_5"],
)
def test_tiles_keep_nothing_of_their_layers(name):
    model = models.make_model(name).train()
    model.gradient_checkpointing_enable()
    batch = models.make_batch("plain", 96)
    whole, tiles = (bytes_of_step(model, batch, {"tiled_mlp": size})[0] for size in (0, 16))
    assert tiles <= whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"activation_offloading": 1.0}, marks=pytest.mark.slow),
        pytest.param({"tiled_mlp": 64}, marks=pytest.mark.slow),
        pytest.param({"tiled_mlp": 64, "activation_offloading": 1.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_peak_of_weights_in_fp32_is_as_planned(as_on_gpus, settings):
    """Under autocast, whose hidden states are in fp32, too."""
    changes = {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 32, "num_key_value_heads": 8}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}, num_hidden_layers=6)).train()
    model.gradient_checkpointing_enable()
    tokens = torch.randint(0, 64, (1, LENGTH))
    _, peak = bytes_of_step(model, {"input_ids": tokens, "labels": tokens}, settings, autocast=True)
    training = Training(LENGTH, 1, 1, sharded="ddp", weights="fp32", **settings)
    planned = estimate_memory(model_size(LlamaForCausalLM, model.config), training, as_on_gpus)
    assert 0.97 * peak < planned.tensors - planned.held < 1.15 * peak


def test_layers_of_gemma_4_keep_keys_and_values_for_others_and_nothing_else() -> None:
    """Not the graphs by which their runs again computed them, which are some ten hidden states here."""
    config = Gemma4UnifiedTextConfig(
        **SIZES | {"num_hidden_layers": 6, "head_dim": 64, "global_head_dim": 128, "num_global_key_value_heads": 1}
    )
    config.layer_types[-1] = "full_attention"
    kept, peak, tokens = [], [], torch.randint(1, 64, (1, LENGTH))
    for stores in (False, True):
        torch.manual_seed(0)
        model = Gemma4UnifiedForCausalLM(config).bfloat16().train()
        model.gradient_checkpointing_enable()
        sizes = model_size(type(model), config)
        for layer in model.model.layers:
            layer.self_attn.store_full_length_kv &= stores
        found = bytes_of_step(model, {"input_ids": tokens, "labels": tokens}, {})
        kept.append(found[0])
        peak.append(found[1])
    shared = 2 * LENGTH * sizes.shared
    assert shared > 0
    assert kept[1] - kept[0] == pytest.approx(shared, rel=0.01)
    assert peak[1] - peak[0] == pytest.approx(shared, rel=0.01)
