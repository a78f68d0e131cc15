"""Resuming after a failure: the last complete checkpoint of a `Trainer`, and a comparison of batches and data."""

import json
import logging
import shutil
from collections.abc import Mapping, Sized
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile
from zlib import crc32

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader
from tqdm.auto import tqdm
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState

from ...errors import ConfigError
from ...ranks.group import ContextGroup
from .accelerate import BurstParallelismConfig

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"  # Trainer writes it last
DEEPSPEED = "*_states.pt"  # weights, optimizer and scheduler
NEEDED = {  # Trainer raises without weights, but silently ignores the others if missing
    "weights": ("*model*.safetensors", "*_model*.bin", "pytorch_model_fsdp_*/.metadata", DEEPSPEED),
    "optimizer": ("optimizer.pt", "optimizer.bin", "optimizer_*/.metadata", DEEPSPEED),
    "scheduler": ("scheduler.pt", DEEPSPEED),
}
ARCHIVES = ("optimizer.*", "scheduler.pt", "scaler.pt", "*_model*.bin", DEEPSPEED)
JSONS = ("config.json", "*_config.json", "*.safetensors.index.json", "*.bin.index.json")
UNREADABLE = (OSError, EOFError, ValueError, TypeError, AttributeError, SafetensorError, BadZipFile, UnpicklingError)


def last_checkpoint(folder: str | Path) -> str | None:
    """Returns the latest complete checkpoint of a `Trainer`; `None` if there is none, as at a first start.

    `Trainer` itself takes the highest number, even if a kill or a full disk has truncated that checkpoint. All ranks
    call this together, after `TrainingArguments` or `Accelerator` has joined them. If none has the random state of
    each rank, it warns, takes the latest one that is otherwise complete, and removes its states that are cut off.

    Args:
        folder (`str` or `Path`): The `output_dir` of the training; it need not exist.

    Raises:
        ConfigError: If ranks see complete checkpoints, but none is complete on all of them.

    Example:

    ```python
    >>> trainer.train(resume_from_checkpoint=hf_burst.last_checkpoint(trainer.args.output_dir))
    ```
    """
    steps = (path.name.removeprefix("checkpoint-") for path in Path(folder).glob("checkpoint-*"))
    paths = {int(step): Path(folder, f"checkpoint-{step}") for step in steps if step.isdigit()}
    every = _gather({step: _look(path) for step, path in paths.items()})
    whole: dict[bool, Path] = {}  # the latest, by whether all random states are there
    for step in sorted(set().union(*every), reverse=True):
        path = Path(folder, f"checkpoint-{step}")
        ranks = [seen.get(step, ("it is missing", False)) for seen in every]
        fault = next((fault for fault, _ in ranks if fault is not None), None)
        if fault is not None:
            _warn("%s is not whole and not taken: %s.", path, fault)
        elif True not in whole:
            whole.setdefault(all(has_state for _, has_state in ranks), path)
    if whole:
        taken = whole.get(True) or whole[False]
        if False in whole:
            _warn("%s is taken. Random states, and so dropout masks, are missing in %s.", taken, whole[False])
        for state in (file for file in taken.glob("rng_state*.pth") if not is_zipfile(file)):  # Trainer would stop
            state.unlink(missing_ok=True)  # another rank may have removed it
        return str(taken)
    if any(fault is None for seen in every for fault, _ in seen.values()):
        raise ConfigError(
            f"The ranks see different checkpoints in {str(folder)!r}. Put the folder on a file system that all hosts "
            "share, or copy the checkpoint to each host."
        )
    return None


def what_is_missing(checkpoint: str | Path) -> str | None:
    """Returns why a run cannot resume from a checkpoint; `None` if it can. All ranks call this together."""
    return next((fault for fault, _ in _gather(_look(Path(checkpoint))) if fault is not None), None)


def recorded(state: Any) -> dict[str, Any]:
    """Returns what [`BurstResume`] saved in a trainer's state."""
    return dict(state.stateful_callbacks.get(BurstResume.__name__, {}).get("attributes", {}))


def _look(checkpoint: Path) -> tuple[str | None, bool]:
    """Returns what is wrong with a checkpoint, as seen by this rank, and whether its random state is there."""
    file = checkpoint / STATE
    if not file.is_file():
        return f"{STATE} is missing, which is written last", False
    try:
        ranks = recorded(TrainerState.load_from_json(str(file))).get("ranks")
        for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
            _read_end(file)
    except UNREADABLE as problem:
        return f"{file.relative_to(checkpoint)} is cut off ({type(problem).__name__}: {problem})", False
    for what, patterns in NEEDED.items():
        if not any(path for pattern in patterns for path in checkpoint.rglob(pattern)):
            return f"it has no {what}", False
    rank = ContextGroup.from_mesh(None).rank
    name = "rng_state*.pth" if ranks is None else "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
    return None, rank >= (ranks or rank + 1) or {*map(is_zipfile, checkpoint.glob(name))} == {True}


