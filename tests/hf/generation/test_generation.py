"""Tokens that are generated over ranks equal those of `model.generate` in one process."""

import inspect
import os
import re
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_burst
from hf_burst.errors import BatchError, ConfigError, RankMismatchError, UnsupportedModelError
from hf_burst.hf.models.recurrent import recurrent_modules
from hf_burst.hf.parts.key_cache import each_once
from hf_burst.hf.sharded_cache import ShardedCache
from hf_burst.hf.view import ModelView
from hf_burst.ranks.watch import Watch
from tests.support import models
from tests.support.ranks import RankError, RankPool
from tests.support.trainers import lora_config

Ranks = Callable[[int], RankPool]
GREEDY = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "several": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    "penalised": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
}


def prompt_of(length: int, padded: bool) -> dict[str, torch.Tensor]:
    """Two prompts, of which the second is padded on the left by a third."""
    ids = models.make_batch("plain", length)["input_ids"]
    if not padded:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1, : length // 3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def make(name: str) -> PreTrainedModel:
    """A small model in evaluation: of tests, or of the coverage table."""
    if not name.endswith(("CausalLM", "Generation", "LMHeadModel")):
        return models.make_model(name, torch.float64).eval()
    from tests.support.tiny_models import tiny_model

    model = tiny_model(name).eval()
    model.generation_config.eos_token_id = None
    return model


def compare(rank: int, size: int, name: str, length: int, padded: bool, ways: tuple[str, ...]) -> None:
    model, prompt = make(name), prompt_of(length, padded)
    asked = {"output_logits": True, "return_dict_in_generate": True}
    wanted: list[tuple[Any, dict[str, torch.Tensor]]] = []
    for way in ways:
        torch.manual_seed(5)
        wanted.append((model.generate(**prompt, **GREEDY | WAYS[way], **asked), prompt))
    model = hf_burst.patch_model(make(name))  # "dynamic" positions remember the longest prompt so far
    for way, (expected, given) in zip(ways, wanted, strict=True):
        torch.manual_seed(5)
        found = hf_burst.generate(model, **given, **GREEDY | WAYS[way], **asked)
        assert torch.equal(found.sequences, expected.sequences), way
        scale = max(float(part.abs().max()) for part in expected.logits)
        # recurrent layers compute their states in fp32, and generate rounds logits to it
        allowed = 3e-5 if recurrent_modules(ModelView(model)) else 3e-6
        for own, other in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=allowed * scale)


