"""Whole training steps: hf_burst beside torch's context parallelism as accelerate runs it, interleaved in one run.

    torchrun --nproc-per-node 4 recipes/benchmarks/training.py --shape llama-8b --lengths 32768 131072 \\
        --out outputs/training.json
    torchrun --nproc-per-node 2 recipes/benchmarks/training.py --device cpu --shape tiny --lengths 512 --rounds 2

One model with random weights is sharded by FSDP2 as accelerate does it, in bf16, with checkpointed layers, and trained
by AdamW on random tokens. All contenders train it in turns, a step each, so that they share weights, optimizer and
memory. Before the first step their losses and gradient norms are compared. README.md beside this file says what is
measured.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import hf_burst
from hf_burst.cli.bench_contenders import Native, choose_native
from hf_burst.cli.bench_ranks import Ranks
from hf_burst.cli.bench_report import environment
from hf_burst.errors import ConfigError
from hf_burst.plan import Mask

PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
SHAPES: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "llama-8b": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "llama-1b": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "qwen3-8b": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "tiny": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
LORA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Job:
    """The model that is trained, and on what.

    Args:
        model (`nn.Module`): The model, sharded; a peft model for LoRA.
        base (`PreTrainedModel`): The Transformers model inside of it.
        optimizer (`torch.optim.Optimizer`): Its optimizer.
        ranks ([`Ranks`]): The processes.
        mesh (`DeviceMesh`): All of them.
        tokens (`torch.LongTensor` of shape `(1, length)`): One sequence, the same on every rank.
    """

    model: nn.Module
    base: PreTrainedModel
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    mesh: DeviceMesh
    tokens: torch.Tensor

    @property
    def items(self) -> int:
        """Labels of the sequence."""
        return self.tokens.shape[1] - 1


Loss = Callable[[Job], torch.Tensor]
Way = Callable[[Job], Any]


@contextmanager
def burst(job: Job, keep: float) -> Iterator[Loss]:
    """The model patched: it is given the whole sequence."""
    hf_burst.patch_model(job.model, hf_burst.BurstConfig(attention_keep=keep), job.mesh)
    try:
        yield lambda job: job.model(input_ids=job.tokens, labels=job.tokens).loss
    finally:
        hf_burst.unpatch_model(job.model)


@contextmanager
def stock(job: Job, backend: str) -> Iterator[Loss]:
    """What `Accelerator.maybe_context_parallel` enters, the hooks that accelerate adds, and Liger's fused loss."""
    if not job.ranks.cuda:
        raise ConfigError("context_parallel knows CUDA kernels only")
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = {module: set(module._forward_pre_hooks) for module in job.base.modules()}
    job.base.set_attn_implementation("sdpa")
    _attach_context_parallel_hooks(job.base)
    set_rotate_method("allgather")
    kernel = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if backend == "cudnn" else nullcontext()

    def loss(job: Job) -> torch.Tensor:
        buffers = whole_batch(job)
        inside.enter_context(context_parallel(job.mesh, buffers=buffers, buffer_seq_dims=[1] * 3))
        return shard_loss(job, *buffers)

    try:
        with kernel, fused_loss(job), ExitStack() as inside:
            yield loss
    finally:
        for module, known in before.items():
            for key in set(module._forward_pre_hooks) - known:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


@contextmanager
def deepspeed(job: Job, kernel: str) -> Iterator[Loss]:
    """DeepSpeed's Ulysses in the place of an attention of Transformers, contiguous shards, and Liger's fused loss."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    job.base.set_attn_implementation(kernel)
    plain = ALL_ATTENTION_FUNCTIONS[kernel]
    ALL_ATTENTION_FUNCTIONS[kernel] = ulysses(job.base, kernel, job.ranks.size)

    def loss(job: Job) -> torch.Tensor:
        return shard_loss(job, *(whole.chunk(job.ranks.size, 1)[job.ranks.rank] for whole in whole_batch(job)))

    try:
        with fused_loss(job), on_cudnn(job, kernel):
            yield loss
    finally:
        ALL_ATTENTION_FUNCTIONS[kernel] = plain


@cache
def ulysses(model: PreTrainedModel, kernel: str, size: int) -> Callable[..., Any]:
    """What DeepSpeed registers for a model; made once, with a process group of its own."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.parallel_state_sp import _release_sequence_parallel_groups
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    deepspeed.comm.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    _release_sequence_parallel_groups()  # another kernel's, which keeps them itself
    plain = ALL_ATTENTION_FUNCTIONS[kernel]
    try:
        UlyssesSPAttentionHF.register_with_transformers(model, kernel, size, micro_batch_size=1)
        registered: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[kernel]
    finally:
        ALL_ATTENTION_FUNCTIONS[kernel] = plain
    return registered


