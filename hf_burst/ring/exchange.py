"""Point-to-point messages between the ranks of a group, posted ahead and counted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..mesh import ContextGroup
from ..plan import Traffic


@dataclass(frozen=True)
class Expected:
    """A tensor that a peer will send."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    peer: int


@dataclass
class Posted:
    """Messages under way. What is sent is kept alive, and must not change, until `wait`."""

    works: list[dist.Work]
    sent: list[torch.Tensor]
    received: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """The tensors received; on a GPU the current stream waits for them, not the host."""
        for work in self.works:
            work.wait()
        self.works, self.sent = [], []
        return self.received


@dataclass
class Exchange:
    """The messages of one rank in one pass.

    Every rank posts its rounds in the same order ([`goes_ahead`]), and a message belongs to the same round at both of
    its ends, so no rank waits for a round that its peer has not reached.
    """

    group: ContextGroup
    device: torch.device
    sent: Traffic = field(default_factory=Traffic)

    def post(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[Expected], tag: int) -> Posted:
        """Starts to send and to receive.

        Args:
            sends (sequence of `(torch.Tensor, int)`): Tensors and the ranks of the group that they go to.
            receives (sequence of [`Expected`]): What comes, in the order in which the peer sends it.
            tag (`int`): Tells the rounds apart.
        """
        tensors = [tensor.contiguous() for tensor, _ in sends]
        landing = [torch.empty(expected.shape, dtype=expected.dtype, device=self.device) for expected in receives]
        process_group = self.group.process_group if sends or receives else None
        operations = [
            dist.P2POp(dist.isend, tensor, group=process_group, tag=tag, group_peer=peer)
            for tensor, (_, peer) in zip(tensors, sends, strict=True)
        ]
        operations += [
            dist.P2POp(dist.irecv, tensor, group=process_group, tag=tag, group_peer=expected.peer)
            for tensor, expected in zip(landing, receives, strict=True)
        ]
        self.sent += Traffic(len(tensors), sum(tensor.nbytes for tensor in tensors))
        return Posted(dist.batch_isend_irecv(operations) if operations else [], tensors, landing)
