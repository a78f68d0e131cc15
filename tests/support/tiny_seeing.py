"""A tiny model that sees, of each family that is served with images."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_burst.check.tiny import Double

IMAGE, VIDEO, START = 60, 61, 62  # token ids; text has smaller ones
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": 63}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_CLIP = {"model_type": "clip_vision_model", **_TOWER, "projection_dim": 16}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False}
_PATCHES = {  # of towers that take patches of images of any size
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_LLAMA, _QWEN2 = {"model_type": "llama", **TEXT}, {"model_type": "qwen2", **TEXT}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, "sliding_window": 16}
_TILES = {"image_grid_pinpoints": [[16, 16], [16, 32]]}


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}


_QWEN3_5 = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": _mrope(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.25),
}
_QWEN3_VL = {"head_dim": 8, "rope_parameters": _mrope(2, 1, 1, mrope_interleaved=True)}
_DEEP = {**_PATCHES, "depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
_TABLE = {**_PATCHES, "num_position_embeddings": 64}
_GLM_IDS = {
    **{f"{kind}_token_id": number for kind, number in (("image", IMAGE), ("video", VIDEO), ("image_start", START))},
    **{"image_end_token_id": 63, "video_start_token_id": 58, "video_end_token_id": 59},
}
_GLM = {"rope_parameters": _mrope(1, 1, 2, partial_rotary_factor=1.0)}
_GLM_EXPERTS = {
    **{"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
_PLAIN_TOWER = {
    name: _TOWER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
_SAM = {
    **{**_TOWER, "image_size": 64, "patch_size": 16, "output_channels": 8, "window_size": 2},
    **{"global_attn_indexes": [1], "mlp_dim": 24, "mlp_ratio": 1.5},
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
_MUSE = {
    **{"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "layer_rope_theta": [1e4, 0],
}
_MUSE_TOWER = {
    **{**_PLAIN_TOWER, "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8, "max_position_embeddings": 64},
    "layer_types": ["window_attention", "full_attention"],
}
_MUSE_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "out_hidden_size": 64, "projector_hidden_size": 16}
_SOUND = {
    **{"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16},
    "max_source_positions": 16,
}
_OMNI_IDS = {
    **{
        f"{kind}_{name}": number
        for kind, number in (("image", IMAGE), ("video", VIDEO), ("audio", 59))
        for name in ("token_id", "token_index")
    },
    **{"vision_start_token_id": START, "audio_start_token_id": 58, "user_token_id": 57},
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "Aria": {
        "text_config": {**TEXT, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        "vision_config": transformers.Idefics3VisionConfig(**_TOWER),
        "projector_patch_to_query_dict": {4: 2},
    },
    "AyaVision": {
        "text_config": {
            **{"model_type": "cohere2", **TEXT, "sliding_window": 16, "logit_scale": 1.0},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _SIGLIP,
        "downsample_factor": 2,
    },
    "Cohere2Vision": {
        "text_config": {
            **{"model_type": "cohere2", **TEXT, "sliding_window": 16, "logit_scale": 1.0},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _SIGLIP,
        **{"downsample_factor": 2, "alignment_intermediate_size": 32},
    },
    "DeepseekVL": {"text_config": _LLAMA, "vision_config": _SIGLIP},
    "Ernie4_5_VLMoe": {
        "text_config": {
            **{**TEXT, "moe_intermediate_size": [16, 16], "moe_num_experts": 4, "moe_k": 2},
            **{"moe_num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
            "rope_parameters": _mrope(1, 1, 2),
        },
        "vision_config": {
            **{name: value for name, value in _PATCHES.items() if name not in ("out_hidden_size",)},
            "temporal_merge_size": 2,
        },
        **_GLM_IDS,
    },
    "Gemma3": {
        "text_config": {"model_type": "gemma3_text", **TEXT, **_SLIDING, "query_pre_attn_scalar": 8},
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
    },
    "Gemma4": {
        "text_config": {
            **{**TEXT, **_SLIDING, "pad_token_id": 0, "use_bidirectional_attention": "vision"},
            **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 8},
        },
        "vision_config": {
            **{**_TOWER, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4},
            **{"pooling_kernel_size": 2, "position_embedding_size": 64},
        },
        **{"audio_config": None, "video_token_id": VIDEO},
    },
    "Gemma4Unified": {
        "text_config": {**TEXT, **_SLIDING, "pad_token_id": 0, "global_head_dim": 8},
        "vision_config": {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 64, "output_proj_dims": 16},
        **{"audio_config": None, "video_token_id": VIDEO},
    },
    "Glm46V": {
        "text_config": {"model_type": "glm4v_text", **TEXT, **_GLM},
        "vision_config": {"model_type": "glm4v_vision", **_PATCHES, "image_size": 32},
        **_GLM_IDS,
    },
    "Glm4vMoe": {
        "text_config": {**TEXT, **_GLM, **_GLM_EXPERTS, "head_dim": 8},
        "vision_config": {**_PATCHES, "image_size": 32},
        **_GLM_IDS,
    },
    "GlmOcr": {"text_config": {**TEXT, **_GLM, "head_dim": 8}, "vision_config": _PATCHES, **_GLM_IDS},
    "GotOcr2": {
        "text_config": _QWEN2,
        "vision_config": {
            **{**_TOWER, "image_size": 64, "patch_size": 16, "output_channels": 8, "window_size": 2},
            **{"global_attn_indexes": [1], "mlp_dim": 24, "mlp_ratio": 1.5},
        },
    },
    "Glm4v": {"text_config": {**TEXT, **_GLM}, "vision_config": {**_PATCHES, "image_size": 32}, **_GLM_IDS},
    "Idefics2": {
        "text_config": {"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None},
        "vision_config": _TOWER,
        "perceiver_config": {
            **{"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2},
            **{"resampler_head_dim": 8, "num_key_value_heads": 1},
        },
    },
    "Idefics3": {"text_config": _LLAMA, "vision_config": _TOWER, "scale_factor": 2},
    "InternVL": {
        "text_config": _QWEN2,
        "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_seq_length": 4,
    },
    "Janus": {
        "text_config": _LLAMA,
        "vision_config": {**_TOWER, "projection_dim": 32, "mlp_ratio": 1.5, "depth": 2},
        "vq_config": {"base_channels": 32, "num_embeddings": 64},
    },
    "Lfm2Vl": {
        "text_config": {"model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention"]},
        "vision_config": {
            **{name: value for name, value in _TOWER.items() if name != "image_size"},
            **{"model_type": "siglip2_vision_model", "num_patches": 16},
        },
        **{"downsample_factor": 2, "projector_hidden_size": 32},
    },
    "LightOnOcr": {
        "text_config": {"model_type": "qwen3", **TEXT, "head_dim": 8},
        "vision_config": {"model_type": "pixtral", **_TOWER, "image_size": 32, "head_dim": 8},
        "spatial_merge_size": 2,
    },
    "Llava": {"text_config": _LLAMA, "vision_config": _CLIP, "image_seq_length": 4},
    "LlavaNext": {"text_config": _LLAMA, "vision_config": _CLIP, **_TILES},
    "LlavaNextVideo": {"text_config": _LLAMA, "vision_config": _CLIP, "video_token_index": VIDEO, **_TILES},
    "LlavaOnevision": {
        **{"text_config": _QWEN2, "vision_config": _SIGLIP, **_TILES, "vision_feature_layer": -1},
        "video_token_index": VIDEO,
    },
    "Llama4": {
        "text_config": {
            **{**TEXT, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 512},
            **{"num_local_experts": 2, "num_experts_per_tok": 1},
        },
        "vision_config": {
            **{**_TOWER, "patch_size": 4, "intermediate_size": 64, "vision_output_dim": 32},
            **{"projector_input_dim": 32, "projector_output_dim": 32},
        },
    },
    "Mistral3": {
        "text_config": {"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **_TOWER, "image_size": 32, "head_dim": 8},
    },
    "PaddleOCRVL": {
        "text_config": {**TEXT, "rope_parameters": _mrope(1, 1, 2), "head_dim": 8},
        "vision_config": {
            **{**_TOWER, "patch_size": 4, "image_size": 32},
            **{"spatial_merge_size": 2, "temporal_patch_size": 1},
        },
        **_IDS,
    },
    "PaliGemma": {
        "text_config": {"model_type": "gemma2", **TEXT, **_SLIDING, "sliding_window": 40, "query_pre_attn_scalar": 8},
        "vision_config": {**_SIGLIP, "projection_dim": 32},
        "projection_dim": 32,
    },
    "QianfanOCR": {
        "text_config": {"model_type": "qwen3", **TEXT, "head_dim": 8},
        "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4], "drop_path_rate": 0.0},
        "image_seq_length": 4,
    },
    "Qwen2VL": {
        "text_config": {**TEXT, "rope_parameters": _mrope(1, 1, 2)},
        "vision_config": {**_PATCHES, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        **_IDS,
    },
    "Qwen2_5_VL": {
        "text_config": {**TEXT, "rope_parameters": _mrope(1, 1, 2)},
        "vision_config": {**_PATCHES, "window_size": 16, "fullatt_block_indexes": [1]},
        **_IDS,
    },
    "Qwen3VL": {"text_config": {**TEXT, **_QWEN3_VL}, "vision_config": _DEEP, **_IDS},
    "Qwen3VLMoe": {"text_config": {**TEXT, **_QWEN3_VL, **_EXPERTS}, "vision_config": _DEEP, **_IDS},
    "Qwen3_5": {"text_config": {**TEXT, **_QWEN3_5}, "vision_config": _TABLE, **_IDS},
    "Qwen3_5Moe": {
        "text_config": {**TEXT, **_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 16},
        "vision_config": _TABLE,
        **_IDS,
    },
    "SmolVLM": {"text_config": _LLAMA, "vision_config": _TOWER, "scale_factor": 2},
    "CohereCompass": {
        "text_config": {
            **{**TEXT, "head_dim": 8, "logit_scale": 1.0, "sliding_window": 16},
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "vision_config": _DEEP,
        **_IDS,
    },
    "Cosmos3Edge": {
        "text_config": {**TEXT, "head_dim": 8, "rope_parameters": _mrope(1, 1, 2)},
        "vision_config": {**_PLAIN_TOWER, "patch_size": 4, "num_patches": 16, "spatial_merge_size": 2},
        **{"projector_hidden_size": 32, **_IDS},
    },
    "Cosmos3Omni": {
        "text_config": {"model_type": "qwen3_vl_text", **TEXT, **_QWEN3_VL},
        "vision_config": {"model_type": "qwen3_vl_vision", **_DEEP},
        **_IDS,
    },
    "DeepseekOcr2": {
        "text_config": {
            **{**TEXT, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": {
            "sam_config": {**_SAM, "downsample_channels": [12, 16]},
            "encoder_config": {**TEXT, "hidden_size": 16},
        },
    },
    "DeepseekVLHybrid": {
        "text_config": _LLAMA,
        "vision_config": {**_SIGLIP, "image_size": 32},
        "high_res_vision_config": {"model_type": "sam_vision_model", **_SAM},
    },
    "Emu3": {
        "text_config": {**TEXT, **{f"{kind}_token_id": 0 for kind in ("pad", "bos", "eos")}, "attention_dropout": 0.0},
        "vq_config": {
            **{"base_channels": 32, "hidden_size": 32, "codebook_size": 4, "num_res_blocks": 1},
            **{"channel_multiplier": [1, 1], "attn_resolutions": [], "temporal_downsample_factor": 2},
        },
        "vocabulary_map": {
            **{"<image>": IMAGE, "<|extra_200|>": 59},
            **{f"<|visual token {number:06}|>": 40 + number for number in range(4)},
        },
    },
    "Exaone4_5_": {
        "text_config": {
            **{"model_type": "exaone4", **TEXT, "sliding_window": 16, "sliding_window_pattern": 2},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {**_PATCHES, "window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 1},
        **{"image_token_id": IMAGE, "video_token_id": VIDEO},
    },
    "FuyuForCausalLM": {"text_config": {"model_type": "persimmon", **TEXT}, "patch_size": 4, "image_size": 16},
    "Granite4Vision": {
        "text_config": {**TEXT, "num_hidden_layers": 6},
        "vision_config": {**_CLIP, "hidden_size": 64, "image_size": 32},
        "qformer_config": {
            **{"model_type": "blip_2_qformer", "hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 1},
            **{"encoder_hidden_size": 64, "vocab_size": 8},
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        },
        **{"deepstack_layer_map": [[0, 1], [1, 2]], "spatial_target_layers": [0, 3, 4, 5], "downsample_rate": "1/2"},
        **{"projector_dropout": 0.0, "image_grid_pinpoints": [[32, 32], [32, 64]]},
    },
    "GraniteDocling": {
        "text_config": {**TEXT, "embedding_multiplier": 2.0},
        "vision_config": {**_TOWER, "out_hidden_size": 32, "scale_factor": 2, "deepstack_visual_indexes": [0, 1]},
    },
    "HunYuanVL": {
        "text_config": {**TEXT, "head_dim": 8, "rope_parameters": _mrope(1, 1, 1, 1), "eod_token_id": None},
        "vision_config": {
            **{
                **_PLAIN_TOWER,
                "num_key_value_heads": 2,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "out_hidden_size": 32,
            },
            **{"max_image_size": 32, "text_hidden_size": 32, "img_max_token_num": 64, "max_vit_seq_len": 64},
        },
    },
    "HyperCLOVAXVisionV2": {
        "text_config": {"model_type": "hyperclovax", **TEXT, "head_dim": 8},
        "vision_config": {
            **{"model_type": "qwen2_5_vl_vision", **_PATCHES, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        **{"image_token_id": IMAGE, "video_token_id": VIDEO},
    },
    "Kimi_K25": {
        "text_config": {
            **{"model_type": "deepseek_v3", **TEXT, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1},
            **{"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4},
            **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        },
        "vision_config": {**_PLAIN_TOWER, "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8},
        **{"projection_hidden_size": 16, **_IDS},
    },
    "Lfm3Vl": {
        "text_config": {
            **{"model_type": "lfm3", **TEXT, "head_dim": 8, "sliding_window": 16, "num_hidden_layers": 3},
            "layer_types": ["conv", "full_attention", "sliding_attention"],
        },
        "vision_config": {
            **{**_PLAIN_TOWER, "num_key_value_heads": 1, "patch_size": 4, "spatial_merge_size": 2},
            "layer_types": ["conv", "full_attention"],
        },
        **{"projector_hidden_size": 32, **_IDS},
    },
    **{
        family: {
            "text_config": {"model_type": "qwen3_5_text", **TEXT, **_QWEN3_5, **rope},
            "vision_config": {**_TOWER, "num_hidden_layers": 3, "patch_size": 4, "insert_layer_id": 1},
            **{"insert_layer_id": 1, "image_token_id": IMAGE, "video_token_id": VIDEO, "patch_size": 4},
            **({"image_start_id": START, "image_end_id": 63} if family.endswith("7") else {}),
        }
        for family, rope in (("MiniCPMOcr", _ROPE), ("MiniCPMV4_6", _ROPE), ("MiniCPMV4_7", {}))
    },
    "MuseGlimmer": {"text_config": {**TEXT, **_MUSE}, "vision_config": _MUSE_TOWER, **_MUSE_IDS},
    "MuseSpark": {
        "text_config": {
            **{**TEXT, **_MUSE, "moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"moe_hidden_size": 16, "mlp_layer_types": ["sparse", "sparse"]},
        },
        "vision_config": _MUSE_TOWER,
        "audio_config": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "out_hidden_size": 32},
        **{**_MUSE_IDS, "audio_token_id": 59},
    },
    "NemotronH_Omni_Reasoning_V3": {
        "text_config": {
            **{"model_type": "nemotron_h", **TEXT, "layers_block_type": ["linear_attention", "moe", "full_attention"]},
            **{"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8},
            **{"n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
            **{"head_dim": 8, "pad_token_id": 0},
        },
        "vision_config": {
            **{"model_type": "radio", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"patch_size": 4, "image_size": 16, "max_img_size": 32, "patch_dim": 48, "video_patch_dim": 96},
            "video_temporal_patch_size": 2,
        },
        **{"projector_hidden_size": 16, "vision_hidden_size": 16, "video_token_id": VIDEO, "audio_token_id": 59},
    },
    "Ovis2": {
        "text_config": _QWEN2,
        "vision_config": {**_TOWER, "vocab_size": 24, "num_visual_indicator_tokens": 2},
        **{"visual_indicator_token_ids": [START, 63], "vocab_size": 64, "hidden_size": 32},
    },
    "Qwen2_5OmniThinker": {
        "text_config": {**TEXT, "rope_parameters": _mrope(1, 1, 2)},
        "vision_config": {**_PATCHES, "window_size": 16, "fullatt_block_indexes": [1]},
        "audio_config": {**_SOUND, "n_window": 4, "output_dim": 32},
        **_OMNI_IDS,
    },
    "Qwen3OmniMoeThinker": {
        "text_config": {**TEXT, **_QWEN3_VL, **_EXPERTS},
        "vision_config": _DEEP,
        "audio_config": {**_SOUND, "n_window": 4, "output_dim": 32, "downsample_hidden_size": 8},
        **_OMNI_IDS,
    },
    "Step3p7": {
        "text_config": {
            **{
                **TEXT,
                "head_dim": 8,
                "num_sliding_attention_heads": 4,
                "num_experts_per_tok": 2,
                "n_routed_experts": 4,
            },
            **{"moe_intermediate_size": 16, "share_expert_dim": 16, "mlp_layer_types": ["dense", "sparse"]},
            **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "pad_token_id": 0},
        },
        "vision_config": {**_TOWER, "patch_size": 2, "max_position_embeddings": 64, "mlp_ratio": 1.5},
    },
    "UnlimitedOcr": {
        "text_config": {
            **{**TEXT, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"mlp_layer_types": ["dense", "sparse"], "layer_types": ["reference_sliding_attention"] * 2},
            **{"num_key_value_heads": 4, "sliding_window": 16},
        },
        "vision_config": {
            "sam_config": {**_SAM, "downsample_channels": [12, 16]},
            "encoder_config": {**_TOWER, "image_size": 16, "patch_size": 8},
        },
    },
    "VideoLlama3": {
        "text_config": _QWEN2,
        "vision_config": {**_PLAIN_TOWER, "patch_size": 4},
        **{"image_token_id": IMAGE, "video_token_id": VIDEO},
    },
    "VideoLlava": {
        "text_config": _LLAMA,
        "vision_config": _CLIP,
        **{"image_token_index": IMAGE, "video_token_index": VIDEO, "image_seq_length": 4, "video_seq_length": 15},
    },
    "VipLlava": {"text_config": _LLAMA, "vision_config": _CLIP, "vision_feature_layers": [-1, -2]},
}
FAMILIES = tuple(_CONFIGS)


def seeing_class(family: str) -> Any:
    """The class of a family."""
    return getattr(transformers, f"{family}ForConditionalGeneration", None) or getattr(transformers, family)


def seeing_model(family: str) -> PreTrainedModel:
    """A tiny model of a family with a tower for images, as [`double_model`] makes it."""
    torch.manual_seed(0)
    kind = seeing_class(family)
    names = {"image_token_id", "image_token_index"} & set(vars(kind.config_class()))
    model = double_model(kind, kind.config_class(**{**dict.fromkeys(sorted(names), IMAGE), **_CONFIGS[family]}))
    for weight in model.parameters():
        if weight.ndim > 1 and not weight.any():  # Gemma 3's projector: no gradient would reach the tower
            torch.nn.init.normal_(weight, std=0.02)
    return model


def double_model(kind: Any, config: Any) -> PreTrainedModel:
    """A model in fp64, in training; the default dtype is fp64 meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Double():
            model: PreTrainedModel = kind(config).to(torch.float64)
    finally:
        torch.set_default_dtype(before)
    model.set_experts_implementation("eager")  # others have no fp64
    return model.train()
