"""Blocks of tokens that see each other, such as images: exact over ranks, wherever shards cut them."""

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from hf_burst.attention import AttentionRequest, ContextGroup, SequenceLayout, burst_attention, later
from hf_burst.errors import BatchError
from hf_burst.plan import MaskPattern, make_plan
from hf_burst.plan.blocks import later_keys
from hf_burst.plan.sharding import make_sharding
from tests.support.oracle import admitted_pairs, relative_error, softmax_attention
from tests.support.ranks import RankPool
from tests.support.verify import verify_plan

Ranks = Callable[[int], RankPool]
Blocks = tuple[tuple[tuple[int, int], ...], ...]
LENGTH, HEADS, KEY_HEADS, DIM = 48, 4, 2, 8
CASES: dict[str, tuple[Blocks, list[tuple[int, ...]]]] = {
    "several": ((((3, 8), (8, 9), (20, 37)), ((0, 5),)), [(0, 48), (0, 48)]),
    "all": ((((0, 48),),), [(0, 48)]),
    "prefix": ((((0, 29),), ((0, 1),)), [(0, 48), (0, 48)]),
    "at the ends": ((((0, 2), (46, 48)),), [(0, 48)]),
    "packed": ((((4, 9), (11, 31)),), [(0, 7, 29, 48)]),
    "none of one row": (((), ((23, 26),)), [(0, 48), (0, 48)]),
    "odd": ((((5, 24),),), [(0, 47)]),
}


def wanted(blocks: Blocks, documents: list[tuple[int, ...]], window: int | None, sinks: bool) -> list[torch.Tensor]:
    """Output, log-sum-exp and gradients in one process, every pair written out."""
    tensors = inputs(documents)
    length = documents[0][-1]
    admitted = []
    for spans, bounds in zip(blocks, documents, strict=True):
        pairs = admitted_pairs(length, True, window, bounds)
        whole = admitted_pairs(length, False, None, bounds)
        for start, stop in spans:
            for query in range(start, stop):
                for key in range(query + 1, stop):
                    pairs[query][key] = whole[query][key]
        admitted.append(torch.tensor(pairs))
    q, k, v, dout, scores = tensors
    out, lse = softmax_attention(q, k, v, torch.stack(admitted), DIM**-0.5, sinks=scores if sinks else None)
    gradients = torch.autograd.grad((out * dout).sum(), (q, k, v, *([scores] if sinks else [])))
    return [out.detach(), lse.detach(), *gradients]


