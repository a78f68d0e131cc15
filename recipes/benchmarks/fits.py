"""Does a step fit, in the memory that the plan promises? Trains some steps as a user does: accelerate and `Trainer`.

    python recipes/benchmarks/fits.py --model llama-3-8b --weights lora --out outputs/fits.json
    accelerate launch --config_file recipes/configs/accelerate_fsdp2.yaml --num_processes 2 \\
        recipes/benchmarks/fits.py --model llama-3-8b --length 65536 --document 0 --out outputs/fits.json
    python recipes/benchmarks/fits.py --model llama-3-8b --weights lora --steps 0  # only the promise, for this GPU

Without `--length` the sequence is the longest that `hf-burst plan` promises for these GPUs. A result has for every step
the peaks of torch's allocator, and of all that is taken of the GPU, as a thread sees it that asks the driver every 20
milliseconds: what kernels take while they are tuned is in it. Each run adds a row to the file `--out`.
"""

import argparse
import ast
import json
import logging
import os
import resource
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import hf_burst
from hf_burst.hf.groups import PATCH
from hf_burst.hf.models.model_size import model_size
from hf_burst.hf.parts.memory import MemoryRule
from hf_burst.layers.host_limits import share_of_host
from hf_burst.plan.memory_levels import SETTINGS
from hf_burst.sizing import shapes
from hf_burst.sizing.gpus import Capacity, capacity_of, gpu_named
from hf_burst.sizing.memory_rule import Fit, fit, longest
from hf_burst.sizing.model import Training
from recipes.benchmarks.provenance import SCHEMA_VERSION, git_commit, hardware, versions
from recipes.benchmarks.training_job import TINY, quantise

GIB = 2**30
SHAPES = {**shapes.SHAPES, "tiny": TINY}
OUTSIDE = 2.1  # GiB that CUDA and NCCL were measured to take on two H200s, beside symmetric buffers
# sizes of a config on which no buffer depends
FEW = ("vocab_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_experts")


