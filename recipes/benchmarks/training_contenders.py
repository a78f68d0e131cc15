"""The contenders of training.py, over several ranks and on one GPU: contexts that prepare the model of a job."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from importlib import import_module
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

import hf_burst
from hf_burst.errors import ConfigError
from hf_burst.hf.groups import PATCH
from recipes.benchmarks.harness import setting
from recipes.benchmarks.steps import Loss, Way
from recipes.benchmarks.training_job import Job, checkpoint_layers, hooks_removed
from recipes.benchmarks.training_limits import LIMITS, mixers_of


def config_of(settings: Mapping[str, Any]) -> hf_burst.BurstConfig:
    """The config with settings of `BurstConfig` and of `Memory`; without any of these nothing is chosen.

    Raises:
        ConfigError: If there is no such setting or value.
    """
    names = {setting.name for setting in fields(hf_burst.Memory)} & settings.keys()
    others = {name: value for name, value in settings.items() if name not in names}
    memory = {name: settings[name] for name in names} or "manual"
    return hf_burst.BurstConfig.from_dict({"memory": memory, **others})


def of_the_batch(job: Job) -> torch.Tensor:
    """The loss of the whole sequence."""
    return job.model(**job.batch).loss


@contextmanager
def burst(job: Job, settings: Mapping[str, Any], compute: Loss = of_the_batch) -> Iterator[Loss]:
    """Patches the model with hf_burst, which takes whole sequences. What it measured before stays, as for a model that
    is patched once."""
    hf_burst.patch_model(job.model, config_of(settings), job.mesh)
    patch = getattr(job.base, PATCH)
    patch.memory.rules = job.rules.setdefault((compute, *settings.items()), {})
    patch.checkpointing.host = job.home  # page-locked once, as for a model that stays patched

    def loss(job: Job) -> torch.Tensor:
        value = compute(job)
        job.home = patch.checkpointing.host
        return value

    try:
        yield loss
        job.chosen = asdict(patch.memory.latest.settings) if patch.memory.latest else {}
    finally:
        hf_burst.unpatch_model(job.model)


@contextmanager
def stock(job: Job) -> Iterator[Loss]:
    """Enters torch's context parallelism as accelerate does, with its hooks, cuDNN's kernels and Liger's fused loss."""
    if not job.ranks.cuda:
        raise ConfigError("context_parallel knows CUDA kernels only")
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    job.base.set_attn_implementation("sdpa")
    set_rotate_method("allgather")

    def loss(job: Job) -> torch.Tensor:
        buffers = whole_batch(job)
        inside.enter_context(context_parallel(job.mesh, buffers=buffers, buffer_seq_dims=[1] * 3))
        return shard_loss(job, *buffers)

    with hooks_removed(job.base), sdpa_kernel(SDPBackend.CUDNN_ATTENTION), fused_loss(job), ExitStack() as inside:
        _attach_context_parallel_hooks(job.base)
        yield loss


@contextmanager
def deepspeed(job: Job, kernel: str) -> Iterator[Loss]:
    """Replaces an attention of Transformers by DeepSpeed's Ulysses, on contiguous shards, with Liger's fused loss."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    job.base.set_attn_implementation(kernel)
    plain = ALL_ATTENTION_FUNCTIONS[kernel]
    ALL_ATTENTION_FUNCTIONS[kernel] = ulysses(job.base, kernel, job.ranks.size)

    def loss(job: Job) -> torch.Tensor:
        return shard_loss(job, *(whole.chunk(job.ranks.size, 1)[job.ranks.rank] for whole in whole_batch(job)))

    try:
        with fused_loss(job):
            yield loss
    finally:
        ALL_ATTENTION_FUNCTIONS[kernel] = plain


@cache
def ulysses(model: PreTrainedModel, kernel: str, size: int) -> Callable[..., Any]:
    """The attention that DeepSpeed registers for a model; made once, with a process group of its own."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.parallel_state_sp import _release_sequence_parallel_groups
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    deepspeed.comm.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    _release_sequence_parallel_groups()  # those of another kernel, which keeps them itself
    plain = ALL_ATTENTION_FUNCTIONS[kernel]
    try:
        UlyssesSPAttentionHF.register_with_transformers(model, kernel, size, micro_batch_size=1)
        registered: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[kernel]
    finally:
        ALL_ATTENTION_FUNCTIONS[kernel] = plain
    return registered


