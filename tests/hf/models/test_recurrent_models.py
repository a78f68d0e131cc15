"""Models with recurrent layers over ranks, beside one process that holds the whole sequence."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_burst
from hf_burst.check.tiny import Double, tiny_copy
from hf_burst.errors import UnsupportedModelError
from hf_burst.hf.models import recurrent
from hf_burst.hf.models.layer_sizes import recurrent_sizes
from hf_burst.hf.models.recurrent import recurrent_modules
from hf_burst.hf.parts import tokens
from hf_burst.hf.view import ModelView
from hf_burst.plan import Segments
from hf_burst.ranks.group import ContextGroup
from hf_burst.recurrent import delta, halo, own_heads, scan
from hf_burst.recurrent.states import incoming_states
from tests.hf.test_patch import group_mean
from tests.hf.test_wrappers import compare, flat
from tests.support import models, trainers
from tests.support.ranks import RankPool
from tests.support.tiny_models import tiny_model
from tests.support.trainers import Case

Ranks = Callable[[int], RankPool]
edges_of = halo._edges
KINDS = ("plain", "packed", "left", "right")
WAYS = ("states", "heads")
ACROSS = hf_burst.BurstConfig(chunking="zigzag")  # a cut by documents would leave nothing to pass


def slowly(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose states last: by its own initial weights they are forgotten after some tokens."""
    model = models.make_model(name, dtype).train()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("A_log"):
                parameter.fill_(-4)
    return model


@contextmanager
def forced(way: str) -> Iterator[None]:
    """Recurrent layers of passes go that way, whatever would be chosen."""
    with mock.patch.object(tokens, "way_of", return_value=way):
        yield


def gradients_of(
    model: Any, batch: dict[str, torch.Tensor], config: hf_burst.BurstConfig, way: str = "states"
) -> list[torch.Tensor]:
    """Of the patched model: the loss, and all gradients."""
    models.patch(model, config)
    model.zero_grad()
    with forced(way):
        loss = model(**batch).loss
    loss.backward()
    hf_burst.unpatch_model(model)
    return [loss.detach(), *group_mean(model)]


def greatest_error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Relative to the greatest entry of the loss or a gradient."""
    greatest = max(tensor.abs().max() for tensor in wanted)
    pairs = zip(found, wanted, strict=True)
    return max(float((own - tensor).abs().max() / greatest) for own, tensor in pairs)


def errors_of(rank: int, size: int, name: str, chosen: list[tuple[str, str, str]]) -> list[float]:
    """The greatest error of each batch, in fp64."""
    errors = []
    with Double():
        model = slowly(name, torch.float64)
        for kind, way, chunking in chosen:
            batch = models.make_batch(kind)
            model.zero_grad()
            loss = models.plain_loss(model, batch)
            loss.backward()
            wanted = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            found = gradients_of(model, batch, hf_burst.BurstConfig(chunking=chunking), way)
            errors.append(greatest_error(found, wanted))
    return errors


ALWAYS = {(1, "kimi_linear"), (1, "zamba"), (2, "granite"), (3, "lfm2"), (3, "qwen3_5")}


def run(ranks: Ranks, size: int, *arguments: Any) -> list[float]:
    return errors_of(0, 1, *arguments) if size == 1 else ranks(size).run(errors_of, *arguments)[0]


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=[pytest.mark.full] * ((size, name) not in ALWAYS))
        for size in (1, 2, 3, 4)
        for name in models.RECURRENT
    ],
)
def test_loss_and_gradients_are_those_of_one_process(ranks: Ranks, name: str, size: int) -> None:
    chosen = list(itertools.product(KINDS, WAYS, ("balanced", "contiguous", "zigzag")))
    chosen = chosen[models.RECURRENT.index(name) + size :: 12]
    errors = run(ranks, size, name, chosen)
    assert max(errors) < 1e-9, dict(zip(chosen, errors, strict=True))


def compare_checkpointed(rank: int, size: int, name: str, reentrant: bool) -> float:
    """The greatest error of checkpointed layers, beside the same without checkpoints."""
    model, batch = slowly(name), models.make_batch("packed")
    wanted = gradients_of(model, batch, config=ACROSS)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return greatest_error(gradients_of(model, batch, config=ACROSS), wanted)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in ("kimi_linear", "zamba"))) for n in models.RECURRENT]
)
def test_checkpointed_layers_take_part_again(ranks: Ranks, name: str) -> None:
    reentrant = name == "lfm2"
    assert max(ranks(3).run(compare_checkpointed, name, reentrant)) < 1e-6


def in_half(tensor: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A transition in bf16."""
    return tensor.bfloat16().double() @ state


