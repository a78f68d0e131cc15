"""Ranks that do different things end by an error within seconds, and by a sentence of ours; slow ranks never do."""

import gc
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

import hf_burst
from hf_burst.errors import ConfigError, LostRankError, RankMismatchError
from hf_burst.kernels.cpu_flash import CpuFlashKernel
from hf_burst.ranks import group as groups
from hf_burst.ranks import watch as channel
from hf_burst.ranks.group import ContextGroup, ControlGroup
from hf_burst.ranks.host import SIZE_VARIABLE, address_towards
from hf_burst.ranks.watch import Counts, Report, Verdict, Watch, stuck, watch_of_process
from tests.support import models, trainers
from tests.support.ranks import forked
from tests.support.shared_memory import forget_resources

PATIENCE, INTERVAL = 1.0, 0.25  # seconds
SOON = 45.0  # seconds in which an error has to come, on a busy machine; the time limit is far beyond
LIMIT = 300.0
SLOW = 4 * PATIENCE
FIRST = "forward pass 1 of LlamaForCausalLM in training"
OURS = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


class Said(logging.Handler):
    """Sends what hf_burst logs, one message after another."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(logging.ERROR)
        self.pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self.pipe.send(("said", record.getMessage()))


def live(rank: int, size: int, port: int, pipe: Connection, limit: float, scene: Callable[[int, int], Any]) -> None:
    """One rank of a scene: sends what it returned or raised, and what hf_burst said before."""
    torch.set_num_threads(1)
    os.environ |= {"ACCELERATE_USE_CPU": "1", "STORE_PORT": str(port)}
    Watch.patience, Watch.interval, Watch.grace = PATIENCE, INTERVAL, 4 * PATIENCE
    logging.getLogger("hf_burst").addHandler(Said(pipe))
    channel.faulthandler = mock.Mock(dump_traceback=lambda _: pipe.send(("said", "its stacks. ")))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit))
    except RuntimeError as problem:  # gloo's, on a busy machine
        pipe.send(("unconnected", str(problem)))
        return
    try:
        pipe.send(("returned", scene(rank, size)))
    except Exception as problem:
        pipe.send(("raised", (type(problem), str(problem))))


def play(
    scene: Callable[[int, int], Any], size: int = 2, limit: float = LIMIT, within: float = 2 * SOON
) -> list[dict[str, Any]]:
    """For each rank what it returned or raised, what it said, and how its process ended. In time, or ranks hang. Where
    gloo does not connect the processes, they begin anew."""
    for _ in range(2):
        with suppress(ConnectionError):
            return play_once(scene, size, limit, within)
    return play_once(scene, size, limit, within)


def play_once(scene: Callable[[int, int], Any], size: int, limit: float, within: float) -> list[dict[str, Any]]:
    """The same; a `ConnectionError` where gloo does not connect the processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forked()
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=live, args=(rank, size, store.port, pipes[rank][1], limit, scene))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, there in pipes:
        there.close()
    told: list[dict[str, Any]] = [{} for _ in range(size)]
    open_pipes, last = {here: rank for rank, (here, _) in enumerate(pipes)}, time.monotonic() + within
    try:
        while open_pipes:
            ready: Sequence[Any] = wait(open_pipes, max(0.0, last - time.monotonic()))
            assert ready, f"ranks {list(open_pipes.values())} hang; so far {told}"
            for pipe in ready:
                try:
                    kind, what = pipe.recv()
                    if kind == "unconnected":
                        raise ConnectionError(what)
                    own = told[open_pipes[pipe]]
                    own[kind] = own.get(kind, "") + what if kind == "said" else what
                except EOFError:
                    open_pipes.pop(pipe)
        for process, own in zip(processes, told, strict=True):
            process.join(SOON)
            own["exit"] = process.exitcode
    finally:
        for process in processes:
            process.kill()
            process.join()
    return told


def patched(**settings: Any) -> tuple[Any, dict[str, Any]]:
    """A patched model that is trained, and its batch."""
    settings = {"kernel": "reference", "schedule": "kv_ring"} | settings
    model = models.make_model("llama").train()
    models.patch(model, hf_burst.BurstConfig(**settings))
    return model, models.make_batch("plain")


def in_time(call: Callable[[], Any]) -> None:
    """Calls, and notices an error that comes too late."""
    began = time.monotonic()
    try:
        call()
    finally:
        assert time.monotonic() - began < SOON


def wait_for_all_alone(rank: int, size: int) -> None:
    model, batch = patched()
    model(**batch)
    if rank:
        in_time(dist.barrier)
    in_time(lambda: model.eval()(**batch))


def begin_alone(rank: int, size: int) -> None:
    """Before any pass over both ranks."""
    model, batch = patched()
    if rank:
        in_time(lambda: dist.all_gather([torch.zeros(3, dtype=torch.int64) for _ in range(size)], torch.arange(3)))
    in_time(lambda: model.eval()(**batch))


def reduce_alone(rank: int, size: int) -> None:
    model, batch = patched()
    model(**batch).loss.backward()
    if rank:
        in_time(lambda: dist.all_reduce(torch.ones(2)))
    in_time(lambda: model(**batch))


@pytest.mark.parametrize(
    ("scene", "doing", "latest"),
    [
        (wait_for_all_alone, "forward pass 2 of LlamaForCausalLM in evaluation", FIRST),
        pytest.param(reduce_alone, "forward pass 2 of LlamaForCausalLM in training", FIRST, marks=pytest.mark.full),
        (begin_alone, "forward pass 1 of LlamaForCausalLM in evaluation", "its start"),
    ],
)
def test_ranks_that_wait_in_different_places(scene: Callable[[int, int], None], doing: str, latest: str) -> None:
    model, elsewhere = play(scene)
    kind, text = model["raised"]
    assert kind is RankMismatchError
    for message in (text, elsewhere["said"]):
        assert f"Rank 0 waits in {doing}." in message
        assert f"Rank 1 runs its own code after {latest} and 1 other collective." in message
    assert "its stacks" in elsewhere["said"]
    assert "raised" in elsewhere or elsewhere["exit"] == 1


