"""The command line: `hf-burst doctor`, `hf-burst bench attention` and `hf-burst plan`.

A command is a module with `add_arguments(parser)` and `run(arguments) -> int`, its exit code; it is imported when it is
called for.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import BurstError

# a command is a module of this name; what it does
_COMMANDS = {
    "doctor": "what hf_burst can do on this machine, and which schedule it would take, and why",
    "bench": "time attention over the ranks of this launch",
    "plan": "who computes which part of a mask in which step, as a table and a picture",
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
    parser = argparse.ArgumentParser(prog="hf-burst", description="Exact attention over sequences that span GPUs.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, purpose in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if words[:1] == [name]:
            module = import_module(f".{name}", __name__)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    arguments = parser.parse_args(words)
    try:
        return int(arguments.run(arguments))
    except BurstError as problem:
        print(f"hf-burst: {problem}", file=sys.stderr)
        return 1
