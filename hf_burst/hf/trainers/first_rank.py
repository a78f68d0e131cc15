"""The first rank of a group runs users' code of a trainer (rewards, tools, rollouts) for all of its ranks.

The others wait for the result. If the code makes a model generate, they take part.
"""

import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from math import gcd
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ...errors import BatchError, ConfigError, UnsupportedModelError
from ...layers.surroundings import instead
from ...ranks.group import ContextGroup
from ..generation.generate import generate, same_random_numbers
from ..generation.settings import check, copies_of, evaluating, patched, setting, with_settings
from ..groups import PATCH
from ..patch import patch_model
from ..view import find_inside


def patch_as(model: nn.Module, other: nn.Module) -> None:
    """Patches a model that a trainer may have loaded itself, with the settings of the trained model."""
    own = find_inside(model, PATCH)
    if own is not None and isinstance(other, PreTrainedModel) and not hasattr(other, PATCH):
        patch_model(other, getattr(own, PATCH).config)


def wrap_steps(trainer: Any, **wrappers: Callable[..., Any]) -> None:
    """Replaces methods of a trainer. Each wrapper gets the method before the arguments."""
    for name, wrapper in wrappers.items():
        method = getattr(trainer, name, None)
        if method is None:
            raise ConfigError(
                f"{type(trainer).__name__} has no {name}",
                "its steps are not those of TRL 1.16, with which groups of ranks were compared",
                "Install trl==1.16.0",
            )
        setattr(trainer, name, update_wrapper(partial(wrapper, method), method))


def gather_first_ranks(accelerator: Accelerator, size: int, tensors: Any) -> Any:
    """Gathers from all ranks, and returns what the first rank of each group of `size` ranks has."""

    def once(tensor: Tensor) -> Tensor:
        rows = tensor.shape[0] if tensor.ndim else 1
        every = Accelerator.gather(accelerator, tensor)
        return every.unflatten(0, (-1, size, rows))[:, 0].flatten(0, 1) if rows else every

    return recursively_apply(once, tensors)


