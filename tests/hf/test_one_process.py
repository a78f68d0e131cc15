"""Notebooks and one process: cells that run twice, generation after training, and a launcher inside of a notebook."""

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from safetensors.torch import load_file

import hf_burst
from hf_burst.errors import BatchError, ConfigError, UnsupportedModelError
from tests.support import models, trainers
from tests.support.ranks import RankPool
from tests.support.scripts import in_a_process
from tests.support.trainers import Case, make_trainer

ROOT = Path(__file__).parents[2]
Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("config", [None, hf_burst.BurstConfig(), hf_burst.BurstConfig(schedule="burst")])
def test_patching_twice_changes_nothing(config: hf_burst.BurstConfig | None) -> None:
    model = hf_burst.patch_model(models.make_model("llama").train(), config)
    batch = models.make_batch("packed")
    hooks, loss = len(model._forward_pre_hooks), model(**batch).loss
    assert hf_burst.patch_model(model, config) is model
    adapted = get_peft_model(model, trainers.lora_config())
    assert hf_burst.patch_model(adapted, config) is adapted, "patched before it got adapters"
    assert len(model._forward_pre_hooks) == hooks
    adapted.disable_adapter_layers()
    assert torch.equal(adapted(**batch).loss, loss)
    hf_burst.unpatch_model(adapted)
    assert not model._forward_pre_hooks, "patched twice, unpatched once"


def test_patching_twice_by_another_config_is_refused() -> None:
    model = hf_burst.patch_model(models.make_model("llama"))
    with pytest.raises(ConfigError, match=r"already, with BurstConfig\(.*schedule='auto'.*unpatch_model\(model\)"):
        hf_burst.patch_model(model, hf_burst.BurstConfig(schedule="burst"))
    assert hf_burst.patch_model(model) is model, "it is still the patched model"


def test_patching_twice_looks_at_new_adapters() -> None:
    from peft import PromptTuningConfig

    model = hf_burst.patch_model(models.make_model("llama"))
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UnsupportedModelError, match="PROMPT"):
        hf_burst.patch_model(adapted)


def patch_over_meshes(rank: int, size: int) -> None:
    model = models.make_model("llama")
    everyone = dist.group.WORLD
    hf_burst.patch_model(model, group=everyone)
    assert hf_burst.patch_model(model, group=everyone) is model
    with pytest.raises(ConfigError, match=r"members=\(0, 1\)\), and now .* and None were given"):
        hf_burst.patch_model(model)


def test_patching_twice_over_the_same_ranks(ranks: Ranks) -> None:
    ranks(2).run(patch_over_meshes)


WAYS: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static"})


def generate_after_training(rank: int, size: int, folder: str, case: Case) -> list[list[list[int]]]:
    """What a model says in each way right after `train()`, which leaves it in training mode, and evaluated."""
    trainer = make_trainer(case, folder, learning_rate=1.0)
    trainer.train()
    model, said = trainer.model, []
    assert model.training
    prompt = models.make_batch("plain")["input_ids"][:, :23]
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):
        said += [model.generate(prompt, **options, **way).tolist() for way in WAYS]
        model.eval()
    trainer.train()  # nothing of the generation is left
    return [*said, [[round(entry["loss"] * 1e4) for entry in trainer.state.log_history if "loss" in entry]]]


