"""What recurrent layers cost over ranks, and how they pass what they know: by the states of runs of tokens, which are
gathered or scanned, or by an exchange of tokens for heads. One way is chosen for all layers of a pass."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from .machine import Link, Machine
from .segments import Segments
from .traffic import Pass

RuleKind = Literal["delta", "scan", "selective", "convolution"]
Way = Literal["states", "scanned states", "heads"]
Recurrence = Literal["auto", "states", "heads"]  # a way that is asked for, or the choice of one

SCANNED_FROM = 16  # ranks, for states of layers without prices
_CHUNK = 64  # tokens that a kernel treats as one product of matrices, as fla's kernels do
_WIDE = 4  # bytes of a number of a state, and of the logarithm of a decay
_PIECE_CALLS = 4  # calls that put a piece's output back, and what a state adds to it, forward
_STEP_CALLS = 5  # calls around the messages of a step of a scan
_SLOT_CALLS = 3  # calls that advance a state by a slot, forward
_HALO_CALLS = 12  # calls that find the first outputs of pieces anew, forward
_READ = 5  # times that a number of further columns is read or written, forward, as measured
_SCANNED = 4  # the same of what a scan finds beside its kernel, by its calls
_FULL_PRECISION = 10  # how many times longer products of fp32 take
_RULE_COPIES = 15  # of an output in bf16 that a delta rule's backward pass makes, with keys of 128, as measured
_MESSAGES = {"delta": 2, "scan": 2, "selective": 4}  # that come and leave, where heads are exchanged


@dataclass(frozen=True)
class RecurrentSize:
    """The recurrent layers of one kind in a model.

    Args:
        kind (`str`): `"delta"` for delta rules, `"scan"` for Mamba2, `"selective"` for Mamba1, whose channels are
            always exchanged, and `"convolution"` for layers that only convolve.
        layers (`int`): How many there are.
        heads (`int`): Heads of values; for Mamba1 channels.
        keys, values (`int`): Rows and columns of the state of a head: sizes of its keys and values. For Mamba2 the
            state size and the head size; for Mamba1 the state size and 1.
        key_heads (`int`): Heads of queries and keys; groups of B and C.
        decays (`int`, defaults to 1): Decays of a head in one token.
        channels (`int`, defaults to 0): Channels that are convolved.
        reach (`int`, defaults to 0): How many earlier tokens the convolution sees.
        norm_copies (`tuple[int, int]`, defaults to `(9, 7)`): Copies of a delta rule's gated output in bf16 that its
            norm keeps, and further ones in its backward pass: those of Transformers' norm, which are in fp32 or bf16.
        itemsize (`int`, defaults to 2): Bytes of an element.
    """

    kind: RuleKind
    layers: int
    heads: int = 0
    keys: int = 0
    values: int = 0
    key_heads: int = 0
    decays: int = 1
    channels: int = 0
    reach: int = 0
    norm_copies: tuple[int, int] = (9, 7)
    itemsize: int = 2

    def __str__(self) -> str:
        heads = {
            "delta": f"{self.heads} states of {self.keys} x {self.values}",
            "scan": f"{self.heads} states of {self.keys} x {self.values}",
            "selective": f"{self.heads} channels of {self.keys}",
        }
        convolved = f"{self.channels} channels convolved over {self.reach + 1} tokens"
        layers = "layer" if self.layers == 1 else "layers"
        return f"{self.layers} recurrent {layers} ({self.kind}) of {heads.get(self.kind, convolved)}"

    @property
    def ways(self) -> tuple[Way, ...]:
        """How its layers can pass what they know. Mamba1's kernels take no states, and a convolution has none."""
        return {"selective": ("heads",), "convolution": ("states",)}.get(self.kind, get_args(Way))

    @property
    def slot_bytes(self) -> int:
        """What a run of tokens hands on: for each head its state and the transition, which is `K x K` for delta rules
        and one number for Mamba2."""
        transition = {"delta": self.keys * self.keys, "scan": 1}.get(self.kind)
        return 0 if transition is None else self.heads * (self.keys * self.values + transition) * _WIDE

    @property
    def halo_bytes(self) -> int:
        """The last tokens of a run, which the convolution of the next one sees."""
        return self.channels * self.reach * self.itemsize

    def exchanged(self, ranks: int) -> tuple[int, int]:
        """Bytes of a token that go to other ranks, and that come back, if so many ranks exchange heads. Heads of zeros
        are added where the ranks do not divide them, and keys are repeated where ranks would have to share them."""

        def padded(heads: int) -> int:
            return heads + -heads % ranks

        outputs = padded(self.heads) * self.values * self.itemsize
        key_heads = self.heads if self.key_heads % ranks else self.key_heads
        keys = 2 * padded(key_heads) * self.keys * self.itemsize
        if self.kind == "delta":
            return keys + outputs + padded(self.heads) * (self.decays * _WIDE + self.itemsize), outputs
        if self.kind == "scan":
            return keys + outputs + padded(self.heads) * self.itemsize, outputs
        return (3 * outputs, outputs) if self.kind == "selective" else (0, 0)

    @property
    def shared_bytes(self) -> int:
        """What every rank needs of a token beside its heads: Mamba1's B and C."""
        return 2 * self.keys * self.itemsize if self.kind == "selective" else 0

    @property
    def rule_flops(self) -> float:
        """Operations of a kernel for a token, forward: products with the state, and inside of chunks."""
        return self._flops(self.values) if self.kind != "convolution" else 0.0

    @property
    def column_flops(self) -> float:
        """Those that find a transition beside: as many more columns as there are keys (delta rules)."""
        return self._flops(self.values + self.keys) - self._flops(self.values) if self.kind == "delta" else 0.0

    def state_flops(self, direction: Pass) -> float:
        """Those of a pass that finds states, or their gradients, and no outputs (delta rules). Backward, queries and
        gradients of outputs are multiplied, too."""
        return (6.0 if direction == "backward" else 4.0) * self.heads * self.keys * self.values

    @property
    def transition_flops(self) -> float:
        """Those of one that finds transitions (delta rules)."""
        return 4.0 * self.heads * self.keys**2

    def _flops(self, columns: int) -> float:
        state, chunk = self.keys * columns, 2 * _CHUNK
        if self.kind == "delta":  # products of queries, keys and their transform; of values; and an inverse
            return self.heads * (6 * state + chunk * (3 * self.keys + 2 * columns) + 2 * _CHUNK**2 / 3)
        if self.kind == "scan":
            return self.heads * (4 * state + chunk * columns) + self.key_heads * chunk * self.keys
        return self.heads * 9 * state

    @property
    def token_flops(self) -> float:
        """Operations of a token, forward, as model FLOPs utilisation counts them: the recurrence, token by token.
        A delta rule reads the state twice and writes it once; a scan reads and writes it. Weights of projections and
        convolutions are counted with all others."""
        products = {"delta": 3, "convolution": 0}.get(self.kind, 2)
        return 2.0 * products * self.heads * self.keys * self.values

    @property
    def elements(self) -> int:
        """Elements of a token that the layer keeps beside those of its projections' input: what is convolved, before
        and after, the output of the rule, its gate, and the norm of both. A delta rule keeps normed queries and keys,
        values, decays and inverses of chunks instead of what was convolved."""
        outputs = self.heads * self.values
        if self.kind != "delta":
            return 2 * self.channels + 3 * outputs
        return self.channels + self._rule_elements + self.norm_copies[0] * outputs

    @property
    def backward_elements(self) -> int:
        """Those that are there in its backward pass, with gradients: while the norm of a delta rule's output runs, or
        the rule."""
        outputs = self.heads * self.values
        if self.kind != "delta":
            return self.elements
        return self.channels + max(self._rule_elements + sum(self.norm_copies) * outputs, _RULE_COPIES * outputs)

    @property
    def _rule_elements(self) -> int:
        """What a delta rule keeps of its inputs."""
        return 2 * self.key_heads * self.keys + self.heads * (self.values + _CHUNK + 2 * self.decays)


