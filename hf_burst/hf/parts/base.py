"""The life cycle of a part: one capability of a patched model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..forward_pass import Agreement, Batch, Call, ForwardPass
from ..overrides import Override
from ..view import ModelView

Handles = Sequence[RemovableHandle]


class Part:
    """One capability of a patched model. A part overrides the steps of its life that concern it.

    Making a part looks at the model and may refuse it. Nothing is changed before `install`. What a part knows of single
    modules it takes up in `look`, for they may be exchanged. For each forward pass the parts take the same step one
    after another, in the order of the list in `patch.py`, between the stages of `forward_pass.py`:

        (look ->) admit -> check -> (the ranks agree) -> begin -> arguments -> (the model runs) -> after -> end
    """

    def install(self, view: ModelView) -> None:
        """Changes the model."""

    def look(self, view: ModelView) -> Handles:
        """Takes up the modules of the model: after `install`, and before a pass that finds others than the pass before.
        Returns the hooks that it added, which the patch removes. May refuse what it finds, as `admit` may."""
        return ()

    def overrides(self, view: ModelView) -> Iterable[tuple[type[Override], nn.Module, tuple[Any, ...]]]:
        """What takes the place of modules' own methods from `look` on: the kind, the module, and what its kind is made
        of besides. The patch puts them in place, and takes all away in the end."""
        return ()

    def admit(self, call: Call, agreement: Agreement) -> None:
        """Raises for what is not served, and adds the facts on which the ranks must agree.

        Every error here reaches all ranks. Parts do not communicate, and what they change in the model `remove` puts
        back, but for overrides.
        """

    def check(self, call: Call, batch: Batch, agreement: Agreement) -> None:
        """The same for what this rank computes of the batch."""

    def begin(self, run: ForwardPass) -> None:
        """Takes up the state of the pass; all ranks do it, or none. Parts may communicate."""

    def arguments(self, run: ForwardPass) -> Mapping[str, Any]:
        """Arguments of the model that take the place of those of the batch."""
        return {}

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        """Changes the outputs of this rank, by name, to those of the whole batch."""

    def end(self) -> None:
        """Drops the state of the pass. Called after every pass, also a failed one, and before the next."""

    def remove(self, view: ModelView) -> None:
        """Puts back what `install`, or a pass, changed."""
