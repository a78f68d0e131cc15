"""The life cycle of a part: one capability of a patched model."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..forward_pass import ForwardPass
from ..models.cut_point import TokenInput
from ..overrides import Override
from ..view import ModelView

Handles = Sequence[RemovableHandle]


class Part:
    """One capability of a patched model. A part overrides the steps of its life that concern it.

    Making a part looks at the model and may refuse it. Nothing is changed before `install`. What a part knows of single
    modules it takes up in `look`, for they may be exchanged. For each forward pass the parts take the same step one
    after another, in the order of the list in `patch.py`:

        (look ->) prepare -> (the ranks agree) -> begin -> (the model runs) -> after -> end

    A part may read what another one found in a step before. If it reads what another one found in the same step, it
    `needs` that part, which then stands before it in the list; `tests/hf/test_parts.py` watches who reads what.
    """

    needs: tuple[type["Part"], ...] = ()
    token_inputs: tuple[TokenInput, ...] = ()  # to be cut as well as those of the model's cut point

    def install(self, view: ModelView) -> None:
        """Changes the model."""

    def look(self, view: ModelView) -> Handles:
        """Takes up the modules of the model: after `install`, and before a pass that finds others than the pass before.
        Returns the hooks that it added, which the patch removes. May refuse what it finds, as `prepare` may."""
        return ()

    def prepare(self, run: ForwardPass) -> None:
        """Checks the batch, makes this rank's inputs of it, and adds the facts on which the ranks must agree.

        Every error here reaches all ranks. Parts do not communicate, and what they change in the model
        `remove` puts back, but for overrides.
        """

    def overrides(self, view: ModelView) -> Iterable[tuple[type[Override], nn.Module, tuple[Any, ...]]]:
        """What takes the place of modules' own methods from `look` on: the kind, the module, and what its kind is made
        of besides. The patch puts them in place, and takes all away in the end."""
        return ()

    def begin(self, run: ForwardPass) -> None:
        """Takes up the state of the pass; all ranks do it, or none. Parts may communicate."""

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        """Changes the outputs of this rank, by name, to those of the whole batch."""

    def end(self) -> None:
        """Drops the state of the pass. Called after every pass, also a failed one, and before the next."""

    def remove(self, view: ModelView) -> None:
        """Puts back what `install`, or a pass, changed."""
