"""What as_shipped.py trains and asks: small models with random weights, and rows of every kind that a recipe reads."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any
from unittest import mock

import images
import models
import torch
import transformers
import yaml
from byte_tokenizer import byte_tokenizer
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, ProcessorMixin

from recipes.benchmarks.provenance import git_commit, hardware, versions

VOCABULARY, POSITIONS = 320, 512
CONFIGS = Path(__file__).parents[2] / "recipes/configs"
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": POSITIONS}
SIZES |= {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
PLACES = {  # of images, in chats: what stands there, and the tokens
    "qwen3_5": ("<|vision_start|><|image_pad|><|vision_end|>", ("<|image_pad|>", "<|video_pad|>")),
    "gemma3": ("<start_of_image>", ("<image_soft_token>", "<start_of_image>")),
}
BEHIND = {"qwen3_5": ("<|vision_start|>", "<|vision_end|>"), "gemma3": ("<end_of_image>",)}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ 'PLACE' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)


def configs() -> dict[str, Any]:
    """The config of each kind; those of hybrids are of the files for CPUs."""
    hybrid, granite = (
        {**yaml.safe_load((CONFIGS / f"{name}_hybrid_cpu.yaml").read_text())["model_config"]}
        for name in ("text", "sft")
    )
    own = {name: SIZES[name] for name in ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id")}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    hybrid |= {**own, "rope_parameters": {**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
    ids = {"image_token_id": 260, "video_token_id": 261, "vision_start_token_id": 262, "vision_end_token_id": 263}
    patches = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "out_hidden_size": 128}
    tower = {**TOWER, "model_type": "siglip_vision_model", "num_hidden_layers": 2, "image_size": 56, "patch_size": 14}
    routed = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    wide = {"global_head_dim": 128, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    pixels = {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 64, "output_proj_dims": 16}
    of_gemma = {"image_token_id": 260, "boi_token_id": 261, "eoi_token_id": 262, "mm_tokens_per_image": 4}
    return {
        "llama": {"model_type": "llama", **SIZES},
        "qwen3": {"model_type": "qwen3", **SIZES},
        "qwen3_moe": {"model_type": "qwen3_moe", **SIZES, **routed},
        "granitemoehybrid": {**granite, **own},
        "qwen3_5": {"model_type": "qwen3_5", "text_config": hybrid, "vision_config": patches, **ids},
        "gemma3": {
            **{"model_type": "gemma3", "text_config": {**SIZES, "model_type": "gemma3_text", "sliding_window": 64}},
            **{"vision_config": tower, **of_gemma},
        },
        "gemma4": {
            **{"model_type": "gemma4_unified", "text_config": {**SIZES, **wide}, "vision_config": pixels},
            **{"audio_config": None, "image_token_id": 260, "video_token_id": 261, "audio_token_id": 262},
        },
    }


def make(folder: Path) -> None:
    """Writes the models, each with a tokenizer of bytes, and the rows."""
    (folder / "texts").mkdir(parents=True)
    (folder / "images").mkdir()
    for name, values in configs().items():
        torch.manual_seed(0)
        kind = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        kind.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    draw, texts = Random(0), [text[:3000] for text in topics.values() if len(text) > 3000][:24]
    for number in range(8):
        Image.new("RGB", (56, 56), tuple(draw.randbytes(3))).save(folder / "images" / f"{number}.png")

    def chat(at: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{texts[at][:60]}?"}, {"role": "assistant", "content": texts[at][60:90]}]

    every = range(len(texts))
    rows = {
        "text": [{"text": text} for text in texts],
        "chats": [{"messages": chat(at) * 2} for at in every],
        "images": [{"messages": chat(at), "images": [f"images/{at % 8}.png"]} for at in every],
        "questions": [{"prompt": f"{texts[at // 8][:200]} {at}?", "completion": f"It is {at}."} for at in every],
        "pairs": [{"prompt": chat(at)[:1], "chosen": chat(at)[1:], "rejected": chat(at - 1)[1:]} for at in every],
        "prompts": [{"prompt": chat(at)[:1], "answer": "e"} for at in every],
    }
    for name, listed in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    (folder / "texts" / "one.txt").write_text(texts[0][:300])
    (folder / "questions.txt").write_text("What is it?\n")


@contextmanager
def processors(kind: str) -> Iterator[None]:
    """Has images read by a processor for a small model: those of its kind may need torchvision to be loaded."""
    with mock.patch.object(images, "load_processor", partial(processor, kind)):
        yield


def processor(kind: str, *_: Any) -> ProcessorMixin:
    """What makes tokens and pixels for a small model that sees."""
    tokenizer, (place, tokens) = byte_tokenizer(), PLACES[kind]
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens, *BEHIND[kind]]})
    template = tokenizer.chat_template = TEMPLATE.replace("PLACE", place)
    if kind == "gemma3":
        for name, token in zip(("image_token", "boi_token", "eoi_token"), (*tokens, *BEHIND[kind]), strict=True):
            setattr(tokenizer, name, token)
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
        pixels = transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
        return transformers.Gemma3Processor(pixels, tokenizer, template, image_seq_length=4)
    return OfImages(
        transformers.Qwen2VLImageProcessorPil(patch_size=16, min_pixels=64**2, max_pixels=64**2), tokenizer, template
    )


class OfImages(transformers.Qwen3VLProcessor):
    """Qwen's processor without that of videos."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        for name, token in {"image": "<|image_pad|>", "video": "<|video_pad|>"}.items():
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))


def load(folder: Path) -> None:
    """Loads a model by plain Transformers; its outputs are numbers."""
    model = models.auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        logits = model(input_ids=torch.arange(4, 68)[None]).logits
    assert logits.isfinite().all(), "its outputs are not finite"


def machine(size: int, commit: str | None) -> dict[str, Any]:
    """Where and with what the processes run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "git_commit": commit or git_commit(Path(__file__).parent),
        "hardware": hardware(device, size, 1),
        "versions": versions(cuda=device.type == "cuda"),
    }
