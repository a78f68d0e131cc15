"""Modules in tiles: outputs and all gradients are those of the whole, and a tile's memory is there once."""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

import hf_burst
from hf_burst.check.tiny import Double
from hf_burst.errors import ConfigError, KernelError
from hf_burst.hf.groups import PATCH
from hf_burst.hf.models.support import base_model
from hf_burst.hf.parts.tiles import TiledForward, TiledMLP, candidates
from hf_burst.hf.view import ModelView
from hf_burst.layers.tiled import tiled
from hf_burst.layers.tokenwise import obstacle_to_tiles
from hf_burst.plan import Segments
from tests.hf.test_patch import group_mean, part_of
from tests.support import models
from tests.support.ranks import RankPool
from tests.support.tiny_models import tiny_model
from tests.support.trainers import small_pages

Ranks = Callable[[int], RankPool]
HIDDEN, INNER, TILE = 16, 40, 8


class Dropping(nn.Module):
    """An MLP with dropout, and a weight that no linear layer multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.scale, self.dropout = nn.Parameter(torch.rand(INNER)), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.scale * self.dropout(self.up(x)).sin()))


def gated(bias: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 2}
    return LlamaMLP(LlamaConfig(**sizes, mlp_bias=bias)).to(dtype)


def results(module: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor], checkpoints: bool) -> list[Tensor]:
    """The output of a layer around a module, and all gradients."""
    module.zero_grad()
    leaf = x.detach().requires_grad_(x.requires_grad)

    def layer(inner: Tensor) -> Tensor:
        return inner + forward(inner.cos())

    out = checkpoint(layer, leaf, use_reentrant=False) if checkpoints else layer(leaf)
    out.float().sin().sum().backward()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [out.detach(), *([leaf.grad] if x.requires_grad else []), *gradients]


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (1, 9), (1, 31), (3, 13), (13,), (2, 1, 11)])
def test_all_is_as_of_the_whole(shape: tuple[int, ...], checkpoints: bool) -> None:
    module = gated(bias=True)
    for learns in (True, False):
        x = torch.randn(*shape, HIDDEN, dtype=torch.float64, requires_grad=learns)
        whole = results(module, x, module.forward, checkpoints)
        tiles = results(module, x, lambda inner: tiled(module, module.forward, TILE, inner), checkpoints)
        for found, expected in zip(tiles, whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_frozen_weights_and_adapters() -> None:
    module = gated()
    module.requires_grad_(False)
    adapted = get_peft_model(module, LoraConfig(target_modules=["gate_proj", "down_proj"], init_lora_weights=False))
    x = torch.randn(2, 13, HIDDEN, dtype=torch.float64, requires_grad=True)
    whole = results(adapted, x, module.forward, False)
    assert len(whole) == 6
    for found, expected in zip(
        results(adapted, x, lambda inner: tiled(module, module.forward, TILE, inner), True), whole, strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_dropout_is_drawn_once() -> None:
    module = Dropping().double()
    x = torch.randn(2, 11, HIDDEN, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *_: Tensor) -> Tensor:
        torch.manual_seed(3)
        return tiled(module, module.forward, TILE, x)

    assert torch.autograd.gradcheck(run, (x, *module.parameters()), fast_mode=True)
    state = torch.get_rng_state()
    out = run(x)
    after = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    torch.set_rng_state(state)


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_weights_are_not_less_exact(autocast: bool) -> None:
    """Beside fp64, in the mean over weights: a tile's share of a gradient is not rounded to bf16."""
    reference = gated()
    low = gated(dtype=torch.float32 if autocast else torch.bfloat16)
    x = torch.randn(1, 512, HIDDEN, dtype=torch.float64, requires_grad=True)
    exact = results(reference, x.bfloat16().double().requires_grad_(), reference.forward, False)[2:]
    errors = []
    for forward in (low.forward, lambda inner: tiled(low, low.forward, TILE, inner)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = results(low, x.to(low.up_proj.weight.dtype).requires_grad_(), forward, False)[2:]
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)])
    assert all(tiles <= 1.02 * whole for whole, tiles in zip(*errors, strict=True)), errors


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.bmm.default, torch.ops.aten.linear.default}