class FirstRank:
    """The first rank of a group, from the view of all ranks."""

    def __init__(self, group: ContextGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.calls: dict[str, Callable[..., Any]] = {}  # what all ranks run if users' code calls it
        self.leads = False  # whether this is the first rank, and runs users' code
        self.within: int | None = None  # the thread that runs a call with all ranks
        self.turn = threading.Lock()  # held by that thread; a rollout may use several

    def result(self, run: Callable[[], Any], doing: str) -> Any:
        """Returns the first rank's result of `run` on all ranks, and gives them its random state. Its error ends all
        ranks, which is where `doing` is named. The others do not run it, and join its calls."""
        if self.leads:
            return run()
        result: Any = None
        written = b""
        error: BaseException | None = None
        if not self.group.rank:
            self.leads = True
            try:
                result = run()
                written = self._packed("", (result, torch.get_rng_state()), {})
            except BaseException as problem:  # including KeyboardInterrupt
                error = problem
            self.leads = False
        while True:
            name, content, named = self._send(written, doing, error)
            if not name:
                break
            try:
                self._call(name, partial(self.calls[name], *content, **named))
            except BaseException as problem:  # the first rank has this error, too, and decides what follows
                if self.group.broken:
                    raise
                error = None if isinstance(problem, Exception) else problem
        if self.group.rank:
            result, state = content
            torch.set_rng_state(state)
        return result

    def together(self, name: str, /, *args: Any, mine: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Runs one of [`calls`] on all ranks, also if users' code on the first rank makes it. That rank runs `mine`
        instead, if given."""
        run = mine or partial(self.calls[name], *args, **kwargs)
        if self.within == threading.get_ident():  # all ranks run this already
            return run()
        if not self.leads:
            return self._call(name, run)
        with self.turn:
            self._send(self._packed(name, args, kwargs), name)
            return self._call(name, run)

    def _call(self, name: str, run: Callable[[], Any]) -> Any:
        """Runs a call on all ranks, then raises any rank's error on all of them."""
        within = instead(threading.get_ident(), "within", self)
        with within, self.group.agreeing(self.device, name) as end, torch.no_grad():
            end.add("call", "end")
            return run()

    def _send(self, written: bytes, doing: str, error: BaseException | None = None) -> tuple[str, Any, Any]:
        """Returns the first rank's message on all other ranks. Raises on all ranks if one of them has an error."""
        sent = self.group.first_says(written, self.device, doing, error)
        return _unpacked(sent, self.device) if self.group.rank else ("", None, None)

    def _packed(self, name: str, content: tuple[Any, ...], named: dict[str, Any]) -> bytes:
        """Pickles the name of a call and its objects (rows, images, tensors), and checks that they can be restored."""
        written = io.BytesIO()
        try:
            torch.save((name, content, named), written)
        except (AttributeError, TypeError, RuntimeError, pickle.PicklingError) as problem:
            raise BatchError(
                f"What the first rank of a group called or made cannot be told to the others: {problem}. Rollouts "
                "return numbers, text, tensors and images, and give model.generate such arguments only."
            ) from problem
        _unpacked(written.getvalue(), self.device)  # raises here rather than on the other ranks
        return written.getvalue()

    @contextmanager
    def answering(self, model: nn.Module) -> Iterator[None]:
        """Makes `model.generate` and a rollout's `hf_burst.generate` run on all ranks inside the context."""
        base: Any = patched(model)[0]
        patch = getattr(base, PATCH)
        before = vars(base).get("generate")
        self.calls["model.generate"] = partial(self.answer, model, base)
        ask = partial(self.together, "model.generate")

        def generate_in_turn(*args: Any, **kwargs: Any) -> Any:
            within = self.within == threading.get_ident()
            return type(base).generate(base, *args, **kwargs) if within else ask(*args, **kwargs)

        patch.together = lambda: ask if self.leads and self.within != threading.get_ident() else None
        base.generate = generate_in_turn
        try:
            yield
        finally:
            patch.together = None
            del base.generate
            if before is not None:
                base.generate = before

    def answer(
        self, model: nn.Module, base: Any, inputs: Any = None, generation_config: Any = None, **kwargs: Any
    ) -> Any:
        """Returns a model's answers (`base` is the patched model inside it), without dropout. For unsupported
        arguments, each rank generates alone with the first rank's random numbers."""
        unnamed = {"input_ids": inputs, "generation_config": generation_config}
        given = {name: value for name, value in unnamed.items() if value is not None} | kwargs
        with evaluating(model):
            try:
                check(base, given)
            except (UnsupportedModelError, BatchError):
                given.pop("cuda_graphs", None)  # only for steps over ranks
                with same_random_numbers(self.group, self.device):
                    return base.generate(**given)
            return generate(base, **_each_once(base, given))


def _each_once(model: PreTrainedModel, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `generate` with repeated prompts given once: samples stay the same, and return sequences
    share the keys of their prompt."""
    rows = [given[name] for name in ("input_ids", "attention_mask") if isinstance(given.get(name), Tensor)]
    tensors = sum(isinstance(value, Tensor) for value in tree_leaves(given))  # images may be in lists
    if not setting(model, given, "do_sample") or copies_of(model, given) > 1 or tensors > len(rows) or not rows:
        return given
    _, repeats = torch.unique_consecutive(torch.cat(rows, 1), dim=0, return_counts=True)
    copies = gcd(*repeats.tolist())
    once = {name: value[::copies] for name, value in given.items() if isinstance(value, Tensor)}
    return with_settings(given | once, num_return_sequences=copies)


def _unpacked(written: bytes, device: torch.device) -> Any:
    """Restores the objects, with GPU tensors on this rank's device."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(written), place, weights_only=False)
