"""Going on after a fault: which checkpoint of a `Trainer` is whole, and whether a run goes on as it began."""

import json
import logging
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ...errors import ConfigError
from ...ranks.group import ContextGroup
from ..callers import _frames as frames
from .accelerate import BurstParallelismConfig
from .identity import are_others, frozen_values, known_of

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"  # which Trainer writes last
NUMBERED = re.compile(r"checkpoint-(\d+)")
DEEPSPEED = "*_states.pt"  # both weights and optimizer
WEIGHTS = ("model*.safetensors", "adapter_model.*", "pytorch_model*.bin", DEEPSPEED)
OPTIMIZER = ("optimizer.pt", "optimizer.bin", DEEPSPEED)
ARCHIVES = (*OPTIMIZER, "pytorch_model*.bin", "adapter_model.bin", "scheduler.pt", "scaler.pt", "training_args.bin")
JSONS = ("config.json", "generation_config.json", "adapter_config.json")
INDICES = (".safetensors.index.json", ".bin.index.json")
UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, SafetensorError, UnpicklingError)


@dataclass(frozen=True)
class Seen:
    """What a rank sees of a checkpoint: what is wrong, which random states belong to it, and which of them are here."""

    fault: str | None = "it is missing"
    wanted: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()


def last_checkpoint(folder: str | Path) -> str | None:
    """The latest checkpoint of a `Trainer` that was written to its end; `None` if there is none, as at a first start.

    `Trainer` itself takes the highest number, and so a checkpoint that a kill or a full disk has cut off. All ranks
    call this together, after `TrainingArguments` or `Accelerator` has joined them. If no checkpoint has all random
    states, the latest that lacks nothing else is taken, with a warning.

    Args:
        folder (`str` or `Path`): The `output_dir` of the training; it need not exist.

    Raises:
        ConfigError: If no checkpoint is whole on all ranks, but on some.

    Example:

    ```python
    >>> trainer.train(resume_from_checkpoint=hf_burst.last_checkpoint(trainer.args.output_dir))
    ```
    """
    every = _gather({path.name: _look(path) for path in numbered(folder)})
    names = sorted({name for seen in every for name in seen}, key=_number, reverse=True)
    lacking: list[tuple[str, str]] = []
    for name in names:
        fault, absent = _of_all([seen.get(name, Seen()) for seen in every])
        if fault is None and absent is None:
            return str(Path(folder) / name)
        if fault is None and absent is not None:
            lacking.append((name, absent))
        _warn("%s is not whole and not taken: %s.", Path(folder) / name, fault or absent)
    if lacking:
        _take_without(Path(folder) / lacking[0][0], lacking[0][1])
        return str(Path(folder) / lacking[0][0])
    own = [max((name for name in seen if seen[name].fault is None), key=_number, default=None) for seen in every]
    if any(own):
        told = ", ".join(f"rank {rank} {name}" for rank, name in enumerate(own))
        raise ConfigError(
            f"The ranks see different checkpoints in {str(folder)!r}: {told}. Put the folder on a file system that "
            "all hosts share, or copy the checkpoint to each host."
        )
    return None


