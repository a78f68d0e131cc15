"""Models without a language-model head over 1 to 4 ranks: classifiers of sequences, tokens and spans, and bare decoders
and encoders; beside one process."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

import hf_burst
from hf_burst.check.compare import Double, make_batch
from hf_burst.check.heads import judgement, prepared
from hf_burst.errors import BatchError, RankMismatchError, UnsupportedModelError
from hf_burst.hf.spread.value import Spread
from hf_burst.hf.spread.where import Where
from hf_burst.ranks.group import ContextGroup
from hf_burst.ranks.layout import SequenceLayout
from tests.support import models
from tests.support.gradients import Result, assert_equal
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_models import tiny_model

Ranks = Callable[[int], RankPool]
DECODERS = (
    "LlamaForSequenceClassification",
    "Qwen2ForTokenClassification",
    "Qwen3ForSequenceClassification",
    "MistralForQuestionAnswering",
    "Gemma2ForSequenceClassification",
    "Gemma3TextForSequenceClassification",
    "Phi3ForTokenClassification",
    "GPT2ForSequenceClassification",
    "GPTNeoXForTokenClassification",
    "MixtralForSequenceClassification",
    "GptOssForSequenceClassification",
    "DeepseekV3ForSequenceClassification",
    "LlamaModel",
)
ENCODERS = (
    "BertForSequenceClassification",
    "RobertaForTokenClassification",
    "ModernBertForSequenceClassification",
    "ElectraForQuestionAnswering",
    "BertModel",
)
LATER = (  # whose kind of layer and whose head another one has
    "Qwen3ForSequenceClassification",
    "Gemma2ForSequenceClassification",
    "Phi3ForTokenClassification",
    "GPTNeoXForTokenClassification",
    "MixtralForSequenceClassification",
    "ElectraForQuestionAnswering",
)
ALONE = (("LlamaForSequenceClassification", 1), ("BertForSequenceClassification", 1))


def make(name: str) -> PreTrainedModel:
    torch.set_default_dtype(torch.float64)
    try:
        return prepared(tiny_model(name))
    finally:
        torch.set_default_dtype(torch.float32)


def result(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> Result:
    """The loss of a head, or what stands for it, and all gradients."""
    with Double():
        loss = judgement(model, batch)
        loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), gradients


def over_ranks(rank: int, size: int, name: str, batch: dict[str, torch.Tensor]) -> Result:
    return result(models.patch(make(name)), batch)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(
            name, size, marks=[pytest.mark.full] * ((size != 3 or name in LATER) and (name, size) not in ALONE)
        )
        for name in DECODERS + ENCODERS
        for size in (1, 2, 3, 4)
    ],
)
def test_loss_and_gradients_equal_one_process(ranks: Ranks, name: str, size: int) -> None:
    """Rows padded on both sides, where the class serves them."""
    plain = make(name)
    kind = "one sequence" if "QuestionAnswering" in name else "padded"
    batch = make_batch(kind, plain)
    assert_equal(ranks(size).run(over_ranks, name, batch), result(plain, batch))


def sharing(rank: int, size: int, name: str, batch: dict[str, torch.Tensor]) -> Result:
    return result(models.patch(make(name), hf_burst.BurstConfig(share_prefixes=True)), batch)


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "Qwen2ForTokenClassification", "LlamaModel"])
def test_rows_that_begin_alike_are_computed_one_by_one(ranks: Ranks, name: str) -> None:
    """What these return is of all rows."""
    plain = make(name)
    batch = make_batch("one sequence", plain)
    batch["input_ids"][1, :20] = batch["input_ids"][0, :20]
    if "Token" in name:
        batch["labels"][1, :20] = batch["labels"][0, :20]
    assert_equal(ranks(2).run(sharing, name, batch), result(plain, batch))


def pooled_by_mean(rank: int, size: int, batch: dict[str, torch.Tensor]) -> Result:
    return result(models.patch(mean_pooling()), batch)


def mean_pooling() -> PreTrainedModel:
    model = make("ModernBertForSequenceClassification")
    model.config.classifier_pooling = "mean"
    return model


def test_the_mean_of_rows_padded_on_both_sides(ranks: Ranks) -> None:
    plain = mean_pooling()
    batch = make_batch("padded", plain)
    assert not batch["attention_mask"][0, 0], "padding on the left, too"
    assert_equal(ranks(3).run(pooled_by_mean, batch), result(plain, batch))


def outputs_of(rank: int, size: int, name: str, batch: dict[str, torch.Tensor]) -> Any:
    model = models.patch(make(name)).eval()
    with Double(), torch.no_grad():
        outputs = model(**batch, output_hidden_states=True)
    return {key: value for key, value in outputs.items() if key in ("logits", "last_hidden_state", "hidden_states")}


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaModel"])
def test_outputs_are_of_the_whole_batch(ranks: Ranks, name: str) -> None:
    plain = make(name).eval()
    batch = {key: value for key, value in make_batch("one sequence", plain).items() if key != "labels"}
    with Double(), torch.no_grad():
        expected = plain(**batch, output_hidden_states=True)
    for outputs in ranks(2).run(outputs_of, name, batch):
        for key, value in outputs.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9)


def dropout_masks(rank: int, size: int, seeds: tuple[int, ...] = (7, 7, 7)) -> tuple[float, torch.Tensor]:
    """The loss with dropout behind pooling, and this rank's random numbers afterwards."""
    model = models.patch(make("ModernBertForSequenceClassification"))
    model.drop.p = 0.5
    torch.manual_seed(seeds[rank])
    loss = judgement(model, make_batch("one sequence", model))
    return loss.item(), torch.rand(3)


