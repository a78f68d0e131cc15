"""The attention of other packages, as their users call it, each in the layout that it wants.

* Plain Ulysses (DeepSpeed Ulysses, arXiv 2309.14509): all-to-alls around the kernel of the limit.
* ring-flash-attn: `zigzag_ring_flash_attn_func` and `llama3_flash_attn_varlen_func`, on flash-attn 2.
* torch: `context_parallel` around `scaled_dot_product_attention`, on cuDNN or its flash kernels. K and V travel by
  all-gather or all-to-all.
* torch: `_ContextParallel` around compiled `flex_attention`, which knows documents and windows. Each of its load
  balancers is a contender.
* axolotl-ringmaster: `zigzag_ring_attention`, the function of its balanced ring (`load_balance=head_tail`), on
  flash-attn 2.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from recipes.benchmarks.contenders import Case, Contender, Prepared


def peers() -> list[Contender]:
    """All peers. A peer that cannot run raises the reason when it is built."""
    rotations = [(kernel, method) for kernel in ("cudnn", "flash") for method in ("allgather", "alltoall")]
    return [
        Contender("ulysses plain", "ulysses", _ulysses),
        Contender("ring-flash-attn zigzag", "ring_flash_attn", _ring_flash_attn_zigzag),
        Contender("ring-flash-attn llama3", "ring_flash_attn", _ring_flash_attn_llama3, {"heads_k_stride": "up to 4"}),
        *(_torch_context_parallel(kernel, method) for kernel, method in rotations),
        *(_torch_flex(balancer) for balancer in ("head-tail", "per-document", "ptrr")),
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
    if case.batch != 1:
        raise ValueError("takes packed sequences only: --batch 1")
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
    if case.batch != 1:
        raise ValueError("takes packed sequences only: --batch 1")
    bounds = torch.tensor(case.mask.documents, dtype=torch.int32, device=case.device)
    window = (-1, -1) if case.window is None else (case.window, 0)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice = (
        ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(bounds, True, case.rank, case.ranks)
    )
    stride = next(count for count in (4, 3, 2, 1) if case.kv_heads % count == 0)
    layout = case.layout("contiguous")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring_flash_attn.llama3_flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            heads_k_stride=stride,
            local_k_slice=local_k_slice,
            causal=True,
            window_size=window,
            group=group,
        )

    return Prepared(attend, lambda whole: layout.shard(whole, case.rank).squeeze(0))


def _import_ring_flash_attn() -> types.ModuleType:
    """The package (0.1.8) without its adapters, whose imports current versions of Transformers no longer have."""
    if "ring_flash_attn" not in sys.modules:
        adapters = types.ModuleType("ring_flash_attn.adapters")
        adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
        sys.modules["ring_flash_attn.adapters"] = adapters
    import ring_flash_attn

    return ring_flash_attn


def _torch_context_parallel(kernel: str, method: str) -> Contender:
    def build(case: Case) -> Prepared:
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
        backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[kernel]

        @contextmanager
        def around() -> Iterator[None]:
            set_rotate_method(method)
            buffer = torch.zeros(1, 2 * case.ranks, device=case.device)  # torch 2.11 wants one
            with sdpa_kernel(backend), context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
                yield

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            grouped = case.q_heads != case.kv_heads
            # looked up at each call: the context replaces the function
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

        layout = case.layout()
        # heads before tokens and contiguous, which saves it a copy
        return Prepared(attend, lambda whole: layout.shard(whole, case.rank).transpose(1, 2).contiguous(), around)

    return Contender(f"torch {kernel} {method}", "torch_context_parallel", build)


def _torch_flex(balancer: str) -> Contender:
    def build(case: Case) -> Prepared:
        group = _group(case)
        if case.device.type != "cuda":
            raise ValueError("FlexAttention has no backward on CPUs")
        return flex_attention_over(case, group, balancer)

    return Contender(f"torch flex {balancer}", "torch_flex", build, {"load_balancer": balancer})


def flex_attention_over(case: Case, group: dist.ProcessGroup, balancer: str) -> Prepared:
    """Compiled FlexAttention over gathered keys.

    Its names are private in torch (read in 2.13). They are imported here, so that another torch names the missing one.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental._attention import _context_parallel_shard, _ContextParallel
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64  # one for each length; after 8 torch would no longer compile
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = case.q_heads != case.kv_heads

    class Attention(torch.nn.Module):
        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            score_mod: None = None,
            block_mask: BlockMask | None = None,
        ) -> torch.Tensor:
            return compiled(query, key, value, score_mod, block_mask, enable_gqa=grouped)

    mesh = DeviceMesh.from_group(group, case.device.type, mesh_dim_names=("cp",))
    style = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)
    attention = parallelize_module(Attention(), mesh, style)
    make_mask = torch.compile(create_block_mask, dynamic=False, fullgraph=True)
    whole_mask = make_mask(_flex_mask(case), 1, 1, case.length, case.length, device=case.device.type)
    balance = _balancer(balancer, case, whole_mask)
    (block_mask,) = _context_parallel_shard(mesh, [whole_mask], [2], balance)
    order = balance._generate_indices()[0].unflatten(0, (case.ranks, -1))[case.rank]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, block_mask=block_mask)

    def cut(whole: torch.Tensor) -> torch.Tensor:
        return whole.index_select(1, order.to(whole.device)).transpose(1, 2).contiguous()

    return Prepared(attend, cut)


def _flex_mask(case: Case) -> Callable[..., torch.Tensor]:
    """A function that tells FlexAttention whether a query sees a key."""
    ends = torch.tensor(case.mask.documents[1:], device=case.device)
    document = torch.bucketize(torch.arange(case.length, device=case.device), ends, right=True)
    window = case.length if case.window is None else case.window

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (document[query] == document[key]) & (query >= key) & (query - key <= window)

    return sees


def _balancer(name: str, case: Case, mask: Any) -> Any:
    """One of torch's load balancers, which order the tokens before they are cut into shards."""
    from torch.distributed.tensor.experimental import _attention as torch_attention

    if name == "ptrr":
        return torch_attention._PTRRLoadBalancer(mask, case.ranks)
    if name == "head-tail":
        return torch_attention._HeadTailLoadBalancer(case.length, case.ranks, case.device)
    if case.documents is None:
        raise ValueError("of one document it is head-tail")
    lengths = [stop - start for start, stop in pairwise(case.mask.documents)]
    return torch_attention._PerDocumentHeadTailLoadBalancer([lengths], case.ranks, case.device)


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
