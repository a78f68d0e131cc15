"""The way of every recipe from settings to a trainer, and from a trainer to a checkpoint."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
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
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, Trainer

Made = tuple[Any, BurstSettings]  # a trainer of TRL, and how sequences are shared


@dataclass
class Start:
    """Where a recipe stands when its settings are right."""

    model: ModelSettings
    documents: DataSettings
    burst: BurstSettings
    args: Any  # TRL's training arguments
    more: Any  # further settings of the recipe
    run: dict[str, Any]  # what checkpoints remember
    tokenizer: "PreTrainedTokenizerBase"

    @cached_property
    def config(self) -> "PreTrainedConfig":
        """The config of the model."""
        import models

        return models.load_config(self.model, len(self.tokenizer))

    def load_model(self) -> Any:
        """The patched model."""
        import models

        return models.load_model(self.model, self.config, self.burst, self.args.seed)

    def make(self, kind: "type[Trainer]", rows: "tuple[Dataset, Dataset | None]", **more: Any) -> Any:
        """TRL's trainer of a kind, for the patched model and the adapters that the settings describe, with the rows
        that it trains on and those that it is evaluated on."""
        import models

        resume = self.args.resume_from_checkpoint
        if resume and models.has_towers(self.config) and not self.model.use_peft:  # Trainer knows no names in its files
            self.model.model_name_or_path = resume
        with settings.using("the settings", RuntimeError):
            patched = self.load_model()
            loaded = {"use_cache": patched.config.use_cache} if hasattr(patched.config, "use_cache") else {}
            trainer: Any = as_in_recipes(kind)(
                patched,
                args=self.args,
                train_dataset=rows[0],
                eval_dataset=rows[1],
                peft_config=models.adapter_config(self.model, self.config),
                callbacks=[hf_burst.BurstResume(self.run, other_data=True)],
                **{"processing_class": self.tokenizer, **more},
            )
            trainer.loaded_config = loaded  # what training changes, and a saved model is to have
            if self.model.rope_scaling:
                trainer.scaled_config = self.config
            models.cast_outside_of_autocast(trainer.model, self.args.device)
            return trainer


def begin(
    arguments: list[str],
    kind: str,
    defaults: dict[str, Any],
    check: Callable[..., None] = settings.check,
    more: type | None = None,
) -> Start:
    """Reads and checks the settings of a recipe: those of TRL's training arguments of a kind, with the defaults of this
    recipe, and of a dataclass of its own."""
    kinds = (ModelSettings, DataSettings, BurstSettings, kind, *([more] if more else []))
    model, documents, burst, args, *others = command_line.parse(arguments, kinds, defaults, check)
    if not hasattr(args, "max_length"):  # of GRPO, whose recipe has one
        args.max_length = others[0].max_length
    run = settings.prepare(args, model, documents, burst, *others)
    import models  # takes seconds

    return Start(model, documents, burst, args, others[0] if others else None, run, models.load_tokenizer(model, args))


def as_in_recipes(kind: Any) -> Any:
    """A trainer of a kind whose share of warmup is rounded down to steps: Transformers rounds it up, so that the only
    step of a short training would have a learning rate of 0. A full disk ends it by a sentence, and its card names the
    model that it began with, also one of a folder, for which TRL has "None". Beside adapters it saves its
    `scaled_config`, where one is set."""

    class Trainer(kind):
        scaled_config: "PreTrainedConfig | None" = None

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            share = self.args.warmup_steps
            try:
                if 0 < share < 1:
                    self.args.warmup_steps = int(num_training_steps * share)
                return super().create_scheduler(num_training_steps, optimizer)
            finally:
                self.args.warmup_steps = share

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            import models
            from accelerate.utils import is_peft_model

            super()._save(output_dir, state_dict)
            if self.args.should_save and is_peft_model(self.model):
                models.save_config(output_dir or self.args.output_dir, self.scaled_config)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with resuming.saving(self.args.output_dir):
                super()._save_checkpoint(*args, **kwargs)

        def create_model_card(self, *args: Any, **kwargs: Any) -> None:
            import models

            super().create_model_card(*args, **kwargs)
            if self.is_world_process_zero():
                card = Path(self.args.output_dir) / "README.md"
                base = models.base_in_words(self.model.config)
                text = card.read_text(encoding="utf-8").replace("[None](https://huggingface.co/None)", base)
                card.write_text(text, encoding="utf-8")

    Trainer.__name__, Trainer.__qualname__, Trainer.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Trainer


def sft_trainer(arguments: list[str], defaults: dict[str, Any], text_alone: bool = False) -> Made:
    """TRL's trainer on tokens and labels, as the command line and its YAML files describe it. Chats and completions are
    refused where text alone is trained on."""
    on_gpus = {"use_liger_kernel": find_spec(settings.LIGER) is not None}
    start = begin(arguments, "SFTConfig", {**on_gpus, **defaults})
    import data
    import images
    import models
    from trl import SFTTrainer

    documents, args = start.documents, start.args
    sees = models.has_towers(start.config) and not text_alone
    if sees and images.are_in(data.load_rows(documents.dataset, documents.dataset_split, args.dataset_text_field)):
        processor = images.load_processor(start.model, start.tokenizer)
        chats = images.load_chats(documents, processor, args)
        trainer = start.make(SFTTrainer, chats, processing_class=processor, data_collator=images.collate)
        return trainer, start.burst
    rows = data.load_tokens(documents, start.tokenizer, args, text_alone)
    if documents.group_rows > 1:
        rows = data.load_groups(documents, rows, args)
    trainer = start.make(SFTTrainer, rows)
    if documents.group_rows > 1:
        trainer.data_collator = hf_burst.GroupCollator(trainer.data_collator)  # takes samples of several rows
    return trainer, start.burst


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
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    save(trainer)
    last = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry][-1:]
    done = last == [trainer.state.global_step] and not training.load_best_model_at_end
    if trainer.eval_dataset is not None and not done:
        packed = "packed " * getattr(training, "packing", False)
        rows = f"{len(trainer.eval_dataset):,} {packed}row{'s' * (len(trainer.eval_dataset) > 1)}"
        trainer.accelerator.print(f"the model is in {training.output_dir}; now it is evaluated on {rows}")
        trainer.evaluate()
    if measure is not None:
        measure()
    if first:
        report.write_log(trainer)
    settings.end(trainer)
    if burst.merge_to is not None and first:
        with resuming.saving(burst.merge_to):
            models.merge_adapter(training.output_dir, burst.merge_to)
        print(f"the full model is in {Path(burst.merge_to)}")
    if first:
        print(report.next_steps(trainer, burst.merge_to or training.output_dir))


def save(trainer: "Trainer") -> None:
    """Writes the model, with the config that it was loaded with, before its evaluation, which may take long."""
    config, loaded = trainer.accelerator.unwrap_model(trainer.model).config, getattr(trainer, "loaded_config", {})
    training = {name: getattr(config, name) for name in loaded}
    config.update(loaded)
    with resuming.saving(str(trainer.args.output_dir)):
        trainer.save_model()
    config.update(training)


def retry_when_short(trainer: "Trainer") -> None:
    """In one process a step that ran out of memory runs again, each time with the next settings of `memory="auto"`.

    The gradients of such a step are dropped. Those of batches that were accumulated before it would be, too: then the
    error stays.
    """
    import torch

    from hf_burst.hf.groups import PATCH

    patches = (getattr(module, PATCH, None) for module in trainer.model.modules())
    rules = [patch.memory for patch in patches if patch is not None]
    if trainer.args.world_size > 1 or not any(rule.chooses for rule in rules):
        return
    own = trainer.training_step

    def training_step(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        accumulated = any(weight.grad is not None for weight in model.parameters())
        tried: list[Any] = []
        while True:
            try:
                return own(model, *args, **kwargs)
            except torch.OutOfMemoryError as problem:
                settings_of_step = [rule.latest and rule.latest.settings for rule in rules]
                if accumulated or settings_of_step in tried:
                    raise
                tried.append(settings_of_step)
                print(f"a step ran out of memory, and is tried again with less: {str(problem).splitlines()[0]}")
            model.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()

    trainer.training_step = training_step  # type: ignore[method-assign]
