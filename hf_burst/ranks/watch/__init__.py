"""Ranks that differ are found out, and slow ones are waited for: a side channel beside torch.distributed."""

from .channel import Watch, watch_of_process
from .counts import group_key
from .report import Report, Verdict, stuck

__all__ = ["Report", "Verdict", "Watch", "group_key", "stuck", "watch_of_process"]
