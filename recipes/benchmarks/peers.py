"""The attention of other packages, as their users call it, each in the layout that it wants.

* Plain Ulysses (DeepSpeed Ulysses, arXiv 2309.14509): all-to-alls around the kernel of the limit.
* ring-flash-attn: `zigzag_ring_flash_attn_func` and `llama3_flash_attn_varlen_func`, on flash-attn 2.
* torch: `context_parallel` around `scaled_dot_product_attention`, on cuDNN. K and V travel by all-gather.
* axolotl-ringmaster: `zigzag_ring_attention`, the function of its balanced ring (`load_balance=head_tail`), on
  flash-attn 2.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.nn import functional

from recipes.benchmarks.contenders import Case, Contender, Prepared


def peers() -> list[Contender]:
    """All peers. A peer that cannot run raises the reason when it is built."""
    return [
        Contender("ulysses plain", "ulysses", _ulysses),
        Contender("ring-flash-attn zigzag", "ring_flash_attn", _ring_flash_attn_zigzag),
        Contender("ring-flash-attn llama3", "ring_flash_attn", _ring_flash_attn_llama3, {"heads_k_stride": "up to 4"}),
        Contender("torch cudnn allgather", "torch_context_parallel", _torch_context_parallel),
        Contender("ringmaster zigzag", "ringmaster", _ringmaster_zigzag),
    ]


class _AllToAll(torch.autograd.Function):
    """From a share of the tokens to a share of the heads, or back."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _to_heads(tensor, group) if to_heads else _to_tokens(tensor, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back = _to_tokens if ctx.to_heads else _to_heads
        return back(gradient, ctx.group), None, None


def _to_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`(B, n, H, D)` to `(B, P·n, H/P, D)`."""
    batch, tokens, heads, size = tensor.shape
    ranks = dist.get_world_size(group)
    sent = tensor.reshape(batch, tokens, ranks, heads // ranks, size).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.transpose(0, 1).reshape(batch, ranks * tokens, heads // ranks, size)


def _to_tokens(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`(B, P·n, H/P, D)` to `(B, n, H, D)`."""
    batch, tokens, heads, size = tensor.shape
    ranks = dist.get_world_size(group)
    sent = tensor.reshape(batch, ranks, tokens // ranks, heads, size).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.permute(1, 2, 0, 3, 4).reshape(batch, tokens // ranks, ranks * heads, size)


def _ulysses(case: Case) -> Prepared:
    group = _group(case)
    if case.kv_heads % case.ranks:
        raise ValueError(f"{case.kv_heads} key heads do not divide over {case.ranks} ranks")
    layout, mask = case.layout("contiguous"), case.mask

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (_AllToAll.apply(tensor, group, True) for tensor in (q, k, v))
        return _AllToAll.apply(case.native.attend(q, k, v, mask), group, False)

    return Prepared(attend, lambda whole: layout.shard(whole, case.rank))


def _ring_flash_attn_zigzag(case: Case) -> Prepared:
    group = _group(case)
    ring_flash_attn = _import_ring_flash_attn()
    if case.window is not None:
        raise ValueError("its zigzag ring knows no windows")
    if case.documents is not None:
        return _ring_flash_attn_zigzag_varlen(case, group, ring_flash_attn)
    layout = case.layout()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring_flash_attn.zigzag_ring_flash_attn_func(q, k, v, causal=True, group=group)

    return Prepared(attend, lambda whole: layout.shard(whole, case.rank))


def _ring_flash_attn_zigzag_varlen(case: Case, group: dist.ProcessGroup, ring_flash_attn: types.ModuleType) -> Prepared:
    """Every document is cut into 2P chunks, so its length is a multiple of 2P."""
    bounds = case.mask.documents
    spans = [
        (start + half * (stop - start) // (2 * case.ranks), start + (half + 1) * (stop - start) // (2 * case.ranks))
        for start, stop in pairwise(bounds)
        for half in (case.rank, 2 * case.ranks - 1 - case.rank)
    ]
    local = torch.tensor([bound // case.ranks for bound in bounds], dtype=torch.int32, device=case.device)
    longest = max(stop - start for start, stop in pairwise(bounds)) // case.ranks

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring_flash_attn.zigzag_ring_flash_attn_varlen_func(q, k, v, local, longest, causal=True, group=group)

    def cut(whole: torch.Tensor) -> torch.Tensor:
        return torch.cat([whole[0, start:stop] for start, stop in spans])

    return Prepared(attend, cut)


def _ring_flash_attn_llama3(case: Case) -> Prepared:
    group = _group(case)
    ring_flash_attn = _import_ring_flash_attn()
    bounds = torch.tensor(case.mask.documents, dtype=torch.int32, device=case.device)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    parts = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(bounds, True, case.rank, case.ranks)
    options = dict(zip(names, parts, strict=True)) | {"causal": True, "group": group}
    options["heads_k_stride"] = next(count for count in (4, 3, 2, 1) if case.kv_heads % count == 0)
    options["window_size"] = (-1, -1) if case.window is None else (case.window, 0)
    layout = case.layout("contiguous")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring_flash_attn.llama3_flash_attn_varlen_func(q=q, k=k, v=v, **options)

    return Prepared(attend, lambda whole: layout.shard(whole, case.rank).squeeze(0))


def _import_ring_flash_attn() -> types.ModuleType:
    """The package (0.1.8) without its adapters, whose imports current versions of Transformers no longer have."""
    if "ring_flash_attn" not in sys.modules:
        adapters = types.ModuleType("ring_flash_attn.adapters")
        adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
        sys.modules["ring_flash_attn.adapters"] = adapters
    import ring_flash_attn

    return ring_flash_attn


def _torch_context_parallel(case: Case) -> Prepared:
    group = _group(case)
    if case.device.type != "cuda":
        raise ValueError("context_parallel knows CUDA kernels only")
    if not case.whole:
        raise ValueError("scaled_dot_product_attention knows no documents and no windows over ranks")
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("cp",))

    @contextmanager
    def around() -> Iterator[None]:
        set_rotate_method("allgather")
        buffer = torch.zeros(1, 2 * case.ranks, device=case.device)  # torch 2.11 wants one
        cudnn = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        with cudnn, context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
            yield

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = case.q_heads != case.kv_heads
        # looked up at each call: the context replaces the function
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    layout = case.layout()
    # heads before tokens and contiguous, which saves it a copy
    return Prepared(attend, lambda whole: layout.shard(whole, case.rank).transpose(1, 2).contiguous(), around)


def _ringmaster_zigzag(case: Case) -> Prepared:
    """The function under `RingmasterConfig(backend="ring", load_balance="head_tail")`, which needs no runtime."""
    group = _group(case)
    if case.device.type != "cuda":
        raise ValueError("its zigzag ring knows CUDA kernels only")
    if not case.whole:
        raise ValueError("its zigzag ring knows no documents and no windows")
    from ringmaster.ring.p2p_attn import _flash_ops
    from ringmaster.ring.zigzag import zigzag_ring_attention

    if _flash_ops() is None:
        raise ImportError("Transformers finds no flash-attn 2 for it")
    layout = case.layout()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return zigzag_ring_attention(q, k, v, group=group, scaling=None).transpose(1, 2)

    # heads before tokens in shape, tokens before heads in memory: the form that Transformers passes
    return Prepared(attend, lambda whole: layout.shard(whole, case.rank).transpose(1, 2))


def _group(case: Case) -> dist.ProcessGroup:
    if case.group is None:
        raise ValueError("needs at least 2 processes")
    return case.group
