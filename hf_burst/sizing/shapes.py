"""Models that are planned by their name, without a network: the sizes that their configs have."""

import re
from typing import Any

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
_QWEN3_MOE = {"moe_intermediate_size": 768, "num_experts": 128}
_GPT_OSS = {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
_TIED = {"tie_word_embeddings": True}


def _delta_net(heads: int) -> dict[str, int]:
    """Sizes of recurrent layers with this number of value heads."""
    sizes = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    return {**sizes, "linear_num_value_heads": heads}


# fmt: off
_SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "llama-3.2-1b": ("llama", (128256, 2048, 8192, 16, 32, 8, 64), _TIED),
    "llama-3.2-3b": ("llama", (128256, 3072, 8192, 28, 24, 8, 128), _TIED),
    "llama-3-8b": ("llama", (128256, 4096, 14336, 32, 32, 8, 128), {}),
    "llama-3-70b": ("llama", (128256, 8192, 28672, 80, 64, 8, 128), {}),
    "mistral-7b": ("mistral", (32768, 4096, 14336, 32, 32, 8, 128), {"sliding_window": None}),
    "qwen2.5-7b": ("qwen2", (152064, 3584, 18944, 28, 28, 4, 128), {}),
    "qwen2.5-14b": ("qwen2", (152064, 5120, 13824, 48, 40, 8, 128), {}),
    "qwen2.5-32b": ("qwen2", (152064, 5120, 27648, 64, 40, 8, 128), {}),
    "qwen3-8b": ("qwen3", (151936, 4096, 12288, 36, 32, 8, 128), {}),
    "qwen3-14b": ("qwen3", (151936, 5120, 17408, 40, 40, 8, 128), {}),
    "qwen3-32b": ("qwen3", (151936, 5120, 25600, 64, 64, 8, 128), {}),
    "qwen3-30b-a3b": ("qwen3_moe", (151936, 2048, 6144, 48, 32, 4, 128), _QWEN3_MOE),
    "qwen3.5-9b": ("qwen3_5_text", (248320, 4096, 12288, 32, 16, 4, 256), _delta_net(32)),
    "qwen3.6-27b": ("qwen3_5_text", (248320, 5120, 17408, 64, 24, 4, 256), _delta_net(48)),
    "gemma-3-12b": ("gemma3_text", (262208, 3840, 15360, 48, 16, 8, 256), {"sliding_window": 1024}),
    "gpt-oss-20b": ("gpt_oss", (201088, 2880, 2880, 24, 64, 8, 64), _GPT_OSS),
}
# fmt: on
# a model type of Transformers, and what its config differs in
SHAPES = {
    name: {"model_type": kind, **dict(zip(_SIZES + _HEADS, sizes, strict=True)), **more}
    for name, (kind, sizes, more) in _SHAPES.items()
}
# other names of these sizes
_ALIASES = {
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.3-70b": "llama-3-70b",
    "mistral-7b-v0.3": "mistral-7b",
}
NAMES = sorted((*SHAPES, *_ALIASES))
_PUBLISHERS = ("meta-llama", "mistralai", "qwen", "google", "openai")  # others may give a name to other sizes
_TUNED = re.compile(r"-(instruct|base|it|pt)(?=-|$)|-2507$")  # in names of checkpoints that share a shape


def shape_name(name: str) -> str | None:
    """The key of [`SHAPES`] that a model's name stands for, as people type it: `llama-3.1-8b` or
    `meta-llama/Llama-3.1-8B-Instruct`; `None` for other models."""
    publisher, _, own = name.lower().rpartition("/")
    if publisher and publisher not in _PUBLISHERS:
        return None
    plain = _TUNED.sub("", own).removeprefix("meta-")
    found = _ALIASES.get(plain, plain)
    return found if found in SHAPES else None
