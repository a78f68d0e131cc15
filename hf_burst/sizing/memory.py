"""Memory of a GPU in a training step, by what takes it."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ..plan.layer_sizes import keeping
from ..plan.memory_levels import GAPS, TUNING
from .gpus import Capacity
from .model import SCALES, ModelSize, Training
from .spread import Spread, buffer_bytes, spread_of, state_bytes
from .towers import backward_of_towers, forward_of_towers, kept_by_towers, whole_embeddings

LOADING = "the loading of all weights on every GPU, before FSDP2 shards them"
_LOGITS, _MOST_LOGITS, _PLAIN_LOGITS = 2**29, 2**31, 2**27  # at a time, as in linear_loss.py
# bytes of a GPU outside of torch's allocator: CUDA's context and the code of kernels; and NCCL
_CONTEXT, _NCCL = 1.25 * 2**30, 1.0 * 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one GPU, at the moment of a step when they are the most.

    Args:
        weights, gradients, optimizer (`float`): Of the weights that this GPU holds.
        gathered (`float`): Weights and gradients of the layers that FSDP has put together.
        layer_inputs (`float`): What checkpointed layers keep to be computed again, and what layers share.
        attention (`float`): Attention that is kept for it (`attention_keep`).
        activations (`float`): What all layers keep, or the one that is computed again; and its gradients.
        loss (`float`): Logits that are there at a time, and the gradients of the head in fp32.
        states (`float`): States of recurrent layers, of the runs of all ranks.
        keys (`float`): Keys and values of a prompt, see [`memory_of_prompt`]; none in a step.
        towers (`float`): What towers keep of the images that this GPU encodes, and what all GPUs have of the whole
            sequence: embeddings and their gradients.
        exchange (`float`): Buffers through which ranks exchange blocks.
        gaps (`float`): What torch's allocator holds beyond its tensors, and what these formulas may miss.
        outside (`float`): What CUDA, NCCL, and kernels that are being tuned take outside of the allocator.
        host (`float`): The most bytes of the host's memory in a step, at any moment, not counted in `total`.
        moment (`str`): When that is.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    layer_inputs: float = 0.0
    attention: float = 0.0
    activations: float = 0.0
    loss: float = 0.0
    states: float = 0.0
    keys: float = 0.0
    towers: float = 0.0
    exchange: float = 0.0
    gaps: float = 0.0
    outside: float = 0.0
    host: float = 0.0
    moment: str = ""

    @property
    def items(self) -> dict[str, float]:
        """The bytes of the GPU by name."""
        return {name: bytes_ for name, bytes_ in vars(self).items() if name not in ("host", "moment")}

    @property
    def held(self) -> float:
        """Those that stay from step to step: weights and the optimizer."""
        return self.weights + self.optimizer

    @property
    def total(self) -> float:
        """All that is taken of the GPU."""
        return float(sum(self.items.values()))

    @property
    def tensors(self) -> float:
        """What torch's allocator counts as allocated; symmetric buffers are not."""
        return self.total - self.exchange - self.gaps - self.outside


def estimate_memory(model: ModelSize, training: Training, capacity: Capacity) -> MemoryEstimate:
    """Predicts the most memory that a GPU and its host take in a step, see [`memory_of_step`], not by tensors alone.

    Args:
        model ([`ModelSize`]): What is trained.
        training ([`Training`]): How.
        capacity ([`Capacity`]): On what.
    """
    moments = memory_of_step(model, training, capacity)
    if capacity.on_gpu:
        moments = [_beside_tensors(moment, model, training) for moment in moments]
    return replace(max(moments, key=lambda moment: moment.total), host=max(moment.host for moment in moments))


def _beside_tensors(moment: MemoryEstimate, model: ModelSize, training: Training) -> MemoryEstimate:
    """Adds what tensors do not take. While weights are loaded no gradients leave gaps, and no kernel is tuned."""
    trains = moment.moment != LOADING
    gradients = trains * training.trained(model) * training.number / training.shards
    outside = outside_of_torch(training.gpus) + (TUNING if trains and model.recurrent else 0.0)
    return replace(moment, gaps=gaps_of(moment.tensors - moment.held, training, gradients), outside=outside)


def gaps_of(passing: float, training: Training, gradients: float = 0.0) -> float:
    """Bytes that torch's allocator holds beyond tensors of so many bytes that come and go, and so many of gradients."""
    # gaps of offloaded weights were as large with expandable segments
    share, of_gradients = GAPS[training.expandable_segments and not training.offloaded_weights]
    return share * passing + of_gradients * gradients


def outside_of_torch(gpus: int) -> float:
    """Bytes of a GPU that CUDA takes, and NCCL among several of them."""
    return _CONTEXT + (_NCCL if gpus > 1 else 0.0)


