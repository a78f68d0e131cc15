"""Per-token losses and teacher divergences over ranks, with gradients, and losses after a remembered document."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import BatchError, ConfigError
from ...layers import loss
from ...ranks.group import ContextGroup
from ..batches.documents import batch_shape, check_shape
from ..batches.sharded import checksum, sum_of_bits
from ..forward_pass import Question
from ..groups import PATCH, resolve_group
from ..parts.tokens import check_ranges
from ..spread.value import Spread
from ..view import device_of, is_partitioned, is_sharded_head
from .document import Document, with_document
from .settings import cache_key, check, evaluating, outermost, patched

# vocabulary-sized tensors per token that a divergence needs at a time
_WIDE = {"forward_kl": 6, "reverse_kl": 6, "jsd": 12}


def token_losses(
    model: nn.Module,
    batch: Mapping[str, Any],
    weights: Tensor | None = None,
    document: Document | None = None,
) -> Tensor:
    """Returns the cross-entropy of every token of a batch, over all ranks that share it, for custom losses.

    Every rank of the group calls it with the same batch, or with its shard of one ([`BurstCollator`]). Ranks score
    their own tokens in chunks, and exchange one number per token. As with the model's loss, gradients are those of the
    whole batch after a data-parallel wrapper has averaged them over ranks. To evaluate, call it within
    `torch.no_grad()`, after `model.eval()`.

    Args:
        model (`nn.Module`): A model that [`patch_model`] patched, or the result of `accelerator.prepare`.
        batch (mapping): A full batch, see [`shard_batch`], or a shard, with `labels`.
        weights (`torch.Tensor` of shape `(batch, tokens)`, *optional*): Factors for the losses of the whole batch's
            labels, the same on every rank. They are not normalized.
        document ([`Document`], *optional*): A document before each row; the batch is then `input_ids` and `labels`,
            with an `attention_mask` if it is padded on the left. Every rank scores all of it, without a gradient.

    Returns:
        `torch.Tensor` of shape `(batch, tokens)` of the whole batch, in nats, fp32 (fp64 for a model in fp64), the same
        on every rank. Each value has its label's place. It is 0 where nothing is predicted: at labels of -100, and at
        the first token of a row for a causal model without a document.

    Raises:
        ConfigError: If the model is not patched, has no language-model head, or did not read the document.
        BatchError: If there are no labels, or the weights do not fit.
        RankMismatchError: If labels or weights differ between ranks.

    Example:

    ```python
    >>> losses = hf_burst.token_losses(model, {"input_ids": tokens, "labels": tokens})
    >>> (losses * importance).sum().backward()
    ```
    """
    facts = {"token losses": True, "weights of tokens": weights is not None}
    if document is None:
        losses = _ask(model, batch, Question(facts, _losses))
    else:
        losses = _behind(model, batch, facts, document)
    return losses if weights is None else _weighted(losses, weights, patched(model)[1])


def token_divergences(
    model: nn.Module,
    teacher: nn.Module,
    batch: Mapping[str, Any],
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl",
    top_k: int | None = None,
    temperature: float = 1.0,
    beta: float = 0.5,
) -> Tensor:
    """Returns the divergence of a model from a teacher at every label, for distillation.

    It works as [`token_losses`], with a gradient for the model only. The teacher reads the batch first, without a
    gradient, and scores the same tokens in chunks.

    Args:
        model (`nn.Module`): The student, patched.
        teacher (`nn.Module`): Another patched model with the same vocabulary, over the same ranks.
        batch (mapping): As for [`token_losses`].
        kind (`str`, defaults to `"forward_kl"`): KL(teacher | student); for `"reverse_kl"` KL(student | teacher); for
            `"jsd"` the generalized Jensen-Shannon divergence of GKD (arXiv 2306.13649, equation 1).
        top_k (`int`, *optional*): Restricts both distributions to the teacher's `top_k` likeliest tokens, and
            renormalizes them. By default the whole vocabulary counts.
        temperature (`float`, defaults to 1.0): Divides the logits of both; the result is not multiplied by its square.
        beta (`float`, defaults to 0.5): The teacher's share in the mixture of `"jsd"`, above 0 and below 1.

    Returns:
        `torch.Tensor` of shape `(batch, tokens)`, as in [`token_losses`].

    Raises:
        ConfigError: If a model is not patched, the vocabularies or groups differ, or the teacher's head is sharded.
        BatchError: As [`token_losses`], and if both models would shard the batch differently.
    """
    bad = None if top_k is None or (type(top_k) is int and top_k > 0) else f"top_k={top_k}, and needs at least 1"
    bad = bad if temperature > 0 else f"temperature={temperature}, and needs more than 0"
    bad = bad if 0 < beta < 1 else f"beta={beta}, and needs a number between 0 and 1; at these ends take another kind"
    if bad or kind not in _WIDE:
        raise ConfigError(f"token_divergences was given {bad or f'kind={kind!r}; it is one of {tuple(_WIDE)}'}.")
    _check_teacher(patched(model)[0], patched(teacher)[0])
    kept: list[Spread] = []
    facts = {"token divergences": [kind, top_k, temperature, beta]}

    def keep(scores: Spread, targets: Tensor) -> Tensor:
        kept.append(scores)
        return torch.zeros(targets.shape, device=targets.device)

    with evaluating(teacher), torch.no_grad():
        _ask(teacher, batch, Question(facts, keep))
    measure = partial(loss.token_divergences, kind=kind, top_k=top_k, temperature=temperature, beta=beta)
    return _ask(model, batch, Question(facts, partial(_divergences, kept[0], measure, _WIDE[kind])))


def _check_teacher(student: Any, teacher: Any) -> None:
    """Raises for a teacher that cannot be compared with a student, token by token."""
    pair = student, teacher
    own, other = (module.config.get_text_config().vocab_size for module in pair)
    kinds = {(getattr(module, PATCH).task.kind, resolve_group(getattr(module, PATCH).group)) for module in pair}
    head = teacher.get_output_embeddings()
    ConfigError.refuse(
        (own != other, f"The vocabularies of model and teacher differ: {own} and {other}. Take the same tokenizer."),
        (len(kinds) > 1, "Model and teacher are a causal and a masked one, or of other groups. Give equal ones."),
        (
            head is not None and (is_partitioned(head) or is_sharded_head(head)),
            "The head of the teacher is sharded by FSDP2 or ZeRO-3, which gather it in its own passes alone. Leave the "
            "teacher out of accelerator.prepare, so that every rank holds it.",
        ),
    )


def _ask(model: nn.Module, batch: Mapping[str, Any], question: Question) -> Tensor:
    patch = getattr(patched(model)[0], PATCH)
    if patch.task.reads:
        raise ConfigError("The model has no language-model head, so its tokens have no losses. Load one with a head.")
    inputs = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
    inputs |= {"use_cache": False} if patch.task.generates else {}
    answer = patch.ask(question, model, inputs)["loss"]
    return answer


def _losses(scores: Spread, targets: Tensor) -> Tensor:
    flat = targets.flatten()
    return scores.own_values(lambda logits, part: loss.token_losses(logits, flat[part]))


def _divergences(
    teacher: Spread, measure: Callable[..., Tensor], share: int, scores: Spread, targets: Tensor
) -> Tensor:
    if not (teacher.lies and scores.lies and teacher.lies.layout == scores.lies.layout):
        raise BatchError(
            "The layers of the teacher see otherwise far than those of the model, or share other beginnings, so each "
            "cut the batch in its own way. Give both the same shards, of hf_burst.shard_batch or BurstCollator."
        )
    flat = targets.flatten()

    def value(logits: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            known = teacher.some(part)
        return measure(logits, known, flat[part])

    return scores.own_values(value, share)


def _weighted(losses: Tensor, weights: Tensor, group: ContextGroup) -> Tensor:
    """Returns losses times weights, which must be the same on all ranks."""
    with group.agreeing(losses.device, "token_losses with weights") as found:
        check_shape("The tensor of weights", weights, tuple(losses.shape), ", one for every label of the whole batch")
        if not weights.is_floating_point() or not weights.isfinite().all():
            raise BatchError(f"The weights of tokens ({weights.dtype}) are not finite floating-point numbers.")
        found.add("weights of tokens (checksum)", sum_of_bits(weights.to(losses.device)))
    return losses * weights.to(losses)


@torch.no_grad()
def _behind(model: nn.Module, batch: Mapping[str, Any], facts: dict[str, Any], document: Document) -> Tensor:
    base, group = patched(model)
    ids, mask, labels = (batch.get(name) for name in ("input_ids", "attention_mask", "labels"))  # type: Any, Any, Any
    with group.agreeing(device_of(base), "token_losses behind a document") as found:
        found.facts |= {"document": document.number, **facts}
        if others := sorted(set(batch) - {"input_ids", "attention_mask", "labels"}):
            raise BatchError(f"Behind a document a batch is input_ids and labels; leave out {', '.join(others)}.")
        check(base, {"input_ids": ids, "use_cache": True})
        check_shape("labels", labels, batch_shape(batch))
        check_ranges({"input_ids": ids, "labels": labels}, base.config.get_text_config().vocab_size, None, None)
        whole, shown = with_document(document, ids, mask)
        found.add("answers (checksum)", checksum(batch))
    document.check(base, group)
    new = labels.shape[1]
    logits = outermost(model)(
        input_ids=whole[:, -new:],
        attention_mask=shown,
        position_ids=(shown.cumsum(1) - 1).clamp(min=0)[:, -new:],
        **{cache_key(base): document.cache()},
        use_cache=True,
    ).logits
    padding = shown.shape[1] - shown.sum(1, keepdim=True)
    place = torch.arange(new, device=logits.device) - padding
    before = functional.pad(logits, (0, 0, 1, 0))[:, :-1]
    before = torch.where((place == 0)[..., None], document.logits.to(logits), before)  # it predicts the first token
    targets = labels.masked_fill(place < 0, loss.IGNORE_INDEX)
    return loss.token_losses(before.flatten(0, 1), targets.flatten()).view_as(targets)
