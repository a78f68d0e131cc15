"""Draws the pictures of the documentation: `python docs/mkdocs/pictures.py`."""

import argparse
import json
from dataclasses import replace
from itertools import pairwise
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from transformers import LlamaForCausalLM

from hf_burst.hf.models.model_size import model_size, shape_named
from hf_burst.plan import Mask, MaskPattern, make_plan
from hf_burst.ranks.layout import SequenceLayout
from hf_burst.sizing.gpus import capacity_of, gpu_named
from hf_burst.sizing.memory import memory_of_step
from hf_burst.sizing.model import Training
from recipes.benchmarks.engines import compared, seconds_of

ROOT = Path(__file__).parents[2]
COLORS = ["#4c78a8", "#e8963e", "#59a37c", "#b5639a"]  # of the ranks, as in the notebooks
GREY, DARK = "#9aa0a6", "#333333"
RANKS = 4
# what is trained, and its results
STEPS = {
    "LoRA": ["training_2xH100_lora_no_more_memory.json"],
    "all weights": ["training_2xH100_no_more_memory.json", "training_2xH100_128k_no_more_memory.json"],
}
CONTENDERS = {
    "hf_burst, activation_offloading=1.0": ("hf_burst, all kept on the host", COLORS[0]),
    "DeepSpeed Ulysses, flash-attn 4": ("DeepSpeed's Ulysses", "#d5d8dc"),
    "accelerate context parallelism, cuDNN": ("torch's context parallelism", "#b3b8be"),
    "accelerate context parallelism, cuDNN, offloaded": ("the same, inputs of layers on the host", GREY),
}
ENGINES = {  # of the same training by one script, in the order of the table
    "hf_burst, DDP": "hf_burst (DDP)",
    "hf_burst, offload": "hf_burst (FSDP2), kept on the host",
    "deepspeed": "DeepSpeed's Ulysses (ZeRO-3)",
    "unsloth-ulysses, no liger, DDP": "Unsloth's Ulysses (DDP)",
    "ms-swift, DDP": "ms-swift's Ulysses (DDP)",
    "torch-cudnn": "torch's context parallelism (FSDP2)",
}


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str, **style: Any) -> None:
    """A rounded box with text in it; x and y are its middle."""
    corner = (x - width / 2, y - height / 2)
    shape = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=shape, facecolor=color, edgecolor="white"))
    axes.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": 9, "color": "white", **style})


def arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], **style: Any) -> None:
    options = {"arrowstyle": "-|>", "mutation_scale": 14, "color": DARK, "linewidth": 1.4, **style}
    axes.add_patch(FancyArrowPatch(start, stop, **options))


def blank(axes: Axes, x: tuple[float, float], y: tuple[float, float], title: str = "") -> None:
    axes.set(xlim=x, ylim=y, xticks=[], yticks=[])
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[:].set_visible(False)


def step_time() -> Figure:
    """Speed and memory of a training step, from the committed results."""
    figure, panels = plt.subplots(1, 4, figsize=(13, 3.6), layout="constrained")
    for pair, (weights, names) in zip((panels[:2], panels[2:]), STEPS.items(), strict=True):
        results = [json.loads((ROOT / "recipes/benchmarks/results" / name).read_text()) for name in names]
        measured = [row for result in results for row in result["results"] if "median_s" in row]
        rows = {(row["length"], row["contender"]): row for row in measured}
        lengths = sorted({length for length, _ in rows})
        for axes, unit in zip(pair, ("thousand tokens a second", "GiB a GPU"), strict=True):
            for group, length in enumerate(lengths):
                for place, (contender, (label, color)) in enumerate(CONTENDERS.items()):
                    row, x = rows[length, contender], group + (place - 1.5) * 0.22
                    value = row["peak_memory_gib"] if unit == "GiB a GPU" else length / row["median_s"] / 1000
                    axes.bar(x, value, 0.21, color=color, label=label if not group else None)
                    text = f"{value:.1f}" if value < 10 else f"{value:.0f}"
                    axes.text(x, value, text, ha="center", va="bottom", fontsize=7.5, color=DARK)
            axes.set_xticks(range(len(lengths)), [f"{length // 1024}K" for length in lengths])
            axes.set_title(f"{weights}: {unit}", fontsize=10)
            axes.set(yticks=[])
            axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower center", ncols=4
    )
    figure.suptitle("A step of an 8B Llama on 2 H100s, 32K to 128K tokens: bf16, every layer checkpointed", fontsize=11)
    return figure


