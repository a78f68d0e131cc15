"""The command line. A command is a module with `add_arguments(parser)` and `run(arguments) -> int` (the exit code),
imported only when it is used."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import BurstError

# command, which is also its module's name: what it does
_COMMANDS = {
    "doctor": "what hf_burst can do on this machine, and what is misconfigured on the hosts of a launch",
    "plan": "predict seconds and memory of a training step, and compare ways to divide the GPUs",
    "layout": "which rank holds and computes which part of a sequence, as a table and a picture",
    "check": "whether a model is exact over several ranks, or the loss of a batch right; remembers the verdict",
    "bench": "measure a training step on these GPUs, beside its limit and Transformers on one GPU",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, by default from the arguments of the process.

    Returns:
        `int`: The exit code: 0 for success, 1 for a failure with a printed reason, 130 for an interrupt. For `plan`, 1
        is a training that does not fit, and 2 an error. (argparse exits with 2 for unknown arguments.)
    """
    words = list(sys.argv[1:] if argv is None else argv)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about kernels that no command needs
    try:
        status = _run(words)
        sys.stdout.flush()  # detects a closed pipe here rather than at exit
        return status
    except BurstError as problem:
        print(f"hf-burst: {problem}", file=sys.stderr)
        return 2 if words[:1] == ["plan"] else 1
    except KeyboardInterrupt:
        print("hf-burst: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # Python flushes again at exit (docs.python.org/3/library/signal.html)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="hf-burst", description="Exact attention over sequences that span GPUs.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, purpose in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if words[:1] == [name]:
            module = import_module(f".{name}", __name__)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    arguments = parser.parse_args(words)
    return int(arguments.run(arguments))
