"""Planning on paper: masks, chunk ownership, schedules and their traffic. Pure Python, no tensors, no processes."""

from .balance import assign, chunks_per_rank, imbalance, imbalance_of_steps
from .choose import Choice, candidates, choose, name_of
from .cost import Cost, estimate, head_slices
from .cuts import Cut, Hybrid, cheapest_cut, cuts, sharding_for
from .fit import HOST_ROOM, SETTINGS, Fit, at_level, bucket, fit, fits, levels, longest
from .machine import DATA_SHEETS, KernelRate, Link, Machine, RuleRate, built_in, data_sheet, named
from .mask import Mask, MaskPattern
from .memory import TUNING, MemoryEstimate, estimate_memory, host_bytes, memory_of_step, outside_of_torch
from .model import SHAPES, ModelSize, Training, keeping
from .recurrence import RecurrenceChoice, RecurrenceCost, RecurrentSize, choose_recurrence, recurrence_cost
from .segments import Hop, Segment, Segments
from .sharding import Sharding, cut, make_sharding, pattern, pattern_of
from .step import StepEstimate, estimate_step
from .steps import Plan, Step, Transfer, make_plan
from .tiles import Tile, tiles_between
from .traffic import Shapes, Traffic, rank_traffic
from .verify import verify_plan
from .work import Layer

# fmt: off
__all__ = [
    "DATA_SHEETS",
    "HOST_ROOM",
    "SETTINGS",
    "SHAPES",
    "TUNING",
    "Choice",
    "Cost",
    "Cut",
    "Fit",
    "Hop",
    "Hybrid",
    "KernelRate",
    "Layer",
    "Link",
    "Machine",
    "Mask",
    "MaskPattern",
    "MemoryEstimate",
    "ModelSize",
    "Plan",
    "RecurrenceChoice",
    "RecurrenceCost",
    "RecurrentSize",
    "RuleRate",
    "Segment",
    "Segments",
    "Shapes",
    "Sharding",
    "Step",
    "StepEstimate",
    "Tile",
    "Traffic",
    "Training",
    "Transfer",
    "assign", "at_level",
    "bucket",
    "built_in",
    "candidates",
    "cheapest_cut",
    "choose",
    "choose_recurrence",
    "chunks_per_rank",
    "cut",
    "cuts",
    "data_sheet",
    "estimate",
    "estimate_memory",
    "estimate_step",
    "fit",
    "fits",
    "head_slices",
    "host_bytes",
    "imbalance",
    "imbalance_of_steps",
    "keeping",
    "levels",
    "longest",
    "make_plan",
    "make_sharding",
    "memory_of_step",
    "name_of",
    "named",
    "outside_of_torch",
    "pattern",
    "pattern_of",
    "rank_traffic",
    "recurrence_cost",
    "sharding_for",
    "tiles_between",
    "verify_plan",
]
# fmt: on
