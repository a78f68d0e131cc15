"""Checks the arguments of a forward pass: refuses those that are not served, compares those that ranks must share."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils.checkpoint
import transformers
from transformers import PreTrainedModel

from ...errors import BatchError, UnsupportedModelError
from ...layers.loss import IGNORE_INDEX
from ..admission import check_adapters
from ..batches.documents import batch_shape, cache_of
from ..forward_pass import Call
from ..sharded_cache import ShardedCache
from .base import Part

_DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


class Arguments(Part):
    """Checks what the caller asks of the model, and adds facts of the pass."""

    def admit(self, call: Call) -> None:
        model, given = call.model, call.given
        _check_model(call)
        _check_given(model, given)
        check_adapters(model)
        kind = call.device.type
        call.agreement.facts |= {
            "dtype": str(model.dtype),
            "training": model.training,
            "gradients": torch.is_grad_enabled(),
            "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
            "fused_lm_head": bool(given.get("fused_lm_head")),
            "BurstConfig": str(call.config),
            "transformers": transformers.__version__,
        }


def _check_model(call: Call) -> None:
    """Raises for what a model computes, or a backward pass after it, that is not served over several ranks."""
    model, saving = call.model, torch._C._autograd._top_saved_tensors_default_hooks(False)
    rates = {key: getattr(model.config, key, None) for key in _DROPOUT_KEYS} if model.training else {}
    key = next((key for key, rate in rates.items() if rate), "")
    again = (
        torch.is_grad_enabled() and saving and getattr(saving[0], "__module__", "") == torch.utils.checkpoint.__name__
    )
    noisy = model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None)
    UnsupportedModelError.refuse(
        (
            key,  # its mask would not be that of one process
            f"config.{key} is {rates.get(key)}; dropout of attention weights is not served in training. Load the model "
            f"with {key}=0.0 (from_pretrained(..., {key}=0.0)), which is how long-context models are trained.",
        ),
        (
            again,
            "torch.utils.checkpoint was given the whole model, and would stop its second run in the middle. Checkpoint "
            "its layers: model.gradient_checkpointing_enable(), or TrainingArguments(gradient_checkpointing=True).",
        ),
        (
            noisy and call.group.size > 1,
            "neftune_noise_alpha adds noise that depends on the length of the sequence, of which a rank has a part. "
            "Leave it out of the training arguments.",
        ),
    )


def _check_given(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Raises for arguments of a forward pass that are not served over several ranks."""
    cache, ignored = cache_of(given), given.get("ignore_index", IGNORE_INDEX)
    asked = {key: given.get(key) for key in ("output_attentions", "encoder_hidden_states")}
    wanted = [key for key, value in asked.items() if value is not None and value is not False]
    BatchError.refuse(
        (
            not isinstance(cache, ShardedCache | None),
            f"A cache ({type(cache).__name__}) in training or with labels cannot be sharded. Leave it out; to "
            "generate, switch the model to evaluation first (model.eval()).",
        ),
        (
            ignored != IGNORE_INDEX,
            f"ignore_index={ignored} is not served by hf_burst. Set the labels that do not count to {IGNORE_INDEX}, "
            "and leave it out.",
        ),
        (
            wanted,
            f"{', '.join(wanted)} is not served by hf_burst: attention weights are never in memory. Leave it out.",
        ),
        (
            given.get("return_dict", model.config.return_dict) is False,
            "return_dict=False is not served by hf_burst. Set it to True and read the outputs by name.",
        ),
    )
    batch_shape(given)
