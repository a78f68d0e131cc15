"""A small Llama that is taught in seconds to answer questions by copying needles out of a long text."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_burst.layers.loss import IGNORE_INDEX

KINDS, PLACES = 4, 3  # needles of a text, and the tokens of each
_VALUES, _NOISE = 8, 16  # tokens that may stand at each place of a needle, and elsewhere
_FIRST = 1 + _NOISE
_QUESTIONS = _FIRST + KINDS * PLACES * _VALUES
LONGEST = 768  # tokens that it is taught with


def questions() -> Tensor:
    """A question for each kind of needle, of one token, `(KINDS, 1)`."""
    return _QUESTIONS + torch.arange(KINDS)[:, None]


def needles_of(rows: int, generator: torch.Generator) -> Tensor:
    """Random needles, `(rows, KINDS, PLACES)`."""
    place = torch.arange(KINDS * PLACES).view(KINDS, PLACES)
    return _FIRST + _VALUES * place + torch.randint(_VALUES, (rows, KINDS, PLACES), generator=generator)


def text_with(needles: Tensor, starts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Random tokens with needles among them, `(rows, length)`.

    Args:
        needles (`torch.LongTensor` of shape `(rows, KINDS, PLACES)`): The needles.
        starts (`torch.LongTensor` of shape `(rows, KINDS)`): Where each begins.
        length (`int`): Tokens of a text.
        generator (`torch.Generator`): Of the random tokens.
    """
    text = torch.randint(1, _FIRST, (len(needles), length), generator=generator)
    return text.scatter(1, (starts[..., None] + torch.arange(PLACES)).flatten(1), needles.flatten(1))


def batch_of(rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Texts, and behind each all questions with their answers, which alone are learned."""
    needles = needles_of(rows, generator)
    slots = torch.rand(rows, length // PLACES, generator=generator).argsort(1)[:, :KINDS]
    text = text_with(needles, PLACES * slots, length, generator)
    order = torch.rand(rows, KINDS, generator=generator).argsort(1)
    answers = needles.gather(1, order[..., None].expand(-1, -1, PLACES))
    asked = questions()[order]
    labels = torch.cat([torch.full_like(asked, IGNORE_INDEX), answers], 2).flatten(1)
    ids = torch.cat([text, torch.cat([asked, answers], 2).flatten(1)], 1)
    return {"input_ids": ids, "labels": torch.cat([torch.full_like(text, IGNORE_INDEX), labels], 1)}


def untaught() -> LlamaForCausalLM:
    """The model with random weights."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": _QUESTIONS + KINDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=2 * LONGEST, rope_parameters=rope)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def teach(path: Path) -> None:
    """Teaches it by texts that become longer, and writes its weights to a file. Takes about 10 seconds."""
    model, generator, length = untaught(), torch.Generator().manual_seed(1), KINDS * PLACES
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(1000):
        loss = model(**batch_of(max(2, LONGEST // length), length, generator)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.005 and length == LONGEST:
            torch.save(model.state_dict(), path)
            return
        if loss < 0.05:
            length = min(2 * length, LONGEST)
    raise AssertionError(f"it did not learn texts of {length} tokens")


def taught(path: Path | str) -> LlamaForCausalLM:
    """The model with the weights of a file."""
    model = untaught()
    model.load_state_dict(torch.load(path))
    return model.eval()
