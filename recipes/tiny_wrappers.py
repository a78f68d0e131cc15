"""A tiny model with random weights for every class of Transformers that answers images or sound by text, by its own
config class.

A wrapper's config holds one for its language model and one for each tower. All of them are made small as by `hf-burst
check`. `SETTINGS` holds what single families need besides, and switches on what their default configs leave out.
"""

from functools import reduce
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, SiglipVisionConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from hf_burst.check.tiny import shrink, tiny_model

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
_GLM_ROPE = {**_MROPE, "mrope_section": [8, 12, 12]}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
_TOWER = {
    "image_size": 32,
    "patch_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 8}
_OF_SOUND = ("AudioFlamingo3ForConditionalGeneration", "MusicFlamingoForConditionalGeneration")
SETTINGS: dict[str, dict[str, Any]] = {
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 1, "IMGIMGBSZ": 2}},
    "CohereCompassForConditionalGeneration": {
        "text_config": {
            **_MIXED,
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    },
    "DeepseekOcr2ForConditionalGeneration": {
        "text_config": {"mlp_layer_types": ["dense", *["sparse"] * 31], "num_experts_per_tok": 6}
    },
    "DiffusionGemmaForBlockDiffusion": {
        "text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 1024}
    },
    "Dots3NoteForConditionalGeneration": {
        "text_config": {"layer_types": ["indexed_attention"] * 4, "num_hidden_layers": 4}
    },
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {"<image>": 1, "<|extra_200|>": 2},
        "vq_config": {"base_channels": 32, "hidden_size": 32, "codebook_size": 64},
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [22, 22, 20]}}
    },
    "FastVlmForConditionalGeneration": {"vision_config": _SIGLIP},
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [[0, 1], [1, 2]],
        "spatial_target_layers": [1, 2],
        "downsample_rate": "1/2",
    },
    **{
        f"{family}ForConditionalGeneration": {"text_config": {"rope_parameters": _GLM_ROPE}}
        for family in ("Glm4v", "Glm46V", "GlmOcr")
    },
    "Glm4vMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": {**_GLM_ROPE, "partial_rotary_factor": 0.5}}
    },
    "HunYuanVLForConditionalGeneration": {
        "text_config": {"head_dim": 128, "rope_parameters": {**_MROPE, "mrope_section": [16] * 4}}
    },
    "JanusForConditionalGeneration": {"vq_config": {"base_channels": 32, "num_embeddings": 64}},
    "MiniMaxM3SparseForConditionalGeneration": {
        "text_config": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "num_hidden_layers": 4}
    },
    "MistralLarge4ForConditionalGeneration": {"text_config": {"num_hidden_layers": 4}},
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [2, 1]}},
    "MuseSparkForConditionalGeneration": {"audio_config": {"hidden_sizes": [8, 8, 16, 16]}},
    "PaddleOCRVLForConditionalGeneration": {"text_config": {"rope_parameters": _MROPE}},
    "PerceptionLMForConditionalGeneration": {"vision_config": {**_SIGLIP, "model_args": {"embed_dim": 32}}},
    "Qwen2VLForConditionalGeneration": {"text_config": {"rope_parameters": _MROPE}},
    "Qwen2_5_VLForConditionalGeneration": {"text_config": {"rope_parameters": _MROPE}},
    "Qwen2_5OmniThinkerForConditionalGeneration": {
        "text_config": {"rope_parameters": _MROPE},
        "vision_start_token_id": 151652,
    },
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"vision_start_token_id": 151652},
    "Qwen4ExpForConditionalGeneration": {"text_config": {**_INDEXER, "indexer_compress_ratio": 2}},
    "KyutaiSpeechToTextForConditionalGeneration": {"audio_pad_token_id": 64},
    "Step3p7ForConditionalGeneration": {
        "text_config": {"sliding_window": 512, "layer_types": [*_MIXED["layer_types"], *["full_attention"] * 41]}
    },
    "VibeVoiceAsrForConditionalGeneration": {
        f"{kind}_tokenizer_encoder_config": {"num_filters": 2, "depths": [1] * 7} for kind in ("acoustic", "semantic")
    },
}

# whose config refuses sizes that do not fit each other: what stands beside its small text_config
FITTING: dict[str, dict[str, Any]] = {
    "Apertus1p5ForConditionalGeneration": {
        "vision_config": {"codebook_size": 16, "embed_dim": 8, "latent_channels": 8, "base_channels": 32},
        "audio_config": {"codebook_size": 16, "codebook_dim": 32, "hidden_size": 32, "num_filters": 2},
        **{"image_token_id": 5, "audio_token_id": 6, "image_token_offset": 20, "audio_token_offset": 36},
    }
}


# of the small config, by dotted names; a tower of timm needs its package, and text does not go through it
CHANGES: dict[str, dict[str, Any]] = {
    "Gemma3nForConditionalGeneration": {
        "vision_config": SiglipVisionConfig(**_TOWER, vocab_size=8, vocab_offset=67, rms_norm_eps=1e-6)
    },
    "Granite4VisionForConditionalGeneration": {"qformer_config.num_attention_heads": 4},
}


def wrapper_names() -> list[str]:
    """Every class of the multimodal-LM mapping of the installed Transformers, once, and two of sound that it counts
    among encoder-decoders."""
    return sorted({*MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values(), *_OF_SOUND})


def tiny_wrapper(name: str) -> PreTrainedModel:
    """The model of a class in fp64, the same in every process."""
    model_class = getattr(transformers, name)
    config = model_class.config_class(**SETTINGS.get(name, {}))
    if name in FITTING:
        config = model_class.config_class(text_config=shrink(config.text_config).to_dict(), **FITTING[name])
    else:
        config = shrink(config)
    for path, value in CHANGES.get(name, {}).items():
        *parts, key = path.split(".")
        vars(reduce(getattr, parts, config))[key] = value  # of another class than it should be
    return tiny_model(model_class, config).to(torch.float64)
