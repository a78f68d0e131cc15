"""Joins texts with common prefixes into one row that holds each prefix once.

```text
texts     a b c d e       row      a b c | d e | d x y | d
          a b c d x y     parents    -1     0      0     0
          a b c d         places   of the third text: 0 1 2 8
```

The last common token is repeated at the start of each continuation, so that every token of the row predicts only one
other. A continuation may itself be a prefix of others, so documents form a tree and stand in depth-first order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import BatchError
from ...layers.loss import IGNORE_INDEX, shift_labels
from ..models.cut_point import TOKEN_INPUTS
from .cutting import select_rows
from .documents import BOUNDARY_KEYS, TYPE_KEYS, Text, batch_shape, holds_values, texts_of

_KNOWN = {"input_ids", *TYPE_KEYS, "position_ids", "labels", "attention_mask", *BOUNDARY_KEYS}


@dataclass(frozen=True, eq=False)
class Joined:
    """Texts joined into one row."""

    batch: dict[str, Any]  # the model's arguments, with `1 x J` tokens
    parents: tuple[int, ...]  # for each document, the index of the document it continues, or -1
    places: Tensor  # index in the row of each token of the original batch, `(batch, tokens)`; -1 for padding
    scored: Tensor  # number of texts in which a token's prediction counts for the loss, `(1, J)`
    labels: Tensor | None  # labels of the original batch, `(batch, tokens)`
    sources: Tensor  # flat index in the original batch of each token of the row, `(J,)`

    @property
    def tokens(self) -> int:
        """The number of tokens in the row."""
        return self.scored.shape[1]

    @property
    def given_tokens(self) -> int:
        """The number of tokens in the original batch, without padding."""
        return int((self.places >= 0).sum())

    def restored(self, values: Tensor) -> Tensor:
        """Expands values of the row's tokens, `(1, J, ...)`, to all tokens of the original batch: `(batch, tokens,
        ...)`, 0 for padding. The backward pass sums the gradients of all texts."""
        places = self.places.to(values.device)
        found = values[0].index_select(0, places.flatten().clamp(min=0)).unflatten(0, tuple(places.shape))
        return found.masked_fill((places < 0).view(*places.shape, *[1] * (found.ndim - 2)), 0)

    def restored_scores(self, values: Tensor) -> Tensor:
        """Expands per-prediction values as [`restored`] does, with 0 for tokens whose next token has no label."""
        assert self.labels is not None, "there are scores"
        labels = shift_labels(self.labels.to(values.device))
        return self.restored(values).masked_fill(labels == IGNORE_INDEX, 0)

    def inputs(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the row's inputs of a cut point, from those of all texts."""
        row = select_rows(whole, lambda values: values.flatten()[self.sources.to(values.device)])
        for name, dim in TOKEN_INPUTS.items():
            if whole.get(name) is not None:
                row[name] = self._of_row(whole[name], dim)
        if whole.get("position_ids") is None:
            row["position_ids"] = self.batch["position_ids"]
        else:
            self._check_positions(whole["position_ids"], row["position_ids"])
        return row

    def _check_positions(self, given: Tensor, row: Tensor) -> None:
        """Raises if texts have other positions than the row."""
        places = self.places.to(given.device)
        restored = row[..., 0, :].index_select(-1, places.flatten().clamp(min=0)).unflatten(-1, tuple(places.shape))
        if ((restored != given) & (places >= 0)).any():
            raise BatchError(
                "The model gives texts that begin alike other positions. Set BurstConfig(share_prefixes=False)."
            )

    def _of_row(self, value: Tensor, dim: int) -> Tensor:
        """Returns the values of the row's tokens; `value` has tokens along `dim`, and texts along the previous one."""
        at = dim % value.ndim - 1
        texts = list(value.shape)
        texts[at] = len(self.places)  # positions may be given once
        flat = value.expand(texts).flatten(at, at + 1)
        return flat.index_select(at, self.sources.to(value.device)).unsqueeze(at)

    def kept(self, columns: Sequence[int]) -> Tensor:
        """Returns the row indices of these columns, for all texts one after another."""
        return self.places[:, list(columns)].clamp(min=0).flatten()


def join_texts(batch: Mapping[str, Any], positions: Tensor | None, least: int) -> Joined | None:
    """Joins the texts of a full batch that have a common prefix: rows, or documents of packed rows.

    Tokens are equal if their ids, positions and types are.

    Args:
        batch (mapping): The arguments of a causal model, with `input_ids`.
        positions (`torch.LongTensor` of shape `(batch or 1, tokens)`, *optional*): The positions that the model makes
            for a batch without any; by default they count from 0.
        least (`int`): The minimum number of tokens of a shared prefix.

    Returns:
        The row; `None` if no texts share so many tokens, if texts have different labels for a shared one, or if padding
        or the row's last token predicts a label.
    """
    texts = texts_of(batch)
    ids, labels = batch["input_ids"], batch.get("labels")
    given = batch.get("position_ids")
    if given is not None and given.ndim == 2:
        positions = given
    elif positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)
    kinds = {"input_ids": ids, "position_ids": positions.expand_as(ids)}
    kinds |= {name: batch[name] for name in TYPE_KEYS if batch.get(name) is not None}
    groups = _groups([*kinds.values()], texts, least)
    if len(groups) == len(texts):
        return None
    parents, bounds, places = _laid(torch.stack([kind.long().cpu() for kind in kinds.values()]), groups, least)
    if max(parents) < 0:
        return None
    given = (places.flatten() >= 0).nonzero()[:, 0]
    lies = places.flatten()[given]
    sources = lies.new_empty(bounds[-1]).scatter_reduce(0, lies, given, "amin", include_self=False)
    following = torch.full_like(places, IGNORE_INDEX) if labels is None else shift_labels(labels.long().cpu())
    own = following.flatten()[given]
    targets = lies.new_full(sources.shape, IGNORE_INDEX).scatter_reduce(0, lies, own, "amax")
    counts = own != IGNORE_INDEX
    scored = torch.bincount(lies[counts], minlength=bounds[-1])
    of_padding = (following[places < 0] != IGNORE_INDEX).any()
    if of_padding or int(targets[-1]) != IGNORE_INDEX or (counts & (own != targets[lies])).any():
        return None
    flat = sources.to(ids.device)
    joined = {name: value for name, value in batch.items() if name not in (*BOUNDARY_KEYS, "attention_mask")}
    joined |= {name: kind.flatten()[flat][None] for name, kind in kinds.items()}
    joined["cu_seq_lens_q"] = torch.tensor(bounds, dtype=torch.int32, device="cpu")
    if labels is not None:
        joined["labels"] = torch.cat([targets.new_full((1,), IGNORE_INDEX), targets[:-1]]).to(labels.device)[None]
    return Joined(joined, tuple(parents), places, scored[None], labels, sources)


def obstacle_in(batch: Mapping[str, Any], towers: bool = False) -> str:
    """Returns why a batch's texts cannot be joined; empty if they can. With `towers`, other inputs are allowed."""
    others = sorted(name for name, value in batch.items() if name not in _KNOWN and holds_values(name, value))
    if others and not towers:
        return f"{', '.join(others)} may have a value a token"
    positions = batch.get("position_ids")
    return "position_ids have several values a token" if positions is not None and positions.ndim != 2 else ""


def fit(batch: Mapping[str, Any]) -> bool:
    """Returns whether labels and token types have the shape of the tokens."""
    shape = batch_shape(batch)
    values = [value for value in map(batch.get, ("labels", *TYPE_KEYS)) if value is not None]
    return all(isinstance(value, Tensor) and tuple(value.shape) == shape for value in values)


def _groups(kinds: Sequence[Tensor], texts: Sequence[Text], least: int) -> list[list[Text]]:
    """Groups texts that may share `least` tokens and one more, by a hash: a sum of these tokens, each times a random
    factor for its place. This avoids comparing thousands of packed documents one by one."""
    long = [text for text in texts if text.size > least]
    device, length = kinds[0].device, kinds[0].shape[1]
    starts = torch.tensor([text.row * length + text.start for text in long], dtype=torch.int64, device=device)
    places, draws = starts[:, None] + torch.arange(least + 1, device=device), torch.Generator("cpu").manual_seed(0)
    sums = torch.zeros_like(starts)
    for kind in kinds:
        factors = torch.randint(-(2**62), 2**62, (least + 1,), generator=draws, device="cpu").to(device)
        sums += (kind.long().flatten()[places] * factors).sum(1)  # wraps modulo 2**64
    found, groups = iter(sums.tolist()), dict[Any, list[Text]]()
    for text in texts:
        groups.setdefault(next(found) if text.size > least else text, []).append(text)
    return [*groups.values()]


def _laid(values: Tensor, groups: Sequence[list[Text]], least: int) -> tuple[list[int], list[int], Tensor]:
    """Divides texts into pieces, and lays these in one row, each before its continuations. Only texts of one group
    share any.

    Args:
        values (`torch.Tensor` of shape `(kinds of values, batch, tokens)`): What is compared.
        groups (sequence of lists of [`Text`]): Which texts may share pieces.
        least (`int`): The minimum number of tokens of a shared piece.

    Returns:
        For each piece the index of the piece it continues, or -1; the bounds of the pieces; and the index in the row of
        each token of the batch, -1 for padding.
    """
    parents: list[int] = []
    bounds = [0]
    places = torch.full(values.shape[1:], -1, device="cpu")

    def lay(texts: list[Text], start: int, stop: int, parent: int) -> None:
        bounds.append(bounds[-1] + stop - start)
        parents.append(parent)
        for text in texts:
            places[text.row, text.start + start : text.start + stop] = torch.arange(*bounds[-2:], device="cpu")

    # texts, the number of their tokens that are laid, and the index of the last piece
    open_groups = [(texts, 0, -1) for texts in reversed(groups)]
    while open_groups:
        group, start, parent = open_groups.pop()
        if len(group) == 1:
            lay(group, start, group[0].size, parent)
            continue
        common = _common(values, group, start)
        if common - 1 - start >= least:
            lay(group, start, common - 1, parent)
            start, parent = common - 1, len(parents) - 1
        apart = dict[Any, list[Text]]()
        for text in group:
            following = _of(values, text, common).tolist() if common < text.size else [text]
            apart.setdefault(tuple(following), []).append(text)
        open_groups += [(own, start, parent) for own in reversed(apart.values())]
    return parents, bounds, places


def _common(values: Tensor, texts: Sequence[Text], start: int) -> int:
    """Returns how many tokens all texts have in common."""
    shortest = min(text.size for text in texts)
    rows = torch.stack([_of(values, text, slice(start, shortest)) for text in texts])
    different = (rows != rows[:1]).flatten(0, 1).any(0).nonzero()
    return start + int(different[0]) if len(different) else shortest


def _of(values: Tensor, text: Text, places: int | slice) -> Tensor:
    return values[:, text.row, text.start : text.stop][:, places]
