"""Finds who called a model from the stack of this thread. No other file walks over frames:

within_compiled    when a pass begins: torch.compile does not tell a model that it runs it
trainer_among      a `Trainer` passes itself neither to the model that it runs nor to the accelerator that it makes
is_within          when the decoder is called alone: an interrupted call of the model has not reported its end
"""

import sys
from collections.abc import Callable
from traceback import walk_stack
from typing import Any

MAKING = ("create_accelerator_and_postprocess",)  # the Trainer method that makes its accelerator
ROUNDS = ("_run_epoch", "evaluation_loop")  # Trainer methods around its steps
# trainer attributes that are given logits in evaluation
_METRICS = ("compute_metrics", "preprocess_logits_for_metrics")


def within_compiled() -> bool:
    """Returns whether torch.compile runs the caller, whatever was compiled."""
    names = (frame.f_code.co_name for frame, _ in walk_stack(sys._getframe()))
    return "compile_wrapper" in names  # of torch._dynamo


def trainer_among(methods: tuple[str, ...]) -> tuple[Any | None, tuple[str, ...]]:
    """Returns the innermost `Trainer` that runs one of these methods, and what the user gave it that reads logits of a
    prediction inside."""
    module: Any = sys.modules.get("transformers.trainer")  # no Trainer runs before this import
    readers = tuple[str, ...]()
    for frame, _ in walk_stack(sys._getframe()) if module is not None else ():
        name = frame.f_code.co_name
        if name in methods and isinstance(trainer := frame.f_locals.get("self"), module.Trainer):
            return trainer, readers
        if name == "prediction_step" and not readers and not frame.f_locals.get("prediction_loss_only", True):
            given = frame.f_locals.get("self")
            readers = tuple(each for each in _METRICS if getattr(given, each, None) is not None)
    return None, readers


def is_within(holds: Callable[[Any], bool]) -> bool:
    """Returns whether a module that satisfies `holds` is being called."""
    frames = (frame for frame, _ in walk_stack(sys._getframe()) if frame.f_code.co_name == "_call_impl")
    return any(holds(frame.f_locals.get("self")) for frame in frames)