def engines() -> Figure:
    """One training by several engines, from the committed result."""
    rows = json.loads((ROOT / "recipes/benchmarks/results/engines_2xH200_speed.json").read_text())
    found = {label: row for label, row, _, _ in compared(rows)}
    figure, panels = plt.subplots(1, 3, figsize=(11, 2.7), layout="constrained", sharey=True)
    for place, (label, name) in enumerate(ENGINES.items()):
        row, color = found[label], COLORS[0] if name.startswith("hf_burst") else "#c3c8ce"
        gpu = max(step["allocated_gib"] for step in row["steps"])
        for axes, value in zip(panels, (seconds_of(row), gpu, row["host_gib"]), strict=True):
            axes.barh(-place, value, 0.72, color=color)
            text = f"{value:.2f}" if value < 10 and axes is panels[0] else f"{value:.0f}"
            axes.text(value, -place, f" {text}", va="center", fontsize=9, color=DARK)
    for axes, title in zip(panels, ("seconds a step", "GiB of each GPU", "GiB of the host, in all"), strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set(xticks=[])
        axes.margins(x=0.15)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    panels[0].set_yticks([-place for place in range(len(ENGINES))], list(ENGINES.values()), fontsize=9)
    figure.suptitle("LoRA of an 8B Llama at 65,536 tokens on 2 H200s, by one script", fontsize=11)
    return figure


def ring_step() -> Figure:
    """A ring in its second step, and what one rank does over time."""
    figure, (ring, time) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=[1, 1.25], layout="constrained")
    blank(ring, (-0.3, 4.3), (-0.35, 3.6), "Step 1: every rank has the block of the rank before it")
    places = [(0.75, 2.75), (3.25, 2.75), (3.25, 0.6), (0.75, 0.6)]
    for rank, (x, y) in enumerate(places):
        before = (rank - 1) % RANKS
        ring.add_patch(Rectangle((x - 0.78, y - 0.58), 1.56, 1.16, facecolor="#f3f4f6", edgecolor=COLORS[rank]))
        ring.text(x, y + 0.4, f"rank {rank}", ha="center", va="center", fontsize=9, color=COLORS[rank], weight="bold")
        box(ring, x - 0.37, y - 0.12, 0.64, 0.62, f"Q{rank}\nstays", COLORS[rank])
        box(ring, x + 0.37, y - 0.12, 0.64, 0.62, f"K{before} V{before}\ncomes", COLORS[before])
    sides = [((1.55, 2.75), (2.45, 2.75)), ((3.25, 2.15), (3.25, 1.2))]
    sides += [((2.45, 0.6), (1.55, 0.6)), ((0.75, 1.2), (0.75, 2.15))]
    for rank, (start, stop) in enumerate(sides):
        arrow(ring, start, stop, color=COLORS[rank], linewidth=3, mutation_scale=20)
    ring.text(
        2, 1.68, "in step 2 a block comes\nfrom two ranks before", ha="center", va="center", fontsize=9, color=DARK
    )

    blank(time, (-1.35, 8.4), (-0.2, 4.2), "Rank 0 over time, forward")
    lanes = {"compute": 3, "fetch": 2, "merge": 1}
    for name, y in lanes.items():
        time.text(-0.1, y, name, ha="right", va="center", fontsize=9, color=DARK)
    for step in range(RANKS):
        owner, start = -step % RANKS, 2 * step
        box(time, start + 1, lanes["compute"], 1.94, 0.62, f"Q0 x K{owner} V{owner}", COLORS[owner])
        if step + 1 < RANKS:
            following = -(step + 1) % RANKS
            box(time, start + 0.75, lanes["fetch"], 1.44, 0.5, f"K{following} V{following}", COLORS[following])
        box(time, start + 2.12, lanes["merge"], 0.5, 0.5, "+", DARK)
        time.text(start + 1, 3.62, f"step {step}", ha="center", fontsize=9, color=DARK)
    arrow(time, (0, 0.35), (8.3, 0.35))
    time.text(8.3, 0.08, "time", ha="right", va="center", fontsize=9, color=DARK)
    return figure


