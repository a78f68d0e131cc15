"""Prompts that a model answers in training, and rewards for its answers."""

import runpy
from collections.abc import Callable
from functools import partial
from typing import Any

import data
import numpy
from chats import clean, refuse_besides_text
from datasets import Dataset, Features, Value, concatenate_datasets
from rows import ExactJson, as_json, map_rows
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
            kinds = Features({"prompt": ExactJson(), "tokens": Value("int64")})
            function = partial(read, tokenizer=tokenizer)
            counted = map_rows(rows, function, names, features=kinds, desc="Counting tokens")
            if not data.is_text(rows, "prompt"):
                parts = rows.remove_columns("prompt"), counted.select_columns("prompt")
                rows = concatenate_datasets([*parts], axis=1)
        sizes = numpy.array(counted["tokens"])
        over = data.too_long(sizes, longest, settings.too_long, "prompts without max_completion_length")
        if over.any() and training.process_index == 0:
            print(f"{over.sum():,} prompts of more than {longest:,} tokens are dropped.")
        return rows.select(numpy.flatnonzero(~over))

    return data.load_made(settings, training, make)


def read(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A prompt as chat templates want it, and how many tokens it has."""
    prompt = row["prompt"]
    if not prompt:
        raise ValueError("prompt is empty; it must be text or messages")
    if row.get("system"):
        raise ValueError("its column system would not be read; put a message of the role system first in prompt")
    if isinstance(prompt, str):
        return {"prompt": as_json(prompt), "tokens": len(tokenizer(prompt)["input_ids"])}
    messages = clean(prompt)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return {"prompt": as_json(messages), "tokens": len(ids)}


def reward_function(name: str, rows: Dataset) -> Reward:
    """What gives each completion a number, as TRL calls it: `"answer"`, or a function of a file (`file.py:name`)."""
    if name == "answer":
        if "answer" not in rows.column_names:
            raise SystemExit(f"The reward 'answer' needs a column answer, and there are {rows.column_names}.")
        if empty := sum(each is None or not str(each).strip() for each in rows["answer"]):
            raise SystemExit(
                f"The reward 'answer' needs an answer in every row, and {empty:,} of {len(rows):,} have none. Take "
                "them out, or set a reward of your own."
            )
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
