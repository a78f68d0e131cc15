"""Seconds of a training step: attention by `cost.py`, and the rest by counted operations and bytes."""

from dataclasses import dataclass

from ..config import Schedule
from ..errors import ConfigError
from .balance import assign
from .choose import choose
from .cost import Cost, estimate
from .machine import Machine
from .mask import Mask
from .model import ModelSize, Training
from .sharding import cut
from .traffic import Shapes
from .work import Layer

_ADAMW = 8  # times that a step reads or writes a trained weight's number: gradient norm, p, g, m and v; then p, m and v


@dataclass(frozen=True)
class StepEstimate:
    """Where the seconds of a step go, on the rank with the most attention.

    Args:
        attention_s (`float`): Attention, without what it waits for.
        products_s (`float`): Products of matrices, those of the head and those computed again included.
        elementwise_s (`float`): Norms, rotary positions, activations, additions and adapters, which wait for memory.
        exchange_s (`float`): Messages with nothing beside them, and by how much others slow down what is beside them.
        optimizer_s (`float`): The update of the weights.
        tokens (`int`): Of one GPU.
        flops (`float`): Operations of one GPU as model FLOPs utilisation counts them.
        schedule ([`Schedule`]): How attention is spread, in the layers that see the most.
    """

    attention_s: float
    products_s: float
    elementwise_s: float
    exchange_s: float
    optimizer_s: float
    tokens: int
    flops: float
    schedule: Schedule

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return self.attention_s + self.products_s + self.elementwise_s + self.exchange_s + self.optimizer_s

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.tokens / self.total_s

    def mfu(self, machine: Machine) -> float:
        """Model FLOPs utilisation: the share of the machine's peak; 0 if that is not known."""
        return self.flops / self.total_s / machine.peak if machine.peak else 0.0


def masks_of(model: ModelSize, training: Training) -> list[tuple[float, Mask]]:
    """The layers of each kind, those that see the most first: how many, and their mask."""
    documents = training.documents or (0, training.length)
    masks = [(count, pattern.mask(training.length, documents)) for pattern, count in model.patterns]
    return sorted(masks, key=lambda entry: -entry[1].pairs)


def attention_costs(model: ModelSize, training: Training, machine: Machine) -> list[tuple[float, Schedule, Cost]]:
    """The layers of each kind, as [`masks_of`] has them: how many, their schedule and what one of them costs."""
    ranks, costs = training.burst_size, []
    shapes = Shapes(model.q_heads, model.kv_heads, model.head_dim, model.value_dim, 2, 4)
    masks = masks_of(model, training)
    owners = assign(tuple(mask for _, mask in masks), ranks, weights=tuple(max(1, round(count)) for count, _ in masks))
    for count, mask in masks:
        layer = Layer((mask,), cut(training.length, owners), shapes)
        per_host = min(machine.ranks_per_host, ranks)
        schedule = choose(layer.masks, layer.sharding, model.q_heads, model.kv_heads, per_host).schedule
        costs.append((count, schedule, estimate(schedule, layer, machine)))
    return costs


def estimate_step(model: ModelSize, training: Training, machine: Machine) -> StepEstimate:
    """Predicts a step.

    Args:
        model ([`ModelSize`]): What is trained.
        training ([`Training`]): How.
        machine ([`Machine`]): On what.
    """
    costs = attention_costs(model, training, machine)
    kernels = sum(count * (cost.kernels_s + cost.other_s) for count, _, cost in costs)
    masks = masks_of(model, training)
    repeated = sum(
        count * cost.forward_s * _again(mask, training)
        for (count, mask), (_, _, cost) in zip(masks, costs, strict=True)
    )
    multiplying = products(model, training) / machine.products
    elementwise = _touched(model, training) / machine.memory_bandwidth
    beside = kernels + multiplying + elementwise
    exposed = sum(count * cost.exposed_s for count, _, cost in costs) + _sharding(model, training, machine, beside)
    trained = training.trained(model)
    pairs = sum(count * mask.pairs for count, mask in masks)
    return StepEstimate(
        attention_s=kernels + repeated,
        products_s=multiplying,
        elementwise_s=elementwise,
        exchange_s=exposed,
        optimizer_s=_ADAMW * training.number * trained / training.shards / machine.memory_bandwidth,
        tokens=training.tokens,
        flops=model.flops(training.length, pairs, 0.0 if training.lora else 1.0) / training.burst_size,
        schedule=costs[0][1],
    )


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
    documents = (*(bound for bound in mask.documents if bound < length), length)
    return Mask(length, True, mask.window, documents).pairs / mask.pairs


def products(model: ModelSize, training: Training) -> float:
    """Operations of products of matrices on one GPU. A checkpointed layer computes its products again but for the last
    one, whose result only an adapter behind it needs."""
    layers, last = model.used - model.head, model.layers * model.hidden * model.inner
    passes = 2 if training.lora else 3  # frozen weights need no gradient
    again = layers - (0 if training.lora else last) if training.checkpointing else 0
    adapters = 3 * training.lora * model.adapted
    return 2.0 * training.tokens * (passes * model.used + again + adapters)


def _touched(model: ModelSize, training: Training) -> float:
    """Bytes that a GPU reads and writes beside products and attention. Each call reads its inputs and writes its
    outputs: for each token and layer two norms, two additions, rotary positions, SwiGLU."""
    wide, heads, inner = model.hidden, model.queries + model.keys, model.inner
    if training.fused:
        forward, backward = 20 * wide + 4 * heads + 6 * inner, 24 * wide + 4 * heads + 10 * inner
    else:  # norms in fp32, and a call for every operation
        forward, backward = 68 * wide + 18 * heads + 10 * inner, 92 * wide + 18 * heads + 18 * inner
    passes = 1 + training.checkpointing
    total = model.layers * (passes * forward + backward)
    if training.lora:  # read for the adapter; made, scaled and added
        total += (passes + 1) * 8 * model.adapted
    if training.casts:  # to fp32 and back
        total += (passes + 1) * 12 * model.adapter_inputs
    # FSDP copies gathered weights into place, and gradients to where they are sent from
    copies = 0 if training.shards == 1 else 2 * 2 * (2 * model.weights + (0 if training.lora else model.weights))
    return training.tokens * total + copies


def _sharding(model: ModelSize, training: Training, machine: Machine, beside: float) -> float:
    """Seconds by which messages of weights and gradients make a step longer: what does not fit beside computation, the
    first and the last unit, and what they take from kernels beside them."""
    if training.gpus == 1:
        return 0.0
    link = machine.between_hosts if training.gpus > machine.ranks_per_host else machine.p2p
    away = 2.0 * (training.gpus - 1) / training.gpus  # bytes that travel of a weight in bf16, in one direction
    if training.shards == 1:  # gradients as they are, to be added and to come back
        total = away * training.number * training.trained(model)
        ends = total / model.layers
    else:
        table = model.vocabulary * model.hidden
        total = away * (2 * model.weights + (0 if training.lora else model.weights))
        ends = away * 2 * (table + (model.used - model.head) / model.layers)
    seconds = link.seconds(total)
    return max(0.0, seconds - beside) + link.drag * min(seconds, beside) + link.seconds(ends)
