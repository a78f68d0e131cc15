"""Scores and their cross-entropy, some tokens at a time: the logits of a long sequence are never in memory at once.

Gradients are found in the forward pass, while a chunk's logits are there, so that nothing is computed twice; they wait
for the backward pass in the dtypes of what they belong to, summed up in fp32. On GPUs Liger's fused kernel does it
where the head is a plain linear layer and Liger-Kernel is installed (arXiv 2410.10989).
"""

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .loss import IGNORE_INDEX, token_loss_sum
from .ring import accumulation_dtype

_LOGITS = 2**27  # at a time, in plain torch
_LIGER = "liger_kernel.ops.fused_linear_cross_entropy"
_LIGER_BUDGET = 4  # its logits at a time, in units of the hidden states

Score = Callable[[torch.Tensor], torch.Tensor]


class Linear(NamedTuple):
    """A head that is a linear layer and nothing else, but for soft-capping.

    Args:
        weight (`torch.Tensor` of shape `(vocabulary, hidden)`): Its weight.
        bias (`torch.Tensor` of shape `(vocabulary,)`, *optional*): Its bias.
        softcap (`float`, *optional*): Where its logits saturate.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None


def linear_loss_sum(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    score: Score,
    parameters: Sequence[torch.Tensor],
    vocabulary: int,
    linear: Linear | None = None,
) -> torch.Tensor:
    """The sum of the cross-entropies of this rank's tokens, as [`token_loss_sum`] of `score(hidden)`.

    Args:
        hidden (`torch.Tensor` of shape `(batch, n, hidden)`): What is scored.
        targets (`torch.LongTensor` of shape `(batch, n)`): Shifted labels of the same tokens.
        score (`Callable`): From hidden states of some tokens, `(1, m, hidden)`, to their logits.
        parameters (sequence of `torch.Tensor`): What `score` depends on and learns.
        vocabulary (`int`): Logits of a token.
        linear ([`Linear`], *optional*): What `score` is, if it is no more than that.

    Returns:
        `torch.Tensor`: A scalar in fp32 (fp64 for fp64). It has no second derivative.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    total: torch.Tensor = _LinearLoss.apply(
        hidden, targets, score, vocabulary, linear, torch.is_grad_enabled(), *parameters
    )
    return total


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        score: Score,
        vocabulary: int,
        linear: Linear | None,
        learns: bool,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        wanted = [learns and needed for needed in (ctx.needs_input_grad[0], *ctx.needs_input_grad[6:])]
        flat, labels = hidden.detach().flatten(0, -2), targets.flatten().to(hidden.device)
        liger = None if linear is None or not all(wanted[:1]) else _liger(hidden.device.type, hidden.dtype)
        if liger is not None and linear is not None:
            total, found = _by_liger(liger, flat, labels, linear, parameters)
        else:
            total, found = _by_chunks(flat, labels, score, vocabulary, parameters, wanted)
        ctx.places = [gradient is not None for gradient in found]
        ctx.shape = hidden.shape
        ctx.save_for_backward(*(gradient for gradient in found if gradient is not None))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        dhidden, *others = [next(saved) * factor.to(factor.dtype) if there else None for there in ctx.places]
        return None if dhidden is None else dhidden.view(ctx.shape), None, None, None, None, None, *others


def _by_chunks(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    score: Score,
    vocabulary: int,
    parameters: Sequence[torch.Tensor],
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The loss and the gradients that are wanted, by autograd over one chunk of tokens after another."""
    kind = hidden.device.type
    learned = [parameter for parameter, want in zip(parameters, wanted[1:], strict=True) if want]
    sums = [torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype)) for parameter in learned]
    dhidden = torch.empty_like(hidden) if wanted[0] else None
    total = torch.zeros((), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    rows = max(1, _LOGITS // vocabulary)
    # a cast weight that autocast remembers would belong to the graph of the chunk before
    uncached = torch.autocast(
        kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
    )
    for start in range(0, len(hidden), rows):
        here = slice(start, start + rows)
        with torch.set_grad_enabled(any(wanted)), uncached:
            some = hidden[None, here].requires_grad_(wanted[0])
            loss = token_loss_sum(score(some), targets[None, here])
        total += loss.detach()
        if any(wanted):
            gradients = list(torch.autograd.grad(loss, [some, *learned] if wanted[0] else learned))
            if dhidden is not None:
                dhidden[here] = gradients.pop(0)[0]
            for so_far, gradient in zip(sums, gradients, strict=True):
                so_far += gradient
    added = iter(sums)
    found = [next(added).to(p.dtype) if want else None for p, want in zip(parameters, wanted[1:], strict=True)]
    return total, [dhidden, *found]


def _by_liger(
    liger: Any, hidden: torch.Tensor, targets: torch.Tensor, linear: Linear, parameters: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The same by Liger's kernel, its weight gradient summed up in fp32."""
    loss, _, _, _, dhidden, dweight, dbias = liger.fused_linear_cross_entropy_forward(
        hidden,
        linear.weight.detach(),
        targets,
        bias=None if linear.bias is None else linear.bias.detach(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        softcap=linear.softcap,
        accum_dtype=torch.float32,
        compute_gradients=True,
        weight_requires_grad=any(parameter is linear.weight for parameter in parameters),
        chunk_mem_const=_LIGER_BUDGET,
    )
    return loss, [dhidden, *(dweight if parameter is linear.weight else dbias for parameter in parameters)]


@lru_cache(maxsize=8)
def _liger(device: str, dtype: torch.dtype) -> Any:
    """Liger's module, where it can be used."""
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    try:
        return importlib.import_module(_LIGER)
    except ImportError:
        return None
