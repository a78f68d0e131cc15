"""What TRL's trainers do beyond the matrix of test_training.py: their kinds of data, references and metrics."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_burst
from hf_burst.errors import BatchError, ConfigError
from hf_burst.hf.trainers.accelerate import _check_patched
from tests.support import models, trainers
from tests.support.ranks import RankError, RankPool, reset_accelerate
from tests.support.trainers import Case, make_trainer

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
Ranks = Callable[[int], RankPool]
# what a trainer logs that is a mean or a count over the batch
RATIOS = {"entropy", "mean_token_accuracy", "num_tokens", "rewards/margins", "rewards/accuracies", "logps/chosen", "kl"}


def compare(found: dict[str, Any], wanted: dict[str, Any], names: set[str]) -> None:
    """Training, and what was logged of it."""
    trainers.compare(found, wanted)
    for mine, one in zip(found["log"], wanted["log"], strict=True):
        logged = names & one.keys()
        assert {name: mine[name] for name in logged} == pytest.approx({name: one[name] for name in logged}, abs=1e-5)


def make_experts() -> MixtralForCausalLM:
    """A mixture of experts, with a load-balancing loss that is felt."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        use_cache=False,
    )
    model = MixtralForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # so that tokens choose different experts, by a margin
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def fused(rank: int, size: int, kind: str) -> None:
    """All of TRL's per-token outputs, and the gradient of each that has one."""
    from trl.trainer.utils import add_fused_lm_head

    fields = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    batch = models.make_batch("right" if kind == "without labels" else kind)
    if kind == "without labels":
        batch["labels"].fill_(-100)
    model = make_experts().train()
    add_fused_lm_head(model, outputs=fields)
    torch.manual_seed(0)
    weights = torch.randn(batch["labels"].shape[0], batch["labels"].shape[1] - 1)
    grown = []
    for patched in (False, True):
        if patched:
            models.patch(model)
        outputs = model(**batch, fused_lm_head=True)
        (weights * (outputs.log_probs + 0.1 * outputs.entropy)).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        if patched and size > 1:
            for gradient in gradients:
                torch.distributed.all_reduce(gradient)
                gradient /= size
        grown.append((dict(outputs), gradients))
        model.zero_grad()
    (wanted, expected), (found, gradients) = grown
    assert found.keys() == wanted.keys() == {"loss", "aux_loss", "label_mask", *fields}
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        *((3, "packed"), (3, "right"), (1, "without labels")),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((1, "packed"), (1, "right"), (3, "without labels"))),
    ],
)
def test_per_token_outputs(ranks: Ranks, kind: str, size: int) -> None:
    if size == 1:
        reset_accelerate()
        fused(0, 1, kind)
    else:
        ranks(size).run(fused, kind)


def train(rank: int, size: int, folder: str, case: Case, data: Any, options: dict[str, Any]) -> dict[str, Any]:
    if isinstance(data, str):
        data = datasets.load_from_disk(data)
    return trainers.finish(make_trainer(case, folder, data, **options))


COMPLETIONS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in trainers.preferences()]
SETTINGS: dict[str, tuple[Case, dict[str, Any]]] = {
    "completion only": (Case("SFTTrainer"), {}),
    "whole text": (Case("SFTTrainer", data=2), {"completion_only_loss": False, "pad_to_multiple_of": 8}),
    "dft": (Case("SFTTrainer"), {"loss_type": "dft"}),
    "several losses": (Case("DPOTrainer"), {"loss_type": ["sigmoid", "sft"]}),
    "weights": (Case("DPOTrainer", data=2), {"use_weighting": True, "ld_alpha": 0.5, "max_length": 12}),
    "reference in advance": (Case("DPOTrainer", data=2), {"precompute_ref_log_probs": True}),
    "reference without adapters in advance": (Case("DPOTrainer", lora=True), {"precompute_ref_log_probs": True}),
    "kto": (Case("KTOTrainer"), {}),
    "kto without adapters": (Case("KTOTrainer", lora=True, checkpointing=True), {}),
}


QUICK = (
    "completion only",
    "reference without adapters in advance",
    "kto without adapters",
)


@pytest.mark.parametrize(
    "name",
    [
        *(
            name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
            for name in SETTINGS
            if name != "weights"
        ),
        pytest.param("weights", marks=pytest.mark.full),
    ],
)
def test_settings(ranks: Ranks, tmp_path: Path, name: str) -> None:
    case, options = SETTINGS[name]
    data: Any = datasets.Dataset.from_list(COMPLETIONS if case.trainer == "SFTTrainer" else trainers.preferences())
    if "precompute_ref_log_probs" in options:  # TRL reads from the cache file of a data set on a disk
        data.save_to_disk(tmp_path / "data")
        data = str(tmp_path / "data")
    found = ranks(case.ranks).run(train, str(tmp_path / "ranks"), case, data, options)
    for cached in tmp_path.glob("data/cache-*"):
        cached.unlink()
    wanted = train(0, 1, str(tmp_path / "one"), case.alone, data, options)
    for run in found:
        compare(run, wanted, RATIOS)


