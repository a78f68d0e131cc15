"""The settings that the recipes share, and their checks.

Settings come from YAML files (`--config FILE`, several if you like), then from the command line. A wrong setting ends
every process by one sentence, before the processes talk to each other; one that is not TRL's also before the imports
that take seconds.
"""

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any
from zlib import crc32

import beginning  # noqa: F401 (before torch)
import resuming
import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers.hf_argparser import HfArg
from trl import ModelConfig

import hf_burst
from hf_burst.errors import BurstError
from hf_burst.ranks.host import SIZE_VARIABLE, size_from_env

if TYPE_CHECKING:
    from transformers import TrainingArguments

REFUSALS = (OSError, ValueError, KeyError, ImportError, yaml.YAMLError, StrictDataclassError)  # of libraries
TEXT_FILES = (".txt", ".md", ".rst", ".tex", ".html", ".py")
TABLES = (".jsonl", ".json", ".parquet", ".csv")
TOO_LONG = ("refuse", "split", "drop")
DEFAULTS = {  # where long sequences want others than TRL
    "max_length": 16384,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "warmup_steps": 0.03,  # a share of all steps
    "logging_steps": 1,
    "ddp_find_unused_parameters": False,
    "resume_from_checkpoint": resuming.AUTO,  # the same command goes on
    "lora_dropout": 0.0,
    "lora_target_modules": ["all-linear"],
    "use_cpu": os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("y", "yes", "t", "true", "on", "1"),
}
LIGER = "liger_kernel"


@dataclass
class ModelSettings(ModelConfig):
    """What TRL's `ModelConfig` does not say of a model."""

    model_config: dict[str, Any] | str | None = HfArg(
        default=None, help="Instead of a model: a config (mapping, or JSON or YAML file) to make one from."
    )
    tokenizer: str | None = HfArg(default=None, help="Hub name, folder, or 'bytes'; by default the model's.")
    rope_scaling: dict[str, Any] | str | None = HfArg(
        default=None, help="RoPE parameters to set, such as {rope_type: yarn, factor: 4.0}."
    )
    quantize_experts: bool = HfArg(default=False, help="With load_in_4bit, quantizes the experts as well.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model_config", "rope_scaling"):
            setattr(self, name, mapping(name, getattr(self, name)))
        for name in ("model_name_or_path", "tokenizer"):
            folder = getattr(self, name) or ""
            if is_path(folder) and not Path(folder).exists():
                raise SystemExit(f"{name} is {folder!r}, a folder that does not exist; {nearby(Path(folder))}")
        if self.attn_implementation is not None:
            raise SystemExit("attn_implementation is set, but the attention is hf_burst's; leave it out.")
        if (self.load_in_4bit or self.load_in_8bit) and not self.use_peft:
            raise SystemExit("Quantized weights cannot be trained; set use_peft to train adapters beside them (QLoRA).")
        if (self.load_in_4bit or self.load_in_8bit) and find_spec("bitsandbytes") is None:
            raise SystemExit('load_in_4bit and load_in_8bit need bitsandbytes: pip install ".[qlora]" in a clone.')
        if self.quantize_experts and not self.load_in_4bit:
            raise SystemExit("quantize_experts needs load_in_4bit.")
        if self.load_in_4bit and self.dtype == "auto":
            raise SystemExit("load_in_4bit computes in dtype, which is 'auto'; set bfloat16, float16 or float32.")
        if self.model_config and self.model_name_or_path is not None:
            raise SystemExit(
                f"model_name_or_path is {self.model_name_or_path!r}, and model_config is set too, which makes a model "
                "with random weights. Leave one of them out."
            )
        if self.use_peft and self.model_name_or_path is None:
            raise SystemExit("use_peft trains adapters beside trained weights; set model_name_or_path.")


