"""Experts that lie on several ranks, to which the tokens of a shared sequence travel, beside one process."""

import re
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from packaging.version import Version
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.distributed import DistributedConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import hf_burst
from hf_burst.check.tiny import Double, tiny_model
from hf_burst.errors import BurstError, ConfigError, UnsupportedModelError
from tests.support import models
from tests.support.expert_ranks import divided_twice, over_ranks, whole
from tests.support.ranks import RankError, RankPool

expert_parallel = pytest.importorskip("transformers.distributed.expert_parallel", reason="no AllToAllEP before 5.23")
Ranks = Callable[[int], RankPool]
STEPS, RATE, CLIP = 3, 0.1, 0.5
SIZES = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_experts_per_tok": 2,
}
BALANCED = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
COUNT = 12  # experts, of which 2, 3 and 4 ranks hold as many
KINDS: dict[str, Any] = {
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        lambda: Qwen3MoeConfig(**SIZES, **BALANCED, num_experts=COUNT, moe_intermediate_size=16),
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        lambda: GptOssConfig(**SIZES, **BALANCED, num_local_experts=COUNT, sliding_window=6),
    ),
    "mixtral": (MixtralForCausalLM, lambda: MixtralConfig(**SIZES, **BALANCED, num_local_experts=COUNT)),
    "glm4_moe": (  # a dense layer, and a shared expert
        Glm4MoeForCausalLM,
        lambda: Glm4MoeConfig(**SIZES, n_routed_experts=COUNT, moe_intermediate_size=16, first_k_dense_replace=1),
    ),
}


@dataclass(frozen=True)
class Case:
    """Groups of `burst` ranks; `held` neighbours together have all experts."""

    name: str
    held: int
    burst: int
    groups: int = 1
    kind: str = "plain"
    explicit: bool = False
    checkpointing: bool = False
    memory: tuple[tuple[str, float], ...] = ()
    crowded: bool = False  # all tokens choose the experts of the first rank

    @property
    def ranks(self) -> int:
        return self.burst * self.groups

    def __str__(self) -> str:
        switches = [name for name in ("explicit", "checkpointing", "memory", "crowded") if getattr(self, name)]
        return "-".join([self.name, f"{self.groups}x{self.burst}", f"{self.held}_held", self.kind, *switches])


def make_model(case: Case) -> PreTrainedModel:
    kind, config = KINDS[case.name]
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny_model(kind, config())
    finally:
        torch.set_default_dtype(torch.float32)
    for path, weight in model.named_parameters() if case.crowded else ():
        if path.endswith("router.bias"):
            weight.data[:2] += 1000
    return model


def train(
    model: PreTrainedModel, steps: list[list[dict[str, Tensor]]], mean: Callable[[Tensor], Tensor] = Tensor.detach
) -> dict[str, Any]:
    """What steps of SGD with clipped gradients do to a model, each on the mean of its batches."""
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    weights = dict(model.named_parameters())
    double = model.dtype == torch.float64 and not model.is_gradient_checkpointing  # layers that run again are not in it
    for batches in steps:
        loss = torch.zeros((), dtype=model.dtype, device=model.device)
        with Double() if double else nullcontext():
            for batch in batches:
                own = model(**batch).loss / len(batches)
                own.backward()
                loss += own.detach()
        gradients = {name: whole(weight.grad) * divided_twice(weight) for name, weight in weights.items()}
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        with torch.no_grad():
            for weight in weights.values():
                weight -= RATE * min(1.0, CLIP / float(norm)) * weight.grad * divided_twice(weight)
        model.zero_grad()
        found["losses"].append(mean(loss))
        found["norms"].append(norm)
        found["gradients"].append(gradients)
    return found | {"weights": {name: whole(weight.detach()) for name, weight in weights.items()}}


