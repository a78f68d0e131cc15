"""The result of a benchmark: a JSON document (its form: recipes/benchmarks/schema.json), and tables of it."""

import importlib.metadata
import os
import platform
import socket
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hf_burst

from .bench_contenders import Case
from .bench_ranks import Ranks
from .bench_rounds import PASSES, Measured

SCHEMA_VERSION = 1
_PACKAGES = (
    *("flash-attn", "flash-attn-4", "ring-flash-attn", "axolotl-ringmaster", "deepspeed"),
    *("nvidia-cutlass-dsl", "triton", "transformers", "accelerate", "liger-kernel", "peft"),
)


def environment(ranks: Ranks, command: Sequence[str], commit: str | None) -> dict[str, Any]:
    """Where and with what a benchmark ran."""
    hosts = ranks.gather(socket.gethostname())
    versions = {"python": platform.python_version(), "hf_burst": hf_burst.__version__, "torch": torch.__version__}
    versions |= {name: found for name in _PACKAGES if (found := _version(name))}
    hardware: dict[str, Any] = {"device": platform.processor() or platform.machine(), "memory_gib": None}
    if ranks.cuda:
        properties = torch.cuda.get_device_properties(ranks.device)
        hardware = {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    hardware |= {"ranks": ranks.size, "hosts": len(set(hosts)), "cpus": os.cpu_count()}
    return {
        "schema": SCHEMA_VERSION,
        "command": " ".join(command),
        "git_commit": commit or git_commit(),
        "hardware": hardware,
        "versions": versions,
    }


def git_commit() -> str | None:
    """The commit of the checkout that this package lies in, "+" where files differ; `None` without one."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=here, capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return f"{commit}+" if commit and git("status", "--porcelain", "--untracked-files=no") else commit


def rows(found: Sequence[Measured], case: Case) -> list[dict[str, Any]]:
    """The results of one case. Ratios are between medians: a share of the limit, and how many times as fast as each of
    the others a contender was."""
    medians = {
        measured.contender.name: {name: statistics.median(measured.seconds[name]) for name in PASSES}
        for measured in found
        if measured.status == "ok"
    }
    return [_row(measured, case, medians) for measured in found]


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
    if measured.status != "ok" or measured.prepared is None:
        return row
    own, sent, flops = medians[name], measured.prepared.sent, case.flops()
    roof = medians.get("limit")
    return row | {
        "calls": measured.calls,
        "seconds": measured.seconds,
        "median_s": own,
        "iqr_s": {part: _spread(measured.seconds[part]) for part in PASSES},
        "tflops_per_gpu": {part: flops[part] / own[part] / 1e12 for part in PASSES},
        "share_of_limit": {part: roof[part] / own[part] for part in PASSES} if roof else None,
        "times_as_fast_as": {other: medians[other]["both"] / own["both"] for other in medians if other != name},
        "peak_memory_bytes": measured.peak_bytes,
        "memory_outside_allocator_bytes": measured.outside_bytes,
        "bytes_sent": {"forward": sent.forward, "backward": sent.backward, "source": sent.source},
    }


def table(result: dict[str, Any]) -> str:
    """Text for a terminal: TF/s per GPU of both passes, and the share of the limit."""
    lines = []
    for title, part in _matrices([result]):
        lengths = sorted({row["length"] for row in part})
        lines.append(f"{title}: TF/s per GPU forward+backward (share of the limit)")
        names = list(dict.fromkeys(row["contender"] for row in part))
        cells = {name: [_cell(part, name, length) for length in lengths] for name in names}
        first, width = max(map(len, names)), max(12, *(len(cell) for row in cells.values() for cell in row))
        for name, row in {"": map(_tokens, lengths), **cells}.items():
            lines.append(f"{name:<{first}}" + "".join(f" {cell:>{width}}" for cell in row))
        lines.append("")
    return "\n".join([*lines, *_reasons(result)])


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The same as Markdown, for a README, of several results together; the last counts where they overlap."""
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
    """Rows that belong into one table, under its title."""
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
    """What a title says of documents and windows; older results have none."""
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


def _reasons(result: dict[str, Any]) -> list[str]:
    """Why contenders are missing, each reason once."""
    told: dict[str, None] = {}
    for row in [*result["results"], *result["checks"]]:
        if row["status"] != "ok":
            told[f"{row['contender']} {row['status']}: {row['reason'][:200]}"] = None
    return list(told)


def _spread(values: Sequence[float]) -> float:
    """The interquartile range."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
