"""Steps of GRPO on long prompts, part by part: hf_burst, beside TRL alone at the longest prompt that it holds.

On two GPUs, the shape of an 8B model with random weights and adapters:

    torchrun --nproc-per-node 2 recipes/benchmarks/grpo.py --prompts 32768 --trl-prompts 32768 16384 8192 4096 \\
        --out outputs/grpo_2xH100.json

On two CPU processes, to see that it works:

    torchrun --nproc-per-node 2 recipes/benchmarks/grpo.py --device cpu --shape tiny --prompts 96 --trl-prompts 96 \\
        --answers 4 --answer-length 8 --warm-length 4 --steps 1 --out outputs/grpo_cpu.json

A rollout is one prompt with `--answers` answers, none of which ends early, and `--iterations` training steps on it. It
is the same work for both contenders: hf_burst's processes share all rows, and TRL's have as many whole rows each, which
they train one at a time. With one iteration TRL leaves out the old log-probabilities, which are then those of the
training step.

The parts of a rollout add up: generation, log-probabilities of the old weights and of the reference (the adapters
switched off), rewards, training (forward, backward, optimizer), and what is left (`rest`). Each is the slowest rank's.
The first rollout has short answers, and does not count. Every attempt has processes of its own, so that one that runs
out of memory leaves nothing behind.
"""

import argparse
import json
import logging
import os
import random
import signal
import statistics
import string
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import hf_burst
from hf_burst.cli.launch import launched
from recipes.benchmarks.fits import GIB, Watcher, quiet
from recipes.benchmarks.harness import Row, at_least, options_of, settings_of, table, write
from recipes.benchmarks.provenance import environment
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.training_job import LORA, add_model, make_model
from recipes.byte_tokenizer import byte_tokenizer

GENERATION, REWARDS, TRAINING, REST = "generation", "rewards", "training", "rest"
OLD, REFERENCE = "old log-probabilities", "reference log-probabilities"
PARTS = (GENERATION, OLD, REFERENCE, REWARDS, TRAINING, REST)
CONTENDERS = ("hf_burst", "trl")
# variables by which a launcher tells processes who they are
_LAUNCHER = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


class Clock(TrainerCallback):
    """Seconds and peaks of memory of the parts of a rollout, on which there are so many training steps: of the
    innermost part at any time, so that they add up. `noted` is given them after each part, and whether the rollout
    ends."""

    def __init__(self, iterations: int, device: torch.device, noted: Callable[[Row, bool], None]) -> None:
        self.iterations, self.device, self.noted = iterations, device, noted
        self.inside: list[str] = []
        self.seconds, self.peaks, self.since = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0), 0.0
        self.watcher = Watcher(device)

    def note(self) -> None:
        """Gives the time since the last note, and the peak of memory, to the part that it was spent in."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self.inside:
            part = self.inside[-1]
            self.seconds[part] += now - self.since
            if cuda:
                self.peaks[part] = max(self.peaks[part], torch.cuda.max_memory_allocated(self.device) / GIB)
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.since = now

    def timed(self, method: Callable[..., Any], part: Callable[[], str | None], *args: Any, **kwargs: Any) -> Any:
        """A method of the trainer, whose time is that of a part; of the part around it for `None`."""
        name = part()
        if name is None:
            return method(*args, **kwargs)
        self.note()
        self.inside.append(name)
        try:
            return method(*args, **kwargs)
        finally:
            self.note()
            self.inside.pop()
            self.noted(self.found(), False)

    def follow(self, trainer: Any) -> None:
        """Times the steps of TRL's trainer."""
        trainer.add_callback(self)
        parts: dict[str, Callable[[], str | None]] = {
            "_generate_and_score_completions": lambda: REST,
            "_generate": lambda: GENERATION,
            "_calculate_rewards": lambda: REWARDS,
            "_get_per_token_logps_and_entropies": partial(scored_by, trainer.model),
        }
        for name, part in parts.items():
            method = getattr(trainer, name)
            setattr(trainer, name, update_wrapper(partial(self.timed, method, part), method))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.note()
        self.inside.append(TRAINING)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note()
        self.inside.pop()
        whole = state.global_step % self.iterations == 0
        self.noted(self.found(), whole)
        if whole:
            self.seconds, self.peaks = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
            self.watcher.most = 0

    def found(self) -> Row:
        """What is known of this rollout, on this rank."""
        if self.device.type != "cuda":
            return {"seconds": dict(self.seconds)}
        taken = {"reserved_gib": torch.cuda.memory_reserved(self.device) / GIB, "taken_gib": self.watcher.most / GIB}
        return {"seconds": dict(self.seconds), "peak_gib": dict(self.peaks), "gpu": taken}


