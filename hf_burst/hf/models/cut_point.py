"""Where a model is cut over the ranks: the part that works on tokens, and its inputs with a value a token."""

import inspect
import sys
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from ..admission import row_of
from ..view import ModelView, has_language_head


@dataclass(frozen=True)
class TokenInput:
    """An input of a model that has a value for each token."""

    name: str  # the argument of `forward`
    dim: int = 1  # its dimension of tokens
    pad: int = 0  # the value of tokens that are appended to fill the last chunk


TOKEN_INPUTS = (
    TokenInput("input_ids"),
    TokenInput("inputs_embeds"),
    TokenInput("position_ids", dim=-1),  # (batch, tokens), or (3 or 4, batch, tokens) of rotary positions of images
    TokenInput("token_type_ids"),
)
# what wrappers hand to their language models besides: Gemma 3n and 4, Qwen3-VL and its kin, Granite 4 Vision, and
# Ernie 4.5 VL
_OF_WRAPPERS = (
    TokenInput("per_layer_inputs"),
    TokenInput("visual_pos_masks"),
    TokenInput("vision_mask"),
    TokenInput("moe_mm_token_type_ids"),
)


@dataclass(frozen=True)
class MaskedRows:
    """Inputs of a model with a row for each token that a mask shows."""

    mask: str  # the argument with the mask, `(batch, tokens)` or `(batch, tokens, 1)`, which is a token input too
    rows: str  # the argument with tensors `(tokens that are shown, hidden)`, in a list or by the numbers of layers


_DEEPSTACK = (
    MaskedRows("visual_pos_masks", "deepstack_visual_embeds"),
    MaskedRows("vision_mask", "deepstack_features"),
)


@dataclass(frozen=True)
class CutPoint:
    """Where the tokens of a model are cut. Labels are always cut outside, where the loss is computed."""

    path: str = ""  # the submodule whose inputs are cut, such as "model.language_model"; empty for the model itself
    inputs: tuple[TokenInput, ...] = TOKEN_INPUTS  # those of its inputs that are cut
    masked: tuple[MaskedRows, ...] = ()  # those with rows for some tokens


def cut_point_of(view: ModelView) -> CutPoint:
    """The cut point of a model: as the table says, else where a wrapper hands embeddings to its language model, or a
    class without a language-model head calls its base model, else the model itself."""
    path = row_of(type(view.root)).cut or view.find(language_model_path) or _base_path(view)
    return CutPoint(path, (*TOKEN_INPUTS, *_OF_WRAPPERS), _DEEPSTACK) if path else CutPoint()


def sees_blocks(view: ModelView) -> bool:
    """Whether tokens of an image or a prefix may see later ones in a wrapper, by the source of its class."""
    if not view.find(language_model_path):
        return False
    files = {kind.__module__ for kind in type(view.root).__mro__}
    sources = [inspect.getsource(sys.modules[file]) for file in files if file.startswith("transformers.models.")]
    return not sources or any("block_sequence_ids" in source for source in sources)


def modalities_of(config: PreTrainedConfig) -> list[str]:
    """The names of the configs that a wrapper's config holds: of its language model, of its towers for images and
    sound, and of a wrapper that thinks for one that speaks; empty for the config of a language model alone."""
    parts = {"text_config", "vision_config", "audio_config", "thinker_config", "talker_config"}
    return sorted(parts.intersection(config.sub_configs))


def language_model_path(view: ModelView) -> str:
    """Where a model of several modalities has its language model, such as `"model.language_model"`; else empty."""
    model = view.root
    if not isinstance(model, PreTrainedModel) or not modalities_of(model.config):
        return ""
    decoder = model.get_decoder()
    if decoder in (model, model.base_model) or "inputs_embeds" not in inspect.signature(decoder.forward).parameters:
        return ""
    return next((path for path, module in view.named if module is decoder), "")


def _base_path(view: ModelView) -> str:
    """Where a model without a language-model head has its decoder or encoder; empty if it is one itself."""
    model = view.root
    if not isinstance(model, PreTrainedModel) or model.base_model is model or view.find(has_language_head):
        return ""
    return str(model.base_model_prefix)


def reader_of(view: ModelView) -> ModelView:
    """The part of a model that works on tokens: the language model of a wrapper, or else the model itself."""
    return view.part(view.root.get_submodule(view.find(cut_point_of).path))
