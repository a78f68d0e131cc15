"""The main job, launched as a user launches it, shorter: it learns, and its checkpoint needs no hf_burst."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

datasets = pytest.importorskip("datasets")
from recipes import finetune_long_document  # noqa: E402 (which needs data sets)

ROOT = Path(__file__).parents[1]
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", "recipes/configs/accelerate_2_processes.yaml"]
RELOAD = """
import importlib.util, json, sys
sys.modules["hf_burst"] = None  # any import of it fails
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(3, 203)[None]
loss = float(model(ids, labels=ids).loss.detach())
print(json.dumps({"implementation": model.config._attn_implementation, "loss": loss}))
"""


def finetune(folder: Path, *options: str) -> list[dict[str, float]]:
    command = [sys.executable, *LAUNCH, "recipes/finetune_long_document.py"]
    command += ["--config", "recipes/configs/python_topics_cpu.yaml", "--output_dir", str(folder), *options]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "training_log.json").read_text())["steps"]


def reload(folder: Path) -> dict[str, float | str]:
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, str(folder)], capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_full_finetuning_learns_and_its_checkpoint_stands_alone(tmp_path: Path) -> None:
    log = finetune(tmp_path, "--max_steps", "8", "--sequence_length", "2048", "--warmup_steps", "1")
    assert log[-1]["loss"] < log[0]["loss"] - 1
    assert all(entry["memory_gib"] > 0 for entry in log)
    assert all(entry["tokens_per_second"] > 0 for entry in log[1:])
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "hf_burst" not in (tmp_path / "config.json").read_text()
    found = reload(tmp_path)
    assert found["implementation"] == "sdpa"
    assert float(found["loss"]) > 0


TEXTS = ["A document. " * 40, "Another one, which is longer. " * 60, "x"]


def test_every_source(tmp_path: Path) -> None:
    sources = {kind: tmp_path / f"documents.{kind}" for kind in ("txt", "jsonl", "parquet")}
    sources["txt"].write_text("\n".join(TEXTS))
    datasets.Dataset.from_dict({"text": TEXTS}).to_json(sources["jsonl"])
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(sources["parquet"])
    for kind, source in sources.items():
        found = finetune_long_document.load_documents(finetune_long_document.Recipe(dataset=[str(source)]))
        assert list(found["text"]) == (["\n".join(TEXTS)] if kind == "txt" else TEXTS)
    with pytest.raises(SystemExit, match="mixes kinds of files"):
        finetune_long_document.load_documents(finetune_long_document.Recipe(dataset=list(map(str, sources.values()))))


def test_lora_and_rope_scaling(tmp_path: Path) -> None:
    source, base = tmp_path / "documents.jsonl", tmp_path / "base"
    datasets.Dataset.from_dict({"text": TEXTS}).to_json(source)
    make_base(base)
    options = ["--model", str(base), "--tokenizer", "bytes", "--dataset", str(source), "--sequence_length", "301"]
    options += ["--lora_rank", "2", "--rope_scaling", "{rope_type: linear, factor: 2.0}", "--max_steps", "2"]
    options += ["--burst", "{schedule: burst}", "--per_device_train_batch_size", "2"]
    log = finetune(tmp_path / "out", *options)
    assert len(log) == 2
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert float(reload(tmp_path / "out")["loss"]) > 0


def make_base(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)


def test_a_setting_that_does_not_exist_is_named(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("sequence_lenght: 5\n")
    with pytest.raises(SystemExit, match="sequence_lenght"):
        finetune_long_document.parse(["--config", str(config)])
