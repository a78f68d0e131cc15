"""Asks questions to a text, or to every text of a folder, of any length over several processes, and says which text
answers best.

    accelerate launch --multi_gpu --num_processes 2 recipes/ask.py meta-llama/Llama-3.1-8B-Instruct books/ \\
        --questions questions.txt

Each text is read once for all questions (`hf_burst.remember`). Each question gets an answer from every text; the one
that is likeliest to the model, by the mean log-likelihood of its tokens, is shown with its text. This says which text
the model is surest about, and no more: a model may be sure and wrong, and answers from what it knew before.

Where the tokenizer has a chat template, text and question are the message of a user; `--no-chat` asks without it.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from mimetypes import guess_type
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import beginning
import settings

import hf_burst
from hf_burst.cli import Parser

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

TEMPLATE = "\n\nQuestion: {question}\nAnswer:"


@dataclass(frozen=True)
class Answer:
    """An answer from one text."""

    question: str
    answer: str
    document: str
    log_likelihood: float  # the mean of its tokens, in nats


def frame(tokenizer: "PreTrainedTokenizerBase", questions: Sequence[str], chat: bool) -> tuple[str, list[str]]:
    """What stands before a text, and behind it for each question; with `chat` they are the message of a user."""
    if not chat:
        return "", [TEMPLATE.format(question=question) for question in questions]
    parts, options = [], {"add_generation_prompt": True, "enable_thinking": False}  # where a template has thoughts
    for question in questions:
        message = [{"role": "user", "content": f"(text)\n\n{question}"}]
        asked = tokenizer.apply_chat_template(message, tokenize=False, **options)
        parts.append(asked.partition("(text)"))
    return parts[0][0], [behind for _, _, behind in parts]


def ends_of(model: Any, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens that end an answer: those of the model, such as the end of a turn, and that of the tokenizer."""
    own = model.generation_config.eos_token_id
    ends = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id}
    return sorted(end for end in ends if end is not None)


