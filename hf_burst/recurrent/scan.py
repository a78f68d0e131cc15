"""State-space scans over shards: Mamba2 (arXiv 2405.21060) and Mamba1 (arXiv 2312.00752).

In Mamba2, a token multiplies a head's state by one number, `exp(dt A)`, and adds `dt x B^T`. A run of tokens therefore
gives `S_out = exp(sum dt A) S_in + S_own`, and outputs `y = y_own + exp(cumsum dt A) S_in C`. Everything except `y_own`
is computed here, from the inputs of the model's own function.

In Mamba1 every channel has a decay for each element of its state, and kernels accept no initial state. Its channels are
exchanged instead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .exchange import to_heads, to_tokens, whole_tokens
from .pieces import Rule, joined
from .replay import Shards
from .states import LastStates, by_number, ends_of, in_full_precision, incoming_states, join_backward


def scan_by_states(
    rule: Rule,
    inputs: Sequence[Tensor],
    steps: Tensor,
    decay: Tensor,
    shards: Shards,
    last: LastStates | None = None,
) -> Tensor:
    """Applies Mamba2's scan to each document separately; states pass from rank to rank.

    Args:
        rule ([`Rule`]): The scan of `inputs`, without states.
        inputs (four `torch.Tensor`): `x` of shape `(batch, n, heads, P)`, `dt` as the rule takes it `(batch, n,
            heads)`, B and C `(batch, n, groups, N)`, of this rank's tokens.
        steps (`torch.Tensor` of shape `(batch, n, heads)`): `dt` as it is applied, in fp32.
        decay (`torch.Tensor` of shape `(heads,)`): A, below 0.
        shards ([`Shards`]): The parts of the sequences. All ranks call it at the same time.
        last ([`LastStates`], *optional*): Collects the final states of rows.

    Returns:
        `torch.Tensor` of shape `(batch, n, heads, P)`.
    """
    last = last or LastStates((), shards.group)
    wanted = last.own
    x, _, b, _ = inputs
    segments, own, ending, groups = shards.segments, shards.own, shards.exports | wanted, b.shape[2]
    out, _ = rule(segments, joined(inputs, own), [piece.size for piece in own])
    if not segments.slots and not last.places:
        return out.view(x.shape)
    outputs = list(out.split([piece.size for piece in own]))
    handed, decays = dict[int, tuple[Tensor, Tensor]](), dict[int, Tensor]()
    with in_full_precision(x):
        for index, piece in enumerate(own):
            if index in ending or not piece.opens:
                x_own, b_own, step = joined((x, b, steps), [piece])
                log = (step * decay).double().cumsum(0)  # differences of long sums lose digits in fp32
                decays[index] = log.exp().to(step.dtype)
            if index in ending:
                weighted = x_own.to(step.dtype) * (step * (log[-1] - log).exp().to(step.dtype))[..., None]
                end = torch.einsum("tghp,tgn->ghpn", weighted.unflatten(1, (groups, -1)), b_own.to(step.dtype))
                handed[index] = end.flatten(0, 1), decays[index][-1]
        incoming, slots = incoming_states(handed, by_number, shards) if segments.slots else ({}, ())
        last.states |= ends_of(handed, incoming, by_number, wanted)
        for index, state in incoming.items():
            (c_own,) = joined(inputs[3:], [own[index]])
            read = torch.einsum("ghpn,tgn->tghp", state.to(c_own.dtype).unflatten(0, (groups, -1)), c_own)
            outputs[index] = outputs[index] + read.flatten(1, 2) * decays[index][..., None].to(c_own.dtype)
    return join_backward(torch.cat(outputs).view(x.shape), slots)


def scan_by_channels(rule: Rule, channels: Sequence[Tensor], shared: Sequence[Tensor], shards: Shards) -> Tensor:
    """Applies a scan to each document separately; every rank has whole sequences of some channels, or heads.

    Args:
        rule ([`Rule`]): The scan of `channels` and then `shared`, without states, for this rank's channels.
        channels (sequence of `torch.Tensor` of shape `(batch, n, channels, ...)`): Inputs with a part per channel; the
            output has the shape of the first one.
        shared (sequence of `torch.Tensor` of shape `(batch, n, ...)`): Inputs that all channels need.
        shards ([`Shards`]): The parts of the sequences. All ranks call it at the same time.

    Returns:
        `torch.Tensor` of the shape of the first channel tensor.
    """
    like, whole = channels[0], shards.segments.whole
    spread = to_heads(channels, shards)
    spread += [whole_tokens(tensor, shards) for tensor in shared]
    documents = whole.by_rank[0]
    out, _ = rule(whole, joined(spread, documents), [piece.size for piece in documents])
    flat = out.reshape(like.shape[0], -1, spread[0].shape[2], spread[0].shape[3:].numel())
    return to_tokens(flat, like.shape[2], shards).reshape(like.shape)
