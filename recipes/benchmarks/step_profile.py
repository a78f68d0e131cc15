"""Where the GPU's time of one training step goes, of a document that is read, or of attention alone.

    torchrun --nproc-per-node 2 recipes/benchmarks/step_profile.py --shape qwen3.5-hybrid --lora --liger \\
        --length 65536 --out outputs/profile.json
    torchrun --nproc-per-node 2 recipes/benchmarks/step_profile.py --shape llama-8b --liger --read --length 131072 \\
        --out outputs/profile_reading.json
    torchrun --nproc-per-node 2 recipes/benchmarks/step_profile.py --attention --kv-heads 8 --length 16384 \\
        --out outputs/profile_attention.json

The step is that of training.py's "hf_burst" contender, with settings of BurstConfig in `--settings`; with `--read` it
is `hf_burst.remember`, as in generation.py, and with `--attention` three forward passes of attention in a row and their
backward passes, as in attention.py. After three steps one more runs under torch's profiler on the first rank. What is
written, of that rank: the seconds of the step; those in which a kernel of a group ran, by group; those in which only
messages or copies ran, and in which nothing did; and the operations that took longest, by the shapes of their inputs.
The profiler makes steps some percent longer.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import hf_burst
from hf_burst.plan import Mask
from recipes.benchmarks.contenders import Case
from recipes.benchmarks.contenders import hf_burst as hf_burst_attention
from recipes.benchmarks.harness import begin, options_of, write
from recipes.benchmarks.measure import listening, run_of, timed
from recipes.benchmarks.native import choose_native
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.training_contenders import burst
from recipes.benchmarks.training_job import add_training, apply_liger, make_job, make_model, random_tokens

Span = tuple[float, float]
# the first group of which a word is in a kernel's name
GROUPS = {
    "messages": ("nccl", "barrier_kernel", "Memcpy PtoP"),
    "copies between GPU and host": ("Memcpy HtoD", "Memcpy DtoH"),
    "attention": ("flash", "fmha", "FlashAttention"),
    "recurrence": ("chunk", "delta", "recompute_w_u", "causal_conv", "l2norm", "solve_tril", "merge_16x16", "cumsum"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitK"),
    "norms, rotary positions, activations": ("rms_norm", "rope", "swiglu", "geglu", "layer_norm"),
    "optimizer": ("multi_tensor", "adam"),
}
_HEADS, _HEAD_SIZE, _CALLS = 32, 128, 3  # of attention alone
WAITING = ("messages", "copies between GPU and host")


def group_of(name: str) -> str:
    """The group of a kernel."""
    lower = name.lower()
    return next((group for group, words in GROUPS.items() if any(word.lower() in lower for word in words)), "others")


def covered(spans: Iterable[Span]) -> float:
    """Seconds that lie in any of the spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def kernels_of(profiler: profile) -> list[tuple[str, Span]]:
    """The name of each kernel and copy, and when it ran, in seconds."""
    results: Any = profiler.profiler
    return [
        (event.name(), (event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9))
        for event in results.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
        and event.duration_ns() > 0
        and not event.is_user_annotation()  # which spans all kernels of a forward pass of DDP
    ]


def summary(kernels: list[tuple[str, Span]], seconds: float) -> dict[str, Any]:
    """Seconds by group, of single kernels, of what was not hidden, and of nothing."""
    groups, names = defaultdict[str, list[Span]](list), defaultdict[str, list[Span]](list)
    for name, span in kernels:
        groups[group_of(name)].append(span)
        names[name].append(span)
    computing = [span for group, spans in groups.items() if group not in WAITING for span in spans]
    busy, every = covered(computing), covered(span for _, span in kernels)
    longest = sorted(names.items(), key=lambda item: -covered(item[1]))[:50]
    return {
        "seconds": seconds,
        "groups": {group: covered(spans) for group, spans in sorted(groups.items())},
        "messages and copies alone": every - busy,
        "nothing": seconds - every,
        "kernels": [{"name": name[:160], "seconds": covered(spans), "calls": len(spans)} for name, spans in longest],
    }


