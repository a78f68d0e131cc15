"""The models of training.py, and how they are sharded."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_burst.sizing import shapes
from recipes.benchmarks.harness import at_least

if TYPE_CHECKING:
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
    """The model that is trained, and on what.

    Args:
        model (`nn.Module`): The model, sharded; a peft model for LoRA.
        base (`PreTrainedModel`): The Transformers model inside of it.
        optimizer (`torch.optim.Optimizer`): Its optimizer.
        ranks ([`Ranks`]): The processes.
        mesh (`DeviceMesh`, *optional*): All of them; `None` for one process.
        tokens (`torch.LongTensor` of shape `(1, length)`): One sequence, the same on every rank.
        document (`int`, *optional*): Tokens of each of the documents that the sequence is packed of; one by default.
        chosen (`dict`): Settings that hf_burst chose in the latest step.
        rules (`dict`): What it measured, by what was asked for.
        home (`HostMemory`, *optional*): Where hf_burst offloads to.
    """

    model: nn.Module
    base: PreTrainedModel
    optimizer: torch.optim.Optimizer
    ranks: "Ranks"
    mesh: DeviceMesh | None
    tokens: torch.Tensor
    document: int | None = None
    chosen: dict[str, Any] = field(default_factory=dict)
    rules: dict[Any, dict[Any, Any]] = field(default_factory=dict)
    home: Any = None

    @property
    def items(self) -> int:
        """Labels of the sequence."""
        return self.tokens.shape[1] - 1

    @property
    def batch(self) -> dict[str, torch.Tensor]:
        """The whole sequence with its labels, and the positions of packed documents."""
        batch = {"input_ids": self.tokens, "labels": self.tokens}
        if self.document is not None:
            batch["position_ids"] = torch.arange(self.tokens.shape[1], device=self.tokens.device)[None] % self.document
        return batch


def random_tokens(length: int, model: PreTrainedModel, device: torch.device) -> torch.Tensor:
    """One sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, model.config.vocab_size, (1, length), generator=generator).to(device)


def config_of(shape: str, **changes: Any) -> PreTrainedConfig:
    """The config of a name of `SHAPES`, with other values for some of its attributes."""
    return AutoConfig.for_model(**{**SHAPES[shape], **changes})


def class_of(config: PreTrainedConfig) -> Any:
    """The class of a causal language model."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def make_model(
    shape: str, longest: int, dtype: torch.dtype, device: torch.device, layers: int | None = None
) -> PreTrainedModel:
    """A model for training, with the same random weights on every rank.

    Args:
        shape (`str`): A name of `SHAPES`.
        longest (`int`): Tokens of the longest sequence.
        dtype (`torch.dtype`): Of the weights.
        device (`torch.device`): Where they lie.
        layers (`int`, *optional*): How many layers it has; those of the shape by default.
    """
    changes = {} if layers is None else {"num_hidden_layers": layers}
    config = config_of(shape, max_position_embeddings=longest, use_cache=False, **changes)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with device:
        model: PreTrainedModel = class_of(config)(config)
    torch.set_default_dtype(torch.float32)
    return model.train()


def add_model(parser: argparse.ArgumentParser, shape: str = "llama-8b") -> None:
    """Adds the options of a model with random weights."""
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument("--layers", type=at_least(1), help="how many layers of that width (as many as the shape has)")
    parser.add_argument("--liger", action="store_true", help="Liger's norms, rotary positions and SwiGLU, for all")


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Switches checkpointing on, as `Trainer` does."""
    model.gradient_checkpointing_enable({"use_reentrant": False})


def head_size(model: PreTrainedModel) -> int:
    """Elements of a head of its attention, in the layers that name no other."""
    config = model.config
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads


