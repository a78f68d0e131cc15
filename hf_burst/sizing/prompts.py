"""Memory of a GPU that shares a prompt: that of `hf_burst.remember` and `hf_burst.generate`, and the longest prompt."""

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

from ..plan import MaskPattern
from ..plan.memory_levels import TILE
from .fit import longest_that
from .gpus import Capacity
from .memory import MemoryEstimate, gaps_of, outside_of_torch, whole_weights
from .model import ModelSize, Training
from .spread import Spread, buffer_bytes, spread_of


def memory_of_prompt(model: ModelSize, training: Training, capacity: Capacity) -> MemoryEstimate:
    """Predicts the most memory that a GPU takes while a prompt is read, when the last layer is: the keys of all layers
    are there. Weights lie whole on every GPU, without gradients and optimizer.

    Args:
        model ([`ModelSize`]): What reads it.
        training ([`Training`]): How it is trained: its `length` is that of the prompt, which `burst_size` GPUs share.
            MLPs take it in tiles.
        capacity ([`Capacity`]): On what.
    """
    how = replace(
        training,
        documents=(),
        parents=(),
        reference=False,
        images=0,
        image_tokens=0,
        tiled_mlp=training.tiled_mlp or TILE,
        head_groups=1,
    )
    spread = spread_of(model, how, capacity.ranks_per_host)
    held = MemoryEstimate(
        weights=whole_weights(model, how),
        keys=sum(count * kept_tokens(pattern, how) * cached_bytes(kind) for pattern, kind, count in model.attentions),
        exchange=buffer_bytes(model, how, spread, backward=False),
    )
    moment, activations = max(_rows(model, how, spread, capacity), key=itemgetter(1))
    most = replace(held, activations=activations, moment=moment)
    if capacity.on_gpu:
        most = replace(most, gaps=gaps_of(activations, how), outside=outside_of_torch(how.gpus))
    return most


def cached_bytes(model: ModelSize) -> int:
    """Bytes of a token's keys and values in a layer, or of the latents that they are made of, in bf16."""
    return 2 * (model.latent or 2 * model.keys)


def kept_tokens(pattern: MaskPattern, training: Training) -> int:
    """Tokens of a prompt whose keys a GPU keeps in a layer: its share, of which windows and chunks need the last."""
    limits = training.tokens, pattern.window, pattern.attention_chunk_size
    return min(limit for limit in limits if limit is not None)


def longest_prompt(model: ModelSize, training: Training, capacity: Capacity) -> int:
    """Tokens of the longest prompt that fits, to 1,024 tokens a GPU; 0 if none does. Arguments as in
    [`memory_of_prompt`]."""

    def has_room(length: int) -> bool:
        return memory_of_prompt(model, replace(training, length=length), capacity).total <= capacity.gpu_memory

    return longest_that(has_room, training.burst_size)


def _rows(model: ModelSize, how: Training, spread: Spread, capacity: Capacity) -> Iterator[tuple[str, float]]:
    """Bytes of activations where a layer may have the most of them. Everywhere there are the embeddings, the input of
    the layer, and the sum or norm of it that the next module is given."""
    tokens = how.tokens
    hidden = model.hidden
    wide = how.itemsize // 2
    held = 3 * wide * hidden + 2 * model.head_dim  # cosines and sines, too
    if model.norms and not how.fuses_layers(model):  # in fp32: what is normed, and the result
        yield "a norm", 2.0 * tokens * (held + 4 * hidden)
        if model.norms > 2 * hidden:  # of queries, beside the others
            yield "a norm of the queries", 2.0 * tokens * (held + 5 * model.queries)
    if model.patterns:
        # several parts of an output are merged in fp32
        merged = 3 if capacity.on_gpu and how.burst_size > spread.schedule.ulysses else 0
        for kind in model.kinds:  # memory-efficient attention returns a part that is copied
            sums = (merged + (kind.widest_heads and capacity.on_gpu and not capacity.ffpa)) * kind.queries
            yield "attention", 2.0 * tokens * (held + 2 * (kind.queries + kind.keys) + sums)
    for size in model.recurrent:
        yield "a recurrent layer", 2.0 * tokens * (held + size.elements)
    inner = (2 if how.fuses_layers(model) else 3) * model.inner + 2 * model.routed
    whole = wide * hidden * (2 if how.in_tiles else 1)
    experts = model.fused_in_layer * how.quantized_experts  # dequantized
    yield "an MLP", 2.0 * (tokens * (held + whole) + min(tokens, how.tiled_mlp) * inner + experts)
