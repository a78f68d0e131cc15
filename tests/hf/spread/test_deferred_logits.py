"""Losses on logits that are too large to gather: they are computed where tokens lie, and equal those of one process."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

import hf_burst
from hf_burst.attention import SequenceLayout
from hf_burst.errors import BatchError, RankMismatchError
from hf_burst.hf.batches.cutting import kept_tokens
from hf_burst.hf.parts.head import Head
from hf_burst.hf.spread.value import Spread
from hf_burst.hf.spread.where import Where
from hf_burst.ranks.group import ContextGroup
from tests.hf.generation.test_token_losses import Batch, Width, batch_of, whole_gradients, wrap
from tests.hf.test_patch import part_of
from tests.support import models
from tests.support.gradients import Result, assert_equal
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]


def cross_entropy(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    flat = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
    smooth = functional.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.1)
    return smooth + torch.nn.CrossEntropyLoss(reduction="sum")(flat, labels[:, 1:].flatten())


def selected(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of labels by two ways, and the entropy, of some rows."""
    index = labels[1:, 1:].clamp(min=0)[..., None]
    some = logits[1:, :-1]
    assert logits[labels != -100, :].shape == logits[labels != -100].shape == ((labels != -100).sum(), logits.size(-1))
    first = torch.gather(some, dim=-1, index=index)[..., 0] - torch.stack([row.logsumexp(-1) for row in some])
    second = functional.log_softmax(some / 2, dim=-1).gather(-1, index).squeeze(-1)
    counted = labels[1:, 1:] != -100
    likely = functional.softmax(some, dim=-1).gather(-1, index)[..., 0]
    return ((first + 0.3 * second) * counted).sum() + likely[counted].square().sum()


