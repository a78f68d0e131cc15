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

import command_line
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
    kinds = (ModelSettings, DataSettings, BurstSettings, "DPOConfig")
    model, pairs, burst, args = command_line.parse(arguments, kinds, DEFAULTS, check)
    run = settings.prepare(args, model, pairs, burst)
    import models  # the settings are right; these take seconds
    import preferences
    import report
    from trl import DPOTrainer

    tokenizer = models.load_tokenizer(model)
    config = models.load_config(model, len(tokenizer))
    report.warn(args, models.too_short_a_rope(config, args.max_length, bool(model.model_name_or_path)))
    rows = preferences.load_pairs(pairs, args)
    longest, args.max_length = args.max_length, None  # TRL would cut answers off
    reference = None if model.use_peft else models.load_model(model, config, burst, args.seed)
    trainer = training.make(DPOTrainer, model, run, config, burst, args, rows, tokenizer, ref_model=reference)
    args.max_length = longest
    preferences.fit_pairs(trainer, pairs, longest)
    return trainer, burst


if __name__ == "__main__":
    settings.run(lambda arguments: training.train(*make_trainer(arguments)))
