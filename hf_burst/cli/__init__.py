"""The command line: `hf-burst doctor` and `hf-burst bench attention`.

A command is a module with `add_arguments(parser)` and `run(arguments) -> int`, its exit code; it is imported when it is
called for.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from ..errors import BurstError

# words of a command: its module here, and what it does
_COMMANDS = {
    ("doctor",): ("doctor", "what hf_burst can do on this machine, and which schedule it would take, and why"),
    ("bench", "attention"): ("bench", "time attention over the ranks of this launch beside other libraries"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv (sequence of `str`, *optional*): Its words; those that the process was started with by default.

    Returns:
        `int`: The exit code: 0 if all is well, 1 if it cannot be done, after a sentence that says why. (argparse ends
        the process with 2 for words that it does not know.)
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser, module = _parser(words)
    arguments = parser.parse_args(words)
    if module is None:
        parser.print_help()
        return 1
    try:
        return int(module.run(arguments))
    except BurstError as problem:
        print(f"hf-burst: {problem}", file=sys.stderr)
        return 1


def _parser(words: Sequence[str]) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    """The parser, with the arguments of the command that is called for, and its module."""
    parser = argparse.ArgumentParser(prog="hf-burst", description="Exact attention over sequences that span GPUs.")
    branches: dict[tuple[str, ...], argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    module = None
    for path, (home, purpose) in _COMMANDS.items():
        above = parser
        for depth, word in enumerate(path):
            if path[:depth] not in branches:
                branches[path[:depth]] = above.add_subparsers(metavar="command", required=depth > 0)
            last = depth + 1 == len(path)
            above = branches[path[:depth]].add_parser(word, help=purpose, description=purpose if last else None)
        if tuple(words[: len(path)]) == path:
            module = import_module(f".{home}", __name__)
            module.add_arguments(above)
    return parser, module
