"""FlashAttention-3 (arXiv 2407.08608) from its module, `flash_attn_interface`: for Hopper.

Written from its source, for the form that takes `window_size` and the later one that takes `window_size_left`. Nobody
has run it, for want of a package. The contract test does wherever the module can be imported.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from .base import BackwardInputs, OutputBuffers, Scores
from .flash import FLASH, LENGTHS, FlashCall, FlashKernel, aligned, gradient_buffers, library_keywords
from .library import Signatures, gpu_refusal, package_refusal, parameters

_SHARED = (*LENGTHS, "softmax_scale", "softcap")
_SIGNATURES: Signatures = (
    ("_flash_attn_forward", ("q", "k", "v", *_SHARED, "causal")),
    (
        "_flash_attn_backward",
        ("dout", "q", "k", "v", "out", "softmax_lse", *_SHARED, "dq", "dk", "dv", "deterministic"),
    ),
)


class FlashAttn3Kernel(FlashKernel):
    """`_flash_attn_forward` and `_flash_attn_backward` of `flash_attn_interface`, untried."""

    module = "flash_attn_interface"
    capabilities = replace(FLASH, name="flash_attn_3", head_dims=(64, 256))

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        """See [`Kernel.unavailable`]."""
        refusal = gpu_refusal((9, 0), (10, 0))
        if refusal is None and self.deterministic and head_dim > 192:
            refusal = f"cannot give the same bits each time with head size {head_dim}"
        return refusal or package_refusal("flash-attn-3", self.module, _SIGNATURES, complete=False)

    def launch_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall, scores: Scores, buffers: OutputBuffers | None = None
    ) -> tuple[Tensor, Tensor]:
        """See [`FlashKernel.launch_forward`]."""
        tensors = {"q": aligned(q), "k": aligned(k), "v": aligned(v)}
        out, lse, *_ = _run(self.library._flash_attn_forward, tensors, call, scores)
        return out, lse

    def launch_backward(
        self, inputs: BackwardInputs, call: FlashCall, scores: Scores, buffers: OutputBuffers | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See [`FlashKernel.launch_backward`]."""
        assert inputs.out is not None, "the capabilities say wants_out"
        tensors = {name: aligned(getattr(inputs, name)) for name in ("dout", "q", "k", "v", "out")}
        tensors |= {"softmax_lse": inputs.lse.contiguous(), **gradient_buffers(inputs, buffers)}
        _run(self.library._flash_attn_backward, {**tensors, "deterministic": self.deterministic}, call, scores)
        return tensors["dq"], tensors["dk"], tensors["dv"]


def _run(function: Any, arguments: dict[str, Any], call: FlashCall, scores: Scores) -> Any:
    """Calls a function of any version. Parameters that it requires and we do not know are `None`."""
    names = parameters(function)
    arguments |= library_keywords(call, scores)
    if "causal" not in names:
        arguments["is_causal"] = arguments.pop("causal")
    if "window_size" in names:
        arguments["window_size"] = (arguments.pop("window_size_left"), arguments.pop("window_size_right"))
    return function(**{name: None for name, required in names.items() if required} | arguments)
