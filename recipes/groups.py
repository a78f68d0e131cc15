"""Rows that begin alike, such as questions on one document, as one sample: their beginning is then computed once."""

from typing import Any

from datasets import Dataset, Features, List, Value
from settings import DataSettings
from trl import SFTConfig, SFTTrainer

from hf_burst import GroupCollator

BEGINNING = 256  # tokens by which rows are found that begin alike
Rows = tuple[Dataset, Dataset | None]


def load_groups(settings: DataSettings, rows: Rows, training: SFTConfig) -> Rows:
    """Samples of up to `group_rows` rows that begin with the same tokens, of rows to train on and to evaluate on."""
    with training.main_process_first(desc="grouping"):
        train, held_out = (None if part is None else grouped(part, settings.group_rows) for part in rows)
    if train is not None and training.process_index == 0:
        print(f"{len(rows[0]):,} rows are {len(train):,} samples of up to {settings.group_rows} that begin alike.")
    # the rows fit already, and stay as they are
    training.packing, training.padding_free, training.max_length = False, False, None
    training.remove_unused_columns = False
    assert train is not None, "there is something to train on"
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
    numbers = List(List(Value("int64")))
    return Dataset.from_list(samples, features=Features({"input_ids": numbers, "labels": numbers}))


def collate(trainer: SFTTrainer) -> None:
    """Has the trainer take samples of several rows."""
    trainer.data_collator = GroupCollator(trainer.data_collator)