def every_field(rank: int, size: int, padded: bool) -> None:
    """All that `model.generate` returns but keys, with a row for each beam and return sequence."""
    model, prompt = make("llama"), prompt_of(23, padded)
    names = ("output_logits", "output_scores", "output_hidden_states", "return_dict_in_generate")
    for way in ("greedy", "sampled", "several", "beams"):
        options = GREEDY | WAYS[way] | dict.fromkeys(names, True)
        torch.manual_seed(5)
        wanted = model.generate(**prompt, **options)
        hf_burst.patch_model(model)
        torch.manual_seed(5)
        found = hf_burst.generate(model, **prompt, **options)
        hf_burst.unpatch_model(model)
        assert found.keys() == wanted.keys()
        shown = prompt.get("attention_mask", torch.ones_like(prompt["input_ids"])).bool()  # padding has other states
        for whole in (found, wanted):
            read = [state[shown.repeat_interleave(len(state) // 2, 0)] for state in whole.hidden_states[0]]
            whole.hidden_states = (tuple(read), *whole.hidden_states[1:])
        for name in wanted.keys() - {"past_key_values", "cache"}:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("size", "padded"), [(1, True), pytest.param(3, True, marks=pytest.mark.full), (2, False)])
def test_every_field_is_that_of_one_process(ranks: Ranks, size: int, padded: bool) -> None:
    every_field(0, 1, padded) if size == 1 else ranks(size).run(every_field, padded)


def test_settings_may_be_tensors() -> None:
    model, prompt = make("llama"), prompt_of(19, False)["input_ids"]
    options = {"do_sample": False, "max_new_tokens": 9}
    ends = model.generate(prompt, **options, eos_token_id=None, pad_token_id=0)[:, [21, 23]].flatten()
    settings = {"eos_token_id": ends, "pad_token_id": torch.tensor(0)}
    wanted = model.generate(prompt, **options, **settings)
    assert wanted.shape[1] < 28, "rows end"
    models.patch(model)
    assert torch.equal(hf_burst.generate(model, prompt, **options, **settings), wanted)
    model.generation_config.update(**settings)
    assert torch.equal(hf_burst.generate(model, prompt, **options), wanted)
    config = GenerationConfig(**options, **settings)
    assert torch.equal(hf_burst.generate(model, prompt, generation_config=config), wanted)
    memory = hf_burst.remember(model, prompt[:1, :9])
    assert torch.equal(hf_burst.generate(model, prompt[:1, 9:], document=memory, **options), wanted[:1, 9:])


CASES = [(1, False), (7, True), (64, False), (257, True)]
ALWAYS = {(1, 64), (3, 257), (4, 1)}  # sizes and lengths


@pytest.mark.parametrize(
    ("size", "length", "padded"),
    [
        pytest.param(size, *case, marks=() if (size, case[0]) in ALWAYS else pytest.mark.full)
        for size in (1, 2, 3, 4)
        for case in CASES
    ],
)
def test_tokens_are_those_of_one_process(ranks: Ranks, size: int, length: int, padded: bool) -> None:
    run(ranks, size, "llama", length, padded, tuple(WAYS))


@pytest.mark.parametrize(
    "name",
    [
        *("mistral", "gpt2", "llama_yarn", "llama_dynamic"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen2", "gpt_neox")),
    ],
)
def test_windows_and_learned_and_scaled_positions(ranks: Ranks, name: str) -> None:
    run(ranks, 2, name, 37, True, ("greedy",) if "dynamic" in name else ("greedy", "beams"))


# with weights of the coverage table, under which states last
@pytest.mark.parametrize(
    ("size", "length", "name"),
    [
        pytest.param(size, length, name, marks=[pytest.mark.full] * (size != always))
        for name, always in (("Qwen3_5", 3), ("KimiLinear", 1), ("Lfm2", 3), ("GraniteMoeHybrid", 2))
        for size, length in ((1, 7), (3, 1), (2, 37))
    ],
)
def test_layers_with_a_state(ranks: Ranks, name: str, size: int, length: int) -> None:
    run(ranks, size, f"{name}ForCausalLM", length, length > 1, ("greedy", "beams"))


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        ("GptOssForCausalLM", True),  # sinks and windows
        ("Gemma2ForCausalLM", False),  # soft-capping; Transformers' eager attention of padding is NaN
        ("Llama4ForCausalLM", True),  # chunks, and queries scaled by their positions
        ("DeepseekV3ForCausalLM", True),  # latent keys
        ("Gemma4ForConditionalGeneration", True),  # a wrapper, whose layers share keys
        pytest.param("Gemma3nForCausalLM", True, marks=pytest.mark.full),
    ],
)
def test_kinds_of_layers(ranks: Ranks, name: str, padded: bool) -> None:
    run(ranks, 3, name, 41, padded, ("greedy",))


def run(ranks: Ranks, size: int, *arguments: Any) -> None:
    """Compares on so many ranks."""
    if size == 1:
        compare(0, 1, *arguments)
    else:
        ranks(size).run(compare, *arguments)


@torch._dynamo.config.patch(recompile_limit=1000)  # behind it no graph is made
def compiled(rank: int, size: int) -> None:
    """Layers that are compiled by themselves: a token more must not be a graph more."""
    model, prompt = make("llama"), prompt_of(29, True)
    asked = {**prompt, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(**asked, max_new_tokens=8)
    hf_burst.patch_model(model)
    memory = hf_burst.remember(model, prompt["input_ids"][:1])
    for layer in model.model.layers:
        layer.compile(backend="eager")
    graphs = list[int]()
    for tokens in (4, 8):
        found = hf_burst.generate(model, **asked, max_new_tokens=tokens)
        hf_burst.generate(model, prompt["input_ids"][:1, :3], document=memory, do_sample=False, max_new_tokens=tokens)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert torch.equal(found, wanted)
    assert 0 < graphs[0] == graphs[1], graphs


@pytest.mark.slow
def test_compiled_layers(ranks: Ranks) -> None:
    ranks(2).run(compiled)


def share_of_keys(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Bytes of the prompt's keys on this rank, and new tokens on it, by layer."""
    model = models.patch(make("llama"))
    found = hf_burst.generate(
        model,
        models.make_batch("plain", 64)["input_ids"],
        **GREEDY | {"max_new_tokens": 13},
        return_dict_in_generate=True,
    )
    cache = found.past_key_values
    assert isinstance(cache, ShardedCache)
    assert cache.get_seq_length() == 64 + 12
    layers = cache.layers
    return [layer.document.keys.nbytes for layer in layers], [cache.answer.own(layer.count) for layer in layers]


def test_each_rank_holds_its_share(ranks: Ranks) -> None:
    shares = ranks(4).run(share_of_keys)
    whole = 2 * 64 * 2 * 8 * 8  # rows, tokens, key heads, their size, bytes of fp64
    assert {size for prompt, _ in shares for size in prompt} == {whole // 4}
    assert [new for _, new in shares] == [[3, 3]] * 4


def kept_by_windows(rank: int, size: int) -> list[list[int]]:
    """Positions of the prompt's keys on this rank, of two rows, by layer."""
    model = models.patch(make("qwen2"))  # the second layer has a window of 7 tokens
    found = hf_burst.generate(model, **prompt_of(64, True), **GREEDY, return_dict_in_generate=True)
    return [layer.document.positions[0].tolist() for layer in found.past_key_values.layers]


def test_keys_behind_windows_are_freed(ranks: Ranks) -> None:
    by_layer = zip(*ranks(3).run(kept_by_windows), strict=True)
    layers = [sorted(position for own in held for position in own) for held in by_layer]
    assert layers == [[*range(64)], [*range(64 - 6, 64)]]


def of_class(rank: int, size: int, name: str, padded: bool) -> None:
    compare(rank, size, name, 41, padded, ("greedy",))


# what is not compared: classes that are refused, and those whose cached generation in one process is not exact (Moshi),
# fails (HRM) or is NaN where rows are padded, as Transformers' eager attention makes it
REFUSED_CLASSES = {"DiffLlama", "Dory", "JetMoe", "FalconMamba", "Jamba", "Mamba", "Zamba", "Moshi", "HrmText"}
NAN_IF_PADDED = {"Gemma2", "GraniteMoeSWA", "GraniteSWA", "VaultGemma"}
EXACT = re.findall(r"\| (\w+) \| exact", (Path(__file__).parents[3] / "recipes/results/coverage.md").read_text())


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EXACT if name.endswith(("CausalLM", "LMHeadModel", "Generation"))])
def test_classes_of_the_coverage_table(ranks: Ranks, name: str) -> None:
    if name.removesuffix("ForCausalLM") in REFUSED_CLASSES:
        pytest.skip("refused, or not exact in one process")
    ranks(2).run(of_class, name, name.removesuffix("ForCausalLM") not in NAN_IF_PADDED)


NAMES = ("cache", "past_key_values", "cache_params")  # of a cache, in Transformers 5.17 to 5.24


def renamed(name: str) -> type[LlamaForCausalLM]:
    """A class that takes its cache by this name alone, whatever name the installed Transformers has."""
    own = next(each for each in NAMES if each in inspect.signature(LlamaForCausalLM.forward).parameters)

    class Renamed(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids, **{own if key == name else key: kwargs[key] for key in kwargs})

        def generate(self, **kwargs: Any) -> Any:
            return super().generate(**{own if key == name else key: kwargs[key] for key in kwargs})

    known = inspect.signature(Renamed.forward)
    taken = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    first, last = list(known.parameters.values())[:2], list(known.parameters.values())[2:]
    Renamed.forward.__signature__ = known.replace(parameters=[*first, taken, *last])  # type: ignore[attr-defined]
    return Renamed


def answer_by_name(rank: int, size: int, name: str) -> None:
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(3)
    model = renamed(name)(LlamaConfig(vocab_size=models.VOCABULARY, num_hidden_layers=2, **settings)).double().eval()
    model.generation_config.eos_token_id = None
    document, question = prompt_of(23, padded=False)["input_ids"][:1].split((16, 7), 1)
    whole = torch.cat([document, question], 1)
    with torch.no_grad():
        wanted = model.generate(input_ids=whole, **GREEDY)
        logits = model(whole).logits[:, 15:-1].log_softmax(-1)
    losses = -logits.gather(2, question[..., None])[..., 0]
    hf_burst.patch_model(model)
    assert hf_burst.generate(model, input_ids=whole, **GREEDY).equal(wanted)
    memory = hf_burst.remember(model, input_ids=document)
    assert hf_burst.generate(model, document=memory, input_ids=question, **GREEDY).equal(wanted[:, 16:])
    found = hf_burst.token_losses(model, {"input_ids": question, "labels": question}, document=memory)
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
    with pytest.raises(ConfigError, match=f"was given {name}=DynamicCache"):
        hf_burst.generate(model, input_ids=whole, **{name: DynamicCache()}, **GREEDY)
    with pytest.raises(BatchError, match="DynamicCache"):
        model.train()(whole, **{name: DynamicCache()})


@pytest.mark.parametrize("name", NAMES)
def test_caches_by_the_names_of_all_versions(ranks: Ranks, name: str) -> None:
    ranks(2).run(answer_by_name, name)


class _Noted(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


class _After(StoppingCriteria):
    """Stops when so many calls came: a state of its own, as a clock has."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls -= 1
        return torch.full((len(input_ids),), self.calls <= 0)


class _Never(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 7] = -torch.inf
        return scores


def of_the_first_rank(rank: int, size: int) -> tuple[list[int], list[int], float]:
    """A streamer, a criterion and random numbers that differ between ranks."""
    model, prompt = models.patch(make("llama")), prompt_of(19, False)["input_ids"][:1]
    torch.manual_seed(40 + rank)
    streamer = _Noted()
    options = {"do_sample": True, "streamer": streamer, "logits_processor": [_Never()]}
    found = hf_burst.generate(model, prompt, stopping_criteria=[_After(4 + rank)], **GREEDY | options)
    assert streamer.ended == (rank == 0)
    assert streamer.tokens == (found[0].tolist() if rank == 0 else [])
    return found[0].tolist(), streamer.tokens, float(torch.rand(()))


def test_what_only_the_first_rank_knows(ranks: Ranks) -> None:
    results = ranks(3).run(of_the_first_rank)
    assert len({tuple(tokens) for tokens, _, _ in results}) == 1
    assert len(results[0][0]) == 19 + 4
    for rank in (1, 2):  # their own random numbers go on where they were
        torch.manual_seed(40 + rank)
        assert results[rank][2] == float(torch.rand(()))


def under_autocast(rank: int, size: int) -> bool:
    """Tokens of a model in fp32 under autocast: keys are as narrow as values."""
    model, prompt = models.make_model("qwen3").eval(), prompt_of(19, True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model.generate(**prompt, **GREEDY)
        found = hf_burst.generate(models.patch(model), **prompt, **GREEDY, return_dict_in_generate=True)
    assert {layer.document.keys.dtype for layer in found.past_key_values.layers} == {torch.bfloat16}
    return torch.equal(found.sequences, wanted)


def test_autocast(ranks: Ranks) -> None:
    assert all(ranks(2).run(under_autocast))


def trained_after(rank: int, size: int) -> None:
    """A step of training has the same bits after answers, and without."""
    gradients = []
    for answers in (False, True):
        model = models.patch(models.make_model("llama", torch.float64))
        if answers:
            model.eval()
            hf_burst.generate(model, prompt_of(19, True)["input_ids"], **GREEDY)
            model.train()
        model(**models.make_batch("plain")).loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for own, other in zip(*gradients, strict=True):
        assert torch.equal(own, other)


def test_training_goes_on_as_before(ranks: Ranks) -> None:
    ranks(2).run(trained_after)


def with_sharded_weights(rank: int, size: int) -> None:
    model, prompt = make("llama"), prompt_of(19, True)
    wanted = model.generate(**prompt, **GREEDY)
    hf_burst.patch_model(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    plain = _fsdp_param_group.foreach_all_gather
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", side_effect=plain) as gathered:
        assert torch.equal(hf_burst.generate(model, **prompt, **GREEDY), wanted)
    assert gathered.call_count == 3, "two layers and what is around them, once a call"
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    model.train()
    model(**models.make_batch("plain")).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_fsdp2_gathers_weights_once(ranks: Ranks) -> None:
    ranks(2).run(with_sharded_weights)


def with_sharded_adapters(rank: int, size: int) -> None:
    """The outermost unit is that of peft, which `generate` of the model inside does not call."""
    from peft import get_peft_model

    model, prompt = get_peft_model(make("llama"), lora_config()).eval(), prompt_of(19, False)["input_ids"][:1]
    question = torch.cat([prompt, prompt[:, :5]], 1)
    wanted = [model.generate(input_ids=ids, **GREEDY) for ids in (prompt, question)]
    scores = torch.nn.functional.cross_entropy(model(question).logits[0, 18:-1], question[0, 19:], reduction="none")
    models.patch(model, group=torch.distributed.group.WORLD)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert torch.equal(hf_burst.generate(model, prompt, **GREEDY), wanted[0])
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    document = hf_burst.remember(model, prompt)
    answer = hf_burst.generate(model, question[:, 19:], document=document, **GREEDY)
    assert torch.equal(answer, wanted[1][:, 19:])
    batch = {"input_ids": question[:, 19:], "labels": question[:, 19:]}
    torch.testing.assert_close(hf_burst.token_losses(model, batch, document=document)[0], scores)
    model.train()
    model(**models.make_batch("plain")).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_fsdp2_gathers_weights_around_adapters(ranks: Ranks) -> None:
    ranks(2).run(with_sharded_adapters)


def gathering_fails(rank: int, size: int) -> None:
    model = models.patch(make("llama"))
    fully_shard(model)
    state = model._get_fsdp_state()
    before = state._auto_reshard_after_forward
    with mock.patch.object(type(model), "unshard", side_effect=MemoryError("full")), pytest.raises(MemoryError):
        hf_burst.generate(model, prompt_of(19, False)["input_ids"], **GREEDY)
    assert state._auto_reshard_after_forward == before


def test_fsdp2_shards_again_if_weights_cannot_be_gathered(ranks: Ranks) -> None:
    ranks(2).run(gathering_fails)


def one_group_fails(rank: int, size: int) -> tuple[str, int]:
    """Groups that share weights do not wait for each other after each token."""
    number = rank // 2
    model, prompt = make("llama"), prompt_of(19 + number, False)["input_ids"]
    options = GREEDY | {"max_new_tokens": 5 + 4 * number}
    wanted = model.generate(prompt, **options)
    hf_burst.patch_model(model, group=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"])
    fully_shard(model)
    told = ""
    try:
        hf_burst.generate(
            model, prompt, logits_processor=[_RaisingProcessor(KeyError() if number else None)], **options
        )
    except KeyError as problem:
        told = repr(problem)
    assert torch.equal(hf_burst.generate(model, prompt, **options), wanted)
    return told, rank


def test_an_error_of_one_group_of_those_that_share_weights() -> None:
    pool = RankPool(4)
    assert pool.run(one_group_fails, timeout=60.0) == [("", 0), ("", 1), ("KeyError()", 2), ("KeyError()", 3)]
    pool.close()


def over_fsdp1(rank: int, size: int) -> None:
    """FSDP1 gathers layers in every pass, so groups wait for each other, as in Transformers."""
    number = rank // 2
    model, prompt = make("llama"), prompt_of(19 + number, False)["input_ids"]
    options = GREEDY | {"max_new_tokens": 5 + 4 * number}
    wanted = model.generate(prompt, **options)
    hf_burst.patch_model(model, group=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"])
    layers = ModuleWrapPolicy({LlamaDecoderLayer})
    whole = FullyShardedDataParallel(
        model, auto_wrap_policy=layers, device_id=torch.device("cpu"), use_orig_params=True
    )
    whole(prompt)
    with FullyShardedDataParallel.summon_full_params(whole, recurse=False, writeback=False):
        assert torch.equal(hf_burst.generate(model, prompt, **options), wanted)


def test_groups_that_share_weights_by_fsdp1() -> None:
    pool = RankPool(4)
    pool.run(over_fsdp1, timeout=60.0)
    pool.close()


def one_rank_differs(rank: int, size: int, kind: str) -> None:
    model, prompt = models.patch(make("llama")), prompt_of(19, False)["input_ids"]
    if kind == "prompt":
        prompt = prompt.roll(rank, 1)
    elif kind == "shape":
        prompt = prompt[:, rank:]
    options = {"max_new_tokens": 9 + rank} if kind == "settings" else {}
    if kind == "training" and rank:
        model.train()
    hf_burst.generate(model, prompt, **GREEDY | options)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("prompt", "prompt .checksum."),
        ("shape", "prompt .checksum."),
        ("settings", "max_new_tokens.*Give generate the same prompt"),
        ("training", "model.eval"),
    ],
)
def test_ranks_that_differ_get_an_error(ranks: Ranks, kind: str, told: str) -> None:
    with pytest.raises(RankError, match=told) as caught:
        ranks(2).run(one_rank_differs, kind)
    assert all(isinstance(error, ConfigError | RankMismatchError) for error in caught.value.errors)


def one_rank_alone(rank: int, size: int) -> None:
    """Model.generate on one rank meets no collective; hf_burst.generate on one alone does, and says so."""
    model, prompt = models.patch(make("llama")), prompt_of(19, False)["input_ids"]
    if rank == 0:
        model.generate(prompt, **GREEDY)
        hf_burst.generate(model, prompt, **GREEDY)
    else:
        model(input_ids=prompt, use_cache=False)


def test_one_rank_alone(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="generate") as caught:
        ranks(2).run(one_rank_alone)
    assert all(isinstance(error, RankMismatchError) for error in caught.value.errors)


class _OfRank(LogitsProcessor):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 11 + self.rank] = 1e4
        return scores


def processors_differ(rank: int, size: int) -> None:
    model = models.patch(make("llama"))
    hf_burst.generate(model, prompt_of(19, False)["input_ids"], logits_processor=[_OfRank(rank)], **GREEDY)


def test_ranks_that_choose_different_tokens(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="have chosen different tokens") as caught:
        ranks(2).run(processors_differ)
    assert all(isinstance(error, RankMismatchError) for error in caught.value.errors)


class _Ends(LogitsProcessor):
    """Has one rank end its rows behind some tokens."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.rank == 1 and self.calls == 3:
            scores[:, 7] = 1e4
        return scores


def one_rank_ends(rank: int, size: int) -> None:
    model = models.patch(make("llama"))
    options = {"logits_processor": [_Ends(rank)], "eos_token_id": 7}
    hf_burst.generate(model, prompt_of(19, False)["input_ids"], **options, **GREEDY)


def test_a_rank_that_would_end_before_the_others(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="have chosen different tokens") as caught:
        ranks(2).run(one_rank_ends)
    assert all(isinstance(error, RankMismatchError) for error in caught.value.errors)


class _Raises(BaseStreamer):
    """A streamer, a processor or a criterion that fails at its third call, on one rank."""

    def __init__(self, error: BaseException | None) -> None:
        self.error, self.calls = error, 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.error is not None and self.calls == 3:
            raise self.error

    def end(self) -> None: ...


class _RaisingProcessor(_Raises, LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.put(input_ids)
        return scores


class _RaisingCriterion(_Raises, StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.put(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def raises_on_one_rank(
    rank: int, size: int, kind: str, number: int, tokens: int, raised: type[BaseException], remembers: bool
) -> list[int]:
    """The error of one rank, or its interrupt, reaches all, and the model answers afterwards."""
    model, prompt = models.patch(make("llama")), prompt_of(19, False)["input_ids"][:1]
    error = raised("it is broken") if rank == number else None
    broken: Any = {
        "streamer": _Raises(error),
        "logits_processor": [_RaisingProcessor(error)],
        "stopping_criteria": [_RaisingCriterion(error)],
    }[kind]
    memory = {"document": hf_burst.remember(model, prompt)} if remembers else {}
    with pytest.raises(raised if rank == number else RankMismatchError, match="it is broken"):
        hf_burst.generate(model, prompt, **memory, **GREEDY | {kind: broken, "max_new_tokens": tokens})
    found: list[int] = hf_burst.generate(model, prompt, **GREEDY)[0].tolist()
    return found


@pytest.mark.parametrize(
    ("kind", "number", "tokens", "raised", "remembers"),
    [
        pytest.param(*case, raised, remembers, marks=[pytest.mark.full] * ((line + place + remembers) % 3 > 0))
        for line, case in enumerate(
            (("streamer", 0, 9), ("streamer", 0, 2), ("stopping_criteria", 0, 9), ("logits_processor", 1, 9))
        )
        for place, raised in enumerate((KeyError, KeyboardInterrupt, SystemExit))
        for remembers in (False, True)
    ],
)
def test_what_raises_on_one_rank(
    ranks: Ranks, kind: str, number: int, tokens: int, raised: type[BaseException], remembers: bool
) -> None:
    first, second = ranks(2).run(raises_on_one_rank, kind, number, tokens, raised, remembers, timeout=60.0)
    assert first == second


def raises_before_a_pass(rank: int, size: int, call: int, raised: type[BaseException], remembers: bool) -> str:
    """An error of one rank where the model prepares a pass, in which the other rank already waits for it."""
    if call > 0:  # the processes are its own
        Watch.patience, Watch.interval, Watch.grace = 1.0, 0.25, 4.0
    model, prompt = models.patch(make("llama")), prompt_of(19, False)["input_ids"][:1]
    memory = {"document": hf_burst.remember(model, prompt)} if remembers else {}
    prepare, calls = model.prepare_inputs_for_generation, list[int]()

    @wraps(prepare)  # whose signature is read
    def breaks(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == call + 1:
            raise raised("it is broken")
        return prepare(*arguments, **options)

    model.prepare_inputs_for_generation = breaks
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (of the other rank another)
        hf_burst.generate(model, prompt, **memory, **GREEDY)
    assert rank == 0 or isinstance(caught.value, raised), caught.value
    return str(caught.value)


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("raised", [KeyError, KeyboardInterrupt])
def test_what_raises_before_the_first_pass(ranks: Ranks, raised: type[BaseException], remembers: bool) -> None:
    told, _ = ranks(2).run(raises_before_a_pass, 0, raised, remembers, timeout=60.0)
    assert "it is broken" in told


def mistyped(rank: int, size: int) -> int:
    model, prompt = models.patch(make("llama")), prompt_of(19, False)["input_ids"][:1]
    memory = hf_burst.remember(model, prompt)
    with pytest.raises(ValueError, match="temprature"):
        hf_burst.generate(model, prompt, document=memory, temprature=0.5, **GREEDY)
    return hf_burst.generate(model, prompt, document=memory, **GREEDY).shape[1]


def test_copies_of_a_prompt_that_are_missing() -> None:
    with pytest.raises(BatchError, match="4 rows does not hold 3 copies"):
        each_once(SimpleNamespace(copies=3), {"input_ids": torch.ones(4, 5)})  # type: ignore[arg-type]


def test_after_an_error_of_all_ranks_a_memory_answers(ranks: Ranks) -> None:
    assert ranks(2).run(mistyped) == [19 + 9] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("call", "remembers"), [(3, True), pytest.param(3, False, marks=pytest.mark.full)])
def test_what_raises_before_a_later_pass(call: int, remembers: bool) -> None:
    """Over gloo a rank cannot leave a message that it waits for, so that its process ends, which says why."""
    with pytest.raises(RankError) as caught:
        RankPool(2).run(raises_before_a_pass, call, KeyError, remembers, timeout=60.0)
    assert str(caught.value) == "rank 0: it died with exit code 1", "the other had its own error"


def criteria_of_another_rank(rank: int, size: int) -> tuple[int, ...]:
    model, criteria = models.patch(make("llama")), [_After(3)] if rank else None
    found = hf_burst.generate(model, prompt_of(19, False)["input_ids"], stopping_criteria=criteria, **GREEDY)
    return tuple(found.shape)


def test_criteria_of_other_ranks_do_not_count(ranks: Ranks) -> None:
    assert ranks(2).run(criteria_of_another_rank) == [(2, 19 + 9)] * 2


class _Dies(LogitsProcessor):
    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.rank == 1 and self.calls == 3:
            os._exit(1)
        return scores


def rank_dies(rank: int, size: int) -> None:
    model = models.patch(make("llama"))
    hf_burst.generate(model, prompt_of(19, False)["input_ids"], logits_processor=[_Dies(rank)], **GREEDY)


def test_a_rank_that_dies() -> None:
    pool, began = RankPool(2), time.monotonic()
    with pytest.raises(RankError, match="LostRankError"):
        pool.run(rank_dies)
    assert time.monotonic() - began < 60
    pool.close()


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "empty": ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, BatchError, "neither of them 0"),
    "nothing": ({}, BatchError, "it needs input_ids"),
    "right": (
        {"input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])},
        BatchError,
        "padding_side",
    ),
    "images": (
        {"input_ids": torch.ones(1, 3, dtype=torch.int64), "pixel_values": torch.ones(1, 3, 4, 4)},
        BatchError,
        "pixel_values",
    ),
    "streamer": (
        {"input_ids": torch.ones(1, 3, dtype=torch.int64), "streamer": _Noted(), "num_beams": 2},
        ValueError,
        "beam search",
    ),
    "cache": ({"input_ids": torch.ones(1, 3, dtype=torch.int64), "use_cache": False}, ConfigError, "use_cache=False"),
    "tensor": (
        {"input_ids": torch.ones(1, 3, dtype=torch.int64), "use_cache": torch.tensor(False)},
        ConfigError,
        "use_cache=False",
    ),
    "end": (
        {"input_ids": torch.ones(1, 3, dtype=torch.int64), "eos_token_id": torch.tensor([3.0])},
        ConfigError,
        r"eos_token_id is \[3.0\]",
    ),
    "criterion": (
        {"input_ids": torch.ones(1, 3, dtype=torch.int64), "stopping_criteria": _After(3)},
        ConfigError,
        "give a list",
    ),
    "guesses": (
        {"input_ids": torch.ones(1, 3, dtype=torch.int64), "prompt_lookup_num_tokens": 2},
        ConfigError,
        "taken back",
    ),
    "guesses of a config": (
        {
            "input_ids": torch.ones(1, 3, dtype=torch.int64),
            "generation_config": GenerationConfig(prompt_lookup_num_tokens=2),
        },
        ConfigError,
        "prompt_lookup_num_tokens=2.*taken back",
    ),
    "early layers": (
        {
            "input_ids": torch.ones(1, 3, dtype=torch.int64),
            "generation_config": GenerationConfig(assistant_early_exit=1),
        },
        ConfigError,
        "assistant_early_exit=1.*taken back",
    ),
    "chunks": ({"input_ids": torch.ones(1, 3, dtype=torch.int64), "prefill_chunk_size": 2}, ConfigError, "cut over"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_generate_refuses(kind: str) -> None:
    given, error, told = REFUSED[kind]
    with pytest.raises(error, match=told):
        hf_burst.generate(models.patch(make("llama")), **given, **GREEDY)


def test_what_a_config_says_of_caches_is_passed_over() -> None:
    model, prompt = make("llama"), prompt_of(19, False)["input_ids"]
    wanted = model.generate(prompt, **GREEDY)
    model.generation_config.cache_implementation, model.generation_config.prefill_chunk_size = "static", 4
    model.generation_config.use_cache = False
    assert torch.equal(hf_burst.generate(models.patch(model), prompt, **GREEDY), wanted)


def test_models_that_generate_refuses() -> None:
    prompt = prompt_of(7, False)["input_ids"]
    with pytest.raises(ConfigError, match="patch_model"):
        hf_burst.generate(make("llama"), prompt)
    with pytest.raises(UnsupportedModelError, match="takes no cache"):
        hf_burst.generate(models.patch(models.make_model("bert").eval()), prompt)
    with pytest.raises(UnsupportedModelError, match="no state behind a prompt"):
        hf_burst.generate(models.patch(make("zamba")), prompt)
    looped = models.patch(make("llama"))
    looped.config.n_recurrent_loops = 2
    with pytest.raises(UnsupportedModelError, match="layers in loops"):
        hf_burst.generate(looped, prompt, **GREEDY)
    with pytest.raises(UnsupportedModelError, match="changes the keys or values"):
        hf_burst.generate(models.patch(make("JetMoeForCausalLM")), prompt, **GREEDY)


def test_criteria_that_count_tokens_keep_their_meaning() -> None:
    model, prompt = models.patch(make("llama")), prompt_of(19, False)["input_ids"]
    found = hf_burst.generate(model, prompt, stopping_criteria=[MaxLengthCriteria(22)], **GREEDY)
    assert found.shape == (2, 22)


def instead_of_settings(rank: int, size: int) -> None:
    """As in Transformers, criteria replace those that settings make of their type."""
    model, prompt = make("llama"), prompt_of(19, False)["input_ids"]
    settings: dict[str, Any] = {**GREEDY, "eos_token_id": [*range(3, 60)], "max_time": 1e-9}
    given = [MaxLengthCriteria(40), EosTokenCriteria(torch.tensor([2])), MaxTimeCriteria(1e9)]
    wanted = model.generate(prompt, stopping_criteria=given, **settings)
    assert wanted.shape == (2, 40)
    hf_burst.patch_model(model)
    found = hf_burst.generate(model, prompt, stopping_criteria=None if rank else given, **settings)
    assert torch.equal(found, wanted)


def test_criteria_instead_of_settings(ranks: Ranks) -> None:
    ranks(2).run(instead_of_settings, timeout=60.0)


def by_hand(rank: int, size: int) -> None:
    """A loop of the user's own goes on with the cache of an answer, without gradients."""
    model, prompt = make("llama"), prompt_of(19, False)["input_ids"]
    wanted = model.generate(prompt, **GREEDY | {"max_new_tokens": 10})
    hf_burst.patch_model(model)
    answers = [hf_burst.generate(model, prompt, **GREEDY, return_dict_in_generate=True) for _ in range(2)]
    with torch.no_grad():
        logits = model(answers[0].sequences[:, -1:], past_key_values=answers[0].past_key_values).logits
    assert torch.equal(logits.argmax(-1), wanted[:, -1:])
    with pytest.raises(BatchError, match="no_grad"):
        model(answers[1].sequences[:, -1:], past_key_values=answers[1].past_key_values)


def test_a_loop_of_the_users_own(ranks: Ranks) -> None:
    ranks(2).run(by_hand)