class CallAlone(TrainerCallback):
    """Calls the model on rank 0 alone, once; rank 1 calls a collective of a user's meanwhile, or trains on."""

    def __init__(self, place: str, other: str, model: Any) -> None:
        self.other, self.model, self.called = other, model, False
        setattr(self, place, self.call)

    def call(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.called:
            return
        self.called = True
        if args.process_index == 0:
            with torch.no_grad():
                self.model.eval()(**models.make_batch("plain"))
        elif self.other == "all_gather":
            received = [torch.zeros(3, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(received, torch.arange(3))
            raise AssertionError(f"it received {received}")
        elif self.other:
            getattr(dist, self.other)(*[torch.ones(2)] * (self.other == "all_reduce"))
            raise AssertionError("it went on")


def train_and_call_alone(place: str, other: str, folder: str, rank: int, size: int) -> None:
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": os.environ["STORE_PORT"]}
    os.environ |= {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}
    model = trainers.make_model(trainers.Case())
    every = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    data = trainers.samples("padded", 4)
    callbacks = [CallAlone(place, other, model)]
    options = {**every, "max_steps": 2, "model": model, "eval_dataset": data, "callbacks": callbacks}
    in_time(lambda: trainers.make_trainer(trainers.Case(), folder, **options).train())


@pytest.mark.parametrize(
    ("place", "other"),
    [
        ("on_init_end", ""),
        *(
            pytest.param(place, other, marks=pytest.mark.full)
            for place, other in (
                ("on_log", "barrier"),
                ("on_train_begin", "all_gather"),
                ("on_epoch_begin", ""),
                ("on_step_begin", ""),
                ("on_step_begin", "all_gather"),
                ("on_pre_optimizer_step", ""),
                ("on_optimizer_step", "all_reduce"),
                ("on_substep_end", ""),
                ("on_step_end", ""),
                ("on_step_end", "all_reduce"),
                ("on_prediction_step", ""),
                ("on_evaluate", ""),
                ("on_save", "all_gather"),
                ("on_epoch_end", "barrier"),
            )
        ),
    ],
)
def test_a_callback_that_calls_the_model_on_one_rank(tmp_path: Path, place: str, other: str) -> None:
    """Both ranks end by an error, which names where each of them was. No collective of the user's receives our data."""
    called, went_on = play(partial(train_and_call_alone, place, other, str(tmp_path)))
    kind, text = called["raised"]
    assert kind is RankMismatchError
    assert re.search("[Rr]ank 0(:| waits in) forward pass [0-9]+ of LlamaForCausalLM in evaluation", text)
    own_code = "Rank 1 runs its own code after .* other collective"
    assert re.search(own_code if other else "[Rr]ank 1(:| waits in| runs its own code) ", text)
    assert went_on["exit"] in (0, 1), "it is not ended by gloo"
    assert went_on.get("raised", (None,))[0] is not AssertionError, went_on
    assert "raised" in went_on or went_on["exit"] == 1


def agree_and_gather(rank: int, size: int) -> list[Any]:
    """On one group, two calls of ours that differ."""
    group = ContextGroup.from_mesh(None)
    cpu, gathered = torch.device("cpu"), []
    gathered += group.gather({"rank": rank, "text": "long" * 10 * rank}, cpu, "a comparison of texts")
    with pytest.raises(RankMismatchError) as caught:
        group.gather("more", cpu, "a comparison of more") if rank else group.agree({}, None, cpu, doing="the next pass")
    forget_resources(group)
    group.agree({}, None, cpu)  # over a control group made anew
    return [*gathered, str(caught.value)]


def test_calls_of_ours_that_differ() -> None:
    for told in play(agree_and_gather):
        first, second, text = told["returned"]
        assert (first, second) == ({"rank": 0, "text": ""}, {"rank": 1, "text": "long" * 10})
        assert "rank 0: the next pass; rank 1: a comparison of more" in text


def test_the_address_at_which_gloo_listens() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert address_towards(dist.PrefixStore("a", store)) == "127.0.0.1"
    assert address_towards(dist.HashStore()) == ""
    try:
        address = address_towards(mock.Mock(spec=["host", "port"], host="10.0.0.1", port=9))
    except OSError:
        pytest.skip("this machine has no network")
    group = mock.Mock(rank=lambda: 0, size=lambda: 1)  # of NCCL
    with mock.patch.object(dist, "get_backend", return_value="nccl"), mock.patch.dict(os.environ):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        with mock.patch.object(groups, "address_towards", return_value=address) as asked:
            backend = groups._connect(group, store, timedelta(seconds=5))
    asked.assert_called_once()
    received = [torch.zeros(3)]
    backend.allgather(received, torch.ones(3), timedelta(seconds=5)).wait()
    assert received[0].tolist() == [1.0] * 3


def be_slow(rank: int, size: int) -> float:
    model, batch = patched()
    model(**batch)
    if rank:
        time.sleep(SLOW)
    return float(model(**batch).loss.detach())


def test_a_slow_rank_is_waited_for() -> None:
    first, second = play(be_slow)
    assert first["returned"] == pytest.approx(second["returned"])
    assert "said" not in first


def alive() -> bool:
    return any(thread.name == "hf_burst watch" for thread in threading.enumerate())


def save_on_one(rank: int, size: int) -> str:
    """Rank 1 is slow; the others wait for it in a collective and in a pass, of groups that lie across."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    if rank == 1:
        time.sleep(SLOW)
    if rank < 2:
        ContextGroup.from_mesh(pairs[0]).agree({}, None, torch.device("cpu"))
    if rank > 0:
        dist.barrier(pairs[1])
    return "done" if rank == 2 or alive() else "dead"  # which made no call of hf_burst


def test_who_waits_in_another_collective_for_a_slow_rank_is_left_alone() -> None:
    for told in play(save_on_one, size=3):
        assert told["returned"] == "done"
        assert "said" not in told


def skip_on_one(rank: int, size: int) -> None:
    """Two groups that share sequences, and two that average gradients: the last rank skips a pass. It hears late."""
    if rank == 3:
        read, Watch.patience = Watch._read, SOON

        def hear(watch: Watch, key: int | str) -> Any:
            found = read(watch, key)
            time.sleep(PATIENCE if found is not None and str(key).startswith("verdict") else 0.0)
            return found

        Watch._read = hear  # type: ignore[method-assign]
    mesh = hf_burst.BurstParallelismConfig(burst_size=2).build_device_mesh("cpu")
    model, batch = models.make_model("llama").train(), models.make_batch("plain")
    hf_burst.patch_model(model, hf_burst.BurstConfig(kernel="reference", gradients="manual"), group=mesh["cp"])
    model(**batch)
    assert alive()
    if rank < 3:
        in_time(lambda: model(**batch))
    in_time(dist.barrier)


@pytest.mark.full
def test_a_pass_that_one_rank_of_two_groups_skips() -> None:
    told = play(skip_on_one, size=4)
    assert told[2]["raised"][0] is RankMismatchError
    for own in told[2:]:
        text = own.get("said", "") + str(own.get("raised", ""))
        assert "Rank 2 waits in forward pass 2 of LlamaForCausalLM in training." in text
        assert f"Rank 3 runs its own code after {FIRST} and 1 other collective." in text
    assert all("raised" in own or own["exit"] == 1 for own in told)


def gather_late(rank: int, size: int) -> str:
    """A message between two ranks makes gloo's numbers differ; then the last rank is slow, which is no error."""
    pair, cpu = dist.new_group([0, 1]), torch.device("cpu")
    ContextGroup.from_mesh(None).agree({}, None, cpu)
    if rank == 0:
        dist.send(torch.ones(1), 2)
    if rank == 2:
        dist.recv(torch.ones(1), 0)
        time.sleep(SLOW)
    dist.gather(torch.ones(1), [torch.empty(1) for _ in range(size)] if rank == 0 else None, dst=0)
    if rank < 2:
        ContextGroup.from_mesh(pair).agree({}, None, cpu, doing="the next pass")
    return "done" if alive() else "dead"


@pytest.mark.slow
def test_a_slow_rank_is_waited_for_when_messages_are_not_counted_alike() -> None:
    for told in play(gather_late, size=3):
        assert told["returned"] == "done"
        assert "said" not in told


def broadcast_alone(rank: int, size: int) -> None:
    """Nothing was begun since both met, so no number is needed for a proof."""
    group = ContextGroup.from_mesh(None)
    group.agree({}, None, torch.device("cpu"))
    if rank:
        in_time(lambda: dist.broadcast(torch.ones(1), 0))
    in_time(lambda: group.agree({}, None, torch.device("cpu"), doing="the next pass"))


def test_a_rank_that_receives_alone() -> None:
    waiting, elsewhere = play(broadcast_alone)
    assert waiting["raised"][0] is RankMismatchError
    assert (
        "Rank 1 runs its own code after a comparison of what ranks hold and 1 other collective" in waiting["raised"][1]
    )
    assert "raised" in elsewhere or elsewhere["exit"] == 1


class EndsBetween:
    """A collective that ends after the time that one waited for it, and before it is asked."""

    def __init__(self, problem: str = "") -> None:
        self.problem, self.waits = problem, 0

    def wait(self, limit: timedelta | None = None) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("gloo/transport/tcp: Operation timed out!")
        if self.problem:
            raise RuntimeError(self.problem)
        return True

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_just_after_a_look_is_no_error() -> None:
    watch = mock.Mock(interval=INTERVAL, wait=partial(Watch.wait, mock.Mock(verdict=None)))
    group = mock.Mock(size=1, watch=watch, limit=timedelta(seconds=SOON))
    for work in (EndsBetween(), EndsBetween("Connection closed")):
        group.backend.allgather.return_value = work
        if work.problem:
            with pytest.raises(RuntimeError, match="Connection closed"):
                ControlGroup.gather(group, torch.ones(1))
        else:
            ControlGroup.gather(group, torch.ones(1))


def end_early(rank: int, size: int) -> None:
    model, batch = patched()
    for _ in range(2 - rank):
        in_time(lambda: model(**batch).loss.backward())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14517", "another rank was lost"),
        ("NCCL error: invalid usage. Duplicate GPU detected", "Duplicate GPU detected"),
        ("CUDA out of memory", "CUDA out of memory"),
    ],
)
def test_what_ended_a_pass_is_told_but_for_a_connection_that_was_closed(said: str, told: str) -> None:
    watch, group = object.__new__(Watch), mock.Mock()
    watch.counts, watch.interval = {}, 1.0
    with mock.patch.object(watch, "_within"):
        watch.give_up(group, RuntimeError(said))
    assert told in watch.counts_of(group).broken
    assert "gloo" not in watch.counts_of(group).broken


def fail_early(rank: int, size: int) -> None:
    model, batch = patched()
    model(**batch)
    if rank:
        raise OSError("no space left")
    in_time(lambda: model(**batch))


def die(rank: int, size: int) -> None:
    model, batch = patched()
    model(**batch)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    in_time(lambda: model(**batch))


@pytest.mark.parametrize(
    ("scene", "said"),
    [
        (fail_early, "Rank 1 ended"),
        (end_early, "Rank 1 ended after forward pass 1 of LlamaForCausalLM in training"),
        (die, "Nothing was heard of rank 1"),
    ],
)
def test_a_rank_that_ended_is_named(scene: Callable[[int, int], None], said: str) -> None:
    survivor, _ = play(scene)
    kind, text = survivor["raised"]
    assert kind in (LostRankError, RankMismatchError)
    assert said in text
    assert "forward pass 2" in text or kind is RankMismatchError
    assert "Connection" not in text
    assert "torchrun --max-restarts" in text


def end_first(rank: int, size: int) -> None:
    model, batch = patched()
    model(**batch)
    if rank:
        in_time(lambda: model(**batch))


def test_the_rank_that_ended_is_named_on_all_others() -> None:
    ended, *waiting = play(end_first, size=3)
    assert "returned" in ended
    for told in waiting:
        assert "Rank 0 ended after forward pass 1" in told["raised"][1]
        assert "killed" not in told["raised"][1]


SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
from hf_burst.attention import ContextGroup
from hf_burst.ranks.watch import Watch
Watch.interval = 0.2
dist.init_process_group("gloo")
ContextGroup.from_mesh(None).agree({}, None, torch.device("cpu"), doing="the first pass")
if dist.get_rank() == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_a_message_of_others_that_a_killed_rank_ends_is_explained(tmp_path: Path) -> None:
    """Each rank is a script of its own, as on a cluster, whose errors nobody catches."""
    (tmp_path / "script.py").write_text(SCRIPT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(2):
        joined = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "RANK": str(rank)}
        joined |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        environment = {**os.environ, **joined, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, str(tmp_path / "script.py")]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    survivor, killed = (process.communicate(timeout=2 * SOON)[1] for process in processes)
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL], killed
    assert "rank 0 lost another rank in a message of torch.distributed" in survivor
    assert "Nothing was heard of rank 1: killed" in survivor
    assert "torchrun --max-restarts" in survivor


