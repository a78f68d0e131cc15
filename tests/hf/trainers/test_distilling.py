"""GKD: groups of ranks learn from a teacher what as many single processes learn, which are not patched."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer

import hf_burst
from hf_burst.errors import ConfigError
from hf_burst.hf.groups import PATCH
from hf_burst.hf.parts import head
from hf_burst.hf.trainers.first_rank import FirstRank
from hf_burst.hf.trainers.generating import Distillation
from hf_burst.ranks.group import ContextGroup
from tests.support import models, trainers
from tests.support.ranks import RankError, RankPool, reset_accelerate

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
from trl.experimental.gkd import GKDConfig, GKDTrainer  # noqa: E402

CREATE = Trainer.create_accelerator_and_postprocess
Ranks = Callable[[int], RankPool]
# of a clock, and what Trainer counts by processes
OWN = ("time", "runtime", "per_second", "total_flos")


@dataclass(frozen=True)
class Run:
    """A training of `groups` groups of `burst` ranks; `burst=0`: of single processes that are not patched."""

    burst: int = 2
    groups: int = 1
    kind: str = "GKDTrainer"
    lora: bool = False
    patched: bool = False  # whether the user has patched the teacher
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def alone(self) -> "Run":
        """The run of single processes."""
        options = {name: value for name, value in self.options.items() if not name.startswith("fsdp")}
        return replace(self, burst=0, options=options)


class Doubled(GKDTrainer):
    """A class of the user's, with a loss of its own."""

    @staticmethod
    def generalized_jsd_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2.0 * GKDTrainer.generalized_jsd_loss(*args, **kwargs)


class Drawing(GKDTrainer):
    """A class of the user's whose first rank draws a number with each log."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            random.random()
        super().log(*args, **kwargs)


def rows() -> list[dict[str, Any]]:
    """Prompts of unequal lengths, and answers to them."""
    generator, found = torch.Generator().manual_seed(1), []
    for row in range(12):
        length, prompt = 12 + (row * 5) % 9, 4 + row % 4
        ids = torch.randint(2, models.VOCABULARY, (length,), generator=generator).tolist()
        text = " ".join(f"w{token}" for token in ids[:prompt])
        found.append({"prompt": text, "input_ids": ids, "completion_mask": [0] * prompt + [1] * (length - prompt)})
    return found


def make_trainer(run: Run, folder: str) -> Any:
    reset_accelerate()
    model, teacher = (models.make_model("llama", seed=seed).double() for seed in (0, 3))
    for each in (model, teacher) if run.patched and run.burst else (model,) if run.burst else ():
        hf_burst.patch_model(each)
    settings = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "max_length": 64,
        "max_new_tokens": 6,
        "lmbda": 0.0,
        "parallelism_config": hf_burst.BurstParallelismConfig(burst_size=run.burst) if run.burst else None,
    }
    data = datasets.Dataset.from_list(rows())
    return {"Doubled": Doubled, "Drawing": Drawing}.get(run.kind, GKDTrainer)(
        model,
        teacher,
        args=GKDConfig(**{**settings, **run.options}),
        train_dataset=data,
        eval_dataset=data.select(range(5)),
        processing_class=trainers.tokenizer(),
        peft_config=trainers.lora_config() if run.lora else None,
    )


def as_gpus(trainer: Trainer) -> None:
    """accelerate ignores FSDP on CPUs, so it is told that they are GPUs."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    CREATE(trainer)


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def learn(rank: int, size: int, folder: str, run: Run, limit: float = head.LOGITS_LIMIT_GIB) -> dict[str, Any]:
    over_ranks = mock.patch("hf_burst.hf.trainers.first_rank.generate", wraps=hf_burst.generate)
    sharded = bool(run.options.get("fsdp"))
    with (
        mock.patch.object(Trainer, CREATE.__name__, as_gpus if sharded else CREATE),
        mock.patch.dict(os.environ),
        mock.patch.object(head, "LOGITS_LIMIT_GIB", limit),
        over_ranks as generated,
    ):
        trainer = make_trainer(run, folder)
        trainer.train()
    assert any(isinstance(weight, DTensor) for weight in trainer.model.parameters()) == sharded
    assert (PATCH in vars(trainer.teacher_model)) == bool(run.burst)
    return {
        "generated": generated.call_count,
        "log": [
            {name: value for name, value in entry.items() if not name.endswith(OWN)}
            for entry in trainer.state.log_history
        ],
        "weights": {name: whole(value) for name, value in trainer.model.state_dict().items()},
    }


