"""Seconds of a training step: counted operations and bytes, divided by the rates of a data sheet."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import ConfigError
from ..plan import Mask
from ..plan.work import pairs_of_chunks
from .gpus import DataSheet
from .model import NF4, ModelSize, Training
from .spread import Spread, pairs_of, recurrent_bytes, sent_bytes, spread_of
from .towers import tower_products

# Shares of their data sheets that H200s reached with bf16 (recipes/benchmarks/results: attention_*.json,
# recurrent_*.json, host_copies_*.json; products by recipes/benchmarks/training_limits.py, of an 8B Llama).
PRODUCTS = 0.68
EXPERTS = 0.18  # of products of fused experts: fits_*.json of Qwen3-30B-A3B (0.15) and gpt-oss (0.21)
ATTENTION = 0.66, 0.61  # forward, backward
# of these, by the kernel, what heads of more than 192 elements reach, and of more than 256 by the last two
WIDE_HEADS = {
    "flash_attn_4": (1.15, 0.61),
    "flash_attn_2": (0.85, 0.85),
    "ffpa": (0.71, 0.39),
    "torch_efficient": (0.18, 0.075),
}
RECURRENCE = 0.052, 0.033  # of the recurrence, token by token; chunked kernels compute more
MEMORY, LINK, HOST = 0.83, 0.8, 0.84
HIDDEN = 0.5  # share of NCCL's messages that kernels hide: these take longer by the rest of their time
BETWEEN_HOSTS = 45e9  # bytes/s of a GPU, each way: assumed, nine tenths of 400 Gb/s
_ADAMW = 8  # times that a step reads or writes a trained weight's number: gradient norm, p, g, m and v; then p, m and v


@dataclass(frozen=True)
class StepSeconds:
    """Where the seconds of a step go, on the rank with the most attention.

    Args:
        attention (`float`): Attention, without what it waits for.
        recurrence (`float`): Recurrent layers without their projections.
        products (`float`): Products of matrices, those of the head and those computed again included.
        elementwise (`float`): Norms, rotary positions, activations, additions and adapters, which wait for memory.
        exchange (`float`): Messages that nothing is computed next to.
        host (`float`): Copies to and from the host that take longer than the layers that run meanwhile.
        optimizer (`float`): The update of the weights.
        reference (`float`): The pass of a model that does not learn.
    """

    attention: float
    recurrence: float
    products: float
    elementwise: float
    exchange: float
    host: float
    optimizer: float
    reference: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())


def estimate_seconds(model: ModelSize, training: Training, sheet: DataSheet, ranks_per_host: int = 8) -> StepSeconds:
    """Predicts a step.

    Args:
        model ([`ModelSize`]): What is trained.
        training ([`Training`]): How.
        sheet ([`DataSheet`]): On which GPUs.
        ranks_per_host (`int`, defaults to 8): GPUs of a host.

    Raises:
        ConfigError: If a part of an encoder's attention is to be kept.
        ShardingError: If the sequence is too short for its ranks.
    """
    spread = spread_of(model, training, ranks_per_host)
    bandwidth = MEMORY * sheet.bandwidth
    link = BETWEEN_HOSTS if training.gpus > ranks_per_host else LINK * sheet.link
    attention = _attention(model, training, sheet, spread)
    forward, backward = (sheet.peak * share for share in RECURRENCE)
    passes = 1 + training.checkpointing + training.repeated(model)
    recurrence = training.tokens * model.recurrence_flops * (passes / forward + 2 / backward)
    multiplying = _multiplying(products(model, training), _products_of_experts(model, training), sheet)
    elementwise = touched(model, training) / bandwidth
    computing = attention + recurrence + multiplying + elementwise
    exchange = _exchange(model, training, sheet, spread, attention) + _sharding(model, training, link, computing)
    copied = 2 * training.host_bytes(model) / (HOST * sheet.host)  # out in the forward pass, back in the backward pass
    meanwhile = computing * training.offloaded(model) / model.layers
    updated = _ADAMW * training.number * training.trained(model) / training.shards
    return StepSeconds(
        attention=attention,
        recurrence=recurrence,
        products=multiplying,
        elementwise=elementwise,
        exchange=exchange,
        host=max(0.0, copied - meanwhile),
        optimizer=updated / bandwidth,
        reference=_reference(model, training, sheet, spread, link) if training.reference else 0.0,
    )


def step_flops(model: ModelSize, training: Training) -> float:
    """Operations of one GPU in a step, as model FLOPs utilisation counts them."""
    trained = 0.0 if training.lora else 1.0
    return model.flops(training.length, pairs_of(model, training), trained) / training.burst_size


def _attention(model: ModelSize, training: Training, sheet: DataSheet, spread: Spread) -> float:
    """Kernels of attention on the busiest rank: 2 products of matrices forward, 5 backward (arXiv 2307.08691), and what
    checkpointed layers compute again."""
    return sum(
        count * mask.pairs * ((1 + _again(mask, training) * (1 + training.repeated(model))) * forward + backward)
        for count, mask, (forward, backward) in _by_kind(model, training, sheet, spread)
    )


def _by_kind(
    model: ModelSize, training: Training, sheet: DataSheet, spread: Spread
) -> Iterator[tuple[float, Mask, tuple[float, float]]]:
    """How many layers there are of each kind, their mask, and the seconds of a pair in one of them."""
    for pattern, kind, count in model.attentions:
        yield count, training.mask(pattern), _seconds_of_pairs(kind, training, sheet, spread)


def _seconds_of_pairs(model: ModelSize, training: Training, sheet: DataSheet, spread: Spread) -> tuple[float, float]:
    """Seconds of a pair of a query and a key in a layer on the busiest rank, forward and backward."""
    kernel = sheet.widest if model.widest_heads else sheet.kernel
    wide = WIDE_HEADS[kernel] if model.wide_heads else (1.0, 1.0)
    flops = 4.0 * model.queries * (1 + spread.imbalance) / training.burst_size  # forward
    forward, backward = (flops / (sheet.peak * share * own) for share, own in zip(ATTENTION, wide, strict=True))
    return forward, 2.5 * backward


def _reference(model: ModelSize, training: Training, sheet: DataSheet, spread: Spread, link: float) -> float:
    """The forward pass of a model that does not learn. Heads, states and sharded weights travel once, of two times."""
    kinds = _by_kind(model, training, sheet, spread)
    attention = sum(count * mask.pairs * forward for count, mask, (forward, _) in kinds)
    recurrence = training.tokens * model.recurrence_flops / (sheet.peak * RECURRENCE[0])
    towers = tower_products(model, replace(training, frozen_towers=True))
    multiplying = _multiplying(
        2.0 * training.tokens * model.used + towers, 2.0 * training.tokens * model.visited, sheet
    )
    once, _ = _touched_by_layer(model, training)
    elementwise = training.tokens * model.layers * once / (MEMORY * sheet.bandwidth)
    computing = attention + recurrence + multiplying + elementwise
    gathered = _whole_bytes(model, training) if training.shards > 1 else 0.0
    sending = gathered * (training.gpus - 1) / training.gpus / link
    exchange = _exchange(model, training, sheet, spread, 2 * attention) / 2
    return computing + exchange + sending - HIDDEN * min(sending, computing)


def _again(mask: Mask, training: Training) -> float:
    """The share of an attention that a checkpointed layer computes again: the pairs of the first queries."""
    keep = training.attention_keep
    if not training.checkpointing or keep == 1:
        return 0.0
    if keep == 0:
        return 1.0
    if not mask.causal:
        raise ConfigError(f"attention_keep is {keep}, and an encoder's first tokens see the rest. Take 1.0 or 0.0.")
    length = max(1, round((1 - keep) * mask.length))
    first, _ = pairs_of_chunks([mask], [0, length, mask.length])
    return first / mask.pairs


def products(model: ModelSize, training: Training) -> float:
    """Operations of products of matrices on one GPU. A checkpointed layer computes its products again but for the last
    one; so does an MLP in tiles without checkpoints."""
    layers = model.used - model.head
    last = model.layers * model.hidden * model.inner
    passes = 2 if training.lora else 3  # frozen weights need no gradient
    repeated = 0
    if training.checkpointing:
        repeated = layers
    elif training.in_tiles:
        repeated = 3 * last  # of MLPs
    again = max(0, repeated - last) + training.repeated(model) * layers
    adapters = 3 * training.lora * model.adapted
    return 2.0 * training.tokens * (passes * model.used + again + adapters) + tower_products(model, training)


def _multiplying(operations: float, of_experts: float, sheet: DataSheet) -> float:
    """Seconds of operations of products, some of them in fused experts."""
    return ((operations - of_experts) / PRODUCTS + of_experts / EXPERTS) / sheet.peak


def _products_of_experts(model: ModelSize, training: Training) -> float:
    """Operations of [`products`] in fused experts."""
    passes = (2 if training.lora else 3) + (training.checkpointing or training.in_tiles) + training.repeated(model)
    return 2.0 * training.tokens * model.visited * passes


def touched(model: ModelSize, training: Training) -> float:
    """Bytes that a GPU reads and writes outside of products and attention."""
    forward, backward = _touched_by_layer(model, training)
    passes = 1 + training.checkpointing + training.repeated(model)
    total = model.layers * (passes * forward + backward)
    if training.lora:  # inputs read, and outputs added up; their gradients likewise, and once more for both weights
        total += (3 * passes + 5) * model.adapted
    moved = training.tokens * total
    if training.shards > 1:  # FSDP copies gathered weights into place, and gradients to where they are sent from
        moved += 2 * _sharded_bytes(model, training)
    if training.quantized_experts:  # read in 4 bits and written in 16; once more where layers or tiles run again
        moved += (2 + NF4) * model.fused * (1 + (training.checkpointing or training.in_tiles))
    return moved


def _touched_by_layer(model: ModelSize, training: Training) -> tuple[float, float]:
    """These bytes for a token and layer, forward and backward. Each call reads its inputs and writes its outputs: two
    norms, two additions, rotary positions, SwiGLU, and what recurrent layers take."""
    wide = model.hidden
    inner = model.inner
    recurrent = sum(size.layers * size.elements for size in model.recurrent)
    heads = model.attending * (model.queries + model.keys) / model.layers
    states = 4 * recurrent / model.layers
    if training.fuses_layers(model):
        forward = 20 * wide + 4 * heads + 6 * inner
        backward = 24 * wide + 4 * heads + 10 * inner
    else:  # norms in fp32, and a call for every operation
        forward = 20 * wide + 24 * model.norms + 18 * heads + 10 * inner
        backward = 24 * wide + 34 * model.norms + 18 * heads + 18 * inner
    return forward + states, backward + states


def _exchange(model: ModelSize, training: Training, sheet: DataSheet, spread: Spread, attention: float) -> float:
    """Messages of layers. Blocks of a ring travel next to attention, which hides them if it takes longer. Nothing hides
    heads and states."""
    if training.burst_size == 1:
        return 0.0
    inside = LINK * sheet.link
    heads, heads_across, ring, ring_across = (model.attending * size for size in sent_bytes(model, training, spread))
    link = BETWEEN_HOSTS if training.burst_size > spread.ranks_per_host else inside
    alone = heads / inside + heads_across / BETWEEN_HOSTS + recurrent_bytes(model, training, spread) / link
    return alone + max(0.0, ring / inside - attention, ring_across / BETWEEN_HOSTS - attention)


def _sharded_bytes(model: ModelSize, training: Training) -> float:
    times = 2 if training.lora else 3
    return times * _whole_bytes(model, training)


def _whole_bytes(model: ModelSize, training: Training) -> float:
    """Bytes of all weights of the language model, as they are gathered."""
    return 2.0 * (model.weights - model.unused) - training.saved(model)


def _sharding(model: ModelSize, training: Training, link: float, computing: float) -> float:
    """Messages of weights and gradients, but for what computation hides."""
    total = 2.0 * training.number * training.trained(model)  # gradients as they are, to be added and to come back
    if training.shards > 1:
        total = _sharded_bytes(model, training)
    sending = total * (training.gpus - 1) / training.gpus / link
    return sending - HIDDEN * min(sending, computing)
