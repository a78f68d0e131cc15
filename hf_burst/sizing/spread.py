"""How a batch is spread over the ranks that share it, and the bytes that they exchange for a layer."""

from dataclasses import dataclass
from functools import lru_cache

from ..config import Schedule
from ..plan import (
    RecurrentSize,
    Segments,
    Shapes,
    choose_recurrence,
    choose_schedule,
    head_slices,
    imbalance,
    ring_bytes,
    sharding_for,
)
from ..plan.recurrence import Way
from .model import ModelSize, Training


@dataclass(frozen=True)
class Spread:
    """How a batch is spread.

    Args:
        schedule ([`Schedule`]): How attention is spread.
        ranks_per_host (`int`): Ranks of one host that share the batch.
        hosts (`int`): Hosts between which blocks of a ring cross once; 1 where heads are exchanged between hosts.
        slices (`int`): Groups of the heads that are computed one after another.
        imbalance (`float`): By how much the attention of the busiest rank is above the mean; 0.02 is 2 %.
        recurrence (`str`, *optional*): What recurrent layers exchange: `"states"` of runs of tokens, or `"heads"` for
            tokens; `None` without such layers.
        slots (`int`): States of each recurrent layer that the rank with the most of them exports.
    """

    schedule: Schedule
    ranks_per_host: int
    hosts: int
    slices: int
    imbalance: float
    recurrence: Way | None
    slots: int

    def exchanges_heads(self, size: RecurrentSize) -> bool:
        """Whether recurrent layers of a kind exchange heads, or channels. Kernels of Mamba1 take no states."""
        return size.kind == "selective" or (self.recurrence == "heads" and size.kind != "convolution")


@lru_cache(maxsize=64)
def spread_of(model: ModelSize, training: Training, ranks_per_host: int) -> Spread:
    """How the engine spreads a batch over the ranks that share it.

    Raises:
        ShardingError: If the sequence is too short for them.
    """
    documents, parents, ranks = training.bounds, training.parents, training.burst_size
    layers = {pattern: max(1, round(count)) for pattern, count in model.patterns}
    together = (parents,) if parents else ()
    sharding = sharding_for((documents,), layers, ranks, "balanced", hybrid=model.recurrent, parents=together)
    near = min(ranks, ranks_per_host)
    schedule, slices, uneven = Schedule(), 1, 0.0
    if layers:
        masks = list(map(training.mask, layers))
        widest = max(masks, key=lambda mask: mask.pairs)
        schedule = choose_schedule((widest,), sharding, _shapes_of(model), ranks_per_host).schedule
        heads = model.q_heads, model.kv_heads
        slices = head_slices(schedule, heads, documents[-1] // ranks, True, training.head_groups)
        uneven = imbalance(masks, sharding.owners, tuple(layers.values()), sharding.boundaries)
    recurrence: Way | None = None
    slots = 0
    if model.recurrent:
        segments = Segments(sharding, (documents,), together)
        recurrence, _ = choose_recurrence(model.recurrent, segments)
        slots = segments.most_slots
    return Spread(schedule, near, schedule.hosts(ranks, near), slices, uneven, recurrence, slots)


def _shapes_of(model: ModelSize) -> Shapes:
    """The heads of the model, which computes in bf16 and sums in fp32."""
    return Shapes(model.q_heads, model.kv_heads, model.head_dim, model.value_dim, 2, 4)


def pairs_of(model: ModelSize, training: Training) -> float:
    """The (query, key) pairs that are admitted, added up over the layers."""
    return sum(count * training.mask(pattern).pairs for pattern, count in model.patterns)


def sent_bytes(model: ModelSize, training: Training, spread: Spread) -> tuple[float, float, float, float]:
    """Bytes that a rank sends for an attention layer, forward and backward: to exchange heads, on its host and to other
    hosts, and round the ring, on its host and to other hosts."""
    ulysses = spread.schedule.ulysses
    tokens = training.tokens
    ring = training.burst_size // ulysses
    near = min(ulysses, spread.ranks_per_host)
    heads = tokens * (2 * 2 * (2 * model.queries + 2 * model.keys) / ulysses)  # q, k, v, out; dO, dQ, dK, dV
    block = tokens * ring_bytes(spread.schedule, _shapes_of(model))
    if near < ulysses:
        within = 0.0
        crossings = ring - 1
    else:
        within = (ring / spread.hosts - 1) * spread.hosts
        crossings = spread.hosts - 1
    return heads * (near - 1), heads * (ulysses - near), block * within, block * float(crossings)


def recurrent_bytes(model: ModelSize, training: Training, spread: Spread) -> float:
    """Bytes that a rank sends for all recurrent layers, forward and backward: states of its runs of tokens, or channels
    for tokens where kernels take no states."""
    ranks = training.burst_size
    total = 0.0
    for size in model.recurrent:
        if spread.exchanges_heads(size):
            sent = training.tokens * (size.exchanged(ranks) / ranks + size.shared_bytes)
        else:
            sent = spread.slots * (size.slot_bytes + size.halo_bytes)
        total += 2 * size.layers * sent * (ranks - 1)
    return total


def buffer_bytes(model: ModelSize, training: Training, spread: Spread, backward: bool = True) -> float:
    """Bytes of the buffers through which ranks exchange what a layer needs, in symmetric memory: those of the backward
    pass, which are the most, or of attention in a forward pass alone. Those of other transports are smaller."""
    ranks, ulysses, found = training.burst_size, spread.schedule.ulysses, 2 * model.queries
    block = 2 * 2 * model.keys
    inputs = found + block  # bytes of a token: q, k and v
    row = 0.0
    if ulysses > 1:  # two slices in turn of q, k, v and dO, which are exchanged and packed; and one of what is made
        row += 2 * min(2, spread.slices) * (inputs + backward * found) + (inputs if backward else found)
    if ranks > ulysses and not backward:  # two blocks that come, and the one that peers read; between hosts two more
        row += (3 if spread.hosts == 1 else 5) * block
    elif ranks > ulysses:
        wide = 2 if ranks == 2 else 4  # gradients as the kernel made them, or sums in fp32
        rotating = 2 * model.keys * wide
        if spread.schedule.ring == "burst":
            rotating = max(4 * model.queries + 8 * model.q_heads, wide * model.queries)
        # two blocks that come and three of gradients; sums in fp32 and what is made of them; what peers read
        row += 5 * rotating + 3 * inputs + 4 * max(model.queries, model.keys)
        if spread.hosts > 1:  # the block that is held and the one that crosses, with the sums of either
            row += 2 * 2 * model.keys * (2 + 4)
    row += 4 * model.q_heads * backward  # delta
    attention = training.tokens * row / spread.slices if model.patterns else 0.0
    recurrent = [
        2 * training.tokens * (size.exchanged(ranks) + ranks * size.shared_bytes)
        for size in model.recurrent
        if spread.exchanges_heads(size) and ranks > 1 and backward
    ]
    return max([attention, *recurrent])


def state_bytes(model: ModelSize, training: Training, spread: Spread) -> float:
    """Bytes of the states of all ranks that recurrent layers keep: one of each kind, if they checkpoint."""
    kept = training.burst_size * spread.slots
    total = 0.0
    for size in model.recurrent:
        if not spread.exchanges_heads(size):
            total += (1 if training.checkpointing else size.layers) * kept * size.slot_bytes
    return total
