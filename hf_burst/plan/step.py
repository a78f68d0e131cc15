"""Seconds of a training step: attention by `cost.py`, and the rest by counted operations and bytes."""

from dataclasses import dataclass
from functools import lru_cache

from ..config import Chunking, Schedule
from ..errors import ConfigError
from .balance import assign
from .choose import choose
from .cost import Cost, estimate
from .cuts import Hybrid, cheapest_cut
from .machine import Machine
from .mask import Mask
from .model import ModelSize, Training
from .recurrence import RecurrenceChoice, RecurrenceCost, RecurrentSize, recurrence_cost
from .segments import Segments
from .sharding import cut
from .traffic import Shapes
from .work import Layer

_ADAMW = 8  # times that a step reads or writes a trained weight's number: gradient norm, p, g, m and v; then p, m and v


@dataclass(frozen=True)
class StepEstimate:
    """Where the seconds of a step go, on the rank with the most attention.

    Args:
        attention_s (`float`): Attention, without what it waits for.
        recurrence_s (`float`): Recurrent layers beside their projections, with what they wait for.
        products_s (`float`): Products of matrices, those of the head and those computed again included.
        elementwise_s (`float`): Norms, rotary positions, activations, additions and adapters, which wait for memory.
        exchange_s (`float`): Messages with nothing beside them, and by how much others slow down what is beside them.
        host_s (`float`): Copies to and from the host that take longer than the layers beside which they run.
        optimizer_s (`float`): The update of the weights.
        tokens (`int`): Of one GPU.
        flops (`float`): Operations of one GPU as model FLOPs utilisation counts them.
        schedule ([`Schedule`], *optional*): How attention is spread, in the layers that see the most; `None` without
            attention.
        laid ([`LaidOut`]): How the batch is cut, and what its layers cost.
    """

    attention_s: float
    recurrence_s: float
    products_s: float
    elementwise_s: float
    exchange_s: float
    host_s: float
    optimizer_s: float
    tokens: int
    flops: float
    schedule: Schedule | None
    laid: "LaidOut"

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        layers = self.attention_s + self.recurrence_s + self.products_s + self.elementwise_s
        return layers + self.exchange_s + self.host_s + self.optimizer_s

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


@dataclass(frozen=True)
class LaidOut:
    """How a batch is cut over the ranks, and what one layer of each kind costs.

    Args:
        chunking (`str`): The name of the cut, as in [`BurstConfig`].
        attention (`tuple[tuple[float, Schedule, Cost], ...]`): Layers with attention of each kind, as [`masks_of`] has
            them: how many, their schedule and what one of them costs.
        recurrence (`tuple[tuple[RecurrentSize, RecurrenceCost], ...]`): Recurrent layers of each kind.
        choice ([`RecurrenceChoice`], *optional*): How these pass what they know; `None` without them.
    """

    chunking: Chunking
    attention: tuple[tuple[float, Schedule, Cost], ...]
    recurrence: tuple[tuple[RecurrentSize, RecurrenceCost], ...] = ()
    choice: RecurrenceChoice | None = None


def lay_out(model: ModelSize, training: Training, machine: Machine) -> LaidOut:
    """The cut that a step takes, and what its layers cost, whatever stays in memory."""
    sizes = training.length, training.gpus, training.burst_size, training.documents
    return _lay_out(model, Training(*sizes, head_groups=training.head_groups), machine)


@lru_cache(maxsize=64)
def _lay_out(model: ModelSize, training: Training, machine: Machine) -> LaidOut:
    ranks, masks = training.burst_size, masks_of(model, training)
    shapes = Shapes(model.q_heads, model.kv_heads, model.head_dim, model.value_dim, 2, 4)
    documents = (training.documents or (0, training.length),)
    chunking: Chunking = "balanced"
    recurrence, choice = [], None
    if model.recurrent:
        patterns = tuple((pattern, max(1, round(count))) for pattern, count in model.patterns)
        priced = cheapest_cut(documents, patterns, ranks, Hybrid(model.recurrent, shapes if masks else None, machine))
        chunking, sharding, choice = priced.chunking, priced.sharding, priced.recurrence
        segments = Segments(sharding, documents)
        recurrence = [(size, recurrence_cost(choice.way, size, segments, machine)) for size in model.recurrent]
    else:
        counts = tuple(max(1, round(count)) for count, _ in masks)
        sharding = cut(training.length, assign(tuple(mask for _, mask in masks), ranks, weights=counts))
    attention = []
    for count, mask in masks:
        layer = Layer((mask,), sharding, shapes)
        schedule = choose(layer, machine).schedule
        cost = estimate(schedule, layer, machine, head_groups=training.head_groups)
        attention.append((count, schedule, cost))
    return LaidOut(chunking, tuple(attention), tuple(recurrence), choice)