def answers_from(
    model: Any, tokenizer: "PreTrainedTokenizerBase", document: "torch.Tensor", questions: Sequence[str], tokens: int
) -> list[tuple[str, float]]:
    """The answers of a text to all questions, each with the mean log-likelihood of its tokens.

    All processes call this, with a patched model in evaluation, a tokenizer that pads on the left, the text and what
    stands before it (of shape `(1, tokens)`), the questions as they stand behind it, and the most tokens of an answer.
    """
    import torch

    known = hf_burst.remember(model, document.to(model.device))
    asked = tokenizer(list(questions), return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    ids, mask, ends = asked.input_ids, asked.attention_mask, ends_of(model, tokenizer)
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": ends or None}
    options["pad_token_id"] = tokenizer.pad_token_id
    whole = hf_burst.generate(model, input_ids=ids, attention_mask=mask, document=known, **options)
    written = whole[:, ids.shape[1] :]
    is_end = torch.isin(written, torch.tensor(ends, device=written.device)).long()
    ended = is_end.cumsum(1) - is_end > 0  # behind the first end
    labels = torch.cat([torch.full_like(ids, -100), written.masked_fill(ended, -100)], 1)
    batch = {"input_ids": whole, "attention_mask": torch.cat([mask, torch.ones_like(written)], 1), "labels": labels}
    means = -hf_burst.token_losses(model, batch, document=known).sum(1) / (~ended).sum(1)
    return list(zip(tokenizer.batch_decode(written, skip_special_tokens=True), means.tolist(), strict=True))


def ask(
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    texts: dict[str, str],
    questions: Sequence[str],
    tokens: int,
    chat: bool,
    tell: Callable[[str], None],
) -> list[Answer]:
    """For each question the likeliest of the answers of all texts, see [`frame`] and [`answers_from`]. `tell` gets a
    line before each text."""
    before, asked = frame(tokenizer, questions, chat)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    more = max(len(tokenizer(each, add_special_tokens=False).input_ids) for each in asked) + tokens
    found = {}
    for number, (name, text) in enumerate(texts.items(), 1):  # a chat template has the first token of its own
        document = tokenizer(before + text, return_tensors="pt", add_special_tokens=not chat).input_ids
        said = f"text {number} of {len(texts)}: {name}, {document.shape[1]:,} tokens"
        if positions and document.shape[1] + more > positions:
            said += f"; with question and answer more than the model's {positions:,} positions: it may answer badly"
        tell(said)
        found[name] = answers_from(model, tokenizer, document, asked, tokens)
    best = [max(found, key=lambda name: found[name][number][1]) for number in range(len(questions))]
    return [
        Answer(question, found[name][number][0].strip(), name, found[name][number][1])
        for number, (question, name) in enumerate(zip(questions, best, strict=True))
    ]


def texts_of(documents: Path) -> dict[str, str]:
    """The text of a file, or the texts in and below a folder, by the names of their files; ends the recipe at one that
    is no text, or empty."""
    with settings.using(f"documents {str(documents)!r}"):
        documents.stat()
    texts = {}
    for name, path in {documents.name: documents}.items() if documents.is_file() else text_files(documents).items():
        texts[name] = read(path)
        if not texts[name].strip():
            raise SystemExit(f"{path} is empty. Take it away.")
    return texts


def text_files(folder: Path) -> dict[str, Path]:
    """The text files in and below a folder, by their paths in it. Says which other files are left out."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    chosen = {name for name in names if name.suffix.lower() in settings.TEXT_FILES}
    others = ", ".join(str(name) for name in names if name not in chosen)
    if others and os.environ.get("RANK", "0") == "0":
        told = f"documents {folder}: of {len(names)} files {len(chosen)} end in {', '.join(settings.TEXT_FILES)}"
        print(f"{told}. The others are left out: {shorten(others, 200, placeholder=' ...')}")
    return {str(name): folder / name for name in names if name in chosen}


def read(path: Path) -> str:
    """A text; ends the recipe if it is none."""
    with settings.using(str(path)):
        try:
            return path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as problem:
            if str(guess_type(path.name)[0]).startswith("image/"):
                raise SystemExit(f"{path} is an image, and only texts are asked here. Give a text.") from problem
            raise SystemExit(f"{path} is not UTF-8 ({problem.reason}). Save it as UTF-8, or take it away.") from problem


def main(given: list[str]) -> None:
    parser = Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("model", help="name or folder of a causal language model")
    parser.add_argument("documents", type=Path, help="a text file, or a folder: all text files in and below it")
    parser.add_argument("--questions", type=Path, required=True, help="file with a question a line")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    without = "ask without the chat template of the tokenizer"
    parser.add_argument("--no-chat", dest="chat", action="store_false", help=without)
    arguments = parser.parse_args(given)
    texts = texts_of(arguments.documents)
    questions = [line.strip() for line in read(arguments.questions).splitlines() if line.strip()]
    if not texts or not questions:
        raise SystemExit(f"{len(texts)} texts and {len(questions)} questions were found; give at least one of each.")
    if settings.is_path(arguments.model) and not Path(arguments.model).exists():
        missing = settings.nearby(Path(arguments.model))
        raise SystemExit(f"model is {arguments.model!r}, a folder that does not exist; {missing}")
    settings.check_groups(None)
    beginning.loading()
    import models
    from accelerate import Accelerator
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import find_adapter_config_file

    accelerator = Accelerator(parallelism_config=hf_burst.BurstParallelismConfig.from_env())
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if find_adapter_config_file(arguments.model):
        model = models.load_adapter(arguments.model)
    else:
        kind = models.auto_class(AutoConfig.from_pretrained(arguments.model))
        model = kind.from_pretrained(arguments.model, dtype="auto")
    model = model.to(accelerator.device).eval()
    chat = arguments.chat and tokenizer.chat_template is not None
    tell = partial(accelerator.print, file=sys.stderr, flush=True)
    for answer in ask(hf_burst.patch_model(model), tokenizer, texts, questions, arguments.tokens, chat, tell):
        accelerator.print(json.dumps(asdict(answer), ensure_ascii=False))


if __name__ == "__main__":
    settings.run(main)
