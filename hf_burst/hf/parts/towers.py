"""Towers for images and sound, shared by the ranks: each encodes a part, and all get the features of the whole."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from ...errors import BatchError, UnsupportedModelError
from ...ranks.collectives import all_gather, group_sum
from ...ranks.group import ContextGroup
from ..admission import row_of
from ..context import current
from ..forward_pass import Agreement, Call, ForwardPass, random_rates
from ..overrides import Override
from ..view import ModelView, inner_modules
from .base import Part

_PIXELS = ("pixel_values", "pixel_values_videos", "high_res_pixel_values")
_GRIDS = ("image_grid_thw", "video_grid_thw", "image_grid_hw")
_SIZES = "image_sizes"
_EACH = (*_GRIDS, _SIZES, "image_merge_sizes", "video_merge_sizes")  # arguments with one entry per image
_BY_GRID = ("patches", "frames")
_SOUND = ("input_features", "input_values")
# masks of sound, with one row per clip
_LENGTHS = ("input_features_mask", "feature_attention_mask", "input_values_mask", "padding_mask")
# arguments that each make a tower, or a part of one, run once more
_RUNS = ("pixel_values", "pixel_values_videos", "pixel_values_local", "tile_fine_mask", *_SOUND)


def seen_in(call: Call) -> float:
    """Estimates the bytes of images, videos and sound that the busiest rank encodes; 0 for text."""
    given = call.given
    total = sum(value.nbytes for name in _RUNS if isinstance(value := given.get(name), Tensor))
    grids = [grid.prod(-1) for name in _GRIDS if isinstance(grid := given.get(name), Tensor)]
    images = torch.cat(grids) if grids and row_of(type(call.model)).images not in (None, "all") else None
    share = 1.0 if images is None or not images.numel() else float(images.max() / images.sum())
    return total * max(share, 1 / call.group.size)


class Towers(Part):
    """Lets each rank encode a share of a batch's images and videos, dealt by their sizes, and of its sound."""

    def overrides(self, view: ModelView) -> Iterator[tuple[type[Override], nn.Module, tuple[Any, ...]]]:
        model = view.root
        owner, row = model.base_model, row_of(type(model))
        for kind, how in ((_SharedImages, row.images), (_SharedVideos, row.videos), (_SharedClips, row.sound)):
            own = kind.name in vars(owner)  # set by the user
            if how is not None and hasattr(type(owner), kind.name) and not own:
                yield kind, owner, (how,)

    def admit(self, call: Call, agreement: Agreement) -> None:
        """Checks that images have pixels, and that no noise is added to sound, because each rank would draw its own."""
        name, config, given = type(call.model).__name__, call.model.config, call.given
        pixels = [given.get(key) for key in _PIXELS if row_of(type(call.model)).modalities]
        shapes = ", ".join(str(tuple(value.shape)) for value in pixels if isinstance(value, Tensor) and not len(value))
        heard = call.group.size > 1 and any(given.get(key) is not None for key in _SOUND)
        quiet = "sample" in inspect.signature(type(call.model).forward).parameters and given.get("sample") is False
        noisy = [name for name in config.sub_configs if getattr(getattr(config, name, None), "vae_std", 0)]
        BatchError.refuse(
            (
                shapes,
                f"The batch holds pixels of shape {shapes}, which are of no image. Leave them out, and their grids and "
                "sizes, where a batch has none.",
            ),
            (
                heard and noisy and not quiet,
                f"{name} adds noise to sound, and each rank would add another one. Give batches sample=False, where "
                f"the class takes it, or set vae_std to 0: {', '.join(f'config.{own}.vae_std' for own in noisy)}.",
            ),
        )

    def begin(self, run: ForwardPass) -> None:
        """Checks that towers run equally often in all groups, over which FSDP2 gathers their weights."""
        if not row_of(type(run.model)).modalities or not run.call.sharing:
            return
        held = [float(run.batch.given.get(key) is not None) for key in _RUNS]
        most = run.call.largest([*held, *(-own for own in held)])
        if most[: len(held)] != [-least for least in most[len(held) :]]:
            raise BatchError(
                "Some groups of ranks have images, videos or sound in this step, and others have none. FSDP2 shards "
                "the weights of towers over all groups, which would wait for each other. Give all groups each of "
                "them, or none."
            )


def refuse_draws(owner: nn.Module) -> None:
    """Raises if a tower that every rank runs is random in training: each rank would compute other features. The
    `owner` holds the tower and the language model."""
    reader = {id(module) for module in inner_modules(owner.get_decoder())}  # type: ignore[operator]
    beside = (module for module in inner_modules(owner) if id(module) not in reader)
    rates = {f"{name}={rate}" for name, rate in random_rates(beside)}
    if rates:
        raise UnsupportedModelError(
            f"The tower of {type(owner).__name__} trains with {', '.join(sorted(rates))}, and every rank encodes the "
            "images and sound, each with other random numbers. Set it to 0 in the config of the tower, or tower.eval()."
        )


