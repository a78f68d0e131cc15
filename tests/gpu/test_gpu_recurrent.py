"""On GPUs: models with recurrent layers over ranks, in bf16, are about as close to fp64 as on one GPU.

Their layers call the kernels of flash-linear-attention, mamba-ssm and causal-conv1d where these are installed, and
torch's functions otherwise.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hf_burst
from hf_burst.check.tiny import Double
from hf_burst.config import Chunking
from hf_burst.hf.models.gated_norm import ACTIVATIONS
from hf_burst.hf.parts import gated_norms
from hf_burst.ranks.group import ContextGroup
from hf_burst.ranks.layout import SequenceLayout
from hf_burst.recurrent import Rule, Shards, delta_rule_in_two_passes, fla_gated_norm, fla_kernels, unit_norm
from tests.gpu.test_gpu import Ranks, gpus  # noqa: F401
from tests.hf.models.test_recurrent_models import forced
from tests.hf.test_patch import group_mean
from tests.hf.test_wrappers import flat
from tests.support import models
from tests.support.ranks import gpu_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT, PACKAGES = Path(__file__).parents[2], ("fla", "mamba_ssm", "causal_conv1d")
ATTENTION = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
# sizes that kernels for GPUs take, and no routing, which would flip between bf16 and fp64
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **ATTENTION,
        "intermediate_size": 256,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "kimi_linear": {
        **ATTENTION,
        "linear_head_dim": 64,
        "linear_num_heads": 2,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "mlp_layer_types": ["dense"] * 4,
    },
    "lfm2": {**ATTENTION, "intermediate_size": 256},
    "granite": {
        **ATTENTION,
        "mamba_d_state": 16,
        "mamba_d_head": 32,
        "mamba_n_heads": 8,
        "mamba_chunk_size": 64,
        "num_local_experts": 0,
    },
    "zamba": {
        **ATTENTION,
        "attention_hidden_size": 256,
        "attention_head_dim": 128,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
    },
}
# their gradients are small sums of large terms
DECAYS = ("A_log", "dt_bias", "dt_proj_bias", "in_proj_a.weight", "f_b_proj.weight")


def recurrent_model(name: str) -> nn.Module:
    """With heads and channels as kernels for GPUs take them, and states that last."""
    torch.manual_seed(0)
    config = models.make_model(name).config
    for key, value in SIZES[name].items():
        assert hasattr(config, key), key
        setattr(config, key, value)
    torch.manual_seed(0)
    model: nn.Module = type(models.make_model(name))(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("A_log"):
                parameter.fill_(-4)
    return model.train()


@contextmanager
def without_single_tokens() -> Iterator[None]:
    """The first document of a packed batch has two tokens: causal-conv1d 1.7 refuses the layout in which the plain Kimi
    Linear asks for the gradient of a single one."""
    with mock.patch.object(models, "document_lengths", lambda length: [2, 7, length - 21, 12]):
        yield


@without_single_tokens()
def exact_result(name: str, kind: str) -> tuple[float, torch.Tensor]:
    """The loss and all gradients in fp64, by torch's functions on the CPU."""
    with Double():
        model = recurrent_model(name).double()
        loss = models.plain_loss(model, batch_of(name, kind))
        loss.backward()
    return float(loss.detach()), flat([parameter.grad for parameter in model.parameters()])


def without_kernels(name: str, kind: str, folder: Path) -> tuple[float, torch.Tensor]:
    """The same, in a process that finds no packages of kernels: Transformers would call them on CPUs, too."""
    lines = ["import sys", f"sys.modules.update(dict.fromkeys({PACKAGES}))", "import torch"]
    lines += [
        "from tests.gpu.test_gpu_recurrent import exact_result",
        f"torch.save(exact_result({name!r}, {kind!r}), 'out')",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=folder, env=environment, check=True, timeout=300)
    exact: tuple[float, torch.Tensor] = torch.load(folder / "out")
    return exact


