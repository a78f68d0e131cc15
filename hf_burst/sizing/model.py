"""A model in a few sizes, and how it is trained: what the seconds and the memory of a step follow from."""

from dataclasses import dataclass
from typing import Literal

from ..config import Memory
from ..errors import ConfigError
from ..plan import Mask, MaskPattern
from ..plan.layer_sizes import LayerSizes, keeping

Weights = Literal["bf16", "fp32", "4bit"]
NF4 = 4.127 / 8  # bytes of a weight of 4 bits and of its scales (QLoRA, arXiv 2305.14314)
SCALES = NF4 - 0.5  # of its scales, which FSDP2 does not shard
Sharded = Literal["fsdp2", "ddp"]
# fmt: off
# model types that Liger 0.8.5 has kernels for (MODEL_TYPE_TO_APPLY_LIGER_FN); torch computes norms and MLPs of others
LIGER = frozenset((
    "deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gemma4", "gemma4_text", "glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "internvl", "llama", "llama4", "llama4_text", "llava", "ministral", "mistral", "mixtral", "mllama",
    "mllama_text_model", "muse_glimmer", "nemotron", "olmo2", "olmo3", "paligemma", "phi3", "pixtral", "qwen2",
    "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_text",
    "smollm3", "smolvlm",
))
# fmt: on


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


