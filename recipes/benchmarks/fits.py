"""Does a step fit, in the memory that the plan promises? Trains some steps as a user does: accelerate and `Trainer`.

    python recipes/benchmarks/fits.py --model llama-3-8b --weights lora --out outputs/fits.json
    accelerate launch --config_file recipes/configs/accelerate_fsdp2.yaml --num_processes 2 \\
        recipes/benchmarks/fits.py --model llama-3-8b --length 65536 --document 0 --out outputs/fits.json
    python recipes/benchmarks/fits.py --model llama-3-8b --weights lora --steps 0  # only the promise, for this GPU

Without `--length` the sequence is the longest that `hf-burst plan` promises for these GPUs. It knows no DeepSpeed, and
weights on the host if accelerate was given `--fsdp_offload_params true`. A result has for every step the peaks of
torch's allocator, and of all that is taken of the GPU, as a thread sees it that asks the driver every 20 milliseconds:
what kernels take while they are tuned is in it. Each run adds a row to the file `--out`.
"""

import argparse
import ast
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import hf_burst
from hf_burst.cli.plan import capacity_here
from hf_burst.hf.groups import PATCH
from hf_burst.hf.models.model_size import model_size
from hf_burst.hf.models.support import base_model
from hf_burst.layers.host_limits import share_of_host
from hf_burst.plan.memory_levels import SETTINGS
from hf_burst.sizing import shapes
from hf_burst.sizing.fit import Fit, fit, longest
from hf_burst.sizing.gpus import capacity_of, gpu_named
from hf_burst.sizing.memory import outside_of_torch
from hf_burst.sizing.model import Training
from recipes.benchmarks.harness import begin, options_of, rows_in, write
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.training_job import TINY, quantise

GIB = 2**30
SHAPES = {**shapes.SHAPES, "tiny": TINY}


