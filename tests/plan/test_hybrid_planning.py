"""How recurrent layers pass what they know, and where batches are cut for them: by hand, on the wire, by properties."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

import hf_burst
from hf_burst import BurstConfig, Memory
from hf_burst.attention import SequenceLayout
from hf_burst.errors import ConfigError
from hf_burst.hf.models import layer_sizes as sizes_of_layers
from hf_burst.hf.models.layer_sizes import layer_sizes, recurrent_sizes
from hf_burst.hf.view import ModelView
from hf_burst.plan import (
    Mask,
    MaskPattern,
    RecurrentSize,
    Segments,
    Sharding,
    assign,
    choose_recurrence,
    cut,
    sharding_for,
)
from hf_burst.plan.cuts import by_documents
from hf_burst.plan.sharding import pattern
from hf_burst.ranks.group import ContextGroup
from hf_burst.ring import PeerToPeer
from tests.hf.models.test_recurrent_models import errors_of
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
CAUSAL = {MaskPattern(): 16}


def contiguous(length: int, ranks: int, documents: tuple[int, ...] = ()) -> Segments:
    return Segments(cut(length, pattern(ranks, "contiguous")), (documents or (0, length),))


def test_bytes_by_hand() -> None:
    assert (DELTA.slot_bytes, DELTA.halo_bytes) == (48 * 128 * 256 * 4, 10240 * 3 * 2)
    # a token's q and k of 16 heads, v of 48, decays in fp32 and beta go there; outputs come back
    there, back = 2 * (2 * 16 * 128 + 48 * 128 + 48) + 4 * 48, 2 * 48 * 128
    assert DELTA.exchanged(2) == there + back
    assert SCAN.slot_bytes == 128 * (128 * 64 + 1) * 4
    assert SELECTIVE.slot_bytes == CONVOLUTION.slot_bytes == 0


def test_heads_that_ranks_do_not_divide() -> None:
    """Three ranks: 16 key heads are repeated to the 48 of the values; 30 value heads are 32 of 4 ranks."""
    assert DELTA.exchanged(3) == 2 * (2 * 48 * 128 + 48 * 128 + 48) + 4 * 48 + 2 * 48 * 128
    uneven = RecurrentSize("delta", 1, 30, 96, 192, key_heads=30)
    assert uneven.exchanged(4) == 2 * (2 * 32 * 96 + 2 * 32 * 192 + 32) + 4 * 32


def test_layers_pass_states_unless_these_are_more_bytes() -> None:
    """A layer of Qwen3.6 exports 6.3 MB of a run. Of a token each of two ranks gets heads of 16.5 KB."""
    slot, token = DELTA.slot_bytes, DELTA.exchanged(2)
    even = 2 * slot // token  # tokens of a rank, at which both send as much
    for tokens, way in ((even - 80, "heads"), (even + 80, "states")):
        segments = contiguous(2 * tokens, 2)
        chosen, reason = choose_recurrence([DELTA], segments)
        assert chosen == way
        assert "302.0 MB of states to each rank, or " in reason
    zigzag = Segments(cut(4 * even, pattern(2, "zigzag")), ((0, 4 * even),))
    assert (zigzag.most_slots, choose_recurrence([DELTA], zigzag)[0]) == (1, "states")


def test_documents_that_start_at_the_edges_of_chunks_hand_nothing_on() -> None:
    segments = contiguous(64, 4, (0, 16, 32, 48, 64))
    assert (segments.most_slots, choose_recurrence([DELTA], segments)[0]) == (0, "states")


def test_layers_without_a_choice() -> None:
    segments = contiguous(65536, 2)
    assert choose_recurrence([SELECTIVE, CONVOLUTION], segments)[1].startswith("Mamba1 always exchanges channels")
    assert choose_recurrence([SELECTIVE], segments)[0] == "heads"
    assert choose_recurrence([CONVOLUTION], segments)[0] == "states"
    assert choose_recurrence([DELTA], contiguous(64, 1))[1] == "one rank exchanges nothing"


def test_one_choice_for_all_layers() -> None:
    """Few layers that would rather exchange heads go the way of the many."""
    segments = contiguous(2048, 2)
    lone = replace(SCAN, layers=1, heads=8, keys=16, values=512)
    assert choose_recurrence([lone], segments)[0] == "states"
    assert choose_recurrence([DELTA], contiguous(700, 2))[0] == "heads"
    assert choose_recurrence([lone, DELTA], contiguous(700, 2))[0] == "heads"


def test_the_rule_is_within_two_percent_of_what_was_measured() -> None:
    """Qwen3.6's layer over 2 H200s: states are as fast as heads at 8K tokens, and faster beyond."""
    table = json.loads((RESULTS / "rules.json").read_text())["recurrent"]
    for row in table:
        length = 2 * row["tokens_per_gpu"]
        segments = Segments(cut(length, pattern(2, row["cut"])), ((0, length),))
        way = choose_recurrence([DELTA], segments)[0]
        assert way == row["rule"]
        assert row["ms"][way] < 1.02 * min(row["ms"].values())
    assert len(table) == 6


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
    kernels = replace(DELTA, convolution_copies=1)  # causal-conv1d was installed
    assert 0.95 * measured < kernels.backward_elements < 1.15 * measured
    assert DELTA.backward_elements == kernels.backward_elements + DELTA.channels


