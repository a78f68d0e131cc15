"""Checks of models without a language-model head: their batches, and the number that is compared."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..hf.models.cut_point import reader_of
from ..hf.models.task import CAUSAL_READER, task_of
from ..hf.view import ModelView
from ..layers.loss import IGNORE_INDEX

Batch = dict[str, Tensor]


def kinds_of(model: PreTrainedModel, kinds: Sequence[str]) -> list[str]:
    """Returns the kinds of batches that a model takes. Rows with one label are not packed, and rows are not padded if
    any token may be selected as an answer."""
    name = type(model).__name__
    if (
        not task_of(ModelView(model)).reads
        or reader_of(ModelView(model)).root is model
        or "ForTokenClassification" in name
    ):
        return list(kinds)
    return [kind for kind in kinds if kind == "one sequence" or (kind == "padded" and "QuestionAnswering" not in name)]


def judged(batch: Batch, model: PreTrainedModel) -> Batch:
    """Returns a batch with labels for the model's head instead of token labels."""
    name, labels, kinds = type(model).__name__, batch["labels"], int(model.config.num_labels or 0)
    given = {key: value for key, value in batch.items() if key != "labels"}
    rows, last = torch.arange(len(labels)), labels.shape[1] - 1
    if reader_of(ModelView(model)).root is model:
        return given
    if "ForTokenClassification" in name:
        given["labels"] = torch.where(labels == IGNORE_INDEX, labels, labels % kinds)
    elif "QuestionAnswering" in name:
        given |= {"start_positions": 3 + rows, "end_positions": last - rows}
    else:
        given["labels"] = (rows + 1) % kinds
    return given


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    """Sets the padding token to 0, so that a decoder's head finds the last token of a row, and returns the model."""
    if task_of(ModelView(model)) == CAUSAL_READER:
        model.config.get_text_config().pad_token_id = 0
    return model


def padded_on_right(batch: Batch) -> Batch:
    """Returns a padded batch whose rows all begin with a token, for models that classify by the first one."""
    mask = batch["attention_mask"].clone()
    mask[0] = mask[0].sort(descending=True).values
    hidden = mask == 0
    return batch | {
        "attention_mask": mask,
        "input_ids": batch["input_ids"].clamp(min=3).masked_fill(hidden, 0),
        "labels": batch["labels"].masked_fill(hidden, IGNORE_INDEX),
    }


def judgement(model: PreTrainedModel, batch: Mapping[str, Tensor], bounds: Sequence[int] | None = None) -> Tensor:
    """Returns the loss of a model's head or, for a model without one, a number that depends on all hidden states.

    Args:
        model (`PreTrainedModel`): The model, patched or not.
        batch (mapping): Its inputs.
        bounds (sequence of `int`, *optional*): Document boundaries; documents then run one by one.
    """
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "position_ids")}
    if bounds is None:
        outputs = model(**batch)
        if outputs.get("loss") is not None:
            loss: Tensor = outputs.loss
            return loss
        values = outputs[0]
    else:
        parts = [model(**{key: value[:, a:b] for key, value in inputs.items()}) for a, b in pairwise(bounds)]
        values = torch.cat([part[0] for part in parts], dim=1)
        if "labels" in batch:
            return nn.functional.cross_entropy(values.flatten(0, 1), batch["labels"].flatten())
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(values.shape, generator=generator, dtype=torch.float64).to(values)
    if batch.get("attention_mask") is not None:
        weights = weights * batch["attention_mask"][..., None]
    pooled = outputs.get("pooler_output") if "position_ids" not in batch else None  # one per row, not per document
    return (values * weights).sum() + (0.0 if pooled is None else (pooled * weights[:, 3]).sum())