@contextmanager
def hooks_removed(model: nn.Module) -> Iterator[None]:
    """Forward hooks that are registered meanwhile are removed at the end."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    before = {(module, kind): set(getattr(module, kind)) for module in model.modules() for kind in kinds}
    try:
        yield
    finally:
        for (module, kind), known in before.items():
            for key in set(getattr(module, kind)) - known:
                for hooks in (getattr(module, kind), getattr(module, f"{kind}_with_kwargs")):
                    hooks.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def make_job(
    shape: str,
    longest: int,
    ranks: "Ranks",
    liger: bool,
    weights: str,
    compiled: bool,
    layers: int | None = None,
    gated_norms: bool = False,
) -> Job:
    """A model on this rank. Several ranks shard it as accelerate's FSDP2 does it.

    Args:
        shape (`str`): A name of `SHAPES`.
        longest (`int`): Tokens of the longest sequence.
        ranks ([`Ranks`]): The processes.
        liger (`bool`): Whether it has Liger's norms, rotary positions and SwiGLU.
        weights (`str`): Which of them are trained: `"all"`; or adapters, `"lora"` or, of weights in 4 bits, `"qlora"`.
        compiled (`bool`): Whether each layer is compiled.
        layers (`int`, *optional*): How many layers it has; those of the shape by default.
        gated_norms (`bool`, defaults to `False`): Whether flash-linear-attention computes the norms of gated outputs.
    """
    base = make_model(shape, longest, torch.bfloat16 if ranks.cuda else torch.float32, ranks.device, layers)
    model: nn.Module = base
    if liger:
        apply_liger(base)
    if gated_norms:
        fuse_gated_norms(base)
    if weights == "qlora":
        quantise(base)
    if weights != "all":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(base, LoraConfig(r=16, target_modules=list(LORA)), autocast_adapter_dtype=False)
        for adapter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            adapter.data = adapter.data.to(base.model.norm.weight.dtype)
        base.enable_input_require_grads()
    checkpoint_layers(base)
    if compiled:
        torch._dynamo.config.recompile_limit = 64  # each contender is another model to the compiler
        for index, layer in enumerate(base.model.layers):
            base.model.layers[index] = torch.compile(layer)
    mesh = None
    if ranks.size > 1:
        mesh = init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=("cp",))
        shard(model, base, mesh)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-6, fused=ranks.cuda)
    return Job(model, base, optimizer, ranks, mesh, torch.zeros(1, 1, dtype=torch.int64))


def apply_liger(model: PreTrainedModel) -> None:
    """Gives a model Liger's norms, rotary positions and SwiGLU."""
    from liger_kernel.transformers import monkey_patch

    kind, prefix = model.config.model_type, "apply_liger_kernel_to_"
    apply = getattr(monkey_patch, prefix + kind, None) or getattr(monkey_patch, prefix + kind.removesuffix("_text"))
    apply(cross_entropy=False, fused_linear_cross_entropy=False, model=model)


def fuse_gated_norms(model: PreTrainedModel) -> None:
    """Has flash-linear-attention compute the norms of the gated outputs of gated DeltaNet, as kernels of the hub do it
    in a model that is loaded with `use_kernels=True`."""
    fused: Any = import_module("fla.modules").FusedRMSNormGated
    for layer in model.model.layers:
        if (mixer := getattr(layer, "linear_attn", None)) is not None:
            norm = mixer.norm
            mixer.norm = fused(norm.weight.shape[0], eps=norm.variance_epsilon, activation=norm.activation)
            mixer.norm.weight = norm.weight


def quantise(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Puts the weights of all linear layers but the head into 4 bits, as `BitsAndBytesConfig(load_in_4bit=True)` with
    NF4 and double quantisation loads them, one layer after another, each on a device if one is named."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for layer in model.model.layers:
        layer.to(device or next(layer.parameters()).device)
        for name, linear in [*layer.named_modules()]:
            if isinstance(linear, nn.Linear):
                small = Linear4bit(
                    *(linear.in_features, linear.out_features),
                    bias=linear.bias is not None,
                    compute_dtype=linear.weight.dtype,
                    quant_type="nf4",
                    device="meta",
                )
                small.bias = linear.bias
                weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=small)
                small.weight = weight.to(linear.weight.device)
                layer.set_submodule(name, small)
    model.is_loaded_in_4bit = True  # what peft asks for


def shard(model: nn.Module, base: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shards a model by FSDP2 in the units of accelerate: each layer, the embedding, the last norm with the head.

    Args:
        model (`nn.Module`): The model; a peft model for LoRA.
        base (`PreTrainedModel`): The Transformers model inside of it.
        mesh (`DeviceMesh`): The ranks.
    """
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    last = [base.model.norm, base.lm_head]
    if base.config.tie_word_embeddings:
        last.append(base.model.embed_tokens)
    else:
        fully_shard(base.model.embed_tokens, mesh=mesh, reshard_after_forward=True)
    fully_shard(last, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