def two_levels() -> Figure:
    """Two hosts of four ranks: where blocks go in a step of the outer ring, and what one rank does over time."""
    figure, (places, time) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=[1, 1.25], layout="constrained")
    blank(places, (-0.2, 5.4), (-0.3, 4.75), "K and V cross once, by every network card")
    for host, x in enumerate((1.1, 4.1)):
        places.add_patch(Rectangle((x - 1, 0.0), 2, 4.05, facecolor="#f3f4f6", edgecolor=GREY))
        places.text(x, 4.2, f"host {host}", ha="center", fontsize=10, color=DARK, weight="bold")
        for number in range(RANKS):
            y = 3.5 - number
            box(places, x, y, 1.1, 0.6, f"rank {RANKS * host + number}", COLORS[number])
            if number:
                arrow(places, (x, y + 0.68), (x, y + 0.3), color=GREY)
        side = -0.75 if host == 0 else 0.75
        bend = f"arc3,rad={-0.3 if host == 0 else 0.3}"
        arrow(places, (x + side * 0.75, 0.5), (x + side * 0.75, 3.5), color=GREY, connectionstyle=bend)
    for number in range(RANKS):
        y = 3.5 - number
        arrow(places, (1.68, y + 0.08), (3.52, y + 0.08), color=COLORS[number], linewidth=2.4)
        arrow(places, (3.52, y - 0.12), (1.68, y - 0.12), color=COLORS[number], linewidth=2.4)
    places.text(2.6, 4.25, "outer ring", ha="center", fontsize=9, color=DARK)
    places.text(2.6, -0.22, "grey: the inner ring of each host", ha="center", fontsize=9, color=DARK)

    blank(time, (-1.75, 8.4), (-0.1, 4.1), "Rank 0 over time, forward")
    lanes = {"compute": 3, "inside the host": 2, "between hosts": 1}
    for name, y in lanes.items():
        time.text(-0.1, y, name, ha="right", va="center", fontsize=9, color=DARK)
    for step in range(2 * RANKS):
        crossing, order = divmod(step, RANKS)
        block = RANKS * crossing + -order % RANKS
        color = COLORS[block % RANKS]
        box(time, step + 0.5, lanes["compute"], 0.95, 0.62, f"K{block} V{block}", color, fontsize=8)
        if order + 1 < RANKS:
            following = RANKS * crossing + -(order + 1) % RANKS
            color = COLORS[following % RANKS]
            box(time, step + 0.4, lanes["inside the host"], 0.75, 0.5, f"K{following}", color, fontsize=8)
    box(time, 1.9, lanes["between hosts"], 3.75, 0.5, "K4 V4 come, K0 V0 leave", COLORS[0])
    for crossing in range(2):
        title = "blocks of host 0" if crossing == 0 else "blocks of host 1, that crossed"
        time.plot([RANKS * crossing + 0.05, RANKS * crossing + 3.95], [3.55, 3.55], color=GREY)
        time.text(RANKS * crossing + 2, 3.65, title, ha="center", fontsize=9, color=DARK)
    arrow(time, (0, 0.35), (8.3, 0.35))
    time.text(8.3, 0.08, "time", ha="right", va="center", fontsize=9, color=DARK)
    return figure


def packed_batch() -> Figure:
    """One packed sequence over four ranks, in zigzag and balanced."""
    sizes = [12000, 2000, 2000, 1000, 1000, 1000, 12000, 1768]
    documents = tuple(sum(sizes[:count]) for count in range(len(sizes) + 1))
    length = documents[-1]
    figure, (strips, work) = plt.subplots(1, 2, figsize=(11, 3.2), width_ratios=[3, 1], layout="constrained")
    blank(strips, (0, length), (2.9, -0.25))
    for number, (start, stop) in enumerate(pairwise(documents)):
        strips.add_patch(Rectangle((start, 0), stop - start, 0.6, facecolor=GREY, edgecolor="white", linewidth=2))
        if stop - start > 1500:
            strips.text((start + stop) / 2, 0.3, f"doc {number}", ha="center", va="center", color="white", fontsize=9)
    names = ["documents"]
    for row, chunking in enumerate(("zigzag", "balanced"), start=1):
        layout = SequenceLayout.for_batch([documents], RANKS, chunking)
        plan = make_plan(layout.masks(MaskPattern()), layout.sharding)
        names.append(f"{chunking}\n{len(layout.owners) // RANKS} chunks a rank")
        size = layout.length / len(layout.owners)
        for chunk, owner in enumerate(layout.owners):
            corner = (chunk * size, row)
            strips.add_patch(Rectangle(corner, size, 0.6, facecolor=COLORS[owner], edgecolor="white"))
            middle = ((chunk + 0.5) * size, row + 0.3)
            strips.text(*middle, str(owner), ha="center", va="center", color="white", fontsize=8)
        for rank in range(RANKS):
            pairs = sum(tile.pairs for step in plan.steps(rank, "kv") for tile in step.tiles)
            share = pairs / plan.masks[0].pairs
            work.bar(rank + (RANKS + 1) * (row - 1), share, 0.9, color=COLORS[rank])
            work.text(rank + (RANKS + 1) * (row - 1), share, f"{share:.0%}", ha="center", va="bottom", fontsize=8)
    strips.set_yticks([0.3, 1.3, 2.3], names, fontsize=9)
    strips.tick_params(length=0)
    strips.set_title("Chunks, and the rank that holds each", fontsize=11, loc="left")
    work.axhline(1 / RANKS, color=DARK, linewidth=0.8, linestyle=":")
    work.set_xticks([1.5, 6.5], ["zigzag", "balanced"], fontsize=9)
    work.set(yticks=[])
    work.set_title("Attention of each rank", fontsize=11, loc="left")
    work.spines[["top", "right", "left"]].set_visible(False)
    return figure


