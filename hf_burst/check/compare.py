"""Compares the loss and gradients of a model over two ranks with those of one process. Runs on every rank."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from ..errors import BatchError, BurstError, UnsupportedModelError
from ..hf.admission import Verdict, fingerprint, row_of
from ..hf.batches.documents import documents_of
from ..hf.batches.modalities import values_besides_text
from ..hf.models.cut_point import modalities_of
from ..hf.models.recurrent import recurrent_modules
from ..hf.models.support import check_model
from ..hf.patch import patch_under_check, unpatch_model
from ..hf.view import ModelView
from ..layers.loss import IGNORE_INDEX
from .heads import TOKEN_KINDS, judged, judgement, judgement_apart, kinds_of, model_task, prepared
from .tiny import VOCABULARY, Double, first_position, note

KINDS = ("one sequence", "packed", "padded")
TOLERANCE = 1e-9
BATCH_TOLERANCE = 1e-4
_LENGTH, _TILE = 37, 7  # tokens per sequence, and per tile
_DOCUMENTS = (1, 7, 17, 12)
_BOUNDS = (0, *accumulate(_DOCUMENTS))
Maker = Callable[[], PreTrainedModel]  # builds the compared model, identically in every process


@dataclass(frozen=True)
class BatchComparison:
    """The loss and gradient norm of one batch, in one process and over two ranks.

    Args:
        loss (`tuple[float, float]`): In one process, and over the ranks.
        gradient_norm (`tuple[float, float]`): In one process, and over the ranks.
        documents (`int`): The number of sequences or packed documents in the batch.
        labels (`int`): The number of labels that count.
        apart (`bool`): Whether one process got the documents one by one, because it mixes packed ones.
    """

    loss: tuple[float, float]
    gradient_norm: tuple[float, float]
    documents: int
    labels: int
    apart: bool = False

    @property
    def error(self) -> float:
        """The greater relative difference; nan if a loss is nan."""
        pairs = torch.tensor([self.loss, self.gradient_norm], dtype=torch.float64)
        return float(((pairs[:, 1] - pairs[:, 0]).abs() / pairs[:, 0].abs().clamp(min=1e-30)).max())

    @property
    def equal(self) -> bool:
        """Whether both agree within the tolerance."""
        return self.error <= BATCH_TOLERANCE


def compare(make: Maker) -> Verdict:
    """Returns the verdict on a tiny model in fp64: its loss and all gradients, averaged as by a data-parallel wrapper.

    It compares three batches: two sequences of odd length, packed documents (in one process one by one, because not
    every model keeps them apart), and sequences padded at either end. Over ranks, MLPs run in tiles of a few tokens.
    All checks of [`patch_model`] apply, except that for known classes.
    """
    with local_torch_dtype(torch.float64), Double():
        try:
            model = make()
        except Exception as problem:  # a class may raise anything for a tiny config
            return Verdict("not buildable", note=f"{type(problem).__name__}: {_first_line(problem)}")
        try:
            check_model(ModelView(model))  # before further copies are built
            if modalities_of(model.config) or model_task(model).reads:
                _check_text(prepared(model))
            errors = {kind: _worst_error(make, make_batch(kind, model)) for kind in kinds_of(model, KINDS)}
        except BurstError as problem:
            return Verdict("refused", note=str(problem))
        exact = all(error <= TOLERANCE for error in errors.values())  # False for nan
        remarks = "; ".join(filter(None, [note(model), _leak(model)]))
        others = " and ".join(row_of(type(model)).modalities) if exact else ""
        return Verdict("exact" if exact else "wrong", errors, remarks, fingerprint(ModelView(model)) or "", others)


def compare_batch(make: Maker, batch: Mapping[str, torch.Tensor]) -> BatchComparison:
    """Returns the comparison of a user's batch, in the model's dtype.

    Args:
        make (`Callable`): Builds the model.
        batch (mapping): A collator's output, with labels.

    Raises:
        BurstError: If the model or the batch is not supported.
    """
    model = make()
    patch_under_check(model, tile=max(1, batch["labels"].numel() // (3 * dist.get_world_size())))
    over_ranks = _loss_and_norm(model, model(**batch).loss, dist.get_world_size())
    unpatch_model(model)
    task = model_task(model)
    counted = batch["labels"][:, 1:] if task.causal else batch["labels"]
    documents = documents_of(batch, task)
    count = sum(len(cuts) - 1 for cuts in documents)

    def compared(apart: bool) -> BatchComparison:
        alone = _loss_and_norm(model, _plain_loss(model, batch, documents if apart else None))
        loss, norm = zip(alone, over_ranks, strict=True)
        return BatchComparison(loss, norm, count, int((counted != IGNORE_INDEX).sum()), apart)

    together = compared(apart=False)
    if together.equal or batch.get("attention_mask") is not None or count == len(documents):
        return together
    if next(values_besides_text(batch), None) is not None:
        raise BatchError(
            "The batch packs documents with images or sound, and one process mixes them, so there is nothing to "
            "compare with. Save the batch of a collator that does not pack."
        )
    one_by_one = compared(apart=True)
    return one_by_one if one_by_one.equal else together


def make_batch(kind: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns two sequences of odd length, two padded at either end, or one row of packed documents."""
    generator = torch.Generator().manual_seed(0)
    task = model_task(model)
    ids = torch.randint(3, VOCABULARY, (1 if kind == "packed" else 2, _LENGTH), generator=generator)
    if kind == "padded":
        mask = torch.ones_like(ids)
        by_first_token = task.reads and not task.causal and getattr(model.config, "classifier_pooling", "cls") != "mean"
        mask[0, slice(-6, None) if by_first_token else slice(6)] = 0
        mask[1, -7:] = 0
        batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORE_INDEX)}
        # in eager attention, padding on the left sees all tokens
        if task.causal and model.config.get_text_config()._attn_implementation == "eager":
            batch["labels"][0, 6] = IGNORE_INDEX
    else:
        batch = {"input_ids": ids, "labels": ids.clone()}
        batch["labels"][:, :5] = IGNORE_INDEX
    if kind == "packed":
        positions = torch.cat([torch.arange(size) for size in _DOCUMENTS])[None]
        batch["position_ids"] = positions + first_position(model)
    if TOKEN_KINDS in inspect.signature(model.forward).parameters:  # processors mark text with 0
        batch[TOKEN_KINDS] = torch.zeros_like(ids)
    text = model.config.get_text_config()
    if text is not model.config and getattr(text, "use_bidirectional_attention", None) is True:
        batch["token_type_ids"] = torch.ones_like(ids)  # PaliGemma: no token sees later ones
    return judged(batch, model) if task.reads else batch


