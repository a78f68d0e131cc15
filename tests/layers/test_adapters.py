"""Adapters beside frozen layers: outputs and gradients are peft's, in fewer products and passes."""

import gc
import pickle
import re
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import hf_burst
from hf_burst.errors import ConfigError, KernelError
from hf_burst.hf.forward_pass import Checkpoints
from hf_burst.hf.parts.adapters import Adapters
from hf_burst.hf.view import ModelView
from hf_burst.layers.tiled import tiled
from tests.layers.test_tiled import HIDDEN, PRODUCTS, TILE, gated, in_tiles
from tests.support import models
from tests.support.ranks import RankPool

KINDS = ["bfloat16", "autocast", "autocast of fp32"]
NAMES = ["gate_proj", "up_proj", "down_proj"]


def adapted_mlp(bias: bool = False, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """An MLP with adapters, in a module that a patch would see."""
    mlp = gated(bias, dtype).requires_grad_(False)
    settings = {"r": 4, "lora_alpha": 3, "target_modules": NAMES, "init_lora_weights": False, **options}
    torch.manual_seed(1)
    return get_peft_model(nn.ModuleDict({"mlp": mlp}), LoraConfig(**settings)).base_model.model.mlp


def joined(module: nn.Module) -> nn.Module:
    """A copy of a module, whose adapters have the forward of a patched model."""
    module = deepcopy(module)
    run = SimpleNamespace(call=SimpleNamespace(view=ModelView(module), compiled=False), checkpoints=Checkpoints())
    Adapters().begin(run)  # type: ignore[arg-type]
    return module


def results(
    module: nn.Module, x: Tensor, tiles: bool = False, checkpoints: bool = False, autocast: bool = False
) -> list[Tensor]:
    """The output of a layer around a module, and all gradients."""
    module.zero_grad()
    torch.manual_seed(2)
    leaf = x.detach().requires_grad_(x.requires_grad)

    def layer(inner: Tensor) -> Tensor:
        inner = inner.cos()
        return inner + (tiled(module, module.forward, TILE, inner) if tiles else module(inner))

    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        out = checkpoint(layer, leaf, use_reentrant=False) if checkpoints else layer(leaf)
    out.double().sin().sum().backward()
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    return [out.detach(), *([leaf.grad] if x.requires_grad else []), *gradients]


def inputs(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (2, 13), learns: bool = True) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(*shape, HIDDEN, dtype=torch.float64).to(dtype).requires_grad_(learns)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scaling of each product that is computed in one."""
    seen: list[float] = []
    from hf_burst.hf.parts import adapters

    def counted(*args: Any) -> Tensor:
        seen.append(args[5])
        return own(*args)

    own = adapters.adapted_linear
    monkeypatch.setattr(adapters, "adapted_linear", counted)
    return seen


@pytest.mark.parametrize(("tiles", "checkpoints"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("shape", [(1, 9), (3, 13), (31,)], ids=str)
def test_all_is_as_peft_computes_it(tiles: bool, checkpoints: bool, shape: tuple[int, ...], calls: list[float]) -> None:
    for bias, learns in ((True, True), (False, False)):
        module, x = adapted_mlp(bias).double(), inputs(shape=shape, learns=learns)
        found = results(joined(module), x, tiles, checkpoints)
        assert calls
        assert set(calls) == {3 / 4}
        for one, other in zip(found, results(module, x), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("tiles", "checkpoints"), [(False, False), (False, True), (True, True)])
def test_dropout_before_an_adapter(tiles: bool, checkpoints: bool, calls: list[float]) -> None:
    module = adapted_mlp(lora_dropout=0.4).double()
    found, expected = (results(each, inputs(), tiles, checkpoints) for each in (joined(module), module))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert len(calls) >= 3 * (1 + checkpoints)
    module.eval()
    torch.testing.assert_close(joined(module)(inputs()), module(inputs()), rtol=1e-12, atol=1e-12)


def only(module: nn.Module, name: str) -> nn.Module:
    """A module, of whose adapters one weight learns."""
    for path, weight in module.named_parameters():
        weight.requires_grad_(name in path)
    return module


@pytest.mark.parametrize("name", ["lora_A", "lora_B", "down_proj.lora_B", "nothing"])
@pytest.mark.parametrize("tiles", [False, True])
def test_some_weights_learn(name: str, tiles: bool) -> None:
    module = only(adapted_mlp().double(), name)
    for one, other in zip(results(joined(module), inputs(), tiles, True), results(module, inputs()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def errors_of(kind: str, tiles: bool, device: str = "cpu") -> list[list[float]]:
    """Errors of peft's results and of ours beside fp64: of the output and of all gradients."""
    dtype = torch.float32 if kind == "autocast of fp32" else torch.bfloat16
    module = adapted_mlp(dtype=dtype, r=8, lora_alpha=12).to(device)
    if kind == "bfloat16":
        module.to(dtype)
    x, autocast = inputs(torch.bfloat16, (1, 512)).detach().to(device), kind != "bfloat16"
    exact = results(deepcopy(module).double(), x.double().requires_grad_())
    given = x.to(dtype).requires_grad_()
    every = results(module, given, autocast=autocast), results(joined(module), given, tiles, True, autocast)
    return [[float((a.double() - b).norm() / b.norm()) for a, b in zip(each, exact, strict=True)] for each in every]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiles", [False, True])
def test_errors_are_not_larger(kind: str, tiles: bool, calls: list[float]) -> None:
    theirs, ours = errors_of(kind, tiles)
    assert len(calls) > 3
    ratios = [own / other for other, own in zip(theirs, ours, strict=True)]
    assert max(ratios) <= 1.1, ratios
    assert sum(ratios) <= len(ratios), ratios


class Operators(TorchDispatchMode):
    """Products of matrices, and what else makes wide tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.others = 0, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in {*PRODUCTS, torch.ops.aten.addmm_.default, torch.ops.aten.addmm.out}:
            self.products += 1
        elif isinstance(out, Tensor) and out.numel() >= TILE * HIDDEN and not function.is_view:
            name = function.overloadpacket.__name__
            self.others[name] += not re.search("empty|view", name)
        return out


@pytest.mark.parametrize("tiles", [False, True])
def test_nothing_is_computed_that_nobody_reads(tiles: bool) -> None:
    times = 4 if tiles else 1

    def counted(module: nn.Module) -> Operators:
        x = inputs(shape=(1, 4 * TILE))

        def layer(inner: Tensor) -> Tensor:
            return inner + (tiled(module, module.forward, TILE, inner) if tiles else module(inner))

        with Operators() as operators:
            checkpoint(layer, x, use_reentrant=False).sum().backward()
        return operators

    frozen, adapted = counted(gated().requires_grad_(False)), counted(joined(adapted_mlp(r=2).double()))
    again, gradients = 9 - 2, 3 * 5  # of the last layer x A' alone; of x A', of A and B, and of x in two
    assert adapted.products == (9 + again + gradients) * times
    assert adapted.others == frozen.others, "passes over memory"


def halved(module: nn.Module, given: tuple[Tensor]) -> Tensor:
    return given[0] / 2


class Halving(nn.Dropout):
    """Does something in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def test_what_it_does_not_know_is_left_to_peft(calls: list[float]) -> None:
    def with_two(module: Any) -> None:
        for name in NAMES:
            layer = getattr(module, name)
            layer.update_layer("other", r=2, lora_alpha=1, config=LoraConfig(init_lora_weights=False))
            layer.set_adapter(["default", "other"])

    def each(change: Callable[[Any], Any]) -> Callable[[Any], None]:
        return lambda module: [change(getattr(module, name)) for name in NAMES] and None

    changes: dict[str, Callable[[Any], None]] = {
        "several": with_two,
        "merged": each(lambda layer: layer.merge()),
        "disabled": each(lambda layer: layer.enable_adapters(False)),
        "hooked": each(lambda layer: layer.base_layer.register_forward_hook(lambda *given: 2 * given[2])),
        "replaced": each(lambda layer: setattr(layer.lora_A["default"], "forward", lambda x: x[..., :4])),
        "hooked dropout": each(lambda layer: layer.lora_dropout["default"].register_forward_pre_hook(halved)),
        "other dropout": each(lambda layer: layer.lora_dropout.update({"default": Halving()})),
        "learning": each(lambda layer: layer.base_layer.weight.requires_grad_()),
        "mixed": each(lambda layer: layer.lora_A.float() and layer.lora_B.float()),
    }
    settings: dict[str, dict[str, Any]] = {"DoRA": {"use_dora": True}, "of its own": {"lora_bias": True}}
    settings["hooked dropout"] = {"lora_dropout": 0.4}
    for name in (*changes, *settings):
        module = adapted_mlp(bias=name == "of its own", **settings.get(name, {})).double()
        ours = joined(module)
        for changed in (module, ours) if name in changes else ():
            torch.manual_seed(4)
            changes[name](changed)
        for mode in (True, False):
            found, expected = (results(each.train(mode), inputs()) for each in (ours, module))
            assert calls == [], name
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), name


