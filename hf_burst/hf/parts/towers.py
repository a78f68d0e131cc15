"""Towers of models that see, shared by the ranks: each encodes some of the images, and all get the features of all."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ...errors import BatchError, UnsupportedModelError
from ...ranks.collectives import all_gather
from ...ranks.group import ContextGroup
from ..batches.modalities import pixels_of
from ..context import current
from ..forward_pass import ForwardPass
from ..models.cut_point import dealt_by, language_model_of, language_model_path
from .base import ForwardOverride, Part

_PIXELS, _GRIDS, _SIZES = ("pixel_values", "pixel_values_videos"), ("image_grid_thw", "video_grid_thw"), "image_sizes"
_FEATURES = ("pooler_output", "deepstack_features")


class Towers(Part):
    """Has each rank encode a share of the images and videos of a batch, dealt by their sizes."""

    def install(self, model: PreTrainedModel) -> None:
        how = dealt_by(type(model))
        if not how:
            return
        owner = model.base_model
        for name in ("get_image_features", "get_video_features"):
            if hasattr(type(owner), name) and name not in vars(owner):  # one of the user's own stays
                setattr(owner, name, _SharedEncoder(owner, name, how))

    def prepare(self, run: ForwardPass) -> None:
        sees = any(True for _ in pixels_of(run.batch.given)) and language_model_path(run.model)
        if sees and run.group.size > 1 and run.model.training and not dealt_by(type(run.model)):
            refuse_draws(run.model)

    def remove(self, model: PreTrainedModel) -> None:
        for name, value in list(vars(model.base_model).items()):
            if isinstance(value, _SharedEncoder):
                delattr(model.base_model, name)


def refuse_draws(model: PreTrainedModel) -> None:
    """Raises if a tower drops something at random: ranks that encode the same images would get other features.

    Raises:
        UnsupportedModelError: With the name of the module.
    """
    reader = {id(module) for module in language_model_of(model).modules()}
    for path, module in model.named_modules():
        rate = getattr(module, "drop_prob", module.p if isinstance(module, nn.Dropout) else 0)
        if id(module) not in reader and rate:
            raise UnsupportedModelError(
                f"{path} of {type(model).__name__} drops with a probability of {rate}, other values on each rank that "
                "encodes the images. Set it to 0 in the config of the tower before the model is made."
            )


class _SharedEncoder(ForwardOverride):
    """`get_image_features` or `get_video_features` of one module.

    Args:
        module (`torch.nn.Module`): The module.
        name (`str`): The method.
        how (`str`): `"patches"` where grids say how many rows of pixels an image has, or `"images"` where it has one.
    """

    def __init__(self, module: nn.Module, name: str, how: str) -> None:
        super().__init__(module)
        self.name, self.how = name, how

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = getattr(type(self.module), self.name)
        context = current()
        group = context.call.group if context is not None and context.call is not None else None
        arguments = _named(method, (self.module, *args), kwargs)
        costs = None if group is None or group.size == 1 else self._costs(arguments)
        if group is None or costs is None:
            return method(self.module, *args, **kwargs)
        shares = deal(costs, group.size)
        own = shares[group.rank]
        # a rank without an image runs the smallest one, so that all ranks meet in the same messages of weights
        encoded = own or [min(range(len(costs)), key=costs.__getitem__)]
        output = method(self.module, **arguments | self._part(arguments, costs, encoded))
        _put_together(output, shares, group)
        return output

    def _costs(self, arguments: dict[str, Any]) -> list[int] | None:
        """The rows of pixels of each image, or the area that it has; `None` if it is not known what belongs to which.

        Raises:
            BatchError: If the grids count other rows of pixels than there are.
        """
        pixels, grids = _first(arguments, _PIXELS), _first(arguments, _GRIDS)
        values = {name for name, value in arguments.items() if isinstance(value, Tensor)}
        if pixels is None or values - {*_PIXELS, *_GRIDS, _SIZES, "shift_labels"}:
            return None
        if self.how == "patches":
            costs: list[int] | None = None if grids is None else grids.prod(-1).tolist()
            if costs is not None and sum(costs) != len(pixels):
                raise BatchError(
                    f"The grids of images {grids.tolist()} count {sum(costs)} patches, and there are {len(pixels)} "
                    "rows of pixels. Give both as the processor returns them."
                )
            return costs
        sizes = arguments.get(_SIZES)
        if pixels.ndim != 4 or (sizes is not None and len(sizes) != len(pixels)):
            return None
        return [1] * len(pixels) if sizes is None else torch.as_tensor(sizes).prod(-1).tolist()

    def _part(self, arguments: dict[str, Any], costs: Sequence[int], chosen: Sequence[int]) -> dict[str, Any]:
        """The arguments that hold something of each image, for some of them."""
        part: dict[str, Any] = {}
        for name, value in arguments.items():
            if value is not None and name in (*_GRIDS, _SIZES):
                part[name] = torch.as_tensor(value)[list(chosen)]
            elif value is not None and name in _PIXELS:
                pieces = value.split(costs if self.how == "patches" else 1)
                part[name] = torch.cat([pieces[index] for index in chosen])
        return part

    def _given(self) -> tuple[Any, ...]:
        return self.module, self.name, self.how


def _named(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method by name, without that of its module."""
    names = list(inspect.signature(method).parameters)[1:]
    return dict(zip(names, args[1:], strict=False)) | kwargs