@dataclass(frozen=True)
class RecurrenceCost:
    """What one layer costs on the busiest rank.

    Args:
        forward_s, backward_s (`float`): Seconds of either pass, without projections.
        rule_s (`float`): Seconds of both passes in which the model's own functions run, if all tokens lay here.
        sent_bytes (`int`): Bytes of states, or of exchanged heads, that leave the rank in both passes.
        halo_bytes (`int`): Those of halos.
        memory_bytes (`int`): Most memory beside inputs, outputs and gradients.
        kept_bytes (`int`): What of it stays until the backward pass: slots of all ranks, or after a scan what comes
            to this rank and what it does to that.
    """

    forward_s: float
    backward_s: float
    rule_s: float
    sent_bytes: int
    halo_bytes: int
    memory_bytes: int
    kept_bytes: int

    @property
    def total_s(self) -> float:
        """Seconds of both passes."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class RecurrenceChoice:
    """How the recurrent layers of a model pass what they know, and why, as a part of a sentence."""

    way: Way
    reason: str
    seconds: float  # of all recurrent layers, both passes


def recurrence_cost(way: Way, size: RecurrentSize, segments: Segments, machine: Machine) -> RecurrenceCost:
    """Predicts a layer.

    Args:
        way (`str`): `"states"`, which are gathered, `"scanned states"` or `"heads"`; kinds that have one way take it.
        size ([`RecurrentSize`]): The layer.
        segments ([`Segments`]): Those of all ranks.
        machine ([`Machine`]): On what.
    """
    way = way if way in size.ways else size.ways[0]
    passes = [_PassCost(way, size, segments, machine, direction) for direction in get_args(Pass)]
    forward, backward = passes
    return RecurrenceCost(
        forward_s=forward.seconds,
        backward_s=backward.seconds,
        rule_s=forward.plain + backward.plain,
        sent_bytes=round(forward.sent + backward.sent),
        halo_bytes=round(forward.halos + backward.halos),
        memory_bytes=round(max(forward.memory, backward.memory)),
        kept_bytes=round(forward.kept),
    )


def choose_recurrence(
    sizes: Sequence[RecurrentSize], segments: Segments, machine: Machine, asked: Recurrence = "auto"
) -> RecurrenceChoice:
    """The way of all recurrent layers of a model, the same on all ranks: the one that takes them the least time
    together.

    Args:
        sizes (sequence of [`RecurrentSize`]): All of its kinds.
        segments ([`Segments`]): Those of all ranks.
        machine ([`Machine`]): On what.
        asked (`str`, defaults to `"auto"`): As in [`BurstConfig`].
    """
    ways: dict[Way, float] = {way: _total(way, sizes, segments, machine) for way in get_args(Way)}
    if asked != "auto":
        best = min((way for way in ways if (way == "heads") == (asked == "heads")), key=ways.__getitem__)
        return RecurrenceChoice(best, "asked for", ways[best])
    able = [way for way in ways if any(way in size.ways for size in sizes)]
    if segments.sharding.ranks == 1:
        return RecurrenceChoice(able[0], "one rank exchanges nothing", ways[able[0]])
    if not any(len(size.ways) > 1 for size in sizes):
        kinds = {"selective": "Mamba1 always exchanges channels", "convolution": "convolutions pass their last tokens"}
        reason = ", ".join(kinds[size.kind] for size in sizes)
        return RecurrenceChoice(able[-1], reason, ways[able[-1]])
    best = min(able, key=ways.__getitem__)
    *listed, last = (f"by {way} {seconds * 1e3:.1f} ms" for way, seconds in ways.items())
    reason = f"recurrent layers are predicted to take {', '.join(listed)} and {last}, forward and backward"
    return RecurrenceChoice(best, reason, ways[best])


def _total(way: Way, sizes: Iterable[RecurrentSize], segments: Segments, machine: Machine) -> float:
    return sum(size.layers * recurrence_cost(way, size, segments, machine).total_s for size in sizes)


@dataclass(frozen=True)
class _Runs:
    """What the cost of passing states follows from, each of the rank with the most: tokens of pieces that open no
    document, and how many these are; tokens of pieces that hand on, that do both, and that do either; calls of the
    rule; and the longest piece."""

    later: int
    later_pieces: int
    handing: int
    both: int
    either: int
    calls: int
    longest: int


def _runs_of(segments: Segments) -> _Runs:
    ranks = []
    for rank, own in enumerate(segments.by_rank):
        later = [piece.size for piece in own if not piece.opens]
        sizes = Counter[tuple[bool, bool]]()
        for at, piece in enumerate(own):
            sizes[piece.opens, (rank, at) in segments.slots] += piece.size
        handing = sizes[True, True] + sizes[False, True]
        tokens = sum(later), len(later), handing, sizes[False, True], sizes[True, True] + sum(later)
        ranks.append((*tokens, len(sizes), max(piece.size for piece in own)))
    return _Runs(*map(max, zip(*ranks, strict=True)))


class _PassCost:
    """One pass as it adds up, in seconds and bytes. Messages wait for what they carry and are waited for."""

    def __init__(self, way: Way, size: RecurrentSize, segments: Segments, machine: Machine, direction: Pass) -> None:
        self.size, self.segments, self.machine, self.direction = size, segments, machine, direction
        self.backward = direction == "backward"
        self.times = 2 if self.backward else 1  # operations and calls of the backward pass
        self.summed = self.times if machine.device == "CPU" else 1  # gloo sums gradients on every rank
        self.ranks, self.rows = segments.sharding.ranks, len(segments.documents)
        self.tokens = self.rows * segments.sharding.most_tokens
        self.seconds = self.sent = self.halos = self.memory = self.kept = 0.0
        self.plain = self._rule(self.tokens, segments.once(_runs_of).longest)
        self._convolve()
        if size.kind != "convolution":
            self._exchange_heads() if way == "heads" else self._pass_states(scanned=way != "states")

    def _rule(self, tokens: float, longest: int, later: float = 0.0, calls: int = 1) -> float:
        """Seconds of the model's own function, of whose tokens some have columns of transitions, and of whose pieces
        this is the longest."""
        rate, size = self.machine.rule, self.size
        if size.kind == "convolution":
            return 0.0
        flops = self.times * (tokens * size.rule_flops + later * size.column_flops)
        steps = self.times * longest / _CHUNK * rate.step
        return flops / (rate.backward if self.backward else rate.forward) + steps + calls * rate.call

    def _spread(self, size: float, inside: Link) -> float:
        """Seconds in which a rank sends `size` bytes to every other one; hosts are reached at the same time."""
        near = min(self.ranks, self.machine.ranks_per_host)
        within = inside.seconds(size * (near - 1))
        return max(within, self.machine.between_hosts.seconds(size * (self.ranks - near)))

    def _touch(self, size: float, launches: float = 0.0) -> None:
        """Calls that read or write so many bytes."""
        self.seconds += self.times * (size / self.machine.memory_bandwidth + launches * self.machine.launch)

    def _multiply(self, products: float) -> None:
        """Multiplications and additions in fp32."""
        self.seconds += self.times * 2 * products / (self.machine.products / _FULL_PRECISION)

    def _gather(self, size: float) -> float:
        """A slot of so many bytes for each piece that hands on is gathered; its gradients are summed at home. The bytes
        that a rank sends."""
        slots = self.summed * self.segments.most_slots
        if not slots or not size:
            return 0.0
        self.seconds += self._spread(slots * size, self.machine.p2p)
        return slots * size * (self.ranks - 1)

    def _scan(self) -> None:
        """States go on to pieces ever further behind, with transitions unless all before is known; see
        [`Segments.hops`]. Every step waits for the rank that sends most."""
        state, per_host = self.size.heads * self.size.keys * self.size.values * _WIDE, self.machine.ranks_per_host
        total = Counter[int]()
        for step in self.segments.hops[self.direction]:
            composed, inside, outside = Counter[int](), Counter[int](), Counter[int]()
            for (rank, _), (peer, _), tensors in step:
                size = state if tensors == 1 else self.size.slot_bytes
                composed[rank] += size
                if peer != rank:
                    (inside if rank // per_host == peer // per_host else outside)[rank] += size
            total += inside + outside
            within = self.machine.p2p.seconds(max(inside.values(), default=0))
            self.seconds += max(within, self.machine.between_hosts.seconds(max(outside.values(), default=0)))
            most = max(composed.values())
            self._multiply(2 * most / _WIDE * (self.size.keys if self.size.kind == "delta" else 1))
            self._touch(0.0, _STEP_CALLS + 2 * _SLOT_CALLS * -(-most // state))
        self.sent = max(total.values(), default=0)

    def _convolve(self) -> None:
        """The convolution, and its halos."""
        if self.size.channels:
            self.halos = self._gather(self.size.halo_bytes)
            self._touch(2 * self.tokens * self.size.channels * self.size.itemsize, _HALO_CALLS)

    @property
    def _in_two_passes(self) -> bool:
        """Whether flash-linear-attention's kernels find states and transitions before they find outputs: on GPUs, with
        one decay for each head and keys of their sizes. Whether they are installed is not asked."""
        small = self.size.kind == "delta" and self.size.decays == 1 and self.size.keys <= 256
        return self.machine.device != "CPU" and small

    def _pass_states(self, scanned: bool) -> None:
        """Every rank treats its own pieces; of those that open no document the transitions are found beside."""
        size, runs, slots = self.size, self.segments.once(_runs_of), len(self.segments.slots)
        later, longest, reading = runs.later, runs.longest, _PIECE_CALLS * runs.later_pieces
        state, width = size.heads * size.keys * size.values, size.heads * size.values
        if self._in_two_passes:  # the backward pass has its transitions from the forward pass
            flops = (runs.either if self.backward else runs.handing) * size.state_flops(self.direction)
            flops += 0 if self.backward else runs.both * size.transition_flops
            rate = self.machine.rule.state_gradients if self.backward else self.machine.rule.states
            self.seconds += self._rule(self.tokens, longest) + flops / rate
        elif size.kind == "delta":
            columns = later * size.heads * (size.keys + size.values) * size.itemsize
            self.seconds += self._rule(self.tokens, longest, later, runs.calls)
            self._touch(_READ * columns, reading)
            self.memory = columns * self.times
        else:  # a state of their own in fp32 for pieces that hand on, beside the kernel's
            self.seconds += self._rule(self.tokens, longest)
            self._multiply(runs.handing * state)
            self._touch(_SCANNED * width * (runs.handing * _WIDE + later * size.itemsize), reading)
        if scanned:
            self._scan()
            incoming = runs.later_pieces * state * _WIDE
            self.kept = incoming + self.segments.most_slots * (size.slot_bytes - state * _WIDE)
            self.memory += 3 * self.segments.most_slots * size.slot_bytes  # known, as it leaves, and as it comes
        else:
            self._multiply(slots * state * (size.keys if size.kind == "delta" else 1))
            self._touch(0.0, _SLOT_CALLS * slots)
            self.sent = self._gather(state * _WIDE if self._in_two_passes and self.backward else size.slot_bytes)
            self.kept = self.ranks * self.segments.most_slots * size.slot_bytes
        self.memory += self.kept

    def _exchange_heads(self) -> None:
        """Every rank treats whole documents of some heads; tokens go there, and outputs come back."""
        size, longest = self.size, max(stop - start for row in self.segments.documents for start, stop in pairwise(row))
        share = (size.heads + -size.heads % self.ranks) / size.heads
        self.seconds += self._rule(share * self.tokens, longest)
        if self.ranks == 1:
            return
        direct = self.machine.symmetric is not None and self.ranks <= self.machine.ranks_per_host
        inside = (self.machine.symmetric if direct else None) or self.machine.p2p
        strided = self.machine.strided_bandwidth if direct else 1.0
        messages = _MESSAGES[size.kind]
        moved = self.tokens * sum(size.exchanged(self.ranks))
        self.seconds += self._spread(moved / self.ranks / strided, inside) + (messages - 1) * inside.latency
        self.seconds += (2 if direct else 4) * moved / self.machine.memory_bandwidth
        self.seconds += 4 * messages * self.machine.launch
        shared = self.summed * self.tokens * size.shared_bytes
        self.seconds += self._spread(shared, self.machine.p2p)
        self.sent = (moved / self.ranks + shared) * (self.ranks - 1)
        self.memory = 2.0 * moved + self.times * self.ranks * self.tokens * size.shared_bytes
