"""Generation over the ranks that share sequences, when a trainer or the user calls `model.generate`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from math import gcd
from threading import get_ident
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, PreTrainedModel

from ...errors import BatchError, UnsupportedModelError
from ..generation.generate import generate, same_random_numbers
from ..generation.settings import check, copies_of, evaluating, patched, setting, with_settings
from ..groups import PATCH
from ..patch import patch_model
from ..view import find_inside
from .first_rank import FirstRank


def patch_as(model: nn.Module, other: nn.Module) -> None:
    """Patches a model that a trainer may have loaded itself, with the settings of the trained model."""
    own = find_inside(model, PATCH)
    if own is not None and isinstance(other, PreTrainedModel) and not hasattr(other, PATCH):
        patch_model(other, getattr(own, PATCH).config)


def uncompared(trainer: Any, accelerator: Accelerator, steps: Sequence[str], instead: str = "") -> Iterator[str]:
    """Yields why a trainer was not compared with one process: under DeepSpeed, or if methods to wrap are missing.
    `instead` ends the advice."""
    name = type(trainer).__name__
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        yield (
            f"{name} over ranks that share sequences was not compared with one process under DeepSpeed. Launch it with "
            "DDP, or with FSDP2, which shards weights as ZeRO-3 does."
        )
    missing = [step for step in steps if not hasattr(trainer, step)]
    if missing:
        yield (
            f"{name} has no {', '.join(missing)}: its steps are not those of TRL 1.16, with which groups of ranks were "
            f"compared. Install trl==1.16.0{instead}."
        )


def wrap_steps(trainer: Any, **wrappers: Callable[..., Any]) -> None:
    """Replaces methods of a trainer. Each wrapper gets the method before the arguments."""
    for name, wrapper in wrappers.items():
        method = getattr(trainer, name)
        setattr(trainer, name, update_wrapper(partial(wrapper, method), method))


class GroupGeneration(FirstRank):
    """A [`FirstRank`] for groups that generate together: a trainer's `model.generate` runs over all ranks."""

    within: int | None = None  # the thread that generates with all ranks; a rollout may use several

    @contextmanager
    def answering(self, model: nn.Module) -> Iterator[None]:
        """Makes `model.generate` and a rollout's `hf_burst.generate` run on all ranks inside the context."""
        base: Any = patched(model)[0]
        patch = getattr(base, PATCH)
        before = vars(base).get("generate")
        self.calls["model.generate"] = partial(self.answer, model, base)
        ask = partial(self.together, "model.generate")

        def generate_in_turn(*args: Any, **kwargs: Any) -> Any:
            within = self.within == get_ident()
            return type(base).generate(base, *args, **kwargs) if within else ask(*args, **kwargs)

        patch.together = lambda: ask if self.leads and self.within != get_ident() else None
        base.generate = generate_in_turn
        self.problem = None
        try:
            yield
            self.check()
        finally:
            patch.together = None
            vars(base).pop("generate", None)
            if before is not None:
                base.generate = before

    def answer(
        self,
        model: nn.Module,
        base: Any,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns a model's answers (`base` is the patched model inside it), without dropout. For unsupported
        arguments, all ranks generate alone with the first rank's random numbers, and take its sequences."""
        unnamed = {"input_ids": inputs, "generation_config": generation_config}
        given = {name: value for name, value in unnamed.items() if value is not None} | kwargs
        self.within = get_ident()
        try:
            with evaluating(model):
                return self._answer(base, given)
        finally:
            self.within = None

    def _answer(self, base: Any, given: dict[str, Any]) -> Any:
        try:
            check(base, given)
        except (UnsupportedModelError, BatchError):
            given.pop("cuda_graphs", None)  # only for steps over ranks
            found: list[Any] = []

            def tokens() -> Tensor:  # the rest, such as a cache, stays each rank's own
                found.append(base.generate(**given))
                return getattr(found[0], "sequences", found[0])

            with same_random_numbers(self.group, self.device), torch.no_grad():
                first = self.result(tokens, "generate", alone=False)
            if isinstance(found[0], Tensor):
                return first
            found[0].sequences = first
            return found[0]
        else:
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
    repeated = {"num_return_sequences": copies}
    config = given.get("generation_config")
    return {
        **given,
        **once,
        **(repeated if config is None else {"generation_config": with_settings(config, **repeated)}),
    }
