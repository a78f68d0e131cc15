"""Checks the arguments of a forward pass: refuses those that are not served, compares those that ranks must share."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils.checkpoint
import transformers
from torch.autograd import forward_ad
from transformers import PreTrainedModel

from ...errors import BatchError, UnsupportedModelError
from ...layers.loss import IGNORE_INDEX
from ..admission import check_adapters
from ..batches.documents import batch_shape, cache_of
from ..forward_pass import Agreement, Call
from ..sharded_cache import ShardedCache
from .base import Part

_DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


class Arguments(Part):
    """Checks what the caller asks of the model, and adds facts of the pass."""

    def admit(self, call: Call, agreement: Agreement) -> None:
        model, batch = call.model, call.given
        for key in _DROPOUT_KEYS:
            rate = getattr(model.config, key, None)
            if model.training and rate:  # its mask would not be that of one process
                raise UnsupportedModelError(
                    f"config.{key} is {rate}; dropout of attention weights is not served in training. Load the model "
                    f"with {key}=0.0 (from_pretrained(..., {key}=0.0)), which is how long-context models are trained."
                )
        _check_arguments(model, batch)
        _check_backward(call)
        check_adapters(model)
        noisy = model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None)
        if call.group.size > 1 and noisy:
            raise UnsupportedModelError(
                "neftune_noise_alpha adds noise that depends on the length of the sequence, of which a rank has a "
                "part. Leave it out of the training arguments."
            )
        kind = call.device.type
        agreement.facts |= {
            "dtype": str(model.dtype),
            "training": model.training,
            "gradients": torch.is_grad_enabled(),
            "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
            "fused_lm_head": bool(batch.get("fused_lm_head")),
            "BurstConfig": str(call.config),
            "transformers": transformers.__version__,
        }


def _check_backward(call: Call) -> None:
    """Raises for gradients that a backward pass after this pass does not compute."""
    saving = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if torch.is_grad_enabled() and saving and getattr(saving[0], "__module__", "") == torch.utils.checkpoint.__name__:
        raise UnsupportedModelError(
            "torch.utils.checkpoint was given the whole model, and would stop its second run in the middle. Checkpoint "
            "its layers: model.gradient_checkpointing_enable(), or TrainingArguments(gradient_checkpointing=True)."
        )
    dual = forward_ad._current_level >= 0 and any(
        isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None
        for value in (*call.given.values(), *call.model.parameters())
    )
    if dual:
        raise UnsupportedModelError(
            "Forward-mode derivatives (torch.autograd.forward_ad) are not computed by attention over ranks. Take "
            "gradients by loss.backward() or torch.autograd.grad, or unpatch the model (hf_burst.unpatch_model)."
        )


def _check_arguments(model: PreTrainedModel, batch: Mapping[str, Any]) -> None:
    """Raises for arguments of a forward pass that are not served over several ranks."""
    if cache_of(batch) is not None and not isinstance(cache_of(batch), ShardedCache):
        raise BatchError(
            f"A cache ({type(cache_of(batch)).__name__}) in training or with labels cannot be sharded. Leave it out; "
            "to generate, switch the model to evaluation first (model.eval())."
        )
    if batch.get("ignore_index", IGNORE_INDEX) != IGNORE_INDEX:
        raise BatchError(
            f"ignore_index={batch['ignore_index']} is not served by hf_burst. Set the labels that do not count to "
            f"{IGNORE_INDEX}, and leave it out."
        )
    for key in ("output_attentions", "encoder_hidden_states"):
        if batch.get(key) is not None and batch[key] is not False:
            raise BatchError(f"{key} is not served by hf_burst: attention weights are never in memory. Leave it out.")
    if batch.get("return_dict", model.config.return_dict) is False:
        raise BatchError("return_dict=False is not served by hf_burst. Set it to True and read the outputs by name.")
    batch_shape(batch)
