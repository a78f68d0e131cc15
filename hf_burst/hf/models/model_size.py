"""The sizes of a Transformers model, counted without its weights."""

import re
from collections import Counter
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...errors import ConfigError, UnsupportedModelError
from ...sizing.gpus import data_sheet
from ...sizing.model import LIGER, ModelSize, TowerSize
from ...sizing.shapes import SHAPES, shape_name
from ..admission import row_of
from ..view import ModelView
from .cut_point import language_model_path
from .layer_sizes import experts_of, heads_of, is_experts, layer_sizes
from .recurrent import recurrent_modules
from .support import check_model, has_attention

_LAYER = re.compile(r"\.(\d+)\.")
# factors from patches per side to tokens per side, or the inverse
_SIDES = ("spatial_merge_size", "scale_factor", "downsample_factor", "pooling_kernel_size", "merge_kernel_size")
_SHARES = ("downsample_ratio", "pixel_shuffle_ratio")
_TOKENS = ("mm_tokens_per_image", "num_image_tokens")  # a fixed number of tokens per image, for any number of patches


def model_size(model_class: type[PreTrainedModel], config: PreTrainedConfig, name: str | None = None) -> ModelSize:
    """Counts the weights of a model that is built on the `meta` device and takes no memory. For a wrapper, only the
    language model and the head count as used, because a batch of text needs no more.

    Args:
        model_class (`type`): A class with a language-model head.
        config (`PreTrainedConfig`): Its config; not changed.
        name (`str`, *optional*): A name for the model; by default that of its class.

    Raises:
        ConfigError: If no model can be built from this config, or it does not name its sizes.
        UnsupportedModelError: If hf_burst never supports such a model.
    """
    try:
        return _counted(model_class, config, name or model_class.__name__)
    except UnsupportedModelError:
        raise
    except Exception as problem:  # the model's code may raise anything
        cause = f"{type(problem).__name__}: {str(problem).strip()[:200]}"
        raise ConfigError(
            f"The sizes of {name or model_class.__name__} ({model_class.__name__}) cannot be told by its config "
            f"({cause}). Give the config.json of a model of this class that can be loaded."
        ) from problem


def _counted(model_class: type[PreTrainedModel], config: PreTrainedConfig, name: str) -> ModelSize:
    """Returns the sizes of a model."""
    with torch.device("meta"):
        model = model_class(deepcopy(config))
    view = ModelView(model)
    check_model(view)
    text, head, counts = model.config.get_text_config(), model.get_output_embeddings(), _Weights(view)
    expands = any(hasattr(module, "expand_kv") for module in view.modules)  # latents that attention caches
    linear = [
        module.weight.shape
        for path, module in view.named
        if isinstance(module, nn.Linear | Conv1D) and module is not head and counts.reads(path)
    ]
    sharing: list[Any] = [each for each in view.modules if getattr(each, "store_full_length_kv", False)]  # of Gemma 4
    counted: dict[str, Any] = {
        "inner": round((counts.used - counts.head - counts.mixing) / (3 * text.hidden_size * text.num_hidden_layers)),
        "norms": _normed(view, counts) / text.num_hidden_layers,
        "head_norms": _normed(view, counts, of_heads=True) / text.num_hidden_layers,
    }
    return ModelSize(
        **vars(layer_sizes(view)) | counted,
        name=name,
        vocabulary=text.vocab_size,
        weights=_weights_in(model),
        used=round(counts.used),
        head=counts.head,
        tied=counts.tied,
        linear=counts.linear,
        adapted=sum(map(sum, linear)),
        unused=counts.unused,
        routed=counts.chosen * text.hidden_size,
        experts=counts.experts,
        fused=counts.fused.total(),
        fused_in_layer=max(counts.fused.values(), default=0),
        visited=round(counts.visited),
        tower=tower_size(view),
        latent=int(text.kv_lora_rank + text.qk_rope_head_dim) if expands else 0,
        rotary=sum(
            2 * each.numel() for path, each in model.named_buffers() if "inv_freq" in path and counts.reads(path)
        ),
        liger=config.model_type in LIGER,
        shared=sum(2 * each.k_proj.out_features for each in sharing),
    )


def _normed(view: ModelView, counts: "_Weights", of_heads: bool = False) -> float:
    """Returns the elements per token that enter norms of layers, except torch's norms and recurrent layers' norms; or
    those that enter norms of queries, keys and values. Those of norms without a weight, which are no kernels and keep
    them in fp32, count twice."""
    total, modules, text = 0.0, dict(view.named), view.root.config.get_text_config()
    configs = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else []
    recurrent = {id(inner) for module in view.find(recurrent_modules) for inner in view.inside(module)}
    for path, module in view.named:
        known = "Norm" in type(module).__name__ and not isinstance(module, nn.LayerNorm | nn.RMSNorm)
        layer = _LAYER.search(path)
        if not known or id(module) in recurrent or layer is None or not counts.reads(path):
            continue
        owner, _, name = path.rpartition(".")
        weight = getattr(module, "weight", None)
        size = getattr(modules[owner], "head_dim", 0) if weight is None else weight.numel()
        config = configs[int(layer[1])] if configs else text
        q_heads, kv_heads, head_dim, _ = heads_of(config) if name[:1] in "qkv" else (0, 0, 0, 0)
        heads = q_heads * name.startswith("q") + kv_heads * name.startswith(("k", "v", "qk"))
        if heads or not of_heads:
            total += size * (heads if size == head_dim else 1) * (2 if weight is None else 1)
    return total


