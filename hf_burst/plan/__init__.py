"""Planning on paper: masks, chunk ownership, schedules and their traffic. Pure Python, no tensors, no processes."""

from .balance import assign, chunks_per_rank, imbalance, imbalance_of_steps
from .choose import Choice, candidates, choose, name_of
from .cost import Cost, estimate, head_slices
from .machine import DATA_SHEETS, KernelRate, Link, Machine, built_in, data_sheet, named
from .mask import Mask, MaskPattern
from .memory import MemoryEstimate, estimate_memory
from .model import SHAPES, ModelSize, Training
from .segments import Segment, Segments, segments_of
from .sharding import Sharding, cut, make_sharding, pattern
from .step import StepEstimate, estimate_step
from .steps import Plan, Step, Transfer, make_plan
from .tiles import Tile, tiles_between
from .traffic import Shapes, Traffic, rank_traffic
from .verify import verify_plan
from .work import Layer

# fmt: off
__all__ = [
    "DATA_SHEETS", "SHAPES", "Choice", "Cost", "KernelRate", "Layer", "Link", "Machine", "Mask", "MaskPattern",
    "MemoryEstimate", "ModelSize", "Plan", "Segment", "Segments", "Shapes", "Sharding", "Step", "StepEstimate", "Tile",
    "Traffic", "Training", "Transfer", "assign", "built_in", "candidates", "choose", "chunks_per_rank", "cut",
    "data_sheet", "estimate", "estimate_memory", "estimate_step", "head_slices", "imbalance", "imbalance_of_steps",
    "make_plan", "make_sharding", "name_of", "named", "pattern", "rank_traffic", "segments_of", "tiles_between",
    "verify_plan",
]
# fmt: on
