"""Training steps of several contenders, in turns."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from recipes.benchmarks.harness import Row, table
from recipes.benchmarks.training_job import Job

Loss = Callable[[Job], torch.Tensor]
Way = Callable[[Job], AbstractContextManager[Loss]]  # prepares the model of a job, and gives what computes the loss


def first_gradients(job: Job, way: Way) -> dict[str, float]:
    """The loss of a contender and the norm of its gradients, without a step."""
    with way(job) as loss:
        value = loss(job)
        value.backward()
    norm = nn.utils.clip_grad_norm_(job.model.parameters(), float("inf"))
    job.optimizer.zero_grad()
    return {"loss": mean_loss(job, value), "gradient_norm": float(getattr(norm, "full_tensor", lambda: norm)())}


def mean_loss(job: Job, value: torch.Tensor) -> float:
    """The loss of the whole sequence, from those of all ranks."""
    return float(sum(job.ranks.gather(float(value.detach())))) / job.ranks.size


def step(job: Job, way: Way) -> dict[str, float]:
    """Makes one optimizer step: its seconds, from a barrier on, and its peaks of memory, on the slowest rank."""
    with way(job) as loss:
        gc.collect()
        if job.ranks.cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()
        locking = memory(job)["page_locking_s"]
        job.ranks.align()
        job.ranks.wait()
        start = time.perf_counter()
        value = loss(job)
        value.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.ranks.wait()
        own = {"seconds": time.perf_counter() - start, **memory(job)}
    own["page_locking_s"] -= locking
    return job.ranks.slowest(own) | {"loss": mean_loss(job, value)}


def memory(job: Job) -> dict[str, float]:
    """The peaks of this rank: bytes of its GPU that tensors take and that torch reserves, and bytes of host memory that
    torch and hf_burst have page-locked. And the seconds that page-locking has taken."""
    if not job.ranks.cuda:
        return dict.fromkeys(("peak_bytes", "reserved_bytes", "host_bytes", "page_locking_s"), 0.0)
    host, (size, spent) = torch.cuda.host_memory_stats(), (job.home.size, job.home.seconds) if job.home else (0, 0)
    return {
        "peak_bytes": float(torch.cuda.max_memory_allocated()),
        "reserved_bytes": float(torch.cuda.max_memory_reserved()),
        # all that torch holds; older versions call this reserved
        "host_bytes": float(host.get("reserved_bytes.peak", host.get("allocated_bytes.peak", 0)) + size),
        "page_locking_s": host.get("host_alloc_time.total", 0) / 1e6 + spent,
    }


def measure(
    job: Job,
    ways: Mapping[str, Way],
    rounds: int,
    warmup: int,
    tokens: torch.Tensor,
    checked: int | None = None,
) -> Iterator[dict[str, Row]]:
    """Compares the losses and gradient norms of all contenders on the first `checked` tokens of a sequence of shape
    `(1, length)`, and has them take turns, a step each: `rounds` that count, behind `warmup`.

    Yields:
        The rows by the names of the contenders, after the comparison and after each step.
    """
    job.tokens, rows = tokens[:, :checked], dict[str, Row]()
    for name, way in ways.items():
        check, reason = job.ranks.attempt(partial(first_gradients, job, way))
        rows[name] = {"contender": name, "status": "failed" if reason else "ok", "reason": reason}
        rows[name] |= {"check": check and check | {"length": job.tokens.shape[1]}, "steps": [], "chosen": {}}
        job.ranks.say(f"{tokens.shape[1]} tokens, {name}: {reason or check}")
        job.optimizer.zero_grad()
    job.tokens = tokens
    yield rows
    running = [name for name, row in rows.items() if row["status"] == "ok"]
    for index in range(warmup + rounds):
        turn = index % max(1, len(running))
        for name in [*running[turn:], *running[:turn]]:
            job.chosen = {}
            timed, reason = job.ranks.attempt(partial(step, job, ways[name]))
            rows[name]["chosen"] = job.chosen or rows[name]["chosen"]
            if reason:
                rows[name] |= {"status": "failed", "reason": reason}
                running = [survivor for survivor in running if survivor != name]
                job.optimizer.zero_grad()
            elif index >= warmup:
                rows[name]["steps"].append(timed)
            yield rows
        job.ranks.say(f"{tokens.shape[1]} tokens, round {index + 1} of {warmup + rounds}")


def with_medians(rows: Mapping[str, Row]) -> list[Row]:
    """The rows, those that have steps with their medians, peaks of memory, and ratios to the other contenders."""
    medians = {
        name: statistics.median(each["seconds"] for each in row["steps"]) for name, row in rows.items() if row["steps"]
    }

    def measured(name: str, row: Row) -> Row:
        peaks = {kind: max(each[f"{kind}_bytes"] for each in row["steps"]) for kind in ("peak", "reserved", "host")}
        return {
            "median_s": medians[name],
            **{f"{kind}_memory_gib": size / 2**30 for kind, size in peaks.items()},
            "times_as_fast_as": {rival: medians[rival] / medians[name] for rival in medians if rival != name},
        }

    return [row | measured(name, row) if name in medians else row for name, row in rows.items()]


def summary_table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    cells = []
    for row in rows:
        found = [row.get("length", ""), row["contender"], row["reason"]]
        if "median_s" in row:
            host, share = row["host_memory_gib"], row.get("share_of_limit")
            found[2:] = [f"{row['median_s']:.3f}", f"{row['peak_memory_gib']:.1f}"]
            found += ["" if host is None else f"{host:.1f}", "" if share is None else f"{share:.1%}"]
        cells.append(found)
    return table(["tokens", "contender", "s a step", "GiB", "of the host", "share of its limit"], cells)
