"""Attention over the ranks of a group, for experts: requests, the choice of a schedule, the operator, the function.

```python
>>> from hf_burst.attention import AttentionRequest, ContextGroup, MaskPattern, SequenceLayout, burst_attention
```
"""

from ..plan import MaskPattern
from ..ranks.group import ContextGroup
from ..ranks.layout import SequenceLayout
from .cache import AttentionCache
from .function import attend, burst_attention
from .heads import heads_to_tokens, tokens_to_heads
from .request import AttentionRequest

__all__ = [
    "AttentionCache",
    "AttentionRequest",
    "ContextGroup",
    "MaskPattern",
    "SequenceLayout",
    "attend",
    "burst_attention",
    "heads_to_tokens",
    "tokens_to_heads",
]