@contextmanager
def axolotl(job: Job, kernel: str, **settings: str) -> Iterator[Loss]:
    """ringmaster around an attention of Transformers, as it chooses or as the settings say, the shards that it cuts,
    and Liger's fused loss."""
    import ringmaster
    from ringmaster.shard import shard_batch

    job.base.set_attn_implementation(kernel)  # which loads it
    runtime = ringmaster.setup(
        ringmaster.RingmasterConfig(size=job.ranks.size, **settings),
        num_kv_heads=job.base.config.num_key_value_heads,
        device_mesh=job.mesh,
        device_type=job.ranks.device.type,
        inner_attn=kernel,
    )
    job.base.set_attn_implementation(runtime.attn_implementation)

    def loss(job: Job) -> torch.Tensor:
        whole = dict(zip(("input_ids", "shift_labels", "position_ids"), whole_batch(job), strict=True))
        own, _ = shard_batch(whole, cp_rank=job.ranks.rank, cp_size=job.ranks.size)
        return shard_loss(job, own["input_ids"], own["shift_labels"], own["position_ids"])

    try:
        with fused_loss(job), on_cudnn(job, kernel):
            yield loss
    finally:
        ringmaster.teardown()


def on_cudnn(job: Job, kernel: str) -> AbstractContextManager[Any]:
    """torch's attention on cuDNN's kernels, if that is the kernel and there are GPUs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if job.ranks.cuda and kernel == "sdpa" else nullcontext()


@contextmanager
def fused_loss(job: Job) -> Iterator[None]:
    """Liger's forward in the place of the model's, as its users have it; on CPUs, which it does not run on, nothing."""
    if job.ranks.cuda:
        from liger_kernel.transformers.model import llama, qwen3

        job.base.forward = MethodType(
            (qwen3 if isinstance(job.base, Qwen3ForCausalLM) else llama).lce_forward, job.base
        )
    try:
        yield
    finally:
        vars(job.base).pop("forward", None)


def whole_batch(job: Job) -> list[torch.Tensor]:
    """Tokens, labels shifted before they are cut, and positions."""
    ids, length = job.tokens.clone(), job.tokens.shape[1]
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    return [ids, labels, torch.arange(length, device=ids.device)[None]]


def shard_loss(job: Job, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A rank's share of the loss, times the ranks, over which gradients are averaged."""
    found = job.model(
        input_ids=ids,
        position_ids=positions,
        labels=labels,
        shift_labels=labels,
        num_items_in_batch=job.items,
        use_cache=False,
    ).loss
    return found * job.ranks.size


