"""On GPUs: what lets long sequences fit. Offloading changes no bit, also under load. Tiles and groups of heads are as
exact as the whole. Memory falls by about what the plan says."""

import gc
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import hf_burst
from hf_burst.attention import AttentionRequest, ContextGroup, SequenceLayout, burst_attention
from hf_burst.hf.models.model_size import model_size
from hf_burst.kernels import KernelRequest, explain_kernels
from hf_burst.layers.host_memory import HostMemory
from hf_burst.layers.offload import SavedByLayer
from hf_burst.layers.tiled import tiled
from hf_burst.plan import MaskPattern
from hf_burst.sizing.gpus import capacity_of, gpu_named
from hf_burst.sizing.memory import estimate_memory
from hf_burst.sizing.model import Training
from tests.gpu.test_gpu import (
    Ranks,
    documents_of,
    exact_attention,
    gathered_on_gpu,
    gpus,  # noqa: F401
    relative,
    ways,
)
from tests.hf.test_patch import group_mean
from tests.hf.test_wrappers import flat
from tests.layers import test_adapters
from tests.layers.test_tiled import results
from tests.support import models
from tests.support.ranks import gpu_of, reset_accelerate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Settings = dict[str, Any]


def keep_busy(device: torch.device) -> None:
    """Lets the device compute for about 10 ms, so that copies which wait for nothing come too early."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)


def offload_under_load(rank: int, size: int, device: str, elements: int, layers: int = 12, steps: int = 3) -> list[str]:
    """Which tensors did not come back as they left: each has numbers of its own, memory is written again as soon as it
    is let go of, and the last step is given up halfway."""
    place, wrong = gpu_of(rank) if device == "cuda" else torch.device(device), list[str]()
    home, numbers = HostMemory(place), torch.arange(elements, device=place, dtype=torch.int32)
    for step in range(steps):
        kept, latest = list[Callable[[], torch.Tensor]](), None
        for index in range(layers):
            before, latest = latest, SavedByLayer(home, index < layers - 1)
            latest.following = before
            keep_busy(place)
            kept.append(latest.save(numbers + (step * layers + index)))
            torch.full_like(numbers, -1)
        for index in reversed(range(layers // 2 if step == steps - 1 else 0, layers)):
            back = kept[index]()
            if index % 2:
                keep_busy(place)
            if not torch.equal(back, numbers + (step * layers + index)):
                wrong.append(f"step {step}, layer {index}")
            back.fill_(-1)  # its memory is the caller's
            del back
            torch.full_like(numbers, -1)
    del kept, latest, before  # what began to come back for layers that nobody asks for
    others = [numbers + index for index in range(4)]
    keep_busy(place)
    home.settle()
    wrong += [f"tensor {index}" for index, tensor in enumerate(others) if not torch.equal(tensor, numbers + index)]
    return wrong


def test_what_is_offloaded_comes_back_under_load(gpus: Ranks) -> None:  # noqa: F811
    """64 MiB and a bit: five pages, the last one not full."""
    assert gpus(2).run(offload_under_load, "cuda", 2**24 + 7) == [[]] * 2


def llama(hidden: int, layers: int, vocabulary: int, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 256, "vocab_size": vocabulary}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=2**20)).to(dtype).train()


def train_under_load(rank: int, size: int, device: str, settings: Settings, hidden: int, length: int) -> list[Any]:
    """Losses of three steps, and all weights."""
    place = gpu_of(rank) if device == "cuda" else torch.device(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = llama(hidden, 8, 1024, dtype).to(place)
    model.gradient_checkpointing_enable()
    models.patch(model, hf_burst.BurstConfig(memory=hf_burst.Memory(**settings)))
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: keep_busy(place))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 1024, (1, length), generator=torch.Generator().manual_seed(1)).to(place)
    losses = []
    torch.use_deterministic_algorithms(True)  # kernels with other bits each time would do where it only warns
    try:
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            for parameter, mean in zip(model.parameters(), group_mean(model), strict=True):
                parameter.grad.copy_(mean)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    finally:
        torch.use_deterministic_algorithms(False)
    return [losses, float(flat([parameter.detach().double() for parameter in model.parameters()]).sum())]


def lock_and_unlock(rank: int, size: int) -> list[bool]:
    """Whether pages are page-locked, and whether the driver still knows a block that nothing needs."""
    home = HostMemory(gpu_of(rank))
    home.reserve(2**30)
    pages = [page.memory for page in home.take(2**29)]
    before, block = all(page.is_pinned() for page in pages), min(page.data_ptr() for page in pages)
    del home, pages
    gc.collect()
    known = int(torch.cuda.cudart().cudaHostUnregister(block)) == 0
    with suppress(RuntimeError):  # the driver tells of its error once more, to whoever asks next
        torch.zeros(1, device=gpu_of(rank))
    return [before, known]


def test_host_memory_is_locked_and_given_back(gpus: Ranks) -> None:  # noqa: F811
    assert gpus(2).run(lock_and_unlock) == [[True, False]] * 2


@pytest.mark.parametrize("keep", [1.0, 0.0])
def test_offloading_changes_no_bit_under_load(gpus: Ranks, keep: float) -> None:  # noqa: F811
    def train(**settings: Any) -> list[Any]:
        return gpus(2).run(train_under_load, "cuda", {"attention_keep": keep, **settings}, 1024, 16384)

    expected = train()
    assert train() == expected, "runs are alike"
    assert expected[0][0][-1] < expected[0][0][0], "it learns"
    for share in (1.0, 0.5):
        assert train(activation_offloading=share) == expected, share
        assert train(activation_offloading=share, layers_per_checkpoint=3) == expected, share
    assert train(layers_per_checkpoint=3) == expected


def moved_by(rank: int, size: int, device: str, name: str, hidden: int, noise: float = 0.0) -> tuple[Any, ...]:
    """By how much an optimizer of bitsandbytes moves the weights in three steps, in fp32. Of how many weights the
    states have 8 bits, and of how many they lie in pages. One process is not patched. Noise is relative to the size of
    the gradients that are not zero."""
    from bitsandbytes import optim

    place = gpu_of(rank) if device == "cuda" else torch.device(device)
    model = llama(hidden, 2, 512, torch.float32).to(place)
    before = flat([weight.detach().clone() for weight in model.parameters()])
    if size > 1:
        models.patch(model)
    optimizer = getattr(optim, name)(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 512, (1, 1027), generator=torch.Generator().manual_seed(1)).to(place)
    generator = torch.Generator(place).manual_seed(2)
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        for weight, gradient in zip(model.parameters(), group_mean(model), strict=True):
            random = torch.randn(gradient.shape, device=place, generator=generator)
            weight.grad.copy_(gradient + noise * gradient.square().mean().sqrt() * random * (gradient != 0))
        optimizer.step()
        optimizer.zero_grad()
    states = [[value for value in of.values() if isinstance(value, torch.Tensor)] for of in optimizer.state.values()]
    if device == "cuda":
        torch.cuda.synchronize()
    small = sum(any(value.dtype == torch.uint8 for value in of) for of in states)
    paged = sum(any(getattr(value, "is_paged", False) for value in of) for of in states)
    return (flat([weight.detach() for weight in model.parameters()]) - before).cpu(), small, paged


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW", "PagedAdamW8bit"])
def test_optimizers_of_bitsandbytes_over_ranks(gpus: Ranks, name: str) -> None:  # noqa: F811
    """The weights move as in one process, up to what rounding of the gradients makes of it there. All matrices have
    states in 8 bits, in pages, or both: 7 of each layer, the embeddings and the head."""
    arguments = "cuda", name, 512
    (wanted, small, paged), (rounded, _, _) = (gpus(1).run(moved_by, *arguments, noise)[0] for noise in (0.0, 1e-5))
    assert (small, paged) == (16 * name.endswith("8bit"), 16 * name.startswith("Paged"))
    least = float((rounded - wanted).norm() / wanted.norm())
    assert least < 0.02
    for found, *kinds in gpus(2).run(moved_by, *arguments):
        assert kinds == [small, paged]
        assert float((found - wanted).norm() / wanted.norm()) <= 4 * least


def tile_errors(rank: int, size: int, device: str, autocast: bool, hidden: int, tokens: int, tile: int) -> list[list]:
    """Errors against fp64 of the output and all gradients, at once and in tiles."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_attention_heads": 2}
    reference = LlamaMLP(LlamaConfig(**sizes)).double().to(device)
    low = LlamaMLP(LlamaConfig(**sizes)).to(device, torch.float32 if autocast else torch.bfloat16)
    low.load_state_dict(reference.state_dict())
    reference.load_state_dict(low.state_dict())  # the same weights, rounded
    x = torch.randn(1, tokens, hidden, dtype=torch.float64, device=device).bfloat16()
    exact = results(reference, x.double().requires_grad_(), reference.forward, False)
    errors = []
    for forward in (low.forward, partial(tiled, low, low.forward, tile)):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            found = results(low, x.to(low.up_proj.weight.dtype).requires_grad_(), forward, True)
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)])
    return errors


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_tiles_are_as_exact_as_the_whole(gpus: Ranks, autocast: bool) -> None:  # noqa: F811
    """Tokens that no tile divides. What each tile adds to the gradient of a weight is rounded to bf16 before it is
    added, by at most half of 2 ** -8; all else is rounded alike, so that only chance differs: at most 5 %."""
    whole, tiles = gpus(1).run(tile_errors, "cuda", autocast, 1024, 4099, 512)[0]
    assert max(whole) < 0.02
    rounded = 2**-9 / 3**0.5  # the root of the mean square of errors that are spread evenly
    most = [1.05 * least for least in whole[:2]] + [math.hypot(1.05 * least, rounded) for least in whole[2:]]
    assert all(error <= bound for error, bound in zip(tiles, most, strict=True)), (whole, tiles)


