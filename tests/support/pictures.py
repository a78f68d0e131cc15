"""A processor for a tiny model that sees, and chats with images."""

import random
from typing import Any

import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_pictures import WORDS
from tests.support.tiny_seeing import IMAGE

_CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image> ' if part['type'] == 'image' else part['text'] + ' ' }}{% endfor %}{% endfor %}"
)


def llava_processor() -> Any:
    """A processor for the tiny Llava: a word is a token, and an image four."""
    words = {"<pad>": 0, "</s>": 1, **{f"w{number}": number for number in range(2, WORDS)}, "<image>": IMAGE}
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
        said = [" ".join(f"w{draw.randrange(2, WORDS)}" for _ in range(6 + row % 5)) for _ in range(2)]
        messages = [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
        rows.append({"images": [image] * (1 + row % 2), "messages": messages})
    return rows


def pairs_with_images(count: int = 12) -> list[dict[str, Any]]:
    """Questions about images, each with an answer that is chosen and one that is rejected."""
    rows, draw = [], random.Random(1)
    for row, chat in enumerate(chats_with_images(count)):
        question, chosen = chat["messages"]
        words = " ".join(f"w{draw.randrange(2, WORDS)}" for _ in range(4 + row % 3))
        rejected = {"role": "assistant", "content": words}
        rows.append({"images": chat["images"], "prompt": [question], "chosen": [chosen], "rejected": [rejected]})
    return rows