@dataclass(frozen=True, kw_only=True)
class ModelSize(LayerSizes):
    """The sizes of a model that time and memory follow from: those of its layers, and these.

    Args:
        name (`str`): What it is called.
        vocabulary (`int`): Tokens that there are.
        weights (`int`): All parameters.
        used (`int`): Weights that one token is multiplied with. Tables of embeddings are left out, and so are the
            experts that it is not sent to.
        head (`int`): Those of them in the language-model head.
        tied (`bool`): Whether the head shares its weights with the embeddings.
        linear (`int`): Weights of linear layers but the head, of which bitsandbytes makes 4 bits.
        adapted (`int`): Rows and columns of all linear layers but the head: weights of adapters of rank 1.
        unused (`int`): Weights that a batch of text does not use: those of towers for images and sound.
        routed (`int`): Elements of a token's copies for the experts that it is sent to.
        experts (`int`): Weights of experts, without biases.
        fused (`int`): Those of them in tensors of three dimensions, as Transformers has them.
        fused_in_layer (`int`): Those in the layer that has the most.
        visited (`int`): Those that one token is multiplied with.
        tower ([`TowerSize`], *optional*): Its tower for images, if it is served with them.
        latent (`int`): Elements of a token that a layer caches, and makes keys and values of; 0 if it caches these.
        rotary (`int`): Cosines and sines of a token's position, of all kinds of layers.
        liger (`bool`): Whether Liger has kernels for its layers.
        shared (`int`): Elements of a token's keys and values that layers keep for others.
    """

    name: str
    vocabulary: int
    weights: int
    used: int
    head: int
    tied: bool
    linear: int
    adapted: int
    unused: int
    routed: int
    experts: int
    fused: int
    fused_in_layer: int
    visited: int
    tower: TowerSize | None
    latent: int
    rotary: int
    liger: bool
    shared: int = 0

    def __str__(self) -> str:
        unused = f" ({rounded(self.unused)} not for text)" if self.unused else ""
        heads = f", {self.q_heads} query and {self.kv_heads} key heads of {self.head_dim}" if self.patterns else ""
        states = "".join(f", {size}" for size in self.recurrent)
        return (
            f"{self.name}: {rounded(self.weights)} weights{unused}, {self.layers} layers, {self.hidden} wide{heads}"
            f"{states}, vocabulary {self.vocabulary}"
        )

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
class Training(Memory):
    """How a model is trained: one sequence for each group of GPUs, by AdamW, with the settings of [`Memory`].

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
            adapters, stored as floats if FSDP2 shards them. Frozen weights are else in bf16.
        offloaded_weights (`bool`, defaults to `False`): Whether FSDP2 keeps weights, gradients and optimizer on the
            host (`CPUOffloadPolicy`, accelerate's `fsdp_offload_params`).
        quantized_experts (`bool`, defaults to `False`): Whether experts of three dimensions are in 4 bits, too, see
            [`hf_burst.Experts4bitConfig`].
        lora (`int`, defaults to 0): Rank of adapters on all linear layers but the head; 0 trains all weights.
        checkpointing (`bool`, defaults to `True`): Whether layers are computed again in the backward pass.
        fused (`bool`, defaults to `True`): Whether norms, rotary positions, SwiGLU and the loss are Liger's kernels,
            as far as it knows the model.
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
    offloaded_weights: bool = False
    quantized_experts: bool = False
    lora: int = 0
    checkpointing: bool = True
    fused: bool = True
    expandable_segments: bool = False
    images: int = 0
    image_tokens: int = 0
    frozen_towers: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.length, self.gpus, self.burst_size) < 1 or self.gpus % self.burst_size or self.lora < 0:
            sizes = {name: getattr(self, name) for name in ("length", "gpus", "burst_size", "lora")}
            raise ConfigError(f"{sizes}: sizes are at least 1, burst_size divides gpus, and lora is a rank or 0.")
        if self.images < 0 or (self.images > 0) != (self.image_tokens > 0):
            raise ConfigError(
                f"images is {self.images} and image_tokens {self.image_tokens}: give both, at least 1, or neither."
            )
        if self.weights == "4bit" and not self.lora:
            raise ConfigError("Weights of 4 bits are frozen, so there is nothing to train. Add adapters (lora=16).")
        if self.offloaded_weights and self.sharded != "fsdp2":
            raise ConfigError(f"offloaded_weights is set, and sharded is {self.sharded!r}. Take 'fsdp2'.")
        if self.quantized_experts and self.weights != "4bit":
            raise ConfigError(f"quantized_experts is set, and weights are {self.weights!r}. Take '4bit' (--qlora).")

    @property
    def bounds(self) -> tuple[int, ...]:
        """Cumulative boundaries of its documents."""
        return self.documents or (0, self.length)

    def mask(self, pattern: MaskPattern) -> Mask:
        """What queries see in a layer."""
        return pattern.mask(self.length, self.bounds, self.parents)

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
        return self.gpus if self.sharded == "fsdp2" else 1

    @property
    def gathers(self) -> bool:
        """Whether layers are put together on a GPU as they run."""
        return self.shards > 1 or self.offloaded_weights

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a hidden state: under autocast, embeddings in fp32 begin a residual stream that stays
        so. FSDP2 casts what a layer is given."""
        return 4 if self.weights == "fp32" and not self.lora and not self.gathers else 2

    def saved(self, model: ModelSize) -> float:
        """Bytes that weights in 4 bits take less than in bf16."""
        return (2 - NF4) * self.in_4_bits(model)

    def in_4_bits(self, model: ModelSize) -> int:
        """The weights in 4 bits."""
        return (self.weights == "4bit") * (model.linear + self.quantized_experts * model.fused)

    @property
    def in_tiles(self) -> bool:
        """Whether MLPs are computed some tokens at a time."""
        return 0 < self.tiled_mlp < self.tokens

    def fuses_layers(self, model: ModelSize) -> bool:
        """Whether Liger's kernels compute what is in layers."""
        return self.fused and model.liger

    def repeated(self, model: ModelSize) -> float:
        """The share of the layers that run once more, for the input of the next one."""
        if not self.checkpointing:
            return 0.0
        return 1 - keeping(model.layers, model.layers, self.layers_per_checkpoint) / model.layers

    def offloaded(self, model: ModelSize) -> int:
        """The layers that keep things on the host. The last one does not."""
        layers = model.layers if self.checkpointing else 0
        return max(0, min(round(self.activation_offloading * layers), layers - 1))

    def host_bytes(self, model: ModelSize) -> float:
        """Bytes of the host that offloaded layers of one GPU take."""
        return self.tokens * model.host_bytes(self, self.itemsize, self.offloaded(model))

    def trained(self, model: ModelSize) -> int:
        """The weights that learn."""
        return self.lora * model.adapted or model.weights - (0 if self.learns_to_see else model.unused)

    @property
    def learns_to_see(self) -> bool:
        """Whether towers learn."""
        return self.images > 0 and not self.lora and not self.frozen_towers