@contextmanager
def axolotl(job: Job, kernel: str) -> Iterator[Loss]:
    """Sets up ringmaster around an attention of Transformers, with its own shards and Liger's fused loss. How to share
    the sequence is its choice."""
    import ringmaster
    from ringmaster.recurrent import wire_gated_delta
    from ringmaster.shard import shard_batch

    job.base.set_attn_implementation(kernel)  # loads the kernel
    runtime = ringmaster.setup(
        ringmaster.RingmasterConfig(size=job.ranks.size),
        num_kv_heads=job.base.config.num_key_value_heads,
        device_mesh=job.mesh,
        device_type=job.ranks.device.type,
        inner_attn=kernel,
    )
    job.base.set_attn_implementation(runtime.attn_implementation)
    mixers = mixers_of(job.base.model)
    undo = wire_gated_delta(mixers, job.mesh.get_group()) if mixers else None

    def loss(job: Job) -> torch.Tensor:
        whole = dict(zip(("input_ids", "shift_labels", "position_ids"), whole_batch(job), strict=True))
        own, _ = shard_batch(whole, cp_rank=job.ranks.rank, cp_size=job.ranks.size)
        return shard_loss(job, own["input_ids"], own["shift_labels"], own["position_ids"])

    try:
        with fused_loss(job):
            yield loss
    finally:
        if undo is not None:
            undo()
        ringmaster.teardown()
        job.base.set_attn_implementation("sdpa")  # others would find the attention of a runtime that is gone


@contextmanager
def fused_loss(job: Job) -> Iterator[None]:
    """Replaces the model's forward by Liger's, as its users do. On CPUs it changes nothing, since Liger needs GPUs."""
    if job.ranks.cuda:
        kind = job.base.config.model_type.removesuffix("_text")
        liger = import_module(f"liger_kernel.transformers.model.{kind}")
        forward = getattr(liger, "lce_forward", None) or liger.causal_forward  # of Gemma
        job.base.forward = MethodType(forward, job.base)
    try:
        yield
    finally:
        vars(job.base).pop("forward", None)


def whole_batch(job: Job) -> list[torch.Tensor]:
    """Tokens, shifted labels and positions of the whole sequence."""
    ids, length = job.tokens.clone(), job.tokens.shape[1]
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    return [ids, labels, torch.arange(length, device=ids.device)[None]]


def shard_loss(job: Job, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A rank's share of the loss, times the number of ranks, since gradients are averaged over ranks."""
    share = job.model(
        input_ids=ids,
        position_ids=positions,
        labels=labels,
        shift_labels=labels,
        num_items_in_batch=job.items,
        use_cache=False,
    ).loss
    return share * job.ranks.size


@contextmanager
def offloaded(job: Job, way: Way) -> Iterator[Loss]:
    """Trains in another way, with checkpoints whose inputs Transformers keeps on the host."""
    if not job.ranks.cuda:
        raise ConfigError("Transformers' offloading needs a GPU")
    job.base.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
    try:
        with way(job) as loss:
            yield loss
    finally:
        checkpoint_layers(job.base)


@contextmanager
def plain(
    job: Job,
    kernel: str = "flash_attention_4",  # a name of Transformers
) -> Iterator[Loss]:
    """Trains with an attention of Transformers, with checkpoints and Liger's loss, which holds few logits at a time."""
    job.base.set_attn_implementation(kernel)
    with fused_loss(job):
        yield lambda job: job.model(**job.batch, use_cache=False).loss


@dataclass(frozen=True)
class Contender:
    """One way to train the model of a job."""

    way: Way  # makes a context that prepares the model, and gives the function that computes the loss
    # the name of the limit with the same computations, as `limits` of training_limits.py has it
    limit: str = "all recomputed"
    hybrids: bool | None = False  # whether it is for models with recurrent layers, or for others; `None` for both
    several: bool | None = True  # whether it is for several ranks, or for one; `None` for both
    settings: Mapping[str, Any] | None = None  # those of hf_burst


def by_settings(settings: Mapping[str, Any]) -> Contender:
    """hf_burst with settings as [`config_of`] takes them."""
    limit = LIMITS[settings.get("attention_keep", 1.0)]
    return Contender(partial(burst, settings=settings), limit, None, None, settings)


def read_settings(text: str) -> tuple[str, Contender]:
    """Reads a contender from `NAME=VALUE,NAME=VALUE`, settings as [`config_of`] takes them; `default` has none.

    Raises:
        ArgumentTypeError: If there is no such setting or value.
    """
    settings = dict(map(setting, text.split(","))) if text != "default" else {}
    try:
        config_of(settings)
    except ConfigError as problem:
        raise ArgumentTypeError(str(problem)) from problem
    return f"hf_burst, {text.replace(',', ', ')}", by_settings(settings)


ULYSSES = partial(deepspeed, kernel="flash_attention_4")
alone = partial(Contender, hybrids=None, several=False)
CONTENDERS = {
    "hf_burst, attention saved": by_settings({}),
    "accelerate context parallelism, cuDNN": Contender(stock),
    "DeepSpeed Ulysses, flash-attn 4": Contender(ULYSSES),
    "ringmaster, flash-attn 4": Contender(partial(axolotl, kernel="flash_attention_4"), hybrids=None),
    "Transformers, Liger's loss": alone(plain),
}
# run if they are named
NAMED = {
    "hf_burst, chosen": by_settings({"memory": "auto"}),
    "accelerate context parallelism, cuDNN, offloaded": Contender(partial(offloaded, way=stock)),
    "DeepSpeed Ulysses, flash-attn 4, offloaded": Contender(partial(offloaded, way=ULYSSES)),
    "Transformers, sdpa, Liger's loss": alone(partial(plain, kernel="sdpa")),
}
