"""The same command goes on: which checkpoint a recipe resumes from, and how one ends that has all its steps."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hf_burst

if TYPE_CHECKING:
    from settings import DataSettings, ModelSettings
    from transformers import Trainer, TrainerCallback, TrainingArguments

AUTO = "auto"
OF_A_RUN = ("max_length", "seed", "data_seed", "learning_rate", "weight_decay", "optim", "packing", "packing_strategy")


def settings_of(training: "TrainingArguments", model: "ModelSettings", documents: "DataSettings") -> dict[str, Any]:
    """What must not change where the same command goes on: the model, the data, and how it is trained."""
    own = {name: getattr(training, name, None) for name in OF_A_RUN}
    known: dict[str, Any] = json.loads(json.dumps({**asdict(model), **asdict(documents), **own}, default=str))
    return known


def checkpoint(resume: str | bool | None, output_dir: str, run: dict[str, Any]) -> str | None:
    """The folder to resume from.

    Args:
        resume (`str` or `bool`, *optional*): `"auto"` is the latest whole checkpoint in `output_dir` if there is any,
            which must be of the same settings; `true` is the latest one, of whichever settings; else a folder.
        run (`dict[str, Any]`): The settings of this run.
    """
    choice = str(resume).lower()
    if choice in ("none", "false", "no"):
        return None
    if choice in (AUTO, "true", "yes"):
        latest = hf_burst.last_checkpoint(output_dir)
        if latest is None and choice != AUTO:
            raise SystemExit(f"resume_from_checkpoint is true, but {output_dir!r} holds no whole checkpoint.")
        if latest is not None and choice == AUTO:
            refuse_another_run(latest, run)
        return latest
    if not Path(str(resume)).is_dir():
        raise SystemExit(f"resume_from_checkpoint is {resume!r}; give the folder of a checkpoint, true or auto.")
    from hf_burst.hf.resume import what_is_missing

    if (fault := what_is_missing(str(resume))) is not None:
        raise SystemExit(f"resume_from_checkpoint {resume!r} is not whole: {fault}. Give true for the last whole one.")
    return str(resume)


def refuse_another_run(folder: str, run: dict[str, Any]) -> None:
    """Ends a recipe that would go on from the checkpoint of a run with other settings."""
    from hf_burst.hf.resume import STATE, recorded

    state = json.loads((Path(folder) / STATE).read_text())
    before = recorded(state.get("stateful_callbacks") or {}).get("settings") or {}
    for name, value in before.items():
        if name in run and run[name] != value:
            raise SystemExit(
                f"{folder} was trained with {name} {value!r}, and it is {run[name]!r} now. Set another output_dir, or "
                "resume_from_checkpoint: true to go on from it, or false to train anew."
            )


class Finished(Exception):
    """The checkpoint that was resumed from has all steps."""


def _end_if_finished() -> "TrainerCallback":
    from transformers import TrainerCallback

    class EndIfFinished(TrainerCallback):
        """Transformers would take one step more. Weights are loaded by now, whichever way they are sharded."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= state.max_steps:
                raise Finished

    return EndIfFinished()


def train(trainer: "Trainer") -> None:
    """Trains from the beginning or the checkpoint. Afterwards the model is that of the end, also of a run that was
    killed while its end was written."""
    args = trainer.args
    if args.resume_from_checkpoint is not None:
        trainer.accelerator.print(f"goes on from {args.resume_from_checkpoint}")
        trainer.add_callback(_end_if_finished())
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except Finished:
        state = trainer.state
        trainer.accelerator.print(
            f"{args.resume_from_checkpoint} has {state.global_step:,} steps, and max_steps is {state.max_steps:,}: the "
            "training is done."
        )
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            trainer._load_best_model()
        trainer.control = trainer.callback_handler.on_train_end(args, state, trainer.control)
