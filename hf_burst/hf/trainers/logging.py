"""`BurstCallback`: adds speed, memory, balance and exchange times of a training to the logs of `Trainer`."""

import logging
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainerState

from ...errors import BurstError, ConfigError
from ...plan import Mask, MaskPattern
from ...ranks.layout import SequenceLayout
from ...ring import ExchangeClock
from ...ring.resources import resources_of
from ..admission import trl_classes
from ..groups import PATCH, resolve_group
from ..models.cut_point import language_model_path
from ..models.model_size import model_size, peak_of
from ..models.positions import beyond_positions
from ..view import ModelView, find_inside

logger = logging.getLogger(__name__)


class BurstCallback(TrainerCallback):
    """Logs speed, memory, balance and exchange times with each training loss (Weights & Biases, TensorBoard, trackio,
    log history), and prints a line with the remaining time. It warns if `max_length` is still TRL's default, and once
    if a document has more tokens than the model has positions.

    | key | value |
    |---|---|
    | `tokens_per_second_per_gpu` | tokens without padding, each counted once, per second and process |
    | `mfu` | model FLOPs utilisation: the share of the GPU's bf16 peak, without recomputation |
    | `peak_memory_gib` | highest peak of torch's allocator over ranks; on CPUs, of the whole process |
    | `packing_imbalance` | attention work of the busiest rank above the mean: 0.02 is 2 % |
    | `exchange_seconds` | seconds that attention waited for other ranks, in the first step after a log |

    The numbers cover the steps since the last log, without evaluation and saving. Ranks exchange six numbers per log,
    and only logged steps wait for the device.

    Args:
        trainer (`Trainer`): Any trainer of a patched model.
        peak_flops (`float`, *optional*): Peak FLOP/s of one GPU, for `mfu`; by default from its data sheet. Without a
            data sheet, `mfu` is not logged.
        progress (`bool`, defaults to `True`): Whether to print a line per log.

    Example:

    ```python
    >>> trainer.add_callback(hf_burst.BurstCallback(trainer))
    ```
    """

    clock: ExchangeClock | None  # of the step whose exchanges are timed

    def __init__(self, trainer: Trainer, peak_flops: float | None = None, progress: bool = True) -> None:
        self.trainer, self.progress = trainer, progress
        self.peak = peak_flops or peak_of(trainer.args.device)
        self.handle: RemovableHandle | None = None
        self.warned = False  # no more length warnings

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finds the model, and moves this callback before those that report."""
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)
        trained: Any = self.trainer.model
        model = find_inside(trained, PATCH)
        if model is None:
            raise ConfigError("BurstCallback watches patched models, and the trainer's is not. Call patch_model first.")
        self.size: Any = None
        try:
            self.size = model_size(type(model), model.config)
        except BurstError as problem:
            logger.warning("BurstCallback logs no mfu. %s", problem)
        self.patch = getattr(model, PATCH)
        self.group = resolve_group(self.patch.group)
        self.trained = _share_that_learns(model.get_submodule(language_model_path(ModelView(model))))
        self.on_train_end()  # cleans up after an interrupted training
        self.handle = model.register_forward_pre_hook(self._count)
        self.first = state.global_step
        self.began = self.mark = time.perf_counter()  # end of the first step, and last reading of the clock
        self.samples = True  # whether the exchanges of a step are to be timed
        self._reset()
        warning = None if self.warned else untouched_length(args)
        if state.is_world_process_zero and warning is not None:
            logger.warning("%s", warning)
        if self.progress and state.is_world_process_zero and args.world_size > 1:
            tqdm.write(f"hf_burst: {args.world_size} processes, of which {self.group.size} share each sequence")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Times the exchanges of the first step after a log, but not of the first one, which opens connections."""
        if self.samples and self.group.size > 1 and state.global_step > self.first:
            self.clock = resources_of(self.group).clock = ExchangeClock(args.device)
            self.samples = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds the step's time."""
        self._look()
        resources_of(self.group).clock = None
        if state.global_step <= self.first + 1:  # connections are open and kernels compiled from now on
            self.began = self.mark

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        if self.handle is not None:
            resources_of(self.group).clock = None  # of an interrupted training

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Excludes the seconds of an evaluation or a checkpoint."""
        self.mark = time.perf_counter()

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds the numbers to the log of a training step."""
        if not logs or "loss" not in logs or not self.passes:
            return
        self._look()  # reading the loss has synchronized with the device
        numbers = self._numbers()
        logs.update(numbers)
        state.log_history[-1].update(numbers)  # log_history holds a copy
        if self.progress and state.is_world_process_zero:
            tqdm.write(self._line(state, logs))
        self._reset()
        self.samples = True

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Removes the hook from the model."""
        resources_of(self.group).clock = None
        if self.handle is not None:
            self.handle.remove()

    @torch.compiler.disable
    def _count(self, module: Any, args: Any) -> None:
        """Adds the work of a forward pass: a forward pre-hook that runs after the patch's."""
        if not module.training or not torch.is_grad_enabled() or self.patch.run is None:
            return
        layout = self.patch.run.batch.layout
        self.given += given_tokens(layout)
        if self.size:
            self.flops += self.size.flops(tokens_of(layout), pairs_of(layout, self.size.patterns), self.trained)
        self.imbalance += layout.imbalance
        self.passes += 1
        if not self.warned and self.trainer.is_world_process_zero():
            longest = longest_of(layout)
            said = f"A document of the batch has {longest:,} tokens"
            warning = beyond_positions(module.config, longest, said, "rope_parameters of its config")
            self.warned = warning is not None
            if self.warned:
                logger.warning("%s", warning)

    def _reset(self) -> None:
        """Resets the sums of a log."""
        self.passes = self.given = 0
        self.flops = self.imbalance = self.seconds = 0.0
        self.clock = None

    def _look(self) -> None:
        now = time.perf_counter()
        self.seconds, self.mark = self.seconds + now - self.mark, now

    def _numbers(self) -> dict[str, float]:
        """Returns a log's numbers, combined over all ranks."""
        exchange = -1.0 if self.clock is None else self.clock.seconds()
        device = self.trainer.args.device
        mine = [self.given, self.flops, self.seconds, peak_memory(device), self.imbalance / self.passes, exchange]
        every = self.trainer.accelerator.gather(torch.tensor([mine], dtype=torch.float64, device=device))
        tokens, flops, *_ = every.mean(0).tolist()
        *_, seconds, memory, imbalance, exchange = every.max(0).values.tolist()
        shared = seconds * self.group.size  # the ranks of a group count the same tokens
        return {
            "tokens_per_second_per_gpu": tokens / shared,
            **({"mfu": flops / shared / self.peak} if self.peak and self.size else {}),
            "peak_memory_gib": memory,
            "packing_imbalance": imbalance,
            **({"exchange_seconds": exchange} if exchange >= 0 else {}),
        }

    def _line(self, state: TrainerState, logs: dict[str, float]) -> str:
        done = state.global_step - self.first - 1
        each = (time.perf_counter() - self.began) / done if done > 0 else self.seconds  # with evaluation and saving
        left = timedelta(seconds=round(each * (state.max_steps - state.global_step)))
        mfu = f", MFU {logs['mfu']:.1%}" if "mfu" in logs else ""
        place = "GPU" if self.trainer.args.device.type == "cuda" else "process"
        speed = f"{logs['tokens_per_second_per_gpu']:,.0f} tokens/s a {place}{mfu}, {logs['peak_memory_gib']:.1f} GiB"
        reward = f", reward {logs['reward']:.4g}" if logs.get("reward") is not None else ""  # of generating trainers
        steps = f"step {state.global_step:,} of {state.max_steps:,}, {left} left"
        return f"{steps}, loss {logs['loss']:.4g}{reward}, {speed}"


