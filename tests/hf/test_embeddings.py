"""Embeddings of rows whose tokens lie on 1 to 4 ranks, with a contrastive loss, beside one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import PreTrainedModel

import hf_burst
from hf_burst.check.compare import Double
from hf_burst.errors import BatchError, ConfigError, RankMismatchError
from recipes.tiny_models import tiny_model
from tests.support import models
from tests.support.gradients import Result, assert_equal
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
Batch = dict[str, torch.Tensor]
MODELS = ("LlamaModel", "MistralModel", "Qwen3_5TextModel", "ModernBertModel", "BertModel")
POOLINGS = ("first", "last", "mean")


def make(name: str) -> PreTrainedModel:
    torch.set_default_dtype(torch.float64)
    try:
        return tiny_model(name)
    finally:
        torch.set_default_dtype(torch.float32)


def rows(model: PreTrainedModel, padded: bool) -> Batch:
    """Three texts, of 23 tokens, or of 23, 1 and 14 with padding on the right or on either side."""
    ids = torch.randint(5, 40, (3, 23), generator=torch.Generator().manual_seed(1))
    if not padded:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1, 1:], mask[2, :4], mask[2, 18:] = 0, 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def alone(model: PreTrainedModel, batch: Batch, pooling: str) -> torch.Tensor:
    """Pooled by hand, row by row."""
    options = {"use_cache": False} if "Bert" not in type(model).__name__ else {}
    states, found = model(**batch, **options).last_hidden_state, []
    for row, state in enumerate(states):
        real = state[batch["attention_mask"][row].bool()] if "attention_mask" in batch else state
        found.append({"first": real[0], "last": real[-1], "mean": real.mean(0)}[pooling])
    return torch.stack(found)


def result(model: PreTrainedModel, embed: Callable[..., torch.Tensor], batch: Batch, pooling: str) -> Result:
    """A contrastive loss of the rows, the embeddings, and all gradients."""
    with Double():
        vectors = embed(model, batch, pooling)
        near = functional.normalize(vectors, dim=-1)
        loss = functional.cross_entropy(near @ near.flip(0).T / 0.1, torch.arange(len(near)))
        loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), {"embeddings": vectors.detach(), **gradients}


def over_ranks(rank: int, size: int, name: str, batch: Batch, pooling: str) -> Result:
    return result(models.patch(make(name)), hf_burst.embeddings, batch, pooling)


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MODELS)
def test_embeddings_and_gradients_equal_one_process(ranks: Ranks, name: str, size: int) -> None:
    plain = make(name)
    for pooling in POOLINGS:
        for padded in (False, True):
            plain.zero_grad()
            batch = rows(plain, padded)
            expected = result(plain, alone, batch, pooling)
            assert_equal(ranks(size).run(over_ranks, name, batch, pooling), expected)


def test_sums_are_wide_under_autocast() -> None:
    model = models.patch(make("LlamaModel").float())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = hf_burst.embeddings(model, PLAIN, "mean")
        states = model(**PLAIN).last_hidden_state
    torch.testing.assert_close(found, states.float().mean(1))


def wrapped(rank: int, size: int, how: str, batch: Batch) -> Result:
    """Through a data-parallel wrapper, which averages gradients."""
    plain = models.patch(make("LlamaModel").train())
    if how == "ddp":
        model: Any = torch.nn.parallel.DistributedDataParallel(plain)
    else:
        mesh = init_device_mesh("cpu", (size,))
        for layer in plain.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(plain, mesh=mesh)
    loss, found = result(model, hf_burst.embeddings, batch, "mean")
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return loss, {name.removeprefix("module."): value for name, value in whole.items()}


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_through_wrappers(ranks: Ranks, how: str) -> None:
    plain = make("LlamaModel")
    batch = rows(plain, padded=True)
    assert_equal(ranks(2).run(wrapped, how, batch), result(plain, alone, batch, "mean"))


def gathers(rank: int, size: int) -> list[int]:
    """The numbers that a rank sends, by message."""
    sent = list[int]()
    gather, reduce = torch.distributed.all_gather, torch.distributed.all_reduce
    model = models.patch(make("LlamaModel"))
    batch = {"input_ids": torch.arange(640).remainder(40)[None]}

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent.extend(value.numel() for value in args if isinstance(value, torch.Tensor))
            return function(*args, **kwargs)

        return call

    torch.distributed.all_gather, torch.distributed.all_reduce = noted(gather), noted(reduce)
    try:
        with torch.no_grad():
            hf_burst.embeddings(model, {**batch, "output_hidden_states": True})
            vectors = max(sent)
            sent.clear()
            model(**batch)
    finally:
        torch.distributed.all_gather, torch.distributed.all_reduce = gather, reduce
    return [vectors, max(sent)]


def test_hidden_states_are_not_gathered(ranks: Ranks) -> None:
    for vectors, states in ranks(2).run(gathers):
        assert states >= 320 * 32, "of the rank's tokens, where last_hidden_state is asked for"
        assert vectors < 320


def given(rank: int, size: int, name: str, batch: Batch, poolings: tuple[str, ...]) -> None:
    hf_burst.embeddings(models.patch(make(name)), batch, poolings[rank % len(poolings)])


PACKED = {"input_ids": torch.ones(1, 8, dtype=torch.long), "position_ids": torch.arange(8).remainder(4)[None]}
EMPTY = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": torch.tensor([[1] * 8, [0] * 8])}
PLAIN = {"input_ids": torch.ones(1, 8, dtype=torch.long)}


@pytest.mark.parametrize(
    ("name", "batch", "poolings", "error", "sentence"),
    [
        ("LlamaModel", PACKED, ("last",), BatchError, "packs documents"),
        ("LlamaModel", EMPTY, ("mean",), BatchError, "hides all of row 1"),
        ("LlamaModel", PLAIN, ("max",), ConfigError, "pooling='max'; it is one of"),
        ("LlamaModel", PLAIN, ("last", "max"), (ConfigError, RankMismatchError), "pooling='max'; it is one of"),
        ("LlamaModel", PLAIN, ("last", "mean"), RankMismatchError, "pooling of embeddings"),
        ("LlamaForCausalLM", PLAIN, ("last",), ConfigError, "AutoModel.from_pretrained"),
        ("LlamaForSequenceClassification", PLAIN, ("last",), ConfigError, "AutoModel.from_pretrained"),
    ],
)
def test_what_is_refused(
    ranks: Ranks, name: str, batch: Batch, poolings: tuple[str, ...], error: Any, sentence: str
) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(given, name, batch, poolings)
    for problem in caught.value.errors:
        assert isinstance(problem, error)
        assert sentence in str(problem)


def test_a_model_that_is_not_patched() -> None:
    with pytest.raises(ConfigError, match="patch_model"):
        hf_burst.embeddings(make("LlamaModel"), PLAIN)
