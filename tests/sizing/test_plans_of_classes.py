"""The plan of every causal class beside what tensors take on a CPU, where torch computes norms and MLPs.

python -m tests.sizing.test_plans_of_classes  # prints a line for each class
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from hf_burst.check.tiny import POSITION_COUNTS
from hf_burst.hf.models.model_size import model_size
from hf_burst.sizing.memory import estimate_memory
from hf_burst.sizing.model import Training
from tests.sizing.test_peak_memory import ON_CPU, bytes_of_step
from tests.support import tiny_models

LENGTH = 1024
# the plan's share of what layers took, of models whose layers do more than norms, attention and SwiGLU
LESS = {
    **{"ApertusForCausalLM": 0.71, "Apertus1p5TextForCausalLM": 0.71, "BitNetForCausalLM": 0.75},
    **{"PhiForCausalLM": 0.81, "GPT2LMHeadModel": 0.83, "GPTJForCausalLM": 0.81, "CodeGenForCausalLM": 0.78},
    **{"GptOssForCausalLM": 0.81, "AfmoeForCausalLM": 0.88, "MiMoV2FlashForCausalLM": 0.88},
}
LIKE_LLAMA = [
    *("LlamaForCausalLM", "Qwen3ForCausalLM", "Olmo3ForCausalLM", "SmolLM3ForCausalLM", "MistralForCausalLM"),
    *("Gemma3ForCausalLM", "Gemma4UnifiedForCausalLM", "Glm4ForCausalLM", "GraniteForCausalLM", "SeedOssForCausalLM"),
    *("ArceeForCausalLM", "Ernie4_5ForCausalLM", "Exaone4ForCausalLM", "HeliumForCausalLM", "Cohere2ForCausalLM"),
]


def wider(name: str, size: Any) -> Any:
    """A size of a config, with layers so wide that weights of one size count for little beside tokens."""
    if name in POSITION_COUNTS:
        return 2 * LENGTH
    if "head_dim" in name or name in ("dim_head", "kv_channels", "attention_head_size"):
        return 32 if "rope" in name else 64
    if name in ("q_lora_rank", "kv_lora_rank"):
        return 96
    return {32: 256, 48: 1024, 24: 256}.get(size, size) if type(size) is int else size


def widened(given: Any) -> Any:
    return {key: widened(wider(key, value)) for key, value in given.items()} if isinstance(given, dict) else given


def planned_and_taken(name: str) -> tuple[float, float]:
    """Bytes of a step beside the weights."""
    model_class = getattr(transformers, name)
    with mock.patch.dict(tiny_models.SIZES, widened(tiny_models.SIZES)):
        overrides = widened(tiny_models.overrides_of(name, model_class))
        config = tiny_models.tiny_config(model_class.config_class, overrides)
    torch.manual_seed(0)
    model = model_class(config).bfloat16().train()
    model.gradient_checkpointing_enable()
    tokens = torch.randint(1, 60, (1, LENGTH))
    _, taken = bytes_of_step(model, {"input_ids": tokens, "labels": tokens}, {})
    plan = estimate_memory(model_size(model_class, config), Training(LENGTH, 1, 1, sharded="ddp", fused=False), ON_CPU)
    return plan.tensors - plan.held, taken


@pytest.mark.full
@pytest.mark.parametrize("name", [*LIKE_LLAMA, *LESS])
def test_the_plan_is_near_what_tensors_take(name: str) -> None:
    planned, taken = planned_and_taken(name)
    assert planned / taken == pytest.approx(LESS.get(name, 1.0), abs=0.1 if name in LIKE_LLAMA else 0.02)


def every_class() -> Iterator[str]:
    for name in tiny_models.class_names():
        if not tiny_models.is_masked(name):
            try:
                planned, taken = planned_and_taken(name)
                yield f"{name} {planned / taken:.2f}"
            except Exception as problem:  # refused, or widths that do not go together
                yield f"{name}: {type(problem).__name__}"


if __name__ == "__main__":
    for line in every_class():
        print(line, flush=True)
