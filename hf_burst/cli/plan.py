"""`hf-burst plan`: which rank computes which part of a mask in which step of a ring, in numbers and as a picture; and
with `--model` how long a training step takes, see `sizing.py`."""

import argparse
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from ..config import Chunking
from ..errors import ConfigError
from ..plan import Mask, MaskPattern, Plan, make_plan, sharding_for
from ..plan.steps import Rotating
from ..plan.work import tile_pairs
from . import sizing
from .launch import launched
from .tokens import tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LENGTH = 4096  # tokens where none are given
_POINTS = 720  # of a picture, along each side
_NOBODY = -1
_MOST_MARKED = 32  # ranks whose chunks are marked in a picture
_MOST_RANKS, _MOST_DRAWN = 256, 64  # counted, and drawn, within seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_ring_arguments(parser)
    sizing.add_arguments(parser)


def add_ring_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a mask and its plan."""
    parser.add_argument("--mask", choices=("causal", "full"), default="causal", help="(default %(default)s)")
    parser.add_argument("--window", type=tokens, help="tokens that a query sees backwards beside itself (default all)")
    length = f"tokens of all ranks, such as 4096, 128k or 1M (default {_LENGTH}, or those of the documents)"
    documents = "lengths of packed documents, one after the other"
    parser.add_argument("--length", type=tokens, help=length)
    parser.add_argument("--documents", type=tokens, nargs="+", metavar="TOKENS", help=documents)
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the ring (default %(default)s)")
    parser.add_argument("--chunking", choices=get_args(Chunking), default="balanced", help="(default %(default)s)")
    rotating = 'the rotating block: K and V, or Q as in "burst" backward'
    parser.add_argument("--rotating", choices=get_args(Rotating), default="kv", help=rotating)
    parser.add_argument("--out", type=Path, help="the picture: a file of a kind that matplotlib writes")


def run(arguments: argparse.Namespace) -> int:
    """Prints the work of each rank and step, and draws the plan, on rank 0 of a launch; the exit status."""
    _, rank = launched()
    if rank:
        return 0
    _check_options(arguments)
    if arguments.model:
        if arguments.length is None and not arguments.documents:
            raise ConfigError("--model needs --length, the tokens of a sequence, or --documents.")
        whole = _mask(arguments)
        return sizing.run(arguments, whole.documents, whole.length)
    most = _MOST_RANKS if arguments.out is None else _MOST_DRAWN
    if not 1 <= arguments.ranks <= most:
        raise ConfigError(f"--ranks is {arguments.ranks}; it must be 1 to {_MOST_RANKS}, for --out to {_MOST_DRAWN}.")
    mask = _mask(arguments)
    pattern = MaskPattern(mask.causal, mask.window)
    sharding = sharding_for((mask.documents,), {pattern: 1}, arguments.ranks, arguments.chunking)
    plan = make_plan((mask,), sharding)
    if arguments.out is not None:
        _write_picture(arguments.out, plan, arguments.rotating)
    print(describe(plan, arguments.rotating))
    if arguments.out is not None:
        print(f"picture in {arguments.out}")
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises for options that only count with `--model`, or only without it."""
    parser = argparse.ArgumentParser()
    sizing.add_arguments(parser)
    training = set(vars(parser.parse_args([])))
    add_ring_arguments(parser)
    defaults = vars(parser.parse_args([]))
    rings = set(defaults) - training - {"length", "documents"}
    ignored = [name for name in (rings if arguments.model else training) if getattr(arguments, name) != defaults[name]]
    if ignored:
        names = {"checkpointing": "no-checkpointing", "fused": "plain-kernels"}
        options = ", ".join(sorted(f"--{names.get(name, name).replace('_', '-')}" for name in ignored))
        how = "have no meaning with --model" if arguments.model else "need --model"
        raise ConfigError(f"These options {how}: {options}. See hf-burst plan --help.")


def _write_picture(out: Path, plan: Plan, rotating: Rotating) -> None:
    try:
        figure = draw(plan, rotating)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150, format=out.suffix[1:])
    except (ImportError, OSError, ValueError) as problem:
        raise ConfigError(
            f"--out is {out}, where matplotlib draws no picture: {problem}. Name another file, or install matplotlib."
        ) from problem


def _mask(arguments: argparse.Namespace) -> Mask:
    """The mask that is asked for."""
    length, sizes = arguments.length, arguments.documents or ()
    if sizes and length not in (None, sum(sizes)):
        raise ConfigError(f"--documents have {sum(sizes)} tokens together and --length is {length}; give one.")
    length = sum(sizes) if sizes else _LENGTH if length is None else length
    documents = tuple(accumulate(sizes, initial=0)) if sizes else ()
    return Mask(length, arguments.mask == "causal", arguments.window, documents)


