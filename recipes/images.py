"""Chats about images: rows with `images` beside `messages` (or `prompt` and `completion`), for models that see.

A row is read twice: before training, for its tokens, which those of its images are among; and when its turn comes, for
its pixels, too.
"""

from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import data
from chats import refuse_besides_text
from datasets import Dataset, Image, List
from PIL import Image as Picture
from rows import FOLDER, NUMBER, PICTURES, has_pictures, map_rows
from settings import DataSettings, ModelSettings, using
from torch import Tensor, tensor
from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin
from trl import SFTConfig, pack_dataset

from hf_burst import BurstCollator

Rows = tuple[Dataset, Dataset | None]
Batch = dict[str, Tensor]


def are_in(rows: Dataset) -> bool:
    """Whether rows have images beside them."""
    return "images" in rows.column_names


def opened(rows: Dataset, names: list[str], kind: str = "dataset") -> Dataset:
    """Rows of these files, or of a hub name, with their numbers, and beside names of images the files, which are read
    as they are needed. `kind` is the setting that names the rows, of which those to evaluate on may have no images.

    Images are files, whose names count from the folder of the file with the row, or what datasets reads as images.
    """
    keys = data.answer_columns(rows)
    if not keys or data.is_text(rows, keys[0]):
        raise SystemExit(
            f"{kind} {names} has the columns {[name for name in rows.column_names if name != FOLDER]}; rows about "
            "images have images, and messages, or prompt and completion as lists of messages, and so have rows without "
            "images beside them."
        )
    with using(f"{kind} {names}"):
        refuse_besides_text(rows.column_names, served="images")
        if are_in(rows) and has_pictures(rows):
            rows = rows.cast_column("images", List(Image(decode=False)))
        elif are_in(rows):
            saved = Path(names[0]).resolve() if Path(names[0]).is_dir() else None
            looked = {"desc": "Looking for images", "load_from_cache_file": False}
            paths = map_rows(rows, partial(found, saved=saved), names, **looked)
            rows = rows.add_column(PICTURES, paths[PICTURES]).cast_column(PICTURES, List(Image(decode=False)))
    return rows.add_column(NUMBER, range(len(rows)))


def found(row: dict[str, Any], saved: Path | None) -> dict[str, list[str]]:
    """The files of the images of a row, whose names count from the folder of its file, or from that where rows of no
    file were `saved`."""
    if not isinstance(row["images"] or [], list):
        raise ValueError(f"images is {row['images']!r}; it must be a list of files")
    folder = row.get(FOLDER, saved)
    if folder is None and (short := [name for name in row["images"] or () if not Path(name).is_absolute()]):
        raise ValueError(f"its image {short[0]} counts from the folder of a file, and the row is of none; give paths")
    files = [Path(folder or "", name) for name in row["images"] or ()]
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"its image {missing[0]} is no file")
    for file in files:
        Picture.open(file).close()  # which names a file that is no picture
    return {PICTURES: [str(file) for file in files]}


def load_processor(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """What makes tokens and pixels of chats, with the chat template and the last token that a tokenizer was given."""
    name = settings.tokenizer or settings.model_name_or_path
    with using(f"model_name_or_path {name!r}"):
        try:
            processor: Any = AutoProcessor.from_pretrained(name, revision=settings.model_revision)
        except ImportError as error:
            way = "install it as you installed torch" if "orchvision" in str(error) else "install that"
            raise ImportError(f"{' '.join(str(error).split()).partition(' but ')[0]}; {way}") from None
    if not isinstance(processor, ProcessorMixin):
        raise SystemExit(f"The rows have images, and {name!r} has no processor for them; set a model that sees.")
    own: Any = processor.tokenizer
    if tokenizer.chat_template != own.chat_template or not processor.chat_template:  # that of a file, or its only one
        processor.chat_template = tokenizer.chat_template
    own.chat_template, own.eos_token = processor.chat_template, tokenizer.eos_token
    return processor


def load_chats(settings: DataSettings, processor: ProcessorMixin, training: SFTConfig) -> Rows:
    """Sequences to train on and to evaluate on, of at most `max_length` tokens, those of images among them.

    With `packing`, chats share a sequence by TRL's best fit. They keep their length: a piece of one could begin inside
    an image.
    """
    if settings.too_long == "split":
        raise SystemExit("too_long is 'split', but a piece of a chat could begin inside an image; set refuse or drop.")

    def make(rows: Dataset, kind: str, names: list[str]) -> Dataset:
        rows = opened(rows, names, kind)
        tokens = data.tokens_of(rows, processor, settings, training, kind, names)
        function, _ = data.tokenizer_of(rows, processor, training)
        return sequences(tokens, rows, function, training.max_length if training.packing else None)

    made = data.load_made(settings, training, make)
    if training.process_index == 0 and training.packing:
        print(f"chats about images are packed to {len(made[0]):,} sequences of at most {training.max_length:,} tokens.")
    # labels and sequences are made, and pixels are made of columns that no model knows
    training.assistant_only_loss = training.packing = training.padding_free = training.remove_unused_columns = False
    if training.use_liger_kernel:  # Liger 0.8.5's fails in towers that transpose their patches, such as SigLIP
        training.liger_kernel_config = {"layer_norm": False, **(training.liger_kernel_config or {})}
    return made


def sequences(tokens: Dataset, rows: Dataset, function: data.RowFunction, length: int | None = None) -> Dataset:
    """Chats about images, each as `function` makes it for the model; with a `length` as many in turn as have so many
    tokens. Of all rows those are taken whose numbers stand beside the `tokens`."""
    if length is None:
        chosen = [[number] for number in tokens[NUMBER]]
    else:
        marked = tokens.map(number_each_token, remove_columns=tokens.column_names, desc="Counting tokens")
        chosen = [list(dict.fromkeys(numbers)) for numbers in pack_dataset(marked, length, "bfd")[NUMBER]]
    process = partial(processed, rows=rows, function=function)
    return Dataset.from_dict({"images": chosen}).with_transform(process)  # by this column TRL knows that there are some


def number_each_token(row: dict[str, Any]) -> dict[str, list[int]]:
    """The number of a row, once for each of its tokens."""
    return {NUMBER: [row[NUMBER]] * len(row["input_ids"])}


def processed(chosen: dict[str, list[list[int]]], rows: Dataset, function: data.RowFunction) -> dict[str, Any]:
    """For each sequence its chats, as the model is given them."""
    return {"images": [[as_batch(function(rows[number])) for number in numbers] for numbers in chosen["images"]]}


def as_batch(given: dict[str, Any]) -> Batch:
    """What the model is given for a row, as a batch of one."""
    return given | {key: tensor([given[key]]) for key in ("input_ids", "labels")}


def collate(chosen: list[dict[str, list[Batch]]]) -> Batch:
    """One sequence of all chats that were chosen, which do not see each other."""
    chats = [chat for sequence in chosen for chat in sequence["images"]]
    return chats[0] if len(chats) == 1 else BurstCollator(itemgetter(0), packing=True)(chats)
