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
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from recipes.benchmarks.harness import at_least, begin, options_of, write
from recipes.benchmarks.steps import Way, measure, summary_table, with_medians
from recipes.benchmarks.training_contenders import burst
from recipes.benchmarks.training_job import Job, add_model, make_job

Batch = dict[str, torch.Tensor]


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
    return job.model(**rows).loss


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


def contenders(arguments: argparse.Namespace, rows: Batch) -> dict[str, Way]:
    """All contenders: with a beginning that is shared, with whole rows, and the limit."""
    compute = pairs if arguments.what == "pairs" else questions

    def way(rows: Batch, share: bool = False) -> Way:
        settings = {"share_prefixes": share, "memory": "auto"}
        return partial(burst, settings=settings, compute=partial(compute, rows=rows))

    made = {"shared": way(rows, True), "rows": way(rows), "limit": way(row_of(arguments, rows))}
    return {name: one for name, one in made.items() if name not in arguments.leave_out}


def read_arguments() -> argparse.Namespace:
    parser = options_of(__doc__, timeout_s=600.0)
    add_model(parser)
    parser.set_defaults(weights="lora", gated_norms=False)
    parser.add_argument("--what", choices=("questions", "pairs"), default="questions", help="SFT, or DPO")
    parser.add_argument("--beginning", type=at_least(2), default=65536, help="tokens that all rows share")
    parser.add_argument("--ending", type=at_least(1), default=1024, help="tokens of each row after them")
    parser.add_argument("--endings", type=at_least(2), default=8, help="rows; 2 for a pair")
    parser.add_argument("--leave-out", nargs="+", default=[], help="contenders that do not run")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="timed steps of every contender")
    parser.add_argument("--warmup", type=at_least(0), default=1, help="steps before them")
    arguments = parser.parse_args()
    if arguments.what == "pairs" and arguments.endings % 2:
        parser.error("--what pairs takes an even number of --endings: the first half of the rows is preferred")
    return arguments


def main() -> int:
    arguments = read_arguments()
    ranks, result = begin(arguments, "shape", "layers", "what", "beginning", "ending", "endings", "liger")
    longest = arguments.beginning + arguments.ending * arguments.endings
    job = make_job(arguments, longest, ranks)
    if arguments.what == "pairs":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(job.base)
    rows = rows_of(arguments, job.base.config.vocab_size, ranks.device)
    result["results"] = []
    ways = contenders(arguments, rows)
    for found in measure(job, ways, arguments.rounds, arguments.warmup, rows["input_ids"]):
        result["results"] = [row | {"settings": row["chosen"]} for row in with_medians(found)]
        write(arguments.out, result, ranks)
    ranks.say(summary_table(result["results"]))
    ranks.close()
    return 0 if any("median_s" in row for row in result["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
