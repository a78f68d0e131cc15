"""Towers for images and sound, shared by the ranks: each encodes a part, and all get the features of the whole."""

import inspect
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...errors import BatchError, UnsupportedModelError
from ...ranks.collectives import all_gather
from ...ranks.group import ContextGroup
from ..admission import row_of
from ..context import current, entered
from ..forward_pass import Call, ForwardPass, random_rates
from ..overrides import Override
from ..view import ModelView, inner_modules
from .base import Args, Handles, Kwargs, Part

_PIXELS = ("pixel_values", "pixel_values_videos", "high_res_pixel_values")
_GRIDS = ("image_grid_thw", "video_grid_thw", "image_grid_hw")
_SIZES = "image_sizes"
_EACH = (*_GRIDS, _SIZES, "image_merge_sizes", "video_merge_sizes")  # arguments with one entry per image
_BY_GRID = ("patches", "frames")
_SOUND = ("input_features", "input_values")
_MASKS = ("input_features_mask", "feature_attention_mask", "input_values_mask", "padding_mask")  # one row per clip
# arguments that each make a tower, or a part of one, run once more
_RUNS = ("pixel_values", "pixel_values_videos", "pixel_values_local", "tile_fine_mask", *_SOUND)


def seen_in(call: Call) -> float:
    """Estimates the bytes of images, videos and sound that the busiest rank encodes; 0 for text."""
    given = call.given
    total = sum(value.nbytes for name in _RUNS if isinstance(value := given.get(name), Tensor))
    grids = [grid.prod(-1) for name in _GRIDS if isinstance(grid := given.get(name), Tensor)]
    if not grids or row_of(type(call.model)).images in (None, "all"):
        return float(total)
    costs = torch.cat(grids).tolist()
    return total * max(sum(costs[share]) for share in shares_of(costs, call.group.size)) / max(sum(costs), 1)


class Towers(Part):
    """Lets each rank encode a share of a batch's images, videos and sound."""

    def look(self, view: ModelView) -> Handles:
        model = view.root
        owner, row = model.base_model, row_of(type(model))
        for kind, how in ((_SharedImages, row.images), (_SharedVideos, row.videos), (_SharedClips, row.sound)):
            own = kind.name in vars(owner)  # set by the user
            if how is not None and hasattr(type(owner), kind.name) and not own:
                kind.put(owner, how)
        return ()

    def admit(self, call: Call) -> None:
        """Checks that pixels are of images, and that no noise is added to sound: each rank would draw its own."""
        name, config, given = type(call.model).__name__, call.model.config, call.given
        if any(isinstance(given.get(pixels), Tensor) and not len(given[pixels]) for pixels in _PIXELS):
            raise BatchError("The batch holds pixels of no image. Leave them out, and their grids and sizes.")
        heard = call.group.size > 1 and any(given.get(key) is not None for key in _SOUND)
        quiet = "sample" in inspect.signature(type(call.model).forward).parameters and given.get("sample") is False
        noisy = [name for name in config.sub_configs if getattr(getattr(config, name, None), "vae_std", 0)]
        if heard and noisy and not quiet:
            raise BatchError(
                f"{name} adds noise to sound, and each rank would add another one. Give batches sample=False, where "
                f"the class takes it, or set vae_std to 0: {', '.join(f'config.{own}.vae_std' for own in noisy)}."
            )

    def begin(self, run: ForwardPass) -> None:
        """Checks that towers run equally often in all groups, over which FSDP2 gathers their weights."""
        if not row_of(type(run.model)).modalities or not run.call.sharing:
            return
        held = [float(run.batch.given.get(key) is not None) for key in _RUNS]
        most = run.call.largest([*held, *(-own for own in held)])
        if most[: len(held)] != [-least for least in most[len(held) :]]:
            raise BatchError(
                "Some groups of ranks have images, videos or sound in this step, and others have none, among which "
                "FSDP2 shards the weights of towers. Give all groups each of them, or none."
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
    """The override of a method that encodes with a tower. Each rank encodes consecutive images or clips, so that the
    features of the ranks are consecutive too.

    `how` is `"patches"` if grids say how many rows of pixels an image has, `"frames"` if each frame of a video is taken
    as an image of its own, `"images"` or `"clips"` if each has one row; else every rank encodes all.
    """

    def __init__(self, module: nn.Module, own: Any, how: str) -> None:
        super().__init__(module, own, how)
        self.how = how
        # generation reads which arguments it takes
        self.__signature__ = inspect.signature(getattr(type(module), self.name).__get__(module))

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # with adapters, Transformers makes the first layer of a tower require a gradient, which nothing would use
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns(self.module, (args, kwargs))):
            return self._encode(args, kwargs)

    def _encode(self, args: Args, kwargs: Kwargs) -> Any:
        """Returns the features of all images, after each rank has encoded some."""
        context = current()
        seen = None if context is None else context.sharded_pass
        if seen is None or seen.group.size == 1:
            return self.plain(*args, **kwargs)
        group = seen.group
        arguments = dict(zip(self.__signature__.parameters, args, strict=False)) | kwargs
        frames = self._split_videos(arguments)
        costs = self._costs(arguments)
        if costs is None:
            refuse_draws(self.module)
        if not costs:
            return self.plain(*args, **kwargs)
        own, least = shares_of(costs, group.size)[group.rank], costs.index(min(costs))
        idle = own.start == own.stop
        share = slice(least, least + 1) if idle else own  # all ranks take part in gathering weights
        with entered(None):  # a method for videos may call that for images, to encode its share
            output = self.plain(**arguments | self._part(arguments, costs, share))
        encoded = output.last_hidden_state if output.get("pooler_output") is None else output.pooler_output
        whole, *deep = _of_all_ranks([encoded, *(output.get("deepstack_features") or ())], idle, frames, group)
        for name in [name for name, value in output.items() if value is encoded]:  # wrappers read either name
            output[name] = whole
        if deep:
            output.deepstack_features = deep
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

    def _costs(self, arguments: dict[str, Any]) -> list[int] | None:
        """Returns the rows of pixels, or the area, of each image, or 1 for each clip; `None` if nothing says what
        belongs to which."""
        values, grids = _first(arguments, (*_PIXELS, *_SOUND)), _first(arguments, _GRIDS)
        ready = {name for name in arguments if name.startswith(("image_", "video_", "audio_"))}
        ready -= {*_EACH, "audio_feature_lengths"}
        if self.how == "all" or not isinstance(values, Tensor) or _first(arguments, sorted(ready)) is not None:
            return None
        if self.how in _BY_GRID:
            costs: list[int] | None = None if grids is None else grids.prod(-1).tolist()
            if costs is not None and sum(costs) != len(values):
                counted = f"The grids of images {grids.tolist()} count {sum(costs)} patches"
                raise BatchError(f"{counted}, and there are {len(values)} rows of pixels. Give those of the processor.")
            return costs
        sizes = arguments.get(_SIZES)
        if self.how == "images" and (values.ndim != 4 or (sizes is not None and len(sizes) != len(values))):
            return None
        return [1] * len(values) if sizes is None else torch.as_tensor(sizes).prod(-1).tolist()

    def _part(self, arguments: dict[str, Any], costs: Sequence[int], share: slice) -> dict[str, Any]:
        before = [0, *accumulate(costs)]
        rows = slice(before[share.start], before[share.stop]) if self.how in _BY_GRID else share
        given = {name: value for name, value in arguments.items() if value is not None}
        part = {name: given[name][rows] for name in (*_PIXELS, *_SOUND, *_MASKS) if name in given}
        return part | {name: torch.as_tensor(given[name])[share] for name in _EACH if name in given}


