"""Fine-tunes a model on chats and agent trajectories of any length, on prompts and completions, or on text.

The loss is on what the assistant wrote. Every sequence is sharded over the processes of a group; TRL's `SFTTrainer`
does the rest. Settings come from YAML files, then from the command line: those of TRL's `SFTConfig` and `ModelConfig`,
and those of recipes/settings.py.

The files recipes/configs/sft_*.yaml begin with commands, on CPUs and on GPUs.
"""

import settings
import training

DEFAULTS = {
    "assistant_only_loss": True,  # of chats; of prompts and completions, the loss is on completions
    "packing": True,  # by best fit; chats do not see each other
    "output_dir": "outputs/sft",
}


def make_trainer(arguments: list[str]) -> training.Made:
    """The trainer that the command line and its YAML files describe."""
    return training.sft_trainer(arguments, DEFAULTS)


if __name__ == "__main__":
    settings.run(lambda arguments: training.train(*make_trainer(arguments)))
