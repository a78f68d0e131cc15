"""Trains a model on pairs of answers to long prompts, of which one was preferred (DPO).

Every sequence is sharded over the processes of a group; TRL's `DPOTrainer` does the rest. With LoRA the reference is
the model without its adapters; otherwise it is a copy of the model, patched too. Settings come from YAML files, then
from the command line: those of TRL's `DPOConfig` and `ModelConfig`, and those of recipes/settings.py.

Two CPU processes, a small Llama, pairs of your own:

    ACCELERATE_USE_CPU=1 accelerate launch --config_file recipes/configs/accelerate_2_processes.yaml \
        recipes/dpo.py --config recipes/configs/dpo_cpu.yaml --dataset pairs.jsonl

Four GPUs, Llama-3.1-8B-Instruct with LoRA:

    accelerate launch --multi_gpu --num_processes 4 recipes/dpo.py --config recipes/configs/dpo_4gpu.yaml \
        --dataset pairs.jsonl --output_dir outputs/dpo
"""

from typing import TYPE_CHECKING, Any

import settings
import training
from settings import BurstSettings, DataSettings, ModelSettings

if TYPE_CHECKING:
    from trl import DPOTrainer

DEFAULTS = {"output_dir": "outputs/dpo", "learning_rate": 1e-6}


def check(model: ModelSettings, pairs: DataSettings, burst: BurstSettings, args: Any) -> None:
    """Checks the settings before torch is imported."""
    settings.check(model, pairs, burst, args)
    if args.precompute_ref_log_probs:
        raise SystemExit("precompute_ref_log_probs would compute sequences before they are sharded; leave it out.")


def make_trainer(arguments: list[str]) -> "tuple[DPOTrainer, BurstSettings]":
    """The trainer that the command line and its YAML files describe."""
    start = training.begin(arguments, "DPOConfig", DEFAULTS, check)
    import preferences
    from trl import DPOTrainer

    start.warn()
    reference = None if start.model.use_peft else start.load_model()
    return preferences.make_trainer(DPOTrainer, start, ref_model=reference), start.burst


if __name__ == "__main__":
    settings.run(lambda arguments: training.train(*make_trainer(arguments)))
