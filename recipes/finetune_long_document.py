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

import argparse
import json
import os
import pydoc_data.topics
import resource
import sys
import time
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import accelerate
import datasets
import matplotlib
import torch
import transformers
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

import hf_burst

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
    dtype: str = field(default="auto", metadata={"help": "Dtype to load the weights in: auto, float32, bfloat16."})
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


def parse(arguments: list[str]) -> tuple[Recipe, TrainingArguments]:
    """The YAML file that `--config` names gives the defaults of the command line."""
    parser = HfArgumentParser((Recipe, TrainingArguments))
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path, action="append", default=[])
    files, arguments = first.parse_known_args(arguments)
    for file in files.config:  # of several files, later ones overrule
        values = yaml.safe_load(file.read_text()) or {}
        known = {action.dest for action in parser._actions}
        if unknown := sorted(set(values) - known):
            raise SystemExit(f"{file}: no setting is called {', '.join(unknown)}; see --help.")
        parser.set_defaults(**values)
    recipe, training = parser.parse_args_into_dataclasses(arguments)
    return recipe, training


def mapping(value: Any) -> dict[str, Any]:
    """A setting that is a mapping: from YAML, from a file that it names, or written on the command line."""
    if isinstance(value, str):
        value = yaml.safe_load(Path(value).read_text() if Path(value).suffix in (".json", ".yaml", ".yml") else value)
    return dict(value or {})


def load_documents(recipe: Recipe) -> datasets.Dataset:
    """One document a row, in `text_column`."""
    sources = [recipe.dataset] if isinstance(recipe.dataset, str) else recipe.dataset
    if sources == ["python_topics"]:
        return datasets.Dataset.from_dict({recipe.text_column: ["\n\n".join(pydoc_data.topics.topics.values())]})
    kinds = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
    found = {kinds.get(Path(source).suffix) for source in sources}
    if len(found) > 1:
        raise SystemExit(f"dataset {sources} mixes kinds of files; give files of one kind ({', '.join(kinds)}).")
    kind = found.pop()
    if kind is None:
        return datasets.load_dataset(*sources, split=recipe.dataset_split)
    options = {"sample_by": "document"} if kind == "text" else {}
    return datasets.load_dataset(kind, data_files=sources, split="train", **options)


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    name = recipe.tokenizer or recipe.model
    if name is None:
        raise SystemExit("A model made from a config has no tokenizer of its own: set tokenizer, for example to bytes.")
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


def load_model(recipe: Recipe, vocabulary: int, burst: hf_burst.BurstConfig) -> torch.nn.Module:
    """The model, patched: this is the one line that hf_burst needs."""
    scaling = mapping(recipe.rope_scaling)
    if recipe.model is None:
        settings = {"vocab_size": vocabulary, **mapping(recipe.model_config)}
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    else:
        config = AutoConfig.from_pretrained(recipe.model)
    if scaling:
        config.rope_parameters = {**(config.rope_parameters or {}), **scaling}
    if recipe.model is None:
        model = AutoModelForCausalLM.from_config(config, dtype=None if recipe.dtype == "auto" else recipe.dtype)
    else:
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


def main() -> None:
    recipe, training = parse(sys.argv[1:])
    from_environment = hf_burst.BurstParallelismConfig.from_env()
    training.parallelism_config = (
        from_environment if recipe.burst_size is None else hf_burst.BurstParallelismConfig(burst_size=recipe.burst_size)
    )
    burst = hf_burst.BurstConfig.from_dict(mapping(recipe.burst))
    if not isinstance(recipe.sequence_length, int) or recipe.sequence_length < 2:
        raise ValueError(f"sequence_length is {recipe.sequence_length!r}; give a number of tokens, at least 2.")
    if training.use_liger_kernel:  # hf_burst has the loss of all ranks, fused by Liger too
        training.liger_kernel_config = {"fused_linear_cross_entropy": False, **(training.liger_kernel_config or {})}
    training.include_num_input_tokens_seen = "all"
    training.remove_unused_columns = False
    set_seed(training.seed)
    tokenizer = load_tokenizer(recipe)
    documents = load_documents(recipe)
    if recipe.text_column not in documents.column_names:
        raise SystemExit(f"No column {recipe.text_column!r} in {documents.column_names}: set text_column.")
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
    trainer = LongTrainer(
        model=load_model(recipe, len(tokenizer), burst),
        args=training,
        train_dataset=sequences,
        data_collator=hf_burst.BurstCollator(collate, config=burst),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        report(trainer, recipe, trainer.accelerator.parallelism_config.burst_size)
    trainer.accelerator.wait_for_everyone()
    if training.use_cpu:  # all is written; gloo's threads now and then abort an interpreter that shuts down
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