@pytest.mark.full
@pytest.mark.slow
def test_processes_end_while_their_watches_ask_the_store() -> None:
    """A thread that came back from the store while the interpreter ends would abort them, after all was well."""
    script = (
        "import torch.distributed as dist; from hf_burst.ranks.watch import Watch, watch_of_process; "
        "Watch.interval = 1e-5; "
        "dist.init_process_group('gloo'); watch_of_process(); dist.barrier()"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--no-python"]
    done = subprocess.run([*command, sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


LATE = """
import time
from datetime import timedelta
import torch.distributed as dist
from hf_burst.ranks.watch import Watch, watch_of_process

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(2)  # the interpreter takes long to end

late = Late()

def slow(self):
    try:
        store.wait(["never"], timedelta(seconds=1))
    except RuntimeError:
        pass

Watch.interval, Watch._beat = 0.1, slow
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
watch_of_process()
time.sleep(0.5)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_thread_that_is_held_up_in_torch_does_not_abort_the_end() -> None:
    """The group was destroyed, as `accelerator.end_training()` does, and the thread of its watch is on its way out."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=2 * SOON, env=OURS)
    assert done.returncode == 0, done.stderr


DEAF = """
import atexit
atexit.register(lambda: print(time.monotonic() - began))  # called last: hf_burst registers later
import os, signal, sys, time
import torch.distributed as dist
from hf_burst.ranks.watch import watch_of_process

port, server = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
watch_of_process()
os.kill(server, signal.SIGSTOP)
time.sleep(2)
began = time.monotonic()
"""


@pytest.mark.slow
def test_a_store_that_no_longer_answers_does_not_hold_up_the_end() -> None:
    """As that of a host that is gone."""
    serve = "import time, torch.distributed as dist; store = dist.TCPStore('127.0.0.1', 0, wait_for_workers=False, "
    serve += "is_master=True); print(store.port, flush=True); time.sleep(200)"
    server = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        command = [sys.executable, "-c", DEAF, server.stdout.readline().strip(), str(server.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SOON, env=OURS)
    finally:
        server.kill()
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 4.0


def destroy_while_it_looks(rank: int, size: int) -> str:
    """The watch reads of a group that the main thread destroys meanwhile; and then looks in vain for once."""
    ContextGroup.from_mesh(None).agree({}, None, torch.device("cpu"))
    part = dist.new_group([0, 1])
    watch_of_process()
    read, beat, failed = channel.begun_over, Watch._beat, threading.Event()

    def destroy(group: Any) -> int:
        if group is part and part in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(part)
        return read(group)

    def fail(watch: Watch) -> None:
        if not failed.is_set():
            failed.set()
            raise ValueError("Invalid process group specified")
        beat(watch)

    with mock.patch.object(channel, "begun_over", destroy):
        last = time.monotonic() + SOON
        while part in dist.distributed_c10d._world.pg_map and time.monotonic() < last:
            time.sleep(INTERVAL)
    with mock.patch.object(Watch, "_beat", fail):
        failed.wait(SOON)
        time.sleep(3 * INTERVAL)
    return "done" if alive() else "dead"


def test_the_watch_goes_on_if_a_group_is_destroyed_while_it_looks() -> None:
    for told in play(destroy_while_it_looks):
        assert told["returned"] == "done"
        assert told["said"].count("failed to look") == told["said"].count("hf_burst") == 1


def come_late(rank: int, size: int) -> None:
    model, batch = patched()
    model(**batch)
    if rank:
        time.sleep(14 * PATIENCE)  # longer than the limit, and the answers to who waits
    model(**batch)


@pytest.mark.slow
def test_the_time_limit_is_named_and_what_to_raise() -> None:
    waiting, late = play(come_late, limit=8 * PATIENCE)
    kind, text = waiting["raised"]
    assert kind is LostRankError
    assert "until the time limit" in text
    assert f"Rank 1 runs its own code after {FIRST}." in text
    assert "ddp_timeout" in text
    assert "its stacks" in late["said"]


def never_come(rank: int, size: int) -> None:
    if rank:
        time.sleep(14 * PATIENCE)
    model, batch = patched()
    model(**batch)


@pytest.mark.full
@pytest.mark.slow
def test_a_rank_that_never_came_may_be_slow() -> None:
    """No watch answers for it, though its host can be reached."""
    waiting, _ = play(never_come, limit=8 * PATIENCE)
    text = waiting["raised"][1]
    assert "ran out. Rank 1 never came to a call of hf_burst. If a rank was slow, raise the limit" in text


def explained(problem: str, reports: dict[int, Report | None], reached: bool = True) -> str:
    """What rank 4 says of a problem, of which ranks 0 to 3 may have posted these reports since it first looked."""
    watch = mock.Mock(Watch, rank=4, verdict=None, interval=0.0)

    def within(seconds: float, task: Callable[[], object]) -> bool:
        if reached:
            task()
        return reached

    def hear(ranks: Sequence[int], heard: dict[int, str], told: str) -> None:
        for rank, own in reports.items():
            watch._read = mock.Mock(side_effect=[None, own])
            Watch._hear(watch, [rank], heard, told)

    watch._within, watch._hear = within, hear
    return str(Watch.explain(watch, RuntimeError(problem), range(5), "a call"))


def test_what_is_said_after_the_limit() -> None:
    """Slowness is blamed only if all answered."""
    runs = {rank: report(rank) for rank in range(4)}
    all_answer = explained("Timed out", runs)
    assert "ran out. Rank 0 runs its own code after its start. Rank 1" in all_answer
    assert "If a rank was slow, ra" in all_answer
    silent, gone = explained("Timed out", {2: report(2)}), explained("Timed out", {}, reached=False)
    assert "Rank 2 runs its own code after its start. Nothing was heard of rank 0, 1, 3: killed, stalled," in silent
    assert "ran out. The store of the job cannot be reached: mostly rank 0, which holds it, has ended. Look" in gone
    assert "slow" not in silent + gone


def test_what_is_said_of_a_connection_that_broke() -> None:
    found = {0: report(0, ended="ended"), 2: report(2), 3: None}
    assert (
        "Rank 0 ended after its start. Rank 3 never came to a call of hf_burst. Nothing was heard of rank 1: killed, "
        "stalled, or out of reach. Look for the first error"
    ) in explained("Connection closed", found)
    full = explained("Connection closed", {0: report(0, ended="ended by SystemExit('The disk is full.')")})
    assert "Rank 0 ended by SystemExit('The disk is full.') after its start. " in full
    assert "That error ended the job: mend it." in full
    assert "memory of their hosts" not in full


def lay_meshes(rank: int, size: int) -> None:
    in_time(lambda: hf_burst.BurstParallelismConfig(burst_size=1 + rank).build_device_mesh("cpu"))


def lay_meshes_by_the_environment(rank: int, size: int) -> None:
    os.environ[SIZE_VARIABLE] = str(1 + rank)
    in_time(lambda: hf_burst.BurstParallelismConfig.from_env().build_device_mesh("cpu"))


@pytest.mark.parametrize("scene", [lay_meshes, lay_meshes_by_the_environment])
def test_sizes_that_differ_between_nodes(scene: Callable[[int, int], None]) -> None:
    for told in play(scene):
        kind, text = told["raised"]
        assert kind is RankMismatchError
        assert "burst_size: rank 0 has 1, rank 1 has 2" in text
        assert SIZE_VARIABLE in text


def lay_an_impossible_mesh(rank: int, size: int) -> None:
    in_time(lambda: hf_burst.BurstParallelismConfig(burst_size=2 + rank).build_device_mesh("cpu"))


def test_an_impossible_size_on_one_node_is_told_on_all() -> None:
    first, second = play(lay_an_impossible_mesh)
    assert first["raised"][0] is RankMismatchError
    assert second["raised"][0] is ConfigError
    assert all("burst_size=3" in told["raised"][1] for told in (first, second))


def compile_on_one(rank: int, size: int) -> list[str]:
    texts = []
    for compiler in (lambda model: torch.compile(model, backend="eager"), compile_itself, compile_a_layer):
        model, batch = patched(schedule="auto")
        called = compiler(model) if rank else model
        with pytest.raises(RankMismatchError) as problem:
            called(**batch)
        texts.append(str(problem.value))
    return texts


def compile_itself(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compile_a_layer(model: Any) -> Any:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    return model


def test_ranks_that_compile_and_ranks_that_do_not() -> None:
    for told in play(compile_on_one):
        assert len(told["returned"]) == 3
        for text in told["returned"]:
            assert "compiled: rank 0 has False, rank 1 has True" in text
            assert "Compile the model on all ranks or on none" in text


def give_up_and_call_again(met: bool, rank: int, size: int) -> list[str]:
    """Rank 0 is interrupted while it waits in a call, and calls again; rank 1 comes late."""
    group, device, said = ContextGroup.from_mesh(None), torch.device("cpu"), list[str]()
    watch_of_process()  # as patch_model does
    if met:
        group.agree({}, None, device)
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 2.0)
    else:
        time.sleep(4.0)
    for number in range(3):
        try:
            group.agree({"pass": number}, None, device)
            said.append("went on")
        except (KeyboardInterrupt, ConfigError, RankMismatchError, LostRankError) as problem:
            said.append(f"{type(problem).__name__}: {problem}")
    return said


@pytest.mark.slow
@pytest.mark.parametrize("met", [False, True])
def test_a_call_that_was_given_up_is_met_by_no_later_one(met: bool) -> None:
    """Else rank 1 would take the numbers of the first call for those of the second, and go on alone."""
    first, second = (end["returned"] for end in play(partial(give_up_and_call_again, met)))
    assert first[0].startswith("KeyboardInterrupt")
    assert all("ended in the middle (KeyboardInterrupt" in said for said in first[1:])
    assert "went on" not in second[1:]


def interrupted_everywhere(rank: int, size: int) -> str:
    """Rank 0 is interrupted in the user's code, and tells rank 1, which was interrupted while it waited."""
    group, device = ContextGroup.from_mesh(None), torch.device("cpu")
    group.agree({}, None, device)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    error: BaseException | None = None
    try:
        if rank == 0:
            time.sleep(60)
    except KeyboardInterrupt as problem:
        error = problem
    try:
        group.agree({}, error, device)
    except KeyboardInterrupt:
        return "interrupted"
    return "went on"


def test_all_ranks_are_interrupted() -> None:
    """In different places: each of them ends by its own interrupt."""
    began = time.monotonic()
    assert [told["returned"] for told in play(interrupted_everywhere)] == ["interrupted"] * 2
    assert time.monotonic() - began < SOON


def interrupted_while_it_generates(step: int, rank: int, size: int) -> list[str]:
    """Rank 0 in a layer, in the pass over the prompt or over a token behind it. Rank 1 waits for its messages."""
    said = list[str]()
    Watch.grace = 1.0
    model = models.patch(models.make_model("llama").eval())
    layer, prompt = model.model.layers[1], torch.arange(1, 20)[None]
    forward, calls = layer.mlp.forward, iter(range(step))

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    if rank == 0:
        layer.mlp.forward = interrupt
    for _ in range(2):
        try:
            hf_burst.generate(model, prompt, max_new_tokens=5, do_sample=False)
        except (KeyboardInterrupt, ConfigError, RankMismatchError, LostRankError) as problem:
            said.append(f"{type(problem).__name__}: {problem}")
    time.sleep(15.0 if rank == 0 else 0.0)  # as a notebook, whose process does not end
    return said


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.full), 2])
def test_a_rank_is_interrupted_while_it_generates(step: int) -> None:
    began = time.monotonic()
    first, second = play(partial(interrupted_while_it_generates, step))
    assert first["returned"][0].startswith("KeyboardInterrupt")
    assert "ended in the middle (KeyboardInterrupt" in first["returned"][1]
    assert "Rank 0 cannot go on: a pass ended in the middle (KeyboardInterrupt" in second["said"]
    assert time.monotonic() - began < SOON


def failing_kernel() -> Any:
    """The kernel of CPUs, whose second tile fails."""
    forward, calls = CpuFlashKernel.forward_piece, iter(range(1))

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise MemoryError("a kernel ran out of memory")
        return forward(*args, **kwargs)

    return mock.patch.object(CpuFlashKernel, "forward_piece", fail)


def fail_in_a_kernel(rank: int, size: int) -> None:
    """The kernel fails on all ranks, or on the last of three alone, and the loop goes on."""
    model, batch = patched(kernel="cpu_flash")
    model(**batch).loss.backward()
    if size == 2 or rank == size - 1:
        with failing_kernel(), pytest.raises(MemoryError):
            model(**batch)
        try:
            in_time(lambda: model(**batch))
        finally:
            time.sleep(12 * PATIENCE if size > 2 else 3 * PATIENCE)  # its connections stay
    in_time(lambda: model(**batch))


def test_a_kernel_that_failed_on_all_ranks_and_was_caught() -> None:
    for told in play(fail_in_a_kernel):
        kind, text = told["raised"]
        assert kind in (ConfigError, RankMismatchError)  # its own, or what the other one found first
        assert "ended in the middle (MemoryError" in text
        assert "anew" in text


@pytest.mark.full
@pytest.mark.slow
def test_a_kernel_that_failed_on_one_rank_and_was_caught() -> None:
    *others, own = play(fail_in_a_kernel, size=3)
    assert own["raised"][0] is ConfigError
    for told in others:
        text = told["raised"][1] if "raised" in told else told["said"]
        assert "Rank 2 cannot go on: a pass ended in the middle (MemoryError" in text
        assert told.get("exit") == 1 or "raised" in told


def fail_alone(rank: int, size: int) -> None:
    """The last rank failed in the middle of a pass; its process stays until the others have ended theirs."""
    group, cpu = ContextGroup.from_mesh(None), torch.device("cpu")
    store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    group.agree({}, None, cpu)
    if rank == size - 1:
        watch_of_process().give_up(group.process_group, MemoryError("out of memory"))
    try:
        in_time(lambda: group.agree({}, None, cpu))
    finally:
        store.set(f"raised {rank}", "")
        store.wait([f"raised {other}" for other in range(size)], timedelta(seconds=SOON))


def test_a_rank_that_failed_alone_stops_all() -> None:
    *others, own = (told["raised"] for told in play(fail_alone, size=3))
    assert own[0] is ConfigError
    for kind, text in others:
        assert kind is RankMismatchError
        assert text.startswith("A rank cannot go on, and others wait for it.")
        assert "Rank 2 cannot go on: a pass ended in the middle (MemoryError" in text
        assert "Take smaller batches if memory was short." in text
        assert "equally often" not in text


def end_within_an_except(rank: int, size: int) -> str:
    """As a process that was forked while its parent handled an error."""
    try:
        raise OSError("of the parent")
    except OSError:
        watch = watch_of_process()
        watch.end()
        return str(watch._read(rank))


def test_an_error_of_the_parent_did_not_end_its_fork() -> None:
    for rank, told in enumerate(play(end_within_an_except)):
        assert told["returned"] == f"Rank {rank} ended after its start."


def test_a_long_wait_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    doing = replace(report(0, "agree", "cp", (0, 1), number=2), doing="pass 2")
    watch: Any = mock.Mock(rank=0, seen={}, pause=1.0, late=60.0, report=doing, _read=lambda rank: None)
    for now in (59.0, 61.0, 90.0):
        Watch._look(watch, now)
    assert [record.getMessage() for record in caplog.records] == [
        "hf_burst: rank 0 has waited for more than 60 s in pass 2."
    ]


class LacksMemory(torch.autograd.Function):
    """Fails in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise torch.OutOfMemoryError("provoked")


def lack_memory(hidden: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("provoked")


def skip_a_batch(place: str, layers: tuple[int | None, ...], rank: int, size: int) -> str:
    """A script goes on with the next batch if memory was short, which it is in a layer's MLP of some ranks."""
    model, batch = patched(kernel="cpu_flash")
    layer = layers[rank]
    inner = None if layer is None else model.model.layers[layer].mlp

    def step() -> None:
        if place == "a generation":
            hf_burst.generate(model.eval(), batch["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0)
        else:
            model(**batch).loss.backward()

    step()
    if inner is not None:
        plain = inner.forward
        inner.forward = (lambda hidden: LacksMemory.apply(plain(hidden))) if place == "a backward pass" else lack_memory
    with suppress(torch.OutOfMemoryError):
        step()
    if inner is not None:
        inner.forward = plain
    in_time(step)
    return "went on"


@pytest.mark.parametrize(
    "place",
    [
        "a forward pass",
        pytest.param("a backward pass", marks=pytest.mark.full),
        pytest.param("a generation", marks=pytest.mark.full),
    ],
)
def test_a_batch_that_one_rank_skips_in_its_middle(place: str) -> None:
    stays, left = play(partial(skip_a_batch, place, (None, 0)))
    assert left["raised"][0] is RankMismatchError
    for text in (left["raised"][1], stays.get("said", "") + str(stays.get("raised", ""))):
        assert "A rank has left a pass that others went on with" in text
        assert "caught an error in the middle of a pass" in text
    assert left["raised"][1].count("Rank 0 ") == left["raised"][1].count("Rank 1 ") == 1
    assert "raised" in stays or stays["exit"] == 1


def leave_a_backward_pass_out(rank: int, size: int) -> None:
    model, batch = patched(kernel="cpu_flash")
    model(**batch).loss.backward()
    loss = model(**batch).loss
    if rank == 0:
        in_time(loss.backward)
    in_time(lambda: model(**batch))


def test_a_backward_pass_that_one_rank_leaves_out() -> None:
    _, skips = play(leave_a_backward_pass_out)
    assert skips["raised"][0] is RankMismatchError
    assert "left out the backward pass of a batch" in skips["raised"][1]


@pytest.mark.full
def test_a_batch_that_ranks_skip_in_different_places() -> None:
    for told in play(partial(skip_a_batch, "a forward pass", (1, 0))):
        kind, text = told["raised"]
        assert kind is RankMismatchError
        assert "A rank has left a pass" in text


def begin_one_more(rank: int, size: int) -> None:
    """As on GPUs, where a rank begins an exchange and goes on."""
    group, cpu = ContextGroup.from_mesh(None), torch.device("cpu")
    group.agree({}, None, cpu)
    for _ in range(1 + rank):
        with group.messages():
            pass
    group.agree({}, None, cpu)


def test_ranks_that_began_unequal_numbers_of_exchanges_do_not_go_on() -> None:
    for told in play(begin_one_more):
        kind, text = told["raised"]
        assert kind is RankMismatchError
        assert "times that layers have exchanged values with other ranks: rank 0 has 1, rank 1 has 2" in text
        assert "caught an error in the middle of a pass" in text


def test_a_batch_that_all_ranks_skip_alike() -> None:
    assert [told["returned"] for told in play(partial(skip_a_batch, "a forward pass", (0, 0)))] == ["went on"] * 2


def begin_anew(rank: int, size: int) -> str:
    """The default group is made anew on the same store, after a verdict and an end; then a rank is slow."""
    dist.destroy_process_group()
    store, cpu = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False), torch.device("cpu")
    for world in range(2):
        own = dist.PrefixStore(str(world), store)  # gloo may read the addresses of before
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT))
        agree = partial(ContextGroup.from_mesh(None).agree, {}, None, cpu)
        with mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=store):
            agree()
        if world == 0:
            watch = watch_of_process()
            dist.barrier()
            watch.store.set(f"verdict {rank}", pickle.dumps(Verdict("of before", {0: "", 1: ""})))
            watch._post("ended before")
            dist.barrier()
            dist.destroy_process_group()
    time.sleep(SLOW * rank)
    agree()
    return "done" if alive() else "dead"


