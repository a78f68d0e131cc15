"""Prompts that a model answers in training, and rewards for its answers."""

import runpy
from collections.abc import Callable
from functools import partial
from typing import Any

import data
import numpy
from chats import clean, refuse_besides_text
from datasets import Dataset
from rows import map_rows
from settings import DataSettings, using
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

Reward = Callable[..., list[float]]


def load_prompts(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, training: GRPOConfig
) -> tuple[Dataset, Dataset | None]:
    """Rows with a `prompt`, as text or as messages, that leave room for a completion. Rewards see other columns."""
    if settings.too_long == "split":
        raise SystemExit("too_long is 'split', but a prompt cannot be split; set refuse or drop.")
    longest = training.max_length - training.max_completion_length

    def make(rows: Dataset, kind: str, names: list[str]) -> Dataset:
        if "prompt" not in rows.column_names:
            raise SystemExit(f"dataset {names} has no column prompt: {rows.column_names}.")
        with using(f"dataset {names}"), training.main_process_first(desc="counting tokens"):
            refuse_besides_text(rows.column_names)
            counted = map_rows(rows, partial(count, tokenizer=tokenizer), names, desc="Counting tokens")
        sizes = numpy.array(counted["tokens"])
        over = data.too_long(sizes, longest, settings.too_long, "prompts without max_completion_length")
        if over.any() and training.process_index == 0:
            print(f"{over.sum():,} prompts of more than {longest:,} tokens are dropped.")
        return rows.select(numpy.flatnonzero(~over))

    return data.load_made(settings, training, make)


def count(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """How many tokens a prompt has."""
    prompt = row["prompt"]
    if not prompt:
        raise ValueError("prompt is empty; it must be text or messages")
    if row.get("system"):
        raise ValueError("its column system would not be read; put a message of the role system first in prompt")
    if isinstance(prompt, str):
        return {"tokens": len(tokenizer(prompt)["input_ids"])}
    ids = tokenizer.apply_chat_template(clean(prompt), add_generation_prompt=True, return_dict=True)["input_ids"]
    return {"tokens": len(ids)}


def reward_function(name: str, rows: Dataset) -> Reward:
    """What gives each completion a number, as TRL calls it: `"answer"`, or a function of a file (`file.py:name`)."""
    if name == "answer":
        if "answer" not in rows.column_names:
            raise SystemExit(f"The reward 'answer' needs a column answer, and there are {rows.column_names}.")
        return has_answer
    file, _, function = name.rpartition(":")
    with using(f"reward {name!r}", Exception):
        found = runpy.run_path(file).get(function)
    if not callable(found):
        raise SystemExit(f"reward {name!r}: {file} has no function {function}.")
    return found  # type: ignore[no-any-return]


def has_answer(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """1 for each completion that holds the answer of its row, else 0."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [float(str(right) in text) for text, right in zip(texts, answer, strict=True)]
