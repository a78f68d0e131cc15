"""Where a model is cut over the ranks: the part that works on tokens, and its inputs with a value a token."""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from transformers import PreTrainedConfig, PreTrainedModel

from ..view import ModelView


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


# families of wrappers that were compared on images. Ranks share the images by their "patches", which grids count, or by
# "images" of one row each, or not at all
_SEEING: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("Aria", "DeepseekOcr2", "Emu3", "FuyuForCausalLM", "Granite4Vision", "GraniteDocling"), ""),
        **dict.fromkeys(("Gemma4", "Gemma4Unified"), ""),
        **dict.fromkeys(("Idefics2", "Idefics3", "Janus", "Lfm2Vl", "LightOnOcr", "Llama4", "LlavaNext"), ""),
        **dict.fromkeys(("LlavaNextVideo", "LlavaOnevision", "MiniCPMOcr", "MiniCPMV4_6", "MiniCPMV4_7"), ""),
        **dict.fromkeys(("SmolVLM", "Step3p7", "UnlimitedOcr"), ""),
        **dict.fromkeys(("AyaVision", "Cohere2Vision", "DeepseekVL", "DeepseekVLHybrid", "GotOcr2"), "images"),
        **dict.fromkeys(("Gemma3", "PaliGemma"), "images"),
        **dict.fromkeys(("InternVL", "Llava", "Mistral3", "Ovis2", "QianfanOCR", "VideoLlava", "VipLlava"), "images"),
        **dict.fromkeys(("CohereCompass", "Cosmos3Edge", "Cosmos3Omni", "Ernie4_5_VLMoe", "Exaone4_5_"), "patches"),
        **dict.fromkeys(("Glm46V", "Glm4v", "Glm4vMoe", "GlmOcr", "HunYuanVL", "HyperCLOVAXVisionV2"), "patches"),
        **dict.fromkeys(("Kimi_K25", "Lfm3Vl", "MuseGlimmer", "MuseSpark", "NemotronH_Omni_Reasoning_V3"), "patches"),
        **dict.fromkeys(("PaddleOCRVL", "Qwen2VL", "Qwen2_5OmniThinker", "Qwen2_5_VL", "Qwen3VL"), "patches"),
        **dict.fromkeys(("Qwen3OmniMoeThinker", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "VideoLlama3"), "patches"),
    }
)
# families of wrappers that were compared on sound. Ranks share it by "clips" of one row each, or not at all, where
# clips are not encoded apart from each other
_HEARING: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("AudioFlamingo3", "GlmAsr", "MossTranscribeDiarize", "MuseSpark"), "clips"),
        **dict.fromkeys(("Qwen2_5OmniThinker", "Qwen3ASR", "Voxtral"), "clips"),
        **dict.fromkeys(("Gemma3n", "Gemma4", "MusicFlamingo", "NemotronH_Omni_Reasoning_V3"), ""),
        **dict.fromkeys(("Qwen3OmniMoeThinker", "VibeVoiceAsr"), ""),
    }
)
CUT_POINTS: Mapping[str, CutPoint] = MappingProxyType({})  # by the name of a class; all others are cut at the outside


def cut_point_of(view: ModelView) -> CutPoint:
    """The cut point of a model: by its class or the first base class that has one, else where a wrapper hands
    embeddings to its language model, or a class without a language-model head calls its base model, else the model
    itself."""
    known = (CUT_POINTS[cls.__name__] for cls in type(view.root).__mro__ if cls.__name__ in CUT_POINTS)
    cut_point = next(known, None)
    if cut_point is None:
        path = view.find(language_model_path) or _base_path(view)
        cut_point = CutPoint(path, (*TOKEN_INPUTS, *_OF_WRAPPERS), _DEEPSTACK) if path else CutPoint()
    return cut_point


_WATCHING = frozenset(  # and on videos
    {
        *("CohereCompass", "Cosmos3Edge", "Cosmos3Omni", "Ernie4_5_VLMoe", "Exaone4_5_", "Glm46V", "Glm4v", "Glm4vMoe"),
        *(
            "Gemma4",
            "Gemma4Unified",
            "GlmOcr",
            "HyperCLOVAXVisionV2",
            "Lfm3Vl",
            "LlavaNextVideo",
            "LlavaOnevision",
            "MiniCPMOcr",
            "MiniCPMV4_6",
        ),
        *("MiniCPMV4_7", "MuseGlimmer", "MuseSpark", "Qwen2VL", "Qwen2_5OmniThinker", "Qwen2_5_VL", "Qwen3VL"),
        *("Qwen3OmniMoeThinker", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "VideoLlama3", "VideoLlava"),
    }
)


# families that encode a clip as a whole, or merge its times: ranks share clips there, and frames elsewhere
_WHOLE_CLIPS = frozenset({"Ernie4_5_VLMoe", "VideoLlama3"})


def served_modalities(kind: type) -> list[str]:
    """What a class of models is served with besides text: `"images"`, `"videos"`, `"sound"`."""
    served = {"images": _SEEING, "videos": _WATCHING, "sound": _HEARING}
    return [modality for modality, families in served.items() if family_of(kind) in families]


def needs_positions(kind: type) -> bool:
    """Whether the positions of a class's images depend on what stands before their document."""
    return family_of(kind) == "HunYuanVL"


def sees_blocks(view: ModelView) -> bool:
    """Whether tokens of an image or a prefix may see later ones in a wrapper, by the source of its class."""
    if not view.find(language_model_path):
        return False
    files = {kind.__module__ for kind in type(view.root).__mro__}
    sources = [inspect.getsource(sys.modules[file]) for file in files if file.startswith("transformers.models.")]
    return not sources or any("block_sequence_ids" in source for source in sources)


def images_dealt_by(kind: type) -> str | None:
    """How ranks share the images of a class of models: by `"patches"`, by `"images"`, or not at all (`""`); `None` if
    it is not served with images."""
    return _SEEING.get(family_of(kind))


def frames_apart(kind: type) -> bool:
    """Whether the frames of a video are encoded apart from each other, so that ranks may share one video."""
    family = family_of(kind)
    return family in _WATCHING and _SEEING[family] == "patches" and family not in _WHOLE_CLIPS


def sound_dealt_by(kind: type) -> str | None:
    """How ranks share the sound of a class of models: by `"clips"`, or not at all (`""`); `None` if it is not served
    with sound."""
    return _HEARING.get(family_of(kind))


def family_of(kind: type) -> str:
    """The family of a wrapper, by its first base class of Transformers: FSDP2 and users derive others."""
    own = next((cls for cls in kind.__mro__ if cls.__module__.startswith("transformers.")), kind)
    return own.__name__.removesuffix("ForConditionalGeneration")


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


def has_language_head(view: ModelView) -> bool:
    """Whether a model, or one inside of it, has a language-model head, unlike classifiers and bare decoders."""
    models = (module for module in view.modules if isinstance(module, PreTrainedModel))
    return any(model.get_output_embeddings() is not None for model in models)


def _base_path(view: ModelView) -> str:
    """Where a model without a language-model head has its decoder or encoder; empty if it is one itself."""
    model = view.root
    if not isinstance(model, PreTrainedModel) or model.base_model is model or view.find(has_language_head):
        return ""
    return str(model.base_model_prefix)


def reader_of(view: ModelView) -> ModelView:
    """The part of a model that works on tokens: the language model of a wrapper, or else the model itself."""
    return view.part(view.root.get_submodule(view.find(cut_point_of).path))
