"""Attention through memory that ranks read of each other: segments that take turns, and what is written in place."""

from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from hf_burst.attention import AttentionCache, AttentionRequest, MaskPattern, SequenceLayout
from hf_burst.config import Schedule
from hf_burst.errors import ConfigError, RankMismatchError
from hf_burst.kernels import Scores
from hf_burst.ring import symmetric
from hf_burst.ring.resources import resources_of
from tests.ring.test_ring import PRODUCTS, SCHEDULES, Case, assert_exact, attend, context_group, fitting, put_together
from tests.support.ranks import RankPool
from tests.support.shared_memory import Access, InPlace, Stream, on, races, shared_memory

PACKED = ((0, 1, 2, 3, 16, 29, 30, 41), (0, 41), (0, 11, 24, 41))


@dataclass(frozen=True)
class Shared(Case):
    """A case whose blocks travel through shared memory."""

    transport: str = "symmetric"


def attend_again_and_again(rank: int, size: int, folder: Path, cases: list[Case]) -> tuple[list, dict]:
    """The results of every case, the sizes of which come and go, all in one memory; and how many results of kernels
    were written where they are published, by schedule and direction."""
    results, written = [], {(case.schedule, direction): 0 for case in cases for direction in ("forward", "backward")}
    with shared_memory(folder, context_group(size)) as kernels:
        for case in [*cases, *cases]:
            results.append(attend(rank, size, case))
            for kernel in kernels:
                for direction, count in kernel.written.items():
                    written[case.schedule, direction] += count
                    kernel.written[direction] = 0
    return results, written


