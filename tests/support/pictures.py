"""Tiny models that see, one of each family that is served with images, and batches with images for them."""

import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_burst.check.compare import Double

Batch = dict[str, torch.Tensor]
IMAGE, VIDEO, START = 60, 61, 62  # token ids; text has smaller ones
_WORDS = 56
_TEXT: dict[str, Any] = {
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
_TOWER = {
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
_LLAMA, _QWEN2 = {"model_type": "llama", **_TEXT}, {"model_type": "qwen2", **_TEXT}
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
_CONFIGS: dict[str, dict[str, Any]] = {
    "Aria": {
        "text_config": {**_TEXT, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        "vision_config": transformers.Idefics3VisionConfig(**_TOWER),
        "projector_patch_to_query_dict": {4: 2},
    },
    "AyaVision": {
        "text_config": {
            **{"model_type": "cohere2", **_TEXT, "sliding_window": 16, "logit_scale": 1.0},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _SIGLIP,
        "downsample_factor": 2,
    },
    "Cohere2Vision": {
        "text_config": {
            **{"model_type": "cohere2", **_TEXT, "sliding_window": 16, "logit_scale": 1.0},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _SIGLIP,
        **{"downsample_factor": 2, "alignment_intermediate_size": 32},
    },
    "DeepseekVL": {"text_config": _LLAMA, "vision_config": _SIGLIP},
    "Ernie4_5_VLMoe": {
        "text_config": {
            **{**_TEXT, "moe_intermediate_size": [16, 16], "moe_num_experts": 4, "moe_k": 2},
            **{"moe_num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
            "rope_parameters": _mrope(1, 1, 2),
        },
        "vision_config": {
            **{name: value for name, value in _PATCHES.items() if name not in ("out_hidden_size",)},
            "temporal_merge_size": 2,
        },
        **_GLM_IDS,
    },
    "Glm46V": {
        "text_config": {"model_type": "glm4v_text", **_TEXT, **_GLM},
        "vision_config": {"model_type": "glm4v_vision", **_PATCHES, "image_size": 32},
        **_GLM_IDS,
    },
    "Glm4vMoe": {
        "text_config": {**_TEXT, **_GLM, **_GLM_EXPERTS, "head_dim": 8},
        "vision_config": {**_PATCHES, "image_size": 32},
        **_GLM_IDS,
    },
    "GlmOcr": {"text_config": {**_TEXT, **_GLM, "head_dim": 8}, "vision_config": _PATCHES, **_GLM_IDS},
    "GotOcr2": {
        "text_config": _QWEN2,
        "vision_config": {
            **{**_TOWER, "image_size": 64, "patch_size": 16, "output_channels": 8, "window_size": 2},
            **{"global_attn_indexes": [1], "mlp_dim": 24, "mlp_ratio": 1.5},
        },
    },
    "Glm4v": {"text_config": {**_TEXT, **_GLM}, "vision_config": {**_PATCHES, "image_size": 32}, **_GLM_IDS},
    "Idefics2": {
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8, "sliding_window": None},
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
        "text_config": {"model_type": "lfm2", **_TEXT, "layer_types": ["conv", "full_attention"]},
        "vision_config": {
            **{name: value for name, value in _TOWER.items() if name != "image_size"},
            **{"model_type": "siglip2_vision_model", "num_patches": 16},
        },
        **{"downsample_factor": 2, "projector_hidden_size": 32},
    },
    "LightOnOcr": {
        "text_config": {"model_type": "qwen3", **_TEXT, "head_dim": 8},
        "vision_config": {"model_type": "pixtral", **_TOWER, "image_size": 32, "head_dim": 8},
        "spatial_merge_size": 2,
    },
    "Llava": {"text_config": _LLAMA, "vision_config": _CLIP, "image_seq_length": 4},
    "LlavaNext": {"text_config": _LLAMA, "vision_config": _CLIP, **_TILES},
    "LlavaNextVideo": {"text_config": _LLAMA, "vision_config": _CLIP, **_TILES},
    "LlavaOnevision": {"text_config": _QWEN2, "vision_config": _SIGLIP, **_TILES, "vision_feature_layer": -1},
    "Llama4": {
        "text_config": {
            **{**_TEXT, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 512},
            **{"num_local_experts": 2, "num_experts_per_tok": 1},
        },
        "vision_config": {
            **{**_TOWER, "patch_size": 4, "intermediate_size": 64, "vision_output_dim": 32},
            **{"projector_input_dim": 32, "projector_output_dim": 32},
        },
    },
    "Mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **_TOWER, "image_size": 32, "head_dim": 8},
    },
    "PaddleOCRVL": {
        "text_config": {**_TEXT, "rope_parameters": _mrope(1, 1, 2), "head_dim": 8},
        "vision_config": {
            **{**_TOWER, "patch_size": 4, "image_size": 32},
            **{"spatial_merge_size": 2, "temporal_patch_size": 1},
        },
        **_IDS,
    },
    "QianfanOCR": {
        "text_config": {"model_type": "qwen3", **_TEXT, "head_dim": 8},
        "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4], "drop_path_rate": 0.0},
        "image_seq_length": 4,
    },
    "Qwen2VL": {
        "text_config": {**_TEXT, "rope_parameters": _mrope(1, 1, 2)},
        "vision_config": {**_PATCHES, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        **_IDS,
    },
    "Qwen2_5_VL": {
        "text_config": {**_TEXT, "rope_parameters": _mrope(1, 1, 2)},
        "vision_config": {**_PATCHES, "window_size": 16, "fullatt_block_indexes": [1]},
        **_IDS,
    },
    "Qwen3VL": {"text_config": {**_TEXT, **_QWEN3_VL}, "vision_config": _DEEP, **_IDS},
    "Qwen3VLMoe": {"text_config": {**_TEXT, **_QWEN3_VL, **_EXPERTS}, "vision_config": _DEEP, **_IDS},
    "Qwen3_5": {"text_config": {**_TEXT, **_QWEN3_5}, "vision_config": _TABLE, **_IDS},
    "Qwen3_5Moe": {
        "text_config": {**_TEXT, **_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 16},
        "vision_config": _TABLE,
        **_IDS,
    },
    "SmolVLM": {"text_config": _LLAMA, "vision_config": _TOWER, "scale_factor": 2},
    "VipLlava": {"text_config": _LLAMA, "vision_config": _CLIP, "vision_feature_layers": [-1, -2]},
}
FAMILIES = tuple(_CONFIGS)


def seeing_model(family: str) -> PreTrainedModel:
    """A model in fp64, the same in every process; the default dtype is fp64 meanwhile."""
    torch.manual_seed(0)
    kind: Any = getattr(transformers, f"{family}ForConditionalGeneration")
    names = {"image_token_id", "image_token_index"} & set(vars(kind.config_class()))
    given = {**dict.fromkeys(sorted(names), IMAGE), **_CONFIGS[family]}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Double():
            model: PreTrainedModel = kind(kind.config_class(**given)).to(torch.float64)
    finally:
        torch.set_default_dtype(before)
    model.set_experts_implementation("eager")  # others have no fp64
    return model.train()


def _draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _text(length: int) -> Batch:
    ids = torch.randint(1, _WORDS, (1, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone(), "mm_token_type_ids": torch.zeros_like(ids)}


def _show(batch: Batch, start: int, count: int, token: int = IMAGE) -> int:
    """Puts an image, or a frame of a video, into the text; returns where a next one may begin."""
    batch["input_ids"][0, start - 1] = START
    batch["input_ids"][0, start : start + count] = token
    batch["mm_token_type_ids"][0, start : start + count] = 1 if token == IMAGE else 2
    return start + count + 5


def _patches(length: int, video: bool = False, frames_apart: bool = False) -> Batch:
    """Two images of other sizes, and for `video` one of three frames in the place of the second one, with text between
    the frames if they are `frames_apart`."""
    batch, grids = _text(length), [(1, 4, 4)] if video else [(1, 4, 4), (1, 4, 6)]
    place = 5
    for _, height, width in grids:
        place = _show(batch, place, height * width // 4)
    if video:
        for tokens in (4, 4, 4) if frames_apart else (12,):
            place = _show(batch, place, tokens, VIDEO)
        batch |= {"pixel_values_videos": _draw(48, 96, seed=2), "video_grid_thw": torch.tensor([[3, 4, 4]])}
    rows = sum(height * width for _, height, width in grids)
    return batch | {"pixel_values": _draw(rows, 96), "image_grid_thw": torch.tensor(grids)}


def _pictures(length: int, images: int, tokens: int, shape: tuple[int, ...], **more: torch.Tensor) -> Batch:
    """Images that take so many tokens each."""
    batch, place = _text(length), 5
    for _ in range(images):
        place = _show(batch, place, tokens)
    return {**batch, "pixel_values": _draw(*shape), **more}


_TWO = (2, 3, 16, 16)
_WIDE = {"image_sizes": torch.tensor([[16, 32]])}
_OTHER_WAY = {"image_sizes": torch.tensor([[16, 32], [32, 16]])}
_BATCHES: dict[str, Callable[[int], Batch]] = {
    "Aria": lambda length: _pictures(length, 2, 2, _TWO),
    "Cohere2Vision": lambda length: _pictures(length, 2, 1, _TWO),
    "DeepseekVL": lambda length: _pictures(length, 2, 4, _TWO),
    "Ernie4_5_VLMoe": lambda length: _routed({**_patches(length), "pixel_values": _draw(40, 48)}),
    "GotOcr2": lambda length: _pictures(length, 2, 1, (2, 3, 64, 64)),
    "Idefics2": lambda length: _pictures(length, 2, 4, (1, *_TWO)),
    "Janus": lambda length: _pictures(length, 2, 4, _TWO),
    "Lfm2Vl": lambda length: _pictures(
        length,
        *(2, 4, (2, 16, 192)),
        pixel_attention_mask=torch.ones(2, 16, dtype=torch.long),
        spatial_shapes=torch.tensor([[4, 4], [4, 4]]),
    ),
    "LightOnOcr": lambda length: _pictures(length, 2, 2, (2, 3, 32, 32), **_OTHER_WAY),
    "LlavaNextVideo": lambda length: _pictures(length, 1, 14, (1, 3, 3, 16, 16), **_WIDE),
    "PaddleOCRVL": lambda length: {**_patches(length), "pixel_values": _draw(40, 3, 4, 4)},
    "QianfanOCR": lambda length: _pictures(length, 2, 4, _TWO),
    "VipLlava": lambda length: _pictures(length, 2, 4, _TWO),
    "AyaVision": lambda length: _pictures(length, 2, 1, _TWO),
    "Idefics3": lambda length: _pictures(length, 2, 1, (1, *_TWO)),
    "InternVL": lambda length: _pictures(length, 2, 4, _TWO),
    "Llava": lambda length: _pictures(length, 2, 4, _TWO),
    "LlavaNext": lambda length: _pictures(length, 1, 14, (1, 3, 3, 16, 16), **_WIDE),
    "LlavaOnevision": lambda length: _pictures(length, 1, 14, (1, 3, 3, 16, 16), **_WIDE),
    "Llama4": lambda length: _pictures(length, 2, 4, _TWO),
    "Mistral3": lambda length: _pictures(length, 2, 2, (2, 3, 32, 32), **_OTHER_WAY),
    "SmolVLM": lambda length: _pictures(length, 2, 1, (1, *_TWO)),
}
_QWEN_3 = {"Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe"}
# they take token types
_TYPED = {
    *("Ernie4_5_VLMoe", "Glm46V", "Glm4v", "Glm4vMoe", "GlmOcr", "PaddleOCRVL", "Qwen2VL", "Qwen2_5_VL"),
    *_QWEN_3,
}
WITH_VIDEO = ("Qwen2VL", "Qwen2_5_VL", *sorted(_QWEN_3))


def _routed(batch: Batch) -> Batch:
    """With the kind of expert that each token takes."""
    return {**batch, "moe_mm_token_type_ids": (batch["mm_token_type_ids"] > 0).long()}


def seeing_batch(family: str, length: int = 53, video: bool = False) -> Batch:
    """One sequence with images between its text."""
    batch = _BATCHES[family](length) if family in _BATCHES else _patches(length, video, family in _QWEN_3)
    if family not in _TYPED:
        batch.pop("mm_token_type_ids")
    batch["labels"][:, :3] = -100
    return batch


_CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image> ' if part['type'] == 'image' else part['text'] + ' ' }}{% endfor %}{% endfor %}"
)


def llava_processor() -> Any:
    """A processor for the tiny Llava: a word is a token, and an image four."""
    words = {"<pad>": 0, "</s>": 1, **{f"w{number}": number for number in range(2, _WORDS)}, "<image>": IMAGE}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", additional_special_tokens=["<image>"]
    )
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(**sizes),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_CHAT,
    )


def chats_with_images(count: int = 12) -> list[dict[str, Any]]:
    """Chats about one or two images of random colours."""
    rows, draw = [], random.Random(0)
    for row in range(count):
        size, pixels = (20 + row, 24), [tuple(draw.randbytes(3)) for _ in range((20 + row) * 24)]
        image = Image.new("RGB", size)
        image.putdata(pixels)
        said = [" ".join(f"w{draw.randrange(2, _WORDS)}" for _ in range(6 + row % 5)) for _ in range(2)]
        messages = [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
        rows.append({"images": [image] * (1 + row % 2), "messages": messages})
    return rows
