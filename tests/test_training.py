"""Three optimizer steps of the stock Trainer and of a raw accelerate loop beside those of one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import hf_burst
from tests import models
from tests.ranks import RankPool, reset_accelerate

Ranks = Callable[[int], RankPool]
STEPS, ACCUMULATION, CLIP = 3, 2, 0.5


def samples(kind: str) -> list[dict[str, torch.Tensor]]:
    """Twelve documents of unequal lengths that begin with a prompt; `"packed"`: rows that hold two documents each."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(12):
        length = 29 if kind == "packed" else 17 + (index * 5) % 13
        ids = torch.randint(1, models.VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: 2 + index % 5] = -100
        sample = {"input_ids": ids, "labels": labels}
        if kind == "packed":
            cut = 5 + index
            sample["position_ids"] = torch.cat([torch.arange(cut), torch.arange(length - cut)])
        found.append(sample)
    return found


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Right-padded batches with a mask; packed rows are of one length and need none."""
    length = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "position_ids": 0}
    batch = {
        key: torch.stack(
            [torch.nn.functional.pad(row[key], (0, length - len(row[key])), value=fill[key]) for row in rows]
        )
        for key in rows[0]
    }
    if "position_ids" not in rows[0]:
        batch["attention_mask"] = torch.stack([torch.arange(length) < len(row["input_ids"]) for row in rows]).long()
    return batch


def plan_of(burst: int, explicit: bool) -> tuple[Any, Callable[..., Any]]:
    """The mesh, and the collator of a mode."""
    return hf_burst.BurstParallelismConfig(burst_size=burst), hf_burst.BurstCollator(collate) if explicit else collate


def make_trainee(kind: str, lora: bool) -> torch.nn.Module:
    model = models.make_model("llama")
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model


def run_trainer(
    rank: int, size: int, folder: str, kind: str, burst: int, explicit: bool, rows: int, lora: bool, checkpointing: bool
) -> dict[str, Any]:
    """The stock Trainer; `burst = 0` is one process, not patched."""
    reset_accelerate()
    model = make_trainee(kind, lora)
    mesh, collator = plan_of(burst, explicit) if burst else (None, collate)
    if burst:
        hf_burst.patch_model(model)
    model.config.use_cache = False  # with a cache, plain attention ignores where packed documents begin
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=ACCUMULATION,
        max_grad_norm=CLIP,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        gradient_checkpointing=checkpointing,
        parallelism_config=mesh,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples(kind), data_collator=collator)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "losses": [entry["loss"] for entry in steps],
        "norms": [entry["grad_norm"] for entry in steps],
        "weights": {name: value.detach().clone() for name, value in model.state_dict().items()},
    }


def run_raw(rank: int, size: int, kind: str, burst: int, explicit: bool, rows: int, lora: bool) -> dict[str, Any]:
    """accelerate's loop for gradient accumulation over unequal batches, as its documentation has it."""
    reset_accelerate()
    model = make_trainee(kind, lora).train()
    mesh, collator = plan_of(burst, explicit) if burst else (None, collate)
    if burst:
        hf_burst.patch_model(model)
    model.config.use_cache = False
    accelerator = Accelerator(cpu=True, parallelism_config=mesh, gradient_accumulation_steps=ACCUMULATION)
    loader = DataLoader(samples(kind), batch_size=rows, collate_fn=collator)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    log: dict[str, Any] = {"losses": [], "norms": []}
    batches: Iterator[dict[str, torch.Tensor]] = iter(loader)
    for _ in range(STEPS):
        group = [next(batches) for _ in range(ACCUMULATION)]
        targets = [batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:] for batch in group]
        counted = sum((target != -100).sum() for target in targets)
        items = accelerator.gather(counted).sum()
        total = 0.0
        for index, batch in enumerate(group):
            accelerator.sync_gradients = index == ACCUMULATION - 1
            with accelerator.no_sync(wrapped) if index < ACCUMULATION - 1 else torch.enable_grad():
                loss = wrapped(**batch, num_items_in_batch=items).loss
                accelerator.backward(loss * accelerator.num_processes * ACCUMULATION)
                total += accelerator.gather(loss.detach()).sum().item()
        log["losses"].append(total)
        log["norms"].append(float(accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    log["weights"] = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return log


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    torch.testing.assert_close(found["losses"], wanted["losses"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["norms"], wanted["norms"], rtol=1e-5, atol=1e-6)
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("explicit", [False, True], ids=["full batches", "collator"])
@pytest.mark.parametrize(("data", "burst"), [(1, 2), (2, 2), (1, 3)])
def test_trainer_equals_one_process(
    ranks: Ranks, tmp_path: Path, kind: str, explicit: bool, data: int, burst: int
) -> None:
    wanted = run_trainer(0, 1, str(tmp_path), kind, 0, False, 2, False, False)
    found = ranks(data * burst).run(run_trainer, str(tmp_path), kind, burst, explicit, 2 // data, False, False)
    for run in found:
        compare(run, wanted)
    assert len(set(wanted["losses"])) == STEPS
    assert min(wanted["norms"]) > CLIP, "the clipping must be felt"


@pytest.mark.parametrize("explicit", [False, True], ids=["full batches", "collator"])
def test_trainer_with_lora_and_checkpointing(ranks: Ranks, tmp_path: Path, explicit: bool) -> None:
    wanted = run_trainer(0, 1, str(tmp_path), "packed", 0, False, 2, True, False)
    for run in ranks(2).run(run_trainer, str(tmp_path), "packed", 2, explicit, 2, True, True):
        compare(run, wanted)


def load_with_workers(rank: int, size: int, method: str) -> list[list[int]]:
    reset_accelerate()
    accelerator = Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig())
    collator = hf_burst.BurstCollator(collate)
    options = {"num_workers": 1, "multiprocessing_context": method, "collate_fn": collator, "batch_size": 2}
    loader = accelerator.prepare(DataLoader(samples("packed"), **options))
    model = hf_burst.patch_model(models.make_model("llama").train())
    shards = list(loader)
    assert all(torch.isfinite(model(**shard).loss) for shard in shards)
    return [shard["position_ids"][0].tolist() for shard in shards]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_collator_works_in_data_loader_workers(ranks: Ranks, method: str) -> None:
    first, second = ranks(2).run(load_with_workers, method)
    assert len(first) == 6
    for one, other, sample in zip(first, second, samples("packed")[::2], strict=True):
        length = len(sample["position_ids"])
        assert sorted(one + other) == sorted([*sample["position_ids"].tolist(), *[0] * (-length % 4)])


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("explicit", [False, True], ids=["full batches", "collator"])
@pytest.mark.parametrize(("data", "burst", "lora"), [(1, 2, False), (2, 2, False), (1, 2, True)])
def test_raw_loop_equals_one_process(
    ranks: Ranks, kind: str, explicit: bool, data: int, burst: int, lora: bool
) -> None:
    wanted = run_raw(0, 1, kind, 0, False, 2, lora)
    for run in ranks(data * burst).run(run_raw, kind, burst, explicit, 2 // data, lora):
        compare(run, wanted)