class Watcher(threading.Thread):
    """Asks the driver what is taken of a GPU, until it is told to stop."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(daemon=True)
        self.device, self.most, self.beside, self.done = device, 0, 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.02):
            reserved = torch.cuda.memory_reserved(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            self.most = max(self.most, total - free)
            self.beside = max(self.beside, total - free - max(reserved, torch.cuda.memory_reserved(self.device)))


class Measure(TrainerCallback):
    """Notes the peaks of every step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps, self.start = device, list[dict[str, Any]](), 0.0
        self.watcher = Watcher(device) if device.type == "cuda" else None
        if self.watcher is not None:
            self.watcher.start()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.watcher is not None:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.watcher.most = self.watcher.beside = 0
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        own: dict[str, Any] = {"host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
        if self.watcher is not None:
            torch.cuda.synchronize(self.device)
            stats = torch.cuda.memory_stats(self.device)
            own |= {
                "allocated_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
                "reserved_gib": torch.cuda.max_memory_reserved(self.device) / GIB,
                "taken_gib": self.watcher.most / GIB,
                "beside_torch_gib": self.watcher.beside / GIB,
                "retries": stats["num_alloc_retries"],
                "short": stats["num_ooms"],
            }
        self.steps.append({"seconds": time.perf_counter() - self.start, **own})
        say(" ".join(f"{name} {value:.2f}" for name, value in self.steps[-1].items()))

    def end(self) -> None:
        """Ends the thread: one that came back from the driver after Python has ended would abort the process."""
        if self.watcher is not None:
            self.watcher.done.set()
            self.watcher.join()


def targets(text: str) -> str | list[str]:
    """The modules that get adapters. With Liger, peft cannot adapt fused experts, which "all-linear" has among them."""
    return text if text == "all-linear" else text.split(",")


def say(text: str) -> None:
    """Prints on the first rank, at once."""
    if not int(os.environ.get("RANK", "0")):
        print(text, flush=True)


def config_of(arguments: argparse.Namespace, length: int = 4096) -> Any:
    """The config of the model that is named."""
    changes: dict[str, Any] = {"max_position_embeddings": max(length, 4096)}
    if arguments.layers is not None:
        changes["num_hidden_layers"] = arguments.layers
    return AutoConfig.for_model(**{**SHAPES[arguments.model], **changes})


def make_model(arguments: argparse.Namespace, length: int, device: torch.device) -> PreTrainedModel:
    """A model whose weights repeat some random numbers: made on the CPU in seconds, as if they were loaded. Weights
    that learn are in fp32, as accelerate's mixed precision wants them, frozen ones in bf16, or in 4 bits."""
    config = config_of(arguments, length)
    dtype = torch.float32 if arguments.weights == "all" else torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        known = {id(buffer): name for name, buffer in model.named_buffers()}
    few = {name: min(value, 8) for name, value in vars(config).items() if name in FEW and isinstance(value, int)}
    buffers_alike = AutoConfig.for_model(**{**SHAPES[arguments.model], **few})
    small = AutoModelForCausalLM.from_config(buffers_alike)
    noise = (torch.randn(2**22 + 1, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    for layer in model.model.layers:
        fill(layer, noise)
        if arguments.weights == "qlora":
            quantise_layer(layer.to(device))
    fill(model, noise)
    for module in model.modules():  # what is computed, and not stored: frequencies, scales
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = small.get_buffer(known[id(buffer)]).clone()
    model.tie_weights()
    model.is_loaded_in_4bit = arguments.weights == "qlora"
    return model


def quantise_layer(layer: nn.Module) -> None:
    """Puts the weights of one layer into 4 bits."""
    holder, holder.model = nn.Module(), nn.Module()
    holder.model.layers = nn.ModuleList([layer])
    quantise(holder)  # type: ignore[arg-type]


def fill(module: nn.Module, noise: torch.Tensor) -> None:
    """Gives weights that have no memory some: ones for norms, zeros for biases, and for matrices `noise` again and
    again."""
    for owner in module.modules():
        for key, weight in list(owner._parameters.items()):
            if weight is None or not weight.is_meta:
                continue
            fresh = torch.empty(weight.shape, dtype=weight.dtype)
            if weight.dim() < 2:
                fresh.fill_(float("bias" not in key))
            else:
                for part in fresh.view(-1).split(len(noise)):
                    part.copy_(noise[: len(part)])
            owner._parameters[key] = nn.Parameter(fresh, requires_grad=weight.requires_grad)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The same sequence for every step, packed of documents of one size, or whole."""

    def __init__(self, length: int, document: int, vocabulary: int, steps: int) -> None:
        tokens = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(length))
        positions = torch.arange(length) % (document or length)
        self.row, self.steps = {"input_ids": tokens, "labels": tokens, "position_ids": positions}, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.row


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def promised(arguments: argparse.Namespace, gpus: int) -> tuple[int, Fit]:
    """The longest sequence by the plan, unless one is named, and what the plan says of it."""
    config = config_of(arguments)
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    model = model_size(kind, config, arguments.model)
    capacity = capacity_of(gpu_named(arguments.machine), ranks_per_host=gpus)
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        free = arguments.gpu_memory or torch.cuda.mem_get_info(device)[1] / GIB
        capacity = Capacity(int(free * GIB), share_of_host(device), gpus)
    weights: Any = {"all": "fp32", "lora": "fp32", "qlora": "4bit"}[arguments.weights]
    lora = 0 if arguments.weights == "all" else 16
    expandable = expandable_segments()
    training = Training(1, gpus, gpus, weights=weights, lora=lora, expandable_segments=expandable)
    most = arguments.length or longest(model, training, capacity)
    documents = (*range(0, most, arguments.document), most) if arguments.document else ()
    how = Training(most, gpus, gpus, documents, weights=weights, lora=lora, expandable_segments=expandable)
    return most, fit(model, how, capacity)


def expandable_segments() -> bool:
    """Whether torch's allocator was asked for expandable segments."""
    return "expandable_segments:true" in os.environ.get("PYTORCH_ALLOC_CONF", "").lower()


def make_trainer(arguments: argparse.Namespace, length: int, measure: Measure, args: TrainingArguments) -> Trainer:
    """A trainer as users make it."""
    model: Any = make_model(arguments, length, args.device)
    if arguments.weights != "all":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules=arguments.targets))
    if arguments.contender == "hf_burst":
        hf_burst.patch_model(model, hf_burst.BurstConfig.from_dict(arguments.settings))
    rows = Rows(length, arguments.document, model.config.get_text_config().vocab_size, arguments.steps)
    if arguments.contender == "trl":
        return trl_trainer(model, args, rows, measure)
    return Trainer(model, args, train_dataset=rows, data_collator=collate, callbacks=[measure])


def trl_trainer(model: Any, args: TrainingArguments, rows: Rows, measure: Measure) -> Trainer:
    """The trainer of TRL's guide to long contexts: its own loss some tokens at a time, its collator."""
    from datasets import Dataset as Table
    from trl import SFTTrainer

    from recipes.byte_tokenizer import byte_tokenizer

    table = Table.from_dict({"input_ids": [rows.row["input_ids"].tolist()] * len(rows)})
    return SFTTrainer(model, args, train_dataset=table, processing_class=byte_tokenizer(), callbacks=[measure])


def training_arguments(arguments: argparse.Namespace, gpus: int) -> TrainingArguments:
    """The settings of the trainer: bf16, every layer checkpointed, Liger's kernels, AdamW. TRL's guide has no Liger,
    and keeps the inputs of layers on the host."""
    if arguments.contender == "hf_burst":
        shared: Any = hf_burst.BurstParallelismConfig() if gpus > 1 else None
    else:
        from accelerate import ParallelismConfig

        shared = ParallelismConfig(cp_size=gpus) if gpus > 1 else None
    fused, kind, more = arguments.contender != "hf_burst", TrainingArguments, dict[str, Any]()
    trl = arguments.contender == "trl"
    if trl:
        import trl as library

        kind, more = library.SFTConfig, {"max_length": arguments.length, "pad_to_multiple_of": 2 * gpus}
    return kind(
        output_dir=arguments.folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=1,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"offload": True} if trl else {"use_reentrant": False},
        use_liger_kernel=torch.cuda.is_available() and not trl,
        liger_kernel_config={"fused_linear_cross_entropy": fused, "cross_entropy": False},
        learning_rate=1e-6,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        parallelism_config=shared,
        **more,
    )


