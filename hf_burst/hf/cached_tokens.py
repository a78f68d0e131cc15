"""What all layers of a cache over ranks know of its tokens, and a step of one token at fixed places in memory."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..plan import MaskPattern
from ..ranks.group import ContextGroup

_MASKS = "transformers.masking_utils"


@dataclass
class CachedTokens:
    """What all layers of a cache know of its tokens.

    Args:
        group ([`ContextGroup`]): The ranks.
        rows (`int`): Prompts.
        length (`int`): Tokens of a prompt, padding included.
        starts (`tuple[int, ...]`): For each row, how many of them are padding; empty for none.
        own (`torch.LongTensor` of shape `(rows or 1, n)`): Positions of the tokens of the prompt on this rank, -1 for
            padding; while the prompt is read and from then on.
        new (`torch.LongTensor` of shape `(batch, n)`, *optional*): Positions of the tokens behind the prompt.
        unpadded (`bool`): Whether all of these are real.
        latest (`int`): How many of them are those of the latest step.
        filling (`bool`): Whether the prompt is being read.
        whole (`bool`): Whether windows keep all of it, as its last tokens may be guesses that are taken back.
        fixed ([`FixedStep`], *optional*): Where a step finds its tokens, if that is to be the same place in each.
    """

    group: ContextGroup
    rows: int = 1
    length: int = 0
    starts: tuple[int, ...] = ()
    own: Tensor = field(init=False)
    new: Tensor | None = None
    unpadded: bool = True
    latest: int = 0
    filling: bool = False
    whole: bool = False
    fixed: "FixedStep | None" = None

    @property
    def shown(self) -> Tensor:
        """The tokens of each row of the prompt that are not padding, `(rows or 1, 1)`."""
        starts = torch.tensor(self.starts or (0,), device=self.own.device)
        return self.length - starts[:, None]

    def note_question(self) -> None:
        """Someone asks how many tokens there are. Masks need not: the positions of new tokens stand for them."""
        if self.fixed is not None and sys._getframe(2).f_globals.get("__name__") != _MASKS:
            self.fixed.asked_for_length = True

    def first_seen(self, pattern: MaskPattern) -> int:
        """The first token of the prompt that a later token of any row may see."""
        window, chunk = pattern.window, pattern.attention_chunk_size
        starts = self.starts or (0,)
        seen = [start if window is None else max(start, self.length - window) for start in starts]
        if chunk is not None:
            begun = [start + (self.length - start) // chunk * chunk for start in starts]
            seen = [max(pair) for pair in zip(seen, begun, strict=True)]
        return min(seen)


class FixedStep:
    """A step of one token whose tensors lie where those of other steps lie, so that a recording of it can be played
    again. What differs between steps is in them: no shape, and no number that Python knows.

    Args:
        tokens ([`CachedTokens`]): Those of the cache, with the token of the step.
        room (`int`): New tokens for which each layer has room on this rank; one place more takes those of other ranks.
    """

    def __init__(self, tokens: CachedTokens, room: int) -> None:
        assert tokens.new is not None, "there is a new token"
        self.tokens, self.room = tokens, room
        self.query = tokens.new.new_empty(len(tokens.new), 1)  # its position
        self.place = tokens.new.new_empty(1)  # where layers put its keys
        self.positions = tokens.new.new_empty(len(tokens.new), room + 1)  # of the new keys of this rank; -1 for none
        self.layers: list[Any] = []  # that took up keys
        self.asked_for_length = False  # by the model, which then computes with a number

    def move(self) -> bool:
        """To the latest token of the cache, if there is room for it."""
        new, group = self.tokens.new, self.tokens.group
        assert new is not None, "there is a new token"
        own, last = new[:, group.rank :: group.size], new.shape[1] - 1
        if own.shape[1] > self.room:
            return False
        self.query.copy_(new[:, last:])
        self.place.fill_(last // group.size if last % group.size == group.rank else self.room)
        self.positions.fill_(-1)
        self.positions[:, : own.shape[1]] = own
        return True

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Has layers take up keys at these places, and not count them."""
        self.layers, self.tokens.fixed = [], self
        try:
            yield
        finally:
            self.tokens.fixed = None

    def count(self) -> None:
        """After the step: layers have the token."""
        for layer in self.layers:
            layer.count += 1
