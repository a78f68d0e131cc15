"""Planning on paper: masks, chunk ownership, schedules and their traffic. Pure Python, no tensors, no processes."""

from .balance import assign, chunks_per_rank, imbalance, imbalance_of_steps
from .choose import Choice, candidates, choose, name_of
from .cost import Cost, estimate, head_slices
from .cuts import Cut, Hybrid, cheapest_cut, cuts, sharding_for
from .machine import DATA_SHEETS, KernelRate, Link, Machine, RuleRate, built_in, data_sheet, named
from .mask import Mask, MaskPattern
from .recurrence import RecurrenceChoice, RecurrenceCost, RecurrentSize, choose_recurrence, recurrence_cost
from .segments import Hop, Segment, Segments
from .sharding import Sharding, cut, make_sharding, pattern, pattern_of
from .steps import Plan, Step, Transfer, make_plan
from .tiles import Tile, tiles_between
from .traffic import Shapes, Traffic, rank_traffic
from .verify import verify_plan
from .work import Layer

# fmt: off
__all__ = [
    "DATA_SHEETS",
    "Choice",
    "Cost",
    "Cut",
    "Hop",
    "Hybrid",
    "KernelRate",
    "Layer",
    "Link",
    "Machine",
    "Mask",
    "MaskPattern",
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
    "Tile",
    "Traffic",
    "Transfer",
    "assign",
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
    "head_slices",
    "imbalance",
    "imbalance_of_steps",
    "make_plan",
    "make_sharding",
    "name_of",
    "named",
    "pattern",
    "pattern_of",
    "rank_traffic",
    "recurrence_cost",
    "sharding_for",
    "tiles_between",
    "verify_plan",
]
# fmt: on
