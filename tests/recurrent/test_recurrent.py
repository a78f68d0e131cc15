"""Layers with a state over shards: beside one process that goes through every document token by token, in fp64."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_burst.plan import Segments
from hf_burst.ranks.group import ContextGroup
from hf_burst.ranks.layout import SequenceLayout
from hf_burst.recurrent import (
    Rule,
    Shards,
    causal_convolution,
    delta,
    delta_rule_by_heads,
    delta_rule_by_states,
    delta_rule_in_two_passes,
    halo,
    own_heads,
    pieces,
    scan_by_channels,
    scan_by_states,
)
from hf_burst.recurrent.fla import _FlaKernels
from hf_burst.recurrent.states import incoming_states
from tests.support.delta_steps import DeltaSteps, token_by_token
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
HEADS, KEYS, WIDTH, STATE, REACH = 4, 5, 3, 6, 3


@dataclass(frozen=True)
class Case:
    """A batch, and how it is cut."""

    documents: tuple[tuple[int, ...], ...]
    chunking: str | tuple[int, ...] = "balanced"
    parents: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = torch.float64
    uneven: bool = False  # whether states are forgotten at once by some tokens, and last for others


CASES = {
    "one document": Case(((0, 53),)),
    "zigzag": Case(((0, 47),), "zigzag"),
    "contiguous": Case(((0, 41),), "contiguous"),
    "documents": Case(((0, 1, 2, 5, 7, 18, 31, 32, 53),)),
    "whole documents": Case(((0, 1, 2, 5, 7, 18, 31, 32, 53),), "documents"),
    "ends at the edges of chunks": Case(((0, 12, 24, 36, 48),), "contiguous"),
    "rows": Case(((0, 43), (0, 11, 43), (0, 1, 2, 3, 43)), "zigzag"),
    "chunks shorter than the halo": Case(((0, 24),), (0, 1, 2, 3) * 3),
    "endings": Case(((0, 17, 26, 27, 43),), "zigzag", ((-1, 0, 0, 0),)),
    "a tree": Case(((0, 11, 12, 14, 23, 29, 37, 41),), "contiguous", ((-1, 0, 1, 2, 0, -1, 5),)),
    "rows with endings": Case(((0, 20, 24), (0, 1, 24)), (0, 1, 2, 3) * 2, ((-1, 0), (-1, 0))),
}


def scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    """The scan of Mamba2, of a batch of sequences."""
    repeats, outputs = x.shape[2] // b.shape[2], []
    b, c = (tensor.repeat_interleave(repeats, dim=2) for tensor in (b, c))
    state = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1])
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * a).exp()[..., None, None]
        state = state + torch.einsum("bhp,bhn->bhpn", x[:, t] * dt[:, t, :, None], b[:, t])
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, c[:, t]))
    return torch.stack(outputs, dim=1)


def selective_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    """The scan of Mamba1, of a batch of sequences `(batch, tokens, channels)`."""
    state, outputs = x.new_zeros(x.shape[0], x.shape[2], b.shape[-1]), []
    for t in range(x.shape[1]):
        state = state * (dt[:, t, :, None] * a).exp() + (x * dt)[:, t, :, None] * b[:, t, None]
        outputs.append((state * c[:, t, None]).sum(-1))
    return torch.stack(outputs, dim=1)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """A causal convolution of each channel: `(batch, channels, tokens)`."""
    return functional.conv1d(functional.pad(x, (REACH, 0)), weight[:, None], groups=x.shape[1])


def delta_rule(
    rows: Sequence[Tensor], states: Tensor | None, bounds: Tensor | None, ends: bool
) -> tuple[Tensor, Tensor | None]:
    """The delta rule as a kernel does it: of a batch, or of a row of several pieces."""
    keys, values = rows[1], rows[2]
    pieces = len(keys) if bounds is None else len(bounds) - 1
    if states is None:
        states = values.new_zeros(pieces, *values.shape[2:3], keys.shape[-1], values.shape[-1])
    if bounds is None:
        out, last = token_by_token(*rows, states)
        return out, last if ends else None
    parts = [
        token_by_token(*(row[:, start:stop] for row in rows), state[None])
        for (start, stop), state in zip(pairwise(bounds.tolist()), states, strict=True)
    ]
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([last for _, last in parts]) if ends else None


def make(case: Case) -> dict[str, Tensor]:
    """The tensors of a whole batch; the same on every rank."""
    torch.manual_seed(0)
    rows, tokens = len(case.documents), case.documents[0][-1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, dtype=torch.float64)

    keys = functional.normalize(normal(HEADS // 2, KEYS), dim=-1)
    tensors = {
        "q": normal(HEADS // 2, KEYS),
        "k": keys,
        "v": normal(HEADS, WIDTH),
        "g": -0.2 * normal(HEADS).exp(),
        "channel g": -0.2 * normal(HEADS, KEYS).exp(),
        "beta": normal(HEADS).sigmoid(),
        "x": normal(HEADS, WIDTH),
        "dt": normal(HEADS).exp(),
        "b": normal(2, STATE),
        "c": normal(2, STATE),
        "channels": normal(HEADS + 1),
        "channel dt": normal(HEADS + 1).exp(),
        "weight": torch.randn(HEADS, REACH + 1, dtype=torch.float64),
        "a": -torch.rand(HEADS + 1, STATE, dtype=torch.float64),
    }
    if case.uneven:
        rates = torch.tensor([0.02, 30.0]).repeat_interleave(16).repeat(tokens)[:tokens]
        for name in ("g", "channel g", "dt", "channel dt"):
            tensors[name] *= rates.view(-1, *[1] * (tensors[name].ndim - 2))
    return {name: tensor.float().to(case.dtype) for name, tensor in tensors.items()}


NAMES = {
    "convolution": ("x", "weight"),
    "gated delta rule": ("q", "k", "v", "g", "beta"),
    "gated delta rule, heads exchanged": ("q", "k", "v", "g", "beta"),
    "gated delta rule, packed kernel": ("q", "k", "v", "g", "beta"),
    "gated delta rule, two passes": ("q", "k", "v", "g", "beta"),
    "Kimi delta attention": ("q", "k", "v", "channel g", "beta"),
    "Mamba2": ("x", "dt", "b", "c", "a"),
    "Mamba2, heads exchanged": ("x", "dt", "b", "c", "a"),
    "Mamba1": ("channels", "channel dt", "b", "c", "a"),
}
PARAMETERS = ("weight", "a")


def whole(kind: str, *tensors: Tensor) -> Tensor:
    """What one process computes for one document, `(1, tokens, ...)`."""
    if kind == "convolution":
        x, weight = tensors
        return convolve(x[..., 0].transpose(1, 2), weight).transpose(1, 2)
    if kind == "Mamba1":
        x, dt, b, c, a = tensors
        return selective_scan(x, dt, b[:, :, 0], c[:, :, 0], a)
    if kind.startswith("Mamba2"):
        return scan(*tensors[:4], tensors[4][:HEADS, 0])
    state = tensors[2].new_zeros(1, HEADS, KEYS, WIDTH)
    return token_by_token(*tensors, state)[0]


def sharded(kind: str, segments: Segments, group: ContextGroup, *tensors: Tensor) -> Tensor:
    """What a rank computes for its tokens."""
    shards = Shards(segments, group)
    if kind == "convolution":
        x, weight = tensors
        channels = x[..., 0].transpose(1, 2)
        out = causal_convolution(lambda laid: convolve(laid, weight), channels, REACH, shards)
        return out.transpose(1, 2)
    if kind == "Mamba1":
        x, dt, b, c, a = tensors
        own = own_heads(a, group)
        rule = Rule(lambda rows, *_: (selective_scan(*(row.flatten(2) for row in rows), own), None), packed=False)
        out = scan_by_channels(rule, (x, dt), (b[:, :, 0], c[:, :, 0]), shards)
        return out
    if kind.startswith("Mamba2"):
        x, dt, b, c, a = tensors
        decay = a[:HEADS, 0]
        if kind == "Mamba2":
            rule = Rule(lambda rows, *_: (scan(*rows, decay), None), packed=False)
            return scan_by_states(rule, (x, dt, b, c), dt, decay, shards)
        b, c = (tensor.repeat_interleave(2, dim=2) for tensor in (b, c))
        own = own_heads(decay, group)
        rule = Rule(lambda rows, *_: (scan(*rows, own), None), packed=False)
        return scan_by_channels(rule, (x, dt, b, c), (), shards)
    rule = Rule(delta_rule, packed=kind.endswith("packed kernel"))
    if kind.endswith("exchanged"):
        return delta_rule_by_heads(rule, tensors, shards)
    if kind.endswith("two passes"):
        return delta_rule_in_two_passes(rule, DeltaSteps(), tensors, shards)
    return delta_rule_by_states(rule, tensors, shards)


def compute(rank: int, size: int, kind: str, case: Case) -> list[Tensor]:
    """The output of this rank, and the gradients of what went in."""
    layout = SequenceLayout.for_batch(case.documents, size, case.chunking, parents=case.parents)
    leaves = {name: tensor.requires_grad_() for name, tensor in make(case).items() if name in NAMES[kind]}
    inputs = [leaves[name] if name in PARAMETERS else layout.shard(leaves[name], rank) for name in NAMES[kind]]
    group = ContextGroup.from_mesh(None) if size > 1 else ContextGroup()
    out = sharded(kind, layout.segments, group, *inputs)
    (out * layout.shard(weights_of(kind, case), rank)).sum().backward()
    return [out.detach(), *(leaves[name].grad for name in NAMES[kind])]


def weights_of(kind: str, case: Case) -> Tensor:
    """What the sum of the outputs is weighted by."""
    torch.manual_seed(1)
    rows, tokens = len(case.documents), case.documents[0][-1]
    shape = {"convolution": (HEADS,), "Mamba1": (HEADS + 1,)}.get(kind, (HEADS, WIDTH))
    return torch.randn(rows, tokens, *shape).to(case.dtype)


WHOLE = [name for name, case in CASES.items() if not case.parents]
FORKED = [name for name, case in CASES.items() if case.parents]
# rules that begin with no state know nothing of forks
SIMILAR = {f"gated delta rule, {how}" for how in ("heads exchanged", "packed kernel", "two passes")}
FORKING = [kind for kind in NAMES if kind not in ("Mamba1", "Mamba2, heads exchanged")]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.full] * ((number + place) % 3 > 0))
        for number, kind in enumerate(NAMES)
        for place, name in enumerate(WHOLE)
    ],
)
def test_states_pass_from_rank_to_rank(ranks: Ranks, kind: str, name: str) -> None:
    compare(ranks, kind, CASES[name])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.full] * (kind in SIMILAR or (number + place) % 2 > 0))
        for number, kind in enumerate(FORKING)
        for place, name in enumerate(FORKED)
    ],
)
def test_states_fork_into_endings(ranks: Ranks, kind: str, name: str) -> None:
    compare(ranks, kind, CASES[name])


def compute_with_one_heir(rank: int, size: int, kind: str, case: Case) -> list[Tensor]:
    """As if the gradient of a state came from the last of its endings alone."""

    def alone(*arguments: Any) -> Any:
        states, slots = incoming_states(*arguments)
        last = max(states, default=0)
        return {index: state if index == last else state.detach() for index, state in states.items()}, slots

    with mock.patch.object(delta, "incoming_states", alone):
        return compute(rank, size, kind, case)


def test_a_lost_gradient_of_a_fork_is_noticed(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="not close"):
        compare(ranks, "gated delta rule", CASES["endings"], compute_with_one_heir)


def text_of(row: tuple[int, ...], parents: tuple[int, ...], document: int) -> list[int]:
    """The tokens of a text, from its first document on."""
    tokens = list[int]()
    while document >= 0:
        tokens = [*range(row[document], row[document + 1]), *tokens]
        document = parents[document] if parents else -1
    return tokens


def compare(ranks: Ranks, kind: str, case: Case, compute: Callable[..., Any] = compute) -> None:
    """Outputs and gradients of 1 to 4 ranks, beside those of one process that holds all tokens."""
    expected, *gradients = alone(kind, case)
    for size in (4,) if isinstance(case.chunking, tuple) else (1, 2, 3, 4):
        layout = SequenceLayout.for_batch(case.documents, size, case.chunking, parents=case.parents)
        results = ranks(size).run(compute, kind, case) if size > 1 else [compute(0, 1, kind, case)]
        output = layout.unshard([out for out, *_ in results])
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)
        for place, gradient in enumerate(gradients, start=1):
            total = sum(result[place] for result in results)
            torch.testing.assert_close(total, gradient, rtol=1e-9, atol=1e-10)


def alone(kind: str, case: Case) -> list[Tensor]:
    """The output of one process that holds all tokens, and the gradients of what went in."""
    leaves = {name: tensor.requires_grad_() for name, tensor in make(case).items()}
    rows = []
    for row, bounds in enumerate(case.documents):
        documents = []
        parents = case.parents[row] if case.parents else ()
        for document, (start, stop) in enumerate(pairwise(bounds)):
            text = text_of(bounds, parents, document)
            own = [leaves[n] if n in PARAMETERS else leaves[n][row : row + 1, text] for n in NAMES[kind]]
            documents.append(whole(kind, *own)[:, start - stop :])
        rows.append(torch.cat(documents, dim=1))
    expected = torch.cat(rows)
    (expected * weights_of(kind, case)).sum().backward()
    return [expected.detach(), *(leaves[name].grad for name in NAMES[kind])]


IN_FP32 = {
    "one document": Case(((0, 211),), "contiguous", dtype=torch.float32, uneven=True),
    "documents": Case(((0, 1, 8, 150, 211),), "zigzag", dtype=torch.float32, uneven=True),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.full] * (kind in SIMILAR or (number + place) % 2 > 0))
        for number, kind in enumerate(NAMES)
        for place, name in enumerate(IN_FP32)
    ],
)
def test_errors_in_fp32_are_about_those_of_one_process(ranks: Ranks, kind: str, name: str) -> None:
    """Beside fp64, also where the logarithms of decays add up to thousands: their differences would have no digits
    left."""
    case = IN_FP32[name]
    exact, single = alone(kind, replace(case, dtype=torch.float64)), alone(kind, case)
    for size in (1, 2, 3):
        layout = SequenceLayout.for_batch(case.documents, size, case.chunking)
        results = ranks(size).run(compute, kind, case) if size > 1 else [compute(0, 1, kind, case)]
        output = layout.unshard([out for out, *_ in results])
        found = [output, *(sum(own) for own in list(zip(*results, strict=True))[1:])]
        for wanted, one, own in zip(exact, single, found, strict=True):
            errors = [float((tensor - wanted).norm() / wanted.norm()) for tensor in (one, own)]
            assert errors[1] <= 2 * errors[0] + 1e-6, size


def test_edges_are_made_once_for_a_batch() -> None:
    """Also by an evaluation, whose tensors no training could save; they go with the batch."""
    segments = SequenceLayout.for_batch([(0, 3, 4, 9, 20)], 1).segments
    weight, x = torch.randn(HEADS, REACH + 1).double(), torch.randn(1, HEADS, 20).double()

    def convolution(segments: Segments) -> Tensor:
        return causal_convolution(lambda laid: convolve(laid, weight), x, REACH, Shards(segments, ContextGroup()))

    with mock.patch.object(halo, "from_host", wraps=halo.from_host) as made:
        with torch.inference_mode():
            evaluated = convolution(segments)
        x.requires_grad_()
        trained = convolution(segments)
        trained.sum().backward()
        assert made.call_count == 6, "kinds of indices"
    torch.testing.assert_close(evaluated.clone(), trained.detach())
    edges = weakref.ref(pieces.made_once(segments, halo._edges, x.device, 0, REACH))
    assert edges() is not None
    del segments
    assert edges() is None


def laid_by_two_layers(kind: str) -> int:
    """How many tensors of numbers two layers lay on the device for a batch of documents."""
    segments = SequenceLayout.for_batch([(0, 3, 4, 9, 20)], 1).segments
    tensors = make(Case(((0, 3, 4, 9, 20),)))
    inputs = [tensors[name] for name in NAMES[kind]]
    made = mock.Mock(wraps=pieces.from_host)
    with mock.patch.object(pieces, "from_host", made):
        for _ in range(2):
            sharded(kind, segments, ContextGroup(), *inputs)
    return int(made.call_count)


def test_bounds_are_laid_once_for_a_batch() -> None:
    assert laid_by_two_layers("gated delta rule, packed kernel") == 1


def test_kernels_are_equal_for_what_is_kept() -> None:
    assert _FlaKernels() == _FlaKernels()
    assert hash(_FlaKernels()) == hash(_FlaKernels())


def test_outputs_that_are_changed_later_are_noticed() -> None:
    """Values are replaced in the memory that tanh keeps for its backward pass. Autograd does not mind these, and still
    minds what others do."""
    segments = SequenceLayout.for_batch([(0, 3, 4, 9, 20)], 1).segments
    weight, x = torch.randn(HEADS, REACH + 1).double(), torch.randn(1, HEADS, 20).double().requires_grad_()
    out = causal_convolution(lambda laid: convolve(laid, weight).tanh(), x, REACH, Shards(segments, ContextGroup()))
    parts = [convolve(x[..., start:stop], weight).tanh() for start, stop in ((0, 3), (3, 4), (4, 9), (9, 20))]
    (expected,) = torch.autograd.grad(torch.cat(parts, -1).square().sum(), x)
    (found,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    torch.testing.assert_close(found, expected)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
