"""Finds who called a model from the stack of this thread. No other file walks over frames:

Callers.of_now        when a pass begins: neither `Trainer` nor torch.compile tells a model that it runs it
trainer_being_made    while accelerate is made: it is not passed the trainer
is_within             when the decoder is called alone: an interrupted call of the model has not reported its end
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

_MAKING = ("create_accelerator_and_postprocess",)  # the Trainer method that makes its accelerator
_ROUNDS = ("_run_epoch", "evaluation_loop")  # Trainer methods around its steps
# trainer attributes that are given logits, with the arguments that set them: in any pass, and in evaluation
_LOSSES = {"label_smoother": "label_smoothing_factor", "compute_loss_func": "compute_loss_func"}
_METRICS = ("compute_metrics", "preprocess_logits_for_metrics")


@dataclass(frozen=True)
class Callers:
    """Who runs a pass.

    Args:
        trainer (`Trainer`, *optional*): The trainer that runs this epoch or evaluation.
        readers (`tuple[str, ...]`): Functions that the user gave to that trainer and that read logits of this pass.
        compiled (`bool`): Whether torch.compile runs it.
    """

    trainer: Any | None = None
    readers: tuple[str, ...] = ()
    compiled: bool = False

    @classmethod
    def of_now(cls, compiled: bool) -> "Callers":
        """Returns the callers of the current call.

        Args:
            compiled (`bool`): Whether a module is known to be compiled.
        """
        trainer, readers = None, tuple[str, ...]()
        for frame in _frames():
            name = frame.f_code.co_name
            compiled |= name == "compile_wrapper"  # of torch._dynamo, whatever was compiled
            if trainer is not None:
                continue
            trainer = _trainer_of(frame, _ROUNDS)
            if name == "prediction_step" and not readers and not frame.f_locals.get("prediction_loss_only", True):
                given = frame.f_locals.get("self")
                readers = tuple(each for each in _METRICS if getattr(given, each, None) is not None)
        return cls(trainer, readers, compiled)

    @property
    def multiply_losses(self) -> bool:
        """Whether a loss that uses `num_items_in_batch` is multiplied by the number of processes, the default."""
        return self.trainer is None or bool(self.trainer.args.average_tokens_across_devices)

    def ask_for_logits(self, training: bool) -> list[str]:
        """Returns the trainer's arguments that need logits."""
        names = {**_LOSSES, **({} if training else {name: name for name in _METRICS})}
        return [name for attribute, name in names.items() if getattr(self.trainer, attribute, None) is not None]


def trainer_being_made() -> Any | None:
    """Returns the `Trainer` that is making its accelerator, or `None`."""
    return next(filter(None, (_trainer_of(frame, _MAKING) for frame in _frames())), None)


def is_within(holds: Callable[[Any], bool]) -> bool:
    """Returns whether a module that satisfies `holds` is being called."""
    calls = (frame.f_locals.get("self") for frame in _frames() if frame.f_code.co_name == "_call_impl")
    return any(map(holds, calls))


def _frames() -> Iterator[FrameType]:
    """Yields the frames of active calls, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _trainer_of(frame: FrameType, methods: tuple[str, ...]) -> Any | None:
    """Returns the `Trainer` if the frame runs one of its `methods`, else `None`."""
    module: Any = sys.modules.get("transformers.trainer")  # no Trainer runs before this import
    if module is None or frame.f_code.co_name not in methods:
        return None
    own = frame.f_locals.get("self")
    return own if isinstance(own, module.Trainer) else None