def describe(plan: Plan, rotating: Rotating) -> str:
    """A table of the tokens and the work of every rank, and of its work by step, and how even that is."""
    ranks, work = plan.ranks, steps_of(plan, rotating)
    total = sum(map(sum, work))
    lines = ["rank   tokens   work   by steps (distance round the ring, % of its own work)"]
    for rank, steps in enumerate(work):
        own = sum(steps)
        parts = "  ".join(f"{distance}: {step / own:.0%}" for distance, step in enumerate(steps) if step)
        lines.append(f"{rank:4}  {plan.queries.tokens(rank):7}  {own / total:5.1%}   {parts}")
    most = f"{max(map(sum, work)) * ranks / total - 1:.1%} more than an even share"
    lines.append(f"{plan.pairs:,} pairs of {plan.queries.length:,} tokens; the busiest of {ranks} ranks has {most}.")
    longest = sum(map(max, zip(*work, strict=True)))
    lines.append(f"Step by step, each as long as its busiest rank, it is {longest * ranks / total - 1:.1%} more.")
    return "\n".join(lines)


def steps_of(plan: Plan, rotating: Rotating) -> list[list[int]]:
    """The pairs that each rank computes in each step."""
    work = [[0] * plan.ranks for _ in range(plan.ranks)]
    for rank, own in enumerate(work):
        for step in plan.steps(rank, rotating):
            own[step.order] = sum((tile.batch[1] - tile.batch[0]) * tile_pairs(tile) for tile in step.tiles)
    return work


def who_computes(plan: Plan, rotating: Rotating, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The rank and the step that compute each pair of some tokens, in the first row of a batch; -1 where none does.
    Follows from the tiles of the plan, not from the mask.

    Args:
        plan ([`Plan`]): The plan.
        rotating (`str`): The rotating block, `"kv"` or `"q"`.
        tokens (sequence of `int`): Rising; queries along the first dimension of both arrays, keys along the second.
    """
    positions, owners, rows = np.asarray(tokens), np.full(len(tokens), _NOBODY), np.full(len(tokens), _NOBODY)
    for rank in range(plan.ranks):
        for piece in plan.queries.runs(rank):
            inside = (positions >= piece.start) & (positions < piece.stop)
            owners[inside], rows[inside] = rank, positions[inside] - piece.start + piece.local
    ranks = np.full((len(tokens), len(tokens)), _NOBODY)
    steps = ranks.copy()
    for host in range(plan.queries.ranks):
        for step in plan.steps(host, rotating):
            guest = step.source
            q_rank, k_rank = (host, guest) if rotating == "kv" else (guest, host)
            for tile in step.tiles:
                if tile.batch[0] > 0:
                    continue
                for query in np.flatnonzero((owners == q_rank) & (rows >= tile.q[0]) & (rows < tile.q[1])):
                    start, stop = (tile.k[0] + column for column in tile.columns(int(rows[query]) - tile.q[0]))
                    keys = np.flatnonzero((owners == k_rank) & (rows >= start) & (rows < stop))
                    ranks[query, keys], steps[query, keys] = host, step.order
    return ranks, steps


def draw(plan: Plan, rotating: Rotating) -> "Figure":
    """The mask of the first row of a batch, in the colours of the ranks that compute it and paler in later steps, and
    the work of each rank beside it."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    ranks, length = plan.queries.ranks, plan.queries.length
    points = min(length, _POINTS)
    tokens = [(2 * index + 1) * length // (2 * points) for index in range(points)]
    owner, step = who_computes(plan, rotating, tokens)
    hues = [np.array(to_rgb(f"C{rank % 10}")) for rank in range(ranks)]
    palette = np.array([[_shade(hue, distance, ranks) for distance in range(ranks)] for hue in hues])
    picture = np.where((owner >= 0)[..., None], palette[owner, step], 1.0)
    figure = Figure(figsize=(9.6, 5.2), layout="constrained")
    mask, bars = figure.subplots(1, 2, width_ratios=[1.5, 1])
    mask.imshow(picture, extent=(0, length, length, 0), interpolation="nearest")
    for boundary in plan.queries.boundaries[1:-1] if ranks <= _MOST_MARKED else ():
        mask.axhline(boundary, color="#bbbbbb", linewidth=0.5)
        mask.axvline(boundary, color="#bbbbbb", linewidth=0.5)
    mask.set(xlabel="key", ylabel="query", title=f"Who computes what, over {ranks} ranks")
    _bars(bars, plan, rotating, hues)
    return figure


def _bars(axes: "Axes", plan: Plan, rotating: Rotating, hues: Sequence[np.ndarray]) -> None:
    """The work of each rank, step by step, in even shares."""
    work, ranks = steps_of(plan, rotating), plan.queries.ranks
    even = sum(map(sum, work)) / ranks
    for rank, steps in enumerate(work):
        left = 0.0
        for distance, pairs in enumerate(steps):
            axes.barh(rank, pairs / even, left=left, color=_shade(hues[rank], distance, ranks), edgecolor="white")
            left += pairs / even
    most = max(map(sum, work)) / even - 1
    axes.axvline(1.0, color="#666666", linewidth=1.0, linestyle="--")
    axes.set(xlabel="work, in even shares", ylabel="rank", yticks=range(ranks))
    axes.set_title(f"Dark: own block; paler: later steps\nbusiest rank {most:.1%} above an even share", fontsize=10)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _shade(hue: np.ndarray, distance: int, ranks: int) -> np.ndarray:
    """The colour of a step: that of the rank, mixed with white."""
    pale = 0.75 * distance / max(1, ranks - 1)
    return hue * (1 - pale) + pale
