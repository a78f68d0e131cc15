"""Small models of every family that is served, and batches for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    ZambaConfig,
    ZambaForCausalLM,
)

import hf_burst
from hf_burst.check.tiny import prepare
from hf_burst.ring.resources import GroupResources
from tests.support.tiny_models import OVERRIDES, tiny_config

VOCABULARY = 61
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}


def llama_with(rope: dict[str, object], **sizes: int) -> LlamaForCausalLM:
    """A small Llama with as many key as query heads and scaled rotary positions."""
    rope = {"rope_theta": 1e4, **rope}
    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, **sizes}, num_key_value_heads=4, rope_parameters=rope))


_MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, num_key_value_heads=2)),
    "llama_yarn": lambda: llama_with({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    "llama_linear": lambda: llama_with({"rope_type": "linear", "factor": 4.0}),
    "llama_llama3": lambda: llama_with(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    ),
    "llama_dynamic": lambda: llama_with({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=16),
    "llama_longrope": lambda: llama_with(
        {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 4.0, 6.0, 8.0],
            "original_max_position_embeddings": 16,
        }
    ),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**_SIZES, num_key_value_heads=1, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=16)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, num_key_value_heads=2, sliding_window=9)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=512,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            scale_attn_by_inverse_layer_idx=True,
        )
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES, hidden_dropout=0.0, attention_dropout=0.0)),
}
NAMES = tuple(_MODELS)
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
_MASKED_MODELS = {
    "bert": lambda: BertForMaskedLM(BertConfig(**_SIZES, **_NO_DROPOUT)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**_SIZES, **_NO_DROPOUT, pad_token_id=0)),
    "modernbert": lambda: ModernBertForMaskedLM(
        ModernBertConfig(**_SIZES, **_TOKENS, local_attention=14, global_attn_every_n_layers=2)
    ),
}
MASKED = tuple(_MASKED_MODELS)  # encoders that predict masked tokens
_LINEAR_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
_RECURRENT_MODELS = {
    # gated delta rule, with more value than key heads, and a convolution
    "qwen3_5": lambda: Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **_SIZES,
            **_LINEAR_HEADS,
            linear_value_head_dim=6,
            num_key_value_heads=2,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
        )
    ),
    # Kimi delta attention beside latent attention
    "kimi_linear": lambda: KimiLinearForCausalLM(_tiny("KimiLinearForCausalLM", KimiLinearConfig)),
    # short convolutions
    "lfm2": lambda: Lfm2ForCausalLM(
        Lfm2Config(**_SIZES, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    ),
    # Mamba2 beside attention, and experts
    "granite": lambda: GraniteMoeHybridForCausalLM(_tiny("GraniteMoeHybridForCausalLM", GraniteMoeHybridConfig)),
    # Mamba1 beside attention that layers share
    "zamba": lambda: ZambaForCausalLM(_tiny("ZambaForCausalLM", ZambaConfig)),
}
RECURRENT = tuple(_RECURRENT_MODELS)  # with layers that carry a state


def _tiny(name: str, config: Any) -> Any:
    """The config of the coverage table."""
    tiny = tiny_config(config, OVERRIDES.get(name, {}))
    prepare(tiny)
    return tiny


def make_model(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int | None = None
) -> PreTrainedModel:
    """A small model with random weights, the same for the same seed, of two layers or as many as are named.

    In fp64 its RMS norms are torch's: those of Transformers compute in fp32 whatever the dtype, which hides errors.
    """
    torch.manual_seed(seed)
    model = (_MODELS | _MASKED_MODELS | _RECURRENT_MODELS)[name]()
    if layers is not None:
        kinds = getattr(model.config, "layer_types", None)
        model.config.num_hidden_layers = layers
        if kinds:
            model.config.layer_types = [kinds[index % len(kinds)] for index in range(layers)]
        model = type(model)(model.config)
    if dtype == torch.float64 and name not in RECURRENT:
        for path, module in list(model.named_modules()):
            if type(module).__name__.endswith("RMSNorm"):
                model.set_submodule(path, nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon))
    return model.to(dtype)


def make_batch(kind: str, length: int = 37, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch with labels: `"plain"`, `"packed"` (documents of 1, 7, 12, ... tokens), `"right"` or `"left"` padded.

    Padding is the token 0, in which a model that counts the others sees it.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if kind == "packed" else 2
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, :5] = -100
    if kind == "packed":
        lengths = document_lengths(length)
        batch["position_ids"] = torch.cat([torch.arange(size) for size in lengths])[None]
    elif kind in ("right", "left"):
        mask = torch.ones_like(ids)
        hidden = slice(length - 7, None) if kind == "right" else slice(0, 7)
        mask[1, hidden] = 0
        batch["labels"][mask == 0] = -100
        batch["input_ids"] = ids * mask
        batch["attention_mask"] = mask
    return batch


def document_lengths(length: int) -> list[int]:
    """How the packed batch divides."""
    return [1, 7, length - 20, 12]


def config_of(**settings: Any) -> hf_burst.BurstConfig:
    """The config with these settings, those of [`hf_burst.Memory`] among them."""
    names = {setting.name for setting in fields(hf_burst.Memory)} & settings.keys()
    memory = {"memory": hf_burst.Memory(**{name: settings.pop(name) for name in names})} if names else {}
    return hf_burst.BurstConfig(**{**settings, **memory})


@contextmanager
def hosts_of(ranks: int | None) -> Iterator[None]:
    """As if the ranks were on hosts with this many of them each; `None` for those that they are on."""
    found = GroupResources.ranks_per_host

    def per_host_of(resources: GroupResources, device: torch.device) -> int:
        known = found(resources, device)
        size = resources.group.size
        assert ranks is None or size % min(ranks, size) == 0
        return known if ranks is None else min(ranks, size)

    with mock.patch.object(GroupResources, "ranks_per_host", per_host_of):
        yield


def patch(model: nn.Module, config: hf_burst.BurstConfig | None = None, group: Any = None) -> Any:
    """The model, patched for tests that add up the gradients of ranks themselves."""
    config = replace(config or hf_burst.BurstConfig(), gradients="manual")
    return hf_burst.patch_model(model, config, group)


def plain_logits(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the unpatched model in one process; packed documents one by one."""
    options = {} if is_masked(model) else {"use_cache": False}
    if "position_ids" not in batch:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return model(**inputs, **options).logits
    pieces = torch.split(batch["input_ids"], document_lengths(batch["input_ids"].shape[1]), dim=1)
    return torch.cat([model(input_ids=piece, **options).logits for piece in pieces], dim=1)


def is_masked(model: PreTrainedModel) -> bool:
    """Whether a model predicts masked tokens."""
    return type(model).__name__.endswith("ForMaskedLM")


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels of the next token, written apart from the package."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)


def plain_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The token mean of the cross-entropy, in the dtype of the model."""
    logits = plain_logits(model, batch)
    targets = batch["labels"] if is_masked(model) else shifted(batch["labels"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def counted(model: Any) -> list[int]:
    """The tokens of each call of a model's embeddings, without a hook: hooks of users see every row."""
    embeddings, tokens = model.get_input_embeddings(), list[int]()

    def forward(ids: torch.Tensor) -> torch.Tensor:
        tokens.append(ids.numel())
        return type(embeddings).forward(embeddings, ids)

    embeddings.forward = forward
    return tokens
