"""Where a model's inputs are sharded over the ranks: the submodule that works on tokens, and its per-token inputs."""

import inspect
import sys
from collections.abc import Mapping
from types import MappingProxyType

from transformers import PreTrainedConfig, PreTrainedModel

from ..admission import row_of
from ..view import ModelView, has_language_head

# inputs with one value per token, and their token dimension
TOKEN_INPUTS: Mapping[str, int] = MappingProxyType(
    {
        "input_ids": 1,
        "inputs_embeds": 1,
        "position_ids": -1,  # (batch, tokens), or (3 or 4, batch, tokens) for multimodal RoPE
        "token_type_ids": 1,
        # that wrappers pass to their language models: Gemma 3n and 4, Qwen3-VL and its relatives, Granite 4 Vision, and
        # Ernie 4.5 VL
        "per_layer_inputs": 1,
        "visual_pos_masks": 1,
        "vision_mask": 1,
        "moe_mm_token_type_ids": 1,
    }
)
# inputs with one row, in a list or a dict by layer, for each token that a mask selects: `(selected tokens, hidden)`;
# and the input with the mask, `(batch, tokens)` or `(batch, tokens, 1)`
MASKED_ROWS: Mapping[str, str] = MappingProxyType(
    {"deepstack_visual_embeds": "visual_pos_masks", "deepstack_features": "vision_mask"}
)


def cut_path(view: ModelView) -> str:
    """Returns the path of the submodule where a model's tokens are sharded, empty for the model itself: the table's
    entry, else where a wrapper passes embeddings to its language model or a class without a language-model head calls
    its base model. Labels are always sharded outside, where the loss is computed."""
    return row_of(type(view.root)).cut or view.find(language_model_path) or _base_path(view)


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
    return view.part(view.root.get_submodule(view.find(cut_path)))
