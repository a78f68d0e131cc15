"""What recurrent layers cost, and where batches are cut for them: by hand, on the wire, and by properties."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

import hf_burst
from hf_burst import BurstConfig, SequenceLayout
from hf_burst.errors import ConfigError
from hf_burst.hf.models.hybrid import attention_shapes, recurrent_sizes
from hf_burst.plan import (
    Hybrid,
    Link,
    Machine,
    Mask,
    MaskPattern,
    RecurrentSize,
    RuleRate,
    Segments,
    Shapes,
    Sharding,
    assign,
    cheapest_cut,
    choose_recurrence,
    cut,
    cuts,
    recurrence,
    recurrence_cost,
    sharding_for,
)
from hf_burst.plan.cuts import by_documents
from hf_burst.plan.machine import cpu, h200
from hf_burst.plan.sharding import pattern
from hf_burst.ranks.group import ContextGroup
from hf_burst.ring import PeerToPeer
from hf_burst.ring.resources import GroupResources
from tests.hf.test_recurrent_models import errors_of
from tests.recurrent.test_recurrent import Case, sharded
from tests.support import models
from tests.support.live_memory import LiveMemory
from tests.support.ranks import RankPool

RESULTS = Path(__file__).parents[2] / "recipes/benchmarks/results"
Ranks = Callable[[int], RankPool]
DELTA = RecurrentSize("delta", 48, 48, 128, 128, key_heads=16, channels=10240, reach=3)
KIMI = replace(DELTA, decays=128)
SCAN = RecurrentSize("scan", 36, 128, 128, 64, key_heads=1, channels=8448, reach=3)
SELECTIVE = RecurrentSize("selective", 28, 8192, 16, 1, key_heads=1, channels=8192, reach=3)
CONVOLUTION = RecurrentSize("convolution", 10, channels=2048, reach=2)
LIMIT = "mixer", "limit"
HEADS = Shapes(24, 4, 256, 256, 2, 4)
CAUSAL = ((MaskPattern(), 16),)
# computes and moves anything in no time, but for messages: a second for each, and for each byte
MESSAGES = Link(1.0, 1.0)
PAPER = replace(
    h200(),
    device="CPU",
    rule=RuleRate(1e30, 1e30, 1e30, 1e30, 0.0, 0.0),
    products=1e30,
    launch=0.0,
    memory_bandwidth=1e30,
    p2p=MESSAGES,
    between_hosts=MESSAGES,
    symmetric=None,
)


def contiguous(length: int, ranks: int, documents: tuple[int, ...] = ()) -> Segments:
    return Segments(cut(length, pattern(ranks, "contiguous")), (documents or (0, length),))


def test_bytes_and_seconds_by_hand() -> None:
    """One document over two ranks: rank 0 hands one slot on to one peer; gloo sums its gradient on both."""
    slot, halo = 48 * 128 * 256 * 4, 10240 * 3 * 2
    assert (DELTA.slot_bytes, DELTA.halo_bytes) == (slot, halo)
    cost = recurrence_cost("states", DELTA, contiguous(64, 2), PAPER)
    assert (cost.sent_bytes, cost.halo_bytes, cost.kept_bytes) == (3 * slot, 3 * halo, 2 * slot)
    assert cost.forward_s == pytest.approx(2 + slot + halo)
    assert cost.backward_s == pytest.approx(2 + 2 * (slot + halo))
    summed_at_home = recurrence_cost("states", DELTA, contiguous(64, 2), replace(PAPER, device="GPU"))
    state = slot // 2  # transitions take no gradients in two passes
    assert (summed_at_home.sent_bytes, summed_at_home.halo_bytes) == (slot + state, 2 * halo)
    # a token's q and k of 16 heads, v of 48, decays in fp32 and beta go there; outputs come back; half stays at home
    there, back = 2 * (2 * 16 * 128 + 48 * 128 + 48) + 4 * 48, 2 * 48 * 128
    assert DELTA.exchanged(2) == (there, back)
    cost = recurrence_cost("heads", DELTA, contiguous(64, 2), PAPER)
    assert cost.sent_bytes == 32 * (there + back)
    assert cost.forward_s == pytest.approx(1 + halo + 2 + 16 * (there + back))
    assert SCAN.slot_bytes == 128 * (128 * 64 + 1) * 4
    assert SELECTIVE.slot_bytes == CONVOLUTION.slot_bytes == 0


def test_a_scan_by_hand() -> None:
    """Four runs: in the first step the middle ones send all they know, in the second one the first two send a state."""
    state, slot, halo = 48 * 128 * 128 * 4, 48 * 128 * 256 * 4, 10240 * 3 * 2
    segments = contiguous(64, 4)
    assert [[(*hop.source, *hop.target, hop.tensors) for hop in step] for step in segments.hops["forward"]] == [
        [(0, 0, 1, 0, 1), (1, 0, 2, 0, 2), (2, 0, 3, 0, 2)],
        [(0, 0, 2, 0, 1), (1, 0, 3, 0, 1)],
    ]
    cost = recurrence_cost("scanned states", DELTA, segments, PAPER)
    assert (cost.sent_bytes, cost.kept_bytes) == (2 * (slot + state), slot)
    assert cost.forward_s == pytest.approx((1 + 3 * halo) + (1 + slot) + (1 + state))
    assert cost.backward_s == pytest.approx((1 + 6 * halo) + (1 + slot) + (1 + state))
    hosts = replace(PAPER, ranks_per_host=2, between_hosts=Link(5.0, 1.0))
    cost = recurrence_cost("scanned states", DELTA, segments, hosts)
    assert cost.forward_s == pytest.approx((5 + 2 * halo) + (5 + slot) + (5 + state))


@pytest.mark.parametrize("size", [DELTA, SCAN], ids=["delta", "scan"])
def test_many_ranks_scan(size: RecurrentSize) -> None:
    """On H200s: a gather sends as much more as there are ranks, a scan little more for twice as many."""
    for ranks in (2, 4, 8, 32, 64, 256):
        segments = Segments(cut(8192 * ranks, pattern(ranks, "zigzag")), ((0, 8192 * ranks),))
        assert (choose_recurrence([size], segments, h200(), "states").way == "scanned states") == (ranks > 8)
    gathered, scanned = (recurrence_cost(way, size, segments, h200()) for way in ("states", "scanned states"))
    assert scanned.sent_bytes < gathered.sent_bytes / 20
    assert scanned.kept_bytes < gathered.kept_bytes / 200


def test_heads_that_ranks_do_not_divide() -> None:
    """Three ranks: 16 key heads are repeated to the 48 of the values; 30 value heads are 32 of 4 ranks."""
    assert DELTA.exchanged(3)[0] == 2 * (2 * 48 * 128 + 48 * 128 + 48) + 4 * 48
    uneven = RecurrentSize("delta", 1, 30, 96, 192, key_heads=30)
    assert uneven.exchanged(4)[1] == 2 * 32 * 192
    slow = replace(PAPER, rule=RuleRate(1.0, 1e30, 1e30, 1e30, 0.0, 0.0), p2p=Link(0.0, 1e30))
    alone, exchanged = (recurrence_cost("heads", uneven, contiguous(64, size), slow).forward_s for size in (1, 4))
    assert exchanged == pytest.approx(alone / 4 * 32 / 30)


def test_the_rule_takes_as_long_as_was_measured() -> None:
    """Qwen3.6's layer over 2 H200s, without its convolution: by heads, by states, and by further columns."""
    size, compared = replace(DELTA, channels=0), Counter[str]()
    machine = replace(h200(), ranks_per_host=2)
    for row in json.loads((RESULTS / "recurrent_2xH200.json").read_text())["results"]:
        _, _, contender = row["contender"].partition("hf_burst ")
        if row["part"] != "rule" or row["tokens_per_rank"] < 32768 or not contender:
            continue
        way, chunking = contender.split()
        length = 2 * row["tokens_per_rank"]
        segments = Segments(cut(length, pattern(2, chunking)), ((0, length),))
        two_passes = mock.PropertyMock(return_value=way != "columns")
        with mock.patch.object(recurrence._PassCost, "_in_two_passes", two_passes):
            cost = recurrence_cost("heads" if way == "heads" else "states", size, segments, machine)
        assert cost.forward_s * 1e3 == pytest.approx(row["forward_ms"], rel=0.08), row
        assert cost.backward_s * 1e3 == pytest.approx(row["backward_ms"], rel=0.08), row
        compared[way] += 1
    assert compared == {"heads": 4, "states": 4, "columns": 2}