@contextmanager
def everything_saved(job: Job, way: Way) -> Iterator[Loss]:
    """Another way, with no layer checkpointed."""
    job.base.gradient_checkpointing_disable()
    try:
        with way(job) as loss:
            yield loss
    finally:
        checkpoint_layers(job.base)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Switches checkpointing on, as `Trainer` does it."""
    model.gradient_checkpointing_enable({"use_reentrant": False})


@dataclass(frozen=True)
class Contender:
    """One way to train the model of a job.

    Args:
        way (`Callable`): A context that makes the model ready, and gives what computes the loss.
        limit (`str`): Which one of [`limits`] computes the same.
    """

    way: Way
    limit: str


CUDNN, FLASH_4 = partial(stock, backend="cudnn"), partial(deepspeed, kernel="flash_attention_4")
ZIGZAG = partial(axolotl, kernel="flash_attention_2", backend="ring", load_balance="head_tail")
CONTENDERS = {
    "hf_burst, attention saved": Contender(partial(burst, keep=1.0), "attention saved"),
    "hf_burst, half of it saved": Contender(partial(burst, keep=0.5), "half of attention saved"),
    "hf_burst, attention recomputed": Contender(partial(burst, keep=0.0), "all recomputed"),
    "accelerate context parallelism": Contender(partial(stock, backend="default"), "all recomputed"),
    "accelerate context parallelism, cuDNN": Contender(CUDNN, "all recomputed"),
    "DeepSpeed Ulysses, cuDNN": Contender(partial(deepspeed, kernel="sdpa"), "all recomputed"),
    "DeepSpeed Ulysses, flash-attn 4": Contender(FLASH_4, "all recomputed"),
    "ringmaster, cuDNN": Contender(partial(axolotl, kernel="sdpa"), "all recomputed"),
    "ringmaster, flash-attn 4": Contender(partial(axolotl, kernel="flash_attention_4"), "all recomputed"),
    "ringmaster zigzag, flash-attn 2": Contender(ZIGZAG, "all recomputed"),
}
WITHOUT_CHECKPOINTS: dict[str, Way] = {
    "hf_burst": partial(burst, keep=1.0),
    "accelerate context parallelism, cuDNN": CUDNN,
    "DeepSpeed Ulysses, flash-attn 4": FLASH_4,
}
CONTENDERS |= {
    f"{name}, everything saved": Contender(partial(everything_saved, way=way), "nothing recomputed")
    for name, way in WITHOUT_CHECKPOINTS.items()
}


def make_job(arguments: argparse.Namespace, ranks: Ranks) -> Job:
    """The model on this rank, made and sharded as accelerate's FSDP2 does it."""
    model_class, config_class, sizes = SHAPES[arguments.shape]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if ranks.cuda else torch.float32)
    with ranks.device:
        base = model_class(config_class(**sizes, max_position_embeddings=max(arguments.lengths), use_cache=False))
    torch.set_default_dtype(torch.float32)
    model: nn.Module = base.train()
    if arguments.liger:
        from liger_kernel.transformers import monkey_patch

        apply = getattr(monkey_patch, f"apply_liger_kernel_to_{base.config.model_type}")
        apply(rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False, model=base)
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, target_modules=list(LORA))
        model = get_peft_model(base, adapters, autocast_adapter_dtype=False).to(base.dtype)
        base.enable_input_require_grads()
    checkpoint_layers(base)
    if arguments.compile:
        torch._dynamo.config.recompile_limit = 64  # each contender is another model to the compiler
        for index, layer in enumerate(base.model.layers):
            base.model.layers[index] = torch.compile(layer)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=("cp",))
    options = {"mesh": mesh, "reshard_after_forward": True}
    for layer in base.model.layers:
        fully_shard(layer, **options)
    fully_shard(base.model.embed_tokens, **options)
    fully_shard([base.model.norm, base.lm_head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-6, fused=ranks.cuda)
    return Job(model, base, optimizer, ranks, mesh, torch.zeros(1, 1, dtype=torch.int64))


def first_gradients(job: Job, way: Way) -> dict[str, float]:
    """The loss and the norm of the gradients of a contender at the same weights."""
    with way(job) as loss:
        value = loss(job)
        value.backward()
    norm = nn.utils.clip_grad_norm_(job.model.parameters(), float("inf"))
    job.optimizer.zero_grad()
    total = value.detach().double().cpu()
    dist.all_reduce(total, group=job.ranks._control)
    return {"loss": float(total) / job.ranks.size, "gradient_norm": float(norm.full_tensor())}


def step(job: Job, way: Way) -> dict[str, float]:
    """One optimizer step, timed on this rank from when all are ready, and its peak of memory."""
    with way(job) as loss:
        gc.collect()
        if job.ranks.cuda:
            torch.cuda.reset_peak_memory_stats()
        job.ranks.align()
        if job.ranks.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss(job).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        if job.ranks.cuda:
            torch.cuda.synchronize()
        passed = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if job.ranks.cuda else 0
    slowest = job.ranks.largest(torch.tensor([passed, float(peak)], dtype=torch.float64))
    return {"seconds": float(slowest[0]), "peak_bytes": float(slowest[1])}


def measure(job: Job, length: int, rounds: int, arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """All contenders at one length: what is known after each step."""
    generator = torch.Generator().manual_seed(length)
    vocabulary = job.base.config.vocab_size
    tokens = torch.randint(0, vocabulary, (1, length), generator=generator).to(job.ranks.device)
    job.tokens = tokens[:, : arguments.check_length]
    rows: dict[str, dict[str, Any]] = {}
    longest = dict(arguments.longest)
    for name in (name for name in arguments.contenders if length <= longest.get(name, length)):
        way = CONTENDERS[name].way
        found, reason = job.ranks.attempt(partial(first_gradients, job, way))
        rows[name] = {"contender": name, "length": length, "status": "failed" if reason else "ok", "reason": reason}
        rows[name] |= {"check": found and found | {"length": job.tokens.shape[1]}, "steps": []}
        job.ranks.say(f"{length} tokens, {name}: {reason or found}")
        job.optimizer.zero_grad()
    job.tokens = tokens
    running = [name for name, row in rows.items() if row["status"] == "ok"]
    for index in range(arguments.warmup + rounds):
        turn = index % max(1, len(running))
        for name in [*running[turn:], *running[:turn]]:
            found, reason = job.ranks.attempt(partial(step, job, CONTENDERS[name].way))
            if reason:
                rows[name] |= {"status": "failed", "reason": reason}
                running = [other for other in running if other != name]
                job.optimizer.zero_grad()
            elif index >= arguments.warmup:
                rows[name]["steps"].append(found)
            yield list(rows.values())
        job.ranks.say(f"{length} tokens, round {index + 1} of {arguments.warmup + rounds}")
    for name in running if arguments.profile else ():
        found, _ = job.ranks.attempt(partial(profiled, job, CONTENDERS[name].way))
        rows[name] |= found or {}
        yield list(rows.values())


# what a kernel is, by words in its name, the first that fits; where several run at a time, the first counts
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn"),
    "matrix products": ("nvjet", "gemm", "cutlass", "xmma", "cublas"),
    "merging": ("_combine", "_accumulate"),
    "loss": ("cross_entropy", "element_mul"),
    "optimizer": ("adam", "multi_tensor"),
    "messages": ("nccl", "PtoP", "Memcpy DtoD", "barrier"),
    "the rest": ("",),
}


# where in a step a timeline is drawn, and of how much of it: within a layer's forward pass, and its backward pass
WINDOWS = ((0.15, 0.02), (0.6, 0.03))


@dataclass(frozen=True)
class Event:
    """Something that ran on the device: when, in seconds, on which stream, and the index of its kind in `KINDS`."""

    start: float
    stop: float
    stream: int
    kind: int


def profiled(job: Job, way: Way) -> dict[str, Any]:
    """On what the time of one step goes, in seconds (see [`spent`]), and what ran when in parts of it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorder:
        found = step(job, way)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(path))
        events = device_events(json.loads(path.read_text())["traceEvents"], found["seconds"])
    parts = spent(events)
    return {
        "profile": parts | {"nothing": found["seconds"] - sum(parts.values())},
        "timeline": [timeline(events, begin, share) for begin, share in WINDOWS],
    }


def device_events(trace: Sequence[dict[str, Any]], seconds: float) -> list[Event]:
    """What a Chrome trace has of kernels and copies in its last seconds, which are those of the step: before it the
    ranks wait for each other."""
    found = []
    for event in trace:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = event["name"].lower()
            kind = next(at for at, words in enumerate(KINDS.values()) if any(word.lower() in name for word in words))
            start = event["ts"] / 1e6
            found.append(Event(start, start + event["dur"] / 1e6, event["args"]["stream"], kind))
    last = max((event.stop for event in found), default=0.0)
    return [event for event in found if event.start >= last - seconds]


def spent(events: Sequence[Event]) -> dict[str, float]:
    """Seconds in which a kind ran and none of those before it in `KINDS`."""
    changes = [(event.start, event.kind, 1) for event in events] + [(event.stop, event.kind, -1) for event in events]
    kinds = list(KINDS)
    found, running, before = dict.fromkeys(kinds, 0.0), [0] * len(kinds), 0.0
    for moment, kind, change in sorted(changes):
        first = next((at for at, count in enumerate(running) if count), None)
        if first is not None:
            found[kinds[first]] += moment - before
        running[kind] += change
        before = moment
    return found


def timeline(events: Sequence[Event], begin: float, share: float) -> list[dict[str, Any]]:
    """What ran in a part of a step that begins at a share of it and is as long as another share: milliseconds from the
    beginning of that part."""
    if not events:
        return []
    first, last = min(event.start for event in events), max(event.stop for event in events)
    start, stop = first + begin * (last - first), first + (begin + share) * (last - first)
    kinds = list(KINDS)
    return [
        {
            "stream": event.stream,
            "kind": kinds[event.kind],
            "start_ms": round(1e3 * (max(event.start, start) - start), 4),
            "stop_ms": round(1e3 * (min(event.stop, stop) - start), 4),
        }
        for event in sorted(events, key=lambda event: event.start)
        if event.stop > start and event.start < stop
    ]


def parts_of_limits(job: Job, length: int, native: Native, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of what a step cannot do without, of all layers, measured here. What is computed again in the linear
    layers is all but the last product, whose result no gradient needs (unless adapters come after it)."""
    config, ranks = job.base.config, job.ranks
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    own, dtype = length // ranks.size, job.base.dtype
    widths = [(hidden, heads * size), *[(hidden, config.num_key_value_heads * size)] * 2, (heads * size, hidden)]
    widths += [(hidden, config.intermediate_size)] * 2 + [(config.intermediate_size, hidden)]
    passes = 1 if arguments.lora else 2  # of a frozen weight no gradient is wanted
    products = [_product(own, *width, dtype, ranks) for width in widths]
    forward = sum(products)
    again = forward if arguments.lora else forward - products[-1]
    backward = sum(
        _product(own, out, inner, dtype, ranks) + (passes - 1) * _product(inner, own, out, dtype, ranks)
        for inner, out in widths
    )
    rows = min(own, 4096)
    vocabulary = config.vocab_size
    head = _product(rows, hidden, vocabulary, dtype, ranks) + _product(rows, vocabulary, hidden, dtype, ranks)
    head += (passes - 1) * _product(hidden, rows, vocabulary, dtype, ranks)
    head *= own / rows
    share, kv_share = heads // ranks.size, max(1, config.num_key_value_heads // ranks.size)
    q, k, v = (
        torch.randn(1, length, count, size, dtype=dtype, device=ranks.device, requires_grad=True)
        for count in (share, kv_share, kv_share)
    )
    mask = Mask(length)
    attention = _seconds(lambda: native.attend(q, k, v, mask), ranks)
    out = native.attend(q, k, v, mask)
    dout = torch.randn_like(out)
    attention_back = _seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), ranks)
    layers = config.num_hidden_layers
    return {
        "products forward": layers * forward,
        "products backward": layers * backward,
        "products again": layers * again,
        "head": head,
        "attention forward": layers * attention,
        "attention backward": layers * attention_back,
    }


