"""The way of every recipe from a trainer to a checkpoint."""

from pathlib import Path

import models
import report
import settings
from settings import BurstSettings, ModelSettings
from transformers import PreTrainedConfig, Trainer, TrainerCallback

import hf_burst


def callbacks(model: ModelSettings, config: PreTrainedConfig) -> list[TrainerCallback]:
    """What a recipe adds to the trainer."""
    return [models.SaveConfig(config, differs=bool(model.rope_scaling))] if model.use_peft else []


def train(trainer: Trainer, burst: BurstSettings) -> None:
    """Trains, evaluates where there is something to evaluate on, and writes the checkpoint and its log.

    The adapters are merged by one process, when the others are done.
    """
    first, training = trainer.is_world_process_zero(), trainer.args
    trainer.add_callback(hf_burst.BurstCallback(trainer))  # speed, memory and balance, in every log
    trainer.accelerator.print(report.describe(trainer))
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    trainer.save_model()
    if first:
        report.write_log(trainer)
    settings.end(trainer)
    if burst.merge_to is not None and first:
        models.merge_adapter(training.output_dir, burst.merge_to)
        print(f"the full model is in {Path(burst.merge_to)}")
