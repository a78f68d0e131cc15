"""Fine-tunes a model on chats and agent trajectories of any length, on prompts and completions, or on text.

The loss is on what the assistant wrote. Every sequence is sharded over the processes of a group; TRL's `SFTTrainer`
does the rest. Settings come from YAML files, then from the command line: those of TRL's `SFTConfig` and `ModelConfig`,
and those of recipes/settings.py.

Two CPU processes, a small Llama, chats of your own:

    ACCELERATE_USE_CPU=1 accelerate launch --config_file recipes/configs/accelerate_2_processes.yaml \
        recipes/sft.py --config recipes/configs/sft_cpu.yaml --dataset chats.jsonl

Four GPUs, Llama-3.1-8B-Instruct with LoRA, 131,072 tokens a sequence:

    accelerate launch --multi_gpu --num_processes 4 recipes/sft.py --config recipes/configs/sft_4gpu.yaml \
        --dataset trajectories.jsonl --output_dir outputs/agent --merge_to outputs/agent_merged
"""

from typing import TYPE_CHECKING

import settings
import training
from settings import BurstSettings

if TYPE_CHECKING:
    from trl import SFTTrainer

DEFAULTS = {
    "assistant_only_loss": True,  # of chats; of prompts and completions, the loss is on completions
    "packing": True,  # by best fit; chats do not see each other
    "output_dir": "outputs/sft",
}


def make_trainer(arguments: list[str]) -> "tuple[SFTTrainer, BurstSettings]":
    """The trainer that the command line and its YAML files describe."""
    return training.sft_trainer(arguments, DEFAULTS)


if __name__ == "__main__":
    settings.run(lambda arguments: training.train(*make_trainer(arguments)))
