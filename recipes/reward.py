"""Trains a reward model on pairs of answers to long prompts, of which one was preferred.

Every sequence is sharded over the processes of a group; TRL's `RewardTrainer` does the rest. The model is given a head
that scores the last token of a row. Settings come from YAML files, then from the command line: those of TRL's
`RewardConfig` and `ModelConfig`, and those of recipes/settings.py.

The files recipes/configs/reward_*.yaml begin with commands, on CPUs and on GPUs.
"""

from typing import Any

import settings
import training
from settings import BurstSettings, DataSettings, ModelSettings

DEFAULTS = {"output_dir": "outputs/reward", "learning_rate": 1e-5, "lora_task_type": "SEQ_CLS"}


def check(model: ModelSettings, pairs: DataSettings, burst: BurstSettings, args: Any) -> None:
    """Checks the settings before the processes are joined."""
    settings.check(model, pairs, burst, args)
    if model.use_peft and model.lora_task_type != "SEQ_CLS":
        raise SystemExit(
            f"lora_task_type is {model.lora_task_type!r}, by which the head would not learn; leave it out."
        )


def make_trainer(arguments: list[str]) -> training.Made:
    """The trainer that the command line and its YAML files describe."""
    start = training.begin(arguments, "RewardConfig", DEFAULTS, check)
    import models
    import preferences
    from trl import RewardTrainer

    models.give_rewards(start.config)
    return preferences.make_trainer(RewardTrainer, start), start.burst


if __name__ == "__main__":
    settings.run(lambda arguments: training.train(*make_trainer(arguments)))