def shared_beginning() -> Figure:
    """The mask of a beginning and three endings, beside those of the rows that it stands for."""
    beginning, endings = 12, (5, 3, 4)
    figure, (rows, joined) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    bounds = (0, *(beginning + sum(endings[:count]) for count in range(len(endings) + 1)))
    length = bounds[-1]
    blank(rows, (-1, 28), (length + 0.5, -2), f"{len(endings)} rows: {3 * beginning + sum(endings)} tokens")
    for number, ending in enumerate(endings):
        colors = [COLORS[0]] * beginning + [COLORS[number + 1]] * ending
        pairs(rows, Mask(beginning + ending), colors, beginning, (8.5 * number, 1 + 5 * number), 0.45)
    blank(joined, (-4, length), (length + 0.5, -2), f"One row: {length} tokens")
    mask = Mask(length, documents=bounds, parents=(-1, *[0] * len(endings)))
    colors = [COLORS[index] for index, (start, stop) in enumerate(pairwise(bounds)) for _ in range(start, stop)]
    pairs(joined, mask, colors, beginning, (0, 0), 1.0)
    for name, (start, stop) in zip(("beginning", "ending 1", "ending 2", "ending 3"), pairwise(bounds), strict=True):
        joined.text(-0.4, (start + stop) / 2, name, ha="right", va="center", fontsize=8)
    return figure


def pairs(axes: Axes, mask: Mask, colors: list[str], beginning: int, corner: tuple[float, float], size: float) -> None:
    """The pairs of a mask by the colors of their keys, those of an ending and its beginning in a light one."""
    for query in range(mask.length):
        for key in (key for span in mask.intervals(query) for key in range(*span)):
            light = key < beginning <= query
            place = corner[0] + key * size, corner[1] + query * size
            square = {"facecolor": colors[key], "alpha": 0.45 if light else 1.0}
            axes.add_patch(Rectangle(place, 0.9 * size, 0.9 * size, **square))


def state_passing() -> Figure:
    """A document in runs over three ranks: what each finds by itself, and what passes."""
    sharding = SequenceLayout.for_batch([(0, 12)], 3, "zigzag").sharding
    runs = sorted((run.start, run.stop, rank) for rank in range(3) for run in sharding.runs(rank))
    figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
    blank(axes, (-1.9, 12.1), (-0.5, 4.1))
    for y, text in ((3.5, "at once,\nwithout waiting"), (2.05, "gathered"), (0.6, "added to\nthe outputs")):
        axes.text(-1.8, y, text, ha="left", va="center", fontsize=9, color=DARK)
    for index, (start, stop, rank) in enumerate(runs):
        middle, last = (start + stop) / 2, index == len(runs) - 1
        box(axes, middle, 3.5, stop - start - 0.15, 0.7, f"rank {rank}", COLORS[rank])
        box(axes, middle, 0.6, stop - start - 0.15, 0.7, f"rank {rank}", COLORS[rank])
        if not last:
            hands_on = f"$S_{index}$" if not index else f"$M_{index},\\ S_{index}$"
            axes.text(middle, 2.05, hands_on, ha="center", va="center", fontsize=11, color=DARK)
            arrow(axes, (middle, 3.12), (middle, 2.3), arrowstyle="-|>", connectionstyle="arc3")
            for _, end, _ in runs[index + 1 :]:
                arrow(axes, (middle, 1.8), (end - 0.6, 1.0), arrowstyle="-|>", connectionstyle="arc3", linewidth=0.8)
    axes.text(6, -0.3, "tokens of one document, in order", ha="center", va="center", fontsize=9, color=DARK)
    return figure


