"""How often this rank did what ranks do together, for each process group."""

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=64)
def group_key(name: str, members: tuple[int, ...]) -> str:
    """A name of a process group that all ranks give it, and no other group of theirs."""
    return f"{name}/{zlib.crc32(repr(members).encode()):x}"


def begun_over(group: Any) -> int:
    """How many collectives of a process group this rank has begun; of gloo, messages between two ranks as well."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return 0


@dataclass
class Counts:
    """What hf_burst did over one process group.

    Args:
        agreed (`int`): How many calls of [`Watch.calling`] began.
        met (`int`): The last one that ended well.
        mark (`int`): The collectives of others that had begun by then.
        own (`int`): How many of those that the backend counts were messages of attention.
        exchanges (`int`): How many exchanges of attention this rank has begun: between two calls as many on each rank.
        broken (`str`): By what an attention, or the wait for a call, ended in the middle, if one did.
    """

    agreed: int = 0
    met: int = 0
    mark: int = 0
    own: int = 0
    exchanges: int = 0
    broken: str = ""