SMALL = {
    "gated delta rule": RecurrentSize("delta", 1, 4, 5, 3, key_heads=2, itemsize=4),
    "Mamba2": RecurrentSize("scan", 1, 4, 6, 3, key_heads=2, itemsize=4),
    "Mamba1": RecurrentSize("selective", 1, 5, 6, 1, key_heads=1, itemsize=4),
    "convolution": RecurrentSize("convolution", 1, channels=4, reach=3, itemsize=4),
}


class Wire(PeerToPeer):
    """Messages whose bytes are counted."""

    total = 0.0

    def fetch(self, *arguments: Any) -> Any:
        posted = super().fetch(*arguments)
        Wire.total += sum(tensor.nbytes for tensor in posted.into)
        return posted


def bytes_of(rank: int, size: int, kind: str, chunking: str) -> tuple[float, float]:
    """What a rank sends, or what arrives at it, forward and backward, in fp32."""
    from tests.recurrent.test_recurrent import NAMES, PARAMETERS, make

    Wire.total = 0.0
    gather, reduce = torch.distributed.all_gather, torch.distributed.reduce_scatter

    def all_gather(into: Any, tensor: torch.Tensor, **options: Any) -> Any:
        Wire.total += (size - 1) * tensor.nbytes
        return gather(into, tensor, **options)

    def reduce_scatter(total: torch.Tensor, tensors: Any, **options: Any) -> Any:
        Wire.total += (size - 1) * total.nbytes
        return reduce(total, tensors, **options)

    case = Case(((0, 11, 24, 48),), chunking)
    layout = SequenceLayout.for_batch(case.documents, size, case.chunking)
    leaves = {name: tensor.float().requires_grad_() for name, tensor in make(case).items() if name in NAMES[kind]}
    inputs = [leaves[name] if name in PARAMETERS else layout.shard(leaves[name], rank) for name in NAMES[kind]]
    with (
        mock.patch("torch.distributed.all_gather", all_gather),
        mock.patch("torch.distributed.reduce_scatter", reduce_scatter),
        mock.patch("hf_burst.ring.resources.PeerToPeer", Wire),
    ):
        out = sharded(kind, layout.segments, ContextGroup.from_mesh(None), *inputs)
        forward = Wire.total
        out.sum().backward()
    return forward, Wire.total - forward


@pytest.mark.parametrize("chunking", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("gated delta rule", "states"),
        ("gated delta rule, heads exchanged", "heads"),
        ("Mamba2", "states"),
        ("Mamba1", "heads"),
        ("convolution", "states"),
    ],
)
def test_the_bytes_are_those_on_the_wire(ranks: Ranks, kind: str, way: Any, chunking: str) -> None:
    """What the rule compares, in either pass: slots go to every other rank, and so does a share of the heads."""
    size = SMALL[kind.partition(",")[0]]
    forward, backward = zip(*ranks(4).run(bytes_of, kind, chunking), strict=True)
    segments = SequenceLayout.for_batch([(0, 11, 24, 48)], 4, chunking).segments
    sent = segments.most_slots * (size.slot_bytes + size.halo_bytes) * 3
    if way == "heads":
        gate = 12 * 8 * 4 if kind == "Mamba1" else 0  # of a layer, which this one lacks
        sent = (12 * (size.exchanged(4) + 4 * size.shared_bytes) - gate) * 3 // 4
    assert max(forward) == max(backward) == sent


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
    length, sharding = documents[0][-1], by_documents(documents, tuple(CAUSAL.items()), ranks)
    if sharding is None:
        return
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
    each, sharding = bounds[-1] // ranks, by_documents(documents, tuple(CAUSAL.items()), ranks)
    if sharding is None:
        return
    fitting = [span for span in pairwise(bounds) if span[1] - span[0] <= each]
    split = [span for span in fitting if any(span[0] < edge < span[1] for edge in sharding.boundaries)]
    long = bounds[-1] - sum(stop - start for start, stop in fitting)
    assert len(split) < ranks + long // each


def cut_of(
    documents: tuple[int, ...], ranks: int, layers: Any = None, parts: int = 1, sizes: Any = (DELTA,)
) -> Sharding:
    layers = CAUSAL if layers is None else layers
    return sharding_for((documents,), layers, ranks, "balanced", parts, sizes)