@dataclass
class DataSettings:
    """Where the documents, chats or pairs come from."""

    dataset: list[str] = HfArg(
        default_factory=list, help="Files, folders, a hub name (and its config), or 'python_topics'."
    )
    dataset_split: str = HfArg(default="train", help="Split to train on, such as train[:90%%].")
    eval_dataset: list[str] = HfArg(default_factory=list, help="As dataset, to evaluate on.")
    eval_split: str = HfArg(default="train", help="Split of eval_dataset.")
    eval_share: float = HfArg(
        default=0.0, help="Instead of eval_dataset: share of dataset to evaluate on, drawn; of few texts their ends."
    )
    too_long: str = HfArg(
        default="refuse", help="What is done with rows that are longer than max_length.", metadata={"choices": TOO_LONG}
    )
    group_rows: int = HfArg(
        default=1, help="Up to so many rows that begin alike are one sample, as questions on a document."
    )

    def __post_init__(self) -> None:
        self.dataset = sources("dataset", self.dataset)
        self.eval_dataset = sources("eval_dataset", self.eval_dataset) if self.eval_dataset else []
        if not 0 <= self.eval_share < 1:
            raise SystemExit(f"eval_share is {self.eval_share!r}; give a share from 0 to below 1, such as 0.05.")
        if self.eval_share and self.eval_dataset:
            raise SystemExit("eval_share and eval_dataset are both set; set one of them.")
        check_counts(self, {"group_rows": 1})
        if self.eval_split != "train" and not self.eval_dataset:
            raise SystemExit(f"eval_split is {self.eval_split!r} without eval_dataset; set eval_dataset too.")


@dataclass
class BurstSettings:
    """How sequences are shared by processes, and what is written at the end."""

    burst_size: int | None = HfArg(
        default=None, help="Processes that share a sequence; default HF_BURST_SIZE, else all."
    )
    burst: dict[str, Any] | str | None = HfArg(default=None, help="Settings of BurstConfig, such as {schedule: burst}.")
    merge_to: str | None = HfArg(
        default=None, help="With use_peft: folder for the full model, its adapters merged into it."
    )

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise SystemExit(f"burst_size is {self.size!r}; give a whole number of processes, at least 1.")
        self.burst = mapping("burst", self.burst)
        hf_burst.BurstConfig.from_dict(self.burst)

    @property
    def config(self) -> "hf_burst.BurstConfig":
        """For `patch_model`."""
        return hf_burst.BurstConfig.from_dict(self.burst)

    @property
    def size(self) -> int | None:
        """Processes that share a sequence; `None` for all."""
        return self.burst_size if self.burst_size is not None else size_from_env()

    @property
    def parallelism(self) -> "hf_burst.BurstParallelismConfig":
        """For `TrainingArguments(parallelism_config=...)`."""
        return hf_burst.BurstParallelismConfig(burst_size=self.size)


def check_counts(settings: Any, least: dict[str, int]) -> None:
    """Refuses settings that are no whole numbers, or smaller than they may be."""
    for name, smallest in least.items():
        if type(value := getattr(settings, name)) is not int or value < smallest:
            raise SystemExit(f"{name} is {value!r}; give a whole number, at least {smallest}.")


def sources(name: str, value: Any) -> list[str]:
    """Files, folders or a hub name, as a list."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(item and isinstance(item, str) for item in listed):
        raise SystemExit(f"{name} is {value!r}; give files, folders, a hub name or python_topics.")
    for item in listed:
        path, pattern = Path(item), set("*?[:") & set(item)  # or a URL
        file = path.suffix.lower() in (*TEXT_FILES, *TABLES)
        if (file or is_path(item)) and not pattern and not path.exists():
            kind = "" if file else "a folder "
            raise SystemExit(f"{name} has {item!r}, {kind}{'which' if file else 'that'} does not exist; {nearby(path)}")
        if not file and path.is_file():
            raise SystemExit(
                f"{name} has {item!r}, a file whose suffix tells no kind; a text is named such as {path.stem}.txt, and "
                f"other files {', '.join(TABLES)}."
            )
    return listed


def is_path(name: str) -> bool:
    """Whether a name is written as a path, and not as one of the hub, which has at most one slash in it."""
    return name.startswith(("/", "./", "../", "~")) or name.endswith("/") or name.count("/") > 1


def nearby(missing: Path) -> str:
    """The end of a sentence about a path that does not exist: what lies there under a similar name, or where one is."""
    there = {name: path for path in missing.parent.glob("*") for name in (path.stem, path.name)}
    near = get_close_matches(missing.name, there, 1, 0.75)
    return f"did you mean {there[near[0]]}?" if near else f"the current folder is {Path.cwd()}."


class RowError(ValueError):
    """Rows of which a recipe makes nothing, a line each."""


@contextmanager
def using(setting: str, *refusals: type[Exception]) -> Iterator[None]:
    """Where a library cannot use a setting, the end is a sentence that names it; so is that of more refusals."""
    try:
        yield
    except BurstError:  # which says what to do
        raise
    except (*REFUSALS, *refusals) as error:
        lines = str(error).splitlines() if isinstance(error, RowError) else [str(error)]
        said = "\n".join(shorten(line, 300, placeholder=" ...") for line in lines)
        raise SystemExit(f"{setting} cannot be used:{' ' if len(lines) == 1 else chr(10)}{said}") from None


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A setting that is a mapping: from YAML, from a file that it names, or written on the command line."""
    read = value
    if isinstance(value, str | Path):
        with using(f"{name} {str(value)!r}"):
            in_file = isinstance(value, Path) or Path(value).suffix in (".json", ".yaml", ".yml")
            load = json.loads if in_file and Path(value).suffix == ".json" else yaml.safe_load
            read = load(Path(value).read_text() if in_file else value)
    read = {} if read is None else read
    if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
        raise SystemExit(
            f"{name} is {str(value)!r}; it must be a mapping of names, such as {{name: value}}, or a .json, .yaml or "
            ".yml file that holds one."
        )
    return read


