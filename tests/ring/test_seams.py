"""Queries and keys that are sharded differently, steps in another order, two transports in one group, and the exchange
of heads as an operation of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_burst.attention import ContextGroup, heads_to_tokens, tokens_to_heads
from hf_burst.config import Schedule
from hf_burst.errors import ShardingError
from hf_burst.kernels import BackwardInputs, KernelRequest, Scores, select_kernel
from hf_burst.plan import Mask, Plan, Sharding, Step, cut, make_plan, make_sharding
from hf_burst.ring import Exchange, Exchanges, HeadSizes, PeerToPeer, ShardedAttention
from hf_burst.ring.exchange import Channel, Pending, Region, Round
from hf_burst.ring.loop import RingAttention, backward, forward
from tests.plan.test_plan import masks_of
from tests.ring.test_ring import context_group, poisoned_memory
from tests.support.oracle import admitted_pairs, softmax_attention
from tests.support.ranks import RankPool
from tests.support.verify import verify_plan

Ranks = Callable[[int], RankPool]
ROTATING = ("kv", "q")
SCALE = 5**-0.5
HEADS = (8, 4)


def part(start: int, stop: int, owners: Sequence[int]) -> Sharding:
    """Tokens `[start, stop)` in chunks of these owners."""
    chunks = cut(stop - start, tuple(owners))
    return Sharding(tuple(start + bound for bound in chunks.boundaries), chunks.owners, chunks.ranks)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Queries and keys of any tokens of a sequence, each with any owners."""
    ranks, length = draw(st.integers(1, 5)), draw(st.integers(10, 40))

    def sharding() -> Sharding:
        owners = draw(
            st.lists(st.integers(0, ranks - 1), max_size=4).flatmap(
                lambda more: st.permutations([*range(ranks), *more])
            )
        )
        start = draw(st.integers(0, length - len(owners)))
        return part(start, draw(st.integers(start + len(owners), length)), owners)

    rows = draw(st.lists(masks_of(length), min_size=1, max_size=2))
    return make_plan(tuple(rows), sharding(), sharding())


def admitted(plan: Plan) -> torch.Tensor:
    """Whether each query sees each key, of the queries and keys that are there: `(rows, queries, keys)`."""
    masks = [admitted_pairs(mask.length, mask.causal, mask.window, mask.documents) for mask in plan.masks]
    return torch.tensor(masks)[:, plan.queries.start : plan.queries.stop, plan.keys.start : plan.keys.stop]


@settings(max_examples=200)
@given(plan=plans())
def test_every_pair_is_computed_once_whoever_holds_queries_and_keys(plan: Plan) -> None:
    pairs = int(admitted(plan).sum())
    for rotating in ROTATING:
        assert verify_plan(plan, rotating) == pairs
        assert verify_plan(reordered(plan), rotating) == pairs


class Reordered(Plan):
    """A plan whose blocks come the other way round: the next rank's first."""

    def steps(self, rank: int, rotating: str, crossing: int = 0) -> tuple[Step, ...]:
        turned = [replace(step, order=-step.order % self.ranks) for step in super().steps(rank, rotating)]
        return tuple(sorted(turned, key=lambda step: step.order))


@cache
def reordered(plan: Plan) -> Reordered:
    return Reordered(plan.masks, plan.queries, plan.keys)


def tokens_of(sharding: Sharding, rank: int) -> torch.Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in sharding.runs(rank)])


