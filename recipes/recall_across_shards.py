"""Proof that attention and states cross shards: a model recalls facts that lie on another rank.

A sequence of filler tokens holds a few facts, each one token that says "key k has value v". The values are drawn anew
for every sequence. At the very end a question names one key, and the only label is its value. All facts stand on other
ranks than the question, which is asserted from the sharding itself. So only what reaches over ranks can answer: the
attention of a Llama, or the states of a model with no attention at all (`--layers recurrent`: gated DeltaNet layers).

Two runs are trained on the same data from the same initial weights:

* across shards: the model is patched by hf_burst and is given full batches. It must learn to answer.
* within the shard: the plain Transformers model, every rank on its own tokens (with their true positions). The rank
  that holds the question never sees a fact, so it must stay at chance. No attention reaches over ranks, and no state
  passes.

On CPU with two processes (about a minute), and on four GPUs:

    export ACCELERATE_USE_CPU=1 OMP_NUM_THREADS=1
    accelerate launch --config_file recipes/configs/accelerate_2_processes.yaml recipes/recall_across_shards.py

    accelerate launch --multi_gpu --num_processes 4 recipes/recall_across_shards.py

Writes results.json and recall.png to --output_dir; exits with 1 unless the first run reaches 99 % and the second stays
at chance. In one process both runs are the same and nothing is claimed.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from benchmarks.provenance import made_by
from matplotlib.figure import Figure
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    get_cosine_schedule_with_warmup,
)

import hf_burst
from hf_burst.attention import SequenceLayout
from hf_burst.cli import Parser

GOAL = 0.99
FILLERS = 16
CURVE_SEQUENCES = 512
_WIDTHS = {"hidden_size": 64, "intermediate_size": 128}
SIZES: dict[str, dict[str, Any]] = {  # by the kind of layers
    "attention": {
        **{**_WIDTHS, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        "initializer_range": 0.07,
    },
    "recurrent": {
        **{**_WIDTHS, "num_hidden_layers": 1, "layer_types": ["linear_attention"], "linear_num_key_heads": 4},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **{"linear_conv_kernel_dim": 2, "initializer_range": 0.2},
    },
}
OPTIONS: dict[str, tuple[int | float, str]] = {  # whole numbers are at least 1, but for the seed
    "length": (64, "tokens in a sequence"),
    "num_keys": (4, "facts in a sequence, one a key"),
    "num_values": (8, "values a key can have; chance is 1 / num_values"),
    "num_questions": (1, "questions at the end"),
    "steps": (300, "of training"),
    "batch_size": (32, "sequences of a step"),
    "learning_rate": (2e-3, "of AdamW"),
    "adam_beta2": (0.95, "of AdamW"),
    "eval_every": (20, "steps between two points of the curves"),
    "eval_sequences": (1024, "sequences of the final accuracies"),
    "seed": (0, "of weights and data"),
}
# what each learns by in a minute
DEFAULTS = {"attention": {}, "recurrent": {"num_questions": 4, "learning_rate": 1e-2, "adam_beta2": 0.99}}
CARRIERS = {"attention": "attention", "recurrent": "states"}
CUT = hf_burst.BurstConfig(chunking="zigzag")
LASTING = -6.0  # of A_log: a state keeps more than half of itself over 64 tokens, and not a few tokens as by default
Batch = dict[str, torch.Tensor]


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", choices=tuple(SIZES), default="attention", help="what the model is made of")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/recall"))
    for name, (value, told) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{told} (%(default)s)")
    parser.set_defaults(**DEFAULTS[parser.parse_known_args()[0].layers])
    args = parser.parse_args()
    for name, (value, _) in OPTIONS.items():
        if isinstance(value, int) and name != "seed" and getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.num_values < 2:
        parser.error("--num_values must be at least 2: with one value there is nothing to recall")
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output_dir must be a folder that can be written: {error}")
    return args


class Recall:
    """The task. Tokens: fillers, then the values, then the questions (one a key), then the facts (key x value)."""

    def __init__(self, args: argparse.Namespace, ranks: int) -> None:
        self.layers, self.questions = args.layers, args.num_questions
        self.length, self.keys, self.values, self.ranks = args.length, args.num_keys, args.num_values, ranks
        self.first_question = FILLERS + self.values
        self.first_fact = self.first_question + self.keys
        # the answer to a question is the label of its successor; the last token is a filler
        self.asked_at = range(self.length - 1 - self.questions, self.length - 1)
        self.sharding = SequenceLayout.for_batch([(0, self.length)], ranks, CUT.chunking).sharding
        homes = {self.sharding.owner(token) for token in self.asked_at if token >= 0}
        places = [t for t in range(self.asked_at.start) if ranks == 1 or self.sharding.owner(t) not in homes]
        if len(homes) > 1 or len(places) < self.keys:
            raise SystemExit(
                f"--length {self.length} leaves no room for {self.keys} facts on other ranks than {self.questions} "
                "questions."
            )
        (self.home,) = homes
        self.places = torch.tensor(places)

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        """`rows` sequences. Answers stand in the labels only."""
        input_ids = torch.randint(FILLERS, (rows, self.length), generator=generator)
        values = torch.randint(self.values, (rows, self.keys), generator=generator)
        order = torch.rand(rows, len(self.places), generator=generator).argsort(dim=1)
        facts_at = self.places[order[:, : self.keys]]
        input_ids.scatter_(1, facts_at, self.first_fact + torch.arange(self.keys) * self.values + values)
        first = torch.randint(self.keys, (rows, 1), generator=generator)
        asked = (first + torch.arange(self.questions)) % self.keys  # after one key those that follow it
        input_ids[:, self.asked_at.start : self.asked_at.stop] = self.first_question + asked
        for token in facts_at.gather(1, asked).unique().tolist():
            assert self.ranks == 1 or self.sharding.owner(token) != self.home, "the fact is on the rank that is asked"
        labels = torch.full_like(input_ids, -100)
        labels[:, -self.questions :] = FILLERS + values.gather(1, asked)
        return {"input_ids": input_ids, "labels": labels}

    def model(self) -> PreTrainedModel:
        """A small Llama, or a Qwen3.5 whose layers all are recurrent; its weights are random."""
        sizes = {"vocab_size": self.first_fact + self.keys * self.values, **SIZES[self.layers]}
        if self.layers == "attention":
            return LlamaForCausalLM(LlamaConfig(**sizes))
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, use_cache=False))
        for layer in model.model.layers:
            torch.nn.init.constant_(layer.linear_attn.A_log, LASTING)
        return model


class Run:
    """A model that is trained: patched, on full batches that are equal on all ranks; or plain, on this rank's tokens,
    which see those before them on this rank and nothing else."""

    def __init__(self, task: Recall, across: bool) -> None:
        self.task, self.across, carrier = task, across, CARRIERS[task.layers]
        self.key, self.color = ("across_shards", "#117733") if across else ("within_shard", "#bb2244")
        self.label = f"{carrier} across shards (hf_burst)" if across else f"{carrier} within the shard (no patch)"

    def model(self) -> PreTrainedModel:
        model = self.task.model()
        return hf_burst.patch_model(model, CUT) if self.across else model

    def given(self, batch: Batch) -> tuple[Batch, torch.Tensor]:
        """What the model takes, and the answer to each token, if any. The mask of ones says that a jump in the position
        ids begins no new document."""
        if self.across:
            return {"input_ids": batch["input_ids"]}, batch["labels"].roll(-1, 1)
        part = hf_burst.shard_batch(batch, config=CUT)
        tokens, targets = part["input_ids"], part["shift_labels"]
        if self.task.ranks > 1 and (targets != -100).any():
            assert (tokens < self.task.first_fact).all(), "the rank that is asked holds a fact"
        mask = torch.ones_like(tokens)
        return {"input_ids": tokens, "position_ids": part["position_ids"], "attention_mask": mask}, targets

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Within the shard that of the rank that is asked and 0 elsewhere; times the ranks, since DDP averages
        gradients."""
        if self.across:
            return model(**batch).loss
        inputs, targets = self.given(batch)
        answers = len(batch["labels"]) * self.task.questions
        loss = model(**inputs, labels=targets, shift_labels=targets, num_items_in_batch=answers).loss
        return loss * self.task.ranks

    def hits(self, model: torch.nn.Module, batch: Batch) -> tuple[int, int]:
        """Right answers, and answers: none on ranks that are not asked."""
        inputs, targets = self.given(batch)
        keep = {"logits_to_keep": self.task.questions + 1} if self.across else {}
        logits = model(**inputs, **keep).logits
        targets = targets[:, -logits.shape[1] :]
        asked = targets != -100
        return int((logits[asked].argmax(-1) == targets[asked]).sum()), int(asked.sum())


