"""Draws results of training.py: the time of a step beside its limit, and the parts of this time if they are known.

For the first contender at each length it also draws a timeline.

python recipes/benchmarks/plot_training.py recipes/benchmarks/results/training_2xH200*.json --out training.png
"""

import argparse
import json
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, THEIRS = "#c8102e", "#1f4e79"
PARTS = {
    "attention": "#c8102e",
    "matrix products": "#1f4e79",
    "merging": "#e58a98",
    "loss": "#7a5c99",
    "optimizer": "#2e7d6b",
    "messages": "#5d737e",
    "the rest": "#b07d12",
    "nothing": "#dddddd",
}
Row = dict[str, Any]


def title(result: dict[str, Any], row: Row) -> str:
    """The model, the length and the hardware."""
    kind = "LoRA" if result["lora"] else "full fine-tuning"
    liger = ", Liger's norms, rotary and SwiGLU" if result.get("liger") else ""
    hardware, length = result["hardware"], row["length"]
    tokens = length if length % 1024 else f"{length // 1024}K"
    return f"{result['shape']}, {tokens} tokens, {kind}{liger}\n{hardware['ranks']} x {hardware['device']}"


def draw_steps(axes: Axes, result: dict[str, Any], rows: list[Row]) -> None:
    """Draws a bar for the median step of each contender, with the limit of the same computations as a tick."""
    names = [row["contender"] for row in rows]
    colors = [OURS if name.startswith("hf_burst") else THEIRS for name in names]
    axes.barh(names, [row["median_s"] for row in rows], color=colors, height=0.6)
    for at, row in enumerate(rows):
        if row["share_of_limit"]:
            axes.plot([row["median_s"] * row["share_of_limit"]] * 2, [at - 0.38, at + 0.38], color="black", linewidth=2)
        text = f" {row['median_s']:.2f} s, {row['peak_memory_gib']:.0f} GiB"
        axes.text(row["median_s"], at, text, va="center", fontsize=8)
    axes.set_title(title(result, rows[0]), fontsize=9)
    axes.set_xlim(0, 1.3 * max(row["median_s"] for row in rows))
    axes.set_xlabel("seconds a step (black: limit of the same computations)", fontsize=8)
    _tidy(axes)


def draw_parts(axes: Axes, result: dict[str, Any], rows: list[Row]) -> None:
    """Draws a bar for each contender, divided into kinds of kernels."""
    names, starts = [row["contender"] for row in rows], [0.0] * len(rows)
    for part, color in PARTS.items():
        widths = [max(0.0, row["profile"][part]) for row in rows]
        axes.barh(names, widths, left=starts, color=color, height=0.6, label=part)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_title(f"{title(result, rows[0])}: parts of a step's time", fontsize=9)
    axes.set_xlabel("seconds of one step; where kinds overlap, the first in the legend counts", fontsize=8)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _tidy(axes)


def draw_timeline(axes: Axes, result: dict[str, Any], rows: list[Row]) -> None:
    """Draws the streams in a part of the forward pass and in a part of the backward pass, the busiest stream first."""
    (row,) = rows
    parts = [part for part in row["timeline"] if part]
    busy: dict[int, float] = {}
    for event in chain.from_iterable(parts):
        busy[event["stream"]] = busy.get(event["stream"], 0.0) + event["stop_ms"] - event["start_ms"]
    lines = sorted(busy, key=lambda stream: -busy[stream])
    begin = 0.0
    for part, name in zip(parts, ("forward", "backward"), strict=False):
        for event in part:
            width = event["stop_ms"] - event["start_ms"]
            line = lines.index(event["stream"])
            axes.barh(line, width, left=begin + event["start_ms"], color=PARTS[event["kind"]], height=0.8)
        end = begin + max(event["stop_ms"] for event in part)
        axes.text((begin + end) / 2, -0.6, name, ha="center", fontsize=8)
        begin = 1.04 * end
    axes.set_yticks(range(len(lines)), [f"stream {line}" for line in lines])
    axes.set_title(f"{row['contender']}: timeline\n{title(result, row)}", fontsize=9, pad=12)
    axes.set_xlabel("milliseconds of two parts of a step; colors as in the bars", fontsize=8)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def load(path: Path) -> dict[str, Any]:
    """A result; ends the process with a sentence where there is none."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise SystemExit(f"{path} cannot be read: {problem}") from None
    rows = result.get("results") if isinstance(result, dict) else None
    if not isinstance(rows, list) or "lora" not in result:
        raise SystemExit(f"{path} is no result of training.py")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of training.py")
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    arguments = parser.parse_args()
    panels = []
    for path in arguments.results:
        result = load(path)
        for length in dict.fromkeys(row["length"] for row in result["results"]):
            rows = [row for row in result["results"] if row["length"] == length and "median_s" in row]
            profiled = [row for row in rows if row.get("profile")]
            panels += [(draw_steps, result, rows)] if rows else []
            panels += [(draw_parts, result, profiled)] if profiled else []
            panels += [(draw_timeline, result, [row]) for row in profiled if any(row.get("timeline", ()))][:1]
    if not panels:
        raise SystemExit("None of the files holds a timed step.")
    lines = [2 if draw is draw_timeline else len(rows) for draw, _, rows in panels]
    figure = Figure(figsize=(8.2, sum(1.6 + 0.32 * count for count in lines)), layout="constrained")
    heights = [1.3 + 0.32 * count for count in lines]
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (draw, result, rows) in zip(all_axes, panels, strict=True):
        draw(axes, result, rows)
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(arguments.out, dpi=150)
    except (OSError, ValueError) as problem:
        raise SystemExit(f"--out is {arguments.out}, where no picture can be written: {problem}") from None


if __name__ == "__main__":
    main()
