"""Faults and resuming: nothing that is half-written is taken, and the same command goes on as if nothing had been."""

import io
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import DistributedType, PartialState
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import hf_burst
from hf_burst.attention import ContextGroup
from hf_burst.errors import ConfigError, RankMismatchError
from hf_burst.hf.trainers.resume import rows_of, what_is_missing
from hf_burst.ranks.group import set_timeout
from hf_burst.ranks.watch import START_ANEW, Watch
from tests.support import restarted, scripts
from tests.support.hosts import refusal
from tests.support.models import make_model
from tests.support.ranks import RankError, RankPool, forked, reset_accelerate
from tests.support.trainers import Case, make_trainer, samples, tokenizer

Ranks = Callable[[int], RankPool]
ROOT = Path(__file__).parents[3]
SHUFFLED = {"train_sampling_strategy": "random", "optim": "adamw_torch", "lr_scheduler_type": "cosine"}
EVERY = {**SHUFFLED, "max_steps": 5, "save_strategy": "steps", "save_steps": 1}
SHARDED = {
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "reshard_after_forward": True},
}


KEYS = ("loss", "grad_norm", "learning_rate")
CREATE = Trainer.create_accelerator_and_postprocess


def as_gpus(trainer: Trainer) -> None:
    """accelerate ignores FSDP on CPUs, so it is told that they are GPUs."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    CREATE(trainer)


class StopAt(TrainerCallback):
    """Ends a training as a fault does, without changing how many steps it has."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.step:
            control.should_training_stop = True


def trained(rank: int, size: int, folder: str, case: Case, stop: int = 99, **options: Any) -> dict[str, Any]:
    """Trains from the last whole checkpoint in the folder, as a script of a user does."""
    outer = dict(os.environ)
    try:
        with mock.patch.object(Trainer, "create_accelerator_and_postprocess", as_gpus if "fsdp" in options else CREATE):
            trainer = make_trainer(case, folder, **{**EVERY, **options})
        trainer.add_callback(hf_burst.BurstResume())
        trainer.add_callback(StopAt(stop))
        start = hf_burst.last_checkpoint(folder)
        trainer.train(resume_from_checkpoint=start)
    finally:
        os.environ.clear()
        os.environ.update(outer)
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"start": start and Path(start).name, **{key: [step[key] for step in steps] for key in KEYS}}


