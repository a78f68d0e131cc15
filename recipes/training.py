"""The way of every recipe from settings to a trainer, and from a trainer to a checkpoint."""

import gc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import command_line
import resuming
import settings
from settings import BurstSettings, DataSettings, ModelSettings

import hf_burst

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments
    from trl import SFTTrainer


def callbacks(model: ModelSettings, config: "PreTrainedConfig", run: dict[str, Any]) -> "list[TrainerCallback]":
    """What a recipe adds to the trainer; `run` are the settings that checkpoints remember."""
    import models

    resume = [hf_burst.BurstResume(run, other_data=True), resuming.remember(run)]
    return [*resume, *([models.SaveConfig(config, differs=bool(model.rope_scaling))] if model.use_peft else [])]


def make(
    kind: "type[Trainer]",
    model: ModelSettings,
    run: dict[str, Any],
    config: "PreTrainedConfig",
    burst: BurstSettings,
    args: "TrainingArguments",
    rows: "tuple[Dataset, Dataset | None]",
    tokenizer: "PreTrainedTokenizerBase",
    **more: Any,
) -> Any:
    """TRL's trainer of a kind, for the patched model and the adapters that the settings describe.

    Args:
        run (`dict[str, Any]`): The settings that checkpoints remember, of `settings.prepare`.
        rows (`tuple[Dataset, Dataset | None]`): What it trains on, and what it is evaluated on.
        more: Further arguments of this kind of trainer.
    """
    import models

    with settings.using("the settings", RuntimeError):
        patched: Any = models.load_model(model, config, burst, args.seed)  # by hf_burst
        loaded = {"use_cache": patched.config.use_cache} if hasattr(patched.config, "use_cache") else {}
        trainer: Any = with_whole_warmup(kind)(
            patched,
            args=args,
            train_dataset=rows[0],
            eval_dataset=rows[1],
            processing_class=tokenizer,
            peft_config=models.adapter_config(model, config),
            callbacks=callbacks(model, config, run),
            **more,
        )
        trainer.loaded_config = loaded  # what training changes, and a saved model is to have
        models.cast_outside_of_autocast(trainer.model, args.device)
        return trainer


def with_whole_warmup(kind: Any) -> Any:
    """A trainer of a kind whose share of warmup is rounded down to steps. Transformers rounds it up, so that the only
    step of a short training would have a learning rate of 0."""

    class Trainer(kind):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            share = self.args.warmup_steps
            try:
                if 0 < share < 1:
                    self.args.warmup_steps = int(num_training_steps * share)
                return super().create_scheduler(num_training_steps, optimizer)
            finally:
                self.args.warmup_steps = share

    Trainer.__name__, Trainer.__qualname__, Trainer.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Trainer


def sft_trainer(
    arguments: list[str], defaults: dict[str, Any], text_alone: bool = False
) -> "tuple[SFTTrainer, BurstSettings]":
    """TRL's trainer on tokens and labels, as the command line and its YAML files describe it. Chats and completions are
    refused where text alone is trained on."""
    kinds = (ModelSettings, DataSettings, BurstSettings, "SFTConfig")
    defaults = {"use_liger_kernel": find_spec(settings.LIGER) is not None, **defaults}  # on GPUs
    model, documents, burst, args = command_line.parse(arguments, kinds, defaults, settings.check)
    run = settings.prepare(args, model, documents, burst)
    import data  # the settings are right; these take seconds
    import images
    import models
    import report
    from trl import SFTTrainer

    tokenizer = models.load_tokenizer(model, args)
    config = models.load_config(model, len(tokenizer))
    seen = images.load_images(documents, args) if models.has_towers(config) and not text_alone else None
    processor = tokenizer if seen is None else images.load_processor(model)
    load_from_checkpoint(model, config, args)
    if seen is not None:
        images.arrange(args)
        trainer = make(SFTTrainer, model, run, config, burst, args, seen, processor)
        images.pack(trainer)
        return trainer, burst
    report.warn(args, models.too_short_a_rope(config, args.max_length, bool(model.model_name_or_path)))
    rows = data.load_tokens(documents, tokenizer, args, text_alone)
    if documents.group_rows == 1:
        return make(SFTTrainer, model, run, config, burst, args, rows, tokenizer), burst
    import groups

    rows = groups.load_groups(documents, rows, args)
    trainer = make(SFTTrainer, model, run, config, burst, args, rows, tokenizer)
    groups.collate(trainer)
    return trainer, burst


