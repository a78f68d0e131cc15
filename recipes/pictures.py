"""Pictures of an evaluation: recall by length and depth, and perplexity by position."""

from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path

import numpy
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from report import short
from scoring import Cell, PositionLosses

HIDE_ABOVE = 120  # squares that a heat map may have and still show numbers


def draw_recall(cells: Sequence[Cell], positions: int | None, title: str, path: Path) -> None:
    """A heat map of each task. A line stands behind the last length within the positions of the model."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    lengths, depths = (sorted({getattr(cell, key) for cell in cells}) for key in ("length", "depth"))
    width, height = max(2.2, 0.62 * len(lengths)) * len(tasks) + 1.4, max(2.4, 0.42 * len(depths)) + 1.2
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for axes, task in zip(panels, tasks, strict=True):
        right = {(cell.depth, cell.length): cell.right for cell in cells if cell.task == task}
        grid = numpy.array([[right[depth, length] for length in lengths] for depth in depths])
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        if grid.size <= HIDE_ABOVE:
            for (row, column), share in numpy.ndenumerate(grid):
                colour = "black" if share > 0.6 else "white"
                axes.text(column, row, f"{share:.0%}", ha="center", va="center", color=colour, fontsize=7)
        known = sum(length <= positions for length in lengths) if positions else len(lengths)
        if 0 < known < len(lengths):
            axes.axvline(known - 0.5, color="crimson", linewidth=2)
        axes.set_xticks(range(len(lengths)), [short(length) for length in lengths], rotation=45)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set(xlabel="tokens", title=task)
    panels[0].set_ylabel("depth of the fact")
    figure.colorbar(image, ax=list(panels), format="{x:.0%}", label="right answers")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def draw_positions(curves: Mapping[str, PositionLosses], marks: Mapping[str, int], title: str, path: Path) -> None:
    """Perplexity by the position in the document: curves, and lines at positions to mark, by their labels."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, curve in curves.items():
        axes.plot(curve.middles, numpy.exp(curve.losses), marker=".", label=label)
    for (label, position), style in zip(marks.items(), (":", "--", "-.") * len(marks), strict=False):
        axes.axvline(position, color="black", linestyle=style, linewidth=1, label=label)
    axes.set(xscale="log", yscale="log", xlabel="position in the document (tokens)", ylabel="perplexity per token")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda position, _: short(int(position)))
    spread = numpy.ptp([loss for curve in curves.values() for loss in curve.losses])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if spread > log(5) else MaxNLocator(6))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
