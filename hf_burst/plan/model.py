"""A model in a few sizes: what a training step has to compute, and what it has to keep."""

from dataclasses import dataclass

from .mask import MaskPattern


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that time and memory follow from.

    Args:
        name (`str`): What it is called.
        layers (`int`): Its layers.
        hidden (`int`): Elements of a hidden state.
        inner (`int`): Elements of a token inside of its MLP, of all experts that it is sent to.
        q_heads, kv_heads (`int`): Query and key heads.
        head_dim, value_dim (`int`): Sizes of the heads of queries and keys, and of values.
        vocabulary (`int`): Tokens that there are.
        weights (`int`): All parameters.
        used (`int`): Weights that one token is multiplied with. Tables of embeddings are left out, and so are the
            experts that it is not sent to.
        head (`int`): Those of them in the language-model head.
        tied (`bool`): Whether the head shares its weights with the embeddings.
        adapted (`int`): Rows and columns of all linear layers but the head: weights of adapters of rank 1.
        patterns (`tuple[tuple[MaskPattern, int], ...]`): How many layers see how far.
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
    adapted: int
    patterns: tuple[tuple[MaskPattern, int], ...]

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.weights / 1e9:.2f}e9 weights, {self.layers} layers, {self.hidden} wide, "
            f"{self.q_heads} query and {self.kv_heads} key heads of {self.head_dim}, vocabulary {self.vocabulary}"
        )

    @property
    def queries(self) -> int:
        """Elements of a token's queries, and of what attention finds for them."""
        return self.q_heads * (self.head_dim + self.value_dim) // 2

    @property
    def keys(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.kv_heads * (self.head_dim + self.value_dim) // 2

    def flops(self, tokens: int, pairs: int, trained: float = 1.0) -> float:
        """Floating point operations of a training step that computes nothing twice, as model FLOPs utilisation counts
        them: 6 for each weight and token, 4 if it is frozen, and 12 for each pair and element of the queries.

        Args:
            tokens (`int`): Of all sequences.
            pairs (`int`): (query, key) pairs that are admitted, added up over the layers.
            trained (`float`, defaults to 1.0): Share of the weights that learn.
        """
        return (4 + 2 * trained) * self.used * tokens + 12 * pairs * self.queries
