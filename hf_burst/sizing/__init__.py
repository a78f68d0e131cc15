"""Seconds and memory of training steps, before GPUs are rented. Pure Python; `memory_rule` also chooses the settings
of `BurstConfig(memory="auto")`."""

from .gpus import DATA_SHEETS, HOST_MEMORY, Capacity, DataSheet, capacity_of, data_sheet, gpu_named
from .memory import TUNING, MemoryEstimate, estimate_memory, memory_of_step, outside_of_torch
from .memory_rule import HOST_ROOM, SETTINGS, Fit, at_level, bucket, fit, fits, levels, longest
from .model import ModelSize, Sharded, Training, Weights, keeping
from .seconds import StepSeconds, estimate_seconds, step_flops
from .shapes import SHAPES, shape_name
from .spread import Spread, spread_of

__all__ = [
    "DATA_SHEETS",
    "HOST_MEMORY",
    "HOST_ROOM",
    "SETTINGS",
    "SHAPES",
    "TUNING",
    "Capacity",
    "DataSheet",
    "Fit",
    "MemoryEstimate",
    "ModelSize",
    "Sharded",
    "Spread",
    "StepSeconds",
    "Training",
    "Weights",
    "at_level",
    "bucket",
    "capacity_of",
    "data_sheet",
    "estimate_memory",
    "estimate_seconds",
    "fit",
    "fits",
    "gpu_named",
    "keeping",
    "levels",
    "longest",
    "memory_of_step",
    "outside_of_torch",
    "shape_name",
    "spread_of",
    "step_flops",
]
