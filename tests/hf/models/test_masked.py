"""Encoders that predict masked tokens, over 1 to 4 ranks: what differs from causal language models."""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertLMHeadModel,
    DataCollatorForLanguageModeling,
    EsmConfig,
    EsmForMaskedLM,
    MobileBertConfig,
    MobileBertForMaskedLM,
    ModernBertForMaskedLM,
    NeoMMEConfig,
)
from transformers.loss.loss_utils import ForMaskedLMLoss

import hf_burst
from hf_burst.check.tiny import Double
from hf_burst.errors import BatchError, ConfigError, UnsupportedModelError
from hf_burst.hf.batches.cutting import layout_of
from hf_burst.hf.models.support import layer_patterns
from hf_burst.hf.models.task import CAUSAL, MASKED
from hf_burst.plan import MaskPattern
from tests.hf.parts.test_dropout import gathered, kept_by
from tests.hf.test_patch import KINDS, SCHEDULES, Expected, compare_with_one_process, group_mean, one_process, snapshot
from tests.support import models, trainers
from tests.support.ranks import RankError, RankPool, reset_accelerate
from tests.support.trainers import Case

Ranks = Callable[[int], RankPool]


def compare(rank: int, size: int, name: str, chosen: list[tuple[str, str]], expected: dict[str, Expected]) -> None:
    with Double():  # rotary positions are applied in fp32 otherwise
        compare_with_one_process(rank, size, name, chosen, expected)


ALWAYS = ((1, "bert"), (3, "modernbert"))


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=[pytest.mark.full] * ((size, name) not in ALWAYS))
        for size in (1, 2, 3, 4)
        for name in models.MASKED
    ],
)
def test_loss_logits_and_gradients_equal_one_process(ranks: Ranks, name: str, size: int) -> None:
    """Each kind of batch by one of the schedules; over another number of ranks, by another one."""
    number = models.MASKED.index(name) + size
    chosen = [(kind, SCHEDULES[(number + place) % 2]) for place, kind in enumerate(KINDS)]
    with Double():
        expected = {kind: one_process(name, kind, torch.float64) for kind in KINDS}
    if size == 1:
        compare(0, 1, name, chosen, expected)
    else:
        ranks(size).run(compare, name, chosen, expected)


