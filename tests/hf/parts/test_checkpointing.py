"""Checkpointed layers that remember their attention: the same gradients, and no more attention than was asked for."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_burst
from hf_burst.attention import AttentionCache, AttentionRequest, SequenceLayout
from hf_burst.errors import ConfigError, KernelError, UnsupportedModelError
from hf_burst.hf import context
from hf_burst.hf.parts import checkpointing
from hf_burst.hf.spread.value import Spread
from hf_burst.kernels import Scores
from hf_burst.layers import linear_loss
from hf_burst.ring import ShardedAttention
from tests.hf.test_patch import group_mean
from tests.support import models
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_models import tiny_model

Ranks = Callable[[int], RankPool]
LENGTH = 43


@contextmanager
def counted() -> Iterator[list[int]]:
    """The queries of every attention that is computed."""
    queries: list[int] = []
    forward = ShardedAttention.forward

    def counting(self, exchange, q, *others):
        queries.append(q.shape[1])
        return forward(self, exchange, q, *others)

    with mock.patch.object(ShardedAttention, "forward", counting):
        yield queries


def expected_gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    models.plain_loss(model, batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def keep_parts(
    rank: int,
    size: int,
    name: str,
    kinds: tuple[str, ...],
    settings: list[tuple[str, float]],
    per_host: int | None = None,
) -> None:
    for kind in kinds:
        batch = models.make_batch(kind, LENGTH)
        model = models.make_model(name, torch.float64).train()
        expected_loss, wanted = models.plain_loss(model, batch).detach(), expected_gradients(model, batch)
        model.gradient_checkpointing_enable()
        for schedule, keep in settings:
            config = hf_burst.BurstConfig(schedule=schedule, memory=hf_burst.Memory(attention_keep=keep))
            models.patch(model, config)
            for given in (batch, hf_burst.shard_batch(batch, config=config))[: 1 if kind == "packed" else 2]:
                model.zero_grad()
                with counted() as queries, models.hosts_of(per_host):
                    loss = model(**given).loss
                    again = [round(rows * (1 - keep)) for rows in queries if keep < 1]
                    loss.backward()
                torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-10, atol=1e-10)
                assert len(queries) == (2 if keep == 1 else 4)
                assert queries[2:] == again, (schedule, keep, queries)
                for found, gradient in zip(group_mean(model), wanted, strict=True):
                    torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-10)
            assert context.current() is None
            hf_burst.unpatch_model(model)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 3))])
def test_what_is_kept_is_not_computed_again(ranks: Ranks, size: int) -> None:
    if size == 1:
        keep_parts(0, 1, "llama", ("plain", "packed"), [("auto", keep) for keep in (0.0, 0.25, 0.5, 0.75, 1.0)])
    elif size == 2:
        settings = [("auto", 0.0), ("kv_ring", 1.0), ("burst", 0.5), ("ulysses", 1.0), ("ulysses", 0.75)]
        ranks(2).run(keep_parts, "llama", ("left", "packed"), settings)
    else:
        ranks(3).run(keep_parts, "llama", ("packed",), [("burst", 1.0), ("burst", 0.75), ("kv_ring", 0.25)])


def test_windows_and_products(ranks: Ranks) -> None:
    ranks(2).run(keep_parts, "mistral", ("packed",), [("kv_ring", 0.5)])
    ranks(4).run(keep_parts, "gpt2", ("right",), [("ulysses_2+burst", 1.0), ("ulysses_2+kv_ring", 0.5)])


def odd_uses(rank: int, size: int) -> None:
    """Several graphs at once, a graph that is run twice, passes without one, a pass that fails."""
    batches = [models.make_batch("plain", LENGTH, seed) for seed in range(2)]
    model = models.make_model("llama", torch.float64).train()
    wanted = [expected_gradients(copy.deepcopy(model), batch) for batch in batches]
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(attention_keep=0.5)))
    model.gradient_checkpointing_enable()

    def check(index: int, times: int = 1) -> None:
        for found, gradient in zip(group_mean(model), wanted[index], strict=True):
            torch.testing.assert_close(found, times * gradient, rtol=1e-10, atol=1e-10)
        model.zero_grad()

    losses = [model(**batch).loss for batch in batches]
    with torch.no_grad():
        model(**batches[1])
        model.eval()(**batches[1])
        model.train()
    assert context.current() is None
    with (
        mock.patch.object(LlamaDecoderLayer, "forward", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        model(**batches[0])
    for index, loss in enumerate(losses):
        loss.backward(retain_graph=True)
        check(index)
    with counted() as queries:
        losses[0].backward()
        assert len(queries) == 2
    check(0)
    with torch.no_grad():
        model(**batches[0])
    assert context.current() is None, "a pass ends the interrupted one"


def test_graphs_and_failures_leave_nothing_behind(ranks: Ranks) -> None:
    odd_uses(0, 1)
    ranks(2).run(odd_uses)


def policy(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def wrap_layers(model) -> None:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)


SELECTIVE = partial(create_selective_checkpoint_contexts, policy)
SWITCHES = {
    "not reentrant": (lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}), 2),
    "reentrant": (lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}), 4),
    "selective": (
        lambda model: model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": SELECTIVE}),
        2,
    ),
    "wrapped": (wrap_layers, 2),
    "none": (lambda model: None, 2),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_however_checkpointing_is_switched_on(switch: str) -> None:
    batch = models.make_batch("packed", LENGTH)
    model = models.make_model("llama", torch.float64).train()
    wanted = expected_gradients(model, batch)
    model.zero_grad()
    models.patch(model)
    turn_on, runs = SWITCHES[switch]
    turn_on(model)
    before = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    with counted() as queries:
        model(**batch).loss.backward()
    assert len(queries) == runs
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-10)
    hf_burst.unpatch_model(model)
    assert [vars(module).get("_gradient_checkpointing_func") for module in model.modules()] == before


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "runs"), [(1.0, 2), pytest.param(0.5, 4, marks=pytest.mark.full), (0.0, 4)])
def test_under_torch_compile_it_is_all_or_nothing(keep: float, runs: int) -> None:
    torch._dynamo.reset()
    batch = models.make_batch("packed", LENGTH)
    model = models.make_model("llama", torch.float64).train()
    wanted = expected_gradients(model, batch)
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(attention_keep=keep)))
    model.gradient_checkpointing_enable()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        with counted() as queries, mock.patch.object(linear_loss, "_LOGITS", 7 * models.VOCABULARY):
            outputs = compiled(**batch)
            outputs.loss.backward()
        assert isinstance(outputs.logits, Spread)
        assert len(queries) == runs
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-10)


def test_a_copy_of_a_model_remembers_by_itself() -> None:
    batch = models.make_batch("plain", LENGTH)
    model = models.patch(models.make_model("llama", torch.float64).train())
    model.gradient_checkpointing_enable()
    model(**batch).loss.backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    with counted() as queries:
        twin(**batch).loss.backward()
    assert len(queries) == 2
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def train_for_twenty_steps(rank: int, size: int, keep: float | None) -> list[float]:
    model = models.make_model("llama", torch.float64).train()
    if keep is not None:
        models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(attention_keep=keep)))
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(20):
        batch = models.make_batch("packed" if step % 2 else "plain", LENGTH + step, seed=step % 3)
        loss = models.plain_loss(model, batch) if keep is None else model(**batch).loss
        loss.backward()
        for parameter, gradient in zip(model.parameters(), group_mean(model), strict=True):
            parameter.grad.copy_(gradient)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_twenty_steps_have_the_losses_of_one_process(ranks: Ranks) -> None:
    wanted = train_for_twenty_steps(0, 1, None)
    assert wanted[-1] < wanted[0] - 1
    with mock.patch.object(linear_loss, "_LOGITS", 7 * models.VOCABULARY):
        found = [train_for_twenty_steps(0, 1, 0.75), *ranks(2).run(train_for_twenty_steps, 0.5)]
    for losses in found:
        assert losses == pytest.approx(wanted, rel=1e-8)


def cut_otherwise(rank: int, size: int) -> None:
    model = models.patch(
        models.make_model("llama").train(), hf_burst.BurstConfig(memory=hf_burst.Memory(attention_keep=0.75))
    )
    model.gradient_checkpointing_enable()
    model(**hf_burst.shard_batch(models.make_batch("plain")))


def one_checkpoints(rank: int, size: int) -> None:
    model = models.patch(models.make_model("llama").train())
    if rank:
        model.gradient_checkpointing_enable()
    model(**models.make_batch("plain"))


def checkpoint_other_layers(rank: int, size: int) -> None:
    model = models.patch(models.make_model("llama").train())
    model.gradient_checkpointing_enable()
    model.model.layers[0].gradient_checkpointing = rank == 0
    model(**models.make_batch("plain"))


def test_attention_without_a_graph_is_not_remembered() -> None:
    cache, q = AttentionCache(1.0), torch.randn(1, 8, 2, 16, dtype=torch.float64, requires_grad=True)
    layout = SequenceLayout.for_batch([(0, 8)], 1).encode()
    settings = (None, layout, AttentionRequest(scores=Scores(0.25), schedule="kv_ring"))
    outs = []
    for start in (None, 0):
        cache.position = start
        with torch.no_grad():
            cache.attention(2 * q, q, q, *settings)
        outs.append(cache.attention(q, q, q, *settings))
    assert [entry is None for entry in cache.entries] == [True, False]
    assert torch.equal(*outs)
    cache.position = 0
    with pytest.raises(KernelError, match="in another order"):
        cache.attention(q[:, :4], q[:, :4], q[:, :4], *settings)
    cache.position = 1
    with torch.no_grad():
        outs[0].mul_(2)
    with pytest.raises(KernelError, match="in place"):
        cache.attention(q, q, q, *settings)


def test_what_cannot_be_kept_is_an_error_on_every_rank(ranks: Ranks) -> None:
    ranks(2).run(cut_otherwise)  # all is kept
    with pytest.raises(RankError, match="activation checkpointing") as caught:
        ranks(2).run(one_checkpoints)
    assert all(error is not None for error in caught.value.errors)
    with pytest.raises(RankError, match="2 modules, 2 of them keep") as caught:
        ranks(2).run(checkpoint_other_layers)
    assert all(error is not None for error in caught.value.errors)
    encoder = models.make_model("bert")
    before = encoder.config._attn_implementation
    with pytest.raises(ConfigError, match="sees the rest"):
        models.patch(encoder, hf_burst.BurstConfig(memory=hf_burst.Memory(attention_keep=0.5)))
    assert encoder.config._attn_implementation == before, "nothing was changed"
    with pytest.raises(ConfigError, match=r"0\.25, 0\.5"):
        hf_burst.BurstConfig(memory=hf_burst.Memory(attention_keep=0.3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_reentrant_checkpoints_would_lose_gradients_of_keys_that_layers_share(reentrant: bool) -> None:
    model = models.patch(tiny_model("Gemma4ForCausalLM").train())
    assert any(layer.self_attn.is_kv_shared_layer for layer in model.model.layers)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with pytest.raises(ConfigError, match="take keys of others") if reentrant else nullcontext():
        model(**models.make_batch("packed", LENGTH)).loss.backward()


def test_layers_do_not_run_again_on_a_model_that_was_unpatched() -> None:
    model = models.patch(models.make_model("llama").train())
    model.gradient_checkpointing_enable()
    loss = model(**models.make_batch("packed", LENGTH)).loss
    hf_burst.unpatch_model(model)
    with pytest.raises(UnsupportedModelError, match="was unpatched before a backward pass"):
        loss.backward()


def test_what_is_remembered_lives_as_long_as_the_graph() -> None:
    batch = models.make_batch("plain", LENGTH)
    model = models.patch(models.make_model("llama").train())
    model.gradient_checkpointing_enable()
    made: list[weakref.ref[AttentionCache]] = []

    def make(*arguments: Any) -> AttentionCache:
        cache = AttentionCache(*arguments)
        made.append(weakref.ref(cache))
        return cache

    with mock.patch.object(checkpointing, "AttentionCache", make):
        loss = model(**batch).loss
    gc.collect()
    assert [ref() is not None for ref in made] == [True, True]
    loss.backward()
    del loss
    gc.collect()
    assert [ref() is not None for ref in made] == [False, False]