def load_from_checkpoint(model: ModelSettings, config: "PreTrainedConfig", args: "TrainingArguments") -> None:
    """Has the weights of a wrapper loaded from the checkpoint to resume from: Trainer finds none by the names in its
    files."""
    import models

    if args.resume_from_checkpoint and models.has_towers(config) and not model.use_peft:
        model.model_name_or_path = args.resume_from_checkpoint


def train(trainer: "Trainer", burst: BurstSettings, measure: Callable[[], None] | None = None) -> None:
    """Trains, writes the model, evaluates where there is something to evaluate on, and writes the log.

    The adapters are merged by one process, when the others are done. All processes call `measure` after the training.
    """
    import models
    import report

    first, training = trainer.is_world_process_zero(), trainer.args
    report.follow(trainer)
    trainer.accelerator.print(report.kernels(trainer))
    retry_when_short(trainer)
    resuming.train(trainer)
    save(trainer)
    last = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry][-1:]
    done = last == [trainer.state.global_step] and not training.load_best_model_at_end
    if trainer.eval_dataset is not None and not done:
        rows = f"{len(trainer.eval_dataset):,} row{'s' * (len(trainer.eval_dataset) > 1)}"
        trainer.accelerator.print(f"the model is in {training.output_dir}; now it is evaluated on {rows}")
        trainer.evaluate()
    if measure is not None:
        measure()
    if first:
        report.write_log(trainer)
    settings.end(trainer)
    if burst.merge_to is not None and first:
        models.merge_adapter(training.output_dir, burst.merge_to)
        print(f"the full model is in {Path(burst.merge_to)}")
    if first:
        print(report.next_steps(trainer, burst.merge_to or training.output_dir))


def save(trainer: "Trainer") -> None:
    """Writes the model, with the config that it was loaded with, before its evaluation, which may take long."""
    config, loaded = trainer.accelerator.unwrap_model(trainer.model).config, getattr(trainer, "loaded_config", {})
    training = {name: getattr(config, name) for name in loaded}
    config.update(loaded)
    trainer.save_model()
    config.update(training)


def retry_when_short(trainer: "Trainer") -> None:
    """In one process a step that ran out of memory runs again, each time with the next settings of `memory="auto"`.

    The gradients of such a step are dropped. Those of batches that were accumulated before it would be, too: then the
    error stays.
    """
    import torch

    from hf_burst.hf.groups import PATCH
    from hf_burst.hf.parts.memory import MemoryRule

    patches = (getattr(module, PATCH, None) for module in trainer.model.modules())
    parts = [part for patch in patches if patch is not None for part in patch.parts if isinstance(part, MemoryRule)]
    if trainer.args.world_size > 1 or not any(part.chooses for part in parts):
        return
    own = trainer.training_step

    def training_step(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        accumulated = any(weight.grad is not None for weight in model.parameters())
        tried: list[Any] = []
        while True:
            try:
                return own(model, *args, **kwargs)
            except torch.OutOfMemoryError as problem:
                settings_of_step = [part.latest and part.latest.settings for part in parts]
                if accumulated or settings_of_step in tried:
                    raise
                tried.append(settings_of_step)
                print(f"a step ran out of memory, and is tried again with less: {str(problem).splitlines()[0]}")
            model.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()

    trainer.training_step = training_step  # type: ignore[method-assign]