def gradients(model: PreTrainedModel, loss: torch.Tensor, ranks: int = 1) -> list[torch.Tensor]:
    """Computes the gradients of all weights, averaged over ranks, and clears them in the model."""
    loss.backward()
    found = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    model.zero_grad()
    if ranks > 1:
        for gradient in found:
            dist.all_reduce(gradient)
            gradient /= ranks
    return found


def worst_error(patched: PreTrainedModel, loss: torch.Tensor, plain: PreTrainedModel, expected: torch.Tensor) -> float:
    """Returns the largest error of the loss or a gradient, each relative to its largest entry.

    Args:
        patched (`PreTrainedModel`): The model over the ranks.
        loss (`torch.Tensor`): Its loss.
        plain (`PreTrainedModel`): The same model in one process.
        expected (`torch.Tensor`): The loss of `plain`.
    """
    wanted = gradients(plain, expected)
    errors = [(abs(loss - expected) / abs(expected)).detach()]
    # vanishing gradients, such as those of key biases, are compared with the largest gradient
    least = 1e-3 * max(gradient.abs().max() for gradient in wanted)
    for averaged, gradient in zip(gradients(patched, loss, dist.get_world_size()), wanted, strict=True):
        errors.append((averaged - gradient).abs().max() / max(gradient.abs().max(), least))
    worst = torch.stack(errors).max()  # nan if any error is nan
    return float(f"{float(worst):.0e}")


def _check_text(model: PreTrainedModel) -> None:
    """Raises if a multimodal model or a classifier cannot run on a batch of text in one process."""
    try:
        with torch.no_grad():
            judgement(model, make_batch("one sequence", model))
    except Exception as problem:  # the model may need further inputs
        line = _first_line(problem) or type(problem).__name__
        raise UnsupportedModelError(f"{type(model).__name__} takes no batch of text: {line}") from problem


def _first_line(problem: Exception) -> str:
    return next(filter(None, str(problem).split("\n")), "")


def _leak(model: PreTrainedModel) -> str:
    """Returns a note if one process mixes or refuses packed documents in recurrent layers, with the functions here."""
    if not recurrent_modules(ModelView(model)):
        return ""
    batch = make_batch("packed", model)
    try:
        with torch.no_grad():
            apart = _plain_loss(model, batch, [_BOUNDS])
            together = _plain_loss(model, batch, None)
    except Exception:  # some fallback functions refuse packed documents
        return "one unpatched process refuses packed documents"
    if abs(together - apart) <= TOLERANCE * abs(apart):
        return ""
    return "one unpatched process mixes packed documents"


def _worst_error(make: Maker, batch: dict[str, torch.Tensor]) -> float:
    """Returns the largest error of the loss or a gradient on a batch of text."""
    patched = patch_under_check(prepared(make()), _TILE)
    plain = prepared(make())
    documents = [_BOUNDS] if "position_ids" in batch else None
    return worst_error(patched, judgement(patched, batch), plain, _plain_loss(plain, batch, documents))


def _loss_and_norm(model: PreTrainedModel, loss: torch.Tensor, ranks: int = 1) -> tuple[float, float]:
    norm = get_total_norm([gradient.double() for gradient in gradients(model, loss, ranks)])
    return float(loss.detach()), float(norm)


def _plain_loss(
    model: PreTrainedModel, batch: Mapping[str, torch.Tensor], documents: list[tuple[int, ...]] | None
) -> torch.Tensor:
    """Returns the unpatched model's loss in one process; if `documents` is given, it runs them one by one."""
    if documents is not None:
        return judgement_apart(model, batch, documents)
    return judgement(model, {**batch, "use_cache": False} if model_task(model).generates else batch)