def test_hooks_of_weights_see_one_gradient() -> None:
    module, seen = joined(adapted_mlp().double()), list[Tensor]()
    weight = module.down_proj.lora_B["default"].weight
    weight.register_hook(seen.append)
    results(module, inputs(), tiles=True, checkpoints=True)
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)


def test_a_second_derivative_is_refused() -> None:
    x = inputs()
    out = joined(adapted_mlp().double())(x)
    with pytest.raises(KernelError, match="second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_a_model_with_adapters_in_tiles(calls: list[float]) -> None:
    """And everything is put back."""
    batch = models.make_batch("packed", 43)
    settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)

    def trained(model: Any, patched: bool) -> list[Tensor]:
        loss = model(**batch).loss if patched else models.plain_loss(model, batch)
        loss.backward()
        gradients = [weight.grad.clone() for weight in model.parameters() if weight.requires_grad]
        model.zero_grad()
        return [loss.detach(), *gradients]

    torch.manual_seed(5)
    model = get_peft_model(models.make_model("llama", torch.float64), settings).double().train()
    expected = trained(model, False)
    config = hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=7))
    models.patch(model, config)
    model.gradient_checkpointing_enable()
    for one, other in zip(trained(model, True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert len(calls) > 14
    assert len(in_tiles(model.get_base_model())) == 2
    hf_burst.unpatch_model(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("counted", ["forward", "backward", "both"])
def test_a_counter_around_one_of_the_passes(counted: str, calls: list[float]) -> None:
    """Its hooks are on all modules. A layer is computed again as it was, if they come or go in between."""
    model = get_peft_model(models.patch(models.make_model("llama")), LoraConfig(r=2, target_modules="all-linear"))
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    with FlopCounterMode(display=False) if counted != "backward" else nullcontext():
        loss = model.train()(**models.make_batch("plain")).loss
        if counted == "both":
            loss.backward()
    assert bool(calls) == (counted == "backward")
    if counted != "both":
        with FlopCounterMode(display=False) if counted == "backward" else nullcontext():
            loss.backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("tiled_mlp", [0, 7])
def test_checkpoints_that_keep_products(tiled_mlp: int, calls: list[float]) -> None:
    """Selective checkpoints keep outputs of operators that peft calls, and nothing may change these in place."""
    settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(models.make_model("llama", torch.float64), settings).double().train()
    batch, learned = models.make_batch("plain"), [weight for weight in model.parameters() if weight.requires_grad]
    models.plain_loss(model, batch).backward()
    expected = [weight.grad for weight in learned]
    model.zero_grad()
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=tiled_mlp)))
    kept = Counter[str]()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        products = "mm" in str(operator)
        kept[str(operator)] += products and not context.is_recompute
        return CheckpointPolicy.MUST_SAVE if products else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    loss = model(**batch).loss
    with torch.no_grad():
        model.eval()(**batch)
    model.train()
    loss.backward()
    assert not calls
    assert kept["aten.mm.default"] >= 2 * 3 * 7  # layers, products, adapted linear layers; more of them in tiles
    for weight, gradient in zip(learned, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-10, atol=1e-10)


