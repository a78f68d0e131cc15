"""States that come by a scan over many ranks, which are threads of one process: beside one segment after another."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from torch import Tensor

from hf_burst.attention import SequenceLayout
from hf_burst.plan import Segments
from hf_burst.ranks.group import ContextGroup
from hf_burst.recurrent import Received, doubling
from hf_burst.recurrent.gather import handing_on, take_part
from hf_burst.recurrent.states import by_matrix, by_number, incoming_states
from tests.ranks.test_layout import layouts

HEADS, KEYS, WIDTH = 2, 3, 2


class Simulated(ContextGroup):
    """A rank that is a thread."""

    @property
    def process_group(self) -> Any:
        return self


class Threads:
    """Ranks that exchange tensors in memory, and count what leaves each of them."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=60.0)
        self.boxes: dict[int, tuple[Tensor, ...]] = {}
        self.sent, self.calls = [0] * size, [0] * size

    def all_to_all_single(
        self, landing: Tensor, tensor: Tensor, came: list[int], sizes: list[int], group: Simulated
    ) -> None:
        self.boxes[group.rank] = tensor.split(sizes)
        self.sent[group.rank] += (sum(sizes) - sizes[group.rank]) * tensor.itemsize
        self.calls[group.rank] += 1
        self.barrier.wait()
        parts = [self.boxes[rank][group.rank] for rank in range(self.size)]
        assert [part.numel() for part in parts] == came
        landing.copy_(torch.cat(parts))
        self.barrier.wait()

    def run(self, function: Callable[[Simulated], Any]) -> list[Any]:
        """What every rank returns."""
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            try:
                results[rank] = function(Simulated(rank, self.size))
            except BaseException as problem:
                results[rank] = problem
                self.barrier.abort()

        ranks = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        with mock.patch.object(doubling.dist, "all_to_all_single", self.all_to_all_single):
            for thread in ranks:
                thread.start()
            for thread in ranks:
                thread.join()
        for problem in results:
            if isinstance(problem, BaseException) and not isinstance(problem, threading.BrokenBarrierError):
                raise problem
        return results


@dataclass(frozen=True)
class Case:
    """Ranks, a batch, and how it is cut."""

    ranks: int
    documents: tuple[tuple[int, ...], ...]
    chunking: Any = "zigzag"

    @property
    def segments(self) -> Segments:
        return SequenceLayout.for_batch(self.documents, self.ranks, self.chunking).segments


CASES = {
    "8 ranks": Case(8, ((0, 32),)),
    "13 ranks": Case(13, ((0, 39),), "contiguous"),
    "33 ranks": Case(33, ((0, 66),), "contiguous"),
    "64 ranks": Case(64, ((0, 256),)),
    "documents": Case(16, ((0, 3, 50, 51, 93, 96, 160),)),
    "balanced": Case(12, ((0, 70, 71, 72, 90, 143, 240),), "balanced"),
    "whole documents": Case(8, ((0, 5, 9, 17, 30, 31, 56, 120, 160),), "documents"),
    "rows": Case(9, ((0, 72), (0, 11, 72), (0, 8, 16, 24, 60, 61, 72))),
    "ranks without a slot": Case(8, ((0, 10, 20, 30, 60, 70, 80),), "contiguous"),
    "back to one rank": Case(8, ((0, 96),), (0, 1, 0, 2, 3, 2, 4, 5, 4, 6, 7, 6, 1, 3, 5, 7)),
}


