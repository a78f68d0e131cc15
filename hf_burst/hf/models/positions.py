"""The number of positions that a model was trained on, and a warning for longer sequences."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SCALED = ("yarn", "linear", "dynamic")  # RoPE types whose factor gives the reach; others use max_position_embeddings


def scaled_rope(config: "PreTrainedConfig") -> dict[str, Any] | None:
    """Returns the RoPE parameters to scale: those of full attention, if layer types have their own."""
    parameters: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    if parameters and any(isinstance(value, dict) for value in parameters.values()):
        return parameters.get("full_attention")
    return parameters


def pretrained_length(config: "PreTrainedConfig") -> int:
    """Returns the length, in tokens, that YaRN's factor multiplies."""
    original = getattr(config, "original_max_position_embeddings", None)
    original = original or (scaled_rope(config) or {}).get("original_max_position_embeddings")
    return int(original or config.max_position_embeddings)


def beyond_positions(config: "PreTrainedConfig", length: int, what: str, setting: str) -> str | None:
    """Returns a warning if a sequence is longer than the model's positions, including scaled RoPE; else `None`.

    Args:
        config (`PreTrainedConfig`): The config of the model.
        length (`int`): The tokens of the sequence.
        what (`str`): The beginning of the sentence, which names the long sequence.
        setting (`str`): The setting by which the user scales RoPE.
    """
    config = config.get_text_config()
    most, rope = getattr(config, "max_position_embeddings", None), scaled_rope(config) or {}
    if most is None:
        return None
    # Gemma 3: its positions already include the factor
    counted = rope.get("rope_type") == "linear" and rope is not config.rope_parameters
    reaches = rope.get("rope_type") in _SCALED and not counted
    scaled = rope.get("factor", 1.0) * pretrained_length(config) if reaches else 0
    if length <= max(most, scaled):
        return None
    said = f"{what}, but the model has max_position_embeddings {most:,}: it has not learned later positions."
    factor = -(-length // pretrained_length(config))
    return (
        f"{said} To extend it, set {setting}: {{rope_type: yarn, factor: {factor}.0}}."
        if rope and not counted
        else said
    )