@pytest.mark.slow
def test_an_error_of_an_earlier_default_group_is_forgotten() -> None:
    for told in play(begin_anew):
        assert told["returned"] == "done"


def make_groups_anew(rank: int, size: int) -> list[Any]:
    """An attention over a subgroup ended in the middle; another subgroup has its name by then. Also counts sockets."""
    cpu, seen = torch.device("cpu"), []
    for turn in range(2):
        part = dist.new_group([0, 1], use_local_synchronization=True)
        group = ContextGroup.from_mesh(part)
        group.agree({}, None, cpu)
        seen.append((group.name, watch_of_process().counts_of(part).agreed))
        if turn == 0:
            with pytest.raises(MemoryError), group.messages():
                raise MemoryError("provoked")
            with pytest.raises(ConfigError):
                group.agree({}, None, cpu)
            dist.destroy_process_group(part)
            del part
    return seen


@pytest.mark.full
@pytest.mark.slow
def test_a_group_made_anew_begins_with_new_counts() -> None:
    every: list[dict[str, Any]] = []
    for _ in range(6):  # on a busy machine torch may find the addresses of the group before, and wait there for ever
        with suppress(AssertionError):
            every = play(make_groups_anew, within=SOON / 3)
        if every and all("returned" in told for told in every):
            break
    assert every
    for told in every:
        (first, counts), (second, later) = told["returned"]
        if first != second:
            pytest.skip("this torch gives no name twice, as those up to 2.14 do")
        assert counts == later


