"""TRL's trainers that generate what they learn from (GRPO, RLOO): to them, a group of ranks is one process.

All ranks of a group run the trainer with the same rows and random numbers. They differ only where the trainer calls
users' code:

| a step of GRPO | the first rank of a group | the others |
|---|---|---|
| environments are made and reset, tools run | calls them | receive their results or errors |
| `rollout_func` | calls it | receive its result; join its `model.generate` and `hf_burst.generate` |
| the model generates | takes part | take part |
| vLLM as a server | asks it, together with the first ranks of other groups | receive the answers |
| vLLM beside the trainer | asks its engine | pass no prompts, as an engine may span ranks; receive the answers |
| reward functions | calls them | receive rewards, and write the same logs |
| reward models | computes the scores that count | compute them, too |
| log-probabilities, advantages, shuffles, the loss | computes | compute the same |

TRL's gathers over processes become gathers over groups. This needs private names:

- `_prepare_inputs` of `Trainer` is wrapped, because no public method covers just generation and rewards.
- `_standalone_tools` and `_environment_pool` of `GRPOTrainer` are replaced, because it reads tools and environments
  there, and fills them before it makes its accelerator.
- `gather`, `gather_object` and `broadcast_object_list` in TRL's modules are replaced by those over groups during a
  step, because these functions of accelerate use no accelerator object.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import accelerate.utils
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import Trainer

from ...errors import ConfigError
from ...ranks.group import CP_DIM, ContextGroup
from ..batches.sharded import sum_of_bits
from .answering import GroupGeneration, patch_as, uncompared, wrap_steps
from .first_rank import FirstRank
from .group_accelerator import Groups

_STEPS = ("_prepare_inputs", "compute_loss", "reward_funcs")
_STEPS_WITH_TOOLS = ("_standalone_tools", "environment_factories", "rollout_func")
_LOGS = {"log_extra", "log_metric"}  # arguments of reward functions
_NO_TOOLS = ("reset", "get_reward")  # methods of environments
_OVERRIDES = (
    "Methods that your class of the trainer overrides run on all ranks of a group: have them compute the same there. "
    "Hand in rewards, tools and rollouts as functions, which run on the first rank."
)


class GroupTraining:
    """Makes a group of ranks look like one process to a trainer.

    Args:
        trainer (`Trainer`): The trainer, still under construction.
        accelerator (`Accelerator`): Its accelerator.
        size (`int`): The number of ranks in a group.

    Raises:
        ConfigError: If generation settings are not supported, or a group's rows split the completions of a prompt.
    """

    def __init__(self, trainer: Any, accelerator: Accelerator, size: int) -> None:
        settings = trainer.args
        for reason in _reasons(trainer, settings, accelerator, size):
            raise ConfigError(reason)
        self.trainer, self.real = trainer, accelerator
        self.group = ContextGroup.from_mesh(accelerator.torch_device_mesh[CP_DIM])
        self.first = GroupGeneration(self.group, accelerator.device)
        self.groups = Groups(accelerator, size)
        self.ready = False
        rows = settings.per_device_train_batch_size * settings.steps_per_generation
        settings.generation_batch_size = rows * self.groups.num_processes
        own = {kind.__module__ for kind in type(trainer).__mro__ if issubclass(kind, Trainer)} - {Trainer.__module__}
        self.modules = {*own, "trl.generation.vllm_generation"}
        wrap_steps(trainer, _prepare_inputs=self.prepare_inputs, compute_loss=self.compute_loss)

    def begin(self) -> None:
        """Wraps users' functions, once the trainer is made."""
        if self.ready:
            return
        self.ready = True
        trainer = self.trainer
        once = self.first.once
        if trainer.ref_model is not None:  # FSDP and DeepSpeed have already wrapped it
            patch_as(trainer.model, self.real.unwrap_model(trainer.ref_model))
        trainer.reward_funcs = [
            _Judge(self.first, judge) if isinstance(judge, nn.Module) else once(judge, self.given_to_rewards)
            for judge in trainer.reward_funcs
        ]
        if getattr(trainer, "rollout_func", None) is not None:  # RLOO has no rollouts and no tools
            trainer.rollout_func = once(trainer.rollout_func)
        if getattr(trainer, "tools", None):
            trainer._standalone_tools = [once(tool, tool=True) for tool in trainer._standalone_tools]
        for name, factory in (getattr(trainer, "environment_factories", None) or {}).items():
            pool = trainer._environment_pool[name]
            stand_in = _stand_in(self.first, factory, type(pool[0]))
            trainer._environment_pool[name] = [stand_in(real) for real in pool]
            trainer.environment_factories = trainer.environment_factories | {name: stand_in}
        if trainer.use_vllm:
            engine = trainer.vllm_generation
            engine.accelerator = self.groups
            self.first.calls["sync_weights"] = engine.sync_weights  # rollouts may call it
            engine.sync_weights = partial(self.first.together, "sync_weights")
            engine.generate = partial(self.ask_engine, engine.generate)
        set_seed(trainer.args.seed + self.groups.process_index)  # as device_specific=True with a process per group

    def prepare_inputs(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns completions with their advantages, equal on all ranks. An error of one group ends the others."""
        self.groups.parted = None
        try:
            with self.names_of_groups(), self.first.answering(self.trainer.model):
                found = method(*args, **kwargs)
            sums = {"advantages": sum_of_bits(found["advantages"])}
            advice = {"advantages": _OVERRIDES}
            self.group.agree({}, None, self.real.device, 0, sums, advice, "a step on completions")
        except BaseException as problem:  # including KeyboardInterrupt
            self.groups.end_others(problem)
            raise
        return found

    def compute_loss(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the loss, with metrics over groups."""
        with self.names_of_groups():
            return method(*args, **kwargs)

    @contextmanager
    def names_of_groups(self) -> Iterator[None]:
        """Replaces accelerate's collectives in the trainer's modules by those over groups while its own code runs."""
        swapped = [
            (module, name)
            for module in filter(None, map(sys.modules.get, self.modules))
            for name in ("gather", "gather_object", "broadcast_object_list")
            if vars(module).get(name) is getattr(accelerate.utils, name)
        ]
        for module, name in swapped:
            setattr(module, name, getattr(self.groups, name))
        self.trainer.accelerator = self.groups
        try:
            yield
        finally:
            self.trainer.accelerator = self.real
            for module, name in swapped:
                setattr(module, name, getattr(accelerate.utils, name))

    def given_to_rewards(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns a reward function's arguments, with the user's environments and with logs that all ranks write."""
        given = dict(kwargs)
        for name in _LOGS & kwargs.keys():
            self.first.calls[name] = kwargs[name]
            given[name] = partial(self.first.after, name)
        if kwargs.get("environments"):
            given["environments"] = [getattr(each, "real", each) for each in kwargs["environments"]]
        return given

    def ask_engine(self, method: Callable[..., Any], prompts: list[Any], images: Any, **kwargs: Any) -> Any:
        """Returns vLLM's answers to the first rank on all ranks."""

        def ask() -> Any:
            if not self.group.rank:
                return method(prompts, images, **kwargs)
            return None if self.trainer.vllm_mode == "server" else method([], images and [], **kwargs)

        return self.first.result(ask, "vLLM", alone=False)


class _StandIn:
    """A stand-in for a user's environment, which only the first rank holds and calls for all ranks."""

    def __init__(self, first: FirstRank, factory: Callable[[], Any], real: Any = None) -> None:
        self.real = real
        if real is None and first.leads:  # in a rollout, of which the other ranks know the result alone
            self._make(factory)
        elif real is None:
            first.result(partial(self._make, factory), type(self).__name__)
        for name in _public_methods(type(self)):
            method = getattr(type(self) if self.real is None else self.real, name)
            setattr(self, name, first.once(method, tool=name not in _NO_TOOLS))

    def _make(self, factory: Callable[[], Any]) -> None:
        self.real = factory()

    def __getattr__(self, name: str) -> Any:
        if name == "real":
            raise AttributeError(name)  # of a copy that is being made
        return getattr(self.real, name)


def _stand_in(first: FirstRank, factory: Callable[[], Any], kind: type) -> Callable[..., Any]:
    """Returns a factory of stand-ins. TRL finds tools among the methods of their class."""
    methods = {name: getattr(kind, name) for name in _public_methods(kind)}
    return partial(type(kind.__name__, (_StandIn,), methods), first, factory)


def _public_methods(kind: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]


class _Judge(nn.Module):
    """A reward model that returns the first rank's scores on all ranks."""

    def __init__(self, first: FirstRank, judge: nn.Module) -> None:
        super().__init__()
        self.first, self.judge = first, judge

    def forward(self, **inputs: Any) -> Any:
        scores = self.first.result(lambda: self.judge(**inputs).logits, "a reward model", alone=False)
        return SimpleNamespace(logits=scores)


def _reasons(trainer: Any, settings: Any, accelerator: Accelerator, size: int) -> Iterator[str]:
    """Yields the settings with which a group of ranks cannot act as one process."""
    yield from uncompared(trainer, accelerator, _STEPS + (_STEPS_WITH_TOOLS if hasattr(trainer, "tools") else ()))
    if trainer.use_transformers_continuous_batching:
        yield (
            "use_transformers_continuous_batching=True generates by paged attention, which does not reach over the "
            "ranks that share a sequence. Leave it out: completions are then generated over the ranks."
        )
    parts = trainer.vllm_tensor_parallel_size
    if trainer.use_vllm and trainer.vllm_mode == "colocate" and size % parts:
        yield (
            f"vllm_tensor_parallel_size={parts} beside burst_size={size}: an engine that lies over several groups "
            f"would mix up their prompts. Set it to {size}, by which all ranks of a group generate, or to a divisor."
        )
    rollouts = getattr(trainer, "rollout_func", None) is not None  # RLOO has none
    if rollouts and trainer.use_vllm and trainer.vllm_mode == "colocate" and parts > 1:
        yield (
            f"rollout_func beside vllm_tensor_parallel_size={parts}: it runs on the first rank of a group, and the "
            "other ranks would not take part in what it asks the engine. Leave vllm_tensor_parallel_size at 1, or take "
            "vllm_mode='server'."
        )
    rows = settings.per_device_train_batch_size * settings.steps_per_generation
    evaluated = settings.per_device_eval_batch_size if settings.eval_strategy != "no" else 0
    for number, names, wanted in (
        (rows, "per_device_train_batch_size x steps_per_generation", trainer.num_generations),
        (evaluated, "per_device_eval_batch_size", trainer.num_generations_eval),
    ):
        if number % wanted:
            yield (
                f"{names} is {number} rows, and a prompt has {wanted} completions. The ranks that share sequences hold "
                f"the same rows, so these must be whole groups: a multiple of {wanted}."
            )