def query_path() -> Figure:
    """The rooms that a query passes."""
    figure, axes = plt.subplots(figsize=(11, 4.9), layout="constrained")
    blank(axes, (0, 11.8), (0.3, 5.8))
    floors = {
        "hf/": ("#e9eef5", 5.15, [("patch.py", "cuts the batch"), ("attention.py", "Transformers calls it")]),
        "attention/": (
            "#fbf0e4",
            3.75,
            [
                ("request.py", "one frozen value"),
                ("choice.py", "how to compute"),
                ("operator.py", "seen by autograd"),
            ],
        ),
        "ring/": (
            "#e8f2ec",
            2.35,
            [("sharded.py", "exchanges heads"), ("loop.py", "steps of the plan"), ("merge.py", "adds up in fp32")],
        ),
        "kernels/": ("#f5eaf2", 0.95, [("a tile", "out and log-sum-exp")]),
    }
    middles: dict[str, tuple[float, float]] = {}
    for number, (floor, (shade, y, rooms)) in enumerate(floors.items()):
        axes.add_patch(Rectangle((0.1, y - 0.58), 9.1, 1.16, facecolor=shade, edgecolor="none"))
        axes.text(0.3, y, floor, ha="left", va="center", fontsize=11, weight="bold", color=COLORS[number])
        offset = 1 if floor == "kernels/" else 0
        for index, (room, purpose) in enumerate(rooms):
            x = 2.85 + 2.5 * (index + offset)
            middles[room] = (x, y)
            box(axes, x, y, 2.1, 0.8, f"{room}\n{purpose}", COLORS[number])
    for start, stop in [("patch.py", "attention.py"), ("request.py", "choice.py"), ("choice.py", "operator.py")]:
        arrow(axes, (middles[start][0] + 1.05, middles[start][1]), (middles[stop][0] - 1.05, middles[stop][1]))
    for start, stop in [("sharded.py", "loop.py"), ("loop.py", "merge.py")]:
        arrow(axes, (middles[start][0] + 1.05, middles[start][1]), (middles[stop][0] - 1.05, middles[stop][1]))
    down = {"arrowstyle": "-|>", "connectionstyle": "arc3"}
    arrow(axes, (middles["attention.py"][0], 4.75), (middles["request.py"][0] + 0.3, 4.15), **down)
    arrow(axes, (middles["operator.py"][0], 3.35), (middles["sharded.py"][0] + 0.5, 2.75), **down)
    x, y = middles["loop.py"]
    arrow(axes, (x - 0.3, y - 0.4), (x - 0.3, 1.35), **down)
    arrow(axes, (x + 0.3, 1.35), (x + 0.3, y - 0.4), **down)
    axes.text(x - 0.4, 1.66, "q, k, v", ha="right", va="center", fontsize=8, color=DARK)
    axes.text(x + 0.4, 1.66, "out, lse", ha="left", va="center", fontsize=8, color=DARK)
    box(axes, 10.7, 0.95, 2, 1.16, "other ranks\np2p or symmetric\nmemory", GREY)
    arrow(axes, (9.65, 0.95), (x + 0.95, y - 0.42), linestyle="--", arrowstyle="<|-|>")
    axes.text(8.1, 1.72, "next block, by an Exchange", ha="left", va="center", fontsize=8, color=DARK)
    box(axes, 10.7, 5.15, 2, 0.8, "the layer\ngets its output", GREY)
    arrow(axes, (middles["merge.py"][0] + 0.75, 2.76), (10.7, 4.72), connectionstyle="arc3,rad=0.25")
    return figure