def whole_tensors(plan: Plan, seed: int = 0) -> dict[str, torch.Tensor]:
    """q, dout and dlse of the queries that are there, and k and v of the keys, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    rows, queries, keys = len(plan.masks), plan.queries.length, plan.keys.length
    shapes = {
        "q": (rows, queries, HEADS[0], 5),
        "k": (rows, keys, HEADS[1], 5),
        "v": (rows, keys, HEADS[1], 5),
        "dout": (rows, queries, HEADS[0], 5),
        "dlse": (rows, queries, HEADS[0]),
    }
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    tensors["dlse"][~admitted(plan).any(-1)] = 0  # the log-sum-exp of nothing has no gradient
    return tensors


def local_tensors(plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    queries, keys = (tokens_of(side, rank) - side.start for side in (plan.queries, plan.keys))
    return {name: tensor[:, keys if name in "kv" else queries] for name, tensor in whole_tensors(plan).items()}


def delta_of(local: dict[str, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    return (local["dout"] * out).sum(-1) - local["dlse"]


def run_plan(rank: int, size: int, plan: Plan, rotating: str, transports: bool) -> list:
    """Results of one rank by the loop of a ring, through one transport or two."""
    kernel = select_kernel("cpu_flash", KernelRequest("cpu", torch.float64, 5, 5))
    attention = RingAttention(plan, rank, tuple(range(size)), kernel, Scores(SCALE))
    local = local_tensors(plan, rank)
    exchange = TwoTransports(rank, size) if transports else PeerToPeer(context_group(size), torch.device("cpu"))
    exchanges = Exchanges(exchange, exchange)
    with poisoned_memory():
        out, lse = forward(attention, exchanges, local["q"], local["k"], local["v"])
        inputs = BackwardInputs(
            dout=local["dout"], q=local["q"], k=local["k"], v=local["v"], out=None, lse=lse, delta=delta_of(local, out)
        )
        gradients = backward(attention, exchanges, rotating, inputs)
    return [tensor.numpy() for tensor in (out, lse, *gradients)]


def run_schedule(rank: int, size: int, plan: Plan, name: str) -> list:
    """Results of one rank by a schedule, products and the exchange of heads among them."""
    attention = ShardedAttention(
        schedule=Schedule.parse(name, size),
        group=context_group(size),
        masks=plan.masks,
        queries=plan.queries,
        keys=plan.keys,
        kernel=select_kernel("cpu_flash", KernelRequest("cpu", torch.float64, 5, 5)),
        scores=Scores(SCALE),
    )
    local = local_tensors(plan, rank)
    q, k, v = local["q"], local["k"], local["v"]
    exchange = PeerToPeer(attention.group, torch.device("cpu"))
    exchanges = Exchanges(exchange, exchange)
    with poisoned_memory():
        out, lse, kept = attention.forward(exchanges, q, k, v)
        sizes = HeadSizes(*HEADS, 5, 5)
        saved = kept or [q, k, v]
        gradients = attention.backward(exchanges, sizes, saved, local["dout"], None, lse, delta_of(local, out))
    return [tensor.numpy() for tensor in (out, lse, *gradients)]


def assert_exact(plan: Plan, every: list[list]) -> None:
    """The results of all ranks are those of one process that holds all queries and keys."""
    whole = whole_tensors(plan)
    inputs = [whole[name].requires_grad_() for name in "qkv"]
    out, lse = softmax_attention(*inputs, admitted(plan), SCALE)
    torch.autograd.backward([out, lse], [whole["dout"], whole["dlse"]])
    wanted = [out.detach(), lse.detach(), *(tensor.grad for tensor in inputs)]
    for rank, results in enumerate(every):
        queries, keys = (tokens_of(side, rank) - side.start for side in (plan.queries, plan.keys))
        sides = (queries, queries, queries, keys, keys)
        for name, result, want, rows in zip(("out", "lse", "dq", "dk", "dv"), results, wanted, sides, strict=True):
            torch.testing.assert_close(torch.from_numpy(result), want[:, rows], rtol=1e-10, atol=1e-10, msg=name)


def some_plans(size: int) -> list[Plan]:
    """A continued sequence, keys that are sharded otherwise, keys that some queries do not see, rows that differ."""
    ranks = range(size)
    masks = (Mask(43), Mask(43, True, 6, (0, 1, 20, 43)), Mask(43, False, None, (0, 11, 30, 43)))
    return [
        make_plan(masks[:1], part(29, 43, ranks), make_sharding(43, size)),
        make_plan(masks, make_sharding(43, size), make_sharding(43, size, "contiguous")),
        make_plan(masks[1:], part(5, 40, [*ranks, *reversed(ranks), *ranks]), part(13, 31, [*reversed(ranks)])),
    ]


@pytest.mark.parametrize("transports", [False, True], ids=["one transport", "two transports"])
@pytest.mark.parametrize("rotating", ROTATING)
@pytest.mark.parametrize(
    "size", [1, pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)]
)
def test_a_ring_over_two_shardings_is_exact(ranks: Ranks, size: int, rotating: str, transports: bool) -> None:
    if transports and size == 1:
        pytest.skip("one rank reaches nobody")
    for plan in some_plans(size):
        for ordered in (plan, reordered(plan)) if size > 1 else (plan,):
            arguments = (ordered, rotating, transports)
            every = [run_plan(0, 1, *arguments)] if size == 1 else ranks(size).run(run_plan, *arguments)
            assert_exact(plan, every)


@pytest.mark.parametrize("size", [2, 4])
def test_every_schedule_takes_keys_that_are_sharded_otherwise(ranks: Ranks, size: int) -> None:
    masks = (Mask(48), Mask(48, True, 6, (0, 1, 20, 48)))
    plan = make_plan(masks, make_sharding(48, size), make_sharding(48, size, "contiguous"))
    products = ["ulysses_2+kv_ring", "ulysses_2+burst"] if size == 4 else []
    for name in ("kv_ring", "burst", "ulysses", *products):
        assert_exact(plan, ranks(size).run(run_schedule, plan, name))


@dataclass
class Both:
    """Messages of two transports under way."""

    pending: list[Pending]
    into: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        for pending in self.pending:
            pending.wait()
        return self.into


@dataclass
class TwoTransports(Exchange):
    """An exchange that reaches even distances by one transport and odd ones by another, each with a process group of
    its own: it splits every round by its peers."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        near = frozenset(peer for peer in range(self.size) if (peer - self.rank) % 2 == 0)
        self.peers = (near, frozenset(range(self.size)) - near)
        self.transports = [PeerToPeer(group, torch.device("cpu")) for group in two_groups(self.size)]

    def fetch(
        self,
        channel: Channel,
        this_round: Round,
        tensors: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor] | None = None,
        during_kernel: bool = False,
    ) -> Both:
        into = this_round.targets(into, torch.device("cpu"))
        pending = []
        for transport, peers in zip(self.transports, self.peers, strict=True):
            chosen = [
                (target, part) for target, part in zip(into, this_round.incoming, strict=True) if part.peer in peers
            ]
            outgoing = tuple((peer, region) for peer, region in this_round.outgoing if peer in peers)
            incoming = tuple(
                part._replace(target=Region(index, (0, target.shape[1]))) for index, (target, part) in enumerate(chosen)
            )
            part = replace(this_round, outgoing=outgoing, incoming=incoming)
            pending.append(transport.fetch(channel, part, tensors, [target for target, _ in chosen]))
        return Both(pending, into)


