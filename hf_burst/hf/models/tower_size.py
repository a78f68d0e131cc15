"""The sizes of a tower for images, as far as memory follows from them."""

from math import prod
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...sizing.model import TowerSize
from ..admission import row_of
from ..view import ModelView
from .cut_point import language_model_path
from .support import has_attention

# by which factor a side of patches shrinks to a side of tokens, or the other way round
_SIDES = ("spatial_merge_size", "scale_factor", "downsample_factor", "pooling_kernel_size", "merge_kernel_size")
_SHARES = ("downsample_ratio", "pixel_shuffle_ratio")
_TOKENS = ("mm_tokens_per_image", "num_image_tokens")  # that an image has, whatever its patches


def tower_size(view: ModelView) -> TowerSize | None:
    """The sizes of a model's tower for images; `None` if the model is not served with images, or its tower has no
    layers with attention, or its configs do not say how many patches become a token.

    Args:
        view ([`ModelView`]): Of a model on any device, `meta` too.
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
        key=_weights,
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
        weights=_weights(layers),
        patches=patches,
        dealt=dealt != "all",
    )


def _kept(layer: list[nn.Module], linear: list[nn.Linear], hidden: int, inner: int) -> float:
    """Elements of a patch that a layer keeps: what products, attention and activations are given, and norms, in fp32
    too if they are not torch's. Where one product makes queries, keys and values, the values keep all three, next to
    queries and keys behind their rotation."""
    norms = [module for module in layer if "Norm" in type(module).__name__]
    gated = sum(module.out_features in (inner, 2 * inner) for module in linear) > 1
    attended = 5 if any(module.out_features == 3 * hidden for module in linear) else 3
    of_norms = sum(1 if isinstance(norm, nn.LayerNorm) else 3 for norm in norms)
    return (of_norms - 1 + 3 + attended) * hidden + (4 if gated else 2) * inner


def _patches(model: PreTrainedModel) -> float | None:
    """How many patches become a token, by the configs of the model and of its tower; `None` if they do not say."""
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


def _weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
