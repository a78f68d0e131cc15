"""Which rank owns which chunk: equal tokens, even work, and the coarsest cut that gives them."""

import math
import random
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, GPT2Config, Llama4TextConfig, LlamaConfig, MistralConfig, Qwen2Config

from hf_burst.attention import SequenceLayout
from hf_burst.config import BurstConfig
from hf_burst.errors import ConfigError, ShardingError
from hf_burst.hf.models.support import layer_patterns
from hf_burst.plan import Mask, MaskPattern, assign, balance, imbalance
from hf_burst.plan.sharding import pattern
from hf_burst.plan.work import meetings
from tests.plan.test_plan import masks_of
from tests.support.oracle import admitted_pairs

ZIGZAG = pattern(4, "zigzag")


def log_uniform(total: int, seed: int) -> tuple[int, ...]:
    """Boundaries of documents of 512 to 65,536 tokens, whose logarithms are uniform."""
    draw, bounds = random.Random(seed), [0]
    while bounds[-1] < total:
        size = int(math.exp(draw.uniform(math.log(512), math.log(65536))))
        bounds.append(min(total, bounds[-1] + size))
    return tuple(bounds)


def imbalance_of_steps(masks, owners):
    """How far the steps of a ring, each as long as its busiest rank, are above the mean; `None` if not counted."""
    met = meetings(masks, balance._bounds(masks[0].length, len(owners)))
    return None if met is None else balance._Steps(balance._work(masks, (), len(owners)), met, owners).imbalance


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_packed_documents_are_even_over_the_ranks(ranks):
    for seed in range(30):
        mask = Mask(262144, documents=log_uniform(262144, seed))
        owners = assign((mask,), ranks)
        assert imbalance((mask,), owners) <= 0.02, seed
        assert len({owners.count(rank) for rank in range(ranks)}) == 1, "as many tokens everywhere"


@pytest.mark.parametrize(("ranks", "most"), [(2, 0.15), (3, 0.15), (4, 0.15), (8, 0.6)])
def test_the_steps_of_a_ring_are_even_where_documents_are_packed(ranks, most):
    """Beside what dealing by work alone leaves."""
    before, after = [], []
    for seed in range(12):
        mask = Mask(262144, documents=log_uniform(262144, seed))
        owners = assign((mask,), ranks)
        dealt = balance._dealt_out(balance._work((mask,), (), 8 * ranks), ranks, 1)
        before.append(imbalance_of_steps((mask,), dealt))
        after.append(imbalance_of_steps((mask,), owners))
        assert after[-1] <= most, seed
    assert sum(after) < 0.4 * sum(before)


