"""Dropout over several ranks: masks of each rank's own, the outer random stream in step, runs that can be repeated."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hf_burst
from hf_burst.attention import ContextGroup
from hf_burst.errors import RankMismatchError, UnsupportedModelError
from hf_burst.hf.forward_pass import random_rates
from hf_burst.hf.parts.dropout import DropoutStreams, check_shared_dropout
from tests.support import models
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
RATE = 0.3


def gpt2_with(rate: float) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": models.VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=rate, embd_pdrop=rate)).train()


def llama_with_lora(rate: float, patch_first: bool = True) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = models.make_model("llama")
    if patch_first:
        models.patch(model)
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=rate)
    model = get_peft_model(model, settings)
    return (model if patch_first else models.patch(model)).train()


def kept_by(model: nn.Module) -> dict[str, torch.Tensor]:
    """What each dropout layer keeps of its input in the forward passes to come."""
    kept: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, given, out, path=path: kept.update({path: (out != 0).detach()}))
    return kept


def gathered(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def draw_masks(rank: int, size: int) -> None:
    batch = models.make_batch("packed", 397)
    for model in (
        models.patch(gpt2_with(RATE)),
        llama_with_lora(RATE),
        llama_with_lora(RATE, patch_first=False),
    ):
        kept = kept_by(model)
        seen = []
        for seed, given in ((7, batch), (7, batch), (7, hf_burst.shard_batch(batch)), (None, batch)):
            if seed is not None:
                torch.manual_seed(seed)
            loss = model(**given).loss
            seen.append((loss.item(), {path: mask.clone() for path, mask in kept.items()}))
            states = gathered((torch.get_rng_state(), torch.initial_seed()))
            assert all(torch.equal(state, states[0][0]) for state, _ in states), "the ranks' streams fell out of step"
            assert {seed for _, seed in states} == {7}
        first = seen[0][1]
        assert len(first) >= 4
        for loss, again in seen[1:3]:
            assert loss == seen[0][0]
            assert all(torch.equal(again[path], mask) for path, mask in first.items())
        assert not any(torch.equal(seen[3][1][path], mask) for path, mask in first.items()), "a step repeats another"
        for path, mask in first.items():
            masks = gathered(mask)
            for one, other in [(a, b) for a in range(size) for b in range(a)]:
                agreement = (masks[one] == masks[other]).double().mean().item()
                expected = RATE**2 + (1 - RATE) ** 2
                assert abs(agreement - expected) < 5 * (expected * (1 - expected) / mask.numel()) ** 0.5, path
            share = torch.stack(masks).double().mean().item()
            assert abs(share - (1 - RATE)) < 5 * (RATE * (1 - RATE) / (size * mask.numel())) ** 0.5, path


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_masks_are_the_ranks_own_and_can_be_repeated(ranks: Ranks, size: int) -> None:
    ranks(size).run(draw_masks)


class Broken(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def leave_the_stream_alone(rank: int, size: int, compiled: bool) -> None:
    batch = models.make_batch("plain")
    for model, training in ((gpt2_with(0.0), True), (gpt2_with(RATE), False), (models.make_model("llama"), True)):
        models.patch(model).train(training)
        state = torch.get_rng_state()
        model(**batch)
        assert torch.equal(torch.get_rng_state(), state)
    model = models.patch(gpt2_with(RATE))
    model.transformer.ln_f = Broken()
    torch.manual_seed(3)
    torch.randint(2**63 - 1, ())
    state = torch.get_rng_state()
    if compiled:
        model.compile(backend="eager")
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="broken"):
        model(**batch)
    assert torch.equal(torch.get_rng_state(), state), "an error in the forward pass keeps the stream"
    hf_burst.unpatch_model(model)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    model = models.patch(gpt2_with(RATE))
    model.transformer.ln_f.register_forward_pre_hook(interrupt)
    torch.manual_seed(3)
    with pytest.raises(KeyboardInterrupt):
        model(**batch)
    hf_burst.unpatch_model(model)
    assert torch.equal(torch.get_rng_state(), state), "a pass that was interrupted ends with the patch"


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_outer_stream_is_left_alone(ranks: Ranks, compiled: bool) -> None:
    ranks(2).run(leave_the_stream_alone, compiled)


def train_with_checkpointing(rank: int, size: int) -> None:
    batch = models.make_batch("packed")
    gradients = []
    for build in (lambda: models.patch(gpt2_with(RATE)), lambda: llama_with_lora(RATE)):
        for checkpointing, seed in ((False, 5), (True, 5), (True, 6)):
            model = build()
            if checkpointing:
                model.gradient_checkpointing_enable()
                model.enable_input_require_grads()
            torch.manual_seed(seed)
            model(**batch).loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
            states = gathered(torch.get_rng_state())
            assert torch.equal(states[0], states[1])
        plain, recomputed, other = gradients[-3:]
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-7)
        assert max(float((a - b).abs().max()) for a, b in zip(plain, other, strict=True)) > 1e-4


def test_checkpointing_draws_the_same_masks_again(ranks: Ranks) -> None:
    ranks(2).run(train_with_checkpointing)


class Functional(nn.Module):
    """Dropout as OPT and Starcoder2 have it: a function, and its rate an attribute."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, RATE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, getattr(self, self.name), self.training)


