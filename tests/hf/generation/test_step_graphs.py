"""Steps of one token that are recorded and played: the tokens and scores of one process, and no step less."""

from contextlib import nullcontext
from functools import wraps
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_burst
from hf_burst.hf import answer as answers
from hf_burst.hf.generation import step_graphs
from hf_burst.hf.generation.settings import cache_key
from tests.hf.generation.test_generation import WAYS, Ranks, make, prompt_of
from tests.support.op_graphs import OpGraph, OpGraphs

TOKENS = 19
GREEDY = {"do_sample": False, "max_new_tokens": TOKENS, "pad_token_id": 0}
ASKED = {"output_logits": True, "return_dict_in_generate": True}


def compare(rank: int, size: int, name: str, length: int, padded: bool, ways: tuple[str, ...], room: int = 64) -> int:
    """How many graphs were played."""
    model, prompt = make(name), prompt_of(length, padded)
    wanted = []
    for way in ways:
        torch.manual_seed(5)
        wanted.append(model.generate(**prompt, **GREEDY | WAYS[way], **ASKED))
    model = hf_burst.patch_model(make(name))  # "dynamic" positions remember the longest prompt so far
    OpGraph.played = 0
    for way, expected in zip(ways, wanted, strict=True):
        torch.manual_seed(5)
        with mock.patch.object(step_graphs, "CudaGraphs", OpGraphs), mock.patch.object(answers, "_ROOM", room):
            found = hf_burst.generate(model, **prompt, **GREEDY | WAYS[way], **ASKED)
        assert torch.equal(found.sequences, expected.sequences), way
        scale = max(float(part.abs().max()) for part in expected.logits)
        for own, other in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-5 * scale)  # fp32
    assert "forward" not in vars(model)
    return OpGraph.played


def run(ranks: Ranks, size: int, *arguments: Any) -> list[int]:
    return [compare(0, 1, *arguments)] if size == 1 else ranks(size).run(compare, *arguments)


def pieces(size: int, layers: int = 2, tokens: int = TOKENS) -> int:
    """How many graphs one generation plays: all but the prompt's token and four steps, one of them compared."""
    return (tokens - 1 - 4) * (1 + layers * (size > 1))


@pytest.mark.parametrize(
    ("size", "length", "padded"),
    [
        *((3, 37, True), pytest.param(2, 1, False, marks=pytest.mark.full)),
        *(pytest.param(1, 64, True, marks=pytest.mark.full), pytest.param(4, 7, True, marks=pytest.mark.slow)),
    ],
)
def test_tokens_are_those_of_one_process(ranks: Ranks, size: int, length: int, padded: bool) -> None:
    ways = ("greedy", "sampled", "beams", "several", "penalised")
    assert run(ranks, size, "llama", length, padded, ways) == [len(ways) * pieces(size)] * size


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.full)])
def test_layers_make_room(ranks: Ranks, size: int) -> None:
    """Behind it a step is recorded anew; what was recorded before would write where nothing is any more."""
    # tokens for which there is room at first, and each time that it was made
    lasts = [4, 10, 22] if size == 1 else [12, 30]
    steps = sum(max(0, min(stop, TOKENS - 1) - start - 4) for start, stop in pairwise([0, *lasts]))
    assert run(ranks, size, "llama", 7, True, ("greedy", "beams"), 4) == [2 * steps * (3 if size > 1 else 1)] * size


@pytest.mark.parametrize(
    ("name", "padded", "played"),
    [
        ("mistral", True, True),  # windows
        ("GptOssForCausalLM", True, False),  # sinks; its experts ask which tokens they have
        pytest.param("Gemma2ForCausalLM", False, True, marks=pytest.mark.full),  # soft-capping
        ("Llama4ForCausalLM", True, False),  # scales queries by their positions, which it counts in Python
        pytest.param("DeepseekV3ForCausalLM", True, False, marks=pytest.mark.full),  # latent keys; experts
        ("Gemma4ForConditionalGeneration", True, True),  # a wrapper, whose layers share keys
        ("llama_dynamic", True, False),  # asks for the longest position
    ],
)
def test_kinds_of_layers(ranks: Ranks, name: str, padded: bool, played: bool) -> None:
    assert [bool(count) for count in run(ranks, 2, name, 41, padded, ("greedy",))] == [played] * 2


@pytest.mark.parametrize(
    ("name", "played"),
    [
        ("Qwen3_5", True),
        pytest.param("Lfm2", True, marks=pytest.mark.full),
        pytest.param("KimiLinear", False, marks=pytest.mark.full),  # experts, as above
        pytest.param("GraniteMoeHybrid", False, marks=pytest.mark.full),
    ],
)
def test_layers_with_a_state(ranks: Ranks, name: str, played: bool) -> None:
    found = run(ranks, 2, f"{name}ForCausalLM", 37, True, ("greedy", "beams"))
    assert found[0] == found[1]
    assert (found[0] > 2 * (TOKENS - 6)) is played, "beams, too"


