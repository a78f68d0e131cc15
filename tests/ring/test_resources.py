"""What the ranks of a process group own together: it ends with the group."""

import copy
import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_burst
from hf_burst.attention import AttentionRequest, SequenceLayout, burst_attention
from hf_burst.errors import ConfigError, RankMismatchError
from hf_burst.ranks.group import ContextGroup
from hf_burst.ring import resources
from hf_burst.ring.resources import resources_of
from tests.ring.test_ring import Case, assert_exact, attend, context_group, put_together
from tests.support import models, trainers
from tests.support.ranks import RankPool, forked

Ranks = Callable[[int], RankPool]

SIZE, SECONDS = 3, 180
CASES = [
    Case(((0, 48),), schedule="auto", heads=(6, 3)),
    Case(((0, 5, 20, 33, 48),), schedule="auto", heads=(4, 4), seed=1),
]


@contextmanager
def joined(folder: Path, life: int, rank: int) -> Iterator[None]:
    """A process group of three, which may not be there any more at the end."""
    store = dist.FileStore(str(folder / str(life)), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def attend_and_count(rank: int) -> list:
    """The results of all cases. The ranks must ask for their hosts once, whatever a group before had found."""
    with mock.patch.object(resources, "host_id", wraps=resources.host_id) as agreement:
        results = [attend(rank, SIZE, case) for case in CASES]
    assert agreement.call_count == 1
    return results


def live_twice(number: int, folder: Path, pipe: Connection) -> None:
    """Attends as one rank of a group, and then as another one of a group of the same name."""
    torch.set_num_threads(1)
    every, names = [], set()
    for life, rank in enumerate((number, SIZE - 1 - number)):
        with joined(folder, life, rank):
            every.append((rank, attend_and_count(rank)))
            names.add(context_group(SIZE).name)
            owned = weakref.ref(resources_of(context_group(SIZE)))
            assert owned() is not None
        gc.collect()
        assert owned() is None, "resources outlive their group"
    assert len(names) == 1
    pipe.send(every)


def train_twice(number: int, folder: Path, pipe: Connection) -> None:
    """The losses of a model without a patch, and in two groups of the same name after one `patch_model`."""
    torch.set_num_threads(1)
    model, batch = models.make_model("llama", torch.float64).train(), models.make_batch("plain")
    losses = [float(model(**batch).loss.detach())]
    for life, rank in enumerate((number, SIZE - 1 - number)):
        with joined(folder, life, rank):
            if life == 0:
                models.patch(model, group=dist.group.WORLD)
                group = context_group(SIZE)
            elif number != rank:
                with pytest.raises(ConfigError, match="made anew"):
                    _ = group.process_group
            losses.append(float(model(**batch).loss.detach()))
    with pytest.raises(ConfigError, match="no process group"):
        model(**batch)
    pipe.send(losses)


def change_the_neighbour(number: int, folder: Path, pipe: Connection) -> None:
    """The error on rank 0, which is the first of two in both groups; its model was patched for the first of them."""
    model, batch, error = models.make_model("llama", torch.float64), models.make_batch("plain"), ""
    for life, members in enumerate(([0, 1], [0, 2])):
        with joined(folder, life, number):
            group = dist.new_group(members)
            if life == 0 and number == 0:
                models.patch(model, group=group)
                before = ContextGroup.from_mesh(group)
            elif number == 0:
                with pytest.raises(ConfigError, match=r"was rank 0 of \(0, 1\) and is rank 0 of \(0, 2\)"):
                    before.process_group  # noqa: B018
                with pytest.raises(ConfigError) as problem:
                    model(**batch)
                error = str(problem.value)
            dist.barrier()
    pipe.send(error)


def attend_with_a_group_of_before(number: int, folder: Path, pipe: Connection) -> None:
    """The errors of an attention whose group was made anew since. The rank in the middle has kept its number."""
    layout = SequenceLayout.for_batch([(0, 48)], SIZE)
    q, k, v = (torch.zeros(1, 16, 3, 8) for _ in range(3))
    for life, rank in enumerate((number, SIZE - 1 - number)):
        with joined(folder, life, rank):
            if life == 0:
                request = AttentionRequest(context_group(SIZE))
                burst_attention(q, k, v, layout, request)
            else:
                with pytest.raises((ConfigError, RankMismatchError), match="was made anew") as problem:
                    burst_attention(q, k, v, layout, request)
    pipe.send(str(problem.value))


def collate_before_and_after(number: int, folder: Path, pipe: Connection) -> None:
    """Tokens of the shards of one collator: before a group, in it, by a copy, and after it."""
    collator, rows = hf_burst.BurstCollator(trainers.collate), trainers.samples("packed", 1)
    tokens = [collator(rows)["input_ids"].shape[1]]
    with joined(folder, 0, number):
        tokens += [use(rows)["input_ids"].shape[1] for use in (collator, copy.deepcopy(collator))]
        dist.barrier()  # a rank that leaves at once closes connections that others still make
    tokens.append(collator(rows)["input_ids"].shape[1])
    pipe.send(tokens)


def attend_to_the_end(rank: int) -> None:
    """Attends until a rank is missing."""
    dist.barrier()
    while True:
        attend_and_count(rank)


def lose_and_replace(number: int, folder: Path, pipe: Connection) -> None:
    """Process 2 is lost while the others attend. Process 3 takes its place in the next group."""
    torch.set_num_threads(1)
    if number < SIZE:
        with joined(folder, 0, number):
            attend_and_count(number)
            if number == 2:
                dist.barrier()  # the others have all that they need
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(RuntimeError):
                attend_to_the_end(number)
    rank = min(number, SIZE - 1)
    with joined(folder, 1, rank):
        pipe.send([(rank, attend_and_count(rank))])


def answers(target: Callable[..., None], folder: Path, numbers: Sequence[int], silent: Sequence[int] = ()) -> list:
    """What each process sends, all of them within the time limit; some are not expected to."""
    context = forked()
    pipes = {number: context.Pipe() for number in numbers}
    processes = [context.Process(target=target, args=(number, folder, pipes[number][1])) for number in numbers]
    for process in processes:
        process.start()
    for _, there in pipes.values():
        there.close()
    received = []
    try:
        for number, (here, _) in pipes.items():
            if number not in silent:
                assert here.poll(SECONDS), f"process {number} does not answer"
                received.append(here.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    return received


def assert_all_exact(by_rank: dict[int, list]) -> None:
    whole = put_together([by_rank[rank] for rank in range(SIZE)], SIZE, CASES)
    for case, results in zip(CASES, whole, strict=True):
        assert_exact(case, results)


def test_a_group_made_anew_in_reverse_order_begins_without_resources(tmp_path: Path) -> None:
    """The rank in the middle has the same number in both groups, so that only the process group tells them apart."""
    every = answers(live_twice, tmp_path, range(SIZE))
    for life in range(2):
        assert_all_exact(dict(lives[life] for lives in every))


def test_a_patched_model_follows_its_group(tmp_path: Path) -> None:
    for whole, *sharded in answers(train_twice, tmp_path, range(SIZE)):
        assert sharded == pytest.approx([whole] * 2, rel=1e-6)  # Transformers computes the loss in fp32


def test_a_group_of_the_same_name_with_another_neighbour_is_refused(tmp_path: Path) -> None:
    error, *_ = answers(change_the_neighbour, tmp_path, range(SIZE))
    assert "was rank 0 of (0, 1) and is rank 0 of (0, 2). Pass the mesh anew" in error


def test_a_group_of_before_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, middle, last = answers(attend_with_a_group_of_before, tmp_path, range(SIZE))
    assert "this process was rank 0 of (0, 1, 2) and is rank 2 of (0, 1, 2)" in first
    assert "this process was rank 2 of (0, 1, 2) and is rank 0 of (0, 1, 2)" in last
    assert "stopped before any communication" in middle


def test_a_collator_follows_its_group(tmp_path: Path) -> None:
    assert answers(collate_before_and_after, tmp_path, range(SIZE)) == [[29, 10, 10, 29]] * SIZE


def test_a_new_process_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    every = answers(lose_and_replace, tmp_path, range(SIZE + 1), silent=[2])
    assert_all_exact(dict(lives[0] for lives in every))


def test_one_process_owns_nothing() -> None:
    with resources_of(ContextGroup()).messages(torch.device("cpu"), "symmetric") as (near, far):
        assert near is far
    assert not resources_of(ContextGroup())._pools
