"""Checkpointed recurrent layers over ranks: they are told of the pass again, and take what they received first."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import conv1d, silu
from torch.utils.checkpoint import checkpoint

import hf_burst
from hf_burst.errors import ConfigError, RankMismatchError
from hf_burst.hf import context
from hf_burst.hf.models import recurrent
from hf_burst.hf.models.recurrent import recurrent_modules
from hf_burst.hf.parts import recurrence
from hf_burst.hf.view import ModelView
from hf_burst.ranks import collectives
from hf_burst.recurrent import ReplayBuffer, halo
from tests.hf.models.test_recurrent_models import forced, greatest_error
from tests.hf.test_patch import group_mean
from tests.support import models
from tests.support.delta_steps import DeltaSteps
from tests.support.ranks import RankPool
from tests.support.tiny_models import tiny_model

Ranks = Callable[[int], RankPool]
ZIGZAG = hf_burst.BurstConfig(chunking="zigzag")


@contextmanager
def counted() -> Iterator[list[int]]:
    """The numbers of bytes that are gathered meanwhile."""
    sizes: list[int] = []
    plain = collectives.dist.all_gather

    def gather(shards: Any, tensor: torch.Tensor, **options: Any) -> None:
        sizes.append(tensor.nbytes)
        plain(shards, tensor, **options)

    with mock.patch.object(collectives.dist, "all_gather", gather):
        yield sizes


def make(name: str) -> Any:
    return models.make_model(name) if name in models.RECURRENT else tiny_model(name).float()


def wrap(model: Any, reentrant: bool, *kinds: str) -> None:
    """Torch's wrapper around modules whose class is named so."""
    way = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    for path, module in reversed(list(model.named_modules())):  # the inner ones first
        if type(module).__name__.endswith(kinds):
            model.set_submodule(path, checkpoint_wrapper(module, way))