def test_two_passes_take_as_long_as_was_measured() -> None:
    """What ranks compute beside the rule, by one H100 that plays them without messages."""
    rows = json.loads((RESULTS / "recurrent_1xH100_alone.json").read_text())["results"]
    measured = {row["contender"]: row for row in rows if row["part"] == "rule" and row["tokens_per_rank"] == 32768}
    size, limit = replace(DELTA, channels=0), measured["limit"]
    quiet = Link(0.0, 1e30)
    machine = replace(h200(), ranks_per_host=2, symmetric=None, p2p=quiet, between_hosts=quiet)
    alone = recurrence_cost("states", size, contiguous(32768, 1), machine)
    for chunking, busiest in (("contiguous", 0), ("zigzag", 1)):
        row = measured[f"hf_burst {chunking}, as rank {busiest} of 2"]
        cost = recurrence_cost("states", size, Segments(cut(65536, pattern(2, chunking)), ((0, 65536),)), machine)
        forward, backward = cost.forward_s - alone.forward_s, cost.backward_s - alone.backward_s
        assert forward * 1e3 == pytest.approx(row["forward_ms"] - limit["forward_ms"], rel=0.2), chunking
        assert backward * 1e3 == pytest.approx(row["backward_ms"] - limit["backward_ms"], rel=0.2), chunking


