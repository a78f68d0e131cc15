"""Planning on paper: masks, chunk ownership, schedules and their traffic. Pure Python, no tensors, no processes."""

from .mask import Mask
from .schedule import Plan, Step, Transfer, make_plan
from .sharding import Sharding, chunks_per_rank, make_sharding
from .tiles import Tile, tiles_between
from .traffic import Shapes, Traffic, cheaper_visitor, rank_traffic
from .verify import verify_plan

__all__ = [
    "Mask",
    "Plan",
    "Shapes",
    "Sharding",
    "Step",
    "Tile",
    "Traffic",
    "Transfer",
    "cheaper_visitor",
    "chunks_per_rank",
    "make_plan",
    "make_sharding",
    "rank_traffic",
    "tiles_between",
    "verify_plan",
]
