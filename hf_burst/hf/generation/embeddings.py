"""One vector of each text of a batch, over ranks, without its hidden states being gathered."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from ...errors import ConfigError
from ..groups import PATCH
from ..parts.states import States
from .request import patched


def embeddings(
    model: nn.Module, batch: Mapping[str, Any], pooling: Literal["first", "last", "mean"] = "last"
) -> Tensor:
    """The embedding of each row of a batch, pooled from hidden states that lie on several ranks.

    Every rank of the group calls it with the same batch. Each pools its own tokens, and one exchange of a vector a row
    adds up. Gradients are those of the whole batch, once a data-parallel wrapper has averaged them over ranks, for
    contrastive losses and others. To evaluate, call it within `torch.no_grad()`, after `model.eval()`.

    Args:
        model (`nn.Module`): A model without a head (`AutoModel`) that [`patch_model`] patched, or what
            `accelerator.prepare` made of it.
        batch (mapping): A full batch, a text in each row, padded on either side or not.
        pooling (`str`, defaults to `"last"`): What stands for a row: the state of its first or its last token, or the
            mean of all. Padding does not count.

    Returns:
        `torch.Tensor` of shape `(batch, hidden_size)`, in fp32 (fp64 for a model in fp64), the same on every rank.

    Raises:
        ConfigError: If the model is not patched or has a head, or there is no such pooling.
        BatchError: If a row packs several documents, or has no token.
        RankMismatchError: If ranks have other batches or other poolings.

    Example:

    ```python
    >>> model = hf_burst.patch_model(AutoModel.from_pretrained("Qwen/Qwen3-Embedding-0.6B"))
    >>> vectors = hf_burst.embeddings(model, tokenizer(documents, padding=True, return_tensors="pt"))
    ```
    """
    base, _ = patched(model)
    patch = getattr(base, PATCH)
    if not patch.task.reads or base.base_model is not base:
        raise ConfigError(
            f"{type(base).__name__} has a head, and embeddings are hidden states. Load the model by "
            "AutoModel.from_pretrained, and patch it."
        )
    (part,) = (part for part in patch.parts if isinstance(part, States))
    inputs = dict(batch) | ({"use_cache": False} if patch.task.causal else {})
    part.pooling = pooling
    try:
        found: Tensor = model(**inputs)["last_hidden_state"]
    finally:
        part.pooling = None
    return found
