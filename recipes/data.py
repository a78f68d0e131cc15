"""Documents and chats from files, folders and the hub, and their tokens."""

import os
import pydoc_data.topics
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy
import pyarrow.compute
import report
from chats import IGNORED, ChatTokenizer, chat_reader, clean, is_silent, refuse_besides_text, with_system, without_nulls
from datasets import (
    Dataset,
    Features,
    Json,
    List,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from resuming import saving
from rows import (
    FOLDER,
    READERS,
    WRITTEN,
    ExactJson,
    RowFunction,
    as_json,
    expand,
    folders_of,
    has_pictures,
    kind_of,
    map_rows,
    pictures_of,
    read_written,
    reading,
)
from settings import DataSettings, using
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from trl import SFTConfig
from trl.data_utils import common_prefix_length

Reader = PreTrainedTokenizerBase | ProcessorMixin
Rows = tuple[Dataset, Dataset | None]
BEGINNING = 256  # tokens by which rows are found that begin alike
STRINGS = ("string", "large_string", "string_view", "null")


def load_rows(names: list[str], split: str, text_column: str = "text") -> Dataset:
    """Reads a data set.

    Args:
        names (`list[str]`): Files, folders (of files, or of `save_to_disk`), or a hub name and its config, or
            `["python_topics"]`. A file of text is one document.
        split (`str`): The split, of which local files have `train` alone; a part of it may be given (`train[:90%]`).
        text_column (`str`, *optional*): The column for documents of text files.
    """
    splits = {}
    if names == ["python_topics"]:
        splits["train"] = Dataset.from_dict({text_column: ["\n\n".join(pydoc_data.topics.topics.values())]})
    elif len(names) == 1 and any(Path(names[0], f"{kind}.json").exists() for kind in ("state", "dataset_dict")):
        with using(f"dataset {names}"):
            saved = load_from_disk(names[0])
        splits = {"train": saved} if isinstance(saved, Dataset) else saved
    if splits and split not in splits:
        raise SystemExit(f"dataset_split is {split!r}, and dataset {names} has {', '.join(splits)}.")
    if splits:
        return splits[split]
    kinds: dict[str | None, list[str]] = {}
    for name in names:
        files = expand(name)
        for file in files:
            kinds.setdefault(kind_of(file), []).append(file)
        if len(set(map(kind_of, files))) > 1:
            counts = Counter(Path(file).suffix.lower() for file in files)
            found = " and ".join(f"{suffix} ({count})" for suffix, count in sorted(counts.items()))
            example = " ".join(sorted({str(Path(file).with_name(f"*{Path(file).suffix}")) for file in files}))
            raise SystemExit(f"dataset {name!r} mixes kinds of files: {found}. Name the files: --dataset {example}")
    if len(kinds) > 1 and (None in kinds or split != "train"):
        raise SystemExit(
            f"dataset {names} mixes kinds of files and hub names, or takes a part of several kinds; give one kind "
            f"({', '.join(READERS)})."
        )
    parts = []
    for kind, own in kinds.items():
        with using(f"dataset {own}"), reading(own):
            if kind is None:
                return load_dataset(*names, split=split)
            if kind in ("json", "csv"):
                rows = read_written(kind, own, split)
            else:
                options = {"sample_by": "document", "encoding": "utf-8-sig"} if kind == "text" else {}
                rows = load_dataset(kind, data_files=own, split=split, **options)
            if "images" in rows.column_names and answer_columns(rows) and not has_pictures(rows):
                rows = rows.add_column(FOLDER, folders_of(rows, own, split))
        renamed = kind == "text" and text_column != "text"
        parts.append(rows.rename_column("text", text_column) if renamed else rows)
    if "text" in kinds and all(text_column in part.column_names and not answer_columns(part) for part in parts):
        parts = [part.select_columns([text_column]) for part in parts]  # tables may have more columns
    columns = {tuple(sorted(part.column_names)) for part in parts}
    if len(columns) > 1:
        raise SystemExit(f"dataset {names} mixes kinds of files with other columns: {sorted(columns)}; give one kind.")
    exact = {key: kind for part in parts for key, kind in part.features.items() if isinstance(kind, ExactJson)}
    if exact and len(parts) > 1:
        written = partial(exactly, keys=[*exact])
        parts = [part.map(written, features=Features({**part.features, **exact})) for part in parts]
    with using(f"dataset {names}"):
        return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def exactly(row: dict[str, Any], keys: list[str]) -> dict[str, str]:
    """Columns of a row for `ExactJson`."""
    return {key: as_json(row[key]) for key in keys}


def load_splits(settings: DataSettings, seed: int, text_column: str = "text", ends: bool = False) -> Rows:
    """The rows to train on and those to evaluate on, if there are any. With `ends`, and of a single text, the ends of
    texts are held out that are too few to hold out a whole one."""
    rows = load_rows(settings.dataset, settings.dataset_split, text_column)
    if settings.eval_dataset:
        return rows, load_rows(settings.eval_dataset, settings.eval_split, text_column)
    if not settings.eval_share:
        return rows, None
    texts = text_column in rows.column_names and is_text(rows, text_column) and not answer_columns(rows)
    few = len(rows) == 1 or (ends and len(rows) * settings.eval_share < 1)
    if texts and few:  # one of them might be most of all text
        with using(f"dataset {settings.dataset}"), reading(settings.dataset):
            train, held_out = cut_ends(rows, settings.eval_share, text_column)
        if len(held_out):  # the texts are longer than a few letters
            return train, held_out
    with using(f"eval_share {settings.eval_share} of {len(rows)} rows"):
        parts = rows.train_test_split(test_size=settings.eval_share, seed=seed)
    if os.environ.get("RANK", "0") == "0":
        print(f"eval_share {settings.eval_share}: {len(parts['test']):,} of {len(rows):,} rows held out for evaluation")
    return parts["train"], parts["test"]


def cut_ends(rows: Dataset, share: float, column: str) -> tuple[Dataset, Dataset]:
    """Texts without their ends, and the ends: this share of each."""
    texts = rows.select_columns([column])

    def cut(row: dict[str, str | None]) -> int:
        return round(len(row[column] or "") * (1 - share))

    begins = texts.map(lambda row: {column: row[column] and row[column][: cut(row)]})
    ends = texts.map(lambda row: {column: (row[column] or "")[cut(row) :]}).filter(lambda row: row[column] != "")
    if len(ends) and os.environ.get("RANK", "0") == "0":
        said = f"the ends of {len(ends):,} texts" if len(texts) > 1 else "the end of the text"
        size = sum(len(text) for text in ends[column])
        print(
            f"eval_share {share}: {said} held out for evaluation: {size:,} characters, without what stands before them"
        )
    return begins, ends


def load_made(
    settings: DataSettings,
    training: TrainingArguments,
    make: Callable[[Dataset, str, list[str]], Dataset],
    text_column: str = "text",
    ends: bool = False,
) -> Rows:
    """What `make` makes of the rows to train on, and of those to evaluate on, if there are any. It is given the setting
    and the names that they come from, too."""
    seed = training.seed if training.data_seed is None else training.data_seed
    rows, held_out = load_splits(settings, seed, text_column, ends)
    made = make(rows, "dataset", settings.dataset)
    kind, names = (
        ("eval_dataset", settings.eval_dataset) if settings.eval_dataset else ("eval_share of", settings.dataset)
    )
    return made, None if held_out is None else make(held_out, kind, names)


def load_tokens(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    training: SFTConfig,
    text_alone: bool = False,
    ends: bool = True,
) -> Rows:
    """Tokens and labels to train on and to evaluate on, none longer than `max_length`, with a report of the lengths.
    Chats and completions are refused where text alone is trained on. `ends` is that of `load_splits`."""

    def make(rows: Dataset, kind: str, names: list[str]) -> Dataset:
        if text_alone and (keys := answer_columns(rows)):
            raise SystemExit(
                f"{kind} {names} has the columns {', '.join(keys)}, and this recipe trains on text, which it may cut. "
                "Train chats and completions by recipes/sft.py."
            )
        return tokens_of(rows, tokenizer, settings, training, kind, names)

    made = load_made(settings, training, make, training.dataset_text_field, ends)
    training.assistant_only_loss = False  # done: TRL is given labels
    return made


def tokens_of(
    rows: Dataset, reader: Reader, settings: DataSettings, training: SFTConfig, kind: str, names: list[str]
) -> Dataset:
    """Tokens and labels of rows, none longer than `max_length`, with a report of the lengths; `kind` is the setting
    that names the rows. A processor reads images, too."""
    name = f"{kind} {names}"
    tokens = tokenize(rows, reader, training, name, names)
    if kind == "dataset" and training.process_index == 0:
        with saving(training.output_dir):
            report.report_lengths(lengths(tokens), training.max_length, training.output_dir)
        if answer_columns(rows):
            print(f"the loss counts {labelled(tokens):,} of these {lengths(tokens).sum():,} tokens")
    fitted = fit(tokens, training, settings.too_long, name)
    if len(fitted) != len(tokens) and training.process_index == 0:
        verb = "dropped" if settings.too_long == "drop" else "split"
        print(f"{name}: {(lengths(tokens) > training.max_length).sum():,} rows longer than max_length are {verb}.")
    return fitted


def tokenize_text(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, column: str) -> dict[str, list[int]]:
    """A document, which ends by the end-of-sequence token."""
    if not row[column]:
        return {"input_ids": [], "labels": []}
    if not isinstance(row[column], str):
        raise ValueError(f"{column} is {shorten(repr(row[column]), 60)}; it must be text")
    ids = ended(tokenizer(row[column])["input_ids"], tokenizer)
    return {"input_ids": ids, "labels": ids}


def tokenize_completion(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, only: bool) -> dict[str, list[int]]:
    """A prompt, without loss if `only` completions have it, and its completion, ended by the end-of-sequence token."""
    for key in ("prompt", "completion"):
        if row[key] is None:
            raise ValueError(f"{key} is null; it must be text")
    prompt, whole = (tokenizer(text)["input_ids"] for text in (row["prompt"], row["prompt"] + row["completion"]))
    ids = ended(whole, tokenizer)
    first = common_prefix_length(prompt, ids) if only else 0
    return {"input_ids": ids, "labels": [IGNORED] * first + ids[first:]}


def ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """With one end-of-sequence token at the end."""
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def tokenize_chat(row: dict[str, Any], chat: ChatTokenizer, keys: tuple[str, ...], only: bool) -> dict[str, Any]:
    """A row of messages, or of a prompt and a completion of messages; `only` leaves the prompt without loss."""
    for key in keys:
        if not isinstance(row[key], list):
            raise ValueError(f"{key} is {row[key]!r}; it must be a list of messages")
    parts = [row[key] for key in keys]
    parts[0] = with_system(parts[0], row.get("system"))
    options = without_nulls(row.get("chat_template_kwargs")) or {}
    prompt = len(parts[0]) if len(parts) > 1 and only else 0
    messages = [message for part in parts for message in part]
    return chat(messages, row.get("tools"), prompt, pictures_of(row), **options)


def tokens_alone(row: dict[str, Any], function: RowFunction) -> dict[str, list[int]]:
    """Tokens and labels of what a function makes of a row."""
    made = function(row)
    return {"input_ids": made["input_ids"], "labels": made["labels"]}


def answer_columns(rows: Dataset) -> tuple[str, ...]:
    """The columns of chats, or of prompts and completions; none of text."""
    kinds = (("messages",), ("conversations",), ("prompt", "completion"))
    return next((keys for keys in kinds if set(keys) <= set(rows.column_names)), ())


def tokenizer_of(rows: Dataset, tokenizer: Reader, settings: Any) -> tuple[RowFunction, str | None]:
    """What makes tokens and labels of a row, by the columns there are, and a warning. The settings say on what the loss
    is, and the column of text; a processor reads images, too."""
    columns, text_column = rows.column_names, settings.dataset_text_field
    only = settings.completion_only_loss is not False
    if keys := answer_columns(rows):
        refuse_besides_text(columns, "images" if isinstance(tokenizer, ProcessorMixin) else None)
        if keys[0] != "prompt" or not is_text(rows, "prompt"):
            chat = chat_reader(tokenizer, settings.assistant_only_loss)
            return partial(tokenize_chat, chat=chat, keys=keys, only=only), chat.warning
        return partial(tokenize_completion, tokenizer=tokenizer, only=only), None
    if text_column not in columns:
        raise ValueError(
            f"its columns are {columns}; it needs messages, or prompt and completion, or {text_column!r} (set "
            "dataset_text_field to another)"
        )
    kind = rows.features[text_column]
    mixed = isinstance(kind, Json) and any(isinstance(text, str) for text in rows[text_column])  # of several types
    if not mixed and not is_text(rows, text_column):
        raise ValueError(f"the column {text_column!r} holds {kind}; it must hold text")
    return partial(tokenize_text, tokenizer=tokenizer, column=text_column), None


def is_text(rows: Dataset, column: str) -> bool:
    return getattr(rows.features[column], "dtype", None) in STRINGS


def tokenize(rows: Dataset, tokenizer: Reader, training: SFTConfig, name: str, names: list[str]) -> Dataset:
    """Tokens and labels of every row that holds a label: of `messages`, `conversations`, `prompt` and `completion`, or
    text. Errors call the rows by `name`, and find them in the files of `names`."""
    with using(name), training.main_process_first(desc="tokenizing"):
        function, warning = tokenizer_of(rows, tokenizer, training)
        report.warn(training, warning)
        options = {"num_proc": training.dataset_num_proc, "writer_batch_size": WRITTEN, "desc": "Tokenizing"}
        tokens = map_rows(rows, partial(tokens_alone, function=function), names, **options)
        kept = tokens.filter(has_label, input_columns="labels", desc="Leaving out rows without labels")
    if len(kept) != len(tokens) and training.process_index == 0:
        print(f"{name}: {len(tokens) - len(kept):,} of {len(tokens):,} rows hold nothing to train on and are left out.")
    if len(kept) == 0:
        raise SystemExit(f"{name} holds nothing to train on.")
    if training.process_index == 0 and (silent := count_silent(rows)):
        print(f"{name}: an answer is empty in {silent:,} of {len(rows):,} rows; the model learns to say nothing there.")
    return kept


def count_silent(rows: Dataset, column: str | None = None) -> int:
    """How many chats, or prompts with completions, have an answer of no words, or how many rows in a column."""
    key = column or (answer_columns(rows) or ("",))[-1]
    if not key:
        return 0
    answers = (answer for batch in rows.select_columns(key).iter(batch_size=WRITTEN) for answer in batch[key])
    silent = (
        is_silent(clean(each, images=True)) if isinstance(each, list) and each else not (each and each.strip())
        for each in answers
    )
    return sum(silent)


def has_label(labels: list[int]) -> bool:
    """Whether a token but the first, which nothing predicts, has a label."""
    return any(label != IGNORED for label in labels[1:])


def lengths(rows: Dataset, column: str = "input_ids") -> numpy.ndarray:
    """Tokens of every row, without holding them all in memory."""
    batches = rows.select_columns(column).with_format("arrow").iter(batch_size=64)
    counts = [pyarrow.compute.list_value_length(batch[column]).to_numpy() for batch in batches]
    return numpy.concatenate(counts) if counts else numpy.zeros(0, dtype=int)


def labelled(rows: Dataset) -> int:
    """Tokens that the loss counts, without holding them all in memory."""
    batches = rows.select_columns("labels").with_format("arrow").iter(batch_size=64)
    return sum(int((batch["labels"].combine_chunks().flatten().to_numpy() != IGNORED).sum()) for batch in batches)


def fit(tokens: Dataset, training: SFTConfig, choice: str, name: str) -> Dataset:
    """Rows of at most `max_length` tokens: longer ones are refused, split into pieces, or dropped.

    TRL's packing would cut their ends off. Pieces without a label are left out.
    """
    over = too_long(lengths(tokens), training.max_length, choice, name)
    if not over.any():
        return tokens
    if choice == "drop":
        return tokens.select(numpy.flatnonzero(~over))
    with training.main_process_first(desc="splitting"):
        cut = tokens.map(
            partial(pieces, length=training.max_length), batched=True, batch_size=WRITTEN, desc="Splitting"
        )
        kept = cut.filter(has_label, input_columns="labels", desc="Leaving out pieces without labels")
    if len(kept) != len(cut) and training.process_index == 0:
        print(f"{name}: {len(cut) - len(kept):,} of {len(cut):,} pieces have no label and are left out.")
    return kept


def too_long(sizes: numpy.ndarray, longest: int, choice: str, name: str) -> numpy.ndarray:
    """Which rows are longer than `longest`; they end the recipe if `choice` is to refuse them."""
    over = sizes > longest
    if over.any() and choice == "refuse":
        raise SystemExit(
            f"{name}: {over.sum():,} of {len(sizes):,} rows have more than max_length ({longest:,}) tokens, the "
            f"longest {sizes.max():,}. Set max_length higher, or too_long to drop, or to split rows without images."
        )
    if over.all() and choice == "drop":
        raise SystemExit(f"{name}: all rows have more than max_length ({longest:,}) tokens; set max_length higher.")
    return over


def pieces(rows: dict[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    """Rows in pieces of at most `length` tokens."""
    return {
        key: [row[start : start + length] for row in column for start in range(0, len(row), length)]
        for key, column in rows.items()
    }


def load_groups(settings: DataSettings, rows: Rows, training: SFTConfig) -> Rows:
    """Samples of up to `group_rows` rows that begin with the same tokens, of rows to train on and to evaluate on."""
    with training.main_process_first(desc="grouping"):
        train = grouped(rows[0], settings.group_rows)
        held_out = rows[1] if rows[1] is None else grouped(rows[1], settings.group_rows)
    if training.process_index == 0:
        print(f"{len(rows[0]):,} rows are {len(train):,} samples of up to {settings.group_rows} that begin alike.")
    # the rows fit already, and stay as they are
    training.packing, training.padding_free, training.max_length = False, False, None
    training.remove_unused_columns = False
    return train, held_out


def grouped(rows: Dataset, most: int) -> Dataset:
    """Rows of tokens and labels, those that begin with the same tokens together, `most` a sample at most."""
    samples: list[dict[str, list[Any]]] = []
    latest: dict[tuple[int, ...], dict[str, list[Any]]] = {}
    for row in rows.select_columns(["input_ids", "labels"]):
        key = tuple(row["input_ids"][:BEGINNING])
        sample = latest.get(key)
        if sample is None or len(sample["input_ids"]) == most:
            sample = latest[key] = {"input_ids": [], "labels": []}
            samples.append(sample)
        for name, values in sample.items():
            values.append(row[name])
    features = Features(dict.fromkeys(("input_ids", "labels"), List(List(Value("int64")))))
    columns = {name: [sample[name] for sample in samples] for name in features}
    return Dataset.from_dict(columns, features=features)  # from_list refuses an empty list