def numbered(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, the latest first."""
    return sorted((path for path in Path(folder).glob("*") if NUMBERED.fullmatch(path.name)), key=_number, reverse=True)


def what_is_missing(checkpoint: str | Path) -> str | None:
    """What keeps a run from going on from a checkpoint of a `Trainer`, as the end of a sentence; `None` for nothing.

    All ranks call this together. Random states may be missing, which is a warning. Only the ends of files are read, in
    which one that was cut off differs: not every bit is verified.
    """
    fault, absent = _of_all(_gather(_look(checkpoint)))
    if fault is None and absent is not None:
        _take_without(Path(checkpoint), absent)
    return fault


def _number(checkpoint: str | Path) -> int:
    return int(Path(checkpoint).name.rpartition("-")[2])


def _look(checkpoint: str | Path) -> Seen:
    """What this rank sees of a checkpoint."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        return Seen()
    try:
        states = {file.name for file in folder.glob("rng_state*.pth") if zipfile.is_zipfile(file)}
        if not (folder / STATE).is_file():
            return Seen(f"{STATE} is missing, which is written last", states=frozenset(states))
        callbacks = json.loads((folder / STATE).read_text()).get("stateful_callbacks") or {}
        ranks = (recorded(callbacks).get("batch") or {}).get("ranks") or 0
        if ranks > 1:
            wanted = {f"rng_state_{rank}.pth" for rank in range(ranks)}
        else:
            wanted = {"rng_state.pth"} if ranks == 1 or not states else set()
        files = sorted(folder.rglob("*"))
        faults = (fault for fault in map(_cut_off, files) if fault is not None)
        return Seen(next(faults, None) or _absent(files), frozenset(wanted), frozenset(states))
    except UNREADABLE as problem:
        return Seen(f"a file is cut off ({type(problem).__name__}: {problem})")


def _cut_off(file: Path) -> str | None:
    """What is wrong with a file, if Trainer reads such files."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt"):
            return None
    if any(fnmatch(file.name, pattern) for pattern in ARCHIVES) and file.is_file() and not zipfile.is_zipfile(file):
        return f"{file.name} is cut off"
    if file.name in JSONS and not _is_json(file):
        return f"{file.name} is cut off"
    if file.name == "latest" and (file.parent / STATE).exists():  # DeepSpeed's: the folder to load from
        named = file.read_text().strip()
        return None if named and (file.parent / named).is_dir() else f"latest names {named!r}, which is missing"
    if file.name.endswith(INDICES):
        names = sorted(set(json.loads(file.read_text())["weight_map"].values()))
        return next((f"{name} is missing" for name in names if not (file.parent / name).exists()), None)
    if file.suffix == ".distcp" and not (file.parent / ".metadata").exists():
        return f"{file.parent.name} has no .metadata"
    if file.name == ".metadata":
        for part in (FileSystemReader(file.parent).read_metadata().storage_data or {}).values():
            held = file.parent / part.relative_path
            if not held.exists() or held.stat().st_size < part.offset + part.length:
                return f"{file.parent.name}/{part.relative_path} is {'cut off' if held.exists() else 'missing'}"
    return None


def _is_json(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_text()), dict)
    except ValueError:
        return False


def _absent(files: Sequence[Path]) -> str | None:
    """What a checkpoint lacks of the files without which Trainer would not go on, or would without a word."""

    def has(*patterns: str) -> bool:
        return any(fnmatch(file.name, pattern) for file in files for pattern in patterns)

    sharded = {file.parent.name.rpartition("_")[0] for file in files if file.name == ".metadata"}
    if not has(*WEIGHTS) and "pytorch_model_fsdp" not in sharded:
        return "it has no weights"
    if not has(*OPTIMIZER) and "optimizer" not in sharded:
        return "it has weights alone, without the optimizer"
    return None if has("scheduler.pt", DEEPSPEED) else "scheduler.pt is missing"


def _gather(mine: Any) -> list[Any]:
    """What each rank has."""
    every: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    return every


def _of_all(every: Sequence[Seen]) -> tuple[str | None, str | None]:
    """What is wrong with a checkpoint on any rank, and which random state no rank sees."""
    faults = [(rank, seen.fault) for rank, seen in enumerate(every) if seen.fault is not None]
    wanted = {name for seen in every for name in seen.wanted}
    states = {name for seen in every for name in seen.states}
    absent = min(wanted - states, default=None)
    if not faults:
        return None, absent and f"{absent} is missing"
    same = len(faults) == len(every) and len({fault for _, fault in faults}) == 1
    return (faults[0][1] if same else f"{faults[0][1]} (on rank {faults[0][0]})"), None


def _take_without(checkpoint: Path, absent: str) -> None:
    """Warns that random states are missing, and puts one aside that is cut off, which this rank would read."""
    _warn("%s is taken without all random states: %s. Dropout masks will be others.", checkpoint, absent)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    file = checkpoint / ("rng_state.pth" if alone else f"rng_state_{dist.get_rank()}.pth")
    if file.exists() and not zipfile.is_zipfile(file):
        file.replace(file.with_suffix(".cut_off"))


def _warn(text: str, *values: Any) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(text, *values)


def recorded(callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """What [`BurstResume`] has written into the state of a trainer."""
    attributes: dict[str, Any] = callbacks.get(BurstResume.__name__, {}).get("attributes", {})
    return attributes


class BurstResume(TrainerCallback, ExportableState):
    """Refuses to go on from a checkpoint with other global batches or other data, and keeps checkpoints from being
    mixed.

    The sequences of an optimizer step are `per_device_train_batch_size` x groups x `gradient_accumulation_steps`.
    Another number of ranks or another `burst_size` changes the groups, and `Trainer` goes on without a word, on other
    rows at other learning rates. With this callback it is an error that names the accumulation to set.

    Other training data are an error, too: `Trainer` would skip as many of their rows as were trained on before.
    Compared are the number of rows and, of tables of `datasets` and of lists, up to 16 rows. Streams are not compared.
    Other frozen weights than those that an adapter was trained on are an error as well; a few of them are compared.
    Another number of steps is a warning, because it changes the schedule of learning rates.

    A checkpoint of the same number, of an earlier run, is removed before it is written again. A run that has all its
    steps trains no further when it is started again; `Trainer` would take a step more.

    Args:
        settings (mapping from `str` to values that JSON can hold, *optional*): What else to write into checkpoints.
        other_data (`bool`, defaults to `False`): Whether to go on with other training data, with a warning.
        other_base (`bool`, defaults to `False`): Whether to go on with other frozen weights, with a warning.

    Raises:
        ConfigError: When the training begins, if its steps would take other numbers of sequences than before, or its
            data or its frozen weights are others.

    Example:

    ```python
    >>> trainer.add_callback(hf_burst.BurstResume())
    ```
    """

    def __init__(
        self, settings: Mapping[str, Any] | None = None, other_data: bool = False, other_base: bool = False
    ) -> None:
        self.settings, self.other_data, self.other_base = settings, other_data, other_base
        self.batch: dict[str, int] | None = None
        self.data: dict[str, Any] | None = None  # what is known of it
        self.base: dict[str, list[float]] | None = None  # values of frozen weights
        self.steps: int | None = None
        self.finished: Any = None  # the trainer, while it has nothing to train

    def state(self) -> dict[str, Any]:
        """For the `trainer_state.json` of a checkpoint."""
        names = ("batch", "settings", "data", "base", "steps")
        return {"args": {}, "attributes": {name: getattr(self, name) for name in names}}

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Compares the batches, the data and the frozen weights with those of the checkpoint."""
        mesh = args.parallelism_config
        size = (mesh.burst_size or args.world_size) if isinstance(mesh, BurstParallelismConfig) else 1
        now = {
            "ranks": args.world_size,
            "groups": 1 if args.accelerator_config.split_batches else args.world_size // size,  # of one batch in all
            "rows": args.per_device_train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
        }
        rows = getattr(train_dataloader, "dataset", None)
        known = (known_of(rows), frozen_values(kwargs["model"])) if args.process_index == 0 else None
        data, base = _gather(known)[0]  # all ranks judge what rank 0 has
        before = recorded(state.stateful_callbacks)
        loop = next((frame.f_locals for frame in frames() if frame.f_code.co_name == "_inner_training_loop"), {})
        if state.global_step:
            whence = f"The checkpoint of step {state.global_step:,} was trained"
            if (batch := before.get("batch")) and _sequences(batch) != _sequences(now):
                raise ConfigError(
                    f"{whence} with {_product(batch)}, and this run has {_product(now)}: its data and its learning "
                    f"rates would be others. {_advice(batch, now)}"
                )
            self._compare_base(whence, before.get("base") or {}, base)
            self._compare_data(whence, before.get("data") or {}, data)
            self._tell(loop.get("resume_from_checkpoint"), before.get("steps"), state)
        self._end_if_finished(loop.get("self"), state)
        self.batch, self.data, self.base, self.steps = now, data, base, state.max_steps
        state.stateful_callbacks[type(self).__name__] = self.state()  # a checkpoint may be older than the callback

    def _compare_base(self, whence: str, before: Mapping[str, list[float]], now: Mapping[str, list[float]]) -> None:
        """Refuses other frozen weights than those of the checkpoint, or warns of them."""
        if not are_others(before, now):
            return
        said = f"{whence} beside frozen weights that are not those of this model: an adapter belongs to its base."
        if self.other_base:
            _warn("%s It is trained on beside other weights.", said)
            return
        raise ConfigError(
            f"{said} Load the base model that it was trained with. To train an adapter of this one, set another "
            "output_dir, or remove the checkpoints. To go on all the same, say BurstResume(other_base=True)."
        )

    def _compare_data(self, whence: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Refuses other training data than that of the checkpoint, or warns of it. What is not known does not count."""
        other = [name for name in ("rows", "digest") if None not in (before.get(name), now[name])]
        if all(before[name] == now[name] for name in other):
            return
        contents = " with other contents" if before["rows"] == now["rows"] else ""
        had, has = (f"{rows:,} row{'s' * (rows != 1)}" for rows in (before["rows"], now["rows"]))
        said = f"{whence} on other data: {had}, and it is {has}{contents} now."
        if self.other_data:
            _warn("%s As many rows of it are skipped as were trained on.", said)
            return
        raise ConfigError(
            f"{said} As many rows of it would be skipped as were trained on. To train on it from the beginning, set "
            "another output_dir, or remove the checkpoints. To go on with it, say BurstResume(other_data=True)."
        )

    def _tell(self, checkpoint: str | None, before: int | None, state: Any) -> None:
        """Says from where the training goes on, and warns if the schedule of its learning rates is another."""
        if state.is_world_process_zero:
            tqdm.write(f"goes on from {checkpoint} (step {state.global_step:,} of {state.max_steps:,})")
        if before not in (None, state.max_steps):
            _warn(
                "The checkpoint is of a training of %s steps, and this one has %s: the next step has the learning rate "
                "that the old schedule came to, and later ones those of the new schedule.",
                before,
                state.max_steps,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes room for a checkpoint, which all ranks write if any rank wants one."""
        if args.world_size > 1:  # a callback may ask on one rank alone, such as one that looks at the clock
            group, doing = ContextGroup.from_mesh(None), "the question whether a step is saved"
            askers, _ = group.agree(
                {}, None, args.device, int(control.should_save), doing=doing
            )  # no GPU is waited for
            control.should_save = askers > 0
        if not control.should_save:
            return
        if args.should_save:
            shutil.rmtree(Path(args.output_dir) / f"checkpoint-{state.global_step}", ignore_errors=True)
        if args.world_size > 1:
            dist.barrier()  # of the others none has written yet

    on_epoch_end = on_step_end

    def _end_if_finished(self, trainer: Any, state: Any) -> None:
        """Lets a run that has all its steps come to its end, with the weights of its checkpoint."""
        self.on_train_end()  # of a training that was interrupted
        if trainer is None or not 0 < state.max_steps <= state.global_step:
            return
        _warn("%s steps are done, and max_steps is %s: there is nothing to train.", state.global_step, state.max_steps)

        def stop(*args: Any, **kwargs: Any) -> None:
            trainer.control.should_training_stop = True

        self.finished, trainer._run_epoch = trainer, stop

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leaves the trainer as it was."""
        if self.finished is not None:
            del self.finished._run_epoch
            self.finished = None


def _sequences(batch: Mapping[str, int]) -> int:
    return batch["rows"] * batch["groups"] * batch["accumulation"]


def _product(batch: Mapping[str, int]) -> str:
    return (
        f"{_sequences(batch)} sequences a step (per_device_train_batch_size {batch['rows']} x {batch['groups']} "
        f"group{'s' * (batch['groups'] > 1)} x gradient_accumulation_steps {batch['accumulation']})"
    )


def _advice(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """How this run comes to the sequences of the earlier one."""
    accumulation, rest = divmod(_sequences(before), now["rows"] * now["groups"])
    if not rest:
        return f"Set gradient_accumulation_steps={accumulation}."
    accumulation, rest = divmod(_sequences(before), now["groups"])
    if not rest:
        return f"Set per_device_train_batch_size=1 and gradient_accumulation_steps={accumulation}."
    return (
        f"{now['groups']} groups cannot share {_sequences(before)} sequences; launch ranks for a number of groups that "
        "divides them, or set a larger burst_size."
    )