def limits(parts: dict[str, float]) -> dict[str, float]:
    """Seconds of a step in which nothing but matrix products and attention takes time: with nothing computed twice;
    with the linear layers; and with a quarter of attention or all of it computed twice, too."""
    once = sum(seconds for name, seconds in parts.items() if name != "products again")
    again, attention = parts["products again"], parts["attention forward"]
    return {
        "nothing recomputed": once,
        "attention saved": once + again,
        "half of attention saved": once + again + attention / 4,
        "all recomputed": once + again + attention,
    }


def _product(rows: int, inner: int, columns: int, dtype: torch.dtype, ranks: Ranks) -> float:
    one = torch.randn(rows, inner, dtype=dtype, device=ranks.device)
    other = torch.randn(columns, inner, dtype=dtype, device=ranks.device)
    return _seconds(lambda: one @ other.T, ranks)


def _seconds(function: Callable[[], Any], ranks: Ranks, at_least: float = 0.2) -> float:
    """The time of one of many calls in a row, which take so many seconds together, on the slowest rank: a device that
    is kept busy runs slower than one that was idle before."""

    def run(calls: int) -> float:
        if ranks.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if ranks.cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    run(1)
    once = run(1)
    found = once if once >= at_least else run(max(3, math.ceil(at_least / once)))
    return float(ranks.largest(torch.tensor([found], dtype=torch.float64))[0])


