"""The life cycle of a part, which is one capability of a patched model."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from ..forward_pass import Batch, Call, ForwardPass
from ..view import ModelView

Handles = Sequence[RemovableHandle]
Args = tuple[Any, ...]  # of a call of a module
Kwargs = dict[str, Any]
Outputs = dict[str, Any]  # of the model, by name


class Part:
    """One capability of a patched model. A part overrides the steps that concern it.

    `__init__` looks at the model and may refuse it; nothing changes before `install`. A part collects single modules in
    `look`, because they may be replaced. In each forward pass all parts take a step before any takes the next, in the
    order of the list in `patch.py`, at the stages of `forward_pass.py` that have their names.
    """

    run: ForwardPass | None = None  # the pass under way, from `begin` to `end`, for hooks; the patch sets it

    def install(self, view: ModelView) -> None:
        """Changes the model."""

    def look(self, view: ModelView) -> Handles:
        """Collects the model's modules, after `install` and before a pass that finds other modules than the last one.
        Returns the hooks that it added, which the patch removes, as it removes all overrides. May refuse what it finds,
        as `admit` may."""
        return ()

    def admit(self, call: Call) -> None:
        """Raises for what is not served, and adds the facts on which the ranks must agree to `call.agreement`.

        Every error here reaches all ranks. Parts must not communicate. `remove` must restore what they change in the
        model, except overrides.
        """

    def check(self, call: Call, batch: Batch) -> None:
        """Does the same for what this rank computes of the batch."""

    def begin(self, run: ForwardPass) -> None:
        """Prepares the state of the pass, on all ranks or on none. Parts may communicate."""

    def arguments(self, run: ForwardPass) -> Mapping[str, Any]:
        """Returns arguments of the model that replace those of the batch."""
        return {}

    def after(self, run: ForwardPass, outputs: Outputs) -> None:
        """Replaces this rank's outputs, by name, with those of the whole batch."""

    def end(self) -> None:
        """Drops the state of the pass. Called after every pass, also a failed one, and before the next."""

    def remove(self, view: ModelView) -> None:
        """Restores what `install`, or a pass, has changed."""
