"""A model's task: to predict the next token (causal), masked tokens, or nothing per token (readers). Every difference
between tasks is here."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from ...config import BurstConfig
from ...errors import ConfigError
from ...layers.loss import IGNORE_INDEX, shift_labels
from ..view import ModelView, has_language_head
from .cut_point import reader_of

Reason = tuple[str, str, str]  # why a model is refused: what, why, what instead
ALONE = "Train it on sequences that one GPU holds"
_OWN_LOSS = "leave labels out and compute a loss of your own on the gathered logits"
_WHOLE_SEQUENCE = {  # settings that make an encoder's embeddings depend on other tokens
    "token_dropout": "scales embeddings by the share of masked tokens in the whole sequence",
    "trigram_input": "adds the embeddings of the neighbouring tokens of a sequence",
}


@dataclass(frozen=True)
class Task:
    """A model's task: `CAUSAL` or `MASKED` with a language-model head, else `CAUSAL_READER` or
    `ENCODER_READER`."""

    kind: str  # its name in errors
    causal: bool  # whether a query sees no later key, as in `MaskPattern`
    targets: str  # the batch key of the labels that a rank's tokens predict
    # whether the model takes a cache and `logits_to_keep`, and `model.loss_function` computes the loss; else hf_burst
    # does, from the outputs
    generates: bool = False
    reads: bool = False  # no language-model head: modules after the decoder take the whole batch

    def targets_of(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the labels and prediction targets by their batch keys; `(batch, tokens)` each."""
        return {"labels": labels, "shift_labels": shift_labels(labels)} if self.causal else {"labels": labels}

    def padding_bounds(self, start: int, stop: int) -> tuple[int, ...]:
        """Returns the bounds of a row with real tokens `[start, stop)`. No causal query sees padding on the right."""
        return (start,) if self.causal else (start, stop)

    def overrides(self, use_cache: bool) -> dict[str, Any]:
        """Returns the model arguments that a pass sets."""
        if self.causal:
            return {} if use_cache else {"use_cache": False}
        return {} if self.reads else {"labels": None}  # some classes average their own loss

    def window(self, sliding_window: int) -> int:
        """Returns how many other tokens a query sees in each direction. Causal windows count the query itself."""
        return sliding_window - self.causal

    def check_config(self, config: BurstConfig, name: str) -> None:
        """Raises for settings that this task does not allow; `name` is the model class."""
        keep = config.memory_settings.attention_keep
        if not self.causal and 0 < keep < 1:
            raise ConfigError(
                f"Memory.attention_keep is {keep}, and the first part of a sequence of {name} "
                "sees the rest. Take 1.0 (keep all of what attention found) or 0.0 (nothing)."
            )

    def reasons(self, view: ModelView) -> Iterator[Reason]:
        """Yields the reasons why a model's attention does not fit this task."""
        return _decoder_reasons(view) if self.causal else _encoder_reasons(view.root)

    def loss_reasons(self, model: PreTrainedModel) -> Iterator[Reason]:
        """Yields the reasons why a model's loss is not exact over several ranks; see [`computes_loss`] for `model`."""
        if self.generates and model.loss_function is not ForCausalLMLoss:
            name = getattr(model.loss_function, "__name__", repr(model.loss_function))
            yield (
                f"model.loss_function is {name}",
                "over several ranks only Transformers' ForCausalLMLoss and ForMaskedLMLoss are exact",
                "Load the class with a language-model head, or put a loss that was set back, or " + _OWN_LOSS,
            )
        if self.generates and not calls_loss_function(model):
            why = "it does not call model.loss_function, where the ranks could add theirs up"
            yield f"{type(model).__name__} computes its loss by itself", why, _OWN_LOSS.capitalize()


CAUSAL = Task("causal", True, "shift_labels", generates=True)
MASKED = Task("masked", False, "labels")
CAUSAL_READER = Task("causal", True, "", reads=True)
ENCODER_READER = Task("encoder", False, "", reads=True)


def task_named(causal: bool) -> Task:
    """Returns the task for the public argument `causal`."""
    return CAUSAL if causal else MASKED


def task_of(view: ModelView) -> Task:
    """Returns the task of a model, according to its loss function or, without a language-model head, its attention."""
    if view.find(has_language_head):
        return task_named(view.root.loss_function is not ForMaskedLMLoss)
    sees = {getattr(module, "is_causal", None) for module in reader_of(view).modules}
    return ENCODER_READER if False in sees and True not in sees else CAUSAL_READER


def computes_loss(view: ModelView) -> PreTrainedModel:
    """Returns the model that computes the loss: the wrapper, or its language model."""
    model, reader = view.root, reader_of(view).root
    return reader if calls_loss_function(reader) and not calls_loss_function(model) else model


def calls_loss_function(model: PreTrainedModel) -> bool:
    """Returns whether the model's class computes its loss by `model.loss_function`."""
    return any("loss_function" in forward.__code__.co_names for forward in forwards_of(model))


def forwards_of(model: nn.Module) -> list[Any]:
    """Returns the `forward` of the model's class and of its bases, without decorators."""
    return [inspect.unwrap(vars(cls)["forward"]) for cls in type(model).__mro__ if "forward" in vars(cls)]


def _decoder_reasons(view: ModelView) -> Iterator[Reason]:
    """Yields reasons against a causal model with tokens that see later ones."""
    config, name = view.root.config, type(view.root).__name__
    no_mask = f"{name} is not a masked language model"
    if not getattr(config, "is_causal", True):
        yield "config.is_causal is False", no_mask, "Set it to True"
    both = getattr(config, "use_bidirectional_attention", None)
    if both in (True, "all"):
        yield f"config.use_bidirectional_attention is {both}", no_mask, "Set it to False"
    if any(hasattr(module, "is_decoder") and not module.is_decoder for module in reader_of(view).modules):
        instead = "Make it with is_decoder=True in its config, or load it by AutoModelForMaskedLM"
        yield f"{name} was made as an encoder", "its tokens see later ones", instead


def _encoder_reasons(model: PreTrainedModel) -> Iterator[Reason]:
    """Yields reasons against decoders, and against models that mix tokens outside attention."""
    config, name = model.config, type(model).__name__
    if getattr(config, "is_decoder", False):
        instead = "Make it with is_decoder=False in its config, or load it by AutoModelForCausalLM"
        yield f"{name} was made as a decoder", "its tokens see no later ones", instead
    for setting, why in _WHOLE_SEQUENCE.items():
        if value := getattr(config, setting, False):
            yield f"config.{setting} is {value}", f"{name} {why}", "Make the model with it switched off"
    ignored = getattr(config, "sparse_pred_ignore_index", IGNORE_INDEX)
    if getattr(config, "sparse_prediction", False) and ignored != IGNORE_INDEX:
        what = f"config.sparse_pred_ignore_index is {ignored}"
        yield what, "ranks count other labels", f"Set it to {IGNORE_INDEX}"
