"""Finds ranks that wait for each other in vain, and waits for slow ones: a side channel next to torch.distributed."""

from .channel import Watch, watch_of_process
from .report import LEFT, START_ANEW, Counts, Report, Verdict, group_key, stuck

__all__ = ["LEFT", "START_ANEW", "Counts", "Report", "Verdict", "Watch", "group_key", "stuck", "watch_of_process"]
