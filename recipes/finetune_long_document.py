"""Fine-tunes a causal language model on documents that are longer than one process can hold.

Every sequence is sharded over the processes of a group; TRL's `SFTTrainer` does the rest. Settings come from YAML
files, then from the command line: those of TRL's `SFTConfig` and `ModelConfig`, and those of recipes/settings.py.

The files recipes/configs/text_*.yaml begin with commands, on CPUs and on GPUs.
"""

from functools import partial

import settings
import training

DEFAULTS = {
    "dataset": ["python_topics"],
    "too_long": "split",  # a piece of a document still is text
    "packing": True,  # by best fit; documents do not see each other
    "output_dir": "outputs/text",
}
make_trainer = partial(
    training.sft_trainer, defaults=DEFAULTS, text_alone=True
)  # of the command line and its YAML files

if __name__ == "__main__":
    settings.run(lambda arguments: training.train(*make_trainer(arguments)))
