"""Documents that continue others, as answers continue a question: exact over ranks, as if each text stood alone."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from hf_burst.attention import AttentionRequest, ContextGroup, SequenceLayout, burst_attention
from hf_burst.errors import BatchError
from hf_burst.plan import Mask, MaskPattern, Plan, make_plan, mask
from hf_burst.plan.balance import assign, imbalance
from hf_burst.plan.cuts import by_documents
from hf_burst.plan.sharding import cut
from hf_burst.plan.work import meetings, pairs_of_chunks
from tests.support.oracle import relative_error, softmax_attention
from tests.support.ranks import RankPool
from tests.support.verify import intervals, pairs_of, verify_plan

Ranks = Callable[[int], RankPool]
Rows = list[tuple[int, ...]]
HEADS, KEY_HEADS, DIM = 4, 2, 8
CASES: dict[str, tuple[Rows, Rows]] = {  # boundaries of documents, and which of them each continues
    "three endings": ([(0, 23, 31, 36, 47)], [(-1, 0, 0, 0)]),
    "endings of one token": ([(0, 17, 18, 19, 20, 21, 29)], [(-1, 0, 0, 0, 0, 0)]),
    "a beginning of one token": ([(0, 1, 12, 13, 31)], [(-1, 0, 0, 0)]),
    "one ending": ([(0, 13, 37)], [(-1, 0)]),
    "two beginnings, packed": ([(0, 9, 13, 17, 22, 33, 36, 41)], [(-1, 0, 0, -1, -1, 4, 4)]),
    "rows of their own": ([(0, 11, 20, 31), (0, 31), (0, 16, 17, 31)], [(-1, 0, 0), (-1,), (-1, 0, 0)]),
    "a tree": ([(0, 10, 16, 20, 25, 30, 43)], [(-1, 0, 1, 1, 0, 4)]),
    "sixteen endings": ([(0, 15, *range(18, 64, 3), 64)], [(-1, *[0] * 17)]),
}


def admitted_pairs(bounds: tuple[int, ...], parents: tuple[int, ...], pattern: MaskPattern) -> list[list[bool]]:
    """Whether query i sees key j: each text is written out by itself, and its tokens are looked up in the row."""
    length = bounds[-1]
    sees = [[False] * length for _ in range(length)]
    for document in range(len(parents)):
        text, at = list[int](), document
        while at >= 0:
            text = [*range(bounds[at], bounds[at + 1]), *text]
            at = parents[at]
        chunk, window = pattern.attention_chunk_size or length, length if pattern.window is None else pattern.window
        for place, query in enumerate(text):
            for other, key in enumerate(text[: place + 1]):
                sees[query][key] |= place - other <= window and place // chunk == other // chunk
    return sees


def inputs(rows: int, length: int) -> list[torch.Tensor]:
    """Queries, keys, values, a gradient of the output, and sinks, in fp64."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, length, heads, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.requires_grad_() for tensor in (*tensors, torch.randn(HEADS, generator=generator).double())]


def wanted(case: str, pattern: MaskPattern) -> list[torch.Tensor]:
    """Output, log-sum-exp and gradients in one process, every pair written out."""
    documents, parents = CASES[case]
    pairs = [admitted_pairs(*row, pattern) for row in zip(documents, parents, strict=True)]
    q, k, v, dout, sinks = inputs(len(documents), documents[0][-1])
    out, lse = softmax_attention(q, k, v, torch.tensor(pairs), DIM**-0.5, sinks=sinks)
    gradients = torch.autograd.grad((out * dout).sum(), (q, k, v, sinks))
    return [out.detach(), lse.detach(), *gradients]


