"""Fine-tunes a causal language model on documents that are longer than one process can hold.

Every sequence is sharded over the processes of a group; the stock Transformers `Trainer` does the rest. Settings come
from a YAML file, then from the command line; both take every field of `Recipe` below and of `TrainingArguments`.

Two CPU processes, a small Llama, Python's own documentation as the document:

    ACCELERATE_USE_CPU=1 accelerate launch --config_file recipes/configs/accelerate_2_processes.yaml \
        recipes/finetune_long_document.py --config recipes/configs/python_topics_cpu.yaml

Four GPUs, Llama-3.1-8B with LoRA on local text:

    accelerate launch --num_processes 4 recipes/finetune_long_document.py \
        --config recipes/configs/llama_8b_lora.yaml --dataset books/*.txt --output_dir outputs/books
"""

import json
import os
import pydoc_data.topics
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

import accelerate
import datasets
import matplotlib
import torch
import transformers
import yaml
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_burst
from hf_burst.errors import BurstError

REFUSALS = (OSError, ValueError, KeyError, yaml.YAMLError, DatasetsError, StrictDataclassError)  # of libraries
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
TEXTS = ("model", "tokenizer", "dataset_split", "text_column", "output_dir")  # settings that are nothing but text
SHORTEST = 256  # tokens that a remainder is padded to: enough chunks for 128 processes


