"""`BurstConfig`: the few knobs of hf_burst, "auto" wherever the right value follows from the data."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .errors import ConfigError

Chunking = Literal["zigzag", "contiguous"]
Backward = Literal["auto", "kv_ring", "burst"]
KernelName = Literal["auto", "cpu_flash", "torch_flash", "reference"]


@dataclass(frozen=True)
class BurstConfig:
    """How a patched model shards, exchanges and computes attention.

    Args:
        chunking (`str`, defaults to `"zigzag"`):
            Which rank owns which part of the sequence. `"zigzag"` gives rank r the chunks r and 2P-1-r of 2P, which
            balances causal attention; `"contiguous"` gives rank r the r-th of P chunks.
        backward (`str`, defaults to `"auto"`):
            What travels in the backward pass: `"kv_ring"` sends K and V and returns dK and dV, `"burst"` keeps K and V
            at home and sends Q, dO and two scalars a row and returns dQ (BurstAttention, arXiv 2403.09347). `"auto"`
            takes the one that sends fewer bytes.
        kernel (`str`, defaults to `"auto"`):
            The kernel that computes a tile: `"cpu_flash"` (torch's CPU flash kernel), `"torch_flash"` (the
            FlashAttention-2 kernels inside torch's CUDA builds), `"reference"` (plain torch, fp32/fp64, slow).
        logits_limit_gib (`float`, defaults to `4.0`):
            The most memory, in GiB, that logits gathered over the ranks may take.
        content_checks (`int`, defaults to `8`):
            In how many first forward passes the ranks of a group compare the content of their batches. Shapes and
            dtypes are compared in every forward pass.
    """

    chunking: Chunking = "zigzag"
    backward: Backward = "auto"
    kernel: KernelName = "auto"
    logits_limit_gib: float = 4.0
    content_checks: int = 8

    def __post_init__(self) -> None:
        choices: dict[str, Any] = {"chunking": Chunking, "backward": Backward, "kernel": KernelName}
        for name, allowed in choices.items():
            given = getattr(self, name)
            if given not in get_args(allowed):
                raise ConfigError(
                    f"BurstConfig.{name} is {given!r}; it must be one of {', '.join(map(repr, get_args(allowed)))}."
                )
        if not self.logits_limit_gib > 0:
            raise ConfigError(f"BurstConfig.logits_limit_gib is {self.logits_limit_gib}; it must be above 0.")
        if isinstance(self.content_checks, bool) or not isinstance(self.content_checks, int) or self.content_checks < 0:
            raise ConfigError(
                f"BurstConfig.content_checks is {self.content_checks!r}; it must be an int of at least 0."
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "BurstConfig":
        """Builds a config from a mapping, as read from a YAML file; unknown keys raise."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise ConfigError(f"BurstConfig has no setting {', '.join(unknown)}; it has {', '.join(names)}.")
        return cls(**values)
