"""Which `Trainer` calls, as the stack of this thread tells.

`Trainer` hands itself neither to the accelerator that it makes, with the config of its mesh, nor to the model that it
calls. Its callbacks would be told, but a user adds them, and a loss must be right without.
"""

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

MAKING = ("create_accelerator_and_postprocess",)  # the method by which a Trainer makes its accelerator
_ROUNDS = ("_run_epoch", "evaluation_loop")  # of Trainer, around its steps
# the arguments of a trainer, by the attributes that hold them, which are given logits; in any pass, and in evaluation
_LOSSES = {"label_smoother": "label_smoothing_factor", "compute_loss_func": "compute_loss_func"}
_METRICS = ("compute_metrics", "preprocess_logits_for_metrics")


def frames() -> Iterator[FrameType]:
    """The calls that are under way, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def trainer_under_way(methods: Sequence[str] = _ROUNDS) -> Any | None:
    """The `Trainer` that runs this pass, or one of its other methods; `None` if none does."""
    return next(filter(None, (_trainer_of(frame, methods) for frame in frames())), None)


def multiplies_losses() -> bool:
    """Whether the caller multiplies a loss of `num_items_in_batch` by the number of processes, as is the rule."""
    trainer = trainer_under_way()
    return trainer is None or bool(trainer.args.average_tokens_across_devices)


def _trainer_of(frame: FrameType, methods: Sequence[str] = _ROUNDS) -> Any | None:
    """The `Trainer` whose epoch or evaluation a frame is, or another method."""
    module: Any = sys.modules.get("transformers.trainer")  # without which none runs
    if module is None or frame.f_code.co_name not in methods:
        return None
    own = frame.f_locals.get("self")
    return own if isinstance(own, module.Trainer) else None


def readers_of_logits() -> list[str]:
    """Which functions of the user's, given to the `Trainer` that runs this pass, would meet `None` if logits were not
    there."""
    for frame in frames():
        if _trainer_of(frame) is not None:
            break
        if frame.f_code.co_name == "prediction_step" and not frame.f_locals.get("prediction_loss_only", True):
            return [each for each in _METRICS if getattr(frame.f_locals.get("self"), each, None) is not None]
    return []


def askers_for_logits(trainer: Any, training: bool) -> list[str]:
    """The arguments of a trainer for which it wants logits."""
    names = {**_LOSSES, **({} if training else {name: name for name in _METRICS})}
    return [name for attribute, name in names.items() if getattr(trainer, attribute, None) is not None]
