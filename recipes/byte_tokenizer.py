"""A tokenizer that needs no download."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN, START = "<pad>", "<|im_end|>", "<unk>", "<|im_start|>"
CHATML = Path(__file__).parent / "configs" / "chatml.jinja"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and the two marks of ChatML, by which chats are written."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((PAD, END, UNKNOWN, START, *letters))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        chat_template=CHATML.read_text(encoding="utf-8"),
    )
