"""Chats about images: rows with `images` beside `messages` (or `prompt` and `completion`), for models that see."""

from pathlib import Path
from typing import Any

import data
from datasets import Dataset, Image, List
from settings import DataSettings, ModelSettings, using
from transformers import AutoProcessor, ProcessorMixin
from trl import SFTConfig, SFTTrainer

from hf_burst import BurstCollator

Rows = tuple[Dataset, Dataset | None]


def load_images(settings: DataSettings, training: SFTConfig) -> Rows | None:
    """The rows to train on and to evaluate on, with their images opened as they are needed; `None` for rows of text.

    Images are files, whose names count from the folder of the file with the rows, or what datasets reads as images.
    """
    seed = training.seed if training.data_seed is None else training.data_seed
    rows, held_out = data.load_splits(settings, seed, training.dataset_text_field)
    if "images" not in rows.column_names:
        return None
    held_out_of = settings.eval_dataset or settings.dataset
    return opened(rows, settings.dataset), None if held_out is None else opened(held_out, held_out_of)


def opened(rows: Dataset, names: list[str]) -> Dataset:
    """Rows of these files, or of a hub name, whose images are read as they are needed."""
    if "images" not in rows.column_names:
        raise SystemExit(f"dataset {names} has no column images, and the other one has: {rows.column_names}.")
    with using(f"dataset {names}"):
        data.refuse_besides_text(rows, served="images")
    if isinstance(getattr(rows.features["images"], "feature", None), Image):
        return rows
    folder, files = Path(names[0]) if Path(names[0]).is_dir() else Path(names[0]).parent, rows["images"]
    if missing := [name for names in files for name in names or () if not (folder / name).is_file()]:
        raise SystemExit(
            f"images names {missing[0]!r}, which is no file in {folder.resolve()}: {len(missing)} of them are missing."
        )
    paths = [[str((folder / name).resolve()) for name in names or ()] for names in files]
    return rows.remove_columns("images").add_column("images", paths).cast_column("images", List(Image()))


def load_processor(settings: ModelSettings) -> ProcessorMixin:
    """What makes tokens and pixels of chats."""
    name = settings.tokenizer or settings.model_name_or_path
    with using(f"model_name_or_path {name!r}"):
        processor: Any = AutoProcessor.from_pretrained(name, revision=settings.model_revision)
    if not isinstance(processor, ProcessorMixin):
        raise SystemExit(f"The rows have images, and {name!r} has no processor for them; set a model that sees.")
    return processor


def arrange(training: SFTConfig) -> None:
    """Settings of text that TRL refuses for images. Rows keep their length: a cut one would lose places of images."""
    if training.process_index == 0:
        print("The rows have images: max_length and packing do not count, and the loss is on whole chats.")
    training.packing, training.padding_free, training.max_length = False, False, None
    training.assistant_only_loss = False
    if training.use_liger_kernel:  # Liger 0.8.5's fails in towers that transpose their patches, such as SigLIP
        training.liger_kernel_config = {"layer_norm": False, **(training.liger_kernel_config or {})}


def pack(trainer: SFTTrainer) -> None:
    """Joins the samples of a batch to one packed row."""
    if trainer.args.per_device_train_batch_size > 1:
        trainer.data_collator = BurstCollator(trainer.data_collator, packing=True)
