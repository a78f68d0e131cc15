"""The exceptions of hf_burst. All are `ValueError`s that say what was given, what is allowed and what to do."""

OUT_OF_MEMORY = (
    "hf_burst: what helps, at rising cost of time: gradient_checkpointing=True; memory='auto' in BurstConfig, or "
    "hf_burst.Memory(tiled_mlp=16384, head_groups=4, activation_offloading=1.0, layers_per_checkpoint=4, "
    "attention_keep=0.0), with tiled_mlp=4096 below 65,536 tokens a GPU; a larger burst_size; LoRA. hf-burst plan "
    "--model NAME --length TOKENS --gpus N predicts what fits."
)


class BurstError(ValueError):
    """Base class of every error that hf_burst raises for a user's input."""

    def __init__(self, what: str, why: str = "", instead: str = "") -> None:
        """Joins the three parts of a refusal into its message, or takes a complete message."""
        super().__init__(f"{what}: {why}. {instead}." if why else what)

    @classmethod
    def refuse(cls, *cases: tuple[object, *tuple[str, ...]]) -> None:
        """Raises the first case that holds. A case is a condition, followed by the parts of its message."""
        for holds, *parts in cases:
            if holds:
                raise cls(*parts)


class ConfigError(BurstError):
    """A setting, a mesh or a group that cannot be used."""


class ShardingError(BurstError):
    """A sequence that cannot be cut over the ranks as asked."""


class BatchError(BurstError):
    """A batch that cannot be used as given."""


class RankMismatchError(BurstError):
    """Ranks of one group hold inputs that do not match, or wait for each other in different places."""


class LostRankError(BurstError, RuntimeError):
    """This rank cannot go on, because another rank of the group ended or did not arrive within the time limit."""


class KernelError(BurstError):
    """No kernel, or not the requested one, can compute this attention."""


class UnsupportedModelError(BurstError):
    """A model, or one of its settings, that hf_burst cannot compute exactly and therefore refuses."""
