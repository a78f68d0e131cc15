"""Options for a sequence: its tokens, as people write them, and its packed documents."""

import argparse
import re
from itertools import accumulate

from ..errors import ConfigError

_UNITS = {"": 1, "k": 2**10, "m": 2**20}


def tokens(text: str) -> int:
    """Parses a number of tokens: 131072, 128k or 1M, with 1k = 1,024 and 1M = 1,048,576."""
    match = re.fullmatch(r"(-?\d+)([km]?)", text.replace(",", "").replace("_", "").lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; give one as 131072, 128k or 1M")
    return int(match[1]) * _UNITS[match[2]]


def add_sequence(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Adds the options `--length` and `--documents`."""
    parser.add_argument("--length", type=tokens, help=f"tokens of a sequence, such as 4096, 128k or 1M{default}")
    parser.add_argument(
        "--documents",
        type=tokens,
        nargs="+",
        metavar="TOKENS",
        help="lengths of packed documents, one after the other",
    )


def named_sequence(arguments: argparse.Namespace) -> tuple[int | None, tuple[int, ...]]:
    """Returns the sequence's tokens (`None` if not given) and its cumulative document boundaries (if any)."""
    length = arguments.length
    sizes = arguments.documents
    if not sizes:
        return length, ()
    if length not in (None, sum(sizes)):
        raise ConfigError(f"--documents have {sum(sizes)} tokens together and --length is {length}; give one.")
    return sum(sizes), tuple(accumulate(sizes, initial=0))