@cache
def two_groups(size: int) -> list[ContextGroup]:
    return [ContextGroup.from_mesh(dist.new_group(list(range(size)))) for _ in range(2)]


def exchange_heads(rank: int, size: int, owners: tuple[int, ...], length: int) -> list:
    """A layer that treats each head by itself, in the sequence's order, and its gradient."""
    sharding, group = cut(length, owners), context_group(size)
    x, dy = layer_inputs(length)
    own = tokens_of(sharding, rank)
    leaf = x[:, own].requires_grad_()
    scalars = leaf[..., 1:2].float()
    whole, of_scalars = tokens_to_heads([leaf, scalars], sharding, group)
    y, doubled = heads_to_tokens([layer(whole), of_scalars * 2], sharding, group)
    assert torch.equal(doubled, 2 * scalars), "each in its own dtype"
    y.backward(dy[:, own])
    twice = torch.autograd.grad(tokens_to_heads([leaf], sharding, group)[0].square().sum(), leaf, create_graph=True)[0]
    assert torch.equal(twice, 2 * leaf), "there and back again"
    return [y.detach().numpy(), leaf.grad.numpy()]


def layer(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1) * x


def layer_inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, length, 12, 3, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_exchange_of_heads_is_differentiable_over_any_owners(ranks: Ranks, size: int) -> None:
    for owners, length in (
        ((*range(size), *reversed(range(size))), 29),
        (tuple(range(size)), 8 * size),
        ((0, *range(size), *range(size), 0), 37),
    ):
        arguments = (owners, length)
        every = [exchange_heads(0, 1, *arguments)] if size == 1 else ranks(size).run(exchange_heads, *arguments)
        x, dy = layer_inputs(length)
        y = layer(x.requires_grad_())
        y.backward(dy)
        for rank, results in enumerate(every):
            rows = tokens_of(cut(length, owners), rank)
            for result, want in zip(results, (y.detach(), x.grad), strict=True):
                torch.testing.assert_close(torch.from_numpy(result), want[:, rows], rtol=1e-12, atol=1e-12)


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    sharding, group = make_sharding(12, 2), ContextGroup(0, 2, "nowhere")
    with pytest.raises(ShardingError, match="that the ranks divide"):
        tokens_to_heads([torch.zeros(1, 6, 3, 2)], sharding, group)
    with pytest.raises(ShardingError, match="does not fit 12 tokens over 2 ranks"):
        tokens_to_heads([torch.zeros(1, 5, 4, 2)], sharding, group)
    with pytest.raises(ShardingError, match="does not fit 12 tokens over 2 ranks"):
        heads_to_tokens([torch.zeros(1, 6, 4, 2)], sharding, group)
    with pytest.raises(ShardingError, match="7 tensors were given to be exchanged at once; give 1 to 6"):
        tokens_to_heads([torch.zeros(1, 6, 4, 2)] * 7, sharding, group)
