"""The least time of a training step, from rates that are measured in the same run."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from hf_burst.plan import Mask
from recipes.benchmarks.native import Native
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.training_job import Job, head_size


def parts_of_limits(job: Job, length: int, native: Native, lora: bool) -> dict[str, float]:
    """Measures the seconds of all matrix products and of attention in a step.

    Checkpointed layers compute their products again, but for the last one, whose result no gradient needs. With
    adapters behind it, the last product is computed again too.
    """
    config, ranks = job.base.config, job.ranks
    hidden, heads, size = config.hidden_size, config.num_attention_heads, head_size(job.base)
    own, dtype = length // ranks.size, job.base.dtype
    widths = [(hidden, heads * size), *[(hidden, config.num_key_value_heads * size)] * 2, (heads * size, hidden)]
    widths += [(hidden, config.intermediate_size)] * 2 + [(config.intermediate_size, hidden)]
    passes = 1 if lora else 2  # frozen weights need no gradient
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
    """Seconds of a step in which only matrix products and attention take time.

    The limits differ in what is computed twice: nothing, the linear layers, a quarter of attention too, or all of it.
    """
    once = sum(seconds for name, seconds in parts.items() if name != "products again")
    again, attention = parts["products again"], parts["attention forward"]
    return {
        "nothing recomputed": once,
        "attention saved": once + again,
        "half of attention saved": once + again + attention / 4,
        "all recomputed": once + again + attention,
    }


def _product(rows: int, inner: int, columns: int, dtype: torch.dtype, ranks: Ranks) -> float:
    left = torch.randn(rows, inner, dtype=dtype, device=ranks.device)
    right = torch.randn(columns, inner, dtype=dtype, device=ranks.device)
    return _seconds(lambda: left @ right.T, ranks)


def _seconds(function: Callable[[], Any], ranks: Ranks, at_least: float = 0.2) -> float:
    """Seconds of a call on the slowest rank, among calls in a row that take `at_least` seconds together.

    A busy device runs slower than one that was idle before.
    """

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
    mean = once if once >= at_least else run(max(3, math.ceil(at_least / once)))
    return float(ranks.largest(torch.tensor([mean], dtype=torch.float64))[0])


def flops(job: Job, length: int, lora: bool) -> float:
    """Floating point operations of a step that computes nothing twice.

    A weight takes 6 a token, or 4 if it is frozen. Embeddings count only if they are the weights of the head too.
    Causal attention takes 12 a pair of tokens and element of all heads.
    """
    config = job.base.config
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = sum(parameter.numel() for parameter in job.base.parameters()) - table
    pairs = length * (length + 1) / 2
    return (4 if lora else 6) * weights * length + 12 * pairs * config.num_attention_heads * head_size(job.base) * (
        config.num_hidden_layers
    )