def batch_of(name: str, kind: str) -> dict[str, torch.Tensor]:
    """Mamba1 is computed token by token without its kernels."""
    return models.make_batch(kind, 251 if name == "zamba" else 1021)


@without_single_tokens()
def recurrent_errors(
    rank: int, size: int, device: str, name: str, kind: str, dtype: torch.dtype, exact: float, gradients: torch.Tensor
) -> dict[str, tuple[float, float, float]]:
    """Of the loss, of all gradients and of those of decays: on one GPU, and over all of them by each way."""
    place = gpu_of(rank) if device == "cuda" else torch.device(device)
    model, batch = recurrent_model(name).to(place, dtype), batch_of(name, kind)
    batch = {key: batch[key].to(place) for key in batch}
    decays = flat([torch.full_like(own, path.endswith(DECAYS)).cpu() for path, own in model.named_parameters()]).bool()
    assert decays.any() == (name != "lfm2"), "all but convolutions decay, whatever Transformers calls the weights"
    errors = {}
    for way in ("alone", "states", "heads"):
        model.zero_grad()
        if way == "alone":
            loss = models.plain_loss(model, batch)
        else:
            models.patch(model, hf_burst.BurstConfig(chunking="zigzag"))
            with forced(way):
                loss = model(**batch).loss
        loss.backward()
        found = [parameter.grad for parameter in model.parameters()] if way == "alone" else group_mean(model)
        mine = flat([gradient.double().cpu() for gradient in found])
        parts = [(mine[own] - gradients[own], gradients[own]) for own in (slice(None), decays)]
        shares = [float(error.norm() / wanted.norm().clamp_min(1e-30)) for error, wanted in parts]
        errors[way] = abs(float(loss.detach()) - exact), shares[0], shares[1]
        if way != "alone":
            hf_burst.unpatch_model(model)
    return errors


PASSING: dict[str, tuple[tuple[tuple[int, ...], ...], Chunking]] = {
    "zigzag": (((0, 2039),), "zigzag"),
    "contiguous": (((0, 2039),), "contiguous"),
    "packed": (((0, 300, 301, 1000, 1501, 2039),), "balanced"),
    "rows": (((0, 1021), (0, 500, 1021)), "zigzag"),
}