def attend(rank: int, size: int, case: str, pattern: MaskPattern, settings: dict[str, Any]) -> list[Any]:
    documents, parents = CASES[case]
    chunking = settings.get("chunking", "balanced")
    layout = SequenceLayout.for_batch(documents, size, chunking, patterns={pattern: 1}, parents=parents)
    assert SequenceLayout.decode(layout.encode().numpy().tobytes()) == layout
    q, k, v, dout, sinks = inputs(len(documents), documents[0][-1])
    own = [layout.shard(tensor, rank).detach().requires_grad_() for tensor in (q, k, v)]
    sinks = sinks.detach().requires_grad_()
    request = AttentionRequest(ContextGroup.from_mesh(None), pattern, schedule=settings.get("schedule", "auto"))
    out, lse = burst_attention(*own, layout, request, sinks=sinks)
    (out * layout.shard(dout, rank)).sum().backward()
    return [out.detach(), lse.detach(), *(tensor.grad for tensor in (*own, sinks)), layout]


def errors(found: list[list[Any]], want: list[torch.Tensor]) -> list[float]:
    *rows, sinks = [[own[index] for own in found] for index in range(len(want))]
    layout = found[0][-1]
    got = [*(layout.unshard(parts) for parts in rows), sum(sinks)]
    return [relative_error(*pair) for pair in zip(got, want, strict=True)]


PATTERNS = [MaskPattern(), MaskPattern(window=0), MaskPattern(window=5), MaskPattern(attention_chunk_size=7)]


