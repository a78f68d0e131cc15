"""Checks of models without a language-model head: their batches, and the number that is compared."""

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..hf.models.cut_point import reader_of
from ..hf.models.task import CAUSAL_READER, Task, task_of
from ..hf.view import ModelView
from ..layers.loss import IGNORE_INDEX

TOKEN_KINDS = "mm_token_type_ids"
_OF_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids", TOKEN_KINDS, "position_ids")
Batch = dict[str, Tensor]


def model_task(model: PreTrainedModel) -> Task:
    """Returns a model's task."""
    return task_of(ModelView(model))


def kinds_of(model: PreTrainedModel, kinds: Sequence[str]) -> list[str]:
    """Returns the kinds of batches that a model takes. Rows with one label are not packed, and rows are not padded if
    any token may be selected as an answer."""
    name = type(model).__name__
    by_token = not model_task(model).reads or reader_of(ModelView(model)).root is model
    if by_token or "ForTokenClassification" in name:
        return list(kinds)
    return ["one sequence"] if "QuestionAnswering" in name else ["one sequence", "padded"]


def judged(batch: Batch, model: PreTrainedModel) -> Batch:
    """Returns a batch with labels for the model's head instead of token labels."""
    name = type(model).__name__
    kinds = int(model.config.num_labels or 0)
    given = dict(batch)
    labels = given.pop("labels")
    rows = torch.arange(len(labels))
    if reader_of(ModelView(model)).root is model:
        return given
    if "ForTokenClassification" in name:
        given["labels"] = torch.where(labels == IGNORE_INDEX, labels, labels % kinds)
    elif "QuestionAnswering" in name:
        given["start_positions"] = 3 + rows
        given["end_positions"] = labels.shape[1] - 1 - rows
    else:
        given["labels"] = (rows + 1) % kinds
    return given


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    """Sets the padding token to 0, so that a decoder's head finds the last token of a row, and returns the model."""
    if model_task(model) == CAUSAL_READER:
        model.config.get_text_config().pad_token_id = 0
    return model


def judgement(model: PreTrainedModel, batch: Mapping[str, Any]) -> Tensor:
    """Returns a model's loss or, for a model without one, a number that depends on all hidden states."""
    outputs = model(**batch)
    if outputs.get("loss") is not None:
        return outputs.loss
    number, weights = _weighted_sum(outputs[0], batch)
    pooled = outputs.get("pooler_output")
    if pooled is not None and "position_ids" not in batch:  # one per row, not per document
        number = number + (pooled * weights[:, 3]).sum()
    return number


def judgement_apart(model: PreTrainedModel, batch: Mapping[str, Tensor], documents: Sequence[Sequence[int]]) -> Tensor:
    """Returns the [`judgement`] of a model in one process that gets the documents of each row, between these bounds,
    one by one."""
    task = model_task(model)
    takes = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if task.generates else {}
    keys = [key for key in _OF_TOKENS if key in batch and key in takes]
    rows = []
    for row, bounds in enumerate(documents):
        pieces = [
            {key: batch[key][min(row, len(batch[key]) - 1)][None, start:stop] for key in keys}
            for start, stop in pairwise(bounds)
        ]
        outputs = [model(**piece, **options) for piece in pieces]
        rows.append(torch.cat([output.get("logits", output[0]) for output in outputs], dim=1))
    values = torch.cat(rows)
    labels = batch.get("labels")
    if labels is None:
        return _weighted_sum(values, batch)[0]
    if task.generates:
        values = values[:, :-1]
        labels = labels[:, 1:]
    loss = nn.functional.cross_entropy(values.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return loss / batch.get("num_items_in_batch", (labels != IGNORE_INDEX).sum())


def _weighted_sum(values: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns a sum of hidden states by random weights, which are 0 for padding, and the weights."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(values.shape, generator=generator, dtype=torch.float64).to(values)
    if batch.get("attention_mask") is not None:
        weights = weights * batch["attention_mask"][..., None]
    return (values * weights).sum(), weights
