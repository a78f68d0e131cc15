"""Scores of single tokens over ranks, of whole batches and behind a remembered document."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import BatchError
from ...layers.loss import IGNORE_INDEX
from ...layers.loss import token_losses as losses_of
from ..batches.documents import batch_shape
from ..batches.sharded import checksum
from ..groups import PATCH
from ..parts.token_losses import TokenLosses
from ..parts.tokens import check_ranges
from .memory import RememberedDocument, with_document
from .request import check, patched


def token_losses(model: nn.Module, batch: Mapping[str, Any], memory: RememberedDocument | None = None) -> Tensor:
    """The cross-entropy of every token of a full batch, over all ranks that share it. It has no gradient.

    Every rank of the group calls it with the same batch. Ranks score their own tokens, some at a time, and exchange one
    number a token. Behind a memory every rank scores all. Switch the model to evaluation first (`model.eval()`).

    Args:
        model (`nn.Module`): A model that [`patch_model`] patched, or what `accelerator.prepare` made of it.
        batch (mapping): A full batch, see [`shard_batch`], with `labels` of shape `(batch, tokens)`.
        memory ([`RememberedDocument`], *optional*): A document that stands before each row; the batch is then
            `input_ids` and `labels`, with an `attention_mask` if it is padded on the left.

    Returns:
        `torch.Tensor` of shape `(batch, tokens)` in nats, fp32 (fp64 for a model in fp64), the same on every rank. Each
        value stands where its label does. It is 0 where nothing is predicted: labels of -100, and the first token of a
        row for a causal model, unless a memory stands before it.

    Raises:
        ConfigError: If the model is not patched, or the memory is not of this model.
        BatchError: If there are no labels, or the batch is sharded already.

    Example:

    ```python
    >>> losses = hf_burst.token_losses(model, {"input_ids": tokens, "labels": tokens})
    >>> perplexity = losses[:, -1000:].mean().exp()  # of the last thousand tokens
    ```
    """
    base, _ = patched(model)
    if memory is not None:
        return _behind(model, batch, memory)
    task = getattr(base, PATCH).task
    (part,) = (part for part in getattr(base, PATCH).parts if isinstance(part, TokenLosses))
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if task.generates:
        inputs["use_cache"] = False
    part.wanted, part.labels = True, batch.get("labels")
    try:
        with torch.no_grad():
            model(**inputs)
        losses: Tensor | None = part.losses
    finally:
        part.wanted, part.labels, part.losses = False, None, None
    assert losses is not None, "the model ran"
    return functional.pad(losses, (1, 0))[:, :-1] if task.causal else losses


@torch.no_grad()
def _behind(model: nn.Module, batch: Mapping[str, Any], memory: RememberedDocument) -> Tensor:
    """The losses of tokens that stand behind a document."""
    base, group = patched(model)
    error: Exception | None = None
    checksums: dict[str, Tensor] = {}
    ids, mask, labels = (batch.get(name) for name in ("input_ids", "attention_mask", "labels"))  # type: Any, Any, Any
    whole = shown = torch.empty(0)
    try:
        if others := sorted(set(batch) - {"input_ids", "attention_mask", "labels"}):
            raise BatchError(f"Behind a memory a batch is input_ids and labels; leave out {', '.join(others)}.")
        check(base, {"input_ids": ids, "use_cache": True})
        if labels is None or labels.shape != ids.shape:
            shape = "missing" if labels is None else f"of shape {tuple(labels.shape)}"
            raise BatchError(f"The labels are {shape}; token_losses needs labels of shape {batch_shape(batch)}.")
        check_ranges({"input_ids": ids, "labels": labels}, base.config.get_text_config().vocab_size, None, None)
        whole, shown = with_document(memory, ids, mask)
        own = checksum(batch)
        checksums = {} if own is None else {"answers (checksum)": own}
    except Exception as problem:  # whatever it is, the other ranks must not wait for this one
        error = problem
    facts = {"document": memory.number}
    group.agree(facts, error, base.device, 0, checksums, doing="token_losses behind a memory")
    memory.check(base, group)
    new = labels.shape[1]
    positions = (shown.cumsum(1) - 1).clamp(min=0)[:, -new:]
    found = base(
        input_ids=whole[:, -new:],
        attention_mask=shown,
        position_ids=positions,
        past_key_values=memory.cache(),
        use_cache=True,
    ).logits
    padding = shown.shape[1] - shown.sum(1)  # the first token of a row is predicted by the document alone
    before = functional.pad(found, (0, 0, 1, 0))[:, :-1]
    first = torch.arange(new, device=found.device) == padding[:, None]
    before = torch.where(first[..., None], memory.logits.to(found), before)
    hidden = torch.arange(new, device=found.device) < padding[:, None]
    return losses_of(before, labels.masked_fill(hidden, IGNORE_INDEX))