def enable(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()


def nested(model: Any, reentrant: bool) -> None:
    """Both at once."""
    enable(model, reentrant)
    wrap(model, reentrant, "DecoderLayer")


class Several(torch.nn.Module):
    """More than one layer, for one checkpoint."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        return hidden_states


def wrap_several(model: Any) -> None:
    """One checkpoint around all layers, none of which knows of it."""
    model.backbone.layers = torch.nn.ModuleList([checkpoint_wrapper(Several(*model.backbone.layers))])


SWITCHES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "not reentrant": ("qwen3_5", partial(enable, reentrant=False)),
    "reentrant": ("qwen3_5", partial(enable, reentrant=True)),
    "nested": ("qwen3_5", partial(nested, reentrant=False)),
    "Mamba2": ("Mamba2ForCausalLM", partial(enable, reentrant=False)),
    # accelerate puts one around the layer, and another one around its mixer
    "wrapped twice": ("MambaForCausalLM", lambda model: wrap(model, False, "MambaBlock", "MambaMixer")),
    "wrapped": ("Mamba2ForCausalLM", lambda model: wrap(model, False, "Mamba2Block")),
    "wrapped together": ("Mamba2ForCausalLM", wrap_several),
    "wrapped, reentrant": ("lfm2", lambda model: wrap(model, True, "DecoderLayer")),
}


def gradients_of(model: Any, batch: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """The loss and all gradients, and what the backward pass gathered."""
    model.zero_grad()
    loss = model(**batch).loss
    with counted() as sizes:
        loss.backward()
    return [loss.detach(), *group_mean(model)], sizes


@forced("states")  # exchanged heads do travel again
def compare(rank: int, size: int, switch: str) -> tuple[float, int]:
    """The greatest error beside the same model without checkpoints, and how often the backward pass gathered."""
    name, turn_on = SWITCHES[switch]
    batch, model = models.make_batch("packed"), models.patch(make(name), ZIGZAG)
    wanted, _ = gradients_of(model, batch)
    turn_on(model)
    functions = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    found, sizes = gradients_of(model, batch)
    hf_burst.unpatch_model(model)
    assert functions == [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    assert not any(
        "forward" in vars(module) or module._forward_pre_hooks for module in recurrent_modules(ModelView(model))
    )
    return greatest_error(found, wanted), len(sizes)


@contextmanager
def stepwise() -> Iterator[DeltaSteps]:
    """Kernels of two passes, as if flash-linear-attention were installed."""
    kernels, takes = DeltaSteps(scaled=True), recurrent._takes

    def unit(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * (tensor.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    def by_fla(function: Any, argument: str) -> bool:
        return argument == "cp_context" or takes(function, argument)

    room = {"fla_kernels": lambda *_: kernels, "unit_norm": unit, "_takes": by_fla}
    with mock.patch.multiple(recurrent, **room):
        yield kernels


def compare_steps(rank: int, size: int, kind: str) -> tuple[float, int, list[tuple[float, int]]]:
    """The greatest error of two passes beside one process, and how often they ran. Then that of each way to checkpoint,
    and how often its backward pass gathered."""
    with stepwise() as kernels, forced("states"):
        model, batch = make("qwen3_5"), models.make_batch(kind)
        loss = models.plain_loss(model, batch)
        loss.backward()
        wanted = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        models.patch(model, ZIGZAG)
        plain, _ = gradients_of(model, batch)
        first, found = kernels.runs, []
        for reentrant in (False, True):
            enable(model, reentrant)
            gradients, sizes = gradients_of(model, batch)
            found.append((greatest_error(gradients, plain), len(sizes)))
        return greatest_error(plain, wanted), first, found


def asked_for(rank: int, size: int, kind: str, way: Any) -> list[tuple[str, int, dict[str, Any]]]:
    """What is compiled ahead in a forward pass: functions, their tokens, and what else they are given."""

    def convolved(x: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str) -> torch.Tensor:
        more = weight.shape[-1] - 1
        return silu(conv1d(x, weight[:, None], bias, padding=more, groups=len(weight))[..., : x.shape[2]])

    asked = mock.Mock()
    room: dict[str, Any] = {"fla_compared": lambda _: True, "fla_convolution": convolved, "compile_ahead": asked}
    with stepwise(), forced(way), mock.patch.multiple(recurrent, **room):
        model = models.patch(make("qwen3_5"), ZIGZAG)
        model(**models.make_batch(kind))
    for call in asked.call_args_list:
        assert [tensor.shape[:2] for tensor in call.args[1:]] == [call.args[1].shape[:2]] * 5
    return [(call.args[0].__name__, call.args[1][..., 0, 0].numel(), call.kwargs) for call in asked.call_args_list]


@forced("states")  # exchanged heads do travel again
def with_other_kernels(rank: int, size: int) -> str:
    """What a rank says if it alone has the kernels of two passes."""
    model, batch = models.patch(make("qwen3_5"), ZIGZAG), models.make_batch("plain")
    with mock.patch.object(recurrence, "fla_kernels", return_value=DeltaSteps() if rank else None):
        try:
            model(**batch)
        except RankMismatchError as problem:
            return str(problem)
        finally:
            hf_burst.unpatch_model(model)
    return ""


def test_ranks_have_the_same_kernels(ranks: Ranks) -> None:
    for said in ranks(2).run(with_other_kernels):
        assert "kernels of flash-linear-attention: rank 0 has False, rank 1 has True" in said


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.full), "packed"])
def test_two_passes_are_exact_and_run_again(ranks: Ranks, kind: str) -> None:
    for error, runs, checkpointed in ranks(2).run(compare_steps, kind):
        assert error < 1e-5
        assert runs > 0
        for again, gathered in checkpointed:
            assert again < 1e-6
            assert gathered == 0


def test_kernels_are_compiled_before_they_are_called(ranks: Ranks) -> None:
    """Those of the function that a layer will call: its own, for whole documents, or that of two passes."""
    rule, own = "torch_chunk_gated_delta_rule", {"packed": False, "output_final_state": False}
    assert ranks(1).run(asked_for, "plain", "states") == [[(rule, 74, {**own, "use_qk_l2norm_in_kernel": False})]]
    for passes, *whole in ranks(2).run(asked_for, "plain", "states"):
        assert passes == ("in_two_passes", 40, {})
        assert all(name == rule for name, *_ in whole)
    for found in ranks(2).run(asked_for, "packed", "heads"):
        assert found
        assert all((name, more) == (rule, {**own, "use_qk_l2norm_in_kernel": True}) for name, _, more in found)


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_layer_that_runs_again_receives_nothing_again(ranks: Ranks, switch: str) -> None:
    for error, gathered in ranks(2).run(compare, switch):
        assert error < 1e-6
        assert gathered == 0 or switch == "wrapped twice", "channels of Mamba1 are as large as activations"


@forced("states")  # exchanged heads do travel again
def gather_again(rank: int, size: int) -> int:
    """How often the backward pass gathers where nothing is kept."""
    model = models.patch(make("qwen3_5"), replace(ZIGZAG, memory=hf_burst.Memory(attention_keep=0.0)))
    enable(model, reentrant=False)
    return len(gradients_of(model, models.make_batch("packed"))[1])


def test_nothing_is_kept_where_nothing_is_to_be(ranks: Ranks) -> None:
    assert ranks(2).run(gather_again) == [2, 2], "a halo and the states of one layer"


def alive() -> int:
    """How many layers keep something."""
    gc.collect()
    return sum(isinstance(item, ReplayBuffer) and bool(item.kept) for item in gc.get_objects())


def edges_alive() -> int:
    """How many batches have edges of convolutions on a device."""
    gc.collect()
    return sum(type(item) is halo._Edges for item in gc.get_objects())


@pytest.mark.parametrize("name", [pytest.param("qwen3_5", marks=pytest.mark.full), "granite"])
def test_edges_go_with_the_pass(name: str) -> None:
    """Layouts are kept for long, what layers make of them is not; a checkpoint holds it until it has run again."""
    model = models.patch(models.make_model(name).train())
    enable(model, reentrant=False)
    before = edges_alive()
    for kind in ("packed", "left"):
        loss = model(**models.make_batch(kind)).loss
        assert edges_alive() == before + 1, "one for all layers"
        loss.backward()
        del loss
        assert edges_alive() == before


@forced("states")  # exchanged heads do travel again
def accumulate(rank: int, size: int) -> None:
    """Several passes before their backward passes, which come in another order, and evaluations between."""
    model = models.patch(models.make_model("qwen3_5").train(), ZIGZAG)
    batches = [models.make_batch("packed", seed=seed) for seed in (0, 1)]
    wanted = [gradients_of(model, batch)[0] for batch in batches]
    enable(model, reentrant=False)
    losses = [model(**batch).loss for batch in batches]
    assert alive() == len(batches), "one recurrent layer, in two passes"
    with torch.no_grad():
        model(**batches[1])
        model.eval()(**batches[1])
        model.train()
    assert alive() == len(batches)
    for index in (0, 1, 0):
        model.zero_grad()
        losses[index].backward(retain_graph=True)
        assert greatest_error(group_mean(model), wanted[index][1:]) < 1e-6
    losses.clear()
    assert alive() == 0


def test_passes_keep_apart_and_leave_nothing_behind(ranks: Ranks) -> None:
    ranks(2).run(accumulate)


class ByHand(torch.nn.Module):
    """A checkpoint that no part of a patched model knows."""

    def __init__(self, inside: torch.nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inside, *args, use_reentrant=False, **kwargs)


def test_a_checkpoint_that_tells_nothing_is_an_error() -> None:
    """In the backward pass, and not a wrong gradient."""
    model = models.patch(make("Mamba2ForCausalLM"))
    model.backbone.layers[0].mixer = ByHand(model.backbone.layers[0].mixer)
    loss = model(**models.make_batch("packed")).loss
    with pytest.raises(ConfigError, match="Mamba2Mixer runs again in the backward pass"):
        loss.backward()


def test_a_pass_that_was_interrupted_is_forgotten() -> None:
    """Its context outlives Ctrl-C, and neither the decoder by itself nor generation may find it."""
    model, batch = models.patch(make("qwen3_5").eval()), models.make_batch("packed")
    tokens = {"input_ids": batch["input_ids"], "use_cache": False}

    def decode() -> torch.Tensor:
        hidden: torch.Tensor = model.model(**tokens).last_hidden_state
        return hidden

    def generate() -> torch.Tensor:
        generated: torch.Tensor = model.generate(tokens["input_ids"][:, :3], max_new_tokens=2, do_sample=False)
        return generated

    for compute in (decode, generate):
        wanted = compute()
        with (
            mock.patch.object(type(model.lm_head), "forward", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            model(**batch)
        assert context.current() is not None
        assert torch.equal(compute(), wanted)
        assert context.current() is None


def test_a_module_that_is_not_called_is_an_error() -> None:
    model = models.patch(models.make_model("qwen3_5"))
    layer = model.model.layers[0]
    mixer = layer.linear_attn
    layer.linear_attn = torch.nn.Identity()
    layer.linear_attn.inside = mixer
    layer.linear_attn.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(ConfigError, match="Qwen3_5GatedDeltaNet was passed by"):
        model(**models.make_batch("packed"))


def compare_sharded_weights(rank: int, size: int) -> float:
    """The greatest error where FSDP2 shards the weights of layers, and accelerate has put checkpoints around them."""
    batch, model = models.make_batch("packed"), models.patch(make("MambaForCausalLM"))
    wanted, _ = gradients_of(model, batch)
    hf_burst.unpatch_model(model)
    hf_burst.patch_model(model)
    wrap(model, False, "MambaBlock", "MambaMixer")
    mesh = init_device_mesh("cpu", (size,))
    for layer in (*model.backbone.layers, model):
        fully_shard(layer, mesh=mesh)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return greatest_error([loss.detach(), *(weight.grad.full_tensor() for weight in model.parameters())], wanted)


def test_checkpoints_of_accelerate_under_fsdp(ranks: Ranks) -> None:
    assert max(ranks(2).run(compare_sharded_weights)) < 1e-6
