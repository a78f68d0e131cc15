"""Pairs of answers, of which one was preferred, as TRL wants them."""

import json
from functools import partial
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy
import report
from chats import Message, clean, is_unlearned, parse_tools, refuse_besides_text, with_system, without_nulls
from data import WRITTEN, count_silent, is_text, lengths, load_made, too_long
from datasets import Dataset, Features, List, Value
from rows import ExactJson, as_json, map_rows
from settings import DataSettings, using
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.data_utils import extract_prompt

if TYPE_CHECKING:
    from training import Start


def load_pairs(settings: DataSettings, training: DPOConfig | RewardConfig) -> tuple[Dataset, Dataset | None]:
    """Pairs of answers as TRL wants them: `chosen`, `rejected` and `prompt`, as text or as messages."""
    if settings.too_long == "split":
        raise SystemExit("too_long is 'split', but a pair of answers cannot be split; set refuse or drop.")

    def make(rows: Dataset, kind: str, names: list[str]) -> Dataset:
        if missing := {"chosen", "rejected"} - set(rows.column_names):
            raise SystemExit(f"dataset {names} has no column {' or '.join(sorted(missing))}: {rows.column_names}.")
        with using(f"dataset {names}"), training.main_process_first(desc="cleaning"):
            refuse_besides_text(rows.column_names)
            text, others = is_text(rows, "chosen"), set(rows.column_names) & {"tools", "chat_template_kwargs"}
            function = partial(clean_pair, text=text, others=others)
            features = features_of_pairs(text, others)
            rows = map_rows(rows, function, names, features=features, desc="Cleaning messages")
        if training.process_index == 0 and (same := count_same(rows)):
            print(f"dataset {names}: chosen equals rejected in {same:,} of {len(rows):,} pairs; they teach nothing.")
        if training.process_index == 0 and (silent := count_silent(rows, "chosen")):
            print(f"dataset {names}: chosen is empty in {silent:,} of {len(rows):,} pairs; silence is preferred there.")
        return rows

    return load_made(settings, training, make)


def features_of_pairs(text: bool, others: set[str]) -> Features:
    """Messages are JSON: structs of Arrow would give each tool call the arguments of all others, as nulls."""
    features = {key: Value("string") if text else List(ExactJson()) for key in ("prompt", "chosen", "rejected")}
    kinds = {"tools": Value("string"), "chat_template_kwargs": ExactJson()}
    return Features({**features, **{key: kind for key, kind in kinds.items() if key in others}})


def clean_pair(row: dict[str, Any], text: bool, others: set[str]) -> dict[str, Any]:
    """A pair with its prompt, and what TRL hands on to the chat template. A prompt that the answers begin with is taken
    from them; it may stand beside them as text, too."""
    pair = {key: clean_part(row, key, text) for key in ("chosen", "rejected")}
    prompt = row.get("prompt")
    if prompt is None and not (pair["chosen"] and pair["rejected"]):
        raise ValueError("there is no prompt, and an answer is empty; give a prompt, or take the row out")
    if prompt is None or (not text and prompt == first_question(pair["chosen"]) == first_question(pair["rejected"])):
        pair |= extract_prompt(pair)
    else:
        pair["prompt"] = clean_part(row, "prompt", text)
    if not text and row.get("system"):
        pair["prompt"] = clean(with_system(pair["prompt"], row.get("system")))
    if "tools" in others:
        pair["tools"] = json.dumps(parse_tools(row["tools"]))
    if "chat_template_kwargs" in others:
        pair["chat_template_kwargs"] = as_json(without_nulls(row["chat_template_kwargs"]) or {})
    return pair if text else pair | {key: [*map(as_json, pair[key])] for key in ("prompt", "chosen", "rejected")}


def clean_part(row: dict[str, Any], key: str, text: bool) -> Any:
    """The prompt or an answer; an error if it is not text, or not messages, as the others are."""
    if row[key] is None:
        raise ValueError(f"{key} is null; it must be text or messages")
    if not isinstance(row[key], str if text else list):
        raise ValueError(
            f"{key} is {shorten(repr(row[key]), 60)}; it must be {'text' if text else 'a list of messages'}: give "
            "prompt, chosen and rejected of all rows in one form"
        )
    if text:
        return row[key]
    messages = clean(row[key])
    if key != "prompt" and not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"{key} has no message of the role assistant; give an answer, or take the row out")
    if key != "prompt" and any(map(is_unlearned, messages)):
        raise ValueError(f"{key} has a message of the weight 0, which pairs cannot have; put it into the prompt")
    return messages


def first_question(messages: list[Message]) -> Any:
    """The content of the user's first message."""
    return next((message["content"] for message in messages if message["role"] == "user"), None)


def count_same(pairs: Dataset) -> int:
    """How many pairs hold one answer twice."""
    batches = pairs.select_columns(["chosen", "rejected"]).with_format("arrow").iter(batch_size=WRITTEN)
    columns = ((batch["chosen"].to_pylist(), batch["rejected"].to_pylist()) for batch in batches)
    return sum(one == other for chosen, rejected in columns for one, other in zip(chosen, rejected, strict=True))


def make_trainer(kind: type[DPOTrainer] | type[RewardTrainer], start: "Start", **more: Any) -> Any:
    """TRL's trainer of a kind on pairs, none longer than `max_length`."""
    rows, longest = load_pairs(start.documents, start.args), start.args.max_length
    start.args.max_length = None  # TRL would cut answers off, or leave longer pairs out without a word
    trainer = start.make(kind, rows, **more)
    start.args.max_length = longest
    fit_pairs(trainer, start.documents, longest)
    return trainer


def fit_pairs(trainer: DPOTrainer | RewardTrainer, settings: DataSettings, longest: int) -> None:
    """Refuses or drops pairs of more than `longest` tokens, of which TRL would cut the ends off, or none be left."""
    for name in ("train_dataset", "eval_dataset"):
        if (pairs := getattr(trainer, name)) is None:
            continue
        sizes = numpy.maximum(*(lengths(pairs, f"{part}_ids") for part in ("chosen", "rejected")))
        if "prompt_ids" in pairs.column_names:  # of DPO, whose answers stand apart
            sizes = sizes + lengths(pairs, "prompt_ids")
        if name == "train_dataset" and trainer.args.process_index == 0:
            report.report_lengths(sizes, longest, trainer.args.output_dir, "pairs")
        over = too_long(sizes, longest, settings.too_long, f"{name.split('_')[0]} pairs")
        if over.any():
            if trainer.args.process_index == 0:
                print(f"{name.split('_')[0]} pairs: {over.sum():,} of more than max_length tokens are dropped.")
            setattr(trainer, name, pairs.select(numpy.flatnonzero(~over)))
