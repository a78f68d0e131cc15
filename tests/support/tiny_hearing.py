"""Tiny models that hear, one of each family that is served with sound, and batches with sound for them."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.support.tiny_seeing import TEXT, double_model

Batch = dict[str, torch.Tensor]
START, SOUND = 57, 60  # token ids; text has smaller ones
_WORDS = 56
_TEXT: dict[str, Any] = {**TEXT, "head_dim": 8}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 8,
    "max_source_positions": 12,
}
_LLAMA, _QWEN2, _QWEN3 = ({"model_type": name, **_TEXT} for name in ("llama", "qwen2", "qwen3"))
_OF_CHUNKS = {  # of towers that encode chunks of a clip
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "n_window": 4,
    "n_window_infer": 16,
    "output_dim": 32,
    "max_source_positions": 64,
}
_LONG_CHUNKS = {**_OF_CHUNKS, "downsample_hidden_size": 4, "n_window": 50, "n_window_infer": 100}
_PATCHES = {  # of a tower for images, which sees none
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_IDS = {
    **{"audio_token_id": SOUND, "image_token_id": 61, "video_token_id": 62, "audio_start_token_id": START},
    **{"audio_end_token_id": 58, "vision_start_token_id": 59, "vision_end_token_id": 63, "user_token_id": 56},
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_GEMMA_3N = {
    **{"hidden_size": 16, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 2, "input_feat_size": 8},
    **{"sscp_conv_channel_size": (4, 4), "vocab_size": 4, "vocab_offset": 68, "conf_attention_chunk_size": 4},
    **{"conf_attention_context_left": 5},
}
_CONVOLUTIONS = {  # of a tokenizer that makes one token of four values
    **{"model_type": "vibevoice_acoustic_tokenizer_encoder", "hidden_size": 8, "num_filters": 4},
    **{"downsampling_ratios": [2, 2], "depths": [1, 1, 1], "vae_std": 0.0},
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "AudioFlamingo3": {"text_config": _QWEN2, "audio_config": _TOWER},
    "Gemma3n": {
        "text_config": {
            **{**_TEXT, **_SLIDING, "vocab_size": 72, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0},
            **{"hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]},
            "intermediate_size": [48, 48],
        },
        "audio_config": _GEMMA_3N,
        "audio_soft_tokens_per_image": 8,
        "audio_token_id": 70,
    },
    "Gemma4": {
        "text_config": {
            **{**_TEXT, **_SLIDING, "global_head_dim": 8, "num_kv_shared_layers": 0, "pad_token_id": 0},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
        },
        "audio_config": {
            **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "attention_chunk_size": 4},
            **{"attention_context_left": 5, "output_proj_dims": 24, "subsampling_conv_channels": [8, 4]},
        },
        "vision_config": None,
        **_IDS,
    },
    "GlmAsr": {"text_config": _LLAMA, "audio_config": {**_TOWER, "head_dim": 8}},
    "MossTranscribeDiarize": {"text_config": _QWEN3, "audio_config": _TOWER},
    "MuseSpark": {
        "text_config": {
            **{**_TEXT, **_SLIDING, "moe_intermediate_size": 16, "moe_hidden_size": 16, "num_local_experts": 4},
            **{"num_experts_per_tok": 2, "layer_rope_theta": [1e4, 0], "mlp_layer_types": ["dense", "sparse"]},
        },
        "audio_config": {
            **{"depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [2, 2], "conv_kernel_size": 3},
            **{"num_hidden_layers": 2, "out_hidden_size": 32},
        },
        "vision_config": {
            **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"pos_emb_height": 4, "pos_emb_width": 4, "layer_types": ["full_attention"]},
        },
        **{"projector_hidden_size": 16, "out_hidden_size": 32},
        **_IDS,
    },
    "MusicFlamingo": {"text_config": _QWEN2, "audio_config": {"model_type": "audioflamingo3_encoder", **_TOWER}},
    "NemotronH_Omni_Reasoning_V3": {
        "text_config": {
            **{**_TEXT, "pad_token_id": 0, "layers_block_type": ["linear_attention", "full_attention"]},
            **{"mamba_head_dim": 8, "mamba_num_heads": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8},
        },
        "audio_config": {
            **{name: size for name, size in _TOWER.items() if name != "max_source_positions"},
            **{"conv_kernel_size": 3, "subsampling_conv_channels": 4, "subsampling_factor": 4, "layerdrop": 0.0},
            **{"projection_hidden_size": 16, "projection_bias": True, "dropout": 0.0, "activation_dropout": 0.0},
            "attention_dropout": 0.0,
        },
        "vision_config": {
            **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32},
            **{"max_img_size": 32, "mlp_ratio": 1.0, "video_temporal_patch_size": 2},
        },
        **{"vision_hidden_size": 16, "projector_hidden_size": 16},
        **_IDS,
    },
    "Qwen2_5OmniThinker": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE},
        "audio_config": _OF_CHUNKS,
        "vision_config": _PATCHES,
        **_IDS,
        **{"audio_token_index": SOUND, "image_token_index": 61, "video_token_index": 62},
    },
    "Qwen3ASR": {"text_config": _QWEN3, "audio_config": _LONG_CHUNKS},
    "Qwen3OmniMoeThinker": {
        "text_config": {
            **{**_TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            "rope_parameters": {**_ROPE, "mrope_interleaved": True},
        },
        "audio_config": _LONG_CHUNKS,
        "vision_config": {**_PATCHES, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        **_IDS,
    },
    "VibeVoiceAsr": {
        "text_config": _QWEN2,
        "acoustic_tokenizer_encoder_config": _CONVOLUTIONS,
        "semantic_tokenizer_encoder_config": _CONVOLUTIONS,
        "acoustic_tokenizer_chunk_size": 16,
    },
    "Voxtral": {"text_config": _LLAMA, "audio_config": _TOWER},
}
NAMES = tuple(sorted(_CONFIGS))


def _kind(family: str) -> Any:
    """The class of a family; `None` if this version of Transformers has none."""
    return getattr(transformers, f"{family}ForConditionalGeneration", None) or getattr(transformers, family, None)


FAMILIES = tuple(family for family in NAMES if _kind(family))


def hearing_model(family: str) -> PreTrainedModel:
    """A tiny model of a family with a tower for sound, in fp64, in training, the same in every process."""
    kind = _kind(family)
    torch.manual_seed(0)
    config = kind.config_class(**{"audio_token_id": SOUND, **deepcopy(_CONFIGS[family])})
    if family == "Gemma3n":  # its tower for images is of timm
        tower: dict[str, Any] = {"vocab_size": 4, "vocab_offset": 64, "rms_norm_eps": 1e-6}
        vars(config)["vision_config"] = transformers.SiglipVisionConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
            **tower,
        )
    return double_model(kind, config)


def _text(length: int, last: int = _WORDS) -> Batch:
    ids = torch.randint(1, last, (1, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def _text_with(length: int, tokens: list[int], token: int = SOUND) -> Batch:
    """A text with a place of so many tokens for each clip."""
    batch, place = _text(length), 9  # so that ranks hold tokens of clips that others encode
    for count in tokens:
        batch["input_ids"][0, place - 1] = START
        batch["input_ids"][0, place : place + count] = token
        place += count + 8
    return batch


def _clips(
    length: int,
    frames: list[int],
    tokens: list[int],
    size: int = 24,
    mask: str = "input_features_mask",
    token: int = SOUND,
) -> Batch:
    """Clips of so many frames, padded to `size`, between text."""
    batch = _text_with(length, tokens, token)
    features = torch.randn(len(frames), 8, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch["input_features"] = features
    if mask:
        batch[mask] = (torch.arange(size)[None] < torch.tensor(frames)[:, None]).long()
    return batch


def _values(length: int, mask: str, *shape: int) -> Batch:
    """Clips of 20 and 11 values, of which four make a token, between text."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    real = torch.arange(20)[None] < torch.tensor([[20], [11]])
    return {**_text_with(length, [5, 3]), "input_values": values, mask: real}


