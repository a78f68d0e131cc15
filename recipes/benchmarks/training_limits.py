"""The least time of a training step, from rates that are measured in the same run."""

import inspect
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_burst.plan import Mask
from hf_burst.recurrent import fla_compared, fla_convolution
from recipes.benchmarks.native import Native, choose_native
from recipes.benchmarks.ranks import Ranks

# the names of limits by `Memory.attention_keep`
LIMITS = {
    1.0: "attention saved",
    0.75: "three quarters of attention saved",
    0.5: "half of attention saved",
    0.25: "a quarter of attention saved",
    0.0: "all recomputed",
}
_LONG = 2**18  # tokens of attention that takes seconds


class Attention(NamedTuple):
    """The attention of a layer: query heads, key heads, elements of a head, and how many tokens before itself a query
    sees, `None` for all of them."""

    heads: int
    kv_heads: int
    size: int
    window: int | None


def native_of(kind: Attention, dtype: torch.dtype, ranks: Ranks) -> Native:
    """The fastest kernel of an attention."""
    return choose_native("auto", ranks, dtype, kind.size, Mask(256, window=kind.window))[0]


def parts_of_limits(decoder: Any, ranks: Ranks, length: int, lora: bool) -> dict[str, float]:
    """Measures the seconds of all matrix products, of attention and of recurrent layers' functions in a step.

    Checkpointed layers compute their products again, but for the last one, whose result no gradient needs. With
    adapters behind it, the last product is computed again too; the weights are then frozen.
    """
    config = decoder.config
    hidden, own, dtype = config.hidden_size, length // ranks.size, decoder.dtype
    passes = 1 if lora else 2  # frozen weights need no gradient
    every = [widths_of(layer) for layer in decoder.layers]
    seconds = partial(product_seconds, dtype=dtype, ranks=ranks)
    once, back = forward_products(decoder, own, ranks), dict[tuple[int, int], float]()
    for taken, made in once:
        back[taken, made] = seconds(own, made, taken) + (passes - 1) * seconds(taken, own, made)
    forward = sum(once[width] for widths in every for width in widths)
    again = forward if lora else forward - sum(once[widths[-1]] for widths in every)
    rows = min(own, 4096)
    vocabulary = config.vocab_size
    head = seconds(rows, hidden, vocabulary) + seconds(rows, vocabulary, hidden)
    head = own / rows * (head + (passes - 1) * seconds(hidden, rows, vocabulary))
    mixers = mixers_of(decoder)
    kinds = Counter(attentions_of(decoder))
    attention = {kind: attention_seconds(kind, dtype, ranks, length) for kind in kinds}
    recurrence, recurrence_back = recurrent_seconds(mixers[0], own, dtype, ranks) if mixers else (0.0, 0.0)
    return {
        "products forward": forward,
        "products backward": sum(back[width] for widths in every for width in widths),
        "products again": again,
        "head": head,
        "attention forward": sum(kinds[kind] * attention[kind][0] for kind in kinds if kind.window is None),
        "windowed attention forward": sum(
            kinds[kind] * attention[kind][0] for kind in kinds if kind.window is not None
        ),
        "attention backward": sum(count * attention[kind][1] for kind, count in kinds.items()),
        "recurrence forward": len(mixers) * recurrence,
        "recurrence backward": len(mixers) * recurrence_back,
        "recurrence again": len(mixers) * recurrence,
    }


def forward_products(decoder: Any, own: int, ranks: Ranks) -> dict[tuple[int, int], float]:
    """Seconds of each kind of matrix product in the layers of a decoder, of a rank's tokens, by its widths."""
    kinds = {width for layer in decoder.layers for width in widths_of(layer)}
    return {(taken, made): product_seconds(own, taken, made, decoder.dtype, ranks) for taken, made in kinds}


def widths_of(layer: nn.Module) -> list[tuple[int, int]]:
    """The widths that the matrix products of a layer take in and give out, the last one last."""
    linears = [
        getattr(module, "base_layer", module)  # with an adapter
        for name, module in layer.named_modules()
        if hasattr(module, "base_layer")
        or (isinstance(module, nn.Linear) and "lora_" not in name and "base_layer" not in name)
    ]
    return [(linear.in_features, linear.out_features) for linear in linears]


def mixers_of(decoder: Any) -> list[Any]:
    """The layers of gated DeltaNet."""
    return [layer.linear_attn for layer in decoder.layers if hasattr(layer, "linear_attn")]


def attentions_of(decoder: Any) -> list[Attention]:
    """The attention of each layer that has one. Layers of Gemma 4 differ in heads, too."""
    config, every = decoder.config, list[Attention]()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(decoder.layers)
    for layer, kind in zip(decoder.layers, kinds, strict=True):
        if (module := getattr(layer, "self_attn", None)) is not None:
            window = config.sliding_window - 1 if kind == "sliding_attention" else None
            kv_heads = widths_of(module.k_proj)[0][1] // module.head_dim
            every.append(Attention(config.num_attention_heads, kv_heads, module.head_dim, window))
    return every


