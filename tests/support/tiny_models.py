"""A tiny model with random weights for every class of Transformers that is compared, by its own config class.

`hf_burst.check.tiny.SIZES` names the config attributes that mean the same everywhere. `OVERRIDES` and, for wrappers of
a language model and towers, `SETTINGS` hold what single families need besides, and switch on what their configs leave
out. The config of a wrapper is made small as by `hf-burst check`.
"""

import dataclasses
from functools import reduce
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, SiglipVisionConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from hf_burst.check import tiny
from hf_burst.check.tiny import LAYERS, WINDOW
from hf_burst.hf.models.cut_point import modalities_of

SIZES: dict[str, Any] = {**tiny.SIZES, "use_sliding_window": True, "is_decoder": True}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_LINEAR = {"linear_value_head_dim": 8, "linear_num_value_heads": 2}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_GEMMA4_TEXT = {**_MIXED, "global_head_dim": 8}
_SHARED = {"num_kv_shared_layers": LAYERS, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
# in effect beyond 20 positions, so for one sequence and not for the packed documents
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 20,
}
_MLA = {"num_key_value_heads": 4}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 16}
_REFORMER = {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 16)}
_BLT = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "hidden_size_global": 32}
OVERRIDES: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": _MLA,
    "BailingHybridForCausalLM": {**_HYBRID, **_MLA},
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 50,
        "patcher_config": {**_BLT, "hidden_size": 32},
        "encoder_config": {**_BLT, "hidden_size": 32},
        "decoder_config": {**_BLT, "hidden_size": 32},
        "global_config": {**_BLT, "hidden_size": 32},
    },
    "CohereCompassForCausalLM": {
        **_MIXED,
        "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_top_k": 2},
    },
    "DeepseekV2ForCausalLM": _MLA,
    "DeepseekV3ForCausalLM": _MLA,
    "DeepseekV4ForCausalLM": {"o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8},
    "Dots3NoteForCausalLM": {
        "num_key_value_heads": 4,
        "index_n_heads": 2,
        "index_head_dim": 8,
        **{f"swa_{key}": value for key, value in SIZES.items() if "lora" in key or "head_dim" in key},
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 12,
    },
    "EsmcForMaskedLM": _MLA,
    "FuyuForCausalLM": {"text_config": {"model_type": "persimmon"}},
    "Gemma2ForCausalLM": {"attn_logit_softcapping": 2.0},
    "Gemma3ForCausalLM": _MIXED,
    "Gemma3ForConditionalGeneration": {
        "text_config": _MIXED,
        "vision_config": _SIGLIP,
    },
    "Gemma3nForCausalLM": _MIXED,
    "Gemma4AssistantForCausalLM": {
        "text_config": {"model_type": "gemma4_text", **_SHARED},
        "backbone_hidden_size": 32,
    },
    "Gemma4ForCausalLM": {**_GEMMA4_TEXT, "enable_moe_block": True},
    "Gemma4ForConditionalGeneration": {"text_config": _GEMMA4_TEXT},
    "Gemma4UnifiedAssistantForCausalLM": {
        "text_config": {"model_type": "gemma4_unified_text", "num_kv_shared_layers": LAYERS},
        "backbone_hidden_size": 32,
    },
    "Gemma4UnifiedForCausalLM": _GEMMA4_TEXT,
    "Gemma4UnifiedForConditionalGeneration": {"text_config": _GEMMA4_TEXT},
    "GitForCausalLM": {"vision_config": {**_TOWER, "image_size": 32, "patch_size": 16}},
    "Glm4MoeLiteForCausalLM": _MLA,
    "GotOcr2ForConditionalGeneration": {
        "text_config": {"model_type": "qwen2"},
        "vision_config": {**_TOWER, "image_size": 32, "mlp_dim": 16, "output_channels": 8},
    },
    "GPT2LMHeadModel": {"scale_attn_by_inverse_layer_idx": True},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "GraniteMoeHybridForCausalLM": _HYBRID,
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {**_HYBRID, **_MLA},
    "Kolibri1ForCausalLM": _MIXED,
    "LEDForQuestionAnswering": {"attention_window": 8},  # an even one
    "LagunaForCausalLM": {**_MIXED, "num_attention_heads_per_layer": [4] * 4},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "LongcatFlashForCausalLM": {**_MLA, "head_dim": 4},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MellumForCausalLM": _MIXED,
    "MiniCPM3ForCausalLM": _MLA,
    "MiniMaxM3VLForCausalLM": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
    "Ministral3ForCausalLM": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "MinistralForCausalLM": _MIXED,
    "MobileBertForMaskedLM": {"embedding_size": 16},
    "ModernVBertForMaskedLM": {"text_config": {"model_type": "modernbert"}, "vision_config": _SIGLIP},
    "MossTranscribeDiarizeForConditionalGeneration": {
        "text_config": {"model_type": "qwen3"},
        "audio_config": {**_TOWER, "num_mel_bins": 8},
    },
    "NeoMMEForMaskedLM": {"head_dim": 16, "embedding_rank": 16},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "NemotronHForCausalLM": {"mamba_head_dim": 8},
    "Phi4MultimodalForCausalLM": {
        "vision_config": {**_TOWER, "image_size": 28, "crop_size": 28},
        "audio_config": {**_TOWER, "num_blocks": 1, "ext_pw_out_channel": 16, "nemo_conv_channels": 16},
    },
    "Phi3ForCausalLM": {"rope_parameters": _LONGROPE},
    "PhimoeForCausalLM": {
        "router_jitter_noise": 0.0,
        "rope_parameters": {**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.2},
    },
    "Qwen3_5ForCausalLM": _LINEAR,
    "Qwen3_5MoeForCausalLM": _LINEAR,
    "Qwen3NextForCausalLM": _LINEAR,
    "Qwen4ExpForCausalLM": {
        **_LINEAR,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "ReformerForMaskedLM": _REFORMER,
    "ReformerModelWithLMHead": _REFORMER,
    "RoCBertForCausalLM": {"pronunciation_vocab_size": 9, "shape_vocab_size": 9, "shape_embed_dim": 8},
    "UltraVBertForMaskedLM": {"text_config": {"model_type": "ultrabert"}, "vision_config": _SIGLIP},
    "VaultGemmaForCausalLM": {"attn_logit_softcapping": 2.0},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "YoutuForCausalLM": _MLA,
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "ZambaForCausalLM": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}


_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
_GLM_ROPE = {**_MROPE, "mrope_section": [8, 12, 12]}
_EYE = {
    **{"image_size": 32, "patch_size": 16, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 1, "num_attention_heads": 4},
}
_SIGLIP_EYE = {"model_type": "siglip_vision_model", **_EYE}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 8}
_OF_SOUND = ("AudioFlamingo3ForConditionalGeneration", "MusicFlamingoForConditionalGeneration")
SETTINGS: dict[str, dict[str, Any]] = {
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 1, "IMGIMGBSZ": 2}},
    "CohereCompassForConditionalGeneration": {
        "text_config": {**OVERRIDES["CohereCompassForCausalLM"], "num_hidden_layers": 4},
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
    "FastVlmForConditionalGeneration": {"vision_config": _SIGLIP_EYE},
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
    "PerceptionLMForConditionalGeneration": {"vision_config": {**_SIGLIP_EYE, "model_args": {"embed_dim": 32}}},
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
        "vision_config": SiglipVisionConfig(**_EYE, vocab_size=8, vocab_offset=67, rms_norm_eps=1e-6)
    },
    "Granite4VisionForConditionalGeneration": {"qformer_config.num_attention_heads": 4},
}