def check(model: ModelSettings, documents: DataSettings, burst: BurstSettings, training: Any, *_: Any) -> None:
    """Checks what is known before the processes are joined: the training arguments are a namespace."""
    if (length := training.max_length) < 2:
        raise SystemExit(f"max_length is {length!r}; give a whole number of tokens, at least 2.")
    batches = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
    check_counts(training, dict.fromkeys(batches, 1))
    rows = documents.eval_dataset or documents.eval_share
    if (strategy := training.eval_strategy) in ("steps", "epoch") and not rows:
        raise SystemExit(f"eval_strategy is {strategy!r}, but there are no rows for it; set eval_share.")
    if training.use_liger_kernel and find_spec(LIGER) is None:
        raise SystemExit("use_liger_kernel needs Liger: pip install liger-kernel")
    if (name := model.model_name_or_path) is not None and (Path(name) / "adapter_config.json").exists():
        raise SystemExit(f"model_name_or_path is {name!r}, an adapter. Merge it first: recipes/merge_adapter.py.")
    resuming.check(training.resume_from_checkpoint)
    probe("output_dir", training.output_dir)
    for kind in held_in(training.output_dir):
        if (kind == "an adapter") != model.use_peft:
            raise SystemExit(f"output_dir {training.output_dir!r} holds {kind} of another run; set another folder.")
    if burst.merge_to is not None and not model.use_peft:
        raise SystemExit("merge_to is set without use_peft; what is trained in full is a full model already.")
    if burst.merge_to is not None:
        probe_merged("merge_to", burst.merge_to, training.output_dir, model.model_name_or_path)
    check_groups(burst.burst_size)


def held_in(folder: str) -> list[str]:
    """What a folder holds of an earlier run."""
    kinds = {"adapter_config.json": "an adapter", "model.safetensors*": "a full model"}
    return [kind for pattern, kind in kinds.items() if any(Path(folder).glob(pattern))]


def prepare(
    training: "TrainingArguments", model: ModelSettings, documents: DataSettings, burst: BurstSettings, *more: Any
) -> dict[str, Any]:
    """Gives the training arguments the groups of processes and the checkpoint to resume from. `more` are further
    settings of the recipe.

    Returns:
        The settings that checkpoints remember.
    """
    import torch

    resuming.end_together(resuming.hold(training.output_dir) if training.process_index == 0 else None)
    if training.process_index == 0 and (warning := overruled(burst.burst_size)):
        print(f"WARNING: {warning}", file=sys.stderr)
    keep_time_limit(training)
    chosen = {name: value for each in (model, documents, *more) for name, value in asdict(each).items()}
    run = resuming.settings_of(training, chosen)
    training.resume_from_checkpoint = resuming.checkpoint(training, run)
    held = held_in(training.output_dir)
    if held and training.resume_from_checkpoint is None and training.process_index == 0:
        print(f"output_dir {training.output_dir!r} holds {held[0]} that was trained before; this run replaces it.")
    training.parallelism_config = burst.parallelism
    if training.n_gpu > 1:  # one process takes one GPU; Trainer would copy the model to the others
        training._n_gpu = 1
    training.use_liger_kernel &= torch.cuda.is_available() and not training.use_cpu  # its kernels are those of GPUs
    if training.use_liger_kernel:  # hf_burst has the loss of all ranks, fused by Liger too
        training.liger_kernel_config = {"fused_linear_cross_entropy": False, **(training.liger_kernel_config or {})}
    return run