def inputs(documents: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Queries, keys, values, a gradient of the output, and sinks, in fp64."""
    generator = torch.Generator().manual_seed(1)
    rows, length = len(documents), documents[0][-1]
    shapes = [(rows, length, heads, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.requires_grad_() for tensor in (*tensors, torch.randn(HEADS, generator=generator).double())]


def attend(rank: int, size: int, case: str, request: dict[str, Any], window: int | None, sinks: bool) -> list:
    blocks, documents = CASES[case]
    group = ContextGroup.from_mesh(None)
    chunking = request.get("chunking", "balanced")
    plain = SequenceLayout.for_batch(documents, size, chunking)
    layout = SequenceLayout(plain.length, plain.owners, plain.documents, plain.padding, blocks=blocks)
    assert SequenceLayout.decode(layout.encode().numpy().tobytes()) == layout
    q, k, v, dout, scores = inputs(documents)
    own = [layout.shard(tensor, rank).detach().requires_grad_() for tensor in (q, k, v)]
    scores = scores.detach().requires_grad_()
    asked = AttentionRequest(group, MaskPattern(window=window), schedule=request.get("schedule", "auto"))
    out, lse = burst_attention(*own, layout, asked, sinks=scores if sinks else None)
    (out * layout.shard(dout, rank)).sum().backward()
    gradients = [tensor.grad for tensor in (*own, *([scores] if sinks else []))]
    return [out.detach(), lse.detach(), *gradients, layout]


def assert_exact(found: list[list], want: list[torch.Tensor], sinks: bool = False) -> None:
    layout = found[0][-1]
    for index, tensor in enumerate(want):
        parts = [own[index] for own in found]
        got = sum(parts) if sinks and index == len(want) - 1 else layout.unshard(parts)
        assert relative_error(got, tensor) < 1e-12, index


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_exact(ranks: Ranks, case: str, window: int | None) -> None:
    want = wanted(*CASES[case], window, sinks=False)
    for size in (1, 2, 3):
        assert_exact(ranks(size).run(attend, case, {}, window, False), want)


@pytest.mark.parametrize(
    "request_",
    [
        {"schedule": "burst"},
        {"schedule": "ulysses"},
        {"chunking": "contiguous"},
        {"chunking": (0, 1, 1, 0, 0, 1)},
    ],
    ids=str,
)
def test_blocks_are_exact_by_every_schedule(ranks: Ranks, request_: dict[str, Any]) -> None:
    want = wanted(*CASES["several"], None, sinks=True)
    assert_exact(ranks(2).run(attend, "several", request_, None, True), want, sinks=True)


def test_four_ranks(ranks: Ranks) -> None:
    for schedule in ("auto", "ulysses_2+kv_ring"):
        want = wanted(*CASES["packed"], 6, sinks=False)
        assert_exact(ranks(4).run(attend, "packed", {"schedule": schedule}, 6, False), want)


def test_plans_are_proved() -> None:
    choose = random.Random(0)
    for _ in range(60):
        ranks, length, rows = choose.randint(1, 4), choose.randint(16, 70), choose.randint(1, 3)
        sharding = make_sharding(length, ranks, choose.choice(["zigzag", "contiguous"]))
        blocks, documents = [], []
        for _ in range(rows):
            edges = sorted(choose.sample(range(length + 1), 6))
            blocks.append(tuple(zip(edges[::2], edges[1::2], strict=True)))
            documents.append((0, *sorted(choose.sample(range(1, length), choose.randint(0, 3))), length))
        later = later_keys(tuple(blocks), tuple(documents), sharding)
        pairs = verify_plan(make_plan((later.mask,), later.queries, later.keys), "kv")
        inside = 0
        for spans, bounds in zip(blocks, documents, strict=True):
            whole = admitted_pairs(length, False, None, bounds)
            inside += sum(whole[i][j] for start, stop in spans for i in range(start, stop) for j in range(i + 1, stop))
        assert pairs == inside + ranks  # and the tokens that stand for nothing


def attend_without_the_next_rank(rank: int, size: int, *arguments: Any) -> list:
    """As if no keys of a block came from another rank."""
    with mock.patch.object(later, "_places", own_places):
        return attend(rank, size, *arguments)


def own_places(spans: Any, device: torch.device) -> Any:
    rows, places = PLACES(spans, device)
    return rows, places.roll(1)


PLACES = later._places


def test_other_keys_are_noticed(ranks: Ranks) -> None:
    want = wanted(*CASES["several"], None, sinks=False)
    with pytest.raises(AssertionError):
        assert_exact(ranks(2).run(attend_without_the_next_rank, "several", {}, None, False), want)


def attend_wrongly(rank: int, size: int, blocks: Blocks, causal: bool) -> str:
    layout = SequenceLayout(8, (0,), ((0, 8),), blocks=blocks)
    q, k, v = (torch.randn(1, 8, 2, 8) for _ in range(3))
    try:
        burst_attention(q, k, v, layout, AttentionRequest(ContextGroup.from_mesh(None), MaskPattern(causal)))
    except BatchError as problem:
        return str(problem)
    return ""


def test_wrong_blocks_are_refused(ranks: Ranks) -> None:
    for blocks in (((5, 3),),), (((0, 9),),), (((0, 2),), ((0, 2),)), (((4, 6), (5, 7)),):
        assert "pairs (start, stop)" in ranks(1).run(attend_wrongly, blocks, True)[0]
    assert "for causal attention" in ranks(1).run(attend_wrongly, (((0, 2),),), False)[0]