def make(segments: Segments, matrices: bool) -> dict[tuple[int, int], dict[str, Tensor]]:
    """For every segment of each rank: what it adds to a state, what it does to one, and the gradient of what comes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    shapes = {"adds": (HEADS, KEYS, WIDTH), "gradient": (HEADS, KEYS, WIDTH)}
    shapes["does"] = (HEADS, KEYS, KEYS) if matrices else (HEADS,)
    return {
        (rank, index): {name: normal(*shape) / 2 for name, shape in shapes.items()}
        for rank, own in enumerate(segments.by_rank)
        for index in range(len(own))
    }


def one_by_one(segments: Segments, matrices: bool) -> tuple[dict[Any, Tensor], dict[Any, Any]]:
    """The states that come to segments, and the gradients of what those before add and do."""
    every, came = make(segments, matrices), dict[Any, Tensor]()
    for tensors in every.values():
        tensors["adds"].requires_grad_()
        tensors["does"].requires_grad_()
    for chain in segments.chains:
        state = every[chain[0]]["adds"]
        for place, follower in pairwise(chain):
            if place != chain[0]:
                does = every[place]["does"]
                state = (does @ state if matrices else does[:, None, None] * state) + every[place]["adds"]
            came[follower] = state
    sum((state * every[place]["gradient"]).sum() for place, state in came.items()).backward()
    gradients = {place: (tensors["adds"].grad, tensors["does"].grad) for place, tensors in every.items()}
    return {place: state.detach() for place, state in came.items()}, gradients


def scanned(segments: Segments, matrices: bool, ranks: Threads) -> tuple[dict[Any, Tensor], dict[Any, Any]]:
    """The same by a scan, twice: as a checkpoint runs it again, without any message forward."""
    every, advance = make(segments, matrices), by_matrix if matrices else by_number

    def work(group: Simulated) -> tuple[dict[Any, Tensor], dict[Any, Any]]:
        own = {index: every[group.rank, index] for index in handing_on(segments, group)}
        received, results = Received(scans=True), []
        for _ in range(2):
            received.start()
            handed = {index: (pair["adds"].clone(), pair["does"].clone()) for index, pair in own.items()}
            leaves = [tensor.requires_grad_() for pair in handed.values() for tensor in pair]
            incoming, came = incoming_states(handed, advance, segments, group, received)
            total = sum((state * every[group.rank, index]["gradient"]).sum() for index, state in incoming.items())
            take_part(torch.zeros(()) + total, came).backward()
            states = {(group.rank, index): state.detach() for index, state in incoming.items()}
            gradients = {
                (group.rank, index): tuple(tensor.grad for tensor in pair)
                for index, pair in handed.items()
                if (group.rank, index) in segments.slots
            }
            assert all(leaf.grad is not None for leaf in leaves)
            results.append((states, gradients))
        (first, gradients), (again, once_more) = results
        torch.testing.assert_close((again, once_more), (first, gradients), rtol=0, atol=0)
        return first, gradients

    states, gradients = dict[Any, Tensor](), dict[Any, Any]()
    for own_states, own_gradients in ranks.run(work):
        states |= own_states
        gradients |= own_gradients
    return states, gradients


def greatest_error(segments: Segments, matrices: bool, ranks: Threads) -> float:
    """Of states and gradients, beside one segment after another."""
    (states, gradients), (came, wanted) = scanned(segments, matrices, ranks), one_by_one(segments, matrices)
    assert set(states) == set(came)
    assert set(gradients) == set(segments.slots)
    pairs = [(states[place], came[place]) for place in came]
    for place, own in gradients.items():
        for gradient, right in zip(own, wanted[place], strict=True):
            pairs.append((gradient, torch.zeros_like(gradient) if right is None else right))
    return max(float((found - right).abs().max() / (1 + right.abs().max())) for found, right in pairs)


@pytest.mark.parametrize("matrices", [True, False], ids=["matrices", "numbers"])
@pytest.mark.parametrize("name", CASES)
def test_states_and_gradients_are_those_of_one_by_one(name: str, matrices: bool) -> None:
    """Every rank sends what is planned, as often as the longest chain says: forward, and backward twice."""
    segments, ranks = CASES[name].segments, Threads(CASES[name].ranks)
    assert greatest_error(segments, matrices, ranks) < 1e-12
    longest = max(map(len, segments.chains))
    steps = next(step for step in range(64) if 2**step >= longest)
    assert set(ranks.calls) == {3 * steps}
    state, transition = HEADS * KEYS * WIDTH * 8, HEADS * (KEYS * KEYS if matrices else 1) * 8
    for rank, sent in enumerate(ranks.sent):
        planned = [
            state + (transition if hop.tensors == 2 else 0)
            for direction in ("forward", "backward", "backward")
            for step in segments.hops[direction]
            for hop in step
            if hop.source[0] == rank != hop.target[0]
        ]
        assert sent == sum(planned)


@given(layout=layouts())
def test_segments_come_to_know_all_before(layout: SequenceLayout) -> None:
    segments = layout.segments
    for direction, hops in segments.hops.items():
        chains = [chain if direction == "forward" else chain[::-1] for chain in segments.chains]
        known = {place: (place,) for chain in chains for place in chain}
        for step in hops:
            told = [(hop.target, known[hop.source], hop.tensors) for hop in step]
            for target, run, tensors in told:
                (chain,) = (chain for chain in chains if target in chain)
                assert (tensors == 1) == (run[0] == chain[0])
                known[target] = (*run, *known[target])
        for chain in chains:
            assert [known[place] for place in chain] == [chain[: end + 1] for end in range(len(chain))]


def without_a_step(number: int) -> Any:
    def steps(segments: Segments, rank: int, direction: Any) -> Any:
        every = steps_of(segments, rank, direction)
        return tuple(step for place, step in enumerate(every) if place != number % len(every))

    return steps


def swapped(scan: doubling.Scan, after: Any, first: Any) -> Any:
    """Two runs, the transitions of which are applied in the wrong sequence."""
    state, transition = after
    return scan.advance(transition, first[0]) + state, *(scan.advance(past, transition) for past in first[1:])


def over_documents(segments: Segments, rank: int, direction: Any) -> Any:
    """Forward, the steps of segments that know of rows only."""
    if direction == "backward":
        return steps_of(segments, rank, direction)
    pieces = sorted(
        (piece.row, piece.start, rank, index)
        for rank, own in enumerate(segments.by_rank)
        for index, piece in enumerate(own)
    )
    rows = {row: tuple((rank, index) for at, _, rank, index in pieces if at == row) for row, *_ in pieces}
    leaking = Segments(segments.sharding, segments.documents)
    vars(leaking)["chains"] = tuple(rows.values())
    return steps_of(leaking, rank, direction)


steps_of = doubling._steps_of
BROKEN: dict[str, tuple[Any, str, Any]] = {
    "a step dropped": (doubling, "_steps_of", without_a_step(2)),
    "the last step dropped": (doubling, "_steps_of", without_a_step(-1)),
    "A in place of A^T": (doubling, "_transposed", lambda transition: transition),
    "the wrong sequence": (doubling.Scan, "composed", swapped),
    "a gradient of A without the state": (doubling, "_outer", lambda gradients, states, transitions: 0 * transitions),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_on_purpose_is_found(name: str) -> None:
    with mock.patch.object(*BROKEN[name]):
        assert greatest_error(CASES["documents"].segments, True, Threads(16)) > 1e-6


def test_a_state_that_passes_the_end_of_a_document_is_found() -> None:
    segments = Case(8, ((0, 40, 80),), "contiguous").segments
    with mock.patch.object(doubling, "_steps_of", over_documents):
        assert greatest_error(segments, True, Threads(8)) > 1e-6
