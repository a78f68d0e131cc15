"""Scores and their cross-entropy, some tokens at a time: the logits of a long sequence are never in memory at once.

Gradients are found in the forward pass, while a chunk's logits are there, and summed up in fp32. On GPUs Liger's fused
kernel does it where the head is a plain linear layer and Liger-Kernel is installed (arXiv 2410.10989).
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers.loss import IGNORE_INDEX, token_loss_sum
from ..numerics import accumulation_dtype, refuse_second_derivative

logger = logging.getLogger(__name__)

_LOGITS = 2**27  # at a time, in plain torch
_LIGER = "liger_kernel.ops.fused_linear_cross_entropy"
# Liger's logits at a time: four times the hidden states, or more up to a limit, since every part reads and writes all
# of the weight's gradient. Beyond so many elements it is less, down to once the hidden states.
_LIGER_BUDGET, _LIGER_LOGITS, _LIGER_MOST = 4, 2**29, 2**31

Score = Callable[[Tensor], Tensor]


class Linear(NamedTuple):
    """A head that is a linear layer and nothing else, but for soft-capping.

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
    """The sum of the cross-entropies of this rank's tokens, as [`token_loss_sum`] of `score(hidden)`.

    Args:
        hidden (`torch.Tensor` of shape `(batch, n, hidden)`): What is scored.
        targets (`torch.LongTensor` of shape `(batch, n)`): Shifted labels of the same tokens.
        score (`Callable`): From hidden states of some tokens, `(1, m, hidden)`, to their logits. The parameters that it
            learns are found by scoring one token.
        vocabulary (`int`): Logits of a token.
        linear ([`Linear`], *optional*): What `score` is, if it is no more than that.

    Returns:
        `torch.Tensor`: A scalar in fp32 (fp64 for fp64). It has no second derivative.
    """
    learned, rows = list[Tensor](), rows_at_a_time(vocabulary)
    if torch.is_grad_enabled():
        own = learned_by(score, hidden) if linear is None else [linear.weight, linear.bias]
        learned = [tensor for tensor in own if tensor is not None and tensor.requires_grad]
    else:
        hidden = hidden.detach()
    total: Tensor = _LinearLoss.apply(hidden, targets, score, rows, linear, *learned)
    return total


def rows_at_a_time(vocabulary: int, tensors: int = 1) -> int:
    """How many tokens are scored at a time, where so many tensors as wide as the vocabulary are in memory."""
    return max(1, _LOGITS // (vocabulary * tensors))


def learned_by(score: Score, hidden: Tensor) -> list[Tensor]:
    """The leaves of the graph of a score."""
    logits = score(hidden.detach().flatten(0, -2)[None, :1])
    open_nodes, seen, leaves = [logits.grad_fn], set[Any](), dict[int, Tensor]()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        open_nodes += [following for following, _ in node.next_functions]
    return list(leaves.values())


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
        ctx.has_gradient = [gradient is not None for gradient in gradients]
        ctx.shape = hidden.shape
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        refuse_second_derivative()
        saved = iter(ctx.saved_tensors)
        dhidden, *dparameters = [next(saved) * factor if exists else None for exists in ctx.has_gradient]
        return None if dhidden is None else dhidden.view(ctx.shape), None, None, None, None, *dparameters


def _by_chunks(
    hidden: Tensor, targets: Tensor, score: Score, rows: int, parameters: Sequence[Tensor], wanted: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss and the gradients, of hidden states if `wanted`, by autograd over so many tokens after one another."""
    sums = [torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype)) for parameter in parameters]
    dhidden = torch.empty_like(hidden) if wanted else None
    total = torch.zeros((), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    for start in range(0, len(hidden), rows):
        chunk = slice(start, start + rows)
        with torch.set_grad_enabled(wanted or bool(parameters)):
            states = hidden[None, chunk].requires_grad_(wanted)
            loss = token_loss_sum(score(states), targets[None, chunk])
        total += loss.detach()
        if loss.requires_grad:
            gradients = list(torch.autograd.grad(loss, [states, *parameters] if wanted else parameters))
            if dhidden is not None:
                dhidden[chunk] = gradients.pop(0)[0]
            for so_far, gradient in zip(sums, gradients, strict=True):
                so_far += gradient
    return total, [dhidden, *(so_far.to(p.dtype) for so_far, p in zip(sums, parameters, strict=True))]


def _by_liger(
    liger: Any, hidden: Tensor, targets: Tensor, linear: Linear, parameters: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
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
        chunk_mem_const=_liger_budget(len(hidden), *linear.weight.shape[::-1]),
    )
    return loss, [dhidden, *(dweight if parameter is linear.weight else dbias for parameter in parameters)]


def _liger_budget(tokens: int, width: int, vocabulary: int) -> int:
    """How many times as large as the hidden states its logits may be, for as few parts as the limit allows. Liger makes
    `ceil(vocabulary / (budget * width))` parts of it, whose tokens are rounded up to a power of two."""
    rows = 1 << max(0, (_LIGER_LOGITS // vocabulary).bit_length() - 1)
    parts = -(-tokens // rows)
    most = -(-vocabulary // width) if parts == 1 else (vocabulary - 1) // (width * (parts - 1))
    return max(1, min(_LIGER_BUDGET, _LIGER_MOST // (tokens * width)), most)


@lru_cache(maxsize=8)
def _liger(device: str, dtype: torch.dtype) -> Any:
    """Liger's module, where it can be used."""
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float32):
        return None
    try:
        module = importlib.import_module(_LIGER)
    except ImportError:
        return None
    except Exception as problem:  # one that does not fit this Triton
        logger.warning("hf_burst does without Liger's fused loss, which cannot be imported: %r", problem)
        return None
    known = inspect.signature(module.fused_linear_cross_entropy_forward).parameters
    missing = sorted({"accum_dtype", "compute_gradients", "weight_requires_grad", "chunk_mem_const"} - set(known))
    if missing:
        why = "hf_burst does without the fused loss of this Liger-Kernel, which lacks %s; install liger-kernel>=0.8.5"
        logger.warning(why, ", ".join(missing))
    return None if missing else module
