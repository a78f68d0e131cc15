"""A side channel beside torch.distributed that detects ranks waiting for each other in vain, but lets slow ones be."""

from .channel import Watch, watch_of_process
from .report import LEFT, START_ANEW, Counts, Report, Verdict, group_key, stuck

__all__ = ["LEFT", "START_ANEW", "Counts", "Report", "Verdict", "Watch", "group_key", "stuck", "watch_of_process"]
