"""The result of attention.py: rows of a JSON document (schema.json has its form), and Markdown tables of them."""

import statistics
from collections.abc import Sequence
from typing import Any

from recipes.benchmarks.contenders import Case
from recipes.benchmarks.measure import PASSES, Measured
from recipes.benchmarks.provenance import interquartile_range


def rows(results: Sequence[Measured], case: Case) -> list[dict[str, Any]]:
    """The rows of one case. Ratios between contenders are ratios of medians."""
    medians = {
        measured.contender.name: {name: statistics.median(measured.seconds[name]) for name in PASSES}
        for measured in results
        if measured.status == "ok"
    }
    return [_row(measured, case, medians) for measured in results]


def _row(measured: Measured, case: Case, medians: dict[str, dict[str, float]]) -> dict[str, Any]:
    name = measured.contender.name
    row: dict[str, Any] = {
        "contender": name,
        "config": measured.contender.config,
        "limit_kernel": case.native.name,
        "length": case.length,
        "batch": case.batch,
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "dtype": str(case.dtype).removeprefix("torch."),
        "documents": len(case.mask.documents) - 1,
        "document_tokens": [case.documents.shortest, case.documents.longest] if case.documents else None,
        "window": case.window,
        "ranks": case.ranks,
        "status": measured.status,
        "reason": measured.reason,
        "said": measured.said,
    }
    if measured.status != "ok" or measured.run is None:
        return row
    own, flops = medians[name], case.flops()
    limit = medians.get("limit")
    return row | {
        "calls": measured.calls,
        "seconds": measured.seconds,
        "median_s": own,
        "iqr_s": {part: interquartile_range(measured.seconds[part]) for part in PASSES},
        "tflops_per_gpu": {part: flops[part] / own[part] / 1e12 for part in PASSES},
        "share_of_limit": {part: limit[part] / own[part] for part in PASSES} if limit else None,
        "times_as_fast_as": {rival: medians[rival]["both"] / own["both"] for rival in medians if rival != name},
        "peak_memory_bytes": measured.peak_bytes,
        "memory_outside_allocator_bytes": measured.outside_bytes,
    }


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Tables of several results in Markdown. Where results overlap, the last one counts."""
    lines = []
    for title, part in _matrices(results):
        lengths = sorted({row["length"] for row in part})
        lines += [f"{title}:", "", "| TF/s per GPU (share of the limit) | " + " | ".join(map(_tokens, lengths)) + " |"]
        lines.append("|---|" + "---:|" * len(lengths))
        for name in dict.fromkeys(row["contender"] for row in part):
            cells = " | ".join(_cell(part, name, length) for length in lengths)
            lines.append(f"| {name} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def _matrices(results: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The rows of each table, under its title."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        for row in result["results"]:
            title = (
                f"{row['ranks']} x {result['hardware']['device']}, {row['q_heads']} query and {row['kv_heads']} key "
                f"heads, {row['dtype']}, limit by {row['limit_kernel']}{mask_of(row)}"
            )
            tables.setdefault(title, []).append(row)
    return list(tables.items())


def mask_of(row: dict[str, Any]) -> str:
    """Documents and window, as a title names them. Older results have neither."""
    documents, window = row.get("document_tokens"), row.get("window")
    packed = f", documents of {documents[0]} to {documents[1]} tokens" if documents else ""
    return packed + (f", window {window}" if window is not None else "")


def _tokens(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _cell(part: Sequence[dict[str, Any]], name: str, length: int) -> str:
    row = next((row for row in reversed(part) if row["contender"] == name and row["length"] == length), None)
    if row is None:
        return ""
    if row["status"] != "ok":
        return str(row["status"])
    rate, share = row["tflops_per_gpu"]["both"], row["share_of_limit"]
    digits = f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
    return digits if share is None or name == "limit" else f"{digits} ({share['both']:.0%})"


def reasons(result: dict[str, Any]) -> list[str]:
    """Reasons why contenders are missing, each of them once."""
    reasons: dict[str, None] = {}
    for row in [*result["results"], *result["checks"]]:
        if row["status"] != "ok":
            reasons[f"{row['contender']} {row['status']}: {row['reason'][:200]}"] = None
    return list(reasons)