@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        pytest.param(case, pattern, id=f"{case}-{name}", marks=[pytest.mark.full] * ((number + place) % 2))
        for number, case in enumerate(CASES)
        for place, (name, pattern) in enumerate(zip(("causal", "itself", "window", "chunks"), PATTERNS, strict=True))
    ],
)
def test_endings_are_exact(ranks: Ranks, case: str, pattern: MaskPattern) -> None:
    want = wanted(case, pattern)
    for size in (1, 2, 3):
        assert max(errors(ranks(size).run(attend, case, pattern, {}), want)) < 1e-12


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "burst"},
        {"schedule": "ulysses"},
        {"chunking": "contiguous"},
        {"chunking": "documents"},
        {"chunking": (0, 1, 1, 0, 0, 1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("pattern", [PATTERNS[0], PATTERNS[2]], ids=["causal", "window"])
def test_endings_are_exact_by_every_schedule(ranks: Ranks, settings: dict[str, Any], pattern: MaskPattern) -> None:
    for case in ("two beginnings, packed", "a tree"):
        assert max(errors(ranks(2).run(attend, case, pattern, settings), wanted(case, pattern))) < 1e-12


@pytest.mark.parametrize("schedule", ["auto", "burst", "ulysses_2+kv_ring"])
def test_four_ranks(ranks: Ranks, schedule: str) -> None:
    found = ranks(4).run(attend, "sixteen endings", PATTERNS[2], {"schedule": schedule})
    assert max(errors(found, wanted("sixteen endings", PATTERNS[2]))) < 1e-12


def attend_by_distance_in_the_row(rank: int, size: int, *arguments: Any) -> list[Any]:
    """As if a window counted the tokens of other endings."""
    by_row = lambda queries, keys, band: reach(queries, keys, mask.Band(None, 4))  # noqa: E731
    reach = mask.Reach
    with mock.patch.object(mask, "Reach", by_row):
        return attend(rank, size, *arguments)


def test_distances_of_the_row_instead_of_the_text_are_noticed(ranks: Ranks) -> None:
    case = "three endings", MaskPattern(window=4)  # of which no plan is known yet
    found = ranks(1).run(attend_by_distance_in_the_row, *case, {})
    assert max(errors(found, wanted(*case))) > 1e-3


def draw(choose: random.Random) -> tuple[Mask, int]:
    """A mask of a random tree, and ranks."""
    ranks, length = choose.randint(1, 4), choose.randint(16, 60)
    bounds = (0, *sorted(choose.sample(range(1, length), choose.randint(0, 8))), length)
    parents = tuple(choose.randint(-1, at - 1) for at in range(len(bounds) - 1))
    pattern = choose.choice([*PATTERNS, MaskPattern(window=11)])
    made = pattern.mask(length, bounds, parents)
    pairs = admitted_pairs(bounds, parents, pattern)
    for query, row in enumerate(pairs):
        seen = [key for start, stop in intervals(made, query) for key in range(start, stop)]
        assert seen == [key for key, sees in enumerate(row) if sees]
    assert made.pairs == sum(map(sum, pairs))
    return made, ranks


def test_plans_are_proved() -> None:
    choose = random.Random(0)
    for _ in range(200):
        made, ranks = draw(choose)
        owners = [*range(ranks), *(choose.randrange(ranks) for _ in range(choose.randint(0, 8)))]
        choose.shuffle(owners)
        hosts = choose.choice([count for count in range(1, ranks + 1) if ranks % count == 0])
        plan = make_plan((made,), cut(made.length, tuple(owners)), hosts=hosts)
        assert verify_plan(plan, "kv") == verify_plan(plan, "q") == made.pairs == pairs_of(plan)


def test_work_is_counted_by_chunk() -> None:
    choose = random.Random(1)
    for _ in range(100):
        made, _ = draw(choose)
        bounds = (0, *sorted(choose.sample(range(1, made.length), choose.randint(0, 6))), made.length)
        chunk = [at for at, stop in enumerate(bounds[1:]) for _ in range(bounds[at], stop)]
        work, met = [0] * (len(bounds) - 1), dict[tuple[int, int], int]()
        for query in range(made.length):
            for key in (key for start, stop in intervals(made, query) for key in range(start, stop)):
                work[chunk[query]] += 1
                if chunk[query] != chunk[key]:
                    met[chunk[query], chunk[key]] = met.get((chunk[query], chunk[key]), 0) + 1
        assert pairs_of_chunks((made,), bounds) == work
        assert meetings((made,), bounds) == met


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("endings", [(8, 1024), (2, 1024), (64, 1024), (16, 4096)])
def test_work_is_even(ranks: int, endings: tuple[int, int]) -> None:
    """An ending costs as much a token as the end of its beginning, wherever it lies in the row."""
    count, size = endings
    bounds = (0, *range(2**16, 2**16 + (count + 1) * size, size))
    made = MaskPattern().mask(bounds[-1], bounds, (-1, *[0] * count))
    assert imbalance((made,), assign((made,), ranks)) < 0.021


def test_few_tiles_compute_endings() -> None:
    """All endings see what a rank holds of their beginning in one call of a kernel."""
    bounds = (0, *range(2**16, 2**16 + 9 * 1024, 1024))
    made = MaskPattern().mask(bounds[-1], bounds, (-1, *[0] * 8))
    plan = make_plan((made,), cut(made.length, assign((made,), 2)))
    assert [len(make_plan((made,), cut(made.length, (0,))).steps(0, "kv")[0].tiles)] == [2]
    assert max(len(step.tiles) for rank in range(2) for step in plan.steps(rank, "kv")) <= 12


def test_parents_that_fit_no_documents_are_refused() -> None:
    for parents in ((-1,), (-1, 1), (0, -1), (-1, -2)):
        with pytest.raises(BatchError, match="do not fit 2 documents"):
            Mask(8, documents=(0, 4, 8), parents=parents)
    with pytest.raises(BatchError, match="not causal"):
        Mask(8, False, documents=(0, 4, 8), parents=(-1, 0))
    layout = replace(SequenceLayout.for_batch([(0, 4, 8)], 1), parents=((-1, 1),))
    with pytest.raises(BatchError, match="do not fit"):
        burst_attention(*(torch.ones(1, 8, 1, 8) for _ in range(3)), layout, AttentionRequest())


def test_documents_stay_whole_by_the_work_of_endings() -> None:
    documents, parents = ((0, 512, 520, 528, 1024),), ((-1, 0, 0, -1),)
    assert by_documents(documents, ((MaskPattern(), 1),), 2, parents) is not None
    assert isinstance(
        make_plan(SequenceLayout.for_batch(documents, 2, parents=parents).masks(MaskPattern()), cut(1024, (0, 1))), Plan
    )
