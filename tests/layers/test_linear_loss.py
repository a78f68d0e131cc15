"""The head and its loss some tokens at a time: the same loss and gradients, and no logits of all tokens."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import hf_burst
from hf_burst.check import tiny
from hf_burst.errors import ConfigError
from hf_burst.hf.parts.head import Head
from hf_burst.hf.spread import value
from hf_burst.hf.spread.value import Spread
from hf_burst.layers import linear_loss
from hf_burst.layers.linear_loss import Linear, linear_loss_sum
from hf_burst.layers.loss import token_loss_sum
from tests.hf.test_patch import group_mean, part_of
from tests.hf.test_wrappers import whole
from tests.support import models, tiny_models
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
VOCABULARY = 61


def problem(dtype: torch.dtype, bias: bool = True) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(16, VOCABULARY, bias=bias, dtype=dtype)
    hidden = torch.randn(2, 37, 16, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (2, 37))
    targets[:, 5:9] = -100
    return head, hidden, targets


def score_of(head: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda hidden: 3 * torch.tanh(head(hidden) / 3)


def plain(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    loss = token_loss_sum(score_of(head)(hidden), targets)
    wanted = [tensor for tensor in (hidden, *head.parameters()) if tensor.requires_grad]
    return loss.detach(), *torch.autograd.grad(loss / 7, wanted)


def chunked(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, rows: int = 5) -> tuple[torch.Tensor, ...]:
    with mock.patch.object(linear_loss, "_LOGITS", rows * VOCABULARY):
        loss = linear_loss_sum(hidden, targets, score_of(head), VOCABULARY)
    wanted = [tensor for tensor in (hidden, *head.parameters()) if tensor.requires_grad]
    first = torch.autograd.grad(loss / 7, wanted, retain_graph=True)
    again = torch.autograd.grad(loss / 7, wanted)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    return loss.detach(), *first


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("frozen", ["nothing", "hidden", "weight", "bias"])
def test_chunks_are_the_whole(rows: int, frozen: str) -> None:
    head, hidden, targets = problem(torch.float64)
    for name, tensor in {"hidden": hidden, "weight": head.weight, "bias": head.bias}.items():
        tensor.requires_grad_(name != frozen)
    for found, wanted in zip(chunked(head, hidden, targets, rows), plain(head, hidden, targets), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        loss = linear_loss_sum(hidden, targets, score_of(head), VOCABULARY)
    torch.testing.assert_close(loss, plain(head, hidden, targets)[0])
    assert not loss.requires_grad
    assert linear_loss_sum(hidden, torch.full_like(targets, -100), head, VOCABULARY) == 0


def test_many_chunks_in_bfloat16_are_as_exact_as_one() -> None:
    head, hidden, targets = problem(torch.bfloat16)
    exact = plain(copy.deepcopy(head).double(), hidden.detach().double().requires_grad_(), targets)
    rough, found = plain(head, hidden, targets), chunked(head, hidden, targets, 1)
    assert found[0].dtype == torch.float32
    for mine, other, wanted in zip(found, rough, exact, strict=True):
        assert (mine.double() - wanted).norm() <= 2 * (other.double() - wanted).norm() + 1e-9


def test_autocast() -> None:
    head, hidden, targets = problem(torch.float32)
    exact = plain(head, hidden, targets)
    with torch.autocast("cpu", torch.bfloat16):
        rough, found = plain(head, hidden, targets), chunked(head, hidden, targets)
    assert [tensor.dtype for tensor in found] == [torch.float32] * 4
    for mine, other, wanted in zip(found, rough, exact, strict=True):
        assert 0 < (mine - wanted).norm() <= 2 * (other - wanted).norm()


def liger(calls: list[dict[str, Any]]) -> SimpleNamespace:
    """Stands for Liger's module: the same arguments and results, in plain torch."""

    def fused_linear_cross_entropy_forward(_input, weight, target, *, bias, softcap, weight_requires_grad, **others):
        calls.append(others)
        leaves = [_input.detach().requires_grad_(), weight.detach().requires_grad_()]
        leaves += [] if bias is None else [bias.detach().requires_grad_()]
        with torch.enable_grad():
            logits = functional.linear(*leaves)
            logits = softcap * torch.tanh(logits / softcap) if softcap else logits
            loss = functional.cross_entropy(logits, target, reduction=others["reduction"])
        dhidden, dweight, *dbias = torch.autograd.grad(loss, leaves)
        dweight = dweight if weight_requires_grad else None
        return loss.detach(), None, None, None, dhidden, dweight, (dbias or [None])[0]

    return SimpleNamespace(fused_linear_cross_entropy_forward=fused_linear_cross_entropy_forward)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_liger_is_given_what_it_takes(frozen: bool, bias: bool, softcap: float | None) -> None:
    head, hidden, targets = problem(torch.float64, bias)
    head.weight.requires_grad_(not frozen)
    calls: list[dict[str, Any]] = []
    score = score_of(head) if softcap else head
    with mock.patch.object(linear_loss, "_liger", return_value=liger(calls)):
        loss = linear_loss_sum(hidden, targets, score, VOCABULARY, Linear(head.weight, head.bias, softcap))
    wanted = [tensor for tensor in (hidden, *head.parameters()) if tensor.requires_grad]
    found = torch.autograd.grad(loss / 7, wanted)
    expected = token_loss_sum(score(hidden), targets)
    torch.testing.assert_close(loss, expected)
    for one, other in zip(found, torch.autograd.grad(expected / 7, wanted), strict=True):
        torch.testing.assert_close(one, other)
    assert calls[0]["accum_dtype"] == torch.float32


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator returns."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return result