class Operators(TorchDispatchMode):
    """How many products of matrices run, and the most elements of a tensor that an operator returns."""

    products = largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.products += function in PRODUCTS
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_nothing_is_computed_twice_and_nothing_is_large() -> None:
    module, tiles = gated(), 4
    x = torch.randn(1, tiles * TILE, HIDDEN, dtype=torch.float64, requires_grad=True)
    with Operators() as operators:
        out = checkpoint(lambda inner: inner + tiled(module, module.forward, TILE, inner.cos()), x, use_reentrant=False)
        assert operators.products == 3 * tiles
        out.sum().backward()
    again, gradients = 2, 6  # each tile once more, without the last product; and not for the checkpoint, too
    assert operators.products == (3 + again + gradients) * tiles
    assert operators.largest == max(tiles * TILE * HIDDEN, HIDDEN * INNER)
    assert operators.largest < tiles * TILE * INNER


def test_what_would_be_wrong_is_refused() -> None:
    module = gated()
    x = torch.randn(1, 20, HIDDEN, dtype=torch.float64, requires_grad=True)
    out = tiled(module, module.forward, TILE, x)
    with torch.no_grad():
        module.up_proj.weight.add_(1)
    with pytest.raises(KernelError, match="changed before its backward pass"):
        out.sum().backward()
    out = tiled(module, module.forward, TILE, x)
    with pytest.raises(KernelError, match="second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(ConfigError, match="at least 0"):
        hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=-1))
    with pytest.raises(ConfigError, match="at least 0"):
        hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=0.5))


