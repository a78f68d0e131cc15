"""Rows that begin alike, computed once: everything is as if each row had been computed by itself."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_burst
from hf_burst.hf.batches.joining import join_texts
from hf_burst.hf.groups import PATCH
from recipes.tiny_models import tiny_model
from tests.support import models
from tests.support.ranks import RankPool

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


def packed() -> dict[str, torch.Tensor]:
    """Documents of one row, some of which begin alike."""
    documents = ["abcdefgh", "zzz", "abcdefxyz", "abcd", "q", "abcdefxyw"]
    ids = torch.tensor([[ord(letter) - 96 for document in documents for letter in document]])
    positions = torch.tensor([[place for document in documents for place in range(len(document))]])
    labels = ids.masked_fill(positions == 0, IGNORED)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    if kind == "packed":
        return packed()
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
    embeddings, tokens = model.get_input_embeddings(), list[int]()
    embeddings.register_forward_hook(lambda _, given, out: tokens.append(out.shape[:2].numel()))
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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shared_beginnings_are_exact(ranks: Ranks, size: int) -> None:
    saved = compare(ranks, size, "llama", KINDS)
    if size == 1:
        assert dict(zip(KINDS, saved, strict=True))["sixteen"] == 15 * (len(QUESTION) - 1)


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


@pytest.mark.parametrize("name", FAMILIES)
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
    assert joined.texts.tolist() == [[3, 3, 3, 1, 1, 1, 1, 1, 1]]
    assert joined.scored.tolist() == [[3, 3, 3, 1, 0, 1, 1, 0, 0]]
