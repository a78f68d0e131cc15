"""Hidden states of a rank's tokens that represent those of the whole batch, after a decoder or encoder.

What a head computes token by token is computed for this rank's tokens only; any other operation gets gathered states.
So a classifier's own pooling and loss run on the whole batch, and only a few scores per token are sent.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BatchError, ConfigError, UnsupportedModelError
from ...layers.loss import IGNORE_INDEX
from ...numerics import accumulation_dtype
from ...ranks.collectives import group_sum
from ..batches.cutting import check_padding
from ..forward_pass import Batch, Call, ForwardPass
from ..models.cut_point import reader_of
from ..models.task import Task
from ..spread.value import Spread
from ..spread.where import Where
from ..view import ModelView
from .base import Args, Handles, Outputs, Part
from .replicas import refuse_partitioned

POOLINGS = ("first", "last", "mean")  # of embeddings


def _hidden(call: Call, mask: Tensor, bare: bool) -> str:
    """Returns which token of a row a head or pooler reads, if a mask hides it; else an empty string."""
    config, ids = call.model.config.get_text_config(), call.given.get("input_ids")
    by_mean = getattr(config, "classifier_pooling", "cls") == "mean"
    if by_mean or (bare and (call.task.causal or getattr(call.model, "pooler", None) is None)):
        return ""
    if not call.task.causal:
        return "" if mask[:, 0].all() else "first token"
    pad = config.pad_token_id
    seen = torch.ones_like(mask) if pad is None or ids is None else (ids != pad).to(mask)
    judged = (torch.arange(mask.shape[1], device=mask.device) * seen).argmax(-1)
    return "" if mask.gather(1, judged[:, None]).all() else f"last token that is not config.pad_token_id ({pad})"


def vectors_of_documents(states: Tensor, lies: Where, pooling: str) -> Tensor:
    """Returns a vector of each document, `(documents, width)`, row by row: the state of its first or last token, or the
    mean of all. It sums what the tokens of each rank contribute."""
    numbers, sizes = torch.full(lies.shape, -1, device="cpu"), list[int]()  # the document that a token contributes to
    for row, cuts in zip(numbers, lies.layout.real_documents, strict=True):
        for start, stop in pairwise(cuts):
            row[stop - 1 if pooling == "last" else start : start + 1 if pooling == "first" else stop] = len(sizes)
            sizes.append(stop - start)
    of_own = lies.layout.shard(numbers, lies.group.rank, -1).flatten()
    places = (of_own >= 0).nonzero()[:, 0]
    documents, wide = of_own[places].to(states.device), accumulation_dtype(states.dtype)
    counts = torch.tensor(sizes, dtype=wide, device=states.device)
    lies.share()
    with torch.autocast(states.device.type, enabled=False):  # sums need the wide dtype
        own = states.flatten(0, 1).index_select(0, places.to(states.device)).to(wide)
        total = own.new_zeros(len(counts), own.shape[-1]).index_add(0, documents, own)
        return group_sum(total / counts[:, None] if pooling == "mean" else total, lies.group)


class States(Part):
    """For models without a language-model head: wraps hidden states in [`Spread`] where the decoder or encoder returns
    them, and before its pooler."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def look(self, view: ModelView) -> Handles:
        if not self.task.reads:
            return ()
        reader = reader_of(view).root
        pooler = getattr(reader, "pooler", None)
        handles = []
        if reader is not view.root:
            handles.append(reader.register_forward_hook(self._returned))
        if isinstance(pooler, nn.Module):
            handles.append(pooler.register_forward_pre_hook(self._pooled))
        return handles

    def check(self, call: Call, batch: Batch) -> None:
        if not call.needs_states:
            return
        if call.group.size > 1:
            refuse_partitioned(call.model, "Hidden states, or a model without a language-model head, are not served")
        if call.asked.pooling is None:
            self._check_rows(call, batch)
            return
        lengths = batch.given.get("cu_seq_lens_q")
        if call.asked.pooling not in POOLINGS:
            raise ConfigError(f"embeddings was given pooling={call.asked.pooling!r}; it is one of {POOLINGS}.")
        if not call.task.reads and call.model.base_model is call.model:
            raise UnsupportedModelError(
                f"{type(call.model).__name__} has a head and no base model. Load it by AutoModel.from_pretrained."
            )
        batch.lies.check_texts()
        if lengths is not None and (torch.as_tensor(lengths).flatten().diff() == 0).any():
            raise BatchError("cu_seq_lens_q has a document of no tokens. Drop empty texts from the batch.")

    def _check_rows(self, call: Call, batch: Batch) -> None:
        """Raises for a shard, for documents that a head would judge as one, and for a result that depends on states of
        padding, which sees other tokens than in the unpatched model."""
        name, bare = type(call.model).__name__, reader_of(call.view) is call.view
        judges = " ".join(base.__name__ for base in type(call.model).__mro__)
        each, spans = "ForTokenClassification" in judges, "ForQuestionAnswering" in judges
        labels = batch.given.get("labels")
        mask = batch.given.get("attention_mask") if batch.layout.real and not batch.sharded else None
        hidden = "" if mask is None or each or spans else _hidden(call, mask, bare)
        BatchError.refuse(
            (
                not (bare or each) and any(len(bounds) > 2 for bounds in batch.layout.real_documents),
                f"The batch packs documents, and {name} judges a row as one. Give each a row (packing=False).",
            ),
            (batch.sharded, f"{name} needs the labels of whole rows. Give full batches (no BurstCollator)."),
            (
                mask is not None and spans,
                f"{name} chooses among all tokens, those of padding too, whose states are others than in one process. "
                "Give rows of one length, such as one row a batch, without padding.",
            ),
            (
                hidden,
                f"{name} judges the {hidden} of a row, and attention_mask hides it. Pad on the right, with this token.",
            ),
        )
        if mask is not None and each and labels is not None:
            check_padding((labels != IGNORE_INDEX) & (mask == 0))

    def after(self, run: ForwardPass, outputs: Outputs) -> None:
        if self.task.reads and reader_of(run.call.view) is run.call.view:
            outputs["last_hidden_state"] = self._standing_for_all(outputs["last_hidden_state"], run)
        if run.call.asked.pooling:
            outputs.pop("hidden_states", None)  # else it would be gathered
            states = outputs["last_hidden_state"]
            own = states.own if isinstance(states, Spread) else states  # from a model with a language-model head
            outputs["last_hidden_state"] = vectors_of_documents(own, run.batch.lies, run.call.asked.pooling)

    def _standing_for_all(self, states: Any, run: ForwardPass) -> Any:
        return Spread(states, lies=run.batch.lies) if isinstance(states, Tensor) else states

    def _returned(self, module: nn.Module, args: Args, output: Any) -> Any:
        if self.run is None:
            return output
        if isinstance(output, tuple):
            return (self._standing_for_all(output[0], self.run), *output[1:])
        output["last_hidden_state"] = self._standing_for_all(output["last_hidden_state"], self.run)
        return output

    def _pooled(self, module: nn.Module, args: Args) -> Any:
        if self.run is None:
            return None
        if not args or args[0].ndim != 3:
            raise UnsupportedModelError(
                f"{type(self.run.model).__name__} gives its pooler some of a rank's tokens, and not all. Make it with "
                "add_pooling_layer=False, or take a class that judges tokens."
            )
        return (self._standing_for_all(args[0], self.run), *args[1:])