class Watcher(threading.Thread):
    """Asks the driver what is taken of a GPU, until it is told to stop. On CPUs it does nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(daemon=True)
        self.device, self.most, self.done = device, 0, threading.Event()
        self.start()

    def run(self) -> None:
        while self.device.type == "cuda" and not self.done.wait(0.02):
            free, total = torch.cuda.mem_get_info(self.device)
            self.most = max(self.most, total - free)

    def end(self) -> None:
        """Ends the thread: one that came back from the driver after Python has ended would abort the process."""
        self.done.set()
        self.join()


class Measure(TrainerCallback):
    """Notes the peaks of every step."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.device, self.steps, self.start = ranks, ranks.device, list[dict[str, Any]](), 0.0
        self.watcher = Watcher(ranks.device)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.ranks.wait()
        if self.ranks.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.watcher.most = 0
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        own: dict[str, Any] = {"host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
        if self.ranks.cuda:
            torch.cuda.synchronize(self.device)
            own |= {
                "allocated_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
                "reserved_gib": torch.cuda.max_memory_reserved(self.device) / GIB,
                "taken_gib": self.watcher.most / GIB,
            }
        self.steps.append({"seconds": time.perf_counter() - self.start, **own})
        self.ranks.say(" ".join(f"{name} {value:.2f}" for name, value in self.steps[-1].items()))

    def on_all_ranks(self) -> list[dict[str, Any]]:
        """The largest values of every step."""
        return [self.ranks.slowest(step) for step in self.steps]


def targets(text: str) -> str | list[str]:
    """The modules that get adapters. With Liger, peft cannot adapt fused experts, which "all-linear" has among them."""
    return text if text == "all-linear" else text.split(",")


def config_of(arguments: argparse.Namespace, length: int = 4096) -> Any:
    """The config of the model that is named."""
    changes: dict[str, Any] = {"max_position_embeddings": max(length, 4096)}
    if arguments.layers is not None:
        changes["num_hidden_layers"] = arguments.layers
    return AutoConfig.for_model(**{**SHAPES[arguments.model], **changes})


def make_model(arguments: argparse.Namespace, length: int, device: torch.device) -> PreTrainedModel:
    """A model whose weights repeat some random numbers: made on the CPU in seconds, as if they were loaded. Weights
    that learn are in fp32, as accelerate's mixed precision wants them, frozen ones in bf16, or in 4 bits."""
    unset_hf_deepspeed_config()  # by which the model would be made in shards, with weights that nothing fills
    config = config_of(arguments, length)
    dtype = torch.float32 if arguments.weights == "all" else torch.bfloat16
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    noise = (torch.randn(2**22 + 1, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    model.tie_weights()
    for name, weight in model.named_parameters():
        if weight.dim() < 2:  # of norms, and biases
            weight.data.fill_(float("bias" not in name))
        else:
            for part in weight.data.view(-1).split(len(noise)):
                part.copy_(noise[: len(part)])
    if arguments.weights == "qlora":
        quantise(model, device)
        if parse_flag_from_env("ACCELERATE_USE_FSDP"):  # as the recipes do
            model.to("cpu")
    return model


def batch_of(length: int, document: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """A sequence, packed of documents of one size, or whole."""
    tokens = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(length))
    positions = torch.arange(length)[None] % (document or length)
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


def promised(arguments: argparse.Namespace, gpus: int) -> tuple[int, Fit]:
    """The longest sequence by the plan, unless one is named, and what the plan says of it."""
    config = config_of(arguments)
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    model = model_size(kind, config, arguments.model)
    capacity = capacity_of(gpu_named("h100"), ranks_per_host=gpus)  # where there is no GPU
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        free = arguments.gpu_memory or torch.cuda.mem_get_info(device)[1] / GIB
        capacity = replace(capacity_here(gpus), gpu_memory=int(free * GIB), host_memory=share_of_host(device))
    weights: Any = {"all": "fp32", "lora": "fp32", "qlora": "4bit"}[arguments.weights]
    lora = 0 if arguments.weights == "all" else 16
    given: dict[str, Any] = {"weights": weights, "lora": lora, "expandable_segments": expandable_segments()}
    given["offloaded_weights"] = all(map(parse_flag_from_env, ("ACCELERATE_USE_FSDP", "FSDP_OFFLOAD_PARAMS")))
    given["quantized_experts"] = weights == "4bit" and model.fused > 0
    training = Training(1, gpus, gpus, **given)
    most = arguments.length or longest(model, training, capacity)
    documents = (*range(0, most, arguments.document), most) if arguments.document else ()
    how = Training(most, gpus, gpus, documents, **given)
    return most, fit(model, how, capacity)


def expandable_segments() -> bool:
    """Whether torch's allocator was asked for expandable segments."""
    told = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:true" in words.lower() for words in told)


def make_trainer(arguments: argparse.Namespace, length: int, args: TrainingArguments, measure: Measure) -> Trainer:
    """A trainer as users make it."""
    model: Any = make_model(arguments, length, args.device)
    if arguments.weights != "all":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules=arguments.targets))
    hf_burst.patch_model(model, hf_burst.BurstConfig.from_dict(arguments.settings))
    batch = batch_of(length, arguments.document, model.config.get_text_config().vocab_size)
    rows: Any = [batch] * arguments.steps
    return Trainer(model, args, train_dataset=rows, data_collator=itemgetter(0), callbacks=[measure])


def quiet(cpu: bool) -> dict[str, Any]:
    """What all trainers that are measured have in common: bf16 on GPUs, checkpointed layers, and nothing written."""
    return {
        "use_cpu": cpu,
        "bf16": not cpu,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "learning_rate": 1e-6,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def one_gpu_each(args: TrainingArguments) -> TrainingArguments:
    """Keeps `Trainer` from copying the model of one process to other GPUs."""
    if args.n_gpu > 1:
        args._n_gpu = 1
    return args


def training_arguments(arguments: argparse.Namespace, gpus: int) -> TrainingArguments:
    """The settings of the trainer: bf16, every layer checkpointed, Liger's kernels, AdamW."""
    cpu = not torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=arguments.folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=1,
        use_liger_kernel=not cpu,
        liger_kernel_config={"fused_linear_cross_entropy": False, "cross_entropy": False},
        remove_unused_columns=False,
        parallelism_config=hf_burst.BurstParallelismConfig() if gpus > 1 else None,
        **quiet(cpu),
    )
    return one_gpu_each(args)


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
    rule = getattr(base_model(model), PATCH).memory
    return rule.latest and {"settings": asdict(rule.latest.settings), "expandable_segments": rule.expandable}


def read_arguments() -> argparse.Namespace:
    parser = options_of(__doc__, timeout_s=None)
    parser.add_argument("--model", required=True, choices=SHAPES)
    parser.add_argument("--layers", type=int, help="(default those of the shape)")
    parser.add_argument("--weights", choices=("all", "lora", "qlora"), default="all", help="(default %(default)s)")
    parser.add_argument("--targets", type=targets, default="all-linear", help="of adapters, such as q_proj,v_proj")
    parser.add_argument("--length", type=int, help="tokens (default the longest that the plan promises)")
    parser.add_argument("--document", type=int, default=4096, help="tokens of a packed document, 0 for one")
    parser.add_argument("--steps", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--settings", type=ast.literal_eval, default={}, help="of BurstConfig, as a dictionary")
    smaller = "GiB: as on a smaller GPU, where torch's allocator has what the plan says that CUDA and NCCL leave of it"
    parser.add_argument("--gpu-memory", type=float, help=smaller)
    parser.add_argument("--folder", default="outputs/fits", help="of the trainer")
    return parser.parse_args()


def main() -> None:
    """Trains, and adds a row to the file."""
    arguments, gpus = read_arguments(), int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.gpu_memory is not None:
        as_on_a_smaller_gpu(arguments.gpu_memory - outside_of_torch(gpus) / GIB)
    length, promise = promised(arguments, gpus)
    args = training_arguments(arguments, gpus)  # joins the processes
    ranks, row = begin(arguments, "model", "layers", "weights", "targets", "document", device=args.device.type)
    row |= {"length": length, "expandable_segments": expandable_segments(), "gpu_memory_gib": arguments.gpu_memory}
    row |= {"offloaded_weights": promise.training.offloaded_weights, "promised": described(promise)}
    ranks.say(json.dumps(row["promised"]))
    if arguments.steps:
        row |= run(partial(make_trainer, arguments, length, args), tell, ranks)
    write(arguments.out, [*rows_in(arguments.out), row], ranks)


def as_on_a_smaller_gpu(memory_gib: float) -> None:
    """Has torch's allocator find so many GiB."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(memory_gib * GIB / total, device)


def tell(trainer: Trainer) -> dict[str, Any]:
    """What hf_burst chose."""
    return {"chosen": chosen_of(trainer.accelerator.unwrap_model(trainer.model))}


def run(make: Callable[[Measure], Trainer], tell: Callable[[Any], dict[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """Trains some steps, and tells what they took and what the trainer tells, or how they ended."""
    start, measure, found = time.perf_counter(), Measure(ranks), {"status": "ok", "reason": None, "chosen": None}
    try:
        trainer = make(measure)
        ranks.say(f"made after {time.perf_counter() - start:.0f} s")
        trainer.train()
        found |= tell(trainer)
    except Exception as problem:  # whatever ends it is a result
        found |= {"status": "failed", "reason": f"{type(problem).__name__}: {str(problem)[:600]}"}
        print(f"rank {ranks.rank}: {found['reason']}", flush=True)  # the others may wait for ever
    measure.watcher.end()
    return found | {"steps": measure.on_all_ranks() if found["status"] == "ok" else measure.steps}


if __name__ == "__main__":
    main()
