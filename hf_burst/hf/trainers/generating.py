"""TRL's trainers that generate what they learn from (GRPO, RLOO): to them, a group of ranks is one process.

All ranks of a group run the trainer with the same rows and random numbers. The first one runs `_generate` (the model,
vLLM, `rollout_func`, tools), `_calculate_rewards` and the `reset` of environments for all. The others receive results
and logs, and join what generates, and reward models. All compute log-probabilities, advantages, shuffles and the loss.

TRL's gathers over processes become gathers over groups: `gather`, `gather_object` and `broadcast_object_list` in its
modules are replaced during a step, because these functions of accelerate use no accelerator object.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import accelerate.utils
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, set_seed
from torch import Tensor, nn
from transformers import GenerationConfig, Trainer

from ...errors import ConfigError
from ...layers.loss import IGNORE_INDEX
from ...ranks.group import CP_DIM, ContextGroup
from ..admission import trl_classes
from ..batches.sharded import sum_of_bits
from ..generation.scores import token_divergences
from .first_rank import FirstRank, gather_first_ranks, patch_as, wrap_steps

_LOGGED = ("_metrics", "_pending_extra_logs", "_pending_metrics", "_last_loaded_step")  # in the steps of the first rank
_OVERRIDES = "Methods that your class of the trainer overrides run on all ranks: have them compute the same there."
_LOSS = ("compute_loss", "generalized_jsd_loss")  # of GKD
_READ = ("input_ids", "attention_mask", "labels")


class GroupTraining:
    """Makes a group of ranks look like one process to a trainer, which is still under construction."""

    def __init__(self, trainer: Any, accelerator: Accelerator, size: int) -> None:
        wrap_steps(trainer, _prepare_inputs=self.prepare_inputs, compute_loss=self.compute_loss)
        wrap_steps(trainer, _generate=self.on_first, _calculate_rewards=self.on_first)
        _check_settings(trainer, size)
        self.trainer = trainer
        self.first = FirstRank(ContextGroup.from_mesh(accelerator.torch_device_mesh[CP_DIM]), accelerator.device)
        self.groups = Groups(accelerator, size, self.first)
        self.ready = False
        rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        trainer.args.generation_batch_size = rows * self.groups.num_processes
        own = {kind.__module__ for kind in type(trainer).__mro__ if issubclass(kind, Trainer)}
        self.modules = (own - {Trainer.__module__}) | {"trl.generation.vllm_generation"}

    def begin(self) -> None:
        """Wraps what users hand in, once the trainer is made."""
        if self.ready:
            return
        self.ready = True
        trainer = self.trainer
        if trainer.ref_model is not None:  # FSDP has already wrapped it
            patch_as(trainer.model, self.groups.accelerator.unwrap_model(trainer.ref_model))
        trainer.reward_funcs = [
            _Judge(self.first, f"reward model {number}", judge) if isinstance(judge, nn.Module) else judge
            for number, judge in enumerate(trainer.reward_funcs)
        ]
        for name, factory in (getattr(trainer, "environment_factories", None) or {}).items():  # RLOO has none
            spare = self.same_reset(trainer._environment_pool[name][0])
            make = partial(self.environment, factory, spare)
            trainer.environment_factories = trainer.environment_factories | {name: make}
        if trainer.use_vllm:
            engine = trainer.vllm_generation
            engine.accelerator = self.groups
            self.first.calls |= {"sync_weights": engine.sync_weights, "vLLM": partial(engine.generate, [])}
            engine.sync_weights = partial(self.first.together, "sync_weights")
            engine.generate = partial(self.ask_engine, engine.generate)
        set_seed(trainer.args.seed + self.groups.process_index)  # as device_specific=True with a process per group

    def on_first(self, method: Callable[..., Any], *args: Any) -> Any:
        """Runs a step on the first rank, and gives the others its result and what it has logged."""
        trainer = self.trainer

        def run() -> Any:
            found = method(*args)
            logged = {name: value for name, value in vars(trainer).items() if name in _LOGGED}
            return found, logged, trainer.state.num_input_tokens_seen

        found, logged, trainer.state.num_input_tokens_seen = self.first.result(run, method.__name__)
        vars(trainer).update(logged)
        return found

    def environment(self, factory: Callable[[], Any], spare: Any) -> Any:
        """Returns a new environment on the first rank, and a spare one on the others."""
        made: list[Any] = []
        self.first.result(lambda: made.append(factory()), "environment_factory")
        return self.same_reset(made[0]) if made else spare

    def same_reset(self, environment: Any) -> Any:
        """Returns an environment whose `reset` returns the first rank's result."""
        reset = environment.reset
        environment.reset = lambda **row: self.first.result(partial(reset, **row), "reset")
        return environment

    def prepare_inputs(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns completions with their advantages, equal on all ranks. An error of one group ends all of them."""
        self.groups.parted = False
        try:
            with self.names_of_groups(), self.first.answering(self.trainer.model):
                found = method(*args, **kwargs)
            with self.first.group.agreeing(self.first.device, "a step on completions") as compared:
                compared.add("advantages", sum_of_bits(found["advantages"]), _OVERRIDES)
            self.groups.agree(doing="the end of a step")
        except BaseException as problem:  # including KeyboardInterrupt
            if not self.groups.parted:
                self.groups.agree(problem)
            raise
        return found

    def compute_loss(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.names_of_groups():
            return method(*args, **kwargs)

    @contextmanager
    def names_of_groups(self) -> Iterator[None]:
        """Replaces accelerate's collectives in the trainer's modules by those over groups while its own code runs."""
        with ExitStack() as after:
            for module in filter(None, map(sys.modules.get, self.modules)):
                for name in ("gather", "gather_object", "broadcast_object_list"):
                    stock = getattr(accelerate.utils, name)
                    if vars(module).get(name) is stock:
                        setattr(module, name, getattr(self.groups, name))
                        after.callback(setattr, module, name, stock)
            self.trainer.accelerator = self.groups
            after.callback(setattr, self.trainer, "accelerator", self.groups.accelerator)
            yield

    def ask_engine(self, method: Callable[..., Any], prompts: Any, images: Any, **settings: Any) -> Any:
        """Returns vLLM's answers to the first rank. The others join an engine beside the trainer, which may lie over
        several ranks, without prompts."""
        ask = partial(method, prompts, images, **settings)
        if self.trainer.vllm_mode == "server":
            return ask()
        return self.first.together("vLLM", images and [], settings["num_generations"], mine=ask)


class Distillation:
    """Replaces the steps of TRL's `GKDTrainer`: the first rank generates, as above, and [`hf_burst.token_divergences`]
    compares the logits of two models by chunks of tokens, because they are too large to gather."""

    def __init__(self, trainer: Any, accelerator: Accelerator, size: int) -> None:
        wrap_steps(trainer, compute_loss=self.compute_loss, generate_on_policy_outputs=self.generate)
        wrap_steps(trainer, training_step=self.training_step)
        self.trainer, self.size = trainer, size
        self.sharded = accelerator.distributed_type is DistributedType.FSDP
        self.first = FirstRank(ContextGroup.from_mesh(accelerator.torch_device_mesh[CP_DIM]), accelerator.device)
        kind = type(trainer)
        known = trl_classes(kind)[0]
        self.own_loss = any(getattr(kind, name) is not getattr(known, name) for name in _LOSS)  # the user's

    def take_teacher(self, teacher: nn.Module) -> None:
        """Patches the teacher, which the trainer may have loaded itself, with the student's settings. Under FSDP it
        moves to the device, because accelerate leaves it on the host."""
        if self.sharded and not getattr(teacher, "is_quantized", False):  # quantized models are placed at loading
            teacher.to(self.first.device)
        patch_as(self.trainer.model, teacher)

    def training_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Trains on a batch. `random` decides who answers, so all ranks take the first one's state, where a callback
        may have drawn, too."""
        random.setstate(self.first.result(random.getstate, "who answers"))
        return method(*args, **kwargs)

    def compute_loss(
        self, method: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the loss of a batch. `Trainer` has counted its tokens once per rank of the group."""
        trainer, items = self.trainer, num_items_in_batch
        if items is not None and trainer.args.average_tokens_across_devices:
            items = items / self.size
        if return_outputs or self.own_loss:
            return method(model, inputs, return_outputs=return_outputs, num_items_in_batch=items)
        batch, beta = {name: inputs[name] for name in _READ}, float(trainer.beta)
        kind: Any = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
        options: Any = {"beta": beta} if kind == "jsd" else {}
        total = token_divergences(model, trainer.teacher_model, batch, kind, **options).sum()
        if items is None:
            items = (batch["labels"][:, 1:] != IGNORE_INDEX).sum().clamp(min=1)
        return total / torch.as_tensor(items, device=total.device)

    def generate(
        self, method: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], generation_config: GenerationConfig
    ) -> Any:
        """Returns answers of the model or its teacher, with the cache on; TRL turns it off with checkpointing."""
        with self.first.answering(model):
            cached = GenerationConfig(**{**generation_config.to_dict(), "use_cache": True})
            return self.first.result(lambda: method(model, inputs, cached), "answers")


class Groups:
    """An accelerator whose processes are groups of ranks. All ranks gather, and the first rank of each group counts;
    what only that one gathers in its steps, the others join. Everything else is delegated."""

    def __init__(self, accelerator: Accelerator, size: int, first: FirstRank) -> None:
        self.accelerator, self.size = accelerator, size
        self.num_processes = accelerator.num_processes // size
        self.process_index = accelerator.process_index // size
        self.world = ContextGroup.from_mesh(None) if self.num_processes > 1 else ContextGroup()
        gather = partial(gather_first_ranks, accelerator, size)
        objects = partial(self.meet, gather_object)
        first.calls |= {"gather": partial(self.meet, gather), "objects": objects, "wait": self.agree}
        self.together = first.together
        self.wait_for_everyone = partial(first.together, "wait")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def agree(self, error: BaseException | None = None, doing: str = "a collective over groups of ranks") -> None:
        """Meets the other groups, and raises an error of any of them on all ranks."""
        self.parted = True  # if this raises
        self.world.agree({"call": doing}, error, self.accelerator.device, doing=doing)
        self.parted = False

    def meet(self, call: Callable[..., Any], *args: Any) -> Any:
        self.agree()
        return call(*args)

    def gather(self, tensors: Any) -> Any:
        return self.together("gather", tensors)

    def reduce(self, tensor: Tensor, reduction: str = "sum", scale: float = 1.0) -> Tensor:
        total = self.gather(tensor[None]).sum(0)
        return total / self.num_processes * scale if reduction == "mean" else total * scale

    def gather_object(self, objects: Any) -> Any:
        return [item for own in self._objects(objects) for item in own]

    def broadcast_object_list(self, objects: list[Any], from_process: int = 0) -> list[Any]:
        objects[:] = self._objects(objects)[from_process]
        return objects

    def _objects(self, objects: Any) -> list[Any]:
        each = self.together("objects", [None], mine=partial(self.meet, gather_object, [objects]))
        return each[:: self.size]


class _Judge(nn.Module):
    """A reward model that all ranks run, because it may be patched."""

    def __init__(self, first: FirstRank, name: str, judge: nn.Module) -> None:
        super().__init__()
        self.ask = partial(first.together, name)
        first.calls[name] = judge

    def forward(self, **inputs: Any) -> Any:
        return self.ask(**inputs)


def _check_settings(trainer: Any, size: int) -> None:
    settings, parts = trainer.args, trainer.vllm_tensor_parallel_size
    beside = trainer.use_vllm and trainer.vllm_mode == "colocate"
    ConfigError.refuse(
        (
            trainer.use_transformers_continuous_batching,
            "use_transformers_continuous_batching=True",
            "paged attention does not reach over the ranks that share a sequence",
            "Leave it out: completions are then generated over the ranks",
        ),
        (
            beside and (size % parts or (parts > 1 and getattr(trainer, "rollout_func", None) is not None)),
            f"vllm_tensor_parallel_size={parts} beside burst_size={size}",
            "an engine over several groups would mix up their prompts, and rollouts ask it from one rank",
            f"With rollout_func leave it at 1, or take vllm_mode='server'. Else set it to {size}, or to a divisor",
        ),
    )
    rows = settings.per_device_train_batch_size * settings.steps_per_generation
    evaluated = settings.per_device_eval_batch_size if settings.eval_strategy != "no" else 0
    for number, names, wanted in (
        (rows, "per_device_train_batch_size x steps_per_generation", trainer.num_generations),
        (evaluated, "per_device_eval_batch_size", trainer.num_generations_eval),
    ):
        if number % wanted:
            raise ConfigError(
                f"{names} is {number} rows, and a prompt has {wanted} completions",
                "the ranks that share sequences hold the same rows, which must be whole groups",
                f"Take a multiple of {wanted}",
            )