def test_the_norm_of_a_gated_output_keeps_what_the_plan_counts() -> None:
    norm, (outputs, gates) = Qwen3_5RMSNormGated(128).bfloat16(), torch.randn(2, 512, 128).bfloat16()
    outputs.requires_grad_()
    gates.requires_grad_()
    with LiveMemory(outputs, gates, *norm.parameters()) as live:
        before = live.now
        normed = norm(outputs * 1, gates * 1)
        kept = live.now - before
        (normed * 1).sum().backward()
    per_copy = outputs.nbytes
    assert kept == pytest.approx(DELTA.norm_copies[0] * per_copy, rel=0.01)
    assert live.peak - before == pytest.approx(sum(DELTA.norm_copies) * per_copy, rel=0.01)


def test_the_backward_pass_of_a_layer_takes_what_was_measured() -> None:
    """On one H100, between 32K and 128K tokens, less its input and the gradient of its output."""
    rows = json.loads((RESULTS / "recurrent_1xH100_alone.json").read_text())["results"]
    peaks = {row["tokens_per_rank"]: row["peak_gib"] for row in rows if (row["part"], row["contender"]) == LIMIT}
    measured = (peaks[131072] - peaks[32768]) * 2**30 / (131072 - 32768) / 2 - 2 * 5120
    assert 0.95 * measured < DELTA.backward_elements < 1.15 * measured


def test_documents_that_start_at_the_edges_of_chunks_hand_nothing_on() -> None:
    segments = contiguous(4096, 4, (0, 1024, 2048, 3072, 4096))
    states = recurrence_cost("states", DELTA, segments, h200())
    assert states.sent_bytes == states.halo_bytes == states.memory_bytes == 0
    assert choose_recurrence([DELTA], segments, h200()).way == "states"
    hybrid = Hybrid((DELTA,), HEADS, h200())
    assert cheapest_cut(segments.documents, CAUSAL, 4, hybrid).recurrence.way == "states"


def test_the_choice_goes_by_the_links() -> None:
    """Columns make heads by NVLink better, and 5 GB/s states; Mamba1 and convolutions have no choice."""
    near = replace(h200(), ranks_per_host=2)
    far = replace(h200(), ranks_per_host=1, between_hosts=Link(1e-4, 5e9))
    segments = contiguous(65536, 2)
    assert choose_recurrence([KIMI], segments, near).way == "heads"
    assert choose_recurrence([DELTA], segments, near).way == "states", "in two passes"
    for size in (KIMI, DELTA):
        assert choose_recurrence([size], segments, far).way == "scanned states", "the first run sends no transition"
    for machine in (near, far):
        assert choose_recurrence([SELECTIVE, CONVOLUTION], segments, machine).way == "heads"
        assert choose_recurrence([CONVOLUTION], segments, machine).way == "states"
        assert choose_recurrence([DELTA], segments, machine, "states").reason == "asked for"
    assert recurrence_cost("states", SELECTIVE, segments, far) == recurrence_cost("heads", SELECTIVE, segments, far)


def test_one_choice_for_all_layers() -> None:
    """Few layers that would rather pass states go the way of the many."""
    machine, segments = replace(h200(), ranks_per_host=2), contiguous(65536, 2)
    lone = replace(SCAN, layers=1, heads=512, keys=32, values=8)
    assert choose_recurrence([lone], segments, machine).way == "states"
    assert choose_recurrence([lone, KIMI], segments, machine).way == "heads"


