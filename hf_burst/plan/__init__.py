"""Planning on paper: masks, chunk ownership, schedules and their traffic. Pure Python, no tensors, no processes."""

from .balance import assign, chunks_per_rank, imbalance
from .cuts import sharding_for
from .mask import Band, Mask, MaskPattern
from .recurrence import RecurrentSize, choose_recurrence
from .ring import Plan, Step, Transfer, make_plan
from .schedules import Choice, choose_schedule, head_slices, name_of, ring_bytes, rotating_of
from .segments import Segment, Segments
from .sharding import Sharding, cut, make_sharding
from .tiles import Tile
from .traffic import Shapes, Traffic, rank_traffic

# fmt: off
__all__ = [
    "Band",
    "Choice",
    "Mask",
    "MaskPattern",
    "Plan",
    "RecurrentSize",
    "Segment",
    "Segments",
    "Shapes",
    "Sharding",
    "Step",
    "Tile",
    "Traffic",
    "Transfer",
    "assign",
    "choose_recurrence",
    "choose_schedule",
    "chunks_per_rank",
    "cut",
    "head_slices",
    "imbalance",
    "make_plan",
    "make_sharding",
    "name_of",
    "rank_traffic",
    "ring_bytes",
    "rotating_of",
    "sharding_for",
]
# fmt: on
