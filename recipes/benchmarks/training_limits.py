"""What a training step takes at least, from rates that are measured in the same run."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from hf_burst.cli.bench_contenders import Native
from hf_burst.cli.bench_ranks import Ranks
from hf_burst.plan import Mask
from recipes.benchmarks.training_job import Job, head_size


def parts_of_limits(job: Job, length: int, native: Native, lora: bool) -> dict[str, float]:
    """Seconds of what a step cannot do without, of all layers, measured here. What is computed again in the linear
    layers is all but the last product, whose result no gradient needs (unless adapters come after it)."""
    config, ranks = job.base.config, job.ranks
    hidden, heads, size = config.hidden_size, config.num_attention_heads, head_size(job.base)
    own, dtype = length // ranks.size, job.base.dtype
    widths = [(hidden, heads * size), *[(hidden, config.num_key_value_heads * size)] * 2, (heads * size, hidden)]
    widths += [(hidden, config.intermediate_size)] * 2 + [(config.intermediate_size, hidden)]
    passes = 1 if lora else 2  # of a frozen weight no gradient is wanted
    products = [_product(own, *width, dtype, ranks) for width in widths]
    forward = sum(products)
    again = forward if lora else forward - products[-1]
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
    frozen), embeddings apart unless they are the head's weights, too, and those of causal attention."""
    config = job.base.config
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = sum(parameter.numel() for parameter in job.base.parameters()) - table
    pairs = length * (length + 1) / 2
    return (4 if lora else 6) * weights * length + 12 * pairs * config.num_attention_heads * head_size(job.base) * (
        config.num_hidden_layers
    )
