"""`hf-burst bench`: what it writes, what its limit computes, and what it cannot measure."""

import json
import time
from dataclasses import replace

import pytest
import torch
from transformers import AttentionInterface, LlamaConfig

from hf_burst.check import speed
from hf_burst.check.speed import Job, limit, measure
from hf_burst.cli import bench, main
from hf_burst.config import Memory
from hf_burst.hf.attention import NAME, attention_forward
from tests.cli.test_cli import call

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
CONFIG = LlamaConfig(**SIZES, num_hidden_layers=3, num_key_value_heads=2, architectures=["LlamaForCausalLM"])


def job(ranks: int = 1, seconds: float = 100.0, length: int = 64, lora: int = 0) -> Job:
    ends = time.monotonic() + seconds
    return Job(CONFIG, length, lora, torch.device("cpu"), ranks, ends)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    CONFIG.save_pretrained(tmp_path)
    return str(tmp_path / "config.json")


def test_one_process_writes_a_file_and_a_row(config, tmp_path, capsys):
    out = tmp_path / "one.json"
    assert main(["bench", "--model", config, "--length", "64", "--layers", "2", "--lora", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["model"], result["layers"], result["length"], result["weights"]) == (config, 2, 64, "LoRA 16")
    assert (result["hardware"], result["GPUs"], result["hosts"], result["share_of_limit"]) == ("CPU", 1, 1, None)
    assert result["versions"].keys() >= {"hf_burst", "torch", "transformers"}
    assert result["limit"] == {"reason": "none on one GPU, which sends nothing"}
    assert result["hf_burst"]["settings"].keys() == vars(Memory()).keys()
    for way in ("hf_burst", "transformers"):
        assert result[way]["steps"] == 5
        assert result[way]["tokens_per_second_per_gpu"] == pytest.approx(64 / result[way]["seconds"])
    head, _, row = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    assert len(head) == len(row)
    assert row[head.index("weights")] == "LoRA 16"
    assert row[head.index("of the limit")] == "none on one GPU, which sends nothing"


@pytest.mark.parametrize("lora", [0, 4])
def test_two_ranks_have_a_limit(ranks, lora):
    first, second = ranks(2).run(_measured, lora)
    for way in ("hf_burst", "limit", "transformers"):
        assert first[way]["steps"] == 5
        assert first[way]["seconds"] == second[way]["seconds"] > 0  # of the slowest rank


def _measured(rank: int, size: int, lora: int):
    return measure(job(size, lora=lora))


def test_the_limit_attends_to_all_tokens_by_a_share_of_the_heads(monkeypatch):
    seen = []

    def watched(module, query, key, value, mask, **options):
        seen.append((query.shape, key.shape))
        out, weights = attention_forward(module, query, key, value, mask, **options)
        torch.testing.assert_close(out, causal(query, key, value).transpose(1, 2))
        return out, weights

    monkeypatch.setattr(speed, "attention_forward", watched)
    found = limit(job(ranks=2), Memory())
    assert found["steps"] == 5
    assert seen == [((1, 2, 64, 16), (1, 1, 64, 16))] * len(seen)
    assert len(seen) == 5 * 2 * 3  # steps, the first run and the one for gradients, layers
    assert AttentionInterface()[NAME] is attention_forward


def causal(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def test_named_shapes_have_fewer_layers(monkeypatch, tmp_path):
    """Of Gemma 4, whose config differs by the number of a layer, too."""
    jobs, seconds = [], {"seconds": 1.0, "tokens_per_second_per_gpu": 64.0, "peak_gib": None}
    measured = {"hf_burst": seconds, "limit": {"reason": "none"}, "transformers": {"reason": "none"}}
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setattr(bench, "measure", lambda job: jobs.append(job) or measured)
    for name in ("llama-3.1-8b", "qwen3.5-9b", "gemma-4-12b"):
        assert main(["bench", "--model", name, "--length", "64", "--layers", "6", "--out", str(tmp_path / "out")]) == 0
    assert [job.config.num_hidden_layers for job in jobs] == [6, 6, 6]
    assert [*map(int, jobs[2].config.to_dict()["per_layer_config"])] == [5]
    wide = limit(replace(job(ranks=2), config=jobs[2].config), Memory())
    assert wide == {"reason": "none for layers that differ in their key heads"}


def test_ranks_without_time_do_alike(ranks):
    """A rank whose time is over keeps the others from measuring alone."""
    found = ranks(2).run(_of_one_late_rank)
    assert [each["limit"] for each in found] == [{"reason": "no time was left"}] * 2
    assert [each["transformers"] for each in found] == [{"reason": "no time was left"}] * 2


def _of_one_late_rank(rank: int, size: int):
    return measure(job(size, seconds=100.0 * rank))


def test_heads_that_ranks_cannot_share_have_no_limit():
    assert limit(job(ranks=4), Memory()) == {"reason": "none for 4 and 2 heads over 4"}


def test_what_does_not_fit_or_has_no_time_left_is_said(monkeypatch):
    hurried = measure(job(seconds=0.0))
    assert hurried["hf_burst"]["steps"] == 2
    assert hurried["transformers"] == {"reason": "no time was left"}
    steps = speed._steps

    def full(job, model, tokens, **options):
        if not options:  # Transformers alone
            raise torch.OutOfMemoryError
        return steps(job, model, tokens, **options)

    monkeypatch.setattr(speed, "_steps", full)
    assert measure(job())["transformers"] == {"reason": "out of memory"}


def test_transformers_alone_have_their_own_attention(monkeypatch):
    steps, attention = speed._steps, []

    def watched(job, model, tokens, **options):
        attention.append(model.config._attn_implementation)
        return steps(job, model, tokens, **options)

    monkeypatch.setattr(speed, "_steps", watched)
    measure(job())
    assert attention == ["hf_burst", "sdpa"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "4"], "--layers is 4; give 1 to num_hidden_layers of a text model, here 3"),
        (
            ["--model", "llama-3.2-1b", "--layers", "17"],
            "--layers is 17; give 1 to num_hidden_layers of a text model, here 16",
        ),
        (["--model", "gemma-4-12b", "--layers", "6", "--lora", "-1"], "--lora is -1; give a rank of at least 1"),
        (["--layers", "0"], "--layers is 0; give 1 to num_hidden_layers of a text model, here 3"),
        (["--lora", "-1"], "--lora is -1; give a rank of at least 1"),
        (["--length", "1"], "--length is 1; give at least 2 tokens"),
        (["--out", "no/folder.json"], "--out no/folder.json cannot be written"),
        (["--out", "."], "--out . cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused_before(words, said, config, capsys):
    assert main(["bench", "--model", config, "--length", "64", *words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_of_a_launch(config, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    out = tmp_path / "two.json"
    done = call("bench", "--model", config, "--length", "2k", "--out", str(out), home=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["GPUs"] == 2
    assert result["share_of_limit"] == pytest.approx(result["limit"]["seconds"] / result["hf_burst"]["seconds"])
    assert done.stdout.count(f"{100 * result['share_of_limit']:.0f} %") == 1  # rank 0 alone prints
    assert "| all | 2048 | 2 | 1 | CPU |" in done.stdout
