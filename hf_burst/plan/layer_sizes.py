"""The sizes of a model's layers, and what a token takes in them. A run estimates its first step by it, and
`hf-burst plan` adds weights, the optimizer, buffers and gaps."""

from dataclasses import dataclass, replace
from typing import Any, Self

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
        head_norms (`float`, defaults to 0): Those of them that norms of queries, keys and values are given.
        heads (`tuple[tuple[MaskPattern, tuple[int, int, int, int], float], ...]`, *optional*): If layers differ, how
            many see how far with which `q_heads`, `kv_heads`, `head_dim` and `value_dim`.
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
    head_norms: float = 0.0
    heads: tuple[tuple[MaskPattern, tuple[int, int, int, int], float], ...] = ()

    @property
    def kinds(self) -> tuple[Self, ...]:
        """These sizes with the heads of each kind of layer."""
        return tuple(dict.fromkeys(kind for _, kind, _ in self.attentions)) or (self,)

    @property
    def attentions(self) -> list[tuple[MaskPattern, Self, float]]:
        """How many layers see how far, and these sizes with their heads."""
        names = "q_heads", "kv_heads", "head_dim", "value_dim"
        kinds: list[dict[str, Any]] = [dict(zip(names, heads, strict=True)) for _, heads, _ in self.heads]
        others = zip(self.heads, kinds, strict=True)
        differing = [(pattern, replace(self, heads=(), **kind), count) for (pattern, _, count), kind in others]
        return differing or [(pattern, self, count) for pattern, count in self.patterns]

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
    def widest_heads(self) -> bool:
        """Whether its heads are so wide that torch's memory-efficient attention computes them, or ffpa."""
        return max(self.head_dim, self.value_dim) > 256

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
        attention = [2 * (kind.queries + kind.keys) - elsewhere * kind.queries for kind in self.kinds]
        return max([*attention, *(size.elements for size in self.recurrent)])

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

    def attention_backward(
        self, keep: float, slices: int, on_gpu: bool = True, ffpa: bool = False, documents: tuple[float, float] = (0, 0)
    ) -> float:
        """Bytes while the backward pass of an attention runs, of which a share was kept: what is behind it in the layer
        is gone. Kernels of GPUs have sums in addition. Those of one of several slices of heads are there in addition to
        those of all heads.

        Args:
            keep (`float`): The share.
            slices (`int`): Of the heads, where each kind of layer has so many key heads.
            on_gpu (`bool`, defaults to `True`): Whether a kernel of GPUs computes it.
            ffpa (`bool`, defaults to `False`): Whether ffpa computes the widest heads.
            documents (`tuple[float, float]`, defaults to one): Of several documents, the share of the longest one, and
                that of the rows with which kernels pad them.
        """
        needed = []
        for kind in self.kinds:
            inputs = kind.queries + 2 * kind.keys
            missing = kind.queries if keep < 1 else 0  # of its output; what is kept of it is copied there, too
            row = 2 * (2 * kind.hidden + 2 * inputs + missing + kind.queries + kind.head_norms)
            own = max(1, min(slices, kind.kv_heads))
            sums = kind._wide_sums(ffpa, documents[0]) if kind.widest_heads else kind._sums() * (1 + documents[1])
            needed.append(row + (sums / own if on_gpu else 0.0) + (2 * inputs / own if own > 1 else 0.0))
        return max(needed)

    def _sums(self) -> float:
        """Gradients of the queries in fp32, with two numbers for each row, and of keys and values that several of these
        share. cuDNN, which may take heads of more than 192 elements, has these for every query head in bf16."""
        shared = 2 * self.keys if self.q_heads > self.kv_heads else 0
        if shared and self.wide_heads:
            shared = max(shared, self.queries)
        return 4.0 * (self.queries + 2 * self.q_heads + shared)

    def _wide_sums(self, ffpa: bool, document: float) -> float:
        """What heads above 256 take beside results in bf16. ffpa 0.2.4 makes these, delta and a log-sum-exp. torch's
        memory-efficient attention (`_efficient_attention_backward` of aten's attention_backward.cu, `workspace_size` of
        mem_eff_attention/kernel_backward.h) takes contiguous inputs, makes gradients of keys and values for every query
        head, which are summed in fp32, and has a workspace in fp32 for those of queries. Documents are computed one by
        one, and their gradients summed in fp32."""
        results = 2.0 * self.queries + 4 * self.keys
        call = results + 12 * self.q_heads
        if not ffpa:
            every = self.q_heads * (4 * self.head_dim + 2 * self.value_dim)
            copies = 4 * self.q_heads * self.value_dim if self.kv_heads > 1 else 0
            call += 4 * self.keys + every + copies + 4 * self.q_heads * (self.head_dim + 1)  # blocks have a header
        return (4 * (self.queries + 2 * self.keys) + document * call if document else call) - results

    @property
    def key_blocks(self) -> int:
        """Bytes in which the same workspace has blocks of 64 keys: aten has 200 of all heads, or one of each."""
        return max(
            kind.widest_heads * 4 * 64 * max(200, kind.q_heads) * (kind.head_dim + kind.value_dim)
            for kind in self.kinds
        )

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
        ffpa (`bool`, defaults to `False`): Whether ffpa computes the widest heads.
    """

    sizes: LayerSizes
    itemsize: int
    checkpointing: bool
    exchanges: bool
    ffpa: bool = False

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
        return max(mlp, sizes.attention_backward(keep, groups, ffpa=self.ffpa), sizes.recurrent_backward()) + exchanged