SMALL = {
    "gated delta rule": RecurrentSize("delta", 1, 4, 5, 3, key_heads=2, itemsize=4),
    "Mamba2": RecurrentSize("scan", 1, 4, 6, 3, key_heads=2, itemsize=4),
    "Mamba1": RecurrentSize("selective", 1, 5, 6, 1, key_heads=1, itemsize=4),
    "convolution": RecurrentSize("convolution", 1, channels=4, reach=3, itemsize=4),
}


class Wire(PeerToPeer):
    """Messages whose bytes are counted."""

    total = 0.0

    def _post(self, *arguments: Any) -> Any:
        posted = super()._post(*arguments)
        Wire.total += sum(tensor.nbytes for tensor in posted.into)
        return posted


def bytes_of(rank: int, size: int, kind: str, chunking: str, scans: bool) -> tuple[float, float]:
    """What a rank sends, or what arrives at it, forward and backward, in fp32."""
    from tests.recurrent.test_recurrent import NAMES, PARAMETERS, make

    Wire.total = 0.0
    gather, reduce = torch.distributed.all_gather, torch.distributed.reduce_scatter
    exchange = torch.distributed.all_to_all_single

    def all_gather(into: Any, tensor: torch.Tensor, **options: Any) -> Any:
        Wire.total += (size - 1) * tensor.nbytes
        return gather(into, tensor, **options)

    def reduce_scatter(total: torch.Tensor, tensors: Any, **options: Any) -> Any:
        Wire.total += 2 * (size - 1) * total.nbytes  # gloo reduces all of them on all ranks
        return reduce(total, tensors, **options)

    def all_to_all(landing: Any, tensor: torch.Tensor, came: Any, sizes: list[int], **options: Any) -> Any:
        Wire.total += (sum(sizes) - sizes[rank]) * tensor.itemsize
        return exchange(landing, tensor, came, sizes, **options)

    case = Case(((0, 11, 24, 48),), chunking)
    layout = SequenceLayout.for_batch(case.documents, size, case.chunking)
    leaves = {name: tensor.float().requires_grad_() for name, tensor in make(case).items() if name in NAMES[kind]}
    inputs = [leaves[name] if name in PARAMETERS else layout.shard(leaves[name], rank) for name in NAMES[kind]]
    with (
        mock.patch("torch.distributed.all_gather", all_gather),
        mock.patch("torch.distributed.reduce_scatter", reduce_scatter),
        mock.patch("torch.distributed.all_to_all_single", all_to_all),
        mock.patch("hf_burst.ring.resources.PeerToPeer", Wire),
    ):
        out = sharded(kind, layout.segments, ContextGroup.from_mesh(None), scans, *inputs)
        forward = Wire.total
        out.sum().backward()
    return forward, Wire.total - forward


@pytest.mark.parametrize("chunking", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("gated delta rule", "states"),
        ("gated delta rule", "scanned states"),
        ("gated delta rule, heads exchanged", "heads"),
        ("Mamba2", "states"),
        ("Mamba2", "scanned states"),
        ("Mamba1", "heads"),
        ("convolution", "states"),
    ],
)
def test_the_bytes_are_those_on_the_wire(ranks: Ranks, kind: str, way: Any, chunking: str) -> None:
    size = SMALL[kind.partition(",")[0]]
    forward, backward = zip(*ranks(4).run(bytes_of, kind, chunking, way == "scanned states"), strict=True)
    segments = SequenceLayout.for_batch([(0, 11, 24, 48)], 4, chunking).segments
    cost = recurrence_cost(way, size, segments, cpu())
    gate = 2 * 12 * 8 * 4 * 3 / 4 if kind == "Mamba1" else 0  # of a layer, which this one lacks
    assert cost.sent_bytes + cost.halo_bytes - gate == round(max(forward) + max(backward))


