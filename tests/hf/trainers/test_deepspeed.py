"""DeepSpeed ZeRO-1, 2 and 3 through accelerate, beside one process: training, evaluation, saving and resuming."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, TrainingArguments, get_linear_schedule_with_warmup

import hf_burst
from hf_burst.errors import ConfigError
from hf_burst.layers.linear_loss import linear_loss_sum
from tests.hf.test_wrappers import assert_as_close, flat
from tests.hf.test_wrappers import compare as compare_runs
from tests.hf.trainers.test_training import EVALUATED, KINDS, SWITCH, Speaker, evaluate, stream
from tests.support import models, trainers
from tests.support.ranks import RankError, RankPool, reset_accelerate
from tests.support.trainers import Case, make_trainer

pytest.importorskip("trl")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install deepspeed==0.19.8"
)
GPUS = torch.cuda.device_count()
SAVED = {"stage3_gather_16bit_weights_on_model_save": True}
ON_CPUS = {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
STAGES = (1, 2, 3)


@dataclass
class Pools:
    """`pools(size)` are that many processes of their own: DeepSpeed keeps state for as long as a process runs."""

    backend: str
    opened: dict[int, RankPool] = field(default_factory=dict)

    def __call__(self, size: int) -> RankPool:
        if self.backend == "nccl" and size > GPUS:
            pytest.skip(f"needs {size} GPUs")
        if size not in self.opened or not self.opened[size].alive:
            self.opened[size] = RankPool(size, self.backend)
            self.opened[size].run(join, timeout=500)
        return self.opened[size]

    @property
    def tolerance(self) -> float:
        return 1e-6 if self.backend == "gloo" else 1e-5


def join(rank: int, size: int) -> None:
    """On CPUs DeepSpeed compiles its communication the first time that it runs on a machine."""
    import deepspeed

    os.environ.update(ON_CPUS if dist.get_backend() == "gloo" else {})
    deepspeed.init_distributed(dist.get_backend())


@pytest.fixture(scope="module", params=["gloo", "nccl"] if GPUS > 1 else ["gloo"])
def zero(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """On CPUs, and on GPUs where there are two."""
    pools = Pools(request.param)
    yield pools
    for opened in pools.opened.values():
        opened.close()


def launch(stage: int, clip: float | str = "auto", **settings: Any) -> None:
    """What `accelerate launch` sets for DeepSpeed. All weights of stage 3 are partitioned, however small."""
    reset_accelerate()
    os.environ.pop("ACCELERATE_USE_CPU", None)
    partition = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": clip,
        "zero_optimization": partition | {**SAVED, **settings.pop("zero_optimization", {})},
        "bf16": {"enabled": "auto"},
        **settings,
    }
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=json.dumps(config))


def arguments() -> dict[str, Any]:
    """Training arguments by which accelerate takes the process group that exists, on CPUs too."""
    return {"use_cpu": False, "ddp_backend": dist.get_backend()}


def accelerator_for(mesh: Any, **options: Any) -> Accelerator:
    """That of a raw loop."""
    group = InitProcessGroupKwargs(backend=dist.get_backend())
    return Accelerator(parallelism_config=mesh, kwargs_handlers=[group], **options)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """All weights. Those of ZeRO-3 are gathered, and only the first rank has them."""
    assert trainer.accelerator.distributed_type is DistributedType.DEEPSPEED
    weights = trainer.accelerator.get_state_dict(trainer.deepspeed) or {}
    return {name: value.detach().cpu().clone() for name, value in weights.items()}


def train(
    rank: int, size: int, folder: str, case: Case, stage: int, data: str | None = None, settings: Any = None
) -> dict[str, Any]:
    """Runs a case under DeepSpeed. `data` is a kind of stream."""
    if case.trainer == "raw":
        launch(stage, clip=trainers.CLIP)
        group = InitProcessGroupKwargs(backend=dist.get_backend())
        found = trainers.train_raw(case, cpu=False, kwargs_handlers=[group])
        return {**found, "weights": {name: value.cpu() for name, value in found["weights"].items()}}
    launch(stage, **(settings or {}))
    trainer = make_trainer(case, folder, data and stream(data), **arguments())
    return {**trainers.finish(trainer), "weights": weights_of(trainer)}


def compare(zero: Pools, found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """All ranks have the losses and norms of one process, and those that gathered the weights its weights."""
    assert found[0]["weights"], "the first rank has the weights"
    for mine in found:
        compare_runs(mine if mine["weights"] else {**mine, "weights": wanted["weights"]}, wanted, zero.tolerance)


@cache
def alone(case: Case) -> dict[str, Any]:
    """One process without DeepSpeed and not patched."""
    return trainers.train(0, 1, tempfile.gettempdir(), case.alone)


SUBSET = [
    (1, Case("Trainer", data=2)),
    (2, Case("Trainer", "packed", checkpointing=True, data=2)),
    (2, Case("SFTTrainer", "packed", lora=True)),
    (2, Case("raw")),
    (2, Case("DPOTrainer", lora=True)),
    (3, Case("Trainer", "packed", checkpointing=True, data=2)),
    (3, Case("Trainer", explicit=True)),
    (3, Case("Trainer", lora=True, checkpointing=True)),
    (3, Case("SFTTrainer", "padding_free")),
    (3, Case("SFTTrainer", "packed", lora=True, checkpointing=True, data=2)),
    (3, Case("raw", "packed", data=2)),
    (3, Case("DPOTrainer")),
    (3, Case("Trainer", model="gpt2")),  # its head is the table of its tokens
    (3, Case("Trainer", model="bert")),
]
ALL = [
    (stage, Case(trainer, kind, lora, checkpointing, explicit, data))
    for trainer in ("raw", "Trainer", "SFTTrainer", "DPOTrainer")
    for kind in KINDS.get(trainer, KINDS["raw"])
    for stage, lora, checkpointing, explicit, data in itertools.product(STAGES, SWITCH, SWITCH, SWITCH, (1, 2))
    if not (explicit and trainer == "DPOTrainer")
]


@pytest.mark.parametrize(
    ("stage", "case"),
    [*SUBSET, *(pytest.param(*row, marks=pytest.mark.full) for row in ALL if row not in SUBSET)],
    ids=str,
)
def test_three_steps_equal_one_process(zero: Pools, tmp_path: Path, stage: int, case: Case) -> None:
    compare(zero, zero(case.ranks).run(train, str(tmp_path), case, stage), alone(case.alone))


@pytest.mark.parametrize("kind", ["torch", "datasets"])
def test_iterable_datasets(zero: Pools, tmp_path: Path, kind: str) -> None:
    case = Case(data=2)
    wanted = trainers.finish(make_trainer(case.alone, str(tmp_path), stream(kind)))
    compare(zero, zero(4).run(train, str(tmp_path), case, 2, kind), wanted)


def evaluate_under_deepspeed(rank: int, size: int, folder: str, case: Case, stage: int, count: int) -> dict[str, Any]:
    launch(stage)
    return evaluate(rank, size, folder, case, count, **arguments())


@pytest.mark.parametrize("case", [Case(data=2), Case("SFTTrainer")], ids=str)
def test_evaluation_and_prediction(zero: Pools, tmp_path: Path, case: Case) -> None:
    """Before any training, for which the Trainer asks for ZeRO-3. SFTTrainer's loss is a mean over the groups."""
    wanted = evaluate(0, 1, str(tmp_path), case.alone, 8)
    for found in zero(case.ranks).run(evaluate_under_deepspeed, str(tmp_path), case, 3, 8):
        for mine, metrics in zip(found["metrics"], wanted["metrics"], strict=True):
            for name in EVALUATED & metrics.keys():
                assert mine[name] == pytest.approx(metrics[name], rel=zero.tolerance), name
        real = wanted["labels"] != -100
        assert np.array_equal(found["labels"], wanted["labels"])
        np.testing.assert_allclose(found["logits"][real], wanted["logits"][real], rtol=0, atol=zero.tolerance)