def estimate_step(model: ModelSize, training: Training, machine: Machine) -> StepEstimate:
    """Predicts a step.

    Args:
        model ([`ModelSize`]): What is trained.
        training ([`Training`]): How.
        machine ([`Machine`]): On what.
    """
    laid = lay_out(model, training, machine)
    costs = laid.attention
    kernels = sum(count * (cost.kernels_s + cost.other_s) for count, _, cost in costs)
    masks = masks_of(model, training)
    repeated = (1 + training.repeated(model)) * sum(
        count * cost.forward_s * _again(mask, training)
        for (count, mask), (_, _, cost) in zip(masks, costs, strict=True)
    )
    multiplying = products(model, training) / machine.products
    elementwise = _touched(model, training) / machine.memory_bandwidth
    again = 1 + training.repeated(model) if training.checkpointing else 0
    recurrence = sum(size.layers * (cost.total_s + again * cost.forward_s) for size, cost in laid.recurrence)
    beside = kernels + recurrence + multiplying + elementwise
    exposed = sum(count * cost.exposed_s for count, _, cost in costs) + _sharding(model, training, machine, beside)
    trained = training.trained(model)
    pairs = sum(count * mask.pairs for count, mask in masks)
    return StepEstimate(
        attention_s=kernels + repeated,
        recurrence_s=recurrence,
        products_s=multiplying,
        elementwise_s=elementwise,
        exchange_s=exposed,
        host_s=_host(model, training, machine, beside + repeated + exposed),
        optimizer_s=_ADAMW * training.number * trained / training.shards / machine.memory_bandwidth,
        tokens=training.tokens,
        flops=model.flops(training.length, pairs, 0.0 if training.lora else 1.0) / training.burst_size,
        schedule=costs[0][1] if costs else None,
        laid=laid,
    )


def _host(model: ModelSize, training: Training, machine: Machine, computing: float) -> float:
    """Seconds of copies to and from the host beyond those of the layers. About a third of a layer's time is its forward
    pass, in which it leaves, and the rest its backward pass, in which the one before it comes. Attention comes twice
    where a layer runs once more for the input of the next one, in less time than its products take."""
    kept_input, kept_attention = training.kept(model)
    leaving, layer = training.offloaded(model), computing / model.layers
    with_input = training.inputs(leaving, model)

    def beyond(size: float) -> float:
        copied = size / machine.host_bandwidth
        return max(0.0, copied - layer / 3) + max(0.0, copied - 2 * layer / 3)

    alone = 2.0 * training.tokens * (model.used - model.head) / model.layers / machine.products
    twice = training.repeated(model) * leaving * max(0.0, kept_attention / machine.host_bandwidth - alone)
    return with_input * beyond(kept_input + kept_attention) + (leaving - with_input) * beyond(kept_attention) + twice


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
    one; so does an MLP in tiles without checkpoints."""
    layers, last = model.used - model.head, model.layers * model.hidden * model.inner
    passes = 2 if training.lora else 3  # frozen weights need no gradient
    repeated = layers if training.checkpointing else 3 * last if training.tiles else 0  # all of it, or MLPs
    again = max(0, repeated - last) + training.repeated(model) * layers
    adapters = 3 * training.lora * model.adapted
    return 2.0 * training.tokens * (passes * model.used + again + adapters)


def _touched(model: ModelSize, training: Training) -> float:
    """Bytes that a GPU reads and writes beside products and attention. Each call reads its inputs and writes its
    outputs: for each token and layer two norms, two additions, rotary positions, SwiGLU."""
    wide, inner = model.hidden, model.inner
    recurrent = sum(size.layers * size.elements for size in model.recurrent)
    heads, states = model.attending * (model.queries + model.keys) / model.layers, 4 * recurrent / model.layers
    if training.fused:
        forward, backward = 20 * wide + 4 * heads + 6 * inner, 24 * wide + 4 * heads + 10 * inner
    else:  # norms in fp32, and a call for every operation
        forward, backward = 68 * wide + 18 * heads + 10 * inner, 92 * wide + 18 * heads + 18 * inner
    forward, backward = forward + states, backward + states
    passes = 1 + training.checkpointing + training.repeated(model)
    total = model.layers * (passes * forward + backward)
    if training.lora:  # inputs read, and outputs added up; their gradients likewise, and once more for both weights
        total += (3 * passes + 5) * model.adapted
    # FSDP copies gathered weights into place, and gradients to where they are sent from
    weights = model.weights - model.unused
    copies = 0 if training.shards == 1 else 2 * 2 * (2 * weights + (0 if training.lora else weights))
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
        weights = model.weights - model.unused
        total = away * (2 * weights + (0 if training.lora else weights))
        ends = away * 2 * (table + (model.used - model.head) / model.layers)
    seconds = link.seconds(total)
    return max(0.0, seconds - beside) + link.drag * min(seconds, beside) + link.seconds(ends)