def _read_end(file: Path) -> None:
    """Raises if a file that `Trainer` reads is truncated, or refers to a missing one."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt"):
            return
    if any(map(file.match, ARCHIVES)):
        ZipFile(file).close()
    elif any(map(file.match, JSONS)):
        for name in json.loads(file.read_text()).get("weight_map", {}).values():
            (file.parent / name).stat()
    elif file.name == ".metadata":  # of torch's distributed checkpoints
        for part in (FileSystemReader(file.parent).read_metadata().storage_data or {}).values():
            if (file.parent / part.relative_path).stat().st_size < part.offset + part.length:
                raise EOFError(f"{part.relative_path} is too short")


def _gather(mine: Any) -> list[Any]:
    every = [mine] * ContextGroup.from_mesh(None).size
    if len(every) > 1:
        dist.all_gather_object(every, mine)
    return every


def _warn(text: str, *values: Any) -> None:
    if ContextGroup.from_mesh(None).rank == 0:
        logger.warning(text, *values)


class BurstResume(TrainerCallback, ExportableState):
    """Refuses to resume with other global batches or other data than before, which `Trainer` does silently.

    A step takes `per_device_train_batch_size` x groups x `gradient_accumulation_steps` sequences, and the number of
    groups depends on ranks and `burst_size`. `Trainer` skips as many rows as were trained on, even of other data, so
    the number of rows is compared, and up to 16 rows of a `datasets` table.

    All ranks save if a callback asks for it on any rank. An earlier run's checkpoint with the same number is removed
    first. A finished run that is started again keeps its weights (not under DeepSpeed), although `Trainer` takes one
    more step if the run ended within an epoch.

    Args:
        settings (mapping from `str` to JSON values, *optional*): Further values to write into checkpoints.
        other_data (`bool`, defaults to `False`): Whether to resume with other training data, with a warning.

    Raises:
        ConfigError: At the start of training, if batches or data differ from before.

    Example:

    ```python
    >>> trainer.add_callback(hf_burst.BurstResume())
    ```
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, other_data: bool = False) -> None:
        self.settings = settings
        self.other_data = other_data
        self.began: dict[str, Any] = {}
        self.finished = False

    def state(self) -> dict[str, Any]:
        """Returns the entry for a checkpoint's `trainer_state.json`."""
        return {"args": {}, "attributes": {"settings": self.settings, **self.began}}

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Compares batches and data with those of the checkpoint."""
        mesh = args.parallelism_config
        size = (mesh.burst_size or args.world_size) if isinstance(mesh, BurstParallelismConfig) else 1
        groups = 1 if args.accelerator_config.split_batches else args.world_size // size  # split: one batch for all
        sequences = int(args.per_device_train_batch_size * groups * args.gradient_accumulation_steps)
        rows = _gather(rows_of(getattr(train_dataloader, "dataset", None)))[0]
        self.began = {"ranks": args.world_size, "sequences": sequences, "rows": rows}
        self.finished = 0 < state.max_steps <= state.global_step
        if state.global_step:
            self._compare(f"The checkpoint of step {state.global_step:,} was trained", recorded(state))
            if state.is_world_process_zero:
                tqdm.write(f"goes on from checkpoint-{state.global_step} (of {state.max_steps:,} steps)")
        if self.finished:
            _warn("%s steps are done, and max_steps is %s: nothing is trained.", state.global_step, state.max_steps)
        state.stateful_callbacks[type(self).__name__] = self.state()  # the checkpoint may lack the callback

    def _compare(self, said: str, before: Mapping[str, Any]) -> None:
        now = self.began
        if "sequences" not in before:
            _warn("%s without BurstResume, or by an older one: neither batches nor data are compared.", said)
        if before.get("sequences", now["sequences"]) != now["sequences"]:
            raise ConfigError(
                f"{said} with {before['sequences']} sequences a step, and this run has {now['sequences']}",
                "its data and learning rates would be others",
                "Set per_device_train_batch_size x groups x gradient_accumulation_steps to the same product",
            )
        rows = before.get("rows", now["rows"]), now["rows"]
        if None in rows:
            _warn("%s; streamed data are not compared.", said)
        if None in rows or rows[0] == rows[1]:
            return
        said += f" on other data: {before['rows']}, and now {now['rows']}. As many are skipped as were trained on."
        if not self.other_data:
            raise ConfigError(
                f"{said} To train on them from the beginning, set another output_dir, or remove the checkpoints. To go "
                "on with them, say BurstResume(other_data=True)."
            )
        _warn("%s", said)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Discards the step if all steps are done, because `Trainer` takes one more in the middle of an epoch."""
        if self.finished:
            model.zero_grad()
            state.global_step -= 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Has all ranks save if any rank asks for it, and removes an old checkpoint with the same number."""
        control.should_save &= not self.finished
        if args.world_size > 1:  # a callback may ask on one rank only, such as one with a time limit
            group, doing = ContextGroup.from_mesh(None), "the question whether a step is saved"
            askers, _ = group.agree({}, None, args.device, int(control.should_save), doing=doing)
            control.should_save = askers > 0
        if control.should_save and args.should_save:
            shutil.rmtree(Path(args.output_dir) / f"checkpoint-{state.global_step}", ignore_errors=True)
        if control.should_save and args.world_size > 1:
            dist.barrier()  # no rank writes before the removal

    on_epoch_end = on_step_end


def rows_of(data: Any) -> str | None:
    """Returns the number of rows of data, with a checksum of some rows for a `datasets` table; `None` for a stream."""
    rows = len(data) if isinstance(data, Sized) else 0
    if not rows or not hasattr(data, "with_format"):
        return f"{rows:,} rows" if rows else None
    places = sorted({place * (rows - 1) // 15 for place in range(16)})  # includes the first and the last
    table = data.with_format("arrow")[places]  # without transforms, because these may be random
    # float columns are left out: TRL adds reference losses to rows, which differ by rounding
    names = [name for name in sorted(table.column_names) if str(table[name].type) not in ("float", "double")]
    checksum = crc32(repr([(name, table[name].to_pylist()) for name in names]).encode())
    return f"{rows:,} rows (checksum {checksum:x})"
