"""Attention over ranks: messages, merging, and the loops that execute the steps of a plan."""

from .exchange import MAX_TENSORS, Exchange, ExchangeClock, Exchanges, PeerToPeer
from .merge import merge_, row_products
from .sharded import HeadSizes, HeadsToTokens, ShardedAttention, TokensToHeads, kept_shapes, ulysses_ranks_of
from .symmetric import SymmetricPool

# fmt: off
__all__ = [
    "MAX_TENSORS", "Exchange", "ExchangeClock", "Exchanges", "HeadSizes", "HeadsToTokens", "PeerToPeer",
    "ShardedAttention", "SymmetricPool", "TokensToHeads", "kept_shapes", "merge_",
    "row_products", "ulysses_ranks_of",
]
# fmt: on
