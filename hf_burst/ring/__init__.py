"""The ring: merging, messages, and the one loop that executes a schedule."""

from .exchange import Exchange
from .execute import Attention, backward, forward
from .merge import accumulation_dtype, merge_

__all__ = ["Attention", "Exchange", "accumulation_dtype", "backward", "forward", "merge_"]
