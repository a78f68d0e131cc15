"""The rows of files: what is wrong with some of them, and where they stand."""

import csv
import json
import os
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from glob import glob
from hashlib import sha256
from itertools import chain, islice, zip_longest
from pathlib import Path
from textwrap import shorten
from types import NoneType
from typing import Any

from chats import without_nulls
from datasets import Dataset, Features, Image, Json, ReadInstruction, Value, concatenate_datasets, load_dataset
from datasets.data_files import DataFilesList
from datasets.exceptions import DatasetsError
from datasets.features.features import register_feature
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile
from settings import TEXT_FILES, RowError

READERS = {**dict.fromkeys(TEXT_FILES, "text"), ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
RowFunction = Callable[[dict[str, Any]], dict[str, Any]]
SOURCES = [  # of functions, whose names are all that datasets knows
    Path(__file__).with_name(f"{name}.py") for name in ("data", "chats", "preferences", "rows")
]
NUMBER = "number of the row"  # a column that readers of rows leave as it is
FOLDER, PICTURES = "folder of the file", "pictures of the row"  # columns beside the names of images
WRONG_QUOTES = {  # what Python says of them
    "unexpected end of data": "a quote has no end",
    "',' expected after '\"'": 'a quote ends inside of a value; write quotes inside of values twice ("")',
}
WRITTEN = 64  # long rows that are in memory together
SHOWN, MANY = 10, 100  # wrong rows that an error shows, and that are looked for
PLAIN = {str: "string", int: "int64", bool: "bool", NoneType: "null"}  # what Arrow holds of JSON as it is written


@dataclass
class ExactJson(Json):
    """A column of JSON as it is written. That of datasets rounds numbers, and makes a number of the text "5". What a
    function of `map` makes for it must be written by [`as_json`], which datasets leaves as it is."""

    _type: str = field(default="ExactJson", init=False, repr=False)

    def encode_example(self, example_data: Any) -> str | None:
        return None if example_data is None else as_json(example_data)

    def decode_example(self, example_data: str | None, token_per_repo_id: Any = None) -> Any:
        return None if example_data is None else json.loads(json.loads(example_data))


def as_json(value: Any) -> str:
    """JSON of the JSON text of a value: a text is the one kind of JSON that datasets does not write anew."""
    return json.dumps(json.dumps(value))


with warnings.catch_warnings():  # the function is called experimental
    warnings.simplefilter("ignore")
    register_feature(ExactJson, "ExactJson")


def kind_of(file: str) -> str | None:
    """What reads a file; `None` for the name of a data set."""
    return READERS.get(Path(file).suffix.lower())


@contextmanager
def reading(names: list[str]) -> Iterator[None]:
    """Where files cannot be read or hold nothing, the error says so, and in which lines or rows."""
    try:
        yield
    except StopIteration:
        raise ValueError("it holds no rows") from None
    except (DatasetsError, UnicodeDecodeError, ArrowException) as error:  # which say only that there was one
        if wrong := list(islice(chain.from_iterable(map(wrong_in, files_of(names))), SHOWN)):
            raise RowError("\n".join(wrong)) from None
        raise ValueError(str(error.__cause__ or error)) from None


def files_of(names: list[str]) -> list[str]:
    """Names that are files, and the files of folders and of patterns."""
    named = chain.from_iterable(map(expand, names))
    held = chain.from_iterable([name] if Path(name).is_file() else sorted(glob(name, recursive=True)) for name in named)
    return [name for name in held if Path(name).is_file()]


def wrong_in(file: str) -> Iterator[str]:
    """What makes a file unreadable, and in which lines, or after which row."""
    if not file.lower().endswith(".parquet") and (wrong := not_utf_8(file)):
        yield wrong
        return
    place = file
    try:
        for place, row in groups_of(file) if file.lower().endswith(".parquet") else placed_rows(file):
            if isinstance(row, json.JSONDecodeError):
                yield f"{place}: {row.msg} (column {row.colno})"
            elif isinstance(row, csv.Error):
                yield f"{place}: {row}"
            elif not isinstance(row, dict):
                yield f"{place}: it must be a mapping, such as {{...}}"
    except (DatasetsError, ValueError, OSError) as error:
        yield f"{file if place == file else f'behind {place}'}: {str(error).strip()}"


def not_utf_8(file: str) -> str | None:
    """What is said of a line that is not UTF-8, if there is one."""
    with Path(file).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError as problem:
                near = line[max(0, problem.start - 20) : problem.end + 20]
                return f"{file}:{number} is not UTF-8: {problem.reason} in {near!r}; save the file as UTF-8"
    return None


def groups_of(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The last row of each group of a Parquet file that can be read."""
    groups, rows = ParquetFile(file), 0
    for number in range(groups.num_row_groups):
        rows += groups.read_row_group(number).num_rows
        yield f"{file}, row {rows:,}", {}


def read_written(kind: str, data_files: list[str], split: str) -> Dataset:
    """Rows of JSON or CSV as they are written; all of CSV is text. datasets, which reads files that are not local,
    makes times of dates, floats of numbers, and one order of keys. Where a later piece of a file has another type, it
    puts quotes around text, makes text of numbers, drops zeros before them, or fails."""
    if any("://" in file for file in data_files):
        return load_dataset(kind, data_files=data_files, split=split)
    data_files = list(map(str, DataFilesList.from_patterns(data_files)))
    if not data_files:
        raise ValueError("there is no such file")
    columns = from_files(columns_of, data_files, Features({"name": Value("string"), "kind": Value("string")}))
    kinds = {column["name"]: Value(column["kind"]) if column["kind"] else ExactJson() for column in columns}
    rows = from_files(written_rows, data_files, Features(kinds))
    parts = ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    if not any(part.to > part.from_ for part in parts):
        raise ValueError(f"{split!r} of {len(rows)} rows holds none")
    return concatenate_datasets([rows.select(range(part.from_, part.to)) for part in parts])


def from_files(make: Callable[[Iterable[str]], Iterator[Any]], files: list[str], features: Features) -> Dataset:
    """What a function makes of files, which datasets keeps as long as they and the code stay as they are."""
    stamps = [(path.resolve(), path.stat().st_mtime_ns, path.stat().st_size) for path in map(Path, files)]
    known = sha256(repr((make.__name__, files, stamps, code())).encode()).hexdigest()
    given = {"files": tuple(files)}  # of a list, datasets would give the function one file at a time
    return Dataset.from_generator(
        make, features=features, gen_kwargs=given, fingerprint=known, writer_batch_size=WRITTEN
    )


def columns_of(files: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The columns of files, and their kind; `None` where Arrow would change a value."""
    kinds: dict[str, set[type]] = defaultdict(set)
    for row in written_rows(files):
        for name, value in row.items():
            kinds[name].add(float if type(value) is int and not -(1 << 63) <= value < 1 << 63 else type(value))
    if not kinds:
        raise DatasetsError("it holds no rows")
    for name, found in kinds.items():
        first, *more = (found - {NoneType}) or found
        yield {"name": name, "kind": None if more else PLAIN.get(first)}


def written_rows(files: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The rows of files of JSON or CSV; one that is null is empty."""
    for place, row in chain.from_iterable(placed_rows(file, errors="strict") for file in files):
        if not isinstance(row, dict | None):
            raise DatasetsError(f"{place} is not a row")
        yield row or {}


def placed_rows(file: str, errors: str = "replace") -> Iterator[tuple[str, Any]]:
    """The rows of a file, each with the line in which it begins; in Parquet with its number, from 1. In place of a row
    that is broken stands its error. `errors` is that of `open`, for text that is not UTF-8."""
    kind = kind_of(file)
    if file.lower().endswith(".jsonl") and begins_with_a_row(file, errors):
        with Path(file).open(encoding="utf-8-sig", errors=errors) as lines:
            for number, line in enumerate(lines, 1):
                yield from ((f"{file}:{number}", value) for _, value in json_values(line.rstrip(), 0))
    elif kind == "json":
        text = Path(file).read_text(encoding="utf-8-sig", errors=errors)
        values = json_values(text, text.index("[") + 1 if text.lstrip().startswith("[") else 0)
        for line, value in values:
            yield f"{file}:{line}", {"text": value} if isinstance(value, str) else value
    elif kind == "csv":
        yield from ((f"{file}:{line}", row) for line, row in csv_rows(file, errors))
    elif kind == "parquet":
        rows = load_dataset(kind, data_files=file, split="train", streaming=True).decode(False)
        yield from ((f"{file}, row {number:,}", row) for number, row in enumerate(rows, 1))


def begins_with_a_row(file: str, errors: str) -> bool:
    """Whether the first line with text is whole JSON, or broken JSON, and not a list of rows or the beginning of more
    lines, as in files of JSON that are named .jsonl."""
    with Path(file).open(encoding="utf-8-sig", errors=errors) as lines:
        first = next((line.rstrip() for line in lines if line.strip()), "{}")
    try:
        value = json.loads(first)
    except json.JSONDecodeError as error:
        return error.pos < len(first)
    return not (isinstance(value, list) and value and all(isinstance(row, dict) for row in value))


def json_values(text: str, end: int) -> Iterator[tuple[int, Any]]:
    """Values of JSON that follow each other, from the beginning or from within a list, each with its line. An error is
    the last, also that of a list which does not end, or behind whose end there is more."""
    decoder, between, line = json.JSONDecoder(), re.compile(r"[\s,]*"), 1 + text.count("\n", 0, end)
    listed = end > 0
    while (start := between.match(text, end).end()) < len(text) or listed:  # type: ignore[union-attr]
        line += text.count("\n", end, start)
        if listed and text.startswith("]", start):
            if text[start + 1 :].strip():
                more = json.JSONDecodeError("There is more behind the end of the list", text, start + 1)
                yield more.lineno, more
            return
        try:
            value, end = decoder.raw_decode(text, start)
            if "\\ud" in text[start:end].lower():
                json.dumps(value, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            yield error.lineno, error
            return
        except UnicodeEncodeError as error:
            half = f"{error.object[error.start]!r} is half of a character, whose other half is missing"
            yield line, json.JSONDecodeError(half, text, start)
            return
        yield line, value
        line += text.count("\n", start, end)


def csv_rows(file: str, errors: str) -> Iterator[tuple[int, Any]]:
    """The rows of a CSV file, each with the line in which it begins; an empty value is null. An error is the last that
    it yields."""
    csv.field_size_limit(sys.maxsize)  # a field may be a long text
    with Path(file).open(newline="", encoding="utf-8-sig", errors=errors) as held:
        reader, names, begins = csv.reader(held, strict=True), list[str](), 1
        try:
            for values in reader:
                blank = len(values) < 2 and values != [""] and not "".join(values).strip()
                if names and not blank:
                    yield begins, csv_row(names, values)
                elif not blank:
                    names = csv_names(values)
                begins = reader.line_num + 1
        except csv.Error as error:
            yield begins, csv.Error(WRONG_QUOTES.get(str(error), str(error)))


def csv_names(values: list[str]) -> list[str]:
    """The names of columns; those without one have a number."""
    names = [name or f"column {number}" for number, name in enumerate(values, 1)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise csv.Error(f"the columns {twice} are there more than once; give each a name of its own")
    return names


def csv_row(names: list[str], values: list[str]) -> dict[str, str | None]:
    if any(values[len(names) :]):  # spreadsheets end lines with commas
        raise csv.Error(f"it holds {len(values)} values, and the columns are {names}")
    return dict(zip_longest(names, (value or None for value in values[: len(names)])))


def code() -> str:
    """A digest of the sources of functions."""
    return sha256(b"".join(Path(file).read_bytes() for file in SOURCES)).hexdigest()


def map_rows(
    rows: Dataset, function: Callable[[dict[str, Any]], dict[str, Any]], names: list[str], **options: Any
) -> Dataset:
    """What a function makes of each row. What datasets has kept of other code is not taken.

    Raises:
        RowError: If there are rows of which it makes nothing, with the first of them.
        ValueError: If what it makes cannot be stored.
    """
    options = {"remove_columns": [name for name in rows.column_names if name != NUMBER], **options}
    try:
        with reading(names):  # pyarrow does not look whether JSON lines are UTF-8
            return rows.map(partial(make_row, function=function, code=code()), **options)
    except TypeError as error:  # of pyarrow, which stores what the function has made
        raise ValueError(str(error)) from error
    except ValueError as error:
        if isinstance(error.__context__, UnicodeDecodeError) or not (wrong := wrong_rows(rows, function, names)):
            raise
    more = [f"and {len(wrong) - SHOWN} more rows"] if len(wrong) > SHOWN else []
    raise RowError("\n".join(wrong[:SHOWN] + more))


def has_pictures(rows: Dataset) -> bool:
    """Whether datasets reads the images of rows, which are not names of files then."""
    return isinstance(getattr(rows.features["images"], "feature", None), Image)


def folders_of(rows: Dataset, names: list[str], split: str) -> list[str]:
    """The folder of the file that each row comes from; the rows are a split of these files, or a part of it."""
    files = DataFilesList.from_patterns(names)  # in the order in which they are read
    folders = [str(Path(file).parent) for file in files]
    if len(set(folders)) == 1:
        return folders[:1] * len(rows)
    held = [folder for folder, file in zip(folders, files, strict=True) for _ in placed_rows(file)]
    total = rows.info.splits["train"].num_examples  # type: ignore[index]
    if len(held) != total:
        raise ValueError(
            f"{len(held):,} rows are found in its files, and {total:,} are read, so it is not certain from which "
            "folder the images of a row count; write JSON lines"
        )
    parts = ReadInstruction.from_spec(split).to_absolute({"train": total})
    return [folder for part in parts for folder in held[part.from_ : part.to]]


def pictures_of(row: dict[str, Any]) -> list[Any]:
    """The images of a row, decoded."""
    pictures = []
    for number, held in enumerate(row.get(PICTURES) or row.get("images") or (), 1):
        try:
            pictures.append(Image().decode_example(held))
        except Exception as error:
            named = isinstance(held, dict) and held.get("path")
            raise ValueError(f"its image {named or number} cannot be read: {error}") from error
    return pictures


def make_row(row: dict[str, Any], function: RowFunction, code: str) -> dict[str, Any]:
    """What a function makes of a row. datasets looks at the code, a digest."""
    try:
        return function(row)
    except UnicodeDecodeError:  # of the file
        raise
    except Exception as error:
        raise ValueError(str(error)) from error


def wrong_rows(rows: Iterable[dict[str, Any]], function: RowFunction, names: list[str]) -> list[str]:
    """What is wrong with rows, and where: file and line, in Parquet the row, in their order; else the number of a row
    of those that were drawn, from 1. After many it looks no further."""
    left: list[tuple[int, dict[str, Any], str]] = []
    for index, row in enumerate(rows):
        try:
            function(row)
        except Exception as error:
            known = {name: value for name, value in row.items() if name not in (NUMBER, PICTURES)}
            left.append((index, without_nulls(known), str(error)))
        if len(left) == MANY:
            break
    placed: list[str] = []
    places = ((file, *each) for file in (files_of(names) if left else ()) for each in placed_rows(file))
    for file, place, row in places:
        known = without_nulls(row) or {}  # a row that is null has nulls alone
        same = (known, {**known, FOLDER: os.path.dirname(os.path.abspath(file))}) if isinstance(known, dict) else ()
        if (found := next((at for at, (_, row, _) in enumerate(left) if row in same), None)) is not None:
            placed.append(f"{place}: {left.pop(found)[2]}")
        if not left:
            break
    return placed + [f"row {index + 1} ({shorten(str(row), 80)}): {said}" for index, row, said in left]


def expand(name: str) -> list[str]:
    """A folder's files, in the order of their names; anything else by itself."""
    folder = Path(name)
    if not folder.is_dir():
        return [name]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    readable = [str(path) for path in files if path.suffix.lower() in READERS]
    if not readable:
        kinds = ", ".join(sorted({path.suffix or path.name for path in files})) or "nothing"
        raise SystemExit(
            f"dataset {name!r} is a folder that holds {kinds}; it must hold {', '.join(READERS)}. "
            "Give texts a name that ends in .txt."
        )
    others = Counter(path.suffix or path.name for path in files if path.suffix.lower() not in READERS)
    if others and os.environ.get("RANK", "0") == "0":
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(5))
        print(f"dataset {name}: {len(readable)} files are read, others are left out ({kinds}).")
    return readable