@dataclass
class Recipe:
    """What `TrainingArguments` does not say."""

    model: str | None = field(default=None, metadata={"help": "Hub name or local folder of a causal language model."})
    model_config: str | None = field(
        default=None, metadata={"help": "Instead of model: a config (mapping, or JSON or YAML file) to make one from."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Hub name, folder, or 'bytes'; by default the model's."}
    )
    dtype: str = field(default="auto", metadata={"choices": DTYPES, "help": "Dtype to load the weights in."})
    dataset: list[str] = field(
        default_factory=lambda: ["python_topics"],
        metadata={"help": "Files (.txt, .md, .jsonl, .json, .parquet, .csv), a hub name, or 'python_topics'."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the documents."})
    sequence_length: int = field(default=16384, metadata={"help": "Tokens of a sequence, over all its processes."})
    rope_scaling: str | None = field(
        default=None, metadata={"help": "RoPE parameters to set, such as {rope_type: yarn, factor: 4.0}."}
    )
    lora_rank: int = field(default=0, metadata={"help": "Rank of LoRA on all linear layers; 0 trains every weight."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of LoRA."})
    burst_size: int | None = field(
        default=None, metadata={"help": "Processes that share a sequence; default HF_BURST_SIZE, else all."}
    )
    burst: str | None = field(default=None, metadata={"help": "Settings of BurstConfig, such as {schedule: burst}."})

    def __post_init__(self) -> None:
        """Checks what needs neither data nor a model, before the processes meet."""
        for name in ("model_config", "rope_scaling", "burst"):
            setattr(self, name, mapping(name, getattr(self, name)))
        hf_burst.BurstConfig.from_dict(self.burst)
        for name, least in (("sequence_length", 2), ("lora_rank", 0)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise SystemExit(f"{name} is {value!r}; give a whole number, at least {least}.")
        sources = [self.dataset] if isinstance(self.dataset, str) else self.dataset
        if not isinstance(sources, list) or not sources or not all(each and isinstance(each, str) for each in sources):
            raise SystemExit(f"dataset is {self.dataset!r}; give files of text, a folder, a hub name or python_topics.")
        self.dataset = sources


@contextmanager
def using(setting: str) -> Iterator[None]:
    """Where a library cannot use a setting, the end is a sentence that names it."""
    try:
        yield
    except REFUSALS as error:
        reason = (isinstance(error, DatasetsError) and error.__cause__) or error  # theirs says only that there was one
        raise SystemExit(f"{setting} cannot be used: {shorten(str(reason), 300, placeholder=' ...')}") from None


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A setting that is a mapping: from YAML, from a file that it names, or written on the command line."""
    found = value
    if isinstance(value, str | Path):
        with using(f"{name} {str(value)!r}"):
            in_file = isinstance(value, Path) or Path(value).suffix in (".json", ".yaml", ".yml")
            found = yaml.safe_load(Path(value).read_text() if in_file else value)
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise SystemExit(
            f"{name} is {str(value)!r}; it must be a mapping of names, such as {{name: value}}, or a .json, .yaml or "
            ".yml file that holds one."
        )
    return found


def parse(arguments: list[str]) -> tuple[Recipe, TrainingArguments]:
    """The YAML file that `--config` names gives the defaults of the command line."""
    parser = HfArgumentParser((Recipe, TrainingArguments), usage="%(prog)s [--config FILE] [--SETTING VALUE ...]")
    known = {action.dest: action for action in parser._actions if action.dest != "help"}
    more = "YAML file of settings; of several, later ones overrule, and the command line overrules all."
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help=more)
    for file in parser.parse_args(arguments).config:
        values = mapping("--config", file)
        if unknown := sorted(set(values) - set(known)):
            raise SystemExit(f"{file}: no setting is called {', '.join(unknown)}; see --help.")
        for name, value in values.items():
            if name in TEXTS and not isinstance(value, str | None):
                raise SystemExit(f"{file}: {name} is {value!r}; give text, a number in quotes.")
            if (choices := known[name].choices) and value not in (None, *choices):
                raise SystemExit(f"{file}: {name} is {value!r}; it must be one of {', '.join(map(repr, choices))}.")
        parser.set_defaults(**values)
    try:
        recipe, training, _ = parser.parse_args_into_dataclasses(arguments)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    return recipe, training


def load_documents(recipe: Recipe) -> datasets.Dataset:
    """One document a row, in `text_column`."""
    sources = recipe.dataset
    if sources == ["python_topics"]:
        return datasets.Dataset.from_dict({recipe.text_column: ["\n\n".join(pydoc_data.topics.topics.values())]})
    kinds = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
    found = {kinds.get(Path(source).suffix) for source in sources}
    if len(found) > 1:
        raise SystemExit(f"dataset {sources} mixes kinds of files; give files of one kind ({', '.join(kinds)}).")
    kind = found.pop()
    options = {"sample_by": "document"} if kind == "text" else {}
    with using(f"dataset {sources}"):
        if kind is None:
            documents = datasets.load_dataset(*sources, split=recipe.dataset_split)
        else:
            documents = datasets.load_dataset(kind, data_files=sources, split="train", **options)
    if recipe.text_column not in documents.column_names:
        raise SystemExit(f"No column {recipe.text_column!r} in {documents.column_names}: set text_column.")
    values = documents.features[recipe.text_column]
    if getattr(values, "dtype", None) not in ("string", "large_string", "string_view", "null"):
        raise SystemExit(f"text_column {recipe.text_column!r} of dataset {sources} holds {values}; it must hold text.")
    return documents


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    name = recipe.tokenizer or recipe.model
    if name is None:
        raise SystemExit("A model made from a config has no tokenizer of its own: set tokenizer, for example to bytes.")
    with using(f"tokenizer {name!r}"):
        return ByT5Tokenizer(extra_ids=0) if name == "bytes" else AutoTokenizer.from_pretrained(name)


def pack(rows: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, column: str, length: int) -> dict[str, Any]:
    """Cuts the stream of all documents into sequences; a document sees nothing before it starts. Nothing is dropped
    but a single last token, which predicts nothing."""
    documents = [tokenizer(text)["input_ids"] for text in rows[column] if text]
    documents = [document for document in documents if document]
    tokens = list(chain.from_iterable(documents))
    starts = set()
    position = 0
    for document in documents:
        starts.add(position)
        position += len(document)
    sequences: dict[str, Any] = {"input_ids": [], "position_ids": [], "labels": []}
    for first in range(0, len(tokens) - 1, length):
        piece = tokens[first : first + length]
        offset, positions, labels = 0, [], list(piece)
        for index in range(len(piece)):
            if first + index in starts:  # the end of one document does not predict the start of another
                offset, labels[index] = index, -100
            positions.append(index - offset)
        sequences["input_ids"].append(piece)
        sequences["position_ids"].append(positions)
        sequences["labels"].append(labels)
    return sequences


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Stacks sequences; shorter ones are padded on the right, the padding being a document of its own."""
    longest = max(SHORTEST, *(len(row["input_ids"]) for row in rows))
    batch: dict[str, list[list[int]]] = {"input_ids": [], "position_ids": [], "labels": []}
    for row in rows:
        missing = longest - len(row["input_ids"])
        batch["input_ids"].append(row["input_ids"] + [0] * missing)
        batch["position_ids"].append(row["position_ids"] + list(range(missing)))
        batch["labels"].append(row["labels"] + [-100] * missing)
    return {key: torch.tensor(value) for key, value in batch.items()}


def load_config(recipe: Recipe, vocabulary: int) -> PreTrainedConfig:
    """The config of the model, with the RoPE parameters that are set."""
    if recipe.model is None:
        settings = {"vocab_size": vocabulary, **recipe.model_config}
        kind = settings.pop("model_type", None)
        if kind not in list(CONFIG_MAPPING):
            raise SystemExit(
                f"model_config has the model_type {kind!r}; give one that Transformers has, such as llama, or set "
                "model instead of model_config."
            )
        with using(f"model_config {recipe.model_config}"):
            config = AutoConfig.for_model(kind, **settings)
    else:
        with using(f"model {recipe.model!r}"):
            config = AutoConfig.from_pretrained(recipe.model)
    kind = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SystemExit(f"The model is a {kind}, of which Transformers has no causal language model; set another one.")
    scaling = dict(recipe.rope_scaling)
    if scaling:
        if "type" in scaling:  # as it was called
            scaling.setdefault("rope_type", scaling.pop("type"))
        parameters = getattr(config, "rope_parameters", None)
        if parameters is None:
            raise SystemExit(f"rope_scaling is set, but a {kind} has no RoPE parameters; leave it out.")
        parameters = {**parameters, **scaling}
        found, allowed = parameters.get("rope_type", "default"), ["default", *ROPE_INIT_FUNCTIONS]
        if found not in allowed:
            raise SystemExit(f"rope_scaling has the rope_type {found!r}; it must be one of {', '.join(allowed)}.")
        with using(f"rope_scaling {recipe.rope_scaling}"):
            config.rope_parameters = parameters
            config.standardize_rope_params()
            config.validate_rope()
    return config


def load_model(recipe: Recipe, config: PreTrainedConfig, burst: hf_burst.BurstConfig) -> torch.nn.Module:
    """The model, patched: this is the one line that hf_burst needs."""
    if recipe.model is None:
        with using(f"model_config {recipe.model_config}"):
            model = AutoModelForCausalLM.from_config(config, dtype=None if recipe.dtype == "auto" else recipe.dtype)
    else:
        with using(f"model {recipe.model!r}"):
            model = AutoModelForCausalLM.from_pretrained(recipe.model, config=config, dtype=recipe.dtype)
    hf_burst.patch_model(model, burst)
    if recipe.lora_rank:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=recipe.lora_rank, lora_alpha=recipe.lora_alpha, target_modules="all-linear")
        model = get_peft_model(model, adapter)
    return model


class LongTrainer(Trainer):
    """The stock Trainer, whose log also says how fast it goes and how much memory it takes."""

    seen, since = 0, 0.0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            now, tokens = time.perf_counter(), self.state.num_input_tokens_seen
            if self.since:
                logs["tokens_per_second"] = round((tokens - self.seen) / (now - self.since), 1)
            self.seen, self.since = tokens, now
            if torch.cuda.is_available():
                logs["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            else:  # the peak of this process: ru_maxrss counts KiB, on macOS bytes
                unit = 2**30 if sys.platform == "darwin" else 2**20
                logs["memory_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 2)
        super().log(logs, start_time)


def report(trainer: Trainer, recipe: Recipe, processes: int) -> None:
    """Writes the log, with what it was made by, and a picture of the loss beside the checkpoint."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    folder = Path(trainer.args.output_dir)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    if not steps:
        print(f"checkpoint in {folder}; no step was logged (logging_steps is {trainer.args.logging_steps})")
        return
    made_by = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "processes": trainer.accelerator.num_processes,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, accelerate, hf_burst)},
    }
    lines = ",\n  ".join(json.dumps(entry) for entry in steps)  # a line a step
    log = json.dumps({**made_by, "steps": []}, indent=1).replace('"steps": []', f'"steps": [\n  {lines}\n ]')
    (folder / "training_log.json").write_text(log + "\n")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([entry["step"] for entry in steps], [entry["loss"] for entry in steps], marker=".")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.set_title(f"{recipe.sequence_length:,} tokens a sequence, sharded over {processes} processes")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=150)
    print(f"loss {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f}; checkpoint, loss.png and log are in {folder}")


def make_trainer(recipe: Recipe, training: TrainingArguments) -> Trainer:
    """The model, the data and all that was set."""
    from_environment = hf_burst.BurstParallelismConfig.from_env()
    training.parallelism_config = (
        from_environment if recipe.burst_size is None else hf_burst.BurstParallelismConfig(burst_size=recipe.burst_size)
    )
    burst = hf_burst.BurstConfig.from_dict(recipe.burst)
    resume = training.resume_from_checkpoint
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise SystemExit(f"resume_from_checkpoint is {resume!r}; give the folder of a checkpoint.")
    with using(f"output_dir {training.output_dir!r}"):
        Path(training.output_dir).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=training.output_dir).close()  # fails where nothing can be written
    if training.use_liger_kernel:  # hf_burst has the loss of all ranks, fused by Liger too
        training.liger_kernel_config = {"fused_linear_cross_entropy": False, **(training.liger_kernel_config or {})}
    training.include_num_input_tokens_seen = "all"
    training.remove_unused_columns = False
    set_seed(training.seed)
    tokenizer = load_tokenizer(recipe)
    config = load_config(recipe, len(tokenizer))
    documents = load_documents(recipe)
    with training.main_process_first(desc="tokenising"):
        sequences = documents.map(
            pack,
            batched=True,
            batch_size=1000,
            remove_columns=documents.column_names,
            fn_kwargs={"tokenizer": tokenizer, "column": recipe.text_column, "length": recipe.sequence_length},
        )
    if len(sequences) == 0:
        raise SystemExit(f"dataset {recipe.dataset} holds no text in the column {recipe.text_column!r}.")
    return LongTrainer(
        model=load_model(recipe, config, burst),
        args=training,
        train_dataset=sequences,
        data_collator=hf_burst.BurstCollator(collate, config=burst),
        processing_class=tokenizer,
    )


def finetune(recipe: Recipe, trainer: Trainer) -> None:
    """Trains, and writes the checkpoint and its log."""
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        report(trainer, recipe, trainer.accelerator.parallelism_config.burst_size)
    trainer.accelerator.wait_for_everyone()
    if trainer.args.use_cpu:  # all is written; gloo's threads now and then abort an interpreter that shuts down
        sys.stdout.flush()
        os._exit(0)


def main() -> None:
    try:
        recipe, training = parse(sys.argv[1:])
        try:
            trainer = make_trainer(recipe, training)
        except OSError as error:  # later ones are no setting's
            raise SystemExit(str(error)) from None
        finetune(recipe, trainer)
    except BurstError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