def test_the_cut_has_few_runs_where_states_pass() -> None:
    """One document: with attention a zigzag, without it the fewest runs. Documents that are no longer than a rank's
    tokens stay whole."""
    whole, packed = (0, 4096), (0, 1000, 2048, 3000, 4096)
    assert cut_of(whole, 4) == cut(4096, pattern(4, "zigzag"))
    assert cut_of(whole, 4, layers={}) == cut(4096, pattern(4, "contiguous"))
    assert cut_of(whole, 4, parts=2) == cut(4096, pattern(4, "zigzag") * 2)
    assert cut_of((0, 4), 4) == cut(4, pattern(4, "contiguous"))
    assert cut_of((0, 500, 4096), 4) == cut(4096, pattern(4, "zigzag"))
    assert cut_of(packed, 2) == by_documents((packed,), tuple(CAUSAL.items()), 2) != cut(4096, pattern(2, "zigzag"))
    assert Segments(cut_of(packed, 2), (packed,)).most_slots == 0
    assert cut_of(packed, 2, layers={}) == cut(4096, pattern(2, "contiguous"))


def test_the_cut_is_that_of_attention_where_no_states_pass() -> None:
    packed = (0, 700, 2048, 3000, 4096)
    even = sharding_for((packed,), CAUSAL, 2, "balanced")
    assert cut_of(packed, 2, sizes=(SELECTIVE, CONVOLUTION)) == even
    assert even != cut_of(packed, 2)


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
        BurstConfig(chunking="documents", memory=Memory(attention_keep=0.5))
    with pytest.raises(ConfigError, match="'documents' deals out no equal chunks"):
        assign((Mask(16),), 2, "documents")
    assert SequenceLayout.for_batch([(0, 9)], 1, "documents").owners == (0,)


def test_rows_share_their_cut() -> None:
    """Documents count that all rows have."""
    for rows in (((0, 8, 16, 24),) * 2, ((0, 8, 16, 24), (0, 3, 8, 16, 20, 24))):
        sharding = by_documents(rows, tuple(CAUSAL.items()), 3)
        assert sharding == Sharding((0, 8, 16, 24), sharding.owners, 3)


def test_sizes_of_models() -> None:
    tiny = {name: models.make_model(name) for name in (*models.RECURRENT, "llama")}
    sizes = {name: recurrent_sizes(ModelView(model)) for name, model in tiny.items()}
    assert sizes["qwen3_5"] == (RecurrentSize("delta", 1, 4, 8, 6, key_heads=2, channels=2 * 2 * 8 + 4 * 6, reach=3),)
    (kimi,) = sizes["kimi_linear"]
    assert (kimi.kind, kimi.decays) == ("delta", kimi.keys)
    assert {own.kind for own in sizes["granite"]} == {"scan"}
    assert {own.kind for own in sizes["lfm2"]} == {"convolution"}
    assert {own.kind for own in sizes["zamba"]} == {"selective"}
    for name in models.RECURRENT:
        assert layer_sizes(ModelView(tiny[name])).q_heads in (0, tiny[name].config.num_attention_heads)
        assert sum(own.layers for own in sizes[name]) >= 1
    assert sizes["llama"] == ()


def ways_of(rank: int, size: int) -> list[tuple[str, float]]:
    """The way that a model takes by itself, where heads are larger and where states are; its loss."""
    model, batch, taken = models.make_model("qwen3_5"), models.make_batch("plain"), []
    calls: list[Any] = []
    for states in (1, 1 << 30):
        with mock.patch.object(RecurrentSize, "slot_bytes", states):
            models.patch(model)
            hook = model.model.register_forward_pre_hook(
                lambda module, args, kwargs: calls.append(kwargs["burst_pass"]), with_kwargs=True
            )
            loss = model(**batch).loss.detach()
            hook.remove()
            hf_burst.unpatch_model(model)
        sizes_of_layers.chosen_way.cache_clear()
        taken.append((calls[-1].way, float(loss)))
    return taken


def test_a_pass_takes_the_chosen_way(ranks: Ranks) -> None:
    results = ranks(2).run(ways_of)
    assert [way for way, _ in results[0]] == ["states", "heads"]
    expected = models.plain_loss(models.make_model("qwen3_5"), models.make_batch("plain")).item()
    for _, loss in [*results[0], *results[1]]:
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("zamba", marks=pytest.mark.full)])
def test_models_cut_by_documents_are_exact(ranks: Ranks, name: str) -> None:
    chosen = [("packed", way, "documents") for way in ("states", "heads")]
    assert max(ranks(3).run(errors_of, name, chosen)[0]) < 1e-9


def outputs_of(rank: int, size: int) -> list[float]:
    """The errors of logits and of losses of batches cut by documents: by the model, and before they come to it."""
    config = BurstConfig(chunking="documents", gradients="manual")
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
