"""Extends the context of a model by YaRN, and shows the perplexity by position before and after.

The model's rotary positions are stretched (YaRN, arXiv 2309.00071), which its config saves. It is then trained on long
documents, each shared by several processes. Text that is held out says what that changes beyond the old length.

Two CPU processes: a small model learns Python's own documentation 256 tokens at a time, and is extended to 1,024:

    ACCELERATE_USE_CPU=1 accelerate launch --config_file recipes/configs/accelerate_2_processes.yaml \
        recipes/extend_context.py --config recipes/configs/extend_cpu.yaml

Four GPUs, a model of 8,192 positions extended to 32,768:

    accelerate launch --num_processes 4 recipes/extend_context.py --config recipes/configs/extend_4gpu.yaml \
        --dataset books/ --output_dir outputs/extended
"""

import copy
import json
from dataclasses import asdict, dataclass, field, replace
from math import exp
from pathlib import Path
from typing import Any

import data
import models
import report
import settings
import torch
import training
from pictures import draw_positions
from scoring import Groups, PositionLosses, losses_by_position
from settings import BurstSettings, DataSettings, ModelSettings
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import SFTConfig, SFTTrainer, get_peft_config

DEFAULTS = {
    "max_length": None,  # what the extended model has
    "too_long": "split",
    "eval_share": 0.1,
    "packing": True,
    "output_dir": "outputs/extended",
}
LABELS = "before", "YaRN, not trained", "YaRN, trained"


@dataclass
class Extension:
    """How far the context is extended."""

    factor: float = field(default=4.0, metadata={"help": "By how much the positions of the model are multiplied."})
    windows: int = field(default=32, metadata={"help": "Pieces of held-out text for the perplexity."})
    pretraining_steps: int = field(
        default=0, metadata={"help": "With model_config: steps to train it from nothing, at its own length, at first."}
    )
    pretraining_batch: int = field(default=16, metadata={"help": "Sequences of such a step, on each group."})

    def __post_init__(self) -> None:
        if not self.factor > 1:
            raise SystemExit(f"factor is {self.factor}; give a number above 1, such as 4.0.")
        for name in ("windows", "pretraining_batch"):
            if getattr(self, name) < 1:
                raise SystemExit(f"{name} is {getattr(self, name)}; give a whole number, at least 1.")