class Odd(nn.Module):
    """An MLP whose output is not simply that of its last product."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN), kind
        self.scale, self.other = (nn.Parameter(torch.rand(HIDDEN)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x).sin()
        if self.kind == "computed bias":
            return functional.linear(inner, self.down.weight, self.scale.exp())
        if self.kind == "weight by name":
            return functional.linear(inner, weight=self.down.weight)
        out = self.down(inner)
        if self.kind == "in place":
            return out.tanh_()
        if self.kind == "scaled in place":
            out *= self.scale
            return out
        return out * (self.scale + self.other) + self.scale.sum()


@pytest.mark.parametrize("kind", ["in place", "scaled in place", "computed bias", "weight by name", "shared gradient"])
@pytest.mark.parametrize("hooks", [False, True])
def test_odd_modules(kind: str, hooks: bool) -> None:
    torch.manual_seed(0)
    module, calls = Odd(kind).double(), list[Tensor]()
    x = torch.randn(2, 13, HIDDEN, dtype=torch.float64, requires_grad=True)
    results(module, x, module.forward, False)
    for weight in module.parameters():
        if hooks and weight.grad is not None:
            weight.register_hook(lambda gradient: calls.append(gradient) or 2 * gradient)
    whole = results(module, x, module.forward, False)
    counted = len(calls)
    tiles = results(module, x, lambda inner: tiled(module, module.forward, TILE, inner), True)
    assert len(calls) == 2 * counted
    for found, expected in zip(tiles, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def in_tiles(model: Any) -> list[str]:
    """The modules that the latest pass computed in tiles."""
    obstacles, tiles = part_of(model, TiledMLP).obstacles, TiledForward.of
    return [name for name, module in model.named_modules() if obstacles.get(id(tiles(module))) == ""]


def with_tiles(
    rank: int, size: int, make: Callable[..., PreTrainedModel], name: str, config: dict[str, Any], kind: str = "packed"
) -> tuple[float, int]:
    """The largest error of the loss and of a gradient beside one process, and how many modules run in tiles."""
    batch, model = models.make_batch(kind, 43), make(name).train()
    model.set_attn_implementation("eager")
    model.zero_grad()
    loss = models.plain_loss(model, batch)
    loss.backward()
    expected = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    model.zero_grad()
    models.patch(model, models.config_of(**config))
    model.gradient_checkpointing_enable()
    with small_pages():
        loss = model(**batch).loss
        loss.backward()
    found = [loss.detach(), *group_mean(model)]
    count = len(in_tiles(model))
    hf_burst.unpatch_model(model)
    assert not any("forward" in vars(module) for module in model.modules())
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)), count


ALL_ON = {"tiled_mlp": 7, "activation_offloading": 1.0}


@pytest.mark.parametrize(
    ("name", "size"),
    [("gpt2", 3), ("qwen3_5", 2), *(pytest.param(name, 2, marks=pytest.mark.full) for name in ("llama", "granite"))],
)
def test_ranks_train_in_tiles_as_one_process(ranks: Ranks, name: str, size: int) -> None:
    for error, count in ranks(size).run(with_tiles, models.make_model, name, ALL_ON):
        assert error < 2e-5
        assert count == {"qwen3_5": 2, "granite": 8}.get(name, 2)


def trained(model: Any, exact: bool, *others: Tensor) -> list[Tensor]:
    """The loss and the gradients of all weights that learn, and of others."""
    batch, patched = models.make_batch("plain", 43), hasattr(base_model(model), PATCH)
    with Double() if exact else nullcontext():
        loss = model(**batch).loss if patched else models.plain_loss(model, batch)
        loss.backward()
    learned = [*(weight for weight in model.parameters() if weight.requires_grad), *others]
    gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in learned]
    for weight in learned:
        weight.grad = None
    return [loss.detach(), *gradients]


def compare_with_the_whole(
    model: Any, config: dict[str, Any] | None = None, checkpoints: bool = False, others: Sequence[Tensor] = ()
) -> list[str]:
    """A model in fp64 beside itself in tiles of 7 tokens, twice; returns the modules that had tiles. Checkpoints run
    layers again without the mode in which casts to fp32 hide nothing."""
    exact = not checkpoints or isinstance(model, LlamaForCausalLM)
    tolerance, whole = 1e-9 if exact else 2e-5, trained(model, not checkpoints, *others)
    models.patch(model, models.config_of(**{"tiled_mlp": 7, **(config or {})}))
    if checkpoints:
        base_model(model).gradient_checkpointing_enable()
    for _ in range(2):
        for found, expected in zip(trained(model, not checkpoints, *others), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    return in_tiles(base_model(model))


def tiny(name: str) -> PreTrainedModel:
    return tiny_model(name).double().train()


@pytest.mark.parametrize(
    "name",
    [
        *("GptOss", "Gemma3", "Llama4"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("Mixtral", "Qwen3Moe", "DeepseekV3", "Qwen3Next")),
    ],
)
def test_families_in_tiles(name: str) -> None:
    """Blocks with routers are tiled as a whole, or experts in them. Llama 4 gives each expert all tokens in a row."""
    paths = compare_with_the_whole(tiny(f"{name}ForCausalLM"))
    ends = {"GptOss": {"mlp.experts"}, "Llama4": {"feed_forward.shared_expert"}}
    assert {path.split(".", 3)[3] for path in paths} == ends.get(name, {"mlp"})
    assert len({path.split(".")[2] for path in paths}) == 4


@pytest.mark.parametrize(
    ("name", "layers"), [("Mixtral", 2), ("Gemma3", 3), pytest.param("DeepseekV3", 1, marks=pytest.mark.full)]
)
def test_families_in_tiles_and_checkpoints(name: str, layers: int) -> None:
    assert compare_with_the_whole(tiny(f"{name}ForCausalLM"), {"layers_per_checkpoint": layers}, checkpoints=True)


def test_router_logits_are_of_all_tokens() -> None:
    """Hooks of Transformers take them from the routers, so that the experts alone are tiled."""
    results = []
    for tokens in (0, 7):
        model = models.patch(tiny("MixtralForCausalLM"), hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=tokens)))
        model.config.output_router_logits = True
        results.append(trained(model, True))
    assert {path.split(".", 3)[3] for path in in_tiles(model)} == {"mlp.experts"}
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "checkpoints"),
    [
        ("Qwen3MoeForCausalLM", True),
        pytest.param("MixtralForCausalLM", False, marks=pytest.mark.slow),
        pytest.param("MixtralForCausalLM", True, marks=pytest.mark.slow),
        pytest.param("Qwen3MoeForCausalLM", False, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_fused_experts(name: str, checkpoints: bool) -> None:
    """peft adds them to the experts' weights for as long as its wrapper runs."""
    settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny(name), settings).double()
    assert any("experts" in path for path, weight in model.named_parameters() if weight.requires_grad)
    assert len(compare_with_the_whole(model, checkpoints=checkpoints)) == 4


def test_a_forward_that_was_replaced_is_tiled_again() -> None:
    """As Liger's kernels are put there, by Trainer, after the model was patched."""
    model = models.patch(models.make_model("llama").train(), hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7)))
    batch, calls = models.make_batch("plain", 43), list[int]()
    expected = float(model(**batch).loss)
    for module in candidates(ModelView(model)):

        def forward(x: Tensor, module: Any = module) -> Tensor:
            calls.append(x.shape[1])
            return type(module).forward(module, x)

        module.forward = forward
    assert float(model(**batch).loss) == pytest.approx(expected, rel=1e-6)
    assert set(calls) == {32, 15, 17, 3, 1}, "of a trial, and of tiles"
    hf_burst.unpatch_model(model)
    assert all(vars(module)["forward"].__name__ == "forward" for module in candidates(ModelView(model)))


