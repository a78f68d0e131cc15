"""accelerate's mesh, data-parallel x context-parallel, by a subclass of its `ParallelismConfig`."""

import logging
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import numpy
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, is_compiled_module, recursively_apply
from accelerate.utils.deepspeed import DummyScheduler
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.trainer_utils import seed_worker

from ...errors import BatchError, ConfigError
from ...ranks.group import CP_DIM, ContextGroup, set_timeout
from ...ranks.host import SIZE_VARIABLE, host_id, misplaced, size_from_env
from ..admission import TRAINERS, trainer_role, trl_classes
from ..batches.collator import BurstCollator
from ..callers import MAKING, trainer_among
from ..groups import PATCH, check_processes
from ..parts.expert_ranks import weights_of_experts
from ..view import find_inside, inner_modules
from .first_rank import gather_first_ranks, patch_as, wrap_steps
from .generating import Distillation, GroupTraining

logger = logging.getLogger(__name__)


@dataclass(repr=False)
class BurstParallelismConfig(ParallelismConfig):
    """A mesh for hf_burst: groups of `burst_size` neighbouring ranks share a sequence, and groups are data-parallel.

    Pass it to `Accelerator(parallelism_config=...)` or `TrainingArguments(parallelism_config=...)`; accelerate's data
    loaders then give every rank of a group the same batch. The groups are data-parallel: weights are sharded under
    FSDP2 and replicated otherwise. Under FSDP2, `dp_replicate_size=N` makes N copies of the weights, each sharded over
    neighbouring ranks, such as those of a host.

    Args:
        burst_size (`int`, *optional*): Ranks that share a sequence; all ranks by default.

    Example:

    ```python
    >>> accelerator = Accelerator(parallelism_config=hf_burst.BurstParallelismConfig(burst_size=2))
    ```
    """

    burst_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.burst_size is not None and (not isinstance(self.burst_size, int) or self.burst_size < 1):
            raise ConfigError(
                f"burst_size is {self.burst_size!r}; it must be an int of at least 1, or None for all ranks."
            )
        _refuse_other_sizes({name: getattr(self, name) for name in ("tp_size", "cp_size", "sp_size")})

    @classmethod
    def from_env(cls) -> "BurstParallelismConfig":
        """Reads `burst_size` from the environment variable `HF_BURST_SIZE`. If it is unset, all ranks share a sequence.

        Scripts under `accelerate launch` call this, because the launcher builds only accelerate's own class.
        """
        return cls(burst_size=size_from_env())

    @property
    def shares_sequences(self) -> bool:
        """Whether several ranks share a sequence; known once the mesh is built."""
        return (self.burst_size or 1) > 1

    @property
    def total_size(self) -> int:
        """The number of ranks in the whole mesh."""
        return int(self.dp_replicate_size * self.dp_shard_size * (self.burst_size or 1))

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Mesh dimensions whose ranks receive the same batch."""
        return [CP_DIM] if self.shares_sequences else []

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Mesh dimensions over which FSDP shards the model."""
        return (["dp_shard"] if self.dp_shard_enabled else []) + self.non_dp_dim_names

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Mesh dimensions over which the loss is averaged."""
        return self.dp_dim_names + self.non_dp_dim_names

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Divides the ranks into groups, then builds the mesh as accelerate does."""
        world = ContextGroup.from_mesh(None)
        device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
        if self.burst_size is None:
            self.burst_size = max(1, world.size // (self.dp_replicate_size * self.dp_shard_size))
        fsdp = AcceleratorState._shared_state.get("fsdp_plugin")
        shards = fsdp is not None and fsdp.fsdp_version == 2
        given = self.burst_size * self.dp_replicate_size
        if (shards or self.dp_replicate_size == 1) and self.dp_shard_size == 1 and world.size % given == 0:
            self._set_size("dp_shard" if shards else "dp_replicate", world.size // given)
        self._agree(world, device, shards)
        self._sizes[CP_DIM] = self.burst_size
        mesh = super().build_device_mesh(device_type)
        for name in (mesh and mesh.mesh_dim_names) or ():  # torch would use its default time limit
            set_timeout(world.time_limit(device), mesh.get_group(name))
        if self.shares_sequences:  # more hosts than necessary are exact but slower
            problem = misplaced(world.gather(host_id(), device, "the making of a mesh"), self.burst_size)
            if problem and world.rank == 0:
                logger.warning("%s", problem)
        return mesh

    def _agree(self, world: ContextGroup, device: torch.device, shards: bool) -> None:
        """Raises on all ranks if ranks would build different meshes, which would hang, or an impossible one."""
        facts = {name: getattr(self, name) for name in ("burst_size", "dp_replicate_size", "dp_shard_size")}
        sizes = " x ".join(f"{name}={size}" for name, size in facts.items())
        error: ConfigError | None = None
        if self.total_size != world.size:
            error = ConfigError(
                f"{sizes} is {self.total_size} ranks, and {world.size} launched",
                f"burst_size (or {SIZE_VARIABLE}) must divide them",
                "Choose another one, or launch more: accelerate launch --multi_gpu --num_processes N",
            )
        elif shards and self.dp_replicate_size == world.size > 1:
            error = ConfigError(
                f"dp_replicate_size={world.size} under FSDP2",
                f"each of {world.size} ranks has a copy of the weights, so nothing is sharded",
                "Launch without FSDP, or choose fewer copies, such as one a host",
            )
        advice = f"Launch every node with the same burst_size and {SIZE_VARIABLE}, and the same config of accelerate."
        doing = f"the making of a mesh of {sizes}"
        world.agree(facts, error, device, advice=dict.fromkeys(facts, advice), doing=doing)

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Tells a new accelerator about the groups. Skips accelerate's own check, because it refuses CPU processes."""
        check_processes()
        if self.shares_sequences:
            _Shared(accelerator, self.burst_size or 1)
        else:
            accelerator.prepare_data_loader = partial(_prepare_data_loader, accelerator)


class _Shared:
    """Overrides methods of one accelerator that must know that the `size` ranks of a group hold the same batch."""

    def __init__(self, accelerator: Accelerator, size: int) -> None:
        self.accelerator, self.size = accelerator, size
        for name in ("prepare", "prepare_model", "prepare_data_loader", "prepare_scheduler", "gather_for_metrics"):
            setattr(accelerator, name, getattr(self, name))
        trainer: Any = trainer_among(MAKING)[0]
        self.trainer = trainer
        role = trainer_role(type(trainer))
        if accelerator.distributed_type is DistributedType.DEEPSPEED:
            if role is not None:
                raise ConfigError(
                    f"{type(trainer).__name__} over ranks that share sequences under DeepSpeed",
                    "it was not compared with one process",
                    "Launch it with DDP, or with FSDP2, which shards weights as ZeRO-3 does",
                )
            config = accelerator.deepspeed_plugin.deepspeed_config
            tensors = config.get("tensor_parallel", {}).get("autotp_size", 1)
            sequences = config.get("sequence_parallel_size", 1)
            _refuse_other_sizes({"sequence_parallel_size": sequences, "tensor_parallel.autotp_size": tensors})
            accelerator._prepare_deepspeed = self._prepare_deepspeed
            members = accelerator.torch_device_mesh[CP_DIM].get_group()  # the only dimension that data loaders know
            mesh = DeviceMesh.from_group(members, accelerator.device.type, mesh_dim_names=("tp",))
            accelerator.state.ds_device_mesh = mesh
        self.generating = GroupTraining(trainer, accelerator, size) if role == "generates" else None
        self.distilling = Distillation(trainer, accelerator, size) if role == "distills" else None
        wrap_steps(accelerator, load_state=self.restore)
        if trainer is not None:
            wrap_steps(trainer, evaluation_loop=self.evaluate, _load_rng_state=self.restore)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        for item in args:
            _check_patched(item, self.size)
        return Accelerator.prepare(self.accelerator, *args, **kwargs)

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        if self.generating is not None and getattr(self.trainer, "ref_model", None) is model:
            patch_as(self.trainer.model, model)
        if self.distilling is not None and evaluation_mode:
            self.distilling.take_teacher(model)
        _check_patched(model, self.size, evaluation_mode)
        _check_placed(model, evaluation_mode, self.generating is not None)
        learns = not evaluation_mode and any(weight.requires_grad for weight in model.parameters())
        if learns and not any(isinstance(inner, DistributedDataParallel) for inner in inner_modules(model)):
            vars(model)["_is_accelerate_prepared"] = False  # evaluate() sets it: train() would leave it without DDP
        return Accelerator.prepare_model(self.accelerator, model, device_placement, evaluation_mode)

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> Any:
        if self.generating is not None:
            self.generating.begin()
        elif self.distilling is None:
            _check_offline(self.trainer)
        _read_by_ranks(self.accelerator, data_loader)  # those of a group need the same batch
        seeded = data_loader.worker_init_fn
        if isinstance(seeded, partial) and seeded.func is seed_worker:  # workers of a group need the same seed
            group = self.accelerator.process_index // self.size
            data_loader.worker_init_fn = partial(seed_worker, **{**seeded.keywords, "rank": group})
        _divide_by_group(data_loader.batch_sampler, self.accelerator.num_processes, self.size)
        return Accelerator.prepare_data_loader(self.accelerator, data_loader, *args, **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        return self._step_by_group(Accelerator.prepare_scheduler(self.accelerator, scheduler))

    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        for item in args:
            if isinstance(item, DummyScheduler) and item.total_num_steps is not None:
                item.total_num_steps *= self.size  # accelerate divides it by the number of processes
        return tuple(map(self._step_by_group, Accelerator._prepare_deepspeed(self.accelerator, *args)))

    def _step_by_group(self, prepared: Any) -> Any:
        """Changes a scheduler, which accelerate steps once per process, because a group has only one batch."""
        if type(prepared) is AcceleratedScheduler and not prepared.split_batches:
            prepared.split_batches = True  # its own step is then a single one
            prepared.step = partial(_step, prepared, self.accelerator.num_processes // self.size)
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Counts each group once. Scalars (token counts) of sharded batches are the exception: every rank counts."""
        if isinstance(input_data, torch.Tensor) and input_data.ndim == 0 and self.holds_shards():
            state, numbers = self.gradient_state, self.accelerator.gather(input_data)
            uneven = state.end_of_dataloader and state.remainder > 0
            return numbers[: state.remainder * self.size] if uneven else numbers
        try:
            recursively_apply(torch.Tensor.detach, input_data, error_on_other_type=True)
        except TypeError:  # accelerate detects objects this way
            use_gather_object = True
        if use_gather_object and self.accelerator.process_index % self.size:
            input_data = []
        return Accelerator.gather_for_metrics(self, input_data, use_gather_object)

    def holds_shards(self) -> bool:
        """Returns whether a model's batch arrived sharded."""
        modules = (module for model in self.accelerator._models for module in inner_modules(model))
        return any(getattr(module, PATCH).explicit for module in modules if hasattr(module, PATCH))

    def evaluate(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the evaluation loop, and counts each group once where Seq2SeqTrainer uses `Accelerator.gather`."""
        if self.trainer.gather_function == self.accelerator.gather:
            self.trainer.gather_function = self.gather
        wrapped = self.trainer.model_wrapped
        found = method(*args, **kwargs)
        if is_compiled_module(self.trainer.model_wrapped):
            self.trainer.model_wrapped = wrapped  # train() would take the compiled model for one in DDP
        return found

    def restore(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Loads states, and gives the first rank's random numbers to its group. A group that the checkpoint does not
        know gets those of the first one: samplers would draw other batches."""
        world, before = ContextGroup.from_mesh(None), torch.get_rng_state()
        doing = "the loading of a state"
        with world.agreeing(self.accelerator.device, doing):
            method(*args, **kwargs)
        own = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        every = world.gather((not before.equal(own[2]), own), self.accelerator.device, doing)
        loaded, first = every[world.rank - world.rank % self.size]
        if not loaded:
            _, first = every[0]
        random.setstate(first[0])
        numpy.random.set_state(first[1])
        torch.set_rng_state(first[2])

    def gather(self, tensors: Any) -> Any:
        """Gathers for `Accelerator.gather_for_metrics`."""
        if self.holds_shards():
            recursively_apply(_check_not_sharded, tensors)
        return gather_first_ranks(self.accelerator, self.size, tensors)

    gradient_state = property(lambda self: self.accelerator.gradient_state)


def _step(prepared: AcceleratedScheduler, batches: int, *args: Any, **kwargs: Any) -> None:
    """Steps a learning rate scheduler once for each of the `batches` that all processes hold together."""
    for _ in range(batches if prepared.step_with_optimizer and prepared.gradient_state.sync_gradients else 1):
        if prepared.scheduler._step_count <= getattr(prepared.scheduler, "total_steps", math.inf):
            AcceleratedScheduler.step(prepared, *args, **kwargs)


def _prepare_data_loader(accelerator: Accelerator, loader: DataLoader, *args: Any, **kwargs: Any) -> Any:
    """Has each rank read a stream that [`BurstCollator`] shards, because accelerate cannot send its batches."""
    if isinstance(getattr(loader.collate_fn, "data_collator", loader.collate_fn), BurstCollator):
        _read_by_ranks(accelerator, loader)
    return Accelerator.prepare_data_loader(accelerator, loader, *args, **kwargs)


def _read_by_ranks(accelerator: Accelerator, loader: DataLoader) -> None:
    """Has each rank read a stream and take its rows, where accelerate would have the first rank send them."""
    accelerator.dataloader_config.dispatch_batches = False
    if hasattr(loader.dataset, "n_shards"):  # a stream of `datasets`
        vars(loader)["dataset"] = _InOrder(loader.dataset)


class _InOrder(IterableDataset[Any]):
    """A stream of `datasets` without its shards, of which accelerate would give some to each group. Groups would end
    apart, so that evaluation waits for ever, and have other rows than one process in a step."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Any:
        return iter(self.stream)

    def set_epoch(self, epoch: int) -> None:
        self.stream.set_epoch(epoch)


def _divide_by_group(sampler: Any, ranks: int, size: int) -> None:
    """Has the sampler of `train_sampling_strategy="batch_rebalance"`, which itself divides batches over all ranks,
    divide them over groups of `size`. It is changed in place, because `Trainer` looks for it in the prepared loader."""
    if getattr(sampler, "dp_size", 1) == ranks and hasattr(sampler, "effective_batch_size"):
        given = {name: getattr(sampler, name) for name in signature(type(sampler)).parameters}
        sampler.__init__(**given | {name: given[name] // size for name in ("effective_batch_size", "dp_size", "rank")})


def _check_not_sharded(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim > 1:
        raise BatchError(
            f"gather_for_metrics was given a tensor of shape {tuple(tensor.shape)} of a batch that arrived sharded",
            "it holds this rank's tokens only",
            "For predict() and compute_metrics give the model full batches (no BurstCollator)",
        )
    return tensor


def _check_patched(item: Any, size: int, evaluates: bool = False) -> None:
    """Raises for an unpatched Transformers model that is trained or a language model. Other models that only assist,
    such as reward models, and those beside a patched model may hold whole sequences."""
    if not isinstance(item, nn.Module) or find_inside(item, PATCH) is not None:
        return
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()}
    for module in inner_modules(item):
        if not isinstance(module, PreTrainedModel):
            continue
        trained = not evaluates and any(parameter.requires_grad for parameter in module.parameters())
        if trained or known & {kind.__name__ for kind in type(module).__mro__}:
            raise ConfigError(
                f"{type(module).__name__} is not patched, so each of the {size} ranks that share a sequence would hold "
                "all of it. Call hf_burst.patch_model(model) before the model is prepared; DPOTrainer and KTOTrainer "
                "load a reference model of their own, so load it yourself, patch it too and pass it as ref_model. A "
                "class that patch_model refuses trains without BurstParallelismConfig."
            )


def _check_placed(model: nn.Module, evaluates: bool, generates: bool) -> None:
    """Raises for a model that Transformers sharded at loading, because accelerate would wrap it again, and for expert
    parallelism in a trainer that `generates`. `Trainer` prepares such a model in evaluation mode."""
    ConfigError.refuse(
        (
            getattr(model, "is_distributed_loading_by_transformers", False) and not evaluates,
            "The model was loaded with a DistributedConfig",
            "Transformers averages its gradients already",
            "Prepare the rest without it: optimizer, loader = accelerator.prepare(optimizer, loader)",
        ),
        (
            generates and any(weights_of_experts(model)),
            "The trainer generates what it learns from, and the experts lie on several ranks "
            "(DistributedConfig(ep_size=...))",
            "both were not compared with one process",
            "Load the model without it, and have accelerate's FSDP2 shard the weights",
        ),
    )


def _refuse_other_sizes(sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if size > 1:
            raise ConfigError(
                f"{name}={size} beside BurstParallelismConfig",
                "a sequence is sharded by burst_size alone, and tensor parallelism is not combined with it",
                f"Leave out {name}",
            )


def _check_offline(trainer: Any) -> None:
    """Raises for a trainer of TRL that samples, as its settings tell: completions or rewards would differ between ranks
    of a group."""
    if any("temperature" in vars(kind) for kind in trl_classes(type(getattr(trainer, "args", None)))):
        names = [place.rpartition(".")[2] for place, role in TRAINERS.items() if role == "generates"]
        raise ConfigError(
            "The trainer generates what it learns from",
            "the ranks that share a sequence would generate different ones",
            f"Take {' or '.join(names)}, or your own class of one; to learn from a teacher, take TRL's GKDTrainer, or "
            "hf_burst.token_divergences. Or leave BurstParallelismConfig and patch_model out",
        )
