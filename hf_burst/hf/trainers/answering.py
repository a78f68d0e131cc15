"""Answers of a model over the ranks that share its sequences, where a trainer or the user calls `model.generate`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, PreTrainedModel

from ...errors import BatchError, ConfigError, UnsupportedModelError
from ...ranks.group import ContextGroup
from ..generation.generate import generate, same_random_numbers
from ..generation.request import asked, check, copies_of, patched
from ..groups import PATCH
from ..patch import WITHIN
from ..view import find_inside, inner_modules


def check_steps(trainer: Any, accelerator: Accelerator, steps: Sequence[str], instead: str = "") -> None:
    """Raises for a trainer that was not compared with one process: under DeepSpeed, or without some of the methods that
    are wrapped. `instead` ends the advice."""
    name = type(trainer).__name__
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        raise ConfigError(
            f"{name} over ranks that share sequences was not compared with one process under DeepSpeed. Launch it with "
            "DDP, or with FSDP2, which shards weights as ZeRO-3 does."
        )
    missing = [step for step in steps if not hasattr(trainer, step)]
    if missing:
        raise ConfigError(
            f"{name} has no {', '.join(missing)}: its steps are not those of TRL 1.16, with which groups of ranks were "
            f"compared. Install trl==1.16.0{instead}."
        )


def answer(
    model: nn.Module,
    group: ContextGroup,
    device: torch.device,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    **kwargs: Any,
) -> Any:
    """The model's `generate`, without dropout, called by all ranks of a group. What is not served over ranks each
    generates by itself, with the random numbers of the first."""
    first = {"input_ids": inputs, "generation_config": generation_config}  # that may be given without a name
    base = patched_inside(model)
    given = {name: value for name, value in first.items() if value is not None} | kwargs
    modes = [(module, module.training) for module in inner_modules(model)]
    model.eval()
    try:
        check(base, given)
    except (UnsupportedModelError, BatchError):
        given.pop("cuda_graphs", None)  # of steps over ranks
        with _within(), same_random_numbers(group, device), torch.no_grad():
            return base.generate(**given)
    else:
        with _within():
            return generate(base, **_each_once(base, given))
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def answering(model: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """While TRL or a rollout generates, `model.generate` and `hf_burst.generate` are a function. Within a call of it
    they are those that they were; other threads, which may generate meanwhile, meet the function."""
    base: Any = patched(model)[0]
    patch, before = getattr(base, PATCH), vars(base).get("generate")

    def generate_in_turn(*args: Any, **kwargs: Any) -> Any:
        return type(base).generate(base, *args, **kwargs) if WITHIN.get() else function(*args, **kwargs)

    outer, patch.together = patch.together, function
    base.generate = generate_in_turn
    try:
        yield
    finally:
        vars(base).pop("generate", None)
        patch.together = outer
        if before is not None:
            base.generate = before


@contextmanager
def _within() -> Iterator[None]:
    """A call in which this thread generates with all ranks."""
    token = WITHIN.set(True)
    try:
        yield
    finally:
        WITHIN.reset(token)


def patched_inside(model: nn.Module) -> Any:
    """The patched model inside of a model; `None` if there is none."""
    return find_inside(model, PATCH)


def _each_once(model: PreTrainedModel, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate`, where prompts that come several times in a row are given once: what is sampled stays
    the same, and return sequences share the keys of their prompt."""
    rows = [given[name] for name in ("input_ids", "attention_mask") if isinstance(given.get(name), Tensor)]
    tensors = sum(isinstance(value, Tensor) for value in tree_leaves(given))  # images may come in lists
    if not asked(model, given, "do_sample") or copies_of(model, given) > 1 or tensors > len(rows) or not rows:
        return given
    _, repeats = torch.unique_consecutive(torch.cat(rows, 1), dim=0, return_counts=True)
    copies = gcd(*repeats.tolist())
    once = {name: value[::copies] for name, value in given.items() if isinstance(value, Tensor)}
    config = given.get("generation_config")
    if config is None:
        return {**given, **once, "num_return_sequences": copies}
    return {
        **given,
        **once,
        "generation_config": GenerationConfig(**{**config.to_dict(), "num_return_sequences": copies}),
    }
