"""Recurrent layers over ranks: their sizes, and the rule by which they pass what they know. They pass the states at the
ends of runs of tokens, or exchange tokens for heads. One way is chosen for all layers of a pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .segments import Segments

RuleKind = Literal["delta", "scan", "selective", "convolution"]
Way = Literal["states", "heads"]

_CHUNK = 64  # tokens that a kernel treats as one product of matrices, as fla's kernels do
_WIDE = 4  # bytes of a number of a state, and of the logarithm of a decay
_RULE_COPIES = 15  # of an output in bf16 that a delta rule's backward pass makes, with keys of 128, as measured


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
        convolution_copies (`int`, defaults to 2): Copies of its channels that a delta rule's convolution keeps: its
            input, and without the package causal-conv1d what its activation is given.
        repeats_keys (`bool`, defaults to `False`): Whether a delta rule is given keys for every head of values.
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
    convolution_copies: int = 2
    repeats_keys: bool = False
    itemsize: int = 2

    def __str__(self) -> str:
        special = {
            "selective": f"{self.heads} channels of {self.keys}",
            "convolution": f"{self.channels} channels convolved over {self.reach + 1} tokens",
        }
        held = special.get(self.kind, f"{self.heads} states of {self.keys} x {self.values}")
        return f"{self.layers} recurrent layer{'s' * (self.layers != 1)} ({self.kind}) of {held}"

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

    def exchanged(self, ranks: int) -> int:
        """Bytes of a token that go to other ranks and that come back, added up, if `ranks` exchange heads. Heads of
        zeros are added where the ranks do not divide them, and keys are repeated where ranks would share them."""

        def padded(heads: int) -> int:
            return heads + -heads % ranks

        outputs = padded(self.heads) * self.values * self.itemsize
        key_heads = self.heads if self.key_heads % ranks else self.key_heads
        keys = 2 * padded(key_heads) * self.keys * self.itemsize
        if self.kind == "delta":
            return keys + 2 * outputs + padded(self.heads) * (self.decays * _WIDE + self.itemsize)
        if self.kind == "scan":
            return keys + 2 * outputs + padded(self.heads) * self.itemsize
        return 4 * outputs

    @property
    def shared_bytes(self) -> int:
        """What every rank needs of a token apart from its heads: Mamba1's B and C."""
        return 2 * self.keys * self.itemsize if self.kind == "selective" else 0

    @property
    def token_flops(self) -> float:
        """Operations of a token, forward, as model FLOPs utilisation counts them: the recurrence, token by token.
        A delta rule reads the state twice and writes it once; a scan reads and writes it. Weights of projections and
        convolutions are counted with all others."""
        products = 3 if self.kind == "delta" else 2
        return 2.0 * products * self.heads * self.keys * self.values

    @property
    def elements(self) -> int:
        """Elements of a token that the layer keeps apart from those of its projections' input: what is convolved,
        before and after, the output of the rule, its gate, and the norm of both. A delta rule keeps normed queries and
        keys, values, decays and inverses of chunks instead of what was convolved."""
        outputs = self.heads * self.values
        if self.kind != "delta":
            return 2 * self.channels + 3 * outputs
        return self.convolution_copies * self.channels + self._rule_elements + self.norm_copies[0] * outputs

    @property
    def backward_elements(self) -> int:
        """Those that are there in its backward pass, with gradients: while the norm of a delta rule's output runs, or
        the rule."""
        outputs = self.heads * self.values
        if self.kind != "delta":
            return self.elements
        convolved = self.convolution_copies * self.channels
        return convolved + max(self._rule_elements + sum(self.norm_copies) * outputs, _RULE_COPIES * outputs)

    @property
    def _rule_elements(self) -> int:
        """What a delta rule keeps of its inputs."""
        key_heads = self.heads if self.repeats_keys else self.key_heads
        return 2 * key_heads * self.keys + self.heads * (self.values + _CHUNK + 2 * self.decays)


def choose_recurrence(sizes: Sequence[RecurrentSize], segments: Segments) -> tuple[Way, str]:
    """The way of all recurrent layers of a model, the same on all ranks, and why, as a part of a sentence: states,
    unless a rank would send more bytes of them than of tokens that are exchanged for heads.

    Args:
        sizes (sequence of [`RecurrentSize`]): All of its kinds.
        segments ([`Segments`]): Those of all ranks.
    """
    ranks = segments.sharding.ranks
    free = [size for size in sizes if len(size.ways) > 1]
    if ranks == 1:
        return "states", "one rank exchanges nothing"
    if any(map(any, segments.parents)):
        return "states", "texts go on in several ways, which their states do"
    if not free:
        kinds = {"selective": "Mamba1 always exchanges channels", "convolution": "convolutions pass their last tokens"}
        ways = [way for size in sizes for way in size.ways]
        return ways[-1], ", ".join(kinds[size.kind] for size in sizes)
    tokens = len(segments.documents) * segments.sharding.most_tokens
    states = segments.most_slots * sum(size.layers * size.slot_bytes for size in free)
    heads = tokens * sum(size.layers * size.exchanged(ranks) for size in free) // ranks
    compared = f"recurrent layers send {states / 1e6:.1f} MB of states to each rank, or {heads / 1e6:.1f} MB of heads"
    return "states" if states <= heads else "heads", compared
