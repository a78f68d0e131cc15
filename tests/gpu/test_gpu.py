"""On GPUs, over NCCL: error at most twice that of plain bf16 attention on one GPU, and models that train as on one.

Ranks share GPUs where there are fewer, so that one GPU runs all tests but slowly.
"""

import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hf_burst
from hf_burst.attention import AttentionRequest, ContextGroup, SequenceLayout, burst_attention
from hf_burst.config import Schedule
from hf_burst.kernels import BackwardInputs, Band, Scores, flash_attn_4
from hf_burst.kernels.flash_attn_4 import FlashAttn4Kernel
from hf_burst.kernels.torch_cudnn import TorchCudnnKernel
from hf_burst.layers import linear_loss
from hf_burst.layers.loss import token_loss_sum
from hf_burst.plan import MaskPattern
from tests.hf.parts.test_dropout import RATE, gathered, gpt2_with, kept_by
from tests.hf.test_wrappers import Case, assert_half_as_close, compare, flat, packed, recording, train_by_accelerate
from tests.ring import test_ring
from tests.support import models
from tests.support.ranks import RankPool, gpu_of, share_gpus

Ranks = Callable[[int], RankPool]
WHOLE = MaskPattern()
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    """`gpus(size)` is the pool of that many processes on GPUs."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools or not pools[size].alive:
            pools[size] = RankPool(size, "nccl")
        return pools[size]

    yield pool
    for opened in pools.values():
        opened.close()


def documents_of(kind: str, length: int) -> tuple[int, ...]:
    return (0, 1, 98, 99, length // 3, length - 211, length) if kind == "packed" else (0, length)


def exact_attention(q, k, v, documents, causal, window, blocks=()):
    """fp32 softmax with the mask written out."""
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    position = torch.arange(length, device=q.device)
    bounds = torch.tensor(documents[1:], device=q.device)
    document = torch.bucketize(position, bounds, right=True)
    mask = document[:, None] == document[None]
    distance = position[:, None] - position[None]
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance <= window
        if not causal:
            mask &= distance >= -window
    for start, stop in blocks:
        mask[start:stop, start:stop] |= distance[start:stop, start:stop] < 0
    keys, values = (tensor.repeat_interleave(groups, 2) for tensor in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def attention_case(rank: int, size: int, kind: str, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    length, batch = 1027, 2
    causal, window = kind != "full", 300 if "window" in kind else None
    blocks = ((3, 259), (259, 400), (500, 1020)) if "blocks" in kind else ()
    device = gpu_of(rank)
    generator = torch.Generator(device).manual_seed(7)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(batch, length, count, head_dim, device=device, generator=generator).to(dtype)

    q, k, v, dout = normal(heads[0]), normal(heads[1]), normal(heads[1]), normal(heads[0])
    documents = documents_of(kind, length)
    answers = []
    for kept in (torch.float32, dtype):
        leaves = [tensor.to(kept).requires_grad_() for tensor in (q, k, v)]
        out = exact_attention(*leaves, documents, causal, window, blocks)
        answers.append([out.detach(), *torch.autograd.grad(out, leaves, dout.to(kept))])
    exact, rough = answers
    group = ContextGroup.from_mesh(None)
    dealt = [rank for chunk in range(4) for rank in ([*range(size)], [*range(size)][::-1], [*range(size)])[chunk % 3]]
    layout = SequenceLayout.for_batch([documents] * batch, size, dealt if kind == "packed" else "balanced")
    layout = replace(layout, blocks=(blocks,) * batch) if blocks else layout
    over_hosts = [(way, per_host) for per_host in (1, 2) for way in ways(size, heads) if crosses(*way, per_host)]
    for (schedule, transport), per_host in [
        *((way, None) for way in ways(size, heads)),
        *(over_hosts if size == 4 else ()),
    ]:
        leaves = [layout.shard(tensor, group.rank).requires_grad_() for tensor in (q, k, v)]
        request = request_for(group, schedule, transport, MaskPattern(causal, window))
        with models.hosts_of(per_host):
            out, _ = burst_attention(*leaves, layout, request)
            found = [out.detach(), *torch.autograd.grad(out, leaves, layout.shard(dout, group.rank))]
        for name, mine, wanted, plain in zip(("out", "dq", "dk", "dv"), found, exact, rough, strict=True):
            assert mine.dtype == dtype
            whole = layout.unshard(gathered_on_gpu(mine))
            assert relative(whole, wanted) <= 2 * relative(plain, wanted), (name, schedule, transport, per_host)


def ways(size: int, heads: tuple[int, int]) -> list[tuple[str, str]]:
    """Schedules that so many heads allow over so many ranks, and transports."""
    schedules = ["kv_ring", "burst", "ulysses", "auto"]
    schedules += ["ulysses_2+kv_ring", "ulysses_2+burst"] if size == 4 else []
    allowed = [name for name in schedules if name == "auto" or Schedule.parse(name, size).refusal(size, *heads) is None]
    transports = ["symmetric", "p2p"] if size > 1 else ["auto"]
    return [(schedule, transport) for schedule in allowed for transport in transports]


def crosses(schedule: str, transport: str, per_host: int) -> bool:
    """Whether 4 ranks can run it over hosts of so many ranks. Memory is read inside of hosts alone."""
    if schedule == "auto" or transport != "symmetric":
        return True
    return per_host % Schedule.parse(schedule, 4).ulysses == 0


def request_for(
    group: ContextGroup,
    schedule: str,
    transport: str,
    pattern: MaskPattern = WHOLE,
) -> AttentionRequest:
    """With the kernel that is chosen by itself, which may write in place. Products have many kinds of tiles: there one
    that compiles nothing."""
    kernel = "auto" if schedule in ("auto", "ulysses", "kv_ring", "burst") else "torch_flash"
    return AttentionRequest(group, pattern, kernel=kernel, schedule=schedule, transport=transport)


def gathered_on_gpu(shard: torch.Tensor) -> list[torch.Tensor]:
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard.contiguous())
    return shards


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["causal", "full", "packed", "window", "blocks", "blocks and window"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_error_is_at_most_twice_that_of_plain_bf16(gpus: Ranks, size: int, kind: str, heads: tuple[int, int]) -> None:
    gpus(size).run(attention_case, kind, heads, 64, torch.bfloat16)


@pytest.mark.parametrize("head_dim", [80, 96, 128, 192, 256])
def test_head_sizes_and_fp16(gpus: Ranks, head_dim: int) -> None:
    gpus(2).run(attention_case, "packed", (4, 2), head_dim, torch.float16)


def attend_on_gpu(rank: int, size: int, case: test_ring.Case) -> list:
    return test_ring.attend(rank, size, case, gpu_of(rank))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_mask_is_as_close_as_plain_bf16(gpus: Ranks, size: int) -> None:
    """Documents, windows, chunks, sinks, soft-caps, assignments and schedules as they are drawn on CPUs."""

    @settings(max_examples=20, phases=[Phase.generate])
    @given(
        drawn=test_ring.cases(size, longest=300, flash="torch_flash"),
        head_dim=st.sampled_from([64, 40]),
        transport=st.sampled_from(["symmetric", "p2p"] if size > 1 else ["auto"]),
    )
    def every_case_is_close(drawn: test_ring.Case, head_dim: int, transport: str) -> None:
        case = replace(drawn, dims=(head_dim, head_dim), dtype=torch.bfloat16, transport=transport)
        (case,) = test_ring.fitting(size, [case])
        every = [[results] for results in gpus(size).run(attend_on_gpu, case)]
        test_ring.assert_as_close_as_plain(case, *test_ring.put_together(every, size, [case]))

    every_case_is_close()


def change_shapes(rank: int, size: int, heads: tuple[int, int]) -> None:
    """Passes of several shapes and dtypes in turns, three layers at once, each with inputs of its own: nothing that was
    returned is overwritten. Both transports give the same, after an evaluation in inference mode, too."""
    device = gpu_of(rank)
    group = ContextGroup.from_mesh(None)
    generator = torch.Generator(device).manual_seed(rank)
    kinds = [(1, 1024, torch.bfloat16), (2, 1024, torch.bfloat16), (1, 1024, torch.float16), (1, 1088, torch.bfloat16)]

    def normal(count: int, batch: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(batch, length // size, count, 64, device=device, generator=generator).to(dtype)

    def attend(schedule: str, way: str, layers: list, douts: list, layout: SequenceLayout) -> list:
        request = request_for(group, schedule, way)
        leaves = [[tensor.clone().requires_grad_() for tensor in layer] for layer in layers]
        outs = [burst_attention(*layer, layout, request)[0] for layer in leaves]
        for out, dout in reversed(list(zip(outs, douts, strict=True))):
            out.backward(dout)
        return [*outs, *(tensor.grad for layer in leaves for tensor in layer)]

    for schedule in dict.fromkeys(name for name, _ in ways(size, heads) if name != "auto"):
        with torch.inference_mode():  # an evaluation before training
            layout = SequenceLayout.for_batch([(0, 1024)], size)
            inputs = [normal(count, *kinds[0]) for count in (heads[0], heads[1], heads[1])]
            burst_attention(*inputs, layout, request_for(group, schedule, "symmetric"))
        for step in range(3):
            for batch, length, dtype in kinds:
                layout = SequenceLayout.for_batch([(0, length)] * batch, size)
                shapes = (heads[0], heads[1], heads[1])
                layers = [[normal(count, batch, length, dtype) for count in shapes] for _ in range(3)]
                douts = [normal(heads[0], batch, length, dtype) for _ in range(2)]
                douts.append(torch.ones((), device=device, dtype=dtype).expand(layers[0][0].shape))
                if rank == size - 1 and not step:
                    time.sleep(0.1)  # a rank that comes late
                results = [attend(schedule, way, layers, douts, layout) for way in ("symmetric", "p2p")]
                for symmetric, p2p in zip(*results, strict=True):
                    assert symmetric.dtype == dtype
                    # kernels that want an output are given another one with the same product with its gradient
                    assert relative(symmetric, p2p.float()) < 5e-3, (schedule, step, batch, length, dtype)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn 4")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("band", "rows", "columns"),
    [(Band(low=0), 2048, 2048), (Band(low=0), 2112, 2112), (Band(), 1985, 2048)],
    ids=["causal", "causal with half a block", "whole"],
)
def test_wide_heads_go_backward_by_cudnn_as_exactly(band: Band, rows: int, columns: int, dtype: torch.dtype) -> None:
    if not flash_attn_4._cudnn_knows_wide_heads(torch.device("cuda", 0)):
        pytest.skip("needs Hopper and cuDNN 9.15")
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, size, heads, 256) for size, heads in ((rows, 6), (columns, 2), (columns, 2), (rows, 6))]
    q, k, v, dout = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    scale = 256**-0.5
    exact = [tensor.float().requires_grad_() for tensor in (q, k, v)]
    attended = plain_attention(*exact, causal=band.low == 0, scale=scale)
    wanted = torch.autograd.grad(attended, exact, dout.float())
    errors = []
    for least in (1024, 4096):  # from which on it is cuDNN's
        kernel = FlashAttn4Kernel()
        assert kernel.unavailable(256, 256) is None
        out, lse = kernel.forward(q, k, v, band, Scores(scale))
        with (
            mock.patch.object(flash_attn_4, "_LONG_TILE", least),
            mock.patch.object(kernel.cudnn, "backward_piece", wraps=kernel.cudnn.backward_piece) as by_cudnn,
        ):
            found = kernel.backward(BackwardInputs(dout, q, k, v, out, lse, None), band, Scores(scale))
        assert by_cudnn.called == (least == 1024)
        errors.append([relative(gradient, precise) for gradient, precise in zip(found, wanted, strict=True)])
    for name, ours, plain in zip(("dq", "dk", "dv"), *errors, strict=True):
        assert ours <= 2 * plain, (name, ours, plain)


@pytest.mark.parametrize("columns", [64, 192, 2112])
def test_half_a_block_of_keys_by_cudnn(columns: int) -> None:
    """Scores so low that a key that is not there would count for all. In the first element of
    the queries' gradients -80 times the rounding of all weights is no small part, so its bound is wider."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, size, 2, 64, generator=generator, device="cuda").bfloat16()
        for size in (256, columns, columns, 256)
    )
    q[..., 0], k[..., 0] = 12.0, -80.0
    scale = 0.125
    exact = [tensor.float().requires_grad_() for tensor in (q, k, v)]
    attended = plain_attention(*exact, causal=False, scale=scale)
    wanted = torch.autograd.grad(attended, exact, dout.float())
    kernel = TorchCudnnKernel()
    out, lse = kernel.forward(q, k, v, Band(), Scores(scale))
    assert lse.max() < -89
    found = kernel.backward(BackwardInputs(dout, q, k, v, out, lse, None), Band(), Scores(scale))
    for name, gradient, precise in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        assert gradient.isfinite().all(), name
        assert relative(gradient, precise) < 0.1, name
        first = 1 if name == "dq" else 0
        assert relative(gradient[..., first:], precise[..., first:]) < 0.02, name


