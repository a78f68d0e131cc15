"""Training steps on rows that begin alike: the beginning computed once, beside a batch of whole rows.

    torchrun --nproc-per-node 2 recipes/benchmarks/beginnings.py --liger --out outputs/beginnings.json
    python recipes/benchmarks/beginnings.py --liger --what pairs --endings 2 --out outputs/pairs.json
    torchrun --nproc-per-node 2 recipes/benchmarks/beginnings.py --shape qwen3.5-hybrid
    torchrun --nproc-per-node 2 recipes/benchmarks/beginnings.py --device cpu --shape tiny --beginning 256 --ending 16

One model with random weights and adapters of rank 16 is trained on `--endings` rows: `--what questions` is SFT, whose
endings have labels, and `--what pairs` is DPO, with the adapters switched off for the reference (by TRL's fused head).
All contenders take turns, a step each. Before the first step their losses and gradient norms are compared.

The limit is a step on one row of as many tokens as are left when the beginning is computed once: a text that has about
as many pairs of a query and a key.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import hf_burst
from hf_burst.hf.groups import PATCH
from hf_burst.hf.parts.checkpointing import Checkpointing
from hf_burst.hf.parts.memory import MemoryRule
from hf_burst.plan import MaskPattern
from recipes.benchmarks.provenance import environment
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.training import at_least, first_gradients, step
from recipes.benchmarks.training_job import SHAPES, Job, make_job

Batch = dict[str, torch.Tensor]
Loss = Callable[[Job], torch.Tensor]


def rows_of(arguments: argparse.Namespace, vocabulary: int, device: torch.device) -> Batch:
    """Rows that share a beginning, with labels on their endings."""
    generator = torch.Generator().manual_seed(0)
    beginning = torch.randint(0, vocabulary, (1, arguments.beginning), generator=generator)
    endings = torch.randint(0, vocabulary, (arguments.endings, arguments.ending), generator=generator)
    ids = torch.cat([beginning.expand(arguments.endings, -1), endings], 1).to(device)
    labels = ids.clone()
    labels[:, : arguments.beginning] = -100
    return {"input_ids": ids, "labels": labels}


def row_of(arguments: argparse.Namespace, rows: Batch) -> Batch:
    """One row of as many tokens as all endings and the beginning once, with as many labels."""
    beginning = arguments.beginning
    return {
        name: torch.cat([value[:1, :beginning], value[:, beginning:].reshape(1, -1)], 1) for name, value in rows.items()
    }


def questions(job: Job, rows: Batch) -> torch.Tensor:
    """The mean loss of the labels of all rows, in one pass."""
    loss: torch.Tensor = job.model(**rows).loss
    return loss


def questions_one_by_one(job: Job, rows: Batch) -> torch.Tensor:
    """The same, a row at a time."""
    size, total = job.ranks.size, torch.zeros((), device=job.ranks.device)
    items = int((rows["labels"] != -100).sum()) * size  # which every rank of a group counts
    for index in range(len(rows["labels"])):
        row = {name: value[index : index + 1] for name, value in rows.items()}
        loss = job.model(**row, num_items_in_batch=items).loss * size
        if index + 1 < len(rows["labels"]):
            loss.backward()
            total += loss.detach()
    return loss + total


def pairs(job: Job, rows: Batch) -> torch.Tensor:
    """DPO of the first half of the rows over the second one; of a single row, over its reference."""

    def margin() -> torch.Tensor:
        scores = job.model(**rows, fused_lm_head=True).log_probs.sum(1)
        half = len(scores) // 2
        return scores[:half].sum() - scores[half:].sum()

    model: Any = job.model
    with torch.no_grad(), model.disable_adapter():
        reference = margin()
    return -functional.logsigmoid(0.1 * (margin() - reference))


def contenders(arguments: argparse.Namespace, rows: Batch) -> dict[str, tuple[Loss, bool]]:
    """The losses of all contenders, and whether each shares beginnings."""
    limit = row_of(arguments, rows)
    compute = pairs if arguments.what == "pairs" else questions
    made: dict[str, tuple[Loss, bool]] = {
        "shared": (partial(compute, rows=rows), True),
        "rows": (partial(compute, rows=rows), False),
    }
    if arguments.what == "questions":
        made["rows, one by one"] = (partial(questions_one_by_one, rows=rows), False)
    return {**made, "limit": (partial(compute, rows=limit), False)}


@contextmanager
def patched(job: Job, loss: Loss, share: bool, memory: str) -> Iterator[Loss]:
    """Patches the model; page-locked memory is kept as for a model that stays patched."""
    config: Mapping[str, Any] = {"share_prefixes": share, "memory": memory}
    hf_burst.patch_model(job.model, hf_burst.BurstConfig.from_dict(config), job.mesh)
    parts = {type(part): part for part in getattr(job.base, PATCH).parts}
    parts[Checkpointing].host = job.home
    parts[MemoryRule].rules = job.rules.setdefault((share, memory), {})
    try:
        yield loss
        job.home = parts[Checkpointing].host
        latest = parts[MemoryRule].latest
        job.chosen = asdict(latest.settings) if latest else {}
    finally:
        hf_burst.unpatch_model(job.model)


def measure(job: Job, arguments: argparse.Namespace, rows: Batch) -> Iterator[list[dict[str, Any]]]:
    """Measures all contenders, and yields what is known after each step."""
    ways: dict[str, Callable[[Job], AbstractContextManager[Loss]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, (loss, share) in contenders(arguments, rows).items():
        if name in arguments.leave_out:
            continue
        ways[name] = partial(patched, loss=loss, share=share, memory=arguments.memory)
        check, reason = job.ranks.attempt(partial(first_gradients, job, ways[name]))
        found[name] = {"contender": name, "check": check, "reason": reason, "steps": []}
        job.ranks.say(f"{name}: {reason or check}")
        job.optimizer.zero_grad()
        yield list(found.values())
    running = [name for name, row in found.items() if row["reason"] is None]
    for index in range(arguments.warmup + arguments.rounds):
        turn = index % max(1, len(running))
        for name in [*running[turn:], *running[:turn]]:
            job.chosen = {}
            timed, reason = job.ranks.attempt(partial(step, job, ways[name]))
            if reason:
                found[name]["reason"] = reason
                running = [other for other in running if other != name]
                job.optimizer.zero_grad()
            elif index >= arguments.warmup:
                found[name]["steps"].append(timed)
                found[name]["settings"] = job.chosen
            yield list(found.values())
        job.ranks.say(f"round {index + 1} of {arguments.warmup + arguments.rounds}")


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds medians, peaks of memory, and how many times as fast sharing is."""
    medians = {
        row["contender"]: statistics.median(step["seconds"] for step in row["steps"]) for row in found if row["steps"]
    }
    shared = medians.get("shared")
    return [
        row
        | {
            "median_s": medians[row["contender"]],
            "peak_memory_gib": max(step["peak_bytes"] for step in row["steps"]) / 2**30,
            "host_memory_gib": max(step["host_bytes"] for step in row["steps"]) / 2**30,
            "sharing_is_times_as_fast": shared and medians[row["contender"]] / shared,
        }
        if row["contender"] in medians
        else row
        for row in found
    ]