@pytest.fixture(scope="module")
def checkpoint(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of step 1 of two ranks."""
    folder = tmp_path_factory.mktemp("checkpoint")
    ranks(2).run(trained, str(folder), Case(), 1)
    return folder / "checkpoint-1"


@pytest.mark.parametrize(
    ("name", "kept", "told"),
    [
        ("trainer_state.json", None, "trainer_state.json is missing, which is written last"),
        ("trainer_state.json", 0.5, "trainer_state.json is cut off"),
        ("model.safetensors", 0.9, "model.safetensors is cut off"),
        ("model.safetensors", 0.0, "model.safetensors is cut off"),
        ("optimizer.pt", 0.9, "optimizer.pt is cut off"),
        ("scheduler.pt", 0.0, "scheduler.pt is cut off"),
        ("config.json", 0.5, "config.json is cut off"),
        ("config.json", 0.0, "config.json is cut off"),
        ("generation_config.json", 0.9, "generation_config.json is cut off"),
        ("optimizer.pt", None, "it has no optimizer"),
        ("scheduler.pt", None, "it has no scheduler"),
        ("model.safetensors", None, "it has no weights"),
    ],
)
def test_half_written_checkpoints_are_not_taken(
    checkpoint: Path, tmp_path: Path, name: str, kept: float | None, told: str
) -> None:
    """Trainer itself takes the highest number."""
    for step in (2, 10):
        shutil.copytree(checkpoint, tmp_path / f"checkpoint-{step}")
    assert hf_burst.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    for file in (tmp_path / "checkpoint-10").glob(name):
        if kept is None:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    assert told in (what_is_missing(tmp_path / "checkpoint-10") or "")
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert hf_burst.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    shutil.rmtree(tmp_path / "checkpoint-2")
    assert hf_burst.last_checkpoint(tmp_path) is None
    assert hf_burst.last_checkpoint(tmp_path / "nothing") is None


def see(rank: int, size: int, folder: str, mine: str = "") -> tuple[str, str]:
    """What a rank takes of the folder, and what is said."""
    handler = logging.StreamHandler(said := io.StringIO())
    logging.getLogger("hf_burst").addHandler(handler)
    try:
        return str(hf_burst.last_checkpoint(f"{folder}/{mine or rank}")), said.getvalue()
    except ConfigError as error:
        return str(error), said.getvalue()
    finally:
        logging.getLogger("hf_burst").removeHandler(handler)


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_checkpoint_without_a_random_state_is_taken_if_none_is_whole(
    ranks: Ranks, checkpoint: Path, tmp_path: Path, cut_off: bool
) -> None:
    """As where rank 0 has removed the earlier one, and a rank died before it wrote its state, or while it did."""
    for step in (2, 10):
        shutil.copytree(checkpoint, tmp_path / f"all/checkpoint-{step}")
    last = tmp_path / "all/checkpoint-10"
    state = last / "rng_state_1.pth"
    if cut_off:
        state.write_bytes(state.read_bytes()[:100])
    else:
        state.unlink()
    assert what_is_missing(last) is None
    for number, earlier in ((2, "checkpoint-2"), (3, "checkpoint-2"), (2, "checkpoint-10")):
        assert state.exists() == cut_off
        for path, said in ranks(number).run(see, str(tmp_path), "all")[:1]:
            assert Path(path).name == earlier
            assert f"{path} is taken. Random states, and so dropout masks, are missing in {last}" in said
        if number == 3:
            shutil.rmtree(tmp_path / "all/checkpoint-2")
    assert not state.exists(), "Trainer would stop at it"
    assert hf_burst.last_checkpoint(tmp_path / "all") == str(last)


def test_files_that_are_no_part_of_a_checkpoint_are_not_read(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(copy(checkpoint.parent, tmp_path, 1)) / "checkpoint-1"
    (folder / "faiss.index.json").write_text("{}")
    (folder / "table.bin").write_text("of another program")
    (folder / "notes.json").write_text("{}\n{}\n")
    (folder / "empty.json").write_text("")
    assert what_is_missing(folder) is None
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert "model.safetensors.index.json is cut off (FileNotFoundError" in (what_is_missing(folder) or "")


def test_configs_of_other_adapters_are_read(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(copy(checkpoint.parent, tmp_path, 1)) / "checkpoint-1"
    (folder / "other").mkdir()
    (folder / "other/adapter_config.json").write_bytes(bytes(40))  # a disk that lost power has zeros
    assert "other/adapter_config.json is cut off" in (what_is_missing(folder) or "")


def test_ranks_that_see_different_checkpoints_say_so(ranks: Ranks, checkpoint: Path, tmp_path: Path) -> None:
    """As on hosts that share no file system."""
    shutil.copytree(checkpoint, tmp_path / "0" / "checkpoint-7")
    for said, _ in ranks(2).run(see, str(tmp_path)):
        assert "see different checkpoints in" in said
        assert "Put the folder on a file system that all hosts share" in said


def test_hosts_that_keep_checkpoints_of_their_own(ranks: Ranks, checkpoint: Path, tmp_path: Path) -> None:
    """`save_on_each_node`: each has the random states of its own ranks, none that of rank 0 at step 10."""
    for rank in (0, 1):
        for step in (4, 6, 8, 10):
            shutil.copytree(checkpoint, tmp_path / f"{rank}/checkpoint-{step}")
            (tmp_path / f"{rank}/checkpoint-{step}/rng_state_{0 if step == 10 else 1 - rank}.pth").unlink()
    assert [Path(path).name for path, _ in ranks(2).run(see, str(tmp_path))] == ["checkpoint-8"] * 2
    (tmp_path / "1/checkpoint-8/optimizer.pt").unlink()
    (tmp_path / "0/checkpoint-6/model.safetensors").write_bytes(b"")
    for rank, (path, _) in enumerate(ranks(2).run(see, str(tmp_path))):
        assert path == str(tmp_path / f"{rank}/checkpoint-4")


class Ask(TrainerCallback):
    """Wants a checkpoint on one rank alone, as one that looks at the clock."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = args.process_index == 1 and state.global_step == 1


def asked(rank: int, size: int, folder: str) -> None:
    trainer = make_trainer(Case(), folder, **{**EVERY, "save_strategy": "no", "max_steps": 2})
    trainer.add_callback(Ask())
    resume = hf_burst.BurstResume()
    own = resume.on_step_end

    def on_step_end(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("a step that waits for its GPU")):
            own(*args, **kwargs)

    resume.on_step_end = on_step_end
    trainer.add_callback(resume)
    trainer.train()


def test_all_ranks_save_when_one_wants_to(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(asked, str(tmp_path))
    assert what_is_missing(tmp_path / "checkpoint-1") is None
    assert hf_burst.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("before", [{"settings": None}, {"sequences": 4}])
def test_states_that_lack_numbers_are_gone_on_from(before: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    resume = hf_burst.BurstResume()
    resume.began = {"sequences": 4, "rows": "8 rows"}
    resume._compare("It was trained", before)
    assert ("neither batches nor data are compared" in caplog.text) == ("sequences" not in before)


def test_a_batch_that_is_split_has_one_group(tmp_path: Path) -> None:
    """`split_batches`: per_device_train_batch_size is that of all ranks."""
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "report_to": []}
    for split, groups in ((False, 4), (True, 1)):
        args = TrainingArguments(str(tmp_path), use_cpu=True, accelerator_config={"split_batches": split}, **arguments)
        callback = hf_burst.BurstResume()
        with mock.patch.object(TrainingArguments, "world_size", 4):
            callback.on_train_begin(args, TrainerState(), None, model=make_model("llama"))
        assert callback.began["sequences"] == 4 * groups * 2


ACCELERATE = ["accelerate.commands.launch", "--config_file", str(ROOT / "recipes/configs/accelerate_2_processes.yaml")]
AGAIN = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:PORT", "--rdzv-id", "job", "--max-restarts", "2"]
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"],
    "torchrun, c10d": ["torch.distributed.run", "--nproc-per-node", "2", *AGAIN],
    "torchrun on two hosts": ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *AGAIN],
    "accelerate": [
        *ACCELERATE,
        *("--rdzv_backend", "c10d", "--main_process_ip", "127.0.0.1", "--main_process_port", "PORT"),
        *("--max_restarts", "2"),
    ],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name != "torchrun" else ()) for name in LAUNCHERS]
)
@pytest.mark.slow
def test_launchers_start_again_and_go_on(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """As docs/how-to/resume.md has it: a rank is killed, and losses are those of a run without faults, bit by bit."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / restarted.FIRST).touch()
    port = str(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)
    words = [word.replace("PORT", port) for word in LAUNCHERS[name]]
    command = [sys.executable, "-m", *words, restarted.__file__, str(folder), json.dumps(EVERY)]
    ours = {"ACCELERATE_USE_CPU": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **ours, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    logs = [(tmp_path / f"log-{host}").open("w+") for host in range(2 if "--nnodes" in words else 1)]
    wanted = ranks(2).run(trained, str(tmp_path / "whole"), Case())[0]
    agents = [subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) for log in logs]
    deadline = time.monotonic() + 240
    while any(agent.poll() is None for agent in agents) and time.monotonic() < deadline:
        time.sleep(0.1)
    codes = [agent.poll() for agent in agents]
    for agent in agents:
        agent.terminate()  # so that it ends its processes
        agent.wait(30)
    assert codes == [0] * len(codes), [Path(log.name).read_text()[-3000:] for log in logs]
    assert not (folder / restarted.FIRST).exists(), "it was killed"
    result = json.loads((folder / "result.json").read_text())
    steps = [entry for entry in result["log"] if "grad_norm" in entry]
    assert result["start"] == "checkpoint-2"
    assert all([step[key] for step in steps] == wanted[key] for key in KEYS)


def copy(folder: Path, to: Path, step: int) -> str:
    shutil.copytree(folder / f"checkpoint-{step}", to / f"checkpoint-{step}")
    return str(to)


LAYOUTS = [
    pytest.param(Case(data=2, burst=1), Case(data=1, burst=2), id="2x1 to 1x2", marks=pytest.mark.full),
    pytest.param(Case(data=1, burst=2), Case(data=1, burst=1), id="1x2 to one process"),
    pytest.param(Case(data=1, burst=2), Case(data=2, burst=2), id="1x2 to 2x2", marks=pytest.mark.full),
    pytest.param(Case(data=1, burst=4), Case(data=1, burst=1), id="1x4 to one process", marks=pytest.mark.full),
    pytest.param(Case(data=2, burst=2), Case(data=1, burst=4), id="2x2 to 1x4", marks=pytest.mark.full),
    pytest.param(Case(data=1, burst=1), Case(data=2, burst=2), id="one process to 2x2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("before", "after"), LAYOUTS)
def test_other_ranks_go_on_with_the_same_losses(ranks: Ranks, tmp_path: Path, before: Case, after: Case) -> None:
    """Shuffled rows, AdamW, a cosine; killed in the second of two epochs. On as many ranks, losses are bit-equal."""
    wanted = ranks(before.ranks).run(trained, str(tmp_path / "whole"), before)[0]
    assert len(set(wanted["loss"])) == len(wanted["loss"]) == 5
    for case in (before, after):
        folder = copy(tmp_path / "whole", tmp_path / f"{case.ranks}_{case.burst}", 4)
        for found in ranks(case.ranks).run(trained, folder, case):
            assert found.pop("start") == "checkpoint-4"
            for key in KEYS:
                assert found[key] == (wanted[key] if case is before else pytest.approx(wanted[key], rel=2e-5)), key


@pytest.mark.parametrize("more", [Case(burst=4), Case(data=2)], ids=str)
def test_ranks_that_were_added_draw_the_same_batches(ranks: Ranks, tmp_path: Path, more: Case) -> None:
    """In the group or as another, by a sampler that draws from the random state of the process, at the beginning of the
    second epoch."""
    options = {"train_sampling_strategy": "group_by_length"}
    wanted = ranks(2).run(resumed_with, str(tmp_path / "whole"), Case(), options)[0]
    folder = copy(tmp_path / "whole", tmp_path / "more", 3)
    for found in ranks(4).run(resumed_with, folder, more, options):
        assert found["start"] == "checkpoint-3"
        assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-5)


def numbers_after_loading(rank: int, size: int, folder: str, save: bool) -> list[float]:
    accelerator = Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig())
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7 if save else rank)
    accelerator.save_state(folder) if save else accelerator.load_state(folder)
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_ranks_that_load_a_state_of_fewer_have_its_random_numbers(ranks: Ranks, tmp_path: Path) -> None:
    wanted = ranks(2).run(numbers_after_loading, str(tmp_path), True)[0]
    assert ranks(4).run(numbers_after_loading, str(tmp_path), False) == [wanted] * 4


def loading_fails(rank: int, size: int, folder: str) -> str:
    accelerator = Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig())

    def read(*_: Any) -> None:
        if rank == 1:
            raise OSError("the disk of rank 1")

    accelerator.register_load_state_pre_hook(read)
    with pytest.raises((OSError, RankMismatchError)) as problem:
        accelerator.load_state(folder)
    return str(problem.value)


def test_a_rank_that_cannot_load_a_state_ends_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(numbers_after_loading, str(tmp_path), True)
    others, own = ranks(2).run(loading_fails, str(tmp_path))
    assert own == "the disk of rank 1"
    assert others == "Rank 1 of the group stopped before any communication: the disk of rank 1"


def finished_again(rank: int, size: int, folder: str) -> None:
    """The same command after the end, and then a longer training by the same trainer."""
    trainer = make_trainer(Case(), folder, **{**EVERY, "max_steps": 2})
    trainer.add_callback(hf_burst.BurstResume())
    last = hf_burst.last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=last)
    assert trainer.state.global_step == 2
    stored = load_file(f"{folder}/checkpoint-2/model.safetensors")
    for name, value in trainer.model.state_dict().items():
        assert name not in stored or torch.equal(value, stored[name]), name
    assert get_last_checkpoint(folder) == f"{folder}/checkpoint-2"
    trainer.args.max_steps = 3
    trainer.train(resume_from_checkpoint=last)
    assert trainer.state.global_step == 3


def test_a_run_that_is_finished_trains_no_further(ranks: Ranks, tmp_path: Path) -> None:
    """In the middle of an epoch Trainer would take a step more."""
    ranks(2).run(resumed_with, str(tmp_path), Case(), {"max_steps": 2})
    ranks(2).run(finished_again, str(tmp_path))


@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.full)])
def test_another_global_batch_is_an_error(ranks: Ranks, checkpoint: Path, tmp_path: Path, number: int) -> None:
    folder = copy(checkpoint.parent, tmp_path, 1)
    with pytest.raises(RankError) as caught:
        ranks(number).run(resumed_with, folder, Case(data=number, burst=1), {"per_device_train_batch_size": 1})
    for error in caught.value.errors:
        assert isinstance(error, ConfigError)
        said = f"step 1 was trained with 4 sequences a step, and this run has {2 * number}: its data and learning"
        assert said in str(error)
        assert "x groups x" in str(error)


def resumed_with(rank: int, size: int, folder: str, case: Case, options: dict[str, Any]) -> dict[str, Any]:
    return trained(rank, size, folder, case, **options)


def of_data(rank: int, size: int, folder: str, data: Any, steps: int, other: bool = False) -> tuple[list[Any], str]:
    """The steps of a training on other rows, and what it says."""
    trainer = make_trainer(Case(), folder, data=data, **{**EVERY, "max_steps": steps})
    trainer.add_callback(hf_burst.BurstResume(other_data=other))
    handler = logging.StreamHandler(said := io.StringIO())
    logging.getLogger("hf_burst").addHandler(handler)
    try:
        with redirect_stdout(said):
            trainer.train(resume_from_checkpoint=hf_burst.last_checkpoint(folder))
    finally:
        logging.getLogger("hf_burst").removeHandler(handler)
    return [entry["step"] for entry in trainer.state.log_history if "grad_norm" in entry], said.getvalue()


def test_other_training_data_are_an_error(ranks: Ranks, tmp_path: Path) -> None:
    """As a script that is started on other files, in the folder of the training before."""
    folder, data = str(tmp_path), samples("padded")
    ranks(2).run(of_data, folder, data, 2)
    with pytest.raises(RankError) as caught:
        ranks(2).run(of_data, folder, data[:-1], 4)
    for error in caught.value.errors:
        assert isinstance(error, ConfigError)
        assert "The checkpoint of step 2 was trained on other data: 12 rows, and now 11 rows." in str(error)
        assert "set another output_dir" in str(error)
    steps, said = ranks(2).run(of_data, copy(tmp_path, tmp_path / "asked", 2), data[:-1], 3, True)[0]
    assert steps[-1] == 3
    assert "and now 11 rows. As many are skipped as were trained on." in said
    (_, said), (_, other_rank) = ranks(2).run(of_data, folder, data, 4)
    assert "goes on from checkpoint-2 (of 4 steps)" in said
    assert other_rank == ""
    _, said = ranks(2).run(of_data, folder, data, 4)[0]
    assert "goes on from checkpoint-4 (of 4 steps)\n4 steps are done" in said


def test_streamed_data_are_said_not_to_be_compared(caplog: pytest.LogCaptureFixture) -> None:
    resume, before = hf_burst.BurstResume(), {"sequences": 4}
    warned = "The checkpoint of step 2 was trained; streamed data are not compared."
    for then, now in ((None, None), ("9 rows", None), (None, "9 rows")):
        caplog.clear()
        resume.began = {"sequences": 4, "rows": now}
        resume._compare("The checkpoint of step 2 was trained", before | {"rows": then})
        assert caplog.messages == [warned]
    caplog.clear()
    resume._compare("The checkpoint of step 2 was trained", before)  # by an older release
    resume._compare("The checkpoint of step 2 was trained", resume.began)
    assert not caplog.messages


def test_rows_of_tables_are_compared(tmp_path: Path) -> None:
    """They are read as Arrow holds them: transforms, which may be random, are not run."""
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [index] * 9, "logps": index / 3, "text": f"t{index}"} for index in range(40)]
    table = datasets.Dataset.from_list(rows)
    known = rows_of(table)
    assert str(known).startswith("40 rows (checksum ")
    assert known == rows_of(table.with_transform(lambda rows: 1 / 0)) == rows_of(table.with_format("torch"))
    table.save_to_disk(tmp_path)
    assert known == rows_of(datasets.load_from_disk(tmp_path))
    assert known == rows_of(datasets.Dataset.from_list([{**row, "logps": row["logps"] + 1e-6} for row in rows]))
    for index in (0, 39):
        changed = [{**row, "text": "other"} if row is rows[index] else row for row in rows]
        assert known != rows_of(datasets.Dataset.from_list(changed))
    assert known != rows_of(table.select(range(39, -1, -1)))
    assert rows_of(rows) == rows_of(torch.utils.data.TensorDataset(torch.ones(40))) == "40 rows"
    assert rows_of(table.to_iterable_dataset()) is rows_of(None) is None


def test_a_checkpoint_of_an_earlier_run_is_not_mixed_with_a_new_one(tmp_path: Path) -> None:
    """The folder is emptied before it is written again."""
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1/old.pt").write_text("old")
    trained(0, 1, str(tmp_path), Case(burst=1), 1)
    assert not (tmp_path / "checkpoint-1/old.pt").exists()
    assert what_is_missing(tmp_path / "checkpoint-1") is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(Case(), Case(), id="2 to 2"),
        pytest.param(Case(), Case(data=2), id="2 to 4", marks=pytest.mark.full),
        pytest.param(Case(data=2), Case(), id="4 to 2", marks=pytest.mark.full),
    ],
)
def test_sharded_checkpoints_of_fsdp2(ranks: Ranks, tmp_path: Path, before: Case, after: Case) -> None:
    """SHARDED_STATE_DICT, by torch's distributed checkpoints."""
    wanted = ranks(before.ranks).run(resumed_with, str(tmp_path / "whole"), before, SHARDED)[0]
    folder = copy(tmp_path / "whole", tmp_path / "again", 4)
    part = max(Path(folder).rglob("optimizer_0/*.distcp"), key=lambda file: file.stat().st_size)
    table = part.parent / ".metadata"
    for file, kept, problem in (
        (part, 0.5, f"EOFError: {part.name} is too short"),
        (part, 0, f"EOFError: {part.name} is too short"),
        (part, None, "FileNotFoundError"),
        (table, 0.5, "UnpicklingError"),
        (table, 0, "EOFError"),
    ):
        content = file.read_bytes()
        if kept is None:
            file.unlink()
        else:
            file.write_bytes(content[: int(kept * len(content))])
        assert f"optimizer_0/.metadata is cut off ({problem}" in (what_is_missing(part.parents[1]) or "")
        file.write_bytes(content)
    for found in ranks(after.ranks).run(resumed_with, folder, after, SHARDED):
        assert found["start"] == "checkpoint-4"
        for key in KEYS:
            assert found[key] == pytest.approx(wanted[key], rel=2e-5), key


def limits(rank: int, size: int) -> list[timedelta]:
    """The time limits of the groups of a mesh, where that of all ranks is 123 s."""
    reset_accelerate()
    cpu = torch.device("cpu")
    before = dist.group.WORLD._get_backend(cpu).options._timeout
    set_timeout(timedelta(seconds=123))
    try:
        mesh = Accelerator(cpu=True, parallelism_config=hf_burst.BurstParallelismConfig(burst_size=2)).torch_device_mesh
        return [mesh.get_group(name)._get_backend(cpu).options._timeout for name in mesh.mesh_dim_names]
    finally:
        set_timeout(before)


def test_groups_have_the_time_limit_of_all_ranks(ranks: Ranks) -> None:
    """torch gives a group that a mesh makes its own default, 10 or 30 minutes."""
    for found in ranks(4).run(limits):
        assert found == [timedelta(seconds=123)] * 2


def run_the_page(rank: int, size: int, folder: str) -> None:
    """The script for asynchronous checkpoints."""
    from tests.house.test_docs import arguments_of, run_script

    script = ROOT / "docs/scripts/async_save.py"
    run_script(rank, size, folder, str(script), arguments_of(script.read_text()))


def test_asynchronous_checkpoints_go_on(ranks: Ranks, tmp_path: Path) -> None:
    """The script of the page, whose last checkpoint is half-written, goes on from the one before, bit by bit."""
    pytest.importorskip("datasets")
    make_model("llama").save_pretrained(tmp_path / "llama")
    tokenizer().save_pretrained(tmp_path / "llama")
    for number, name in enumerate(("first.txt", "second.txt", "third.txt", "fourth.txt")):
        (tmp_path / name).write_text(" ".join(f"w{2 + (7 * number + 3 * word) % 50}" for word in range(60)))
    ranks(2).run(run_the_page, str(tmp_path))
    last = tmp_path / "outputs/asynchronous/6"
    dcp_to_torch_save(last, tmp_path / "whole.pt")
    (last / ".metadata").unlink()
    ranks(2).run(run_the_page, str(tmp_path))
    dcp_to_torch_save(last, tmp_path / "again.pt")
    whole, again = (torch.load(tmp_path / name, weights_only=False) for name in ("whole.pt", "again.pt"))
    assert whole["step"] == again["step"] == 6
    for name, value in whole["weights"].items():
        assert torch.equal(value, again["weights"][name]), name
    assert not torch.equal(whole["weights"]["lm_head.weight"], make_model("llama").lm_head.weight)


@pytest.fixture
def faults() -> Any:
    """The script that provokes faults."""
    pytest.importorskip("datasets")
    pytest.importorskip("trl")
    pytest.importorskip("matplotlib")
    from tests.support import faults

    return faults


ANEW = START_ANEW.partition(" (")[0]  # the page that it names may move


def ours(sentence: str) -> bool:
    """Whether hf_burst says it, with the way out."""
    return re.match(r"(hf_burst: )?(Rank \d+ |Ranks wait |A rank )", sentence) is not None and ANEW in sentence


def check(faults: Any, fault: Any, row: dict[str, Any]) -> None:
    """Every rank ended within the limit; one that another rank or the network left alone says a sentence of ours."""
    assert row["bit_equal"], row
    assert row["seconds"] < faults.LIMIT + faults.GRACE, row
    for rank, code in enumerate(row["exit_codes"]):
        if fault.what in ("slow", "network stalls", "packets lost"):
            assert code == 0, row
        elif rank == fault.rank and fault.what == "stalled":
            assert code is None, row
        elif fault.signal:
            assert code == {signal.SIGINT: 130}.get(fault.signal, -fault.signal), row
        else:
            assert code not in (0, None), row
            alone = rank != fault.rank or fault.what == "network down"
            assert not alone or ours(row["sentences"][rank]), row


def test_the_page_has_the_faults_that_were_provoked(faults: Any) -> None:
    result = json.loads((ROOT / "recipes/benchmarks/results/faults_2xCPU.json").read_text())
    assert faults.table(result) in (ROOT / "recipes/benchmarks/results/faults_2xCPU.md").read_text()
    for fault, row in zip(faults.FAULTS, result["faults"], strict=True):
        assert asdict(fault).items() <= row.items()
        check(faults, fault, row)


@pytest.mark.slow
def test_a_recipe_that_is_killed_goes_on(faults: Any, tmp_path: Path) -> None:
    """One rank is killed in the middle of writing a checkpoint: the other ends by itself, the same command goes on
    from the one before, and losses and weights are those of a run without faults, bit by bit."""
    whole, job = (faults.Job(tmp_path / name, options={"max_steps": "6"}) for name in ("whole", "killed"))
    whole.folder.mkdir()
    recipe = str(faults.RECIPE.relative_to(ROOT))
    scripts.run_by_ranks(2, recipe, whole.words, whole.folder)
    ended = job.run(faults.Fault("kill -9", "saving", rank=0, step=3))
    assert ended.exit_codes[0] == -signal.SIGKILL
    assert ended.exit_codes[1] not in (0, None)
    assert ours(ended.sentences[1])
    assert "Nothing was heard of rank 0: killed, stalled, or out of reach." in ended.sentences[1]
    assert (tmp_path / "killed/out/checkpoint-4/optimizer.pt").exists()
    said = scripts.run_by_ranks(2, recipe, job.words, job.folder)
    assert "\ngoes on from checkpoint-2 " in said
    assert job.result == whole.result


def killed_beside(rank: int, port: int, folder: str) -> None:
    """A process of two, of which the second is killed while the first waits for it; their errors go to a file."""
    os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    Watch.interval = 0.2
    joined = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    os.environ |= {**joined, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    dist.init_process_group("gloo")
    ContextGroup.from_mesh(None).agree({}, None, torch.device("cpu"), doing="the first pass")
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("way", ["Process", pytest.param("spawn", marks=pytest.mark.full)])
def test_processes_of_multiprocessing_say_what_ended_them(tmp_path: Path, way: str) -> None:
    """Their errors never come to `sys.excepthook`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if way == "spawn":
        given = (store.port, str(tmp_path))
        processes = torch.multiprocessing.spawn(killed_beside, given, 2, join=False).processes
    else:
        given = ((rank, store.port, str(tmp_path)) for rank in range(2))
        processes = [forked().Process(target=killed_beside, args=each) for each in given]
        for process in processes:
            process.start()
    for process in processes:
        process.join(120)
    said = (tmp_path / "0.err").read_text()
    assert [process.exitcode for process in processes] == [1, -signal.SIGKILL], said
    assert "Rank 0 lost the connection to another rank in a message of torch.distributed. Nothing was" in said


@pytest.mark.slow
def test_a_network_that_is_cut_ends_every_rank(faults: Any, tmp_path: Path) -> None:
    """Rank 1 is on a host of its own. The time limit ends both; neither blames slowness, and each names what it could
    not reach."""
    if refusal() is not None:
        pytest.skip(str(refusal()))
    job = faults.Job(tmp_path, options={"max_steps": "3", "ddp_timeout": "5"})
    ended = job.run(faults.Fault("network down", "forward", step=1))
    assert ended.exit_codes == [1, 1], ended
    assert ended.seconds < faults.LIMIT + faults.GRACE
    assert all(map(ours, ended.sentences)), ended
    assert "Nothing was heard of rank 1: killed, stalled, or out of reach." in ended.sentences[0]
    assert "The store of the job cannot be reached" in ended.sentences[1]
    assert not any("slow" in sentence for sentence in ended.sentences)


@pytest.mark.full
def test_a_recipe_that_is_killed_in_its_first_save_begins_anew(faults: Any, tmp_path: Path) -> None:
    """Both ranks do, and losses and weights are those of a run without faults, bit by bit."""
    short = {"max_steps": "3"}
    whole, job = (faults.Job(tmp_path / name, options=short) for name in ("whole", "killed"))
    assert whole.run(faults.Fault()).exit_codes == [0, 0]
    assert job.run(faults.Fault("kill -9", "saving", rank=0, step=1)).exit_codes[0] == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "killed/out").glob("checkpoint-*")] == ["checkpoint-2"]
    assert hf_burst.last_checkpoint(tmp_path / "killed/out") is None
    again = job.run(faults.Fault())
    assert (again.exit_codes, again.resumed_from) == ([0, 0], None)
    assert job.result == whole.result


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_fault_ends_and_goes_on(faults: Any, tmp_path: Path) -> None:
    whole, refused = faults.Job(tmp_path / "whole"), refusal()
    whole.run(faults.Fault())
    for number, fault in enumerate(faults.FAULTS):
        if fault.what not in faults.NETWORK or refused is None:
            check(faults, fault, faults.provoke(fault, tmp_path / str(number), whole.result))
