"""`BurstConfig`: the settings of hf_burst, "auto" wherever the right value follows from the data."""

import re
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .errors import ConfigError

Chunking = Literal["balanced", "zigzag", "contiguous", "documents"]
RingKind = Literal["kv_ring", "burst", "all_gather"]
Recurrence = Literal["auto", "states", "heads"]
Memory = Literal["auto", "named"]
Gradients = Literal["averaged_by_wrapper", "averaged_by_hand"]
Transport = Literal["auto", "p2p", "symmetric"]
KernelName = Literal["auto", "flash_attn_4", "flash_attn_2", "torch_flash", "torch_cudnn", "cpu_flash", "reference"]
_KEEP = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Schedule:
    """A schedule: the heads are spread over `ulysses` neighbouring ranks, the sequence over the rest of the group.

    Rank r is member `r % ulysses` of ring rank `r // ulysses`.

    Args:
        ring (`str`, defaults to `"kv_ring"`): What happens between the ring ranks, as in [`BurstConfig`]: `"kv_ring"`,
            `"burst"` or `"all_gather"`.
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

    def hosts(self, ranks: int, ranks_per_host: int) -> int:
        """Hosts between which a ring of so many ranks has a level of its own. It is 1, and the ring has one level, with
        one host, with unequal ones, and if ranks that exchange heads are on several hosts."""
        even = ranks % ranks_per_host == 0 and ranks_per_host % self.ulysses == 0
        return ranks // ranks_per_host if even else 1

    def __str__(self) -> str:
        return self.ring if self.ulysses == 1 else f"ulysses_{self.ulysses}+{self.ring}"


@dataclass(frozen=True)
class BurstConfig:
    """How a patched model shards, exchanges and computes attention.

    Args:
        chunking (`str`, defaults to `"balanced"`):
            Which rank owns which part of the sequence. Every rank holds as many tokens. `"contiguous"` gives rank r the
            r-th of P chunks. `"zigzag"` gives it chunks r and 2P-1-r of 2P, which balances one causal document.
            `"balanced"` counts the work of packed documents. It takes the coarsest cut, in up to 16 chunks a rank, that
            leaves the busiest rank at most 2 % above the mean. Steps of a ring over up to 8 ranks may be 15 % above it.
            If no cut reaches both, it takes the most even one. `"documents"` leaves documents whole as far as every
            rank then holds as many tokens. For a model with recurrent layers `"balanced"` compares all of them, and
            takes the one for which attention and recurrent layers together are predicted to take the least time.
        schedule (`str`, defaults to `"auto"`):
            How the ranks exchange blocks.

            - `"kv_ring"`: K and V rotate. In the backward pass dK and dV return.
            - `"burst"`: the same forward. Backward, Q, dO and two scalars a row rotate, and dQ returns (BurstAttention,
              arXiv 2403.09347).
            - `"all_gather"`: K and V of all ranks are collected, some heads at a time.
            - `"ulysses"`: tokens are exchanged for heads.
            - `"ulysses_2+kv_ring"`: a product of two, with any number and any of the first three.
            - `"auto"`: a ring over two ranks, or if documents mostly stay at home. Otherwise as many ranks of one host
              exchange heads as the heads allow. The ring is `"burst"` if there are as many key heads as query heads.
              Over several hosts it is the schedule that is predicted to take the least time for whole sequences, or a
              ring if documents mostly stay at home. The documents of every batch count (under `torch.compile`, one
              whole document). The log says why.
        kernel (`str`, defaults to `"auto"`):
            The kernel that computes a tile. `"auto"` takes the fastest that can, and logs why.

            - `"flash_attn_4"`: of the package `flash-attn-4`.
            - `"flash_attn_2"`: of the package `flash-attn`.
            - `"torch_flash"`: FlashAttention-2 inside torch's CUDA builds.
            - `"torch_cudnn"`: cuDNN's, inside torch's CUDA builds. It has no windows, and runs only if it is named.
            - `"cpu_flash"`: torch's flash kernel for CPUs.
            - `"reference"`: plain torch in fp32 or fp64. It is slow.
        transport (`str`, defaults to `"auto"`):
            How blocks travel. By `"symmetric"` ranks of one host read each other's memory. By `"p2p"` they send and
            receive, over NCCL or gloo. `"auto"` takes the first where it can be had.
        ranks_per_host (`int`, *optional*):
            Ranks of a group on one host, neighbours of each other. By default it is found: `NCCL_HOSTID` where it is
            set, else host names. Between hosts every block crosses once, and ranks of a host hand it round. With as
            many as the group has ranks, blocks go straight to every rank that needs them.
        recurrence (`str`, defaults to `"auto"`):
            How recurrent layers pass what they know over the ranks. By `"states"` every rank computes its own tokens,
            and the states at the ends of its runs of tokens travel. By `"heads"` tokens are exchanged for heads, as
            Ulysses does. `"auto"` takes for every batch the way that all recurrent layers of the model together are
            predicted to take less time by; where a layer has no price (MiniMax, RecurrentGemma, Zaya), states. Mamba1
            always exchanges channels, whatever is named: its kernels take no states.
        memory (`str`, defaults to `"auto"`):
            By `"auto"`, a training step that does not fit into a GPU's memory is made to fit: layers are offloaded,
            then `tiled_mlp` and `head_groups` are set, then `layers_per_checkpoint`, then `attention_keep`, one after
            another until the step is predicted to fit, as far as they are not named here. Below 32,768 tokens a GPU the
            tiles come first. The log says what is set, and warns if nothing fits. By `"named"` all of them stay as they
            are.
        attention_keep (`float`, defaults to `1.0`):
            The share of the attention output that checkpointed layers keep instead of computing it again: 0.0, 0.25,
            0.5, 0.75 or 1.0, from the end of the sequence. All of it takes the memory of one more hidden state a layer.
            Half of it takes half of that, and a quarter of causal attention is computed again. Every rank then has as
            much of each half or quarter. Encoders keep all or nothing. Received states and halos of recurrent layers
            are kept, unless it is 0.0.
        activation_offloading (`float`, defaults to `0.0`):
            The share of the checkpointed layers, from the first one on, whose inputs and kept attention wait in
            page-locked host memory for the backward pass. Copies run beside computation. The last layer keeps its own.
        layers_per_checkpoint (`int`, defaults to 1):
            Of so many checkpointed layers in a row only the first one keeps its input. The backward pass computes the
            inputs of the others again, beside what it computes again anyway; kept attention is not. The last so many
            layers keep theirs.
        tiled_mlp (`int`, defaults to 0):
            MLPs, and experts behind a router, are computed so many tokens at a time, in both passes; 0 for all at once.
            The backward pass computes them again, as a checkpointed layer does anyway.
        head_groups (`int`, defaults to 1):
            Attention is computed and exchanged for at least so many groups of the heads, one after another, if there
            are as many key heads: less memory, more and shorter messages.
        logits_limit_gib (`float`, defaults to `4.0`):
            The most memory, in GiB, that logits gathered over the ranks may take.
        gradients (`str`, defaults to `"averaged_by_wrapper"`):
            Who averages gradients over the ranks. By default DDP, FSDP, DeepSpeed or a hook of a parameter does, and
            training is refused without them. `"averaged_by_hand"` says that your own loop does it between `backward`
            and `step`. Weights are compared after the first update in either case.
    """

    chunking: Chunking = "balanced"
    schedule: str = "auto"
    kernel: KernelName = "auto"
    transport: Transport = "auto"
    ranks_per_host: int | None = None
    recurrence: Recurrence = "auto"
    memory: Memory = "auto"
    attention_keep: float = 1.0
    activation_offloading: float = 0.0
    layers_per_checkpoint: int = 1
    tiled_mlp: int = 0
    head_groups: int = 1
    logits_limit_gib: float = 4.0
    gradients: Gradients = "averaged_by_wrapper"

    def __post_init__(self) -> None:
        if self.schedule != "auto":
            Schedule.parse(str(self.schedule))
        choices: dict[str, Any] = {
            "chunking": Chunking,
            "kernel": KernelName,
            "transport": Transport,
            "recurrence": Recurrence,
            "memory": Memory,
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
        share = self.activation_offloading
        if not (isinstance(share, int | float) and 0 <= share <= 1):
            raise ConfigError(f"BurstConfig.activation_offloading is {share!r}; it must be a share from 0.0 to 1.0.")
        if type(self.layers_per_checkpoint) is not int or self.layers_per_checkpoint < 1:
            given = self.layers_per_checkpoint
            raise ConfigError(f"BurstConfig.layers_per_checkpoint is {given!r}; give a number of at least 1.")
        if type(self.tiled_mlp) is not int or self.tiled_mlp < 0:
            raise ConfigError(f"BurstConfig.tiled_mlp is {self.tiled_mlp!r}; give tokens of a tile, or 0 for none.")
        per_host = self.ranks_per_host
        if per_host is not None and (type(per_host) is not int or per_host < 1):
            raise ConfigError(f"BurstConfig.ranks_per_host is {per_host!r}; give a number of at least 1, or None.")
        if type(self.head_groups) is not int or self.head_groups < 1:
            raise ConfigError(f"BurstConfig.head_groups is {self.head_groups!r}; give a number of at least 1.")
        if self.chunking == "documents" and self.stretches > 1:
            raise ConfigError(
                f"BurstConfig(chunking='documents', attention_keep={self.attention_keep!r}): attention is kept in "
                "parts of chunks of one size. Take attention_keep 1.0 or 0.0, or another chunking."
            )
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
