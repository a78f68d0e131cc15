"""The explicit mode, where batches are sharded before they reach the model; and samples that hold several texts."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import get_worker_info

from ...config import BurstConfig
from ...errors import BatchError
from ...layers.loss import IGNORE_INDEX
from ...ranks.group import ContextGroup
from ..groups import resolve_group
from ..models.task import Task, task_named
from .cutting import cut_inputs, cut_targets, layout_of
from .joining import Joined, fit, join_texts, obstacle_in
from .packing import join_samples
from .sharded import LAYOUT_KEY, describe_shard


def shard_batch(
    batch: Mapping[str, Any],
    group: DeviceMesh | dist.ProcessGroup | None = None,
    config: BurstConfig | None = None,
    causal: bool = True,
) -> dict[str, Any]:
    """Returns this rank's shard of a full batch.

    Labels are shifted before they are sharded, except for masked language models. Position ids are added. A layout (the
    key `"burst_batch"`) replaces padding masks and packed boundaries. Sequences are padded to whole chunks.

    Args:
        batch (mapping): What a Transformers data collator returns: `input_ids` of shape `(batch, tokens)`, and any of
            `labels`, `attention_mask`, `position_ids`, `token_type_ids`, `inputs_embeds`, `cu_seq_lens_q`, `seq_idx`.
            It must be equal on all ranks of the group.
        group (`DeviceMesh` or `ProcessGroup`, *optional*): The ranks that share the sequence; by default the group in
            accelerate's state ([`BurstParallelismConfig`]), else all ranks.
        config ([`BurstConfig`], *optional*): How to shard. Chunks are balanced for layers that see whole documents.
        causal (`bool`, defaults to `True`): Whether the model is causal; `False` for masked ones (`...ForMaskedLM`).

    Returns:
        `dict`: The same keys for this rank's tokens, without `attention_mask` but with `position_ids`, and with
        `shift_labels` if the batch has `labels` and `causal` is set. Pass it unchanged to a patched model.

    Raises:
        BatchError: If the batch is empty, shapes disagree or the mask is not padding.
    """
    ranks = resolve_group(None if group is None else ContextGroup.from_mesh(group))
    return _shard(batch, config or BurstConfig(), ranks, task_named(causal))


def _shard(batch: Mapping[str, Any], config: BurstConfig, group: ContextGroup, task: Task) -> dict[str, Any]:
    if "shift_labels" in batch or LAYOUT_KEY in batch:
        raise BatchError("The batch carries shift_labels, so it counts as sharded already. Shard it once.")
    joined = _joined(batch) if config.share_prefixes is True and task.causal else None
    row, parents = (batch, ()) if joined is None else (joined.batch, (joined.parents,))
    layout = layout_of(row, config, group.size, task, parents=parents)
    shard = cut_inputs({**row, **cut_targets(row, layout, group.rank, task)}, layout, group.rank)
    return {**shard, LAYOUT_KEY: describe_shard(shard, batch, layout, group.rank, task)}


def _joined(batch: Mapping[str, Any]) -> Joined | None:
    """Returns the texts with common prefixes joined into one row; `None` if none have one, or if a label counts in
    several texts, because trainers count the labels of the collated batch."""
    if batch.get("input_ids") is None or obstacle_in(batch) or not fit(batch):
        return None
    joined = join_texts(batch, None, least=1)
    if joined is None or joined.labels is None:
        return joined
    counts = {int((labels != IGNORE_INDEX).sum()) for labels in (joined.labels, joined.batch["labels"])}
    return joined if len(counts) == 1 else None


class BurstCollator:
    """A data collator that shards the output of another one, for `Trainer(data_collator=...)` or a `DataLoader`.

    Args:
        base_collator (`Callable`): Any collator that returns a mapping of tensors, such as
            `DataCollatorForLanguageModeling` or `DataCollatorWithFlattening`.
        group (`DeviceMesh` or `ProcessGroup`, *optional*): As in [`shard_batch`].
        config ([`BurstConfig`], *optional*): As in [`shard_batch`]. With `share_prefixes=True`, texts with a common
            prefix are joined before they are sharded, unless a label counts in several of them.
        causal (`bool`, *optional*): As in [`shard_batch`]. By default `False` for a `base_collator` that masks tokens
            (`DataCollatorForLanguageModeling(mlm=True)`), else `True`.
        packing (`bool`, defaults to `False`): Whether to join the samples of a batch into one packed row instead, even
            with images or sound, which TRL does not pack. The row stays whole, because models with towers shard it
            themselves. `per_device_train_batch_size` samples are joined; `group`, `config` and `causal` have no effect.

    Example:

    ```python
    >>> collator = hf_burst.BurstCollator(DataCollatorForLanguageModeling(tokenizer, mlm=False))
    >>> collator = hf_burst.BurstCollator(DataCollatorForVisionLanguageModeling(processor), packing=True)
    ```
    """

    def __init__(
        self,
        base_collator: Callable[[list[Any]], Mapping[str, Any]],
        group: DeviceMesh | dist.ProcessGroup | None = None,
        config: BurstConfig | None = None,
        causal: bool | None = None,
        packing: bool = False,
    ) -> None:
        self.packing = packing
        self.base_collator = base_collator
        self.causal = not getattr(base_collator, "mlm", False) if causal is None else causal
        self.config = config or BurstConfig()
        self._named = None if group is None else ContextGroup.from_mesh(group)
        self._sent: ContextGroup | None = None  # the group of the process that pickled this copy for a worker

    def __call__(self, features: list[Any]) -> dict[str, Any]:
        """Collates samples, then shards or packs the batch."""
        if self.packing:
            return join_samples([self.base_collator([feature]) for feature in features])
        group = self._sent if self._sent and get_worker_info() else resolve_group(self._named)
        return _shard(self.base_collator(features), self.config, group, task_named(self.causal))

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for data loader workers, with the group resolved, because workers know no groups."""
        return {**self.__dict__, "_sent": None if self.packing else resolve_group(self._named)}


class GroupCollator:
    """A data collator for samples that hold several texts, such as a document with each of its questions.

    All texts become rows of one batch. Their common prefixes are computed once, see `share_prefixes` of
    [`BurstConfig`].

    Args:
        base_collator (`Callable`): Any text collator, such as `DataCollatorForSeq2Seq(tokenizer)`.

    Raises:
        BatchError: If a column of a sample is not a list of texts, or columns differ in their number.

    Example:

    ```python
    >>> sample = {"input_ids": [document + question for question in questions], "labels": labels}
    >>> collator = hf_burst.GroupCollator(DataCollatorForSeq2Seq(tokenizer))
    >>> batch = collator([sample])
    ```
    """

    def __init__(self, base_collator: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self.base_collator = base_collator

    def __call__(self, features: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Collates the texts of all samples."""
        return self.base_collator([text for sample in features for text in _texts_of(sample)])


def _texts_of(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the texts of a sample, each with its own columns."""
    columns = [[] if isinstance(c, str) or not hasattr(c, "__len__") else c for c in sample.values()]
    counts = {len(column) for column in columns}
    if len(counts) != 1 or 0 in counts or not all(hasattr(text, "__len__") for column in columns for text in column):
        raise BatchError(
            f"A sample holds {str(sample)[:200]}; GroupCollator takes as many texts in every column, at least one, "
            "each a list of its tokens: [[1, 2, 3], [1, 2, 4]]. Remove other columns."
        )
    return [dict(zip(sample, values, strict=True)) for values in zip(*columns, strict=True)]
