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
from ..context import current
from ..forward_pass import ForwardPass
from ..models.cut_point import dealt_by
from .base import ForwardOverride, Part
from .dropout import random_rates

_PIXELS = ("pixel_values", "pixel_values_videos", "high_res_pixel_values")
_GRIDS = ("image_grid_thw", "video_grid_thw", "image_grid_hw")
_SIZES = "image_sizes"
_EACH = (*_GRIDS, _SIZES, "image_merge_sizes", "video_merge_sizes")  # arguments with something of each image
# arguments by which a tower, or a part of one, runs once more
_RUNS = ("pixel_values", "pixel_values_videos", "pixel_values_local", "tile_fine_mask")


class Towers(Part):
    """Has each rank encode a share of the images and videos of a batch, dealt by their sizes."""

    def install(self, model: PreTrainedModel) -> None:
        how = dealt_by(type(model))
        if how is None:
            return
        owner = model.base_model
        for name in ("get_image_features", "get_video_features"):
            if hasattr(type(owner), name) and name not in vars(owner):  # one of the user's own stays
                setattr(owner, name, _SharedEncoder(owner, name, how))

    def begin(self, run: ForwardPass) -> None:
        """Under FSDP2 towers gather their weights over all groups, and each has to run as often.

        Raises:
            BatchError: On all ranks, if one group has images, or videos, and another one has none.
        """
        if dealt_by(type(run.model)) is None or not run.sharing:
            return
        held = [float(run.batch.given.get(key) is not None) for key in _RUNS]
        most = run.largest([*held, *(-own for own in held)])
        if most[: len(held)] != [-least for least in most[len(held) :]]:
            raise BatchError(
                "Some groups of ranks have images or videos in this step, and others have none. FSDP2 shards the "
                "weights of towers over all groups, which would wait for each other. Give all groups both, or none."
            )

    def remove(self, model: PreTrainedModel) -> None:
        for name, value in list(vars(model.base_model).items()):
            if isinstance(value, _SharedEncoder):
                delattr(model.base_model, name)


def refuse_draws(owner: nn.Module) -> None:
    """Raises if a tower that every rank runs is random in training: each would find other features.

    Args:
        owner (`torch.nn.Module`): The module with the tower and the language model.

    Raises:
        UnsupportedModelError: With the rates.
    """
    reader = {id(module) for module in owner.get_decoder().modules()}  # type: ignore[operator]
    rates = {f"{name}={rate}" for name, rate in random_rates(owner, reader)}
    if rates:
        raise UnsupportedModelError(
            f"The tower of {type(owner).__name__} trains with {', '.join(sorted(rates))}, and every rank encodes the "
            "images, each with other random numbers. Set it to 0 in the config of the tower, or tower.eval()."
        )


class _SharedEncoder(ForwardOverride):
    """`get_image_features` or `get_video_features` of one module.

    Args:
        module (`torch.nn.Module`): The module.
        name (`str`): The method.
        how (`str`): `"patches"` where grids say how many rows of pixels an image has, `"images"` where it has one;
            else every rank encodes all.
    """

    def __init__(self, module: nn.Module, name: str, how: str) -> None:
        super().__init__(module)
        self.name, self.how = name, how
        self.running = False  # for its share
        # generation asks which arguments it takes
        self.__signature__ = inspect.signature(getattr(type(module), name).__get__(module))

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = getattr(type(self.module), self.name)
        context = current()
        group = context.call.group if context is not None and context.call is not None else None
        arguments = _named(method, (self.module, *args), kwargs)
        costs = None if group is None or group.size == 1 else self._costs(arguments)
        if group is not None and group.size > 1 and costs is None:
            refuse_draws(self.module)
        if group is None or not costs or self._within():
            return method(self.module, *args, **kwargs)
        shares = deal(costs, group.size)
        own = shares[group.rank]
        # a rank without an image runs the smallest one, so that all ranks meet in the same messages of weights
        encoded = own or [min(range(len(costs)), key=costs.__getitem__)]
        self.running = True
        try:
            output = method(self.module, **arguments | self._part(arguments, costs, encoded))
        finally:
            self.running = False
        _put_together(output, shares, group)
        return output

    def _within(self) -> bool:
        """Whether the other method calls this one, to encode its share of the videos as images."""
        return any(other.running for other in vars(self.module).values() if isinstance(other, _SharedEncoder))

    def _costs(self, arguments: dict[str, Any]) -> list[int] | None:
        """The rows of pixels of each image, or the area that it has; `None` if it is not known what belongs to which.

        Raises:
            BatchError: If the grids count other rows of pixels than there are.
        """
        pixels, grids = _first(arguments, _PIXELS), _first(arguments, _GRIDS)
        others = {name for name in arguments if name.startswith(("image_", "video_"))} - {*_EACH}
        if not self.how or not isinstance(pixels, Tensor) or any(arguments[name] is not None for name in others):
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
            if value is not None and name in _EACH:
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
    deep: Sequence[Any] = output.get("deepstack_features") or ()
    layers = [output.pooler_output, *deep]
    # of Transformers 5.17 features of layers are not split by image
    rows = [layer if isinstance(layer, Tensor) and layer.ndim == 2 else torch.cat(list(layer)) for layer in layers]
    stacked, flat = isinstance(output.pooler_output, Tensor), bool(deep) and isinstance(deep[0], Tensor)
    sizes = torch.zeros(count, dtype=torch.long, device=rows[0].device)
    for place, features in zip(shares[group.rank], output.pooler_output, strict=False):
        sizes[place] = len(features)
    dist.all_reduce(sizes, group=group.process_group)
    lengths: list[int] = sizes.tolist()
    totals = [sum(lengths[place] for place in share) for share in shares]
    mine = torch.cat(rows, dim=-1)[: totals[group.rank]]  # nothing of one that was run for the weights' sake
    padded = functional.pad(mine, (0, 0, 0, max(totals) - len(mine)))
    found: dict[int, Tensor] = {}
    for rank, (gathered, share) in enumerate(zip(all_gather(padded, group), shares, strict=True)):
        pieces = gathered[: totals[rank]].split([lengths[place] for place in share])
        found |= dict(zip(share, pieces, strict=True))
    whole: list[Sequence[Tensor]] = [
        found[place].split([row.shape[-1] for row in rows], dim=-1) for place in range(count)
    ]
    by_layer = [tuple(parts[number] for parts in whole) for number in range(len(rows))]
    output.pooler_output = torch.stack(by_layer[0]) if stacked else by_layer[0]
    if deep:
        output.deepstack_features = [torch.cat(layer) if flat else layer for layer in by_layer[1:]]