@pytest.mark.parametrize(
    ("size", "slices"),
    [
        (2, 1),
        (3, 3),
        pytest.param(4, 1, marks=pytest.mark.full),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 3), (3, 1), (4, 3))),
    ],
)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["some", "every"])
def test_attention_through_shared_memory_is_exact(ranks, size, slices, every, tmp_path):
    """Every kind by every schedule, with one slice of the heads or with three."""
    kinds = [
        Shared(PACKED, kernel="reference"),
        Shared(((0, 67),), kernel="reference", seed=1),
        Shared(((0, 23),), kernel="reference", heads=(6, 3), dtype=torch.float32, seed=2),
        Shared(((0, 48),), window=5, chunking="contiguous", seed=3),
        Shared(((0, 48),), causal=False, dims=(6, 3), kernel="reference", sinks=True, seed=4),
    ]
    names = [*SCHEDULES, *PRODUCTS[size]]
    many = [
        replace(case, schedule=name)
        for one, name in enumerate(names)
        for other, case in enumerate(kinds)
        if every or (one + other + size + slices // 2) % 2
    ]
    many = fitting(size, many)
    if slices > 1:
        many = [replace(case, heads=(case.heads[0] * slices, case.heads[1] * slices)) for case in many]
    answers = ranks(size).run(attend_again_and_again, tmp_path, many)
    every = [results for results, _ in answers]
    for _, written in answers:
        for (name, direction), count in written.items():
            route = Schedule.parse(name, size)
            assert bool(count) == (route.ulysses == size or direction == "backward"), (name, direction)
    for case, found in zip([*many, *many], put_together(every, size, [*many, *many]), strict=True):
        assert_exact(case, found, 1e-10 if case.dtype == torch.float64 else 2e-5)


def accesses_of(rank: int, size: int, folder: Path, cases: list[Case]) -> list[Access]:
    found: list[Access] = []
    with shared_memory(folder, context_group(size), found):
        for case in cases * 3:
            attend(rank, size, case)
    return found


@pytest.mark.parametrize("schedule", ["kv_ring", "burst"])
def test_no_bytes_are_written_too_early_where_ranks_leave_rounds_out(ranks, schedule, tmp_path):
    case = Shared(((0, 40),), window=3, kernel="reference", schedule=schedule)
    found = [access for own in ranks(5).run(accesses_of, tmp_path, [case]) for access in own]
    assert sum(access.kind == "read" for access in found) > 10
    assert not races(found)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_bytes_are_written_while_a_rank_may_still_read_them(ranks, size, schedule, tmp_path):
    """Of several passes in a row, with one slice of the heads and with four, by what their streams wait for."""
    many = [
        Shared(((0, 24),), kernel="reference", schedule=schedule, heads=(2 * size * slices, size * slices))
        for slices in (1, 4)
    ]
    found = [access for own in ranks(size).run(accesses_of, tmp_path, many) for access in own]
    for kind in ("read", "write"):
        assert sum(access.kind == kind for access in found) > 10, kind
    assert not races(found)


def accesses_on_two_streams(rank: int, size: int, folder: Path, cases: list[Case]) -> list[Access]:
    """Of passes on two streams in turn, neither of which waits for the other one."""
    found: list[Access] = []
    with shared_memory(folder, context_group(size), found):
        streams = [Stream(), Stream()]
        for stream in (*streams, streams[1], *streams):
            for case in cases:
                with on(stream):
                    attend(rank, size, case)
    return found


@pytest.mark.parametrize("slices", [*(pytest.param(s, marks=pytest.mark.full) for s in ((1,), (4,))), (1, 4)])
def test_no_bytes_are_written_too_early_where_passes_change_their_stream(ranks, slices, tmp_path):
    many = [
        Shared(((0, 24),), kernel="reference", schedule="ulysses", heads=(4 * count, 2 * count)) for count in slices
    ]
    found = [access for own in ranks(2).run(accesses_on_two_streams, tmp_path, many) for access in own]
    assert sum(access.kind == "read" for access in found) > 10
    assert not races(found)


def run_a_region_again(rank: int, size: int, folder: Path, seen: bool) -> None:
    """What was exchanged for a region that runs again is under way until the next pass, which waits for it: the
    backward pass of that region, or another one, where nobody asks for gradients."""
    group, generator = context_group(size), torch.Generator().manual_seed(rank)
    layout = SequenceLayout.for_batch([(0, 24)], size)
    numbers = [torch.randn(1, 24 // size, heads, 8, dtype=torch.float64, generator=generator) for heads in (8, 4, 4, 8)]
    leaves, dout = [one.requires_grad_() for one in numbers[:3]], numbers[3]
    request = AttentionRequest(group, MaskPattern(), Scores(8**-0.5), "reference", "ulysses", "symmetric")
    rest = (None, layout.encode(), request)
    clocks: list[dict] = []
    backward = InPlace.backward

    def noted(kernel: InPlace, *arguments: object) -> list[torch.Tensor]:
        clocks.append(dict(Stream.current.clock))
        return backward(kernel, *arguments)

    with shared_memory(folder, group), mock.patch.object(InPlace, "backward", noted):
        pool = resources_of(group).pool(torch.device("cpu"))
        cache = AttentionCache(1.0)
        out = cache.attention(*leaves, *rest)
        wanted = torch.autograd.grad(out, leaves, dout)
        cache.position = 0
        again = cache.attention(*leaves, *rest)
        events = [pending.done for pending, _ in pool.pending]
        assert len(events) == 2  # slices
        copies = pool.stream.key
        assert all(Stream.current.clock.get(copies, 0) < event.clock[copies] for event in events)
        clocks.clear()
        if seen:
            with resources_of(group).messages(torch.device("cpu"), "symmetric"):  # the next pass begins
                pass
            assert all(Stream.current.clock.get(copies, 0) >= event.clock[copies] for event in events)
            found = torch.autograd.grad(again, leaves, dout)
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other)
        else:
            del again
            with on(Stream()):
                AttentionCache(1.0).attention(*leaves, *rest)
                clocks.append(Stream.current.clock)
            clocks.append(Stream.current.clock)
        assert not pool.pending
        assert len(clocks) == 2  # of two slices, or of both streams
        for clock in clocks:
            assert all(clock.get(copies, 0) >= event.clock[copies] for event in events)


@pytest.mark.parametrize("seen", [True, False])
def test_what_is_left_under_way_is_waited_for(ranks, seen, tmp_path):
    ranks(2).run(run_a_region_again, tmp_path, seen)


def grow_where_one_has_no_memory(rank: int, size: int, folder: Path) -> None:
    """A larger exchange finds no memory on the last rank, whose peers would wait for it for ever."""
    group, device = context_group(size), torch.device("cpu")
    with shared_memory(folder, group):
        pool = resources_of(group).pool(device)
        pool.buffer("blocks", 1)
        full = mock.Mock(side_effect=RuntimeError("CUDA driver error: out of memory"))
        with mock.patch.object(symmetric.symmetric_memory, "empty", full if rank == size - 1 else mock.DEFAULT):
            if rank < size - 1:
                symmetric.symmetric_memory.empty.side_effect = lambda count, **settings: torch.empty(count, **settings)
            error = torch.OutOfMemoryError if rank == size - 1 else RankMismatchError
            with (
                pytest.raises(error, match="of memory that peers read could not be had: CUDA driver error"),
                resources_of(group).messages(device, "symmetric"),
            ):
                pool.buffer("blocks", 1 << 24)
        with pytest.raises(ConfigError, match="ended in the middle"), resources_of(group).messages(device, "symmetric"):
            pass


def try_where_one_may_not(rank: int, size: int, folder: Path) -> str | None:
    """Containers may forbid one rank what its peers can do; all of them hear of it, and may send instead."""
    group = context_group(size)
    with shared_memory(folder, group):
        pool = resources_of(group).pool(torch.device("cpu"))
        forbidden = mock.Mock(side_effect=RuntimeError("operation not permitted\nframe 0"))
        with mock.patch.object(symmetric.symmetric_memory, "empty", forbidden if rank else torch.empty):
            found = symmetric._trial(pool, [])
        group.agree({"goes on": True}, None, torch.device("cpu"))
        return found


def test_ranks_that_see_one_gpu_as_their_first_are_told(monkeypatch):
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    monkeypatch.setattr(symmetric, "find_spec", mock.Mock())
    monkeypatch.setattr(symmetric, "_trial", mock.Mock(side_effect=AssertionError("tried")))
    group = mock.Mock(size=2, gather=lambda mine, *_: [mine] * 2)
    assert "let all see all GPUs of the host" in symmetric.open_pool(group, torch.device("cuda", 0))


def test_what_one_rank_may_not_do_is_heard_of_by_all(ranks, tmp_path):
    for found in ranks(2).run(try_where_one_may_not, tmp_path):
        assert "operation not permitted" in found
        assert "frame" not in found


@pytest.mark.parametrize("size", [2, 3])
def test_memory_that_one_rank_cannot_have_is_an_error_on_all(size, tmp_path):
    pool = RankPool(size)  # of its own, because these ranks exchange nothing afterwards
    try:
        pool.run(grow_where_one_has_no_memory, tmp_path)
    finally:
        pool.close()


def test_what_is_remembered_does_not_grow_for_ever():
    memory: dict = {}
    for number in range(1000):
        made = symmetric.remembered(memory, number, lambda number=number: str(number))
        assert made is symmetric.remembered(memory, number, lambda: "again")
    assert len(memory) <= 256