def rule_inputs(documents: tuple[tuple[int, ...], ...]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries, keys, values, decays and beta of a batch, and the gradient of its output; the same on every rank."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(len(documents), documents[0][-1], *shape, generator=generator)

    inputs = [normal(4, 64), normal(4, 64), normal(4, 64), -normal(4).exp() / 100, normal(4).sigmoid()]
    return [tensor if at == 3 else tensor.bfloat16() for at, tensor in enumerate(inputs)], normal(4, 64).bfloat16()


def two_passes(rank: int, size: int, name: str) -> list[torch.Tensor]:
    """The output of this rank's tokens, and the gradients of what went in."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def rule(rows: Any, states: Any, bounds: Any, ends: bool) -> Any:
        q, k, v, g, beta = rows
        return chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=states, output_final_state=ends, cu_seqlens=bounds
        )

    documents, chunking = PASSING[name]
    layout, place = SequenceLayout.for_batch(documents, size, chunking), gpu_of(rank)
    inputs, dout = rule_inputs(documents)
    q, k, *rest = own = [layout.shard(tensor, rank).to(place).requires_grad_() for tensor in inputs]
    kernels = fla_kernels(place, 64)
    assert kernels is not None
    out = delta_rule_in_two_passes(
        Rule(rule, packed=True),
        kernels,
        (unit_norm(q), unit_norm(k), *rest),
        Shards(layout.segments, ContextGroup.from_mesh(None)),
    )
    gradients = torch.autograd.grad(out, own, layout.shard(dout, rank).to(place))
    return [tensor.detach().float().cpu() for tensor in (out, *gradients)]


def one_process(name: str, place: str, dtype: torch.dtype | None, function: Any) -> list[torch.Tensor]:
    """The same, of whole documents. With a dtype all inputs have it."""
    documents, _ = PASSING[name]
    inputs, dout = rule_inputs(documents)
    leaves = [tensor.to(place, dtype).requires_grad_() for tensor in inputs]
    rows = []
    for row, bounds in enumerate(documents):
        parts = [[leaf[row : row + 1, start:stop] for leaf in leaves] for start, stop in pairwise(bounds)]
        outs = [function(*part[:3], g=part[3], beta=part[4], use_qk_l2norm_in_kernel=True)[0] for part in parts]
        rows.append(torch.cat(outs, dim=1))
    out = torch.cat(rows)
    gradients = torch.autograd.grad(out, leaves, dout.to(place, dtype))
    return [tensor.detach().float().cpu() for tensor in (out, *gradients)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_norms_are_as_close_as_those_of_transformers(activation: str) -> None:
    """Outputs and gradients of a kernel, and of Transformers' norm, in bf16, beside fp64. Some rows are so small that
    eps shows."""
    if not gated_norms.fla_compared(torch.device("cuda")):
        pytest.skip("needs flash-linear-attention")
    generator = torch.Generator().manual_seed(0)
    x, gate, dout = torch.randn(3, 4099, 3, 128, generator=generator).cuda().bfloat16()
    x[::7] *= 1e-3
    weight = torch.randn(128, generator=generator).cuda().bfloat16()

    def exact(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        return normed * ACTIVATIONS[activation](gate)

    def transformers(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return (weight * normed.bfloat16() * ACTIVATIONS[activation](gate.float())).bfloat16()

    def all_of(norm: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, gate, weight)]
        out = norm(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    def by_kernel(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fla_gated_norm(x, gate, weight, 1e-6, activation)

    wanted = all_of(exact, torch.float64)
    found, plain = all_of(by_kernel, torch.bfloat16), all_of(transformers, torch.bfloat16)
    for own, other, tensor in zip(found, plain, wanted, strict=True):
        assert own.dtype == torch.bfloat16
        assert (own.double() - tensor).norm() <= 1.2 * (other.double() - tensor).norm()


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("name", PASSING)
def test_two_passes_are_as_close_as_one_gpu(gpus: Ranks, name: str) -> None:  # noqa: F811
    """Twice the error of flash-linear-attention itself at most, against its plain form in fp32."""
    pytest.importorskip("fla")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

    def plain(q: Any, k: Any, v: Any, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool) -> Any:
        q, k = (nn.functional.normalize(tensor, dim=-1) for tensor in (q, k))
        return naive_chunk_gated_delta_rule(q, k, v, g, beta)

    exact = one_process(name, "cpu", torch.float32, plain)
    alone = one_process(name, "cuda", None, chunk_gated_delta_rule)
    layout = SequenceLayout.for_batch(PASSING[name][0], 2, PASSING[name][1])
    shards = gpus(2).run(two_passes, name, timeout=1800)
    for tensors in zip(exact, alone, *shards, strict=True):
        wanted, single = tensors[:2]
        found = layout.unshard(list(tensors[2:]))
        assert (found - wanted).norm() <= 2 * (single - wanted).norm()


@pytest.mark.timeout(2000)  # kernels of flash-linear-attention are tuned for minutes, for every shape
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("name", SIZES)
def test_recurrent_models_are_as_close_as_one_gpu(
    gpus: Ranks,  # noqa: F811
    tmp_path: Path,
    name: str,
    kind: str,
    dtype: torch.dtype,
) -> None:
    exact, ulp = without_kernels(name, kind, tmp_path), torch.finfo(dtype).eps
    for errors in gpus(2).run(recurrent_errors, "cuda", name, kind, dtype, *exact, timeout=1800):
        alone = errors.pop("alone")
        for way, (loss, gradients, decays) in errors.items():
            assert loss <= 2 * alone[0] + ulp / 4, (way, loss, alone)
            assert gradients <= 2 * alone[1] + ulp < 0.5, (way, gradients, alone)
            assert decays <= 2 * alone[2] + 2 * ulp, (way, decays, alone)