def leave_worlds(rank: int, size: int) -> int:
    """How many watches are left after default groups came and went."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False)
    watches = []
    for world in range(3):
        own = dist.PrefixStore(str(world), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT))
        ContextGroup.from_mesh(None).agree({}, None, torch.device("cpu"))
        watches.append(ref(watch_of_process()))
        dist.barrier()
        dist.destroy_process_group()
    last = time.monotonic() + SOON
    while time.monotonic() < last and any(watch() is not None for watch in watches):
        time.sleep(INTERVAL)
        gc.collect()
    return sum(watch() is not None for watch in watches)


def test_a_watch_goes_with_its_default_group() -> None:
    assert [told["returned"] for told in play(leave_worlds)] == [0, 0]


def over(group: str, **counts: Any) -> dict[str, Counts]:
    return {group: Counts(**counts)}


def report(rank: int, kind: str = "", group: str = "", members: Sequence[int] = (), **facts: Any) -> Report:
    return Report(rank, 1, kind=kind, group=group, members=members, **facts)


def chain(*reports: Report) -> list[int]:
    """The ranks by which rank 0 is stuck."""
    return [found.rank for found in stuck(0, {own.rank: own for own in reports}.get)]


def test_a_circle_over_several_groups_is_found() -> None:
    """Two groups that share sequences, and one of all ranks that shards weights: ranks 1 and 3 have skipped a batch."""
    agree: dict[str, Any] = {"kind": "agree", "number": 2}
    here, there = {"cp 0": Counts(agreed=1)}, {"cp 1": Counts(agreed=1)}
    waits, goes_on = {"all": Counts(since=1, exact=True)}, {"all": Counts(since=2, exact=True)}
    circle = [
        report(0, group="cp 0", members=(0, 1), counts={"cp 0": Counts(agreed=2), **waits}, **agree),
        report(1, counts={**here, **goes_on}),
        report(2, group="cp 1", members=(2, 3), counts={"cp 1": Counts(agreed=2), **waits}, **agree),
        report(3, counts={**there, **goes_on}),
    ]
    assert chain(*circle) == [0, 1]
    assert not chain(circle[0], replace(circle[1], counts={**here, **waits})), "it is slow"
    assert not chain(circle[0], replace(circle[1], met="another call"))
    assert not chain(circle[0], *circle[2:])


@pytest.mark.parametrize(("agreed", "exchanges", "found"), [(1, 3, [0, 1]), (1, 2, []), (2, 3, [])])
def test_a_rank_that_waits_for_its_device_may_have_been_left(agreed: int, exchanges: int, found: list[int]) -> None:
    """Its main thread seems to run. It is proved by the exchanges that it has begun, and only before the call."""
    waiting = report(0, "agree", "cp", (0, 1), number=2, counts=over("cp", agreed=2, exchanges=2))
    runs = report(1, counts=over("cp", agreed=agreed, exchanges=exchanges))
    assert chain(waiting, runs) == found


@pytest.mark.parametrize(
    ("own", "there", "exact", "found"), [(2, 1, True, [0, 1]), (2, 1, False, []), (1, 0, False, [0, 1])]
)
def test_collectives_that_one_rank_has_begun(own: int, there: int, exact: bool, found: list[int]) -> None:
    """Gloo counts messages between two ranks as well, so there the other one must have begun nothing."""
    waiting = report(0, "agree", "cp", (0, 1), number=2, counts=over("cp", agreed=2, since=there, exact=exact))
    runs = report(1, counts=over("cp", agreed=1, since=own, exact=exact))
    assert chain(waiting, runs) == found
    assert not chain(waiting, replace(runs, counts=over("cp", agreed=1, since=there, exact=exact))), "it is slow"


def test_a_rank_that_ended_or_failed_is_waited_for_by_nobody() -> None:
    waiting = report(0, "agree", "cp", (0, 1), number=2, counts=over("cp", agreed=2))
    late = over("cp", agreed=1)
    assert not chain(waiting, report(1, counts=late))
    ended = report(1, counts=late, ended="ended by OSError()")
    assert chain(waiting, ended) == [0, 1]
    text = Verdict.of([waiting, ended]).text
    assert text.startswith("A rank has ended, and others wait for it.")
    assert "Rank 1 ended by OSError() after its start. That error ended the job: mend it." in text
    assert "equally often" in Verdict.of([waiting, replace(ended, ended="ended")]).text
    assert not chain(waiting, replace(ended, counts=over("cp", agreed=2))), "it came before it ended"
    receiving = report(0, "messages", "cp", (0, 1), number=1)
    assert chain(receiving, report(1, counts=over("cp", exchanges=1, broken="MemoryError()"))) == [0, 1]
    begun = over("cp", agreed=2, exchanges=1)
    assert not chain(receiving, report(1, counts=begun | over("another", broken="MemoryError()")))
    assert not chain(receiving, report(1, "agree", "cp", (0, 1), number=2, counts=begun))