def compare(ranks: Ranks, folder: Path, run: Run, limit: float = head.LOGITS_LIMIT_GIB) -> None:
    """On every rank what one process a group has that is not patched."""
    if run.groups == 1:
        wanted = [learn(0, 1, str(folder / "wanted"), run.alone)]
    else:
        wanted = ranks(run.groups).run(learn, str(folder / "wanted"), run.alone)
    assert wanted[0]["log"][0]["loss"] > 1e-4
    for rank, mine in enumerate(ranks(run.burst * run.groups).run(learn, str(folder / "found"), run, limit)):
        one = wanted[rank // run.burst]
        answers = run.options.get("lmbda", 0.0) > 0.0 or run.options.get("seq_kd", False)
        assert bool(mine["generated"]) == answers, "prompts are not read whole by each rank"
        for entry, expected in zip(mine["log"], one["log"], strict=True):
            assert entry == pytest.approx(expected, rel=1e-6, abs=1e-9), rank
        for name, value in one["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=0, atol=1e-9)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
RUNS: dict[str, Run] = {
    "jensen-shannon": Run(options=EVALUATED),
    "forward": Run(burst=3, options={"beta": 0.0}),
    "reverse": Run(groups=2, patched=True, options={"beta": 1.0, **EVALUATED}),
    "its own answers": Run(groups=2, options={"lmbda": 1.0, "beta": 0.3}),
    "the teacher's answers": Run(options={"seq_kd": True, "gradient_checkpointing": True}),
    "adapters": Run(lora=True, options={"gradient_checkpointing": True, "lmbda": 1.0}),
    "counted by each rank": Run(options={"average_tokens_across_devices": False}),
    "tokens of a batch": Run(options={"prediction_loss_only": False, **EVALUATED}),
    "fsdp2": Run(groups=2, options={"fsdp": "full_shard", "fsdp_config": {"version": 2}, "lmbda": 1.0}),
    "a class of the users": Run(kind="Doubled"),
    "some of its own answers": Run(kind="Drawing", options={"lmbda": 0.5}),
}


QUICK, LATER = ("reverse", "some of its own answers"), ("forward", "jensen-shannon", "adapters")


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.full) for name in LATER),
        *(pytest.param(name, marks=pytest.mark.slow) for name in RUNS if name not in QUICK + LATER),
    ],
)
def test_runs(ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(ranks, tmp_path, RUNS[name])


def test_no_logits_are_gathered(ranks: Ranks, tmp_path: Path) -> None:
    compare(ranks, tmp_path, Run(), 1e-9)


def test_the_teacher_of_a_sharded_model_is_placed() -> None:
    distillation = object.__new__(Distillation)
    distillation.trainer = SimpleNamespace(model=torch.nn.Linear(1, 1))
    distillation.first, distillation.sharded = FirstRank(ContextGroup(), torch.device("meta")), True
    teacher = torch.nn.Linear(1, 1)
    distillation.take_teacher(teacher)
    assert teacher.weight.device.type == "meta"


def learn_online(rank: int, size: int, folder: str, name: str) -> None:
    import trl
    from trl.experimental import gold

    kind, config = {
        "GOLDTrainer": (gold.GOLDTrainer, gold.GOLDConfig),
        "DistillationTrainer": (trl.DistillationTrainer, trl.DistillationConfig),
    }[name]
    settings = config(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_completion_length=5,
        parallelism_config=hf_burst.BurstParallelismConfig(),
    )
    model, teacher = (hf_burst.patch_model(models.make_model("llama", seed=seed)) for seed in (0, 3))
    data = datasets.Dataset.from_list(rows())
    options: Any = {"train_dataset": data, "processing_class": trainers.tokenizer()}
    kind(model, teacher_model=teacher, args=settings, **options).train()


@pytest.mark.parametrize("name", ["DistillationTrainer", "GOLDTrainer"])
def test_other_trainers_with_a_teacher_are_refused(ranks: Ranks, tmp_path: Path, name: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(learn_online, str(tmp_path), name)
    for error in caught.value.errors:
        assert pytest.RaisesExc(ConfigError, match="take TRL's GKDTrainer, or hf_burst.token_diverg").matches(error)


def test_trainers_of_another_trl_are_refused() -> None:
    other: Any = SimpleNamespace(compute_loss=dict)
    with pytest.raises(ConfigError, match="has no generate_on_policy_outputs: its steps are not those of TRL"):
        Distillation(other, SimpleNamespace(), 2)
