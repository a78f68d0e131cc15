"""One harness for all trainers: three optimizer steps of a small model, on ranks or in one process that is not patched.

A case says which trainer, on what, over which mesh. `train` runs it and returns what must equal one process: losses,
gradient norms and weights. Gradient accumulation and clipping are always on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, Trainer, TrainingArguments

import hf_burst
from hf_burst.layers import offload
from hf_burst.layers.host_memory import HostMemory
from tests.support import models
from tests.support.ranks import reset_accelerate

STEPS, ACCUMULATION, CLIP = 3, 2, 0.5
# to the trainer itself
_GIVEN = ("callbacks", "compute_loss_func", "compute_metrics", "eval_dataset", "processing_class")
LITTLE = hf_burst.BurstConfig(memory=hf_burst.Memory(tiled_mlp=5, head_groups=2, activation_offloading=1.0))
Row = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What is trained, and how. `data` groups of `burst` ranks; `burst = 0` is one process that is not patched."""

    trainer: str = "Trainer"
    kind: str = "padded"
    lora: bool = False
    checkpointing: bool = False
    explicit: bool = False
    data: int = 1
    burst: int = 2
    model: str = "llama"
    little: bool = False  # memory: MLPs in tiles, heads in groups, layers offloaded

    @property
    def ranks(self) -> int:
        return self.data * self.burst

    @property
    def rows(self) -> int:
        """Samples of a micro-batch: two over all groups."""
        return 2 // self.data

    @property
    def alone(self) -> "Case":
        """The case in one process, as plain as it can be."""
        return replace(self, checkpointing=False, explicit=False, data=1, burst=0, little=False)

    def __str__(self) -> str:
        switches = [name for name in ("lora", "checkpointing", "explicit", "little") if getattr(self, name)]
        return "-".join([self.model, self.trainer, self.kind, *switches, f"{self.data}x{self.burst}"])


def samples(kind: str, count: int = 12) -> list[Row]:
    """Documents of unequal lengths that begin with a prompt; `"packed"`: rows that hold two documents each."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        length = 29 if kind == "packed" else 17 + (index * 5) % 13
        ids = torch.randint(1, models.VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: 2 + index % 5] = -100
        sample = {"input_ids": ids, "labels": labels}
        if kind == "packed":
            cut = 5 + index
            sample["position_ids"] = torch.cat([torch.arange(cut), torch.arange(length - cut)])
            labels[cut] = -100  # not predicted from another document
        found.append(sample)
    return found


def table(kind: str, count: int = 12) -> Any:
    """The documents as a table of lists, as TRL prepares and packs them."""
    from datasets import Dataset

    return Dataset.from_list([{key: value.tolist() for key, value in row.items()} for row in samples(kind, count)])


def preferences(count: int = 12) -> list[dict[str, str]]:
    """Prompts with two answers, as text."""
    generator = torch.Generator().manual_seed(2)

    def words(count: int) -> str:
        return "".join(f" w{token}" for token in torch.randint(2, models.VOCABULARY, (count,), generator=generator))

    return [
        {"prompt": words(3 + row % 4)[1:], "chosen": words(9 + row % 7), "rejected": words(6 + row % 5)}
        for row in range(count)
    ]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token."""
    words = {"<pad>": 0, "</s>": 1, **{f"w{token}": token for token in range(2, models.VOCABULARY)}}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>")


def collate(rows: list[Row]) -> Row:
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


def lora_config() -> Any:
    from peft import LoraConfig

    torch.manual_seed(5)
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def make_model(case: Case, seed: int = 0) -> torch.nn.Module:
    model: Any = models.make_model(case.model, seed=seed)
    if case.trainer == "RewardTrainer":
        model.config.num_labels, model.config.pad_token_id = 1, 0
        judge = AutoModelForSequenceClassification.from_config(model.config)
        judge.base_model.load_state_dict(model.base_model.state_dict())
        model = judge
    if case.burst:
        hf_burst.patch_model(model, LITTLE if case.little else None)
    model.config.use_cache = False  # with a cache, plain attention ignores where packed documents begin
    return model


def mesh(case: Case) -> hf_burst.BurstParallelismConfig | None:
    return hf_burst.BurstParallelismConfig(burst_size=case.burst) if case.burst else None


def make_trainer(case: Case, folder: str, data: Any = None, **options: Any) -> Trainer:
    """Any trainer but the raw loop, ready to train; `options` are training arguments, or arguments of the trainer."""
    reset_accelerate()
    settings = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "max_steps": STEPS,
        "per_device_train_batch_size": case.rows,
        "per_device_eval_batch_size": case.rows,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_grad_norm": CLIP,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": case.checkpointing,
        "parallelism_config": mesh(case),
    }
    given = {name: options.pop(name) for name in _GIVEN if name in options}
    model = options.pop("model", None) or make_model(case)
    settings |= options
    if case.trainer != "Trainer":
        return _make_trl(case, model, settings, data, given)
    if case.lora:
        from peft import get_peft_model

        model = get_peft_model(model, lora_config())
    return Trainer(
        model,
        TrainingArguments(**settings, remove_unused_columns=False),
        train_dataset=samples(case.kind) if data is None else data,
        data_collator=hf_burst.BurstCollator(collate, causal=case.model not in models.MASKED)
        if case.explicit
        else collate,
        **given,
    )