@settings(max_examples=60)
@given(data=st.data(), ranks=st.integers(2, 4), length=st.integers(16, 40))
def test_steps_are_kept_up_as_chunks_change_hands(data, ranks, length):
    """Beside those counted anew, pair by pair."""
    masks = tuple(data.draw(st.lists(masks_of(length), min_size=1, max_size=2)))
    weights = tuple(range(1, len(masks) + 1))
    owners = data.draw(st.permutations([index % ranks for index in range(3 * ranks)]))
    met = meetings(masks, balance._bounds(length, len(owners)), weights)
    steps = balance._Steps(balance._work(masks, weights, len(owners)), met, owners)
    for _ in range(data.draw(st.integers(0, 6))):
        steps.give(data.draw(st.integers(0, len(owners) - 1)), data.draw(st.integers(0, ranks - 1)))
    size = math.ceil(length / len(owners))
    counted = [[0] * ranks for _ in range(ranks)]
    for mask, weight in zip(masks, weights, strict=True):
        for query, row in enumerate(admitted_pairs(mask.length, mask.causal, mask.window, mask.documents)):
            for key in (key for key, sees in enumerate(row) if sees):
                host, guest = steps.owners[query // size], steps.owners[key // size]
                counted[(host - guest) % ranks][host] += weight
    assert steps.pairs == counted
    assert steps.loads == [sum(own) for own in zip(*counted, strict=True)]
    assert steps.longest == sum(map(max, counted))


def test_what_is_too_much_to_go_through_is_balanced_in_all_only():
    """And where heads are exchanged inside of hosts, so that the steps are other ones."""
    assert imbalance_of_steps((Mask(1 << 20),), pattern(128, "zigzag")) is None
    for ranks in (32, 8):
        count, length = 3 * ranks // 2, ranks << 15
        equal = Mask(length, documents=tuple(index * length // count for index in range(count + 1)))
        owners = assign((equal,), ranks)
        assert (owners == pattern(ranks, "zigzag")) == (ranks == 32)
        assert imbalance_of_steps((equal,), pattern(ranks, "zigzag")) > 0.4
    rows = tuple(Mask(65536, documents=log_uniform(65536, seed)) for seed in range(80))
    owners = assign(rows, 8)
    assert imbalance_of_steps(rows, owners) is None
    assert imbalance(rows, owners) <= 0.02


def test_one_long_document_is_cut_as_ever():
    assert assign((Mask(131072),), 4) == ZIGZAG
    assert assign((Mask(131072), Mask(131072)), 4) == ZIGZAG
    assert assign((Mask(131072),), 1) == (0,)


def test_documents_that_cost_the_same_everywhere_stay_together():
    assert assign((Mask(65536, documents=tuple(range(0, 65537, 64))),), 4) == pattern(4, "contiguous")


def test_chunks_are_no_finer_than_balance_needs():
    """Four documents of an eighth each and one of a half: zigzag is uneven, four chunks a rank are not."""
    mask = Mask(65536, documents=(0, 8192, 16384, 24576, 32768, 65536))
    owners = assign((mask,), 4)
    assert len(owners) == 16
    assert imbalance((mask,), owners) <= 0.02 < imbalance((mask,), ZIGZAG)


def test_what_dealing_alone_leaves_uneven_is_swapped():
    def loads(work, ranks, swaps):
        with mock.patch.object(balance, "_SWAPS", swaps):
            owners = balance._dealt(work, ranks)
        assert {owners.count(rank) for rank in range(ranks)} == {len(work) // ranks}
        return [sum(each for each, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(ranks)]

    assert sorted(loads([2, 8, 5, 1, 1, 3], 2, 0)) == [9, 11]
    assert loads([2, 8, 5, 1, 1, 3], 2, 64) == [10, 10]
    better = 0
    for seed in range(60):
        draw = random.Random(seed)
        work = [int(draw.expovariate(0.001)) for _ in range(16)]
        before, after = max(loads(work, 4, 0)), max(loads(work, 4, 64))
        assert after <= before, seed
        better += after < before
    assert better > 15


def test_the_finest_cut_is_taken_where_it_takes_that():
    """One document of almost all the work in an eighth of the tokens."""
    mask = Mask(65536, documents=(0, 8192, *range(8192 + 64, 65537, 64)))
    owners = assign((mask,), 4)
    assert len(owners) == 64
    assert imbalance((mask,), owners) < imbalance((mask,), balance._dealt(balance._work((mask,), (), 32), 4))


def test_the_padded_length_is_that_of_all_packings():
    lengths = set()
    for seed in range(8):
        layout = SequenceLayout.for_batch([log_uniform(65540, seed)], 4)
        lengths.add(layout.length)
    assert lengths == {65540 + -65540 % 64}


def test_exchanged_heads_leave_neighbours_together():
    assert BurstConfig(schedule="ulysses").chunking_over(4) == "contiguous"
    assert BurstConfig(schedule="ulysses_4+kv_ring").chunking_over(4) == "contiguous"
    assert BurstConfig(schedule="ulysses_2+kv_ring").chunking_over(4) == "balanced"
    assert BurstConfig(schedule="ulysses", chunking="zigzag").chunking_over(4) == "zigzag"
    assert BurstConfig().chunking_over(4) == "balanced"


def test_an_unknown_chunking_is_refused():
    with pytest.raises(ConfigError, match="'zig-zag' deals out no equal chunks"):
        SequenceLayout.for_batch([(0, 64)], 4, "zig-zag")


def test_short_batches_are_not_cut_into_crumbs():
    mask = Mask(4096, documents=(0, 2000, 2100, 4096))
    assert len(assign((mask,), 4)) <= 8


def test_rows_of_a_batch_count_together():
    """The second row is long where the first one is short."""
    first, second = Mask(64, documents=(0, *range(32, 65))), Mask(64, documents=(*range(33), 64))
    assert imbalance((first, second), pattern(2, "contiguous")) == 0
    assert assign((first, second), 2) == pattern(2, "contiguous")
    assert assign((first,), 2) != pattern(2, "contiguous")


@settings(max_examples=60)
@given(data=st.data(), chunks=st.integers(1, 6), length=st.integers(6, 40))
def test_the_imbalance_is_that_of_the_pairs_counted_one_by_one(data, chunks, length):
    masks = tuple(data.draw(st.lists(masks_of(length), min_size=1, max_size=2)))
    owners = tuple(data.draw(st.permutations([index % 3 for index in range(max(3, chunks))])))
    size = math.ceil(length / len(owners))
    loads = [0, 0, 0]
    for mask in masks:
        pairs = admitted_pairs(mask.length, mask.causal, mask.window, mask.documents)
        for query, row in enumerate(pairs):
            loads[owners[query // size]] += sum(row)
    assert imbalance(masks, owners) == pytest.approx(max(loads) / (sum(loads) / 3) - 1)


def test_what_layers_see_is_what_is_balanced():
    """Windows cost the same everywhere, so neighbours stay together; full layers decide where they cost more."""

    def owners(patterns):
        return SequenceLayout.for_batch([(0, 32768)], 4, patterns=patterns).owners

    assert (
        owners({MaskPattern(window=1023): 24})
        == owners({MaskPattern(attention_chunk_size=4096): 24})
        == pattern(4, "contiguous")
    )
    assert owners({MaskPattern(): 4, MaskPattern(window=1023): 20}) == owners(None) == ZIGZAG
    short = {MaskPattern(): 1, MaskPattern(window=63): 4000}  # 16,384 pairs a token in one layer, 256,000 in the others
    assert owners(short) == ZIGZAG
    assert owners(short | {MaskPattern(window=63): 20000}) == pattern(4, "contiguous")


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (LlamaConfig(num_hidden_layers=3), {MaskPattern(): 3}),
        (MistralConfig(num_hidden_layers=2, sliding_window=128), {MaskPattern(window=127): 2}),
        (MistralConfig(num_hidden_layers=2, sliding_window=None), {MaskPattern(): 2}),
        (Gemma3TextConfig(num_hidden_layers=12, sliding_window=512), {MaskPattern(window=511): 10, MaskPattern(): 2}),
        (Qwen2Config(num_hidden_layers=4, use_sliding_window=False), {MaskPattern(): 4}),
        (
            Llama4TextConfig(num_hidden_layers=8, attention_chunk_size=256),
            {MaskPattern(attention_chunk_size=256): 6, MaskPattern(): 2},
        ),
        (GPT2Config(n_layer=5), {MaskPattern(): 5}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_how_far_the_layers_of_a_model_see(config, wanted):
    assert layer_patterns(config) == wanted


def test_a_layout_says_how_even_it_is():
    documents = log_uniform(32768, 3)
    dealt = SequenceLayout.for_batch([documents], 4)
    zigzag = SequenceLayout.for_batch([documents], 4, "zigzag")
    assert dealt.imbalance <= 0.02 < zigzag.imbalance
    assert {dealt.sharding.tokens(rank) for rank in range(4)} == {8192}


def test_what_fills_the_last_chunk_is_a_document_of_its_own():
    layout = SequenceLayout.for_batch([(0, 5, 13)], 2, (0, 1, 1, 0, 0, 1))
    assert (layout.length, layout.padding, layout.documents) == (18, 5, ((0, 5, 13, 18),))
    assert [stop - start for start, stop in pairwise(layout.sharding.boundaries)] == [3] * 6


@pytest.mark.parametrize("owners", [(0, 1, 1), (0, 0), (0, 1, 2), (), (0, 1, -1, 2)])
def test_owners_that_give_ranks_different_shares_are_refused(owners):
    with pytest.raises(ShardingError, match=r"as many, and at least one\. Name the rank, 0 to 1"):
        SequenceLayout.for_batch([(0, 32)], 2, owners)


@pytest.mark.parametrize("stretches", [1, 2, 4])
@pytest.mark.parametrize("chunking", ["balanced", "zigzag", "contiguous"])
def test_every_stretch_is_dealt_out_by_itself(stretches: int, chunking: str) -> None:
    bounds = (0, 700, 41_000, 43_000, 65_536 + 7)
    layout = SequenceLayout.for_batch([bounds], 4, chunking, stretches=stretches)
    each = len(layout.owners) // stretches
    for start in range(0, len(layout.owners), each):
        part = layout.owners[start : start + each]
        assert {part.count(rank) for rank in range(4)} == {each // 4}
    if chunking == "balanced":
        assert layout.imbalance < 0.05
        assert each > 8 or stretches == 4, "chunks were dealt out; four zigzags are even enough"
    for index in range(1, stretches):
        beginning = layout.beginning(index / stretches)
        assert beginning is not None
        assert beginning.length == layout.length * index // stretches
        assert beginning.owners == layout.owners[: len(beginning.owners)]
        for rank in range(4):
            assert layout.indices(rank)[: beginning.length // 4].equal(beginning.indices(rank))
    assert layout.beginning(1 / 3) is None