def attention_seconds(kind: Attention, dtype: torch.dtype, ranks: Ranks, length: int) -> tuple[float, float]:
    """Seconds of attention, forward and backward, on all tokens and a share of the heads. From 256K tokens on it is
    called once, after one of 16K tokens, but for attention in a window, which takes milliseconds."""
    native, long = native_of(kind, dtype, ranks), length >= _LONG and kind.window is None
    share, kv_share = kind.heads // ranks.size, max(1, kind.kv_heads // ranks.size)
    make = partial(torch.randn, dtype=dtype, device=ranks.device, requires_grad=True)

    def timed(tokens: int, once: bool) -> tuple[float, float]:
        q, k, v = (make(1, tokens, count, kind.size) for count in (share, kv_share, kv_share))
        mask, outs = Mask(tokens, window=kind.window), dict[str, torch.Tensor]()

        def attend() -> None:
            outs.clear()
            outs["out"] = native.attend(q, k, v, mask)

        forward = seconds_of(attend, ranks, once=once)
        dout = torch.randn_like(outs["out"])
        back = partial(torch.autograd.grad, outs["out"], (q, k, v), dout, retain_graph=True)
        return forward, seconds_of(back, ranks, once=once)

    if long:
        timed(2**14, once=False)
    return timed(length, once=long)


def rule_call(
    rule: Callable[..., Any],
    keys: tuple[int, int],
    values: tuple[int, int],
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """A call of a gated delta rule on random numbers, and these: q, k, v, beta and g, for heads and their sizes."""
    make = partial(torch.randn, 1, tokens, device=device)
    q, k, v = (make(*heads).to(dtype) for heads in (keys, keys, values))
    beta, g = make(values[0]).sigmoid().to(dtype), -make(values[0]).exp() / 100
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, beta, g)]
    options = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True}
    return lambda: rule(q, k, v, g=g, beta=beta, cu_seqlens=None, **options)[0], leaves


def recurrent_seconds(mixer: Any, tokens: int, dtype: torch.dtype, ranks: Ranks) -> tuple[float, float]:
    """Seconds of the convolution and the delta rule of a layer, forward and backward, on a rank's own tokens. Of the
    convolutions that are installed, the faster one counts."""
    functions = inspect.unwrap(type(mixer).forward).__globals__
    keys, values = (mixer.num_k_heads, mixer.head_k_dim), (mixer.num_v_heads, mixer.head_v_dim)
    rule, leaves = rule_call(functions["torch_chunk_gated_delta_rule"], keys, values, tokens, dtype, ranks.device)
    make = partial(torch.randn, device=ranks.device, dtype=dtype, requires_grad=True)
    x, weight = make(1, tokens, mixer.conv_dim), make(mixer.conv_dim, mixer.conv1d.weight.shape[-1])

    def convolve(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        return function(x.transpose(1, 2), weight, None, activation="silu")

    convolutions = [partial(convolve, functions["causal_conv1d_fn"])]
    if fla_compared(ranks.device):
        convolutions.append(partial(convolve, fla_convolution))

    def both(function: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> tuple[float, float]:
        forward, out = seconds_of(function, ranks), function()
        back = partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)
        return forward, seconds_of(back, ranks)

    convolution = min((both(function, [x, weight]) for function in convolutions), key=sum)
    forward, backward = both(rule, leaves)
    return convolution[0] + forward, convolution[1] + backward


def limits(parts: dict[str, float]) -> dict[str, float]:
    """Seconds of a step in which only matrix products, attention and recurrent functions take time.

    The limits differ in what is computed twice: nothing, the linear layers, or some of the attention too. Of causal
    attention, that of the first half of a sequence is a quarter; of attention in windows, which are much shorter than
    the sequence, it is half.
    """
    once = sum(seconds for name, seconds in parts.items() if not name.endswith("again"))
    again = sum(parts.values()) - once
    whole, windowed = parts["attention forward"], parts["windowed attention forward"]
    kept = {name: once + again + (1 - keep) ** 2 * whole + (1 - keep) * windowed for keep, name in LIMITS.items()}
    return {"nothing recomputed": once, **kept}


def product_seconds(rows: int, inner: int, columns: int, dtype: torch.dtype, ranks: Ranks) -> float:
    """Seconds of a matrix product."""
    left = torch.randn(rows, inner, dtype=dtype, device=ranks.device)
    right = torch.randn(columns, inner, dtype=dtype, device=ranks.device)
    return seconds_of(lambda: left @ right.T, ranks)


def seconds_of(function: Callable[[], Any], ranks: Ranks, at_least: float = 0.2, once: bool = False) -> float:
    """Seconds of a call on the slowest rank, among calls in a row that take `at_least` seconds together, after one that
    does not count; or of the first one.

    A busy device runs slower than one that was idle before.
    """
    if not once:
        ranks.time(function)
    mean = ranks.time(function)
    if not once and mean < at_least:
        mean = ranks.time(function, max(3, math.ceil(at_least / mean)))
    return ranks.largest([mean])[0]
