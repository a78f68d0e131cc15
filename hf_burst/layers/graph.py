"""The autograd graph behind a result."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Kept(torch.autograd.Function):
    """Saves tensors in a node of their own before anything is computed, so that a checkpoint can stop recomputing here.
    Returns the inputs, whose graphs begin with that node."""

    @staticmethod
    def forward(ctx: Any, saved: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor in inputs if not tensor.is_floating_point()))
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients


def new_node() -> Any:
    """Returns a new autograd node, to mark the start of a graph."""
    return torch.empty(0, requires_grad=True).view(0).grad_fn


def leaves_behind(out: Tensor, begun: Any, inputs: Sequence[Tensor]) -> dict[int, Tensor] | None:
    """Returns, by id, the leaves other than inputs that a result depends on; `None` if it depends on a tensor computed
    before the node `begun`, other than weights that autocast cast earlier."""
    leaves = dict[int, Tensor]()
    for node in nodes_behind(out):
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        elif node._sequence_nr() < begun._sequence_nr() and node.name() != "ToCopyBackward0":
            return None
    return {key: leaf for key, leaf in leaves.items() if all(leaf is not tensor for tensor in inputs)}


def nodes_behind(result: Tensor) -> Iterator[Any]:
    """Yields the nodes of a result's graph."""
    seen, nodes = set[Any](), [result.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]
