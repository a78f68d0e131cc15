"""The ring: merging, messages, and the loops that execute a schedule."""

from .exchange import Exchange, PeerToPeer
from .merge import accumulation_dtype, merge_, row_products
from .routes import HeadSizes, Routed, kept_shapes, open_exchange

__all__ = [
    "Exchange",
    "HeadSizes",
    "PeerToPeer",
    "Routed",
    "accumulation_dtype",
    "kept_shapes",
    "merge_",
    "open_exchange",
    "row_products",
]
