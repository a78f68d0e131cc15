"""The loss of every single token of a batch, for evaluation: the logits of a long sequence are never in memory."""

from typing import Any

from torch import Tensor

from ...errors import BatchError
from ...layers.loss import IGNORE_INDEX
from ...ranks.collectives import gather_tokens
from ..batches.documents import batch_shape
from ..batches.sharded import checksum, is_sharded
from ..forward_pass import ForwardPass
from ..lazy_head import token_losses_of
from .base import Part
from .shared_beginnings import SharedBeginnings
from .tokens import check_ranges


class TokenLosses(Part):
    """Scores each token where [`hf_burst.token_losses`] asks for it, in place of the logits."""

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