def test_dropout_behind_pooling_draws_the_same_masks_on_all_ranks(ranks: Ranks) -> None:
    (loss, after), *others = ranks(3).run(dropout_masks)
    for other, numbers in others:
        assert other == loss
        assert torch.equal(numbers, after)
    own = ranks(3).run(dropout_masks, (7, 8, 9))
    assert {other for other, _ in own} == {loss}, "device_specific=True, or a callback that draws on one rank"
    assert len({tuple(numbers.tolist()) for _, numbers in own}) == 3, "each goes on with its own numbers"


def given(rank: int, size: int, name: str, changes: dict[str, Any]) -> None:
    model = models.patch(make(name))
    batch = make_batch("padded", model)
    model(**{**batch, **changes})


PADDED = {"attention_mask": torch.tensor([[0] * 6 + [1] * 31, [1] * 30 + [0] * 7])}
PACKED = {"position_ids": torch.arange(37).remainder(17)[None].expand(2, -1), "attention_mask": None}


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("LlamaForSequenceClassification", PACKED, "judges a row as one"),
        ("LlamaForSequenceClassification", {"input_ids": torch.full((2, 37), 5)}, "judges the last token that is not"),
        ("LlamaForQuestionAnswering", {}, "chooses among all tokens"),
        ("LlamaForTokenClassification", {"labels": torch.ones(2, 37, dtype=torch.long)}, "padding .* have labels"),
        ("BertForSequenceClassification", PADDED, "Pad on the right"),
    ],
)
def test_what_heads_refuse(ranks: Ranks, name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(given, name, changes)
    for error in caught.value.errors:
        assert pytest.RaisesExc(BatchError, match=sentence).matches(error), error


class Tagger(BertForTokenClassification):
    """A class of one's own, named in one's own way."""


class Reader(BertForQuestionAnswering):
    """Another one."""


@pytest.mark.parametrize(
    ("cls", "given", "sentence"),
    [
        (Tagger, {"labels": torch.ones(2, 11, dtype=torch.long)}, "padding .* have labels"),
        (Reader, {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}, "chooses among all"),
    ],
)
def test_heads_of_classes_of_ones_own_refuse_the_same(cls: Any, given: dict[str, Any], sentence: str) -> None:
    config = BertConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = hf_burst.patch_model(cls(config)).eval()
    mask = torch.tensor([[1] * 11, [1] * 6 + [0] * 5])
    with pytest.raises(BatchError, match=sentence):
        model(torch.full((2, 11), 5), attention_mask=mask, **given)


@pytest.mark.parametrize("token", [13, -14])
def test_a_token_that_there_is_not_is_no_other_one(token: int) -> None:
    layout = SequenceLayout.for_batch([(0, 13)], ranks=1)
    shared = mock.Mock()
    states = Spread(torch.zeros(1, 13, 4), lies=Where(layout, ContextGroup.from_mesh(None), share=shared))
    assert torch.mean(states) == states.mean() == 0
    shared.reset_mock()
    with mock.patch.object(Where, "batch", side_effect=AssertionError("the owner sends one token")):
        assert states[:, -1].shape == (1, 4)
    shared.assert_called_once()
    with pytest.raises(IndexError):
        states[:, token]


def test_a_pooler_that_is_not_given_all_tokens_is_refused() -> None:
    model = models.patch(make("AlbertModel"))
    with pytest.raises(UnsupportedModelError, match="add_pooling_layer=False"):
        model(torch.ones(1, 7, dtype=torch.long))


def other_labels(rank: int, size: int) -> None:
    model = models.patch(make("LlamaForSequenceClassification"))
    model(**(make_batch("one sequence", model) | {"labels": torch.tensor([rank, 1])}))


def test_labels_of_rows_must_be_the_same_on_all_ranks(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(other_labels)
    assert all(isinstance(error, RankMismatchError) for error in caught.value.errors)


def test_a_shard_has_no_labels_of_rows() -> None:
    config = LlamaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0)
    model = hf_burst.patch_model(LlamaForSequenceClassification(config))
    with pytest.raises(BatchError, match="Give full batches"):
        model(**hf_burst.shard_batch(models.make_batch("plain")))


def adapted(rank: int, size: int, patched: bool, batch: dict[str, torch.Tensor]) -> Result:
    """LoRA in the decoder, and a head that is trained whole."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    options = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "task_type": "SEQ_CLS"}
    model = peft.get_peft_model(make("LlamaForSequenceClassification"), peft.LoraConfig(r=2, **options)).double()
    if patched:
        models.patch(model)
    with Double():
        loss = model(**batch).loss
        loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert any("modules_to_save" in name for name in found)
    frozen = {name: torch.zeros(1) for name, weight in model.named_parameters() if not weight.requires_grad}
    return loss.item(), found | frozen


def test_adapters_and_a_saved_head(ranks: Ranks) -> None:
    batch = make_batch("padded", make("LlamaForSequenceClassification"))
    assert_equal(ranks(2).run(adapted, True, batch), adapted(0, 1, False, batch))
