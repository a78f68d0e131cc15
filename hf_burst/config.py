"""`BurstConfig`: the few knobs of hf_burst, "auto" wherever the right value follows from the data."""

import re
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .errors import ConfigError

Chunking = Literal["balanced", "zigzag", "contiguous"]
RingKind = Literal["kv_ring", "burst", "all_gather"]
Gradients = Literal["averaged_by_wrapper", "averaged_by_hand"]
Transport = Literal["auto", "p2p", "symmetric"]
KernelName = Literal["auto", "flash_attn_4", "flash_attn_2", "torch_flash", "torch_cudnn", "cpu_flash", "reference"]
_KEEP = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Schedule:
    """A schedule: the heads are spread over `ulysses` neighbouring ranks, the sequence over the rest of the group.

    Rank r is member `r % ulysses` of ring rank `r // ulysses`.

    Args:
        ring (`str`, defaults to `"kv_ring"`): What happens between the ring ranks: `"kv_ring"` (K and V rotate, dK
            and dV return), `"burst"` (backward, Q and dO rotate and dQ returns; arXiv 2403.09347) or `"all_gather"`
            (K and V of all ranks at once, some heads at a time).
        ulysses (`int`, defaults to 1): Ranks that exchange heads for tokens (DeepSpeed Ulysses, arXiv 2309.14509).
    """

    ring: RingKind = "kv_ring"
    ulysses: int = 1

    @classmethod
    def parse(cls, name: str, ranks: int | None = None) -> "Schedule":
        """Reads a name such as `"kv_ring"`, `"ulysses"` (of all `ranks`) or `"ulysses_2+burst"`.

        Raises:
            ConfigError: If there is no such schedule.
        """
        if name in get_args(RingKind):
            return cls(name)  # type: ignore[arg-type]
        if name == "ulysses":
            return cls("kv_ring", ranks or 1)
        match = re.fullmatch(r"ulysses_([1-9]\d*)\+(\w+)", name)
        if match is None or match[2] not in get_args(RingKind):
            raise ConfigError(
                f"There is no schedule {name!r}; it must be one of 'auto', 'kv_ring', 'burst', 'all_gather', "
                "'ulysses', or a product such as 'ulysses_2+kv_ring'."
            )
        return cls(match[2], int(match[1]))  # type: ignore[arg-type]

    def refusal(self, ranks: int, q_heads: int, kv_heads: int) -> str | None:
        """Why so many ranks cannot go this way with so many heads; `None` if they can."""
        if ranks % self.ulysses:
            return f"{ranks} ranks cannot be cut into groups of {self.ulysses}"
        if kv_heads % self.ulysses or q_heads % self.ulysses:
            return f"{q_heads} query and {kv_heads} key heads cannot be spread over {self.ulysses} ranks"
        return None

    def __str__(self) -> str:
        return self.ring if self.ulysses == 1 else f"ulysses_{self.ulysses}+{self.ring}"


