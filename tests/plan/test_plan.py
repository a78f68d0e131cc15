"""Plans on paper: exactly the mask is computed, exactly what is needed travels, and a broken plan is found out."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_burst.config import BurstConfig, Memory
from hf_burst.errors import BatchError, ConfigError, ShardingError
from hf_burst.plan import (
    Mask,
    Plan,
    Shapes,
    Sharding,
    Step,
    Traffic,
    Transfer,
    cut,
    make_plan,
    make_sharding,
    rank_traffic,
)
from hf_burst.plan.ring import sends_before_compute
from hf_burst.plan.sharding import pattern
from hf_burst.plan.traffic import row_bytes
from tests.support.oracle import admitted_pairs
from tests.support.verify import PlanError, columns_of, pairs_of, verify_plan

ROTATING = ("kv", "q")
BF16_MHA = Shapes(q_heads=32, kv_heads=32, head_dim=128, value_dim=128, itemsize=2, accumulator_itemsize=4)
BF16_GQA = Shapes(q_heads=32, kv_heads=8, head_dim=128, value_dim=128, itemsize=2, accumulator_itemsize=4)


def count_pairs(mask: Mask) -> int:
    return sum(map(sum, admitted_pairs(mask.length, mask.causal, mask.window, mask.documents)))


def one_document(length: int, ranks: int, chunking: str = "zigzag", causal: bool = True, window: int | None = None):
    return make_plan((Mask(length, causal, window),), make_sharding(length, ranks, chunking))


@st.composite
def masks_of(draw, length: int) -> Mask:
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=8)) if length > 1 else set()
    window = draw(st.none() | st.integers(0, length + 2))
    return Mask(length, draw(st.booleans()), window, (0, *sorted(cuts), length))


@st.composite
def plans(draw) -> Plan:
    ranks = draw(st.integers(1, 8))
    once = list(range(ranks))
    dealt = st.lists(st.sampled_from(once), max_size=2 * ranks).flatmap(lambda more: st.permutations(once + more))
    patterns = [pattern(ranks, "zigzag"), pattern(ranks, "contiguous")]
    owners = tuple(draw(st.sampled_from(patterns) | dealt))
    length = draw(st.integers(len(owners), 48))
    rows = draw(st.lists(masks_of(length), min_size=1, max_size=3))
    repeated = tuple(row for row in rows for _ in range(draw(st.integers(1, 2))))
    hosts = draw(st.sampled_from([count for count in range(1, ranks + 1) if ranks % count == 0]))
    return make_plan(repeated, cut(length, owners), hosts=hosts)


@settings(max_examples=150)
@given(plan=plans())
@example(plan=one_document(1, 1))
@example(plan=one_document(16, 8))
@example(plan=one_document(47, 7, causal=False))
@example(plan=make_plan((Mask(17, True, None, tuple(range(18))),), make_sharding(17, 4)))
def test_every_plan_computes_its_masks_exactly_once(plan):
    brute_force = sum(count_pairs(mask) for mask in plan.masks)
    assert pairs_of(plan) == brute_force
    for rotating in ROTATING:
        assert verify_plan(plan, rotating) == brute_force


@settings(max_examples=100)
@given(mask=st.integers(1, 30).flatmap(masks_of))
def test_the_keys_of_a_mask_are_the_pairs_of_its_definition(mask):
    for query, row in enumerate(admitted_pairs(mask.length, mask.causal, mask.window, mask.documents)):
        start, stop = mask.keys(query)
        assert [start <= key < stop for key in range(mask.length)] == row
        first, last = mask.document(query)
        assert first <= query < last


@pytest.mark.parametrize(
    ("window", "rotating"),
    [
        *((None, "q"), (40, "kv")),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((None, "kv"), (40, "q"))),
    ],
)
def test_64_ranks_on_a_laptop(rotating, window):
    length = 64 * 4 + 37
    documents = (0, 1, 2, 100, 101, 199, length)
    plan = make_plan((Mask(length, True, window, documents), Mask(length, True, window)), make_sharding(length, 64))
    assert verify_plan(plan, rotating) == pairs_of(plan) == sum(count_pairs(mask) for mask in plan.masks)


@settings(max_examples=60)
@given(ranks=st.integers(1, 8), chunking=st.sampled_from(["zigzag", "contiguous"]), extra=st.integers(0, 40))
def test_a_sharding_holds_every_token_once_in_chunks_of_equal_size(ranks, chunking, extra):
    length = 2 * ranks + extra
    sharding = make_sharding(length, ranks, chunking)
    sizes = [stop - start for start, stop in zip(sharding.boundaries, sharding.boundaries[1:], strict=False)]
    assert max(sizes) - min(sizes) <= 1
    held = [
        (token, rank) for rank in range(ranks) for run in sharding.runs(rank) for token in range(run.start, run.stop)
    ]
    assert sorted(token for token, _ in held) == list(range(length))
    assert all(sharding.owner(token) == rank for token, rank in held)
    for rank in range(ranks):
        runs = sharding.runs(rank)
        assert [run.local for run in runs] == [sum(run.size for run in runs[:index]) for index in range(len(runs))]
        assert sharding.tokens(rank) == sum(run.size for run in runs)


def test_zigzag_balances_a_causal_mask():
    plan = one_document(256, 8)
    work = []
    for rank in range(8):
        tiles = [tile for step in plan.steps(rank, "kv") for tile in step.tiles]
        columns = (columns_of(tile, row) for tile in tiles for row in range(tile.q[1] - tile.q[0]))
        work.append(sum(stop - start for start, stop in columns))
    assert sum(work) == pairs_of(plan)
    assert max(work) == min(work)


def test_plans_are_values():
    mask, sharding = Mask(13, True, None, (0, 5, 13)), make_sharding(13, 3)
    plan = make_plan((mask,), sharding)
    again = Sharding(sharding.boundaries, sharding.owners, 3)
    same = Plan((Mask(13, True, None, (0, 5, 13)),), again, again)
    assert plan == same
    assert hash(plan) == hash(same)
    assert make_plan((mask,), sharding) is plan
    assert plan.steps(1, "kv") is plan.steps(1, "kv")
    assert plan != make_plan((Mask(13, True, None, (0, 6, 13)),), sharding)
    assert len({Mask(13), Mask(13, True, None, (0, 13)), Mask(13, False)}) == 2


@settings(max_examples=60)
@given(plan=plans(), direction=st.sampled_from(["forward", "backward"]), rotating=st.sampled_from(ROTATING))
def test_traffic_is_the_sum_of_the_steps_and_of_their_rows(plan, direction, rotating):
    if direction == "forward":
        rotating = "kv"
    batch, shapes = len(plan.masks), Shapes(6, 3, 5, 7, itemsize=2, accumulator_itemsize=4)
    keys, values, queries, outputs = 3 * 5, 3 * 7, 6 * 5, 6 * 7
    for rank in range(plan.ranks):
        traffic = rank_traffic(plan, rank, direction, rotating, shapes)
        messages = total = across = 0
        crossings = plan.crossings(rank, rotating)
        inner = [step for crossing in crossings for step in plan.steps(rank, rotating, crossing.order)]
        for step in (*crossings, *inner):
            before = total
            if step.send:
                messages += 2 if rotating == "kv" else 4
                visit = 2 * (keys + values) if rotating == "kv" else 2 * (queries + outputs) + 2 * 6 * 4
                total += batch * (step.send.stop - step.send.start) * visit
            if step.recv and direction == "backward":
                messages += 2 if rotating == "kv" else 1
                returned = keys + values if rotating == "kv" else queries
                total += batch * (step.recv.stop - step.recv.start) * returned * (2 if step.recv.single_tile else 4)
            across += total - before if step in crossings else 0
        assert traffic == Traffic(messages, total, across)


@settings(max_examples=60)
@given(plan=plans(), rotating=st.sampled_from(ROTATING))
def test_what_is_sent_is_received(plan, rotating):
    sent, received = [], []
    for rank in range(plan.ranks):
        for step in plan.steps(rank, rotating):
            if step.send:
                sent.append((step.order, rank, step.send.peer, step.send.start, step.send.stop))
                assert 0 <= step.send.start < step.send.stop <= plan.blocks(rotating).tokens(rank)
            if step.recv:
                received.append((step.order, step.recv.peer, rank, step.recv.start, step.recv.stop))
    assert sorted(sent) == sorted(received)


@pytest.mark.parametrize("chunking", ["zigzag", "contiguous"])
@pytest.mark.parametrize("shapes", [BF16_MHA, BF16_GQA])
def test_bytes_of_a_full_mask_are_those_of_the_design(shapes, chunking):
    ranks, n = 4, 24
    plan = one_document(ranks * n, ranks, chunking, causal=False)
    hq, hkv, d = shapes.q_heads, shapes.kv_heads, shapes.head_dim
    for rank in range(ranks):
        hops = ranks - 1
        assert rank_traffic(plan, rank, "forward", "kv", shapes) == Traffic(2 * hops, hops * 4 * n * hkv * d)
        assert rank_traffic(plan, rank, "backward", "kv", shapes) == Traffic(4 * hops, hops * 8 * n * hkv * d)
        burst = Traffic(5 * hops, hops * (6 * n * hq * d + 8 * n * hq))
        assert rank_traffic(plan, rank, "backward", "q", shapes) == burst


def test_burst_sends_fewer_bytes_only_if_heads_are_not_shared():
    plan = one_document(96, 4, causal=False)
    for shapes, expected in ((BF16_MHA, "q"), (BF16_GQA, "kv"), (replace(BF16_MHA, kv_heads=16), "kv")):
        costs = {rotating: rank_traffic(plan, 1, "backward", rotating, shapes).bytes for rotating in ROTATING}
        assert min(costs, key=costs.__getitem__) == expected


def test_mha_saves_the_quarter_of_the_paper():
    plan = one_document(96, 4, causal=False)
    costs = {rotating: rank_traffic(plan, 0, "backward", rotating, BF16_MHA).bytes for rotating in ROTATING}
    assert costs["q"] / costs["kv"] == pytest.approx(0.75 + 1 / 128)


@pytest.mark.parametrize("rotating", ROTATING)
def test_a_causal_mask_sends_only_what_is_seen(rotating):
    shapes = replace(BF16_GQA, kv_heads=32)
    causal, full = one_document(96, 4), one_document(96, 4, causal=False)
    sent = [
        sum(rank_traffic(plan, rank, "forward", "kv", shapes).bytes for rank in range(4)) for plan in (causal, full)
    ]
    assert sent[0] == sent[1] * 3 // 4
    contiguous = one_document(96, 4, "contiguous")
    hops = [sum(step.send is not None for step in contiguous.steps(rank, rotating)) for rank in range(4)]
    assert hops == ([3, 2, 1, 0] if rotating == "kv" else [0, 1, 2, 3])


@pytest.mark.parametrize("rotating", ROTATING)
@pytest.mark.parametrize("causal", [True, False])
def test_documents_that_reach_no_other_rank_send_nothing(rotating, causal):
    documents = (0, 10, 24, 48, 50, 72, 96)
    plan = make_plan((Mask(96, causal, None, documents),), make_sharding(96, 4, "contiguous"))
    for rank in range(4):
        assert [step.order for step in plan.steps(rank, rotating)] == [0]
        assert rank_traffic(plan, rank, "backward", rotating, BF16_GQA) == Traffic()
    chunks = tuple(range(0, 97, 12))
    plan = make_plan((Mask(96, causal, None, chunks),), make_sharding(96, 4, "zigzag"))
    assert all(rank_traffic(plan, rank, "backward", rotating, BF16_GQA) == Traffic() for rank in range(4))


def test_a_document_over_two_ranks_sends_its_own_tokens_only():
    plan = make_plan((Mask(96, True, None, (0, 24, 40, 53, 96)),), make_sharding(96, 4, "contiguous"))
    moves = {(rank, step.send) for rank in range(4) for step in plan.steps(rank, "kv") if step.send}
    assert moves == {(1, Transfer(2, 40 - 24, 24, True)), (2, Transfer(3, 53 - 48, 24, True))}


@pytest.mark.parametrize("rotating", ROTATING)
def test_a_window_within_a_chunk_talks_to_the_neighbour_only(rotating):
    window = 5
    for length in (8 * 16, 8 * 64):
        plan = one_document(length, 8, "contiguous", window=window)
        for rank in range(8):
            sends = [step.send for step in plan.steps(rank, rotating) if step.send]
            neighbour = rank + 1 if rotating == "kv" else rank - 1
            expected = [(neighbour, window)] if 0 <= neighbour < 8 else []
            assert [(send.peer, send.rows) for send in sends] == expected


@pytest.mark.parametrize("chunking", ["zigzag", "contiguous"])
def test_the_traffic_of_a_window_grows_with_the_window_and_not_with_the_sequence(chunking):
    def sent(length: int, window: int) -> int:
        plan = one_document(length, 4, chunking, window=window)
        return sum(rank_traffic(plan, rank, "forward", "kv", BF16_MHA).bytes for rank in range(4))

    assert sent(512, 8) == sent(1024, 8) > 0
    assert sent(512, 16) == 2 * sent(512, 8)


class Tampered(Plan):
    """A plan of which the steps of one rank are changed: those after a crossing, or the crossings."""

    change: Callable[[tuple[Step, ...]], tuple[Step, ...]]
    crossing: int | None = 0

    def steps(self, rank, rotating, crossing=0):
        steps = super().steps(rank, rotating, crossing)
        return type(self).change(steps) if rank == 1 and crossing == self.crossing else steps

    def crossings(self, rank, rotating):
        crossings = super().crossings(rank, rotating)
        return type(self).change(crossings) if rank == 1 and self.crossing is None else crossings


def tampered(plan: Plan, index: int, crossing: int | None = 0, **changes: Callable[[Step], object]) -> Plan:
    """`plan` with the fields of step `index` of rank 1 replaced by what `changes` make of it."""

    def change(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        step = steps[index]
        new = replace(step, **{name: make(step) for name, make in changes.items()})
        return (*steps[:index], new, *steps[index + 1 :])

    kind = type("TamperedHere", (Tampered,), {"change": staticmethod(change), "crossing": crossing})
    return kind(plan.masks, plan.queries, plan.keys, plan.hosts)


def first_tile(**changes: Callable[[object], object]) -> Callable[[Step], object]:
    return lambda step: (
        replace(step.tiles[0], **{name: make(step.tiles[0]) for name, make in changes.items()}),
        *step.tiles[1:],
    )


def transfer(name: str, **changes: Callable[[Transfer], object]) -> Callable[[Step], object]:
    return lambda step: replace(
        getattr(step, name), **{field: make(getattr(step, name)) for field, make in changes.items()}
    )


BREAKS = {
    "a tile dropped": (0, {"tiles": lambda step: step.tiles[1:]}),
    "the tile of a rotating block dropped": (1, {"tiles": lambda step: ()}),
    "a tile twice": (1, {"tiles": lambda step: (*step.tiles, step.tiles[0])}),
    "own tile twice": (0, {"tiles": lambda step: step.tiles * 2}),
    "a tile for the wrong rows of keys": (1, {"tiles": first_tile(k=lambda t: (t.k[0], t.k[1] - 1))}),
    "a tile for the wrong rows of queries": (1, {"tiles": first_tile(q=lambda t: (t.q[0] + 1, t.q[1]))}),
    "a band too wide": (0, {"tiles": first_tile(band=lambda t: replace(t.band, low=-1))}),
    "a band too narrow": (0, {"tiles": first_tile(band=lambda t: replace(t.band, high=2))}),
    "a band that leaves a row fully masked": (1, {"tiles": first_tile(band=lambda t: replace(t.band, low=1))}),
    "a document lost": (0, {"tiles": first_tile(band=lambda t: replace(t.band, documents=(0, 3, t.q[1])))}),
    "another row of the batch": (0, {"tiles": first_tile(batch=lambda t: (0, 1))}),
    "a message no one expects": (1, {"send": transfer("send", peer=lambda t: (t.peer + 1) % 4)}),
    "a message of other rows": (1, {"send": transfer("send", stop=lambda t: t.stop - 1)}),
    "a message withheld": (1, {"send": lambda step: None}),
    "a message that is not waited for": (1, {"recv": lambda step: None}),
    "a message of too few rows": (1, {"recv": transfer("recv", start=lambda t: t.start + 1)}),
    "gradients in another dtype": (1, {"recv": transfer("recv", single_tile=lambda t: not t.single_tile)}),
    "a step at another time": (1, {"order": lambda step: step.order + 1}),
}


@pytest.mark.parametrize("rotating", ROTATING)
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_plan_is_found_out(name, rotating):
    mask = Mask(34, causal=True)
    plan = make_plan((mask, mask), make_sharding(34, 4))
    assert verify_plan(plan, rotating) == pairs_of(plan)
    index, changes = BREAKS[name]
    with pytest.raises(PlanError):
        verify_plan(tampered(plan, index, **changes), rotating)


BROKEN_CROSSINGS = {
    "a crossing withheld": (1, None, {"send": lambda step: None}),
    "a crossing that is not waited for": (1, None, {"recv": lambda step: None}),
    "a crossing of too few rows": (1, None, {"recv": transfer("recv", stop=lambda t: t.stop - 1)}),
    "a crossing to another rank": (1, None, {"send": transfer("send", peer=lambda t: t.peer ^ 1)}),
    "a crossing at another time": (1, None, {"order": lambda step: 0}),
    "a tile of what crossed dropped": (0, 1, {"tiles": lambda step: step.tiles[1:]}),
    "a tile beyond what crossed": (0, 1, {"tiles": first_tile(k=lambda t: (t.k[0], t.k[1] + 1))}),
    "what crossed withheld from the next rank": (1, 1, {"send": lambda step: None}),
}


class WithoutCrossings(Plan):
    """Both ends agree on sending nothing between hosts."""

    def crossings(self, rank, rotating):
        return tuple(replace(step, send=None, recv=None) for step in super().crossings(rank, rotating))


class LoneCrossings(Plan):
    """Both ends agree that every gradient crosses back as a kernel made it."""

    def crossings(self, rank, rotating):
        def single(move):
            return move and replace(move, single_tile=True)

        steps = super().crossings(rank, rotating)
        return tuple(replace(step, send=single(step.send), recv=single(step.recv)) for step in steps)


class NeverVisited(Plan):
    """Hosts skip what they compute with the blocks of others."""

    def visited(self, rank, rotating, crossing):
        return crossing == 0


@pytest.mark.parametrize("rotating", ROTATING)
@pytest.mark.parametrize("kind", [WithoutCrossings, LoneCrossings, NeverVisited])
def test_two_ends_that_agree_on_a_wrong_crossing_are_found_out(kind, rotating):
    plan = make_plan((Mask(34),), make_sharding(34, 4), hosts=2)
    with pytest.raises(PlanError):
        verify_plan(kind(plan.masks, plan.queries, plan.keys, plan.hosts), rotating)


@pytest.mark.parametrize("rotating", ROTATING)
@pytest.mark.parametrize("name", BROKEN_CROSSINGS)
def test_a_broken_plan_over_hosts_is_found_out(name, rotating):
    plan = make_plan((Mask(34),), make_sharding(34, 4), hosts=2)
    assert verify_plan(plan, rotating) == pairs_of(plan)
    index, crossing, changes = BROKEN_CROSSINGS[name]
    with pytest.raises(PlanError):
        verify_plan(tampered(plan, index, crossing, **changes), rotating)


@pytest.mark.parametrize("rotating", ROTATING)
@pytest.mark.parametrize(("ranks", "hosts"), [(64, 8), (16, 2), (12, 4)])
def test_a_block_crosses_once_to_each_host_over_all_network_cards(ranks, hosts, rotating):
    plan, per_host = (
        make_plan((Mask(ranks * 8, causal=False),), make_sharding(ranks * 8, ranks), hosts=hosts),
        ranks // hosts,
    )
    for direction in ("forward", "backward"):
        kind = "kv" if direction == "forward" else rotating
        sent = rank_traffic(plan, 3, direction, kind, BF16_GQA)
        block, summed = map(sum, row_bytes(direction, kind, BF16_GQA, single_tile=False))
        single = sum(row_bytes(direction, kind, BF16_GQA, single_tile=True)[1])  # of the one tile of an inner step
        assert sent.across == 8 * (hosts - 1) * (block + summed)
        assert sent.bytes == sent.across + 8 * hosts * (per_host - 1) * (block + single)
    crossings = [plan.crossings(rank, rotating) for rank in range(ranks)]
    for order in range(1, hosts):  # every card sends once in every step, to the card of the same number
        assert {(steps[order].send.peer - rank) % ranks for rank, steps in enumerate(crossings)} == {order * per_host}


@pytest.mark.parametrize("rotating", ROTATING)
@pytest.mark.parametrize("side", ["q", "k"])
def test_a_tile_that_reaches_beyond_the_shard_is_found_out(side, rotating):
    plan = one_document(32, 4, causal=False)
    beyond = first_tile(**{side: lambda tile: (tile.q[0], tile.q[1] + 1)})
    with pytest.raises(PlanError):
        verify_plan(tampered(plan, 0, tiles=beyond), rotating)


@pytest.mark.parametrize("rotating", ROTATING)
def test_two_ends_that_agree_on_too_few_rows_are_found_out(rotating):
    class Short(Plan):
        def steps(self, rank, rotating, crossing=0):
            def cut(move):
                return replace(move, stop=move.stop - 1) if move else None

            return tuple(
                replace(step, send=cut(step.send), recv=cut(step.recv)) for step in super().steps(rank, rotating)
            )

    plan = one_document(34, 4)
    with pytest.raises(PlanError, match="reads rows outside of"):
        verify_plan(Short(plan.masks, plan.queries, plan.keys), rotating)


@pytest.mark.parametrize(
    ("make", "error", "parts"),
    [
        (lambda: Mask(0), BatchError, ["at least 1 token", "length=0", "Drop empty sequences"]),
        (lambda: Mask(8, window=-1), ConfigError, ["window=-1", "negative", "None"]),
        (lambda: Mask(8, documents=(0, 9)), BatchError, ["(0, 9)", "8 tokens", "rise strictly"]),
        (lambda: Mask(8, documents=(1, 8)), BatchError, ["(1, 8)", "from 0 to 8"]),
        (lambda: Mask(8, documents=(0, 3, 3, 8)), BatchError, ["(0, 3, 3, 8)", "cu_seqlens"]),
        (lambda: Mask(8, documents=(0, 5, 4, 8)), BatchError, ["(0, 5, 4, 8)"]),
        (lambda: Mask(50, documents=tuple(range(40))), BatchError, ["(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...)"]),
        (lambda: Sharding((0, 4, 8), (0, 0), 2), ShardingError, ["2 chunks", "(0, 0)", "2 ranks", "own at least one"]),
        (lambda: Sharding((0, 4, 4), (0, 1), 2), ShardingError, ["(0, 4, 4) do not rise", "at least one token"]),
        (lambda: Sharding((0, 4, 8), (0, 1, 2), 3), ShardingError, ["2 chunks", "name one owner a chunk"]),
        (lambda: make_sharding(7, 4), ShardingError, ["7 tokens", "4 ranks", "8 chunks", "at least 8", "Pad it to 8"]),
        (lambda: make_sharding(3, 4, "contiguous"), ShardingError, ["3 tokens", "4 chunks", "at least 4"]),
        (lambda: make_sharding(8, 0), ShardingError, ["at least 1 rank", "ranks=0"]),
        (
            lambda: BurstConfig(chunking="snake"),
            ConfigError,
            ["chunking", "'snake'", "'balanced', 'zigzag', 'contiguous'"],
        ),
        (lambda: BurstConfig(schedule="ring"), ConfigError, ["schedule", "'ring'", "'auto', 'kv_ring', 'burst'"]),
        (lambda: BurstConfig(kernel="triton"), ConfigError, ["kernel", "'triton'", "'auto'", "'reference'"]),
        (lambda: BurstConfig(memory="much"), ConfigError, ["memory", "'much'", "'auto', 'manual'", "hf_burst.Memory"]),
        (lambda: Memory(tiled_mlp=float("nan")), ConfigError, ["Memory.tiled_mlp", "nan", "at least 0"]),
        (lambda: Memory(head_groups=0), ConfigError, ["Memory.head_groups", "0", "at least 1"]),
        (
            lambda: BurstConfig.from_dict({"kernal": "auto"}),
            ConfigError,
            ["kernal", "chunking", "schedule", "kernel", "transport"],
        ),
        (lambda: BurstConfig.from_dict({"memory": {"tiles": 3}}), ConfigError, ["Memory", "tiles", "tiled_mlp"]),
    ],
)
def test_an_error_says_what_was_given_and_what_is_allowed(make, error, parts):
    with pytest.raises(error) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    for part in parts:
        assert part in str(caught.value)


def test_a_config_is_read_from_a_mapping():
    assert BurstConfig.from_dict({}) == BurstConfig()
    assert BurstConfig.from_dict({"chunking": "contiguous", "schedule": "burst"}) == BurstConfig(
        "burst", chunking="contiguous"
    )
    assert BurstConfig.from_dict({"memory": {"tiled_mlp": 7}}) == BurstConfig(memory=Memory(tiled_mlp=7))


def test_a_config_is_copied_changed_and_sent():
    config = BurstConfig(memory=Memory(tiled_mlp=7))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config != BurstConfig()
    assert replace(config, schedule="burst") == BurstConfig("burst", memory=Memory(tiled_mlp=7))
    assert eval(repr(config)) == config
    with pytest.raises(TypeError, match="unexpected keyword argument 'tiles'"):
        BurstConfig(tiles=3)


def test_a_sequence_of_one_token_a_chunk_is_long_enough():
    for ranks, chunking in ((4, "zigzag"), (8, "contiguous")):
        plan = one_document(8, ranks, chunking)
        assert verify_plan(plan, "kv") == verify_plan(plan, "q") == 36


def rounds(plan: Plan, rank: int, rotating: str, returning: bool) -> list[tuple[str, int, set[int]]]:
    """The rounds of a rank in the order in which the loop posts them, and the peers of each."""
    found: list[tuple[str, int, set[int]]] = []

    def post(kind: str, step) -> None:
        peers = {transfer.peer for transfer in (step.send, step.recv) if transfer}
        if peers:
            found.append((kind, step.order, peers))

    steps = plan.steps(rank, rotating)
    for index, step in enumerate(steps):
        following = steps[index + 1] if index + 1 < len(steps) else None
        ahead = following is not None and sends_before_compute(step, following, returning)
        if ahead:
            post("blocks", following)
        if returning and step.order:
            post("gradients", step)
        if following is not None and not ahead:
            post("blocks", following)
    return found


def waits_for_ever(plan: Plan, rotating: str, returning: bool) -> bool:
    """Plays the rounds as NCCL carries them out: one after the other, a message passing when both ends are at it."""
    queues = [rounds(plan, rank, rotating, returning) for rank in range(plan.ranks)]
    while any(queues):
        passed = False
        for rank, queue in enumerate(queues):
            for peer in sorted(queue[0][2]) if queue else ():
                if queues[peer] and queues[peer][0][:2] == queue[0][:2]:
                    queue[0][2].discard(peer)
                    queues[peer][0][2].discard(rank)
                    passed = True
        for queue in queues:
            if queue and not queue[0][2]:
                queue.pop(0)
        if not passed:
            return True
    return False


@given(st.integers(2, 8), st.lists(st.integers(1, 127), max_size=6, unique=True), st.sampled_from([None, 3, 20]))
@settings(max_examples=150)
@example(4, [24, 80, 96], None)
def test_no_order_of_rounds_waits_for_ever(ranks, cuts, window):
    plan = make_plan((Mask(128, True, window, (0, *sorted(cuts), 128)),), make_sharding(128, ranks))
    for rotating in ("kv", "q"):
        for returning in (False, True):
            assert not waits_for_ever(plan, rotating, returning), (rotating, returning)