def class_names() -> list[str]:
    """Every class of the causal-LM and masked-LM mappings of the installed Transformers, once."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()})


def judging_names() -> list[str]:
    """Every class of the mappings for sequence and token classification and question answering, once."""
    mappings = (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    )
    return sorted({name for mapping in mappings for name in mapping.values()})


def overrides_of(name: str, model_class: type[PreTrainedModel]) -> dict[str, Any]:
    """What a class needs besides, or what the class with a language-model head and the same config needs."""
    family = name.partition("For")[0]
    names = [f"{family}For{head}" for head in ("ConditionalGeneration", "CausalLM", "MaskedLM")]
    names = [name, *names, f"{family.removesuffix('Text')}ForCausalLM", f"{family}LMHeadModel"]
    same = (key for key in names if key in OVERRIDES and _config_of(key) is model_class.config_class)
    return OVERRIDES.get(next(same, name), {})


def _config_of(name: str) -> Any:
    return getattr(getattr(transformers, name, None), "config_class", None)


def is_masked(name: str) -> bool:
    """Whether a class is in the masked-LM mapping alone."""
    return name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def tiny_config(config_class: type[PreTrainedConfig], overrides: dict[str, Any] | None = None) -> PreTrainedConfig:
    """The config of a class with every size that is known shrunk, and that of its text model too."""
    overrides = overrides or {}
    values, nested = sizes_of(config_class), {}
    for name, sub_class in config_class.sub_configs.items():
        given = overrides.get(name)
        if "model_type" in (given or {}):
            sub_class = CONFIG_MAPPING[given["model_type"]]
        if dataclasses.is_dataclass(sub_class) and (given is not None or name == "text_config"):
            nested[name] = {**(sizes_of(sub_class) if name == "text_config" else {}), **(given or {})}
    return config_class(**{**values, **overrides, **nested})


def sizes_of(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The attributes that `SIZES` names, and no dropout."""
    values = {}
    for field in dataclasses.fields(config_class):
        if field.name in SIZES:
            values[field.name] = SIZES[field.name]
        elif "drop" in field.name and isinstance(field.default, float):
            values[field.name] = 0.0
    return values


def tiny_model(name: str) -> PreTrainedModel:
    """The model of a class in fp64, the same in every process."""
    model_class = getattr(transformers, name)
    role = {"is_decoder": False} if is_masked(name) and "is_decoder" in sizes_of(model_class.config_class) else {}
    own = overrides_of(name, model_class)
    config = tiny_config(model_class.config_class, {**role, **own})
    if name in judging_names() and not own and (modalities_of(config) or config.is_encoder_decoder):
        config = tiny.shrink(config)  # its towers or its encoder, too
    return tiny.tiny_model(model_class, config).to(torch.float64)


def wrapper_names() -> list[str]:
    """Every class of the multimodal-LM mapping of the installed Transformers, once, and two of sound that it counts
    among encoder-decoders."""
    return sorted({*MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values(), *_OF_SOUND})


def tiny_wrapper(name: str) -> PreTrainedModel:
    """The model of a class in fp64, the same in every process."""
    model_class = getattr(transformers, name)
    config = model_class.config_class(**SETTINGS.get(name, {}))
    if name in FITTING:
        config = model_class.config_class(text_config=tiny.shrink(config.text_config).to_dict(), **FITTING[name])
    else:
        config = tiny.shrink(config)
    for path, value in CHANGES.get(name, {}).items():
        *parts, key = path.split(".")
        vars(reduce(getattr, parts, config))[key] = value  # of another class than it should be
    return tiny.tiny_model(model_class, config).to(torch.float64)