def untouched_length(training: Any) -> str | None:
    """Returns a warning if `max_length` is the default of a TRL class, which cuts or drops longer texts."""
    kinds = trl_classes(type(training))
    kind = next((kind for kind in kinds if isinstance(vars(kind).get("max_length"), int)), None)
    prepared = (getattr(training, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    if kind is None or prepared or training.max_length != kind.max_length:  # type: ignore[attr-defined]
        return None
    return (
        f"max_length is {training.max_length:,}, the default of {kind.__name__}: longer texts are cut or left out. "
        "Set it to the tokens of your longest text."
    )


def tokens_of(layout: SequenceLayout) -> int:
    """Returns the number of tokens that are not padding."""
    return sum(stop - start for start, stop in layout.spans)


def given_tokens(layout: SequenceLayout) -> int:
    """Returns the number of given tokens: a shared prefix counts once per text."""
    if not layout.parents:
        return tokens_of(layout)
    return sum(int(layout.texts(rank).sum()) for rank in range(layout.ranks)) - layout.padding


def pairs_of(layout: SequenceLayout, patterns: Sequence[tuple[MaskPattern, float]]) -> float:
    """Returns the number of (query, key) pairs in all layers of a model."""
    return sum(count * mask.pairs for pattern, count in patterns for mask in _masks(layout, pattern))


def longest_of(layout: SequenceLayout) -> int:
    """Returns the number of tokens of the longest text, including its shared prefix."""
    return max(mask.longest_text for mask in _masks(layout, MaskPattern()))


def _masks(layout: SequenceLayout, pattern: MaskPattern) -> Iterator[Mask]:
    """Yields the mask of each row, without padding."""
    if layout.parents:  # only the last chunk is padded
        yield from layout.masks(pattern)
        return
    for row in layout.real_documents:
        yield pattern.mask(row[-1] - row[0], tuple(bound - row[0] for bound in row))


def peak_memory(device: torch.device) -> float:
    """Returns the peak memory so far, in GiB: of torch's allocator on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes per unit of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _share_that_learns(model: nn.Module) -> float:
    """Returns the share of trained weights. DeepSpeed keeps the sizes of the weights that it shards."""
    sizes = [(getattr(weight, "ds_numel", weight.numel()), weight.requires_grad) for weight in model.parameters()]
    return sum(size for size, learns in sizes if learns) / sum(size for size, _ in sizes)
