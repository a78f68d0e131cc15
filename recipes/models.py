"""The tokenizers, configs and models that the settings describe, and adapters merged into full models."""

import re
from copy import deepcopy
from pathlib import Path
from shutil import copy
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from byte_tokenizer import byte_tokenizer
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from settings import BurstSettings, ModelSettings, using
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from trl import get_peft_config, get_quantization_config

import hf_burst
from hf_burst.hf.models.positions import pretrained_length, scaled_rope

NO_TEXT = r"(?!.*\b(language_model|text_model)\.).*"  # the modules of a wrapper beside its language model


def load_tokenizer(settings: ModelSettings, training: Any = None) -> PreTrainedTokenizerBase:
    """The tokenizer, with the chat template of a file and the end-of-sequence token where `training` has them.

    `training.chat_template_path` is `None` afterwards: TRL would take a file that does not end in .jinja for a model.
    """
    chat_template_path, end = (getattr(training, key, None) for key in ("chat_template_path", "eos_token"))
    revision = None if settings.tokenizer else settings.model_revision
    name = settings.tokenizer or settings.model_name_or_path
    if name is None:
        raise SystemExit("A model made from a config has no tokenizer of its own: set tokenizer, for example to bytes.")
    with using(f"tokenizer {name!r}"):
        tokenizer = byte_tokenizer() if name == "bytes" else AutoTokenizer.from_pretrained(name, revision=revision)
    if chat_template_path is not None:
        with using(f"chat_template_path {chat_template_path!r}"):
            tokenizer.chat_template = Path(chat_template_path).read_text(encoding="utf-8")
        training.chat_template_path = None
    if end is not None:
        if end not in tokenizer.get_vocab():
            raise SystemExit(f"eos_token is {end!r}, which tokenizer {name!r} does not have; set a token that it has.")
        tokenizer.eos_token = end
    if tokenizer.eos_token is None:
        raise SystemExit(f"tokenizer {name!r} has no end-of-sequence token, by which documents end; set another one.")
    return tokenizer


