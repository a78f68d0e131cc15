"""A model in a few sizes, and how it is trained: what the seconds and the memory of a step follow from."""

from dataclasses import dataclass
from typing import Literal

from ..config import Memory
from ..errors import ConfigError
from ..plan import MaskPattern, RecurrentSize
from ..plan.memory_levels import keeping

Weights = Literal["bf16", "fp32", "4bit"]
Sharded = Literal["fsdp2", "ddp"]


def rounded(count: int) -> str:
    """A number of weights as people write it: 8.03e9, 135e6, 66.6e3."""
    unit = next((unit for unit in (9, 6, 3) if round(count, 3 - unit) >= 10**unit), 0)
    return f"{count / 10**unit:.{2 if unit == 9 else 3}{'f' if unit == 9 else 'g'}}e{unit}" if unit else str(count)


@dataclass(frozen=True)
class TowerSize:
    """The tower of a model that sees, as far as the memory of its images follows from it.

    Args:
        layers (`int`): Its layers.
        hidden (`int`): Elements of a patch's hidden state.
        inner (`int`): Elements of a patch inside of a layer's MLP.
        kept (`float`): Elements of a patch that a layer keeps for its backward pass, its input apart.
        weights (`int`): Those of its layers.
        patches (`float`): How many patches become a token.
        dealt (`bool`): Whether ranks share the images. Else each encodes all.
    """

    layers: int
    hidden: int
    inner: int
    kept: float
    weights: int
    patches: float
    dealt: bool


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that time and memory follow from.

    Args:
        name (`str`): What it is called.
        layers (`int`): Its layers.
        hidden (`int`): Elements of a hidden state.
        inner (`int`): Elements of a token inside of its MLP, of all experts that it is sent to.
        q_heads, kv_heads (`int`): Query and key heads.
        head_dim, value_dim (`int`): Sizes of the heads of queries and keys, and of values (means if layers differ).
        vocabulary (`int`): Tokens that there are.
        weights (`int`): All parameters.
        used (`int`): Weights that one token is multiplied with. Tables of embeddings are left out, and so are the
            experts that it is not sent to.
        head (`int`): Those of them in the language-model head.
        tied (`bool`): Whether the head shares its weights with the embeddings.
        linear (`int`): Weights of linear layers but the head, of which bitsandbytes makes 4 bits.
        adapted (`int`): Rows and columns of all linear layers but the head: weights of adapters of rank 1.
        patterns (`tuple[tuple[MaskPattern, float], ...]`): How many layers see how far. A layer with heads of twice
            the mean size counts as two. Empty for a model without attention; its heads are 0.
        recurrent (`tuple[RecurrentSize, ...]`): Its recurrent layers.
        unused (`int`, defaults to 0): Weights that a batch of text does not use: those of towers for images and sound.
        norms (`float`, defaults to 0): Elements of a token that the norms of a layer are given, but torch's own norms,
            which keep nothing in fp32.
        routed (`int`, defaults to 0): Elements of a token's copies for the experts that it is sent to.
        experts (`int`, defaults to 0): Weights of all experts that tokens are sent to.
        fused (`int`, defaults to 0): Those of them that are in no linear layer, as Transformers has them.
        tower ([`TowerSize`], *optional*): Its tower for images, if it is served with them.
        latent (`int`, defaults to 0): Elements of a token that a layer caches, and makes keys and values of; 0 if it
            caches these.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    vocabulary: int
    weights: int
    used: int
    head: int
    tied: bool
    linear: int
    adapted: int
    patterns: tuple[tuple[MaskPattern, float], ...]
    recurrent: tuple[RecurrentSize, ...] = ()
    unused: int = 0
    norms: float = 0.0
    routed: int = 0
    experts: int = 0
    fused: int = 0
    tower: TowerSize | None = None
    latent: int = 0

    def __str__(self) -> str:
        unused = f" ({rounded(self.unused)} not for text)" if self.unused else ""
        heads = f", {self.q_heads} query and {self.kv_heads} key heads of {self.head_dim}" if self.patterns else ""
        states = "".join(f", {size}" for size in self.recurrent)
        return (
            f"{self.name}: {rounded(self.weights)} weights{unused}, {self.layers} layers, {self.hidden} wide{heads}"
            f"{states}, vocabulary {self.vocabulary}"
        )

    @property
    def attending(self) -> int:
        """Layers with attention."""
        return round(sum(count for _, count in self.patterns)) if self.recurrent else self.layers

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

    @property
    def mlp(self) -> int:
        """Weights of the MLP of a layer, of all its experts."""
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        mixing = 2 * self.hidden * (self.queries + self.keys)
        return max(0, (self.weights - self.unused - tables) // self.layers - mixing)

    @property
    def recurrence_flops(self) -> float:
        """Operations of the recurrences of all layers for a token, forward."""
        return sum(size.layers * size.token_flops for size in self.recurrent)

    def flops(self, tokens: int, pairs: float, trained: float = 1.0) -> float:
        """Floating point operations of a training step that computes nothing twice, as model FLOPs utilisation counts
        them: 6 for each weight and token, 4 if it is frozen, 12 for each pair and element of the queries, and 3 times
        those of the recurrences.

        Args:
            tokens (`int`): Of all sequences.
            pairs (`float`): (query, key) pairs that are admitted, added up over the layers.
            trained (`float`, defaults to 1.0): Share of the weights that learn.
        """
        return (4 + 2 * trained) * self.used * tokens + 12 * pairs * self.queries + 3 * tokens * self.recurrence_flops


@dataclass(frozen=True)
class Training:
    """How a model is trained: one sequence for each group of GPUs, by AdamW.

    Args:
        length (`int`): Tokens of a sequence.
        gpus (`int`): All GPUs.
        burst_size (`int`): Those that share a sequence.
        documents (`tuple[int, ...]`, defaults to one document): Cumulative boundaries of packed documents.
        parents (`tuple[int, ...]`, *optional*): Which documents continue others, see [`hf_burst.plan.Mask`].
        reference (`bool`, defaults to `False`): Whether a model that does not learn reads the sequence, too, as for
            DPO: with adapters the same one without them, else a second one.
        sharded (`str`, defaults to `"fsdp2"`): `"fsdp2"` shards weights, gradients and optimizer over all GPUs,
            `"ddp"` nothing.
        weights (`str`, defaults to `"bf16"`): `"bf16"` for weights, gradients and optimizer; `"fp32"` for all three of
            the weights that learn, computed with in bf16 (mixed precision); or `"4bit"` for frozen weights under
            adapters, which no GPU shards. Frozen weights are else in bf16.
        lora (`int`, defaults to 0): Rank of adapters on all linear layers but the head; 0 trains all weights.
        checkpointing (`bool`, defaults to `True`): Whether layers are computed again in the backward pass.
        attention_keep, activation_offloading, layers_per_checkpoint, tiled_mlp, head_groups: As in [`Memory`].
        fused (`bool`, defaults to `True`): Whether norms, rotary positions and SwiGLU are kernels of their own, as
            Liger's are.
        expandable_segments (`bool`, defaults to `False`): Whether torch's allocator has them, which leave smaller gaps
            (`PYTORCH_ALLOC_CONF=expandable_segments:True`).
        images (`int`, defaults to 0): Images among the tokens of a sequence.
        image_tokens (`int`, defaults to 0): Tokens that each of them takes.
        frozen_towers (`bool`, defaults to `False`): Whether towers do not learn. They never do with adapters, nor
            without images.
    """

    length: int
    gpus: int
    burst_size: int
    documents: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    reference: bool = False
    sharded: Sharded = "fsdp2"
    weights: Weights = "bf16"
    lora: int = 0
    checkpointing: bool = True
    attention_keep: float = 1.0
    activation_offloading: float = 0.0
    layers_per_checkpoint: int = 1
    tiled_mlp: int = 0
    head_groups: int = 1
    fused: bool = True
    expandable_segments: bool = False
    images: int = 0
    image_tokens: int = 0
    frozen_towers: bool = False

    def __post_init__(self) -> None:
        sizes = {"length": self.length, "gpus": self.gpus, "burst_size": self.burst_size, "lora": self.lora}
        if min(self.length, self.gpus, self.burst_size) < 1 or self.gpus % self.burst_size or self.lora < 0:
            raise ConfigError(f"{sizes}: sizes are at least 1, burst_size divides gpus, and lora is a rank or 0.")
        if self.images < 0 or (self.images > 0) != (self.image_tokens > 0):
            raise ConfigError(
                f"images is {self.images} and image_tokens {self.image_tokens}: give how many images a sequence has, "
                "and how many of its tokens each of them takes, both at least 1; or neither."
            )
        Memory(  # raises for what it does not take
            attention_keep=self.attention_keep,
            activation_offloading=self.activation_offloading,
            layers_per_checkpoint=self.layers_per_checkpoint,
            tiled_mlp=self.tiled_mlp,
            head_groups=self.head_groups,
        )
        if self.weights == "4bit" and not self.lora:
            raise ConfigError("Weights of 4 bits are frozen, so there is nothing to train. Add adapters (lora=16).")

    @property
    def tokens(self) -> int:
        """Those of one GPU."""
        return -(-self.length // self.burst_size)

    @property
    def number(self) -> int:
        """Bytes of a number of a trained weight, its gradient or the optimizer. Beside 4 bits, peft makes fp32."""
        return 2 if self.weights == "bf16" else 4

    @property
    def shards(self) -> int:
        """Into how many parts weights are sharded."""
        return self.gpus if self.sharded == "fsdp2" and self.weights != "4bit" else 1

    @property
    def wide_states(self) -> bool:
        """Whether hidden states are in fp32: under autocast, embeddings in fp32 begin a residual stream that stays so.
        FSDP2 casts what a layer is given."""
        return self.weights == "fp32" and not self.lora and self.shards == 1

    @property
    def in_tiles(self) -> bool:
        """Whether MLPs are computed some tokens at a time."""
        return 0 < self.tiled_mlp < self.tokens

    def offloaded(self, model: ModelSize) -> int:
        """The layers that keep things on the host. The last one does not."""
        layers = model.layers if self.checkpointing else 0
        return max(0, min(round(self.activation_offloading * layers), layers - 1))

    def inputs(self, first: int, model: ModelSize) -> int:
        """How many of the `first` layers keep their input. The others compute it again."""
        return keeping(first, model.layers, self.layers_per_checkpoint) if self.checkpointing else 0

    def repeated(self, model: ModelSize) -> float:
        """The share of the layers that run once more, for the input of the next one."""
        return 1 - self.inputs(model.layers, model) / model.layers if self.checkpointing else 0.0

    def kept(self, model: ModelSize) -> tuple[float, float]:
        """Bytes that a checkpointed layer keeps: its input; and of its attention the output and the log-sum-exp."""
        attention = self.attention_keep * (2 * model.queries + 4 * model.q_heads)
        return (4.0 if self.wide_states else 2.0) * self.tokens * model.hidden, self.tokens * attention

    def host_bytes(self, model: ModelSize) -> float:
        """Bytes of the host that offloaded layers of one GPU take: their inputs, and attention that is kept."""
        leaving, (kept_input, kept_attention) = self.offloaded(model), self.kept(model)
        return self.inputs(leaving, model) * kept_input + leaving * model.attending / model.layers * kept_attention

    def trained(self, model: ModelSize) -> int:
        """The weights that learn."""
        return self.lora * model.adapted or model.weights - (0 if self.learns_to_see else model.unused)

    @property
    def learns_to_see(self) -> bool:
        """Whether towers learn."""
        return self.images > 0 and not self.lora and not self.frozen_towers
