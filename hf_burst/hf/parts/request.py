"""What is asked of a forward pass: settings and arguments that are not served, and those that all ranks must share."""

import torch
import transformers
from transformers import PreTrainedModel

from ...errors import BatchError
from ...loss import IGNORE_INDEX
from ..call import batch_shape
from ..support import check_adapters, check_dropout, check_model, check_noise
from .base import ForwardPass, Part


class Request(Part):
    """Checks the model, and what is asked of it; adds the facts of the request.

    Args:
        model (`PreTrainedModel`): The model, which is refused if it is not served exactly.
        under_check (`bool`): As in [`check_model`].
    """

    def __init__(self, model: PreTrainedModel, under_check: bool) -> None:
        self.served = check_model(model, under_check)

    def prepare(self, run: ForwardPass) -> None:
        check_dropout(run.model)
        _check_arguments(run)
        check_adapters(run.model)
        if run.group.size > 1:
            check_noise(run.model)
        run.facts |= {
            "dtype": str(run.model.dtype),
            "training": run.model.training,
            "gradients": torch.is_grad_enabled(),
            "fused_lm_head": bool(run.batch.get("fused_lm_head")),
            "BurstConfig": str(run.config),
            "served by": self.served,
            "transformers": transformers.__version__,
        }


def _check_arguments(run: ForwardPass) -> None:
    """Raises for arguments of a forward pass that are not served over several ranks."""
    batch = run.batch
    if batch.get("past_key_values") is not None:
        raise BatchError(
            "past_key_values in training or with labels: a cache cannot be sharded. Leave it out; to generate, switch "
            "the model to evaluation first (model.eval())."
        )
    if batch.get("ignore_index", IGNORE_INDEX) != IGNORE_INDEX:
        raise BatchError(
            f"ignore_index={batch['ignore_index']} is not served by hf_burst. Set the labels that do not count to "
            f"{IGNORE_INDEX}, and leave it out."
        )
    for key in ("output_attentions", "encoder_hidden_states"):
        if batch.get(key) is not None and batch.get(key) is not False:
            raise BatchError(f"{key} is not served by hf_burst: attention weights are never in memory. Leave it out.")
    if batch.get("return_dict", run.model.config.return_dict) is False:
        raise BatchError("return_dict=False is not served by hf_burst. Set it to True and read the outputs by name.")
    batch_shape(batch)
