"""The memory of a prompt as tensors take it, beside the plan's."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from transformers.models.llama import modeling_llama

import hf_burst
from hf_burst.cli.plan import find_model
from hf_burst.hf.batches import sharded
from hf_burst.hf.models.model_size import model_size
from hf_burst.sizing.gpus import DATA_SHEETS, capacity_of
from hf_burst.sizing.memory import MemoryEstimate
from hf_burst.sizing.model import Training
from hf_burst.sizing.prompts import longest_prompt, memory_of_prompt
from tests.hf.generation.test_generation import make
from tests.sizing.test_peak_memory import CLASSES, LENGTH, ON_CPU, made, some
from tests.support import models
from tests.support.live_memory import FastProducts, LiveMemory
from tests.support.ranks import RankPool


def bytes_of_prompt(rank: int, size: int, name: str, tile: int) -> tuple[int, int]:
    """Bytes beside the weights when a rank reads a prompt: those of its keys, and the most."""
    model, document = made(name, 6).eval(), torch.ones(1, LENGTH, dtype=torch.int64)
    hf_burst.patch_model(model, models.config_of(memory=hf_burst.Memory(tiled_mlp=tile)))
    # the checksum of the weights takes a piece of them at a time, which is more than all of such a small model
    with FastProducts(as_zeros=True), mock.patch.object(sharded, "_PIECE", 2**15):
        hf_burst.remember(model, document)
        with LiveMemory(*model.parameters()) as live:
            weights = live.now
            memory = hf_burst.remember(model, document)
    return memory.nbytes, live.peak - weights


def planned(name: str, tile: int, size: int, fused: bool = False) -> MemoryEstimate:
    model = made(name, 6)
    training = Training(LENGTH, size, size, fused=fused, sharded="ddp", tiled_mlp=tile)
    return memory_of_prompt(model_size(type(model), model.config), training, ON_CPU)


WHOLE = [("llama", 1), ("qwen3", 2), ("olmo2", 1)]  # whose MLPs take all tokens at once
CASES = [*((name, 128, size) for name in CLASSES for size in (1, 2)), *((name, LENGTH, size) for name, size in WHOLE)]
ALWAYS = (("llama", 128, 2),)


@pytest.mark.parametrize(("name", "tile", "size"), some(CASES, lambda case: case in ALWAYS), ids=str)
def test_the_peak_of_a_prompt_is_as_planned(ranks: Callable[[int], RankPool], name: str, tile: int, size: int) -> None:
    arguments = name, tile
    measured = [bytes_of_prompt(0, 1, *arguments)] if size == 1 else ranks(size).run(bytes_of_prompt, *arguments)
    plan = planned(name, tile, size)
    for keys, peak in measured:
        assert keys == plan.keys
        assert peak == pytest.approx(plan.tensors - plan.weights, rel=0.12)


def test_a_prompt_with_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotary positions and SwiGLU make nothing but their results, or take the places of what they are given."""
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda norm, x: x * norm.weight)
    monkeypatch.setattr(
        modeling_llama.LlamaMLP, "forward", lambda mlp, x: mlp.down_proj(mlp.gate_proj(x).mul_(mlp.up_proj(x)))
    )
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *further, **named: (q, k))
    for tile, moment in ((128, "attention"), (LENGTH, "an MLP")):
        keys, peak = bytes_of_prompt(0, 1, "llama", tile)
        plan = planned("llama", tile, 1, fused=True)
        assert plan.moment == moment
        assert keys == plan.keys
        assert peak == pytest.approx(plan.tensors - plan.weights, rel=0.1)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "DeepseekV3ForCausalLM"])
def test_keys_of_windows_and_latent_keys(name: str) -> None:
    """Layers with a window keep the keys that it reaches; what is cached of latent attention is latent."""
    model, length = make(name), 41
    size = model_size(type(model), model.config)
    plan = memory_of_prompt(size, Training(length, 1, 1), ON_CPU)
    memory = hf_burst.remember(models.patch(model), torch.ones(1, length, dtype=torch.int64))
    held = [part for keys in memory.layers if keys is not None for part in (keys.keys, keys.values)]
    assert 2 * sum(part.numel() for part in held) == plan.keys


def test_the_longest_prompt_fits() -> None:
    model = find_model("llama-3-8b", False)[0]
    capacity = capacity_of(DATA_SHEETS["h100"])
    lengths = []
    for gpus in (1, 2, 4, 8):
        training = Training(2**17, gpus, gpus)
        most = longest_prompt(model, training, capacity)
        at, beyond = (
            memory_of_prompt(model, replace(training, length=most + more), capacity) for more in (0, 1024 * gpus)
        )
        assert at.total <= capacity.gpu_memory < beyond.total
        assert at.keys == most / gpus * 2**17, "128 KiB a token"
        assert at.weights == 2 * model.weights, "whole on every GPU"
        lengths.append(most)
    assert lengths == sorted(lengths)
    assert longest_prompt(find_model("llama-3-70b", False)[0], Training(2**17, 8, 8), capacity) == 0