def described(choice: Fit) -> dict[str, Any]:
    """A prediction, in GiB."""
    takes = choice.memory
    parts = {name: round(value / GIB, 2) for name, value in takes.items.items() if value}
    return {
        "fits": choice.fits,
        "settings": {name: getattr(choice.training, name) for name in SETTINGS},
        "tensors_gib": takes.tensors / GIB,
        "taken_gib": takes.total / GIB,
        "host_gib": takes.host / GIB,
        "moment": takes.moment,
        "parts": parts,
    }


def chosen_of(model: Any) -> dict[str, Any] | None:
    """What a patched model chose for its last step."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    parts = [part for part in getattr(inner, PATCH).parts if isinstance(part, MemoryRule)]
    if not parts or parts[0].latest is None:
        return None
    return {"settings": asdict(parts[0].latest.settings), "expandable_segments": parts[0].expandable}


def main() -> None:
    """Trains, and writes a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=SHAPES)
    parser.add_argument("--layers", type=int, help="(default those of the shape)")
    parser.add_argument("--weights", choices=("all", "lora", "qlora"), default="all", help="(default %(default)s)")
    parser.add_argument("--targets", type=targets, default="all-linear", help="of adapters, such as q_proj,v_proj")
    parser.add_argument("--length", type=int, help="tokens (default the longest that the plan promises)")
    parser.add_argument("--document", type=int, default=4096, help="tokens of a packed document, 0 for one")
    parser.add_argument("--steps", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--settings", type=ast.literal_eval, default={}, help="of BurstConfig, as a dictionary")
    parser.add_argument("--contender", choices=("hf_burst", "stock", "trl"), default="hf_burst")
    parser.add_argument("--machine", default="h100", help="whose promise is asked for where there is no GPU")
    smaller = f"GiB: as on a smaller GPU, {OUTSIDE:g} GiB of which are taken outside of torch's allocator"
    parser.add_argument("--gpu-memory", type=float, help=smaller)
    parser.add_argument("--folder", default="outputs/fits", help="of the trainer")
    parser.add_argument("--out", type=Path, help="a JSON file, to which the row is added")
    parser.add_argument("--commit", help="of the measured code, where there is no checkout")
    arguments = parser.parse_args()
    if arguments.contender == "trl" and arguments.length is None:
        parser.error("--contender trl needs --length, as max_length")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_burst").setLevel(logging.INFO)
    gpus = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.gpu_memory is not None:
        as_on_a_smaller_gpu(arguments.gpu_memory)
    length, promise = promised(arguments, gpus)
    row: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "command": " ".join(sys.argv),
        "git_commit": arguments.commit or git_commit(Path(__file__).parent),
        "model": arguments.model,
        "layers": arguments.layers,
        "weights": arguments.weights,
        "targets": arguments.targets,
        "contender": arguments.contender,
        "length": length,
        "document": arguments.document,
        "expandable_segments": expandable_segments(),
        "gpu_memory_gib": arguments.gpu_memory,
        "promised": described(promise),
    }
    say(json.dumps(row["promised"]))
    if arguments.steps:
        row |= run(arguments, length, gpus)
    if arguments.out is not None and not int(os.environ.get("RANK", "0")):
        rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps([*rows, row], indent=1) + "\n")


def as_on_a_smaller_gpu(memory_gib: float) -> None:
    """Has torch's allocator find as much memory as on a GPU with so many GiB."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction((memory_gib - OUTSIDE) * GIB / total, device)


def run(arguments: argparse.Namespace, length: int, gpus: int) -> dict[str, Any]:
    """Trains some steps, and tells what they took, or how they ended."""
    args = training_arguments(arguments, gpus)
    start, measure, status, reason, chosen = time.perf_counter(), Measure(args.device), "ok", None, None
    try:
        trainer = make_trainer(arguments, length, measure, args)
        say(f"made after {time.perf_counter() - start:.0f} s")
        trainer.train()
        chosen = (
            chosen_of(trainer.accelerator.unwrap_model(trainer.model)) if arguments.contender == "hf_burst" else None
        )
    except Exception as problem:  # whatever ends it is a result
        status, reason = "failed", f"{type(problem).__name__}: {str(problem)[:600]}"
        print(f"rank {args.process_index}: {reason}", flush=True)  # the others may wait for ever
    measure.end()
    about = {"hardware": hardware(args.device, gpus, 1), "versions": versions(cuda=args.device.type == "cuda")}
    if dist.is_initialized() and status == "ok":
        every: list[Any] = [None] * gpus
        dist.all_gather_object(every, measure.steps)
        measure.steps = [
            {name: max(each[name] for each in steps) for name in steps[0]} for steps in zip(*every, strict=True)
        ]
    return about | {"status": status, "reason": reason, "chosen": chosen, "steps": measure.steps}


if __name__ == "__main__":
    main()
