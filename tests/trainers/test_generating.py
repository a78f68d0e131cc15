"""GRPO and RLOO: groups of ranks learn what as many single processes learn, which are not patched."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_burst
from tests.support import models, trainers
from tests.support.ranks import RankPool, reset_accelerate

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
Ranks = Callable[[int], RankPool]
G = 2  # completions of a prompt
# of a clock, and what Trainer counts by processes
OWN = ("time", "runtime", "per_second")


@dataclass(frozen=True)
class Run:
    """A training of `groups` groups of `burst` ranks; `burst=0`: of single processes that are not patched."""

    trainer: str = "GRPOTrainer"
    burst: int = 2
    groups: int = 1
    rollouts: bool = True
    lora: bool = False
    reference: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.groups * max(self.burst, 1)


def is_first(burst: int) -> bool:
    """Whether this rank is the first one of its group."""
    return not burst or not dist.is_initialized() or dist.get_rank() % burst == 0


def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that follow from the prompt, its place, the step and torch's random numbers: they differ by rank."""
    ids = trainer.processing_class(prompts)["input_ids"]
    longest = trainer.max_completion_length
    found: dict[str, Any] = {"prompt_ids": ids, "completion_ids": [], "logprobs": [], "tag": []}
    for place, prompt in enumerate(ids):
        generator = random.Random(str((prompt, place, trainer.state.global_step)))
        words = [generator.randrange(2, models.VOCABULARY) for _ in range(generator.randrange(1, longest))]
        words[0] = 2 + int(torch.randint(models.VOCABULARY - 2, ()))
        ended = generator.random() < 0.7
        found["completion_ids"].append(words + [1] if ended else (words * longest)[:longest])
        found["logprobs"].append([-1.0] * len(found["completion_ids"][-1]))
        found["tag"].append(place)
    return found


def reward_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion.split())) for completion in completions]


def make_trainer(run: Run, folder: str) -> Any:
    import trl

    reset_accelerate()
    model = models.make_model("llama").double()
    if run.reference:
        models.make_model("llama", seed=3).double().save_pretrained(f"{folder}/reference")
        model.config._name_or_path = f"{folder}/reference"  # from which TRL makes its reference
    if run.burst:
        hf_burst.patch_model(model)
    calls: list[int] = []

    def reward_luck(completions: list[str], log_metric: Any, log_extra: Any, **rest: Any) -> list[float | None]:
        calls.append(len(completions))
        luck = [random.random() for _ in completions]
        log_metric("luck", sum(luck))
        log_extra("drawn", luck)
        return [None if number > 0.9 else number for number in luck]

    data = datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in trainers.preferences(12)])
    config = getattr(trl, run.trainer.replace("Trainer", "Config"))
    settings = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "beta": 0.0,
        "num_generations": G,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_completion_length": 9,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "log_completions": True,
        "num_completions_to_print": 0,
        "seed": 7,
        "parallelism_config": hf_burst.BurstParallelismConfig(burst_size=run.burst) if run.burst else None,
    }
    given: dict[str, Any] = {"rollout_func": roll_out} if run.rollouts else {}
    if run.lora:
        given["peft_config"] = trainers.lora_config()
    trainer = getattr(trl, run.trainer)(
        model,
        args=config(**{**settings, **run.options}),
        reward_funcs=[reward_length, reward_luck],
        train_dataset=data,
        eval_dataset=data.select(range(5)),
        processing_class=trainers.tokenizer(),
        **given,
    )
    trainer.calls = calls
    return trainer


def learn(rank: int, size: int, folder: str, run: Run) -> dict[str, Any]:
    random.seed(100 + (rank if not run.burst else rank // run.burst if is_first(run.burst) else 99 + rank))
    trainer = make_trainer(run, folder)
    trainer.train()
    return {
        "log": [
            {name: value for name, value in entry.items() if not name.endswith(OWN)}
            for entry in trainer.state.log_history
        ],
        "weights": {name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
        "table": {name: list(map(str, column)) if name in ("prompt", "completion") else column for name, column in (
            ("prompt", trainer._logs["prompt"]),
            ("completion", trainer._logs["completion"]),
            ("advantages", list(trainer._logs["advantages"])),
            *((name, list(column)) for name, column in trainer._logs["rewards"].items()),
            *((name, list(column)) for name, column in trainer._logs["extra"].items()),
        )},
        "tokens": trainer.state.num_input_tokens_seen,
        "calls": trainer.calls,
    }


def compare(ranks: Ranks, folder: Path, run: Run) -> None:
    """On every rank what one process a group has that is not patched."""
    found = ranks(run.ranks).run(learn, str(folder / "found"), run)
    alone = Run(**{**vars(run), "burst": 0})
    if run.groups == 1:
        wanted = [learn(0, 1, str(folder / "wanted"), alone)]
    else:
        wanted = ranks(run.groups).run(learn, str(folder / "wanted"), alone)
    for rank, mine in enumerate(found):
        one = wanted[rank // run.burst]
        assert [entry.keys() for entry in mine["log"]] == [entry.keys() for entry in one["log"]]
        for entry, expected in zip(mine["log"], one["log"], strict=True):
            assert entry == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True), rank
        assert mine["tokens"] == one["tokens"]
        assert mine["calls"] == (one["calls"] if rank % run.burst == 0 else [])
        assert mine["table"].keys() == one["table"].keys()
        for name, column in one["table"].items():
            assert mine["table"][name] == (
                column if name in ("prompt", "completion") else pytest.approx(column, rel=1e-6, abs=1e-6, nan_ok=True)
            ), name
        for name, value in one["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=0, atol=1e-7)


@pytest.mark.parametrize("size", [2])
def test_grpo(ranks: Ranks, tmp_path: Path, size: int) -> None:
    compare(ranks, tmp_path, Run(burst=size, options={"gradient_accumulation_steps": 2}))


RUNS = {
    "3 ranks, iterations": Run(burst=3, options={"num_iterations": 2, "steps_per_generation": 2, "num_generations": 4}),
    "2 x 2": Run(
        groups=2,
        options={
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_iterations": 2,
            "scale_rewards": "batch",
            "mask_truncated_completions": True,
            "eval_strategy": "steps",
            "eval_steps": 2,
        },
    ),
    "2 x 2, generated": Run(groups=2, rollouts=False, options={"loss_type": "cispo", "epsilon_high": 2.0}),
    "2 x 2, adapters": Run(groups=2, lora=True, options={"beta": 0.3, "importance_sampling_level": "sequence"}),
    "3 ranks, reference": Run(burst=3, reference=True, options={"beta": 0.3}),
    "rloo, reference": Run("RLOOTrainer", rollouts=False, reference=True, options={"beta": 0.3}),
    "rloo, 3 ranks": Run("RLOOTrainer", burst=3, rollouts=False, lora=True, options={"beta": 0.3}),
    "rloo, 2 x 2": Run(
        "RLOOTrainer", groups=2, rollouts=False, lora=True, options={"beta": 0.3, "normalize_advantages": True}
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs(ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(ranks, tmp_path, RUNS[name])
