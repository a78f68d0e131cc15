"""Rows that begin alike, computed once: everything is as if each row had been computed by itself."""

import logging
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_burst
from hf_burst.attention import SequenceLayout
from hf_burst.errors import BatchError, ConfigError, RankMismatchError
from hf_burst.hf.batches import joining
from hf_burst.hf.batches.joining import Joined, join_texts
from hf_burst.hf.groups import PATCH
from hf_burst.hf.parts import shared_beginnings
from hf_burst.hf.trainers.logging import given_tokens, longest_of
from hf_burst.hf.trainers.logging import tokens_of as tokens_of_layout
from hf_burst.hf.view import ModelView
from tests.hf.parts import test_experts
from tests.support import models, trainers
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_models import tiny_model

Ranks = Callable[[int], RankPool]
IGNORED = -100
CLOSE, WITH_FP32 = {"rtol": 1e-10, "atol": 1e-10}, {"rtol": 1e-6, "atol": 1e-6}  # routers round to fp32


def texts(*rows: str) -> dict[str, torch.Tensor]:
    """Rows of letters, each a token, padded on the right; capitals have no label."""
    longest = max(map(len, rows))
    ids = torch.tensor([[ord(letter.lower()) - 96 for letter in row] + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    labels = ids.masked_fill(mask == 0, IGNORED)
    for row, letters in enumerate(rows):
        for place, letter in enumerate(letters):
            if letter.isupper():
                labels[row, place] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


QUESTION = "theunexaminedlife"
BATCHES: dict[str, tuple[str, ...]] = {
    "pairs": (QUESTION.upper() + "isnot", QUESTION.upper() + "worthliving"),
    "several labels": (QUESTION + "isnot", QUESTION + "worthliving", QUESTION + "a"),
    "other masks": (QUESTION.upper() + "isnot", QUESTION + "worthliving", QUESTION[:5].upper() + QUESTION[5:] + "a"),
    "endings of one token": tuple(QUESTION.upper() + letter for letter in "abcdef"),
    "equal": (QUESTION, QUESTION, QUESTION + "b", QUESTION),
    "only the beginning": (QUESTION.upper() + "isnot", QUESTION.upper(), QUESTION.upper() + "is"),
    "one row": (QUESTION,),
    "beginnings of one token": ("tabc", "txyzz", "tkl"),
    "two beginnings in any order": ("abcdefgh", "ijklmnop", "abcdefxyz", "ijklmnoab", "zz", "abcdefgh"),
    "a tree": ("abcdefghij", "abcdefgkl", "abcdx", "abcdxyz", "abcdxyzz", "abcdefghik", "q"),
    "sixteen": tuple(QUESTION.upper() + chr(97 + index) * (index % 5 + 1) for index in range(16)),
}


def left(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with two tokens of padding on the left of all rows."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    moved = {name: torch.nn.functional.pad(value, (2, 0), value=fill[name]) for name, value in batch.items()}
    moved["labels"][:, :3] = IGNORED
    return moved


PACKED = ["abcdefgh", "zzz", "abcdefxyz", "abcd", "q", "abcdefxyw"]


def packed(documents: list[str]) -> dict[str, torch.Tensor]:
    """Documents of one row; capitals have no label."""
    ids = torch.tensor([[ord(letter.lower()) - 96 for document in documents for letter in document]])
    positions = torch.tensor([[place for document in documents for place in range(len(document))]])
    capital = torch.tensor([[letter.isupper() for document in documents for letter in document]])
    labels = ids.masked_fill((positions == 0) | capital, IGNORED)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    if kind == "packed":
        return packed(PACKED)
    return left(texts(*BATCHES["a tree"])) if kind == "left" else texts(*BATCHES[kind])


def one_by_one(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of an unpatched model that is given each text alone; those of padding are 0."""
    rope = getattr(model.config, "rope_parameters", None)
    if rope and rope.get("rope_type") == "dynamic":
        return models.plain_logits(model, batch)  # whose longest text decides
    rows = []
    for row, ids in enumerate(batch["input_ids"]):
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[row].bool()
        positions = batch.get("position_ids", torch.arange(len(ids))[None].expand_as(batch["input_ids"]))[row]
        starts = [place for place in range(len(ids)) if real[place] and (positions[place] == 0 or not real[place - 1])]
        logits = torch.zeros(len(ids), model.config.vocab_size, dtype=model.dtype)
        for start, stop in pairwise([*starts, int(real.nonzero()[-1]) + 1]):
            own = model(input_ids=ids[None, start:stop], position_ids=positions[None, start:stop], use_cache=False)
            logits = torch.cat([logits[:start], own.logits[0], logits[stop:]])
        rows.append(logits)
    return torch.stack(rows)


def make_model(name: str) -> Any:
    """A small model in fp64, and so are its norms."""
    if name in models.NAMES + models.RECURRENT:
        return models.make_model(name, torch.float64)
    torch.manual_seed(0)
    model = tiny_model(name)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # so that tokens choose different experts, by a margin
            torch.nn.init.normal_(parameter, std=0.15)
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
            model.set_submodule(path, torch.nn.RMSNorm(module.weight.shape, eps=eps))
    return model.double()


def one_process(name: str, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The loss, gradients and logits of an unpatched model."""
    model = make_model(name).train()
    logits = one_by_one(model, batch)
    targets = models.shifted(batch["labels"])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return {"loss": loss.detach(), "gradients": gradients, "logits": one_by_one(model.eval(), batch).detach()}


def shared(rank: int, size: int, name: str, batches: list[Any], settings: dict[str, Any]) -> list[int]:
    """Compares loss, gradients, logits and losses of tokens with one process; how many tokens each batch saved."""
    config = hf_burst.BurstConfig(share_prefixes=True, **settings)
    model = models.patch(make_model(name), config)
    saved = []
    tokens = models.counted(model)
    for kind, batch, wanted in batches:
        model.train().zero_grad()
        close = CLOSE if name in models.NAMES else WITH_FP32
        tokens.clear()
        outputs = model(**batch)
        outputs.loss.backward()
        torch.testing.assert_close(outputs.loss, wanted["loss"], **close, msg=kind)
        for parameter, gradient in zip(model.parameters(), wanted["gradients"], strict=True):
            found = parameter.grad.clone()
            if size > 1:
                dist.all_reduce(found)
                found /= size
            torch.testing.assert_close(found, gradient, **close, msg=kind)
        check_outputs(model.eval(), batch, wanted["logits"], close)
        real = int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum())
        saved.append(real - tokens[0] * size)
    assert getattr(model, PATCH).run is None
    return saved


@torch.no_grad()
def check_outputs(model: Any, batch: dict[str, torch.Tensor], logits: torch.Tensor, close: dict[str, float]) -> None:
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    outputs = model(**inputs, output_hidden_states=True)
    assert outputs.logits.shape == logits.shape
    torch.testing.assert_close(outputs.logits[real], logits[real], **close)
    assert {state.shape[:2] for state in outputs.hidden_states} == {real.shape}
    kept = model(**inputs, logits_to_keep=2).logits
    torch.testing.assert_close(kept[real[:, -2:]], logits[:, -2:][real[:, -2:]], **close)
    chosen = torch.tensor([1, 0, 1, -1])
    kept = model(**inputs, logits_to_keep=chosen).logits
    torch.testing.assert_close(kept[real[:, chosen]], logits[:, chosen][real[:, chosen]], **close)
    labels = batch["labels"]
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    found = hf_burst.token_losses(model, batch)
    torch.testing.assert_close(found, torch.nn.functional.pad(losses, (1, 0)), **close)


KINDS = [*BATCHES, "left", "packed"]


def compare(ranks: Ranks, size: int, name: str, kinds: list[str], **settings: Any) -> list[int]:
    batches = [(kind, batch_of(kind), one_process(name, batch_of(kind))) for kind in kinds]
    saved = ranks(size).run(shared, name, batches, settings)
    return saved[0]


@pytest.mark.parametrize(
    ("size", "kinds"),
    [
        (1, ["pairs", "sixteen"]),
        (3, KINDS[::2]),
        pytest.param(1, KINDS, marks=pytest.mark.full),
        pytest.param(2, KINDS, marks=pytest.mark.full),
        pytest.param(4, KINDS[1::2], marks=pytest.mark.full),
        pytest.param(3, KINDS[1::2], marks=pytest.mark.full),
        pytest.param(4, KINDS[::2], marks=pytest.mark.full),
    ],
)
def test_shared_beginnings_are_exact(ranks: Ranks, size: int, kinds: list[str]) -> None:
    saved = compare(ranks, size, "llama", kinds)
    if size == 1:
        assert dict(zip(kinds, saved, strict=True))["sixteen"] == 15 * (len(QUESTION) - 1)


FAMILIES = {  # of which each has something of its own
    "mistral": "windows shorter than beginnings and endings",
    "gpt2": "learned positions",
    "llama_dynamic": "frequencies of the longest position",
    "gpt_neox": "a part of the head rotates",
    "GptOssForCausalLM": "sinks, windows and experts",
    "DeepseekV3ForCausalLM": "latent attention and experts",
    "Llama4ForCausalLM": "chunks, and temperatures by positions",
    "Gemma2ForCausalLM": "soft caps and windows",
    "qwen3_5": "gated delta rules",
    "kimi_linear": "delta rules with a decay for each key",
    "lfm2": "convolutions",
    "granite": "Mamba2",
}


LATER = ("kimi_linear", "gpt_neox", "Gemma2ForCausalLM", "lfm2")
LATER += ("DeepseekV3ForCausalLM", "GptOssForCausalLM", "granite")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in LATER)) for n in FAMILIES])
def test_families_are_exact(ranks: Ranks, name: str) -> None:
    saved = compare(ranks, 2, name, ["pairs", "a tree", "other masks"])
    assert min(saved) > 5