def load_config(settings: ModelSettings, vocabulary: int) -> PreTrainedConfig:
    """The config of the model, with the RoPE parameters that are set."""
    name = settings.model_name_or_path
    if name is None:
        sizes = {"vocab_size": vocabulary, **settings.model_config}
        kind = sizes.pop("model_type", None)
        if kind not in list(CONFIG_MAPPING):
            raise SystemExit(
                f"model_config has the model_type {kind!r}; give one that Transformers has, such as llama, or set "
                "model_name_or_path instead of model_config."
            )
        with using(f"model_config {settings.model_config}"):
            config = AutoConfig.for_model(kind, **sizes)
    else:
        with using(f"model_name_or_path {name!r}"):
            config = AutoConfig.from_pretrained(name, revision=settings.model_revision)
    if type(config) not in (*MODEL_FOR_CAUSAL_LM_MAPPING, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        raise SystemExit(
            f"The model is a {config.model_type}, of which Transformers has no causal language model; set another one."
        )
    if settings.rope_scaling:
        scale_rope(config, dict(settings.rope_scaling))
    return config


def base_in_words(config: PreTrainedConfig) -> str:
    """The model that a training begins with, as its card names it: a name on the hub, or that of a folder."""
    name = config._name_or_path
    if not name:
        return f"a {config.model_type} with random weights, made from a config"
    snapshot = re.search(r"models--([^/]+)/snapshots/", f"{Path(name).resolve()}/")  # of the hub's cache
    return f"`{snapshot[1].replace('--', '/') if snapshot else Path(name).resolve().name}`"


def give_rewards(config: PreTrainedConfig) -> None:
    """Makes a config that of a reward model, whose head gives one number a row."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise SystemExit(
            f"The model is a {config.model_type}, of which Transformers has no class for sequence classification, by "
            "which rewards are given; set another one."
        )
    config.num_labels = 1


def gives_rewards(config: PreTrainedConfig) -> bool:
    """Whether a config is that of a reward model: others have no labels, which Transformers counts as two."""
    return config.num_labels == 1


def auto_class(config: PreTrainedConfig) -> Any:
    """What loads a checkpoint as the class that it was saved from: one with towers for images stays one."""
    if gives_rewards(config):
        return AutoModelForSequenceClassification
    wrapper = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    saved = wrapper is not None and wrapper.__name__ in (config.architectures or ())
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not saved
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def has_towers(config: PreTrainedConfig) -> bool:
    """Whether a model wraps a language model and has towers for images or sound beside it."""
    return "text_config" in config.sub_configs and auto_class(config) is AutoModelForImageTextToText


def scale_rope(config: PreTrainedConfig, scaling: dict[str, Any]) -> None:
    """Sets RoPE parameters in a config. Parameters of another `rope_type` are dropped.

    With YaRN, `max_position_embeddings` becomes `factor` times the length that the model was pretrained for.
    """
    config = config.get_text_config()
    if "type" in scaling:  # as it was called
        scaling.setdefault("rope_type", scaling.pop("type"))
    if any(isinstance(value, dict) for value in scaling.values()):
        raise SystemExit("rope_scaling has parameters by the type of layer; give those of full attention alone.")
    parameters, before = scaled_rope(config), getattr(config, "max_position_embeddings", None)
    nested = parameters is not getattr(config, "rope_parameters", None)
    if parameters is None:
        raise SystemExit(f"rope_scaling is set, but a {config.model_type} has no RoPE parameters; leave it out.")
    kind, allowed = scaling.get("rope_type", parameters.get("rope_type", "default")), ["default", *ROPE_INIT_FUNCTIONS]
    if kind not in allowed:
        raise SystemExit(f"rope_scaling has the rope_type {kind!r}; it must be one of {', '.join(allowed)}.")
    if kind != parameters.get("rope_type", "default"):
        kept = {"rope_theta", "partial_rotary_factor", *(config.ignore_keys_at_rope_validation or ())}
        parameters = {key: value for key, value in parameters.items() if key in kept}
    merged = {**parameters, **scaling}
    with using(f"rope_scaling {scaling}"):
        if kind == "yarn" and "factor" in merged:  # without it, validate_rope says so
            original = merged.setdefault("original_max_position_embeddings", pretrained_length(config))
            config.max_position_embeddings = round(merged["factor"] * original)
            if config.max_position_embeddings < before:
                raise SystemExit(
                    f"rope_scaling {scaling} gives {config.max_position_embeddings:,} positions, but the model has "
                    f"{before:,}: the factor is of {original:,}. Set factor to {before / original:g} or more."
                )
        config.rope_parameters = {**config.rope_parameters, "full_attention": merged} if nested else merged
        config.standardize_rope_params()
        config.validate_rope()


def load_model(settings: ModelSettings, config: PreTrainedConfig, burst: BurstSettings, seed: int) -> torch.nn.Module:
    """The model, quantized where that is set, and patched: the last line is the one that hf_burst needs."""
    name = settings.model_name_or_path
    set_seed(seed)  # weights that no checkpoint has, such as those of a new head, are the same in every process
    if name is None:
        with using(f"model_config {settings.model_config}"):
            dtype = None if settings.dtype == "auto" else settings.dtype
            model = auto_class(config).from_config(deepcopy(config), dtype=dtype)
    else:
        options = {"revision": settings.model_revision, "dtype": settings.dtype}
        with using(f"model_name_or_path {name!r}"):
            if (quantization := get_quantization_config(settings)) is not None:
                if settings.quantize_experts:
                    quantization = hf_burst.Experts4bitConfig.from_dict(quantization.to_dict())
                options["quantization_config"] = quantization
            model = auto_class(config).from_pretrained(name, config=deepcopy(config), **options)
            floats = settings.load_in_4bit and quantization.bnb_4bit_quant_storage.is_floating_point
            if floats and parse_flag_from_env("ACCELERATE_USE_FSDP"):
                model.to("cpu")  # FSDP2 takes them back, sharded; accelerate would keep them whole on the GPU meanwhile
    if has_towers(config) and not settings.use_peft:  # no text reaches them; DDP would wait for their gradients
        model.requires_grad_(False)
        for part in filter(None, (model.get_decoder(), model.get_output_embeddings())):
            part.requires_grad_(True)
    return hf_burst.patch_model(model, burst.config)


def adapter_config(settings: ModelSettings, config: PreTrainedConfig) -> PeftConfig | None:
    """The adapters to train, if there are any; they remember the revision of their base. Towers get none."""
    adapter = get_peft_config(settings)
    if adapter is not None:
        adapter.revision = settings.model_revision
        adapter.exclude_modules = NO_TEXT if has_towers(config) else None
    return adapter


class OutsideOfAutocast:
    """True where a device has no autocast now."""

    def __init__(self, device: torch.device) -> None:
        self.kind = device.type

    def __bool__(self) -> bool:
        return not torch.is_autocast_enabled(self.kind)


def cast_outside_of_autocast(model: torch.nn.Module, device: torch.device) -> None:
    """Has adapters take their inputs to their own dtype where autocast does not: it would take them back, and what is
    kept for the gradients of fp32 adapters would be of fp32. TRL generates outside of it."""
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.cast_input_dtype_enabled = OutsideOfAutocast(device)


def save_config(folder: str | Path, config: PreTrainedConfig | None) -> None:
    """Saves the config beside an adapter whose model has other RoPE parameters than its base; `None` if it has not, and
    a config of an earlier run is removed.

    Without it, the adapter would be loaded into a model with the positions of the base, without a word. With it,
    `AutoModelForCausalLM.from_pretrained(adapter)` raises an error, and `load_adapter` has what it needs.
    """
    if config is None:
        (Path(folder) / "config.json").unlink(missing_ok=True)
    else:
        config.save_pretrained(folder)


def load_adapter(folder: str | Path, dtype: str = "auto") -> PeftModel:
    """A base model, which is not quantized, and its adapter, in plain Transformers and peft. A `config.json` beside the
    adapter replaces that of the base."""
    adapter = PeftConfig.from_pretrained(folder)
    base, revision = adapter.base_model_name_or_path, adapter.revision
    own = (Path(folder) / "config.json").exists()
    config = AutoConfig.from_pretrained(folder) if own else AutoConfig.from_pretrained(base, revision=revision)
    if adapter.task_type == "SEQ_CLS":  # of a reward model
        give_rewards(config)
    model = auto_class(config).from_pretrained(base, config=config, dtype=dtype, revision=revision)
    return PeftModel.from_pretrained(model, folder)


def untie(model: torch.nn.Module) -> None:
    """Gives a head that is tied to the embeddings its own weights if one of them has an adapter, which would be merged
    into both."""
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
    adapted = isinstance(inputs, BaseTunerLayer), isinstance(head, BaseTunerLayer)
    if head is None or not any(adapted) or head.weight is not inputs.weight:
        return
    layer = head.get_base_layer() if adapted[1] else head
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False


def merge_adapter(folder: str | Path, to: str | Path, dtype: str = "auto") -> None:
    """Writes a full model, the adapter merged into its weights, and its processor or tokenizer, or that of its base.

    `AutoModelForCausalLM.from_pretrained(to)` loads it, or the class of the base, as vLLM does: neither needs peft or
    hf_burst. The dtype to merge in is that of the base's files by default.
    """
    adapter, own = PeftConfig.from_pretrained(folder), (Path(folder) / "tokenizer_config.json").exists()
    source = {} if own else {"revision": adapter.revision}
    tokenizer = AutoTokenizer.from_pretrained(folder if own else adapter.base_model_name_or_path, **source)
    trained = load_adapter(folder, dtype)
    untie(trained.get_base_model())
    merged = trained.merge_and_unload()
    if gives_rewards(merged.config):  # by this token its head finds the last one of a row
        merged.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    merged.save_pretrained(to)
    tokenizer.save_pretrained(to)
    for file in Path(folder).glob("*processor_config.json"):  # of what sees
        copy(file, to)
