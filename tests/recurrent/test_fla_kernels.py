"""The kernels of flash-linear-attention over ranks, interpreted by Triton on CPUs, beside a delta rule token by token.

The package is fetched into a folder of its own: where Transformers finds it, it calls these kernels on CPUs, too.
"""

import builtins
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, normalize, silu

from hf_burst.config import Chunking
from hf_burst.hf.models.gated_norm import ACTIVATIONS
from hf_burst.ranks.group import ContextGroup
from hf_burst.ranks.layout import SequenceLayout
from hf_burst.recurrent import (
    Rule,
    Shards,
    causal_convolution,
    delta_rule_by_states,
    delta_rule_in_two_passes,
    fla_convolution,
    fla_gated_norm,
    unit_norm,
)
from hf_burst.recurrent.fla import _FlaKernels
from tests.support.delta_steps import token_by_token
from tests.support.ranks import RankPool

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
Ranks = Callable[[int], RankPool]
Case = tuple[tuple[tuple[int, ...], ...], Chunking]
HEADS, KEYS, CHUNK = 2, 64, 64
CASES: dict[str, Case] = {
    "zigzag": (((0, 301),), "zigzag"),
    "contiguous": (((0, 301),), "contiguous"),
    "packed": (((0, 1, 65, 66, 130, 230, 401),), "balanced"),
    "rows": (((0, 211), (0, 120, 211)), "zigzag"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    if torch.cuda.is_available() or find_spec("triton") is None:
        pytest.skip("needs Triton and no GPU: tests/gpu/test_gpu_recurrent.py runs on GPUs")
    fetched = tmp_path_factory.mktemp("fla")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(fetched)]
    done = subprocess.run([*command, "fla-core==0.6.0", "einops==0.8.2"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"flash-linear-attention cannot be fetched: {done.stderr[-300:]}")
    return str(fetched)


class Index(int):
    """A number that an interpreted loop counts with. Compiled ones have this method."""

    def to(self, dtype: Any) -> "Index":
        return self


def interpret(folder: str) -> None:
    """Makes the package of a folder run on CPUs, in this process. Of each kernel the first variant runs."""
    if folder not in sys.path:
        sys.path.append(folder)
        from triton.runtime.autotuner import Autotuner

        always: Any = Autotuner
        always._bench = lambda self, *args, config, **meta: [0.0]
        always.check_disk_cache = lambda self, key, configs, bench: bench()
        loops: Any = importlib.import_module("fla.ops.common.chunk_delta_h")
        loops.range = lambda *bounds: map(Index, builtins.range(*bounds))


def rule_inputs(documents: tuple[tuple[int, ...], ...], channels: bool) -> tuple[list[Tensor], Tensor]:
    """Queries, keys, values, decays and beta in fp32, and the gradient of the output. Decays are those of channels, or
    of heads, of which two share their keys."""
    generator, heads = torch.Generator().manual_seed(0), HEADS if channels else 2 * HEADS

    def normal(*shape: int) -> Tensor:
        return torch.randn(len(documents), documents[0][-1], *shape, generator=generator)

    decay = -normal(heads, *[KEYS] * channels).exp() / 100
    inputs = [normal(HEADS, KEYS), normal(HEADS, KEYS), normal(heads, KEYS), decay, normal(heads).sigmoid()]
    return inputs, normal(heads, KEYS)


def of_one_rank(rank: int, size: int, folder: str, case: Case, channels: bool) -> list[Tensor]:
    """The output of this rank's tokens, and the gradients of what went in."""
    interpret(folder)
    package, name = ("kda", "chunk_kda") if channels else ("gated_delta_rule", "chunk_gated_delta_rule")
    chunked = getattr(importlib.import_module(f"fla.ops.{package}"), name)

    def rule(rows: Any, states: Any, bounds: Any, ends: bool) -> Any:
        q, k, v, g, beta = rows
        begun = {"initial_state": states, "output_final_state": ends, "cu_seqlens": bounds}
        return chunked(q, k, v, g=g, beta=beta, **begun)

    layout = SequenceLayout.for_batch(*case[:1], size, case[1])
    inputs, dout = rule_inputs(case[0], channels)
    q, k, *rest = own = [layout.shard(tensor, rank).requires_grad_() for tensor in inputs]
    rows = (unit_norm(q), unit_norm(k), *rest)
    shards = Shards(layout.segments, ContextGroup.from_mesh(None))
    if channels:
        out = delta_rule_by_states(Rule(rule, packed=True), rows, shards)
    else:
        out = delta_rule_in_two_passes(Rule(rule, packed=True), _FlaKernels(), rows, shards)
    gradients = torch.autograd.grad(out, own, layout.shard(dout, rank))
    return [tensor.detach() for tensor in (out, *gradients)]


def token_after_token(case: Case, channels: bool) -> list[Tensor]:
    """The same of whole documents, in fp64."""
    inputs, dout = rule_inputs(case[0], channels)
    leaves = [tensor.double().requires_grad_() for tensor in inputs]
    rows, state = list[Tensor](), torch.zeros(1, leaves[2].shape[2], KEYS, KEYS, dtype=torch.float64)
    for row, bounds in enumerate(case[0]):
        parts = [[leaf[row : row + 1, start:stop] for leaf in leaves] for start, stop in pairwise(bounds)]
        of_rule = [(normalize(q, dim=-1) * KEYS**-0.5, normalize(k, dim=-1), *rest) for q, k, *rest in parts]
        rows.append(torch.cat([token_by_token(*part, state)[0] for part in of_rule], dim=1))
    out = torch.cat(rows)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


@pytest.mark.parametrize("channels", [False, True], ids=["gated DeltaNet in two passes", "KDA by columns"])
@pytest.mark.parametrize("name", CASES)
def test_states_pass_by_their_kernels(ranks: Ranks, folder: str, name: str, channels: bool) -> None:
    exact, case = token_after_token(CASES[name], channels), CASES[name]
    for size in (2, 3):
        layout = SequenceLayout.for_batch(*case[:1], size, case[1])
        shards = ranks(size).run(of_one_rank, folder, case, channels, timeout=600)
        for wanted, *parts in zip(exact, *shards, strict=True):
            found = layout.unshard(parts).double()
            assert (found - wanted).norm() <= 3e-6 * wanted.norm()


def convolved(rank: int, size: int, folder: str, case: Case) -> list[Tensor]:
    """The convolution of this rank's tokens, and the gradients of these and of the weight."""
    interpret(folder)
    layout, (x, weight, bias, dout) = SequenceLayout.for_batch(*case[:1], size, case[1]), channels_of(case)
    own, weight = layout.shard(x, rank).requires_grad_(), weight.requires_grad_()

    def convolve(laid: Tensor) -> Tensor:
        return fla_convolution(laid, weight, bias, "silu")

    shards = Shards(layout.segments, ContextGroup.from_mesh(None))
    out = causal_convolution(convolve, own.transpose(1, 2), 3, shards).transpose(1, 2)
    dx, dweight = torch.autograd.grad(out, (own, weight), layout.shard(dout, rank))
    return [out.detach(), dx, dweight]


def channels_of(case: Case) -> list[Tensor]:
    """Tokens, the weight and bias of 20 channels, and the gradient of what is convolved."""
    generator, tokens = torch.Generator().manual_seed(0), (len(case[0]), case[0][0][-1], 20)
    return [torch.randn(shape, generator=generator) for shape in (tokens, (20, 4), (20,), tokens)]


@pytest.mark.parametrize("name", CASES)
def test_convolutions_by_their_kernel(ranks: Ranks, folder: str, name: str) -> None:
    case = CASES[name]
    x, weight, bias, dout = (tensor.double() for tensor in channels_of(case))
    leaves = x.requires_grad_(), weight.requires_grad_()
    parts = [
        silu(conv1d(x[row : row + 1, start:stop].mT, weight[:, None], bias, padding=3, groups=20)[..., : stop - start])
        for row, bounds in enumerate(case[0])
        for start, stop in pairwise(bounds)
    ]
    out = torch.cat([part.mT.flatten(0, 1) for part in parts]).view_as(x)
    wanted = [out, *torch.autograd.grad(out, leaves, dout)]
    for size in (2, 3):
        layout = SequenceLayout.for_batch(*case[:1], size, case[1])
        *whole, dweights = zip(*ranks(size).run(convolved, folder, case, timeout=600), strict=True)
        found = [*(layout.unshard(list(parts)) for parts in whole), sum(dweights)]
        for mine, exact in zip(found, wanted, strict=True):
            assert (mine.double() - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("how", ["passes", "packed", "whole", "channels"])
def test_kernels_of_a_layer_are_compiled_ahead(folder: str, tmp_path: Path, how: str) -> None:
    """Of both passes, by Triton's own classes without a GPU: nothing is left for a call."""
    paths = os.pathsep.join([str(ROOT), folder, os.environ.get("PYTHONPATH", "")])
    more = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tests.support.fla_without_gpu", how]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ahead, launched = True, set[str]()
    for what in json.loads(done.stdout.splitlines()[-1]):
        ahead = what == "ahead" or (ahead and what != "called")
        assert ahead or not what.startswith("compiled"), what
        launched |= set(what.split()[1:2]) if what.startswith("launched") else set()
    assert len(launched) == (16 if how == "channels" else 15)


def questions(rank: int, size: int, folder: str, name: str) -> int:
    """How often kernels ask the device for the chunks of a batch."""
    interpret(folder)
    from fla.ops.utils import index

    asked = mock.Mock(wraps=index._segmented_arange)
    with mock.patch.object(index, "_segmented_arange", asked):
        of_one_rank(rank, size, folder, CASES[name], False)
    return asked.call_count


@pytest.mark.parametrize("name", CASES)
def test_kernels_ask_for_no_chunks_of_pieces_whose_state_passes(ranks: Ranks, folder: str, name: str) -> None:
    """Of documents that one rank holds they ask once."""
    held_by_one = name in ("packed", "rows")
    assert ranks(2).run(questions, folder, name) == [held_by_one, 0]


def laid(rank: int, size: int, folder: str, bounds: list[int]) -> list[bool]:
    """Whether what is laid is what the package makes of the bounds."""
    interpret(folder)
    from fla.ops.utils import prepare_chunk_indices, prepare_chunk_offsets

    found = _FlaKernels().lay(bounds, torch.device("cpu"))
    makers = {"chunk_indices": prepare_chunk_indices, "chunk_offsets": prepare_chunk_offsets}
    wanted = [make(found.for_states["cu_seqlens"], CHUNK) for make in makers.values()]
    pairs = zip([found.for_states[name] for name in makers], wanted, strict=True)
    return [torch.equal(mine, theirs) and mine.dtype == theirs.dtype for mine, theirs in pairs]


@pytest.mark.parametrize("bounds", [[0, 1], [0, 64, 128], [0, 63, 64, 129], [77, 78, 700]])
def test_chunks_are_laid_as_the_package_lays_them(ranks: Ranks, folder: str, bounds: list[int]) -> None:
    assert ranks(2).run(laid, folder, bounds) == [[True, True]] * 2


def normed(rank: int, size: int, folder: str, activation: str) -> list[list[Tensor]]:
    """A gated norm, and its gradients: in fp32, and in bf16 with a weight in fp32, as under autocast."""
    interpret(folder)
    *inputs, weight, dout = gated()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        leaves.append(weight.detach().requires_grad_())
        out = fla_gated_norm(*leaves, 1e-6, activation)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))])
    return found


def gated() -> list[Tensor]:
    """What is normed, partly so small that eps shows, its gate, the weight, and the gradient of the output."""
    generator, shape = torch.Generator().manual_seed(0), (3, 67, 4, 48)
    x, gate, dout = torch.randn(3, *shape, generator=generator)
    x[1] *= 1e-3
    return [x, gate, torch.randn(48, generator=generator), dout]


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norms_by_their_kernel(ranks: Ranks, folder: str, activation: str) -> None:
    *inputs, dout = (tensor.double() for tensor in gated())
    leaves = [tensor.requires_grad_() for tensor in inputs]
    x, gate, weight = leaves
    out = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight * ACTIVATIONS[activation](gate)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    found, rounded = ranks(2).run(normed, folder, activation, timeout=600)[0]
    for own, other, exact in zip(found, rounded, wanted, strict=True):
        assert (own.double() - exact).norm() <= 3e-6 * exact.norm()
        assert (other.double() - exact).norm() <= 1e-2 * exact.norm()
    assert [tensor.dtype for tensor in rounded] == [torch.bfloat16] * 3 + [torch.float32]