class _SharedImages(_SharedEncoder):
    name = "get_image_features"


class _SharedVideos(_SharedEncoder):
    name = "get_video_features"


class _SharedClips(_SharedEncoder):
    name = "get_audio_features"


def learns(owner: nn.Module, inputs: Any) -> bool:
    """Returns whether anything beside the language model learns, or an input of a tower requires a gradient."""
    reader = {id(weight) for weight in owner.get_decoder().parameters()}  # type: ignore[operator]
    given = (value for value in tree_leaves(inputs) if isinstance(value, Tensor))
    learning = (weight for weight in owner.parameters() if id(weight) not in reader)
    return any(tensor.requires_grad for tensor in chain(given, learning))


def _first(arguments: dict[str, Any], names: Sequence[str]) -> Any:
    return next((value for name in names if (value := arguments.get(name)) is not None), None)


def shares_of(costs: Sequence[int], ranks: int) -> list[slice]:
    """Returns the consecutive images of each rank. The middle of an image lies in its rank's part of all costs."""
    doubled, ends = max(2 * sum(costs), 1), accumulate(costs)
    owners = [min((2 * end - cost) * ranks // doubled, ranks - 1) for end, cost in zip(ends, costs, strict=True)]
    bounds = [sum(owner < rank for owner in owners) for rank in range(ranks + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def _of_all_ranks(layers: Sequence[Any], idle: bool, frames: Sequence[int], group: ContextGroup) -> list[Any]:
    """Returns the features of all ranks for each layer, one tensor or a tensor of each image, from those that this rank
    encoded, which do not count if it is `idle`. The frames of a video are joined. Gradients of all ranks are summed."""
    rows = [layer if isinstance(layer, Tensor) else torch.cat(list(layer)) for layer in layers]
    whole = _gathered(torch.cat(rows, dim=-1), idle, group).split([row.shape[-1] for row in rows], dim=-1)
    if isinstance(layers[0], Tensor):
        return list(whole)
    lengths = torch.tensor([len(each) for each in layers[0]], device=rows[0].device)
    images = [int(image.sum()) for image in _gathered(lengths, idle, group).cpu().split(list(frames) or 1)]
    # Transformers 5.17 does not split features of layers by image
    pairs = zip(whole, layers, strict=True)
    return [each if isinstance(layer, Tensor) else each.split(images) for each, layer in pairs]


def _gathered(own: Tensor, idle: bool, group: ContextGroup) -> Tensor:
    own = own[:0] if idle else own
    counts: list[int] = torch.cat(all_gather(torch.tensor([len(own)], device=own.device), group)).tolist()
    padded = torch.cat([own, own.new_zeros(max(counts) - len(own), *own.shape[1:])])
    return torch.cat([rows[:count] for rows, count in zip(all_gather(padded, group), counts, strict=True)])
