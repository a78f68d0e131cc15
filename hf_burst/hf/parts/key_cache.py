"""Reads the prompt of a generation over ranks: cut as in training, with its keys stored in a cache."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import BatchError, RankMismatchError
from ...ranks.collectives import gather_stacked
from ...ranks.group import ContextGroup
from ..batches.documents import TOKEN_KEYS, batch_shape, check_shape, tokens_of
from ..batches.sharded import checksum
from ..forward_pass import Batch, Call, ForwardPass
from ..sharded_cache import ShardedCache
from .base import Outputs, Part

# arguments with one row per row of the batch; copies of a prompt have equal rows
_BY_ROW = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


class KeyCache(Part):
    """Lets the cache of a pass store the keys of the prompt. Copies of a prompt in the batch, as for beams, are read
    once."""

    def check(self, call: Call, batch: Batch) -> None:
        layout, held = batch.layout, call.cache is not None
        if held and any(stop < layout.length - layout.padding for _, stop in layout.real):
            raise BatchError("Prompts are padded on the right. Pad on the left: tokenizer.padding_side = 'left'.")
        call.agreement.add("a cache over ranks", held)

    def begin(self, run: ForwardPass) -> None:
        if run.call.cache is not None:
            run.call.cache.begin_prompt(run.batch.layout, run.device)

    def after(self, run: ForwardPass, outputs: Outputs) -> None:
        if run.call.cache is not None:
            run.call.cache.end_prompt()


def repeated(values: Tensor, cache: ShardedCache | None) -> Tensor:
    """Returns logits or states of prompts that were read once, repeated for each copy of a prompt in the batch."""
    return values if cache is None or cache.copies == 1 else values.repeat_interleave(cache.copies, 0)


def each_once(cache: ShardedCache, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the batch with each prompt once, where `generate` made consecutive copies. Raises for a tensor that may
    not have one row per prompt."""
    copies, part = cache.copies, dict(batch)
    if batch_shape(batch)[0] % copies:
        raise BatchError(f"A batch of {batch_shape(batch)[0]} rows does not hold {copies} copies of each prompt.")
    for name, value in batch.items():
        if copies == 1 or not isinstance(value, Tensor) or not value.ndim:
            continue
        if name not in _BY_ROW:
            raise BatchError(f"{name} is not known to have a row for each prompt. Generate without beams, one by one.")
        dim = value.ndim - 2 if name == "position_ids" else 0
        part[name] = value if value.shape[dim] == 1 else value.unflatten(dim, (-1, copies)).select(dim + 1, 0)
    return part


def begin_step(cache: ShardedCache, batch: dict[str, Any]) -> None:
    """Prepares cache and batch for a pass over new tokens.

    Raises:
        BatchError: If the tokens do not fit the cache.
        RankMismatchError: On all ranks, if they were given different tokens, unless `generate` has compared them, or
            if another rank has failed before the pass.
    """
    rows, new = batch_shape(batch)
    keep = batch.get("logits_to_keep", 0)
    if isinstance(keep, int) and 0 < keep < new:  # a number would make Gemma 4 slice its mask
        batch["logits_to_keep"] = torch.arange(new - keep, new, device=tokens_of(batch).device)
    group = cache.answer.group
    if not cache.compares and not same_tokens(group, batch):
        group.agree({}, None, tokens_of(batch).device, doing="generate")  # raises the error of the other rank
    if cache.is_within_pass:
        raise BatchError("A pass over this cache ended in its middle, so its layers differ. Make a new one.")
    shown, length = batch.get("attention_mask"), cache.get_seq_length()
    if shown is not None:
        check_shape("attention_mask", shown, (rows, length + new), f" behind {length} tokens in the cache")
    positions = cache.begin_step(rows, new, shown)
    if batch.get("position_ids") is None and not cache.answer.unpadded:
        batch["position_ids"] = positions.clamp(min=0)  # a model itself would count the padding of other questions


def same_tokens(group: ContextGroup, batch: Mapping[str, Any], failed: bool = False) -> bool:
    """Compares the new tokens of all ranks, unless one of them has failed. Returns whether none has.

    Raises:
        RankMismatchError: On all ranks, if they differ.
    """
    if group.size == 1:
        return not failed
    own = checksum({name: batch[name] for name in TOKEN_KEYS if batch.get(name) is not None})
    with group.messages():
        every = gather_stacked(torch.stack([own, torch.full_like(own, int(failed))]), group)
    sums, failures = zip(*every.tolist(), strict=True)  # generate also waits for the device after each token
    if any(failures):
        return False
    if len(set(sums)) > 1:
        raise RankMismatchError(
            "The ranks have chosen different tokens. They have the same scores and random numbers, so a logits "
            "processor, or a loop of your own, differs between them: have it depend on nothing but its arguments."
        )
    return True
