"""Numbers of tokens as people write them."""

import argparse
import re

_UNITS = {"": 1, "k": 2**10, "m": 2**20}


def tokens(text: str) -> int:
    """A number of tokens: 131072, 128k or 1M, of 1,024 and 1,048,576 tokens."""
    match = re.fullmatch(r"(-?\d+)([km]?)", text.replace(",", "").replace("_", "").lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; give one as 131072, 128k or 1M")
    return int(match[1]) * _UNITS[match[2]]