@pytest.mark.parametrize("path", ["mlp.up_proj", "mlp.down_proj", "mlp"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_hooks(path: str, checkpoints: bool) -> None:
    """Those inside of an MLP see all of its tokens, and what hooks add learns."""
    model, vectors, seen = models.make_model("llama", torch.float64).train(), list[Tensor](), list[Tensor]()
    for layer in model.model.layers:
        module, vector = layer.get_submodule(path), torch.rand(1, dtype=torch.float64, requires_grad=True)
        module.register_forward_hook(
            lambda module, given, out, vector=vector: seen.append(out.detach()) or out + vector
        )
        vectors.append(vector)
    assert len(compare_with_the_whole(model, None, checkpoints, vectors)) == 2 * (path == "mlp")
    assert len(seen) > 4
    assert all(any(map(partial(torch.allclose, found), seen[:2])) for found in seen[2:])


def test_hooks_on_all_modules() -> None:
    """A pass with them has no tiles; the next one has."""
    model, shapes = models.make_model("llama", torch.float64).train(), set[torch.Size]()
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7)))
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, out: shapes.add(out.shape[:-1]) if type(module) is nn.Linear else None
    )
    hooked = trained(model, True)
    assert shapes == {(2, 43)}
    assert not in_tiles(model)
    handle.remove()
    for found, expected in zip(trained(model, True), hooked, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert len(in_tiles(model)) == 2


@pytest.mark.parametrize("inside", [False, True])
def test_a_vector_of_a_forward_of_ones_own(inside: bool) -> None:
    """It is no parameter of the module. One that is computed outside is known there alone."""
    model, vectors = models.make_model("llama", torch.float64).train(), list[Tensor]()
    for layer in model.model.layers:
        vectors.append(torch.rand(32, dtype=torch.float64, requires_grad=True))
        scale = vectors[-1] if inside else vectors[-1].exp()

        def forward(x: Tensor, mlp: Any = layer.mlp, scale: Tensor = scale) -> Tensor:
            return type(mlp).forward(mlp, x * scale) * scale

        layer.mlp.forward = forward
    if inside:
        assert len(compare_with_the_whole(model, None, True, vectors)) == 2
        return
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7)))
    trained(model, True, *vectors)
    assert not in_tiles(model)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reentrant", "model", "layers"])
def test_reentrant_checkpoints_and_compilers(how: str) -> None:
    model = models.make_model("llama", torch.float64).train()
    whole = trained(model, False)
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7)))
    if how == "reentrant":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    for module in {"model": [model], "layers": model.model.layers}.get(how, []):
        module.compile(backend="eager")
    for found, expected in zip(trained(model, False), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    with torch.inference_mode():
        assert float(model.eval()(**models.make_batch("plain", 43)).loss) == pytest.approx(float(whole[0]), rel=1e-9)
    assert len(in_tiles(model)) == 2


def adapted(*names: str) -> Any:
    settings = LoraConfig(r=2, target_modules=["up_proj", "down_proj", "q_proj"], init_lora_weights=False)
    model = get_peft_model(models.make_model("llama", torch.float64), settings, adapter_name=names[0]).train()
    for name in names[1:]:
        model.add_adapter(name, settings)
    return model.double()


@pytest.mark.parametrize("tokens", [0, 7])
def test_two_adapters_in_one_backward_pass(tokens: int) -> None:
    model, batch, results = adapted("one", "other"), models.make_batch("plain", 43), []
    for patched in (False, True):
        if patched:
            models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=tokens)))
        losses = []
        for name in ("one", "other"):
            model.set_adapter(name)
            for path, weight in model.named_parameters():
                weight.requires_grad_("lora" in path)  # which peft takes from all but the latest
            losses.append(model(**batch).loss if patched else models.plain_loss(model, batch))
        (losses[0] + 2 * losses[1]).backward()
        results.append([weight.grad for path, weight in model.named_parameters() if "lora" in path])
        model.zero_grad()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_what_changes_before_the_backward_pass() -> None:
    """Another adapter, a weight that does not learn any more, or evaluation instead of training, is told."""
    model, batch = adapted("only"), models.make_batch("plain", 43)
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7)))
    loss = model(**batch).loss
    assert len(in_tiles(base_model(model))) == 2
    with model.disable_adapter(), pytest.raises(KernelError, match="another one in the backward pass: an adapter"):
        loss.backward()
    loss = model(**batch).loss
    model.requires_grad_(False)
    with pytest.raises(KernelError, match="a requires_grad changed"):
        loss.backward()
    module = Dropping().double()
    out = tiled(module.train(), module.forward, TILE, torch.randn(2, 11, HIDDEN, dtype=torch.float64))
    module.eval()
    with pytest.raises(KernelError, match="changed before its backward pass"):
        out.sum().backward()
    x = torch.randn(2, 11, HIDDEN, dtype=torch.float64, requires_grad=True)
    out = tiled(module.train().requires_grad_(False), module.forward, TILE, x)
    module.another = nn.Identity()
    with pytest.raises(KernelError, match="changed before its backward pass"):
        out.sum().backward()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_weights_and_inputs_that_do_not_learn(checkpoints: bool) -> None:
    model = models.make_model("llama", torch.float64).train().requires_grad_(False)
    model.model.norm.weight.requires_grad_()
    assert len(compare_with_the_whole(model, None, checkpoints)) == 2
    module, x = gated().requires_grad_(False), torch.randn(1, 20, HIDDEN, dtype=torch.float64)
    assert not tiled(module, module.forward, TILE, x).requires_grad


