"""Drawings of shapes, chats about them, and a small model that can learn to see them, without a hub.

    python recipes/shapes.py outputs/shapes

The folder gets chats.jsonl with its images, others.jsonl to evaluate on, and a Llava of random weights with its
processor, whose tokens are bytes.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from byte_tokenizer import byte_tokenizer
from PIL import Image, ImageDraw
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

COLOURS = ("red", "green", "blue", "yellow", "white", "purple")
SHAPES = ("circle", "square", "triangle")
SIDE, PATCH = 32, 8  # pixels


def draw(colour: str, shape: str, dice: random.Random) -> Image.Image:
    """A shape somewhere on black."""
    image, size = Image.new("RGB", (SIDE, SIDE)), dice.randint(14, 22)
    left, top = dice.randint(1, SIDE - size - 1), dice.randint(1, SIDE - size - 1)
    right, bottom, pen = left + size, top + size, ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=colour)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=colour)
    else:
        pen.polygon(((left, bottom), (right, bottom), ((left + right) // 2, top)), fill=colour)
    return image


def write_chats(folder: Path, name: str, count: int, seed: int) -> None:
    """Chats about one drawing each, and the drawings, in files that begin with a name."""
    dice, rows = random.Random(seed), []
    for number in range(count):
        colour, shape = dice.choice(COLOURS), dice.choice(SHAPES)
        file = f"images/{name}_{number}.png"
        draw(colour, shape, dice).save(folder / file)
        asked, told = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": f"{colour} {shape}"}
        rows.append({"messages": [asked, told], "images": [file]})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def processor() -> LlavaProcessor:
    """What makes tokens and pixels: a byte is a token, and a drawing 17."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]}, replace_extra_special_tokens=False)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return LlavaProcessor(pixels, tokenizer, PATCH, "full", tokenizer.chat_template, num_additional_image_tokens=1)


def save_model(folder: Path) -> None:
    """A small Llava of random weights, and its processor."""
    seeing: Any = processor()
    tokenizer = seeing.tokenizer
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 4096, "initializer_range": 0.06}
    config = LlavaConfig(
        text_config=LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **heads, **ends, **sizes),
        vision_config=CLIPVisionConfig(
            hidden_size=64, intermediate_size=128, image_size=SIDE, patch_size=PATCH, projection_dim=64, **heads
        ),
        image_token_index=seeing.image_token_id,
        image_seq_length=(SIDE // PATCH) ** 2 + 1,
        vision_feature_select_strategy="full",
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    seeing.save_pretrained(folder)


def write(folder: Path, chats: dict[str, int]) -> None:
    """Drawings, files of so many chats each, and the model."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate(chats.items()):
        write_chats(folder, name, count, seed)
    save_model(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where drawings, chats and the model are written")
    target: Path = parser.parse_args().folder
    write(target, {"chats": 512, "others": 64})
    print(f"512 chats about drawings, 64 others and a model that sees are in {target}")