def ceilings(arguments: argparse.Namespace) -> dict[str, float]:
    """How many times fewer tokens, and pairs of a query and a key, sharing has."""
    first, size, count = arguments.beginning, arguments.ending, arguments.endings
    bounds = (0, *range(first, first + count * size + 1, size))
    joined = MaskPattern().mask(bounds[-1], bounds, (-1, *[0] * count))
    rows = count * MaskPattern().mask(first + size, (0, first + size)).pairs
    limit = MaskPattern().mask(joined.length, (0, joined.length)).pairs
    return {
        "tokens": count * (first + size) / joined.length,
        "pairs": rows / joined.pairs,
        "pairs_of_the_limit": limit / joined.pairs,
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| contender | s a step | sharing is so many times as fast | GiB | of the host |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in result["results"]:
        if "median_s" not in row:
            lines.append(f"| {row['contender']} | {row['reason']} | | | |")
            continue
        faster = row["sharing_is_times_as_fast"]
        numbers = f"{row['median_s']:.3f} | {'' if faster is None else format(faster, '.2f')}"
        lines.append(
            f"| {row['contender']} | {numbers} | {row['peak_memory_gib']:.1f} | {row['host_memory_gib']:.1f} |"
        )
    return "\n".join(lines)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=at_least(1), help="how many layers of that width (as many as the shape has)")
    parser.add_argument("--what", choices=("questions", "pairs"), default="questions", help="SFT, or DPO")
    parser.add_argument("--beginning", type=at_least(2), default=65536, help="tokens that all rows share")
    parser.add_argument("--ending", type=at_least(1), default=1024, help="tokens of each row after them")
    parser.add_argument("--endings", type=at_least(2), default=8, help="rows; 2 for a pair")
    parser.add_argument("--memory", choices=("auto", "manual"), default="auto", help="as in BurstConfig")
    parser.add_argument("--leave-out", nargs="+", default=[], help="contenders that do not run")
    parser.add_argument("--liger", action="store_true", help="Liger's norms, rotary positions and SwiGLU")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="timed steps of every contender")
    parser.add_argument("--warmup", type=at_least(0), default=1, help="steps before them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one step may take")
    parser.add_argument("--commit", help="the commit to write down, if this is no git checkout")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    arguments = parser.parse_args()
    if arguments.what == "pairs" and arguments.endings % 2:
        parser.error("--what pairs takes an even number of --endings: the first half of the rows is preferred")
    return arguments


def main() -> int:
    arguments = read_arguments()
    ranks = Ranks(arguments.device, arguments.timeout)
    longest = arguments.beginning + arguments.ending * arguments.endings
    job = make_job(arguments.shape, longest, ranks, arguments.liger, "lora", compiled=False, layers=arguments.layers)
    if arguments.what == "pairs":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(job.base)
    rows = rows_of(arguments, job.base.config.vocab_size, ranks.device)
    names = ("shape", "layers", "what", "beginning", "ending", "endings", "memory", "liger")
    result = environment(ranks, [Path(sys.argv[0]).name, *sys.argv[1:]], arguments.commit)
    result |= {name: getattr(arguments, name) for name in names} | {"ceilings": ceilings(arguments), "results": []}
    for found in measure(job, arguments, rows):
        result["results"] = summary(found)
        if arguments.out is not None and ranks.rank == 0:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    ranks.say(json.dumps(result["ceilings"]))
    ranks.say(table(result))
    ranks.close()
    return 0 if any("median_s" in row for row in result["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