@dataclass(frozen=True)
class BurstConfig:
    """How a patched model shards, exchanges and computes attention.

    Args:
        chunking (`str`, defaults to `"balanced"`):
            Which rank owns which part of the sequence. `"contiguous"` gives rank r the r-th of P chunks; `"zigzag"` the
            chunks r and 2P-1-r of 2P, which balances causal attention over one document; `"balanced"` takes the
            coarsest cut, in up to 16 chunks a rank, that leaves the busiest rank at most 2 % above the mean for the
            packed documents of a batch (and the steps of a ring over up to 8 ranks 15 %), or else the most even one.
            Every rank holds as many tokens.
        schedule (`str`, defaults to `"auto"`):
            How the ranks exchange blocks: `"kv_ring"` sends K and V and returns dK and dV, `"burst"` keeps K and V at
            home in the backward pass and sends Q, dO and two scalars a row and returns dQ (BurstAttention, arXiv
            2403.09347), `"all_gather"` collects K and V of all ranks, some heads at a time, `"ulysses"` exchanges heads
            for tokens, and `"ulysses_2+kv_ring"` (any number, any of the first three) is a product of two. `"auto"`
            takes a ring over two ranks and where documents mostly stay at home, else exchanges heads over as many ranks
            of one host as the heads allow, and logs why. It goes by the documents of every batch (under
            `torch.compile`, by one whole document). The ring is `"burst"` where there are as many key as query heads.
        kernel (`str`, defaults to `"auto"`):
            The kernel that computes a tile: `"flash_attn_4"` (package `flash-attn-4`), `"flash_attn_2"` (package
            `flash-attn`), `"torch_flash"` (the FlashAttention-2 kernels inside torch's CUDA builds), `"torch_cudnn"`
            (cuDNN's, inside them too: no windows), `"cpu_flash"` (torch's CPU flash kernel), `"reference"` (plain
            torch, fp32/fp64, slow). `"auto"` takes the fastest that can, and logs why.
        transport (`str`, defaults to `"auto"`):
            How blocks travel: `"symmetric"` (inside of one host: ranks read each other's memory), `"p2p"` (send and
            receive of NCCL or gloo), `"auto"` for the first where it can be had.
        attention_keep (`float`, defaults to `1.0`):
            How much of the attention output is kept in checkpointed layers instead of being computed again, from the
            end of the sequence: 1.0 for all of it (the memory of one more hidden state a layer), 0.0 for nothing, or
            0.25, 0.5, 0.75. Half of it costs half of the memory, and a quarter of causal attention is computed again;
            the ranks then have as much of every half or quarter. Encoders keep all or nothing. It stays on the device,
            also where checkpointing offloads to the host.
        logits_limit_gib (`float`, defaults to `4.0`):
            The most memory, in GiB, that logits gathered over the ranks may take.
        gradients (`str`, defaults to `"averaged_by_wrapper"`):
            Who averages gradients over the ranks: DDP, FSDP, DeepSpeed or a hook of a parameter, without which training
            is refused; or `"averaged_by_hand"`, your own loop between `backward` and `step`. Weights are compared after
            the first update in either case.
    """

    chunking: Chunking = "balanced"
    schedule: str = "auto"
    kernel: KernelName = "auto"
    transport: Transport = "auto"
    attention_keep: float = 1.0
    logits_limit_gib: float = 4.0
    gradients: Gradients = "averaged_by_wrapper"

    def __post_init__(self) -> None:
        if self.schedule != "auto":
            Schedule.parse(str(self.schedule))
        choices: dict[str, Any] = {
            "chunking": Chunking,
            "kernel": KernelName,
            "transport": Transport,
            "gradients": Gradients,
        }
        for name, kind in choices.items():
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ConfigError(
                    f"BurstConfig.{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}."
                )
        if self.attention_keep not in _KEEP:
            keeps = ", ".join(map(str, _KEEP))
            raise ConfigError(f"BurstConfig.attention_keep is {self.attention_keep!r}; it must be one of {keeps}.")
        if not (isinstance(self.logits_limit_gib, int | float) and self.logits_limit_gib > 0):
            raise ConfigError(f"BurstConfig.logits_limit_gib is {self.logits_limit_gib!r}; it must be above 0.")

    def chunking_over(self, ranks: int) -> Chunking:
        """How a batch is cut over so many ranks. Where all of them exchange heads, one chunk a rank is as even."""
        exchanged = self.schedule != "auto" and Schedule.parse(self.schedule, ranks).ulysses == ranks > 1
        return "contiguous" if exchanged and self.chunking == "balanced" else self.chunking

    @property
    def stretches(self) -> int:
        """Equal parts of a sequence, of each of which every rank holds as much. The kept attention begins with one."""
        return {0.0: 1, 0.5: 2}.get(self.attention_keep % 1, 4)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "BurstConfig":
        """Builds a config from a mapping, as read from a YAML file; unknown keys raise."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise ConfigError(f"BurstConfig has no setting {', '.join(unknown)}; it has {', '.join(names)}.")
        return cls(**values)
