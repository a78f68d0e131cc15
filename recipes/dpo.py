"""Trains a model on pairs of answers to long prompts, of which one was preferred (DPO).

Every sequence is sharded over the processes of a group; TRL's `DPOTrainer` does the rest. With LoRA the reference is
the model without its adapters; otherwise it is a copy of the model, patched too. Settings come from YAML files, then
from the command line: those of TRL's `DPOConfig` and `ModelConfig`, and those of recipes/settings.py.

The files recipes/configs/dpo_*.yaml begin with commands, on CPUs and on GPUs.
"""

from typing import Any

import settings
import training
from settings import BurstSettings, DataSettings, ModelSettings

DEFAULTS = {"output_dir": "outputs/dpo", "learning_rate": 1e-6}


def check(model: ModelSettings, pairs: DataSettings, burst: BurstSettings, args: Any) -> None:
    """Checks the settings before the processes are joined."""
    settings.check(model, pairs, burst, args)
    if args.precompute_ref_log_probs:
        raise SystemExit("precompute_ref_log_probs would compute sequences before they are sharded; leave it out.")


def make_trainer(arguments: list[str]) -> training.Made:
    """The trainer that the command line and its YAML files describe."""
    start = training.begin(arguments, "DPOConfig", DEFAULTS, check)
    import preferences
    from trl import DPOTrainer

    reference = None if start.model.use_peft else start.load_model()
    return preferences.make_trainer(DPOTrainer, start, ref_model=reference), start.burst


if __name__ == "__main__":
    settings.run(lambda arguments: training.train(*make_trainer(arguments)))
