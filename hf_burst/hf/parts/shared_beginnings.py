"""Computes the common beginning of texts in a batch once, as for several answers to one question."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ...errors import BatchError
from ..admission import row_of
from ..attention import scales_by_place
from ..batches.cutting import kept_tokens
from ..batches.documents import batch_shape, real_tokens
from ..batches.joining import Joined, fit, join_texts, obstacle_in
from ..batches.modalities import same_for_every_text
from ..batches.sharded import is_sharded, sum_of_bits
from ..forward_pass import Agreement, Call
from ..models.cut_point import cut_path, sees_blocks
from ..view import ModelView
from .recurrence import NO_FORKS, Recurrence

logger = logging.getLogger(__name__)

_LEAST = 256  # fewest tokens of a beginning with "auto": kernels take as many at a time, or half of it
_HOOKS = "Register the same hooks inside of the model on all ranks, or set BurstConfig(share_prefixes=False)."
_SAVED = 0.25  # smallest share of the tokens that must be saved with "auto"

_LIBRARIES = {"hf_burst", "torch", "transformers", "accelerate", "deepspeed", "peft", "trl"}  # their hooks know no rows
_OF_ROWS = {"adapter_names", "alora_offsets"}  # except these of peft


class SharedBeginnings:
    """Joins the texts of a full batch into one row, see [`Joined`].

    Args:
        view ([`ModelView`]): The model.
        recurrence ([`Recurrence`]): The part for its recurrent layers.
        positions (`Callable`): Returns the model's own position ids for a batch, or `None` if they count from 0.
    """

    def __init__(
        self,
        view: ModelView,
        recurrence: Recurrence,
        positions: Callable[[Mapping[str, Any]], torch.Tensor | None],
    ) -> None:
        self.cut_path, self.recurrence, self.positions = view.find(cut_path), recurrence, positions
        self.sees_blocks, self.by_place = view.find(sees_blocks), any(map(scales_by_place, view.modules))
        self.logged: set[str] = set()  # logged once

    def join(self, call: Call, agreement: Agreement) -> Joined | None:
        """Returns the texts of a batch as one row; `None` if that is not possible, or saves too little."""
        given, asked = call.given, call.config.share_prefixes
        if asked is False or is_sharded(given) or not call.task.causal or "input_ids" not in given:
            return None
        if call.task.reads or call.pooling:  # their outputs are of all texts
            return None
        if given.get("inputs_embeds") is not None or given["input_ids"] is None:
            return None
        labels = given.get("labels")
        if not fit(given, labels) or not _joinable(call, labels is not None):
            return None  # parts raise with the reason
        obstacle = self._obstacle(call)
        if obstacle in self.logged:
            return None
        least = _LEAST if asked == "auto" else 1
        joined = join_texts(given, self.positions(given), least)
        if joined is None or (asked == "auto" and joined.tokens > (1 - _SAVED) * joined.given_tokens):
            return None
        hooked = _hooked(call.view)
        agreement.add("hooks that may have a value for each row", hooked, _HOOKS)
        obstacle = obstacle or hooked
        if obstacle:
            self._log(obstacle, f"Rows that begin alike are computed one by one: {obstacle}.")
            return None
        saved = f"{joined.tokens:,} tokens instead of {joined.given_tokens:,}"
        self._log("joined", f"What texts of a batch have in common at their beginning is computed once: {saved}.")
        if call.group.size > 1:  # the row does not show which texts and labels it stands for
            agreement.add("texts that begin alike", _content(joined))
        return joined

    def _obstacle(self, call: Call) -> str:
        """Returns why this pass cannot share anything, or an empty string."""
        if self.sees_blocks:
            return "tokens of images may see later ones"
        if row_of(type(call.model)).positions == "row":
            return "positions of images depend on other rows"
        if call.model.training and getattr(call.model.get_input_embeddings(), "neftune_noise_alpha", None):
            return "noise of neftune_noise_alpha depends on the length of a row"
        if not self.recurrence.forks:
            return NO_FORKS
        if found := obstacle_in(call.given, bool(self.cut_path)):
            return found
        if self.by_place and any(start for start, _ in real_tokens(call.given)):
            return "queries are scaled by places that count padding"
        if self.cut_path and not same_for_every_text(call.given, call.model.config):
            return "images and sound are not the same for every text"
        if call.config.share_prefixes == "auto" and call.compiled:
            return "every batch would be compiled anew"
        rates = call.random_rates if call.config.share_prefixes == "auto" else []
        name = next((name for name, _ in rates), None)
        return "" if name is None else f"{name} would draw once for all of them (share_prefixes=True allows it)"

    def row(self, joined: Joined, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the joined row's arguments, or the original texts for a model that reads them before they are cut."""
        batch = dict(given) if self.cut_path else dict(joined.batch)
        if "labels" not in given:
            batch.pop("labels", None)
        keep = given.get("logits_to_keep", 0)
        if isinstance(keep, torch.Tensor) or keep:
            batch["logits_to_keep"] = joined.kept(kept_tokens(keep, batch_shape(given)[1]))
        return batch

    def _log(self, what: str, sentence: str) -> None:
        """Logs a sentence once."""
        if what not in self.logged:
            self.logged.add(what)
            logger.info("hf_burst: %s", sentence)


def _hooked(view: ModelView) -> str:
    """Returns why hooks prevent sharing, or an empty string: they would see one row, but may expect all."""
    for path, module in view.named:
        kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
        if path and any(kinds) and any(_may_know_rows(hook) for hooks in kinds for hook in hooks.values()):
            return f"a hook of {path} may have a value for each row"
    return ""


def _may_know_rows(hook: Any) -> bool:
    """Returns whether a hook is the user's, or holds what peft was given for each row."""
    if isinstance(hook, partial):
        return bool(_OF_ROWS & hook.keywords.keys()) or _may_know_rows(hook.func)
    return str(hook.__module__).partition(".")[0] not in _LIBRARIES


def _joinable(call: Call, labelled: bool) -> bool:
    """Returns whether a pass returns nothing that needs separate rows: a cache to continue with, or both some logits
    and a loss."""
    given = call.given
    if call.cache is not None:
        return False
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, torch.Tensor) or keep:
        try:
            kept_tokens(keep, batch_shape(given)[1])
        except BatchError:
            return False
        if labelled:
            return False
    caches = given.get("use_cache")
    if caches is None:  # evaluation with labels reads no cache
        caches = not labelled and getattr(call.model.config, "use_cache", False)
    return call.model.training or call.group.size > 1 or not caches


def _content(joined: Joined) -> torch.Tensor:
    """Returns a checksum of what the joined row stands for."""
    parts = [torch.tensor(joined.places.shape, device="cpu"), joined.places, joined.scored]
    parts += [] if joined.labels is None else [joined.labels.cpu()]
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for part in parts:
        total = total * 3 + sum_of_bits(part)
    return total