def test_a_selective_checkpoint_inside_of_a_layer_that_checkpoints(calls: list[float]) -> None:
    model = get_peft_model(models.patch(models.make_model("llama")), LoraConfig(r=2, target_modules="all-linear"))
    base = model.get_base_model()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    base.model.layers[0].mlp = checkpoint_wrapper(base.model.layers[0].mlp, context_fn=contexts)
    model.train()(**models.make_batch("plain")).loss.backward()
    assert not calls


def test_no_tokens() -> None:
    """As experts get them."""
    for shape in ((0,), (2, 0)):
        module, x = adapted_mlp().double(), inputs(shape=shape)
        for one, other in zip(results(joined(module), x), results(module, x), strict=True):
            assert torch.equal(one, other)


class Exact(nn.Module):
    """A module that computes without autocast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.inner(x.float())
            return out


@pytest.mark.parametrize("tiles", [False, True])
def test_a_backward_pass_under_autocast(tiles: bool) -> None:
    x, gradients = inputs(torch.float32), []
    for module in (Exact(adapted_mlp(dtype=torch.float32)), joined(Exact(adapted_mlp(dtype=torch.float32)))):
        with torch.autocast("cpu", torch.bfloat16, enabled=tiles):
            out = tiled(module, module.forward, TILE, x) if tiles else module(x)
        with torch.autocast("cpu", torch.bfloat16):
            out.sum().backward()
        gradients.append([weight.grad for weight in module.parameters() if weight.requires_grad])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tiles", [0, 7])
def test_the_life_of_a_patched_model(tiles: int, calls: list[float]) -> None:
    """It is copied, pickled, compiled and merged as others are, and its memory is given back when it goes."""
    batch = models.make_batch("plain")
    settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(
        models.patch(models.make_model("llama"), hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=tiles))),
        settings,
    )
    expected = model(**batch).loss
    mlp = model.get_base_model().model.layers[0].mlp
    for other in (deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert vars(other.down_proj)["forward"].module is other.down_proj
        assert ("forward" in vars(other)) == bool(tiles)
    counted = len(calls)
    with torch.no_grad():
        mlp.up_proj.eval()(torch.zeros(1, 1, mlp.up_proj.in_features))
    assert len(calls) == counted, "a token alone is decoded by peft"
    mlp.up_proj.train()
    compiled = SimpleNamespace(call=SimpleNamespace(view=ModelView(model), compiled=True))
    Adapters().begin(compiled)  # type: ignore[arg-type]
    adapted = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert not any("forward" in vars(layer) for layer in adapted)
    torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-5, atol=1e-5)
    assert all("forward" in vars(layer) for layer in adapted)
    gone = [weakref.ref(layer) for layer in adapted]
    del adapted, mlp, other
    gc.disable()
    try:
        model = model.merge_and_unload()
        assert not any(layer() is not None for layer in gone)
    finally:
        gc.enable()
    torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-4, atol=1e-4)


def in_4_bits(dtype: torch.dtype = torch.float32, device: str = "cpu", storage: torch.dtype = torch.uint8) -> Any:
    """An MLP of weights in 4 bits, with adapters."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    mlp = gated(dtype=dtype).requires_grad_(False)
    for name in NAMES:
        linear = getattr(mlp, name)
        options: dict[str, Any] = {"quant_type": "nf4", "quant_storage": storage}
        small = Linear4bit(linear.in_features, linear.out_features, bias=False, device="meta", **options)
        small.weight = Params4bit(linear.weight.data, requires_grad=False, module=small, **options).to(device)
        setattr(mlp, name, small)
    settings = LoraConfig(r=4, lora_alpha=3, target_modules=NAMES, init_lora_weights=False)
    model = nn.ModuleDict({"mlp": mlp})
    model.is_loaded_in_4bit = True
    torch.manual_seed(1)
    return get_peft_model(model, settings).base_model.model.mlp.to(device)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize(("tiles", "checkpoints"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("autocast", [False, True])
def test_weights_in_4_bits(tiles: bool, checkpoints: bool, autocast: bool, calls: list[float]) -> None:
    module, ours = in_4_bits(), joined(in_4_bits())
    x = inputs(torch.bfloat16 if autocast else torch.float32)
    found = results(ours, x, tiles, checkpoints, autocast)
    assert len(calls) >= 3
    tolerance = 2e-2 if autocast else 1e-5
    for one, other in zip(found, results(module, x, autocast=autocast), strict=True):
        assert float((one - other).norm() / other.norm()) < tolerance


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_the_dtype_of_adapters_beside_4_bits(calls: list[float]) -> None:
    """Without autocast, peft computes adapters in fp32 beside an input in bf16. With an input in fp32 bitsandbytes
    computes in fp32, also under autocast."""
    for storage in (torch.uint8, torch.bfloat16):
        for adapters, x, autocast, ours in (
            (torch.float32, torch.bfloat16, False, False),
            (torch.bfloat16, torch.bfloat16, False, True),
            (torch.float32, torch.bfloat16, True, True),
            (torch.float32, torch.float32, True, False),
        ):
            module = in_4_bits(torch.bfloat16, storage=storage)
            for name, weight in module.named_parameters():
                weight.data = weight.data.to(adapters) if "lora" in name else weight.data
            calls.clear()
            results(joined(module), inputs(x), autocast=autocast)
            assert bool(calls) == ours, (storage, adapters, x, autocast)


def under_fsdp2(rank: int, size: int, storage: torch.dtype) -> list[float]:
    """How far two steps are from those of one process. FSDP2 takes away what makes numbers of 4 bits, and the first
    forward pass puts it back."""
    alone, module = in_4_bits(storage=storage), joined(in_4_bits(storage=storage))
    fully_shard(module, mesh=init_device_mesh("cpu", (size,)))
    x, errors = inputs(torch.float32), list[float]()
    for _ in range(2):
        found, expected = results(module, x, checkpoints=True), results(alone, x)
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
        errors += [float((one - other).norm() / other.norm()) for one, other in zip(whole, expected, strict=True)]
    return errors


def cast_by_fsdp2(rank: int, size: int) -> str:
    """Runs weights that FSDP2 leaves whole, that an inner unit shards and does not cast, and that it casts."""
    mesh, policy = init_device_mesh("cpu", (size,)), MixedPrecisionPolicy(torch.bfloat16)
    whole, inner, cast = (joined(in_4_bits(storage=torch.float32)) for _ in range(3))
    small = [weight for name, weight in whole.named_parameters() if "lora" not in name]
    fully_shard(whole, mesh=mesh, mp_policy=policy, ignored_params=set(small))
    for name in NAMES:
        fully_shard(getattr(inner, name).base_layer, mesh=mesh)
    fully_shard(inner, mesh=mesh, mp_policy=policy)
    fully_shard(cast, mesh=mesh, mp_policy=policy)
    for module in (whole, inner):
        results(module, inputs(torch.bfloat16))
    with pytest.raises(ConfigError) as caught:
        results(cast, inputs(torch.bfloat16))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_4_bits_that_fsdp2_would_cast_are_refused(ranks: Callable[[int], RankPool]) -> None:
    for problem in ranks(2).run(cast_by_fsdp2):
        assert problem.startswith("Weights of 4 bits are stored as torch.float32, and FSDP2 casts to torch.bfloat16:")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("storage", [torch.uint8, torch.float32], ids=str)
def test_4_bits_under_fsdp2(ranks: Callable[[int], RankPool], storage: torch.dtype) -> None:
    for errors in ranks(2).run(under_fsdp2, storage):
        assert len(errors) == 16
        assert max(errors) < 1e-5
