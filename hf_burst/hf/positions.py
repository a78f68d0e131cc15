"""Learned position embeddings: which positions there are, and the position ids that some models make of the mask."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_NAMES = ("wpe", "pos")


@dataclass(frozen=True)
class LearnedPositions:
    """What a model's learned position embeddings ask of position ids; rotary positions ask nothing.

    Args:
        limits (`tuple[int, int]`, *optional*): The position ids `[first, end)` that have an embedding.
        from_mask (`bool`, defaults to `False`): Whether the model counts positions from the first token that
            `attention_mask` does not hide, as OPT does.
    """

    limits: tuple[int, int] | None = None
    from_mask: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LearnedPositions":
        """Finds the position embeddings of a model by their names."""
        tokens = model.get_input_embeddings()
        found: list[Any] = [
            module
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding)
            and module is not tokens
            and any(part in name.rpartition(".")[2] for part in _NAMES)
        ]
        if not found:
            return cls()
        offsets = [int(getattr(module, "offset", 0)) for module in found]
        ends = [module.num_embeddings - offset for module, offset in zip(found, offsets, strict=True)]
        masked = any("attention_mask" in inspect.signature(type(module).forward).parameters for module in found)
        return cls((-min(offsets), min(ends)), masked)

    def make(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """The position ids that the model itself would make of a full batch that has none: padding has -1."""
        mask = batch.get("attention_mask")
        if not self.from_mask or mask is None:
            return None
        return mask.long().cumsum(dim=1) * mask.long() - 1
