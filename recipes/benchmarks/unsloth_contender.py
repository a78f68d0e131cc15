"""Unsloth as a contender of training.py, on one GPU: a model that it loads and adapts, with the weights of the job.

Unsloth exchanges functions of torch, Transformers and peft for as long as a process lives, so it runs alone.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_burst.errors import ConfigError
from recipes.benchmarks.training_contenders import Loss
from recipes.benchmarks.training_job import Job


@contextmanager
def unsloth(job: Job, tiled: bool = False) -> Iterator[Loss]:
    """Trains with Unsloth: its kernels, its loss, and its checkpoints, which offload.

    Args:
        job ([`Job`]): What is trained: adapters in LoRA.
        tiled (`bool`): Whether MLPs run in its tiles, those for several processes. Its tiles for one process fail with
            adapters in bf16 (2026.10.9): their backward pass changes a view in place.
    """
    if not job.ranks.cuda:
        raise ConfigError("Unsloth needs a GPU")
    if job.model is job.base or getattr(job.base, "is_loaded_in_4bit", False):
        raise ConfigError("Unsloth is here for adapters beside weights in bf16: give --lora")
    model, lengths = adapted(job.model, job.base, tiled), documents(job)
    labels = torch.cat([job.tokens[:, 1:], torch.full_like(job.tokens[:, :1], -100)], 1)

    def loss(job: Job) -> torch.Tensor:
        value: torch.Tensor = model(**job.batch, **lengths, shift_labels=labels, use_cache=False).loss
        return value

    yield loss


def documents(job: Job) -> dict[str, torch.Tensor]:
    """The lengths of packed documents, as Unsloth's collator gives them."""
    if job.document is None:
        return {}
    tokens = job.tokens.shape[1]
    starts = range(0, tokens, job.document)
    return {"packed_seq_lengths": torch.tensor([min(job.document, tokens - start) for start in starts])}


@cache
def adapted(model: nn.Module, base: PreTrainedModel, tiled: bool) -> nn.Module:
    """A model that Unsloth loads from a folder and adapts as its users do, with the parameters of another one.

    Args:
        model (`nn.Module`): The model with adapters, whose parameters it takes.
        base (`PreTrainedModel`): The Transformers model inside of it.
        tiled (`bool`): Whether MLPs run in tiles, see [`unsloth`].
    """
    from peft.tuners.lora import LoraLayer

    if tiled:
        import_module("unsloth.models._tiled_mlp_ddp").patch_tiled_mlp_for_ddp()
    loader: Any = import_module("unsloth").FastLanguageModel
    longest = base.config.max_position_embeddings
    common = {"max_seq_length": longest, "use_gradient_checkpointing": "unsloth"}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(base, Path(folder))
        loaded, _ = loader.from_pretrained(
            folder,
            dtype=base.model.norm.weight.dtype,
            load_in_4bit=False,
            unsloth_tiled_mlp=tiled,
            local_files_only=True,
            **common,
        )
    lora = next(module for module in base.modules() if isinstance(module, LoraLayer))
    names = {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    result: nn.Module = loader.get_peft_model(
        loaded,
        r=lora.r["default"],
        lora_alpha=lora.lora_alpha["default"],
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(names),
        **common,
    )
    result.train()
    result.gradient_checkpointing_enable()  # both as Trainer does: only then do its checkpoints offload
    share(model, result)
    return result


def write_folder(base: PreTrainedModel, folder: Path) -> None:
    """Writes what a model is loaded from: its config, a tokenizer, and one weight. Loading makes the others."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    base.config.save_pretrained(folder)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(special.values())}, "<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    weights = {"model.norm.weight": base.model.norm.weight.detach().cpu()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def share(model: nn.Module, other: nn.Module) -> None:
    """Puts the parameters of a model into another one, in the places of the same names."""
    own, others = dict(model.named_parameters()), dict(other.named_parameters())
    if own.keys() != others.keys():
        raise ConfigError(f"Unsloth's model has other parameters: {sorted(own.keys() ^ others.keys())[:4]}")
    for name, parameter in own.items():
        if parameter.shape != others[name].shape:
            raise ConfigError(f"Unsloth's {name} is {tuple(others[name].shape)} in shape, not {tuple(parameter.shape)}")
        place, _, leaf = name.rpartition(".")
        setattr(other.get_submodule(place), leaf, parameter)
