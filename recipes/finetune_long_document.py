"""Fine-tunes a causal language model on documents that are longer than one process can hold.

Every sequence is sharded over the processes of a group; TRL's `SFTTrainer` does the rest. Settings come from YAML
files, then from the command line: those of TRL's `SFTConfig` and `ModelConfig`, and those of recipes/settings.py.

The files recipes/configs/text_*.yaml begin with commands, on CPUs and on GPUs.
"""

import settings
import training

DEFAULTS = {
    "dataset": ["python_topics"],
    "too_long": "split",  # a piece of a document still is text
    "packing": True,  # by best fit; documents do not see each other
    "output_dir": "outputs/text",
}


def make_trainer(arguments: list[str]) -> training.Made:
    """The trainer that the command line and its YAML files describe."""
    return training.sft_trainer(arguments, DEFAULTS, text_alone=True)


if __name__ == "__main__":
    settings.run(lambda arguments: training.train(*make_trainer(arguments)))
