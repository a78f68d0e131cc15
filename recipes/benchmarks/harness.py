"""What the benchmarks share: the options of their command lines, and where a result goes."""

import argparse
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from recipes.benchmarks.provenance import environment
from recipes.benchmarks.ranks import Ranks

Row = dict[str, Any]


def at_least(least: int) -> Callable[[str], int]:
    """A reader of whole numbers that are not smaller."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return read


def file_to_write(text: str) -> Path:
    """Reads the name of a file, and makes its folder. An older file stays as it is."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}, where no result can be written: {error}") from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; give another file")
    return path


def options_of(doc: str | None, timeout_s: float | None = 300.0) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have: where the result goes; and on what device, with how much
    patience, unless `timeout_s` is `None`, as for trainings whose launcher says so."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if timeout_s is not None:
        parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        parser.add_argument("--timeout", type=float, default=timeout_s, help="seconds that one call may take")
    parser.add_argument("--commit", help="the commit to write down, if this is no git checkout")
    parser.add_argument("--out", type=file_to_write, help="where the result goes, as JSON")
    return parser


def begin(arguments: argparse.Namespace, *told: str, device: str | None = None) -> tuple[Ranks, Row]:
    """Joins the processes, or those that a trainer joined on a `device`, and begins a result: where and with what it
    runs, and the options that it tells by name."""
    ranks = Ranks(arguments.device, arguments.timeout) if device is None else Ranks(device, 300.0)
    if device is not None:  # hf_burst's choices are part of what is told
        logging.basicConfig(format="%(message)s")
        logging.getLogger("hf_burst").setLevel(logging.INFO)
    return ranks, environment(ranks, arguments.commit) | {name: getattr(arguments, name) for name in told}


def write(out: Path | None, result: Any, ranks: Ranks) -> None:
    """Writes a result anew, on the first rank. The file is whole at any time."""
    if out is not None and ranks.rank == 0:
        part = out.with_name(f"{out.name}.part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(out)


def settings_of(arguments: argparse.Namespace) -> Row:
    """The options, as a result keeps them."""
    kinds = int | float | str | list | tuple
    return {name: value for name, value in vars(arguments).items() if isinstance(value, kinds)}


def rows_in(out: Path | None) -> list[Row]:
    """The rows of earlier runs."""
    return json.loads(out.read_text()) if out is not None and out.exists() else []


def setting(text: str) -> tuple[str, Any]:
    """Reads `name=value`; the value is one of YAML."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, yaml.safe_load(value)


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of Markdown; cells that are missing at the end of a row are empty."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    filled = ([*map(str, line), *[""] * (len(heads) - len(line))] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in filled)
