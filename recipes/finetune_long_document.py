"""Fine-tunes a causal language model on documents that are longer than one process can hold.

Every sequence is sharded over the processes of a group; TRL's `SFTTrainer` does the rest. Settings come from YAML
files, then from the command line: those of TRL's `SFTConfig` and `ModelConfig`, and those of recipes/settings.py.

Two CPU processes, a small Llama, Python's own documentation as the document:

    ACCELERATE_USE_CPU=1 accelerate launch --config_file recipes/configs/accelerate_2_processes.yaml \
        recipes/finetune_long_document.py --config recipes/configs/text_cpu.yaml

Four GPUs, Llama-3.1-8B with LoRA on local text, a file a document:

    accelerate launch --multi_gpu --num_processes 4 recipes/finetune_long_document.py \
        --config recipes/configs/text_4gpu.yaml --dataset books/ --output_dir outputs/books
"""

from typing import TYPE_CHECKING

import settings
import training
from settings import BurstSettings

if TYPE_CHECKING:
    from trl import SFTTrainer

DEFAULTS = {
    "dataset": ["python_topics"],
    "too_long": "split",  # a piece of a document still is text
    "packing": True,  # by best fit; documents do not see each other
    "output_dir": "outputs/text",
}


def make_trainer(arguments: list[str]) -> "tuple[SFTTrainer, BurstSettings]":
    """The trainer that the command line and its YAML files describe."""
    return training.sft_trainer(arguments, DEFAULTS, text_alone=True)


if __name__ == "__main__":
    settings.run(lambda arguments: training.train(*make_trainer(arguments)))