def resume(rank: int, size: int, folder: str, case: Case, stage: int) -> list[Any]:
    """Trains by AdamW with a falling rate and shuffled batches, once more from the checkpoint after two steps, and
    saves. Returns losses, evaluations and weights of both."""
    options = {"optim": "adamw_torch", "learning_rate": 1e-3, "lr_scheduler_type": "linear", "save_strategy": "steps"}
    options |= {"save_steps": 2, "train_sampling_strategy": "random", "eval_dataset": trainers.samples("padded", 8)}
    found = []
    for checkpoint in (None, f"{folder}/checkpoint-2"):
        launch(stage)
        trainer = make_trainer(case, folder, **options, **arguments())
        trainer.train(resume_from_checkpoint=checkpoint)
        steps = [(entry["loss"], entry["learning_rate"]) for entry in trainer.state.log_history if "loss" in entry]
        found.append((steps, trainer.evaluate()["eval_loss"], weights_of(trainer)))
    trainer.save_model(f"{folder}/saved")
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_from_a_checkpoint(zero: Pools, tmp_path: Path, stage: int) -> None:
    found = zero(4).run(resume, str(tmp_path), Case(data=2), stage)
    saved = dict(LlamaForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
    for whole, resumed in found:  # the checkpoint has the log of the first two steps
        np.testing.assert_allclose(resumed[0], whole[0], rtol=zero.tolerance)
        assert resumed[1] == pytest.approx(whole[1], rel=zero.tolerance)
        for name, value in whole[2].items():
            torch.testing.assert_close(resumed[2][name], value, rtol=0, atol=zero.tolerance)
    assert saved.keys() == found[0][1][2].keys()
    assert all(torch.equal(saved[name], value) for name, value in found[0][1][2].items())


def load_partitioned(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    """Training arguments first: then `from_pretrained` partitions the weights as it reads them."""
    launch(3)
    settings = TrainingArguments(folder, report_to=[], **arguments())
    model = LlamaForCausalLM.from_pretrained(f"{settings.output_dir}/base")
    assert not any(parameter.numel() for parameter in model.parameters())
    trainer = make_trainer(case, folder, model=hf_burst.patch_model(model), **arguments())
    return {**trainers.finish(trainer), "weights": weights_of(trainer)}


@pytest.mark.parametrize("trainer", ["Trainer", "SFTTrainer"])
def test_weights_that_were_partitioned_when_loaded(zero: Pools, tmp_path: Path, trainer: str) -> None:
    case = Case(trainer)
    models.make_model("llama").save_pretrained(tmp_path / "base")
    compare(zero, zero(2).run(load_partitioned, str(tmp_path), case), alone(case.alone))


def call_anywhere(rank: int, size: int) -> list[float]:
    """The losses of a pass in training, of one after a step, and of one outside of DeepSpeed's engine."""
    launch(3)
    accelerator, model = accelerator_for(trainers.mesh(Case())), trainers.make_model(Case()).train()
    loader = DataLoader(trainers.samples("padded"), batch_size=2, collate_fn=trainers.collate)
    engine, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    batch = next(iter(loader))
    losses = []
    for _ in range(2):
        with mock.patch("hf_burst.hf.spread.value.linear_loss_sum", wraps=linear_loss_sum) as scored:
            loss = engine(**batch).loss
        assert scored.called, "by a few tokens at a time"
        accelerator.backward(loss)
        assert model.lm_head.weight.numel() == 0, "gathered for no longer than it is needed"
        losses.append(float(loss.detach()))
    assert not model.lm_head._external_params
    assert not model._external_params, "DeepSpeed would gather it for the whole pass"
    with torch.no_grad():
        outside = float(accelerator.unwrap_model(engine)(**batch).loss)
        assert outside == float(engine(**batch).loss)
    return [*losses, outside]


def test_the_head_is_gathered_when_the_loss_is_computed(zero: Pools) -> None:
    for first, second, third in zero(2).run(call_anywhere):
        assert first > second > third


def keep_the_head(rank: int, size: int, folder: str, case: Case, stage: int) -> dict[str, Any]:
    """LoRA that trains a copy of the head beside its adapters."""
    from peft import get_peft_model

    if case.burst:
        launch(stage)
    config = trainers.lora_config()
    config.modules_to_save = ["lm_head"]
    model = get_peft_model(trainers.make_model(case), config)
    trainer = make_trainer(replace(case, lora=False), folder, model=model, **(arguments() if case.burst else {}))
    found = trainers.finish(trainer)
    return {**found, "weights": weights_of(trainer)} if case.burst else found


def test_a_head_inside_of_an_adapter(zero: Pools, tmp_path: Path) -> None:
    wanted = keep_the_head(0, 1, str(tmp_path), Case().alone, 0)
    compare(zero, zero(2).run(keep_the_head, str(tmp_path), Case(), 3), wanted)


def train_and_generate(rank: int, size: int, folder: str, case: Case, stage: int) -> dict[str, Any]:
    if case.burst:
        launch(stage)
    trainer, speaker = make_trainer(case, folder, learning_rate=1.0, **(arguments() if case.burst else {})), Speaker()
    trainer.add_callback(speaker)
    found = trainers.finish(trainer)
    return {**found, "weights": weights_of(trainer) if case.burst else found["weights"], "said": speaker.said}


def test_generation_between_steps(zero: Pools, tmp_path: Path) -> None:
    wanted = train_and_generate(0, 1, str(tmp_path), Case().alone, 0)
    found = zero(2).run(train_and_generate, str(tmp_path), Case(), 3)
    compare(zero, found, wanted)
    assert [mine["said"] for mine in found] == [wanted["said"]] * 2


def moves_in_bfloat16(rank: int, size: int, case: Case, stage: int, half: bool) -> torch.Tensor:
    """How far three steps move DeepSpeed's fp32 copies of the weights, which begin as numbers of bf16."""
    from deepspeed.utils import safe_get_full_fp32_param

    launch(stage, clip=trainers.CLIP)
    accelerator = accelerator_for(trainers.mesh(case), mixed_precision="bf16" if half else "no")
    model = models.make_model("llama").bfloat16().float().train()
    start = flat([value.detach() for value in model.parameters()])
    if case.burst:
        hf_burst.patch_model(model)
    model.config.use_cache = False
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    loader = DataLoader(trainers.samples(case.kind), batch_size=case.rows, collate_fn=trainers.collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in itertools.islice(loader, trainers.STEPS):
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16 if half else torch.float32}
    return flat([safe_get_full_fp32_param(parameter).cpu() for parameter in model.parameters()]) - start


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16(zero: Pools, stage: int) -> None:
    case = Case(kind="packed", checkpointing=True)
    exact, rough = (zero(1).run(moves_in_bfloat16, case.alone, stage, half)[0] for half in (False, True))
    for found in zero(2).run(moves_in_bfloat16, case, stage, True):
        assert_as_close(found, rough, exact)


def rates(rank: int, size: int, burst: int | None, kind: str) -> list[float]:
    """The learning rates of a raw loop with accumulation. `"config"` is a scheduler of DeepSpeed's own."""
    own: dict[str, Any] = {
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    }
    launch(2, clip=0.0, **(own if kind == "config" else {}))
    accelerator = accelerator_for(trainers.mesh(Case(burst=burst or 0)), gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    steps, warmup = 16, 3
    if kind == "config":
        optimizer: Any = DummyOptim(model.parameters(), lr=1.0)
        scheduler: Any = DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=warmup)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = get_linear_schedule_with_warmup(optimizer, warmup, steps)
    loader = DataLoader([torch.ones(2)] * 48, batch_size=1)
    engine, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = []
    for batch in itertools.islice(loader, 12):
        with accelerator.accumulate(engine):
            accelerator.backward(engine(batch).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append(accelerator._optimizers[0].param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("kind", ["prepared", "config"])
def test_a_scheduler_steps_once_for_each_batch(zero: Pools, kind: str) -> None:
    """As in stock accelerate over as many processes as there are groups."""
    alone, two = (zero(size).run(rates, None, kind)[0] for size in (1, 2))
    assert len(set(alone)) > 4
    assert two != alone
    assert zero(2).run(rates, 2, kind) == [alone] * 2
    assert zero(4).run(rates, 2, kind) == [two] * 4


def share_otherwise(rank: int, size: int, settings: dict[str, Any], parallel: dict[str, int]) -> None:
    launch(2, **settings)
    accelerator_for(hf_burst.BurstParallelismConfig(**parallel))


@pytest.mark.parametrize(
    ("settings", "parallel", "name"),
    [
        ({}, {"sp_size": 2}, "sp_size=2"),
        ({"sequence_parallel_size": 2}, {}, "sequence_parallel_size=2"),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, "tensor_parallel.autotp_size=2"),
    ],
)
def test_deepspeeds_own_parallelism_is_refused(
    zero: Pools, settings: dict[str, Any], parallel: dict[str, int], name: str
) -> None:
    with pytest.raises(RankError) as caught:
        zero(2).run(share_otherwise, settings, parallel)
    for error in caught.value.errors:
        assert pytest.RaisesExc(ConfigError, match=f"{name} beside").matches(error)


# torch's own optimizer, for which no compiler is needed
OFFLOADED: dict[str, Any] = {
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}


WEIGHTS_TOO = {"zero_optimization": {**OFFLOADED["zero_optimization"], "offload_param": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("stage", "settings"),
    [(2, OFFLOADED), (3, OFFLOADED), (3, OFFLOADED | WEIGHTS_TOO)],
    ids=["zero2", "zero3", "zero3, weights too"],
)
def test_what_is_in_the_hosts_memory(zero: Pools, tmp_path: Path, stage: int, settings: dict[str, Any]) -> None:
    compare(zero, zero(2).run(train, str(tmp_path), Case(), stage, None, settings), alone(Case().alone))


SCRIPT = """
import sys, torch
from transformers import Trainer, TrainingArguments
import hf_burst
from tests.support import models
arguments = TrainingArguments(
    sys.argv[1], max_steps=2, per_device_train_batch_size=1, max_grad_norm=0.5, logging_steps=1, save_strategy="no",
    report_to=[], use_cpu=False, ddp_backend=sys.argv[3], parallelism_config=hf_burst.BurstParallelismConfig(),
)
model = hf_burst.patch_model(models.make_model("llama"))
ids = torch.arange(1, 38)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 2)
trainer.train()
config = trainer.accelerator.deepspeed_config
assert [config["zero_optimization"]["stage"], config["gradient_clipping"]] == [int(sys.argv[2]), 0.5]
trainer.save_model()
"""


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.slow
def test_the_config_files(zero: Pools, tmp_path: Path, stage: int) -> None:
    """A launched script writes weights that `from_pretrained` reads."""
    script, output = tmp_path / "train.py", tmp_path / "output"
    script.write_text(SCRIPT)
    config = f"recipes/configs/accelerate_zero{stage}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    command += [script, output, str(stage), zero.backend]
    environment = {**os.environ, "PYTHONPATH": ".", **(ON_CPUS if zero.backend == "gloo" else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    trained, start = LlamaForCausalLM.from_pretrained(output), models.make_model("llama")
    for moved, before in zip(trained.parameters(), start.parameters(), strict=True):
        assert moved.shape == before.shape
        assert not torch.equal(moved, before)
