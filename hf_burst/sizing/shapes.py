"""Models that are planned by their name, without a network: the sizes that their configs have."""

import re
from dataclasses import dataclass
from typing import Any

from ..plan import MaskPattern
from .model import ModelSize

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_QWEN3_MOE = {"moe_intermediate_size": 768, "num_experts": 128}
_GPT_OSS = {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
_GEMMA3 = {
    "sliding_window": 1024,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def _gemma4(kv_heads: int) -> dict[str, Any]:
    """Full-attention layers with heads of 512, so many of them for keys, which are their values too."""
    return {
        "global_head_dim": 512,
        "num_global_key_value_heads": kv_heads,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
    }


def _long(factor: float) -> dict[str, Any]:
    """Positions of Llama 3 from 3.1 on."""
    return {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


_SMALL_LLAMA = {"tie_word_embeddings": True, **_long(32.0)}


def _delta_net(heads: int) -> dict[str, int]:
    return {
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_value_heads": heads,
    }


# fmt: off
_SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "llama-3.2-1b": ("llama", (128256, 2048, 8192, 16, 32, 8, 64, 131072), _SMALL_LLAMA),
    "llama-3.2-3b": ("llama", (128256, 3072, 8192, 28, 24, 8, 128, 131072), _SMALL_LLAMA),
    "llama-3-8b": ("llama", (128256, 4096, 14336, 32, 32, 8, 128, 8192), {}),
    "llama-3-70b": ("llama", (128256, 8192, 28672, 80, 64, 8, 128, 8192), {}),
    "mistral-7b": ("mistral", (32768, 4096, 14336, 32, 32, 8, 128, 32768), {"sliding_window": None}),
    "qwen2.5-7b": ("qwen2", (152064, 3584, 18944, 28, 28, 4, 128, 32768), {}),
    "qwen2.5-14b": ("qwen2", (152064, 5120, 13824, 48, 40, 8, 128, 32768), {}),
    "qwen2.5-32b": ("qwen2", (152064, 5120, 27648, 64, 40, 8, 128, 32768), {}),
    "qwen3-8b": ("qwen3", (151936, 4096, 12288, 36, 32, 8, 128, 40960), {}),
    "qwen3-14b": ("qwen3", (151936, 5120, 17408, 40, 40, 8, 128, 40960), {}),
    "qwen3-32b": ("qwen3", (151936, 5120, 25600, 64, 64, 8, 128, 40960), {}),
    "qwen3-30b-a3b": ("qwen3_moe", (151936, 2048, 6144, 48, 32, 4, 128, 40960), _QWEN3_MOE),
    "qwen3.5-9b": ("qwen3_5_text", (248320, 4096, 12288, 32, 16, 4, 256, 262144), _delta_net(32)),
    "qwen3.6-27b": ("qwen3_5_text", (248320, 5120, 17408, 64, 24, 4, 256, 262144), _delta_net(48)),
    "gemma-3-12b": ("gemma3_text", (262208, 3840, 15360, 48, 16, 8, 256, 131072), _GEMMA3),
    "gemma-4-12b": ("gemma4_unified_text", (262144, 3840, 15360, 48, 16, 8, 256, 262144), _gemma4(1)),
    "gemma-4-31b": ("gemma4_text", (262144, 5376, 21504, 60, 32, 16, 256, 262144), _gemma4(4)),
    "gpt-oss-20b": ("gpt_oss", (201088, 2880, 2880, 24, 64, 8, 64, 131072), _GPT_OSS),
}
# fmt: on
# a model type of Transformers, and what its config differs in; of Qwen 2.5 the positions are those of Instruct
SHAPES = {
    name: {"model_type": kind, **dict(zip(_SIZES, sizes, strict=True)), **more}
    for name, (kind, sizes, more) in _SHAPES.items()
}
# of the same sizes, and what else their configs differ in
SHAPES |= {
    "llama-3.1-8b": {**SHAPES["llama-3-8b"], **_long(8.0)},
    "llama-3.1-70b": {**SHAPES["llama-3-70b"], **_long(8.0)},
    "llama-3.3-70b": {**SHAPES["llama-3-70b"], **_long(8.0)},
    "mistral-7b-v0.3": SHAPES["mistral-7b"],
    "qwen3-30b-a3b-2507": {**SHAPES["qwen3-30b-a3b"], "max_position_embeddings": 262144},
}
NAMES = sorted(SHAPES)
_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_PUBLISHERS = ("meta-llama", "mistralai", "qwen", "google", "openai")  # others may give a name to other sizes
_TUNED = re.compile(r"-(instruct|base|it|pt)(?=-|$)")  # in names of checkpoints that share a shape


def shape_name(name: str) -> str | None:
    """The key of [`SHAPES`] that a model's name stands for, as people type it: `llama-3.1-8b` or
    `meta-llama/Llama-3.1-8B-Instruct`; `None` for other models."""
    publisher, _, own = name.lower().rpartition("/")
    if publisher and publisher not in _PUBLISHERS:
        return None
    plain = _TUNED.sub("", own).removeprefix("meta-")
    return plain if plain in SHAPES else None


@dataclass(frozen=True)
class Positions:
    """What a config says of positions, by the names that it has."""

    max_position_embeddings: int
    rope_parameters: dict[str, Any]

    def get_text_config(self) -> "Positions":
        return self


def dense_model(name: str) -> tuple[ModelSize, Positions] | None:
    """The sizes of a named model whose layers are all alike, by the formulas of its class, which need neither torch nor
    Transformers; `None` for other models."""
    shape = SHAPES.get(shape_name(name) or "", {})
    if shape.get("model_type") not in _DENSE:
        return None
    normed, biased = shape["model_type"] == "qwen3", shape["model_type"] == "qwen2"  # queries and keys
    hidden, inner, layers, head_dim = (shape[_SIZES[place]] for place in (1, 2, 3, 6))
    queries, keys = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    linear = layers * (2 * hidden * (queries + keys) + 3 * hidden * inner)
    others = layers * (2 * hidden + normed * 2 * head_dim + biased * (queries + 2 * keys)) + hidden
    head, tied = shape["vocab_size"] * hidden, shape.get("tie_word_embeddings", False)
    size = ModelSize(
        name=name,
        layers=layers,
        hidden=hidden,
        inner=inner,
        q_heads=shape["num_attention_heads"],
        kv_heads=shape["num_key_value_heads"],
        head_dim=head_dim,
        value_dim=head_dim,
        patterns=((MaskPattern(causal=True), float(layers)),),
        norms=float(2 * hidden + normed * (queries + keys)),
        head_norms=float(normed * (queries + keys)),
        vocabulary=shape["vocab_size"],
        weights=linear + others + head * (1 if tied else 2),
        used=linear + others + head,
        head=head,
        tied=tied,
        linear=linear,
        adapted=layers * (7 * hidden + 2 * (queries + keys) + 3 * inner),
        unused=0,
        routed=0,
        experts=0,
        fused=0,
        fused_in_layer=0,
        visited=0,
        tower=None,
        latent=0,
        rotary=2 * head_dim,
        liger=True,
    )
    return size, Positions(shape["max_position_embeddings"], shape.get("rope_parameters", {"rope_type": "default"}))