def flops(job: Job, length: int, lora: bool) -> float:
    """Floating point operations of a step that computes nothing twice: 6 a weight and token (4 where weights are
    frozen), embeddings apart, and those of causal attention."""
    config = job.base.config
    table = config.vocab_size * config.hidden_size
    weights = sum(parameter.numel() for parameter in job.base.parameters()) - table
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = length * (length + 1) / 2
    return (4 if lora else 6) * weights * length + 12 * pairs * config.num_attention_heads * size * (
        config.num_hidden_layers
    )


def summary(rows: Sequence[dict[str, Any]], work: float, roof: dict[str, float], ranks: Ranks) -> list[dict[str, Any]]:
    """Medians, rates, and how many times as fast as each other contender."""
    medians = {
        row["contender"]: statistics.median(one["seconds"] for one in row["steps"]) for row in rows if row["steps"]
    }
    peak = PEAK.get(torch.cuda.get_device_name()) if ranks.cuda else None
    found = []
    for row in rows:
        name = row["contender"]
        if name in medians:
            limit = roof[CONTENDERS[name].limit]
            row = row | {
                "median_s": medians[name],
                "tokens_per_second_and_gpu": row["length"] / medians[name] / ranks.size,
                "mfu": work / medians[name] / ranks.size / peak if peak else None,
                "peak_memory_gib": max(one["peak_bytes"] for one in row["steps"]) / 2**30,
                "share_of_limit": limit / medians[name],
                "times_as_fast_as": {other: medians[other] / medians[name] for other in medians if other != name},
            }
        found.append(row)
    return found


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| tokens | contender | s a step | MFU | GiB | share of its limit |", "|---:|---|---:|---:|---:|---:|"]
    for row in result["results"]:
        if "median_s" not in row:
            lines.append(f"| {row['length']} | {row['contender']} | {row['reason']} | | | |")
            continue
        shares = [row["mfu"], row["share_of_limit"]]
        mfu, share = ("" if value is None else f"{value:.1%}" for value in shares)
        gib = f"{row['peak_memory_gib']:.1f}"
        lines.append(f"| {row['length']} | {row['contender']} | {row['median_s']:.3f} | {mfu} | {gib} | {share} |")
    for row in result["results"]:
        if row.get("profile"):
            parts = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in row["profile"].items())
            lines.append(f"\n{row['length']} tokens, {row['contender']}, seconds: {parts}")
    return "\n".join(lines)