@pytest.mark.parametrize(
    "case",
    [
        Case(burst=1),
        pytest.param(Case(lora=True), marks=pytest.mark.slow),
        pytest.param(Case("SFTTrainer", "packed"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_generation_right_after_training(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    wanted = generate_after_training(0, 1, str(tmp_path), case.alone)
    assert wanted[0] == wanted[2] == wanted[4]
    if case.burst == 1:
        assert generate_after_training(0, 1, str(tmp_path), case) == wanted
    else:
        for said in ranks(case.burst).run(generate_after_training, str(tmp_path), case):
            assert said == wanted


def test_a_cache_in_a_training_pass_is_refused() -> None:
    """With gradients, each rank would learn from the whole sequence."""
    model = hf_burst.patch_model(models.make_model("llama").train())
    prompt = models.make_batch("plain")["input_ids"]
    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values
    with pytest.raises(BatchError, match=r"A cache .* in training or with labels"):
        model(prompt[:, :3], past_key_values=cache)


def run_cell(folder: str) -> None:
    os.chdir(folder)
    runpy.run_path("cell.py", run_name="__main__")


def launched_in_a_notebook(folder: Path, processes: int) -> dict[str, torch.Tensor]:
    """The weights that docs/scripts/notebook_launcher.py trains over so many processes."""
    cell = (ROOT / "docs/scripts/notebook_launcher.py").read_text()
    assert cell.count("num_processes=2") == 1
    folder.mkdir()
    with socket.socket() as found:
        found.bind(("", 0))
        port = found.getsockname()[1]  # the launcher's own may be taken by another training
    (folder / "cell.py").write_text(cell.replace("num_processes=2", f'num_processes={processes}, use_port="{port}"'))
    if processes == 1:
        in_a_process(run_cell, str(folder))
        return load_file(folder / "outputs/notebook/model.safetensors")
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RANK")}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "cell.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return load_file(folder / "outputs/notebook/model.safetensors")


@pytest.mark.slow
def test_the_launcher_of_notebooks(tmp_path: Path) -> None:
    wanted = launched_in_a_notebook(tmp_path / "one", 1)
    found = launched_in_a_notebook(tmp_path / "two", 2)
    assert list(found) == list(wanted)
    both = [torch.cat([weights.flatten() for weights in trained.values()]) for trained in (found, wanted)]
    assert (both[0] - both[1]).norm() <= 1e-6 * both[1].norm(), "a step of AdamW is 100 times as much"


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("chunking", ["balanced", "zigzag"])
def test_nothing_is_appended_to_outputs(keep: float, chunking: str) -> None:
    """In one process there is nothing to cut, so no length is rounded up, and no cache holds what nobody wrote."""
    config = hf_burst.BurstConfig(chunking=chunking, memory=hf_burst.Memory(attention_keep=keep))
    plain, model = (models.make_model("llama", torch.float64).eval() for _ in range(2))
    models.patch(model, config)
    for length in (1, 37):
        batch = models.make_batch("plain", length)
        batch["labels"] = batch["input_ids"]
        tokens = {"input_ids": batch["input_ids"]}
        embedded = {"inputs_embeds": plain.get_input_embeddings()(batch["input_ids"]).detach()}
        wanted = plain(**batch, output_hidden_states=True)
        for given in (batch, tokens, embedded, hf_burst.shard_batch(batch, config=config)):
            found = model(**given, output_hidden_states=True)
            torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found.hidden_states, wanted.hidden_states, rtol=1e-12, atol=1e-12)
            assert found.past_key_values.get_seq_length() == length
        last = model(**tokens, logits_to_keep=1).logits
        torch.testing.assert_close(last, wanted.logits[:, -1:], rtol=1e-12, atol=1e-12)
    next_token = wanted.logits[:, -1:].argmax(-1)
    ahead = (each(next_token, past_key_values=each(**tokens).past_key_values).logits for each in (model, plain))
    torch.testing.assert_close(*ahead, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 37])
def test_parts_of_attention_are_kept_of_any_length(length: int) -> None:
    """Also of one that has no such parts, of which all is kept."""
    tokens = models.make_batch("plain", length)["input_ids"]
    plain, model = (models.make_model("llama", torch.float64).train() for _ in range(2))
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(attention_keep=0.75)))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for each in (plain, model):
        each(tokens, use_cache=False).logits.square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("after_a_pass", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_decoder_alone_with_checkpoints(after_a_pass: bool, reentrant: bool) -> None:
    """In one process every call holds whole sequences. A checkpoint that runs layers again has nothing to be told."""
    plain, model = (models.make_model("llama", torch.float64).train() for _ in range(2))
    models.patch(model)
    batch = models.make_batch("plain", 41)
    for each in (plain, model):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if after_a_pass:
            each(**batch).loss.backward()
            each.zero_grad()
        each.model(input_ids=batch["input_ids"]).last_hidden_state.square().sum().backward()
    for ours, theirs in zip(model.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)