def _make_trl(
    case: Case, model: torch.nn.Module, settings: dict[str, Any], data: Any, given: dict[str, Any]
) -> Trainer:
    import trl
    from datasets import Dataset

    given = {"processing_class": tokenizer(), **given}
    if case.lora and not hasattr(model, "peft_config"):
        given["peft_config"] = lora_config()
    if case.trainer == "SFTTrainer":
        packing = {"packing": case.kind == "packed", "padding_free": case.kind == "padding_free"}
        packing["max_length"] = 40 if case.kind == "packed" else None
        data = table("padded", count=24) if data is None else data
        trainer = trl.SFTTrainer(model, trl.SFTConfig(**packing, **settings), train_dataset=data, **given)
        if case.explicit:  # padding-free takes no collator at first
            trainer.data_collator = hf_burst.BurstCollator(trainer.data_collator)
        return trainer
    if case.trainer == "RewardTrainer":
        data = Dataset.from_list(preferences()) if data is None else data
        return trl.RewardTrainer(model, trl.RewardConfig(**settings), train_dataset=data, **given)
    if case.trainer in ("ORPOTrainer", "CPOTrainer"):
        from trl.experimental import cpo, orpo

        data = Dataset.from_list(preferences()) if data is None else data
        kind, config = (
            (orpo.ORPOTrainer, orpo.ORPOConfig) if case.trainer == "ORPOTrainer" else (cpo.CPOTrainer, cpo.CPOConfig)
        )
        return kind(model, args=config(**settings, beta=0.5, max_length=64), train_dataset=data, **given)
    given["ref_model"] = None if case.lora else make_model(case, seed=3)
    data = Dataset.from_list(preferences()) if data is None else data
    if case.trainer == "DPOTrainer":
        return trl.DPOTrainer(model, args=trl.DPOConfig(**settings, beta=0.5), train_dataset=data, **given)
    answers = [
        {"prompt": row["prompt"], "completion": row[answer], "label": answer == "chosen"}
        for row in data
        for answer in ("chosen", "rejected")
    ]
    data = Dataset.from_list(answers)
    return trl.KTOTrainer(model, args=trl.KTOConfig(**settings, beta=0.5), train_dataset=data, **given)


@contextmanager
def small_pages(page: int = 1024, block: int = 2**14) -> Iterator[None]:
    """All tensors are offloaded, into pages of so few bytes."""
    with (
        mock.patch.multiple(HostMemory, page_bytes=page, block_bytes=block),
        mock.patch.object(offload, "_SMALL", 0),
    ):
        yield


def train(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    """Runs a case on this rank."""
    with small_pages() if case.little else nullcontext():
        return train_raw(case) if case.trainer == "raw" else finish(make_trainer(case, folder))


def finish(trainer: Trainer) -> dict[str, Any]:
    """Trains, and what came of it."""
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "losses": [entry["loss"] for entry in steps],
        "norms": [entry["grad_norm"] for entry in steps],
        "weights": {name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
        "log": steps,
    }


def train_raw(case: Case, collator: Callable[..., Any] = collate, **options: Any) -> dict[str, Any]:
    """accelerate's loop for gradient accumulation over unequal batches, as its documentation has it; `options` are
    those of the accelerator."""
    reset_accelerate()
    model = make_model(case).train()
    if case.lora:
        from peft import get_peft_model

        model = get_peft_model(model, lora_config())
    if case.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    options = {"cpu": True, "parallelism_config": mesh(case), "gradient_accumulation_steps": ACCUMULATION} | options
    accelerator = Accelerator(**options)
    collator = hf_burst.BurstCollator(collator) if case.explicit else collator
    loader = DataLoader(samples(case.kind), batch_size=case.rows, collate_fn=collator)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    log: dict[str, Any] = {"losses": [], "norms": []}
    batches: Iterator[Row] = iter(loader)
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
    weights = accelerator.get_state_dict(wrapped) or {}  # of ZeRO-3, the first rank has them
    log["weights"] = {name: value.detach().clone() for name, value in weights.items()}
    return log


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Losses, gradient norms and weights, to 1e-6 in fp32."""
    torch.testing.assert_close(found["losses"], wanted["losses"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["norms"], wanted["norms"], rtol=1e-6, atol=1e-6)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6)
