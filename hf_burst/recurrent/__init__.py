"""Recurrent layers over shards: how runs of tokens transform a state, and how these transforms compose. Knows nothing
about Transformers."""

from .delta import delta_rule_by_heads, delta_rule_by_states
from .exchange import own_heads
from .fla import (
    compile_ahead,
    fla_compared,
    fla_convolution,
    fla_gated_norm,
    fla_installed,
    fla_kernels,
    in_two_passes,
    unit_norm,
)
from .halo import causal_convolution
from .pieces import Rule
from .replay import ReplayBuffer, Shards
from .scan import scan_by_channels, scan_by_states
from .states import LastStates
from .two_passes import delta_rule_in_two_passes

# fmt: off
__all__ = [
    "LastStates", "ReplayBuffer", "Rule", "Shards", "causal_convolution", "compile_ahead", "delta_rule_by_heads",
    "delta_rule_by_states", "delta_rule_in_two_passes", "fla_compared", "fla_convolution", "fla_gated_norm",
    "fla_installed", "fla_kernels", "in_two_passes", "own_heads", "scan_by_channels", "scan_by_states", "unit_norm",
]
# fmt: on