def check_groups(size: int | None) -> None:
    """Refuses groups that do not divide the processes that a launcher has started, before the data is read. Their size
    is that of the variable if none is given."""
    name, way = (SIZE_VARIABLE, "Set it to") if size is None else ("burst_size", "Pass --burst_size")
    processes, size = int(os.environ.get("WORLD_SIZE", "0")), size_from_env() if size is None else size
    if size is not None and processes % size:
        fitting = max(smaller for smaller in range(1, size + 1) if processes % smaller == 0)
        raise SystemExit(
            f"{name} is {size}, which does not divide the processes that were launched: {processes}. {way} {fitting}."
        )


def overruled(size: int | None) -> str | None:
    """What is said of a variable that names another size of groups."""
    variable = os.environ.get(SIZE_VARIABLE)
    if size is None or variable in (None, "", str(size)):
        return None
    return f"burst_size is {size}, which overrules {SIZE_VARIABLE}={variable}. Pass --burst_size {variable} for that."


def keep_time_limit(training: "TrainingArguments") -> None:
    """Sets `ddp_timeout`, which Transformers passes over on CPUs."""
    import torch.distributed as dist

    from hf_burst.ranks.group import set_timeout

    if training.use_cpu and dist.is_initialized():
        set_timeout(timedelta(seconds=training.ddp_timeout))


def probe(name: str, folder: str) -> None:
    """Makes the folder, and fails where nothing can be written into it."""
    with using(f"{name} {folder!r}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def probe_merged(name: str, folder: str, adapter: str, base: str | None) -> None:
    """The same for a merged model. It may not lie beside an adapter, because Transformers would load both, nor replace
    the base, to which the adapter would then be added again."""
    if Path(folder).resolve() == Path(adapter).resolve() or (Path(folder) / "adapter_config.json").exists():
        raise SystemExit(f"{name} is {folder!r}, where an adapter is; set another folder.")
    if base is not None and Path(folder).resolve() == Path(base).resolve():
        raise SystemExit(f"{name} is {folder!r}, where the base of the adapter is; set another folder.")
    probe(name, folder)
    if any(Path(folder).glob("model.safetensors*")) and os.environ.get("RANK", "0") == "0":
        print(f"{name} {folder!r} holds a full model; the merged one replaces it.")


def end(joined: Any) -> None:
    """Ends the process group when all processes are done; the process then ends as any other does.

    Trackers such as W&B finish their runs when the interpreter ends. It must therefore end by itself, and nothing may
    hold on to the process group: threads of gloo that are left abort it.
    """
    joined.accelerator.wait_for_everyone()
    joined.accelerator.end_training()
    gc.collect()


def run(main: Callable[[list[str]], None]) -> None:
    """Runs a recipe; what is wrong with its settings, its data or its model ends it by one sentence."""
    try:
        main(sys.argv[1:])
    except (BurstError, StrictDataclassError, SystemExit) as error:
        sentence = error.code if isinstance(error, SystemExit) else str(error)
        if isinstance(sentence, str) and told_by_another(sentence):
            sentence = 1
        raise SystemExit(sentence) from None
    except KeyboardInterrupt:
        if not told_by_another("interrupted"):
            print("interrupted; the same command goes on from the last checkpoint, if one was saved", file=sys.stderr)
        raise SystemExit(130) from None


def told_by_another(sentence: str) -> bool:
    """Whether another process of this machine has said so. The sentence also goes into the launcher's report."""
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is None:
        return False
    message = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
    Path(file).write_text(json.dumps({"message": message}))
    try:
        (Path(file).parents[1] / f"told_{crc32(sentence.encode())}").touch(exist_ok=False)
    except FileExistsError:
        return True
    return False