class _SharedEncoder(Override):
    """The override of a method that encodes with a tower.

    Args:
        module (`torch.nn.Module`): The module.
        own: What the module had in this place before.
        how (`str`): `"patches"` if grids say how many rows of pixels an image has, `"frames"` if the tower takes each
            frame of a video as an image of its own, `"images"` if an image has one row; else every rank encodes all.
    """

    def __init__(self, module: nn.Module, own: Any, how: str) -> None:
        super().__init__(module, own)
        self.how = how
        self.running = False  # while it encodes this rank's share
        # generation reads which arguments it takes
        self.__signature__ = inspect.signature(getattr(type(module), self.name).__get__(module))

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # with adapters, Transformers makes the first layer of a tower require a gradient, which nothing would use
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns(self.module, (args, kwargs))):
            return self._encode(args, kwargs)

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the features of all images, after each rank has encoded some."""
        method: Callable[..., Any] = getattr(type(self.module), self.name)
        context = current()
        group = context.sharded_pass.group if context is not None and context.sharded_pass is not None else None
        arguments = _named(method, (self.module, *args), kwargs)
        frames = self._split_videos(arguments)
        costs = None if group is None or group.size == 1 else self._costs(arguments)
        if group is not None and group.size > 1 and costs is None:
            refuse_draws(self.module)
        if group is None or not costs or self._within():
            return method(self.module, *args, **kwargs)
        shares = self._deal(costs, group.size)
        own = shares[group.rank]
        # a rank without a share runs the cheapest image, so that all ranks take part in gathering weights
        encoded = own or [min(range(len(costs)), key=costs.__getitem__)]
        self.running = True
        try:
            output = method(self.module, **arguments | self._part(arguments, costs, encoded))
        finally:
            self.running = False
        self._put_together(output, shares, group)
        if frames:
            _join_frames(output, frames)
        return output

    def _split_videos(self, arguments: dict[str, Any]) -> list[int]:
        """Turns each frame into an image, by its grid; returns the number of frames of each video."""
        grids = arguments.get("video_grid_thw")
        if self.how != "frames" or grids is None:
            return []
        times, *sides = grids.unbind(-1)
        single = torch.stack([torch.ones_like(times), *sides], dim=-1)
        arguments["video_grid_thw"] = single.repeat_interleave(times, dim=0)
        return times.tolist()

    def _deal(self, costs: Sequence[int], ranks: int) -> list[list[int]]:
        """Returns which images, or clips, each rank encodes."""
        return deal(costs, ranks)

    def _put_together(self, output: Any, shares: Sequence[Sequence[int]], group: ContextGroup) -> None:
        """Replaces the features that this rank encoded with those of all ranks."""
        _put_together(output, shares, group)

    def _within(self) -> bool:
        """Returns whether the other method calls this one, to encode its share of the videos as images."""
        return any(other.running for other in vars(self.module).values() if isinstance(other, _SharedEncoder))

    def _costs(self, arguments: dict[str, Any]) -> list[int] | None:
        """Returns the rows of pixels, or the area, of each image; `None` if nothing says what belongs to which."""
        pixels, grids = _first(arguments, _PIXELS), _first(arguments, _GRIDS)
        others = {name for name in arguments if name.startswith(("image_", "video_"))} - {*_EACH}
        if self.how == "all" or not isinstance(pixels, Tensor) or any(arguments[name] is not None for name in others):
            return None
        if self.how in _BY_GRID:
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
        """Returns the per-image arguments of the chosen images."""
        part: dict[str, Any] = {}
        for name, value in arguments.items():
            if value is not None and name in _EACH:
                part[name] = torch.as_tensor(value)[list(chosen)]
            elif value is not None and name in _PIXELS:
                pieces = value.split(costs if self.how in _BY_GRID else 1)
                part[name] = torch.cat([pieces[index] for index in chosen])
        return part

    def _given(self) -> tuple[Any, ...]:
        return self.module, self.own, self.how


class _SharedImages(_SharedEncoder):
    name = "get_image_features"


class _SharedVideos(_SharedEncoder):
    name = "get_video_features"


class _SharedClips(_SharedEncoder):
    """The override of `get_audio_features`. Each rank encodes consecutive clips, so that the features of the ranks are
    consecutive too: how many features a clip has is not known.

    Args:
        module (`torch.nn.Module`): The module.
        own: What the module had in this place before.
        how (`str`): `"clips"` if sound has one row per clip and clips are encoded separately; else every rank encodes
            all.
    """

    name = "get_audio_features"

    def _costs(self, arguments: dict[str, Any]) -> list[int] | None:
        """Returns a cost of 1 for each clip; `None` if ranks do not share them."""
        sound, lengths = _first(arguments, _SOUND), "audio_feature_lengths"
        ready = [name for name in arguments if name.startswith("audio_") and name != lengths]
        known = self.how == "clips" and isinstance(sound, Tensor) and all(arguments[name] is None for name in ready)
        return [1] * len(sound) if known else None

    def _deal(self, costs: Sequence[int], ranks: int) -> list[list[int]]:
        bounds = [len(costs) * rank // ranks for rank in range(ranks + 1)]
        return [list(range(first, end)) for first, end in pairwise(bounds)]

    def _part(self, arguments: dict[str, Any], costs: Sequence[int], chosen: Sequence[int]) -> dict[str, Any]:
        rows = slice(chosen[0], chosen[-1] + 1)
        held = {name: arguments.get(name) for name in (*_SOUND, *_LENGTHS)}
        return {name: value[rows] for name, value in held.items() if value is not None}

    def _put_together(self, output: Any, shares: Sequence[Sequence[int]], group: ContextGroup) -> None:
        encoded: Tensor = output.last_hidden_state if output.get("pooler_output") is None else output.pooler_output
        totals = torch.zeros(group.size, dtype=torch.long, device=encoded.device)
        totals[group.rank] = len(encoded) if shares[group.rank] else 0
        totals = group_sum(totals, group)
        whole = torch.cat(_gather_rows(encoded, totals.tolist(), group))
        for name in [name for name, value in output.items() if value is encoded]:  # wrappers read either name
            output[name] = whole


def learns(owner: nn.Module, inputs: Any) -> bool:
    """Returns whether anything beside the language model learns, or an input of a tower requires a gradient."""
    reader = {id(weight) for weight in owner.get_decoder().parameters()}  # type: ignore[operator]
    given = (value for value in tree_leaves(inputs) if isinstance(value, Tensor))
    learning = (weight for weight in owner.parameters() if id(weight) not in reader)
    return any(tensor.requires_grad for tensor in chain(given, learning))


def _named(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a method by name, without its module."""
    names = list(inspect.signature(method).parameters)[1:]
    return dict(zip(names, args[1:], strict=False)) | kwargs


