"""`BurstCallback`: what people watch, beside what is counted by hand, and where it is shown."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM, TrainerCallback, TrainingArguments

import hf_burst
from hf_burst.attention import AttentionRequest, burst_attention
from hf_burst.errors import ConfigError
from hf_burst.hf.batches.cutting import layout_of
from hf_burst.hf.models.model_size import model_size
from hf_burst.hf.trainers.logging import longest_of, pairs_of, untouched_length
from hf_burst.ranks.group import ContextGroup
from hf_burst.ranks.layout import SequenceLayout
from hf_burst.ring import ExchangeClock
from hf_burst.ring.resources import resources_of
from tests.support import models, trainers
from tests.support.ranks import RankPool, reset_accelerate
from tests.support.trainers import ACCUMULATION, STEPS, Case, make_trainer

pytest.importorskip("trl")
Ranks = Callable[[int], RankPool]
PEAK = 1e12
KEYS = {"tokens_per_second_per_gpu", "mfu", "peak_memory_gib", "packing_imbalance"}


class Spied(hf_burst.BurstCallback):
    """Writes down the seconds of each log."""

    def _numbers(self) -> dict[str, float]:
        return super()._numbers() | {"seconds": self.seconds}


class Reporter(TrainerCallback):
    """Keeps what it is told, as those of Weights & Biases and TensorBoard do."""

    def __init__(self) -> None:
        self.told: list[dict[str, float]] = []

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.told.append(dict(logs))


class SlowEvaluation(TrainerCallback):
    """Half a second for each batch."""

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)


def watch(rank: int, size: int, folder: str, case: Case, options: dict[str, Any]) -> list[dict[str, float]]:
    """Trains with a reporter and, after it, the callback; the logs of the steps as both know them."""
    reset_accelerate()
    trainer = make_trainer(case, folder, **options)
    reporter = Reporter()
    trainer.add_callback(reporter)
    trainer.add_callback(SlowEvaluation())
    trainer.add_callback(Spied(trainer, peak_flops=PEAK))
    trainer.train()
    log = trainer.state.log_history
    steps, told = ([entry for entry in entries if "loss" in entry] for entries in (log, reporter.told))
    assert [{**entry, "step": at["step"]} for entry, at in zip(told, steps, strict=True)] == steps
    runtime = log[-1]["train_runtime"] - sum(entry.get("eval_runtime", 0) for entry in log)
    assert sum(entry["seconds"] for entry in steps) <= runtime, "an evaluation is not part of a step"
    return steps


def lengths(step: int) -> list[int]:
    """The documents of a step, which two micro-batches of two rows hold over all groups."""
    rows = 2 * ACCUMULATION
    return [len(row["input_ids"]) for row in trainers.samples("padded")[rows * step : rows * (step + 1)]]


def imbalance(case: Case, step: int) -> float:
    """The mean of the micro-batches of a step, of the group in which it is the most."""
    rows = trainers.samples("padded")[2 * ACCUMULATION * step :]
    batches = [trainers.collate(rows[start : start + case.rows]) for start in range(0, 2 * ACCUMULATION, case.rows)]
    each = [layout_of(batch, hf_burst.BurstConfig(), case.burst).imbalance for batch in batches]
    return max(sum(each[group :: case.data]) / ACCUMULATION for group in range(case.data))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param(Case(checkpointing=True), {}, marks=pytest.mark.full),
        (Case(data=2, explicit=True), {}),
        (Case(), {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": trainers.samples("padded", 2)}),
    ],
    ids=["one group", "two groups, sharded batches", "evaluation in between"],
)
def test_tokens_and_operations_are_counted_once(
    ranks: Ranks, tmp_path: Path, case: Case, options: dict[str, Any]
) -> None:
    logs = ranks(case.ranks).run(watch, str(tmp_path), case, options)
    model = models.make_model("llama")
    used = sum(weight.numel() for weight in model.parameters()) - models.VOCABULARY * 32
    for step in range(STEPS):
        entries = [log[step] for log in logs]
        assert set(entries[0]) >= KEYS
        seconds = max(entry["seconds"] for entry in entries)
        tokens = entries[0]["tokens_per_second_per_gpu"] * seconds * case.ranks
        assert tokens == pytest.approx(sum(lengths(step)), rel=1e-6)
        pairs = 2 * sum(length * (length + 1) // 2 for length in lengths(step))  # of both layers
        flops = entries[0]["mfu"] * PEAK * seconds * case.ranks
        assert flops == pytest.approx(6 * used * sum(lengths(step)) + 12 * pairs * 32, rel=1e-6)
        assert entries[0]["packing_imbalance"] == pytest.approx(imbalance(case, step)) != 0
        assert 0.1 < entries[0]["peak_memory_gib"] < 20
        assert ("exchange_seconds" in entries[0]) == (step > 0)
        assert all(0 < entry["exchange_seconds"] < seconds for entry in entries if step)
        for key in KEYS:
            assert len({entry[key] for entry in entries}) == 1, "every rank knows the same"


def sampled(rank: int, size: int, folder: str) -> tuple[list[int], list[int]]:
    """The steps whose messages are timed, in a training that is interrupted and begun anew; hooks on the model then."""
    reset_accelerate()
    timed: list[int] = []

    class Interrupted(TrainerCallback):
        """After two steps, once."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if resources_of(ContextGroup.from_mesh(None)).clock is not None:
                timed.append(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hooks.append(len(trainer.model._forward_pre_hooks))
            if len(hooks) == 2:
                raise KeyboardInterrupt

    hooks: list[int] = []
    trainer = make_trainer(Case(), folder, max_steps=9, logging_steps=3)
    callback = hf_burst.BurstCallback(trainer)
    trainer.add_callback(callback)
    trainer.add_callback(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.evaluate(trainer.train_dataset)
    assert resources_of(ContextGroup.from_mesh(None)).clock is None
    trainer.train()
    assert resources_of(ContextGroup.from_mesh(None)).clock is None
    hooks.append(len(trainer.model._forward_pre_hooks))
    return timed, hooks


def test_one_step_of_each_log_is_timed(ranks: Ranks, tmp_path: Path) -> None:
    for timed, hooks in ranks(2).run(sampled, str(tmp_path)):
        assert timed == [2, 2, 4, 7]
        assert hooks == [hooks[0]] * 11 + [hooks[0] - 1]


def watched(rank: int, size: int, folder: str) -> int:
    """The passes of attention that are timed in the second step of a trainer with a reference pass in each step."""
    reset_accelerate()
    trainer = make_trainer(Case("DPOTrainer", lora=True), folder, max_steps=2, gradient_accumulation_steps=1)
    trainer.add_callback(hf_burst.BurstCallback(trainer))
    with mock.patch.object(ExchangeClock, "watch", autospec=True, side_effect=ExchangeClock.watch) as watch:
        trainer.train()
    return watch.call_count


def test_passes_without_gradients_do_not_stop_the_clock(ranks: Ranks, tmp_path: Path) -> None:
    layers, passes = 2, 3  # the reference, forward and backward
    assert ranks(2).run(watched, str(tmp_path)) == [layers * passes] * 2


@pytest.mark.parametrize(
    "case",
    [
        Case("SFTTrainer", "packed", data=2),
        pytest.param(Case("SFTTrainer", "padding_free", lora=True), marks=pytest.mark.full),
    ],
)
def test_tokens_of_trl(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    """As SFTTrainer counts them, whose numbers are those of all steps so far."""
    logs, before = ranks(case.ranks).run(watch, str(tmp_path), case, {}), 0
    for step, entry in enumerate(logs[0]):
        tokens = entry["tokens_per_second_per_gpu"] * max(log[step]["seconds"] for log in logs) * case.ranks
        assert tokens == pytest.approx(entry["num_tokens"] - before, rel=1e-6)
        before = entry["num_tokens"]


def test_several_steps_are_one_log_and_frozen_weights_count_less(tmp_path: Path) -> None:
    """In one process, with adapters; nothing is exchanged there."""
    case = Case(burst=1, lora=True)
    (entry,) = watch(0, 1, str(tmp_path), case, {"logging_steps": STEPS})
    assert "exchange_seconds" not in entry
    assert entry["packing_imbalance"] == 0
    tokens = sum(sum(lengths(step)) for step in range(STEPS))
    assert entry["tokens_per_second_per_gpu"] * entry["seconds"] == pytest.approx(tokens, rel=1e-6)
    size = model_size(LlamaForCausalLM, models.make_model("llama").config)
    pairs = 2 * sum(length * (length + 1) // 2 for step in range(STEPS) for length in lengths(step))
    adapters = 2 * (32 + 32 + 32 + 16) * 2  # of rank 2, for queries and values of two layers
    trained = adapters / (adapters + size.weights)
    assert entry["mfu"] * PEAK * entry["seconds"] == pytest.approx(size.flops(tokens, pairs, trained), rel=1e-6)


def test_a_line_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch(0, 1, str(tmp_path), Case(burst=1), {})
    lines = re.findall(r"^step .*$", capsys.readouterr().out, re.MULTILINE)
    assert len(lines) == STEPS
    number = r"[\d.,]+"
    pattern = rf"step 1 of 3, 0:00:\d\d left, loss {number}, {number} tokens/s a process, MFU {number}%, {number} GiB"
    assert re.fullmatch(pattern, lines[0])
    assert lines[-1].startswith("step 3 of 3, 0:00:00 left, ")


def test_the_first_step_says_nothing_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It compiles, and opens connections."""

    class SlowStart(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not state.global_step:
                time.sleep(4)

    reset_accelerate()
    trainer = make_trainer(Case(burst=1), str(tmp_path), logging_steps=2)
    trainer.add_callback(SlowStart())
    trainer.add_callback(hf_burst.BurstCallback(trainer))
    trainer.train()
    assert re.search(r"^step 2 of 3, 0:00:0[01] left", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("positions", "rope", "factor"),
    [(16, {}, 2), (64, {}, None), (16, {"rope_type": "yarn", "factor": 4.0}, None)],
)
def test_documents_beyond_the_positions_of_the_model_are_warned_of_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    positions: int,
    rope: dict[str, Any],
    factor: int | None,
) -> None:
    case = Case(burst=1)
    trainer = make_trainer(case, str(tmp_path))
    trainer.model.config.max_position_embeddings = positions
    trainer.model.config.rope_parameters = {"rope_theta": 1e4, "rope_type": "default", **rope}
    trainer.add_callback(hf_burst.BurstCallback(trainer))
    trainer.train()
    said = [record.message for record in caplog.records if "max_position_embeddings" in record.message]
    assert len(said) == (factor is not None)
    assert factor is None or "16: it has not learned later positions. To extend it, set rope_parameters" in said[0]
    assert factor is None or f"{{rope_type: yarn, factor: {factor}.0}}" in said[0]


@pytest.mark.parametrize(("length", "told", "warns"), [(1024, False, True), (1024, True, False), (None, False, False)])
def test_a_length_that_is_the_default_of_trl_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int | None, told: bool, warns: bool
) -> None:
    trainer = make_trainer(Case(trainer="SFTTrainer", burst=1), str(tmp_path))
    trainer.args.max_length = length
    watch = hf_burst.BurstCallback(trainer)
    watch.warned = told
    trainer.add_callback(watch)
    trainer.train()
    said = "max_length is 1,024, the default of SFTConfig: longer texts are cut or left out."
    assert (said in caplog.text) == warns


def test_lengths_that_somebody_chose_are_not_warned_of(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")

    @dataclass
    class Long(trl.SFTConfig):
        max_length: int | None = 65536

    given: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    assert "1,024, the default of RewardConfig" in str(untouched_length(trl.RewardConfig(**given)))
    assert "1,024, the default of SFTConfig" in str(untouched_length(Long(**given, max_length=1024)))
    prepared = trl.SFTConfig(**given, dataset_kwargs={"skip_prepare_dataset": True})
    chosen = trl.SFTConfig(**given, max_length=1025)
    for training in (Long(**given), prepared, chosen, trl.GRPOConfig(**given), TrainingArguments(**given)):
        assert untouched_length(training) is None


def test_packed_documents_have_the_positions_of_their_own() -> None:
    layout = SequenceLayout.for_batch([(0, 6, 16), (0, 3, 16)], 1, real=((0, 16), (2, 14)))
    assert longest_of(layout) == 11
    size = model_size(LlamaForCausalLM, models.make_model("llama").config)
    assert pairs_of(layout, size.patterns) == 2 * (21 + 55 + 1 + 66)


def test_a_model_that_is_not_patched_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(Case(burst=0), str(tmp_path))
    trainer.add_callback(hf_burst.BurstCallback(trainer))
    with pytest.raises(ConfigError, match=r"the trainer.s is not\. Call patch_model"):
        trainer.train()


def test_a_model_whose_size_cannot_be_told_is_trained_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def untold(*_: Any) -> None:
        raise ConfigError("The sizes cannot be told.")

    monkeypatch.setattr("hf_burst.hf.trainers.logging.model_size", untold)
    logs = watch(0, 1, str(tmp_path), Case(burst=1), {})
    assert len(logs) == STEPS
    assert all(KEYS - {"mfu"} <= set(entry) and "mfu" not in entry for entry in logs)
    assert "BurstCallback logs no mfu. The sizes cannot be told." in caplog.text


def late(rank: int, size: int, schedule: str) -> float:
    """Attention that rank 1 begins half a second after the others; the seconds of messages."""
    group = ContextGroup.from_mesh(dist.group.WORLD)
    resources = resources_of(group)
    layout = SequenceLayout.for_batch([(0, 64 * size)], size)
    q, k, v = (torch.randn(1, 64, 4, 16, requires_grad=True) for _ in range(3))

    request = AttentionRequest(schedule=schedule, group=group)

    def attend() -> None:
        burst_attention(q, k, v, layout, request, check=False)

    attend()
    resources.clock = ExchangeClock(torch.device("cpu"))
    time.sleep(0.5 * (rank == 1))
    attend()
    clock, resources.clock = resources.clock, None
    attend()
    assert clock is not None
    return clock.seconds()


@pytest.mark.parametrize("schedule", ["kv_ring", "ulysses"])
def test_seconds_of_messages_are_those_of_waiting(ranks: Ranks, schedule: str) -> None:
    punctual, tardy = ranks(2).run(late, schedule)
    assert punctual > 0.4
    assert 0 < tardy < punctual - 0.25


def report(rank: int, size: int, folder: str, where: list[str]) -> None:
    reset_accelerate()
    trainer = make_trainer(Case("SFTTrainer", "packed"), folder, report_to=where, project="watched")
    trainer.add_callback(hf_burst.BurstCallback(trainer, peak_flops=PEAK))
    trainer.train()


def test_tensorboard_shows_the_numbers(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(2).run(report, str(tmp_path), ["tensorboard"])
    (events,) = tmp_path.rglob("events.out.tfevents.*")  # rank 0 alone reports
    shown = EventAccumulator(str(events)).Reload()
    for key in KEYS:
        scalars = shown.Scalars(f"train/{key}")
        assert [scalar.step for scalar in scalars] == [1, 2, 3]
        assert all(scalar.value >= 0 for scalar in scalars)
    assert [scalar.step for scalar in shown.Scalars("train/exchange_seconds")] == [2, 3]
