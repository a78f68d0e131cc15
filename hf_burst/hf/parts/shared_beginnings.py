"""Computes the common beginning of texts in a batch once, as for several answers to one question."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..admission import row_of
from ..attention import scales_by_place
from ..batches.cutting import kept_tokens
from ..batches.documents import batch_shape, real_tokens
from ..batches.joining import Joined, fit, join_texts, obstacle_in
from ..batches.modalities import same_for_every_text
from ..forward_pass import Call
from ..models.cut_point import cut_path, reader_of, sees_blocks
from ..view import ModelView, hooks_of
from .recurrence import NO_FORKS, forks

logger = logging.getLogger(__name__)

_LEAST = 256  # fewest tokens of a beginning with "auto": kernels take as many at a time, or half of it
_HOOKS = "Register the same hooks inside of the model on all ranks, or set BurstConfig(share_prefixes=False)."
_SAVED = 0.25  # smallest share of the tokens that must be saved with "auto"

_LIBRARIES = {"hf_burst", "torch", "transformers", "accelerate", "deepspeed", "peft", "trl"}  # their hooks know no rows
_OF_ROWS = {"adapter_names", "alora_offsets"}  # except these of peft


class SharedBeginnings:
    """Joins the texts of a full batch into one row, see [`Joined`]."""

    def __init__(self) -> None:
        self.logged: set[str] = set()  # logged once

    def join(self, call: Call, positions: Callable[[Mapping[str, Any]], Tensor | None]) -> Joined | None:
        """Returns the texts of a batch as one row; `None` if that is not possible, or saves too little. `positions`
        returns the model's own position ids for a batch, or `None` if they count from 0."""
        given, asked = call.given, call.config.share_prefixes
        if asked is False or call.needs_states or not call.task.causal:  # or outputs are of all texts
            return None
        if given.get("inputs_embeds") is not None or given.get("input_ids") is None or not _joinable(call):
            return None
        obstacle = self._obstacle(call)
        if obstacle in self.logged:
            return None
        joined = join_texts(given, positions(given), _LEAST if asked == "auto" else 1)
        if joined is None or (asked == "auto" and joined.tokens > (1 - _SAVED) * joined.given_tokens):
            return None
        hooked = _hooked(call.view)
        call.agreement.add("hooks that may have a value for each row", hooked, _HOOKS)
        obstacle = obstacle or hooked
        if obstacle:
            self._log(obstacle, f"Rows that begin alike are computed one by one: {obstacle}.")
            return None
        saved = f"{joined.tokens:,} tokens instead of {joined.given_tokens:,}"
        self._log("joined", f"What texts of a batch have in common at their beginning is computed once: {saved}.")
        return joined

    def _obstacle(self, call: Call) -> str:
        """Returns why this pass cannot share anything, or an empty string."""
        whole = bool(call.view.find(cut_path))
        if call.view.find(sees_blocks):
            return "tokens of images may see later ones"
        if row_of(type(call.model)).positions == "row":
            return "positions of images depend on other rows"
        if call.model.training and getattr(call.model.get_input_embeddings(), "neftune_noise_alpha", None):
            return "noise of neftune_noise_alpha depends on the length of a row"
        if not forks(call.view):
            return NO_FORKS
        if found := obstacle_in(call.given, whole):
            return found
        if call.view.find(by_place) and any(start for start, _ in real_tokens(call.given)):
            return "queries are scaled by places that count padding"
        if whole and not same_for_every_text(call.given, call.model.config):
            return "images and sound are not the same for every text"
        if call.config.share_prefixes == "auto" and call.compiled:
            return "every batch would be compiled anew"
        rates = call.random_rates if call.config.share_prefixes == "auto" else []
        name = next((name for name, _ in rates), None)
        return "" if name is None else f"{name} would draw once for all of them (share_prefixes=True allows it)"

    def _log(self, what: str, sentence: str) -> None:
        """Logs a sentence once."""
        if what not in self.logged:
            self.logged.add(what)
            logger.info("hf_burst: %s", sentence)


def row_of_texts(joined: Joined, call: Call) -> dict[str, Any]:
    """Returns the joined row's arguments, or the original texts for a model that reads them before they are cut."""
    given = call.given
    batch = dict(given) if call.view.find(cut_path) else dict(joined.batch)
    if "labels" not in given:
        batch.pop("labels", None)
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        batch["logits_to_keep"] = joined.kept(kept_tokens(keep, batch_shape(given)[1]))
    return batch


def by_place(view: ModelView) -> bool:
    """Returns whether a layer scales its queries by their places."""
    return any(map(scales_by_place, reader_of(view).modules))


def _hooked(view: ModelView) -> str:
    """Returns why hooks prevent sharing, or an empty string: they would see one row, but may expect all."""
    for path, module in view.named:
        if path and any(map(_may_know_rows, hooks_of(module))):
            return f"a hook of {path} may have a value for each row"
    return ""


def _may_know_rows(hook: Any) -> bool:
    """Returns whether a hook is the user's, or holds what peft was given for each row."""
    if isinstance(hook, partial):
        return bool(_OF_ROWS & hook.keywords.keys()) or _may_know_rows(hook.func)
    return str(hook.__module__).partition(".")[0] not in _LIBRARIES


def _joinable(call: Call) -> bool:
    """Returns whether the arguments fit (else parts raise with the reason), and a pass returns nothing that needs
    separate rows: a cache to continue with, or both some logits and a loss."""
    given, labels, keep = call.given, call.given.get("labels"), call.given.get("logits_to_keep", 0)
    some_logits = isinstance(keep, Tensor) or bool(keep)
    if call.cache is not None or not fit(given) or (some_logits and labels is not None):
        return False
    caches = given.get("use_cache")
    if caches is None:  # evaluation with labels reads no cache
        caches = labels is None and getattr(call.model.config, "use_cache", False)
    return call.model.training or call.group.size > 1 or not caches
