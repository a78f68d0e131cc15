"""The models of training.py, and how they are sharded."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from hf_burst.sizing import shapes
from recipes.benchmarks.harness import at_least
from recipes.benchmarks.ranks import Ranks


def rope(theta: float, share: float | None = None) -> dict[str, Any]:
    """Rotary positions, of a share of each head."""
    partial = {} if share is None else {"partial_rotary_factor": share}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **partial}}


TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# three layers of gated DeltaNet to one of attention, with the heads of Qwen3.6-27B and the widths of Qwen3-8B
HYBRID = {**shapes.SHAPES["qwen3.6-27b"], "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {**shapes.SHAPES["llama-3-8b"], **rope(5e5)},
    "llama-1b": {**shapes.SHAPES["llama-3.2-1b"], **rope(5e5)},
    "qwen3-8b": {**shapes.SHAPES["qwen3-8b"], **rope(1e6)},
    "qwen3-14b": {**shapes.SHAPES["qwen3-14b"], **rope(1e6)},
    "gemma-4-12b": {**shapes.SHAPES["gemma-4-12b"], "model_type": "gemma4_text"},  # the type that Liger knows
    "qwen3.5-hybrid": {**HYBRID, "num_hidden_layers": 32, **rope(1e7, 0.25)},
    "tiny-hybrid": {
        **{**TINY, **LINEAR, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 16},
        **rope(1e4, 0.25),
    },
    "tiny": {**TINY, **rope(1e4)},
    "tiny-tied": {**TINY, **rope(1e4), "tie_word_embeddings": True},
}
LORA = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "out_proj"),  # of layers with a state
)


@dataclass
class Job:
    """The model that is trained, and on what."""

    model: nn.Module  # sharded; a peft model for LoRA
    base: PreTrainedModel  # the Transformers model inside of it
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    mesh: DeviceMesh | None  # all ranks; `None` for one process
    tokens: torch.Tensor  # one sequence of shape `(1, length)`, the same on every rank
    chosen: dict[str, Any] = field(default_factory=dict)  # settings that hf_burst chose in the latest step
    rules: dict[Any, dict[Any, Any]] = field(default_factory=dict)  # what it measured, by what was asked for
    home: Any = None  # the `HostMemory` that hf_burst offloads to

    @property
    def items(self) -> int:
        """Labels of the sequence."""
        return self.tokens.shape[1] - 1

    @property
    def batch(self) -> dict[str, torch.Tensor]:
        """The whole sequence with its labels."""
        return {"input_ids": self.tokens, "labels": self.tokens}


def random_tokens(length: int, model: PreTrainedModel, device: torch.device) -> torch.Tensor:
    """One sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, model.config.vocab_size, (1, length), generator=generator).to(device)


def config_of(shape: str, **changes: Any) -> PreTrainedConfig:
    """The config of a name of `SHAPES`, with other values for some of its attributes."""
    return AutoConfig.for_model(**{**SHAPES[shape], **changes})


def make_model(
    shape: str, longest: int, dtype: torch.dtype, device: torch.device, layers: int | None = None
) -> PreTrainedModel:
    """A model for training, with the same random weights on every rank; by default it has the layers of its shape."""
    changes = {} if layers is None else {"num_hidden_layers": layers}
    config = config_of(shape, max_position_embeddings=longest, use_cache=False, **changes)
    return random_model(AutoModelForCausalLM, config, dtype, device)


