"""The load-balancing loss of mixtures of experts over several ranks beside one process."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import hf_burst
from hf_burst.errors import UnsupportedModelError
from tests.support import models
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
SIZES = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, head_dim=8, moe_intermediate_size=16)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, head_dim=8, sliding_window=6)),
}


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # so that tokens choose different experts, by a margin
            torch.nn.init.normal_(parameter, std=0.15)
    return model.train()


def compare(rank: int, size: int, name: str, kind: str, explicit: bool, counted: bool) -> None:
    """Against the whole batch in one process; `counted`: as Trainer does, with `num_items_in_batch`."""
    model, batch = make_model(name), models.make_batch(kind)
    items = int((models.shifted(batch["labels"]) != -100).sum())
    wanted = model(**batch, use_cache=False, **({"num_items_in_batch": torch.tensor(items)} if counted else {}))
    wanted.loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    unbalanced = wanted.loss - 0.5 * wanted.aux_loss
    assert (wanted.loss - unbalanced).abs() > 0.1, "the load-balancing loss must be felt"
    model.zero_grad()
    models.patch(model)
    if counted:  # full batches are counted by every rank
        batch["num_items_in_batch"] = torch.tensor(items * (1 if explicit else size))
    outputs = model(**(hf_burst.shard_batch(batch) if explicit else batch))
    loss = outputs.loss * (size if counted else 1)
    loss.backward()
    torch.testing.assert_close(outputs.aux_loss, wanted.aux_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-6, atol=1e-6)
    assert outputs.router_logits is None or size == 1
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        found = torch.zeros_like(gradient) if parameter.grad is None else parameter.grad
        dist.all_reduce(found)
        torch.testing.assert_close(found / size, gradient, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("explicit", "kind", "name"),
    [
        pytest.param(
            explicit,
            kind,
            name,
            marks=[pytest.mark.full] * (place == 1 + explicit or (explicit + place + number) % 3 > 0),
        )
        for explicit in (False, True)
        for place, kind in enumerate(("plain", "right", "left"))
        for number, name in enumerate(MODELS)
    ],
)
def test_the_load_balancing_loss_is_that_of_the_whole_batch(ranks: Ranks, name: str, kind: str, explicit: bool) -> None:
    for counted in (False, True):
        ranks(2).run(compare, name, kind, explicit, counted)


def test_over_three_ranks(ranks: Ranks) -> None:
    ranks(3).run(compare, "mixtral", "left", False, True)


def ask_for_another_balance(rank: int, size: int) -> None:
    model = make_model("mixtral")
    model.config.output_router_logits = False
    del model.num_experts_per_tok
    models.patch(model)
    batch = models.make_batch("plain")
    assert model(**batch).loss.isfinite()
    model(**batch, output_router_logits=rank == 0)


def test_a_balance_that_is_not_known_is_refused_on_every_rank(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(ask_for_another_balance)
    first, second = caught.value.errors
    assert isinstance(first, UnsupportedModelError)
    assert "output_router_logits" in str(first)
    assert "output_router_logits" in str(second)