def smoothed(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    losses = -logits[..., :-1, :].float().log_softmax(dim=-1)
    return losses.sum(dim=-1, keepdim=True, dtype=torch.float64)[labels[:, 1:] != -100].sum()


def of_one_token(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Which one rank holds; and the mean of all logits of a row, detached."""
    return logits[:, 20, :].logsumexp(-1).sum() + logits[0].detach().mean()


LOSSES = {loss.__name__: loss for loss in (cross_entropy, selected, smoothed, of_one_token)}


def inputs_of(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


def deferred(rank: int, size: int, name: str, kind: str) -> Result:
    batch = batch_of(kind)
    model = models.patch(models.make_model("llama", torch.float64).train(), hf_burst.BurstConfig(share_prefixes=True))
    few = mock.patch("hf_burst.layers.linear_loss._LOGITS", 14 * models.VOCABULARY)
    none = mock.patch("hf_burst.hf.parts.head.LOGITS_LIMIT_GIB", 1e-9)
    with few, none, Width(model.config.hidden_size) as width:
        logits = model(**inputs_of(batch)).logits
        assert isinstance(logits, Spread)
        assert logits.shape == (*batch["labels"].shape, models.VOCABULARY)
        loss = LOSSES[name](logits, batch["labels"])
        loss.backward()
    assert 0 < width.most <= 7, "no tensor as wide as the vocabulary holds all tokens of a rank"
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


def expected(name: str, kind: str) -> Result:
    """The same in one process that is not patched."""
    batch, model = batch_of(kind), models.make_model("llama", torch.float64).train()
    loss = LOSSES[name](models.plain_logits(model, batch), batch["labels"])
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


CASES = [(name, kind) for name in LOSSES for kind in ("right", "left", "alike")]
CASES.remove(("of_one_token", "alike"))  # padding has other logits there, and is in the mean


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.full) for size in (2, 4))])
@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*case, marks=[pytest.mark.full] * (number % 2)) for number, case in enumerate(CASES)],
)
def test_losses_on_logits_equal_one_process(ranks: Ranks, name: str, kind: str, size: int) -> None:
    tolerance = 2e-6 if name == "smoothed" else 1e-9  # which rounds to fp32
    assert_equal(ranks(size).run(deferred, name, kind), expected(name, kind), tolerance)


def accuracy(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """What a `compute_loss` logs, and a loss of all logits: they are gathered."""
    right = logits[:, :-1].detach().argmax(-1) == labels[:, 1:]
    return torch.where((labels[:, 1:] != -100)[..., None], logits[:, :-1], 0).square().sum() + right.sum()


def beside_labels(rank: int, size: int, kind: str) -> list[Result]:
    results, batch = [], batch_of(kind)
    for loss in (cross_entropy, selected, accuracy):
        model = models.patch(
            models.make_model("llama", torch.float64).train(), hf_burst.BurstConfig(share_prefixes=True)
        )
        logits = model(**batch)["logits"]
        assert isinstance(logits, Spread), "of which a training by the loss alone computes nothing"
        value = loss(logits, batch["labels"])
        value.backward()
        results.append((value.item(), {name: weight.grad for name, weight in model.named_parameters()}))
    assert torch.equal(logits[..., 3], logits[:, :, 3])
    with mock.patch("hf_burst.hf.parts.head.LOGITS_LIMIT_GIB", 1e-9):
        outputs = model(**batch)
        assert outputs.logits.logsumexp(-1).shape == batch["labels"].shape
        with pytest.raises(BatchError, match=r"trains with labels in the batch, and argmax\(-1\) was asked of"):
            outputs.logits.argmax(-1)
    assert model.eval()(**batch).logits.shape == (*batch["labels"].shape, models.VOCABULARY)
    return results


@pytest.mark.parametrize("kind", ["right", "alike"])
@pytest.mark.parametrize("size", [1, 2])
def test_logits_of_a_batch_with_labels(ranks: Ranks, size: int, kind: str) -> None:
    """As `compute_loss` of a `Trainer` reads them, whose batch keeps its labels."""
    found = ranks(size).run(beside_labels, kind)
    for number, loss in enumerate((cross_entropy, selected, accuracy)):
        batch, model = batch_of(kind), models.make_model("llama", torch.float64).train()
        value = loss(models.plain_logits(model, batch), batch["labels"])
        value.backward()
        wanted = value.item(), {name: weight.grad for name, weight in model.named_parameters()}
        assert_equal([results[number] for results in found], wanted, 1e-9)


def at_padding(rank: int, size: int, scored: bool) -> None:
    """What a loss makes of padding, whose scores are 0: no word is impossible."""
    model = models.patch(models.make_model("llama", torch.float64).train(), hf_burst.BurstConfig(share_prefixes=True))
    if scored:  # by the model itself, for a gradient
        model.lm_head.weight.register_hook(lambda gradient: gradient)
    batch = batch_of("alike")
    logits = model(**batch).logits
    assert (logits.head is None) == scored
    assert float(logits.log_softmax(-1).logsumexp(-1).detach().abs().max()) < 1e-5
    likely = logits.softmax(-1)
    assert float(likely.sum(-1).detach().min()) > 0.99
    (-(likely * likely.log()).sum(-1) * (batch["labels"] != -100)).sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("scored", [False, True])
def test_functions_of_a_loss_see_zeros_at_padding(ranks: Ranks, scored: bool) -> None:
    ranks(2).run(at_padding, scored)


def by_all_means(rank: int, size: int) -> None:
    """What is not computed where tokens lie is that of the logits; behind an update there are none."""
    batch = models.make_batch("plain")
    model = models.patch(models.make_model("llama", torch.float64).train())
    with torch.no_grad():
        plain = models.make_model("llama", torch.float64)(**inputs_of(batch)).logits
    outputs = model(**batch)
    logits, mask = outputs.logits, batch["labels"] != -100
    facts = logits.requires_grad, logits.is_floating_point(), logits.is_cuda
    assert facts == (True, True, False), "without messages"
    for found, wanted in (
        (logits * mask[..., None], plain * mask[..., None]),
        (logits + torch.ones(1), plain + 1),
        (abs(logits), abs(plain)),
        (logits.sum(), plain.sum()),
        (logits.softmax(1), plain.softmax(1)),
        (logits.view(-1), plain.view(-1)),
        ((1 + logits[..., 2:9]).logsumexp(-1), (1 + plain[..., 2:9]).logsumexp(-1)),
        (logits[:, -5:, :3].softmax(1), plain[:, -5:, :3].softmax(1)),
        (torch.stack(list(logits)), plain),
    ):
        torch.testing.assert_close(found.detach(), wanted)
    with pytest.raises(TypeError, match="not changed in place"):
        logits[:, 3] = 0.0
    outputs.loss.backward()
    logits.argmax(-1)
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad
    for ask in (lambda: logits.argmax(-1), lambda: logits.logsumexp(-1)):
        with pytest.raises(BatchError, match="behind an update of the head"):
            ask()


@pytest.mark.parametrize("size", [1, 2])
def test_all_that_tensors_do_is_done_where_logits_fit(ranks: Ranks, size: int) -> None:
    ranks(size).run(by_all_means)


def wrapped(rank: int, size: int, how: str) -> Result:
    batch, model = batch_of("right"), models.patch(models.make_model("llama", torch.float64).train())
    with mock.patch("hf_burst.hf.parts.head.LOGITS_LIMIT_GIB", 1e-9):
        logits = wrap(model, how, size)(**inputs_of(batch)).logits
    loss = of_one_token(logits, batch["labels"])
    loss.backward()
    return loss.item(), whole_gradients(model)


@pytest.mark.parametrize("how", ["ddp", "fsdp2 tail"])
def test_losses_on_logits_through_wrappers(ranks: Ranks, how: str) -> None:
    """A token that one rank holds: the others take part."""
    assert_equal(ranks(2).run(wrapped, how), expected("of_one_token", "right"))


@pytest.mark.parametrize("how", ["fsdp2", "fsdp2 alone"])
def test_a_head_that_fsdp2_has_sharded_again_is_refused(ranks: Ranks, how: str) -> None:
    with pytest.raises(RankError, match="sharded the head again"):
        ranks(2).run(wrapped, how)


def under_autocast(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from gathered logits of bf16, in fp32, and from deferred ones."""
    model, ids = models.patch(models.make_model("llama").train()), batch_of("right")["input_ids"]
    with torch.autocast("cpu", torch.bfloat16):
        gathered = model(ids).logits
        with mock.patch("hf_burst.hf.parts.head.LOGITS_LIMIT_GIB", 1e-9):
            apart = model(ids).logits
        assert gathered.dtype == torch.bfloat16
        return gathered.float().logsumexp(-1).detach(), apart.logsumexp(-1).detach()


def test_under_autocast_scores_are_reduced_in_fp32(ranks: Ranks) -> None:
    for gathered, apart in ranks(2).run(under_autocast):
        assert apart.dtype == torch.float32
        torch.testing.assert_close(apart, gathered, rtol=1e-6, atol=1e-6)


def adapted(**options: Any) -> Any:
    """A patched model, whose head has adapters."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, init_lora_weights=False, **options)
    model = get_peft_model(models.make_model("llama", torch.float64), settings).double().train()
    return models.patch(model)


def switch_adapters(rank: int, size: int, options: dict[str, Any]) -> None:
    """A head that is put off would compute other logits by now."""
    model = adapted(**options)
    model.add_adapter("other", model.peft_config["default"])
    logits = model(**models.make_batch("plain")).logits
    for ask in (lambda: logits.logsumexp(-1), lambda: logits.softmax(1)):
        with model.disable_adapter(), pytest.raises(BatchError, match="where other adapters of it work"):
            ask()
    values = logits.logsumexp(-1).sum()
    model.set_adapter("other")
    with pytest.raises(BatchError, match="The gradient was asked of logits behind"):
        values.backward()


@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
    ids=str,
)
def test_logits_are_not_those_of_other_adapters(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks(2).run(switch_adapters, options)


def drop_out(rank: int, size: int) -> None:
    """Whoever reads logits, and the backward pass, finds the same numbers dropped. Ranks draw alike afterwards."""
    model = adapted(target_modules=["lm_head"], lora_dropout=0.5)
    logits = model(**models.make_batch("plain", 64)).logits
    learned = [weight for name, weight in model.named_parameters() if "lm_head.lora" in name]
    drawn, found = torch.get_rng_state(), list[Any]()
    for values in (logits.logsumexp(-1), logits.whole().logsumexp(-1)):
        found.append((values.detach(), *torch.autograd.grad(values.sum(), learned)))
    assert torch.equal(torch.get_rng_state(), drawn)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2])
def test_dropout_in_a_head_that_is_put_off(ranks: Ranks, size: int) -> None:
    ranks(size).run(drop_out)


APART: dict[str, Callable[[Any, torch.Tensor, int], Any]] = {
    "rows of other number": lambda logits, labels, rank: logits[rank:].logsumexp(-1),
    "other rows": lambda logits, labels, rank: logits[rank].logsumexp(-1),
    "other labels": lambda logits, labels, rank: functional.cross_entropy(logits[0], labels[0].roll(rank)),
    "other temperatures": lambda logits, labels, rank: (logits / (1 + rank)).logsumexp(-1),
}


def ask_apart(rank: int, size: int, how: str) -> None:
    model, batch = models.patch(models.make_model("llama").train()), models.make_batch("plain")
    with mock.patch("hf_burst.hf.parts.head.LOGITS_LIMIT_GIB", 1e-9):
        logits = model(batch["input_ids"]).logits
    APART[how](logits, batch["labels"], rank)


@pytest.mark.parametrize("how", APART)
def test_ranks_that_ask_for_others_are_told(ranks: Ranks, how: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(ask_apart, how)
    assert all(isinstance(error, RankMismatchError) for error in caught.value.errors)


def ask_for(rank: int, size: int, what: str) -> None:
    model = models.patch(models.make_model("llama").train())
    with mock.patch("hf_burst.hf.parts.head.LOGITS_LIMIT_GIB", 1e-9):
        logits = model(models.make_batch("plain")["input_ids"]).logits
    REFUSED[what](logits)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "sort": lambda logits: logits.sort(-1),
    "cat": lambda logits: torch.cat([torch.zeros(2, 37, 61), logits]),
    "getitem": lambda logits: logits[..., 7],
    r"softmax\(1\)": lambda logits: logits.softmax(1),
    "mul": lambda logits: (logits * torch.ones(61)).logsumexp(-1),
    r"view\(-1\)": lambda logits: logits.view(-1),
    "add": lambda logits: torch.ones(61) + logits,
}
MISSING: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "gather": lambda logits, words: logits.gather(-1, words[..., None]),
    "cross_entropy": lambda logits, words: functional.cross_entropy(logits.view(-1, 61), words.flatten()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_mixes_tokens_is_refused(ranks: Ranks, what: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(ask_for, what)
    for error in caught.value.errors:
        assert pytest.RaisesExc(BatchError, match=f"{what}.* was asked of them. Served are").matches(error), error


def ask_for_a_missing_word(rank: int, size: int, by: str) -> None:
    """One rank has the token, and none may wait for it."""
    model, words = models.patch(models.make_model("llama").train()), models.make_batch("plain")["input_ids"].clone()
    with mock.patch("hf_burst.hf.parts.head.LOGITS_LIMIT_GIB", 1e-9):
        logits = model(words).logits
    words[0, 3] = 61
    MISSING[by](logits, words)


@pytest.mark.parametrize("by", MISSING)
def test_a_word_that_there_is_not_is_refused_on_every_rank(ranks: Ranks, by: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(ask_for_a_missing_word, by)
    for error in caught.value.errors:
        assert pytest.RaisesExc(BatchError, match=f"{by}.* was asked for the word 61").matches(error), error


def of_no_token(rank: int, size: int) -> tuple[float, torch.dtype, float]:
    """The sum over no token; and in which type words are normalized that a method of tensors is given."""
    model, ids = (
        models.patch(models.make_model("llama", torch.float64).train()),
        models.make_batch("plain")["input_ids"],
    )
    with mock.patch("hf_burst.hf.parts.head.LOGITS_LIMIT_GIB", 1e-9):
        logits = model(ids).logits
    nothing = logits[torch.zeros_like(ids, dtype=torch.bool)].logsumexp(-1)
    nothing.sum().backward()
    gradient = model.lm_head.weight.grad
    assert nothing.shape == (0,)
    assert gradient is not None
    return nothing.sum().item(), logits.log_softmax(-1, torch.float32).dtype, gradient.abs().max().item()


def test_no_token_counts_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(of_no_token) == [(0.0, torch.float32, 0.0)] * 2


@pytest.mark.parametrize("documents", [(0, 97), (0, 30, 33, 97)])
@pytest.mark.parametrize("keep", [1, 5, torch.tensor([-1, 3, 96, 3, 50])])
def test_tokens_that_are_kept_are_found_by_runs(documents: tuple[int, ...], keep: Any) -> None:
    layout = SequenceLayout.for_batch([documents], 3, "balanced")
    wanted = [token % 97 for token in keep.tolist()] if isinstance(keep, torch.Tensor) else list(range(97 - keep, 97))
    found = {}
    for rank in range(3):
        lies = Where(layout, ContextGroup(rank, 3))
        local = lies.local[kept_tokens(keep, 97)]
        held = layout.indices(rank)
        found |= {place: int(held[row]) for place, row in enumerate(local.tolist()) if row >= 0}
    assert [found[place] for place in range(len(wanted))] == wanted


def change_in_place(rank: int, size: int) -> None:
    model, batch = models.patch(models.make_model("llama").train()), models.make_batch("plain")
    logits = model(**batch).logits
    for change in (lambda: logits.div_(2), lambda: logits.__setitem__(0, 1.0)):
        with pytest.raises(TypeError, match="not changed in place"):
            change()


def test_values_of_several_ranks_are_not_changed_in_place(ranks: Ranks) -> None:
    ranks(2).run(change_in_place)


def test_logits_in_a_model_are_changed_in_place() -> None:
    """A statement of a forward changes those that follow it."""
    model = models.patch(models.make_model("llama").train())
    model(**models.make_batch("plain"))
    hidden = torch.randn(1, 5, model.config.hidden_size)
    part_of(model, Head).lazy.under_way = True
    logits = model.lm_head(hidden)
    assert isinstance(logits, Spread)
    logits.div_(2)
    part_of(model, Head).lazy.under_way = False
    torch.testing.assert_close(logits.score(), model.lm_head(hidden) / 2)
