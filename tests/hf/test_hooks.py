"""Forward hooks of the user on a patched model and on its head: served as in plain Transformers, or refused."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_forward_hook

import hf_burst
from hf_burst.errors import ConfigError
from hf_burst.hf.spread.value import Spread
from tests.support import models
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]


def scale_tensors(module: nn.Module, args: Any, output: Any) -> Any:
    """A hook that acts on tensors only."""
    return output * 0.5 if isinstance(output, torch.Tensor) else output


def compute(module: nn.Module, args: Any, output: Any) -> Any:
    """A hook that computes with what it is given."""
    return output - output.mean(-1, keepdim=True) + torch.log1p(output.abs())


def hook_head(model: nn.Module, hook: Callable[..., Any]) -> nn.Module:
    model.lm_head.register_forward_hook(hook)
    return model


def adapted_head(model: nn.Module, hook: Callable[..., Any], before: bool = False) -> nn.Module:
    """A hook on the linear layer inside of an adapted head, or one before it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    adapted = get_peft_model(model, settings).double()
    layer = adapted.base_model.model.lm_head.base_layer
    layer.register_forward_pre_hook(hook) if before else layer.register_forward_hook(hook)
    return adapted


def losses_with_hook(
    rank: int, size: int, hook: Callable[..., Any], attach: Callable[..., nn.Module], patch_first: bool
) -> None:
    """Loss and gradients of a model with a hook on its head, patched and in one process."""
    batch = models.make_batch("plain")
    plain = attach(models.make_model("llama", torch.float64), hook).train()
    loss = models.plain_loss(plain, batch)
    loss.backward()
    model = models.make_model("llama", torch.float64)
    model = attach(models.patch(model), hook) if patch_first else models.patch(attach(model, hook))
    hooked = model.train()(**batch)
    hooked.loss.backward()
    torch.testing.assert_close(hooked.loss, loss, rtol=1e-10, atol=1e-10)
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        if wanted.grad is not None:
            gradient = ours.grad.clone()
            if size > 1:
                dist.all_reduce(gradient)
            torch.testing.assert_close(gradient / size, wanted.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("hook", [scale_tensors, compute])
@pytest.mark.parametrize("attach", [hook_head, adapted_head])
@pytest.mark.parametrize("size", [1, 2])
def test_a_hook_on_the_head_is_given_logits(ranks: Ranks, size: int, hook: Any, attach: Any) -> None:
    for patch_first in (False, True):
        if size == 1:
            losses_with_hook(0, 1, hook, attach, patch_first)
        else:
            ranks(size).run(losses_with_hook, hook, attach, patch_first)


def test_a_hook_on_every_module_is_given_logits() -> None:
    model, seen = hf_burst.patch_model(models.make_model("llama").train()), []
    handle = register_module_forward_hook(lambda module, args, output: seen.append((module, type(output))))
    try:
        model(**models.make_batch("plain"))
    finally:
        handle.remove()
    assert (model.lm_head, torch.Tensor) in seen


def see_outputs(rank: int, size: int) -> None:
    """Hooks on the model see the outputs of the whole batch, registered before the patch or after it."""
    batch = models.make_batch("plain")
    inputs = {"input_ids": batch["input_ids"]}
    wanted = models.plain_logits(models.make_model("llama", torch.float64).eval(), batch)
    for patch_first in (False, True):
        shapes = []
        model = models.make_model("llama", torch.float64).eval()
        if patch_first:
            models.patch(model)
        model.register_forward_hook(lambda module, args, output, into=shapes: into.append(output.logits.shape))
        if not patch_first:
            models.patch(model)
        torch.testing.assert_close(model(**inputs).logits, wanted, rtol=1e-10, atol=1e-10)
        assert shapes == [wanted.shape]


def test_hooks_on_the_model_see_outputs_of_the_whole_batch(ranks: Ranks) -> None:
    ranks(2).run(see_outputs)


def mask_labels(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A pre-hook that hides half of the labels."""
    labels = kwargs["labels"].clone()
    labels[:, : labels.shape[1] // 2] = -100
    return args, {**kwargs, "labels": labels}


def change_labels(rank: int, size: int) -> None:
    batch = models.make_batch("plain")
    changed = mask_labels(nn.Module(), (), batch)[1]
    model = models.make_model("llama", torch.float64).train()
    wanted = models.plain_loss(model, changed)
    handle = model.register_forward_pre_hook(mask_labels, with_kwargs=True)
    models.patch(model)
    torch.testing.assert_close(model(**batch).loss, wanted, rtol=1e-10, atol=1e-10)
    handle.remove()
    model.register_forward_pre_hook(mask_labels, with_kwargs=True)
    with pytest.raises(ConfigError, match=r"Register it before hf_burst\.patch_model"):
        model(**batch)


@pytest.mark.parametrize("size", [1, 2])
def test_a_pre_hook_that_changes_labels_counts_or_is_refused(ranks: Ranks, size: int) -> None:
    if size == 1:
        change_labels(0, 1)
    else:
        ranks(size).run(change_labels)


def hook_one_rank(rank: int, size: int, backward: bool) -> None:
    """A line for debugging on rank 0, under FSDP2."""
    model = models.patch(models.make_model("llama").train())
    fully_shard(model.lm_head)
    fully_shard(model)
    if rank == 0 and backward:
        model.lm_head.register_full_backward_hook(lambda *_: None)
    elif rank == 0:
        model.lm_head.register_forward_hook(lambda *_: None)
    model(**models.make_batch("plain")).loss.backward()


@pytest.mark.parametrize("backward", [False, True])
def test_a_hook_on_the_head_of_one_rank_is_refused(ranks: Ranks, backward: bool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(hook_one_rank, backward, timeout=60)
    assert "hooks on the head: rank 0 has" in str(caught.value)


def test_a_pre_hook_on_a_partitioned_head_counts_once() -> None:
    """ZeRO-3 calls the head a second time for the loss."""
    batch, losses = models.make_batch("plain"), []
    for partitioned in (False, True):
        model = models.make_model("llama", torch.float64).train()
        model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        hf_burst.patch_model(model)
        if partitioned:
            model.lm_head.weight.ds_id = 0
        losses.append(model(**batch).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)


def test_a_pre_hook_inside_of_an_adapted_head_is_given_all_tokens() -> None:
    batch, seen = models.make_batch("plain"), []
    model = hf_burst.patch_model(models.make_model("llama", torch.float64))
    model = adapted_head(model, lambda module, args: seen.append(args[0].shape[:-1]), before=True)
    with mock.patch("hf_burst.layers.linear_loss._LOGITS", 7 * models.VOCABULARY):
        model.train()(**batch).loss.backward()
    assert seen == [batch["input_ids"].shape]


def lazy_under(rank: int, size: int, wrapper: str) -> list[str]:
    """Whether the head of a model with hooks of a library is put off."""
    model = models.patch(models.make_model("llama").train())
    if wrapper == "fsdp":
        fully_shard(model.lm_head)
        fully_shard(model)
    else:  # as TRL's offloading of activations leaves the head out
        own = {"__name__": "trl.models.activation_offloading"}
        hook = eval("lambda *args: None", own)
        model.lm_head.register_forward_hook(hook, always_call=True)
    kinds: list[str] = []
    whole = Spread.loss_sum

    def loss_sum(self: Spread, *args: Any) -> torch.Tensor:
        kinds.append("whole" if self.head is None else "lazy")
        return whole(self, *args)

    with mock.patch.object(Spread, "loss_sum", loss_sum):
        model(**models.make_batch("plain")).loss.backward()
    return kinds


@pytest.mark.parametrize("wrapper", ["fsdp", "trl"])
def test_hooks_that_look_after_memory_leave_the_head_lazy(ranks: Ranks, wrapper: str) -> None:
    assert ranks(2).run(lazy_under, wrapper) == [["lazy"]] * 2