def scored_by(model: torch.nn.Module) -> str | None:
    """Whose log-probabilities are computed: with gradients those of training."""
    if torch.is_grad_enabled():
        return None
    off = any(getattr(module, "disable_adapters", False) is True for module in model.modules())
    return REFERENCE if off else OLD


def prompts_of(lengths: list[int]) -> list[Row]:
    """Texts of so many tokens, a letter each."""
    letters = random.Random(sum(lengths))
    return [{"prompt": "".join(letters.choices(string.ascii_letters, k=length))} for length in lengths]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs between answers, so that they have advantages."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def settings(arguments: argparse.Namespace, contender: str, folder: Path) -> Any:
    """The settings of the trainer: all rows at once for hf_burst, and one of a rank's share for TRL."""
    from trl import GRPOConfig

    size, ours = launched()[0], contender == "hf_burst"
    turns = 1 if ours else arguments.answers // size
    return GRPOConfig(
        output_dir=str(folder / "trainer"),
        parallelism_config=hf_burst.BurstParallelismConfig() if ours and size > 1 else None,
        **quiet(on_cpu(arguments)),
        max_steps=arguments.iterations * (1 + arguments.steps),
        per_device_train_batch_size=arguments.answers if ours else 1,
        steps_per_generation=turns,
        gradient_accumulation_steps=turns,
        num_generations=arguments.answers,
        num_iterations=arguments.iterations,
        max_completion_length=arguments.answer_length,
        beta=0.04,  # so that there is a reference
        lr_scheduler_type="constant",
        ddp_find_unused_parameters=False,
        use_liger_kernel=arguments.liger,
        shuffle_dataset=False,
    )


def run(arguments: argparse.Namespace) -> None:
    """One attempt, in processes of its own: trains, and adds what each rollout took to the last row of the result."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOTrainer

    contender, prompt, folder = arguments.attempt[0], int(arguments.attempt[1]), Path(arguments.attempt[2])
    args = settings(arguments, contender, folder)
    device, start = args.device, time.perf_counter()  # joins the processes
    ranks = Ranks(device.type, arguments.timeout)
    result = environment(ranks, arguments.commit, sys.argv[1:-6]) | json.loads(arguments.out.read_text())
    row = result["results"][-1]
    longest, dtype = prompt + arguments.answer_length, torch.float32 if on_cpu(arguments) else torch.bfloat16
    model: Any = make_model(arguments.shape, longest, dtype, device, arguments.layers)
    model.config.use_cache = model.generation_config.use_cache = True
    if contender == "hf_burst":
        hf_burst.patch_model(model)
    else:
        model.set_attn_implementation(arguments.trl_attention)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    trainer: Any = GRPOTrainer(
        model,
        reward,
        args,
        Dataset.from_list(prompts_of([arguments.warm_prompt or prompt, *[prompt] * (1 + arguments.steps)])),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules=list(LORA[:7])),
    )
    ranks.say(f"{contender}, {prompt:,} tokens: made after {time.perf_counter() - start:.0f} s")

    def length_of_answers(length: int) -> None:
        full = {"max_new_tokens": length, "min_new_tokens": length}
        trainer.generation_config.update(**full)
        trainer.generation_kwargs.update(full)

    def noted(found: Row, whole: bool) -> None:
        warm = trainer.state.global_step <= arguments.iterations - (not whole)
        row["begun"] = None if whole else {"warm": warm, **found}  # of the first rank, if time runs out before its end
        if whole:
            length_of_answers(arguments.answer_length)
            row["rollouts"].append({"warm": warm, **{kind: ranks.slowest(own) for kind, own in found.items()}})
            row.update(summary(row, arguments.iterations))
        write(arguments.out, result, ranks)

    length_of_answers(arguments.warm_length)
    clock = Clock(arguments.iterations, device, noted)
    clock.follow(trainer)
    trainer.train()
    clock.watcher.end()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def failure_of(command: list[str], folder: Path, timeout_s: float) -> str | None:
    """Runs the processes of an attempt, and tells how they failed, if they did."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    process = subprocess.Popen(command, env=outside, start_new_session=True, stdout=sys.stderr)
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"it did not end within {timeout_s:.0f} s"
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun then ends its workers, which have sessions of their own
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                for worker in psutil.Process(process.pid).children(recursive=True):
                    worker.kill()
                process.kill()
                process.wait()
    failures = [path.read_text() for path in sorted(folder.glob("failure_*"))]
    return ("; ".join(failures) or f"its processes ended with status {status}") if status else None


