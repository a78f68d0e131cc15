"""Does a step fit, with the memory that the plan promises? Trains some steps as a user does: accelerate, `Trainer`.

    python recipes/benchmarks/fits.py --model llama-3-8b --weights lora --out outputs/fits.json
    accelerate launch --config_file recipes/configs/accelerate_fsdp2.yaml --num_processes 2 recipes/benchmarks/fits.py \\
        --model llama-3-8b --weights all --length 65536 --document 0 --out outputs/fits.json
    python recipes/benchmarks/fits.py --model llama-3-8b --weights lora --list    # what the plan promises, on this GPU

Without `--length` the sequence is the longest that `hf-burst plan` promises for these GPUs. A result has for every step
the peaks of torch's allocator, and of all that is taken of the GPU, as a thread sees it that asks the driver every 20
milliseconds: what kernels take while they are tuned is in it. Each run is a row of the file `--out`.
"""

import argparse
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import hf_burst
from hf_burst.hf.model_size import model_size, shape_named
from hf_burst.plan import SHAPES, Training, estimate_memory, longest
from hf_burst.plan.machine import by_data_sheet, data_sheet
from recipes.benchmarks.provenance import environment
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.training_job import quantise

GIB = 2**30
# shapes of checkpoints that the plan has no name for: their sizes as their config.json has them
MORE: dict[str, dict[str, Any]] = {
    "llama-3.2-3b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "gemma-3-12b": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}


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


def say(text: str) -> None:
    """Prints on the first rank, at once."""
    if not int(os.environ.get("RANK", "0")):
        print(text, flush=True)


def make_model(name: str, weights: str, dtype: torch.dtype, longest: int, layers: int | None) -> PreTrainedModel:
    """A model with weights that repeat some random numbers: made in seconds on a CPU, as if they were loaded."""
    sizes = SHAPES.get(name) or MORE[name]
    changes = {} if layers is None else {"num_hidden_layers": layers}
    config = AutoConfig.for_model(**{**sizes, **changes}, max_position_embeddings=max(longest, 4096))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(2**22 + 1, generator=generator) * 0.02).to(dtype)
    with torch.device("meta"):
        layers_of = model.model.layers
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for layer in layers_of:
        fill(layer, noise)
        if weights == "qlora":
            layer.to(device)
            quantise_one(layer)
    fill(model, noise)
    model.tie_weights()
    for module in model.modules():  # what is computed, and not stored: frequencies
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                fresh = type(module)(config).to("cpu") if "Rotary" in type(module).__name__ else None
                module._buffers[key] = fresh._buffers[key] if fresh is not None else torch.ones(buffer.shape)
    if weights == "qlora":
        model.is_loaded_in_4bit = True
    return model.to(device) if weights == "qlora" else model


def quantise_one(layer: nn.Module) -> None:
    """Puts the weights of one layer into 4 bits."""

    class _Model:
        model = nn.Module()

    holder = _Model()
    holder.model.layers = nn.ModuleList([layer])
    quantise(holder)  # type: ignore[arg-type]


def fill(module: nn.Module, noise: torch.Tensor) -> None:
    """Gives weights that have no memory some: norms ones, biases zeros, matrices the numbers of `noise` again and
    again."""
    for owner in module.modules():
        for key, weight in list(owner._parameters.items()):
            if weight is None or not weight.is_meta:
                continue
            fresh = torch.empty(weight.shape, dtype=weight.dtype)
            flat = fresh.view(-1)
            if weight.dim() < 2:
                flat.fill_(0.0 if "bias" in key or "log" in key else 1.0)
            else:
                for part in flat.split(len(noise)):
                    part.copy_(noise[: len(part)])
            owner._parameters[key] = nn.Parameter(fresh, requires_grad=weight.requires_grad)


def rows(length: int, document: int, vocabulary: int) -> Iterator[dict[str, list[int]]]:
    """One sequence, packed of documents of one size."""
    tokens = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    positions = [index % document if document else index for index in range(length)]
    yield {"input_ids": tokens, "labels": tokens, "position_ids": positions}


def promised(arguments: argparse.Namespace, gpus: int) -> tuple[int, dict[str, float]]:
    """The longest sequence by the plan, or the one that is named, and what the plan says of it in GiB."""
    sizes = SHAPES.get(arguments.model) or MORE[arguments.model]
    changes = {} if arguments.layers is None else {"num_hidden_layers": arguments.layers}
    config = shape_named(arguments.model) if not changes and arguments.model in SHAPES else None
    config = config or AutoConfig.for_model(**{**sizes, **changes})
    model = model_size(type(model_on_meta(config)), config, arguments.model)
    raise NotImplementedError


def model_on_meta(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
