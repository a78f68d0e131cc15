"""The same command goes on: which checkpoint a recipe resumes from, and how one ends that has all its steps."""

import atexit
import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from glob import glob
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_burst.errors import BurstError

if TYPE_CHECKING:
    from transformers import TrainingArguments

AUTO, START = "auto", "resume_from_checkpoint"
NO, YES = ("none", "false", "no"), ("true", "yes")
FREE = (  # settings by which the same experiment is another run; of those that end in _ all with this beginning
    *("num_train_epochs", "max_steps", "output_dir", "resume_from_checkpoint", "ignore_data_skip", "do_"),
    *("save_", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "enable_jit_checkpoint"),
    *("restore_callback_states_from_checkpoint", "log_", "logging_", "disable_tqdm", "report_to", "run_name"),
    *("project", "trackio_", "hub_", "push_to_hub", "debug", "skip_memory_metrics", "include_"),
    *("eval_dataset", "eval_split", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_packing"),
    *("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "per_device_eval_batch_size"),
    *("batch_eval_metrics", "prediction_loss_only", "bf16_full_eval", "fp16_full_eval", "full_determinism"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "auto_find_batch_size", "pad_to_multiple_of"),
    *("use_cpu", "use_cache", "torch_compile", "torch_compile_", "use_liger_kernel", "liger_kernel_config"),
    *("activation_", "gradient_checkpointing", "gradient_checkpointing_", "torch_empty_cache_steps", "local_rank"),
    *("dataset_num_proc", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    *("ddp_", "fsdp", "fsdp_config", "deepspeed", "parallelism_config", "precompute_ref_batch_size"),
    *("attn_implementation", "bnb_4bit_quant_storage", "trust_remote_code", "windows"),
)
PATHS = ("model_name_or_path", "tokenizer", "chat_template_path")
READ = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".jsonl", ".json", ".parquet", ".csv", ".arrow")
MUCH = 2**30  # bytes; a disk with more is not full, if the system does not say so
PIECE, PIECES = 1 << 20, 64  # bytes of a file, and how many pieces are read of a large one


def settings_of(training: "TrainingArguments", chosen: dict[str, Any]) -> dict[str, Any]:
    """What must not change where the same command goes on: the model, the data, and how it is trained."""
    every = {"trained by": type(training).__name__, **training.to_dict(), **chosen}
    every |= {name: getattr(training, name, None) for name in ("eos_token", "pad_token")}  # to_dict hides them
    every["dataset"] = [known for name in chosen["dataset"] for known in contents(name)]
    rewards = [name.rpartition(":") for name in chosen.get("reward", ())]  # functions of files, or "answer"
    every["reward"] = [":".join([*(contents(file) if file else ()), name]) for file, _, name in rewards]
    every |= {name: str(Path(every[name]).resolve()) for name in PATHS if Path(every.get(name) or "?").exists()}
    beginnings = tuple(name for name in FREE if name.endswith("_"))
    own = {name: value for name, value in every.items() if name not in FREE and not name.startswith(beginnings)}
    return json.loads(json.dumps(own, default=str))


def contents(name: str) -> Iterator[str]:
    """Files and folders with a digest of what they hold, which a copy elsewhere shares; other names as they are."""
    found = [Path(name)] if Path(name).exists() else sorted(map(Path, glob(name, recursive=True)))
    for path in found:
        digest, inside = sha256(), sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in (one for one in inside if one.is_file()):
            parts = file.relative_to(path).parts
            if any(part.startswith(".") for part in parts):
                continue
            digest.update(f"{'/'.join(parts)} {(size := file.stat().st_size)} ".encode())
            if file.suffix.lower() not in READ:  # such as pictures
                continue
            with file.open("rb") as held:
                for piece in range(PIECES):
                    held.seek(max(piece * PIECE, piece * (size - PIECE) // (PIECES - 1)))
                    digest.update(held.read(PIECE))
        yield f"{path.resolve().name} ({digest.hexdigest()[:12]})"
    if not found:
        yield name


def check(resume: str | bool | None) -> None:
    """Refuses what is no folder."""
    if str(resume).lower() not in (AUTO, *NO, *YES) and not Path(str(resume)).is_dir():
        raise SystemExit(f"{START} is {resume!r}; give the folder of a checkpoint, true, false or auto.")


def checkpoint(training: "TrainingArguments", run: dict[str, Any]) -> str | None:
    """The folder to resume from, by `resume_from_checkpoint`, on which all ranks agree.

    `"auto"` is the latest whole checkpoint in `output_dir` if there is any, which must be of the same settings. `true`
    is the latest one, of whichever settings; else it is a folder. `"auto"` is `None` also where every checkpoint was
    cut off while it was written.
    """
    resume, output_dir = training.resume_from_checkpoint, training.output_dir
    choice = str(resume).lower()
    if choice in NO:
        return None
    import hf_burst
    from hf_burst.hf.trainers.resume import what_is_missing

    if choice not in (AUTO, *YES):
        if (fault := what_is_missing(str(resume))) is not None:
            raise SystemExit(
                f"resume_from_checkpoint {resume!r} is not whole: {fault}. Give true for the last whole one."
            )
        return str(resume)
    latest = hf_burst.last_checkpoint(output_dir)
    begun = sorted(Path(output_dir).glob("checkpoint-*[0-9]")) if latest is None else []
    if latest is None:
        nothing = f"resume_from_checkpoint is true, but {output_dir!r} holds no whole checkpoint."
        problem = why_not_anew(begun) if choice == AUTO else nothing
    else:
        problem = of_another_run(latest, run) if choice == AUTO else None
    end_together(problem)
    if begun and training.process_index == 0:
        print(f"begins anew: {begun[0]} was cut off, and {output_dir} holds no whole checkpoint")
    return latest


def of_another_run(folder: str, run: dict[str, Any]) -> str | None:
    """Why a recipe does not go on from a checkpoint: it is of a run with other settings. `None` if it is not."""
    from transformers import TrainerState

    from hf_burst.hf.trainers.resume import STATE, recorded

    before = recorded(TrainerState.load_from_json(str(Path(folder) / STATE))).get("settings") or {}
    advice = "Set another output_dir, or resume_from_checkpoint: true to go on from it, or false to train anew."
    if not before:
        return f"{folder} does not tell by which settings it was trained. {advice}"
    return (changed := difference(before, run)) and f"{folder} was trained with {changed} now. {advice}"


def why_not_anew(begun: list[Path]) -> str | None:
    """Why a recipe does not begin anew beside checkpoints of which none is whole: one was written to its end, and may
    be all that is left of a training."""
    from hf_burst.hf.trainers.resume import STATE

    ended = next((path.name for path in begun if holds_json(path / STATE)), None)
    return ended and (
        f"{str(begun[0].parent)!r} holds no whole checkpoint, though {ended} was written to its end. Set another "
        "output_dir, or resume_from_checkpoint: false to train anew, which overwrites it."
    )


def difference(before: dict[str, Any], run: dict[str, Any]) -> str | None:
    """The first setting that differs, with both of its values."""
    other = next((name for name, value in before.items() if name in run and run[name] != value), None)
    return other and f"{other} {before[other]!r}, and it is {run[other]!r}"


def holds_json(file: Path) -> bool:
    """Whether a file was written to its end."""
    try:
        return isinstance(json.loads(file.read_text()), dict)
    except (OSError, ValueError):
        return False


def hold(folder: str) -> str | None:
    """Holds a folder until this process ends: two trainings in it would mix their checkpoints. Says who holds it, if
    another process does. The file's name is one that `push_to_hub` leaves out: reading it would end the hold."""
    path, file = Path(folder).resolve() / "_training.lock", -1
    try:
        while file < 0 or not (path.exists() and os.path.samestat(os.fstat(file), path.stat())):  # removed meanwhile
            file = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 200).decode() or "Another process"
        return (
            f"{holder} trains in output_dir {folder!r}. Wait for it, or end it: a launcher that was killed (kill -9) "
            "leaves its processes behind. Or set another folder."
        )
    except OSError:  # a file system without locks, or a file of another user
        return None
    os.ftruncate(file, 0)
    os.write(file, f"Process {os.getpid()} of {platform.node()}".encode())
    atexit.register(path.unlink, missing_ok=True)  # after a crash the next run takes what is left
    return None


@contextmanager
def saving(folder: str) -> Iterator[None]:
    """Has a full disk end what is written into a folder by a sentence, which other ranks are told of, too."""
    try:
        yield
    except Exception as error:
        if (told := full_disk(Path(folder), error)) is None:
            raise
        raise BurstError(told) from None


def full_disk(folder: Path, error: Exception) -> str | None:
    """What is said of an error if the disk of a folder is full, of which torch says "unexpected pos" alone."""
    said, free = str(error), shutil.disk_usage(folder).free
    saved = [each for each in folder.glob("checkpoint-*") if each.is_dir()]
    needed = max((sum(file.stat().st_size for file in each.rglob("*")) for each in saved), default=0)
    by_system = getattr(error, "errno", None) in (ENOSPC, EDQUOT) or "No space left" in said
    by_torch = "unexpected pos" in said or "failed writing" in said
    if not by_system and not (by_torch and free < max(needed, MUCH)):
        return None
    largest = f", and the largest checkpoint there has {needed / 2**30:.2f} GiB" if needed else ""
    return (
        f"Rank {os.environ.get('RANK', '0')} cannot save: the disk of {str(folder)!r}, or a quota there, is full: "
        f"{free / 2**30:.2f} GiB are free{largest}. Free some (save_total_limit: 2 keeps fewer checkpoints); the same "
        "command then goes on from the last whole checkpoint."
    )


def end_together(problem: str | None) -> None:
    """Ends all ranks by what any of them has to say: files may differ between hosts."""
    import torch.distributed as dist

    every: list[str | None] = [problem]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, problem)
    if (told := next(filter(None, every), None)) is not None:
        raise SystemExit(told)