def _first(arguments: dict[str, Any], names: Sequence[str]) -> Any:
    """Returns the first of these arguments that is given."""
    return next((value for name in names if (value := arguments.get(name)) is not None), None)


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deals images to ranks: the largest first, each to the rank with the least so far.

    Args:
        costs (sequence of `int`): The costs of the images.
        ranks (`int`): The number of ranks.

    Returns:
        `list[list[int]]`: For each rank the sorted places of its images.
    """
    shares, loads = [list[int]() for _ in range(ranks)], [0] * ranks
    for image in sorted(range(len(costs)), key=lambda place: -costs[place]):
        rank = loads.index(min(loads))
        shares[rank].append(image)
        loads[rank] += costs[image]
    return [sorted(share) for share in shares]


def _put_together(output: Any, shares: Sequence[Sequence[int]], group: ContextGroup) -> None:
    """Replaces the features that this rank encoded with those of all images. The rank that encoded an image gets the
    sum of all ranks' gradients for its features."""
    count = sum(map(len, shares))
    deep: Sequence[Any] = output.get("deepstack_features") or ()
    layers = [output.pooler_output, *deep]
    # Transformers 5.17 does not split features of layers by image
    rows = [layer if isinstance(layer, Tensor) and layer.ndim == 2 else torch.cat(list(layer)) for layer in layers]
    stacked, flat = isinstance(output.pooler_output, Tensor), bool(deep) and isinstance(deep[0], Tensor)
    sizes = torch.zeros(count, dtype=torch.long, device=rows[0].device)
    for place, features in zip(shares[group.rank], output.pooler_output, strict=False):
        sizes[place] = len(features)
    lengths: list[int] = group_sum(sizes, group).tolist()
    totals = [sum(lengths[place] for place in share) for share in shares]
    found: dict[int, Tensor] = {}
    for gathered, share in zip(_gather_rows(torch.cat(rows, dim=-1), totals, group), shares, strict=True):
        pieces = gathered.split([lengths[place] for place in share])
        found |= dict(zip(share, pieces, strict=True))
    whole: list[Sequence[Tensor]] = [
        found[place].split([row.shape[-1] for row in rows], dim=-1) for place in range(count)
    ]
    by_layer = [tuple(parts[number] for parts in whole) for number in range(len(rows))]
    output.pooler_output = torch.stack(by_layer[0]) if stacked else by_layer[0]
    if deep:
        output.deepstack_features = [torch.cat(layer) if flat else layer for layer in by_layer[1:]]


def _join_frames(output: Any, frames: Sequence[int]) -> None:
    """Joins the features of the frames of each video, if they are separate."""
    bounds = [0, *accumulate(frames)]

    def joined(features: Any) -> Any:
        apart = not isinstance(features, Tensor)
        return tuple(torch.cat(features[start:end]) for start, end in pairwise(bounds)) if apart else features

    output.pooler_output = joined(output.pooler_output)
    if output.get("deepstack_features"):
        output.deepstack_features = [joined(layer) for layer in output.deepstack_features]


def _gather_rows(encoded: Tensor, totals: Sequence[int], group: ContextGroup) -> list[Tensor]:
    """Returns the rows of features of each rank, `totals` many. Gradients of all ranks are summed."""
    mine = encoded[: totals[group.rank]]  # without what was encoded only to gather weights
    padded = functional.pad(mine, (0, 0, 0, max(totals) - len(mine)))
    return [rows[:total] for rows, total in zip(all_gather(padded, group), totals, strict=True)]