@pytest.mark.parametrize("explicit", [pytest.param(False, marks=pytest.mark.full), True])
def test_metrics_of_sharded_batches(ranks: Ranks, tmp_path: Path, explicit: bool) -> None:
    """Counts of one rank are added up; those of a group count once. The last batch is smaller."""
    case = Case("SFTTrainer", "packed", explicit=explicit)
    data = trainers.table("padded", 12)
    wanted = train(0, 1, str(tmp_path), case.alone, data, {})
    for found in ranks(2).run(train, str(tmp_path), case, data, {}):
        compare(found, wanted, {"entropy", "mean_token_accuracy"} if explicit else RATIOS)


def train_experts(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    model = make_experts()
    if case.burst:
        hf_burst.patch_model(model)
    return trainers.finish(make_trainer(case, folder, model=model))


@pytest.mark.parametrize("explicit", [False, pytest.param(True, marks=pytest.mark.full)])
def test_mixtures_of_experts(ranks: Ranks, tmp_path: Path, explicit: bool) -> None:
    case = Case("SFTTrainer", explicit=explicit)
    wanted = train_experts(0, 1, str(tmp_path), case.alone)
    assert wanted["log"][0]["aux_loss"] > 1
    for found in ranks(2).run(train_experts, str(tmp_path), case):
        compare(found, wanted, {"aux_loss", "entropy"})


def train_adapters(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    """Adapters that were there before: TRL keeps a copy of them as the reference."""
    from peft import get_peft_model

    model = get_peft_model(trainers.make_model(case), trainers.lora_config())
    return trainers.finish(make_trainer(case, folder, model=model))


def test_adapters_trained_before(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("DPOTrainer", lora=True)
    wanted = train_adapters(0, 1, str(tmp_path), case.alone)
    assert wanted["losses"] != trainers.train(0, 1, str(tmp_path), case.alone)["losses"]
    for found in ranks(2).run(train_adapters, str(tmp_path), case):
        compare(found, wanted, RATIOS)


def evaluate(rank: int, size: int, folder: str, case: Case) -> dict[str, float]:
    data = datasets.Dataset.from_list(trainers.preferences(5))
    return make_trainer(case, folder, eval_dataset=data).evaluate()


@pytest.mark.parametrize(
    "case", [Case("DPOTrainer"), pytest.param(Case("DPOTrainer", lora=True, data=2), marks=pytest.mark.full)], ids=str
)
def test_evaluation_of_preferences(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    plain = replace(case, burst=0)
    parallel = ranks(2).run(evaluate, str(tmp_path), plain) if case.data > 1 else [evaluate(0, 1, str(tmp_path), plain)]
    wanted = {name: value for name, value in parallel[0].items() if not name.endswith(("time", "per_second"))}
    assert {"eval_loss", "eval_rewards/margins", "eval_entropy"} <= wanted.keys()
    for found in ranks(case.ranks).run(evaluate, str(tmp_path), case):
        # rewards are small differences of sums of log-probabilities, which fp32 rounds at about 1e-6
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=2e-6)


def own_reference(rank: int, size: int, folder: str, trainer: str) -> None:
    """The trainer loads its reference itself, with the attention of the policy."""
    import trl

    model = hf_burst.patch_model(AutoModelForCausalLM.from_pretrained(folder))
    arguments = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "parallelism_config": hf_burst.BurstParallelismConfig(),
        "per_device_train_batch_size": 2,
        "train_sampling_strategy": "sequential",
    }
    pairs = trainers.preferences(4)
    if trainer == "KTOTrainer":
        pairs = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in pairs]
    make, config = getattr(trl, trainer), getattr(trl, trainer.replace("Trainer", "Config"))
    make(
        model,
        args=config(**arguments),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=trainers.tokenizer(),
    )


@pytest.mark.parametrize("trainer", ["DPOTrainer", "KTOTrainer"])
def test_a_reference_model_that_was_not_patched_is_refused(ranks: Ranks, tmp_path: Path, trainer: str) -> None:
    models.make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(RankError) as caught:
        ranks(2).run(own_reference, str(tmp_path), trainer)
    for error in caught.value.errors:
        assert pytest.RaisesExc(ConfigError, match="patch it too and pass it as ref_model").matches(error), error


def train_rewards(rank: int, size: int, folder: str, what: str) -> None:
    """Models without a language-model head are trained, or help."""
    reset_accelerate()
    config = LlamaConfig(
        vocab_size=models.VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = LlamaForSequenceClassification(config)
    mesh = hf_burst.BurstParallelismConfig()
    if what == "RewardTrainer":
        from trl import RewardConfig, RewardTrainer

        model.config.num_labels = 1
        arguments = RewardConfig(output_dir=folder, use_cpu=True, bf16=False, max_steps=1, parallelism_config=mesh)
        data = datasets.Dataset.from_list(trainers.preferences(4))
        RewardTrainer(model, arguments, train_dataset=data, processing_class=trainers.tokenizer()).train()
    accelerator = Accelerator(cpu=True, parallelism_config=mesh)
    accelerator.prepare_model(model, evaluation_mode=True)  # it gives rewards, and learns nothing
    policy = hf_burst.patch_model(models.make_model("llama"))
    accelerator.prepare(policy, torch.optim.SGD(policy.parameters()), model.requires_grad_(False))
    accelerator.prepare(model.requires_grad_(True))


@pytest.mark.parametrize("what", ["RewardTrainer", "a loop"])
def test_models_that_are_trained_must_be_patched(ranks: Ranks, tmp_path: Path, what: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(train_rewards, str(tmp_path), what)
    for error in caught.value.errors:
        sentence = "LlamaForSequenceClassification is not patched.*that patch_model refuses trains without"
        assert pytest.RaisesExc(ConfigError, match=sentence).matches(error), error


def test_a_tower_beside_a_patched_model_may_learn() -> None:
    """It reads no tokens, and gives the model embeddings."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=8, patch_size=4))
    policy = hf_burst.patch_model(models.make_model("llama"))
    _check_patched(torch.nn.ModuleList([policy, tower]), 2)
    with pytest.raises(ConfigError, match="CLIPVisionModel is not patched"):
        _check_patched(tower, 2)


def test_a_frozen_judge_from_sequence_to_sequence_is_not_patched() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    judge = T5ForConditionalGeneration(T5Config(**sizes))
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration is not patched"):
        _check_patched(judge, 2)
    _check_patched(judge.requires_grad_(False), 2)
    with pytest.raises(ConfigError, match="LlamaForCausalLM is not patched"):
        _check_patched(models.make_model("llama").requires_grad_(False), 2)


def spoiled_completions(rank: int, size: int, folder: str) -> None:
    trainer = make_trainer(Case("DPOTrainer"), folder)
    trainer.data_collator = hf_burst.BurstCollator(trainer.data_collator)
    trainer.train()


def test_pairs_are_not_sharded_by_a_collator(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(spoiled_completions, str(tmp_path))
    for error in caught.value.errors:
        assert pytest.RaisesExc(BatchError, match="completion_mask of shape.*looks like values of tokens").matches(
            error
        )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("RewardTrainer"), marks=pytest.mark.full),
        pytest.param(Case("RewardTrainer", burst=3, checkpointing=True), marks=pytest.mark.full),
        Case("RewardTrainer", data=2, checkpointing=True, little=True),
    ],
    ids=str,
)
def test_rewards_equal_one_process(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    """Three steps with accumulation and clipping, and what is logged of rewards."""
    wanted = trainers.train(0, 1, str(tmp_path / "alone"), case.alone)
    for found in ranks(case.ranks).run(trainers.train, str(tmp_path), case):
        compare(found, wanted, {"mean_reward", "min_reward", "max_reward", "accuracy", "margin", "num_tokens"})


def classify(rank: int, size: int, folder: str, case: Case, average: bool) -> dict[str, Any]:
    """Labels of rows, by Trainer, which multiplies the loss by the number of processes if it averages over them."""
    model = trainers.make_model(replace(case, trainer="RewardTrainer"))
    model.config.problem_type = "regression"
    rows = [{**row, "labels": row["input_ids"][:1] / 60} for row in trainers.samples("padded")]

    def collate(chosen: list[Any]) -> dict[str, Any]:
        values = torch.cat([row["labels"] for row in chosen])
        return {**trainers.collate([{"input_ids": row["input_ids"]} for row in chosen]), "labels": values}

    trainer = make_trainer(case, folder, rows, model=model, average_tokens_across_devices=average)
    trainer.data_collator = collate
    return trainers.finish(trainer)


@pytest.mark.parametrize("average", [True, pytest.param(False, marks=pytest.mark.full)])
def test_classification_by_trainer_equals_one_process(ranks: Ranks, tmp_path: Path, average: bool) -> None:
    case = Case("Trainer", burst=2)
    wanted = classify(0, 1, str(tmp_path / "alone"), case.alone, average)
    for found in ranks(2).run(classify, str(tmp_path), case, average):
        trainers.compare(found, wanted)


def rank(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    """Trains where no logits are gathered."""
    with mock.patch("hf_burst.hf.parts.head.LOGITS_LIMIT_GIB", 1e-9):
        return trainers.train(rank, size, folder, case)


@pytest.mark.parametrize("gathered", [pytest.param(True, marks=pytest.mark.full), False], ids=["gathered", "deferred"])
@pytest.mark.parametrize(
    "case", [Case("ORPOTrainer"), pytest.param(Case("CPOTrainer", burst=3), marks=pytest.mark.full)], ids=str
)
def test_rankings_equal_one_process(ranks: Ranks, tmp_path: Path, case: Case, gathered: bool) -> None:
    """TRL's losses that follow from all logits, and what is logged of them; but for their mean, which padding is in."""
    names = {"rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected", "nll_loss", "log_odds_ratio"}
    wanted = trainers.train(0, 1, str(tmp_path / "alone"), case.alone)
    for found in ranks(case.ranks).run(trainers.train if gathered else rank, str(tmp_path), case):
        compare(found, wanted, names)