def _by_time(batch: Batch, types: str = "") -> Batch:
    """With a row for each frame, a mask of booleans, and types of tokens, of which 3 is sound."""
    return {
        **batch,
        **({types: 3 * (batch["input_ids"] >= SOUND)} if types else {}),
        "input_features": batch["input_features"].transpose(1, 2),
        "input_features_mask": batch["input_features_mask"].bool(),
    }


_BATCHES: dict[str, Callable[[int], Batch]] = {
    "AudioFlamingo3": lambda length: _clips(length, [24, 14], [6, 3]),
    "Gemma3n": lambda length: _by_time(_clips(length, [24, 14], [8, 8], token=70), "token_type_ids"),
    "Gemma4": lambda length: _by_time(_clips(length, [24, 14], [6, 4]), "mm_token_type_ids"),
    "GlmAsr": lambda length: _clips(length, [24, 14], [3, 1]),
    "MossTranscribeDiarize": lambda length: _clips(length, [24, 14], [3, 2]),
    "MuseSpark": lambda length: _values(length, "input_values_mask", 2, 20),
    "NemotronH_Omni_Reasoning_V3": lambda length: _by_time(_clips(length, [24, 14], [6, 4])),
    "MusicFlamingo": lambda length: _clips(length, [24, 14], [6, 3]),
    "Qwen2_5OmniThinker": lambda length: _clips(length, [24, 14], [6, 3], mask="feature_attention_mask"),
    "Qwen3ASR": lambda length: _clips(length, [130, 14], [17, 2], size=200),
    "Qwen3OmniMoeThinker": lambda length: _clips(length, [130, 14], [17, 2], 130, "feature_attention_mask"),
    "VibeVoiceAsr": lambda length: _values(length, "padding_mask", 2, 1, 20),
    "Voxtral": lambda length: _clips(length, [24, 24], [6, 6], mask=""),
}


def hearing_batch(family: str, length: int = 53) -> Batch:
    """One sequence with two clips between its text."""
    batch = _BATCHES[family](length)
    batch["labels"][:, :3] = -100
    return batch


def padded(batch: Batch) -> Batch:
    """Two rows: the sequence, and its beginning, padded on the right."""
    short = batch["input_ids"].shape[1] - 6
    twice = {key: torch.cat([value, value]) for key, value in batch.items()}
    twice["input_ids"][1, short:] = 0
    twice["labels"][1, short:] = -100
    mask = torch.ones_like(twice["input_ids"])
    mask[1, short:] = 0
    return {**twice, "attention_mask": mask}
