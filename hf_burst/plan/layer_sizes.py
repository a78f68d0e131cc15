"""The sizes of a model's layers, and what a token takes in them. A run estimates its first step by it, and
`hf-burst plan` adds weights, the optimizer, buffers and gaps."""

from dataclasses import dataclass

from ..config import Memory
from .mask import MaskPattern
from .recurrence import RecurrentSize


def keeping(first: int, layers: int, per_checkpoint: int) -> int:
    """How many of the `first` checkpointed layers keep their input: the first one of each `per_checkpoint` in a row,
    and each of the last `per_checkpoint` of all `layers`, because their inputs are needed at once."""
    least = max(0, layers - per_checkpoint)
    return -(-min(first, least) // per_checkpoint) + max(0, first - least)


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of a model's layers.

    Args:
        layers (`int`): How many there are.
        hidden (`int`): Elements of a hidden state.
        inner (`int`): Elements of a token inside of its MLP, of all experts that it is sent to.
        q_heads, kv_heads (`int`): Query and key heads; 0 without attention.
        head_dim, value_dim (`int`): Sizes of the heads of queries and keys, and of values (means if layers differ).
        patterns (`tuple[tuple[MaskPattern, float], ...]`): How many layers see how far. A layer with heads of twice
            the mean size counts as two. Empty for a model without attention.
        recurrent (`tuple[RecurrentSize, ...]`): Its recurrent layers.
        norms (`float`, defaults to 0): Elements of a token that the norms of a layer are given, but torch's own norms,
            which keep nothing in fp32.
    """

    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    patterns: tuple[tuple[MaskPattern, float], ...]
    recurrent: tuple[RecurrentSize, ...] = ()
    norms: float = 0.0

    @property
    def attending(self) -> int:
        """Layers with attention."""
        return round(sum(count for _, count in self.patterns)) if self.recurrent else self.layers

    @property
    def causal(self) -> bool:
        """Whether queries see no later key."""
        return all(pattern.causal for pattern, _ in self.patterns)

    @property
    def wide_heads(self) -> bool:
        """Whether its heads are so wide that kernels compute them at other rates, and with other sums."""
        return self.head_dim > 192

    @property
    def queries(self) -> int:
        """Elements of a token's queries, and of what attention finds for them."""
        return self.q_heads * (self.head_dim + self.value_dim) // 2

    @property
    def keys(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.kv_heads * (self.head_dim + self.value_dim) // 2

    def kept(self, memory: Memory, itemsize: int) -> tuple[int, float]:
        """Bytes that a checkpointed layer keeps: its input, of so many bytes an element; and of its attention the
        output and the log-sum-exp."""
        return itemsize * self.hidden, memory.attention_keep * (2 * self.queries + 4 * self.q_heads)

    def host_bytes(self, memory: Memory, itemsize: int, leaving: int) -> float:
        """Bytes of the host that so many offloaded layers take: their inputs, and attention that is kept."""
        kept_input, kept_attention = self.kept(memory, itemsize)
        attentions = leaving * self.attending / self.layers
        return keeping(leaving, self.layers, memory.layers_per_checkpoint) * kept_input + attentions * kept_attention

    def mixing(self, elsewhere: bool) -> int:
        """Elements that the widest mixer of a layer keeps: attention, of which the output may be kept `elsewhere`, or a
        recurrence."""
        attention = 2 * (self.queries + self.keys) - elsewhere * self.queries
        return max([attention, *(size.elements for size in self.recurrent)])

    def elements(self, fused: bool = True, mixing: float | None = None) -> float:
        """Elements that a layer keeps for its backward pass, its input apart: what norms and products are given, what
        its attention or recurrence keeps (`mixing`; by default the mean of all layers), and for SwiGLU both halves;
        without Liger's kernels also its sigmoid, and norms in fp32."""
        if mixing is None:
            attention = 2 * (self.queries + self.keys) * self.attending
            mixing = (attention + sum(size.layers * size.elements for size in self.recurrent)) / self.layers
        in_fp32 = self.norms and not fused
        norms = 3 * self.norms if in_fp32 else max(self.norms - self.hidden, self.hidden)
        return (3 if fused else 4) * self.inner + 2 * self.hidden + norms + mixing

    def attention_backward(self, keep: float, slices: int, on_gpu: bool = True) -> float:
        """Bytes while the backward pass of an attention runs, of which a share was kept: what is behind it in the layer
        is gone. On GPUs, kernels add up gradients in fp32: of the queries, and of keys and values that several of these
        share. cuDNN, which may take heads of more than 192 elements, has these for every query head in bf16. Those of
        one of several slices of heads are there in addition to those of all heads."""
        inputs = self.queries + 2 * self.keys
        missing = self.queries if keep < 1 else 0  # of its output; what is kept of it is copied there, too
        row = 2 * (2 * self.hidden + 2 * inputs + missing + self.queries)
        shared = 2 * self.keys if self.q_heads > self.kv_heads else 0
        if shared and self.wide_heads:
            shared = max(shared, self.queries)
        sums = 4 * (self.queries + shared) / slices if on_gpu else 0.0
        return row + sums + (2 * inputs / slices if slices > 1 else 0.0)

    def recurrent_backward(self) -> float:
        """Bytes while the backward pass of a recurrent layer runs, with its input and the gradient of its output."""
        return max((2 * (size.backward_elements + 2 * self.hidden) for size in self.recurrent), default=0.0)


@dataclass(frozen=True)
class StepEstimate:
    """What a token takes of a GPU in a training step, about.

    Args:
        sizes ([`LayerSizes`]): Of the model.
        itemsize (`int`): Bytes of an element of a hidden state.
        checkpointing (`bool`): Whether layers checkpoint.
        exchanges (`bool`): Whether several ranks share a sequence.
    """

    sizes: LayerSizes
    itemsize: int
    checkpointing: bool
    exchanges: bool

    def bytes_of_token(self, memory: Memory) -> float:
        """What layers keep of it, and the layer that runs backward."""
        sizes = self.sizes
        kept_input, kept_attention = sizes.kept(memory, self.itemsize)
        if not self.checkpointing:
            inner = 3 * sizes.inner if memory.tiled_mlp else 0
            return sizes.layers * (kept_input + 2 * (sizes.elements() - inner)) + self.working(memory)
        together = memory.layers_per_checkpoint
        stay = sizes.layers * (1 - memory.activation_offloading)
        ahead = min(2, sizes.layers) if memory.activation_offloading else 0  # that came back
        inputs = min(sizes.layers, stay / together + ahead + together - 1)
        attentions = min(sizes.layers, stay + ahead) * sizes.attending / sizes.layers
        return kept_input * inputs + kept_attention * attentions + self.working(memory)

    def working(self, memory: Memory) -> float:
        """What it takes while a layer runs backward: MLP, attention or recurrence; and what ranks exchange."""
        sizes = self.sizes
        groups = memory.head_groups
        keep = memory.attention_keep if self.checkpointing else 0.0
        row = sizes.elements(mixing=sizes.mixing(keep == 1)) + sizes.hidden + sizes.inner
        exchanged = 12 * (sizes.queries + 2 * sizes.keys) / groups if self.exchanges else 0.0
        mlp = 0.0 if memory.tiled_mlp else 2 * row
        return max(mlp, sizes.attention_backward(keep, groups), sizes.recurrent_backward()) + exchanged
