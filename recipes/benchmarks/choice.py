"""The rule for schedules beside a search over predicted seconds and beside what was measured. Needs no GPU.

    python recipes/benchmarks/choice.py --out outputs/choice.json

For every case in `results/attention_*.json`: the schedule that `hf_burst.plan.choose` names, the one that the cost
model predicts to be the fastest on H200s, and the fastest one measured, each with how much slower it was than that.
"""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from hf_burst.config import Schedule
from hf_burst.plan import Layer, MaskPattern, Shapes, candidates, choose, estimate, name_of
from hf_burst.plan.choose import fetched_share
from hf_burst.plan.machine import h200
from hf_burst.ranks.layout import SequenceLayout
from recipes.benchmarks.documents import Documents

RESULTS = Path(__file__).parent / "results"
HOST = 8  # ranks of the simulated hosts
# the search stayed with what it took for one whole document, unless another schedule was cheaper by a tenth
TENTH = 1.1
Row = dict[str, Any]


def layer_of(row: Row, whole: bool = False) -> Layer:
    """The layer that a result was measured of; `whole`: of one document of the same length."""
    documents, ranks = row.get("document_tokens"), row["ranks"]
    bounds = (0, row["length"])
    if documents and not whole:
        bounds = Documents(*documents).bounds(row["length"], 2 * ranks)
    layout = SequenceLayout.for_batch([bounds] * row["batch"], ranks)
    shapes = Shapes(row["q_heads"], row["kv_heads"], row["head_dim"], row["head_dim"], 2, 4)
    return Layer(layout.masks(MaskPattern(window=row.get("window"))), layout.sharding, shapes)


def searched(layer: Layer, kernel: str, usual: Schedule | None = None) -> Schedule:
    """The schedule with the fewest predicted seconds on H200s.

    Args:
        layer ([`Layer`]): What is computed.
        kernel (`str`): Name of the kernel.
        usual ([`Schedule`], *optional*): What one whole document takes. The search keeps it unless another schedule is
            cheaper by a tenth, and then takes the first one in the order of [`candidates`] of which that is not so.
    """
    machine = h200(kernel)
    options = candidates(layer.ranks, layer.shapes.q_heads, layer.shapes.kv_heads, machine.ranks_per_host)
    if kernel == "torch_cudnn":  # slow on the tiles of gathered keys
        options = [schedule for schedule in options if schedule.ring != "all_gather"]
    if usual is not None:
        options = [schedule for schedule in options if schedule.ulysses in (1, usual.ulysses, layer.ranks)]
    costs = {schedule: estimate(schedule, layer, machine) for schedule in options}
    # a quarter of the memory was free for a layer
    seconds = {schedule: cost.total_s for schedule, cost in costs.items() if cost.memory_bytes <= machine.memory / 4}
    least = min(seconds.values())
    if usual is None:
        return min(seconds, key=lambda schedule: round(seconds[schedule], 9))
    return next(schedule for schedule in (usual, *seconds) if seconds.get(schedule, math.inf) <= TENTH * least)


def ruled(layer: Layer) -> Schedule:
    """The schedule that the rule names."""
    return choose(layer, replace(h200(), ranks_per_host=HOST)).schedule


def measured(file: Path) -> list[Row]:
    """The cases of a file: what was measured, and the milliseconds of every schedule, with chunks cut as by default.

    What `"auto"` took counts where its schedule was not measured by name in the same run.
    """
    result = json.loads(file.read_text())
    cases: dict[tuple[int, int], Row] = {}
    for row in result["results"]:
        package, _, name = row["contender"].partition(" ")
        if row["status"] != "ok" or " " in name or (package != "hf_burst" and row["contender"] != "ulysses plain"):
            continue
        case = cases.setdefault(
            (row["length"], row["kv_heads"]), {**row, "kernel": result["kernel"], "ms": {}, "auto": {}, "plain": None}
        )
        milliseconds = 1e3 * row["median_s"]["both"]
        if package != "hf_burst":
            case["plain"] = milliseconds
        elif name != "auto":
            case["ms"][name] = milliseconds
        else:
            took = [line.split(" ")[2] for line in row["said"] if line.startswith("hf_burst runs ")]
            case["auto"] = {took[-1]: milliseconds}
    return [{**case, "ms": {**case["auto"], **case["ms"]}} for case in cases.values()]