class Balanced(torch.autograd.Function):
    """Hands on a tensor, and adds to its gradient that of a loss of all tokens, as some mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.save_for_backward(out)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + ctx.saved_tensors[0].mean(-2, keepdim=True)


class MixingMLP(LlamaMLP):
    """Is named as an MLP, and is none."""

    def __init__(self, config: LlamaConfig, kind: str) -> None:
        super().__init__(config)
        self.kind, self.alpha = kind, nn.Parameter(torch.zeros(()))
        self.positions, self.calls = nn.Parameter(torch.rand(64, 32)), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "in place":
            x.mul_(0.5)
        out = super().forward(x)
        if self.kind == "mean":
            return out + x.mean(1, keepdim=True)
        if self.kind == "closed gate":
            return out + self.alpha * x.mean(1, keepdim=True)
        if self.kind == "token before":
            return out + functional.pad(x, (0, 0, 1, -1))
        if self.kind == "token after":
            return out + functional.pad(x, (0, 0, -1, 1))
        if self.kind == "pairs":
            rows = functional.pad(x, (0, 0, 0, x.shape[1] % 2)).unflatten(1, (-1, 2))
            return out + rows.flip(2).flatten(1, 2)[:, : x.shape[1]]
        if self.kind == "position":
            return out + self.positions[: x.shape[1]]
        if self.kind == "balanced":
            return Balanced.apply(out)
        if self.kind == "notes":
            self.calls += 1
            self.seen += x.shape[1]
        return out


KINDS = ["mean", "closed gate", "token before", "token after", "pairs", "position", "balanced", "notes"]


@pytest.mark.parametrize("kind", [*KINDS, "in place", "none"])
def test_modules_that_mix_tokens(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of each it is found out when it runs first, and what it notes of its runs is not disturbed."""
    model = models.make_model("llama", torch.float64).train()
    for layer in model.model.layers:
        layer.mlp = MixingMLP(model.config, kind).double()
    state = torch.get_rng_state()
    with caplog.at_level("INFO", "hf_burst"):
        paths = compare_with_the_whole(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(paths) == 2 * (kind == "none")
    told = [record.getMessage() for record in caplog.records if "not computed in tiles" in record.getMessage()]
    assert len(told) == (kind != "none")
    if kind == "notes":
        assert [(layer.mlp.calls, int(layer.mlp.seen)) for layer in model.model.layers] == [(3, 129)] * 2


def test_a_trial_leaves_nothing_in_the_cache_of_autocast() -> None:
    """What it casts without a graph would have no gradients."""
    model, gradients = models.make_model("llama").train(), []
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7)))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(**models.make_batch("plain", 43)).loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
        model.zero_grad()
    assert len(in_tiles(model)) == 2
    assert all(map(torch.equal, *gradients))


def test_the_first_call_has_a_whole_tile() -> None:
    """By which Triton tunes kernels whose key does not have the number of tokens."""
    model, sizes = models.make_model("llama").train(), list[int]()
    own = model.model.layers[0].mlp.gate_proj.forward
    model.model.layers[0].mlp.gate_proj.forward = lambda x: sizes.append(x.shape[-2]) or own(x)
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=40)))
    model(**models.make_batch("plain", 43))
    assert sizes[0] == 20, "of two rows"


