"""FlashAttention-4 (CuTe) from its package, `flash-attn-4`: the fastest on Hopper and Blackwell.

Read in version 4.0.0b36, whose `_flash_attn_fwd` and `_flash_attn_bwd` are private: another version that names its
parameters otherwise is refused, and so is the old copy of the same module that the package `flash-attn` brings along:
install that one first. It compiles a kernel for each kind of call, in a second or two. Its backward takes the
gradient of the log-sum-exp and subtracts it from `rowsum(dout * out)`, so `out` = 0 and `dlse` = -delta stand for a
delta whose output is elsewhere; that `out` is one vector of zeros, expanded.
"""

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from .base import Capabilities, OutputBuffers
from .flash import Call, FlashKernel, Given
from .library import Calls, gpu_refusal, package_refusal

_MODULE = "flash_attn.cute.interface"
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_SCORES = ("softmax_scale", "causal", "softcap", "window_size_left", "window_size_right")
_GRADIENTS = ("dq", "dk", "dv")
_CALLS: Calls = (
    ("_flash_attn_fwd", ("q", "k", "v", *_LENGTHS, *_SCORES, "return_lse", "out", "lse")),
    (
        "_flash_attn_bwd",
        ("q", "k", "v", "out", "dout", "lse", *_LENGTHS, *_SCORES, *_GRADIENTS, "dlse", "deterministic"),
    ),
)


class FlashAttn4Kernel(FlashKernel):
    """`_flash_attn_fwd` and `_flash_attn_bwd` of `flash_attn.cute.interface`.

    Head sizes other than those of its card are padded: at 80 the gradient of the queries was wrong (version 4.0.0b36,
    H200, bf16), and nothing says that the rest are tested. Other than equal ones only 192 for q and k and 128 for v
    (DeepSeek) are taken, which its Hopper backward does only if no heads are shared.
    """

    capabilities = Capabilities(
        name="flash_attn_4",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(64, 256),
        head_multiple=8,
        own_value_dim=False,
        wide=False,
        wants_out=False,
        softcap=True,
        deterministic=True,
        derives_delta=True,
        value_dims=((192, 128),),
        head_sizes=(64, 96, 128, 192, 256),
    )

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        """See [`Kernel.unavailable`]."""
        refusal = gpu_refusal((9, 0), (12, 0))
        if refusal is None and max(head_dim, value_dim) > 128 and torch.cuda.get_device_capability() >= (10, 0):
            refusal = f"takes head sizes up to 128 on Blackwell, not {max(head_dim, value_dim)}"
        return refusal or package_refusal("flash-attn-4", _MODULE, _CALLS)

    def load(self) -> Any:
        """See [`FlashKernel.load`]."""
        return import_module(_MODULE)

    def launch_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, into: OutputBuffers | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`FlashKernel.launch_forward`]; copies what is not aligned by itself."""
        out, lse = into or (None, None)
        out, lse, *_ = self.library._flash_attn_fwd(q, k, v, **_keywords(call), return_lse=True, out=out, lse=lse)
        return out, lse

    def launch_backward(self, given: Given, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See [`FlashKernel.launch_backward`].

        The true `out` costs a read of it, `dlse` the launch that negates delta: so `out` is taken where there is one.
        """
        out, dlse = given.out, None
        if out is None:
            assert given.delta is not None, "there is out or delta"
            out = _zeros(given.v.shape[-1], given.dout.dtype, given.dout.device).expand(given.dout.shape)
            dlse = torch.neg(given.delta, out=given.delta.new_empty(given.delta.shape))
        dq, dk, dv = self.library._flash_attn_bwd(
            *(given.q, given.k, given.v, out, given.dout, given.lse),
            **{**_keywords(call), **given.empty_gradients(), "dlse": dlse, "deterministic": self.deterministic},
        )
        return dq, dk, dv


def _keywords(call: Call) -> dict[str, Any]:
    """No window is `None`; a negative one would be taken at its word."""
    causal, left, right = call.window
    scores = (call.scores.scale, causal, call.scores.softcap, left, right)
    lengths = dict(zip(_LENGTHS, call.lengths, strict=True)) if call.packed else {}
    return {**lengths, **dict(zip(_SCORES, scores, strict=True))}


@lru_cache(maxsize=16)
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """From the host, so that they are there for every stream."""
    return torch.zeros(size, dtype=dtype).to(device)