@st.composite
def packings(draw: Any) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Rows of documents, many of them short, and ranks that divide their tokens."""
    ranks, each = draw(st.integers(2, 6)), draw(st.integers(2, 40))
    rows = draw(st.integers(1, 2)) if each > 4 else 1
    length = ranks * each
    bounds = [draw(st.sets(st.integers(1, length - 1), max_size=12)) for _ in range(rows)]
    return tuple((0, *sorted(own), length) for own in bounds), ranks


@given(packing=packings())
@example(packing=(((0, 24),), 3))
@example(packing=(((0, 5, 10, 15, 20),), 4))
@example(packing=(((0, 7, 14),), 2))
@example(packing=((tuple(range(13)),), 6))
def test_every_rank_holds_as_many_tokens_each_once(packing: Any) -> None:
    documents, ranks = packing
    length = documents[0][-1]
    for sharding in by_documents(documents, {MaskPattern(): 1}, ranks):
        assert sharding.boundaries[0] == 0
        assert sharding.boundaries[-1] == length
        assert {sharding.tokens(rank) for rank in range(ranks)} == {length // ranks}
        held = sorted((run.start, run.stop) for rank in range(ranks) for run in sharding.runs(rank))
        assert [edge for run in held for edge in run][1:-1:2] == [edge for run in held for edge in run][2::2]


@given(packing=packings())
def test_documents_are_cut_only_to_fill_ranks_up(packing: Any) -> None:
    """Of those that fit one rank, fewer than there are ranks."""
    documents, ranks = packing
    bounds = sorted(set.intersection(*map(set, documents)))
    each = bounds[-1] // ranks
    for sharding in by_documents(documents, {MaskPattern(): 1}, ranks)[:1]:
        fitting = [span for span in pairwise(bounds) if span[1] - span[0] <= each]
        split = [span for span in fitting if any(span[0] < edge < span[1] for edge in sharding.boundaries)]
        long = bounds[-1] - sum(stop - start for start, stop in fitting)
        assert len(split) < ranks + long // each


@settings(max_examples=30, deadline=None)
@given(packing=packings(), recurrent=st.sampled_from([(DELTA,), (SCAN,), (SELECTIVE,), (DELTA, CONVOLUTION)]))
def test_the_chosen_cut_costs_no_more_than_each_named_one(packing: Any, recurrent: Any) -> None:
    documents, ranks = packing
    for shapes, patterns in ((HEADS, CAUSAL), (None, ())):
        hybrid = Hybrid(recurrent, shapes, replace(h200(), ranks_per_host=ranks))
        taken, priced = cheapest_cut(documents, patterns, ranks, hybrid), cuts(documents, patterns, ranks, hybrid)
        assert taken.total_s == min(one.total_s for one in priced)
        named = {one.sharding: one.total_s for one in priced}
        for chunking in ("contiguous", "zigzag", "documents"):
            if chunking != "zigzag" or documents[0][-1] >= 2 * ranks:
                sharding = sharding_for(documents, dict(patterns), ranks, chunking)
                assert sharding not in named or taken.total_s <= named[sharding]
                assert sharding in named
        for way in ("states", "heads"):
            assert taken.total_s <= cheapest_cut(documents, patterns, ranks, replace(hybrid, recurrence=way)).total_s


def test_attention_is_weighed_against_states() -> None:
    """One document by slow links: with attention a zigzag, and without it the fewest runs. Where documents are no
    longer than a rank's tokens, they stay whole."""
    slow = replace(h200(), ranks_per_host=1, between_hosts=Link(1e-4, 5e9))
    whole = ((0, 262144),)
    with_attention, without = Hybrid((DELTA,), HEADS, slow), Hybrid((DELTA,), None, slow)
    assert cheapest_cut(whole, CAUSAL, 8, with_attention).chunking == "zigzag"
    assert cheapest_cut(whole, (), 8, without).chunking == "contiguous"
    documents = ((0, 7000, 27000, 40000),)
    taken = cheapest_cut(documents, (), 2, without)
    assert (taken.chunking, taken.most_slots, taken.recurrence.way) == ("documents", 0, "states")
    assert taken.sharding.boundaries == documents[0]


@given(packing=packings())
def test_models_without_recurrent_layers_are_cut_as_before(packing: Any) -> None:
    documents, ranks = packing
    masks = tuple(Mask(row[-1], documents=row) for row in documents)
    wanted = assign(masks, ranks) if documents[0][-1] >= 2 * ranks else pattern(ranks, "contiguous")
    layout = SequenceLayout.for_batch(documents, ranks)
    if not layout.padding:
        assert (layout.owners, layout.boundaries) == (wanted, ())


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"attention_keep=0\.5"):
        BurstConfig(chunking="documents", attention_keep=0.5)
    with pytest.raises(ConfigError, match="'documents' are not equal"):
        assign((Mask(16),), 2, "documents")
    assert SequenceLayout.for_batch([(0, 9)], 1, "documents").owners == (0,)


def test_rows_share_their_cut() -> None:
    """Documents count that all rows have."""
    for rows in (((0, 8, 16, 24),) * 2, ((0, 8, 16, 24), (0, 3, 8, 16, 20, 24))):
        sharding, *_ = by_documents(rows, {MaskPattern(): 1}, 3)
        assert sharding == Sharding((0, 8, 16, 24), sharding.owners, 3)