def attend_in_groups(rank: int, size: int, kind: str) -> None:
    """Of every kernel, schedule and transport: heads in groups, beside all heads at once and beside fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    length, heads, device = 1027, (8, 4), gpu_of(rank)
    generator = torch.Generator(device).manual_seed(7)
    q, k, v, dout = (
        torch.randn(2, length, count, 64, device=device, generator=generator).bfloat16()
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    documents, pattern = documents_of(kind, length), MaskPattern(kind != "full")
    wide = [tensor.float().requires_grad_() for tensor in (q, k, v)]
    out = exact_attention(*wide, documents, kind != "full", None)
    exact = [out.detach(), *torch.autograd.grad(out, wide, dout.float())]
    group = ContextGroup.from_mesh(None)
    layout = SequenceLayout.for_batch([documents] * 2, size)
    known = explain_kernels(KernelRequest("cuda", torch.bfloat16, 64, 64))
    kernels = [name for name, refusal in known if refusal is None and name != "reference"]
    assert kernels
    for kernel, (schedule, transport) in product(kernels, ways(size, heads)):
        errors = []
        for groups in (1, 2, 4):
            request = AttentionRequest(
                group, pattern, kernel=kernel, schedule=schedule, transport=transport, head_groups=groups
            )
            leaves = [layout.shard(tensor, group.rank).requires_grad_() for tensor in (q, k, v)]
            out, _ = burst_attention(*leaves, layout, request)
            found = [out.detach(), *torch.autograd.grad(out, leaves, layout.shard(dout, group.rank))]
            errors.append([relative(layout.unshard(gathered_on_gpu(a)), b) for a, b in zip(found, exact, strict=True)])
        for name, whole, *grouped in zip(("out", "dq", "dk", "dv"), *errors, strict=True):
            assert max(grouped) <= 1.05 * whole < 0.02, (kernel, schedule, transport, name, whole, grouped)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["causal", "full", "packed"])
def test_groups_of_heads_are_as_exact_as_all(gpus: Ranks, size: int, kind: str) -> None:  # noqa: F811
    gpus(size).run(attend_in_groups, kind)


SIZES = {"hidden": 2048, "layers": 6, "vocabulary": 4096, "dtype": torch.bfloat16}
LENGTH = 65536
SAVING: list[Settings] = [
    {"tiled_mlp": 8192},
    {"activation_offloading": 1.0},
    {"attention_keep": 0.0},
    {"tiled_mlp": 8192, "activation_offloading": 1.0},
    {"tiled_mlp": 8192, "activation_offloading": 1.0, "head_groups": 4},
    {"head_groups": 4},
    {"tiled_mlp": 8192, "layers_per_checkpoint": 2},
]


def peaks_of_steps(rank: int, size: int, every: list[Settings]) -> list[int]:
    """The most memory that tensors take in a second step, with each of the settings."""
    place, peaks = gpu_of(rank), []
    model = llama(**SIZES).to(place)
    model.gradient_checkpointing_enable()
    tokens = torch.randint(0, 4096, (1, LENGTH), device=place, generator=torch.Generator(place).manual_seed(1))
    for settings in every:
        transport, memory = "auto" if size == 1 else "p2p", hf_burst.Memory(**settings)
        models.patch(model, hf_burst.BurstConfig(transport=transport, memory=memory))
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(input_ids=tokens, labels=tokens).loss.backward()
            peaks_of_step = torch.cuda.max_memory_allocated()
            model.zero_grad()
        peaks.append(peaks_of_step)
        hf_burst.unpatch_model(model)
    return peaks


@pytest.mark.parametrize("size", [1, 2])
def test_memory_falls_by_about_what_the_plan_says(gpus: Ranks, size: int) -> None:  # noqa: F811
    model = llama(**{**SIZES, "dtype": torch.bfloat16})
    sizes, capacity = model_size(type(model), model.config), capacity_of(gpu_named("h200"))

    def predicted(settings: Settings) -> float:
        training = Training(LENGTH, size, size, sharded="ddp", fused=False, **settings)
        memory = estimate_memory(sizes, training, capacity)
        return memory.tensors + memory.exchange - memory.optimizer

    every: list[Settings] = [{}, *SAVING]
    measured = gpus(size).run(peaks_of_steps, every)[0]
    report = [
        (settings, peak / 2**30, predicted(settings) / 2**30) for settings, peak in zip(every, measured, strict=True)
    ]
    for settings, peak in zip(SAVING, measured[1:], strict=True):
        falls, should = measured[0] - peak, predicted({}) - predicted(settings)
        assert peak <= 1.01 * measured[0], report
        if should > 0.05 * predicted({}):
            assert 0.7 < falls / should < 1.5, (settings, report)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("kind", test_adapters.KINDS)
def test_adapters_are_not_less_exact(kind: str, tiles: bool) -> None:
    theirs, ours = test_adapters.errors_of(kind, tiles, "cuda")
    assert all(own <= 1.05 * other for other, own in zip(theirs, ours, strict=True)), (theirs, ours)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("tiles", [False, True])
def test_adapters_beside_weights_in_4_bits(tiles: bool) -> None:
    """As peft and bitsandbytes compute them, up to the rounding of bf16."""
    module = test_adapters.in_4_bits(torch.bfloat16, "cuda")
    x = test_adapters.inputs(torch.bfloat16, (1, 512)).detach().cuda().requires_grad_()
    theirs = test_adapters.results(module, x, autocast=True)
    ours = test_adapters.results(test_adapters.joined(module), x, tiles, True, autocast=True)
    assert all(relative(own, other) < 2e-2 for own, other in zip(ours, theirs, strict=True))


def losses_with_weights_on_the_host(rank: int, size: int, burst: bool) -> tuple[list[float], bool]:
    """Losses of two steps under FSDP2 whose weights wait on the host, and whether layers left the GPU."""
    reset_accelerate()
    model = models.make_model("llama", layers=4).train()
    if burst:
        memory = hf_burst.Memory(activation_offloading=1.0)
        hf_burst.patch_model(model, hf_burst.BurstConfig(memory=memory))
    model.gradient_checkpointing_enable()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True, auto_wrap_policy="transformer_based_wrap")
    mesh = hf_burst.BurstParallelismConfig(burst_size=size) if burst else None
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=mesh)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(model, FSDPModule)
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    losses = []
    for seed in range(2):
        batch = {key: value.to(accelerator.device) for key, value in models.make_batch("plain", seed=seed).items()}
        loss = model(**batch, **({} if burst else {"use_cache": False})).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parts = model._hf_burst.parts if burst else ()
    hosts = [part.host for part in parts if getattr(part, "host", None) is not None]
    return losses, any(host.device == accelerator.device for host in hosts)


def test_weights_that_fsdp2_keeps_on_the_host_of_a_gpu(gpus: Ranks) -> None:  # noqa: F811
    """NCCL alone, as `accelerate launch` starts it where FSDP2 is asked for in Python."""
    (wanted, _), *_ = gpus(2).run(losses_with_weights_on_the_host, False)
    for losses, left in gpus(2).run(losses_with_weights_on_the_host, True):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert left, "layers leave for the host, too"
