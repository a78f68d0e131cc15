"""The ring: merging, messages, and the loops that execute a schedule."""

from .exchange import Exchange, PeerToPeer
from .merge import accumulation_dtype, merge_
from .routes import HeadSizes, Routed, head_slices, kept_shapes

__all__ = [
    "Exchange",
    "HeadSizes",
    "PeerToPeer",
    "Routed",
    "accumulation_dtype",
    "head_slices",
    "kept_shapes",
    "merge_",
]