def dropped(*arguments: Any) -> Any:
    """Zeros in place of the states that come in."""
    states, slots = incoming_states(*arguments)
    return {index: 0 * state for index, state in states.items()}, slots


def without_halos(segments: Segments, device: torch.device, rank: int, reach: int) -> Any:
    """Edges before which there are zeros."""
    edges = edges_of(segments, device, rank, reach)
    nowhere = segments.sharding.ranks * segments.most_slots * reach
    return replace(edges, halos=torch.full_like(edges.halos, nowhere))


def one_token_off(segments: Segments, device: torch.device, rank: int, reach: int) -> Any:
    """Edges whose halos end one token too early."""
    edges = edges_of(segments, device, rank, reach)
    last = segments.sharding.ranks * segments.most_slots * reach
    moved = (edges.halos > 0) & (edges.halos < last)
    return replace(edges, halos=edges.halos - moved.long())


def of_rows(segments: Segments, device: torch.device, rank: int, reach: int) -> Any:
    """The edges of segments that know of rows only."""
    rows = Segments(segments.sharding, tuple((0, row[-1]) for row in segments.documents))
    return edges_of(rows, device, rank, reach)


def of_the_next(x: torch.Tensor, group: ContextGroup) -> torch.Tensor:
    """What belongs to the heads of the next rank."""
    return own_heads(x, replace(group, rank=(group.rank + 1) % group.size))


Combination = tuple[str, str, str]
CONTIGUOUS: Combination = ("plain", "states", "contiguous")
BROKEN: dict[str, tuple[str, Combination, Any, str, Any]] = {
    "a halo of zeros": ("qwen3_5", CONTIGUOUS, halo, "_edges", without_halos),
    "a halo one token off": ("qwen3_5", CONTIGUOUS, halo, "_edges", one_token_off),
    "documents that leak through a convolution": ("lfm2", ("packed", "states", "zigzag"), halo, "_edges", of_rows),
    "a state that is dropped": ("qwen3_5", CONTIGUOUS, delta, "incoming_states", dropped),
    "a transition in bf16": ("qwen3_5", CONTIGUOUS, delta, "by_matrix", in_half),
    "a number that is dropped": ("granite", CONTIGUOUS, scan, "incoming_states", dropped),
    "heads of another rank": ("granite", ("plain", "heads", "balanced"), recurrent, "own_heads", of_the_next),
    "channels of another rank": ("zamba", CONTIGUOUS, recurrent, "own_heads", of_the_next),
}


def break_and_compare(rank: int, size: int, name: str) -> list[float]:
    model, combination, room, attribute, broken = BROKEN[name]
    with mock.patch.object(room, attribute, broken):
        return errors_of(rank, size, model, [combination])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * n.endswith("of another rank")) for n in BROKEN]
)
def test_what_is_broken_on_purpose_is_found(ranks: Ranks, name: str) -> None:
    assert max(ranks(3).run(break_and_compare, name)[0]) > 1e-6


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(model="qwen3_5", checkpointing=True, burst=3), marks=pytest.mark.full),
        pytest.param(Case(model="granite", data=2), marks=pytest.mark.full),
        Case("SFTTrainer", "packed", model="lfm2"),
        Case(model="qwen3_5", lora=True, explicit=True),
    ],
    ids=str,
)
def test_three_steps_of_trainers(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    """Packed documents leak in Transformers without kernels: beside one process that is patched."""
    alone = Case(case.trainer, case.kind, case.lora, model=case.model, burst=int(case.kind == "packed"))
    results = ranks(case.ranks).run(trainers.train, str(tmp_path), case)
    compare(results[0], trainers.train(0, 1, str(tmp_path), alone), 1e-5)


def test_the_class_and_other_models_stay_as_they_are() -> None:
    first, second = (models.make_model("qwen3_5") for _ in range(2))
    layer, other = first.model.layers[0].linear_attn, second.model.layers[0].linear_attn
    before = type(layer).forward
    models.patch(first)
    assert "forward" in vars(layer)
    assert "forward" not in vars(other)
    assert type(layer).forward is before
    hf_burst.unpatch_model(first)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("name", ["MiniMaxForCausalLM", "RecurrentGemmaForCausalLM", "ZayaForCausalLM"])
def test_states_inside_of_a_forward_are_refused_with_a_sentence(name: str) -> None:
    model = tiny_model(name)
    with pytest.raises(UnsupportedModelError, match=rf"{name} is not served: .* inside of its own forward"):
        hf_burst.patch_model(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "name", ["Bamba", "BailingHybrid", "FalconH1", "GraniteMoeHybrid", "Mamba2", "Zamba", "Zamba2"]
)
def test_heads_with_a_state_become_small(name: str) -> None:
    """Configs whose sizes depend on one another."""
    kind = getattr(transformers, f"{name}ForCausalLM")
    model = tiny_copy(kind, kind.config_class())
    assert sum(weight.numel() for weight in model.parameters()) < 120_000
    models.plain_loss(model, models.make_batch("plain")).backward()


@pytest.mark.parametrize("name", ["xLSTMForCausalLM", "RwkvForCausalLM"])
def test_unknown_states_are_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="no recurrent layers whose states are known how to pass"):
        hf_burst.patch_model(tiny_model(name))


