"""The benchmark of answers over ranks runs, and its numbers agree with each other."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recipes.benchmarks import generation, training_job
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.training_limits import Attention
from tests.recipes.test_benchmarks import TINY_GEMMA_4
from tests.support import scripts
from tests.support.ranks import RankPool

OPTIONS = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--tokens", "4", "--alone", "32", "64"]
LENGTHS = ["--prompts", "256", "--decode", "256", "--memory", "64", "--questions", "1", "3"]
KEYS_OF_A_TOKEN = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, their size, bytes


@pytest.mark.slow
def test_the_benchmark_of_generation(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    out = tmp_path / "deep" / "result.json"
    said, _ = ranks(2).run(scripts.run, "recipes/benchmarks/generation.py", [*OPTIONS, *LENGTHS, "--out", str(out)])
    rows = json.loads(out.read_text())["results"]
    assert [(row["what"], row["length"]) for row in rows] == [
        ("alone, keys on the gpu", 32),
        ("alone, keys on the gpu", 64),
        ("attention of a token", 256),
        ("prefill", 256),
        ("questions", 64),
        ("decoding", 256),
    ]
    assert not [row for row in rows if "failure" in row], said
    for row in rows:
        if "bytes_of_keys" in row:
            assert row["bytes_of_keys"] == row["length"] // 2 * KEYS_OF_A_TOKEN, "a rank holds its share"
    for row in rows[2:3]:
        assert row["reading"] == pytest.approx(row["length"] // 2 * KEYS_OF_A_TOKEN / 2 / 3e12), "of one layer of two"
        assert row["share_of_limit"] == pytest.approx((row["reading"] + row["exchange"]) / row["seconds"])
    assert rows[3]["share_of_limit"] == pytest.approx(sum(rows[3]["limit"].values()) / rows[3]["seconds"])
    written = [(count, rows[4][str(count)]) for count in (1, 3)] + [(1, row) for row in rows[:2]]
    written += [(1, row[name]) for row in rows[5:] for name in ("as it is", "compiled")]
    for count, speed in written:
        assert speed["first_token_s"] > 0
        assert speed["tokens_per_second"] == pytest.approx(count / speed["seconds_per_token"])


def test_layers_of_several_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts each layer by its own heads and window; the attention of a token is that of all tokens."""
    monkeypatch.setitem(training_job.SHAPES, "tiny-gemma-4", TINY_GEMMA_4)
    lengths: dict[str, list[int]] = {name: [] for name in ("prompts", "decode", "alone")}
    model = {"shape": "tiny-gemma-4", "layers": None, "dtype": "float32", "liger": False}
    options = argparse.Namespace(**lengths, **model, memory=128, bandwidth=3.0)
    bench = generation.Bench(options, Ranks("cpu"))
    read = bench.attention(128)["reading"]
    assert read == pytest.approx(2 * 1 * 128 * 32 * 4 / 3e12), "keys and values, heads, tokens, their size, bytes"

    def seconds(kind: Attention, dtype: torch.dtype, ranks: Ranks, length: int) -> tuple[float, float]:
        assert kind in (Attention(4, 2, 16, 31), Attention(4, 1, 32, None))
        assert length == 128
        return (1.0 if kind.window else 100.0), 1e6

    monkeypatch.setattr(generation, "attention_seconds", seconds)
    assert bench.prefill_limit(128)["attention"] == 5 * 1.0 + 100.0