def random_model(kind: Any, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The same random weights on every rank, for training; `kind` is an automatic class."""
    torch.manual_seed(0)
    with device:
        return kind.from_config(config, dtype=dtype).train()


def add_model(parser: argparse.ArgumentParser, shape: str = "llama-8b") -> None:
    """Adds the options of a model with random weights."""
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument("--layers", type=at_least(1), help="how many layers of that width (as many as the shape has)")
    parser.add_argument("--liger", action="store_true", help="Liger's norms, rotary positions and SwiGLU, for all")


def add_training(parser: argparse.ArgumentParser, shape: str = "llama-8b") -> None:
    """Adds the options of a model that is trained."""
    add_model(parser, shape)
    adapters = "adapters of rank 16 on all large linear layers"
    parser.add_argument("--lora", dest="weights", action="store_const", const="lora", default="all", help=adapters)
    parser.add_argument("--gated-norms", action="store_true", help="fla's norms of gated outputs, for all")


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Switches checkpointing on, as `Trainer` does."""
    model.gradient_checkpointing_enable({"use_reentrant": False})


@contextmanager
def hooks_removed(model: nn.Module) -> Iterator[None]:
    """Forward hooks that are registered meanwhile are removed at the end."""
    kinds = ("pre_hooks", "hooks", "pre_hooks_with_kwargs", "hooks_with_kwargs", "hooks_always_called")
    hooks = [getattr(module, f"_forward_{kind}") for module in model.modules() for kind in kinds]
    before = [known.copy() for known in hooks]
    try:
        yield
    finally:
        for now, known in zip(hooks, before, strict=True):
            now.clear()
            now.update(known)


def make_job(arguments: argparse.Namespace, longest: int, ranks: Ranks) -> Job:
    """A model on this rank, by the options of [`add_training`]. Several ranks shard it as accelerate's FSDP2 does."""
    dtype = torch.bfloat16 if ranks.cuda else torch.float32
    base = make_model(arguments.shape, longest, dtype, ranks.device, arguments.layers)
    model: nn.Module = base
    if arguments.liger:
        apply_liger(base)
    if arguments.gated_norms:
        fuse_gated_norms(base)
    if arguments.weights == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(base, LoraConfig(r=16, target_modules=list(LORA)), autocast_adapter_dtype=False)
        for adapter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            adapter.data = adapter.data.to(base.model.norm.weight.dtype)
        base.enable_input_require_grads()
    checkpoint_layers(base)
    mesh = None
    if ranks.size > 1:
        mesh = init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=("cp",))
        shard(model, base, mesh)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-6, fused=ranks.cuda)
    return Job(model, base, optimizer, ranks, mesh, torch.zeros(1, 1, dtype=torch.int64))


def apply_liger(model: PreTrainedModel) -> None:
    """Gives a model Liger's norms, rotary positions and SwiGLU."""
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def fuse_gated_norms(model: PreTrainedModel) -> None:
    """Has flash-linear-attention compute the norms of the gated outputs of gated DeltaNet, as kernels of the hub do it
    in a model that is loaded with `use_kernels=True`."""
    fused: Any = import_module("fla.modules").FusedRMSNormGated
    for layer in model.model.layers:
        if (mixer := getattr(layer, "linear_attn", None)) is not None:
            norm = mixer.norm
            mixer.norm = fused(norm.weight.shape[0], eps=norm.variance_epsilon, activation=norm.activation)
            mixer.norm.weight = norm.weight


def quantise(model: PreTrainedModel, device: torch.device) -> None:
    """Puts the weights of all linear layers but the head into 4 bits, and those of fused experts, as
    `Experts4bitConfig()` loads them, one layer after another, each on a device."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    from hf_burst.hf.models.layer_sizes import is_experts
    from hf_burst.layers.dequantized import dequantize_when_read

    for layer in model.model.layers:
        layer.to(device)
        for name, module in [*layer.named_modules()]:
            if isinstance(module, nn.Linear):
                dtype = module.weight.dtype
                how = {"quant_type": "nf4", "quant_storage": dtype}  # FSDP2 shards floats
                sizes = module.in_features, module.out_features
                small = Linear4bit(*sizes, module.bias is not None, dtype, device="meta", **how)
                small.bias = module.bias
                small.weight = Params4bit(module.weight.data, False, module=small, **how).to(module.weight.device)
                layer.set_submodule(name, small)
                continue
            for own, weight in [*module.named_parameters(recurse=False)]:
                if is_experts(module, weight):
                    packed = Params4bit(weight.data, False, quant_type="nf4", quant_storage=weight.dtype)
                    setattr(module, own, packed.to(weight.device))
                    dequantize_when_read(module, own)
    model.is_loaded_in_4bit = True  # what peft asks for


def shard(model: nn.Module, base: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shards a model, which may be a peft model around the base, by FSDP2 in the units of accelerate: each layer, the
    embedding, the last norm with the head."""
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    last = [base.model.norm, base.lm_head]
    if base.config.tie_word_embeddings:
        last.append(base.model.embed_tokens)
    else:
        fully_shard(base.model.embed_tokens, mesh=mesh, reshard_after_forward=True)
    fully_shard(last, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