@forced("states")
def compile_and_compare(rank: int, size: int, name: str, checkpointing: bool) -> float:
    """The greatest error of a compiled model, beside itself before."""
    torch._dynamo.reset()
    model, batch = slowly(name), models.make_batch("packed")
    wanted = gradients_of(model, batch, config=ACROSS)
    models.patch(model, ACROSS)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    loss = torch.compile(model, backend="aot_eager")(**batch).loss
    loss.backward()
    return greatest_error([loss.detach(), *group_mean(model)], wanted)


@pytest.mark.full
@pytest.mark.parametrize(("name", "checkpointing"), [("granite", False), ("qwen3_5", True), ("zamba", False)])
def test_compiled_models(ranks: Ranks, name: str, checkpointing: bool) -> None:
    assert max(ranks(2).run(compile_and_compare, name, checkpointing)) < 1e-6


@pytest.mark.parametrize("name", ["qwen3_5", "granite", "zamba"])
def test_generation_and_copies(name: str, tmp_path: Path) -> None:
    """A patched model generates as it did; its copies, and what is loaded of it, are patched by themselves."""
    model = models.make_model(name).eval()
    prompt = torch.arange(1, 12)[None]
    wanted = model.generate(prompt, max_new_tokens=4, do_sample=False)
    models.patch(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), wanted)
    torch.save(model, tmp_path / "model.pt")
    others = [copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)]
    batch = models.make_batch("packed")
    loss = model(**batch).loss
    for other in others:
        torch.testing.assert_close(other(**batch).loss, loss, rtol=0, atol=0)
        hf_burst.unpatch_model(other)
        assert not any("forward" in vars(module) for module in other.modules())


def compute_in_bfloat16(rank: int, size: int, name: str) -> tuple[float, float]:
    """The errors of gradients under autocast, beside fp32: over ranks, and in one process."""
    model, batch = slowly(name), models.make_batch("plain")

    def alone() -> torch.Tensor:
        model.zero_grad()
        models.plain_loss(model, batch).backward()
        return flat([parameter.grad for parameter in model.parameters()])

    exact = alone()
    with torch.autocast("cpu", torch.bfloat16):
        rough = alone()
        ours = flat(gradients_of(model, batch, config=ACROSS)[1:])
    return float((ours - exact).norm()), float((rough - exact).norm())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n not in ("qwen3_5", "lfm2"))) for n in models.RECURRENT]
)
def test_autocast(ranks: Ranks, name: str) -> None:
    over_ranks, alone = ranks(3).run(compute_in_bfloat16, name)[0]
    assert 0 < over_ranks < 2 * alone


@forced("states")
def compute_by_fsdp(rank: int, size: int, name: str) -> float:
    """The greatest error of gradients of weights that FSDP2 shards, of checkpointed layers."""
    model, batch = slowly(name), models.make_batch("packed")
    wanted = gradients_of(model, batch, config=ACROSS)
    hf_burst.patch_model(model, ACROSS)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    found = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return greatest_error([loss.detach(), *found], wanted)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_weights_that_fsdp_shards(ranks: Ranks, name: str) -> None:
    assert max(ranks(2).run(compute_by_fsdp, name)) < 1e-6


def test_a_model_that_was_patched_is_freed() -> None:
    model = slowly("qwen3_5")
    kept = [weakref.ref(module) for module in recurrent_modules(ModelView(model))]
    sizes = recurrent_sizes(ModelView(model))
    models.patch(model)
    hf_burst.unpatch_model(model)
    del model
    gc.collect()
    assert sizes
    assert [module() for module in kept] == [None] * len(kept)


def test_activations_that_are_derived_by_their_output(ranks: Ranks) -> None:
    """The convolution's first tokens are computed anew beside the others, and not in their place."""
    assert max(ranks(2).run(relu_after_the_convolution)) < 1e-9


def relu_after_the_convolution(rank: int, size: int) -> float:
    with Double():
        model, batch = slowly("granite", torch.float64), models.make_batch("packed")
        for module in recurrent_modules(ModelView(model)):
            module.activation, module.act = "relu", torch.nn.ReLU()
        models.plain_loss(model, batch).backward()
        wanted = [parameter.grad.clone() for parameter in model.parameters()]
        return greatest_error(gradients_of(model, batch, config=ACROSS)[1:], wanted)