def attempt(arguments: argparse.Namespace, contender: str, prompt: int, out: Path) -> bool:
    """Measures a contender at one length, by processes that add to its row in the file of the result."""
    row: Row = {"contender": contender, "prompt": prompt, "status": "running", "reason": None, "rollouts": []}
    result = json.loads(out.read_text())
    result["results"].append(row)
    out.write_text(json.dumps(result))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(launched()[0]), __file__, *sys.argv[1:]]
        command += ["--out", str(out), "--attempt", contender, str(prompt), folder]
        reason = failure_of(command, Path(folder), arguments.timeout)
    result = json.loads(out.read_text())
    result["results"][-1] |= {"status": "failed" if reason else "ok", "reason": reason}
    out.write_text(json.dumps(result, indent=1) + "\n")
    return reason is None


def summary(row: Row, iterations: int) -> Row:
    """Medians of the rollouts that count, and the peaks of all of them."""
    counted = [each for each in row["rollouts"] if not each["warm"]]
    if not counted:
        return {}
    medians = {name: statistics.median(each["seconds"][name] for each in counted) for name in PARTS}
    return {
        "median_s": medians,
        "rollout_s": statistics.median(sum(each["seconds"].values()) for each in counted),
        "training_step_s": medians[TRAINING] / iterations,
        "peak_gib": max((max(each["peak_gib"].values()) for each in counted if "peak_gib" in each), default=None),
        "taken_gib": max((each["gpu"]["taken_gib"] for each in counted if "gpu" in each), default=None),
    }


def summary_table(rows: list[Row]) -> str:
    """The result as Markdown."""
    cells = []
    for row in rows:
        found = [row["contender"], f"{row['prompt']:,}", row["reason"]]
        if "median_s" in row:
            memory = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
            found[2:] = [*(f"{row['median_s'][name]:.2f}" for name in PARTS), f"{row['rollout_s']:.2f}", memory]
        cells.append(found)
    return table(["contender", "prompt", *PARTS, "s a rollout", "peak GiB"], cells)


def on_cpu(arguments: argparse.Namespace) -> bool:
    return arguments.device == "cpu" or (arguments.device == "auto" and not torch.cuda.is_available())


def read_arguments() -> argparse.Namespace:
    parser = options_of(__doc__, timeout_s=400.0)  # of an attempt
    add_model(parser)
    parser.add_argument("--prompts", type=at_least(1), nargs="+", default=[32768], help="tokens of hf_burst's prompts")
    parser.add_argument("--trl-prompts", type=at_least(1), nargs="+", help="TRL's; the longest that it holds counts")
    parser.set_defaults(trl_prompts=[32768, 16384, 8192, 4096])
    parser.add_argument("--answers", type=at_least(2), default=8, help="to a prompt")
    parser.add_argument("--answer-length", type=at_least(1), default=1024, help="tokens of each of them")
    parser.add_argument("--warm-length", type=at_least(1), default=32, help="tokens of those of the first rollout")
    parser.add_argument("--warm-prompt", type=at_least(1), help="tokens of its prompt (as many as of the others)")
    parser.add_argument("--iterations", type=at_least(1), default=2, help="training steps on a rollout")
    parser.add_argument("--steps", type=at_least(1), default=2, help="rollouts that count")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--trl-attention", default="sdpa", help="attn_implementation of TRL's model")
    parser.add_argument("--attempt", nargs=3, help=argparse.SUPPRESS)  # contender, prompt, folder
    arguments = parser.parse_args()
    if "trl" in arguments.contenders and arguments.answers % launched()[0]:
        parser.error(f"--answers is {arguments.answers}; give a multiple of TRL's processes, which are {launched()[0]}")
    return arguments


def main() -> int:
    """Measures all contenders in processes of their own, which the first one starts."""
    arguments = read_arguments()
    if arguments.attempt is not None:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("hf_burst").setLevel(logging.INFO)
        try:
            run(arguments)
        except Exception as problem:  # whatever ends it is a result, and ends the other processes
            text = (str(problem) or repr(problem)).strip().splitlines()[0]
            failure = f"rank {launched()[1]}: {type(problem).__name__}: {text[:500]}"
            Path(arguments.attempt[2], f"failure_{launched()[1]}").write_text(failure)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # an end in good order would wait for messages of the others
        return 0
    if launched()[1]:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the processes of an attempt, too
    held = []
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or Path(folder, "result.json")
        out.write_text(json.dumps({"settings": settings_of(arguments), "results": []}))
        for contender in arguments.contenders:
            ours = contender == "hf_burst"
            for prompt in arguments.prompts if ours else sorted(arguments.trl_prompts, reverse=True):
                held.append(attempt(arguments, contender, prompt, out))
                if held[-1] and not ours:
                    break
        print(summary_table(json.loads(out.read_text())["results"]), file=sys.stderr, flush=True)
    return int(not any(held))


if __name__ == "__main__":
    sys.exit(main())
