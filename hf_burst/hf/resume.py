"""Going on after a fault: which checkpoint of a `Trainer` is whole, and whether a run goes on as it began."""

import json
import logging
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..errors import ConfigError
from .accelerate import BurstParallelismConfig

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"  # which Trainer writes last
NUMBERED = re.compile(r"checkpoint-(\d+)")
ARCHIVES = (".pt", ".pth", ".bin")  # of torch.save, zip files whose table stands at the end


def last_checkpoint(folder: str | Path) -> str | None:
    """The latest checkpoint of a `Trainer` that was written to its end; `None` if there is none, as at a first start.

    `Trainer` itself takes the highest number, and so a checkpoint that a kill or a full disk has cut off. All ranks
    call this together, after `TrainingArguments` or `Accelerator` has joined them.

    Args:
        folder (`str` or `Path`): The `output_dir` of the training; it need not exist.

    Raises:
        ConfigError: If the ranks see different checkpoints.

    Example:

    ```python
    >>> trainer.train(resume_from_checkpoint=hf_burst.last_checkpoint(trainer.args.output_dir))
    ```
    """
    numbered = [(int(match[1]), path) for path in Path(folder).glob("*") if (match := NUMBERED.fullmatch(path.name))]
    latest, found = None, [path for _, path in sorted(numbered, reverse=True)]
    for path in found:
        fault = what_is_missing(path)
        if fault is None:
            latest = str(path)
            break
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning("%s is not whole and not taken: %s.", path, fault)
    if dist.is_initialized() and dist.get_world_size() > 1:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, latest and Path(latest).name)
        if len(set(every)) > 1:
            seen = ", ".join(f"rank {rank} {name}" for rank, name in enumerate(every))
            raise ConfigError(
                f"The ranks see different checkpoints in {str(folder)!r}: {seen}. Put the folder on a file system that "
                "all hosts share, or copy the checkpoint to each host."
            )
    return latest


def what_is_missing(checkpoint: str | Path) -> str | None:
    """What keeps a run from going on from a checkpoint of a `Trainer`, as the end of a sentence; `None` for nothing.

    Only the ends of files are read, in which one that was cut off differs: not every bit is verified.
    """
    folder = Path(checkpoint)
    try:
        state = json.loads((folder / STATE).read_text())
        for file in sorted(folder.rglob("*")):
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
            elif file.suffix in ARCHIVES and not zipfile.is_zipfile(file):
                return f"{file.name} is cut off"
            elif file.name.endswith(".index.json"):
                names = set(json.loads(file.read_text())["weight_map"].values())
                if absent := sorted(name for name in names if not (folder / name).exists()):
                    return f"{absent[0]} is missing"
            elif file.suffix == ".distcp" and not (file.parent / ".metadata").exists():
                return f"{file.parent.name} has no .metadata"
    except FileNotFoundError:
        return f"{STATE} is missing, which is written last"
    except (OSError, ValueError, SafetensorError) as problem:
        return f"a file is cut off ({problem})"
    ranks = (recorded(state.get("stateful_callbacks") or {}).get("batch") or {}).get("ranks")
    states = {file.name for file in folder.glob("rng_state*.pth")}
    wanted = {f"rng_state_{rank}.pth" for rank in range(ranks or 0)} if (ranks or 0) > 1 else set()
    if not states:
        return "it has weights alone, without the optimizer"
    return f"{min(wanted - states)} is missing" if wanted - states else None


def recorded(callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """What [`BurstResume`] has written into the state of a trainer."""
    attributes: dict[str, Any] = callbacks.get(BurstResume.__name__, {}).get("attributes", {})
    return attributes


class BurstResume(TrainerCallback, ExportableState):
    """Refuses to go on from a checkpoint with other global batches, and keeps checkpoints from being mixed.

    The sequences of an optimizer step are `per_device_train_batch_size` x groups x `gradient_accumulation_steps`.
    Another number of ranks or another `burst_size` changes the groups, and `Trainer` goes on without a word, on other
    rows at other learning rates. With this callback it is an error that names the accumulation to set.

    A checkpoint of the same number, of an earlier run, is removed before it is written again.

    Args:
        settings (mapping from `str` to values that JSON can hold, *optional*): What else to write into checkpoints.

    Raises:
        ConfigError: When the training begins, if its steps would take other numbers of sequences than before.

    Example:

    ```python
    >>> trainer.add_callback(hf_burst.BurstResume())
    ```
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self.batch: dict[str, int] | None = None

    def state(self) -> dict[str, Any]:
        """For the `trainer_state.json` of a checkpoint."""
        return {"args": {}, "attributes": {"batch": self.batch, "settings": self.settings}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compares the batches with those of the checkpoint."""
        mesh = args.parallelism_config
        size = (mesh.burst_size or args.world_size) if isinstance(mesh, BurstParallelismConfig) else 1
        now = {
            "ranks": args.world_size,
            "groups": args.world_size // size,
            "rows": args.per_device_train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
        }
        before = recorded(state.stateful_callbacks).get("batch")
        if state.global_step and before and _sequences(before) != _sequences(now):
            raise ConfigError(
                f"The checkpoint of step {state.global_step:,} was trained with {_product(before)}, and this run has "
                f"{_product(now)}: its data and its learning rates would be others. {_advice(before, now)}"
            )
        self.batch = now
        state.stateful_callbacks[type(self).__name__] = self.state()  # a checkpoint may be older than the callback

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes room for a checkpoint."""
        if not control.should_save:
            return
        if args.should_save:
            shutil.rmtree(Path(args.output_dir) / f"checkpoint-{state.global_step}", ignore_errors=True)
        if args.world_size > 1:
            dist.barrier()  # of the others none has written yet

    on_epoch_end = on_step_end


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