@contextmanager
def some_at_a_time(rows: int) -> Iterator[None]:
    with mock.patch.object(linear_loss, "_LOGITS", rows * tiny.VOCABULARY):
        yield


def heads(name: str) -> nn.Module:
    """Models whose heads differ."""
    if name == "lora on the head":
        model = models.make_model("llama", torch.float64)
        return get_peft_model(model, LoraConfig(r=3, target_modules=["lm_head", "q_proj"], init_lora_weights=False))
    if name == "a head that is saved":
        model = models.make_model("llama", torch.float64)
        return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    return tiny_models.tiny_model(name)


@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("LlamaForCausalLM", True),
        ("Gemma2ForCausalLM", True),  # soft-capped, tied
        ("GraniteForCausalLM", False),  # scaled
        ("CohereForCausalLM", False),
        ("BertLMHeadModel", True),
        ("OPTForCausalLM", True),
        ("lora on the head", False),
        ("a head that is saved", False),
    ],
)
def test_no_model_makes_all_logits_in_training(name: str, linear: bool) -> None:
    batch = models.make_batch("plain", 41)
    batch["input_ids"] %= tiny.VOCABULARY
    model = heads(name).train()
    plain = copy.deepcopy(model)
    logits = plain(input_ids=batch["input_ids"], use_cache=False).logits
    wanted = functional.cross_entropy(logits.flatten(0, 1), models.shifted(batch["labels"]).flatten())
    wanted.backward()
    models.patch(model)
    asked = []
    plainly = value.linear_loss_sum

    def watched(hidden: Any, targets: Any, score: Any, vocabulary: int, linear: Linear | None) -> torch.Tensor:
        asked.append(linear is not None)
        return plainly(hidden, targets, score, vocabulary, linear)

    with some_at_a_time(3), mock.patch.object(value, "linear_loss_sum", watched), Largest() as seen:
        outputs = model(**batch)
        outputs.loss.backward()
    assert asked == [linear]
    assert isinstance(outputs.logits, Spread)
    assert seen.most < logits.numel(), "logits of all tokens were made"
    tolerance = 1e-6 if name in ("GraniteForCausalLM", "Gemma2ForCausalLM") else 1e-10  # norms in fp32
    torch.testing.assert_close(outputs.loss, wanted.detach(), rtol=tolerance, atol=tolerance)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=tolerance)


def test_evaluation_has_its_logits_and_nothing_stays_behind() -> None:
    batch = models.make_batch("plain")
    model = models.make_model("llama").train()
    expected = models.plain_logits(model, batch).detach()
    models.patch(model)
    assert isinstance(model(**batch).logits, Spread)
    torch.testing.assert_close(model.eval()(**batch).logits, expected)
    torch.testing.assert_close(model.train()(input_ids=batch["input_ids"]).logits, expected)
    with (
        mock.patch.object(type(model.model), "forward", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        model(**batch)
    assert model.eval().generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape[1] == 39
    assert isinstance(model.train()(**batch).logits, Spread)
    with mock.patch.object(type(model.model), "forward", side_effect=EOFError), pytest.raises(EOFError):
        model(**batch)
    assert not part_of(model, Head).lazy.under_way
    head = model.lm_head
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))  # another module takes its place
    adapted(**batch).loss.backward()
    assert "forward" not in vars(head)
    hf_burst.unpatch_model(adapted)
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=batch["input_ids"]).logits, expected)


