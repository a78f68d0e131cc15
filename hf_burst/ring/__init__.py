"""Attention over ranks: messages, merging, and the loops that execute the steps of a plan."""

from .exchange import MAX_TENSORS, Exchange, ExchangeClock, Exchanges, PeerToPeer
from .merge import merge_, row_products
from .sharded import HeadSizes, ShardedAttention, kept_shapes
from .symmetric import SymmetricPool
from .ulysses import HeadsToTokens, TokensToHeads, ulysses_ranks_of

# fmt: off
__all__ = [
    "MAX_TENSORS", "Exchange", "ExchangeClock", "Exchanges", "HeadSizes", "HeadsToTokens", "PeerToPeer",
    "ShardedAttention", "SymmetricPool", "TokensToHeads", "kept_shapes", "merge_",
    "row_products", "ulysses_ranks_of",
]
# fmt: on