def plain_attention(q, k, v, causal: bool, scale: float) -> torch.Tensor:
    """fp32 softmax with as many columns as there are."""
    groups = q.shape[2] // k.shape[2]
    keys, values = (tensor.repeat_interleave(groups, 2) for tensor in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_shapes_that_come_and_go(gpus: Ranks, size: int, heads: tuple[int, int]) -> None:
    gpus(size).run(change_shapes, heads)


def attend_twice_alike(rank: int, size: int) -> None:
    device, length = gpu_of(rank), 2048
    group = ContextGroup.from_mesh(None)
    generator = torch.Generator(device).manual_seed(rank)
    torch.use_deterministic_algorithms(True)
    try:
        for documents in ((0, length), (0, 700, length)):
            layout = SequenceLayout.for_batch([documents], size)
            packed = torch.randn(1, length // size, 8, 3 * 64, device=device, generator=generator).bfloat16()
            dout = torch.randn(1, length // size, 8, 64, device=device, generator=generator).bfloat16()
            for schedule, transport in ways(size, (8, 8)):
                request = request_for(group, schedule, transport)
                results = []
                for _ in range(4):
                    leaf = packed.clone().requires_grad_()
                    q, k, v = leaf.chunk(3, 3)  # not contiguous
                    out, _ = burst_attention(q, k, v, layout, request)
                    out.backward(dout)
                    results.append((out.detach(), leaf.grad))
                for out, gradient in results[1:]:
                    assert torch.equal(out, results[0][0]), (schedule, transport)
                    assert torch.equal(gradient, results[0][1]), (schedule, transport)
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_runs_have_the_same_bits(gpus: Ranks) -> None:
    gpus(4).run(attend_twice_alike)


def attend_on_streams(rank: int, size: int) -> None:
    """Layers on two streams in turn, while other work takes and fills the memory that they let go of."""
    device, length = gpu_of(rank), 4096
    group = ContextGroup.from_mesh(None)
    layout = SequenceLayout.for_batch([(0, 1500, length)], size)
    streams = [torch.cuda.current_stream(device), torch.cuda.Stream(device)]
    generator = torch.Generator(device).manual_seed(rank)

    def layers(schedule: str, transport: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        request = request_for(group, schedule, transport)
        found = []
        for index, tensor in enumerate(inputs):
            stream = streams[index % 2]
            stream.wait_stream(streams[1 - index % 2])
            with torch.cuda.stream(stream):
                leaf = (tensor * 1.0).requires_grad_()
                out, _ = burst_attention(*leaf.split([8, 4, 4], 2), layout, request)
                (gradient,) = torch.autograd.grad(out, leaf, out.detach())
                found += [out.detach(), gradient]
                del out, leaf
                for _ in range(4):
                    torch.full((tensor.numel(),), torch.nan, device=device, dtype=tensor.dtype)
        torch.cuda.synchronize()
        return found

    inputs = [torch.randn(1, length // size, 16, 64, device=device, generator=generator).bfloat16() for _ in range(10)]
    for schedule in dict.fromkeys(name for name, _ in ways(size, (8, 4)) if name != "auto"):
        found = [layers(schedule, transport, inputs) for transport in ("symmetric", "p2p")]
        for one, other in zip(*found, strict=True):
            assert relative(one, other.float()) < 2e-3, schedule


def test_streams_and_memory_that_is_taken_anew(gpus: Ranks) -> None:
    gpus(4).run(attend_on_streams)


def attend_without_waiting(rank: int, size: int) -> None:
    """Packings that were not seen before, while torch raises where the host would wait for the device."""
    device, length = gpu_of(rank), 4096
    group = ContextGroup.from_mesh(None)
    generator = torch.Generator(device).manual_seed(rank)
    q, k, v, dout = (
        torch.randn(2, length // size, 8, 64, device=device, generator=generator).bfloat16() for _ in range(4)
    )
    # chunks that are dealt out; the first two packings warm up: kernels compile, and buffers become large enough
    cuts = [(0, length), (0, 1500, 1501, 3000, length), (0, 700, 1111, 2600, length), (0, 99, 2000, 3900, length)]
    layouts = [SequenceLayout.for_batch([cut, (0, 1000, length)], size) for cut in cuts]
    for schedule, transport in ways(size, (8, 8)):
        request = AttentionRequest(group, kernel="torch_flash", schedule=schedule, transport=transport)
        for index, layout in enumerate(layouts):
            leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
            torch.cuda.set_sync_debug_mode("error" if index > 1 else "default")
            try:
                out, _ = burst_attention(*leaves, layout, request, check=False)
                out.backward(dout)
            except RuntimeError as error:
                raise AssertionError(f"{schedule} over {transport}: {error}") from error
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_the_host_does_not_wait_for_a_new_packing(gpus: Ranks) -> None:
    gpus(2).run(attend_without_waiting)


def capture_a_packed_call(rank: int, size: int) -> None:
    """Warmed up on another stream, as torch advises; many packings later the graph has boundaries of its own."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1024, 4, 64, device="cuda", generator=generator).bfloat16() for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    request = AttentionRequest(kernel="torch_flash")

    def attend(cut: int) -> list[torch.Tensor]:
        layout = SequenceLayout.for_batch([(0, cut, 1024)], 1)
        out, _ = burst_attention(q, k, v, layout, request)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(100)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(100)
    for cut in range(101, 200):
        attend(cut)
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor.copy_(torch.randn(tensor.shape, device="cuda", generator=generator))
    graph.replay()
    for one, wanted in zip(found, attend(100), strict=True):
        torch.testing.assert_close(one, wanted)


def test_a_packed_call_can_be_captured(gpus: Ranks) -> None:
    gpus(1).run(capture_a_packed_call)


def lose_a_rank(rank: int, port: int, transport: str) -> None:
    """The last of two ranks dies between two passes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_NCCL_ASYNC_ERROR_HANDLING="1")
    if torch.cuda.device_count() < 2:
        share_gpus(rank)
    torch.cuda.set_device(gpu_of(rank))
    dist.init_process_group("nccl", rank=rank, world_size=2, timeout=timedelta(seconds=10))
    group = ContextGroup.from_mesh(None)
    layout = SequenceLayout.for_batch([(0, 256)], 2)
    q, k, v = (torch.randn(1, 128, 4, 64, device=gpu_of(rank)).bfloat16() for _ in range(3))
    request = AttentionRequest(group, schedule="kv_ring", transport=transport, kernel="torch_flash")
    for _ in range(4):
        burst_attention(q, k, v, layout, request, check=False)
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(0)
    burst_attention(q, k, v, layout, request, check=False)
    torch.cuda.synchronize()  # NCCL may give up the messages first and end the process then
    time.sleep(100)
    os._exit(0)  # which must not be reached


@pytest.mark.parametrize("transport", ["symmetric", "p2p"])
def test_a_rank_that_is_gone_ends_the_others(transport: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    processes = [context.Process(target=lose_a_rank, args=(rank, port, transport)) for rank in range(2)]
    for process in processes:
        process.start()
    processes[0].join(150)  # NCCL writes down what was under way before it ends a process
    alive = processes[0].is_alive()
    for process in processes:
        process.kill()
    assert not alive, "the rank that is left waits for ever"
    assert processes[0].exitcode not in (0, None)


def large_messages(rank: int, size: int, schedule: str) -> float:
    """Packed documents that let ranks skip rounds, with messages that no buffer of NCCL holds."""
    chunk, device = 16384, gpu_of(rank)
    documents = (0, 3 * chunk // 2, 5 * chunk, 6 * chunk, 8 * chunk)
    group = ContextGroup.from_mesh(None)
    layout = SequenceLayout.for_batch([documents], size)
    generator = torch.Generator(device).manual_seed(rank)
    shape = (1, 2 * chunk, 8, 128)
    leaves = [torch.randn(shape, device=device, generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    out, _ = burst_attention(*leaves, layout, AttentionRequest(group, schedule=schedule))
    out.float().square().sum().backward()
    return float(sum(leaf.grad.float().norm() for leaf in leaves))


def test_large_messages_and_skipped_rounds_do_not_hang(gpus: Ranks) -> None:
    ring, burst = (gpus(4).run(large_messages, schedule, timeout=60) for schedule in ("kv_ring", "burst"))
    torch.testing.assert_close(ring, burst, rtol=1e-2, atol=0)


def score_by_liger(rank: int, size: int, softcap: float | None) -> None:
    assert linear_loss._liger("cuda", torch.bfloat16) is not None
    device, generator = gpu_of(rank), torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3001, 512, generator=generator).to(device)
    weight = (torch.randn(32003, 512, generator=generator) / 16).to(device)
    targets = torch.randint(0, 32003, (1, 3001), generator=generator).to(device)
    targets[:, 5:900] = -100

    def found(dtype: torch.dtype, fused: bool) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]

        def score(some: torch.Tensor) -> torch.Tensor:
            logits = some @ leaves[1].T
            return softcap * torch.tanh(logits / softcap) if softcap else logits

        if fused:
            linear = linear_loss.Linear(leaves[1], None, softcap)
            loss = linear_loss.linear_loss_sum(leaves[0], targets, score, 32003, linear)
        else:
            loss = token_loss_sum(score(leaves[0]), targets)
        (loss / 7).backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves)]

    exact, rough = found(torch.float64, False), found(torch.bfloat16, False)
    for most in (2**29, 2**23):  # logits at a time: one part, and twelve
        with mock.patch.object(linear_loss, "_LIGER_LOGITS", most):
            mine = found(torch.bfloat16, True)
        for one, other, wanted in zip(mine, rough, exact, strict=True):
            assert relative(one, wanted.float()) <= 2 * relative(other, wanted.float()) + 1e-6


@pytest.mark.skipif(not importlib.util.find_spec("liger_kernel"), reason="needs Liger-Kernel")
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_liger_scores_as_exactly_as_bfloat16_can(gpus: Ranks, softcap: float | None) -> None:
    gpus(1).run(score_by_liger, softcap)


def keep_attention(rank: int, size: int) -> None:
    """What is kept of checkpointed layers beside layers that keep everything."""
    batch = {key: value.to("cuda") for key, value in models.make_batch("packed", 1024).items()}
    exact = models.make_model("mistral").to("cuda").train()
    models.plain_loss(exact, batch).backward()
    wanted = flat([parameter.grad for parameter in exact.parameters()])
    model = models.make_model("mistral", torch.bfloat16).to("cuda").train()
    for schedule in dict.fromkeys(name for name, _ in ways(size, (4, 2))):
        errors = []
        for checkpointing, keep in ((False, 1.0), (True, 1.0), (True, 0.5), (True, 0.0)):
            if checkpointing:
                model.gradient_checkpointing_enable()
            models.patch(model, hf_burst.BurstConfig(schedule=schedule, memory=hf_burst.Memory(attention_keep=keep)))
            model(**batch).loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            errors.append(relative(flat([parameter.grad for parameter in model.parameters()]) / size, wanted.float()))
            model.zero_grad()
            hf_burst.unpatch_model(model)
            model.gradient_checkpointing_disable()
        assert max(errors) <= 2 * errors[0] < 0.2, (schedule, errors)


def test_checkpointed_layers_that_keep_their_attention(gpus: Ranks) -> None:
    gpus(4).run(keep_attention)


def train(rank: int, size: int, name: str, patched: bool) -> list[float]:
    model = models.make_model(name, torch.bfloat16).to("cuda").train()
    if patched:
        models.patch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(8):
        batch = {key: value.to("cuda") for key, value in models.make_batch("packed", 301, seed=step % 2).items()}
        loss = model(**batch, use_cache=False).loss if patched else models.plain_loss(model, batch)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert", "modernbert"])
def test_a_patched_model_trains_as_on_one_gpu(gpus: Ranks, name: str) -> None:
    plain = gpus(1).run(train, name, False)[0]
    for losses in gpus(4).run(train, name, True):
        torch.testing.assert_close(losses, plain, rtol=0.02, atol=0.02)
    assert plain[-1] < plain[0], plain


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(("data", "burst"), [(1, 2), (1, 4), (2, 2)])
def test_trainer_with_fsdp2_equals_one_gpu(
    gpus: Ranks, tmp_path: Path, data: int, burst: int, kind: str, lora: bool, checkpointing: bool
) -> None:
    """Three optimizer steps in fp32, full batches and sharded ones."""
    case = Case(data, burst, kind, lora, checkpointing, explicit=checkpointing != lora)
    wanted = gpus(1).run(train_by_accelerate, str(tmp_path), case.alone, "cuda")[0]
    for found in gpus(data * burst).run(train_by_accelerate, str(tmp_path), case, "cuda"):
        compare(found, wanted, 1e-5)


@pytest.mark.parametrize(("data", "burst"), [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_trainer_with_fsdp2_in_bfloat16(gpus: Ranks, tmp_path: Path, data: int, burst: int, lora: bool) -> None:
    case = Case(data, burst, "packed", lora, checkpointing=True, half=True)
    assert_half_as_close(gpus, str(tmp_path), case, "cuda")


def drop_on_gpu(rank: int, size: int) -> None:
    model = models.patch(gpt2_with(RATE).to("cuda"))
    batch = {key: value.to("cuda") for key, value in models.make_batch("packed", 397).items()}
    kept = kept_by(model)
    seen = []
    for seed, checkpointing in ((7, False), (7, True), (8, True)):
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(seed)
        before = torch.cuda.get_rng_state()
        model(**batch).loss.backward()
        assert torch.equal(torch.cuda.get_rng_state(), before)
        states = gathered(torch.get_rng_state())
        assert all(torch.equal(state, states[0]) for state in states)
        seen.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
        for mask in kept.values():
            masks = gathered(mask.cpu())
            assert not any(torch.equal(masks[one], masks[other]) for one in range(size) for other in range(one))
    for one, again, other in zip(*seen, strict=True):
        torch.testing.assert_close(again, one, rtol=1e-4, atol=1e-6)
        assert not torch.equal(again, other)


def test_dropout_masks_are_the_ranks_own(gpus: Ranks) -> None:
    gpus(4).run(drop_on_gpu)


def compile_on_gpu(rank: int, size: int) -> None:
    """Inductor beside eager, both patched, in bf16; another packing compiles no layer anew."""
    torch._dynamo.reset()
    eager = models.patch(models.make_model("llama", torch.bfloat16).to("cuda").train())
    model = models.patch(models.make_model("llama", torch.bfloat16).to("cuda").train())
    graphs: list[bool] = []
    compiled = torch.compile(model, backend=recording(graphs, "inductor"))
    for index, cuts in enumerate([(400,), (7, 393), (1, 9, 390), (5, 5, 200, 190)]):
        batch = {key: value.to("cuda") for key, value in packed(cuts, index).items()}
        wanted, loss = eager(**batch).loss, compiled(**batch).loss
        wanted.backward()
        loss.backward()
        torch.testing.assert_close(loss, wanted, rtol=1e-2, atol=1e-2)
        mine, other = (flat([p.grad for p in one.parameters()]) for one in (model, eager))
        assert (mine - other).norm() < 0.05 * other.norm()
        model.zero_grad()
        eager.zero_grad()
    assert graphs.count(True) == 1, graphs


def test_a_compiled_model_on_gpus(gpus: Ranks) -> None:
    gpus(2).run(compile_on_gpu, timeout=400)