def test_which_tokens_are_joined() -> None:
    joined = join_texts(texts("abcde", "abcdxy", "abcd"), None, 1)
    assert joined is not None
    assert "".join(chr(96 + token) for token in joined.batch["input_ids"][0]) == "abcdedxyd"
    assert joined.parents == (-1, 0, 0, 0)
    assert joined.batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 3]]
    assert joined.places[2].tolist() == [0, 1, 2, 8, -1, -1]
    layout = SequenceLayout.for_batch([(0, 3, 5, 8, 9)], 1, parents=[joined.parents])
    assert layout.texts(0).tolist() == [[3, 3, 3, 1, 1, 1, 1, 1, 1]]
    assert joined.scored.tolist() == [[3, 3, 3, 1, 0, 1, 1, 0, 0]]


def test_documents_that_only_begin_with_one_token_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of packed documents begin with the same token: comparing them one by one would take seconds a pass."""
    compared = list[int]()
    common = joining._common

    def counted(values: Any, texts: Any, start: int) -> int:
        compared.append(len(texts))
        return common(values, texts, start)

    monkeypatch.setattr(joining, "_common", counted)
    size, count = 40, 50
    ids = torch.randint(1, 60, (1, size * count), generator=torch.Generator().manual_seed(0))
    ids[0, ::size] = 7
    batch = {"input_ids": ids, "position_ids": (torch.arange(size * count) % size)[None]}
    assert join_texts(batch, None, 8) is None
    assert not compared
    batch["input_ids"][0, 3 * size : 4 * size] = batch["input_ids"][0, :size]
    joined = join_texts(batch, None, 8)
    assert compared == [2]
    assert joined is not None
    assert joined.tokens == size * count - (size - 1)


@pytest.mark.parametrize(
    "settings",
    [{"attention_keep": 0.5}, {"attention_keep": 0.0, "layers_per_checkpoint": 2}, {"tiled_mlp": 4, "head_groups": 2}],
    ids=str,
)
def test_settings_of_memory_change_nothing(ranks: Ranks, settings: dict[str, Any]) -> None:
    memory = {"activation_offloading": 1.0, **settings}
    ranks(2).run(checkpointed, batch_of("several labels"), one_process("llama", batch_of("several labels")), memory)


def checkpointed(rank: int, size: int, batch: Any, wanted: Any, memory: dict[str, Any]) -> None:
    config = hf_burst.BurstConfig(share_prefixes=True, memory=hf_burst.Memory(**memory))
    model = models.patch(models.make_model("llama", torch.float64), config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with trainers.small_pages():
        loss = model(**batch).loss
        loss.backward()
    torch.testing.assert_close(loss, wanted["loss"], **CLOSE)
    for parameter, gradient in zip(model.parameters(), wanted["gradients"], strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad / size, gradient, **CLOSE)


def balance(rank: int, size: int, kind: str, counted: bool) -> None:
    """The load-balancing loss beside the whole batch in one process; `counted` as Trainer does it."""
    model, batch = test_experts.make_model("mixtral"), batch_of(kind)
    items = int((models.shifted(batch["labels"]) != IGNORED).sum())
    wanted = model(**batch, use_cache=False, **({"num_items_in_batch": torch.tensor(items)} if counted else {}))
    wanted.loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    models.patch(model, hf_burst.BurstConfig(share_prefixes=True))
    outputs = model(**batch, **({"num_items_in_batch": torch.tensor(items * size)} if counted else {}))
    if size == 1:
        for layer, expected_layer in zip(outputs.router_logits, wanted.router_logits, strict=True):
            real = batch["attention_mask"].flatten().bool()
            torch.testing.assert_close(layer[real], expected_layer[real], rtol=1e-6, atol=1e-6)
    else:
        assert outputs.router_logits is None
    loss = outputs.loss * (size if counted else 1)
    loss.backward()
    torch.testing.assert_close(outputs.aux_loss, wanted.aux_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-6, atol=1e-6)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        found = torch.zeros_like(gradient) if parameter.grad is None else parameter.grad
        if size > 1:
            dist.all_reduce(found)
        torch.testing.assert_close(found / size, gradient, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_routers_are_balanced_over_all_rows(ranks: Ranks, size: int) -> None:
    for kind in ("pairs", "a tree"):
        for counted in (False, True):
            ranks(size).run(balance, kind, counted)


def broken(what: str, *values: Any) -> Joined:
    """Joined texts whose shared tokens count once, or of whose endings the first one alone is predicted."""
    joined = Joined(*values)
    if what == "weights":
        return replace(joined, scored=joined.scored.clamp(max=1))
    scored = joined.scored.clone()
    scored[:, joined.places[1:, len(QUESTION) - 1]] = 0
    return replace(joined, scored=scored)


@pytest.mark.parametrize("what", ["weights", "endings"])
def test_tokens_that_count_too_seldom_are_noticed(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(joining, "Joined", partial(broken, what))
    batch = batch_of("several labels")
    with pytest.raises(AssertionError, match="several labels"):
        shared(0, 1, "llama", [("several labels", batch, one_process("llama", batch))], {})


def long_texts(length: int, endings: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, models.VOCABULARY, (endings, length + 20), generator=generator)
    ids[:, :length] = ids[0, :length].clone()
    ids[:, length] = torch.arange(1, endings + 1)
    return {"input_ids": ids, "labels": ids.clone()}


def tokens_of(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """How many tokens a model computes for a batch."""
    counts = models.counted(model)
    model(**batch)
    del model.get_input_embeddings().forward
    return sum(counts)


def test_what_auto_shares(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_burst")
    long, short = long_texts(300), long_texts(250)
    model = models.patch(models.make_model("llama")).train()
    assert tokens_of(model, long) == 299 + 3 * 21
    assert tokens_of(model, short) == short["input_ids"].numel(), "beginnings of fewer tokens than a kernel takes"
    assert tokens_of(model, long_texts(300, 1)) == 320
    assert "computed once: 362 tokens instead of 960." in caplog.text
    little = long_texts(300, 2)
    little = {name: torch.nn.functional.pad(value, (0, 900), value=3) for name, value in little.items()}
    assert tokens_of(model, little) == little["input_ids"].numel(), "few tokens would be saved"
    for config in (hf_burst.BurstConfig(share_prefixes=False), hf_burst.BurstConfig(share_prefixes=True)):
        other = models.patch(models.make_model("llama"), config).train()
        shares = config.share_prefixes is True
        assert (tokens_of(other, short) == short["input_ids"].numel()) == (not shares)


def test_dropout_draws_for_every_row_unless_it_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    from peft import LoraConfig, get_peft_model

    caplog.set_level(logging.INFO, "hf_burst")
    batch = long_texts(300)
    for share, tokens in (("auto", 960), (True, 362)):
        config = hf_burst.BurstConfig(share_prefixes=share)
        lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
        model = get_peft_model(models.patch(models.make_model("llama"), config), lora).train()
        assert tokens_of(model, batch) == tokens
        assert tokens_of(model.eval(), batch) == 362
    assert "computed one by one: dropout would draw once for all of them" in caplog.text


def test_what_is_not_shared_is_computed_row_by_row(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_burst")
    config = hf_burst.BurstConfig(share_prefixes=True)
    batch = long_texts(40)
    zamba = models.patch(models.make_model("zamba"), config)
    assert tokens_of(zamba, batch) == batch["input_ids"].numel()
    assert "one by one: the kernels of its recurrent layers begin with no state" in caplog.text
    llama = models.patch(models.make_model("llama"), config)
    embeds = llama.get_input_embeddings()(batch["input_ids"]).detach()
    assert llama(inputs_embeds=embeds, labels=batch["labels"]).loss.isfinite()
    bert = models.patch(models.make_model("bert"), config)
    assert tokens_of(bert, batch) == batch["input_ids"].numel()
    padded = left(texts("abcde", "abcdxy"))
    padded["labels"][:, 2] = padded["input_ids"][:, 2]  # which padding predicts
    assert join_texts(padded, None, 1) is None


@pytest.mark.parametrize("value", ["always", None, 1, "True"])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"share_prefixes is .*; it must be one of 'auto', True, False"):
        hf_burst.BurstConfig(share_prefixes=value)


def other_batches(rank: int, size: int, change: str) -> None:
    model = models.patch(models.make_model("llama"), hf_burst.BurstConfig(share_prefixes=True))
    batch = texts(*BATCHES["pairs" if rank and change == "texts" else "equal"])
    if rank and change == "labels":
        batch["labels"][0, 2:4] = -100
    if rank and change == "padding":
        batch = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in batch.items()}
        batch["labels"][:, -3:] = -100
    if change == "logits_to_keep":
        del batch["labels"]
        batch["logits_to_keep"] = torch.tensor([0, 99])
    model(**batch)


@pytest.mark.parametrize("change", ["texts", "labels", "padding"])
def test_ranks_with_other_texts_are_told(ranks: Ranks, change: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(other_batches, change)
    assert all(isinstance(error, RankMismatchError) for error in caught.value.errors)


def test_logits_that_are_not_there(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="a tensor of one or more indices"):
        ranks(2).run(other_batches, "logits_to_keep")


@pytest.mark.parametrize("keep", [0, 20, 28])
def test_logits_to_keep_beside_labels_are_those_of_one_process(keep: int) -> None:
    batch, plain = batch_of("several labels"), models.make_model("llama", torch.float64)
    model = models.patch(models.make_model("llama", torch.float64), hf_burst.BurstConfig(share_prefixes=True))
    if 0 < keep < batch["input_ids"].shape[1]:
        for either in (plain, model):
            with pytest.raises(ValueError, match="batch_size"):
                either(**batch, logits_to_keep=keep)
        return
    loss, wanted = (either(**batch, logits_to_keep=keep).loss for either in (model, plain))
    torch.testing.assert_close(loss, wanted.to(loss.dtype), **WITH_FP32)  # Transformers computes it in fp32


def test_noise_of_embeddings_is_that_of_rows() -> None:
    model = models.patch(models.make_model("llama"), hf_burst.BurstConfig(share_prefixes=True)).train()
    batch = texts("abcdef", "abcdeg")
    assert tokens_of(model, batch) < batch["input_ids"].numel()
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    assert tokens_of(model, batch) == batch["input_ids"].numel()


def test_a_cache_is_there_whatever_the_rows() -> None:
    ids, following = texts("abcdef", "abcdeg")["input_ids"], torch.tensor([[3], [4]])
    plain = models.make_model("llama").eval()
    model = models.patch(models.make_model("llama"), hf_burst.BurstConfig(share_prefixes=True)).eval()
    wanted, first = (either(input_ids=ids).past_key_values for either in (plain, model))
    wanted = plain(input_ids=following, past_key_values=wanted).logits
    torch.testing.assert_close(model(input_ids=following, past_key_values=first).logits, wanted)
    asked = {"input_ids": ids, "labels": ids}
    own, labelled = (model(**asked, **more) for more in ({}, {"use_cache": True}))
    assert own.past_key_values is None, "evaluation shares, and reads no cache"
    torch.testing.assert_close(labelled.loss, own.loss)
    torch.testing.assert_close(model(input_ids=following, past_key_values=labelled.past_key_values).logits, wanted)


def test_numbers_of_a_log_are_those_of_all_texts() -> None:
    layout = SequenceLayout.for_batch([(0, 5, 8, 12)], 2, parents=[(-1, 0, 0)])
    assert longest_of(layout) == 9
    assert (tokens_of_layout(layout) - layout.padding, given_tokens(layout)) == (12, 17)


def test_a_label_that_does_not_count_hides_no_beginning() -> None:
    batch = texts("abcdefghij", "abcdefghij", "abcdefxyzz")
    for place in range(4, 9):
        labels = batch["labels"].clone()
        labels[0, place] = -100
        joined = join_texts(batch | {"labels": labels}, None, 1)
        assert joined is not None
        assert joined.tokens == 16, place
    batch["labels"][0, 4] = 1
    assert join_texts(batch, None, 1) is None, "two labels for one token"


def test_generation_goes_on_as_ever() -> None:
    model = models.patch(models.make_model("llama"), hf_burst.BurstConfig(share_prefixes=True)).eval()
    ids = texts("abcdef", "abcdeg")["input_ids"]
    wanted = models.make_model("llama").eval().generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)


def sharded(rank: int, size: int, name: str, kind: str, wanted: dict[str, Any]) -> bool:
    """Batches that a collator joins and shards; whether it joined any."""
    batch = batch_of(kind)
    shard = hf_burst.shard_batch(batch, config=hf_burst.BurstConfig(share_prefixes=True))
    model = models.patch(models.make_model(name, torch.float64)).train()
    loss = model(**shard).loss
    loss.backward()
    close = CLOSE if name in models.NAMES else WITH_FP32
    torch.testing.assert_close(loss, wanted["loss"], **close)
    for parameter, gradient in zip(model.parameters(), wanted["gradients"], strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad / size, gradient, **close)
    return bool(shard["burst_batch"].layout.parents)


@pytest.mark.parametrize(
    ("kind", "joins"),
    [("pairs", True), pytest.param("sixteen", True, marks=pytest.mark.full), ("several labels", False)],
)
def test_batches_that_a_collator_joins(ranks: Ranks, kind: str, joins: bool) -> None:
    for name in ("llama", "qwen3_5"):
        assert ranks(3).run(sharded, name, kind, one_process(name, batch_of(kind))) == [joins] * 3


def test_joined_shards_for_a_model_that_cannot_fork() -> None:
    shard = hf_burst.shard_batch(batch_of("pairs"), config=hf_burst.BurstConfig(share_prefixes=True))
    with pytest.raises(BatchError, match=r"begin with no state. Leave share_prefixes=True out of the config"):
        models.patch(models.make_model("zamba"))(**shard)


@pytest.mark.slow
def test_compiled_models_share() -> None:
    model = models.patch(models.make_model("llama", torch.float64), hf_burst.BurstConfig(share_prefixes=True)).train()
    model.compile(backend="eager")
    for kind in ("several labels", "a tree"):
        wanted = one_process("llama", batch_of(kind))
        model.zero_grad()
        loss = model(**batch_of(kind)).loss
        loss.backward()
        torch.testing.assert_close(loss, wanted["loss"], **CLOSE)
        for parameter, gradient in zip(model.parameters(), wanted["gradients"], strict=True):
            torch.testing.assert_close(parameter.grad, gradient, **CLOSE)


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": IGNORED}
    return {
        name: torch.tensor([[*row[name], *[value] * (longest - len(row[name]))] for row in rows])
        for name, value in fill.items()
    }


def test_samples_of_several_texts() -> None:
    samples = [
        {"input_ids": [[1, 2, 3], [1, 2, 4, 5]], "labels": [[-100, 2, 3], [-100, -100, 4, 5]]},
        {"input_ids": [[6, 7]], "labels": [[6, 7]]},
    ]
    batch = hf_burst.GroupCollator(collate)(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [1, 2, 4, 5], [6, 7, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100], [-100, -100, 4, 5], [6, 7, -100, -100]]
    for sample, sentence in (
        ({"input_ids": [1, 2]}, "A sample holds {'input_ids': [1, 2]}"),
        ({"input_ids": [[1]], "prompt": "a text"}, "A sample holds {'input_ids': [[1]], 'prompt': 'a text'}"),
        ({"input_ids": [[1], [2]], "labels": [[1]]}, "A sample holds {'input_ids': [[1], [2]], 'labels': [[1]]}"),
        ({"input_ids": []}, "A sample holds {'input_ids': []}"),
    ):
        with pytest.raises(BatchError, match=re.escape(sentence)):
            hf_burst.GroupCollator(collate)([sample])


def test_other_dtypes_and_default_devices() -> None:
    batch = {name: value.int() for name, value in batch_of("a tree").items()}
    wanted = join_texts(batch_of("a tree"), None, 1)
    with torch.device("meta"):
        joined = join_texts(batch, None, 1)
    assert joined is not None
    assert wanted is not None
    assert joined.batch["input_ids"].dtype == torch.int32
    assert torch.equal(joined.batch["input_ids"].long(), wanted.batch["input_ids"])
    assert torch.equal(joined.batch["labels"].long(), wanted.batch["labels"])
    assert torch.equal(joined.places, wanted.places)


def test_logits_of_all_texts_are_counted(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="The logits of 56 tokens take"):
        ranks(2).run(gather_too_much)


def gather_too_much(rank: int, size: int) -> None:
    model = models.patch(models.make_model("llama"), hf_burst.BurstConfig(share_prefixes=True)).eval()
    ids = batch_of("pairs")["input_ids"]
    one = ids.numel() * models.VOCABULARY * 4 / 2**30
    with mock.patch("hf_burst.hf.parts.head.LOGITS_LIMIT_GIB", 0.9 * one), torch.no_grad():
        model(input_ids=ids)


def random_batch(choose: random.Random) -> dict[str, torch.Tensor]:
    """Texts of few letters, some with a common beginning: rows padded on a side, or documents of one row."""
    letters = "abc"[: choose.randint(1, 3)]
    words = ["".join(choose.choices(letters, k=choose.randint(1, 14))) for _ in range(choose.randint(2, 9))]
    first = "".join(choose.choices("abcdef", k=choose.randint(1, 12)))
    words = [first + word if choose.random() < 0.6 else word for word in words]
    words = ["".join(letter.upper() if choose.random() < 0.3 else letter for letter in word) for word in words]
    kind = choose.choice([texts, left, packed])
    if kind is packed:
        return packed(words)
    return texts(*words) if kind is texts else left(texts(*words))


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.full)])
def test_random_texts_are_exact(name: str) -> None:
    choose, batches = random.Random(0), list[Any]()
    while len(batches) < 12:
        batch = random_batch(choose)
        if (models.shifted(batch["labels"]) != IGNORED).any():
            batches.append(("random", batch, one_process(name, batch)))
    assert sum(saved > 0 for saved in shared(0, 1, name, batches, {})) > 5


def an_adapter_a_row(rank: int, size: int) -> None:
    """Rows of one beginning, each by an adapter of its own, or by a hook that has a value for it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    batch, names = texts(*BATCHES["pairs"]), ["first", "second"]
    settings = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(make_model("llama"), settings, "first").double()
    model.add_adapter("second", settings)
    model.double().eval()
    scales = torch.tensor([2.0, 3.0], dtype=torch.float64)[:, None, None]
    with torch.no_grad():
        by_adapters = model(**batch, adapter_names=names)
        layer = model.base_model.model.model.layers[0]
        handle = layer.register_forward_hook(lambda module, given, out: out * scales)
        by_hook = model(**batch)
        handle.remove()
        models.patch(model, hf_burst.BurstConfig(share_prefixes=True))
        one = model(**batch)
        found = model(**batch, adapter_names=names)
        layer.register_forward_hook(lambda module, given, out: out * scales)
        hooked = model(**batch)
    part = getattr(model.base_model.model, PATCH).tokens.beginnings
    assert "joined" in part.logged, "without either they are shared"
    real = batch["attention_mask"].bool()
    for output, wanted in ((found, by_adapters), (hooked, by_hook)):
        torch.testing.assert_close(output.loss, wanted.loss.double(), **WITH_FP32)
        torch.testing.assert_close(output.logits[real], wanted.logits[real], **CLOSE)
    assert not torch.isclose(one.loss, found.loss)


@pytest.mark.parametrize("size", [1, 2])
def test_values_of_rows_see_every_row(ranks: Ranks, size: int) -> None:
    ranks(2).run(an_adapter_a_row) if size == 2 else an_adapter_a_row(0, 1)


def test_modules_without_hooks_cost_no_calls() -> None:
    """Hooks come at any time, so every pass that shares something looks for them in all modules."""
    model, calls = make_model("llama"), list[str]()
    inside = shared_beginnings.__file__

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == inside:
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        assert not shared_beginnings._hooked(ModelView(model))
    finally:
        sys.setprofile(None)
    assert calls == ["_hooked"]


def hooked_on_one(rank: int, size: int) -> None:
    model = models.patch(make_model("llama").eval(), hf_burst.BurstConfig(share_prefixes=True))
    if rank == 0:
        model.model.layers[0].register_forward_hook(lambda module, given, out: None)
    model(**texts(*BATCHES["pairs"]))


def test_a_hook_on_one_rank_is_named(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"hooks that may have a value for each row.*Register the same hooks inside"):
        ranks(2).run(hooked_on_one)
