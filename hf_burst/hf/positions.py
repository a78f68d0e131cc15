"""Learned position embeddings: which positions there are, and the position ids that some models make of the mask."""

import inspect
from collections.abc import Iterator, Mapping
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
        from_mask (`bool`, defaults to `False`): Whether positions count from the first visible token, as in OPT.
        padding_idx (`int`, *optional*): A padding token that is not counted, as in RoBERTa; others begin one above it.
    """

    limits: tuple[int, int] | None = None
    from_mask: bool = False
    padding_idx: int | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LearnedPositions":
        """Finds the position embeddings of a model by their names."""
        tokens = model.get_input_embeddings()
        limits: list[tuple[int, int]] = []
        from_mask, padding_idx = False, None
        owners: Iterator[Any] = model.modules()
        for owner in owners:
            if isinstance(getattr(owner, "pos_encoding", None), torch.Tensor):  # CTRL
                limits.append((0, len(owner.pos_encoding)))
            if numbers_tokens(owner):
                padding_idx = owner.padding_idx
            for name, module in owner.named_children():
                if isinstance(module, nn.Embedding) and module is not tokens and any(part in name for part in _NAMES):
                    offset = int(getattr(module, "offset", 0))
                    limits.append((-offset, module.num_embeddings - offset))
                    from_mask |= "cumsum" in inspect.unwrap(type(owner).forward).__code__.co_names
        if not limits:
            return cls(padding_idx=padding_idx)
        return cls((max(first for first, _ in limits), min(end for _, end in limits)), from_mask, padding_idx)

    def make(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """The position ids that the model would make of a full batch without any, if not those from 0."""
        mask, ids = batch.get("attention_mask"), batch.get("input_ids")
        if self.padding_idx is not None and ids is not None:
            real = (ids != self.padding_idx).long()
            return real.cumsum(dim=1) * real + self.padding_idx
        if self.padding_idx is not None:
            embeds = batch["inputs_embeds"]
            return torch.arange(embeds.shape[1], device=embeds.device)[None] + self.padding_idx + 1
        if self.from_mask and mask is not None:
            return mask.long().cumsum(dim=1) * mask.long() - 1
        return None


def numbers_tokens(module: nn.Module) -> bool:
    """Whether a module counts positions from `padding_idx + 1`, by leaving out the tokens that are `padding_idx`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "create_position_ids_from_input_ids" in code.co_names


def segment_count(model: PreTrainedModel) -> int | None:
    """The token types of which a model has embeddings apart from those of its tokens; `None` for no such table."""
    tables = [getattr(module, "token_type_embeddings", None) for module in model.modules()]
    return min((table.num_embeddings for table in tables if isinstance(table, nn.Embedding)), default=None)