def answer(rank: int, size: int) -> int:
    model, document = make("llama"), prompt_of(33, False)["input_ids"][:1]
    questions = prompt_of(9, True)
    whole = torch.cat([document.expand(2, -1), questions["input_ids"]], 1)
    whole[1] = torch.cat([document[0], questions["input_ids"][1, 3:], whole.new_zeros(3)])
    expected = [model.generate(row[None], **GREEDY)[0, -TOKENS:] for row in (whole[0], whole[1, :-3])]
    hf_burst.patch_model(model)
    memory = hf_burst.remember(model, document)
    OpGraph.played = 0
    with mock.patch.object(step_graphs, "CudaGraphs", OpGraphs):
        found = hf_burst.generate(model, **questions, **GREEDY, document=memory, cuda_graphs=True)
    assert torch.equal(found[:, -TOKENS:], torch.stack(expected))
    return OpGraph.played


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_questions_to_a_memory(ranks: Ranks, size: int) -> None:
    found = [answer(0, 1)] if size == 1 else ranks(size).run(answer)
    assert found == [pieces(size, tokens=TOKENS + 1)] * size, "the questions have made room"


def generate(caplog: pytest.LogCaptureFixture, change: Any) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The tokens with and without recordings of a model that was changed, and why there were none."""
    model, prompt = make("llama"), prompt_of(17, False)
    hf_burst.patch_model(model)
    change(model)
    expected = hf_burst.generate(model, **prompt, **GREEDY)
    with mock.patch.object(step_graphs, "CudaGraphs", OpGraphs), caplog.at_level("INFO", "hf_burst"):
        found = hf_burst.generate(model, **prompt, **GREEDY, cuda_graphs=True)
    return expected, found, "".join(message for message in caplog.messages if "without CUDA graphs" in message)


def grow(model: Any, part: Any, length_of: Any) -> None:
    """What a part of the model computes depends on a number that a recording does not know."""
    length = [0]

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        length[0] = length_of(kwargs[cache_key(model.model)])

    count.__module__ = "transformers.of_tests"
    model.model.register_forward_pre_hook(count, with_kwargs=True)
    plain = part.forward
    part.forward = lambda hidden: plain(hidden) * (1 + 0.1 * (length[0] % 20))


def count_in_python(model: Any) -> None:
    grow(model, model.model.layers[1].mlp, lambda cache: len(cache.answer.new[0]) if cache.is_read else 0)


def count_for_queries(model: Any) -> None:
    """Which changes what a rank sends to others, and nothing else of its own."""
    grow(model, model.model.layers[1].self_attn.q_proj, lambda cache: len(cache.answer.new[0]) if cache.is_read else 0)


def ask_for_the_length(model: Any) -> None:
    grow(model, model.model.layers[1].mlp, lambda cache: cache.get_seq_length())


def ask_a_layer(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    grow(model, mlp, lambda cache: cache.layers[0].get_seq_length() // 8 if cache.layers else 0)


def ask_for_the_mask(model: Any) -> None:
    grow(model, model.model.layers[1].mlp, lambda cache: cache.get_mask_sizes(1, 0)[0] // 8 if cache.layers else 0)


def ask_for_a_number(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: plain(hidden) * (1 if bool(hidden.sum() > 0) else 2)


def hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (count_in_python, "a recorded step computed something else"),
        (count_for_queries, "a recorded step computed something else"),
        *(
            (ask, "the model asks its cache how long it is")
            for ask in (ask_for_the_length, ask_a_layer, ask_for_the_mask)
        ),
        (ask_for_a_number, "not permitted when stream is capturing"),
        (hook, "model.layers.0 has a hook"),
        pytest.param(
            lambda model: model.model.layers[0].mlp.compile(backend="eager"),
            "model.layers.0.mlp is compiled",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_recorded_runs_as_it_is(caplog: pytest.LogCaptureFixture, change: Any, why: str) -> None:
    played = OpGraph.played
    expected, found, said = generate(caplog, change)
    assert torch.equal(found, expected)
    assert why in said
    assert OpGraph.played <= played + 1, "only to compare"


def switch_off(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(False)


def add_a_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 2 * output)


def replace_a_weight(model: Any) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = -weight.data


@pytest.mark.parametrize("change", [switch_off, add_a_hook, replace_a_weight])
def test_a_processor_changes_the_model(caplog: pytest.LogCaptureFixture, change: Any) -> None:
    """Between two tokens, by which time steps are played; with one that changes nothing they go on."""

    class Change(LogitsProcessor):
        def __init__(self, model: Any, change: Any) -> None:
            self.model, self.change, self.calls = model, change, 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 10:
                self.change(self.model)
            return scores

    found = []
    for stand_in, what in ((False, change), (True, change), (True, lambda model: None)):
        caplog.clear()
        model, prompt = make("llama"), prompt_of(17, False)
        torch.manual_seed(7)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        inject_adapter_in_model(lora, model)  # as add_adapter does, for which some versions want a newer peft
        hf_burst.patch_model(model.eval())
        processor, OpGraph.played = LogitsProcessorList([Change(model, what)]), 0
        graphs = mock.patch.object(step_graphs, "CudaGraphs", OpGraphs) if stand_in else nullcontext()
        with graphs, caplog.at_level("INFO", "hf_burst"):
            found.append(hf_burst.generate(model, **prompt, **GREEDY, **ASKED, logits_processor=processor))
        said = "".join(caplog.messages)
        assert OpGraph.played == (0 if not stand_in else 10 - 1 - 4 if what is change else pieces(1))
        assert ("the model was changed while it generated" in said) == (stand_in and what is change)
    plain, played, unchanged = (torch.stack(answer.logits) for answer in found)
    torch.testing.assert_close(played, plain)
    assert not torch.allclose(plain, unchanged, atol=1e-3)


def test_a_processor_generates_by_itself() -> None:
    """Two calls within each step, by other caches: they run normally, and the steps of the outer call are played."""

    class Ask(LogitsProcessor):
        def __init__(self, model: Any, prompt: dict[str, Any]) -> None:
            self.model, self.prompt, self.answers = model, prompt, list[torch.Tensor]()

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                self.answers.append(hf_burst.generate(self.model, **self.prompt, **GREEDY | {"max_new_tokens": 8}))
            return scores

    model, prompt = hf_burst.patch_model(make("llama")), prompt_of(17, False)
    inner = prompt_of(9, False)
    expected = hf_burst.generate(model, **prompt, **GREEDY)
    answer = hf_burst.generate(model, **inner, **GREEDY | {"max_new_tokens": 8})
    ask, OpGraph.played = Ask(model, inner), 0
    with mock.patch.object(step_graphs, "CudaGraphs", OpGraphs):
        found = hf_burst.generate(model, **prompt, **GREEDY, logits_processor=LogitsProcessorList([ask]))
    assert torch.equal(found, expected)
    assert all(torch.equal(own, answer) for own in ask.answers)
    assert OpGraph.played == pieces(1)
    assert "forward" not in vars(model)


def test_a_config_that_wants_none() -> None:
    model, OpGraph.played = hf_burst.patch_model(make("llama")), 0
    config = GenerationConfig(cuda_graphs=False, eos_token_id=None, **GREEDY)
    with mock.patch.object(step_graphs, "CudaGraphs", OpGraphs):
        hf_burst.generate(model, **prompt_of(17, False), generation_config=config)
        assert OpGraph.played == 0
        hf_burst.generate(model, **prompt_of(17, False), **GREEDY)
    assert OpGraph.played == pieces(1)


def send_something_else(rank: int, size: int, name: str) -> int:
    model, prompt = make("llama"), prompt_of(17, False)
    globals()[name](hf_burst.patch_model(model))
    expected = hf_burst.generate(model, **prompt, **GREEDY, **ASKED)
    OpGraph.played = 0
    with mock.patch.object(step_graphs, "CudaGraphs", OpGraphs):
        found = hf_burst.generate(model, **prompt, **GREEDY, **ASKED, cuda_graphs=True)
    for own, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(own, other)
    return OpGraph.played


@pytest.mark.parametrize("name", ["count_in_python", "count_for_queries"])
def test_what_a_rank_sends_is_compared(ranks: Ranks, name: str) -> None:
    assert ranks(2).run(send_something_else, name) == [3, 3], "only to compare"


def test_arguments_that_cannot_be_compared(caplog: pytest.LogCaptureFixture) -> None:
    def add(model: Any) -> None:
        plain = model.prepare_inputs_for_generation
        model.prepare_inputs_for_generation = lambda *args, **kwargs: plain(*args, **kwargs) | {"of_a_step": [1]}
        forward = model.forward
        model.forward = wraps(forward)(lambda of_a_step=None, **kwargs: forward(**kwargs))

    assert "arguments that cannot be compared" in generate(caplog, add)[2]


def test_autocast_and_a_model_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected, found, said = generate(caplog, lambda model: model.float())
    assert torch.equal(found, expected)
    assert "autocast is on" in said
    with caplog.at_level("INFO", "hf_burst"):
        model = hf_burst.patch_model(make("llama"))
        caplog.clear()
        hf_burst.generate(model, **prompt_of(7, False), **GREEDY)
        assert "CUDA graphs" not in caplog.text, "which nobody expects without a GPU"
