"""Pools one vector per document over ranks, without gathering hidden states."""

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal

from accelerate.utils import get_mixed_precision_context_manager
from torch import Tensor, nn

from ..batches.sharded import is_sharded
from ..forward_pass import Question
from ..groups import PATCH
from ..overrides import Override
from .settings import patched


def embeddings(
    model: nn.Module, batch: Mapping[str, Any], pooling: Literal["first", "last", "mean"] = "last"
) -> Tensor:
    """Returns the embedding of each document of a batch, pooled from hidden states that are sharded over ranks.

    Every rank of the group calls it with the same batch, or with its shard of one ([`BurstCollator`]). Each rank pools
    its own tokens, and one exchange of a vector per document adds them up. After a data-parallel wrapper has averaged
    gradients over ranks, they are those of the whole batch, for contrastive and other losses. To evaluate, call it
    within `torch.no_grad()`, after `model.eval()`.

    Args:
        model (`nn.Module`): A model that [`patch_model`] patched, with or without adapters, or the result of
            `accelerator.prepare`. If the model has a head (`AutoModelForCausalLM`, a classifier), only its base model
            runs. The head gets no gradient: freeze it, or set DDP's `find_unused_parameters=True`.
        batch (mapping): A full batch, or a shard. A row is one document, possibly padded on either side, or several
            packed ones (`position_ids` that restart, `cu_seq_lens_q`, `seq_idx`). Labels are not read.
        pooling (`str`, defaults to `"last"`): The vector of a document: the state of its first or its last token, or
            the mean of all its tokens. Padding does not count.

    Returns:
        `torch.Tensor` of shape `(documents, hidden_size)`, in the order of the batch, in fp32 (fp64 for a model in
        fp64), the same on every rank.

    Raises:
        ConfigError: If the model is not patched, or the pooling is unknown.
        UnsupportedModelError: If the model has a head and no base model, or DeepSpeed ZeRO-3 shards its weights.
        BatchError: If a document has no tokens, or texts were joined when the batch was sharded.
        RankMismatchError: If batches or poolings differ between ranks.

    Example:

    ```python
    >>> model = hf_burst.patch_model(AutoModel.from_pretrained("Qwen/Qwen3-Embedding-0.6B"))
    >>> vectors = hf_burst.embeddings(model, tokenizer(documents, padding=True, return_tensors="pt"))
    ```
    """
    base, _ = patched(model)
    patch = getattr(base, PATCH)
    inputs = dict(batch) | ({"use_cache": False} if patch.task.causal else {})
    if not is_sharded(inputs):
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "num_items_in_batch")}
    question = Question({"pooling of embeddings": str(pooling)}, pooling=str(pooling))
    instead = None if base.base_model is base else _BaseModel.put(base)
    try:
        found = patch.ask(question, model, inputs)["last_hidden_state"]
    finally:
        if instead is not None:
            instead.remove()
    return found


class _BaseModel(Override):
    """Runs the base model in place of a model with a head, in the precision of accelerate's forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.module
        names = inspect.signature(type(model.base_model).forward).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())
        given = {name: value for name, value in kwargs.items() if value is not None and (takes_all or name in names)}
        prepared = "_original_forward" in vars(model)
        with get_mixed_precision_context_manager(native_amp=True) if prepared else nullcontext():
            return model.base_model(*args, **given)