def drop_by_function(rank: int, size: int, name: str) -> None:
    module, part = Functional(name), DropoutStreams()
    rates, group = list(random_rates(module.modules())), ContextGroup.from_mesh(None)
    run = SimpleNamespace(call=SimpleNamespace(random_rates=rates), group=group, seed=0)
    torch.manual_seed(1)
    x = torch.ones(200)
    part.begin(run)
    masks = gathered(module(x))
    part.end()
    assert not torch.equal(*masks)
    torch.manual_seed(1)
    masks = gathered(module(x))
    assert torch.equal(*masks), "a call that is not sharded draws as ever"
    part.begin(run)
    torch.manual_seed(2)
    part.end()
    assert torch.initial_seed() == 2, "a pass was interrupted, and the user seeds anew"


@pytest.mark.parametrize("name", ["dropout", "resid_pdrop", "residual_dropout", "jitter_noise"])
def test_functional_dropout_is_seen(ranks: Ranks, name: str) -> None:
    ranks(2).run(drop_by_function, name)


def refuse_shared(rank: int, size: int) -> None:
    from peft import BOFTConfig, LoHaConfig, LoKrConfig, OFTConfig, get_peft_model

    batch = models.make_batch("plain")
    for settings in (
        LoHaConfig(r=2, target_modules=["q_proj"], rank_dropout=0.5),
        LoHaConfig(r=2, target_modules=["q_proj"], module_dropout=0.5),
        LoKrConfig(r=2, target_modules=["q_proj"], rank_dropout=0.5),
        OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"], module_dropout=0.5),
        BOFTConfig(boft_block_size=4, target_modules=["q_proj"], boft_dropout=0.5),
    ):
        model = get_peft_model(models.patch(models.make_model("llama")), settings)
        model.eval()(**batch)
        with pytest.raises((UnsupportedModelError, RankMismatchError), match="for a whole sequence"):
            model.train()(**batch)


def test_dropout_of_layers_and_weights_is_refused(ranks: Ranks) -> None:
    ranks(2).run(refuse_shared)
    model = nn.Linear(2, 2)
    model.layerdrop = 0.1
    with pytest.raises(UnsupportedModelError, match=r"layerdrop=0\.1"):
        check_shared_dropout(random_rates(model.modules()))
    check_shared_dropout(random_rates(model.eval().modules()))


def resume(rank: int, size: int) -> None:
    """Four steps, and the last two of them again from what a checkpoint holds: weights and the random state."""
    model = models.patch(gpt2_with(RATE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(4)
    saved, ends = None, []
    for step in (0, 1, 2, 3, 2, 3):
        if step == 2 and saved is None:
            saved = (copy.deepcopy(model.state_dict()), torch.get_rng_state())
        elif step == 2:
            model.load_state_dict(saved[0])
            torch.set_rng_state(saved[1])
        model(**models.make_batch("packed", seed=step)).loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_attention_dropout_of_any_name_is_refused() -> None:
    model = models.patch(models.make_model("llama"))
    model.model.layers[1].self_attn.attention_dropout = 0.1
    model.eval()(**models.make_batch("plain"))
    with pytest.raises(UnsupportedModelError, match="drops attention weights"):
        model.train()(**models.make_batch("plain"))


def test_a_resumed_run_draws_the_same_masks(ranks: Ranks) -> None:
    ranks(2).run(resume)
