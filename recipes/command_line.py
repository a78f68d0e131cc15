"""Reads settings from the command line and YAML files."""

import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import beginning
from settings import DEFAULTS, mapping
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

OLDER = {"activation_checkpointing": "gradient_checkpointing"}  # names of settings before Transformers 5.23
NEEDED = ("output_dir", "max_length", "max_completion_length")  # may not be null, though TRL takes it
WORDS = {int: "a whole number", float: "a number", string_to_bool: "true or false"}


class Parser(HfArgumentParser):
    """A parser whose errors are a sentence too."""

    def error(self, message: str) -> NoReturn:
        option = message.removeprefix("argument ").partition("/")[0].partition(":")[0]
        named = (one for one in self._actions if option in one.option_strings)
        switch = "one argument" in message and any(one.type is string_to_bool for one in named)
        raise SystemExit(f"{message}{f', such as {option} true' if switch else ''}; see --help.")


def parse(
    arguments: list[str],
    kinds: tuple[type | str, ...],
    defaults: dict[str, Any],
    check: Callable[..., None] = lambda *values: None,
) -> tuple[Any, ...]:
    """Reads the settings, and checks them before the processes are joined.

    Args:
        arguments (`list[str]`): The command line. Of several YAML files (`--config`) later ones overrule.
        kinds (`tuple[type | str, ...]`): The dataclasses whose fields are the settings. Those of TRL may be names: they
            take seconds to import, before which the settings of the others are read and checked.
        defaults (`dict[str, Any]`): Defaults that overrule `DEFAULTS` and those of the dataclasses.
        check (`Callable`): Is called with the values, those of TRL in a namespace, since TRL's classes join the
            processes when they are made; raises for wrong ones.
    """
    arguments = [at_home(word) for word in arguments]
    own = tuple(kind for kind in kinds if not isinstance(kind, str))
    if len(own) == len(kinds):
        return read(arguments, own, defaults)
    if {"-h", "--help"} & set(arguments):
        libraries = ", ".join(kind for kind in kinds if isinstance(kind, str))
        more = f"Settings of TRL's {libraries} are taken, too: --help_all lists all of them."
        read(arguments, own, defaults, more=more)
    arguments = ["--help"] if "--help_all" in arguments else arguments
    values = iter(() if "--help" in arguments else read(arguments, own, defaults, alone=False))
    beginning.loading("torch, Transformers and TRL")
    import trl

    def check_all(given: SimpleNamespace) -> None:
        check(*(given if isinstance(kind, str) else next(values) for kind in kinds))

    every = tuple(getattr(trl, kind) if isinstance(kind, str) else kind for kind in kinds)
    return read(arguments, every, defaults, check=check_all)


def read(
    arguments: list[str],
    kinds: tuple[type, ...],
    defaults: dict[str, Any],
    alone: bool = True,
    more: str = "",
    check: Callable[[SimpleNamespace], None] = lambda given: None,
) -> tuple[Any, ...]:
    """One value of each dataclass; if they are not alone, other settings than theirs are passed over. The help ends by
    `more`. All settings are checked before the dataclasses are made."""
    usage = "%(prog)s [--config FILE] [--SETTING VALUE ...]"
    parser = Parser(kinds, usage=usage, allow_abbrev=False, add_help=alone, epilog=more)
    known = {action.dest: action for action in reversed(parser._actions) if action.dest != "help"}  # not --no_NAME
    types = {name: kind for one in kinds for name, kind in get_type_hints(one, include_extras=True).items()}
    checkpointing = {"activation_checkpointing", "gradient_checkpointing"} & set(known)  # two names of one setting
    parser.set_defaults(**dict.fromkeys(checkpointing))
    parser.set_defaults(**{name: value for name, value in {**DEFAULTS, **defaults}.items() if name in known})
    file = "YAML file of settings; of several, later ones overrule, and the command line overrules all."
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help=file)
    given, unknown = parser.parse_known_args(arguments)
    if unknown and alone:
        raise SystemExit(f"No setting is called {unknown[0].lstrip('-')}{similar(unknown[0].lstrip('-'), known)}")
    for file in given.config:
        values = mapping("--config", file)
        values = {name if name in known else OLDER.get(name, name): at_home(value) for name, value in values.items()}
        for name in list(values):
            if name in known:
                values[name] = as_given(file, known[name], types[name], values[name])
            elif alone:
                raise SystemExit(f"{file}: no setting is called {name}{similar(name, known)}")
            else:
                del values[name]
        parser.set_defaults(**other_model(values), **values)
    parser.set_defaults(**other_model({word.lstrip("-").split("=")[0] for word in arguments}))
    given = vars(parser.parse_known_args(arguments)[0])
    if checkpointing and all(given[name] is None for name in checkpointing):
        parser.set_defaults(**{min(checkpointing): True})
    check(SimpleNamespace(**vars(parser.parse_known_args(arguments)[0])))
    try:
        return parser.parse_args_into_dataclasses(arguments, return_remaining_strings=not alone)[: len(kinds)]
    except ValueError as error:
        told = str(error)
        if "bf16/gpu" in told:
            told = (
                "bf16 is asked for, as in recipes/configs for GPUs, and no GPU is found. Without one take a file there "
                "whose name ends in _cpu.yaml, and set ACCELERATE_USE_CPU=1."
            )
        raise SystemExit(told) from None


def at_home(value: Any) -> Any:
    """Paths that begin by `~`, written out. Shells do so, but neither in YAML nor behind `--name=`."""
    if isinstance(value, list):
        return [at_home(item) for item in value]
    if not isinstance(value, str):
        return value
    name, equals, path = value.partition("=") if value.startswith("--") else ("", "", value)
    return name + equals + os.path.expanduser(path)


def as_given(file: Path, setting: Any, kind: Any, value: Any) -> Any:
    """The value of a setting in a YAML file, as the command line reads it; a list of one may be without brackets."""
    if value is None and NoneType in get_args(kind) and setting.dest not in NEEDED:
        return None
    if setting.choices and value not in setting.choices:
        choices = ", ".join(map(repr, setting.choices))
        raise SystemExit(f"{file}: {setting.dest} is {value!r}; it must be one of {choices}.")
    several = setting.nargs == "+"
    kinds = {get_origin(one) or one for one in (kind, *get_args(kind))} - {str, NoneType, *([list] if several else [])}
    kinds |= set() if setting.type in WORDS else {bool}  # which documentation has where annotations say text
    try:
        made = []
        for item in value if several and isinstance(value, list) else [value]:
            if type(item) not in kinds and isinstance(item, list | dict | None):
                raise ValueError
            made.append(item if type(item) in kinds else setting.type(str(item)))
    except (ValueError, TypeError, ArgumentTypeError) as error:
        wanted = f"give {WORDS.get(setting.type, 'text')}{', or several in a list' * several}"
        said = wanted if setting.type in WORDS else str(error) or wanted
        raise SystemExit(f"{file}: {setting.dest} is {value!r}; {said}.") from None
    return made if several else made[0]


def other_model(names: Iterable[str]) -> dict[str, None]:
    """Takes back the model of an earlier source where a later one names another, and its tokenizer where that model has
    its own."""
    ways, given = {"model_name_or_path", "model_config"}, set(names)
    taken = ways if ways & given else set()
    return dict.fromkeys((taken | ({"tokenizer"} if "model_name_or_path" in given else set())) - given)


def similar(name: str, known: dict[str, Any]) -> str:
    """The end of a sentence about a setting that does not exist."""
    matches = get_close_matches(name.split("=")[0].replace("-", "_"), known, n=1)
    return f"; did you mean {matches[0]}?" if matches else "; see --help."
