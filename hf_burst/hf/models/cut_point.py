"""Where a model's inputs are sharded over the ranks: the submodule that works on tokens, and its per-token inputs."""

import inspect
import sys
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from ..admission import row_of
from ..view import ModelView, has_language_head


@dataclass(frozen=True)
class TokenInput:
    """A model input with one value per token."""

    name: str  # the argument of `forward`
    dim: int = 1  # the token dimension
    pad: int = 0  # the value of padding that fills the last chunk


TOKEN_INPUTS = (
    TokenInput("input_ids"),
    TokenInput("inputs_embeds"),
    TokenInput("position_ids", dim=-1),  # (batch, tokens), or (3 or 4, batch, tokens) for multimodal RoPE
    TokenInput("token_type_ids"),
)
# further inputs that wrappers pass to their language models: Gemma 3n and 4, Qwen3-VL and its relatives, Granite 4
# Vision, and Ernie 4.5 VL
_OF_WRAPPERS = (
    TokenInput("per_layer_inputs"),
    TokenInput("visual_pos_masks"),
    TokenInput("vision_mask"),
    TokenInput("moe_mm_token_type_ids"),
)


@dataclass(frozen=True)
class MaskedRows:
    """Model inputs with one row for each token that a mask selects."""

    mask: str  # the argument with the mask, `(batch, tokens)` or `(batch, tokens, 1)`, also a token input
    rows: str  # the argument with tensors `(selected tokens, hidden)`, in a list or a dict by layer index


_DEEPSTACK = (
    MaskedRows("visual_pos_masks", "deepstack_visual_embeds"),
    MaskedRows("vision_mask", "deepstack_features"),
)


@dataclass(frozen=True)
class CutPoint:
    """Where a model's tokens are sharded. Labels are always sharded outside, where the loss is computed."""

    path: str = ""  # the submodule with sharded inputs, such as "model.language_model"; empty for the model itself
    inputs: tuple[TokenInput, ...] = TOKEN_INPUTS  # its inputs that are sharded
    masked: tuple[MaskedRows, ...] = ()  # its inputs with rows for some tokens only


def cut_point_of(view: ModelView) -> CutPoint:
    """Returns the cut point of a model: the table's entry, else where a wrapper passes embeddings to its language model
    or a class without a language-model head calls its base model, else the model itself."""
    path = row_of(type(view.root)).cut or view.find(language_model_path) or _base_path(view)
    return CutPoint(path, (*TOKEN_INPUTS, *_OF_WRAPPERS), _DEEPSTACK) if path else CutPoint()


def sees_blocks(view: ModelView) -> bool:
    """Returns whether image or prefix tokens of a wrapper may see later ones, according to its source code."""
    if not view.find(language_model_path):
        return False
    files = {kind.__module__ for kind in type(view.root).__mro__}
    sources = [inspect.getsource(sys.modules[file]) for file in files if file.startswith("transformers.models.")]
    return not sources or any("block_sequence_ids" in source for source in sources)


def modalities_of(config: PreTrainedConfig) -> list[str]:
    """Returns the names of a wrapper's sub-configs (language model, image and audio towers, thinker and talker); empty
    for the config of a plain language model."""
    parts = {"text_config", "vision_config", "audio_config", "thinker_config", "talker_config"}
    return sorted(parts.intersection(config.sub_configs))


def language_model_path(view: ModelView) -> str:
    """Returns the path of a multimodal model's language model, such as `"model.language_model"`; else empty."""
    model = view.root
    if not isinstance(model, PreTrainedModel) or not modalities_of(model.config):
        return ""
    decoder = model.get_decoder()
    if decoder in (model, model.base_model) or "inputs_embeds" not in inspect.signature(decoder.forward).parameters:
        return ""
    return next((path for path, module in view.named if module is decoder), "")


def _base_path(view: ModelView) -> str:
    """Returns the path of a headless model's decoder or encoder; empty if the model is one itself."""
    model = view.root
    if not isinstance(model, PreTrainedModel) or model.base_model is model or view.find(has_language_head):
        return ""
    return str(model.base_model_prefix)


def reader_of(view: ModelView) -> ModelView:
    """Returns the part of a model that works on tokens: a wrapper's language model, or the model itself."""
    return view.part(view.root.get_submodule(view.find(cut_point_of).path))