CASES = [
    Case(model="bert"),  # averages each batch by itself, though Trainer counts the labels of all accumulated ones
    pytest.param(Case(model="bert", data=2), marks=pytest.mark.full),
    Case(model="bert", data=2, explicit=True),
    pytest.param(Case(model="modernbert", data=2), marks=pytest.mark.full),  # by num_items_in_batch
    Case(model="modernbert", explicit=True, checkpointing=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_of_trainer_equal_one_process(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    wanted = trainers.train(0, 1, tempfile.gettempdir(), case.alone)
    for found in ranks(case.ranks).run(trainers.train, str(tmp_path), case):
        trainers.compare(found, wanted)
    assert min(wanted["norms"]) > trainers.CLIP, "the clipping must be felt"


def evaluate(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    trainer = trainers.make_trainer(case, folder, eval_dataset=trainers.samples("padded", 8))
    predictions = trainer.predict(trainer.eval_dataset)
    return {"loss": trainer.evaluate()["eval_loss"], "logits": predictions.predictions, "labels": predictions.label_ids}


@pytest.mark.parametrize("name", ["bert", pytest.param("modernbert", marks=pytest.mark.full)])
def test_evaluation_and_prediction(ranks: Ranks, tmp_path: Path, name: str) -> None:
    case = Case(model=name, data=2)
    alone = evaluate(0, 1, str(tmp_path), case.alone)
    real = alone["labels"] != -100
    for found in ranks(4).run(evaluate, str(tmp_path), case):
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert np.array_equal(found["labels"], alone["labels"])
        np.testing.assert_allclose(found["logits"][real], alone["logits"][real], rtol=0, atol=1e-5)


def count_on_each_device_alone(rank: int, size: int, folder: str, steps: int) -> None:
    case = Case(model="bert")
    settings = {"average_tokens_across_devices": False, "gradient_accumulation_steps": steps}
    trainer = trainers.make_trainer(case, folder, **settings)
    try:
        trainer.train()
    finally:
        assert trainer.state.global_step == 0, "weights were changed before"


@pytest.mark.parametrize("steps", [1, 4])
def test_labels_that_were_not_counted_over_all_ranks_are_noticed(ranks: Ranks, tmp_path: Path, steps: int) -> None:
    """`Trainer` multiplies the loss by the number of processes only if it counted the labels of all of them."""
    with pytest.raises(RankError) as caught:
        ranks(2).run(count_on_each_device_alone, str(tmp_path), steps)
    for error in caught.value.errors:
        assert pytest.RaisesExc(BatchError, match="Leave average_tokens_across_devices=False out").matches(error)


def give_up_an_accumulation(rank: int, size: int) -> None:
    """The first of two batches is dropped, for example after a loss that is not finite, and another pair comes."""
    model = models.patch(models.make_model("bert").train())
    pair = [models.make_batch("plain") for _ in range(2)]
    pair[1]["labels"][:, ::2] = -100
    counts = [int((batch["labels"] != -100).sum()) * size for batch in pair]
    assert counts[0] > counts[1] > 0
    for batches in (1, 2, 2):
        for batch in pair[:batches]:
            loss = model(**batch, num_items_in_batch=sum(counts)).loss
            loss.backward()
        model.zero_grad()
    model(**pair[0], num_items_in_batch=sum(counts)).loss.backward()  # given up, but its gradients are kept
    assert torch.isfinite(model(**pair[1], num_items_in_batch=counts[1]).loss + loss)


@pytest.mark.parametrize("size", [1, 2])
def test_an_accumulation_may_be_given_up(ranks: Ranks, size: int) -> None:
    if size == 1:
        give_up_an_accumulation(0, 1)
    else:
        ranks(size).run(give_up_an_accumulation)


def masking_collator() -> DataCollatorForLanguageModeling:
    tokenizer = trainers.tokenizer()
    tokenizer.add_special_tokens({"mask_token": "w60"})
    return DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.5, seed=3)


def test_a_collator_that_masks_tokens_does_not_shift_labels() -> None:
    rows = [{"input_ids": row["input_ids"].tolist()} for row in trainers.samples("padded", 2)]
    full, shard = masking_collator()(rows), hf_burst.BurstCollator(masking_collator())(rows)
    assert torch.equal(shard["labels"], full["labels"])
    assert "shift_labels" not in shard
    assert "shift_labels" in hf_burst.BurstCollator(masking_collator(), causal=True)(rows)
    assert "shift_labels" in hf_burst.BurstCollator(trainers.collate)(trainers.samples("padded", 2))
    model = models.patch(models.make_model("bert").eval())
    full["attention_mask"] = shard.pop("attention_mask", full["attention_mask"])
    torch.testing.assert_close(model(**shard).loss, model(**full).loss)


def give_shards_of_the_other_kind(rank: int, size: int, name: str, causal: bool, labelled: bool) -> None:
    batch = models.make_batch("plain")
    if not labelled:
        del batch["labels"]
    models.patch(models.make_model(name).train())(**hf_burst.shard_batch(batch, causal=causal))


def give_shift_labels(rank: int, size: int) -> None:
    batch = models.make_batch("plain")
    batch["shift_labels"] = models.shifted(batch.pop("labels"))
    models.patch(models.make_model("bert").train())(**batch)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_shards_for_the_other_kind_of_model_are_refused(ranks: Ranks, name: str, labelled: bool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(give_shards_of_the_other_kind, name, name == "bert", labelled, timeout=60)
    message = f"causal={name == 'llama'}"
    assert all(pytest.RaisesExc(BatchError, match=message).matches(error) for error in caught.value.errors)


def test_shift_labels_are_not_for_masked_language_models(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(give_shift_labels, timeout=60)
    assert all("shift_labels without the layout" in str(error) for error in caught.value.errors)


def label_padding(rank: int, size: int) -> None:
    batch = models.make_batch("left")
    batch["labels"][1, 2] = 5
    models.patch(models.make_model("bert").train())(**batch)


def mask_nothing(rank: int, size: int) -> None:
    batch = models.make_batch("plain")
    batch["labels"].fill_(-100)
    models.patch(models.make_model("bert").train())(**batch, num_items_in_batch=7)


def attend_causally(rank: int, size: int) -> None:
    model = models.make_model("llama").train()
    model.loss_function = ForMaskedLMLoss
    models.patch(model)(**models.make_batch("plain"))


def drop_attention_weights(rank: int, size: int) -> None:
    sizes = {**models._SIZES, "attention_probs_dropout_prob": 0.1}
    models.patch(BertForMaskedLM(BertConfig(**sizes)).train())(**models.make_batch("plain"))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (label_padding, BatchError, "1 tokens of padding that attention_mask hides have labels"),
        (mask_nothing, BatchError, "All labels of the batch are -100, or no token predicts them"),
        (attend_causally, UnsupportedModelError, "LlamaAttention is causal, and .* should be that of an encoder"),
        (drop_attention_weights, UnsupportedModelError, "config.attention_probs_dropout_prob is 0.1"),
    ],
)
def test_what_would_be_wrong_is_refused_on_every_rank(
    ranks: Ranks, function: Callable[[int, int], None], kind: type[Exception], message: str
) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(function, timeout=60)
    for error in caught.value.errors:
        assert pytest.RaisesExc(kind, match=message).matches(error), error


def test_heads_and_settings_that_are_not_served_are_refused_with_a_sentence() -> None:
    config = BertConfig(**models._SIZES)
    decoder = BertConfig(**models._SIZES, is_decoder=True)
    esm = EsmConfig(**models._SIZES, token_dropout=True, mask_token_id=4, pad_token_id=0)
    sparse = models.make_model("modernbert").config
    sparse.sparse_prediction, sparse.sparse_pred_ignore_index = True, 0
    mobile = {"embedding_size": 16, "num_hidden_layers": 1, "intra_bottleneck_size": 16, "hidden_size": 32}
    for model, message in (
        (BertForPreTraining(config), r"BertForPreTraining was made as an encoder: .* load it by AutoModelForMaskedLM"),
        (BertLMHeadModel(config), "BertLMHeadModel was made as an encoder"),
        (BertForMaskedLM(decoder), "BertForMaskedLM was made as a decoder"),
        (EsmForMaskedLM(esm), "config.token_dropout is True: .* in the whole sequence"),
        (MobileBertForMaskedLM(MobileBertConfig(vocab_size=61, **mobile)), "config.trigram_input is True"),
        (ModernBertForMaskedLM(sparse), "sparse_pred_ignore_index is 0"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            models.patch(model)


def prepare_unpatched(rank: int, size: int) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig())
    accelerator.prepare(models.make_model("bert"))


def test_a_model_that_was_not_patched_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(prepare_unpatched)
    for error in caught.value.errors:
        assert pytest.RaisesExc(ConfigError, match="BertForMaskedLM is not patched").matches(error)
    reset_accelerate()


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_unpatch_puts_everything_back(name: str) -> None:
    model, batch = models.make_model(name).train(), models.make_batch("plain")
    before, loss = snapshot(model), model(**batch).loss
    hf_burst.unpatch_model(models.patch(model))
    assert snapshot(model) == before
    assert torch.equal(model(**batch).loss, loss)


def wrapped(rank: int, size: int, name: str, how: str) -> None:
    """The same loss and gradients under what is put around a model."""
    from peft import LoraConfig, get_peft_model

    model, batch = models.make_model(name, torch.float64).train(), models.make_batch("packed")
    if how == "lora":
        torch.manual_seed(3)
        targets = ["query", "value"] if name == "bert" else ["Wqkv"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).train()
    if how == "sparse_prediction":
        model.sparse_prediction = True
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = models.plain_loss(model.base_model.model if how == "lora" else model, batch)
    expected = torch.autograd.grad(loss, trained)
    models.patch(model)
    if how == "checkpointing":
        model.gradient_checkpointing_enable()
    called = torch.compile(model, backend="aot_eager") if how == "compile" else model
    found = called(**batch).loss
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-8)
    for mine, wanted in zip(group_mean(torch.nn.ParameterList(trained)), expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param("modernbert", "compile", marks=pytest.mark.full),
        ("bert", "lora"),
        ("bert", "checkpointing"),
        ("modernbert", "sparse_prediction"),
    ],
)
def test_what_is_put_around_a_model(ranks: Ranks, name: str, how: str) -> None:
    ranks(2).run(wrapped, name, how)


def draw_masks(rank: int, size: int) -> None:
    sizes = {**models._SIZES, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.3}
    torch.manual_seed(0)
    model = models.patch(BertForMaskedLM(BertConfig(**sizes)).train())
    kept = kept_by(model)
    losses = []
    for _ in range(2):
        torch.manual_seed(7)
        losses.append(model(**models.make_batch("plain", 396)).loss.item())
        states = gathered(torch.get_rng_state())
        assert torch.equal(*states), "the ranks' streams fell out of step"
    assert losses[0] == losses[1]
    for mask in kept.values():
        assert not torch.equal(*gathered(mask))


def test_dropout_masks_are_the_ranks_own(ranks: Ranks) -> None:
    ranks(2).run(draw_masks)


def test_work_is_balanced_for_both_directions() -> None:
    """One sequence needs no zigzag, where every token sees all others; padding and documents still cost nothing."""
    config, ids = hf_burst.BurstConfig(), torch.ones(1, 16384, dtype=torch.long)
    for task, owners in ((MASKED, (0, 1, 2, 3)), (CAUSAL, (0, 1, 2, 3, 3, 2, 1, 0))):
        assert layout_of({"input_ids": ids}, config, 4, task).owners == owners
    mask = (torch.arange(16384) < 9000).long()[None]
    layout = layout_of({"input_ids": ids, "attention_mask": mask}, config, 4, MASKED)
    assert layout.documents == ((0, 9000, 16384),)
    work = [0] * 4
    for chunk, (start, stop) in enumerate(itertools.pairwise(layout.sharding.boundaries)):
        work[layout.owners[chunk]] += sum(
            max(0, min(stop, end) - max(start, first)) * (end - first) for first, end in ((0, 9000), (9000, 16384))
        )
    assert max(work) * 4 / sum(work) <= 1.021


def test_windows_of_encoders_are_as_wide_on_both_sides() -> None:
    config = models.make_model("modernbert").config
    assert config.sliding_window == 7
    assert layer_patterns(config, MASKED) == {MaskPattern(False): 1, MaskPattern(False, 7): 1}
    assert layer_patterns(models.make_model("bert").config, MASKED) == {MaskPattern(False): 2}
    varied = NeoMMEConfig(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2, sliding_window=9)
    assert layer_patterns(varied, MASKED) == {MaskPattern(False): 1, MaskPattern(False, 9): 1}


@pytest.mark.parametrize("name", models.MASKED)
def test_under_autocast_the_head_runs_as_in_one_process(name: str) -> None:
    """accelerate's autocast ends with the model's forward, before its hooks."""
    batch = models.make_batch("plain")
    losses = []
    for patched in (False, True):
        model = models.make_model(name).train()
        if patched:
            models.patch(model)
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.detach().float())
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)


def read_with_workers(rank: int, size: int, folder: str) -> list[int]:
    """What the ranks of a group read when workers draw at random what is masked."""
    reset_accelerate()
    trainer = trainers.make_trainer(Case(model="bert", data=2, burst=2), folder, dataloader_num_workers=1)
    trainer.data_collator = draw_one
    return [int(batch["drawn"][0]) for batch in trainer.get_train_dataloader()]


def draw_one(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(len(rows), 1), "drawn": torch.randint(10**9, (1,)).expand(len(rows))}


@pytest.mark.full
@pytest.mark.slow
def test_workers_of_a_group_draw_the_same(ranks: Ranks, tmp_path: Path) -> None:
    first, second, third, fourth = ranks(4).run(read_with_workers, str(tmp_path))
    assert first == second != third == fourth
