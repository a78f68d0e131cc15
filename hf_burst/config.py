"""`BurstConfig` and `Memory`: the settings of hf_burst. "auto" chooses the value that suits the data."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .errors import ConfigError

Chunking = Literal["balanced", "zigzag", "contiguous", "documents"]
RingKind = Literal["kv_ring", "burst"]
Gradients = Literal["averaged_by_wrapper", "manual"]
Transport = Literal["auto", "p2p", "symmetric"]
# fmt: off
KernelName = Literal[
    "auto", "flash_attn_4", "flash_attn_2", "torch_flash", "torch_cudnn", "ffpa", "torch_efficient", "cpu_flash",
    "reference",
]
# fmt: on
_KEEP = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Schedule:
    """A schedule: `ulysses` neighbouring ranks split the heads, and the rest of the group splits the sequence.

    Rank r is member `r % ulysses` of ring rank `r // ulysses`.

    Args:
        ring (`str`, defaults to `"kv_ring"`): What the ring ranks exchange, as in [`BurstConfig`]: `"kv_ring"` or
            `"burst"`.
        ulysses (`int`, defaults to 1): Ranks that exchange heads for tokens (DeepSpeed Ulysses, arXiv 2309.14509).
    """

    ring: RingKind = "kv_ring"
    ulysses: int = 1

    @classmethod
    def parse(cls, name: str, ranks: int | None = None) -> "Schedule":
        """Parses a name such as `"kv_ring"`, `"ulysses"` (over all `ranks`) or `"ulysses_2+burst"`.

        Raises:
            ConfigError: If there is no such schedule.
        """
        if name == "ulysses":
            return cls("kv_ring", ranks or 1)
        match = re.fullmatch(r"(ulysses_([1-9]\d*)\+)?(kv_ring|burst)", str(name))
        if match is None:
            raise ConfigError(
                f"There is no schedule {name!r}; it must be one of 'auto', 'kv_ring', 'burst', 'ulysses', or "
                "a product such as 'ulysses_2+kv_ring'."
            )
        return cls(match[3], int(match[2] or 1))  # type: ignore[arg-type]

    def refusal(self, ranks: int, q_heads: int, kv_heads: int) -> str | None:
        """Returns why these numbers of ranks and heads do not fit the schedule, or `None` if they do."""
        if ranks % self.ulysses:
            return f"{ranks} ranks cannot be cut into groups of {self.ulysses}"
        if kv_heads % self.ulysses or q_heads % self.ulysses:
            return f"{q_heads} query and {kv_heads} key heads cannot be spread over {self.ulysses} ranks"
        return None

    def hosts(self, ranks: int, ranks_per_host: int) -> int:
        """Returns the number of hosts in the outer level of a two-level ring. It is 1 (one level) for a single host,
        for hosts of unequal size, and if a group that exchanges heads spans hosts."""
        even = ranks % ranks_per_host == 0 and ranks_per_host % self.ulysses == 0
        return ranks // ranks_per_host if even else 1

    def __str__(self) -> str:
        return self.ring if self.ulysses == 1 else f"ulysses_{self.ulysses}+{self.ring}"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """How a training step saves memory: `BurstConfig(memory=hf_burst.Memory(tiled_mlp=8192))`.

    The step uses exactly these settings. Omitted ones keep their defaults, and nothing is chosen automatically.

    Args:
        activation_offloading (`float`, defaults to `0.0`):
            The share of the checkpointed layers, counted from the first, that keep their inputs and attention outputs
            in page-locked host memory until the backward pass. Copies overlap computation. The last layer stays on the
            GPU.
        tiled_mlp (`int`, defaults to 0):
            Computes MLPs, and experts behind a router, this many tokens at a time in both passes; 0 for all at once.
            The backward pass recomputes them, as a checkpointed layer does anyway.
        head_groups (`int`, defaults to 1):
            Computes and exchanges attention in at least this many groups of heads, one after another, if there are
            that many key heads. This takes less memory, and sends more and shorter messages.
        layers_per_checkpoint (`int`, defaults to 1):
            Only the first of this many consecutive checkpointed layers keeps its input. The backward pass recomputes
            the inputs of the others, but not the attention outputs that are kept. The last layers of the model, this
            many, all keep their inputs.
        attention_keep (`float`, defaults to `1.0`):
            The share of the attention output that checkpointed layers keep instead of recomputing it: 0.0, 0.25, 0.5,
            0.75 or 1.0, from the end of the sequence. Keeping all of it takes the memory of one more hidden state per
            layer. Keeping half takes half of that, and recomputes a quarter of causal attention. For a partial share,
            every rank holds the same amount of each half or quarter. Encoders keep all or nothing. Recurrent layers
            keep received states and halos unless it is 0.0.

    Raises:
        ConfigError: If a value is not allowed.
    """

    # in the order that `memory="auto"` sets them
    activation_offloading: float = 0.0
    tiled_mlp: int = 0
    head_groups: int = 1
    layers_per_checkpoint: int = 1
    attention_keep: float = 1.0

    def __post_init__(self) -> None:
        share = self.activation_offloading
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(f"Memory.activation_offloading is {share!r}; it must be a share from 0.0 to 1.0.")
        for name, least in {"tiled_mlp": 0, "head_groups": 1, "layers_per_checkpoint": 1}.items():
            count = getattr(self, name)
            if type(count) is not int or count < least:
                raise ConfigError(f"Memory.{name} is {count!r}; it must be a number of at least {least}.")
        if self.attention_keep not in _KEEP:
            raise ConfigError(
                f"Memory.attention_keep is {self.attention_keep!r}; it must be one of {str(_KEEP)[1:-1]}."
            )

    @property
    def stretches(self) -> int:
        """Number of equal parts of the sequence, so that the kept attention starts at the beginning of a part. Every
        rank holds the same amount of each part."""
        return {0.0: 1, 0.5: 2}.get(self.attention_keep % 1, 4)


@dataclass(frozen=True)
class BurstConfig:
    """How a patched model shards, exchanges and computes attention.

    Args:
        schedule (`str`, defaults to `"auto"`):
            How the ranks exchange blocks.

            - `"kv_ring"`: K and V rotate. In the backward pass dK and dV return.
            - `"burst"`: the forward pass is the same. In the backward pass Q, dO and two scalars per row rotate, and dQ
              returns (BurstAttention, arXiv 2403.09347).
            - `"ulysses"`: ranks exchange tokens for heads.
            - `"ulysses_2+kv_ring"`: a product of the two, with any number and either ring.
            - `"auto"`: a ring over two ranks of one host, or if documents mostly stay on their ranks. Otherwise as many
              ranks of one host exchange heads as the heads allow, with a ring around them; ranks of several hosts do so
              if that sends at least a sixth less between hosts. The ring is `"burst"` if there are as many key heads as
              query heads. Each batch's documents decide (under `torch.compile`, one whole document). The log says why.
        kernel (`str`, defaults to `"auto"`):
            The kernel that computes a tile. `"auto"` takes the fastest that supports it, and logs why.

            - `"flash_attn_4"`: from the package `flash-attn-4`.
            - `"flash_attn_2"`: from the package `flash-attn`.
            - `"torch_flash"`: FlashAttention-2 inside torch's CUDA builds.
            - `"torch_cudnn"`: cuDNN's kernel inside torch's CUDA builds. It has no windows, and runs only if named.
            - `"ffpa"`: from the package `ffpa-attn`, for heads above 256 on Hopper.
            - `"torch_efficient"`: memory-efficient attention inside torch's CUDA builds, for heads of any size.
            - `"cpu_flash"`: torch's flash kernel for CPUs.
            - `"reference"`: plain torch in fp32 or fp64; slow.
        transport (`str`, defaults to `"auto"`):
            How blocks travel. With `"symmetric"`, ranks of one host read each other's memory. With `"p2p"`, they send
            and receive over NCCL or gloo. `"auto"` takes the first if it is available.
        chunking (`str`, defaults to `"balanced"`):
            Which rank owns which part of the sequence. All ranks hold equally many tokens. `"contiguous"` gives rank r
            the r-th of P chunks. `"zigzag"` gives it chunks r and 2P-1-r of 2P, which balances one causal document.
            `"balanced"` counts the work of packed documents. It takes the coarsest cut, up to 16 chunks per rank, whose
            busiest rank is at most 2 % above the mean. Steps of a ring over up to 8 ranks may be 15 % above it. If no
            cut satisfies both, it takes the most even one. `"documents"` keeps documents whole as far as equal numbers
            of tokens per rank allow. If a model's layers pass states, `"balanced"` means `"contiguous"` without
            attention, `"documents"` if every document fits on one rank, and `"zigzag"` otherwise.
        gradients (`str`, defaults to `"averaged_by_wrapper"`):
            Who averages gradients over the ranks. By default DDP, FSDP, DeepSpeed or a parameter hook does, and
            training is refused without one. `"manual"` means that your own loop does it between `backward` and `step`.
            Weights are compared after the first update in either case.
        memory (`str` or [`Memory`], defaults to `"auto"`):
            How a training step saves memory.

            - `"auto"`: raises the level of saving until a step fits into a GPU's memory. The first step takes the first
              level estimated to need less than half of the free memory, and later steps the first that fits by
              measurement. The levels offload layers, then set `tiled_mlp` and `head_groups`, then
              `layers_per_checkpoint`, then `attention_keep`. Below 32,768 tokens per GPU the tiles come first. The log
              says what is set, and warns if nothing fits.
            - `"manual"`: chooses nothing; all settings of [`Memory`] keep their defaults.
            - an [`hf_burst.Memory`][Memory]: exactly these settings; nothing else is chosen.
        share_prefixes (`"auto"` or `bool`, defaults to `"auto"`):
            Whether to compute the common beginning of texts in a batch once, such as the prompt of a pair of answers.
            Outputs and gradients are those of all rows. Anything that cannot be shared is computed row by row, and the
            log says so.

            - `"auto"`: beginnings of at least 256 tokens, if that saves a quarter of the tokens. Not with dropout,
              because its draws would differ.
            - `True`: every common beginning. Dropout draws once for a shared token.
            - `False`: nothing.

    Raises:
        ConfigError: If a value is not allowed.

    Example:

    ```python
    >>> config = hf_burst.BurstConfig(schedule="burst", memory=hf_burst.Memory(tiled_mlp=8192, head_groups=2))
    ```
    """

    schedule: str = "auto"
    kernel: KernelName = "auto"
    transport: Transport = "auto"
    chunking: Chunking = "balanced"
    gradients: Gradients = "averaged_by_wrapper"
    memory: Memory | Literal["auto", "manual"] = "auto"
    share_prefixes: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.schedule != "auto":
            Schedule.parse(self.schedule)
        choices = {
            "kernel": get_args(KernelName),
            "transport": get_args(Transport),
            "chunking": get_args(Chunking),
            "gradients": get_args(Gradients),
            "share_prefixes": ("auto", True, False),
            "memory": ("auto", "manual"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            other = ", or an hf_burst.Memory" if name == "memory" else ""
            if other and isinstance(value, Memory):
                continue
            if value not in allowed or not isinstance(value, str | bool):  # 1 is no True
                raise ConfigError(
                    f"BurstConfig.{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}{other}."
                )
        if self.chunking == "documents" and self.memory_settings.stretches > 1:
            raise ConfigError(
                f"BurstConfig(chunking='documents', memory={self.memory!r}): attention is kept in parts of chunks of "
                "one size. Take attention_keep 1.0 or 0.0, or another chunking."
            )

    @property
    def memory_settings(self) -> Memory:
        """The given memory settings; the defaults for `"auto"` and `"manual"`."""
        return self.memory if isinstance(self.memory, Memory) else Memory()

    def chunking_over(self, ranks: int) -> Chunking:
        """Returns the chunking of a batch. If all ranks exchange heads, one chunk per rank is just as balanced."""
        exchanged = self.schedule != "auto" and Schedule.parse(self.schedule, ranks).ulysses == ranks > 1
        return "contiguous" if exchanged and self.chunking == "balanced" else self.chunking

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BurstConfig":
        """Builds a config from a mapping, such as a YAML file's; `memory` may itself be a mapping.

        Raises:
            ConfigError: For unknown keys, and as [`BurstConfig`] does.
        """
        memory = values.get("memory")
        nested = memory if isinstance(memory, Mapping) else {}
        for kind, given in ((cls, values), (Memory, nested)):
            names = [field.name for field in fields(kind)]
            unknown = sorted(given.keys() - names)
            if unknown:
                raise ConfigError(f"{kind.__name__} has no setting {', '.join(unknown)}; it has {', '.join(names)}.")
        return cls(**{**values, "memory": Memory(**nested)} if memory is nested else values)
