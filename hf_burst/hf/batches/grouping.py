"""Samples that hold several texts, such as a document with each of its questions."""

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import BatchError


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
