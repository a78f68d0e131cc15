"""Rings on two levels: exact on any number of hosts, each block crossing once, by messages and by shared memory."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_burst.config import Schedule
from hf_burst.errors import BurstError, ConfigError
from hf_burst.kernels import KernelRequest, Scores, select_kernel
from hf_burst.plan import MaskPattern, Shapes, Traffic, make_plan, rank_traffic
from hf_burst.ranks.group import ContextGroup
from hf_burst.ranks.layout import SequenceLayout
from hf_burst.ring import HeadSizes, ShardedAttention, SymmetricPool
from hf_burst.ring.resources import GroupResources, resources_of
from tests.hf.parts.test_checkpointing import expected_gradients, keep_parts
from tests.hf.test_patch import group_mean
from tests.ring.test_ring import Case, assert_exact, attend, attend_to_all, context_group, fitting, put_together
from tests.support import models
from tests.support.shared_memory import Access, forget_resources, races, shared_memory
from tests.support.traffic import Counted, sent_by

PACKED = ((0, 1, 2, 3, 16, 29, 30, 41), (0, 41), (0, 11, 24, 41))
KINDS = [
    Case(PACKED, kernel="reference"),
    Case(((0, 67),), kernel="reference", sinks=True, seed=1),
    Case(((0, 48),), window=5, chunking="contiguous", seed=3),
    Case(((0, 48),), causal=False, dims=(6, 3), kernel="reference", seed=4),
    Case(((0, 12, 24, 36, 48),), chunking="contiguous", seed=5),  # nothing travels
    Case(((0, 24, 48),), chunking="contiguous", seed=6),  # nothing crosses between two hosts
    Case(((0, 23),), head_groups=2, heads=(4, 4), seed=7),
]
SCHEDULES = {
    4: ("kv_ring", "burst", "ulysses_2+kv_ring", "ulysses_2+burst"),
    6: ("kv_ring", "burst", "ulysses_3+burst", "ulysses_2+kv_ring"),
    8: ("burst", "ulysses_2+kv_ring"),
}


def over_hosts(size: int, per_host: int, transport: str = "auto") -> list[Case]:
    """Every kind by some schedule, and every schedule for some kinds."""
    cases = [
        replace(case, schedule=name, ranks_per_host=per_host, transport=transport)
        for one, name in enumerate(SCHEDULES[size])
        for other, case in enumerate(KINDS)
        if (one + other + per_host) % 2
    ]
    return fitting(size, cases)


LARGE = [pytest.param(6, 3, marks=pytest.mark.slow), pytest.param(8, 4, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("size", "per_host"), [(4, 1), pytest.param(4, 2, marks=pytest.mark.full), (6, 2), *LARGE])
def test_attention_over_hosts_is_exact(ranks, size, per_host):
    cases = over_hosts(size, per_host)
    for case, found in zip(cases, put_together(ranks(size).run(attend_to_all, cases), size, cases), strict=True):
        assert_exact(case, found)


def attend_through_both(rank: int, size: int, folder: Path, per_host: int, cases: list[Case]) -> tuple[list, list]:
    """The results over hosts whose ranks read each other's memory, and which bytes of it were read and written."""
    group, found = context_group(size), list[Access]()
    near, _ = resources_of(group).levels(torch.device("cpu"), per_host)
    with shared_memory(folder / str(rank // per_host), near, found):
        results = [attend(rank, size, case) for case in [*cases, *cases]]
    return results, found


@pytest.mark.parametrize(("size", "per_host"), [pytest.param(4, 2, marks=pytest.mark.full), LARGE[0], (6, 2)])
def test_ranks_of_a_host_read_memory_and_hosts_send_messages(ranks, size, per_host, tmp_path):
    for host in range(size // per_host):
        (tmp_path / str(host)).mkdir()
    cases = over_hosts(size, per_host, "symmetric")
    cases = [case for case in cases if per_host % Schedule.parse(case.schedule).ulysses == 0]  # others cross hosts
    answers = ranks(size).run(attend_through_both, tmp_path, per_host, cases)
    many = [*cases, *cases]
    for case, found in zip(many, put_together([results for results, _ in answers], size, many), strict=True):
        assert_exact(case, found)
    for host in range(size // per_host):
        accesses = [access for _, own in answers[host * per_host : (host + 1) * per_host] for access in own]
        assert sum(access.kind == "read" for access in accesses) > 100
        assert not races(accesses)


@pytest.mark.slow
@pytest.mark.parametrize("per_host", [1, 2])
def test_whole_models_over_hosts_are_exact(ranks, per_host):
    """Checkpointed layers, which keep their attention, some of it, or none."""
    settings = [("auto", 1.0), ("kv_ring", 0.0), ("burst", 0.5), ("ulysses_2+burst", 1.0)]
    ranks(4).run(keep_parts, "llama", ("left", "packed"), settings, per_host)


def compile_over_hosts(rank: int, size: int) -> None:
    torch._dynamo.reset()
    batch = models.make_batch("packed", 43)
    model = models.make_model("llama", torch.float64).train()
    expected_loss, wanted = models.plain_loss(model, batch).detach(), expected_gradients(model, batch)
    model.zero_grad()
    models.patch(model)
    with models.hosts_of(2):
        loss = torch.compile(model, backend="aot_eager")(**batch).loss
        loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-10, atol=1e-10)
    for found, gradient in zip(group_mean(model), wanted, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.full
@pytest.mark.slow
def test_compiled_over_hosts_it_is_exact(ranks):
    ranks(4).run(compile_over_hosts)


def differ_in_a_later_pass(rank: int, size: int) -> str:
    """The ranks know their hosts from the first pass, so that one of them alone may fail in the second."""
    model, batch = models.patch(models.make_model("llama")), models.make_batch("plain")
    model(**batch)
    lost = mock.patch.object(GroupResources, "ranks_per_host", side_effect=ConfigError("no hosts"))
    with lost if rank == 1 else nullcontext(), pytest.raises(BurstError) as caught:
        model(**batch)
    return str(caught.value)


def test_what_one_rank_alone_cannot_do_is_told_on_all(ranks):
    for said in ranks(2).run(differ_in_a_later_pass, timeout=60):
        assert "no hosts" in said


def sent_over(rank: int, size: int, schedule: str, per_host: int, rows: int, kv_heads: int) -> list[Traffic]:
    """What leaves a rank in an attention in fp32, forward and backward, as its exchanges count it."""
    layout = SequenceLayout.for_batch([(0, rows * size)], size)
    attention = ShardedAttention(
        schedule=Schedule.parse(schedule, size),
        group=ContextGroup.from_mesh(None),
        masks=layout.masks(MaskPattern()),
        queries=layout.sharding,
        keys=layout.sharding,
        kernel=select_kernel("cpu_flash", KernelRequest("cpu", torch.float32, 16, 16)),
        scores=Scores(0.25),
        ranks_per_host=per_host,
    )
    q, dout = (torch.randn(1, rows, 4, 16) for _ in range(2))
    k, v = (torch.randn(1, rows, kv_heads, 16) for _ in range(2))
    resources, sent = resources_of(attention.group), []
    sizes = HeadSizes(4, kv_heads, 16, 16)
    with mock.patch("hf_burst.ring.resources.PeerToPeer", Counted):
        with resources.messages(q.device, "p2p", attention.near_ranks) as exchanges:
            out, lse, kept = attention.forward(exchanges, q, k, v)
        sent.append(sent_by(exchanges))
        with resources.messages(q.device, "p2p", attention.near_ranks) as exchanges:
            attention.backward(exchanges, sizes, kept or [q, k, v], dout, out, lse, (dout * out).sum(-1))
    return [*sent, sent_by(exchanges)]


@pytest.mark.parametrize(
    ("nodes", "per_host", "schedule"),
    [
        (2, 2, "burst"),
        pytest.param(4, 2, "kv_ring", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, 2, "kv_ring"), (4, 2, "burst"))),
    ],
)
def test_bytes_between_hosts_are_those_of_the_plan_and_each_block_crosses_once(hosts, nodes, per_host, schedule):
    """On the wire, between hosts that are network namespaces; headers and acknowledgements come on top."""
    size, rows, kv_heads = nodes * per_host, 2048, 2
    pool = hosts(nodes, per_host)
    pool.run(sent_over, schedule, per_host, 4 * size, kv_heads)  # opens connections
    before = pool.network.sent()
    found = pool.run(sent_over, schedule, per_host, rows, kv_heads)
    left = [after - earlier for after, earlier in zip(pool.network.sent(), before, strict=True)]
    layout = SequenceLayout.for_batch([(0, rows * size)], size)
    plan = make_plan(layout.masks(MaskPattern()), layout.sharding, hosts=nodes)
    shapes, rotating = Shapes(4, kv_heads, 16, 16, 4, 4, 4), "q" if schedule == "burst" else "kv"
    for rank, (forward, backward) in enumerate(found):
        assert forward == rank_traffic(plan, rank, "forward", "kv", shapes)
        assert backward == rank_traffic(plan, rank, "backward", rotating, shapes)
        assert forward.across <= (nodes - 1) * rows * 2 * kv_heads * 16 * 4  # K and V once a host
    for host in range(nodes):
        own = range(host * per_host, (host + 1) * per_host)
        across = sum(traffic.across for rank in own for traffic in found[rank])
        assert across <= left[host] < 1.08 * across + 1e5


def refuse_on_one_host(rank: int, size: int) -> str:
    """Only the second host has no symmetric memory; what its ranks and the others raise."""
    group = context_group(size)
    forget_resources(group)
    with mock.patch.multiple(torch.cuda, Stream=mock.DEFAULT, synchronize=mock.DEFAULT):
        pool = "no memory here" if rank // 2 else SymmetricPool(ContextGroup(), torch.device("cpu"), 1)
        with (
            mock.patch("hf_burst.ring.resources.open_pool", return_value=pool),
            pytest.raises(ConfigError, match=r"'symmetric'. cannot be had: no memory here. Take 'auto'"),
            resources_of(group).messages(torch.device("cpu"), "symmetric", 2),
        ):
            pass
        forget_resources(group)
    return "raised"


def test_symmetric_memory_that_one_host_lacks_is_refused_on_all(ranks):
    assert ranks(4).run(refuse_on_one_host) == ["raised"] * 4


def make_and_forget(rank: int, size: int) -> list[int]:
    """How many process groups there are, each time that those of hosts were made, used and ended."""
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)  # ranks know of different numbers of groups
    counts = []
    for _ in range(3):
        attend(rank, size, Case(((0, 41),), ranks_per_host=2))
        forget_resources(context_group(size))
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_groups_of_hosts_are_made_anew_and_leave_nothing(ranks):
    for counts in ranks(4).run(make_and_forget):
        assert len(set(counts)) == 1
