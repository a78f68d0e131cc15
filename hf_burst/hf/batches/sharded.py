"""Batches that arrive sharded: their extra data, how to recognise them, and checksums of batches."""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from ...errors import BatchError
from ...ranks.group import ContextGroup
from ...ranks.layout import SequenceLayout
from ..models.cut_point import TOKEN_INPUTS
from ..models.task import Task
from .documents import batch_shape, check_shape, real_tokens

LAYOUT_KEY = "burst_batch"
_UNCHANGED = ". Leave shards as hf_burst.shard_batch or BurstCollator made them"
_SPREAD = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio's share of 2**64 (Knuth, The Art of Computer Programming 6.4)
_PIECE = 2**22  # words that are summed at a time


@dataclass(frozen=True)
class ShardedBatch:
    """The extra data of a sharded batch, under the key `"burst_batch"`."""

    layout: SequenceLayout
    rank: int  # the rank of this shard
    fingerprint: int  # checksum of the whole batch
    positions: int  # checksum of this shard's position ids
    longest: int  # the highest position in the whole batch
    padded: bool  # whether rows of the whole batch begin with padding
    labelled: bool  # whether the batch had labels
    task: Task  # the task of the model it was sharded for


def is_sharded(batch: Mapping[str, Any]) -> bool:
    """Returns whether a batch counts as sharded, because it has a layout or `shift_labels`."""
    return batch.get("shift_labels") is not None or batch.get(LAYOUT_KEY) is not None


def describe_shard(
    shard: Mapping[str, Any], full: Mapping[str, Any], layout: SequenceLayout, rank: int, task: Task
) -> ShardedBatch:
    """Returns the extra data of a shard, with checksums that show whether shards belong together."""
    labelled = shard.get("labels") is not None
    positions = int(sum_of_bits(shard["position_ids"].long()))
    padded = any(start for start, _ in real_tokens(full))
    return ShardedBatch(layout, rank, int(checksum(full)), positions, longest_position(full), padded, labelled, task)


def longest_position(full: Mapping[str, Any]) -> int:
    """Returns the highest position in a full batch."""
    positions = full.get("position_ids")
    return batch_shape(full)[1] - 1 if positions is None else int(positions.max())


def layout_of_shard(batch: Mapping[str, Any], group: ContextGroup, task: Task) -> SequenceLayout:
    """Returns the layout of a batch that arrived sharded, checked against the model's group and task."""
    about: ShardedBatch | None = batch.get(LAYOUT_KEY)
    if about is None:
        raise BatchError(
            "The batch carries shift_labels without the layout of a shard. Give full batches with labels, or shards "
            "made by hf_burst.shard_batch or BurstCollator."
        )
    layout, shape = about.layout, batch_shape(batch)
    BatchError.refuse(
        (
            about.task != task,
            f"The batch was cut for a {about.task.kind} language model, this is a {task.kind} one. Give shard_batch "
            f"or BurstCollator causal={task.causal}.",
        ),
        (
            batch.get("attention_mask") is not None,
            "A sharded batch carries an attention_mask. shard_batch folds it into the layout; leave it out.",
        ),
        (
            about.labelled and batch.get("labels") is None,
            "The labels were taken out of a sharded batch, as Trainer does for label smoothing and compute_loss_func. "
            "Give the model full batches instead (no BurstCollator): their logits are gathered.",
        ),
        (
            (about.rank, layout.ranks) != (group.rank, group.size),
            f"The batch was sharded as part {about.rank} of {layout.ranks}, this process is rank {group.rank} of "
            f"{group.size}. Give the collator the same group as patch_model.",
        ),
    )
    check_shape("position_ids of a sharded batch", batch.get("position_ids"), shape, _UNCHANGED)
    if about.labelled:
        check_shape(f"{task.targets} of a sharded batch", batch.get(task.targets), shape, _UNCHANGED)
    if int(sum_of_bits(batch["position_ids"].long())) != about.positions:
        raise BatchError(f"The position_ids of a sharded batch are others than when it was sharded{_UNCHANGED}.")
    return layout


def checksum(batch: Mapping[str, Any]) -> torch.Tensor:
    """Returns a checksum of the token inputs, labels and padding mask of a batch, a scalar `torch.LongTensor` computed
    without a GPU sync; 0 if there are no such tensors."""
    total: torch.Tensor | None = None
    for key in (*TOKEN_INPUTS, "labels", "attention_mask"):
        value = batch.get(key)
        if isinstance(value, torch.Tensor):
            own = sum_of_bits(value if value.is_floating_point() else value.long()) + zlib.crc32(key.encode())
            total = own if total is None else total * _SPREAD + own.to(total.device)
    return torch.zeros((), dtype=torch.int64, device="cpu") if total is None else total


def sum_of_bits(tensors: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns a checksum of the bytes of a tensor, or of several in a row: a scalar `torch.LongTensor` on the device of
    the first; the host does not wait for tensors of one device. Only tensors of the same dtypes compare. On a GPU
    several are read in one pass, by a kernel, if Triton can compile it.

    Bytes are read as 64-bit words, which are mixed with their indices: one changed word always changes the sum, changes
    of several, as swaps, cancel with a chance of 2**-64 (splitmix64, Steele et al., OOPSLA 2014; products wrap)."""
    several = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    sums, place, count = list[torch.Tensor](), 0, 0
    for tensor in several:
        octets = tensor.detach().contiguous().flatten().view(torch.uint8)
        if octets.numel() % 8:
            octets = functional.pad(octets, (0, -octets.numel() % 8))
        elif octets.storage_offset() % 8:
            octets = octets.clone()
        words = octets.view(torch.int64)
        fused = _fused_sums(words.device) if several is tensors and words.is_cuda else None
        sums.append(fused(words, place, _SPREAD) if fused else _sums_of_words(words, place))
        place += words.numel()
        count += tensor.numel()  # tells padding from zeros
    every = [each.to(sums[0].device) for each in sums] or [torch.zeros(1, dtype=torch.int64, device="cpu")]
    return torch.cat(every).sum() + count


@cache
def _fused_sums(device: torch.device) -> Callable[[torch.Tensor, int, int], torch.Tensor] | None:
    """Returns the kernel for a GPU, if Triton is there and can compile, for which it needs a compiler of C, too."""
    try:
        from .fused_sums import sums_of_words

        sums_of_words(torch.zeros(1, dtype=torch.int64, device=device), 0, _SPREAD)
    except Exception:  # a checksum stops no run
        return None
    return sums_of_words


def _sums_of_words(words: torch.Tensor, place: int) -> torch.Tensor:
    """Returns sums of some words each, mixed with their indices, of which `place` is the first."""
    sums = []
    for piece in words.split(_PIECE):  # saves memory
        mixed = piece + torch.arange(place + 1, place + 1 + piece.numel(), device=words.device) * _SPREAD
        mixed = (mixed ^ ((mixed >> 30) & (2**34 - 1))) * _SPREAD  # shifts that bring no signs
        sums.append(((mixed ^ ((mixed >> 27) & (2**37 - 1))) * _SPREAD).sum())
        place += piece.numel()
    return torch.stack(sums)
