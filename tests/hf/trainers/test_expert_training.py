"""Trainers of models whose experts lie on several ranks, beside one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_burst
from hf_burst.errors import ConfigError
from tests.hf.parts import test_expert_ranks as experts
from tests.support import trainers
from tests.support.expert_ranks import over_ranks, whole
from tests.support.ranks import RankError, RankPool

trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402

Ranks = Callable[[int], RankPool]


def train(rank: int, size: int, folder: str, case: trainers.Case, held: int, balanced: bool) -> dict[str, Any]:
    """As `trainers.train`, of a mixture of experts in fp32. Its load-balancing loss is one of each micro-batch, which
    several groups divide."""
    model = experts.make_model(experts.Case("qwen3_moe", held, size)).float()
    if not balanced:
        model.config.output_router_logits, model.config.router_aux_loss_coef = False, 0.0
    model.config.use_cache = False
    if held:
        model = hf_burst.patch_model(over_ranks(model, held))
    found = trainers.finish(trainers.make_trainer(case, folder, model=model))
    return found | {"weights": {name: whole(weight) for name, weight in found["weights"].items()}}


@pytest.mark.parametrize(
    ("case", "held"),
    [
        pytest.param(trainers.Case("Trainer"), 2, marks=pytest.mark.slow),
        pytest.param(
            trainers.Case("Trainer", "packed", data=2, checkpointing=True, explicit=True), 2, marks=pytest.mark.full
        ),
        pytest.param(trainers.Case("SFTTrainer", "packed", data=2), 4, marks=pytest.mark.slow),
        (trainers.Case("Trainer", lora=True), 2),
        pytest.param(trainers.Case("DPOTrainer", lora=True), 2, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_three_steps_equal_one_process(ranks: Ranks, tmp_path: Path, case: trainers.Case, held: int) -> None:
    wanted = train(0, 1, str(tmp_path), case.alone, 0, case.data == 1)
    for found in ranks(case.ranks).run(train, str(tmp_path), case, held, case.data == 1):
        trainers.compare(found, wanted)
    assert case.lora or min(wanted["norms"]) > trainers.CLIP, "the clipping must be felt"


def save_and_evaluate(rank: int, size: int, folder: str) -> None:
    case = trainers.Case("Trainer")
    model = experts.make_model(experts.Case("qwen3_moe", 2, size)).float()
    placed = hf_burst.patch_model(over_ranks(model, 2))
    trainer = trainers.make_trainer(case, folder, model=placed, eval_dataset=trainers.samples("padded", 4))
    loss = trainer.evaluate()["eval_loss"]
    trainers.finish(trainer)
    trainer.save_model()
    dist.barrier()
    saved = type(model).from_pretrained(folder, experts_implementation="eager").state_dict()
    for name, weight in placed.state_dict().items():
        assert torch.equal(saved[name], whole(weight)), name
    batches = [trainers.collate(trainers.samples("padded", 4)[row : row + 2]) for row in (0, 2)]
    wanted = [model.eval()(**batch, use_cache=False).loss.item() for batch in batches]
    assert loss == pytest.approx(sum(wanted) / 2, rel=1e-6)


def test_saving_and_evaluation(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save_and_evaluate, str(tmp_path))


def generate_to_learn(rank: int, size: int, folder: str) -> None:
    model = experts.make_model(experts.Case("qwen3_moe", 2, size)).float()
    placed = hf_burst.patch_model(over_ranks(model, 2))
    settings = {"use_cpu": True, "bf16": False, "max_steps": 1, "report_to": [], "save_strategy": "no"}
    trainer = trl.GRPOTrainer(
        placed,
        args=trl.GRPOConfig(folder, parallelism_config=hf_burst.BurstParallelismConfig(), **settings),
        reward_funcs=[lambda completions, **rest: [0.0] * len(completions)],
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in trainers.preferences(8)]),
        processing_class=trainers.tokenizer(),
    )
    trainer.train()


def test_trainers_that_generate_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(generate_to_learn, str(tmp_path))
    for error in caught.value.errors:
        assert isinstance(error, ConfigError)
        assert "generates what it learns from, and the experts" in str(error)
