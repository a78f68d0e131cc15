"""Training and evaluation by every trainer beside one process, and what no trainer can be given."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    get_linear_schedule_with_warmup,
)

import hf_burst
from hf_burst.errors import BatchError, ConfigError, RankMismatchError
from hf_burst.hf.parts import head
from tests.support import models, trainers
from tests.support.ranks import RankError, RankPool, reset_accelerate
from tests.support.trainers import Case, make_trainer

pytest.importorskip("trl")
Ranks = Callable[[int], RankPool]
TRAINERS = ("raw", "Trainer", "SFTTrainer", "DPOTrainer")
KINDS = {"raw": ("padded", "packed"), "SFTTrainer": ("padded", "packed", "padding_free"), "DPOTrainer": ("padded",)}
SWITCH = (False, True)


def product(trainer: str) -> list[Case]:
    """All cases of a trainer. DPO pads its pairs, and makes batches that only a model can shard."""
    explicit = (False,) if trainer == "DPOTrainer" else SWITCH
    axes = (KINDS.get(trainer, KINDS["raw"]), SWITCH, SWITCH, explicit, (1, 2))
    return [Case(trainer, *values) for values in itertools.product(*axes)]


LITTLE = [
    Case("Trainer", "packed", data=2),
    Case("SFTTrainer", "packed", lora=True),
    Case("DPOTrainer"),
    Case("raw", burst=3),
]
ALL = [case for trainer in TRAINERS for case in product(trainer)]
ALL += [Case("Trainer", burst=3), *(replace(case, checkpointing=True, little=True) for case in LITTLE)]
SUBSET = [  # with each value of each axis
    Case("Trainer", "packed", lora=True, explicit=True),
    Case("SFTTrainer", "padding_free", explicit=True, data=2),
    *ALL[-2:],
]


@cache
def alone(case: Case) -> dict[str, Any]:
    """One process. Not patched, without checkpointing."""
    return trainers.train(0, 1, tempfile.gettempdir(), case)


@pytest.mark.parametrize(
    "case", [*SUBSET, *(pytest.param(case, marks=pytest.mark.full) for case in ALL if case not in SUBSET)], ids=str
)
def test_three_steps_equal_one_process(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    wanted = alone(case.alone)
    for found in ranks(case.ranks).run(trainers.train, str(tmp_path), case):
        trainers.compare(found, wanted)
    assert len(set(wanted["losses"])) == trainers.STEPS
    assert case.lora or min(wanted["norms"]) > trainers.CLIP, "the clipping must be felt"


def train_evaluated(rank: int, size: int, folder: str, case: Case, options: dict[str, Any]) -> dict[str, Any]:
    trainer = make_trainer(case, folder, eval_dataset=trainers.samples("padded", 2), **options)
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    return trainers.finish(trainer)


@pytest.mark.parametrize("options", [{}, {"torch_compile": True, "torch_compile_backend": "eager"}], ids=str)
def test_a_model_that_was_evaluated_is_trained(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    """accelerate takes such a model for one that is in DDP; Transformers alone trains each rank by itself."""
    wanted = alone(Case().alone)
    for found in ranks(2).run(train_evaluated, str(tmp_path), Case(), options):
        trainers.compare(found, wanted)


def evaluate_in_turn(rank: int, size: int, folder: str) -> None:
    """accelerate wraps the forward of a model that it prepares once more, for autocast."""
    options = {"bf16": True, "max_steps": 1, "eval_dataset": trainers.samples("padded", 2)}
    trainer, forwards = make_trainer(Case(), folder, **options), list[Any]()
    for _ in range(3):
        trainer.train()
        trainer.evaluate()
        forwards.append(trainer.model.forward)
    assert forwards[1] is forwards[2]


def test_evaluations_in_turn_with_trainings_wrap_the_model_no_further(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(evaluate_in_turn, str(tmp_path))


def train_rebalanced(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    options = {"train_sampling_strategy": "batch_rebalance", "processing_class": trainers.tokenizer()}
    return trainers.finish(make_trainer(case, folder, trainers.samples(case.kind, 11), **options))


@pytest.mark.parametrize("data", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_sampler_that_divides_by_ranks_itself(ranks: Ranks, tmp_path: Path, data: int) -> None:
    """Groups are its ranks, as in plain data parallelism over as many processes."""
    case = Case(data=data)
    wanted = ranks(data).run(train_rebalanced, str(tmp_path), replace(case, burst=0))[0]
    for found in ranks(case.ranks).run(train_rebalanced, str(tmp_path), case):
        trainers.compare(found, wanted)


def evaluate(rank: int, size: int, folder: str, case: Case, count: int, **options: Any) -> dict[str, Any]:
    """`evaluate` before and after `predict`, of an untrained model."""
    make = trainers.table if case.trainer == "SFTTrainer" else trainers.samples
    trainer = make_trainer(case, folder, eval_dataset=make("padded", count), **options)
    metrics = [trainer.evaluate()]
    if not case.explicit:
        predictions = trainer.predict(trainer.eval_dataset)
        metrics += [{"eval_loss": predictions.metrics["test_loss"]}, trainer.evaluate()]
        return {"metrics": metrics, "logits": predictions.predictions, "labels": predictions.label_ids}
    with pytest.raises(BatchError, match="full batches"):
        trainer.predict(trainer.eval_dataset)
    return {"metrics": metrics}


EVALUATED = {"eval_loss", "eval_entropy", "eval_mean_token_accuracy"}


@pytest.mark.parametrize(
    ("data", "count", "explicit", "trainer"),
    [
        (1, 5, False, "Trainer"),
        (2, 8, True, "Trainer"),
        (2, 7, False, "SFTTrainer"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (1, 5, True, "Trainer"),
                (1, 5, True, "SFTTrainer"),
                (1, 5, False, "SFTTrainer"),
                (2, 8, False, "Trainer"),
                (2, 8, False, "SFTTrainer"),
                (2, 8, True, "SFTTrainer"),
                (2, 7, False, "Trainer"),
                (2, 7, True, "Trainer"),
                (2, 7, True, "SFTTrainer"),
            )
        ),
    ],
)
def test_evaluation_and_prediction(
    ranks: Ranks, tmp_path: Path, trainer: str, explicit: bool, data: int, count: int
) -> None:
    """The last batch is smaller than the others, or filled up, as plain data parallelism does too."""
    case = Case(trainer, explicit=explicit, data=data)
    plain = replace(case, explicit=False, burst=0)
    alone = evaluate(0, 1, str(tmp_path), replace(plain, data=1), count)
    parallel = ranks(data).run(evaluate, str(tmp_path), plain, count)[0] if data > 1 else alone
    if trainer == "Trainer" and count % 2 == 0:  # SFTTrainer's loss is a mean over the ranks' means
        assert parallel["metrics"][0]["eval_loss"] == pytest.approx(alone["metrics"][0]["eval_loss"], rel=1e-6)
    for found in ranks(case.ranks).run(evaluate, str(tmp_path), case, count):
        for mine, wanted in zip(found["metrics"], parallel["metrics"], strict=False):
            for name in EVALUATED & wanted.keys():
                assert mine[name] == pytest.approx(wanted[name], rel=1e-6), name
        if not explicit:
            assert len(found["logits"]) == count, "each row once"
            real = alone["labels"] != -100
            assert np.array_equal(found["labels"], alone["labels"])
            np.testing.assert_allclose(found["logits"][real], alone["logits"][real], rtol=0, atol=1e-6)


GATHERED: dict[str, dict[str, Any]] = {
    "seq2seq": {"include_for_metrics": ["inputs", "loss"]},
    "seq2seq, generated": {"predict_with_generate": True, "generation_max_length": 40},
    "objects": {"eval_use_gather_object": True, "include_for_metrics": ["inputs"]},
    "each batch": {"batch_eval_metrics": True, "include_for_metrics": ["loss"], "eval_accumulation_steps": 1},
    "lists of batches": {"eval_do_concat_batches": False, "include_for_metrics": ["inputs"]},
}


def as_tensors(parts: Any) -> Any:
    return tree_map(lambda part: torch.empty(0) if part is None else torch.as_tensor(part), parts)


def gather_in_evaluation(rank: int, size: int, folder: str, case: Case, name: str) -> list[Any]:
    """All that metrics are given, and all that `predict` returns."""
    seen: list[Any] = []

    def metrics(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        parts = (prediction.predictions, prediction.label_ids, prediction.inputs, prediction.losses)
        seen.append(as_tensors(parts))
        return {"rows": len(prediction.label_ids)}

    options = {"eval_dataset": trainers.samples("padded", 7), **GATHERED[name]}
    options |= {"compute_metrics": metrics, "processing_class": trainers.tokenizer()}
    seq2seq = {"Trainer": Seq2SeqTrainer, "TrainingArguments": Seq2SeqTrainingArguments}
    with mock.patch.multiple(trainers, **seq2seq) if "seq2seq" in name else nullcontext():
        trainer = make_trainer(case, folder, **options)
    found = [trainer.evaluate()["eval_rows"], trainer.evaluate()["eval_loss"]]
    predicted = trainer.predict(trainer.eval_dataset)
    return [*found, seen, as_tensors(tuple(predicted[:2])), predicted.metrics["test_loss"]]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in ("seq2seq", "lists of batches"))) for n in GATHERED]
)
def test_evaluation_gathers_a_group_once(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Whatever gathers, in order, and with the rows that plain data parallelism has twice."""
    case = Case(data=2)
    wanted = ranks(2).run(gather_in_evaluation, str(tmp_path), replace(case, burst=0), name)[0]
    for found in ranks(4).run(gather_in_evaluation, str(tmp_path), case, name):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def evaluation_loop(rank: int, size: int) -> list[int]:
    """A loop of the user's, by a name that `Trainer` has for one of its own."""
    accelerator = Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig(burst_size=2))
    found: list[int] = accelerator.gather(torch.tensor([rank])).tolist()
    return found


