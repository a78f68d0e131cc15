"""Trains a model by reinforcement on long prompts (GRPO): it answers each several times, and learns from rewards.

Every sequence is sharded over the processes of a group, which is one worker to TRL's `GRPOTrainer`: it answers, and is
rewarded, once. Settings come from YAML files, then from the command line: those of TRL's `GRPOConfig` and
`ModelConfig`, and those of recipes/settings.py.

The files recipes/configs/grpo_*.yaml begin with commands, on CPUs and on GPUs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import settings
import training
from settings import BurstSettings, DataSettings, ModelSettings
from transformers.hf_argparser import HfArg

DEFAULTS = {
    "output_dir": "outputs/grpo",
    "learning_rate": 1e-6,
    "num_generations": 8,
    "per_device_train_batch_size": 8,  # the answers to a prompt, which is computed once
    "per_device_eval_batch_size": 8,
}


@dataclass
class Rewards:
    """What answers are rewarded for, and how long they are with their prompts."""

    reward: list[str] = HfArg(
        default_factory=lambda: ["answer"],
        help="'answer' (1 if the row's answer is in the completion), or functions: rewards.py:name.",
    )
    max_length: int = HfArg(default=16384, help="Most tokens of a prompt and its completion.")

    def __post_init__(self) -> None:
        self.reward = [self.reward] if isinstance(self.reward, str) else self.reward
        for name in self.reward:
            file, _, function = name.rpartition(":")
            if name != "answer" and not (function.isidentifier() and Path(file).is_file()):
                raise SystemExit(f"reward has {name!r}; give 'answer', or a function of a file: rewards.py:name.")


def check(model: ModelSettings, documents: DataSettings, burst: BurstSettings, args: Any, rewards: Rewards) -> None:
    """Checks the settings before the processes are joined."""
    args.max_length = rewards.max_length
    settings.check(model, documents, burst, args)
    if not 0 < args.max_completion_length < rewards.max_length:
        raise SystemExit(
            f"max_completion_length is {args.max_completion_length}, and max_length {rewards.max_length} holds a "
            "prompt, too; set one of them."
        )


def make_trainer(arguments: list[str]) -> training.Made:
    """The trainer that the command line and its YAML files describe."""
    start = training.begin(arguments, "GRPOConfig", DEFAULTS, check, Rewards)
    import prompts
    from trl import GRPOTrainer

    rows = prompts.load_prompts(start.documents, start.tokenizer, start.args)
    functions = [prompts.reward_function(name, rows[0]) for name in start.more.reward]
    return start.make(GRPOTrainer, rows, reward_funcs=functions), start.burst


if __name__ == "__main__":
    settings.run(lambda arguments: training.train(*make_trainer(arguments)))