def operations(profiler: profile) -> list[dict[str, Any]]:
    """The operations whose own kernels took longest, by the shapes of their inputs."""
    averages = profiler.key_averages(group_by_input_shape=True)
    own = [(row.self_device_time_total / 1e6, row) for row in averages if row.device_type.name == "CPU"]
    rows = sorted(own, key=lambda item: -item[0])[:70]
    return [
        {"name": row.key[:120], "shapes": str(row.input_shapes)[:200], "seconds": seconds, "calls": row.count}
        for seconds, row in rows
        if seconds
    ]


def profiler_of(ranks: Ranks) -> profile:
    """What records a step."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ranks.cuda else [])]
    return profile(activities=activities, record_shapes=True)


def profiled(profiler: profile, seconds: float) -> dict[str, Any]:
    """All that is written of a step that took so many seconds."""
    return {**summary(kernels_of(profiler), seconds), "operations": operations(profiler)}


Steps = tuple[Callable[[], Any], Callable[[], Any]]  # makes one; the settings that were chosen


@contextmanager
def training(arguments: argparse.Namespace, ranks: Ranks) -> Iterator[Steps]:
    """Steps of an optimizer."""
    job = make_job(arguments, arguments.length, ranks)
    job.tokens = random_tokens(arguments.length, job.base, ranks.device)

    def step() -> None:
        loss(job).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()

    with burst(job, arguments.settings) as loss:
        yield step, lambda: job.chosen


@contextmanager
def reading(arguments: argparse.Namespace, ranks: Ranks) -> Iterator[Steps]:
    """Documents that a model remembers."""
    dtype = torch.bfloat16 if ranks.cuda else torch.float32
    model: Any = make_model(arguments.shape, arguments.length + 1, dtype, ranks.device, arguments.layers).eval()
    if arguments.liger:
        apply_liger(model)
    model.config.use_cache = model.generation_config.use_cache = True
    hf_burst.patch_model(model, hf_burst.BurstConfig.from_dict(arguments.settings))
    tokens = random_tokens(arguments.length, model, ranks.device)
    yield partial(hf_burst.remember, model, tokens), dict


@contextmanager
def attending(arguments: argparse.Namespace, ranks: Ranks) -> Iterator[Steps]:
    """Attention, several calls in a row as the layers of a model make them."""
    dtype = torch.bfloat16 if ranks.cuda else torch.float32
    case = Case(
        length=arguments.length,
        q_heads=_HEADS,
        kv_heads=arguments.kv_heads,
        head_dim=_HEAD_SIZE,
        dtype=dtype,
        device=ranks.device,
        rank=ranks.rank,
        ranks=ranks.size,
        native=choose_native("auto", ranks, dtype, _HEAD_SIZE, Mask(256))[0],
        kernel="auto",
        group=dist.group.WORLD if ranks.size > 1 else None,
    )
    settings = dict(arguments.settings)
    run = run_of(hf_burst_attention(settings.pop("schedule", "auto"), settings), case)
    yield partial(timed, run, _CALLS, ranks.cuda), dict


def main() -> None:
    """Makes four steps, the last one under the profiler."""
    parser = options_of(__doc__, timeout_s=600.0)
    add_training(parser, "qwen3.5-hybrid")
    parser.add_argument("--length", type=int, default=65536, help="tokens of the whole sequence")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--read", action="store_true", help="a document, without training")
    kinds.add_argument("--attention", action="store_true", help=f"alone, of {_HEADS} query heads of {_HEAD_SIZE}")
    parser.add_argument("--kv-heads", type=int, default=8, help="of attention alone")
    parser.add_argument("--settings", type=json.loads, default={}, help="of BurstConfig and Memory, as JSON")
    arguments = parser.parse_args()
    ranks, result = begin(arguments)
    seconds = list[float]()
    profiler = profiler_of(ranks)
    steps = attending if arguments.attention else reading if arguments.read else training
    with listening() as said, steps(arguments, ranks) as (step, chosen):
        for index in range(4):
            ranks.align()
            if index == 3 and ranks.rank == 0:
                ranks.wait()
                profiler.start()
            seconds.append(ranks.time(step))
            if index == 3 and ranks.rank == 0:
                profiler.stop()
    if ranks.rank == 0:
        found = {"steps_s": seconds, "chosen": chosen(), **profiled(profiler, seconds[-1]), "said": said}
        ranks.say(json.dumps({name: found[name] for name in ("steps_s", "groups", "nothing", "chosen")}))
        write(arguments.out, result | found, ranks)
    ranks.close()


if __name__ == "__main__":
    main()
