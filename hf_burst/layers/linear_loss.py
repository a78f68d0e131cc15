"""Scores and their cross-entropy, some tokens at a time: the logits of a long sequence are never in memory at once.

The forward pass computes the gradients while a chunk's logits are in memory, and sums them in fp32. On GPUs Liger's
fused kernel does this if the head is a plain linear layer and Liger-Kernel is installed (arXiv 2410.10989).
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..numerics import accumulation_dtype, refuse_second_derivative
from .by_parts import gradients_by_parts
from .graph import nodes_behind
from .loss import IGNORE_INDEX, token_loss_sum

logger = logging.getLogger(__name__)

_LOGITS = 2**27  # at a time, in plain torch
_LIGER = "liger_kernel.ops.fused_linear_cross_entropy"
# Liger's logits at a time: four times the hidden states, or more up to _LIGER_LOGITS, since every part reads and writes
# the whole weight gradient. _LIGER_MOST elements cap it, down to the size of the hidden states.
_LIGER_BUDGET, _LIGER_LOGITS, _LIGER_MOST = 4, 2**29, 2**31

Score = Callable[[Tensor], Tensor]


class Linear(NamedTuple):
    """A head that is only a linear layer, optionally with soft-capping.

    Args:
        weight (`torch.Tensor` of shape `(vocabulary, hidden)`): Its weight.
        bias (`torch.Tensor` of shape `(vocabulary,)`, *optional*): Its bias.
        softcap (`float`, *optional*): The limit of its logits.
    """

    weight: Tensor
    bias: Tensor | None
    softcap: float | None


def linear_loss_sum(
    hidden: Tensor, targets: Tensor, score: Score, vocabulary: int, linear: Linear | None = None
) -> Tensor:
    """Sums the cross-entropies of this rank's tokens, as [`token_loss_sum`] of `score(hidden)` does.

    Args:
        hidden (`torch.Tensor` of shape `(batch, n, hidden)`): Hidden states to score.
        targets (`torch.LongTensor` of shape `(batch, n)`): Shifted labels of the same tokens.
        score (`Callable`): Maps hidden states of some tokens, `(1, m, hidden)`, to their logits. Scoring one token
            finds its trainable parameters.
        vocabulary (`int`): Logits of a token.
        linear ([`Linear`], *optional*): The head, if `score` is only that.

    Returns:
        `torch.Tensor`: A scalar in fp32 (fp64 for fp64). It has no second derivative.
    """
    learned, rows = list[Tensor](), rows_at_a_time(vocabulary)
    if torch.is_grad_enabled():
        own = learned_by(score, hidden) if linear is None else [linear.weight, linear.bias]
        learned = [tensor for tensor in own if tensor is not None and tensor.requires_grad]
    else:
        hidden = hidden.detach()
    return _LinearLoss.apply(hidden, targets, score, rows, linear, *learned)


def rows_at_a_time(vocabulary: int, tensors: int = 1) -> int:
    """Returns how many tokens to score at a time, with `tensors` tensors of vocabulary width in memory."""
    return max(1, _LOGITS // (vocabulary * tensors))


def learned_by(score: Score, hidden: Tensor) -> list[Tensor]:
    """Returns the leaves of the autograd graph of a score."""
    scores = score(hidden.detach().flatten(0, -2)[None, :1])
    return [node.variable for node in nodes_behind(scores) if hasattr(node, "variable")]


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, score: Score, rows: int, linear: Linear | None, *parameters: Tensor
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        flat, labels = hidden.detach().flatten(0, -2), targets.flatten().to(hidden.device)
        liger = _liger(hidden.device.type, hidden.dtype) if linear is not None and wanted else None
        if liger is not None and linear is not None:
            total, gradients = _by_liger(liger, flat, labels, linear, parameters)
        else:
            total, gradients = _by_chunks(flat, labels, score, rows, parameters, wanted)
        ctx.shape = hidden.shape
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        refuse_second_derivative()
        dhidden, *dparameters = [None if saved is None else saved * factor for saved in ctx.saved_tensors]
        return None if dhidden is None else dhidden.view(ctx.shape), None, None, None, None, *dparameters


def _by_chunks(
    hidden: Tensor, targets: Tensor, score: Score, rows: int, parameters: Sequence[Tensor], wanted: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the loss and the gradients (of hidden states if `wanted`), with autograd over `rows` tokens at a time."""
    total = torch.zeros((), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)

    def compute(states: Tensor, chunk: slice) -> tuple[Tensor, None]:
        loss = token_loss_sum(score(states), targets[None, chunk])
        total.add_(loss.detach())
        return loss, None

    return total, gradients_by_parts(hidden, rows, compute, parameters, wanted)


def _by_liger(
    liger: Any, hidden: Tensor, targets: Tensor, linear: Linear, parameters: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Does the same with Liger's kernel, and sums its weight gradient in fp32."""
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
        chunk_mem_const=_liger_budget(len(hidden), *linear.weight.shape[::-1]),
    )
    return loss, [dhidden, *(dweight if parameter is linear.weight else dbias for parameter in parameters)]


def _liger_budget(tokens: int, width: int, vocabulary: int) -> int:
    """Returns how many times larger than the hidden states Liger's logits may be, for as few parts as the limit allows.
    Liger makes `ceil(vocabulary / (budget * width))` parts, and rounds their tokens up to a power of two."""
    rows = 1 << max(0, (_LIGER_LOGITS // vocabulary).bit_length() - 1)
    parts = -(-tokens // rows)
    most = -(-vocabulary // width) if parts == 1 else (vocabulary - 1) // (width * (parts - 1))
    return max(1, min(_LIGER_BUDGET, _LIGER_MOST // (tokens * width)), most)


@lru_cache(maxsize=8)
def _liger(device: str, dtype: torch.dtype) -> Any:
    """Returns Liger's module if it can be used."""
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float32):
        return None
    needed = {"accum_dtype", "compute_gradients", "weight_requires_grad", "chunk_mem_const"}
    try:
        module = importlib.import_module(_LIGER)
        missing = sorted(needed - inspect.signature(module.fused_linear_cross_entropy_forward).parameters.keys())
    except ImportError:
        return None
    except Exception as problem:  # it does not match this Triton
        missing = [repr(problem)]
    if missing:
        logger.warning(
            "hf_burst does without Liger's fused loss (%s). Install liger-kernel>=0.8.5.", ", ".join(missing)
        )
    return None if missing else module
