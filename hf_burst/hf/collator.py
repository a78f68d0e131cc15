"""The explicit mode: batches that are sharded before they reach the model."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..config import BurstConfig
from ..errors import BatchError
from ..mesh import ContextGroup
from .accelerate import resolve_group
from .cutting import cut_batch
from .sharded import LAYOUT_KEY, describe_shard
from .task import Task, task_named


def shard_batch(
    batch: Mapping[str, Any],
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    config: BurstConfig | None = None,
    causal: bool = True,
) -> dict[str, Any]:
    """This rank's part of a full batch.

    Labels are shifted before they are cut (those of masked language models are not), position ids are made explicit,
    padding masks and packed documents go into a layout (the key `"burst_batch"`), and the sequence is padded to a whole
    number of equal chunks.

    Args:
        batch (mapping): What a Transformers data collator returns: `input_ids` of shape `(batch, tokens)`, and any of
            `labels`, `attention_mask`, `position_ids`, `token_type_ids`, `inputs_embeds`, `cu_seq_lens_q`. Equal on
            all ranks of the group.
        mesh (`DeviceMesh` or `ProcessGroup`, *optional*): The ranks that share the sequence; by default those of
            accelerate's state ([`BurstParallelismConfig`]), else all.
        config ([`BurstConfig`], *optional*): How to cut. Chunks are balanced for layers that see whole documents: how
            far those of the model do is not known here.
        causal (`bool`, defaults to `True`): Whether the batch is for a causal language model; `False` for a masked one
            (`...ForMaskedLM`). A patched model refuses batches of the other kind.

    Returns:
        `dict`: The same keys for this rank's tokens, without `attention_mask`, with `position_ids` and, if there were
        `labels` and it is causal, `shift_labels`. Pass it to a patched model as it is.

    Raises:
        BatchError: If the batch is empty, shapes disagree or the mask is not padding.
        ShardingError: If the sequence has fewer tokens than chunks.
    """
    group = resolve_group(None if mesh is None else ContextGroup.from_mesh(mesh))
    return _shard(batch, config or BurstConfig(), group.rank, group.size, task_named(causal))


def _shard(batch: Mapping[str, Any], config: BurstConfig, rank: int, ranks: int, task: Task) -> dict[str, Any]:
    if "shift_labels" in batch or LAYOUT_KEY in batch:
        raise BatchError("The batch carries shift_labels, so it counts as sharded already. Shard it once.")
    shard, layout = cut_batch(batch, config, rank, ranks, task)
    return {**shard, LAYOUT_KEY: describe_shard(shard, batch, layout, rank, task)}


class BurstCollator:
    """A data collator that shards what another one returns. For `Trainer(data_collator=...)` or a `DataLoader`.

    Args:
        base_collator (`Callable`): Any collator that returns a mapping of tensors, such as
            `DataCollatorForLanguageModeling` or `DataCollatorWithFlattening`.
        mesh (`DeviceMesh` or `ProcessGroup`, *optional*): As in [`shard_batch`].
        config ([`BurstConfig`], *optional*): As in [`shard_batch`].
        causal (`bool`, *optional*): As in [`shard_batch`]. By default `False` for a `base_collator` that masks tokens
            (`DataCollatorForLanguageModeling(mlm=True)`), else `True`.

    Example:

    ```python
    >>> collator = hf_burst.BurstCollator(DataCollatorForLanguageModeling(tokenizer, mlm=False))
    ```
    """

    def __init__(
        self,
        base_collator: Callable[[list[Any]], Mapping[str, Any]],
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
        config: BurstConfig | None = None,
        causal: bool | None = None,
    ) -> None:
        self.base_collator = base_collator
        self.causal = not getattr(base_collator, "mlm", False) if causal is None else causal
        self.config = config or BurstConfig()
        self._group = None if mesh is None else ContextGroup.from_mesh(mesh)
        self._place: tuple[int, int] | None = None

    def _resolve(self) -> tuple[int, int]:
        """This rank and the size of the group, found at the first use, in the main process."""
        if self._place is None:
            group = resolve_group(self._group)
            self._place = (group.rank, group.size)
        return self._place

    def __call__(self, features: list[Any]) -> dict[str, Any]:
        """Collates samples, then shards the batch."""
        return _shard(self.base_collator(features), self.config, *self._resolve(), task_named(self.causal))

    def __getstate__(self) -> dict[str, Any]:
        """For data loader workers, which know nothing of groups: the place is found before they start."""
        self._resolve()
        return self.__dict__
