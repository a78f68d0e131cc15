"""The ring: merging, messages, and the loops that execute a schedule."""

from .exchange import Exchange, PeerToPeer
from .merge import accumulation_dtype, merge_, row_products
from .sharded import HeadSizes, ShardedAttention, kept_shapes, open_exchange

__all__ = [
    "Exchange",
    "HeadSizes",
    "PeerToPeer",
    "ShardedAttention",
    "accumulation_dtype",
    "kept_shapes",
    "merge_",
    "open_exchange",
    "row_products",
]