def step_memory() -> Figure:
    """What takes memory in a step as it is predicted, from the loss to the backward pass of the first layer."""
    model = model_size(LlamaForCausalLM, shape_named("llama-3-8b"), "llama-3-8b")
    training, capacity = Training(524288, 2, 2), capacity_of(gpu_named("h200"))
    tiles = {"activation_offloading": 1.0, "tiled_mlp": 16384, "head_groups": 4}
    settings = {
        "as it is": {},
        "layers offloaded": {"activation_offloading": 1.0},
        "and MLPs in tiles, heads in groups": tiles,
        "and 4 layers share a checkpoint": {**tiles, "layers_per_checkpoint": 4},
    }
    figure, panels = plt.subplots(1, len(settings), figsize=(13, 3.8), sharey=True, layout="constrained")
    for axes, (title, own) in zip(panels, settings.items(), strict=True):
        moments = memory_of_step(model, replace(training, **own), capacity)
        items = {
            "weights and optimizer": ("weights", "optimizer", "gathered"),
            "gradients": ("gradients",),
            "layer inputs": ("layer_inputs",),
            "attention": ("attention",),
            "one layer": ("activations",),
            "exchange": ("exchange",),
            "loss": ("loss",),
        }
        parts = [[sum(moment.items[name] for name in names) / 2**30 for moment in moments] for names in items.values()]
        colors = ["#c5c9ce", GREY, COLORS[0], "#8fb1d6", COLORS[1], COLORS[2], COLORS[3]]
        axes.stackplot(range(len(moments)), parts, labels=items, colors=colors)
        axes.axhline(capacity.gpu_memory / 2**30, color=DARK, linestyle="--", linewidth=1)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xticks([0, 1, len(moments) - 2], ["loss", "\nlast layer", "first layer"], fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("GiB of a GPU")
    panels[1].annotate("an H200", (32, capacity.gpu_memory / 2**30 + 3), ha="right", fontsize=8)
    handles, labels = panels[0].get_legend_handles_labels()
    panels[-1].legend(handles[::-1], labels[::-1], fontsize=8, facecolor="white", edgecolor="white", framealpha=1)
    return figure


def longer_context() -> Figure:
    """SmolLM2 before and after its context was extended: perplexity by position, facts that it finds, and losses."""
    result = json.loads((ROOT / "recipes/results/extension_smollm2.json").read_text())
    colors = dict(
        zip(("before", "stretched, not trained", "stretched and trained"), (GREY, *COLORS[1::-1]), strict=True)
    )
    figure, (curves, facts, steps) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for place, (label, color) in enumerate(colors.items()):
        curve = result["extension"]["curves"][label]
        middles = [(first * end) ** 0.5 for first, end in pairwise(curve["edges"])]
        curves.plot(middles[8:], [exp(loss) for loss in curve["losses"]][8:], marker=".", color=color, label=label)
        cells = [cell for cell in result["evaluation"][label]["recall"] if cell["task"] == "single"]
        for group, length in enumerate(sorted({cell["length"] for cell in cells})):
            share = fmean(cell["right"] for cell in cells if cell["length"] == length)
            facts.bar(group + (place - 1) * 0.27, share, 0.25, color=color)
            facts.text(group + (place - 1) * 0.27, share, f"{share:.0%}", ha="center", va="bottom", fontsize=8)
    old = result["extension"]["old length"]
    curves.axvline(old, color=DARK, linestyle=":", linewidth=1)
    curves.text(old * 0.93, 3000, "old length", ha="right", fontsize=8)
    curves.set(xscale="log", yscale="log", title="perplexity of held-out RFCs, by position")
    curves.set_xticks([256, 2048, 16384, 65536], ["256", "2K", "16K", "64K"])
    curves.set_yticks([5, 10, 100, 1000], ["5", "10", "100", "1,000"])
    curves.minorticks_off()
    curves.legend(frameon=False, fontsize=8, loc="upper left")
    facts.set(title="a hidden fact is found, by tokens of the text", yticks=[], ylim=(0, 1.1))
    facts.set_xticks(range(3), ["8K", "32K", "64K"])
    for (label, run), (color, width) in zip(result["steps"].items(), ((COLORS[0], 2.5), (COLORS[1], 0.8)), strict=True):
        steps.plot(run["loss"], color=color, linewidth=width, label=label)
    steps.set(title="loss of 300 steps of up to 64K tokens", xlabel="step")
    steps.legend(frameon=False, fontsize=8)
    for axes in (curves, facts, steps):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


PICTURES = (
    *(
        engines,
        step_time,
        longer_context,
        ring_step,
        two_levels,
        packed_batch,
        shared_beginning,
        state_passing,
        query_path,
    ),
    step_memory,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures", help="folder (default %(default)s)")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for draw in PICTURES:
        figure = draw()
        figure.savefig(folder / f"{draw.__name__}.png", dpi=130, facecolor="white", metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