def test_sizes_of_models() -> None:
    sizes = {name: recurrent_sizes(models.make_model(name)) for name in models.RECURRENT}
    assert sizes["qwen3_5"] == (RecurrentSize("delta", 1, 4, 8, 6, key_heads=2, channels=2 * 2 * 8 + 4 * 6, reach=3),)
    (kimi,) = sizes["kimi_linear"]
    assert (kimi.kind, kimi.decays) == ("delta", kimi.keys)
    assert {own.kind for own in sizes["granite"]} == {"scan"}
    assert {own.kind for own in sizes["lfm2"]} == {"convolution"}
    assert {own.kind for own in sizes["zamba"]} == {"selective"}
    for name in models.RECURRENT:
        model = models.make_model(name)
        shapes = attention_shapes(model)
        assert shapes is None or shapes.q_heads == model.config.num_attention_heads
        assert sum(own.layers for own in sizes[name]) >= 1
    assert recurrent_sizes(models.make_model("llama")) == ()


def ways_of(rank: int, size: int) -> list[tuple[str, float]]:
    """The way that a model takes by itself, where a state's steps take long, links are slow, or passes over states take
    long; its loss."""
    model, batch, taken = models.make_model("qwen3_5"), models.make_batch("plain"), []
    calls: list[Any] = []
    rule, link = h200().rule, Link(0.0, 1e3)
    slow_state = replace(h200(), symmetric=None, rule=replace(rule, step=1.0))
    slow_link = replace(h200(), symmetric=None, p2p=link)
    slow_pass = replace(h200(), symmetric=None, rule=replace(rule, states=1.0, state_gradients=1.0))
    for machine in (slow_state, slow_link, slow_pass):
        with mock.patch.object(GroupResources, "machine", lambda *_, machine=machine: machine):
            models.patch(model)
            hook = model.model.register_forward_pre_hook(
                lambda module, args, kwargs: calls.append(kwargs["burst_call"]), with_kwargs=True
            )
            loss = model(**batch).loss.detach()
            hook.remove()
            hf_burst.unpatch_model(model)
        taken.append((calls[-1].way, float(loss)))
    return taken


def test_a_pass_takes_the_chosen_way(ranks: Ranks) -> None:
    results = ranks(2).run(ways_of)
    assert [way for way, _ in results[0]] == ["states", "scanned states", "heads"]
    expected = models.plain_loss(models.make_model("qwen3_5"), models.make_batch("plain")).item()
    for _, loss in [*results[0], *results[1]]:
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["qwen3_5", "zamba"])
def test_models_cut_by_documents_are_exact(ranks: Ranks, name: str) -> None:
    chosen = [("packed", way, "documents") for way in ("states", "heads")]
    assert max(ranks(3).run(errors_of, name, chosen)[0]) < 1e-9


def outputs_of(rank: int, size: int) -> list[float]:
    """The errors of logits and of losses of batches cut by documents: by the model, and before they come to it."""
    config = BurstConfig(chunking="documents", gradients="averaged_by_hand")
    model, batch = models.make_model("llama").eval(), models.make_batch("packed")
    with torch.no_grad():
        loss = models.plain_loss(model, batch)
        hf_burst.patch_model(model, config, torch.distributed.new_group([rank], use_local_synchronization=True))
        alone = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        hf_burst.unpatch_model(model)
        hf_burst.patch_model(model, config)
        gathered = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        losses = [model(**batch).loss, model(**hf_burst.shard_batch(batch, config=config)).loss]
    errors = [float((gathered - alone).abs().max()), *(abs(float(own - loss)) for own in losses)]
    return [*errors, float(len(SequenceLayout.for_batch([(0, 1, 8, 20, 37)], size, "documents").boundaries))]


def test_logits_and_losses_of_documents_that_stay_whole(ranks: Ranks) -> None:
    *errors, boundaries = ranks(3).run(outputs_of)[0]
    assert max(errors) < 1e-5
    assert boundaries > 0, "chunks of several sizes"


def test_a_machine_remembers_its_rule() -> None:
    machine = replace(h200(), rule=RuleRate(1e12, 2e12, 3e12, 4e12, 1e-3, 1e-6))
    assert Machine.from_json(machine.to_json()) == machine
    with pytest.raises(ConfigError):
        replace(machine, rule=RuleRate(0.0, 1.0, 1.0, 1.0, 0.0, 0.0))