def test_the_fused_loss_of_liger_in_the_place_of_forward_is_refused() -> None:
    def lce_forward(self, **kwargs):
        raise AssertionError("which adds up the loss of one rank")

    lce_forward = FunctionType(lce_forward.__code__, {"__name__": "liger_kernel.transformers.model.llama"})
    model = models.patch(models.make_model("llama").train())
    model.forward = MethodType(lce_forward, model)
    with pytest.raises(ConfigError, match="'fused_linear_cross_entropy': False"):
        model(**models.make_batch("plain"))


def gradients_with(prepare: Callable[[nn.Module], Any], patched: bool) -> list[torch.Tensor | None]:
    """Of a model that someone has changed."""
    model = models.make_model("llama", torch.float64).train()
    kept = prepare(model)
    if patched:
        models.patch(model)
    batch = models.make_batch("plain")
    with some_at_a_time(5):
        (model(**batch).loss if patched else models.plain_loss(model, batch)).backward()
    extra = [kept] if isinstance(kept, nn.Parameter) else []
    return [parameter.grad for parameter in [*model.parameters(), *extra]]


def scale_by_a_weight_elsewhere(model: nn.Module) -> nn.Parameter:
    factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden) * factor
    return factor


def leave_a_weight_aside(model: nn.Module) -> None:
    model.lm_head.unused = nn.Linear(3, 3, dtype=torch.float64)


