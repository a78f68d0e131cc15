"""A document is refused when weights have been written since it was read, however they were written, and served as long
as they have the same values. Neither torch's counters of versions nor addresses see all of these writes."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import hf_burst
from hf_burst.errors import ConfigError, RankMismatchError
from tests.hf.generation.test_remembering import Ranks, ask, document_of, make, questions
from tests.hf.models.test_experts_4bit import experts_of, load, make_model
from tests.support import models

Model = Any
CHANGED = "weights of the model have changed"


def is_refused(model: Model, read: hf_burst.Document, error: type[Exception] | tuple[Any, ...] = ConfigError) -> None:
    labelled = {**questions(), "labels": questions()["input_ids"]}
    for use in (lambda: ask(model, read, "greedy"), lambda: hf_burst.token_losses(model, labelled, document=read)):
        with pytest.raises(error, match=CHANGED):
            use()


def last(model: Model) -> torch.nn.Parameter:
    return list(model.model.parameters())[-1]


def held(model: Model) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def step(weights: Iterable[Any], kind: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    learned = list(weights)
    for weight in learned:
        weight.grad = torch.ones_like(weight)
    kind(learned, lr=1e-3, **options).step()


def others(model: Model) -> dict[str, torch.Tensor]:
    return {name: value * 1.01 for name, value in model.state_dict().items()}


def assign_twice(model: Model) -> None:
    """Often at the address of before, which the first assignment frees."""
    weight = last(model)
    value = weight.detach() * 1.01
    weight.data = torch.empty(0)
    weight.data = value.clone()


def write_memory(model: Model) -> None:
    """As kernels do that are given an address, such as those of an optimizer outside of torch."""
    last(model).detach().numpy()[-1] += 1e-6


def flip_bit(model: Model) -> None:
    last(model).data.view(torch.int64)[3] ^= 1


def swap_rows(model: Model) -> None:
    weight = model.model.embed_tokens.weight
    weight.data[[3, 4]] = weight.data[[4, 3]]


def replace(model: Model, value: torch.Tensor) -> None:
    model.model.norm.weight = torch.nn.Parameter(value)


WRITES: dict[str, Callable[[Model], Any]] = {
    "SGD": lambda model: step(model.parameters(), torch.optim.SGD),
    "AdamW, fused": lambda model: step(model.parameters(), torch.optim.AdamW, fused=True),
    "AdamW, one by one": lambda model: step(model.parameters(), torch.optim.AdamW, foreach=False),
    "AdamW, of one weight": lambda model: step([last(model)], torch.optim.AdamW),
    "load_state_dict": lambda model: model.load_state_dict(others(model)),
    "load_state_dict, assigned": lambda model: model.load_state_dict(others(model), assign=True),
    "data.copy_": lambda model: last(model).data.copy_(last(model).detach() * 1.01),
    "data, several at once": lambda model: torch._foreach_add_([weight.data for weight in model.parameters()], 1e-3),
    "data, assigned": lambda model: setattr(last(model), "data", last(model).detach() * 1.01),
    "data, assigned twice": assign_twice,
    "memory": write_memory,
    "one bit": flip_bit,
    "rows in another order": swap_rows,
    "another parameter": lambda model: replace(model, last(model).detach() * 1.01),
    "another dtype": lambda model: model.float(),
    "another dtype and back": lambda model: model.bfloat16().double(),
}


@pytest.mark.parametrize("kind", WRITES)
def test_written_weights(kind: str) -> None:
    model = models.patch(make("llama"))
    read = hf_burst.remember(model, document_of(9))
    before = {name: value.detach().clone() for name, value in held(model).items()}
    expected = ask(model, read, "greedy")
    WRITES[kind](model)
    is_refused(model, read)
    for name, value in held(model).items():
        value.data = before[name]
    assert torch.equal(ask(model, read, "greedy"), expected), "values count, not writes"


SAME: dict[str, Callable[[Model], Any]] = {
    "load_state_dict": lambda model: model.load_state_dict({**model.state_dict()}),
    "load_state_dict, assigned": lambda model: model.load_state_dict({**model.state_dict()}, assign=True),
    "another parameter": lambda model: replace(model, last(model).detach().clone()),
    "device": lambda model: model.to("cpu"),
    "frozen": lambda model: model.requires_grad_(False),
    "elsewhere in memory": lambda model: setattr(last(model), "data", torch.cat([last(model)[:1], last(model)])[1:]),
}


@pytest.mark.parametrize("kind", SAME)
def test_the_same_values(kind: str) -> None:
    model = models.patch(make("llama"))
    read = hf_burst.remember(model, document_of(9))
    expected = ask(model, read, "greedy")
    SAME[kind](model)
    assert torch.equal(ask(model, read, "greedy"), expected)


# what changes an adapter, and what takes the change back
ADAPTERS: dict[str, tuple[Callable[[Model], Any], Callable[[Model], Any] | None]] = {
    "merged": (lambda model: model.merge_adapter(), None),  # it rounds
    "disabled": (lambda model: model.disable_adapter_layers(), lambda model: model.enable_adapter_layers()),
    "another": (lambda model: model.set_adapter("other"), lambda model: model.set_adapter("default")),
    "both": (
        lambda model: model.base_model.set_adapter(["default", "other"]),
        lambda model: model.set_adapter("default"),
    ),
    "learned": (lambda model: lora_of(model, "default").data.mul_(2), lambda m: lora_of(m, "default").data.div_(2)),
}


def lora_of(model: Model, adapter: str) -> torch.Tensor:
    return next(weight for name, weight in model.named_parameters() if name.endswith(f"lora_A.{adapter}.weight"))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(kind: str) -> None:
    settings = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = hf_burst.patch_model(get_peft_model(make("llama"), settings).eval())
    model.add_adapter("other", settings)
    read = hf_burst.remember(model, document_of(9))
    expected = ask(model.eval(), read, "greedy")
    lora_of(model, "other").data.mul_(2)
    assert torch.equal(ask(model, read, "greedy"), expected), "it does not work"
    change, back = ADAPTERS[kind]
    change(model)
    is_refused(model.eval(), read)
    if back is not None:
        back(model)
        assert torch.equal(ask(model.eval(), read, "greedy"), expected)


def of_one_rank(rank: int, size: int) -> None:
    """Weights that each rank holds, and that one of them writes."""
    model = models.patch(make("llama"))
    read = hf_burst.remember(model, document_of(9))
    last(model).data.mul_(1 + 0.01 * rank)
    is_refused(model, read, ConfigError if rank else RankMismatchError)


def under_fsdp2(rank: int, size: int) -> None:
    model = models.patch(make("llama"))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    read = hf_burst.remember(model, document_of(9))
    expected = ask(model, read, "greedy")
    model.unshard()
    model.model.layers[rank].unshard()
    assert torch.equal(ask(model, read, "greedy"), expected), "gathered weights are the same"
    model.reshard()
    assert torch.equal(ask(model, read, "greedy"), expected)
    step(model.parameters(), torch.optim.SGD)
    is_refused(model, read)
    read = hf_burst.remember(model, document_of(9))
    ask(model, read, "greedy")
    last(model).to_local().data.mul_(1 + 0.01 * rank)  # the other rank gathers it
    is_refused(model, read)


@pytest.mark.parametrize("function", [of_one_rank, under_fsdp2])
def test_written_weights_over_ranks(ranks: Ranks, function: Callable[..., None]) -> None:
    ranks(2).run(function, timeout=60.0)


def quantized(kind: str, folder: Path) -> Model:
    """A model with MLPs in 4 or 8 bits, or with experts in 4 bits."""
    if kind == "experts":
        make_model("Qwen3Moe").save_pretrained(folder)
        return load(folder).eval()
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=models.VOCABULARY, **sizes)).eval()
    for mlp in (layer.mlp for layer in model.model.layers):
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(mlp, name)
            features, values = (linear.in_features, linear.out_features), linear.weight.data
            small: Any
            if kind == "4 bits":
                small = Linear4bit(*features, bias=False, device="meta")
                small.weight = Params4bit(values, requires_grad=False, module=small).to("cpu")
            else:
                small = Linear8bitLt(*features, bias=False, has_fp16_weights=False, device="meta")
                small.weight = Int8Params(values, requires_grad=False, has_fp16_weights=False).to("cpu")
            setattr(mlp, name, small)
    return model


def state_of(model: Model, kind: str) -> Any:
    if kind == "experts":
        module, name = experts_of(model)[0]
        return module.parametrizations[name][0].state
    linear = model.model.layers[1].mlp.up_proj
    return linear.weight.quant_state if kind == "4 bits" else linear.state


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("4 bits", "absmax"), ("4 bits", "code"), ("4 bits", "offset"), ("4 bits", "state2.absmax")),
        *(("8 bits", "SCB"), ("8 bits", "CB"), ("experts", "absmax"), ("experts", "state2.absmax")),
    ],
)
def test_scales_of_quantized_weights(kind: str, name: str, tmp_path: Path) -> None:
    """Which are no parameters, and in 8 bits move from the weight to its module in the first pass."""
    model = hf_burst.patch_model(quantized(kind, tmp_path))
    model.generation_config.eos_token_id = None
    read = hf_burst.remember(model, document_of(9))
    expected = ask(model, read, "greedy")
    *path, attribute = name.split(".")
    state = state_of(model, kind)
    for each in path:
        state = getattr(state, each)
    before = getattr(state, attribute)
    setattr(state, attribute, (before.float() * 2).to(before.dtype))
    is_refused(model, read)
    setattr(state, attribute, before)
    assert torch.equal(ask(model, read, "greedy"), expected)
    before.data.flatten()[:1].add_(1)
    is_refused(model, read)
