"""TRL's trainers that generate what they learn from (GRPO, RLOO): to them, a group of ranks is one process.

All ranks run the trainer, because all of them take part in each pass of the model. What must happen once for a group
runs on its first rank, which hands on what came of it: generation with everything around it (the user's rollouts,
tools, environments) and rewards. Where the trainer asks about processes, or gathers over them, it is told of groups.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import accelerate.utils
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply, set_seed
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from ...errors import BatchError, ConfigError, UnsupportedModelError
from ...ranks.group import CP_DIM, ContextGroup
from ..callers import frames
from ..generation.generate import generate, same_random_numbers
from ..generation.request import check
from ..groups import PATCH
from ..patch import patch_model

_SERVED = {("trl.trainer.grpo_trainer", "GRPOTrainer"), ("trl.trainer.rloo_trainer", "RLOOTrainer")}


def generating_trainer() -> Any | None:
    """The trainer that is making its accelerator, if it generates what it learns from and is served."""
    making = (frame.f_locals.get("self") for frame in frames() if _is_making(frame.f_code.co_name))
    trainer = next((each for each in making if isinstance(each, Trainer)), None)
    kinds = [(kind.__module__, kind.__name__) for kind in type(trainer).__mro__]
    known = next((place for place, kind in enumerate(kinds) if kind in _SERVED), None)
    if known is None or any(module.startswith("trl.") for module, _ in kinds[:known]):  # TRL's own other losses
        return None
    return trainer


def _is_making(name: str) -> bool:
    return name == "create_accelerator_and_postprocess"


class Groups:
    """An accelerator whose processes are groups of ranks. What it does not say is that of the real one.

    Args:
        accelerator (`Accelerator`): The real one.
        size (`int`): The ranks of a group.
    """

    def __init__(self, accelerator: Accelerator, size: int) -> None:
        self.accelerator = accelerator
        self.num_processes = accelerator.num_processes // size
        self.process_index = accelerator.process_index // size
        mesh = accelerator.torch_device_mesh
        self.peers = ContextGroup.from_mesh(mesh["dp"]) if self.num_processes > 1 else ContextGroup()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def gather(self, tensors: Any) -> Any:
        """As `Accelerator.gather`, over the ranks that have this one's place in their groups."""

        def over_groups(tensor: Tensor) -> Tensor:
            tensor = (tensor[None] if tensor.ndim == 0 else tensor).contiguous()
            if self.peers.size == 1:
                return tensor
            every = [torch.empty_like(tensor) for _ in range(self.peers.size)]
            dist.all_gather(every, tensor, group=self.peers.process_group)
            return torch.cat(every)

        return recursively_apply(over_groups, tensors, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As `Accelerator.reduce`."""

        def over_groups(tensor: Tensor) -> Tensor:
            total = tensor.clone()
            if self.peers.size > 1:
                dist.all_reduce(total, group=self.peers.process_group)
            return total / self.peers.size * scale if reduction == "mean" else total * scale

        return recursively_apply(over_groups, tensor, error_on_other_type=True)

    def gather_object(self, objects: Any) -> Any:
        """As `accelerate.utils.gather_object`."""
        if self.peers.size == 1:
            return objects
        every: list[Any] = [None] * self.peers.size
        dist.all_gather_object(every, objects, group=self.peers.process_group)
        return [item for own in every for item in own]

    def broadcast_object_list(self, objects: list[Any], from_process: int = 0) -> list[Any]:
        """As `accelerate.utils.broadcast_object_list`."""
        if self.peers.size > 1:
            dist.broadcast_object_list(
                objects, src=self.peers.members[from_process], group=self.peers.process_group
            )
        return objects


class GroupTraining:
    """Wraps the methods of one trainer in which ranks of a group would come apart.

    Args:
        trainer (`Trainer`): It is being made.
        accelerator (`Accelerator`): Its accelerator.
        size (`int`): The ranks of a group.

    Raises:
        ConfigError: If it is to generate in a way that is not served, or a group's rows are not whole groups of
            completions.
    """

    def __init__(self, trainer: Any, accelerator: Accelerator, size: int) -> None:
        self.trainer, self.size, self.device = trainer, size, accelerator.device
        self.group = ContextGroup.from_mesh(accelerator.torch_device_mesh[CP_DIM])
        self.groups = Groups(accelerator, size)
        self.real = accelerator
        self.leading = False  # whether this is the first rank, and runs what is run once
        self.ready = False
        settings = trainer.args
        _check(trainer, settings)
        settings.generation_batch_size = (
            settings.per_device_train_batch_size * self.groups.num_processes * settings.steps_per_generation
        )
        modules = {kind.__module__ for kind in type(trainer).__mro__ if issubclass(kind, Trainer)}
        self.modules = {*modules - {Trainer.__module__}, "trl.generation.vllm_generation"}
        self.wrap(trainer, "_prepare_inputs", self.seen_as_groups)
        self.wrap(trainer, "compute_loss", self.seen_as_groups)
        self.wrap(trainer, "_generate", self.generate)
        self.wrap(trainer, "_generate_single_turn", self.generate_single_turn)
        self.wrap(trainer, "_calculate_rewards", self.calculate_rewards)

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Has a method of an object run through a wrapper, which is given the method first."""
        method = partial(getattr(type(owner), name), owner)
        setattr(owner, name, update_wrapper(partial(wrapper, method), getattr(type(owner), name)))

    def patch_reference(self, model: Any) -> None:
        """Patches the reference model, which the trainer makes by itself, as the model."""
        bare = self.real.unwrap_model(model)
        if isinstance(bare, PreTrainedModel) and not hasattr(bare, PATCH):
            config = getattr(_patched(self.trainer.model), PATCH).config
            patch_model(bare, config)

    def begin(self) -> None:
        """What is left to do when the trainer is made: the reference model, seeds."""
        if self.ready:
            return
        self.ready = True
        if self.trainer.ref_model is not None:  # which FSDP and DeepSpeed have wrapped by themselves
            self.patch_reference(self.trainer.ref_model)
        set_seed(self.trainer.args.seed + self.groups.process_index)  # as device_specific=True of one process a group

    @contextmanager
    def names_of_groups(self) -> Iterator[None]:
        """While the trainer's own code runs, its names of accelerate's collectives are those over groups."""
        swapped: list[tuple[Any, str, Any]] = []
        for name in ("gather", "gather_object", "broadcast_object_list"):
            of_all = getattr(accelerate.utils, name)
            for module in filter(None, map(sys.modules.get, self.modules)):
                if vars(module).get(name) is of_all:
                    swapped.append((module, name, of_all))
                    setattr(module, name, getattr(self.groups, name))
        self.trainer.accelerator = self.groups
        try:
            yield
        finally:
            self.trainer.accelerator = self.real
            for module, name, of_all in swapped:
                setattr(module, name, of_all)

    def seen_as_groups(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.names_of_groups():
            return method(*args, **kwargs)

    def generate(self, method: Callable[..., Any], prompts: list[Any]) -> Any:
        """Completions, of the first rank: with rollouts, tools and environments as they are called there."""
        trainer = self.trainer
        counts = trainer._metrics["train" if trainer.model.training else "eval"]

        def once() -> Any:
            return method(prompts), prompts, dict(counts), trainer.state.num_input_tokens_seen

        result, prompts[:], metrics, trainer.state.num_input_tokens_seen = self.lead(once, "generation")
        counts.update(metrics)
        return result

    def generate_single_turn(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One call of the model's `generate`, over all ranks of the group."""
        return self.together("_generate_single_turn", partial(self._generate_over_ranks, method), *args, **kwargs)

    def _generate_over_ranks(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _generating(self.trainer.model, self.group):
            return method(*args, **kwargs)

    def calculate_rewards(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Rewards of all groups: the user's functions are called on the first rank of each."""
        trainer = self.trainer

        def once() -> Any:
            rewards = method(*args, **kwargs)
            return rewards.cpu(), dict(trainer._pending_extra_logs), dict(trainer._pending_metrics)

        rewards, columns, metrics = self.lead(once, "rewards")
        trainer._pending_extra_logs.update(columns)
        trainer._pending_metrics.update(metrics)
        return rewards.to(self.device)

    def lead(self, run: Callable[[], Any], doing: str) -> Any:
        """What `run` returns on the first rank, on all ranks. They take part in what it calls [`together`], and go on
        with its random numbers."""
        error: Exception | None = None
        result: Any = None
        if self.group.rank == 0:
            self.leading = True
            try:
                result = run()
            except Exception as problem:  # the others must not wait for this one
                error = problem
            finally:
                self.leading = False
            return self._exchange(doing, (None, result, torch.get_rng_state()), error)[1]
        while True:
            called, what, state = self._exchange(doing, None, error)
            if called is None:
                torch.set_rng_state(state)
                return what
            try:
                args, kwargs = what
                getattr(self.trainer, called)(*args, **kwargs)
            except Exception as problem:
                error = problem

    def together(self, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of a method of the trainer, which all ranks make if the first one makes it while it leads."""
        if not self.leading:
            return run(*args, **kwargs)
        self._exchange(name, (name, (args, kwargs), None), None)
        self.leading = False
        try:
            return run(*args, **kwargs)
        finally:
            self.leading = True

    def _exchange(self, doing: str, told: Any, error: Exception | None) -> Any:
        """What the first rank tells all others, unless one has met an error, which is then one of all."""
        self.group.agree({"call": "lead"}, error, self.device, doing=doing)
        return self.group.gather(told, self.device, doing)[0]


def _check(trainer: Any, settings: Any) -> None:
    """Raises for settings by which the ranks of a group would not be one process."""
    if trainer.use_transformers_continuous_batching:
        raise ConfigError(
            "use_transformers_continuous_batching=True generates by paged attention, which does not reach over the "
            "ranks that share a sequence. Leave it out: completions are then generated over the ranks."
        )
    rows = settings.per_device_train_batch_size * settings.steps_per_generation
    evaluated = settings.per_device_eval_batch_size if settings.eval_strategy != "no" else 0
    for number, names, wanted in (
        (rows, "per_device_train_batch_size x steps_per_generation", trainer.num_generations),
        (evaluated, "per_device_eval_batch_size", trainer.num_generations_eval),
    ):
        if number % wanted:
            raise ConfigError(
                f"{names} is {number} rows, and a prompt has {wanted} completions. The ranks that share sequences hold "
                f"the same rows, so these must be whole groups: a multiple of {wanted}."
            )


def _patched(model: nn.Module) -> Any:
    return next(module for module in model.modules() if PATCH in vars(module))


@contextmanager
def _generating(model: nn.Module, group: ContextGroup) -> Iterator[None]:
    """While TRL generates, the model's `generate` is that over ranks; for what that does not serve, each rank generates
    by itself, with the random numbers of the first."""
    base = _patched(model)
    modes = [(module, module.training) for module in model.modules()]

    def over_ranks(**kwargs: Any) -> Any:
        del base.generate
        model.eval()
        try:
            check(base, kwargs)
        except (UnsupportedModelError, BatchError):
            with same_random_numbers(group, base.device):
                return base.generate(**kwargs)
        return generate(base, **kwargs)

    base.generate = over_ranks
    try:
        yield
    finally:
        vars(base).pop("generate", None)
        for module, mode in modes:
            module.training = mode
