"""Trains a reward model on pairs of answers to long prompts, of which one was preferred.

Every sequence is sharded over the processes of a group; TRL's `RewardTrainer` does the rest. The model is given a head
that scores the last token of a row. Settings come from YAML files, then from the command line: those of TRL's
`RewardConfig` and `ModelConfig`, and those of recipes/settings.py.

Two CPU processes, a small Llama, pairs of your own:

    ACCELERATE_USE_CPU=1 accelerate launch --config_file recipes/configs/accelerate_2_processes.yaml \
        recipes/reward.py --config recipes/configs/reward_cpu.yaml --dataset pairs.jsonl

Four GPUs, Llama-3.1-8B-Instruct with LoRA:

    accelerate launch --multi_gpu --num_processes 4 recipes/reward.py --config recipes/configs/reward_4gpu.yaml \
        --dataset pairs.jsonl --output_dir outputs/reward
"""

from typing import TYPE_CHECKING, Any

import settings
import training
from settings import BurstSettings, DataSettings, ModelSettings

if TYPE_CHECKING:
    from trl import RewardTrainer

DEFAULTS = {"output_dir": "outputs/reward", "learning_rate": 1e-5, "lora_task_type": "SEQ_CLS"}


def check(model: ModelSettings, pairs: DataSettings, burst: BurstSettings, args: Any) -> None:
    """Checks the settings before torch is imported."""
    settings.check(model, pairs, burst, args)
    if model.use_peft and model.lora_task_type != "SEQ_CLS":
        raise SystemExit(
            f"lora_task_type is {model.lora_task_type!r}, by which the head would not learn; leave it out."
        )


def make_trainer(arguments: list[str]) -> "tuple[RewardTrainer, BurstSettings]":
    """The trainer that the command line and its YAML files describe."""
    start = training.begin(arguments, "RewardConfig", DEFAULTS, check)
    import models
    import preferences
    from trl import RewardTrainer

    models.give_rewards(start.config)
    start.warn()
    return preferences.make_trainer(RewardTrainer, start), start.burst


if __name__ == "__main__":
    settings.run(lambda arguments: training.train(*make_trainer(arguments)))
