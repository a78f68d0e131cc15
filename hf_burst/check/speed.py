"""Measures a training step for `hf-burst bench`: of hf_burst, of its limit, and of Transformers on one GPU."""

import gc
import statistics
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils.import_utils import is_liger_kernel_available

from ..config import BurstConfig, Memory
from ..hf.attention import NAME, attention_forward, register
from ..hf.context import LaidTokens, current, entered
from ..hf.groups import PATCH
from ..hf.models.support import base_model
from ..hf.patch import patch_model
from ..ranks.layout import SequenceLayout

Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One sequence of random tokens, on which all ranks train a model of random weights."""

    config: PreTrainedConfig
    length: int  # tokens of the sequence
    lora: int  # rank of the adapters; 0 trains all weights
    device: torch.device
    ranks: int
    ends: float  # when no further step begins, by `time.monotonic`

    def mesh(self, sharing: int) -> Any:
        """Returns a mesh in which so many ranks share a sequence; `None` for one process."""
        shape = self.ranks // sharing, sharing
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "cp")) if dist.is_initialized() else None

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks."""
        values = [value] * self.ranks
        if dist.is_initialized():
            dist.all_gather_object(values, value)
        return values

    def slowest(self, found: Result) -> Result:
        """Returns the result of the slowest rank, or of the first that has none."""
        return max(self.gather(found), key=lambda each: each.get("seconds", float("inf")))


def measure(job: Job) -> dict[str, Result]:
    """Measures AdamW steps with checkpointed layers, in bf16 on GPUs and in fp32 on CPUs: of `"hf_burst"`, whose
    weights FSDP2 shards, of its `"limit"`, and of `"transformers"` with a sequence on each GPU. Returns the numbers of
    the slowest rank, or a `reason` why there are none, and the `settings` of [`Memory`] that hf_burst chose."""
    results = {"hf_burst": job.slowest(_burst(job))}
    seconds, settings = results["hf_burst"]["seconds"], Memory(**results["hf_burst"]["settings"])
    alone = job.mesh(sharing=1)
    for name, expected in {"limit": seconds, "transformers": job.ranks * seconds}.items():
        gc.collect()
        torch.cuda.empty_cache()
        in_time, found = all(job.gather(time.monotonic() + 2 * expected < job.ends)), {"reason": "no time was left"}
        try:  # no rank waits for another here: memory may be short on one alone
            if in_time and name == "limit":
                found = limit(job, settings, alone)
            elif in_time:
                found = _steps(job, make_model(job, True), job.length)
        except torch.OutOfMemoryError:
            found = {"reason": "out of memory"}
        results[name] = job.slowest(found)
    return results


def limit(job: Job, settings: Memory, alone: Any = None) -> Result:
    """Measures both passes without a message: each rank holds a whole model and computes its share of the tokens, which
    attention takes for all tokens of its share of the heads: as much work as its part of the real step has. Weights are
    not updated, since each rank of the real step updates a share of them. `alone` is a mesh of groups of one rank."""
    sizes, ranks = job.config.get_text_config().to_dict(), job.ranks
    if any("num_key_value_heads" in layer for layer in (sizes.get("per_layer_config") or {}).values()):
        return {"reason": "none for layers that differ in their key heads"}
    heads = sizes["num_attention_heads"], sizes.get("num_key_value_heads") or sizes["num_attention_heads"]
    if ranks == 1:
        return {"reason": "none on one GPU, which sends nothing"}
    if heads[0] % ranks or heads[1] % ranks:
        return {"reason": f"none for {heads[0]} and {heads[1]} heads over {ranks}"}
    own = -(-job.length // ranks)
    whole = SequenceLayout.for_batch([(0, own * ranks)], 1)
    laid = LaidTokens.of(whole, 0, job.device, places=False)

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        context: Any = current()
        seen = replace(context, sharded_pass=replace(context.sharded_pass, layout=whole, laid=laid))
        swapped = (states.transpose(1, 2) for states in (query, key, value))
        query, key, value = (each.reshape(1, own * ranks, -1, each.shape[3]).transpose(1, 2) for each in swapped)
        if options.get("s_aux") is not None:
            options["s_aux"] = options["s_aux"][: heads[0] // ranks]
        with entered(seen):
            return attention_forward(module, query, key, value, mask, **options)[0].reshape(1, own, heads[0], -1), None

    model = patch_model(make_model(job), BurstConfig(memory=settings), alone)
    AttentionInterface.register(NAME, attend)
    try:
        return _steps(job, model, own, updates=False)
    finally:
        register()


def make_model(job: Job, fused_loss: bool = False) -> Any:
    """Makes the same model on every rank, with Liger's kernels on GPUs that have them; a peft model for adapters."""
    on_gpu, config = job.device.type == "cuda", deepcopy(job.config)  # patching changes the config
    torch.manual_seed(0)
    with job.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    if on_gpu and is_liger_kernel_available():
        apply_liger_kernel(model, {"fused_linear_cross_entropy": fused_loss})
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    if job.lora:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=job.lora, target_modules="all-linear"), autocast_adapter_dtype=False)
    return model


def _burst(job: Job) -> Result:
    mesh = job.mesh(sharing=job.ranks)
    model = patch_model(make_model(job), group=mesh)
    base: Any = base_model(model)
    layers = [module for module in base.modules() if type(module).__name__ in (base._no_split_modules or ())]
    for module in (*layers, model) if mesh else ():
        fully_shard(module, mesh=mesh["cp"])
    found = _steps(job, model, job.length, together=True)
    latest = getattr(base, PATCH).memory.latest
    return found | {"settings": asdict(latest.settings if latest else Memory())}


def _steps(job: Job, model: Any, tokens: int, together: bool = False, updates: bool = True) -> Result:
    """Times the last three of five steps on this rank, or fewer; `together` if ranks wait, so that all make as many."""
    on_gpu, seconds, more = job.device.type == "cuda", list[float](), True
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=on_gpu)
    torch.manual_seed(0)  # the same batch on every rank
    batch = torch.randint(job.config.get_text_config().vocab_size, (1, tokens)).to(job.device)
    while more:
        start = time.perf_counter()
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        if updates:
            optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize(job.device)
        seconds.append(time.perf_counter() - start)
        fits = time.monotonic() + seconds[-1] < job.ends
        more = len(seconds) < 2 or (len(seconds) < 5 and (all(job.gather(fits)) if together else fits))
    step, peak = (
        statistics.median(seconds[1:][-3:]),
        round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_gpu else None,
    )
    speed = tokens / (job.ranks if together else 1) / step
    return {"seconds": step, "tokens_per_second_per_gpu": speed, "peak_gib": peak, "steps": len(seconds)}