def _first(arguments: dict[str, Any], names: Sequence[str]) -> Any:
    """The first of these arguments that is given."""
    return next((value for name in names if (value := arguments.get(name)) is not None), None)


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Which images each rank encodes: the largest first, each to the rank that has the least by then.

    Args:
        costs (sequence of `int`): What the images cost.
        ranks (`int`): How many ranks there are.

    Returns:
        `list[list[int]]`: For each rank the places of its images, in their order.
    """
    shares, loads = [list[int]() for _ in range(ranks)], [0] * ranks
    for image in sorted(range(len(costs)), key=lambda place: -costs[place]):
        rank = loads.index(min(loads))
        shares[rank].append(image)
        loads[rank] += costs[image]
    return [sorted(share) for share in shares]


def _put_together(output: Any, shares: Sequence[Sequence[int]], group: ContextGroup) -> None:
    """Puts the features of all images in the place of those that this rank encoded. Gradients of all ranks for the
    features of an image are summed where it was encoded."""
    count = sum(map(len, shares))
    names = [name for name in _FEATURES if output.get(name) is not None]
    layers = [output.pooler_output, *(output.deepstack_features if "deepstack_features" in names else ())]
    stacked = isinstance(output.pooler_output, Tensor)
    rows = [torch.cat(list(layer)) for layer in layers]
    sizes = torch.zeros(count, dtype=torch.long, device=rows[0].device)
    for place, features in zip(shares[group.rank], output.pooler_output, strict=False):
        sizes[place] = len(features)
    dist.all_reduce(sizes, group=group.process_group)
    lengths: list[int] = sizes.tolist()
    totals = [sum(lengths[place] for place in share) for share in shares]
    mine = torch.cat(rows, dim=-1)[: totals[group.rank]]  # nothing of one that was run for the weights' sake
    padded = functional.pad(mine, (0, 0, 0, max(totals) - len(mine)))
    found: dict[int, Tensor] = {}
    for gathered, share in zip(all_gather(padded, group), shares, strict=True):
        pieces = gathered[: sum(lengths[place] for place in share)].split([lengths[place] for place in share])
        found |= dict(zip(share, pieces, strict=True))
    whole = [found[place].split([row.shape[-1] for row in rows], dim=-1) for place in range(count)]
    by_layer: list[tuple[Tensor, ...]] = list(zip(*whole, strict=True))
    output.pooler_output = torch.stack(by_layer[0]) if stacked else by_layer[0]
    if "deepstack_features" in names:
        output.deepstack_features = list(by_layer[1:])