def train(accelerator: Accelerator, args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """One run: the accuracies every `eval_every` steps, the final one on more sequences, and the seconds it took."""
    set_seed(args.seed)
    model = run.model()
    betas = (0.9, args.adam_beta2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=betas, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps)
    model, optimizer = accelerator.prepare(model, optimizer)

    def batch(generator: torch.Generator) -> Batch:
        return {key: value.to(accelerator.device) for key, value in run.task.batch(args.batch_size, generator).items()}

    @torch.no_grad()
    def accuracy(sequences: int, seed: int) -> float:
        model.eval()
        unseen = torch.Generator().manual_seed(seed)
        counts = [run.hits(model, batch(unseen)) for _ in range(-(-sequences // args.batch_size))]
        model.train()
        right, total = accelerator.reduce(torch.tensor(counts, device=accelerator.device).sum(0)).tolist()
        return right / total

    start = time.perf_counter()
    data = torch.Generator().manual_seed(args.seed)
    steps, curve = [0], [accuracy(CURVE_SEQUENCES, args.seed + 1_000_000)]
    for step in range(1, args.steps + 1):
        accelerator.backward(run.loss(model, batch(data)))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % args.eval_every == 0 or step == args.steps:
            steps.append(step)
            curve.append(accuracy(CURVE_SEQUENCES, args.seed + 1_000_000))
    final = accuracy(args.eval_sequences, args.seed + 2_000_000)
    seconds = round(time.perf_counter() - start, 1)
    accelerator.print(f"{run.label}: {final:.1%} right after {args.steps} steps, {seconds:.0f} s", flush=True)
    return {"steps": steps, "accuracy": curve, "final_accuracy": final, "seconds": seconds}


def draw(results: dict[str, Any], runs: tuple[Run, Run], path: Path) -> None:
    """The learning curves."""
    task, figure = runs[0].task, Figure(figsize=(8, 4.6), layout="constrained")
    curves = figure.subplots()
    for run in runs:
        curve = results["runs"][run.key]
        curves.plot(curve["steps"], curve["accuracy"], "o-", color=run.color, markersize=4, label=run.label)
    curves.axhline(results["chance"], color="black", linestyle=":", label=f"chance (1 of {task.values} values)")
    curves.set(xlabel="training step", ylabel="right answers on unseen sequences", ylim=(0, 1.04))
    title = f"Recall over {task.ranks} ranks: no fact stands on the rank that is asked"
    curves.set_title(title if task.ranks > 1 else "Recall in one process: both runs are the same")
    curves.yaxis.set_major_formatter("{x:.0%}")
    curves.grid(alpha=0.3)
    curves.legend(loc="center right")
    figure.savefig(path, dpi=120)


def main() -> None:
    args = parse_args()
    accelerator = Accelerator()  # without a mesh all ranks share every sequence; one of the two models is not patched
    task = Recall(args, ranks=accelerator.num_processes)
    runs = Run(task, across=True), Run(task, across=False)
    across, within = (train(accelerator, args, run) for run in runs)
    chance = 1 / task.values
    answers = args.eval_sequences * args.num_questions
    noise = 4 * (chance * (1 - chance) / answers) ** 0.5  # 4 standard deviations of guessing
    proven = across["final_accuracy"] >= GOAL and abs(within["final_accuracy"] - chance) <= noise
    results = {
        "runs": {runs[0].key: across, runs[1].key: within},
        "chance": chance,
        "ranks": task.ranks,
        "question": {"tokens": list(task.asked_at), "rank": task.home},
        "facts": {"ranks": sorted({task.sharding.owner(token) for token in task.places.tolist()})},
        "config": {key: value for key, value in vars(args).items() if key != "output_dir"},
        "model": {"type": "llama" if args.layers == "attention" else "qwen3_5_text", **SIZES[args.layers]},
        **made_by(task.ranks),
    }
    if accelerator.is_main_process:
        (args.output_dir / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        draw(results, runs, args.output_dir / "recall.png")
    claim = f"the first must reach {GOAL:.0%}, the second stay at {chance:.1%} +- {noise:.1%}"
    if task.ranks == 1:
        accelerator.print("One process: both runs are the same, so nothing is claimed.")
    else:
        accelerator.print(f"{'Proven' if proven else 'FAILED'} over {task.ranks} ranks: {claim}.")
    accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0 if proven or task.ranks == 1 else 1)  # the threads of gloo can abort an interpreter that shuts down


if __name__ == "__main__":
    main()
