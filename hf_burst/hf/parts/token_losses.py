"""The loss of every single token of a batch, for evaluation: the logits of a long sequence are never in memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import BatchError, ConfigError
from ...layers.loss import IGNORE_INDEX
from ...ranks.collectives import gather_tokens
from ..batches.documents import batch_shape
from ..batches.sharded import checksum, is_sharded
from ..forward_pass import ForwardPass
from ..groups import PATCH
from ..lazy_head import token_losses_of
from .base import Part
from .shared_beginnings import SharedBeginnings
from .tokens import check_ranges


def token_losses(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The cross-entropy of every token of a full batch, over all ranks that share it. It has no gradient.

    Every rank of the group calls it with the same batch. Ranks score their own tokens, some at a time, and exchange one
    number a token. Switch the model to evaluation first (`model.eval()`).

    Args:
        model (`nn.Module`): A model that [`patch_model`] patched, or what `accelerator.prepare` made of it.
        batch (mapping): A full batch, see [`shard_batch`], with `labels` of shape `(batch, tokens)`.

    Returns:
        `torch.Tensor` of shape `(batch, tokens)` in nats, fp32 (fp64 for a model in fp64), the same on every rank. Each
        value stands where its label does. It is 0 where nothing is predicted: labels of -100, and the first token of a
        row for a causal model.

    Raises:
        ConfigError: If the model is not patched.
        BatchError: If there are no labels, or the batch is sharded already.

    Example:

    ```python
    >>> losses = hf_burst.token_losses(model, {"input_ids": tokens, "labels": tokens})
    >>> perplexity = losses[:, -1000:].mean().exp()  # of the last thousand tokens
    ```
    """
    patched = (module for module in model.modules() if PATCH in vars(module))
    patch = getattr(next(patched, None), PATCH, None)
    if patch is None:
        raise ConfigError("token_losses takes a patched model. Call hf_burst.patch_model(model) first.")
    (part,) = (part for part in patch.parts if isinstance(part, TokenLosses))
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if patch.task.generates:
        inputs["use_cache"] = False
    part.wanted, part.labels = True, batch.get("labels")
    try:
        with torch.no_grad():
            model(**inputs)
        losses = part.losses
    finally:
        part.wanted, part.labels, part.losses = False, None, None
    assert losses is not None, "the model ran"
    return functional.pad(losses, (1, 0))[:, :-1] if patch.task.causal else losses


class TokenLosses(Part):
    """Scores each token where [`token_losses`] asks for it, in place of the logits."""

    needs = (SharedBeginnings,)

    def __init__(self) -> None:
        self.wanted = False
        self.labels: Tensor | None = None
        self.losses: Tensor | None = None

    def wanted_labels(self) -> Tensor | None:
        """The labels whose losses are asked for."""
        return self.labels if self.wanted else None

    def prepare(self, run: ForwardPass) -> None:
        if not self.wanted:
            return
        if is_sharded(run.batch.given) or run.batch.given.get("logits_to_keep"):
            raise BatchError(
                "token_losses takes full batches (no shard_batch, no BurstCollator) without logits_to_keep."
            )
        joined = run.batch.joined
        shape = batch_shape(run.batch.given) if joined is None else tuple(joined.places.shape)
        if self.labels is None or tuple(self.labels.shape) != shape:
            shown = "missing" if self.labels is None else f"of shape {tuple(self.labels.shape)}"
            raise BatchError(f"The labels are {shown}; token_losses needs labels of shape {shape}, as input_ids.")
        check_ranges({"labels": self.labels}, run.model.config.get_text_config().vocab_size, None, None)
        labels = checksum({"labels": self.labels}, ())
        run.agreement.add("token losses", True)
        run.agreement.add("labels of tokens (checksum)", None if labels is None else int(labels))

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        if not self.wanted or self.labels is None:
            return
        joined = run.batch.joined
        labels = self.labels if joined is None else joined.batch["labels"]
        targets = run.task.targets_of(labels)[run.task.targets]
        own = run.batch.layout.shard(targets, run.group.rank, pad_value=IGNORE_INDEX)
        losses = gather_tokens(token_losses_of(outputs["logits"], own), run.batch.layout, run.group)
        self.losses = losses if joined is None else joined.restored_scores(losses)