def test_a_trial_that_fails_keeps_nothing() -> None:
    """The graph of its run is freed, though no backward pass does it: a node that saves its own result lives in it."""
    kept = list[weakref.ref[Tensor]]()

    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            opened = x.sigmoid()
            kept.append(weakref.ref(opened))
            return opened * x, x

    tokens = torch.rand(1, 64, HIDDEN)
    module = Both()
    assert "one tensor" in obstacle_to_tiles(module, module, [tokens], TILE)
    gc.collect()
    assert [tensor() for tensor in kept] == [None]


def test_weights_that_are_taken_apart_are_refused() -> None:
    model = models.patch(models.make_model("llama").train(), hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7)))
    model.model.layers[0].mlp.up_proj.weight.ds_id = 3
    with pytest.raises(ConfigError, match="ZeRO-3"):
        model(**models.make_batch("plain"))


def under_fsdp2(rank: int, size: int, name: str, precision: torch.dtype) -> None:
    """All that spares memory, beside one process without any of it; twice, as gradients are accumulated."""
    batch, model = models.make_batch("packed", 43), models.make_model(name, precision, layers=6).train()
    models.plain_loss(model, batch).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    models.patch(model, models.config_of(head_groups=2, layers_per_checkpoint=2, **ALL_ON))
    model.gradient_checkpointing_enable()
    options = {"mesh": init_device_mesh("cpu", (size,)), "mp_policy": MixedPrecisionPolicy(param_dtype=precision)}
    segments: list[Segments] = []

    def note(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():  # else it runs once more, for the input of the next one
            segments.append(kwargs["burst_pass"].segments)

    for layer in model.model.layers:
        fully_shard(layer, **options)
        layer.register_forward_pre_hook(note, with_kwargs=True)
    fully_shard(model, **options)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5}[precision]
    for accumulated in (1, 2):
        with small_pages():
            model(**batch).loss.backward()
        for path, parameter in model.named_parameters():
            found, expected = parameter.grad.full_tensor(), accumulated * wanted[path]
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    first, *others = segments[: len(model.model.layers)]
    assert all(other is first for other in others), "one object for all layers"


@pytest.mark.parametrize(("name", "precision"), [("llama", torch.float64), ("qwen3_5", torch.float32)], ids=str)
def test_under_fsdp2(ranks: Ranks, name: str, precision: torch.dtype) -> None:
    ranks(2).run(under_fsdp2, name, precision)


def units_inside(rank: int, size: int, unit: str) -> int:
    """Units of FSDP2 that are an MLP, or a linear layer of it, beside one process; some weights are frozen."""
    batch, model = models.make_batch("plain", 43), models.make_model("llama", torch.float64).train()
    for path, weight in model.named_parameters():
        weight.requires_grad_("gate_proj" not in path)
    models.plain_loss(model, batch).backward()
    wanted = {path: weight.grad for path, weight in model.named_parameters()}
    model.zero_grad()
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7)))
    model.gradient_checkpointing_enable()
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer.get_submodule(unit), mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model(**batch).loss.backward()
        for path, weight in model.named_parameters():
            if weight.requires_grad:
                torch.testing.assert_close(weight.grad.full_tensor(), wanted[path], rtol=1e-10, atol=1e-10)
        model.zero_grad()
    return len(in_tiles(model))


@pytest.mark.parametrize("unit", ["mlp", "mlp.up_proj"])
def test_units_of_fsdp2_inside_of_layers(ranks: Ranks, unit: str) -> None:
    assert ranks(2).run(units_inside, unit) == [2 * (unit == "mlp")] * 2


def adapted_experts_under_fsdp2(rank: int, size: int) -> int:
    """Adapters of fused experts in a sharded model, beside one process."""
    settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny("MixtralForCausalLM"), settings).double()
    whole = trained(model, False)
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7)))
    base, mesh = base_model(model), init_device_mesh("cpu", (size,))
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        loss, *gradients = trained(model, False)
        for found, expected in zip([loss, *(each.full_tensor() for each in gradients)], whole, strict=True):
            torch.testing.assert_close(found.to(expected.dtype), expected, rtol=2e-5, atol=2e-5)
    return len(in_tiles(base))


def test_adapters_of_experts_under_fsdp2(ranks: Ranks) -> None:
    assert ranks(2).run(adapted_experts_under_fsdp2) == [4, 4]