def compared(case: Row) -> Row:
    """A case of the table."""
    layer, ranks, kernel = layer_of(case), case["ranks"], case["kernel"]
    usual = searched(layer_of(case, whole=True), kernel)
    packed = case.get("document_tokens") is not None
    names = {"rule": ruled(layer), "search": searched(layer, kernel, usual) if packed else searched(layer, kernel)}
    milliseconds = case["ms"]
    best = min(milliseconds, key=milliseconds.__getitem__)
    row = {key: case.get(key) for key in ("ranks", "kernel", "q_heads", "kv_heads", "length", "window")}
    row["documents"] = len(layer.masks[0].documents) - 1
    row["fetched_share"] = round(fetched_share(layer.masks, layer.sharding), 3)
    row["ms"] = {name: round(value, 3) for name, value in milliseconds.items()}
    row["plain_ulysses_ms"] = case["plain"] and round(case["plain"], 3)
    row["best"] = best
    for who, schedule in names.items():
        name = name_of(schedule, ranks)
        behind = milliseconds[name] / milliseconds[best] - 1 if name in milliseconds else None
        row |= {who: name, f"{who}_behind": behind if behind is None else round(behind, 4)}
    return row


def simulated() -> list[Row]:
    """Where nothing was measured: the rule beside the search, both in predicted seconds, on one host."""
    cases = [
        {"ranks": ranks, "kv_heads": kv_heads, "length": tokens * ranks}
        for ranks in (3, 6, 8)
        for kv_heads in (1, 2, 8, 32)
        for tokens in (8192, 32768)
    ]
    cases += [
        {"ranks": ranks, "kv_heads": 8, "length": 1 << 18, "document_tokens": [512, longest]}
        for ranks in (4, 8)
        for longest in (4096, 16384, 65536)
    ]
    cases += [
        {"ranks": ranks, "kv_heads": 8, "length": length, "window": 4095}
        for ranks in (4, 8)
        for length in (1 << 15, 1 << 16, 1 << 17)
    ]
    rows = []
    for case in cases:
        layer = layer_of({"q_heads": 32, "head_dim": 128, "batch": 1, **case})
        schedules = {"rule": ruled(layer), "search": searched(layer, "flash_attn_4")}
        seconds = {who: estimate(schedule, layer, h200()).total_s for who, schedule in schedules.items()}
        names = {who: name_of(schedule, layer.ranks) for who, schedule in schedules.items()}
        share = round(fetched_share(layer.masks, layer.sharding), 3)
        behind = round(seconds["rule"] / seconds["search"] - 1, 4)
        documents = len(layer.masks[0].documents) - 1
        rows.append({**case, "documents": documents, "fetched_share": share, **names, "rule_behind": behind})
    return rows


def mask_of(row: Row) -> str:
    """What the queries see, in words."""
    count, window = row["documents"], row.get("window")
    return f"{count} documents" if count > 1 else f"window {window + 1}" if window else "whole"


def markdown(cases: list[Row], simulations: list[Row]) -> str:
    """Both tables."""

    def percent(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.1%}"

    lines = ["| GPUs | kernel | key heads | tokens | mask | keys needed | rule | behind | search | behind | fastest |"]
    lines.append("|---:|---|---:|---:|---|---:|---|---:|---|---:|---|")
    for case in cases:
        cells = [case["ranks"], case["kernel"], case["kv_heads"], case["length"], mask_of(case)]
        cells += [f"{case['fetched_share']:.0%}", case["rule"], percent(case["rule_behind"])]
        cells += [case["search"], percent(case["search_behind"]), f"{case['best']} of {len(case['ms'])}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "| GPUs, 8 a host | key heads | tokens | mask | keys needed | rule | search | rule behind, predicted |",
    ]
    lines.append("|---:|---:|---:|---|---:|---|---|---:|")
    for row in simulations:
        cells = [*(row[key] for key in ("ranks", "kv_heads", "length")), mask_of(row), f"{row['fetched_share']:.0%}"]
        cells += [row["rule"], row["search"], f"{row['rule_behind']:.1%}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON, and as tables beside it (.md)")
    arguments = parser.parse_args()
    files = sorted(RESULTS.glob("attention_*.json"))
    cases = [{"file": file.name, **compared(case)} for file in files for case in measured(file)]
    simulations = simulated()
    tables = markdown(cases, simulations)
    print(tables)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"measured": cases, "simulated": simulations}, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(tables + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
