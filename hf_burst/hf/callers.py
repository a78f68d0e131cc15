"""Who called a model, as far as the stack of this thread tells: a `Trainer`, functions of its user, a checkpoint."""

import dis
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import torch.utils.checkpoint

_ROUNDS = ("_run_epoch", "evaluation_loop")  # of Trainer, around its steps
_THEIRS = ("transformers", "trl", "accelerate", "peft", "torch", "hf_burst")
# the arguments of a trainer, by the attributes that hold them, which are given logits; in any pass, and in evaluation
_LOSSES = {"label_smoother": "label_smoothing_factor", "compute_loss_func": "compute_loss_func"}
_METRICS = ("compute_metrics", "preprocess_logits_for_metrics")


def frames() -> Iterator[FrameType]:
    """The calls that are under way, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def trainer_under_way() -> Any | None:
    """The `Trainer` that runs this pass, if one does."""
    return next(filter(None, map(_trainer_of, frames())), None)


def _trainer_of(frame: FrameType) -> Any | None:
    """The `Trainer` whose epoch or evaluation a frame is."""
    module: Any = sys.modules.get("transformers.trainer")  # without which none runs
    if module is None or frame.f_code.co_name not in _ROUNDS:
        return None
    own = frame.f_locals.get("self")
    return own if isinstance(own, module.Trainer) else None


def readers_of_logits() -> list[str]:
    """What in the `Trainer` that runs this pass would meet `None` if its logits were not there: functions of the user's
    that it is given, and such that called the model and will read `logits` without asking whether they are there."""
    own: list[str] = []
    found: list[str] = []
    for frame in frames():
        if _trainer_of(frame) is not None:
            return own + found
        if frame.f_code.co_name == "prediction_step" and not frame.f_locals.get("prediction_loss_only", True):
            found = [each for each in _METRICS if getattr(frame.f_locals.get("self"), each, None) is not None]
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _THEIRS and _will_read_logits(frame.f_code, frame.f_lasti):
            own.append(f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})")
    return []


def askers_for_logits(trainer: Any, training: bool) -> list[str]:
    """The arguments of a trainer for which it wants logits."""
    names = {**_LOSSES, **({} if training else {name: name for name in _METRICS})}
    return [name for attribute, name in names.items() if getattr(trainer, attribute, None) is not None]


@cache
def _will_read_logits(code: CodeType, offset: int) -> bool:
    """Whether a function reads an attribute or an item `logits` whichever way it goes on from an instruction, and
    compares nothing with `None`, as one would that asks whether logits are there."""
    steps = list(dis.get_instructions(code))
    reads = {index for index, pair in enumerate(pairwise(steps)) if _reads(*pair)}
    if not reads or any("NONE" in step.opname or step.opname == "IS_OP" for step in steps):
        return False
    place = {step.offset: index for index, step in enumerate(steps)}
    ways, gone = [max(index for start, index in place.items() if start <= offset) + 1], set(reads)
    while ways:
        index = ways.pop()
        step = steps[index]
        if index in gone or step.opname in ("RAISE_VARARGS", "RERAISE"):
            continue
        gone.add(index)
        if step.opname in ("RETURN_VALUE", "RETURN_CONST"):
            return False
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            ways.append(place[step.argval])
        if not step.opname.startswith("JUMP_"):
            ways.append(index + 1)
    return True


def _reads(step: dis.Instruction, following: dis.Instruction) -> bool:
    """`outputs.logits`, `outputs["logits"]` or `outputs.get("logits")`."""
    if step.opname == "LOAD_CONST":
        return step.argval == "logits" and following.opname in ("BINARY_SUBSCR", "BINARY_OP", "PRECALL", "CALL")
    return step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval == "logits"


def is_checkpointed() -> bool:
    """Whether torch's checkpoint that is not reentrant is to run the caller a second time, in the backward pass."""
    inside = torch.utils.checkpoint.__file__
    innermost = next((frame.f_code.co_name for frame in frames() if frame.f_code.co_filename == inside), None)
    return innermost is not None and innermost not in ("forward", "backward")  # which are of the reentrant one