class _Weights:
    """Weight counts of a model, by their use for a batch of text.

    `used` weights multiply a token; `head` and `mixing` are their parts in the language-model head and in layers that
    mix tokens (attention, recurrent ones). `unused` weights lie outside the language model. A token goes to `chosen`
    experts. bitsandbytes quantizes `linear` weights to 4 bits; `fused` counts those of `experts` in three dimensions,
    by module, of which a token visits `visited`.
    """

    def __init__(self, view: ModelView) -> None:
        model = view.root
        self.path, text = view.find(language_model_path), model.config.get_text_config()
        head = getattr(model.get_output_embeddings(), "weight", None)
        tables = {id(module.weight) for module in view.modules if isinstance(module, nn.Embedding)}
        mixers = {id(weight) for module in view.find(recurrent_modules) for weight in module.parameters()}
        layers = [module for module in view.modules if type(module) is nn.Linear or isinstance(module, Conv1D)]
        linear = {id(layer.weight): layer.weight.numel() for layer in layers if layer.weight is not head}
        experts, self.chosen = experts_of(text)
        self.tied = id(head) in tables
        self.head = 0 if head is None else head.numel()
        self.used, self.linear = float(self.head), sum(linear.values())
        self.mixing = self.unused = self.experts = 0
        self.fused, self.visited = Counter[str](), 0.0
        for path, weight in model.named_parameters(remove_duplicate=False):  # each layer uses shared weights
            count = weight.numel()
            if not self.reads(path):
                self.unused += 0 if weight is head else count
            elif weight is not head and id(weight) not in tables:
                holder = path.rpartition(".")[0]
                fused = is_experts(model.get_submodule(holder), weight)
                routed = (fused or "experts." in path) and not re.search("shared|router", path)
                own = count * (self.chosen / experts if routed and experts else 1)
                self.used += own
                self.visited += fused * own
                self.experts += (fused or (routed and id(weight) in linear)) * count
                self.fused[holder] += fused * count
                self.mixing += ("attn" in path or "attention" in path or id(weight) in mixers) * count

    def reads(self, path: str) -> bool:
        """Returns whether a batch of text uses the module or weight at this path."""
        return not self.path or path.startswith(f"{self.path}.")


def shape_named(name: str) -> PreTrainedConfig | None:
    """Returns the config of the entry of [`SHAPES`] that a user's name means; `None` for other names."""
    known = shape_name(name)
    return AutoConfig.for_model(**SHAPES[known]) if known else None


def peak_of(device: torch.device) -> float:
    """Returns a GPU's peak FLOP/s in bf16 from its data sheet; 0 for devices without one."""
    sheet = data_sheet(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return sheet.peak if sheet else 0.0


def tower_size(view: ModelView) -> TowerSize | None:
    """Returns the sizes of a model's image tower; `None` if images are not supported, the tower has no attention
    layers, or the configs do not give the number of patches per token.

    Args:
        view ([`ModelView`]): A model on any device, including `meta`.
    """
    model, text = view.root, view.find(language_model_path)
    dealt = row_of(type(model)).images
    layers = max(
        (
            module
            for path, module in view.named
            if isinstance(module, nn.ModuleList) and not path.startswith(f"{text}.") and "audio" not in path
            if has_attention(view.part(module))
        ),
        key=_weights_in,
        default=None,
    )
    if dealt is None or not layers:
        return None
    layer = view.inside(layers[0])
    linear, patches = [module for module in layer if isinstance(module, nn.Linear)], _patches(model)
    if not linear or patches is None:
        return None
    hidden = min(module.in_features for module in linear)
    inner = max(module.in_features for module in linear)
    return TowerSize(
        layers=len(layers),
        hidden=hidden,
        inner=inner,
        kept=_kept(layer, linear, hidden, inner),
        weights=_weights_in(layers),
        patches=patches,
        dealt=dealt != "all",
    )


def _kept(layer: list[nn.Module], linear: list[nn.Linear], hidden: int, inner: int) -> float:
    """Returns the elements per patch that a layer saves: inputs of products, attention, activations and norms (custom
    norms also save fp32 copies). After a fused QKV product, values keep all three, beside rotated queries and keys."""
    norms = [module for module in layer if "Norm" in type(module).__name__]
    gated = sum(module.out_features in (inner, 2 * inner) for module in linear) > 1
    attended = 5 if any(module.out_features == 3 * hidden for module in linear) else 3
    of_norms = sum(1 if isinstance(norm, nn.LayerNorm) else 3 for norm in norms)
    return (of_norms - 1 + 3 + attended) * hidden + (4 if gated else 2) * inner


def _patches(model: PreTrainedModel) -> float | None:
    """Returns the number of patches per token, read from the configs of the model and its tower; `None` if unknown."""
    vision: Any = getattr(model.config, "vision_config", None)
    configs = [config for config in (vision, model.config) if config is not None]

    def first(names: tuple[str, ...]) -> Any:
        found = (getattr(config, name, None) for name in names for config in configs)
        return next((value for value in found if value), None)

    tokens, side, share = first(_TOKENS), first(_SIDES), first(_SHARES)
    if tokens is not None:
        return float((vision.image_size // vision.patch_size) ** 2 / tokens)
    if side is not None:
        return float(prod(side) if isinstance(side, list | tuple) else side**2)
    if share is not None:
        return float(share**-2)
    return 1.0 if "llava" in model.config.model_type else None


def _weights_in(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
