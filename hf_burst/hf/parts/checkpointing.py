"""Checkpointed layers that keep their attention, see [`SavedAttention`]."""

from dataclasses import replace

from transformers import PreTrainedModel

from ...config import BurstConfig
from ...errors import BatchError
from ..checkpointing import SavedAttention
from .base import ForwardPass, Part


class Checkpointing(Part):
    """Sees to all modules that checkpoint by the time of a pass.

    Args:
        config ([`BurstConfig`]): How much of the attention they keep.
    """

    def __init__(self, config: BurstConfig) -> None:
        self.saved = SavedAttention(config.attention_keep)

    def prepare(self, run: ForwardPass) -> None:
        modules = self.saved.install(run.model) if run.model.training else None
        if modules and 0 < self.saved.share < 1 and run.layout.beginning(1 - self.saved.share) is None:
            raise BatchError(
                f"BurstConfig(attention_keep={self.saved.share}) needs batches of which every rank holds as much of "
                f"each part of the sequence, and this one was cut into {len(run.layout.owners)} chunks by another "
                "BurstConfig. Give the BurstCollator (or shard_batch) the config of the model."
            )
        run.facts["activation checkpointing"] = modules

    def begin(self, run: ForwardPass) -> None:
        run.call = replace(run.call, saved=self.saved)

    def remove(self, model: PreTrainedModel) -> None:
        self.saved.remove(model)
