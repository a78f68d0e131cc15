"""Draws results of attention.py: the share of the limit against the tokens of the whole sequence.

    python recipes/benchmarks/plot.py outputs/attention_4xH200.json --ranks 4 --out attention.png

One panel for each number of key heads; files of one mask. `--markdown` prints the same numbers as tables.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from recipes.benchmarks.report import markdown, mask_of

OURS, FAINT = "#c8102e", "#999999"
THEIRS = ("#1f4e79", "#3a9bd5", "#5d737e", "#2e7d6b", "#7a5c99", "#b07d12", "#8a3b12", "#4c9a2a")
MARKERS = "osD^vP*X"
Row = dict[str, Any]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of attention.py")
    parser.add_argument("--out", type=Path, help="the picture")
    parser.add_argument("--ranks", type=int, help="draw runs of this many ranks; by default the largest number")
    parser.add_argument("--kernel", help="draw runs with this kernel of the limit; by default that of the first file")
    parser.add_argument("--contenders", nargs="+", default=["*"], help="patterns of names, such as 'hf_burst auto'")
    parser.add_argument("--part", choices=("both", "forward", "backward"), default="both", help="the passes to draw")
    parser.add_argument("--markdown", action="store_true", help="print tables for a README")
    args = parser.parse_args()
    if args.out is None and not args.markdown:
        parser.error("give --out, --markdown or both")
    endings = sorted(Figure().canvas.get_supported_filetypes())
    if args.out is not None and (args.out.suffix[1:].lower() not in endings or args.out.is_dir()):
        parser.error(f"--out {args.out} must be a file that ends in .{', .'.join(endings)}")
    return args


def load(path: Path) -> dict[str, Any]:
    """A result of attention.py."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(result, dict) or not {"settings", "kernel", "results"} <= set(result):
        raise SystemExit(f"{path} is no result of attention.py.")
    return result


def draw(rows: Sequence[Row], part: str, device: str) -> Figure:
    """One panel for each number of key heads."""
    heads = sorted({row["kv_heads"] for row in rows})
    figure = Figure(figsize=(6.4 * len(heads), 4.6), layout="constrained")
    panels = figure.subplots(1, len(heads), sharey=True, squeeze=False)[0]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    theirs = [name for name in names if not name.startswith("hf_burst")]
    for axes, kv_heads in zip(panels, heads, strict=True):
        own = [row for row in rows if row["kv_heads"] == kv_heads]
        for name in names:
            line = sorted((row["length"], row["share_of_limit"][part]) for row in own if row["contender"] == name)
            if not line:
                continue
            first = name == "hf_burst auto"
            color = OURS if name.startswith("hf_burst") else THEIRS[theirs.index(name) % len(THEIRS)]
            width, style = (2.6, "-") if first else (1.3, "--" if name.startswith("hf_burst") else "-")
            marker = MARKERS[names.index(name) % len(MARKERS)]
            lengths, shares = zip(*line, strict=True)
            axes.plot(lengths, shares, style, color=color, linewidth=width, marker=marker, markersize=4, label=name)
        _dress(axes, sorted({row["length"] for row in own}), f"{own[0]['q_heads']} query, {kv_heads} key heads")
    passes = "forward + backward" if part == "both" else part
    lines = {line.get_label(): line for axes in panels for line in axes.get_legend_handles_labels()[0]}
    panels[-1].legend(
        handles=list(lines.values()), loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=8
    )
    panels[0].set_ylabel(f"share of the limit, {passes}")
    title = f"Causal attention over {rows[0]['ranks']} x {device}, {rows[0]['dtype']}{mask_of(rows[0])}"
    figure.suptitle(title, fontsize=12)
    return figure


def _dress(axes: Axes, lengths: Sequence[int], title: str) -> None:
    axes.axhline(1, color=FAINT, linewidth=1)
    axes.text(lengths[0], 1.012, "no communication", color=FAINT, fontsize=8, verticalalignment="bottom")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length // 1024}K" if length % 1024 == 0 else str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("tokens of the whole sequence")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    args = parse_args()
    results = [load(path) for path in args.results]
    if len({result["settings"].get("in_a_row", 1) for result in results}) > 1:
        print("Some of the files have single calls and others calls in a row: draw them apart.", file=sys.stderr)
        return 2
    if args.markdown:
        print(markdown(results))
    if args.out is None:
        return 0
    rows = [
        row
        for result in results
        for row in result["results"]
        if row["status"] == "ok" and row["share_of_limit"] and row["contender"] != "limit"
    ]
    ranks = args.ranks or max((row["ranks"] for row in rows), default=0)
    kernel = args.kernel or results[0]["kernel"]
    rows = [row for row in rows if (row["ranks"], row["limit_kernel"]) == (ranks, kernel)]
    rows = [row for row in rows if any(fnmatch(row["contender"], pattern) for pattern in args.contenders)]
    masks = {mask_of(row) for row in rows}
    if len(masks) > 1:
        named = "; ".join(mask.removeprefix(", ") or "whole sequences" for mask in sorted(masks))
        print(f"The files have several masks ({named}): draw them apart.", file=sys.stderr)
        return 2
    rows = list({(row["contender"], row["length"], row["kv_heads"]): row for row in rows}.values())
    if not rows:
        print(f"Nothing to draw for {ranks} ranks, {kernel} and {args.contenders}.", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, args.part, results[0]["hardware"]["device"]).savefig(args.out, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