def memory_of_step(model: ModelSize, training: Training, capacity: Capacity) -> list[MemoryEstimate]:
    """Predicts the memory of a GPU at the moments when it can be the most: the loss, and the backward pass of every
    layer from the last to the first, and of the embeddings if they learn. Gradients come as what layers keep goes.

    Args:
        model ([`ModelSize`]): What is trained.
        training ([`Training`]): How.
        capacity ([`Capacity`]): On what.
    """
    number, shards, tokens = training.number, training.shards, training.tokens
    sharded, learns, table = training.gathers, not training.lora, model.vocabulary * model.hidden
    gradients = training.trained(model) * number / shards
    buckets = 0.0 if sharded or training.gpus == 1 else gradients  # those of DDP stay from step to step
    spread = spread_of(model, training, capacity.ranks_per_host)
    one, every = _activations(model, training, spread, capacity)
    # bytes of a layer as it is gathered
    unit = (2 * (model.weights - model.unused - table * (2 - model.tied)) - training.saved(model)) / model.layers
    states = tokens * model.hidden
    most = max(max(1, min(4, _MOST_LOGITS // states)) * states, _LOGITS) if training.fused else _PLAIN_LOGITS
    # torch alone has three copies of logits in fp32, and those in bf16
    logits = (2 if training.fused else 14) * min(tokens * model.vocabulary, most)
    layers, leaving, together = model.layers, training.offloaded(model), training.layers_per_checkpoint
    counts = _by_layer(layers, leaving, together if training.checkpointing else 1)
    checkpointed = tokens * training.checkpointing
    kept_input, kept_attention = (checkpointed * kept for kept in model.kept(training, training.itemsize))
    attending = model.attending / layers
    whole = whole_weights(model, training)
    scales = SCALES * training.in_4_bits(model)
    shared = _shared(model, training, capacity)
    at_loss = MemoryEstimate(
        weights=(whole - scales) / shards + scales,
        gradients=buckets,
        optimizer=2 * gradients,
        gathered=4.0 * table if sharded else 0.0,  # the head, and the message that it came in
        layer_inputs=(keeping(layers, layers, together) - keeping(leaving, layers, together)) * kept_input + shared,
        attention=(layers - leaving) * attending * kept_attention,
        activations=every,
        loss=logits + (4 if training.fused else 10) * states + (6 * table if learns else 0),
        states=state_bytes(model, training, spread),
        towers=kept_by_towers(model, training),
        exchange=buffer_bytes(model, training, spread),
        host=training.host_bytes(model),
        moment="the loss",
    )
    moments = [at_loss]
    if sharded and training.weights == "4bit":  # by accelerate, on every GPU; one is in bf16
        read = 2.0 * max(model.hidden * model.inner, training.quantized_experts * model.fused_in_layer)
        moments.append(MemoryEstimate(weights=whole, activations=read, moment=LOADING))
    first = table * number / shards if learns else 0.0
    between = gradients - first * (1 if model.tied else 2)  # those of the embeddings come behind those of all layers
    names = {layers: "of the last layer", 1: "of the first layer"}
    for layer in range(layers, 0, -1):
        done = (layers - layer) / max(1, layers - (not sharded))  # of the backward pass; FSDP's last are gathered
        inputs, attentions, again = counts[layer - 1]
        head = model.tied or training.reference or (learns and layer == layers)  # has more to do, or its gradient
        moments.append(
            replace(
                at_loss,
                gradients=buckets + first + done * between,
                # layers that were computed again for the input of the next one are still together
                gathered=2 * unit * (1 + learns + again) + 2 * table * head if sharded else 0.0,
                layer_inputs=inputs * kept_input + shared,
                attention=attentions * attending * kept_attention,
                activations=every * layer / layers + one,
                loss=0.0,
                moment=f"the backward pass {names.get(layer, f'of layer {layer}')}",
            )
        )
    between_layers = replace(at_loss, layer_inputs=shared, attention=0.0, loss=0.0, states=0.0)
    late = replace(between_layers, gradients=buckets + gradients)
    if training.images:
        forward = forward_of_towers(model, training)
        moments.append(replace(between_layers, activations=forward, moment="the forward pass of the towers"))
        if training.learns_to_see:
            backward = backward_of_towers(model, training)
            moments.append(replace(late, activations=backward, moment="the backward pass of the towers"))
    if learns:  # when all layers are behind
        moments.append(
            replace(
                late,
                gathered=4.0 * table if sharded else 0.0,
                activations=2.0 * states + (whole_embeddings(model, training) if training.images else 0.0),
                moment="the backward pass of the embeddings",
            )
        )
    if training.offloaded_weights:  # all but scales of 4 bits
        host = at_loss.host + at_loss.weights - scales + 3 * gradients
        held: dict[str, Any] = {"weights": scales, "gradients": 0.0, "optimizer": 0.0, "host": host}
        moments = [each if each.moment == LOADING else replace(each, **held) for each in moments]
    return moments


@lru_cache(maxsize=1024)
def _by_layer(layers: int, leaving: int, per_checkpoint: int) -> tuple[tuple[int, int, int], ...]:
    """How many inputs of layers, and attentions, the GPU has when one layer is left, or two, or more, and how many of
    the inputs were computed again. What the host keeps of this layer is there, too, and of the one that comes next."""
    kept = [keeping(first, layers, per_checkpoint) for first in range(layers + 1)]

    def start(index: int) -> int:
        """The layer with the input from which that of another one is computed."""
        while kept[index + 1] == kept[index]:
            index -= 1
        return index

    counts = []
    for last in range(layers):
        again = last - start(last)
        ahead = -1 if last == 0 else last - 1 if again else start(last - 1)
        stay = kept[last + 1] - kept[min(leaving, last + 1)]
        inputs = stay + again + (last < leaving and not again) + (0 <= ahead < leaving and start(ahead) == ahead)
        counts.append((inputs, max(0, last + 1 - leaving) + (last < leaving) + (0 <= ahead < leaving), again))
    return tuple(counts)


def _shared(model: ModelSize, training: Training, capacity: Capacity) -> float:
    """Bytes of what layers share: keys and values, and tables of rotary positions. Next to flash-attn 4, Liger 0.8.5
    holds the latest 16 of heads of 128 elements or more that it rotates whole."""
    whole = model.rotary > 0 and model.rotary % (2 * model.head_dim) == 0 and model.head_dim >= 128
    kept = 16 * model.head_dim if whole and training.fuses_layers(model) and capacity.on_gpu else 0
    return float(training.tokens * (training.itemsize * max(model.rotary, kept) + 2 * model.shared))


def _activations(model: ModelSize, training: Training, spread: Spread, capacity: Capacity) -> tuple[float, float]:
    """Bytes of activations: those of the layer that runs backward, with their gradients; and what all layers keep."""
    tokens = training.tokens
    fused = training.fuses_layers(model)
    keep = training.attention_keep if training.checkpointing else 0.0
    row = model.elements(fused, model.mixing(keep == 1)) + model.hidden
    inner = model.inner * (4 if fused else 6)  # of its MLP, with gradients
    if model.routed and fused:  # Liger's experts: activations with their weights, and gradients of the copies
        inner += model.inner + model.routed
    one = 2.0 * tokens * (row - model.inner * (3 if fused else 4) + inner)
    if training.itemsize == 4:  # those of the layer in fp32, a cast for each product, weights and gradients in bf16
        one += 2.0 * tokens * (6 + training.in_tiles) * model.hidden + 4 * (model.weights - model.unused) / model.layers
    if training.in_tiles:  # a tile, the gradient of all of its input, and weights of 4 bits or gradients of others
        one -= 2 * (tokens - training.tiled_mlp) * inner - 2 * tokens * model.hidden
        if training.weights == "4bit":
            one += 2 * min(model.mlp, model.linear // model.layers)
        elif not training.lora:
            one += 4 * model.mlp
        if training.itemsize == 4:  # a tile's gradients next to their sums, and casts of weights and gradients
            one += 8 * model.mlp
    again = training.checkpointing or training.in_tiles
    if training.quantized_experts and again:  # in 16 bits, those of one layer at a time
        one += 2 * model.fused_in_layer
    if model.routed and fused and training.lora:  # Liger computes gradients of experts that are frozen
        one += 2 * model.mlp
    if model.norms and not fused:  # the backward pass of a norm, in fp32
        one = max(one, 2.0 * tokens * (row - 4 * model.inner + 8 * model.hidden))
    one = max(one, tokens * model.recurrent_backward())
    if model.patterns:
        longest = max(stop - start for start, stop in pairwise(training.bounds))
        document = min(1.0, longest / tokens) if len(training.bounds) > 2 else 0.0
        rows = 128 * (len(training.bounds) - 1) / training.length if document else 0.0  # that kernels add to documents
        wide = capacity.on_gpu, capacity.ffpa, (document, rows)
        blocks = model.key_blocks if capacity.on_gpu and not capacity.ffpa else 0
        one = max(one, tokens * model.attention_backward(keep, spread.slices, *wide) + blocks)
    mean = model.elements(fused) + model.hidden
    if training.in_tiles:
        mean -= model.inner * (3 if fused else 4)
    every = 2 * tokens * model.layers * mean
    if training.quantized_experts and not again:
        every += 2 * model.fused
    return one, 0.0 if training.checkpointing else every


def whole_weights(model: ModelSize, training: Training) -> float:
    """Bytes of all weights, those of a second model for reference among them."""
    held = float(training.trained(model) * training.number)
    if training.lora:
        held += 2 * model.weights
    elif training.reference:
        held += model.weights * training.number
    return held - training.saved(model)
