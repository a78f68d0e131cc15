"""FlashAttention-2 (arXiv 2307.08691) inside every CUDA build of torch, and from its package, `flash-attn`.

A window as long as the keys counts as infinite, which is right only where there are no more rows than columns; taller
tiles are cut.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..plan import Band
from .base import BackwardInputs, Gradients, OutputBuffers, Outputs, Scores
from .flash import FLASH, LENGTHS, FlashKernel, aligned, gradient_buffers, library_keywords
from .library import Signatures, gpu_refusal, package_refusal
from .pieces import Piece, crop

_LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
_SCORES = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
_UNUSED = {"dropout_p": 0.0, "alibi_slopes": None}
_TENSORS = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
_SIGNATURES: Signatures = (
    ("_flash_attn_forward", ("q", "k", "v", *_SCORES, "return_softmax")),
    ("_flash_attn_varlen_forward", ("q", "k", "v", *LENGTHS, *_SCORES, "return_softmax")),
    ("_flash_attn_backward", (*_TENSORS, *_SCORES, "deterministic")),
    ("_flash_attn_varlen_backward", (*_TENSORS, *LENGTHS, *_SCORES, "deterministic")),
)


class TorchFlashKernel(FlashKernel):
    """`aten::_flash_attention_forward` and `aten::_flash_attention_backward`, which is deterministic by torch's own
    switch: where that is set, deterministic kernels are selected."""

    capabilities = replace(FLASH, name="torch_flash", softcap=False)

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        refusal = gpu_refusal((8, 0))
        if refusal is None and 192 < head_dim <= 224 and torch.cuda.get_device_capability() in _LITTLE_SHARED_MEMORY:
            return f"has no backward for head size {head_dim} on this GPU, which has too little shared memory"
        return refusal

    def cut(self, piece: Piece) -> Iterator[Piece]:
        """See [`FlashKernel.cut`]; no piece with a band has more rows than columns."""
        for cropped in crop(piece):
            rows, columns, band = cropped.rows, cropped.columns, cropped.band
            if band == Band() or cropped.height <= cropped.width:
                yield cropped
                continue
            middle = rows.start + cropped.width
            yield from self.cut(Piece(slice(rows.start, middle), columns, band))
            yield from self.cut(Piece(slice(middle, rows.stop), columns, band.shift(cropped.width)))

    def launch_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Piece, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        causal, left, right = call.window
        out, lse, *_ = self.library._flash_attention_forward(
            *(aligned(q), aligned(k), aligned(v), *call.lengths, 0.0, causal, False),
            **{"scale": scores.scale, "window_size_left": left, "window_size_right": right},
        )
        return out, lse

    def launch_backward(
        self, inputs: BackwardInputs, call: Piece, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        causal, left, right = call.window
        no_dropout = torch.empty(2, dtype=torch.uint64, device=inputs.q.device)
        dq, dk, dv = self.library._flash_attention_backward(
            *map(aligned, inputs.with_out),
            inputs.lse.contiguous(),  # the library takes no strides for it
            *(*call.lengths, 0.0, causal, no_dropout, torch.empty(0, device=inputs.q.device)),
            **{"scale": scores.scale, "window_size_left": left, "window_size_right": right},
        )
        return dq, dk, dv


class FlashAttn2Kernel(TorchFlashKernel):
    """`_flash_attn_forward`, `_flash_attn_backward` and their `_varlen_` forms, of the package `flash-attn` (read in
    version 2.8.3.post2): as in torch, and soft-capped scores."""

    module = "flash_attn.flash_attn_interface"
    capabilities = replace(FLASH, name="flash_attn_2")

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        return super().unavailable(head_dim, value_dim) or package_refusal("flash-attn", self.module, _SIGNATURES)

    def launch_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Piece, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        library = self.library
        function = library._flash_attn_varlen_forward if call.packed else library._flash_attn_forward
        keywords = {**_UNUSED, **library_keywords(call, scores), "return_softmax": False}
        out, lse, *_ = function(aligned(q), aligned(k), aligned(v), **keywords)
        return out, lse

    def launch_backward(
        self, inputs: BackwardInputs, call: Piece, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        library = self.library
        function = library._flash_attn_varlen_backward if call.packed else library._flash_attn_backward
        gradients = gradient_buffers(inputs, buffers)
        keywords = {**_UNUSED, **library_keywords(call, scores), **gradients, "deterministic": self.deterministic}
        function(
            *map(aligned, inputs.with_out), inputs.lse.contiguous(), **keywords
        )  # the library takes no strides for lse
        return gradients["dq"], gradients["dk"], gradients["dv"]
