"""Plans of texts that continue one of others, and of a reference that reads them, too: by hand, and as torch counts."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from hf_burst.cli import main
from hf_burst.cli.plan import find_model
from hf_burst.hf.models.model_size import model_size, shape_named
from hf_burst.sizing.fit import longest
from hf_burst.sizing.gpus import capacity_of, gpu_named
from hf_burst.sizing.memory import estimate_memory
from hf_burst.sizing.model import Training
from hf_burst.sizing.prompts import longest_prompt, memory_of_prompt
from hf_burst.sizing.seconds import estimate_seconds, step_flops
from hf_burst.sizing.towers import encoded

LLAMA = model_size(LlamaForCausalLM, shape_named("llama-3-8b"), "llama-3-8b")
SHEET = gpu_named("h200")
H200 = capacity_of(SHEET)
BEGINNING, ENDINGS = 65536, (1000, 3000)
BOUNDS = (0, BEGINNING, BEGINNING + ENDINGS[0], BEGINNING + sum(ENDINGS))
PAIR = Training(BOUNDS[-1], 1, 1, BOUNDS, parents=(-1, 0, 0), lora=16)
PLAN = ["plan", "--model", "llama-3-8b", "--gpus", "2", "--machine", "h200"]


def causal(tokens: int) -> float:
    return tokens * (tokens + 1) / 2


def test_each_ending_sees_the_beginning_and_itself() -> None:
    pairs = causal(BEGINNING) + sum(BEGINNING * ending + causal(ending) for ending in ENDINGS)
    ((pattern, count),) = LLAMA.patterns
    mask = PAIR.mask(pattern)
    assert (count, mask.pairs) == (32, pairs)
    seconds = estimate_seconds(LLAMA, PAIR, SHEET)
    assert seconds.attention == pytest.approx(32 * pairs * 4 * 4096 / 989e12 * (1 / 0.66 + 2.5 / 0.61))
    assert seconds.reference == 0
    least = replace(PAIR, length=3 * 4096, documents=(0, 4096, 2 * 4096, 3 * 4096))
    again = causal(4096) + 4096 * 4096 + causal(4096) + 1024 * 4096 + causal(1024)  # of the first three quarters
    first, second = (estimate_seconds(LLAMA, replace(least, attention_keep=keep), SHEET) for keep in (0.25, 1.0))
    assert first.attention - second.attention == pytest.approx(32 * again * 4 * 4096 / 989e12 / 0.66)


@pytest.mark.parametrize("lora", [0, 16])
def test_a_reference_is_a_forward_pass(lora: int) -> None:
    training = replace(PAIR, lora=lora, reference=True)
    alone, asked = (estimate_seconds(LLAMA, each, SHEET) for each in (replace(training, reference=False), training))
    ((pattern, count),) = LLAMA.patterns
    mask = training.mask(pattern)
    attention = count * mask.pairs * 4 * 4096 / 989e12 / 0.66
    read = 20 * 4096 + 4 * (4096 + 1024) + 6 * 14336
    elementwise = 32 * training.length * read / 4.8e12 / 0.83
    products = 2 * training.length * LLAMA.used / 989e12 / 0.68
    assert asked.reference == pytest.approx(attention + products + elementwise)
    assert asked.total == pytest.approx(alone.total + asked.reference)
    assert step_flops(LLAMA, training) == step_flops(LLAMA, replace(training, reference=False))


def test_operations_of_a_reference_are_those_that_torch_counts() -> None:
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=896, num_hidden_layers=4)
    model, ids = LlamaForCausalLM(config), torch.randint(0, 512, (1, 512))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids)
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    sheet = SHEET._replace(peak=1.0, bandwidth=1e30)
    size = model_size(LlamaForCausalLM, config)
    wide = estimate_seconds(replace(size, patterns=()), Training(512, 1, 1, reference=True), sheet)
    assert wide.reference * 0.68 == pytest.approx(counted, rel=0.003)


def test_what_a_reference_sends() -> None:
    """Heads are exchanged in one pass of two, and sharded weights are gathered once."""
    alone = Training(BOUNDS[-1], 4, 4, BOUNDS, parents=(-1, 0, 0), sharded="ddp", lora=16)
    slow = SHEET._replace(link=1e9)
    one, four = (estimate_seconds(LLAMA, replace(alone, reference=True, gpus=n, burst_size=n), slow) for n in (1, 4))
    spread = estimate_seconds(LLAMA, alone, slow)
    assert four.reference - one.reference / 4 == pytest.approx(spread.exchange / 2, rel=0.02)
    sharded = estimate_seconds(LLAMA, replace(alone, reference=True, sharded="fsdp2"), slow)
    gathered = 2 * (LLAMA.weights - LLAMA.unused) * 3 / 4 / 1e9 / 0.8
    assert 0.5 * gathered < sharded.reference - four.reference < gathered, "some of it is hidden"


def test_a_second_model_takes_memory_and_an_adapter_takes_none() -> None:
    for weights, number in (("bf16", 2), ("fp32", 4)):
        training = Training(BOUNDS[-1], 4, 4, BOUNDS, parents=(-1, 0, 0), weights=weights)
        memory = [estimate_memory(LLAMA, replace(training, reference=asked), H200) for asked in (False, True)]
        assert memory[1].total - memory[0].total == pytest.approx(number * LLAMA.weights / 4)
    memory = [estimate_memory(LLAMA, replace(PAIR, reference=asked), H200) for asked in (False, True)]
    assert memory[0] == memory[1]


def test_what_is_told_of_a_whole_text_has_neither() -> None:
    asked, plain = replace(PAIR, lora=0, reference=True), Training(BOUNDS[-1], 1, 1)
    assert longest(LLAMA, replace(asked, reference=False), H200) == longest(LLAMA, plain, H200)
    assert longest_prompt(LLAMA, asked, H200) == longest_prompt(LLAMA, plain, H200)
    assert memory_of_prompt(LLAMA, asked, H200) == memory_of_prompt(LLAMA, plain, H200)


def test_the_command_plans_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--length", "64k", "--endings", "1k", "2k", "--reference", "--lora"]) == 0
    report = capsys.readouterr().out
    assert "68,608 tokens a sequence, fp32 adapters of rank 16" in report
    assert "\ntexts of 1,024, 2,048 tokens continue the first 65,536 of them, which are computed once" in report
    assert "\na reference reads all of them, too, which does not count for MFU\n" in report
    assert ", reference " in next(line for line in report.splitlines() if "seconds: attention" in line)
    assert "Longest" not in report
    assert main([*PLAN, "--length", "64k"]) == 0
    report = capsys.readouterr().out
    assert "continue" not in report
    assert "reference" not in report
    assert "tokens, on all GPUs; the model has 8,192 positions, and more need rope_scaling." in report


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--documents", "64", "32", "--endings", "8"], "--endings continue one text. Give its tokens by --length"),
        (["--documents", "64", "--endings", "8"], "and no --documents"),
        (["--endings", "8"], "--model needs --length"),
        (["--length", "64", "--endings", "0"], "Document boundaries (0, 64, 64) do not fit"),
        (["--length", "64", "--endings", "8", "--model", "BertForMaskedLM"], "attention that is not causal"),
    ],
)
def test_endings_that_cannot_be(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *words]) == 2
    assert said in capsys.readouterr().err


def test_states_and_towers_of_a_reference() -> None:
    sheet = SHEET._replace(bandwidth=1e30)
    hybrid = find_model("qwen3.5-9b", trust_remote_code=False)[0]
    alone = Training(65536, 1, 1, lora=16, reference=True)
    with_states, without = (
        estimate_seconds(model, alone, sheet).reference for model in (hybrid, replace(hybrid, recurrent=()))
    )
    assert with_states - without == pytest.approx(65536 * hybrid.recurrence_flops / 989e12 / 0.052)
    seeing = find_model("Qwen2_5_VLForConditionalGeneration", trust_remote_code=False)[0]
    images = replace(alone, lora=0, images=4, image_tokens=1024)
    assert images.learns_to_see
    assert seeing.tower is not None
    towers = [estimate_seconds(seeing, each, SHEET).reference for each in (images, replace(alone, lora=0))]
    once = 2 * encoded(seeing, images) * seeing.tower.weights
    assert towers[0] - towers[1] == pytest.approx(once / 989e12 / 0.68)