def shrink(module: nn.Module, args: Any, out: Any) -> None:
    out.mul_(0.1)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "logits in place": lambda model: model.lm_head.register_forward_hook(shrink),
    "a logit": lambda model: model.lm_head.register_forward_hook(lambda _, __, out: out.__setitem__((..., 3), 0.0)),
    "new logits": lambda model: model.lm_head.register_forward_hook(lambda _, __, out: -out.to(dtype=torch.float64)),
    "gradient of the weight": lambda model: model.lm_head.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3)),
    "gradient of the head": lambda model: model.lm_head.register_full_backward_hook(
        lambda _, grads, __: (2 * grads[0],)
    ),
    "a weight elsewhere": scale_by_a_weight_elsewhere,
    "a weight that follows": lambda model: nn.utils.parametrizations.weight_norm(model.lm_head) and None,
    "a weight that follows before": lambda model: nn.utils.weight_norm(model.lm_head) and None,
    "a weight that is not used": leave_a_weight_aside,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_whoever_changes_the_head_gets_what_one_process_gives(change: str) -> None:
    wanted, found = (gradients_with(CHANGES[change], patched) for patched in (False, True))
    for mine, other in zip(found, wanted, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_heads_in_float16_make_all_logits() -> None:
    """Their gradients must not be found before their scale is known."""
    model = models.patch(models.make_model("llama").train().half())
    with mock.patch.object(linear_loss, "linear_loss_sum", side_effect=AssertionError):
        (1000 * model(**models.make_batch("plain")).loss).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_models_that_share_a_head() -> None:
    batch = models.make_batch("plain")
    first, second = (models.make_model("llama", torch.float64, seed).train() for seed in range(2))
    second.lm_head = first.lm_head
    wanted = [models.plain_loss(model, batch).detach() for model in (first, second)]
    for model in (first, second):
        models.patch(model)
    for _ in range(30):
        for model, loss in zip((first, second), wanted, strict=True):
            torch.testing.assert_close(model(**batch).loss.detach(), loss)
    hf_burst.unpatch_model(first)
    torch.testing.assert_close(second(**batch).loss.detach(), wanted[1])
    hf_burst.unpatch_model(second)
    assert "forward" not in vars(first.lm_head)


def test_a_liger_that_lacks_something_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    def fused_linear_cross_entropy_forward(_input, weight, target, accum_dtype=None):
        raise AssertionError("which must not be called")

    old = SimpleNamespace(fused_linear_cross_entropy_forward=fused_linear_cross_entropy_forward)
    for module in ({"return_value": old}, {"side_effect": RuntimeError("no driver")}):
        with mock.patch.object(linear_loss.importlib, "import_module", **module), caplog.at_level("WARNING"):
            assert linear_loss._liger.__wrapped__("cuda", torch.bfloat16) is None
    assert "liger-kernel>=0.8.5" in caplog.text
    assert "no driver" in caplog.text


def test_what_else_is_done_with_logits_is_done_with_all_of_them() -> None:
    logits, layer = torch.randn(1, 3, 4), nn.Linear(2, 4)
    head = SimpleNamespace(
        plain=lambda _: logits, within=lambda compute, hidden: compute(hidden), own=None, module=layer, vocabulary=4
    )

    def put_off() -> Any:
        return Spread(torch.randn(1, 3, 2), head)  # type: ignore[arg-type]

    assert (3 * torch.tanh(put_off() / 3.0)).linear[2] == 3.0
    assert (2 * torch.tanh(put_off() / 3.0)).linear is None
    for function in (
        lambda value: 2 * torch.tanh(value / 3.0),
        lambda value: -value + 1,
        lambda value: value.to(dtype=torch.float64) + torch.ones(4),
        lambda value: value[..., :2].log_softmax(-1),
        lambda value: value[..., :],
    ):
        later = function(put_off())
        assert later.head is head, "nothing is computed"
        assert torch.equal(later.score(), function(logits))
        assert later.dtype == function(logits).dtype
    for function in (
        lambda value: value[:, 1:],
        lambda value: value[..., 1:, :],
        lambda value: value[:, 0],
        lambda value: torch.cat([value, logits]),
        lambda value: value * logits,
        lambda value: logits - value,
        lambda value: value.softmax(1),
        lambda value: value.argmax(-1),
        lambda value: torch.as_tensor(value.shape),
    ):
        assert torch.equal(function(put_off()), function(logits))
    written, expected = put_off(), logits.clone()
    written[:, :, 2] = 7.0
    expected[:, :, 2] = 7.0
    assert torch.equal(2 * written.score(), 2 * expected)
    assert len(written) == len(list(written)) == 1
    twin = copy.copy(put_off())
    assert twin.head is head
    with pytest.raises(AttributeError):
        twin.__array__()


def shard_the_head(rank: int, size: int, way: str) -> None:
    """FSDP2 around the head: with the root's weights, with the last norm as accelerate has it, or by itself."""
    batch = models.make_batch("packed")
    model = models.make_model("llama", torch.float64).train()
    models.plain_loss(model, batch).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    models.patch(model)
    mesh = init_device_mesh("cpu", (size,))
    # a policy whose outputs are of a lesser dtype: that of the loss must not be
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(output_dtype=torch.float64)}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if way == "tail":
        fully_shard([model.model.norm, model.lm_head], **options, reshard_after_forward=False)
    elif way != "root":
        fully_shard(model.lm_head, **options, reshard_after_forward=way == "resharded")
    fully_shard(model, **options)
    for accumulated in (1, 2):
        with some_at_a_time(5):
            loss = model(**batch).loss
        assert isinstance(model.lm_head.weight, DTensor) or way != "resharded"
        loss.backward()
        torch.testing.assert_close(loss, loss.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(whole(parameter.grad), accumulated * wanted[name], rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        assert model.eval()(**batch).logits.shape[1] == batch["input_ids"].shape[1]


@pytest.mark.parametrize("way", ["root", "tail", "alone", "resharded"])
def test_heads_that_fsdp2_shards(ranks: Ranks, way: str) -> None:
    ranks(2).run(shard_the_head, way)


def share_a_head(rank: int, size: int) -> None:
    batch = models.make_batch("left")
    model = models.make_model("gpt2", torch.float64).train()  # tied
    models.plain_loss(model, batch).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    models.patch(model)
    with some_at_a_time(2):
        model(**batch).loss.backward()
    for found, gradient in zip(group_mean(model), wanted, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-10)


def test_tied_heads_over_ranks(ranks: Ranks) -> None:
    ranks(3).run(share_a_head)


def ligers_parts(tokens: int, width: int, vocabulary: int) -> tuple[int, int]:
    """The budget, and the tokens of a part by Liger's own arithmetic: ceil(V / (C * H)) parts, rounded up."""
    budget = linear_loss._liger_budget(tokens, width, vocabulary)
    parts = -(-vocabulary // (budget * width))
    return budget, min(tokens, 1 << (-(-tokens // parts) - 1).bit_length())


@given(tokens=st.integers(1, 1 << 18), width=st.integers(8, 1 << 14), vocabulary=st.integers(8, 1 << 19))
def test_the_parts_of_ligers_loss_are_no_larger_than_they_may_be(tokens, width, vocabulary):
    budget, rows = ligers_parts(tokens, width, vocabulary)
    least = max(1, min(4, 2**31 // (tokens * width)))
    assert budget == least or rows * vocabulary <= 2**29 or (budget > least and rows == 1)
    assert budget >= least


def test_the_parts_of_ligers_loss_are_few() -> None:
    assert ligers_parts(8192, 4096, 128256) == (31, 4096)  # of an 8B Llama, 32K tokens over 4 ranks
    assert ligers_parts(37120, 2048, 128256)[1] == 4096
    assert ligers_parts(3000, 4096, 128256)[1] == 3000
    assert ligers_parts(1 << 17, 4096, 128256) == (4, 1 << 14)
    assert ligers_parts(1 << 19, 4096, 128256) == (1, 1 << 14), "of 512K tokens a rank, a quarter"
