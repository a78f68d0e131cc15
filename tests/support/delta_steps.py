"""A gated delta rule token by token, and its steps as kernels of two passes have them."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hf_burst.recurrent.two_passes import Inputs, Passing


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule of a batch of sequences `(batch, tokens, heads, ...)`."""
    repeats, outputs = v.shape[2] // k.shape[2], []
    q, k = (tensor.repeat_interleave(repeats, dim=2) for tensor in (q, k))
    for t in range(q.shape[1]):
        state = state * (g[:, t, :, None, None] if g.ndim == 3 else g[:, t, :, :, None]).exp()
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


class DeltaSteps:
    """The delta rule in steps, token by token."""

    kept = 1

    def __init__(self, scaled: bool = False) -> None:
        self.scaled, self.runs = scaled, 0

    def lay(self, bounds: Sequence[int], device: torch.device) -> Sequence[int]:
        return bounds

    def prepare(self, inputs: Inputs, passing: Passing) -> tuple[Tensor, ...]:
        self.runs += 1
        return (inputs.g.exp(),)

    def maps(self, inputs: Inputs, prepared: tuple[Tensor, ...], passing: Passing) -> tuple[Tensor, Tensor]:
        (heads, width), keys = inputs.v.shape[1:], inputs.k.shape[-1]
        states, transitions = (inputs.v.new_zeros(len(passing.places), heads, keys, size) for size in (width, keys))
        identity = torch.eye(keys, dtype=states.dtype).expand(1, heads, -1, -1)
        for piece, rows in enumerate(self.rows(inputs, passing.laid)):
            states[piece] = token_by_token(*rows, torch.zeros_like(states[:1]))[1][0]
            rows[2] = rows[2].new_zeros(*rows[2].shape[:3], keys)
            transitions[piece] = token_by_token(*rows, identity)[1][0]
        return states, transitions

    def outputs(self, inputs: Inputs, prepared: tuple[Tensor, ...], begin: Tensor, passing: Passing) -> Tensor:
        assert torch.equal(prepared[0], inputs.g.exp())
        return torch.cat([out for out, _ in self.run(inputs, begin, passing)])

    def begin_backward(
        self, inputs: Inputs, kept: tuple[Tensor, ...], begin: Tensor, dout: Tensor, passing: Passing
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.enable_grad():
            begin = begin.detach().requires_grad_()
            out = self.outputs(inputs, kept, begin, passing)
            return torch.autograd.grad(out, begin, dout)[0], (begin.detach(), dout)

    def end_backward(self, inputs: Inputs, begun: tuple[Tensor, ...], dend: Tensor, passing: Passing) -> Inputs:
        with torch.enable_grad():
            leaves = Inputs(*(tensor.detach().requires_grad_() for tensor in inputs))
            outs, ends = zip(*self.run(leaves, begun[0], passing), strict=True)
            return Inputs(*torch.autograd.grad((torch.cat(outs), torch.stack(ends)), leaves, (begun[1], dend)))

    def run(self, inputs: Inputs, begin: Tensor, passing: Passing) -> list[tuple[Tensor, Tensor]]:
        if self.scaled:  # as kernels do, by the size of keys
            inputs = inputs._replace(q=inputs.q * inputs.q.shape[-1] ** -0.5)
        pieces = zip(self.rows(inputs, passing.laid), begin, strict=True)
        return [(out[0], end[0]) for out, end in (token_by_token(*rows, state[None]) for rows, state in pieces)]

    def rows(self, inputs: Inputs, bounds: Sequence[int]) -> list[list[Tensor]]:
        return [[tensor[None, start:stop] for tensor in inputs] for start, stop in pairwise(bounds)]
