"""TRL's trainers that generate what they learn from (GRPO, RLOO): to them, a group of ranks is one process.

All ranks run the trainer, because all of them take part in each pass of the model. What must happen once for a group
runs on its first rank, which hands on what came of it: generation with everything around it (the user's rollouts,
tools, environments) and rewards. Where the trainer asks about processes, or gathers over them, it is told of groups.
"""

import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import accelerate.utils
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, Trainer

from ...errors import BatchError, ConfigError, LostRankError, RankMismatchError
from ...ranks.group import CP_DIM, ContextGroup
from ..groups import PATCH
from ..patch import patch_model
from .answering import answer, answering, check_steps, patched_inside
from .group_accelerator import Groups

_STEPS = (
    "_prepare_inputs",
    "compute_loss",
    "_generate_and_score_completions",
    "_generate",
    "_generate_single_turn",
    "_calculate_rewards",
)


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
        settings = trainer.args
        _check(trainer, settings, accelerator, size)
        self.trainer, self.real, self.device = trainer, accelerator, accelerator.device
        self.group = ContextGroup.from_mesh(accelerator.torch_device_mesh[CP_DIM])
        self.groups = Groups(accelerator, size)
        self.leading = False  # whether this is the first rank, and runs what is run once
        self.begun = False  # whether the first rank leads through the generation of this step, or has
        self.parted: BaseException | None = None  # what all ranks have met in a call, after which others do not follow
        self.turn = threading.RLock()  # of one of the user's threads to have all ranks call
        self.ready = False
        self.calls: dict[str, Callable[..., Any]] = {"model.generate": self.generate_over_ranks}
        rows = settings.per_device_train_batch_size * settings.steps_per_generation
        settings.generation_batch_size = rows * self.groups.num_processes
        own = {kind.__module__ for kind in type(trainer).__mro__ if issubclass(kind, Trainer)} - {Trainer.__module__}
        self.modules = {*own, "trl.generation.vllm_generation"}
        self.wrap(trainer, "_prepare_inputs", self.seen_as_groups)
        self.wrap(trainer, "compute_loss", self.seen_as_groups)
        self.wrap(trainer, "_generate_and_score_completions", self.score)
        self.wrap(trainer, "_generate", self.generate)
        self.wrap(trainer, "_calculate_rewards", self.calculate_rewards)
        self.join(trainer, "_generate_single_turn", self.single_turn)

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Has a method of an object run through a wrapper, which is given the method first."""
        method = getattr(type(owner), name).__get__(owner)
        setattr(owner, name, update_wrapper(partial(wrapper, method), method))

    def join(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """As [`wrap`], for a method that all ranks call as soon as the first one does so while it leads."""
        self.calls[name] = partial(wrapper, getattr(type(owner), name).__get__(owner))
        self.wrap(owner, name, lambda method, *args, **kwargs: self.together(name, *args, **kwargs))

    def begin(self) -> None:
        """What is left to do when the trainer is made."""
        if self.ready:
            return
        self.ready = True
        trainer = self.trainer
        if trainer.ref_model is not None:  # which FSDP and DeepSpeed have wrapped by themselves
            self.patch_reference(trainer.ref_model)
        for place, judge in enumerate(trainer.reward_funcs):
            if isinstance(judge, nn.Module):
                self.calls[f"reward model {place}"] = partial(_call_model, judge)
        if trainer.use_vllm:
            engine = trainer.vllm_generation
            engine.accelerator = self.groups
            self.wrap(engine, "generate", self.generate_by_engine)
            self.join(engine, "sync_weights", self.sync_weights)
        if self.group.rank and getattr(trainer, "environment_factories", None) is not None:
            trainer.environment_factories = dict.fromkeys(trainer.environment_factories, _Absent)
            trainer._environment_pool = {name: [] for name in trainer.environment_factories}
        set_seed(trainer.args.seed + self.groups.process_index)  # as device_specific=True with one process a group

    def patch_reference(self, model: Any) -> None:
        """Patches the reference model, which the trainer makes by itself, as the model."""
        bare, own = self.real.unwrap_model(model), patched_inside(self.trainer.model)
        if own is not None and isinstance(bare, PreTrainedModel) and not hasattr(bare, PATCH):
            patch_model(bare, getattr(own, PATCH).config)

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
        """A step of the trainer, to which groups are processes."""
        with self.names_of_groups():
            return method(*args, **kwargs)

    def score(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Completions and their rewards. An environment that fails to be reset does so on the first rank alone, before
        it leads. What one group meets ends the others, too."""
        self.begun, self.groups.parted = False, None
        try:
            return method(*args, **kwargs)
        except BaseException as problem:  # also when the user interrupts
            try:
                if not self.begun:
                    self._tell(None, problem, "generation")
            finally:
                self.groups.tell(problem)
            raise

    def generate(self, method: Callable[..., Any], prompts: list[Any]) -> Any:
        """Completions, made on the first rank: rollouts, tools and environments are called there."""
        self.begun = True
        trainer = self.trainer
        counts = trainer._metrics["train" if trainer.model.training else "eval"]

        def once() -> Any:
            return method(prompts), prompts, dict(counts), trainer.state.num_input_tokens_seen

        result, prompts[:], metrics, trainer.state.num_input_tokens_seen = self.lead(once, "generation")
        counts.update(metrics)
        return result

    def single_turn(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One answer to each prompt, by TRL's own code on all ranks. The model answers over them."""
        with answering(self.trainer.model, self.generate_over_ranks):
            return method(*args, **kwargs)

    def generate_over_ranks(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """The model's `generate`. What is not served over ranks each generates by itself, with the random numbers of
        the first."""
        return answer(self.trainer.model, self.group, self.device, inputs, generation_config, **kwargs)

    def generate_by_engine(self, method: Callable[..., Any], prompts: list[Any], images: Any, **kwargs: Any) -> Any:
        """vLLM's answers to the prompts of the first rank. Other ranks ask their engine, which may lie over them, for
        nothing; a server they leave alone."""
        if self.group.rank and self.trainer.vllm_mode == "server":
            return [], [], [], []
        return method([], images and [], **kwargs) if self.group.rank else method(prompts, images, **kwargs)

    def sync_weights(self, method: Callable[..., Any]) -> None:
        """Sends vLLM the weights, which all ranks gather."""
        method()
        self.trainer._last_loaded_step = self.trainer.state.global_step

    def calculate_rewards(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Rewards of all groups. The user's functions are called on the first rank of each, models on all ranks."""
        trainer, functions = self.trainer, self.trainer.reward_funcs

        def once() -> Any:
            trainer.reward_funcs = [
                _Together(self, f"reward model {place}") if isinstance(judge, nn.Module) else judge
                for place, judge in enumerate(functions)
            ]
            try:
                rewards = method(*args, **kwargs)
            finally:
                trainer.reward_funcs = functions
            return rewards, dict(trainer._pending_extra_logs), dict(trainer._pending_metrics)

        rewards, columns, metrics = self.lead(once, "rewards")
        trainer._pending_extra_logs.update(columns)
        trainer._pending_metrics.update(metrics)
        return rewards

    def lead(self, run: Callable[[], Any], doing: str) -> Any:
        """What `run` returns on the first rank, on all ranks. They take part in what it calls [`together`], and go on
        with its random numbers."""
        if self.group.rank:
            return self.follow(doing)
        error: BaseException | None = None
        told = b""
        self.leading, self.parted = True, None
        try:
            with answering(self.trainer.model, partial(self.together, "model.generate")):
                result = run()
            if self.parted is not None:  # and the user's code went on
                raise self.parted
            told = _packed((result, torch.get_rng_state()))
        except BaseException as problem:  # also when the user interrupts
            met = isinstance(problem, RankMismatchError | LostRankError) and problem is not self.groups.parted
            if self.parted is not None or met:  # the others waited, and have met it by now
                raise
            error = problem
        finally:
            self.leading = False
        self._tell(("", told), error, doing)
        return result

    def follow(self, doing: str) -> Any:
        """The other ranks, while the first one leads."""
        while True:
            name, content = self._tell(None, None, doing)
            if not name:
                result, state = content
                torch.set_rng_state(state)
                return result
            args, kwargs = content
            self._call(name, *args, **kwargs)

    def together(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A call that all ranks make, if the first one makes it while it leads."""
        with self.turn:
            if not self.leading:
                return self.calls[name](*args, **kwargs)
            if self.parted is not None:
                raise self.parted
            self._tell((name, _packed((args, kwargs))), None, name)
            self.leading = False
            try:
                return self._call(name, *args, **kwargs)
            finally:
                self.leading = True

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Such a call, at the end of which the error of one rank is one of all."""
        error: BaseException | None = None
        result: Any = None
        try:
            result = self.calls[name](*args, **kwargs)
        except BaseException as problem:  # also when the user interrupts
            error = problem
        self._agree("end", error, name)
        return result

    def _tell(self, told: tuple[str, bytes] | None, error: BaseException | None, doing: str) -> tuple[str, Any]:
        """What the first rank tells all others, unless it has met an error, which is then one of all."""
        self._agree("lead", error, doing)
        name, written = self.group.gather(told, self.device, doing)[0]
        content: Any = None
        try:
            content = _unpacked(written, self.device) if self.group.rank else None
        except Exception as problem:  # of what an object does when it is made anew
            error = problem
        self._agree("told", error, doing)
        return name, content

    def _agree(self, call: str, error: BaseException | None, doing: str) -> None:
        try:
            self.group.agree({"call": call}, error, self.device, doing=doing)
        except BaseException as problem:
            self.parted = problem
            raise


class _Absent:
    """Stands for an environment on ranks that do not step it."""

    def reset(self, **row: Any) -> None:
        """Tells nothing."""


class _Together(nn.Module):
    """Stands for a reward model where the first rank calls it, so that all ranks do."""

    def __init__(self, training: GroupTraining, name: str) -> None:
        super().__init__()
        self.name, self.run = name, training.together

    def forward(self, **inputs: Any) -> Any:
        return self.run(self.name, **inputs)


def _check(trainer: Any, settings: Any, accelerator: Accelerator, size: int) -> None:
    """Raises for settings by which the ranks of a group would not be one process."""
    check_steps(trainer, accelerator, _STEPS)
    if trainer.use_transformers_continuous_batching:
        raise ConfigError(
            "use_transformers_continuous_batching=True generates by paged attention, which does not reach over the "
            "ranks that share a sequence. Leave it out: completions are then generated over the ranks."
        )
    parts = trainer.vllm_tensor_parallel_size
    if trainer.use_vllm and trainer.vllm_mode == "colocate" and size % parts:
        raise ConfigError(
            f"vllm_tensor_parallel_size={parts} beside burst_size={size}: an engine that lies over several groups "
            f"would mix up their prompts. Set it to {size}, by which all ranks of a group generate, or to a divisor."
        )
    rollouts = getattr(trainer, "rollout_func", None) is not None  # RLOO has none
    if rollouts and trainer.use_vllm and trainer.vllm_mode == "colocate" and parts > 1:
        raise ConfigError(
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
            raise ConfigError(
                f"{names} is {number} rows, and a prompt has {wanted} completions. The ranks that share sequences hold "
                f"the same rows, so these must be whole groups: a multiple of {wanted}."
            )


def _call_model(model: nn.Module, **inputs: Any) -> Any:
    with torch.inference_mode():
        return model(**inputs)


def _packed(content: Any) -> bytes:
    """Any objects as bytes, such as rows, images and tensors.

    Raises:
        BatchError: If the other ranks cannot be told of one, such as of a streamer or an open file.
    """
    written = io.BytesIO()
    try:
        torch.save(content, written)
    except (AttributeError, TypeError, RuntimeError, pickle.PicklingError) as problem:
        raise BatchError(
            f"What the first rank of a group called or made cannot be told to the others: {problem}. Rollouts return "
            "numbers, text, tensors and images, and give model.generate such arguments only."
        ) from problem
    return written.getvalue()


def _unpacked(written: bytes, device: torch.device) -> Any:
    """The objects, with tensors of another rank's GPU on the one of this rank."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(written), place, weights_only=False)