def mean_over_ranks(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def compare(rank: int, size: int, case: Case) -> None:
    model = make_model(case)
    placed = over_ranks(model, case.held)
    steps = [
        [models.make_batch(case.kind, 37 + 6 * group, case.groups * step + group) for group in range(case.groups)]
        for step in range(STEPS)
    ]
    plain = [[{**batch, "use_cache": False} for batch in batches] for batches in steps]
    if case.checkpointing:
        model.gradient_checkpointing_enable()
        placed.gradient_checkpointing_enable()
    wanted = train(model, plain)
    mesh = init_device_mesh("cpu", (case.groups, case.burst), mesh_dim_names=("dp", "cp"))
    models.patch(placed, models.config_of(**dict(case.memory)), mesh["cp"])
    own = [batches[rank // case.burst] for batches in steps]
    found = train(
        placed,
        [[hf_burst.shard_batch(batch, group=mesh["cp"]) if case.explicit else batch] for batch in own],
        mean_over_ranks,
    )
    close = {"rtol": 1e-6, "atol": 1e-7} if case.checkpointing else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(found, wanted, **close)
    assert min(map(float, wanted["norms"])) > CLIP, "the clipping must be felt"


CASES = [
    *(pytest.param(Case(name, 2, 2), marks=[pytest.mark.full] * (name != "qwen3_moe")) for name in KINDS),
    Case("qwen3_moe", 3, 3, kind="left"),
    pytest.param(Case("qwen3_moe", 2, 4, kind="packed", checkpointing=True), marks=pytest.mark.full),
    pytest.param(Case("gpt_oss", 4, 4, explicit=True), marks=pytest.mark.full),
    Case(
        "mixtral",
        2,
        2,
        groups=2,
        kind="right",
        checkpointing=True,
        memory=(("layers_per_checkpoint", 2), ("tiled_mlp", 5)),
    ),
    Case("glm4_moe", 4, 2, groups=2, kind="packed", memory=(("tiled_mlp", 5), ("head_groups", 2))),
    pytest.param(Case("gpt_oss", 2, 4, crowded=True, checkpointing=True), marks=pytest.mark.full),
    Case("gpt_oss", 2, 2, crowded=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_one_process(ranks: Ranks, case: Case) -> None:
    if case.name == "glm4_moe" and Version(transformers.__version__) >= Version("5.24"):
        pytest.skip("its routers are fp32 by name, and FSDP2 itself refuses two dtypes in a layer")
    ranks(case.ranks).run(compare, case)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tp_size": 2, "ep_size": 2}, "tp_size=2, ep_size=2.* tokens do not travel"),
        ({"tp_size": 2, "ep_size": 2, "tp_plan": {}, "ep_implementation": "all_reduce"}, "tokens do not travel"),
        ({"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, "tokens do not travel"),
        ({"fsdp_size": 2, "ep_size": 2, "ep_implementation": "my_own"}, "ep_implementation='my_own'"),
    ],
    ids=[
        "all ranks hold the same tokens",
        "all_reduce",
        "some ranks hold the same tokens",
        "an exchange that is not known",
    ],
)
def test_exchanges_of_the_same_tokens_are_refused(settings: dict[str, Any], sentence: str) -> None:
    model = make_model(Case("qwen3_moe", 1, 1))
    model.config.distributed_config = DistributedConfig(**settings)
    with pytest.raises(UnsupportedModelError, match=sentence):
        hf_burst.patch_model(model)


def fail_in_fp64(rank: int, size: int) -> None:
    placed = hf_burst.patch_model(over_ranks(make_model(Case("mixtral", 2, 2)), 2))
    placed.eval()(**models.make_batch("plain"))  # without a gradient
    placed.train()(**models.make_batch("plain"))


def test_gradients_that_torch_divides_twice_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(fail_in_fp64)
    for error in caught.value.errors:
        assert isinstance(error, ConfigError)
        assert "torch.float64, and one rank alone has its experts" in str(error)


class OnlyOwnTokens(expert_parallel.AllReduceEP):
    """As if the ranks held the same tokens."""

    needs_shared_batch = False


def add_up(rank: int, size: int) -> tuple[float, float]:
    """The loss where ranks that share a sequence add up what their experts return (AllReduceEP), and that of one
    process."""
    model, batch = make_model(Case("mixtral", 2, 2)), models.make_batch("plain", 32)
    expert_parallel.EPImplementationInterface.register("add up", OnlyOwnTokens)
    with mock.patch("hf_burst.hf.models.support._EXPERT_EXCHANGES", ("add up",)):
        placed = models.patch(over_ranks(model, 2, ep_implementation="add up"))
    return placed(**batch).loss.item(), model(**batch, use_cache=False).loss.item()


def test_why_the_same_tokens_are_refused(ranks: Ranks) -> None:
    for found, wanted in ranks(2).run(add_up):
        assert abs(found - wanted) > 1e-2


def compare_broken(rank: int, size: int, case: Case, how: str) -> None:
    with ExitStack() as stack:
        if how == "gradients of experts are averaged over their copies":
            stack.enter_context(mock.patch("torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor"))
        elif how == "the last token that travels here is lost":
            forward = GptOssExperts.forward

            def lose(self: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
                kept = torch.arange(len(tokens)) < len(tokens) - 1
                return forward(self, tokens, chosen, weights) * kept[:, None]

            stack.enter_context(mock.patch.object(GptOssExperts, "forward", lose))
        compare(rank, size, case)


@pytest.mark.parametrize(
    "how",
    [
        "gradients of experts are averaged over their copies",
        pytest.param("the last token that travels here is lost", marks=pytest.mark.full),
    ],
)
def test_what_is_wrong_is_seen(ranks: Ranks, how: str) -> None:
    with pytest.raises(RankError, match="not close"):
        ranks(4).run(compare_broken, Case("gpt_oss", 2, 4), how)


def generate(rank: int, size: int, held: int) -> None:
    model = make_model(Case("qwen3_moe", held, 2)).float().eval()
    placed, ids = over_ranks(model, held), models.make_batch("plain")["input_ids"]
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "cp"))
    models.patch(placed, group=mesh["cp"])
    asked = {"max_new_tokens": 3 + 2 * (rank // 2), "do_sample": False}  # groups generate unlike
    wanted = model.generate(ids, **asked)
    assert torch.equal(hf_burst.generate(placed, ids, **asked), wanted)


def test_generation(ranks: Ranks) -> None:
    ranks(4).run(generate, 2)
    with pytest.raises(RankError) as caught:
        ranks(4).run(generate, 4)
    for error in caught.value.errors:
        assert isinstance(error, ConfigError)
        assert "an ep_size that divides burst_size" in str(error)


def fail(rank: int, size: int, what: str) -> None:
    model, batch = make_model(Case("qwen3_moe", 2, 2)), models.make_batch("plain")
    placed: Any = over_ranks(model.float(), 2)
    hf_burst.patch_model(placed)
    if what == "adapter":
        from peft import LoraConfig, get_peft_model

        get_peft_model(placed, LoraConfig(target_modules=[], target_parameters=["mlp.experts.down_proj"]))(**batch)
    elif what == "compiled":
        torch.compile(placed, backend="eager")(**batch)
    elif what == "prepared":
        Accelerator(parallelism_config=hf_burst.BurstParallelismConfig()).prepare(placed)
    else:
        with torch.inference_mode():
            placed.eval()(**batch)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("adapter", "an adapter of peft on them"),
        ("compiled", "under torch.compile"),
        ("prepared", "accelerator.prepare.optimizer, loader"),
        ("inference", "Use torch.no_grad"),
    ],
)
def test_what_is_not_served_is_refused_on_every_rank(ranks: Ranks, what: str, sentence: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(fail, what)
    for error in caught.value.errors:
        assert isinstance(error, BurstError)
        assert re.search(sentence, str(error))
