"""Dataclasses with the fields of TRL's training arguments, read from the sources that are installed.

TRL's own classes take torch with them, and tens of seconds. These take none, and refuse what argparse refuses: names
that no setting has, and values that are no numbers.
"""

import ast
from dataclasses import field, make_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

KNOWN = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict, "Any": Any}


def stand_in(name: str) -> type | None:
    """The dataclass for a class of TRL, or for Transformers' `TrainingArguments`; `None` if they lie elsewhere now."""
    try:
        return make_dataclass(name, [(own, *typed) for own, typed in fields_of(name).items()])
    except LookupError:
        return None


def fields_of(name: str) -> dict[str, tuple[Any, Any]]:
    """The type of each field of a class and its bases, and what dataclasses call a field. Raises if one is missing."""
    package, path = "trl", f"trainer/{name.strip('_').removesuffix('Config').lower()}_config.py"
    if name == "TrainingArguments":
        package, path = "transformers", "training_args.py"
    spec = find_spec(package)
    source = Path(((spec and spec.submodule_search_locations) or ["/"])[0]) / path
    nodes = ast.parse(source.read_text()).body if source.is_file() else []
    definition = next((node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name), None)
    if definition is None:
        raise LookupError(name)
    found: dict[str, tuple[Any, Any]] = {}
    for base in definition.bases:
        found |= fields_of(ast.unparse(base))
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = described(node)
    return found


def described(node: ast.AnnAssign) -> tuple[Any, Any]:
    """The type and the field of a line. Other types than numbers and text are text, or lists of it; other defaults than
    values are `None`."""
    names = {part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)}
    known = names <= set(KNOWN)
    kind = eval(ast.unparse(node.annotation), dict(KNOWN)) if known else list[str] if "list" in names else str | None
    words = {word.arg: word.value for word in node.value.keywords} if isinstance(node.value, ast.Call) else {}
    told = words.get("metadata")
    pairs = zip(told.keys, told.values, strict=True) if isinstance(told, ast.Dict) else ()
    options = {value_of(key): value_of(value) for key, value in pairs}
    kept = {name: options[name] for name in ("nargs", "const") if name in options}
    return kind, field(default=value_of(words.get("default", node.value)), metadata=kept)


def value_of(node: ast.expr | None) -> Any:
    try:
        return node and ast.literal_eval(node)
    except ValueError:
        return None