def test_a_users_own_loop_gathers_from_all_ranks(ranks: Ranks) -> None:
    assert ranks(2).run(evaluation_loop) == [[0, 1], [0, 1]]


def gather_objects(rank: int, size: int) -> list[Any]:
    accelerator = Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig(burst_size=2))
    loader = accelerator.prepare(DataLoader([{"value": value} for value in range(7)], batch_size=2))
    found: dict[str, list[Any]] = {"tensors": [], "scalars": [], "objects": [], "asked": []}
    for batch in loader:
        values = batch["value"]
        found["tensors"] += accelerator.gather_for_metrics({"nested": (values,)})["nested"][0].tolist()
        found["scalars"] += accelerator.gather_for_metrics(values.sum()).tolist()
        found["objects"] += accelerator.gather_for_metrics([f"value {value}" for value in values.tolist()])
        found["asked"] += accelerator.gather_for_metrics(values, use_gather_object=True)
    return [found["tensors"], found["scalars"], found["objects"], [int(value) for value in found["asked"]]]


def test_a_group_counts_once_in_metrics(ranks: Ranks) -> None:
    values = list(range(7))
    for found in ranks(4).run(gather_objects):
        assert found == [values, [1, 5, 9, 6], [f"value {value}" for value in values], values]


class Stream(torch.utils.data.IterableDataset):
    """The documents, without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(trainers.samples("padded"))


def stream(kind: str) -> Any:
    shards = 2 if kind == "shards" else 1
    return Stream() if kind == "torch" else trainers.table("padded").to_iterable_dataset(shards).with_format("torch")


def train_on_stream(rank: int, size: int, folder: str, case: Case, kind: str) -> dict[str, Any]:
    return trainers.finish(make_trainer(case, folder, stream(kind)))


@pytest.mark.parametrize(
    ("trainer", "kind", "data"),
    [
        ("Trainer", "torch", 1),
        ("SFTTrainer", "datasets", 2),
        ("SFTTrainer", "shards", 2),
        pytest.param("Trainer", "datasets", 2, marks=pytest.mark.full),
        pytest.param("SFTTrainer", "datasets", 1, marks=pytest.mark.full),
        pytest.param("Trainer", "torch", 2, marks=pytest.mark.full),
        pytest.param("Trainer", "datasets", 1, marks=pytest.mark.full),
    ],
)
def test_iterable_datasets(ranks: Ranks, tmp_path: Path, trainer: str, kind: str, data: int) -> None:
    case = Case(trainer, data=data)
    wanted = train_on_stream(0, 1, str(tmp_path), case.alone, kind)
    for found in ranks(case.ranks).run(train_on_stream, str(tmp_path), case, kind):
        trainers.compare(found, wanted)


def train_on_removed_columns(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    trainer = make_trainer(case, folder, Stream())
    trainer.args.remove_unused_columns = True  # by a collator around that of the user
    return trainers.finish(trainer)


@pytest.mark.parametrize("data", [1, 2])
def test_a_stream_is_sharded_in_groups_of_one(ranks: Ranks, tmp_path: Path, data: int) -> None:
    """As torchrun starts them: accelerate would have the first rank send its batches."""
    case = Case(explicit=True, data=data, burst=1)
    wanted = train_on_stream(0, 1, str(tmp_path), case.alone, "torch")
    for function, arguments in ((train_on_stream, (case, "torch")), (train_on_removed_columns, (case,))):
        for found in ranks(data).run(function, str(tmp_path), *arguments):
            trainers.compare(found, wanted)


def read_stream(rank: int, size: int, kind: str, dispatch: bool | None) -> list[list[int]]:
    """The tokens that a raw loop reads."""
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=hf_burst.BurstParallelismConfig(burst_size=2),
        dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch),
    )
    loader = accelerator.prepare(DataLoader(stream(kind), batch_size=1, collate_fn=trainers.collate))
    model = accelerator.prepare(hf_burst.patch_model(models.make_model("llama").train()))
    found = []
    for batch in loader:
        assert torch.isfinite(model(**batch).loss)
        found.append(batch["input_ids"][0].tolist())
    return found


@pytest.mark.parametrize(
    ("kind", "dispatch"),
    [("torch", None), ("torch", True), ("shards", None), pytest.param("datasets", None, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("data", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_raw_loop_over_an_iterable_dataset(ranks: Ranks, kind: str, dispatch: bool | None, data: int) -> None:
    """Each rank reads its batches, even where accelerate is asked to dispatch them."""
    rows = [row["input_ids"].tolist() for row in trainers.samples("padded")]
    for rank, found in enumerate(ranks(2 * data).run(read_stream, kind, dispatch)):
        assert found == rows[rank // 2 :: data]


def shuffle(rank: int, size: int, same: bool) -> list[int]:
    reset_accelerate()
    torch.manual_seed(7 if same else rank)
    accelerator = Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig())
    model = accelerator.prepare(hf_burst.patch_model(models.make_model("llama", seed=7 if same else rank).train()))
    loader = DataLoader(trainers.samples("padded"), batch_size=1, collate_fn=trainers.collate, shuffle=True)
    return [float(model(**batch).loss.detach()) for batch in accelerator.prepare(loader)]


def test_shuffling_needs_one_seed(ranks: Ranks) -> None:
    first, second = ranks(2).run(shuffle, True)
    assert first == second
    with pytest.raises(RankError) as caught:
        ranks(2).run(shuffle, False)
    for error in caught.value.errors:
        assert pytest.RaisesExc(RankMismatchError, match=r"accelerate.utils.set_seed\(seed\)").matches(error)


def squared(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """A loss of one's own: the squared distance of each label's probability from 1."""
    targets = models.shifted(labels)
    probabilities = outputs["logits"].softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    total = ((1 - probabilities) ** 2)[targets != -100].sum()
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


LOSSES: dict[str, dict[str, Any]] = {
    "smoothing": {"label_smoothing_factor": 0.2},
    "function": {"compute_loss_func": squared},
    "median": {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs.logits.median()},
}


def train_otherwise(
    rank: int, size: int, folder: str, case: Case, loss: str, limit: float = head.LOGITS_LIMIT_GIB
) -> dict[str, Any]:
    with mock.patch.object(head, "LOGITS_LIMIT_GIB", limit):
        return trainers.finish(make_trainer(case, folder, **LOSSES[loss]))


@pytest.mark.parametrize(
    ("trainer", "loss"),
    [
        ("Trainer", "smoothing"),
        ("Trainer", "function"),
        pytest.param("SFTTrainer", "function", marks=pytest.mark.full),
        pytest.param("SFTTrainer", "smoothing", marks=pytest.mark.full),
    ],
)
def test_losses_on_the_logits(ranks: Ranks, tmp_path: Path, trainer: str, loss: str) -> None:
    case = Case(trainer, data=2)
    wanted = train_otherwise(0, 1, str(tmp_path), case.alone, loss)
    assert wanted["losses"] != pytest.approx(alone(case.alone)["losses"], rel=1e-5)
    for limit in (head.LOGITS_LIMIT_GIB, 1e-9):  # gathered, or computed where tokens lie
        for found in ranks(4).run(train_otherwise, str(tmp_path), case, loss, limit):
            trainers.compare(found, wanted)
    with pytest.raises(RankError) as caught:
        ranks(2).run(train_otherwise, str(tmp_path), Case(trainer, explicit=True), loss)
    for error in caught.value.errors:
        assert pytest.RaisesExc(BatchError, match="labels were taken out of a sharded batch").matches(error)


def test_a_loss_that_mixes_tokens_names_what_is_served(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(train_otherwise, str(tmp_path), Case(), "median", 1e-9)
    for error in caught.value.errors:
        sentence = r"are gathered, and median\(\) was asked of them. Served are slices.*take hf_burst.token_losses"
        assert pytest.RaisesExc(BatchError, match=sentence).matches(error), error


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def most_likely(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def ask(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
    assert (outputs.logits is None) != model.training, "evaluation gathers all or nothing"
    if model.training:
        assert outputs.logits.detach().logsumexp(-1).shape == inputs["labels"].shape
    return (outputs.loss, outputs) if return_outputs else outputs.loss


AFTERWARDS = ("compute_loss", "compute_metrics", "preprocess_logits_for_metrics")
WITHOUT_LOGITS: dict[str, tuple[dict[str, Any], str]] = {
    "metrics": ({"compute_metrics": accuracy}, "compute_metrics would be given outputs.logits=None"),
    "both": (
        {"compute_metrics": accuracy, "preprocess_logits_for_metrics": most_likely},
        "compute_metrics, preprocess_logits_for_metrics would be given .*per_device_eval_batch_size",
    ),
    "smoothing": (
        {"label_smoothing_factor": 0.2},
        "Trainer asks for them where .*label_smoothing_factor.*lower per_device_train",
    ),
    "function": ({"compute_loss_func": squared}, "where it has .*compute_loss_func.*lower per_device_train"),
}


def without_logits(rank: int, size: int, folder: str, what: str, evaluate: bool) -> dict[str, float]:
    """Logits are above the limit."""
    given = dict(WITHOUT_LOGITS.get(what, ({"compute_loss": ask}, ""))[0])
    later = {name: given.pop(name) for name in list(given) if name in AFTERWARDS}
    model = hf_burst.patch_model(models.make_model("llama"))
    trainer = make_trainer(Case(), folder, model=model, eval_dataset=trainers.samples("padded", 4), **given)
    for name, value in later.items():
        setattr(trainer, name, partial(value, trainer) if name == "compute_loss" else value)
    with mock.patch.object(head, "LOGITS_LIMIT_GIB", 1e-9):
        return trainer.evaluate() if evaluate else trainer.train().metrics


@pytest.mark.parametrize("what", WITHOUT_LOGITS)
def test_functions_that_would_meet_no_logits(ranks: Ranks, tmp_path: Path, what: str) -> None:
    """In evaluation. An error before the pass, on all ranks, which says why and what its reader can do."""
    with pytest.raises(RankError) as caught:
        ranks(2).run(without_logits, str(tmp_path), what, True)
    for error in caught.value.errors:
        assert pytest.RaisesExc(BatchError, match=WITHOUT_LOGITS[what][1]).matches(error), error
        assert "logits_to_keep" not in str(error)


@pytest.mark.parametrize("evaluate", SWITCH)
def test_a_loss_that_asks_for_logits_above_the_limit(ranks: Ranks, tmp_path: Path, evaluate: bool) -> None:
    for metrics in ranks(2).run(without_logits, str(tmp_path), "asks", evaluate):
        assert metrics["eval_loss" if evaluate else "train_loss"] > 0


class Speaker(TrainerCallback):
    """Generates after every step, as a callback that logs samples does."""

    def __init__(self) -> None:
        self.said: list[list[int]] = []

    def on_step_end(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        prompt = trainers.samples("padded")[0]["input_ids"][None]
        model.eval()
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
        self.said.append(model.generate(prompt, **options, pad_token_id=0)[0].tolist())
        model.train()


def train_and_generate(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    trainer, speaker = make_trainer(case, folder, learning_rate=1.0), Speaker()
    trainer.add_callback(speaker)
    return {**trainers.finish(trainer), "said": speaker.said}


def test_generation_between_steps(ranks: Ranks, tmp_path: Path) -> None:
    wanted = train_and_generate(0, 1, str(tmp_path), Case().alone)
    assert len({tuple(said) for said in wanted["said"]}) > 1, "the steps must be heard"
    for found in ranks(2).run(train_and_generate, str(tmp_path), Case()):
        trainers.compare(found, wanted)
        assert found["said"] == wanted["said"]


class Faulty:
    """A data collator that spoils the batches of another one."""

    def __init__(self, collator: Callable[..., Any], fault: str, rank: int) -> None:
        self.collator, self.fault, self.rank = collator, fault, rank

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        batch = dict(self.collator(rows))
        if self.fault == "content":
            batch["input_ids"][0, 0] += self.rank
        elif self.fault == "labels":
            for key in {"labels", "completion_mask"} & set(batch):
                batch[key] = torch.full_like(batch[key], -100 if key == "labels" else 0)
        elif self.fault == "token":
            batch["input_ids"][0, 1] = models.VOCABULARY  # in the shard of one rank
        elif self.fault == "mask":
            batch["attention_mask"][0, 2] = 0
        return batch


FAULTS = {
    "content": (RankMismatchError, "content (checksum): rank 0 has"),
    "labels": (BatchError, "All labels of the batch are -100"),
    "token": ((BatchError, RankMismatchError), f"input_ids holds {models.VOCABULARY}; this model takes 0 to"),
    "mask": (BatchError, "attention_mask of row 0 "),
}


def train_on_faults(rank: int, size: int, folder: str, trainer: str) -> dict[str, Exception | None]:
    """What is raised for each fault."""
    found: dict[str, Exception | None] = {}
    for fault in FAULTS:
        try:
            if trainer == "raw":
                trainers.train_raw(Case("raw"), Faulty(trainers.collate, fault, rank))
            else:
                made = make_trainer(Case(trainer), folder)
                made.data_collator = Faulty(made.data_collator, fault, rank)
                made.train()
        except Exception as error:
            found[fault] = error
    return found


@pytest.mark.parametrize("trainer", [*TRAINERS[:3], pytest.param("DPOTrainer", marks=pytest.mark.full)])
def test_bad_batches_are_refused_on_every_rank(ranks: Ranks, tmp_path: Path, trainer: str) -> None:
    for found in ranks(2).run(train_on_faults, str(tmp_path), trainer):
        for fault, (kind, message) in FAULTS.items():
            if fault == "labels" and trainer not in ("raw", "Trainer"):
                assert fault not in found, "TRL goes on"
                continue
            assert isinstance(found.get(fault), kind), (fault, found.get(fault))
            assert message in str(found[fault])


def train_without_labels(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    made = make_trainer(case, folder)
    made.data_collator = Faulty(made.data_collator, "labels", rank)
    return trainers.finish(made)


@pytest.mark.parametrize(
    "trainer", ["SFTTrainer", *(pytest.param(t, marks=pytest.mark.full) for t in ("DPOTrainer", "KTOTrainer"))]
)
def test_trl_goes_on_where_no_label_counts(ranks: Ranks, tmp_path: Path, trainer: str) -> None:
    case = Case(trainer)
    wanted = train_without_labels(0, 1, str(tmp_path), case.alone)
    for found in ranks(2).run(train_without_labels, str(tmp_path), case):
        trainers.compare(found, wanted)


def prepare_unpatched(rank: int, size: int, evaluation: bool) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig())
    model = models.make_model("gpt2")
    if evaluation:
        accelerator.prepare_model(model, evaluation_mode=True)
    else:
        from peft import get_peft_model

        accelerator.prepare(get_peft_model(models.make_model("llama"), trainers.lora_config()))


@pytest.mark.parametrize("evaluation", SWITCH)
def test_models_that_were_not_patched_are_refused(ranks: Ranks, evaluation: bool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(prepare_unpatched, evaluation)
    for error in caught.value.errors:
        assert pytest.RaisesExc(ConfigError, match="is not patched, so each of the 2 ranks").matches(error)


def load_with_workers(rank: int, size: int, method: str) -> list[list[int]]:
    reset_accelerate()
    accelerator = Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig())
    collator = hf_burst.BurstCollator(trainers.collate)
    options = {"num_workers": 1, "multiprocessing_context": method, "collate_fn": collator, "batch_size": 2}
    loader = accelerator.prepare(DataLoader(trainers.samples("packed"), **options))
    model = models.patch(models.make_model("llama").train())
    shards = list(loader)
    assert all(torch.isfinite(model(**shard).loss) for shard in shards)
    return [shard["position_ids"][0].tolist() for shard in shards]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_the_collator_works_in_data_loader_workers(ranks: Ranks, method: str) -> None:
    first, second = ranks(2).run(load_with_workers, method)
    assert len(first) == 6
    for one, other, sample in zip(first, second, trainers.samples("packed")[::2], strict=True):
        length = len(sample["position_ids"])
        assert sorted(one + other) == sorted([*sample["position_ids"].tolist(), *[0] * (-length % 4)])


def rates(rank: int, size: int, burst: int | None, kind: str, split: bool) -> list[float]:
    """The learning rates of accelerate's loop with accumulation, in which the scheduler is prepared, too."""
    reset_accelerate()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=split),
        **({"parallelism_config": hf_burst.BurstParallelismConfig(burst_size=burst)} if burst else {}),
    )
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if kind == "linear":
        scheduler = get_linear_schedule_with_warmup(optimizer, 2, 16)
    else:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=7)  # fewer than there are
    prepared = accelerator.prepare_model(model) if size > 1 else model
    prepared, optimizer, scheduler = accelerator.prepare(prepared, optimizer, scheduler)
    assert accelerator.prepare_scheduler(scheduler) is scheduler
    assert accelerator._schedulers == [scheduler]
    found = []
    for _ in range(12):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(torch.ones(1, 2)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append(scheduler.get_last_lr()[0])
    return found


@pytest.mark.parametrize("kind", ["linear", "one cycle"])
def test_a_prepared_scheduler_steps_once_a_batch(ranks: Ranks, kind: str) -> None:
    """As in stock accelerate over as many processes as there are groups."""
    for split in (False, True) if kind == "linear" else (False,):
        alone, two = rates(0, 1, None, kind, split), ranks(2).run(rates, None, kind, split)[0]
        assert len(set(alone)) > 4
        assert ranks(2).run(rates, 2, kind, split) == [alone] * 2
        assert ranks(4).run(rates, 2, kind, split) == [two] * 4
    reset_accelerate()
