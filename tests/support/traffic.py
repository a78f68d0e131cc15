"""Counts what leaves a rank, beside what a plan says."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_burst.plan import Traffic
from hf_burst.ring import Exchanges, PeerToPeer
from hf_burst.ring.exchange import Channel, Pending, Round


@dataclass
class Counted(PeerToPeer):
    """Sends and receives, and counts the messages and bytes that have left this rank so far."""

    sent: Traffic = field(default_factory=Traffic)

    def fetch(self, channel: Channel, this_round: Round, tensors: Sequence[torch.Tensor], *rest: Any) -> Pending:
        parts = [region.of(tensors) for _, region in this_round.outgoing]
        self.sent += Traffic(len(parts), sum(part.nbytes for part in parts))
        return super().fetch(channel, this_round, tensors, *rest)


def sent_by(exchanges: Exchanges) -> Traffic:
    """What has left this rank, and crossed to other hosts."""
    near: Any = exchanges.near
    far: Any = exchanges.far
    return near.sent if far is near else near.sent + replace(far.sent, across=far.sent.bytes)
