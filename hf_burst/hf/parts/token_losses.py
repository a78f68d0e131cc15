"""A number for every token of a batch, its loss or its divergence from a teacher, with a gradient: the logits of a long
sequence are never in memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ...errors import BatchError, ConfigError, UnsupportedModelError
from ...layers import loss
from ...ranks.collectives import gather_tokens
from ...ranks.layout import SequenceLayout
from ..batches.sharded import sum_of_bits
from ..forward_pass import ForwardPass
from ..groups import PATCH, resolve_group
from ..lazy_head import LazyLogits, is_partitioned, logits_of_some, values_of_tokens
from .base import Part
from .tokens import Tokens

_WIDE = 6  # tensors as wide as the vocabulary, of the tokens that a divergence takes at a time
_KINDS = ("forward_kl", "reverse_kl")
_AGAIN = "{}, and losses of tokens need it once more in the backward pass. {}."


def token_losses(model: nn.Module, batch: Mapping[str, Any], weights: Tensor | None = None) -> Tensor:
    """The cross-entropy of every token of a batch, over all ranks that share it, for losses of one's own.

    Every rank of the group calls it with the same batch, or with its shard of one ([`BurstCollator`]). Ranks score
    their own tokens, some at a time, and exchange one number a token. Gradients are as those of the model's loss: of
    the whole batch, once a data-parallel wrapper has averaged them over ranks. For evaluation call it within
    `torch.no_grad()`.

    Args:
        model (`nn.Module`): A model that [`patch_model`] patched, or what `accelerator.prepare` made of it.
        batch (mapping): A full batch, see [`shard_batch`], or a shard, with `labels`.
        weights (`torch.Tensor` of shape `(batch, tokens)`, *optional*): What the loss of each label of the whole batch
            is multiplied with, the same on every rank. Nothing is divided.

    Returns:
        `torch.Tensor` of shape `(batch, tokens)` of the whole batch, in nats, fp32 (fp64 for a model in fp64), the same
        on every rank. Each value stands where its label does. It is 0 where nothing is predicted: labels of -100, and
        the first token of a row for a causal model.

    Raises:
        ConfigError: If the model is not patched.
        BatchError: If there are no labels, or the weights do not fit.
        RankMismatchError: If labels or weights differ between ranks.

    Example:

    ```python
    >>> losses = hf_burst.token_losses(model, {"input_ids": tokens, "labels": tokens})
    >>> (losses * importance).sum().backward()
    ```
    """
    return _ask(model, batch, _Question(_losses, {"token losses": True}, weights))


def token_divergences(
    model: nn.Module,
    teacher: nn.Module,
    batch: Mapping[str, Any],
    kind: Literal["forward_kl", "reverse_kl"] = "forward_kl",
    top_k: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """How far a model's distribution of each label's word is from that of a teacher, for distillation.

    As [`token_losses`], with a gradient for the model alone. The teacher reads the batch first, without a gradient, and
    scores the same tokens, some at a time.

    Args:
        model (`nn.Module`): The student, patched.
        teacher (`nn.Module`): Another patched model with the same vocabulary, over the same ranks.
        batch (mapping): As for [`token_losses`].
        kind (`str`, defaults to `"forward_kl"`): KL(teacher | student), or for `"reverse_kl"` KL(student | teacher).
        top_k (`int`, *optional*): Both distributions are restricted to as many words, the likeliest for the teacher,
            and add up to 1 over these. By default all words count.
        temperature (`float`, defaults to 1.0): Divides the logits of both; the result is not multiplied by its square.

    Returns:
        `torch.Tensor` of shape `(batch, tokens)`, as [`token_losses`] returns.

    Raises:
        ConfigError: If a model is not patched, the vocabularies or groups differ, or the teacher's head is sharded.
        BatchError: As [`token_losses`]; and if both models would cut the batch differently.
    """
    bad = None if top_k is None or (type(top_k) is int and top_k > 0) else f"top_k={top_k}, and needs at least 1"
    bad = bad if temperature > 0 else f"temperature={temperature}, and needs more than 0"
    if bad or kind not in _KINDS:
        raise ConfigError(f"token_divergences was given {bad or f'kind={kind!r}; it is one of {_KINDS}'}.")
    patch, other = _patch_of(model), _patch_of(teacher)
    for name, read in (
        ("vocabularies", lambda module: _inner(module).config.get_text_config().vocab_size),
        ("tasks", lambda module: _patch_of(module).task.kind),
    ):
        if read(model) != read(teacher):
            raise ConfigError(
                f"The {name} of model and teacher differ: {read(model)} and {read(teacher)}. Take a teacher with the "
                "tokenizer of the model."
            )
    if resolve_group(patch.group) != resolve_group(other.group):
        raise ConfigError(
            "The teacher was patched for another group of ranks than the model. Patch both with the same group."
        )
    head = _inner(teacher).get_output_embeddings()
    if head is not None and (is_partitioned(head) or _is_sharded(head)):
        raise ConfigError(
            "The head of the teacher is sharded by FSDP2 or ZeRO-3, which gather it in its own passes alone. Leave the "
            "teacher out of accelerator.prepare, so that every rank holds it."
        )
    kept: list[_Scores] = []
    facts = {"token divergences": [kind, top_k, temperature]}
    training = teacher.training
    teacher.eval()
    try:
        with torch.no_grad():
            _ask(teacher, batch, _Question(partial(_keep, kept), facts))
    finally:
        teacher.train(training)
    value = partial(_divergences, kept[0], kind, top_k, temperature)
    return _ask(model, batch, _Question(value, facts, layout=kept[0].layout))


Answer = Callable[[ForwardPass, Any, Tensor], Tensor]  # of the logits and targets of this rank's tokens


@dataclass
class _Question:
    """What a pass is asked for in place of logits."""

    answer: Answer
    facts: dict[str, Any]  # for the ranks to agree on
    weights: Tensor | None = None
    layout: SequenceLayout | None = None  # that the pass must have, of a teacher


@dataclass(frozen=True)
class _Scores:
    """The scores of a teacher, and how its tokens lie."""

    logits: Tensor | LazyLogits
    layout: SequenceLayout


def _patch_of(model: nn.Module) -> Any:
    patched = (module for module in model.modules() if PATCH in vars(module))
    patch = getattr(next(patched, None), PATCH, None)
    if patch is None:
        raise ConfigError(
            "token_losses and token_divergences take patched models. Call hf_burst.patch_model(model) first."
        )
    if patch.task.reads:
        raise ConfigError("The model has no language-model head, so its tokens have no losses. Load one with a head.")
    return patch


def _is_sharded(head: nn.Module) -> bool:
    return any(isinstance(weight, DTensor) for weight in head.parameters())


def _inner(model: nn.Module) -> Any:
    return next(module for module in model.modules() if PATCH in vars(module))


def _ask(model: nn.Module, batch: Mapping[str, Any], question: _Question) -> Tensor:
    patch = _patch_of(model)
    (part,) = (part for part in patch.parts if isinstance(part, TokenLosses))
    inputs = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
    if patch.task.generates:
        inputs["use_cache"] = False
    part.asked = question
    try:
        answer: Tensor = model(**inputs)["loss"]
    finally:
        part.asked = None
    return answer


def _losses(run: ForwardPass, logits: Any, targets: Tensor) -> Tensor:
    flat = targets.flatten()
    return values_of_tokens(logits, lambda scores, part: loss.token_losses(scores, flat[part]))


def _keep(kept: list[_Scores], run: ForwardPass, logits: Any, targets: Tensor) -> Tensor:
    kept.append(_Scores(logits, run.batch.layout))
    return torch.zeros(targets.shape, device=targets.device)


def _divergences(
    teacher: _Scores, kind: str, top_k: int | None, temperature: float, run: ForwardPass, logits: Any, targets: Tensor
) -> Tensor:
    flat = targets.flatten()

    def value(scores: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            known = logits_of_some(teacher.logits, part)
        return loss.token_divergences(scores, known, flat[part], kind, top_k, temperature)

    return values_of_tokens(logits, value, _WIDE)


class TokenLosses(Part):
    """Scores each token where [`token_losses`] asks for it, in place of the logits."""

    needs = (Tokens,)

    def __init__(self) -> None:
        self.asked: _Question | None = None
        self.targets: Tensor | None = None  # of this rank's tokens

    def prepare(self, run: ForwardPass) -> None:
        if self.asked is None:
            return
        if run.batch.given.get("logits_to_keep"):
            raise BatchError("token_losses and token_divergences score all tokens. Leave logits_to_keep out.")
        if run.targets is None:
            raise BatchError(
                "The labels are missing; token_losses and token_divergences need labels of the shape of input_ids, in "
                "which -100 is not predicted."
            )
        layout, weights = run.batch.layout, self.asked.weights
        shape = (layout.batch_size, layout.length - layout.padding)
        if weights is not None and (tuple(weights.shape) != shape or not weights.is_floating_point()):
            raise BatchError(
                f"The weights are {weights.dtype} of shape {tuple(weights.shape)}; for this batch they must be "
                f"floating point numbers of shape {shape}, one for every label of the whole batch."
            )
        if weights is not None and not bool(weights.isfinite().all()):
            raise BatchError("The weights of tokens hold numbers that are not finite.")
        if self.asked.layout is not None and self.asked.layout != layout:
            raise BatchError(
                "The layers of the teacher see otherwise far than those of the model, so each would cut the batch in "
                "its own way. Give both the same shards: batches of hf_burst.shard_batch or BurstCollator."
            )
        head = run.model.get_output_embeddings()
        if torch.is_grad_enabled() and head is not None and is_partitioned(head):
            raise UnsupportedModelError(_AGAIN.format("ZeRO-3 shards the head", "Use ZeRO-2"))
        run.agreement.facts |= self.asked.facts
        run.agreement.add("weights of tokens (checksum)", None if weights is None else sum_of_bits(weights))
        self.targets = run.targets
        for key in ("labels", "shift_labels"):  # the model is to compute no loss of its own
            run.batch.inputs.pop(key, None)

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        if self.asked is None or self.targets is None:
            return
        head = run.model.get_output_embeddings()
        if torch.is_grad_enabled() and head is not None and _is_sharded(head):
            cure = (
                "Wrap it together with the last norm, with reshard_after_forward=False, or leave it to the whole model"
            )
            raise UnsupportedModelError(_AGAIN.format("FSDP2 has sharded the head again after its pass", cure))
        own = self.asked.answer(run, outputs["logits"], self.targets)
        values = gather_tokens(own, run.batch.layout, run.group)
        if run.task.causal:
            values = functional.pad(values, (1, 0))[:, :-1]
        weights = self.asked.weights
        outputs["loss"] = values if weights is None else values * weights.to(values)

    def end(self) -> None:
        self.targets = None
