"""What differs from one engine of engines.py to another: settings, the model, and for ms-swift the trainer."""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from datasets import Dataset
from transformers import AutoModelForCausalLM

import hf_burst
from hf_burst.hf.groups import PATCH
from hf_burst.hf.models.support import base_model
from hf_burst.hf.parts.adapters import Adapters
from recipes.benchmarks.fits import SHAPES, Measure, make_model
from recipes.byte_tokenizer import byte_tokenizer

SEED = 0
MakeRows = Callable[[int], Dataset]  # of a vocabulary


def alone(arguments: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """Nothing but TRL, in one process."""
    if gpus > 1:
        raise ValueError(f"one-gpu is one process, and these are {gpus}")
    return {}


def burst(arguments: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """All ranks share a sequence, under DDP or FSDP2 as it was launched."""
    shared = hf_burst.BurstParallelismConfig() if gpus > 1 else None
    return {"parallelism_config": shared, "ddp_find_unused_parameters": False}


def patch(model: Any, arguments: argparse.Namespace) -> None:
    """hf_burst's line of a script."""
    memory = {"memory": {"activation_offloading": 1.0}} if arguments.offload else {}
    hf_burst.patch_model(model, hf_burst.BurstConfig.from_dict({**memory, **arguments.settings}))
    if arguments.adapters == "peft":
        patched = getattr(base_model(model), PATCH)
        patched.parts = tuple(part for part in patched.parts if not isinstance(part, Adapters))


def context_parallelism(arguments: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """torch's, as accelerate and TRL run it: under FSDP2, by torch's own attention."""
    return {"parallelism_config": ParallelismConfig(cp_size=gpus), "pad_to_multiple_of": 2 * gpus}


def on_cudnn(model: Any, arguments: argparse.Namespace) -> None:
    """Leaves torch's attention to cuDNN, which is the fastest of its kernels on Hopper GPUs."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)


def ulysses(arguments: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """DeepSpeed's, as accelerate and TRL run it: under ZeRO-3."""
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    handler.sp_attn_implementation = attention_of("deepspeed")  # of flash-attn 4 accelerate 1.15 does not know
    shared = ParallelismConfig(sp_backend="deepspeed", sp_size=gpus, sp_handler=handler)
    on_cpus = {} if torch.cuda.is_available() else {"use_cpu": False, "ddp_backend": "gloo"}
    return {"parallelism_config": shared, "pad_to_multiple_of": gpus, **on_cpus}


def load(arguments: argparse.Namespace) -> Any:
    """The model of a folder, or random weights. Weights that learn are in fp32, as mixed precision wants them."""
    dtype = torch.bfloat16 if arguments.weights == "lora" and torch.cuda.is_available() else torch.float32
    kernel = attention_of(arguments.engine)
    if arguments.model not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, attn_implementation=kernel)
    model: Any = make_model(arguments, arguments.length, torch.device("cpu")).to(dtype)
    model.set_attn_implementation(kernel)
    return model


def unsloth_settings(backend: str, arguments: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """Its own context parallelism under DDP, and what its `SFTConfig` sets otherwise (two batches a step, decay) as
    Transformers does."""
    plain = {
        "gradient_accumulation_steps": 1,
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "max_grad_norm": 1.0,
        "adam_beta2": 0.999,
    }
    return {
        "context_parallel_size": gpus,
        "context_parallel_backend": backend,
        "gradient_checkpointing_kwargs": None,
        **plain,
    }


def load_unsloth(arguments: argparse.Namespace) -> Any:
    """Its model with its adapters, from a folder. Layers' inputs go to the host with `--offload`."""
    from unsloth import FastLanguageModel  # before Transformers is used

    if arguments.weights == "all":
        raise ValueError(
            "Unsloth shares no sequence when all weights learn: full_finetuning takes another class (loader.py)"
        )
    checkpoints = "unsloth" if arguments.offload else True
    model, _ = FastLanguageModel.from_pretrained(
        folder_of(arguments),
        max_seq_length=arguments.length,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        use_gradient_checkpointing=checkpoints,
        local_files_only=True,
    )
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    name_wrapped_attention()
    return FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, target_modules=linear, use_gradient_checkpointing=checkpoints, random_state=SEED
    )


def name_wrapped_attention() -> None:
    """Unsloth 2026.10.9 refuses its own context parallelism to every model: its loader wraps attention (llama.py,
    `gated`), and its check asks for what was wrapped (context_parallel.py). This names the wrapper."""
    import unsloth.models.llama as patched
    from transformers.models.llama.modeling_llama import LlamaAttention

    patched.LlamaAttention_fast_forward = LlamaAttention.forward


def folder_of(arguments: argparse.Namespace) -> str:
    """The folder of a Llama. Its first process writes random weights once, in the dtype in which they train."""
    if arguments.model not in SHAPES:
        return arguments.model
    if SHAPES[arguments.model]["model_type"] != "llama":
        raise ValueError(f"{arguments.engine} is set up for Llama here, and {arguments.model} is another model")
    dtype = torch.float32 if arguments.weights == "all" else torch.bfloat16
    name = f"{arguments.model}_{arguments.layers}_{arguments.length}_{dtype}"
    folder, start = Path(arguments.folder) / name, time.monotonic()
    if int(os.environ.get("LOCAL_RANK", "0")) == 0 and not (folder / "done").exists():
        model = make_model(arguments, arguments.length, torch.device("cpu")).to(dtype)
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        (folder / "done").touch()
    while not (folder / "done").exists():
        if time.monotonic() - start > 300:
            raise TimeoutError(f"the first process has not written {folder} in 300 s")
        time.sleep(1)
    return str(folder)


def swift_trainer(arguments: argparse.Namespace, measure: Measure, make_rows: MakeRows) -> Any:
    """ms-swift's pipeline and trainer, over rows that are tokens already."""
    from swift.pipelines.train.sft import SwiftSft
    from swift.sequence_parallel import sequence_parallel
    from swift.trainers import TrainerFactory

    if arguments.packed:
        raise ValueError("ms-swift packs rows by its own templates, not rows that are tokens; give --unpacked")
    cuda, full = torch.cuda.is_available(), arguments.weights == "all"
    attention = "flash_attention_4" if cuda else "sdpa"
    if attention == "flash_attention_4":
        share_attention_4(sequence_parallel)
    options = {
        "model": folder_of(arguments),
        "model_type": "llama",
        "template": "dummy",
        "cached_dataset": "unused",  # rows come below
        "tuner_type": "full" if full else "lora",
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_dropout": 0,
        "target_modules": "all-linear",
        "torch_dtype": "float32" if full or not cuda else "bfloat16",
        "bf16": cuda,
        "attn_impl": attention,
        "padding_free": "flash" in attention,
        "sequence_parallel_size": int(os.environ.get("WORLD_SIZE", "1")),
        "max_length": arguments.length,
        "max_steps": arguments.steps,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "weight_decay": 0,
        "adam_beta2": 0.999,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "output_dir": arguments.folder,
        "add_version": False,
        "seed": SEED,
        "data_seed": SEED,
        "train_dataloader_shuffle": False,
        "dataloader_num_workers": 0,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
        "ddp_find_unused_parameters": False,
        "use_hf": True,
        "use_liger_kernel": cuda and not arguments.no_liger,
        **({"fsdp": swift_shards(arguments)} if full and cuda else {}),
        **({} if cuda else {"use_cpu": True, "ddp_backend": "gloo"}),
    }
    words = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    pipe = SwiftSft([part for name, word in words.items() for part in (f"--{name}", word)])
    rows = make_rows(pipe.model.config.vocab_size)
    # it rolls labels round: the first one, which no token predicts, must not count (its templates leave it out)
    rows = rows.map(lambda row: {"labels": [-100, *row["labels"][1:]]}, load_from_cache_file=False)
    rows = rows.add_column("length", [len(ids) for ids in rows["input_ids"]])  # its collator wants it
    pipe.model = pipe.prepare_model(pipe.args, pipe.model, template=pipe.template, train_dataset=rows)
    made = TrainerFactory.get_trainer_cls(pipe.args)
    trainer = made(
        model=pipe.model, args=pipe.args.training_args, template=pipe.template, train_dataset=rows, eval_dataset=None
    )
    trainer.add_callback(measure)
    return trainer


def swift_shards(arguments: argparse.Namespace) -> str:
    """Its preset fsdp2.json, in one process's memory, and with its offloading of activations if that is asked for."""
    config = {
        "fsdp_version": 2,
        "version": 2,  # its callback of offloading reads this name
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": True,
        "activation_cpu_offload": arguments.offload,
    }
    return json.dumps({"fsdp": "full_shard auto_wrap", "fsdp_config": config})


def share_attention_4(sequence_parallel: Any) -> None:
    """ms-swift 4.6 shares "flash_attention_2" and "sdpa" alone (`_prepare_flash_attn`); by any other name each rank
    would attend to its own part without a word. This shares flash-attn 4 in the same way."""
    from transformers import masking_utils, modeling_utils

    masks, attentions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, modeling_utils.ALL_ATTENTION_FUNCTIONS

    prepare = sequence_parallel._prepare_flash_attn

    def prepare_both(model: Any) -> None:
        own = attentions["flash_attention_4"]
        prepare(model)
        attentions["flash_attention_2_origin"] = own
        attentions["flash_attention_4"] = attentions["flash_attention_2"]
        masks["flash_attention_4"] = masks["flash_attention_2"]

    sequence_parallel._prepare_flash_attn = prepare_both


@dataclass(frozen=True)
class Engine:
    """What differs from one engine to another."""

    settings: Callable[[argparse.Namespace, int], dict[str, Any]]  # arguments of `SFTConfig`, for so many GPUs
    attention: str = "flash_attention_4"  # of Transformers, on GPUs
    change: Callable[[Any, argparse.Namespace], Any] | None = None  # of the model, before the trainer has it
    load: Callable[[argparse.Namespace], Any] = load
    trainer: Callable[[argparse.Namespace, Measure, MakeRows], Any] | None = None  # one of its own in TRL's place


ENGINES = {
    "one-gpu": Engine(alone),
    "hf_burst": Engine(burst, attention="sdpa", change=patch),
    "torch": Engine(context_parallelism, attention="sdpa"),
    "torch-cudnn": Engine(context_parallelism, attention="sdpa", change=on_cudnn),
    "deepspeed": Engine(ulysses),
    "unsloth": Engine(partial(unsloth_settings, "ring"), attention="sdpa", load=load_unsloth),
    "unsloth-ulysses": Engine(partial(unsloth_settings, "ulysses"), attention="sdpa", load=load_unsloth),
    "ms-swift": Engine(lambda *_: {}, trainer=swift_trainer),  # which makes settings of its own
}


def attention_of(engine: str) -> str:
    """The attention of Transformers: on CPUs, torch's."""
    return ENGINES[engine].attention if torch.cuda.is_available() else "sdpa"
