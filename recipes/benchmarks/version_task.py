"""The task that versions.py gives to each of its processes. Needs nothing of hf_burst."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

VERSIONS = ("before", "after")


@dataclass(frozen=True)
class Task:
    """The task of one process of versions.py.

    Args:
        version (`str`): `"before"` or `"after"`.
        folder (`str`): The checkout of this version.
        rank, ranks (`int`): This rank, and how many ranks each version has.
        host (`str`), port (`int`): Where the store of all processes listens.
        settings (`dict`): The options of versions.py.
        cases (`list[dict]`): The cases to measure, one after another.
    """

    version: str
    folder: str
    rank: int
    ranks: int
    host: str
    port: int
    settings: dict[str, Any]
    cases: list[dict[str, Any]]

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device("cuda", self.rank) if self.settings["device"] == "cuda" else torch.device("cpu")

    @property
    def limit(self) -> timedelta:
        """How long processes wait for each other."""
        return timedelta(seconds=self.settings["timeout"])

    def store(self) -> dist.TCPStore:
        """A connection of its own to the store of all processes."""
        return dist.TCPStore(self.host, self.port, is_master=False, timeout=self.limit)
