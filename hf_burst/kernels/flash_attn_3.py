"""FlashAttention-3 (arXiv 2407.08608) from its module, `flash_attn_interface`: for Hopper.

Written from its source, for the form that takes `window_size` and the later one that takes `window_size_left`. Nobody
has run it, for want of a package. The contract test does wherever the module can be imported.
"""

from importlib import import_module
from typing import Any

import torch

from .base import Capabilities, OutputBuffers
from .flash import Call, FlashKernel, Given, aligned, unbounded_is_negative
from .library import Calls, gpu_refusal, package_refusal, parameters

_MODULE = "flash_attn_interface"
_SHARED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "softcap")
_CALLS: Calls = (
    ("_flash_attn_forward", ("q", "k", "v", *_SHARED, "causal")),
    (
        "_flash_attn_backward",
        ("dout", "q", "k", "v", "out", "softmax_lse", *_SHARED, "dq", "dk", "dv", "deterministic"),
    ),
)


class FlashAttn3Kernel(FlashKernel):
    """`_flash_attn_forward` and `_flash_attn_backward` of `flash_attn_interface`, untried."""

    capabilities = Capabilities(
        name="flash_attn_3",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(64, 256),
        head_multiple=8,
        own_value_dim=False,
        wide=False,
        wants_out=True,
        softcap=True,
        deterministic=True,
        derives_delta=True,
    )

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        """See [`Kernel.unavailable`]."""
        refusal = gpu_refusal((9, 0), (10, 0))
        if refusal is None and self.deterministic and head_dim > 192:
            refusal = f"cannot give the same bits each time with head size {head_dim}"
        return refusal or package_refusal("flash-attn-3", _MODULE, _CALLS, complete=False)

    def load(self) -> Any:
        """See [`FlashKernel.load`]."""
        return import_module(_MODULE)

    def launch_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, into: OutputBuffers | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`FlashKernel.launch_forward`]."""
        tensors = {"q": aligned(q), "k": aligned(k), "v": aligned(v)}
        out, lse, *_ = _run(self.library._flash_attn_forward, tensors, call)
        return out, lse

    def launch_backward(self, given: Given, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See [`FlashKernel.launch_backward`]."""
        assert given.out is not None, "the card says wants_out"
        tensors = {name: aligned(getattr(given, name)) for name in ("dout", "q", "k", "v", "out")}
        tensors |= {"softmax_lse": given.lse.contiguous(), **given.empty_gradients()}
        _run(self.library._flash_attn_backward, {**tensors, "deterministic": self.deterministic}, call)
        return tensors["dq"], tensors["dk"], tensors["dv"]


def _run(function: Any, arguments: dict[str, Any], call: Call) -> Any:
    """Calls a function of any version: what it wants and is not given is `None`."""
    names = parameters(function)
    causal, left, right = unbounded_is_negative(call.window)
    cu_q, cu_k, longest_q, longest_k = call.lengths
    if call.packed:
        arguments |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    arguments |= {"softmax_scale": call.scores.scale, "softcap": call.scores.softcap}
    arguments["causal" if "causal" in names else "is_causal"] = causal
    if "window_size" in names:
        arguments["window_size"] = (left, right)
    else:
        arguments |= {"window_size_left": left, "window_size_right": right}
    return function(**{name: None for name, required in names.items() if required} | arguments)