def longest(text: str) -> tuple[str, int]:
    """A contender and a length, of the command line."""
    name, _, tokens = text.rpartition("=")
    if name not in CONTENDERS or not tokens.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=TOKENS; the names are {', '.join(CONTENDERS)}")
    return name, int(tokens)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 on all linear layers but the head")
    parser.add_argument("--liger", action="store_true", help="Liger's norms, rotary positions and SwiGLU, for all")
    parser.add_argument("--compile", action="store_true", help="every layer compiled by itself, for all")
    parser.add_argument("--profile", action="store_true", help="one more step each, and on what its time goes")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768], help="tokens of the whole sequence")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument(
        "--longest",
        metavar="NAME=TOKENS",
        type=longest,
        nargs="+",
        default=[],
        help="contenders that are left out of longer sequences",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        nargs="+",
        default=[5],
        help="steps that are timed, of every contender; one number, or one a length from the shortest on",
    )
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--check-length", type=int, help="tokens that are compared before the first step (all)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one step may take")
    parser.add_argument("--commit", help="what to write down where this is no git checkout")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    arguments = parser.parse_args()
    lengths = sorted(arguments.lengths)
    if len(arguments.rounds) not in (1, len(lengths)):
        parser.error(f"--rounds has {len(arguments.rounds)} numbers for {len(lengths)} lengths; give one, or one each")
    ranks = Ranks(arguments.device, arguments.timeout)
    dtype = torch.bfloat16 if ranks.cuda else torch.float32
    native, _ = choose_native("auto", ranks, dtype, 128 if ranks.cuda else 16, Mask(256))
    job = make_job(arguments, ranks)
    result = environment(ranks, [Path(sys.argv[0]).name, *sys.argv[1:]], arguments.commit)
    result |= {
        "shape": arguments.shape,
        "lora": arguments.lora,
        "liger": arguments.liger,
        "compiled": arguments.compile,
        "kernel": native.name,
        "parts_of_limits": {},
        "limits": {},
        "results": [],
    }
    rounds = arguments.rounds * (len(lengths) // len(arguments.rounds))
    for length, count in zip(lengths, rounds, strict=True):
        parts = parts_of_limits(job, length, native, arguments)
        roof = limits(parts)
        result["parts_of_limits"][str(length)], result["limits"][str(length)] = parts, roof
        before = result["results"]
        for rows in measure(job, length, count, arguments):
            result["results"] = [*before, *summary(rows, flops(job, length, arguments.lora), roof, ranks)]
            if arguments.out is not None and ranks.rank == 0:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    ranks.say(json.dumps(result["parts_of_limits"]))
    ranks.say(table(result))
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
