"""Dataclasses with the fields of TRL's training arguments, read from the sources that are installed.

TRL's own classes take torch with them, and tens of seconds. These take none, and refuse what argparse refuses: names
that no setting has, values that are no numbers, and those that are no choice.
"""

import ast
from argparse import ArgumentTypeError
from dataclasses import field, make_dataclass
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

from transformers.utils import logging

KNOWN = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict, "Any": Any}
KNOWN |= {"Literal": Literal, "Optional": Optional, "Union": Union}
COMPUTED = {"trainer_log_levels.keys()": [*logging.get_log_levels_dict(), "passive"]}  # no literals


class Elsewhere(Exception):
    """A class that is not where it was."""


class Choices(StrEnum):
    """An enum of Transformers, by its values."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        choices = ", ".join(repr(choice.value) for choice in cls)
        raise ArgumentTypeError(f"invalid choice: {value!r} (choose from {choices})")


def stand_in(name: str) -> type | None:
    """The dataclass for a class of TRL, or for Transformers' `TrainingArguments`; `None` if they lie elsewhere now."""
    try:
        return make_dataclass(name, [(own, *typed) for own, typed in fields_of(name).items()])
    except Elsewhere:
        return None


def fields_of(name: str) -> dict[str, tuple[Any, Any]]:
    """The type of each field of a class and its bases, and what dataclasses call a field. Raises if one is missing."""
    package, path = "trl", f"trainer/{name.strip('_').removesuffix('Config').lower()}_config.py"
    if name == "TrainingArguments":
        package, path = "transformers", "training_args.py"
    spec = find_spec(package)
    file = Path(((spec and spec.submodule_search_locations) or ["/"])[0]) / path
    definition = next((node for node in lines(file) if isinstance(node, ast.ClassDef) and node.name == name), None)
    if definition is None:
        raise Elsewhere(name)
    found: dict[str, tuple[Any, Any]] = {}
    for base in definition.bases:
        found |= fields_of(ast.unparse(base))
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            found[ast.unparse(node.target)] = described(node, file)
    return found


@cache
def lines(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []


def choices(name: str, file: Path) -> type[Choices] | None:
    """The enum that a file defines, or imports from one beside it; `None` if that is none, or a value is no text."""
    for node in lines(file):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and name in [alias.name for alias in node.names]:
            return choices(name, file.parent / f"{str(node.module).replace('.', '/')}.py")
        if isinstance(node, ast.ClassDef) and node.name == name and "Enum" in " ".join(map(ast.unparse, node.bases)):
            members = [one for one in node.body if isinstance(one, ast.Assign)]
            values = {ast.unparse(one.targets[0]): value_of(one.value) for one in members}
            return Choices(name, values) if all(isinstance(value, str) for value in values.values()) else None
    return None


def described(node: ast.AnnAssign, file: Path) -> tuple[Any, Any]:
    """The type and the field of a line. Other types than numbers, text and choices are text on the command line, or
    lists of it, and `Annotated`: other values may be right. Other defaults than values are `None`."""
    names = {part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)}
    types = KNOWN | {name: choices(name, file) for name in names - set(KNOWN)}
    known = all(types[name] for name in names)
    kind = eval(ast.unparse(node.annotation), types) if known else None
    kind = kind if known else Annotated[list[str] if "list" in names else str | None, "another type"]
    words = {word.arg: word.value for word in node.value.keywords} if isinstance(node.value, ast.Call) else {}
    told = words.get("metadata")
    pairs = zip(told.keys, told.values, strict=True) if isinstance(told, ast.Dict) else ()
    options = {value_of(key): value_of(value) for key, value in pairs}
    kept = {name: options[name] for name in ("nargs", "const", "choices") if name in options}
    return kind, field(default=value_of(words.get("default", node.value)), metadata=kept)


def value_of(node: ast.expr | None) -> Any:
    try:
        return node and ast.literal_eval(node)
    except ValueError:  # no literal
        return COMPUTED.get(ast.unparse(node))
