"""Attention over the ranks of a group: the request, the choice of a schedule, the operator, the public function."""

from .cache import AttentionCache
from .function import attend, burst_attention
from .heads import heads_to_tokens, tokens_to_heads
from .request import AttentionRequest

__all__ = [
    "AttentionCache",
    "AttentionRequest",
    "attend",
    "burst_attention",
    "heads_to_tokens",
    "tokens_to_heads",
]
